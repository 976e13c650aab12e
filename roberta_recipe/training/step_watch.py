"""What ends training before its last step: a signal, the time limit, a loss that is not finite, a loss spike.

All processes decide alike, at the end of an optimizer step, by the sum of what each of them has seen.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from roberta_recipe.errors import RunError, Stopped
from roberta_recipe.log import duration, is_first_process, logger
from roberta_recipe.record import TIME_LIMIT
from roberta_recipe.started import continue_with, launcher_is_gone
from roberta_recipe.training import spikes

if TYPE_CHECKING:
    from roberta_recipe.training.durable_trainer import DurableTrainer

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# a terminal's Ctrl-C reaches a process, and again through its launcher
_SAME_INTERRUPT_S = 2.0
# a process notes a signal when a call of torch returns, as of a backward pass on a CPU
_MOST_OF_A_CALL_S = 30.0
DATA_POLL_S = 5.0  # between two looks at a step that waits for its data
ANNOUNCE_S = 60.0  # a longer wait for data is a log line
GRACE_S = 20.0  # for the data of a step, after a signal
STUCK_S = 600.0  # without progress, a data worker is stuck


class StepWatch(TrainerCallback):
    """Ends training early, at the same step in all processes: with a checkpoint on SIGTERM, on Ctrl-C and after
    `minutes`; without one where the loss is not finite, and at a loss spike of so many `deviations`
    (`spikes.is_spike`), to train again from the last. A second Ctrl-C ends the process at once.
    """

    def __init__(
        self,
        minutes: float | None = None,
        deviations: float | None = None,
        start_s: float | None = None,
        cooldown_share: float | None = None,
    ):
        self.minutes, self.deviations, self.cooldown_share = minutes, deviations, cooldown_share
        self.elapsed_share = 0.0  # of `minutes`, at the end of the last step; the same in all processes
        self.start_s = start_s  # time.monotonic() from which `minutes` count; None: from the begin of training
        self.stopped_by: str | None = None  # "SIGTERM", "Ctrl-C", `TIME_LIMIT`
        self.spike: float | None = None  # the loss that ended training
        self.told = torch.zeros(1).share_memory_()  # to stop: a signal's number; data workers look at it too
        atexit.register(kill_workers)  # before multiprocessing's own end, which waits for them
        self.recent_losses: deque[float] = deque(maxlen=spikes.WINDOW)
        self.trainer: DurableTrainer | None = None
        self._handlers: dict[int, Any] = {}
        self._interrupted_s: float | None = None
        self._read, self._read_s = None, 0.0  # what data workers have read, and when it last grew
        self._announced = 0  # the last step whose wait for data is in the log

    def begin(self, recent_losses: Iterable[float]) -> None:
        """Take over the signals; `recent_losses` are those of the steps before."""
        self.start_s = self.start_s or time.monotonic()
        # above 0 where a run has returned to a checkpoint
        elapsed = torch.tensor(self._elapsed_share(), device=self.trainer.args.device)
        self.elapsed_share = self.trainer.sum_over_processes(elapsed).item()
        self.recent_losses.extend(recent_losses)
        # a job that a script's shell has put into the background ignores Ctrl-C, which is for others
        numbers = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._tell) for number in numbers}

    def end(self) -> None:
        """Give the signals back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _tell(self, number: int, _: Any) -> None:
        now_s, self.told[0] = time.monotonic(), number
        if number != signal.SIGINT:
            return
        if self._interrupted_s is None:
            self._interrupted_s = now_s
            if is_first_process():  # a handler may not wait for a lock of `logging` or of a stream
                os.write(2, b"\nCtrl-C: this step is finished and saved first; Ctrl-C again ends at once\n")
        elif now_s - self._interrupted_s > _SAME_INTERRUPT_S:
            raise KeyboardInterrupt

    def _elapsed_share(self) -> float:
        """Of `minutes`, by the first process's clock, or some processes would train on alone; 0 in the others."""
        if not self.minutes or self.trainer.args.process_index:
            return 0.0
        return (time.monotonic() - self.start_s) / (60 * self.minutes)

    def cooled(self, schedule: Callable[[int], float], step: int) -> float:
        """The share of the learning rate that `schedule` has at `step`, falling linearly to 0 over the last
        `cooldown_share` of the time limit."""
        return schedule(step) * min(1.0, max(0.0, 1 - self.elapsed_share) / self.cooldown_share)

    def on_step_end(self, args, state, control, **kwargs):
        told = [float(self.told) == number for number in _SIGNALS]
        flags = torch.tensor([*told, self._elapsed_share()], dtype=torch.float32, device=args.device)
        step = torch.cat([flags, self.trainer.not_finite, self.trainer.step_loss])
        terminated, interrupted, elapsed, not_finite, loss = self.trainer.sum_over_processes(step).tolist()
        self.elapsed_share = elapsed
        self.trainer.not_finite.zero_()
        self.trainer.step_loss.zero_()
        if terminated or interrupted:
            self.stopped_by = "SIGTERM" if terminated else "Ctrl-C"
        if self._is_spike(loss / args.world_size):
            self.spike = loss / args.world_size
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False
            return
        self.trainer.check_step(bool(not_finite))
        if self.stopped_by or (elapsed >= 1 and state.global_step < state.max_steps):
            self.stopped_by = self.stopped_by or TIME_LIMIT
            control.should_save = control.should_training_stop = True
            why = f"{TIME_LIMIT}={self.minutes:g}" if self.stopped_by == TIME_LIMIT else self.stopped_by
            why = "The launcher has ended" if terminated and launcher_is_gone() else why
            logger.info(f"{why}: saving step {state.global_step:,} of {state.max_steps:,}, then ending")

    @contextlib.contextmanager
    def waiting_for_data(self, progress: torch.Tensor | None) -> Iterator[None]:
        """Within, `check_wait` is called every `DATA_POLL_S`, by a timer's signal: `DataLoader`'s own timeout does not
        cover the wait for a file descriptor, which a frozen worker never sends."""
        begun_s = time.monotonic()
        before = signal.signal(signal.SIGALRM, lambda *_: self.check_wait(time.monotonic() - begun_s, progress))
        try:
            signal.setitimer(signal.ITIMER_REAL, DATA_POLL_S, DATA_POLL_S)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
        except (RunError, KeyboardInterrupt):
            kill_workers()
            raise

    def check_wait(self, waited_s: float, progress: torch.Tensor | None) -> None:
        """A step has waited `waited_s` for data. Raises `RunError` after `STUCK_S` without progress; after a signal,
        `Stopped` after `GRACE_S` without progress, or `GRACE_S` in all before the first step. `progress` grows
        while workers tokenize text (`TextReader`), for a resume perhaps for hours; a token cache has none."""
        trainer, now_s, step = self.trainer, time.monotonic(), self.trainer.state.global_step + 1
        read = None if progress is None else progress.tolist()
        if read != self._read:
            self._read, self._read_s = read, now_s
        idle_s = min(waited_s, now_s - self._read_s)
        has_trained = step > trainer._first_step + 1
        kept = f"had no data after {duration(waited_s)}. {trainer._last_good()} {continue_with()}"
        if self.told > 0 and (idle_s if has_trained else waited_s) >= GRACE_S:
            by = "SIGTERM" if self.told == signal.SIGTERM else "Ctrl-C"
            raise Stopped(f"stopped by {by}: step {step:,} {kept}", by)
        if idle_s >= STUCK_S:
            raise RunError(
                f"no data from the data workers for {duration(idle_s)}. Common causes: the open-file limit (ulimit "
                f"-n), storage that does not answer; a worker's traceback may stand above. Step {step:,} {kept}"
            )
        if waited_s >= ANNOUNCE_S and self._announced != step:
            self._announced = step
            logger.info(f"Step {step:,}: waiting for data for {duration(waited_s)}")

    def told_since(self) -> str | None:
        """By which signal a process was told to end after the last step; called in all processes."""
        told = torch.tensor([float(self.told) == number for number in _SIGNALS], device=self.trainer.args.device)
        terminated, interrupted = self.trainer.sum_over_processes(told.float()).tolist()
        return "SIGTERM" if terminated else "Ctrl-C" if interrupted else None

    def _is_spike(self, loss: float) -> bool:
        """Whether `loss` of the step ends training; another loss is one of those that the next is compared with."""
        if self.trainer.overflowed:
            return False
        if self.deviations and spikes.is_spike(loss, self.recent_losses, self.deviations):
            return True
        self.recent_losses.append(loss)
        return False


def kill_workers() -> None:
    """Kill the data workers of a run that ends with an error; a stuck worker ignores SIGTERM."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises for each killed worker
    for worker in multiprocessing.active_children():
        if worker.daemon:  # as data workers are, and no process of a program that imports this
            worker.kill()
            worker.join()
    signal.signal(signal.SIGCHLD, handler)


def outlive_a_stop(told: torch.Tensor, before: Callable[[int], None] | None, worker: int) -> None:
    """What a data worker does of signals, after what it did `before`: Ctrl-C is its trainer's, which ends its workers,
    and so is a SIGTERM that the trainer has got too; both finish and save their step first."""
    if before:
        before(worker)
    trainer = os.getppid()

    def end_unless_told(*_: Any) -> None:
        end_s = time.monotonic() + _MOST_OF_A_CALL_S
        while time.monotonic() < end_s and os.getppid() == trainer:
            if told > 0:
                return
            time.sleep(0.05)
        os._exit(0)

    signal.signal(signal.SIGTERM, end_unless_told)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
