"""`Trainer` for runs that are killed: checkpoints that are whole or absent, and errors that say what is safe.

Built on these of `Trainer`'s internals in transformers 5.23: `_save_checkpoint` writes below `_get_output_dir()`,
`_run_epoch` is called once an epoch, `_tr_loss` holds the loss since the last log line.
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import rotate_checkpoints

from roberta_recipe import durable, hub
from roberta_recipe.args import RunError
from roberta_recipe.checkpoint import PARTIAL, STATE_NAME, layout, newest_first
from roberta_recipe.run import is_out_of_memory


class DurableTrainer(Trainer):
    """`Trainer` whose checkpoints are whole or absent, and that goes on from the newest whole one as if nothing had
    been: with a `recipe_state.json` in each, whose content at the start is `resumed`.

    `fingerprint` says what must not change between two starts of a run. A `publisher` pushes each checkpoint; nothing
    else here touches the Hub, whatever `push_to_hub` says.
    """

    memory_advice = ""  # beside a smaller micro-batch

    def __init__(
        self,
        *args,
        fingerprint: dict[str, Any],
        resumed: dict[str, Any] | None,
        publisher: hub.Publisher | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.publisher = publisher
        self.fingerprint, resumed = fingerprint, resumed or {}
        self.restarts: int = resumed.get("restarts", -1) + 1
        self._first_step: int = resumed.get("step", 0)
        self._loss_sums: list[float] = resumed.get("loss_sums", [])
        self._loss_sum_from: int = resumed.get("loss_sum_from", 0)
        self._earlier_s: float = resumed.get("train_seconds", 0.0)
        self._start_s = time.monotonic()

    def count_consumed(self) -> None:
        """Add up, over processes, what was consumed since the last call; called in all of them."""

    def recipe_state(self) -> dict[str, Any]:
        """What a checkpoint holds for `resumed`, beside `Trainer`'s own."""
        return {
            "step": self.state.global_step,
            "fingerprint": self.fingerprint,
            "layout": layout(self.args),
            "restarts": self.restarts,
            "loss_sum_from": self._globalstep_last_logged,
            "train_seconds": self.train_seconds,
        }

    def record(self) -> dict[str, Any]:
        """What a run record holds of this kind of run alone."""
        return {}

    def sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, "sum")

    def train(self, *args, **kwargs):
        self._start_s = time.monotonic()
        try:
            return super().train(*args, **kwargs)
        except Exception as error:
            if "loss scale already at minimum" in str(error):  # DeepSpeed's, a plain Exception
                raise RunError(
                    "fp16 gradients overflowed with the loss scale at its floor: train in bf16 (--bf16 true --fp16 "
                    f"false), or lower learning_rate={self.args.learning_rate}. {self._last_good()}"
                ) from error
            if not is_out_of_memory(error):
                raise
            micro = self.args.per_device_train_batch_size
            raise RunError(
                f"out of memory at step {self.state.global_step + 1} ({_first_line(error)}): lower "
                f"per_device_train_batch_size={micro}{self.memory_advice}; the global batch stays what it is. "
                f"{self._last_good()}"
            ) from error

    def _run_epoch(self, *, model, epoch, train_dataloader, **kwargs):
        if self.state.global_step >= self.state.max_steps:  # killed between the last step and the record
            self.control.should_training_stop = True
            return
        if self._loss_sums and self.state.global_step == self._first_step:  # the mean that is logged next goes on
            share = self._loss_sums[self.args.process_index % len(self._loss_sums)]
            same = len(self._loss_sums) == self.args.world_size
            self._tr_loss += share if same else sum(self._loss_sums) / len(self._loss_sums)
            self._globalstep_last_logged = self._loss_sum_from
        super()._run_epoch(model=model, epoch=epoch, train_dataloader=train_dataloader, **kwargs)

    @property
    def train_seconds(self) -> float:
        """Of this start and of those before it."""
        return self._earlier_s + time.monotonic() - self._start_s

    def _get_output_dir(self, trial):
        return os.path.join(self.args.output_dir, PARTIAL)

    def _save_checkpoint(self, model, trial):
        """Aside, with a manifest, durable, renamed: a crash or a full disk leaves the last complete one."""
        self.count_consumed()  # what is behind the last log line belongs to the checkpoint
        loss_sums = self.accelerator.gather(self._tr_loss.detach().reshape(1)).tolist()
        name = f"checkpoint-{self.state.global_step}"
        aside, place = Path(self.args.output_dir, PARTIAL, name), Path(self.args.output_dir, name)
        self._refuse_bad_weights()
        if self.args.should_save:
            shutil.rmtree(aside.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        failure = None
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            failure = error
        self._end_writing(failure, name)
        try:
            if self.args.should_save:
                durable.write_json(aside / STATE_NAME, {**self.recipe_state(), "loss_sums": loss_sums})
                durable.publish(aside, place)
        except OSError as error:
            failure = error
        self._end_writing(failure, name)
        if self.args.should_save:
            shutil.rmtree(aside.parent, ignore_errors=True)
            rotate_checkpoints(self.args.output_dir, self.args.save_total_limit, use_mtime=True)
        if self.publisher and not self.control.should_training_stop:  # what is pushed at the end has it all
            self.publisher.push_checkpoint(place, self.state.global_step, self.state.max_steps)

    def _master_weights(self) -> dict[str, torch.Tensor]:
        """The fp32 weights that DeepSpeed's optimizer steps, whole, on the first process; every process must call.

        The model itself holds them in half precision under bf16 and fp16, and in parts under ZeRO 3.
        """
        from deepspeed.utils import safe_get_full_fp32_param

        weights = {}
        for name, parameter in self.model.named_parameters():  # a tied one once
            whole = safe_get_full_fp32_param(parameter)
            if self.args.should_save:
                weights[name] = whole.cpu()
        return weights

    def _refuse_bad_weights(self) -> None:
        """Raise `RunError` where a weight is not finite, in all processes."""
        bad = sum((~torch.isfinite(p)).any().float() for p in self.model.parameters() if p.numel())
        if self.sum_over_processes(torch.as_tensor(bad, device=self.args.device)):
            raise RunError(
                f"the weights are not finite after step {self.state.global_step}, so no checkpoint of them is written. "
                f"Lower learning_rate={self.args.learning_rate} or warm up longer. {self._last_good()}"
            )

    def _save(self, output_dir=None, state_dict=None):
        if self.is_deepspeed_enabled:
            state_dict = self._master_weights()
        super()._save(output_dir, state_dict)
        if self.is_deepspeed_enabled and self.args.should_save:
            self.model.config.dtype = "float32"  # as in the file; what was written is that of the model in memory
            self.model.config.save_pretrained(output_dir or self.args.output_dir)
        if self.args.should_save:  # a pickle; preset.yaml says it all
            Path(output_dir or self.args.output_dir, TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def save_model(self, output_dir=None, _internal_call=False):
        if _internal_call:  # of a checkpoint, which has its own care
            return super().save_model(output_dir, _internal_call)
        failure = None
        try:
            super().save_model(output_dir, _internal_call=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            failure = error
        self._end_writing(failure, "the model")

    def init_hf_repo(self, token=None, private=None):
        """The publisher's, who asks before anything is trained."""

    def _push_from_checkpoint(self, checkpoint_folder):
        """The publisher's, when the checkpoint is whole; `Trainer` would add a pickle of its arguments, token and
        all."""

    def _end_writing(self, failure: Exception | None, what: str) -> None:
        """Raise `RunError` in all processes where writing failed in one (under DeepSpeed, whose own writing waits for
        all, in that one alone: the launcher ends the others)."""
        failed = torch.tensor(float(failure is not None), device=self.args.device)
        if not (failure and self.is_deepspeed_enabled):
            failed = self.sum_over_processes(failed)
        if failed:
            if self.args.should_save:  # room for whoever looks into it
                shutil.rmtree(Path(self.args.output_dir, PARTIAL), ignore_errors=True)
            raise RunError(
                f"{what} could not be written to {self.args.output_dir}: "
                f"{_first_line(failure) if failure else 'another process says why'}. {self._last_good()} Make room, "
                "then start the same command again"
            ) from failure

    def _last_good(self) -> str:
        there = newest_first(self.args.output_dir)
        return f"The last complete checkpoint is {there[0]}." if there else "There is no checkpoint yet."


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
