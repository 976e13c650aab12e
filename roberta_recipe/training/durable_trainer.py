"""`Trainer` for runs that are killed: sealed checkpoints, the gradient of the whole effective batch, and errors that
name the last checkpoint. `tests/trainer_internals.py` lists the parts of `Trainer` that it depends on."""

import contextlib
import copy
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback

from roberta_recipe import durable
from roberta_recipe.data.masking import IGNORED
from roberta_recipe.errors import RunError, first_line, says_no_room
from roberta_recipe.log import logger
from roberta_recipe.record import LOG_NAME, finite
from roberta_recipe.started import continue_with
from roberta_recipe.training import digests, optimizers, stopping, weights
from roberta_recipe.training.checkpoint import (
    STATE_VERSION,
    SealedCheckpoints,
    announce_layout,
    layout,
    newest_first,
)
from roberta_recipe.training.data_workers import leave_signals_to_trainer
from roberta_recipe.training.progress import Progress
from roberta_recipe.training.stopping import Stopping
from roberta_recipe.training.throughput import Throughput

MAX_SKIPPED_STEPS = 32  # in a row: from 2^16 the loss scale is at 1 after 16


class StepBoundaries(TrainerCallback):
    """Calls the trainer's `end_step`, and logs the last step."""

    def __init__(self, trainer: "DurableTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)  # of this start's flags, not the checkpoint's

    def on_train_end(self, args, state, control, **kwargs):
        self.trainer.end_s = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.end_step()
        if state.global_step >= state.max_steps and args.logging_strategy != "no":
            control.should_log = True  # the end of the curve, and of a short run all of it


class LogFile(TrainerCallback):
    """`log.jsonl`: a line for each log entry; that of a step with `beside()`, which trackers do not draw. As training
    begins, the entries of the checkpoint replace its lines: later steps are logged again."""

    def __init__(self, beside: Callable[[], dict[str, Any]]):
        self.beside = beside

    def on_train_begin(self, args, state, control, **kwargs):
        if args.should_save:
            durable.write_text(Path(args.output_dir, LOG_NAME), "".join(map(_log_line, state.log_history)))

    def on_log(self, args, state, control, logs=None, **kwargs):
        state.log_history[-1] |= self.beside() if "loss" in logs else {}
        if args.should_save:
            with open(Path(args.output_dir, LOG_NAME), "a", encoding="utf-8") as file:
                file.write(_log_line(state.log_history[-1]))


class DurableTrainer(Trainer):
    """`Trainer` with sealed checkpoints, resumed from the newest of them as if it had not been interrupted: `resumed`
    is the content of its `recipe_state.json`.

    `fingerprint` says what must not change between two starts of a run. `objectives` maps each objective to the batch
    column of its targets (-100: no target). A step's loss is the sum, over objectives, of the losses of all targets of
    the effective batch / their number (`num_items_in_batch`: one denominator an objective, over all micro-batches and
    processes). `stopping` ends training early. The `on_save` of `callbacks` is called when a checkpoint is sealed and
    the older ones are rotated; `Trainer` itself neither pushes nor rotates.

    A step whose gradients overflow in fp16 is skipped: weights and learning rate stay, the loss scale is lowered, and
    the step is counted in `skipped_steps`. It is a step of `max_steps` like any other, and its batch is consumed.
    """

    change_advice = "in another output_dir"  # how a run continues with another precision or rate
    saved_max_length: int | None = None  # tokens that the saved tokenizer truncates to; None: the model's positions
    loss_is_scaled_for_ga = True  # the loss here is that of the whole effective batch already

    def __init__(
        self,
        *,
        args: TrainingArguments,
        fingerprint: dict[str, Any],
        objectives: dict[str, str],
        resumed: dict[str, Any] | None,
        stopping: Stopping | None = None,
        callbacks: Iterable[TrainerCallback] = (),
        **kwargs,
    ):
        self._layout = layout(args)  # before Trainer fills in what a DeepSpeed configuration leaves open
        self.stopping, self.throughput = stopping or Stopping(), Throughput(args)
        own = [StepBoundaries(self), self.stopping, self.throughput, LogFile(self.logged_beside)]
        own += [SealedCheckpoints(self, args.save_total_limit), *callbacks, Progress()]
        of_trainer = copy.copy(args)
        vars(of_trainer).update(save_total_limit=None)  # Trainer would rotate before a checkpoint is sealed
        super().__init__(args=of_trainer, callbacks=own, **kwargs)
        self.remove_callback(PrinterCallback if self.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
        self.fingerprint, self.objectives, resumed = fingerprint, objectives, resumed or {}
        self.left_out: tuple[str, ...] = ()  # of the weights that are saved: how their names begin
        self.resumes: int = resumed.get("resumes", 0) + 1 if resumed else 0
        self._first_step: int = resumed.get("step", 0)
        # (objectives,): this process's losses of the step, and of the `_steps` since the last log line
        self._step_losses, self._losses = torch.zeros(2, len(objectives), device=self.args.device)
        self._steps = 0
        self._unsealed: Path | None = None  # the checkpoint that `Trainer` is writing
        self._earlier_s: float = resumed.get("train_seconds", 0.0)
        self._start_s, self.end_s = time.monotonic(), None  # of training
        self.skipped_steps: int = resumed.get("skipped_steps", 0)  # by fp16, as gradients overflowed
        self._skipped_in_a_row: int = resumed.get("skipped_in_a_row", 0)
        # of a step: losses that are not finite; the loss, its share of this process x number of processes
        self.not_finite, self.step_loss = torch.zeros(2, 1, device=self.args.device)
        self.stopping.trainer, self._recent_losses = self, resumed.get("recent_losses", [])
        if resumed:
            announce_layout(resumed["layout"], self._layout)

    # What subclasses add

    def count_consumed(self) -> None:
        """Add up, over processes, what was consumed since the last call; called in all of them."""

    def recipe_state(self) -> dict[str, Any]:
        """What a checkpoint holds for `resumed`, beside `Trainer`'s own."""
        return {
            "version": STATE_VERSION,
            "step": self.state.global_step,
            "fingerprint": self.fingerprint,
            "layout": self._layout,
            "resumes": self.resumes,
            "train_seconds": self.train_seconds,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
            "recent_losses": list(self.stopping.recent_losses),
        }

    def record(self) -> dict[str, Any]:
        """The trainer's fields of the run record; called in all processes."""
        hashes = digests.of_training(self, self.model_folder)
        return {"fingerprint": self.fingerprint, "skipped_steps": self.skipped_steps, "state_digests": hashes}

    @property
    def model_folder(self) -> Path:
        """Where the finished run's weights are."""
        return Path(self.args.output_dir)

    def logged_beside(self) -> dict[str, Any]:
        """Values of a step's log entry that are no metrics."""
        return {}

    # Loss

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """(the micro-batches of a step, (objectives,): the targets of each objective in them, over all processes)."""
        with self.throughput.waiting():
            batches = list(itertools.islice(epoch_iterator, num_batches))
        if not batches:  # the data have ended, which Trainer warns of
            return batches, None
        counts = [sum((batch[column] != IGNORED).sum() for batch in batches) for column in self.objectives.values()]
        return batches, self.sum_over_processes(torch.stack(counts).to(device))

    def loss_of_batch(self, losses: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        """(): what a micro-batch adds to the loss of the step, of its sums of losses (objectives,).

        An objective without a target in the whole batch has a sum of 0, divided by 1. Gradients of processes are
        averaged and the denominators are of all processes, so the sum is multiplied by their number.
        """
        losses = losses * self.accelerator.num_processes / num_items_in_batch.clamp(min=1)
        self._step_losses += losses.detach()
        return losses.sum()

    def log(self, logs, start_time=None):
        """As `Trainer`, with the mean losses of the steps since the last line, without those that fp16 skipped with a
        loss that is not finite; no line where no other step was."""
        if "loss" in logs:
            if not self._steps:
                return
            total = self.sum_over_processes(self._losses.clone()).tolist()
            means = [loss / (self.args.world_size * self._steps) for loss in total]
            self._losses.zero_()
            self._steps = 0
            self.count_consumed()
            logs |= {"loss": sum(means), "tokens_seen": self.state.num_input_tokens_seen}
            if len(means) > 1:
                logs |= {f"{name}_loss": mean for name, mean in zip(self.objectives, means, strict=True)}
            if self.args.fp16:
                logs |= {"skipped_steps": self.skipped_steps, "loss_scale": self.loss_scale}
            if self.step_was_skipped:  # infinite, or the norm of another step
                logs.pop("grad_norm", None)
        super().log(logs, start_time)

    def sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, "sum")

    # Optimizer, and overflow in fp16

    def create_optimizer(self, model=None):
        if self.args.optim in optimizers.own():
            model = self.model if model is None else model
            self.optimizer = optimizers.build(self.args, model, self.get_decay_parameter_names(model))
        optimizer = super().create_optimizer(model)
        # the scaler calls a fused optimizer at an overflow too, as its kernel skips the step, and accelerate takes the
        # call for a step, so that the rate advances (accelerate #4242); without this mark, the scaler does not call it
        if self.accelerator.scaler is not None:
            optimizer._step_supports_amp_scaling = False
        return optimizer

    @property
    def loss_scale(self) -> float | None:
        """What a loss is multiplied by before its backward pass; None where the precision is not fp16."""
        if not self.args.fp16:
            return None
        return self.optimizer.optimizer.loss_scale if self.is_deepspeed_enabled else self.accelerator.scaler.get_scale()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last optimizer step was skipped, as its gradients overflowed; the same in all processes."""
        return bool(self.accelerator.optimizer_step_was_skipped)

    def end_step(self) -> None:
        """After each optimizer step, in all processes alike: count the steps that fp16 skipped, add the step's losses
        to the logged mean unless it was skipped and they are not finite; raises `RunError` for overflow without end."""
        losses, self._step_losses = self._step_losses, torch.zeros_like(self._step_losses)
        if not self.overflowed or not self.sum_over_processes((~torch.isfinite(losses)).any().float()):
            self._losses += losses
            self._steps += 1
        if not self.overflowed:
            self._skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        logger.info(
            f"Step {self.state.global_step}: fp16 gradients overflowed, so weights and learning rate stay as they are "
            f"({self.skipped_steps} skipped so far); the loss scale is now {self.loss_scale:,g}"
        )
        if self._skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise stopping.overflowed(self, f"in {self._skipped_in_a_row} steps in a row, up to step")

    def _load_scaler(self, checkpoint):
        if self.accelerator.scaler is not None:  # None for a run that began in fp16 and is resumed in bf16 or fp32
            super()._load_scaler(checkpoint)

    # Data

    def get_eval_dataloader(self, eval_dataset=None):
        return leave_signals_to_trainer(super().get_eval_dataloader(eval_dataset))

    # Training

    @property
    def overflowed(self) -> bool:
        """Whether fp16 skipped the last step, which has a loss scale to lower."""
        return self.args.fp16 and self.step_was_skipped

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.not_finite += ~torch.isfinite(loss)
        self.step_loss += loss
        return loss

    def diverged(self, what: str) -> RunError:
        """The error of a run that is lost; subclasses name the data."""
        return stopping.diverged(self, what)

    def _rate(self) -> str:
        """The learning rate, and that of `optim_args`, by the names of the flags."""
        second = " and optim_args' lr" * ("lr" in optimizers.TABLE[optimizers.name_of(self.args)].arguments)
        return f"learning_rate={self.args.learning_rate}{second}"

    def train(self, *args, **kwargs):
        self._start_s = time.monotonic()
        with self.stopping.training(self._recent_losses):
            try:
                return super().train(*args, **kwargs)
            except Exception as error:
                if self._unsealed and is_write_failure(error):
                    self.end_writing(self._unsealed, error)
                raise

    def _run_epoch(self, **kwargs):
        if self.state.global_step >= self.state.max_steps:  # killed between the last step and the record
            self.control.should_training_stop = True
        else:
            super()._run_epoch(**kwargs)

    @property
    def train_seconds(self) -> float:
        """Of this start and of all starts before it."""
        return self._earlier_s + (self.end_s or time.monotonic()) - self._start_s

    # Checkpoints

    def check_before_saving(self) -> None:
        """Raise `RunError` in all processes where a weight is not finite."""
        bad = sum((~torch.isfinite(p)).any().float() for p in self.model.parameters() if p.numel())
        if self.sum_over_processes(torch.as_tensor(bad, device=self.args.device)):
            raise RunError(
                f"the weights are not finite after step {self.state.global_step}, so no checkpoint of them is written. "
                f"Lower {self._rate()} or warm up longer. {self._last_good()}"
            )

    def save_model(self, output_dir=None, _internal_call=False):
        """Write the finished model, whole or not at all; as an internal call, the model of a checkpoint, which
        `SealedCheckpoints` seals when `Trainer` has written the rest."""
        folder = Path(output_dir or self.args.output_dir)
        if not _internal_call:
            aside = durable.aside_of(folder / "model")
            with self.writing(aside, "the model"):
                self.write_model(aside)
                if self.args.should_save:
                    durable.move_files_into_place(aside, folder)
            return
        self.count_consumed()  # since the last log line, if any
        self.check_before_saving()
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed as it wrote it
        self.accelerator.wait_for_everyone()
        with self.writing(folder):
            self.write_model(folder)
        self._unsealed = folder

    def write_model(self, folder: Path) -> None:
        """Write weights (fp32), config and tokenizer into a new folder; every process must call."""
        state = self._master_weights() if self.is_deepspeed_enabled else self.model.state_dict()
        if not self.args.should_save:
            return
        state = {name: weight for name, weight in state.items() if not name.startswith(self.left_out)}
        self.model.save_pretrained(folder, state_dict=state)
        if self.is_deepspeed_enabled:
            self.model.config.dtype = "float32"  # as in the file; `save_pretrained` wrote the type in memory
            self.model.config.save_pretrained(folder)
        with weights.fitted(self.processing_class, self.model.config, self.saved_max_length):
            self.processing_class.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Load with the model's own class, which may keep weights in files of its own."""
        stored = type(self.model).from_pretrained(resume_from_checkpoint, dtype=torch.float32)
        self.model.load_state_dict(stored.state_dict())

    def _master_weights(self) -> dict[str, torch.Tensor]:
        """The fp32 weights that DeepSpeed's optimizer steps, whole, on the first process; every process must call.

        The model itself holds them in half precision under bf16 and fp16, and in shards under ZeRO 3.
        """
        from deepspeed.utils import safe_get_full_fp32_param

        master = {}
        for name, parameter in self.model.named_parameters():  # a tied parameter comes once
            whole = safe_get_full_fp32_param(parameter)
            if self.args.should_save:
                master[name] = whole.cpu()
        return master

    @contextlib.contextmanager
    def writing(self, folder: Path, what: str | None = None) -> Iterator[None]:
        """Within, the files of `folder` are written; see `end_writing`."""
        failure = None
        try:
            yield
        except Exception as error:
            if not is_write_failure(error):
                raise
            failure = error
        self.end_writing(folder, failure, what)

    def end_writing(self, folder: Path, failure: Exception | None = None, what: str | None = None) -> None:
        """Raise `RunError` in all processes where writing `folder` failed in one of them, and delete it. DeepSpeed
        waits for all processes as it writes, so there only that process raises, and the launcher ends the others."""
        self._unsealed = None
        failed = torch.tensor(float(failure is not None), device=self.args.device)
        if not (failure and self.is_deepspeed_enabled):
            failed = self.sum_over_processes(failed)
        if failed:
            if self.args.should_save:  # makes room for the user
                shutil.rmtree(folder, ignore_errors=True)
            raise RunError(
                f"{what or folder.name} could not be written to {self.args.output_dir}: "
                f"{first_line(failure) if failure else 'another process says why'}. {self._last_good()} Make "
                f"room. {continue_with()}"
            ) from failure

    def _last_good(self) -> str:
        checkpoints = newest_first(self.args.output_dir)
        return f"The last complete checkpoint is {checkpoints[0]}." if checkpoints else "There is no checkpoint yet."


def _log_line(entry: dict[str, Any]) -> str:
    return json.dumps(finite(entry)) + "\n"


def is_write_failure(error: Exception) -> bool:
    """Whether an exception says that a file could not be written."""
    return isinstance(error, (OSError, SafetensorError)) or says_no_room(error)
