"""Fault-tolerant `Trainer`: sealed checkpoints, exact resuming, a loss that is normalized over the whole effective
batch. `tests/test_trainer_internals.py` lists the private parts of `Trainer` that it depends on."""

import contextlib
import copy
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from roberta_recipe import durable
from roberta_recipe.data import IGNORED
from roberta_recipe.errors import InputError, RunError, first_line, is_disk_full, library_errors
from roberta_recipe.launcher import resume_hint
from roberta_recipe.log import listed, logger
from roberta_recipe.model import weights
from roberta_recipe.record import LOG_NAME, finite
from roberta_recipe.training import checkpoint, optimizers
from roberta_recipe.training.monitor import Progress, Throughput
from roberta_recipe.training.stopping import Stopping

MAX_SKIPPED_STEPS = 32  # in a row: 16 halvings take the loss scale from 2^16 to 1


class LogFile(TrainerCallback):
    """Writes `log.jsonl`: one line per log entry; training entries also have the values of `extras()`, which trackers
    do not get. On resuming, the file is rewritten from the checkpoint's entries.

    Each saved step is logged before it is saved, and so is the last step: a checkpoint holds no running mean.
    """

    def __init__(self, extras: Callable[[], dict[str, Any]]):
        self.extras = extras

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)  # intervals of this start's flags, not the checkpoint's
        if args.should_save:
            durable.write_text(Path(args.output_dir, LOG_NAME), "".join(map(_log_line, state.log_history)))

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_save or state.global_step >= state.max_steps:
            control.should_log = args.logging_strategy != "no"

    def on_log(self, args, state, control, logs=None, **kwargs):
        state.log_history[-1] |= self.extras() if "loss" in logs else {}
        if args.should_save:
            with open(Path(args.output_dir, LOG_NAME), "a", encoding="utf-8") as file:
                file.write(_log_line(state.log_history[-1]))


class DurableTrainer(Trainer):
    """`Trainer` with sealed checkpoints and bit-identical resuming; `resumed` is the `recipe_state.json` of the
    checkpoint, None for a new run.

    `fingerprint`: the settings that must not change between two starts. `label_columns`: objective -> batch column of
    its targets (-100: no target). A step's loss is the sum over objectives of (sum of losses) / (number of targets) in
    the effective batch; `num_items_in_batch` has one denominator per objective, over all micro-batches and processes.
    `stopping` ends training early. `on_save` of `callbacks` is called after a checkpoint is sealed and older ones are
    rotated; `Trainer` itself neither pushes nor rotates. `steps_after`: as in `Progress`.

    If fp16 gradients overflow, the step is skipped: weights and learning rate stay, the loss scale is lowered. The step
    counts toward `max_steps` and in `skipped_steps`, and its batch is consumed.
    """

    saved_max_length: int | None = None  # `model_max_length` of the saved tokenizer; None: the model's maximum
    loss_is_scaled_for_ga = True  # `compute_loss` normalizes over accumulation steps itself

    def __init__(
        self,
        *,
        args: TrainingArguments,
        fingerprint: dict[str, Any],
        label_columns: dict[str, str],
        resumed: dict[str, Any] | None = None,
        stopping: Stopping | None = None,
        run_name: str | None = None,
        callbacks: Iterable[TrainerCallback] = (),
        steps_after: int = 0,
        **kwargs,
    ):
        self._layout = checkpoint.layout(args)  # before Trainer fills in a DeepSpeed configuration
        self.stopping, self.throughput = stopping or Stopping(), Throughput(args)
        # in this order: Stopping or a callback asks for a checkpoint, LogFile logs its step, Progress prints last
        own = [self.stopping, self.throughput, *callbacks, LogFile(self.log_extras), Progress(steps_after)]
        trainer_args = copy.copy(args)  # `self.args`
        name = run_name or args.run_name or Path(args.output_dir).name  # in trackers
        vars(trainer_args).update(save_total_limit=None, run_name=name)  # Trainer would rotate before the seal
        with library_errors():
            super().__init__(args=trainer_args, callbacks=own, **kwargs)
        if self.args.torch_compile and not self.args.tf32:  # TrainingArguments and accelerate have enabled it
            torch.backends.fp32_precision = "ieee"
            torch.backends.cuda.matmul.allow_tf32 = False
        self.remove_callback(PrinterCallback if self.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
        self.fingerprint, self.label_columns, self.save_total_limit = fingerprint, label_columns, args.save_total_limit
        # (objectives,): this process's losses of the current step, and of the `_steps` since the last log line
        self._step_losses, self._losses = torch.zeros(2, len(label_columns), device=self.args.device)
        self._steps = 0
        self._start_s, self._end_s = time.monotonic(), None  # of training
        self.stopping.trainer, self.resumed = self, resumed or {}
        self.resumes: int = self.resumed.get("resumes", -1) + 1
        self._first_step: int = self.resumed.get("step", 0)
        self._skipped_in_a_row: int = self.resumed.get("skipped_in_a_row", 0)
        self.skipped_steps: int = self.resumed.get("skipped_steps", 0)
        self.stopping.recent_losses.extend(self.resumed.get("recent_losses", []))

    # For subclasses to extend

    def count_consumed(self) -> None:
        """Add the tokens of all processes since the last call; called on all ranks."""

    def recipe_state(self) -> dict[str, Any]:
        """Content of a checkpoint's `recipe_state.json`."""
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
        measured = {"matrix_rate": self.throughput.matrix_rate, "skipped_steps": self.skipped_steps}
        return {"fingerprint": self.fingerprint, **measured, "state_digests": hashes}

    @property
    def model_folder(self) -> Path:
        """The folder of the finished run's weights."""
        return Path(self.args.output_dir)

    def log_extras(self) -> dict[str, Any]:
        """Values for `log.jsonl` other than metrics."""
        return {}

    def diverged(self, what: str) -> RunError:
        """The error for a loss, gradient or weight that is not finite; subclasses name the data."""
        return RunError(
            f"{what}; the step was not saved. Lower learning_rate={self.args.learning_rate} or use a longer warm-up "
            f"(warmup_steps={self.args.warmup_steps:g}). {self.checkpoint_hint}"
        )

    # Loss

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """(micro-batches of a step, (objectives,): number of targets of each objective over all processes)."""
        with self.throughput.timing("waited"):
            batches = list(itertools.islice(epoch_iterator, num_batches))
        if not batches:  # end of the data; Trainer warns
            return batches, None
        counts = [sum((batch[column] != IGNORED).sum() for batch in batches) for column in self.label_columns.values()]
        return batches, self.sum_over_processes(torch.stack(counts).to(device))

    def loss_of_batch(self, losses: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        """(): a micro-batch's part of the step's loss, from its sums of losses (objectives,).

        The factor `num_processes` compensates for the averaging of gradients over processes. An objective without
        targets in the effective batch has the loss 0.
        """
        losses = losses * self.accelerator.num_processes / num_items_in_batch.clamp(min=1)
        self._step_losses += losses.detach()
        return losses.sum()

    def log(self, logs, start_time=None):
        """`Trainer.log` with the mean losses since the last line. Steps that fp16 skipped with a non-finite loss do not
        count; without other steps, nothing is logged."""
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
                logs |= {f"{name}_loss": mean for name, mean in zip(self.label_columns, means, strict=True)}
            if self.args.fp16:
                logs |= {"skipped_steps": self.skipped_steps, "loss_scale": self.loss_scale}
            logs |= self.throughput.figures()
            if self.step_was_skipped:  # the norm is infinite, or of an earlier step
                logs.pop("grad_norm", None)
        super().log(logs, start_time)

    def sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, "sum")

    # Optimizer, and overflow in fp16

    def create_optimizer(self, model=None):
        if self.args.optim in optimizers.custom_names():
            model = self.model if model is None else model
            self.optimizer = optimizers.build(self.args, model, self.get_decay_parameter_names(model))
        optimizer = super().create_optimizer(model)
        # else GradScaler calls a fused optimizer on overflow too: its kernel skips the step, but accelerate advances
        # the schedule (accelerate #4242)
        if self.accelerator.scaler is not None:
            optimizer._step_supports_amp_scaling = False
        self.hyperparameters = optimizers.hyperparameters(optimizer)  # of the command line, not of a checkpoint
        return optimizer

    @property
    def loss_scale(self) -> float:
        """The loss scale of fp16."""
        return self.optimizer.optimizer.loss_scale if self.is_deepspeed_enabled else self.accelerator.scaler.get_scale()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last optimizer step was skipped because of its gradients; the same on all ranks."""
        return bool(self.accelerator.optimizer_step_was_skipped)

    def step_losses(self) -> torch.Tensor:
        """(objectives,): this process's part of the last step's loss x number of processes; resets it to 0."""
        losses, self._step_losses = self._step_losses, torch.zeros_like(self._step_losses)
        return losses

    def count_step(self, losses: torch.Tensor, is_finite: bool) -> bool:
        """Add the last step to the logged mean and, on fp16 overflow, to `skipped_steps`; called on all ranks. Returns
        whether it overflowed. Raises `RunError` after `MAX_SKIPPED_STEPS` overflows in a row."""
        overflowed = self.args.fp16 and self.step_was_skipped
        if is_finite or not overflowed:
            self._losses += losses
            self._steps += 1
        if not overflowed:
            self._skipped_in_a_row = 0
            return False
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
        return True

    def _load_scaler(self, checkpoint):
        if self.accelerator.scaler is not None:  # None if an fp16 run resumes in bf16 or fp32
            super()._load_scaler(checkpoint)

    # Training

    def train(self, *args, **kwargs):
        self._start_s = time.monotonic()
        with self.stopping.training(), library_errors(lambda: self.state.global_step <= self._first_step):
            output = super().train(*args, **kwargs)
        self._end_s = time.monotonic()
        for tracker in get_reporting_integration_callbacks(self.args.report_to):
            self.remove_callback(tracker)  # with a later log line, MLflow and Trackio would begin another run
        if run := getattr(sys.modules.get("wandb"), "run", None):
            run.finish()  # the next seed would log to it
        return output

    def _run_epoch(self, **kwargs):
        if self.state.global_step >= self.state.max_steps:  # killed between the last step and the record
            self.control.should_training_stop = True
        else:
            super()._run_epoch(**kwargs)

    @property
    def train_seconds(self) -> float:
        """Training time of this start and all earlier starts."""
        return self.resumed.get("train_seconds", 0.0) + (self._end_s or time.monotonic()) - self._start_s

    # Checkpoints

    @property
    def checkpoint_hint(self) -> str:
        """A sentence that names the newest checkpoint, for error messages."""
        last_step = max(self._first_step, self.state.global_step)
        checkpoints = checkpoint.newest_first(self.args.output_dir, last_step)
        return f"The last complete checkpoint is {checkpoints[0]}." if checkpoints else "There is no checkpoint yet."

    def _save_checkpoint(self, model, trial):
        """`Trainer`'s checkpoint, then the recipe's state and, last, the manifest; then rotation."""
        self.count_consumed()  # since the last log line
        bad = sum((~torch.isfinite(p)).any().float() for p in self.model.parameters() if p.numel())
        if self.sum_over_processes(torch.as_tensor(bad, device=self.args.device)):
            raise self.diverged(f"the weights after step {self.state.global_step} are not finite")
        folder = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)  # unfinished, of a killed start
        self.accelerator.wait_for_everyone()
        with self.writing(folder, folder.name):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # all ranks have written
            hashes = checkpoint.state_hashes(self, folder)
            if self.args.should_save:
                durable.write_json(folder / checkpoint.STATE_NAME, {**self.recipe_state(), "digests": hashes})
                durable.seal(folder)
        if self.args.should_save:
            checkpoint.rotate(self.args.output_dir, self.save_total_limit, self.state.global_step)

    def save_model(self, output_dir=None, _internal_call=False):
        """Write the finished model atomically, without heads of objectives; `_internal_call`: by `_save_checkpoint`."""
        folder = Path(output_dir or self.args.output_dir)
        if _internal_call:
            self.write_model(folder)
            return
        temporary = durable.temporary_path(folder / "model")
        with self.writing(temporary, "the model"):
            self.write_model(temporary, without=getattr(self.model, "heads_of_objectives", ()))
            if self.args.should_save:
                durable.move_files_into_place(temporary, folder)

    def write_model(self, folder: Path, without: tuple[str, ...] = ()) -> None:
        """Write weights (fp32, except the prefixes `without`), config and tokenizer into a new folder, on all ranks."""
        state = self._master_weights() if self.is_deepspeed_enabled else self.model.state_dict()
        if not self.args.should_save:
            return
        state = {name: weight for name, weight in state.items() if not name.startswith(without)}
        self.model.save_pretrained(folder, state_dict=state)
        if self.is_deepspeed_enabled:
            self.model.config.dtype = "float32"  # of the file; `save_pretrained` wrote the dtype in memory
            self.model.config.save_pretrained(folder)
        weights.for_saving(self.processing_class, self.model.config, self.saved_max_length).save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Load by `from_pretrained`: `Trainer` reports tied weights as missing."""
        folder, settings = resume_from_checkpoint, {"dtype": torch.float32, "output_loading_info": True}
        stored, info = type(self.model).from_pretrained(folder, **settings)
        shapes, wanted = ({name: of.shape for name, of in one.state_dict().items()} for one in (stored, self.model))
        other = {
            *info["missing_keys"],
            *info["unexpected_keys"],
            *(name for name, _ in shapes.items() ^ wanted.items()),
        }
        if other:
            raise InputError(
                f"{folder} has other weights than this model ({listed(sorted(other), 1)}): name another output_dir, "
                f"with --model_name_or_path {folder} to start from its weights"
            )
        self.model.load_state_dict(stored.state_dict())

    def _master_weights(self) -> dict[str, torch.Tensor]:
        """DeepSpeed's fp32 master weights, gathered on rank 0. Call it on all ranks. The model itself holds half
        precision under bf16 and fp16, and shards under ZeRO 3."""
        from deepspeed.utils import safe_get_full_fp32_param

        master = {}
        for name, parameter in self.model.named_parameters():  # yields a tied parameter once
            whole = safe_get_full_fp32_param(parameter)
            if self.args.should_save:
                master[name] = whole.cpu()
        return master

    @contextlib.contextmanager
    def writing(self, folder: Path, what: str) -> Iterator[None]:
        """On a failed write, delete `folder` and raise `RunError`. The other ranks end as after any failure of a rank:
        by the launcher, or in the next collective."""
        try:
            yield
        except Exception as error:
            if not (isinstance(error, OSError | SafetensorError) or is_disk_full(error)):
                raise
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise RunError(
                f"{what} could not be written to {self.args.output_dir}: {first_line(error)}. "
                f"{self.checkpoint_hint} Free disk space. {resume_hint()}"
            ) from error


def _log_line(entry: dict[str, Any]) -> str:
    return json.dumps(finite(entry)) + "\n"
