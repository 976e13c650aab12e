"""Which checkpoint a run goes on from, and whether it is the same run (Table 9: 500K steps, seldom in one go)."""

import logging
import os
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments

from roberta_recipe import durable
from roberta_recipe.args import InputError

logger = logging.getLogger("recipe")

STATE_NAME = "recipe_state.json"
PARTIAL = ".partial"  # below the output folder: the checkpoint that is being written
# What the blocks depend on; where it changes, their places mean nothing any more.
_DATA = ("tokenizer", "input_format", "max_seq_length", "validation_share", "language", "shares", "shuffle_window")
_DATA += ("max_train_samples", "data_seed")


def newest_first(output_dir: str | Path) -> list[Path]:
    """The checkpoints of a run, the newest first, whether they are whole or not."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.split("-")[1].isdecimal()]
    return sorted(found, key=lambda path: -int(path.name.split("-")[1]))


def find(args: TrainingArguments) -> str | None:
    """The checkpoint to go on from, the same in all processes; None for a run that begins.

    It is the newest of the output folder that is as it was written; what is passed over is named. Where the folder has
    none, it is `resume_from_checkpoint`. Raises `InputError` where there are checkpoints and none is whole.
    """
    found: list[Any] = [None]
    if args.process_index == 0:
        try:
            found = [_find(args.output_dir, args.resume_from_checkpoint)]
        except InputError as error:
            found = [error]
    if args.world_size > 1:
        broadcast_object_list(found)
    if isinstance(found[0], InputError):
        raise found[0]
    return found[0]


def _find(output_dir: str, explicit: str | None) -> str | None:
    if half := sorted(Path(output_dir, PARTIAL).glob("*")):
        logger.warning(f"Passed over {half[-1]}: writing it was not finished")
    there = newest_first(output_dir)
    if explicit is not None and Path(explicit).resolve() in [path.resolve() for path in there[1:]]:
        raise InputError(
            f"resume_from_checkpoint={explicit}: {output_dir} has newer checkpoints ({there[0].name}); to go back, "
            "move them away"
        )
    for path in there:
        if (fault := durable.fault(path)) is None:
            return str(path)
        logger.warning(f"Passed over {path}: {fault}")
    if there:
        raise InputError(
            f"no checkpoint in output_dir={output_dir} is whole (passed over: {', '.join(p.name for p in there)}); "
            "move them away to start from the beginning"
        )
    if explicit is None:
        return None
    if not Path(explicit).is_dir():
        raise InputError(f"resume_from_checkpoint={explicit} is no folder; {output_dir} has no checkpoint either")
    if fault := durable.fault(explicit):
        raise InputError(f"resume_from_checkpoint={explicit} cannot be used: {fault}")
    return explicit


def layout(args: TrainingArguments) -> dict[str, Any]:
    """How a run is spread out, which may change between two starts of it, but not under DeepSpeed."""
    plugin = args.deepspeed_plugin
    return {"processes": args.world_size, "zero_stage": plugin.zero_stage if plugin else None}


def load_state(
    checkpoint: str, fingerprint: dict[str, Any], layout_now: dict[str, Any], despite_changes: bool | None = None
) -> dict[str, Any]:
    """The `recipe_state.json` of a checkpoint, as this run can go on from it.

    Raises `InputError` where what is resumed is not what was started, unless `despite_changes` (None: the script has no
    such flag); then data that has changed begins at its beginning. Under DeepSpeed the layout must be the one that the
    checkpoint was written in.
    """
    state = durable.read_json(os.path.join(checkpoint, STATE_NAME))
    before = state["layout"]
    if before != layout_now and {before["zero_stage"], layout_now["zero_stage"]} != {None}:
        raise InputError(
            f"{checkpoint} was written by {_in_words(before)}, and this run is {_in_words(layout_now)}: DeepSpeed's "
            "optimizer state cannot be divided anew. Start as before (accumulation makes up for another "
            "per_device_train_batch_size), or take the weights alone into a new run with --model_name_or_path "
            f"{checkpoint}"
        )
    if changed := durable.differences(state["fingerprint"], fingerprint):
        listed = "; ".join(changed.values())
        if not despite_changes:
            override = "" if despite_changes is None else ", or go on all the same with --resume_despite_changes true"
            raise InputError(
                f"this is not the run that {checkpoint} belongs to: {listed}. Start it as before, or name another "
                f"output_dir{override}"
            )
        logger.warning(f"Going on from {checkpoint} despite changes: {listed}")
        if any(name in _DATA or name.startswith("source ") for name in changed):
            state |= {"places": 0, "states": None}
    return state


def _in_words(layout: dict[str, Any]) -> str:
    stage = f" under ZeRO {layout['zero_stage']}" if layout["zero_stage"] is not None else " without DeepSpeed"
    return f"{layout['processes']} process{'es' * (layout['processes'] > 1)}{stage}"
