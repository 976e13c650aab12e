"""Skipped blocks, and the restart after a loss spike."""

import re
import shutil

import pytest
from conftest import run_python, train

from roberta_recipe import durable
from roberta_recipe.data import order
from roberta_recipe.errors import InputError, RunError, Stopped
from roberta_recipe.record import SKIPPED_NAME
from roberta_recipe.training import stopping
from roberta_recipe.training.mlm_trainer import MlmTrainer

SAVING = ["--save_strategy", "steps", "--save_steps", "4", "--max_steps", "12"]


def weights(output_dir):
    return durable.sha256(output_dir / "model.safetensors")


@pytest.fixture
def consumed(monkeypatch):
    """Identifiers of the blocks in training micro-batches, in training order."""
    found = []
    step = MlmTrainer.training_step

    def recording(self, model, inputs, num_items_in_batch=None):
        found.append(inputs["input_ids"].sum().item())
        return step(self, model, inputs, num_items_in_batch)

    monkeypatch.setattr(MlmTrainer, "training_step", recording)
    return found


@pytest.mark.parametrize("source", ["text", "cache", "repeated"])
def test_blocks_are_left_out_exactly_and_the_rest_stays(preset, tmp_path, consumed, source):
    """Blocks of a run with one block per step, compared with the steps of a run that skips some of them."""
    flags = [*SAVING, "--per_device_train_batch_size", 1]
    flags += {"text": [], "cache": ["--token_cache", tmp_path / "cache"], "repeated": ["--max_train_samples", 30]}[
        source
    ]
    train(preset, *flags, "--global_batch_size", 1, "--max_steps", 57, "--output_dir", tmp_path / "whole")
    whole, consumed[:] = list(consumed), []
    less = [*flags, "--global_batch_size", 4, "--output_dir", tmp_path / "less"]
    record = train(preset, *less, "--skip_blocks", "9-14", "20", "47-48")
    left_out = {*range(9, 15), 20, 47, 48}
    kept = [value for position, value in enumerate(whole) if position not in left_out]
    assert len(kept) == len(consumed) == 48 and len(set(kept)) > 24
    for step in range(0, 48, 4):  # a step takes its blocks by their length
        assert sorted(consumed[step : step + 4]) == sorted(kept[step : step + 4])
    assert record["skipped_blocks"] == [[9, 15], [20, 21], [47, 49]]


def test_a_resumed_run_leaves_out_what_it_left_out_before(preset, tmp_path):
    """With and without the flag; later blocks may be added, consumed blocks cannot be skipped."""
    flags = [*SAVING, "--skip_blocks", "20-23", "70-75"]
    train(preset, *flags, "--output_dir", tmp_path / "alone")
    for name, again in {"same": flags, "without": SAVING, "part": [*SAVING, "--skip_blocks", "71"]}.items():
        shutil.copytree(tmp_path / "alone" / "checkpoint-4", tmp_path / name / "checkpoint-4")
        assert train(preset, *again, "--output_dir", tmp_path / name)["resumes"] == 1
        assert weights(tmp_path / name) == weights(tmp_path / "alone"), name
    resumed = tmp_path / "alone" / "checkpoint-4"  # 4 steps of 8 blocks, and the 4 that were left out
    with pytest.raises(InputError, match="the checkpoint, at block 36, was trained on 30"):
        train(
            preset, *SAVING, "--resume_from_checkpoint", resumed, "--output_dir", tmp_path / "b", "--skip_blocks", "30"
        )
    more = ["--resume_from_checkpoint", resumed, "--output_dir", tmp_path / "c", "--skip_blocks", "50"]
    assert train(preset, *SAVING, *more)["skipped_blocks"] == [[20, 24], [50, 51], [70, 76]]
    assert weights(tmp_path / "c") != weights(tmp_path / "alone")


@pytest.fixture
def poisoned(monkeypatch):
    """Positions of blocks that multiply a step's loss by 1,000."""
    positions = set()
    loss_of_batch = MlmTrainer.loss_of_batch

    def spoilt(self, losses, num_items):
        blocks = order.unskipped(self.position, self.fingerprint["global_batch_size"], self.skipped)
        bad = any(position in part for part in blocks for position in positions)
        return loss_of_batch(self, losses * (1000 if bad else 1), num_items)

    monkeypatch.setattr(MlmTrainer, "loss_of_batch", spoilt)
    monkeypatch.setattr(stopping, "MIN_LOSSES", 3)
    return positions


def train_through(preset, *argv):
    """Restart after each loss spike; returns the record and the messages of `Stopped`."""
    messages = []
    while True:
        try:
            return train(preset, *argv), messages
        except Stopped as stopped:
            assert stopped.exit_code == 65
            messages.append(str(stopped))


def test_after_a_spike_the_same_command_continues_without_its_blocks(preset, tmp_path, poisoned):
    """It equals a run without the blocks of the spike's step and of the step before it, bit for bit, also after a later
    kill and restart."""
    never = train(preset, *SAVING, "--output_dir", tmp_path / "never", "--skip_blocks", "48-63")
    poisoned.add(60)  # the eighth step, after checkpoint-4
    flags = [*SAVING, "--output_dir", tmp_path / "run", "--rewind_on_spike", 20]
    record, (message,) = train_through(preset, *flags)
    assert re.fullmatch(
        r"stopped by a loss spike: the loss of step 8 is \d{3,}\.\d{3}, a spike; the next start leaves out blocks "
        r"48 to 63\. The last complete checkpoint is .*checkpoint-4\. Continue with: .*",
        message,
    )
    assert record["skipped_blocks"] == never["skipped_blocks"] == [[48, 64]] and record["resumes"] == 1
    assert record["steps"] == 12 and record["digest"] == never["digest"]
    assert weights(tmp_path / "run") == weights(tmp_path / "never")
    for name in ("run_record.json", "checkpoint-8/manifest.json", "checkpoint-12/manifest.json"):
        (tmp_path / "run" / name).unlink()
    train(preset, *flags)
    assert weights(tmp_path / "run") == weights(tmp_path / "never")


def test_blocks_that_the_checkpoint_was_trained_on_are_not_left_out(preset, tmp_path, poisoned):
    """A spike in the step after a checkpoint: also an older checkpoint then leads to the same run."""
    never = train(preset, *SAVING, "--output_dir", tmp_path / "never", "--skip_blocks", "32-39")
    poisoned.add(34)  # the fifth step, after checkpoint-4
    flags = [*SAVING, "--output_dir", tmp_path / "run", "--rewind_on_spike", 20]
    with pytest.raises(Stopped, match="the next start leaves out blocks 32 to 39"):
        train(preset, *flags)
    (tmp_path / "run" / "checkpoint-4" / "manifest.json").unlink()
    assert train(preset, *flags)["skipped_blocks"] == never["skipped_blocks"] == [[32, 40]]
    assert weights(tmp_path / "run") == weights(tmp_path / "never")


SPIKY = """
from roberta_recipe.data import order
from roberta_recipe.errors import exit_on_error
from roberta_recipe.training import stopping
from roberta_recipe.training.mlm_trainer import MlmTrainer
import train_mlm
def spoilt(self, losses, num_items):
    blocks = order.unskipped(self.position, self.fingerprint["global_batch_size"], self.skipped)
    return loss_of_batch(self, losses * (1000 if any(60 in part for part in blocks) else 1), num_items)
loss_of_batch, MlmTrainer.loss_of_batch, stopping.MIN_LOSSES = MlmTrainer.loss_of_batch, spoilt, 3
exit_on_error(train_mlm.main)
"""


@pytest.fixture
def spiky(preset, tmp_path, root):
    """A function: start a script, under `program`, with a spike in block 60."""
    (tmp_path / "spiky.py").write_text(SPIKY)
    flags = [*SAVING, "--config", preset, "--rewind_on_spike", 20]

    def start(*program, size=8):
        argv = [*program, "spiky.py", *flags, "--per_device_train_batch_size", size]
        return run_python(*argv, cwd=tmp_path, env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"})

    return start


@pytest.mark.slow
def test_torchrun_starts_a_run_again_after_a_spike(tmp_path, spiky, monkeypatch):
    """Two processes. With the agent's store, they would find addresses of the processes before them."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    two = ["--standalone", "--nproc_per_node", 2, "--max_restarts", 1]
    done = spiky("-m", "torch.distributed.run", *two, size=4)
    assert done.returncode == 0, done.stderr
    assert "stopped by a loss spike: the loss of step 8 is " in done.stderr
    record = durable.read_json(tmp_path / "run" / "run_record.json")
    assert record["skipped_blocks"] == [[48, 64]] and record["resumes"] == 1 and record["steps"] == 12


def test_other_data_keep_no_spikes(preset, tmp_path, poisoned):
    """Skipped positions refer to the old data, also for a later start on the new data; those of the new data count
    before its first checkpoint."""
    poisoned.add(60)
    flags = [*SAVING, "--rewind_on_spike", 20]
    assert train_through(preset, *flags)[0]["skipped_blocks"] == [[48, 64]]
    poisoned.clear()
    more = ["--max_steps", 18, "--data_seed", 7, "--resume_despite_changes"]
    assert train(preset, *flags, *more)["skipped_blocks"] == []
    for name in ("run_record.json", "checkpoint-18/manifest.json"):
        (tmp_path / "run" / name).unlink()
    assert train(preset, *flags, *more)["skipped_blocks"] == []
    poisoned.add(12)  # the second step on other data again, before a checkpoint
    record, messages = train_through(preset, *flags, "--max_steps", 22, "--data_seed", 8, "--resume_despite_changes")
    assert record["skipped_blocks"] == [[0, 16]] and len(messages) == 1


def test_a_spike_before_the_first_checkpoint_sends_the_run_to_its_beginning(preset, tmp_path, poisoned):
    never = train(preset, *SAVING, "--output_dir", tmp_path / "never", "--skip_blocks", "24-39")
    poisoned.add(33)  # the fifth step
    flags = ["--save_strategy", "no", "--max_steps", 12, "--rewind_on_spike", 20]
    record, (message,) = train_through(preset, *flags)
    assert "leaves out blocks 24 to 39. There is no checkpoint yet. " in message
    assert record["digest"] == never["digest"]
    assert weights(tmp_path / "run") == weights(tmp_path / "never")


def test_a_run_that_spikes_in_every_start_ends(preset, tmp_path, poisoned):
    poisoned |= set(range(40, 10_000))
    with pytest.raises(RunError, match=r"as in 3 earlier starts from the same checkpoint: lower learning_rate"):
        train_through(preset, *SAVING, "--rewind_on_spike", 20)
    returns = durable.read_sealed(tmp_path / "run" / SKIPPED_NAME)["returns"]
    assert [entry["step"] for entry in returns] == [6, 5, 5]


def test_a_loss_that_is_no_number_is_a_spike(preset, tmp_path, monkeypatch):
    loss_of_batch, never = MlmTrainer.loss_of_batch, tmp_path / "never"
    train(preset, *SAVING, "--output_dir", never, "--skip_blocks", "48-63")

    def spoilt(self, losses, num_items):
        return loss_of_batch(self, losses * (float("nan") if self.position == 56 else 1), num_items)

    monkeypatch.setattr(MlmTrainer, "loss_of_batch", spoilt)
    (_, messages) = train_through(preset, *SAVING, "--rewind_on_spike", 20)
    assert "the loss of step 8 is nan, a spike" in messages[0]
    assert weights(tmp_path / "run") == weights(never)


def test_what_is_called_a_spike():
    before = [2.0, 4.0] * 64  # mean 3, standard deviation 1
    assert stopping.is_spike(9.01, before, 6) and not stopping.is_spike(8.99, before, 6)
    assert not stopping.is_spike(9.01, before[: stopping.MIN_LOSSES - 1], 6) and stopping.is_spike(
        9.01, before[: stopping.MIN_LOSSES], 6
    )
    assert not stopping.is_spike(9.01, [100.0] * 64 + [2.0, 4.0, 90.0, 100.0], 6)
    assert stopping.is_spike(9.01, [100.0] * 64 + before, 6), "only the last 128 steps count"
    assert stopping.is_spike(float("nan"), [], 6) and stopping.is_spike(float("inf"), [], 6)


def test_a_damaged_list_of_blocks_is_refused(tmp_path):
    path = tmp_path / SKIPPED_NAME
    durable.write_sealed(path, {"returns": [{"step": 8, "loss": 9.0, "blocks": [[48, 64]]}]})
    assert [spike["blocks"] for spike in stopping.read_spikes(tmp_path)] == [[[48, 64]]]
    path.write_text(path.read_text().replace("64", "65"))
    with pytest.raises(InputError, match=r"skipped_blocks.json cannot be used \(.*its content does not match"):
        stopping.read_spikes(tmp_path)
