"""`Trainer` for runs that are killed: checkpoints that are whole or absent, the gradient of the whole effective batch
for every objective, and errors that say what is safe. `trainer_internals` lists what it builds on."""

import functools
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK, TRAINING_ARGS_NAME
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import rotate_checkpoints

from roberta_recipe import durable
from roberta_recipe.data.masking import IGNORED
from roberta_recipe.errors import (
    RunError,
    Stopped,
    first_line,
    lost_message,
    says_no_room,
)
from roberta_recipe.hardware import is_out_of_memory, lost_process
from roberta_recipe.log import logger
from roberta_recipe.record import LOG_NAME, finite
from roberta_recipe.started import continue_with
from roberta_recipe.training import attention, digests, environment, optimization, optimizers, weights
from roberta_recipe.training.checkpoint import (
    PARTIAL,
    STATE_NAME,
    STATE_VERSION,
    announce_layout,
    layout,
    newest_first,
)
from roberta_recipe.training.progress import Progress
from roberta_recipe.training.step_watch import StepWatch, outlive_a_stop

# of a group of weights: which they are, and which kernel steps them
_NOT_OF_THE_RATE = ("params", "foreach", "fused", "capturable", "differentiable")
MAX_SKIPPED_STEPS = 32  # in a row: from 2^16 the loss scale is at 1 after 16


class StepBoundaries(TrainerCallback):
    """Tells its trainer where training, and each optimizer step of it, begins and ends."""

    def __init__(self, trainer: "DurableTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)  # those of this start, and not the checkpoint's
        self.trainer.begin_log()

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.begin_step()

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.end_step()
        if state.global_step >= state.max_steps and args.logging_strategy != "no":
            control.should_log = True  # the end of the curve, and of a short run all of it


class DurableTrainer(Trainer):
    """`Trainer` whose checkpoints are whole or absent, and that is resumed from the newest whole checkpoint as if it
    had not been interrupted: each has a `recipe_state.json`, whose content at the start is `resumed`.

    `fingerprint` says what must not change between two starts of a run. `objectives` maps each objective to the batch
    column of its targets (-100: no target). A step's loss is the sum, over objectives, of the losses of all targets of
    the effective batch / their number (`num_items_in_batch`: one denominator an objective, over all micro-batches and
    processes). A callback's `on_save` is called when a checkpoint is whole; nothing here touches the Hub, whatever
    `args.push_to_hub` says. `watch` ends training early.

    A step whose gradients overflow in fp16 is skipped: weights and learning rate stay, the loss scale is lowered, and
    the step is counted in `skipped_steps`. It is a step of `max_steps` like any other, and its batch is consumed.
    """

    memory_advice = ""  # further advice for the out-of-memory message
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
        watch: StepWatch | None = None,
        **kwargs,
    ):
        # Trainer's own push comes before the checkpoint is whole, and holds a pickle of its arguments, token and all
        args.push_to_hub = False
        self._layout = layout(args)  # before Trainer fills in what a DeepSpeed configuration leaves open
        super().__init__(args=args, **kwargs)
        self.fingerprint, self.objectives, resumed = fingerprint, objectives, resumed or {}
        self.left_out: tuple[str, ...] = ()  # of the weights that are saved: how their names begin
        self.resumes: int = resumed.get("resumes", 0) + 1 if resumed else 0
        self._first_step: int = resumed.get("step", 0)
        # losses since the last log line: of this process, by objective; and what the checkpoint had of them
        self._objective_losses = torch.zeros(len(objectives), device=self.args.device)
        self._logged_step: int = resumed.get("logged_step", 0)
        self._losses_before: list[list[float]] = resumed.get("losses", [])
        self._earlier_s: float = resumed.get("train_seconds", 0.0)
        self._start_s = time.monotonic()
        self.skipped_steps: int = resumed.get("skipped_steps", 0)  # by fp16, as gradients overflowed
        self._skipped_in_a_row: int = resumed.get("skipped_in_a_row", 0)
        self._losses_at_begin: tuple[torch.Tensor, torch.Tensor] | None = None  # of the step, in fp16
        # of a step: losses that are not finite; the loss, its share of this process x number of processes
        self.not_finite, self.step_loss = torch.zeros(2, 1, device=self.args.device)
        self.watch, self._recent_losses = watch or StepWatch(), resumed.get("recent_losses", [])
        self.watch.trainer = self
        self.add_callback(StepBoundaries(self))
        self.add_callback(self.watch)
        self.remove_callback(PrinterCallback if self.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
        self.add_callback(Progress())
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
            "logged_step": self._logged_step,
            "train_seconds": self.train_seconds,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
            "recent_losses": list(self.watch.recent_losses),
        }

    def record(self) -> dict[str, Any]:
        """Fields of the run record that this trainer knows; called in all processes."""
        digests = {**self._weights_digest(self.model_folder), **self._optimizer_digests()}
        return {"fingerprint": self.fingerprint, "skipped_steps": self.skipped_steps, "state_digests": digests}

    @property
    def model_folder(self) -> Path:
        """Where the finished run's weights are."""
        return Path(self.args.output_dir)

    def logged_beside(self, logs: dict[str, float]) -> dict[str, Any]:
        """What an entry of the log has beside the metrics that trackers draw."""
        return {}

    # Loss

    def _get_num_items_in_batch(self, batch_samples, device):
        """(objectives,): the targets of each objective in all micro-batches of a step, in all processes."""
        if not batch_samples:  # the data have ended, which Trainer warns of
            return None
        counts = [
            sum((batch[column] != IGNORED).sum() for batch in batch_samples) for column in self.objectives.values()
        ]
        return self.sum_over_processes(torch.stack(counts).to(device))

    def loss_of_batch(self, losses: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        """(): what a micro-batch adds to the loss of the step, of its sums of losses (objectives,).

        An objective without a target in the whole batch has a sum of 0, divided by 1. Gradients of processes are
        averaged and the denominators are of all processes, so the sum is multiplied by their number.
        """
        losses = losses * self.accelerator.num_processes / num_items_in_batch.clamp(min=1)
        self._objective_losses += losses.detach()
        return losses.sum()

    def log(self, logs, start_time=None):
        if "loss" in logs:
            means = self.sum_over_processes(self._objective_losses.clone())
            means /= self.args.world_size * max(self.state.global_step - self._logged_step, 1)
            if len(self.objectives) > 1:
                logs |= {f"{name}_loss": mean for name, mean in zip(self.objectives, means.tolist(), strict=True)}
            self._objective_losses.zero_()
            self._logged_step = self.state.global_step
            if self.args.fp16:
                logs |= {"skipped_steps": self.skipped_steps, "loss_scale": self.loss_scale}
            if self.step_was_skipped:  # infinite, or the norm of another step
                logs.pop("grad_norm", None)
        super().log(logs, start_time)
        self.state.log_history[-1] |= self.logged_beside(logs)
        if self.args.should_save:
            with open(self._log_path, "a", encoding="utf-8") as file:
                file.write(_log_line(self.state.log_history[-1]))

    def begin_log(self) -> None:
        """Write the log of the steps before the checkpoint anew: what was logged after it will be logged again."""
        if self.args.should_save:
            durable.write_text(self._log_path, "".join(map(_log_line, self.state.log_history)))

    @property
    def _log_path(self) -> Path:
        return Path(self.args.output_dir, LOG_NAME)

    def sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, "sum")

    # Optimizer, and overflow in fp16

    def create_optimizer(self, model=None):
        if self.args.optim in optimizers.OWN:
            model = self.model if model is None else model
            self.optimizer = optimization.make(self.args, model, self.get_decay_parameter_names(model))
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

    def begin_step(self) -> None:
        """Before the first micro-batch of an optimizer step."""
        if self.args.fp16:
            self._losses_at_begin = self._tr_loss.clone(), self._objective_losses.clone()

    def end_step(self) -> None:
        """After each optimizer step, in all processes alike: count the steps that fp16 skipped, leave out of the logged
        mean a loss that is not finite, and raise `RunError` for overflow without end."""
        if not (self.args.fp16 and self.step_was_skipped):
            self._skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        if self.sum_over_processes((~torch.isfinite(self._tr_loss)).float()):
            self._tr_loss, self._objective_losses = self._losses_at_begin
            # the mean is over the other steps; where it is of this step alone, nothing is logged
            self._globalstep_last_logged += 1
            self._logged_step += 1
        logger.info(
            f"Step {self.state.global_step}: fp16 gradients overflowed, so weights and learning rate stay as they are "
            f"({self.skipped_steps} skipped so far); the loss scale is now {self.loss_scale:,g}"
        )
        if self._skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise self._overflow_error(f"in {self._skipped_in_a_row} steps in a row, up to step")

    def _overflow_error(self, where: str) -> RunError:
        return RunError(
            f"fp16 gradients overflowed {where} {self.state.global_step}: train in bf16 (--bf16 true --fp16 false), "
            f"lower {self._rate()} or warm up longer, {self.change_advice}. "
            f"{self._last_good()}"
        )

    def _issue_warnings_after_load(self, load_result):
        """A checkpoint is whole (`checkpoint.find`): what it has not are tied weights, which are stored once."""
        self.model.tie_weights()

    def _load_scaler(self, checkpoint):
        if self.accelerator.scaler is not None:  # None for a run that began in fp16 and is resumed in bf16 or fp32
            super()._load_scaler(checkpoint)

    # Data

    def get_eval_dataloader(self, eval_dataset=None):
        return self.spared(super().get_eval_dataloader(eval_dataset))

    def spared(self, loader: DataLoader) -> DataLoader:
        """`loader`, whose workers leave a stop to this process."""
        own = getattr(loader, "base_dataloader", loader)  # of accelerate's, what starts the workers
        own.worker_init_fn = functools.partial(outlive_a_stop, self.watch.told, own.worker_init_fn)
        return loader

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

    def check_step(self, not_finite: bool) -> None:
        """After each optimizer step, in all processes alike: raise `RunError` where a loss of it was not finite, or in
        bf16 and fp32 the gradient, as DeepSpeed would skip the step and train on."""
        if not self.overflowed and (not_finite or self.step_was_skipped):
            kind = "loss" if not_finite else "gradient"
            raise self.diverged(f"the {kind} of step {self.state.global_step} is not finite")

    def diverged(self, what: str) -> RunError:
        """The error of a run that is lost."""
        if attention.leaves_cudnn_out(self.args.device):
            what += f" ({attention.CUDNN_DISABLED}, so that is not the cause)"
        return RunError(
            f"{what}; nothing of it was saved. Lower {self._rate()} or warm up longer "
            f"(warmup_steps={self.args.warmup_steps:g}), {self.change_advice}. {self._last_good()}"
        )

    def _rate(self) -> str:
        """The rate of the run, and of Muon's matrices, by the names of the flags."""
        of_matrices = " and optim_args' lr" if self.args.optim == "muon" else ""
        return f"learning_rate={self.args.learning_rate}{of_matrices}"

    def end_if_stopped(self, note: str = "") -> None:
        """After `train`: raise `Stopped` where a signal ended it; the step is saved, unless a spike ended it too."""
        if self.watch.stopped_by in Stopped.EXIT_CODES:
            step = f"step {self.state.global_step:,} of {self.state.max_steps:,}"
            what = "is saved in" if self.watch.spike is None else "is a spike, and returned from: the run is in"
            self._stop(self.watch.stopped_by, f"{step} {what} {self.args.output_dir}{note}")

    def end_if_told(self) -> None:
        """After a run is finished: raise `Stopped` where a signal came after its last step."""
        if by := self.watch.told_since():
            self._stop(by, f"the run in {self.args.output_dir} is finished")

    def _stop(self, by: str, what: str) -> NoReturn:
        environment.leave_process_group()
        raise Stopped(f"stopped by {by}: {what}. {continue_with()}", by)

    def train(self, *args, **kwargs):
        self._start_s = time.monotonic()
        self.watch.begin(self._recent_losses)
        try:
            return super().train(*args, **kwargs)
        except KeyboardInterrupt:  # the second
            raise Stopped(
                f"ended at once, in step {self.state.global_step + 1:,}. {self._last_good()} {continue_with()}"
            ) from None
        except Exception as error:
            if "loss scale already at minimum" in str(error):  # DeepSpeed's, a plain Exception
                raise self._overflow_error("with the loss scale at its floor, after step") from error
            if lost := lost_process(error):
                raise RunError(f"{lost_message(lost, error)} {self._last_good()} {continue_with()}") from error
            if not is_out_of_memory(error):
                raise
            micro = self.args.per_device_train_batch_size
            raise RunError(
                f"out of memory at step {self.state.global_step + 1} ({first_line(error)}): lower "
                f"per_device_train_batch_size={micro}{self.memory_advice}; the global batch stays what it is. "
                f"{self._last_good()}"
            ) from error
        finally:
            self.watch.end()

    def _run_epoch(self, *, model, epoch, train_dataloader, **kwargs):
        if self.state.global_step >= self.state.max_steps:  # killed between the last step and the record
            self.control.should_training_stop = True
            return
        if self._losses_before and self.state.global_step == self._first_step:
            # the mean that is logged next counts the steps before the checkpoint too
            before = torch.tensor(self._losses_before, device=self.args.device)  # (processes, 1 + objectives)
            same = len(before) == self.args.world_size
            before = before[self.args.process_index] if same else before.mean(0)
            self._tr_loss += before[0]
            self._objective_losses += before[1:]
            self._globalstep_last_logged = self._logged_step
        super()._run_epoch(model=model, epoch=epoch, train_dataloader=train_dataloader, **kwargs)

    @property
    def train_seconds(self) -> float:
        """Of this start and of all starts before it."""
        return self._earlier_s + time.monotonic() - self._start_s

    # Checkpoints

    def _get_output_dir(self, trial):
        return os.path.join(self.args.output_dir, PARTIAL)

    def _save_checkpoint(self, model, trial):
        """Write aside, with a manifest, sync, rename: a crash or a full disk leaves the last complete checkpoint."""
        self.count_consumed()  # what was consumed after the last log line belongs to the checkpoint
        losses = torch.cat([self._tr_loss.detach().reshape(1), self._objective_losses])[None]
        losses = self.accelerator.gather(losses).tolist()  # (processes, 1 + objectives)
        name = f"checkpoint-{self.state.global_step}"
        aside, target = Path(self.args.output_dir, PARTIAL, name), Path(self.args.output_dir, name)
        self._refuse_bad_weights()
        if self.args.should_save:
            shutil.rmtree(aside.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        failure = None
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:
            failure = write_failure(error)
        self._end_writing(failure, name)
        digests = self._optimizer_digests()
        try:
            if self.args.should_save:
                digests |= self._weights_digest(aside)
                durable.write_json(aside / STATE_NAME, {**self.recipe_state(), "losses": losses, "digests": digests})
                durable.move_into_place(aside, target, digests=digests)
        except OSError as error:
            failure = error
        self._end_writing(failure, name)
        if self.args.should_save:
            shutil.rmtree(aside.parent, ignore_errors=True)
            rotate_checkpoints(self.args.output_dir, self.args.save_total_limit, use_mtime=True)

    def _weights_digest(self, folder: Path) -> dict[str, str]:
        """Of the weights that were saved in `folder`; on the first process, empty elsewhere."""
        return {"weights": digests.of_weights(folder)} if self.args.should_save else {}

    def _optimizer_digests(self) -> dict[str, str]:
        """Of the optimizer's state, which under DeepSpeed is that of all processes in turn, and of the scheduler with
        the rate and the other settings of each group of weights; every process must call."""
        if self.is_deepspeed_enabled:
            state = gather_object([digests.of_state(self.optimizer.state_dict())])
        else:
            state = self.optimizer.state_dict()["state"] if self.args.should_save else None
        groups = [
            {name: value for name, value in group.items() if name not in _NOT_OF_THE_RATE}
            for group in self.optimizer.param_groups
        ]
        scheduler = {"scheduler": self.lr_scheduler.state_dict(), "groups": groups}
        return {"optimizer": digests.of_state(state), "scheduler": digests.of_state(scheduler)}

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

    def _refuse_bad_weights(self) -> None:
        """Raise `RunError` where a weight is not finite, in all processes."""
        bad = sum((~torch.isfinite(p)).any().float() for p in self.model.parameters() if p.numel())
        if self.sum_over_processes(torch.as_tensor(bad, device=self.args.device)):
            raise RunError(
                f"the weights are not finite after step {self.state.global_step}, so no checkpoint of them is written. "
                f"Lower {self._rate()} or warm up longer. {self._last_good()}"
            )

    def _save(self, output_dir=None, state_dict=None):
        if self.is_deepspeed_enabled:
            state_dict = self._master_weights()
        if self.left_out:
            state_dict = self.model.state_dict() if state_dict is None else state_dict
            state_dict = {name: weight for name, weight in state_dict.items() if not name.startswith(self.left_out)}
        with weights.fitted(self.processing_class, self.model.config, self.saved_max_length):
            super()._save(output_dir, state_dict)
        if self.is_deepspeed_enabled and self.args.should_save:
            self.model.config.dtype = "float32"  # as in the file; `save_pretrained` wrote the type in memory
            self.model.config.save_pretrained(output_dir or self.args.output_dir)
        if self.args.should_save:  # training_args.bin is a pickle; preset.yaml has the same values
            Path(output_dir or self.args.output_dir, TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def save_model(self, output_dir=None, _internal_call=False):
        if _internal_call:  # within a checkpoint, whose writing is watched as a whole
            return super().save_model(output_dir, _internal_call)
        folder, failure = output_dir or self.args.output_dir, None
        aside = Path(self.args.output_dir, PARTIAL, "model")
        if self.args.should_save:
            shutil.rmtree(aside.parent, ignore_errors=True)
        try:
            super().save_model(str(aside), _internal_call=True)
            if self.args.should_save:
                durable.move_files_into_place(aside, folder)
                shutil.rmtree(aside.parent, ignore_errors=True)
        except Exception as error:
            failure = write_failure(error)
        self._end_writing(failure, "the model")

    def _end_writing(self, failure: Exception | None, what: str) -> None:
        """Raise `RunError` in all processes where writing failed in one of them (under DeepSpeed, whose own writing
        waits for all, in that process alone: the launcher ends the others)."""
        failed = torch.tensor(float(failure is not None), device=self.args.device)
        if not (failure and self.is_deepspeed_enabled):
            failed = self.sum_over_processes(failed)
        if failed:
            if self.args.should_save:  # makes room for the user
                shutil.rmtree(Path(self.args.output_dir, PARTIAL), ignore_errors=True)
            raise RunError(
                f"{what} could not be written to {self.args.output_dir}: "
                f"{first_line(failure) if failure else 'another process says why'}. {self._last_good()} Make "
                f"room. {continue_with()}"
            ) from failure

    def _last_good(self) -> str:
        checkpoints = newest_first(self.args.output_dir)
        return f"The last complete checkpoint is {checkpoints[0]}." if checkpoints else "There is no checkpoint yet."


def _log_line(entry: dict[str, Any]) -> str:
    return json.dumps(finite(entry)) + "\n"


def write_failure(error: Exception) -> Exception:
    """`error` where it says that a file could not be written; any other exception is raised again."""
    if not (isinstance(error, (OSError, SafetensorError)) or says_no_room(error)):
        raise error
    return error
