"""Runs that are killed, stopped, out of disk space or memory: saved state, and how they resume."""

import multiprocessing
import os
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import Forked, forked_ranks, same_run, train
from safetensors import SafetensorError
from safetensors.torch import save_file

from roberta_recipe import durable
from roberta_recipe.data import chunks
from roberta_recipe.errors import InputError, is_disk_full
from roberta_recipe.record import INDEX_NAME
from roberta_recipe.training import checkpoint, stopping
from roberta_recipe.training.mlm_trainer import MlmTrainer

SAVING = ["--save_strategy", "steps", "--save_steps", "3", "--max_steps", "12"]
WORKER = ["--dataloader_num_workers", "1"]
KEYS = ("step", "loss", "grad_norm", "tokens_seen", "blocks_digest", "digest")


def history(output_dir, step=12):
    log = durable.read_json(Path(output_dir) / f"checkpoint-{step}" / "trainer_state.json")["log_history"]
    return [{key: entry[key] for key in KEYS} for entry in log if "loss" in entry]


def wait_for_line(run, line, times):
    """Wait until a forked run has logged this text so many times."""
    deadline_s = time.monotonic() + 100
    while run.log.count(line) < times and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert run.log.count(line) >= times, run.log


def test_killed_twice_and_started_again_a_run_is_the_same_run(dropout, tmp_path, monkeypatch):
    """Two processes with a data worker each, over many chunks, bit for bit; the second time without the chunk index.
    benchmarks/faults kills at random times."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4_000)
    flags = [*SAVING, "--per_device_train_batch_size", "2", "--dataloader_num_workers", "1", "--output_dir"]

    def start_ranks(name):
        return forked_ranks(lambda rank: train(dropout, *flags, tmp_path / name), tmp_path)

    ranks = start_ranks("alone")
    assert [rank.end() for rank in ranks] == [0, 0], ranks[0].log
    for index in ("kept", "lost"):
        ranks = start_ranks("killed")
        wait_for_line(ranks[0], "  loss ", 5)
        processes = [psutil.Process(rank.pid) for rank in ranks]
        for victim in [worker for rank in processes for worker in rank.children(recursive=True)] + processes:
            victim.kill()
        assert [rank.end() for rank in ranks] == [-signal.SIGKILL] * 2
        assert not (tmp_path / "killed" / "run_record.json").exists()
        if index == "lost":
            (tmp_path / "killed" / INDEX_NAME).unlink()
    ranks = start_ranks("killed")
    assert [rank.end() for rank in ranks] == [0, 0] and "Resuming" in ranks[0].log
    assert history(tmp_path / "killed") == history(tmp_path / "alone") and len(history(tmp_path / "alone")) == 12
    assert same_run(tmp_path / "killed", tmp_path / "alone")  # weights, optimizer, scheduler


@pytest.mark.parametrize("cached", [False, True])
def test_another_layout_takes_the_same_blocks_after_the_checkpoint(preset, tmp_path, cached):
    flags = [*SAVING, *(["--token_cache", tmp_path / "cache"] if cached else [])]
    train(preset, *flags, "--output_dir", tmp_path / "a")
    elsewhere = ["--resume_from_checkpoint", tmp_path / "a" / "checkpoint-6", "--output_dir", tmp_path / "b"]
    train(preset, *flags, *elsewhere, "--per_device_train_batch_size", 2, "--dataloader_num_workers", 2)
    whole, other = history(tmp_path / "a"), history(tmp_path / "b")
    assert [entry["digest"] for entry in other] == [entry["digest"] for entry in whole] and len(whole) == 12
    assert [entry["loss"] for entry in other] == pytest.approx([entry["loss"] for entry in whole], rel=1e-5)


def test_a_checkpoint_between_two_log_lines(dropout, tmp_path):
    """A step is logged before it is saved, so that the next logged mean begins there, resumed or not."""
    flags = [*SAVING, "--logging_steps", 4, "--output_dir"]
    train(dropout, *flags, tmp_path / "a")
    train(dropout, *flags, tmp_path / "b", "--resume_from_checkpoint", tmp_path / "a" / "checkpoint-3")
    assert history(tmp_path / "b") == history(tmp_path / "a")
    assert [entry["step"] for entry in history(tmp_path / "a")] == [1, 3, 4, 6, 8, 9, 12]


def damage(path, fault):
    if fault == "missing":
        path.unlink()
    elif fault == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    elif fault == "bit":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["optimizer.pt", "recipe_state.json", "manifest.json"])
@pytest.mark.parametrize("fault", ["missing", "truncated", "bit"])
def test_a_bad_newest_checkpoint_is_passed_over(tmp_path, name, fault, caplog):
    for step in (3, 6):
        aside = tmp_path / "aside"
        aside.mkdir()
        for file in ("optimizer.pt", "recipe_state.json"):
            (aside / file).write_bytes(os.urandom(1000))
        durable.move_into_place(aside, tmp_path / f"checkpoint-{step}")
    assert checkpoint._find(str(tmp_path), None) == str(tmp_path / "checkpoint-6")
    with pytest.raises(InputError, match="has newer checkpoints; move them away first"):
        checkpoint._find(str(tmp_path), str(tmp_path / "checkpoint-3"))
    damage(tmp_path / "checkpoint-6" / name, fault)
    assert checkpoint._find(str(tmp_path), None) == str(tmp_path / "checkpoint-3")
    assert "Skipped" in caplog.text and "checkpoint-6" in caplog.text
    assert name in caplog.text or name == durable.MANIFEST
    shutil.rmtree(tmp_path / "checkpoint-3")
    unsealed = (name, fault) == (durable.MANIFEST, "missing")
    said = r"checkpoints of another program \(checkpoint-6" if unsealed else r"is intact \(skipped: checkpoint-6\)"
    with pytest.raises(InputError, match=said):
        checkpoint._find(str(tmp_path), None)
    if unsealed:
        (tmp_path / "log.jsonl").touch()  # of a start that was killed as it wrote its first checkpoint
        assert checkpoint._find(str(tmp_path), None) is None


def test_a_named_folder_that_is_no_checkpoint_is_called_what_it_is(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    durable.seal(tmp_path / "run")
    for name, said in {"nowhere": "there is no such folder", "run": "recipe_state.json is missing"}.items():
        with pytest.raises(InputError, match=f"resume_from_checkpoint=.*{name} cannot be used: {said}"):
            checkpoint._find(str(tmp_path / "new"), str(tmp_path / name))


def test_sealed_weights_are_readable_by_those_who_can_read_the_config(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").touch()
    durable.seal(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    umask = os.umask(0)
    os.umask(umask)
    assert modes == dict.fromkeys(("model.safetensors", "config.json", durable.MANIFEST), 0o666 & ~umask)


def test_the_newest_whole_checkpoints_stay(tmp_path):
    for step in (2, 4, 6, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step != 6:  # of a killed start
            durable.seal(tmp_path / f"checkpoint-{step}")
    checkpoint.rotate(tmp_path, 2, 10)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4", "checkpoint-10"}
    checkpoint.rotate(tmp_path, None, 10)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_resumed_is_what_was_started(preset, tmp_path, root):
    train(preset, *SAVING, "--output_dir", tmp_path / "a")
    (tmp_path / "a" / "run_record.json").unlink()
    changes = {"global_batch_size": 16, "mlm_probability": 0.2, "seed": 7, "max_seq_length": 32, "learning_rate": 2e-3}
    for name, value in changes.items():
        with pytest.raises(InputError, match=rf"{name} was [\d.]+, is {value}.*--resume_despite_changes"):
            train(preset, *SAVING, "--output_dir", tmp_path / "a", f"--{name}", value)
    flags = ["--max_steps", 15, "--learning_rate", 2e-3, "--resume_despite_changes", "--output_dir", tmp_path / "a"]
    record = train(preset, *SAVING, *flags)
    assert record["steps"] == 15 and record["resumes"] == 1
    rates = durable.read_json(tmp_path / "a" / "checkpoint-15" / "trainer_state.json")["log_history"]
    assert [e["learning_rate"] for e in rates if e.get("step") == 13] == [pytest.approx(2e-3 * 3 / 15)]


def test_a_state_of_another_layout_of_deepspeed_or_another_version_is_refused(tmp_path):
    layout = {"processes": 2, "zero_stage": 2}
    state = {"version": checkpoint.STATE_VERSION, "layout": layout, "fingerprint": {}}
    durable.write_json(tmp_path / "recipe_state.json", state)
    assert checkpoint.load_state(tmp_path, {}, layout)["changed"] == []
    for change in ({"processes": 4}, {"zero_stage": 1}, {"zero_stage": None}, {"round_robin_gradients": True}):
        with pytest.raises(InputError, match=f"cannot be converted .{next(iter(change))} was (2|None), is "):
            checkpoint.load_state(tmp_path, {}, {**layout, **change})
    for precision in ("bf16", "fp16"):  # fp32's loss scale of 1 would stay
        durable.write_json(tmp_path / "recipe_state.json", {**state, "fingerprint": {precision: False}})
        with pytest.raises(InputError, match=rf"cannot be converted .{precision} was False, is True"):
            checkpoint.load_state(tmp_path, {precision: True}, layout, despite_changes=True)
    durable.write_json(tmp_path / "recipe_state.json", {**state, "version": 1})
    with pytest.raises(InputError, match="was written by another version"):
        checkpoint.load_state(tmp_path, {}, layout)


def test_ranks_with_different_settings_are_refused(preset, tmp_path):
    """Each rank would train with its own learning rate."""
    flags = ["--per_device_train_batch_size", 4, "--learning_rate"]
    ranks = forked_ranks(lambda rank: train(preset, *flags, ("1e-3", "2e-3")[rank]), tmp_path)
    assert [rank.end() for rank in ranks] == [2, 2], ranks[0].log
    said = "processes have different settings: learning_rate=0.001 on rank 0, 0.002 on rank 1; "
    assert said in ranks[0].log and "Traceback" not in ranks[0].log + ranks[1].log
    ranks = forked_ranks(lambda rank: train(preset, *flags, "1e-3", "--logging_steps", 1 + rank), tmp_path)
    assert [rank.end() for rank in ranks] == [2, 2] and "logging_steps=1.0 on rank 0, 2 on rank 1; " in ranks[0].log


def test_all_ranks_skip_the_blocks_of_rank_0(preset, tmp_path, monkeypatch):
    """A file system may show the ranks other spikes; some blocks would be read twice, and others never."""
    whole = train(preset, "--output_dir", tmp_path / "whole")

    def of(rank):
        spikes = [{"blocks": [[8, 16]]}] if rank else []
        monkeypatch.setattr(stopping, "read_spikes", lambda folder: spikes)
        train(preset, "--per_device_train_batch_size", 4)

    ranks = forked_ranks(of, tmp_path)
    assert [rank.end() for rank in ranks] == [0, 0], ranks[0].log
    assert durable.read_json(tmp_path / "run" / "run_record.json")["digest"] == whole["digest"]


def test_killed_behind_the_last_step_a_run_only_finishes(preset, tmp_path):
    first = train(preset, *SAVING)
    (tmp_path / "run" / "run_record.json").unlink()
    again = train(preset, *SAVING)
    assert again["steps"] == 12 and again["digest"] == first["digest"] and again["resumes"] == 1
    assert again["metrics"]["eval_loss"] == first["metrics"]["eval_loss"]


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_saves_the_step_and_ends_with_the_documented_code(preset, tmp_path, processes):
    flags = ["--max_steps", "100000", "--per_device_train_batch_size", "2", "--dataloader_num_workers", "1"]
    ranks = forked_ranks(lambda rank: train(preset, *flags), tmp_path, processes)
    wait_for_line(ranks[0], "  loss ", 4)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert [rank.end() for rank in ranks] == [75] * processes, ranks[0].log
    (saved,) = checkpoint.newest_first(tmp_path / "run")
    step = durable.read_json(saved / "recipe_state.json")["step"]
    assert durable.damage(saved) is None and saved.name == f"checkpoint-{step}" and step >= 4
    assert f"stopped by SIGTERM: step {step} of 100,000 is saved in" in ranks[0].log and "Traceback" not in ranks[0].log


def kill_at(monkeypatch, method, step):
    """Patch `MlmTrainer`'s `method` to end its process at a step, like `kill -9`."""
    original = getattr(MlmTrainer, method)

    def killed(self, *args, **kwargs):
        if self.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MlmTrainer, method, killed)


@pytest.mark.parametrize(
    ("method", "step", "victim", "kept"),
    [
        ("training_step", 5, 1, "The last complete checkpoint is .*checkpoint-3"),
        ("evaluate", 12, 0, "files are complete"),
    ],
)
def test_a_process_that_is_killed_is_named_in_a_line_by_the_others(
    preset, tmp_path, monkeypatch, method, step, victim, kept
):
    def call(rank):
        if rank == victim:
            kill_at(monkeypatch, method, step)
        train(preset, *SAVING, "--per_device_train_batch_size", 4)

    ranks = forked_ranks(call, tmp_path)
    assert ranks[victim].end() == -signal.SIGKILL
    other = ranks[1 - victim]
    assert other.end() == 1, other.log
    said = rf"error: another process of this run is gone.* \(.*by peer.*\): .* {kept}.* Continue with: .*"
    assert any(re.fullmatch(said, line) for line in other.log.splitlines()), other.log
    assert "Traceback" not in other.log


def test_a_full_disk_leaves_the_last_checkpoint(preset, tmp_path, monkeypatch):
    """A file size limit acts as the full disk: 200 KB, from the second checkpoint on."""
    save = MlmTrainer.save_model

    def with_quota(self, *args, **kwargs):
        if self.state.global_step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        save(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(MlmTrainer, "save_model", with_quota)
        run = Forked(lambda: train(preset, *SAVING), tmp_path / "log")
        assert run.end() == 1, run.log
    last = run.log.splitlines()[-1]
    assert last.startswith("error: checkpoint-6 could not be written") and "checkpoint-3" in last
    assert not (tmp_path / "run" / "checkpoint-6").exists()
    train(preset, *SAVING)
    assert len(history(tmp_path / "run")) == 12


WRITERS = {
    "tokenizers": lambda path, tokenizer: tokenizer.save_pretrained(path.parent),
    "torch": lambda path, _: torch.save({"tensor": torch.zeros(100_000)}, path),
    "shared memory": lambda *_: torch.zeros(100_000).share_memory_(),
    "safetensors": lambda path, _: save_file({"tensor": torch.zeros(100_000)}, path),
    "python": lambda path, _: path.write_bytes(bytes(10_000)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_for_which_there_is_no_room_is_known_whoever_writes_it(tokenizer, tmp_path, writer):
    def write():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            WRITERS[writer](tmp_path / "file", tokenizer)
        except Exception as error:
            is_known = isinstance(error, SafetensorError) if writer == "safetensors" else is_disk_full(error)
            os._exit(not is_known)
        os._exit(2)

    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(("method", "what"), [("train", "the model"), ("evaluate", "File too large")])
def test_a_disk_that_is_full_at_the_end_loses_no_step(preset, tmp_path, monkeypatch, method, what):
    """The last checkpoint is kept; the next start writes model and record."""
    original = getattr(MlmTrainer, method)

    def then_quota(self, *args, **kwargs):
        value = original(self, *args, **kwargs)
        limit = (tmp_path / "log").stat().st_size + 5000  # the log of this process is a file too
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return value

    with monkeypatch.context() as patch:
        patch.setattr(MlmTrainer, method, then_quota)
        run = Forked(lambda: train(preset, *SAVING), tmp_path / "log")
        assert run.end() == 1, run.log
    last = run.log.splitlines()[-1]
    assert last.startswith("error: ") and what in last and "Continue with: " in last
    assert train(preset, *SAVING)["steps"] == 12


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(preset, tmp_path):
    """A tracker's files and a damaged chunk index do not prevent it."""
    (tmp_path / "run" / "runs" / "Nov23_host").mkdir(parents=True)
    (tmp_path / "run" / INDEX_NAME).write_text("0 damaged\n")
    assert train(preset, *SAVING)["steps"] == 12


def test_out_of_memory_says_what_to_lower(preset, tmp_path, monkeypatch):
    """With a real limit, 100 MB above the memory in use after loading."""

    def limited(function):
        def within(*args, **kwargs):
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + 100_000_000, resource.RLIM_INFINITY))
            try:
                return function(*args, **kwargs)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        return within

    # more than the memory that earlier tests of this process have freed, which a fork may use again
    big = ["--global_batch_size", "8192", "--per_device_train_batch_size", "8192", "--max_steps", "1"]
    monkeypatch.setattr(MlmTrainer, "training_step", limited(MlmTrainer.training_step))
    run = Forked(lambda: train(preset, *big), tmp_path / "log")
    assert run.end() == 1 and "lower per_device_train_batch_size=8192" in run.log, run.log
