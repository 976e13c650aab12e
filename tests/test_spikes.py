"""Blocks that are left out of the order, and runs that return to a checkpoint after a loss spike."""

import os
import shutil
import signal

import pytest
from conftest import forked_ranks

import train_mlm
from roberta_recipe import durable
from roberta_recipe.data import order
from roberta_recipe.errors import InputError, RunError, Stopped
from roberta_recipe.training import spikes
from roberta_recipe.training.mlm_trainer import MlmTrainer
from roberta_recipe.training.step_watch import StepWatch

SAVING = ["--save_strategy", "steps", "--save_steps", "4", "--max_steps", "12"]


def train(preset, *argv):
    return train_mlm.main(["--config", str(preset), *map(str, argv)])


def weights(output_dir):
    return durable.sha256(output_dir / "model.safetensors")


@pytest.fixture
def consumed(monkeypatch):
    """What tells the blocks of the training micro-batches apart, in the order in which they were trained on."""
    found = []
    step = MlmTrainer.training_step

    def recording(self, model, inputs, num_items_in_batch=None):
        found.append(inputs["input_ids"].sum().item())
        return step(self, model, inputs, num_items_in_batch)

    monkeypatch.setattr(MlmTrainer, "training_step", recording)
    return found


@pytest.mark.parametrize("source", ["text", "cache", "repeated"])
def test_blocks_are_left_out_exactly_and_the_rest_stays(preset, tmp_path, consumed, source):
    """Blocks one by one of a run that has a block a step, against the steps of a run that leaves some of them out."""
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
    """With the flag again or without it; blocks ahead may be added, blocks that are behind cannot be taken back."""
    flags = [*SAVING, "--skip_blocks", "20-23", "70-75"]
    train(preset, *flags, "--output_dir", tmp_path / "alone")
    for name, again in {"same": flags, "without": SAVING, "part": [*SAVING, "--skip_blocks", "71"]}.items():
        shutil.copytree(tmp_path / "alone" / "checkpoint-4", tmp_path / name / "checkpoint-4")
        assert train(preset, *again, "--output_dir", tmp_path / name)["resumes"] == 1
        assert weights(tmp_path / name) == weights(tmp_path / "alone"), name
    resumed = tmp_path / "alone" / "checkpoint-4"  # 4 steps of 8 blocks, and the 4 that were left out
    with pytest.raises(InputError, match="blocks 30 are before block 36, where the run is resumed"):
        train(
            preset, *SAVING, "--resume_from_checkpoint", resumed, "--output_dir", tmp_path / "b", "--skip_blocks", "30"
        )
    more = ["--resume_from_checkpoint", resumed, "--output_dir", tmp_path / "c", "--skip_blocks", "50"]
    assert train(preset, *SAVING, *more)["skipped_blocks"] == [[20, 24], [50, 51], [70, 76]]
    assert weights(tmp_path / "c") != weights(tmp_path / "alone")


@pytest.fixture
def poisoned(monkeypatch):
    """Positions: a step that takes one of these blocks has 1,000 times its loss."""
    positions = set()
    compute = MlmTrainer.compute_loss

    def spoilt(self, *others, **kwargs):
        blocks = order.kept(self.position, self.fingerprint["global_batch_size"], self.skipped)
        bad = any(position in part for part in blocks for position in positions)
        return compute(self, *others, **kwargs) * (1000 if bad else 1)

    monkeypatch.setattr(MlmTrainer, "compute_loss", spoilt)
    monkeypatch.setattr(spikes, "NEEDED", 3)
    return positions


def test_a_spike_sends_the_run_back_without_its_blocks(preset, tmp_path, poisoned, capsys):
    """It becomes the run that never saw the blocks of the spike's step and of the step before it, bit for bit; killed
    after the return and started again, it is still that run."""
    left_out = train(preset, *SAVING, "--output_dir", tmp_path / "never", "--skip_blocks", "48-63")
    poisoned.add(60)  # the eighth step, after checkpoint-4
    flags = [*SAVING, "--output_dir", tmp_path / "run", "--rewind_on_spike", 20]
    record = train(preset, *flags)
    assert "returning to checkpoint-4, without blocks 48 to 63" in capsys.readouterr().err
    assert record["skipped_blocks"] == left_out["skipped_blocks"] == [[48, 64]]
    assert record["steps"] == 12 and record["digest"] == left_out["digest"]
    assert weights(tmp_path / "run") == weights(tmp_path / "never")
    for name in ("run_record.json", "checkpoint-8/manifest.json", "checkpoint-12/manifest.json"):
        (tmp_path / "run" / name).unlink()
    train(preset, *flags)
    assert weights(tmp_path / "run") == weights(tmp_path / "never")


def test_a_return_keeps_the_clock_and_other_data_keep_no_returns(preset, tmp_path, poisoned, monkeypatch):
    """`max_train_minutes` counts from the first start; positions left out are those of the old data."""
    watches = []
    monkeypatch.setattr(train_mlm, "StepWatch", lambda *args: watches.append(StepWatch(*args)) or watches[-1])
    poisoned.add(60)
    flags = [*SAVING, "--rewind_on_spike", 20, "--max_train_minutes", 60]
    assert train(preset, *flags)["skipped_blocks"] == [[48, 64]]
    assert len(watches) == 2 and watches[0].start_s == watches[1].start_s
    more = ["--max_steps", 14, "--data_seed", 7, "--resume_despite_changes"]
    assert train(preset, *flags, *more)["skipped_blocks"] == []


def test_a_signal_at_a_spike_ends_the_run_that_then_returns(preset, tmp_path, poisoned, monkeypatch):
    train(preset, *SAVING, "--output_dir", tmp_path / "never", "--skip_blocks", "48-63")
    poisoned.add(60)
    compute = MlmTrainer.compute_loss

    def told(self, *others, **kwargs):
        if self.position == 56:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(self, *others, **kwargs)

    monkeypatch.setattr(MlmTrainer, "compute_loss", told)
    with pytest.raises(Stopped, match="stopped by SIGTERM: step 8 of 12 is a spike, and returned from: the run is in "):
        train(preset, *SAVING, "--rewind_on_spike", 20)
    monkeypatch.setattr(MlmTrainer, "compute_loss", compute)
    train(preset, *SAVING, "--rewind_on_spike", 20)
    assert weights(tmp_path / "run") == weights(tmp_path / "never")


def test_two_processes_return_together(preset, tmp_path, poisoned):
    """The spike is in the blocks of one of them."""
    poisoned.add(60)
    flags = [*SAVING, "--per_device_train_batch_size", 4]
    never = [*flags, "--output_dir", tmp_path / "never", "--skip_blocks", "48-63"]
    for argv in ([*flags, "--rewind_on_spike", 20], never):
        ranks = forked_ranks(lambda rank, argv=argv: train(preset, *argv), tmp_path)
        assert [rank.end() for rank in ranks] == [0, 0], ranks[0].log
    assert weights(tmp_path / "run") == weights(tmp_path / "never")
    assert spikes.read_skipped(tmp_path / "run") == [range(48, 64)]


def test_a_spike_before_the_first_checkpoint_sends_the_run_to_its_beginning(preset, tmp_path, poisoned, capsys):
    never = train(preset, *SAVING, "--output_dir", tmp_path / "never", "--skip_blocks", "24-39")
    poisoned.add(33)  # the fifth step
    flags = ["--save_strategy", "no", "--max_steps", 12, "--rewind_on_spike", 20]
    assert train(preset, *flags)["digest"] == never["digest"]
    assert "returning to the beginning, without blocks 24 to 39" in capsys.readouterr().err
    assert weights(tmp_path / "run") == weights(tmp_path / "never")


def test_a_run_that_spikes_wherever_it_goes_ends(preset, tmp_path, poisoned):
    poisoned |= set(range(40, 10_000))
    with pytest.raises(RunError, match=r"has returned to checkpoint-4 3 times already: lower learning_rate"):
        train(preset, *SAVING, "--rewind_on_spike", 20)
    assert [entry["step"] for entry in spikes.read_returns(tmp_path / "run")] == [6, 5, 5]


def test_without_the_flag_a_spike_is_trained_on(preset, poisoned):
    poisoned.add(60)
    assert train(preset, *SAVING)["skipped_blocks"] == []


def test_a_loss_that_is_no_number_is_a_spike(preset, tmp_path, monkeypatch):
    compute, never = MlmTrainer.compute_loss, tmp_path / "never"
    train(preset, *SAVING, "--output_dir", never, "--skip_blocks", "48-63")

    def spoilt(self, *others, **kwargs):
        return compute(self, *others, **kwargs) * (float("nan") if self.position == 56 else 1)

    monkeypatch.setattr(MlmTrainer, "compute_loss", spoilt)
    train(preset, *SAVING, "--rewind_on_spike", 20)
    assert weights(tmp_path / "run") == weights(never)


def test_what_is_called_a_spike():
    before = [2.0, 4.0] * 64  # mean 3, standard deviation 1
    assert spikes.is_spike(9.01, before, 6) and not spikes.is_spike(8.99, before, 6)
    assert not spikes.is_spike(9.01, before[: spikes.NEEDED - 1], 6) and spikes.is_spike(
        9.01, before[: spikes.NEEDED], 6
    )
    assert not spikes.is_spike(9.01, [100.0] * 64 + [2.0, 4.0, 90.0, 100.0], 6)
    assert spikes.is_spike(9.01, [100.0] * 64 + before, 6), "only the last 128 steps count"
    assert spikes.is_spike(float("nan"), [], 6) and spikes.is_spike(float("inf"), [], 6)


def test_a_damaged_list_of_returns_is_refused(tmp_path):
    path = tmp_path / spikes.SKIPPED_NAME
    spikes.write_return(tmp_path, [], step=8, loss=9.0, returned_to="checkpoint-4", blocks=[range(48, 64)])
    assert spikes.read_skipped(tmp_path) == [range(48, 64)]
    path.write_text(path.read_text().replace("64", "65"))
    with pytest.raises(InputError, match=r"skipped_blocks.json cannot be used \(it is not what was written"):
        spikes.read_skipped(tmp_path)
