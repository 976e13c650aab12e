"""Data workers of a `DataLoader`: signal handling, end with the trainer, timeout."""

import atexit
import functools
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

from roberta_recipe.errors import RunError, Stopped
from roberta_recipe.hardware import end_with_parent
from roberta_recipe.launcher import resume_hint
from roberta_recipe.log import duration

if TYPE_CHECKING:
    from roberta_recipe.training.durable_trainer import DurableTrainer

POLL_S = 5.0  # interval of the timer
GRACE_S = 20.0  # timeout after a signal
STUCK_S = 600.0  # timeout of a wait for data


class DataTimeout:
    """Timeout of a step's wait for data, a context manager. Raises `RunError` after `STUCK_S` without `progress` (the
    number of texts tokenized by workers; None: a token cache), and `Stopped` after `GRACE_S` if a signal came.

    `DataLoader`'s own timeout does not cover the wait for a file descriptor from a frozen worker.
    """

    def __init__(self, trainer: "DurableTrainer", progress: torch.Tensor | None):
        self.trainer, self.progress = trainer, progress

    def __enter__(self) -> "DataTimeout":
        self._idle_s, self._read = 0.0, None
        self._handler = signal.signal(signal.SIGALRM, self.check)
        signal.setitimer(signal.ITIMER_REAL, POLL_S, POLL_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._handler)
        if kind:
            kill_workers()

    def check(self, *_) -> None:
        """Signal handler of the timer."""
        read, by = None if self.progress is None else self.progress.item(), self.trainer.stopping.signaled_by
        # not wall-clock time, which goes on while the process is suspended
        self._idle_s = self._idle_s + POLL_S if read == self._read else 0.0
        self._read = read
        if self._idle_s < (GRACE_S if by else STUCK_S):
            return
        step = f"step {self.trainer.state.global_step + 1:,} had no data for {duration(self._idle_s)}"
        end = f"{self.trainer.checkpoint_hint} {resume_hint()}"
        if by:
            raise Stopped(f"stopped by {by}: {step}. {end}", by)
        raise RunError(
            f"{step}. Common causes: the open-file limit (ulimit -n), unresponsive storage; a worker's "
            f"traceback may be printed above. {end}"
        )


def ignore_signals_in_workers(loader: DataLoader) -> DataLoader:
    """Have the workers of `loader` ignore SIGTERM and Ctrl-C, which launchers and terminals send to all processes, so
    that the trainer can finish and save its step. They end when the trainer ends."""
    base = getattr(loader, "base_dataloader", loader)  # inside accelerate's wrapper
    base.worker_init_fn = functools.partial(_set_up_worker, os.getpid())
    atexit.unregister(kill_workers)  # registered for an earlier loader
    atexit.register(kill_workers)  # runs before multiprocessing's handler, which sends SIGTERM and waits
    return loader


def _set_up_worker(trainer: int, worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(trainer, signal.SIGKILL)


def kill_workers() -> None:
    """Kill the data workers of this process, which ignore SIGTERM."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for each killed worker
    for worker in multiprocessing.active_children():
        if worker.daemon:  # only data workers are daemons
            worker.kill()
            worker.join()
    signal.signal(signal.SIGCHLD, handler)
