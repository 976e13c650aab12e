"""Data workers that are killed, stuck or frozen; their use of open files and shared memory."""

import os
import re
import resource
import signal
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import Forked, train, wait_until
from test_resume import SAVING, WORKER, wait_for_line

from roberta_recipe.errors import RunError, Stopped
from roberta_recipe.training import data_loading, data_workers
from roberta_recipe.training.mlm_trainer import MlmTrainer


def test_a_data_worker_that_is_killed_is_a_line(preset, tmp_path, monkeypatch):
    def call():
        def killing(self, *args, **kwargs):
            if self.state.global_step == 5:
                os.kill(psutil.Process().children()[0].pid, signal.SIGKILL)
                time.sleep(1)  # until the worker's end is seen
            return step(self, *args, **kwargs)

        step = MlmTrainer.training_step
        monkeypatch.setattr(MlmTrainer, "training_step", killing)
        train(preset, *SAVING, "--dataloader_num_workers", 1)

    run = Forked(call, tmp_path / "log")
    assert run.end() == 1, run.log
    (last,) = [line for line in run.log.splitlines() if line.startswith("error: ")]
    assert "a data worker is gone (DataLoader worker (pid" in last and "checkpoint-3" in last, run.log
    assert "Traceback" not in run.log


def test_a_step_of_many_micro_batches_passes_the_limit_of_open_files(preset, tmp_path):
    """128 micro-batches of three tensors; a run with a file descriptor per tensor hung."""

    def call():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        train(preset, "--global_batch_size", 128, "--per_device_train_batch_size", 1, "--max_steps", 1, *WORKER)

    run = Forked(call, tmp_path / "log")
    assert run.end() == 0, run.log


@pytest.fixture
def stuck(preset, tmp_path, monkeypatch):
    """A run whose data worker stops at the fourth step and ignores SIGTERM."""

    def stopping(*args):
        numbers.append(0)
        if len(numbers) == 4:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as in a library's call that does not return
            (tmp_path / "stops").touch()
            time.sleep(1000)
        return collate(*args)

    numbers, collate = [], data_loading.micro_batches
    monkeypatch.setattr(data_loading, "micro_batches", stopping)
    monkeypatch.setattr(data_workers, "POLL_S", 0.1)
    monkeypatch.setattr(data_workers, "STUCK_S", 3.0)
    monkeypatch.setattr(data_workers, "GRACE_S", 0.5)
    run = Forked(lambda: train(preset, *SAVING, *WORKER), tmp_path / "log")
    wait_for_line(run, "step 3/12  loss", 1)
    wait_until((tmp_path / "stops").exists)
    return run


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (None, 1, "error: step 4 had no data for 3 s. Common causes"),
        (signal.SIGTERM, 75, "stopped by SIGTERM: step 4 had no data for "),
        (signal.SIGINT, 130, "stopped by Ctrl-C: step 4 had no data for "),
    ],
)
def test_a_data_worker_that_is_stuck_is_a_line(stuck, number, code, said):
    (worker,) = psutil.Process(stuck.pid).children()
    if number:
        os.kill(stuck.pid, number)
    assert stuck.end() == code, stuck.log
    last = stuck.log.splitlines()[-1]
    assert last.startswith(said) and re.search(r"checkpoint-3\. Continue with: ", last), stuck.log
    assert not worker.is_running() and "Traceback" not in stuck.log


def test_a_frozen_data_worker_is_a_line(preset, tmp_path, monkeypatch):
    """Its batches are in the queue, but not their file descriptors, for which `DataLoader` waits without a timeout."""
    monkeypatch.setattr(data_workers, "POLL_S", 0.1)
    monkeypatch.setattr(data_workers, "GRACE_S", 0.5)
    run = Forked(lambda: train(preset, *SAVING, *WORKER, "--max_steps", 5000), tmp_path / "log")
    wait_for_line(run, "step 3/", 1)
    (worker,) = psutil.Process(run.pid).children()
    worker.suspend()
    os.kill(run.pid, signal.SIGTERM)
    assert run.end() == 75, run.log
    assert re.search(r"stopped by SIGTERM: step \d+ had no data .*Continue with: ", run.log.splitlines()[-1])
    assert not worker.is_running()


@pytest.mark.parametrize(
    ("signaled_by", "reads", "waited_s", "ending"),
    [
        (None, True, 3600, None),  # workers tokenize text for an hour
        (None, False, 590, None),
        (None, False, 610, RunError),
        ("SIGTERM", False, 15, None),
        ("SIGTERM", False, 30, Stopped),
        ("SIGTERM", True, 3600, None),  # steps since the checkpoint would be lost
        (None, None, 610, RunError),  # a token cache
    ],
)
def test_how_long_a_step_waits_for_data(signaled_by, reads, waited_s, ending):
    """The timer counts its ticks, as the clock goes on while the process is suspended."""
    progress = None if reads is None else torch.zeros(1)
    state, stopping = SimpleNamespace(global_step=9), SimpleNamespace(signaled_by=signaled_by)
    trainer = SimpleNamespace(state=state, stopping=stopping, checkpoint_hint="Kept.")
    raised = None
    with data_workers.DataTimeout(trainer, progress) as wait:
        for _ in range(5, waited_s + 1, 5):
            if reads:
                progress += 1
            try:
                wait.check()
            except RunError as error:
                raised = type(error)
                break
    assert raised is ending
