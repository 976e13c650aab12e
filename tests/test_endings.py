"""Resuming after Ctrl-C, SIGTERM, the time limit, and the end of a run that is extended."""

import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from conftest import Forked, same_run, train, wait_until
from glue_runs import data_dir, flags  # noqa: F401

import finetune_glue
from roberta_recipe import durable, errors, hardware, launcher
from roberta_recipe.errors import InputError, Stopped
from roberta_recipe.publishing import plots
from roberta_recipe.training import checkpoint, stopping
from roberta_recipe.training.finetune_trainer import FinetuneTrainer
from roberta_recipe.training.mlm_trainer import MlmTrainer

RUN = "lr0.001-batch8-seed1"
SAVING = ["--save_strategy", "steps", "--save_steps", "3", "--max_steps", "12"]


@pytest.fixture
def glue(flags, tmp_path, monkeypatch):
    """A function: fine-tune with further flags, three epochs of three steps, each evaluated."""
    monkeypatch.setattr(plots, "plot_runs", lambda *_: None)
    argv = flags("rte", "--save_strategy", "steps", "--save_steps", 2, "--max_steps", 9, "--logging_steps", 4)
    return lambda name: finetune_glue.main([*argv, "--output_dir", str(tmp_path / name)])


@pytest.fixture
def at_step(monkeypatch):
    """A function: call `call()` at the end of a step, once."""

    def arrange(step, call):
        original, calls = stopping.Stopping.on_step_end, [call]

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step and calls:
                calls.pop()()
            original(self, args, state, control, **kwargs)

        monkeypatch.setattr(stopping.Stopping, "on_step_end", on_step_end)

    return arrange


def send(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "by"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")]
)
def test_a_signal_saves_the_step_and_the_same_command_continues(preset, tmp_path, at_step, number, by):
    train(preset, *SAVING, "--output_dir", tmp_path / "whole")
    before = signal.getsignal(number)
    at_step(5, send(number))
    with pytest.raises(Stopped, match=rf"stopped by {by}: step 5 of 12 is saved in .*run\. Continue with: ") as stopped:
        train(preset, *SAVING)
    assert (
        stopped.value.exit_code == {"Ctrl-C": 130, "SIGTERM": 75, "SIGHUP": 129}[by]
        and signal.getsignal(number) == before
    )
    assert checkpoint.newest_first(tmp_path / "run")[0].name == "checkpoint-5"
    assert train(preset, *SAVING)["resumes"] == 1
    assert same_run(tmp_path / "whole", tmp_path / "run")


def test_an_interrupt_that_also_ends_the_reader_of_the_output_saves_the_step(preset, tmp_path, at_step, monkeypatch):
    """`2>&1 | tee log`: the terminal's Ctrl-C goes to both."""

    write = os.write

    def closed(file, text):
        if file == 2:
            raise BrokenPipeError
        return write(file, text)

    monkeypatch.setattr(stopping.os, "write", closed)
    at_step(5, send(signal.SIGINT))
    with pytest.raises(Stopped, match="step 5 of 12 is saved"):
        train(preset, *SAVING)


def test_a_checkpoint_that_was_passed_over_does_not_displace_the_newer_one(preset, tmp_path, at_step, capsys):
    """checkpoint-6 is damaged, so that the second start begins at checkpoint-3 and saves step 4."""
    at_step(7, send(signal.SIGTERM))
    with pytest.raises(Stopped):
        train(preset, *SAVING)
    for step in (6, 7):
        (tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"damaged")
    at_step(4, send(signal.SIGTERM))
    with pytest.raises(Stopped):
        train(preset, *SAVING, "--save_total_limit", 1)
    kept = [path.name for path in checkpoint.newest_first(tmp_path / "run")]
    assert kept == ["checkpoint-7", "checkpoint-6", "checkpoint-4"]
    assert train(preset, *SAVING, "--save_total_limit", 1)["resumes"] == 2
    assert [path.name for path in checkpoint.newest_first(tmp_path / "run")] == ["checkpoint-12"]


def test_a_stop_in_an_evaluation_is_outlived_by_its_data_worker(preset, tmp_path, monkeypatch):
    """A launcher forwards a signal to all processes of a rank. The step is saved also if it comes during evaluation."""
    batches = MlmTrainer._equal_batch_counts

    def slowly(self, loader):
        for number, batch in enumerate(batches(self, loader)):
            (tmp_path / "evaluates").touch()
            time.sleep(0.3 * (number < 5))
            yield batch

    monkeypatch.setattr(MlmTrainer, "_equal_batch_counts", slowly)
    evaluating = ["--eval_strategy", "steps", "--eval_steps", 5, "--dataloader_num_workers", 1]
    run = Forked(lambda: train(preset, *SAVING, *evaluating), tmp_path / "log")
    wait_until((tmp_path / "evaluates").exists)
    workers = psutil.Process(run.pid).children(recursive=True)
    for process in [*workers, psutil.Process(run.pid)]:
        process.send_signal(signal.SIGTERM)
    assert run.end() == 75 and len(workers) >= 2, run.log
    assert "step 6 of 12 is saved" in run.log


def test_a_second_interrupt_ends_at_once(preset, tmp_path, at_step, monkeypatch):
    monkeypatch.setattr(stopping, "_SAME_INTERRUPT_S", 0.0)

    def twice():
        send(signal.SIGINT)()
        time.sleep(0.01)
        send(signal.SIGINT)()

    at_step(5, twice)
    with pytest.raises(Stopped, match=r"ended immediately, in step 6\. The last complete checkpoint is .*checkpoint-3"):
        train(preset, *SAVING)
    assert [path.name for path in checkpoint.newest_first(tmp_path / "run")] == ["checkpoint-3"]


def test_a_time_limit_ends_a_run_that_the_same_command_continues(preset, tmp_path, capsys):
    few = [*SAVING, "--max_steps", 6]
    train(preset, *few, "--output_dir", tmp_path / "whole")
    limit, steps, records = ["--max_train_minutes", 1e-9], [], []
    while not records or records[-1]["stopped_by"] != "max_steps":
        records.append(train(preset, *few, *limit))
        steps.append(records[-1]["steps"])
        said = capsys.readouterr().out
        assert ("stopped by max_train_minutes" in said and "Continue with: " in said) == (steps[-1] < 6)
    assert steps == list(range(1, 7)) and records[-1]["resumes"] == 5
    assert all(record["metrics"]["eval_loss"] > 0 for record in records)
    assert same_run(tmp_path / "whole", tmp_path / "run")
    with pytest.raises(InputError, match="already holds a finished run"):
        train(preset, *few, *limit)


def test_a_finished_run_is_extended_by_saying_so(preset, tmp_path):
    train(preset, *SAVING)
    for refused in (["--max_steps", 20], ["--resume_despite_changes", "true"]):
        with pytest.raises(
            InputError,
            match=r"finished run.*higher --max_steps or --num_train_epochs and --resume_despite_changes true",
        ):
            train(preset, *SAVING, *refused)
    record = train(preset, *SAVING, "--max_steps", 20, "--resume_despite_changes", "true")
    assert record["steps"] == 20 and record["resumes"] == 1
    log = durable.read_json(tmp_path / "run" / "checkpoint-20" / "trainer_state.json")["log_history"]
    assert [entry["step"] for entry in log if "loss" in entry] == list(range(1, 21))


def test_a_finished_run_is_extended_by_more_passes(preset, tmp_path):
    saving = ("--save_strategy", "steps", "--save_steps", "3")
    first = train(preset, *saving, "--num_train_epochs", 0.5)
    with pytest.raises(InputError, match="finished run"):
        train(preset, *saving, "--num_train_epochs", 1)
    record = train(preset, *saving, "--num_train_epochs", 1, "--resume_despite_changes", "true")
    assert record["steps"] == 2 * first["steps"] and record["resumes"] == 1
    for fewer in (0.5, 1):  # nothing is written again
        with pytest.raises(InputError, match="already holds a finished run"):
            train(preset, *saving, "--num_train_epochs", fewer, "--resume_despite_changes", "true")


@pytest.mark.parametrize("step", [3, 5, 9])
def test_a_fine_tuning_that_is_stopped_at_any_step_is_the_same_run(glue, tmp_path, at_step, step):
    """Including the last step of an epoch, which is saved after its evaluation, and steps within an epoch, where no
    further evaluation takes place."""
    whole = glue("whole")
    at_step(step, send(signal.SIGINT))
    with pytest.raises(Stopped, match=rf"stopped by Ctrl-C: step {step} of 9 is saved"):
        glue("stopped")
    assert glue("stopped")["settings"][0]["seeds"] == whole["settings"][0]["seeds"]
    assert same_run(tmp_path / "whole" / RUN, tmp_path / "stopped" / RUN)


def test_killed_in_an_evaluation_a_fine_tuning_measures_that_epoch_again(glue, tmp_path, monkeypatch):
    """The checkpoint of an epoch's last step was written before the evaluation."""
    whole = glue("whole")
    evaluate, calls = FinetuneTrainer.evaluate, []

    def killed(self, *args, **kwargs):
        calls.append(self.state.global_step)
        if len(calls) == 2:
            raise SystemExit("killed")
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(FinetuneTrainer, "evaluate", killed)
    with pytest.raises(SystemExit):
        glue("killed")
    assert glue("killed")["settings"][0]["seeds"] == whole["settings"][0]["seeds"]
    assert calls == [3, 6, 6, 9]
    assert same_run(tmp_path / "whole" / RUN, tmp_path / "killed" / RUN)


@pytest.mark.parametrize(("number", "code", "by"), [(signal.SIGTERM, 75, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C")])
def test_a_signal_outside_of_training_is_one_line(tmp_path, number, code, by):
    run = Forked(lambda: (print("ready", flush=True), time.sleep(60)), tmp_path / "log")
    wait_until(lambda: "ready" in run.log)
    os.kill(run.pid, number)
    assert run.end() == code
    assert run.log.splitlines()[1:] == [f"ended by {by}; saved files are complete. {launcher.resume_hint()}"]


class SignalledInDestructor:
    def __init__(self, number):
        self.number = number

    def __del__(self):
        os.kill(os.getpid(), self.number)
        time.sleep(0.1)


def signalled_in_destructor(number):
    SignalledInDestructor(number)
    time.sleep(60)


def broken_pipe():
    read, write = os.pipe()
    os.close(read)
    return write


def removed_while_written():
    os.open("cache/a.bin.host-1.tmp", os.O_RDONLY)


def test_an_error_that_nobody_reads_keeps_its_exit_code(root):
    script = "from roberta_recipe.errors import *\ndef main():\n    raise InputError('x')\nexit_on_error(main)"
    for closed in ({"stderr": broken_pipe()}, {"preexec_fn": lambda: os.close(1)}):
        assert subprocess.run([sys.executable, "-c", script], cwd=root, **closed).returncode == 2


@pytest.mark.parametrize(
    ("run", "code", "line"),
    [
        (lambda: signalled_in_destructor(signal.SIGTERM), 75, "ended by SIGTERM; saved files are complete."),
        (lambda: signalled_in_destructor(signal.SIGINT), 130, "ended by Ctrl-C; saved files are complete."),
        (
            lambda: os.write(broken_pipe(), b"result"),
            1,
            "the program that read the output has ended. Saved files are complete.",
        ),
        (removed_while_written, 1, "another program removed this temporary file. Saved files are complete."),
    ],
)
def test_a_signal_or_a_removed_file_at_a_bad_moment_is_one_line(tmp_path, run, code, line):
    """Regression tests of failures found by the fault census."""
    ended = Forked(run, tmp_path / "log")
    assert ended.end() == code and line in ended.log and "Traceback" not in ended.log


def test_a_worker_killed_while_it_sends_is_a_lost_worker():
    reader, writer = multiprocessing.Pipe()
    writer.close()
    with pytest.raises(EOFError) as caught:
        reader.recv()
    assert hardware.lost_process(caught.value) == "a data worker is gone"
    assert hardware.lost_process(EOFError()) is None


def test_nccl_s_own_errors_are_not_called_a_lost_process():
    """NCCL has one exception type for a lost rank, out of memory and a wrong launch; messages as torch writes them."""

    def raised(kind, meaning, last):
        where = f"NCCL error in: /pytorch/NCCLUtils.cpp:93, {kind} (run with NCCL_DEBUG=INFO for details), NCCL version"
        return torch.distributed.DistBackendError(f"{where} 2.28.9\n{meaning}.\nLast error:\n{last}")

    gone = raised("remote process exited or there was a network error", "ncclRemoteError: A call failed", "closed")
    shared = raised("invalid usage", "ncclInvalidUsage: This usually", "Duplicate GPU detected : rank 1 and rank 0")
    full = raised("unhandled cuda error", "ncclUnhandledCudaError: Call", "Cuda failure 2 'out of memory'")
    calloc = raised("unhandled cuda error", "ncclUnhandledCudaError: Call", "Failed to CUDA calloc async 608 bytes")
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    device = torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")
    assert [bool(hardware.lost_process(error)) for error in (gone, shared, full, calloc)] == [True, False, False, False]
    found = [hardware.is_out_of_memory(error) for error in (gone, shared, full, calloc, cublas, device)]
    assert found == [False, False, True, True, True, True]


def test_what_all_processes_find_is_said_once(tmp_path, monkeypatch):
    """Rank 0 prints the error; the launcher ends the other ranks, which wait."""

    def fail():
        raise InputError("learning_rate=-1 must be at least 0")

    waits, sleep = tmp_path / "waits", time.sleep
    monkeypatch.setattr(errors.time, "sleep", lambda seconds: (waits.touch(), sleep(seconds)))
    second = Forked(fail, tmp_path / "1", RANK="1")
    while not waits.exists():
        sleep(0.01)
    os.kill(second.pid, signal.SIGTERM)
    first = Forked(fail, tmp_path / "0", RANK="0")
    assert first.end() == 2 and "error: learning_rate=-1" in first.log
    assert second.end() == 2 and second.log == ""
    monkeypatch.setattr(errors, "_HEAD_START_S", 0.1)
    alone = Forked(fail, tmp_path / "2", RANK="1")
    assert alone.end() == 2 and alone.log.startswith("error: learning_rate=-1")


def test_the_command_that_continues_is_the_launcher_s(monkeypatch):
    """Or this process's own, if the launcher's cannot be read."""
    own = f"Continue with: {shlex.join(sys.orig_argv)}"
    assert launcher.resume_hint.__wrapped__() == own
    monkeypatch.setattr(launcher, "launcher_pid", lambda: 1)
    assert (
        launcher.resume_hint.__wrapped__()
        == f"Continue with: {shlex.join(psutil.Process(1).cmdline() or sys.orig_argv)}"
    )
    monkeypatch.setattr(launcher, "launcher_pid", lambda: 2**22 + 1)  # no process
    assert launcher.resume_hint.__wrapped__() == own


def test_resuming_reads_its_own_command_line(preset, tmp_path):
    """`Trainer` takes the intervals of logging, evaluation and saving from the checkpoint."""
    assert yaml.safe_load(Path(preset).read_text())["logging_steps"] == 1
    flags = [*SAVING, "--logging_steps", 6]
    train(preset, *flags, "--max_train_minutes", 1e-9)
    record = train(preset, *SAVING, "--save_steps", 5)
    assert [step for step, _ in record["loss_at_steps"]["train"]] == list(range(1, 13))
    assert (tmp_path / "run" / "checkpoint-10").is_dir() and not (tmp_path / "run" / "checkpoint-9").exists()


@pytest.mark.parametrize("name", ["preset.yaml", "log.jsonl", "run_record.json"])
def test_a_run_that_was_killed_as_it_wrote_a_file_begins_again(preset, tmp_path, monkeypatch, name):
    run = tmp_path / "run"
    argv = ("--max_steps", "2", "--save_strategy", "steps", "--save_steps", "2", "--output_dir", run)

    def replace(path, target):
        if Path(target).name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        os.rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        assert Forked(lambda: train(preset, *argv), tmp_path / "log").end() == -signal.SIGKILL
    (left,) = run.glob("*.tmp")
    assert left.name.startswith(name) and not (run / name).exists()
    train(preset, *argv)
    assert not list(run.rglob("*.tmp")) and durable.read_json(run / "run_record.json")["steps"] == 2


def test_what_a_killed_process_of_this_machine_left_is_removed(tmp_path):
    """Files of living processes and of other machines stay."""
    this = os.uname().nodename
    gone = Forked(lambda: None, tmp_path.parent / "log")
    gone.end()
    others = [f"a.{this}-{os.getppid()}.tmp", f"a.other-{gone.pid}.tmp", "a.txt", f"a.{this}-x.tmp"]
    for name in (*others, f"a.{this}-{gone.pid}.tmp", f"b.{this}-{gone.pid}.tmp", f".a.{this}-{os.getpid()}.tmp"):
        (tmp_path / name).touch()
    durable.remove_stale(tmp_path, "a")
    assert (tmp_path / f"b.{this}-{gone.pid}.tmp").exists()
    durable.remove_stale(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
    assert [bool(durable.TEMPORARY.search(name)) for name in others] == [True, True, False, False]


def test_an_error_is_said_though_the_process_is_ended_as_it_is_said(tmp_path):
    """As a launcher ends the other ranks after one has failed."""

    class Late(InputError):
        def __str__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(100):  # the handler runs here
                pass
            return "what is wrong"

    def run():
        raise Late

    process = Forked(run, tmp_path / "log")
    assert (process.end(), process.log) == (2, "error: what is wrong\n")
