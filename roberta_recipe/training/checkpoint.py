"""Sealed checkpoints: writing, rotation, and the one to resume from (Table 9: 500K steps, seldom in one start)."""

import os
import shutil
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.log import counted, logger
from roberta_recipe.record import LOG_NAME
from roberta_recipe.settings import values_of
from roberta_recipe.training import digests, optimizers
from roberta_recipe.training.processes import from_first_process

if TYPE_CHECKING:
    from roberta_recipe.training.durable_trainer import DurableTrainer

STATE_NAME = "recipe_state.json"
STATE_VERSION = 4  # of its content
# what an optimizer's stored state depends on
OPTIMIZER_FLAGS = ("optim", "optim_args", "optim_target_modules")
# variables of the environment that choose kernels, and so the rounding
_KERNEL_VARIABLES = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "TORCHDYNAMO_DISABLE"),
    *("TORCH_COMPILE_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "FLASH_ATTENTION_DETERMINISTIC"),
)


class RecipeState(TypedDict):
    """`recipe_state.json` of a checkpoint."""

    version: int
    step: int
    fingerprint: dict[str, Any]
    layout: dict[str, Any]  # `layout`
    train_seconds: float  # of all starts
    skipped_steps: int
    skipped_in_a_row: int
    recent_losses: list[float]  # of the last steps (`stopping.is_spike`)
    digests: dict[str, str]  # as `RunRecord.state_digests`
    resumes: NotRequired[int]  # as in `RunRecord`
    position: NotRequired[int]  # of the next block in the order
    skipped_blocks: NotRequired[list[list[int]]]  # as in `PretrainingRecord`
    blocks_digest: NotRequired[int]  # as in `PretrainingRecord`, so is `digest`
    digest: NotRequired[int]
    computed_tokens: NotRequired[int]  # of a fine-tuning, with padding
    best_step: NotRequired[int | None]  # as in `FinetuneRecord`
    best_score: NotRequired[float | None]  # None: not finite


class SealedCheckpoints(TrainerCallback):
    """Seals each checkpoint that `Trainer` has written: adds the recipe state and, last, the manifest, without which a
    folder is no checkpoint; then keeps the newest `limit`. A step that is saved is logged first, so no running mean is
    part of a checkpoint."""

    def __init__(self, trainer: "DurableTrainer", limit: int | None):
        self.trainer, self.limit = trainer, limit

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= control.should_save and args.logging_strategy != "no"

    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self.trainer.end_writing(folder)  # by `Trainer`, in all processes
        with self.trainer.writing(folder):
            hashes = digests.of_training(self.trainer, folder)
            if args.should_save:
                durable.write_json(folder / STATE_NAME, {**self.trainer.recipe_state(), "digests": hashes})
                durable.seal(folder)
        if args.should_save:
            rotate(args.output_dir, self.limit)


def rotate(output_dir: str | Path, limit: int | None) -> None:
    """Delete the checkpoints before the newest `limit` (0, None: none), and unsealed folders of killed starts."""
    kept = newest_first(output_dir)[: limit or None]
    for path in all_folders(output_dir):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def all_folders(output_dir: str | Path) -> list[Path]:
    """The checkpoint folders of a run, newest first, unsealed ones too."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in Path(output_dir).glob("checkpoint-*")}
    return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: -int(steps[path]))


def newest_first(output_dir: str | Path) -> list[Path]:
    """The sealed checkpoints of a run, newest first, whether their files are intact or not."""
    return [path for path in all_folders(output_dir) if (path / durable.MANIFEST).is_file()]


def resume(
    args: TrainingArguments,
    fingerprint: dict[str, Any],
    despite_changes: bool | None = None,
    data: Container[str] = (),
) -> tuple[str | None, dict[str, Any] | None]:
    """The checkpoint to resume from (`find`) and its state (`load_state`); None and None for a run that begins."""
    path = find(args)
    return path, path and load_state(path, fingerprint, layout(args), despite_changes, data)


def find(args: TrainingArguments) -> str | None:
    """The checkpoint to resume from, the same in all processes; None for a run that begins.

    It is the newest checkpoint of the output folder that is as it was written; the folders that are passed over are
    named. Where the folder has no sealed checkpoint, it is `resume_from_checkpoint`. Raises `InputError` where there
    are sealed checkpoints and all are damaged.
    """
    return from_first_process(args, lambda: _find(args.output_dir, args.resume_from_checkpoint))


def _find(output_dir: str, explicit: str | None) -> str | None:
    checkpoints, folders = newest_first(output_dir), all_folders(output_dir)
    if folders and not checkpoints and not Path(output_dir, LOG_NAME).is_file():  # an unsealed one would be deleted
        raise InputError(
            f"output_dir={output_dir} has checkpoints of another program ({folders[0].name}): name another output_dir, "
            f"and for their weights --model_name_or_path {folders[0]}"
        )
    if explicit is not None and Path(explicit).resolve() in [path.resolve() for path in checkpoints[1:]]:
        raise InputError(
            f"resume_from_checkpoint={explicit}: {output_dir} has newer checkpoints ({checkpoints[0].name}); to go "
            "back, move them away"
        )
    for path in folders:
        if (fault := durable.fault(path)) is None:
            return str(path)
        logger.warning(f"Passed over {path}: {fault}")
    if checkpoints:
        names = ", ".join(path.name for path in checkpoints)
        raise InputError(
            f"no checkpoint in output_dir={output_dir} is whole (passed over: {names}); move them away to start from "
            "the beginning"
        )
    if explicit is None:
        return None
    if not Path(explicit).is_dir():
        raise InputError(f"resume_from_checkpoint={explicit} is no folder; {output_dir} has no checkpoint either")
    if fault := durable.fault(explicit):
        raise InputError(f"resume_from_checkpoint={explicit} cannot be used: {fault}")
    return explicit


def layout(args: TrainingArguments) -> dict[str, Any]:
    """How a run is spread out and computed, which may change between two starts of it: the rounding and the draws of
    dropout depend on it. Processes and ZeRO stage may not change under DeepSpeed."""
    plugin = args.deepspeed_plugin
    on_gpu, threads = args.device.type == "cuda", counted(torch.get_num_threads(), "thread")
    return {
        "processes": args.world_size,
        "zero_stage": plugin.zero_stage if plugin else None,
        "deepspeed_config": durable.fingerprint(plugin.deepspeed_config) if plugin else None,
        "device": torch.cuda.get_device_name() if on_gpu else f"{args.device.type}, {threads}",
        "torch": torch.__version__,
        **values_of(args, "layout"),
        **{name: os.environ[name] for name in _KERNEL_VARIABLES if name in os.environ},
    }


def announce_layout(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Say where the layout is another than that of the checkpoint."""
    if changed := durable.differences(before, now):
        logger.info(
            f"Resuming in another layout ({'; '.join(changed.values())}): the examples and the mathematics stay, the "
            "rounding and the draws of dropout do not"
        )


def read_state(checkpoint: str | Path) -> RecipeState:
    """The `recipe_state.json` of a checkpoint. Raises `InputError` where it cannot be read or is another version's."""
    path = os.path.join(checkpoint, STATE_NAME)
    try:
        state = durable.read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): move the checkpoint away") from None
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise InputError(
            f"{checkpoint} was written by another version of this recipe: resume it with that version, or take the "
            f"weights alone into a new run with --model_name_or_path {checkpoint}"
        )
    return state


def load_state(
    checkpoint: str,
    fingerprint: dict[str, Any],
    layout_now: dict[str, Any],
    despite_changes: bool | None = None,
    data: Container[str] = (),
) -> dict[str, Any]:
    """The `recipe_state.json` of a checkpoint, as this run can resume from it.

    Raises `InputError` where what is resumed is not what was started, unless `despite_changes` (None: the script has no
    such flag). Then, where a name of the fingerprint that is in `data` (what the positions of blocks depend on) has
    changed, the data begin at their beginning. Under DeepSpeed the layout must be that of the checkpoint.
    """
    state = read_state(checkpoint)
    before, shards = state["layout"], ("processes", "zero_stage")
    if any(before[name] != layout_now[name] for name in shards) and {
        before["zero_stage"],
        layout_now["zero_stage"],
    } != {None}:
        raise InputError(
            f"{checkpoint} was written by {_in_words(before)}, and this run is {_in_words(layout_now)}: DeepSpeed's "
            "optimizer state cannot be redistributed. Start as before (accumulation makes up for another "
            "per_device_train_batch_size), or take the weights alone into a new run with --model_name_or_path "
            f"{checkpoint}"
        )
    if changed := durable.differences(state["fingerprint"], fingerprint):
        listed = "; ".join(changed.values())
        if not despite_changes:
            override = "" if despite_changes is None else ", or resume all the same with --resume_despite_changes true"
            raise InputError(
                f"this is not the run that {checkpoint} belongs to: {listed}. Start it as before, or name another "
                f"output_dir{override}"
            )
        # the arguments of an optimizer of ours are in its groups, into which `optimization.put_back` puts those of now
        of_groups = {"optim_args"} if fingerprint.get("optim") in optimizers.own() else set()
        if changed.keys() & (set(OPTIMIZER_FLAGS) - of_groups):
            raise InputError(
                f"{checkpoint} has the state of another optimizer ({listed}), which cannot be taken over: start it as "
                f"before, or take the weights alone into a new run with --model_name_or_path {checkpoint}"
            )
        logger.warning(f"Resuming from {checkpoint} despite changes: {listed}")
    data_changed = any(name in data for name in changed)
    if data_changed:
        state |= {"position": 0, "skipped_blocks": []}
    return {**state, "changed": list(changed), "data_changed": data_changed}


def _in_words(layout: dict[str, Any]) -> str:
    stage = f" under ZeRO {layout['zero_stage']}" if layout["zero_stage"] is not None else " without DeepSpeed"
    return f"{counted(layout['processes'], 'process')}{stage}"
