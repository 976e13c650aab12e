"""`Trainer` for runs that are killed: sealed checkpoints, the gradient of the whole effective batch, and errors that
name the last checkpoint. `tests/test_trainer_internals.py` lists the parts of `Trainer` that it depends on."""

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
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from roberta_recipe import durable
from roberta_recipe.data import IGNORED
from roberta_recipe.errors import RunError, first_line, library_errors, says_no_room
from roberta_recipe.log import logger
from roberta_recipe.model import weights
from roberta_recipe.record import LOG_NAME, finite
from roberta_recipe.started import continue_with
from roberta_recipe.training import checkpoint, optimizers
from roberta_recipe.training.data_workers import leave_signals_to_trainer
from roberta_recipe.training.progress import Progress
from roberta_recipe.training.stopping import Stopping
from roberta_recipe.training.throughput import Throughput

MAX_SKIPPED_STEPS = 32  # in a row: from 2^16 the loss scale is at 1 after 16


class LogFile(TrainerCallback):
    """`log.jsonl`: a line for each log entry, a step's with the values of `beside()`, which trackers do not draw. On
    resuming, the entries of the checkpoint replace the lines: later steps are logged again.

    A step that is saved is logged first, so that no running mean is part of a checkpoint; so is the last step.
    """

    def __init__(self, beside: Callable[[], dict[str, Any]]):
        self.beside = beside

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)  # of this start's flags, not the checkpoint's
        if args.should_save:
            durable.write_text(Path(args.output_dir, LOG_NAME), "".join(map(_log_line, state.log_history)))

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_save or state.global_step >= state.max_steps:
            control.should_log = args.logging_strategy != "no"

    on_epoch_end = on_step_end

    def on_log(self, args, state, control, logs=None, **kwargs):
        state.log_history[-1] |= self.beside() if "loss" in logs else {}
        if args.should_save:
            with open(Path(args.output_dir, LOG_NAME), "a", encoding="utf-8") as file:
                file.write(_log_line(state.log_history[-1]))


class DurableTrainer(Trainer):
    """`Trainer` with sealed checkpoints, resumed from the newest of them as if it had not been interrupted: `resumed`
    is the content of its `recipe_state.json`.

    `fingerprint` has the settings that must not change between two starts of a run. `objectives` maps each objective
    to the batch column of its targets (-100: no target). A step's loss is the sum, over objectives, of the losses of
    all targets of the effective batch / their number (`num_items_in_batch`: one denominator an objective, over all
    micro-batches and processes). `stopping` ends training early. `on_save` of `callbacks` is called when a checkpoint
    is sealed and the older ones are rotated; `Trainer` itself neither pushes nor rotates.

    A step whose gradients overflow in fp16 is skipped: weights and learning rate stay, the loss scale is lowered, and
    the step is counted in `skipped_steps`. It is a step of `max_steps` like any other, and its batch is consumed.
    """

    saved_max_length: int | None = None  # `model_max_length` of the saved tokenizer; None: the model's positions
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
        self._layout = checkpoint.layout(args)  # before Trainer fills in a DeepSpeed configuration
        self.stopping, self.throughput = stopping or Stopping(), Throughput(args)
        own = [self.stopping, self.throughput, LogFile(self.logged_beside), *callbacks, Progress()]
        of_trainer = copy.copy(args)
        vars(of_trainer).update(save_total_limit=None)  # Trainer would rotate before a checkpoint is sealed
        with library_errors():
            super().__init__(args=of_trainer, callbacks=own, **kwargs)
        self.remove_callback(PrinterCallback if self.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
        self.fingerprint, self.objectives, self.save_total_limit = fingerprint, objectives, args.save_total_limit
        self.left_out: tuple[str, ...] = ()  # name prefixes of weights that are not saved
        # (objectives,): this process's losses of the step, and of the `_steps` since the last log line
        self._step_losses, self._losses = torch.zeros(2, len(objectives), device=self.args.device)
        self._steps = 0
        self._start_s, self._end_s = time.monotonic(), None  # of training
        self.stopping.trainer, resumed = self, resumed or {}
        self.resumes: int = resumed.get("resumes", 0) + 1 if resumed else 0
        self._first_step: int = resumed.get("step", 0)
        self._earlier_s: float = resumed.get("train_seconds", 0.0)
        self._skipped_in_a_row: int = resumed.get("skipped_in_a_row", 0)
        self.skipped_steps: int = resumed.get("skipped_steps", 0)
        self.stopping.recent_losses.extend(resumed.get("recent_losses", []))

    # For subclasses to extend

    def count_consumed(self) -> None:
        """Add up the tokens of all processes since the last call; called on all ranks."""

    def recipe_state(self) -> dict[str, Any]:
        """`recipe_state.json` of a checkpoint, and so `resumed`."""
        return {
            "version": checkpoint.STATE_VERSION,
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
        """The trainer's fields of the run record; called on all ranks."""
        hashes = checkpoint.state_hashes(self, self.model_folder)
        return {"fingerprint": self.fingerprint, "skipped_steps": self.skipped_steps, "state_digests": hashes}

    @property
    def model_folder(self) -> Path:
        """The folder of the finished run's weights."""
        return Path(self.args.output_dir)

    def logged_beside(self) -> dict[str, Any]:
        """Values of a step's log entry that are no metrics."""
        return {}

    def diverged(self, what: str) -> RunError:
        """The error of a run that is lost to numbers that are not finite; subclasses name the data."""
        return RunError(
            f"{what}; nothing of it was saved. Lower learning_rate={self.args.learning_rate} or warm up longer "
            f"(warmup_steps={self.args.warmup_steps:g}). {self.last_good}"
        )

    # Loss

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """(the micro-batches of a step, (objectives,): the number of targets of each objective over all processes)."""
        with self.throughput.waiting():
            batches = list(itertools.islice(epoch_iterator, num_batches))
        if not batches:  # the data have ended, which Trainer warns of
            return batches, None
        counts = [sum((batch[column] != IGNORED).sum() for batch in batches) for column in self.objectives.values()]
        return batches, self.sum_over_processes(torch.stack(counts).to(device))

    def loss_of_batch(self, losses: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        """(): a micro-batch's share of the loss of the step, from its sums of losses (objectives,).

        An objective without a target in the whole batch has a sum of 0, divided by 1. Gradients of processes are
        averaged and the denominators are of all processes, so the sum is multiplied by their number.
        """
        losses = losses * self.accelerator.num_processes / num_items_in_batch.clamp(min=1)
        self._step_losses += losses.detach()
        return losses.sum()

    def log(self, logs, start_time=None):
        """As `Trainer`, with the mean losses of the steps since the last line, without those that fp16 skipped with a
        loss that is not finite; no line where all were skipped."""
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
        # GradScaler calls a fused optimizer at an overflow too, as its kernel skips the step, and accelerate takes that
        # for a step of the schedule (accelerate #4242); without this attribute GradScaler does not call it
        if self.accelerator.scaler is not None:
            optimizer._step_supports_amp_scaling = False
        return optimizer

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of fp16; None in another precision."""
        if not self.args.fp16:
            return None
        return self.optimizer.optimizer.loss_scale if self.is_deepspeed_enabled else self.accelerator.scaler.get_scale()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last optimizer step was skipped for its gradients; the same on all ranks."""
        return bool(self.accelerator.optimizer_step_was_skipped)

    @property
    def overflowed(self) -> bool:
        """Whether fp16 skipped the last step, which has a loss scale to lower."""
        return self.args.fp16 and self.step_was_skipped

    def step_losses(self) -> torch.Tensor:
        """(objectives,): this process's share of the loss of the last step x number of processes; sets it to 0."""
        losses, self._step_losses = self._step_losses, torch.zeros_like(self._step_losses)
        return losses

    def count_step(self, losses: torch.Tensor, is_finite: bool) -> None:
        """Count the last step in the logged mean and, where its fp16 gradients overflowed, in `skipped_steps`; on all
        ranks. Raises `RunError` for overflow without end."""
        if is_finite or not self.overflowed:
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
            raise self.diverged(
                f"fp16 gradients overflowed in {self._skipped_in_a_row} steps in a row, up to step "
                f"{self.state.global_step}: train in bf16 (--bf16 true --fp16 false)"
            )

    def _load_scaler(self, checkpoint):
        if self.accelerator.scaler is not None:  # None for a run that began in fp16 and is resumed in bf16 or fp32
            super()._load_scaler(checkpoint)

    # Training

    def get_eval_dataloader(self, eval_dataset=None):
        return leave_signals_to_trainer(super().get_eval_dataloader(eval_dataset))

    def train(self, *args, **kwargs):
        self._start_s = time.monotonic()
        with self.stopping.training(), library_errors(lambda: self.state.global_step <= self._first_step):
            output = super().train(*args, **kwargs)
        self._end_s = time.monotonic()
        return output

    def _run_epoch(self, **kwargs):
        if self.state.global_step >= self.state.max_steps:  # killed between the last step and the record
            self.control.should_training_stop = True
        else:
            super()._run_epoch(**kwargs)

    @property
    def train_seconds(self) -> float:
        """Of this start and of all starts before it."""
        return self._earlier_s + (self._end_s or time.monotonic()) - self._start_s

    # Checkpoints

    @property
    def last_good(self) -> str:
        return checkpoint.last_good(self.args.output_dir)

    def _save_checkpoint(self, model, trial):
        """`Trainer`'s checkpoint, then the recipe's state and, last, the manifest; then rotation."""
        self.count_consumed()  # since the last log line
        bad = sum((~torch.isfinite(p)).any().float() for p in self.model.parameters() if p.numel())
        if self.sum_over_processes(torch.as_tensor(bad, device=self.args.device)):
            raise self.diverged(f"the weights after step {self.state.global_step} are not finite")
        folder = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed as it wrote it
        self.accelerator.wait_for_everyone()
        with self.writing(folder, folder.name):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # for the files of all ranks
            hashes = checkpoint.state_hashes(self, folder)
            if self.args.should_save:
                durable.write_json(folder / checkpoint.STATE_NAME, {**self.recipe_state(), "digests": hashes})
                durable.seal(folder)
        if self.args.should_save:
            checkpoint.rotate(self.args.output_dir, self.save_total_limit)

    def save_model(self, output_dir=None, _internal_call=False):
        """Write the finished model atomically; as an internal call, the model of a checkpoint."""
        folder = Path(output_dir or self.args.output_dir)
        if _internal_call:
            self.write_model(folder)
            return
        aside = durable.aside_of(folder / "model")
        with self.writing(aside, "the model"):
            self.write_model(aside)
            if self.args.should_save:
                durable.move_files_into_place(aside, folder)

    def write_model(self, folder: Path) -> None:
        """Write weights (fp32), config and tokenizer into a new folder; every rank must call."""
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
        """Load with the model's own class, which may have further weight files."""
        stored = type(self.model).from_pretrained(resume_from_checkpoint, dtype=torch.float32)
        self.model.load_state_dict(stored.state_dict())

    def _master_weights(self) -> dict[str, torch.Tensor]:
        """DeepSpeed's fp32 master weights, whole, on the first rank; every rank must call. The model itself has them in
        half precision under bf16 and fp16, and in shards under ZeRO 3."""
        from deepspeed.utils import safe_get_full_fp32_param

        master = {}
        for name, parameter in self.model.named_parameters():  # a tied parameter comes once
            whole = safe_get_full_fp32_param(parameter)
            if self.args.should_save:
                master[name] = whole.cpu()
        return master

    @contextlib.contextmanager
    def writing(self, folder: Path, what: str) -> Iterator[None]:
        """Where a file of `folder` cannot be written, delete the folder and raise `RunError`. The other ranks end as
        for any rank that fails: by the launcher, or in the next collective."""
        try:
            yield
        except Exception as error:
            if not is_write_failure(error):
                raise
            if self.args.should_save:  # makes room for the user
                shutil.rmtree(folder, ignore_errors=True)
            raise RunError(
                f"{what} could not be written to {self.args.output_dir}: {first_line(error)}. {self.last_good} Make "
                f"room. {continue_with()}"
            ) from error


def _log_line(entry: dict[str, Any]) -> str:
    return json.dumps(finite(entry)) + "\n"


def is_write_failure(error: Exception) -> bool:
    return isinstance(error, (OSError, SafetensorError)) or says_no_room(error)
