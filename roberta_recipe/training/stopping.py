"""Early stopping of a training run: signals, time limit, NaN losses, loss spikes, out of memory, lost processes; with
error messages and exit codes.

All ranks make the same decision, at the end of an optimizer step, from values that are summed over ranks.

Loss spikes are handled as in PaLM (arXiv 2204.02311, section 5.1): resume from a checkpoint before the spike and skip
the batches around it; "the loss did not spike again at the same point". A spike is defined as in OLMo-core's
skip-step optimizers: more than 6 (there) standard deviations above the mean loss of the last 128 steps.
"""

import contextlib
import math
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from roberta_recipe import durable
from roberta_recipe.data.order import in_words
from roberta_recipe.errors import RunError, Stopped, first_line, lost_message
from roberta_recipe.hardware import is_out_of_memory, lost_process
from roberta_recipe.input_files import explained
from roberta_recipe.launcher import resume_hint
from roberta_recipe.log import is_first_process, logger
from roberta_recipe.record import SKIPPED_NAME, TIME_LIMIT, finite
from roberta_recipe.training.checkpoint import newest_first, step_of
from roberta_recipe.training.launching import leave_process_group, on_first_process

if TYPE_CHECKING:
    from roberta_recipe.training.durable_trainer import DurableTrainer

SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP"}
_SAME_INTERRUPT_S = 2.0  # one Ctrl-C arrives twice, from the terminal and from the launcher
WINDOW = 128  # steps in the mean that a loss is compared with
MIN_LOSSES = 32  # losses needed to detect a spike
STEPS_OF_SPIKE = 2  # the step of the spike, and the step before it, whose update caused it
MAX_REWINDS = 3  # from the same checkpoint


class Stopping(TrainerCallback):
    """Stops training early, at the same step on all ranks: with a checkpoint on SIGNALS and after `minutes`;
    without one if the loss is not finite, and at a loss spike (`is_spike` with `deviations`). A second Ctrl-C ends the
    process immediately. `trainer` is set by the trainer. At the end of a step, the trainer's losses (`step_losses`) are
    summed over ranks together with the other figures, and added to the logged mean (`count_step`)."""

    trainer: "DurableTrainer"

    def __init__(
        self, minutes: float | None = None, deviations: float | None = None, cooldown_share: float | None = None
    ):
        self.minutes, self.deviations, self.cooldown_share = minutes, deviations, cooldown_share
        self.elapsed_share = 0.0  # of `minutes`, at the end of the last step; the same on all ranks
        self.signaled_by: str | None = None  # a value of SIGNALS, of this process
        self.stopped_by: str | None = None  # a value of SIGNALS, or `TIME_LIMIT`; the same on all ranks
        self.recent_losses: deque[float] = deque(maxlen=WINDOW)
        self._interrupted_s: float | None = None

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Context of `Trainer.train`: signal handlers; library exceptions become `RunError`s (`explain`)."""
        self._begun_s = time.monotonic()
        # a background job of a shell script ignores SIGINT
        numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        handlers = {number: signal.signal(number, self._handle_signal) for number in numbers}
        try:
            yield
        except KeyboardInterrupt:  # a second Ctrl-C
            step = self.trainer.state.global_step + 1
            raise Stopped(
                f"ended immediately, in step {step:,}. {self.trainer.checkpoint_hint} {resume_hint()}"
            ) from None
        except Exception as error:
            if (explained := explain(self.trainer, error)) is None:
                raise
            raise explained from error
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _handle_signal(self, number: int, _: Any) -> None:
        now_s, is_first, self.signaled_by = time.monotonic(), self.signaled_by is None, SIGNALS[number]
        is_interrupt = number == signal.SIGINT
        if is_first and is_first_process():  # `logging` takes locks, which a signal handler must not wait for
            again = "; Ctrl-C again ends immediately" * is_interrupt
            with contextlib.suppress(OSError):  # the same Ctrl-C ended `| tee`
                os.write(2, f"\n{self.signaled_by}: finishing and saving this step first{again}\n".encode())
        if not is_interrupt:
            return
        if self._interrupted_s is None:
            self._interrupted_s = now_s
        elif now_s - self._interrupted_s > _SAME_INTERRUPT_S:
            raise KeyboardInterrupt

    def with_cooldown(self, schedule: Callable[[int], float], step: int) -> float:
        """`schedule` at `step`, falling linearly to 0 over the last `cooldown_share` of the time limit."""
        return schedule(step) * min(1.0, max(0.0, 1 - self.elapsed_share) / self.cooldown_share)

    def _signals(self) -> torch.Tensor:
        """(3,): 1 for each of SIGNALS that this process received."""
        flags = [float(self.signaled_by == name) for name in SIGNALS.values()]
        return torch.tensor(flags, device=self.trainer.args.device)

    def on_step_end(self, args, state, control, **kwargs):
        trainer, losses, share = self.trainer, self.trainer.step_losses(), 0.0
        if self.minutes and args.process_index == 0:  # rank 0's clock decides
            share = (time.monotonic() - self._begun_s) / (60 * self.minutes)
        figures = [losses.new_tensor(share), (~torch.isfinite(losses)).any().float(), losses.sum()]
        summed = trainer.sum_over_processes(torch.cat([self._signals(), torch.stack(figures)]))
        *signaled, self.elapsed_share, not_finite, loss = summed.tolist()
        self.stopped_by = _name(signaled)
        overflowed = trainer.count_step(losses, is_finite=not not_finite)
        if not overflowed:
            self._check_loss(loss / args.world_size, bool(not_finite))
        if not self.stopped_by and self.elapsed_share >= 1 and state.global_step < state.max_steps:
            self.stopped_by = TIME_LIMIT
        if self.stopped_by:
            control.should_save = control.should_training_stop = True
            why = f"{TIME_LIMIT}={self.minutes:g}" if self.stopped_by == TIME_LIMIT else self.stopped_by
            logger.info(f"{why}: saving step {state.global_step:,} of {state.max_steps:,}, then ending")

    def _check_loss(self, loss: float, not_finite: bool) -> None:
        """Raise `Stopped` for a spike, and `RunError` for a loss that is not finite or, in bf16 and fp32, a gradient
        (DeepSpeed would skip the step and continue)."""
        trainer = self.trainer
        if self.deviations and is_spike(loss, self.recent_losses, self.deviations):
            raise on_first_process(trainer.args, lambda: record_spike(trainer, loss, self.stopped_by or "a loss spike"))
        self.recent_losses.append(loss)
        if not_finite or trainer.step_was_skipped:
            kind = "loss" if not_finite else "gradient"
            raise trainer.diverged(f"the {kind} of step {trainer.state.global_step} is not finite")

    def end_if_stopped(self, wait: Callable[[], None] | None = None) -> None:
        """After training: raise `Stopped` if a signal stopped it, with its last step saved. `wait()` comes first, as a
        launcher ends all ranks once one has ended."""
        if self.stopped_by not in (None, TIME_LIMIT):
            if wait:
                wait()
            state, folder = self.trainer.state, self.trainer.args.output_dir
            self._end(f"step {state.global_step:,} of {state.max_steps:,} is saved in {folder}")

    def end_if_signaled(self) -> None:
        """After the end of a run: raise `Stopped` if a signal came after its last step."""
        self.stopped_by = _name(self.trainer.sum_over_processes(self._signals()).tolist())
        if self.stopped_by:
            self._end(f"the run in {self.trainer.args.output_dir} is finished")

    def _end(self, what: str) -> None:
        leave_process_group()
        raise Stopped(f"stopped by {self.stopped_by}: {what}. {resume_hint()}", self.stopped_by)


def _name(signaled: Sequence[float]) -> str | None:
    return next((name for name, processes in zip(SIGNALS.values(), signaled, strict=True) if processes), None)


def explain(trainer: "DurableTrainer", error: Exception) -> RunError | None:
    """A `RunError` with advice for a library exception in training; None for a bug."""
    step = trainer.state.global_step
    if "loss scale already at minimum" in str(error):  # DeepSpeed's, a plain Exception
        return trainer.diverged(
            f"fp16 gradients overflowed with the loss scale at its minimum, after step {step}: train in bf16 (--bf16 "
            "true --fp16 false)"
        )
    if "Expected to have finished reduction" in str(error):  # DDP's
        return RunError("this model has weights that no step uses: add --ddp_find_unused_parameters true")
    if lost := lost_process(error):
        return RunError(f"{lost_message(lost, error)} {trainer.checkpoint_hint} {resume_hint()}")
    if is_out_of_memory(error):
        fix = f"lower per_device_train_batch_size={trainer.args.per_device_train_batch_size} (the batch stays) or, "
        fix += f"in an evaluation, per_device_eval_batch_size={trainer.args.per_device_eval_batch_size}"
        return RunError(f"out of memory at step {step + 1} ({first_line(error)}): {fix}. {trainer.checkpoint_hint}")
    return None


def is_spike(loss: float, before: Iterable[float], deviations: float) -> bool:
    """Whether a loss is not finite, or more than `deviations` standard deviations above the mean of the last `WINDOW`
    losses `before` it."""
    if not math.isfinite(loss):
        return True
    window = list(before)[-WINDOW:]
    return len(window) >= MIN_LOSSES and loss > statistics.fmean(window) + deviations * statistics.pstdev(window)


def read_spikes(output_dir: str | Path) -> list[dict[str, Any]]:
    """The loss spikes recorded in the run's folder. Raises `InputError` for a damaged file."""
    path = Path(output_dir, SKIPPED_NAME)
    fix = ": it lists the blocks that this run skips; move it away, and name them with --skip_blocks"
    with explained(f"{path} cannot be used", fix):
        return durable.read_sealed(path)["returns"] if path.is_file() else []


def record_spike(trainer: "DurableTrainer", loss: float, by: str) -> RunError:
    """Record a spike in the last step, so that the next start skips its blocks; returns the error that ends this start,
    with the exit code of `by`."""
    output_dir, step = trainer.args.output_dir, trainer.state.global_step
    spikes, saved = read_spikes(output_dir), newest_first(output_dir, step - 1)
    saved_step = step_of(saved[0]) if saved else 0
    what = f"the loss of step {step:,} is {loss:.3f}, a spike"
    if sum(entry["step"] > saved_step for entry in spikes) >= MAX_REWINDS:
        return RunError(
            f"{what}, as in {MAX_REWINDS} earlier starts from the same checkpoint: lower learning_rate or use a "
            f"longer warm-up in a new output_dir, or move newer checkpoints away to rewind further. "
            f"{trainer.checkpoint_hint}"
        )
    blocks = trainer.last_blocks(min(STEPS_OF_SPIKE, step - saved_step))  # the checkpoint was trained on earlier ones
    positions = [[part.start, part.stop] for part in blocks]
    entry = {"step": step, "loss": finite(loss), "blocks": positions, "fingerprint": trainer.fingerprint}
    durable.write_sealed(Path(output_dir, SKIPPED_NAME), {"returns": [*spikes, entry]})
    what += f"; the next start leaves out blocks {in_words(blocks)}"
    return Stopped(f"stopped by {by}: {what}. {trainer.checkpoint_hint} {resume_hint()}", by)
