"""Output folder of a run (creation, lock, files of other runs) and its checkpoints: rotation, selection for resuming,
recipe state, hashes of weights and optimizer.

A complete checkpoint is sealed (`durable.seal`): its manifest is written last, and a folder without one is ignored.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from safetensors import safe_open
from transformers import TrainingArguments

from roberta_recipe import durable
from roberta_recipe import record as records
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import read_input_json
from roberta_recipe.log import counted, logger
from roberta_recipe.settings import values_of
from roberta_recipe.training import optimizers
from roberta_recipe.training.launching import on_first_process

if TYPE_CHECKING:
    from roberta_recipe.training.durable_trainer import DurableTrainer

STATE_NAME = "recipe_state.json"  # `DurableTrainer.recipe_state` and the `digests` of weights and optimizer
STATE_VERSION = 4  # of its content
# DeepSpeed settings that determine the order of the weights in the optimizer's state; DeepSpeed does not check them
_STATE_ORDER = ("round_robin_gradients", "sub_group_size")
_ALIKE = (  # free flags that decide when ranks communicate
    *("logging_strategy", "logging_steps", "logging_first_step", "save_strategy", "save_steps"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start"),
)

# files of a run that ended before its first checkpoint; "runs" is TensorBoard's
_BEFORE_CHECKPOINT = {durable.LOCK_NAME, records.HASHES_NAME, records.PRESET_NAME, records.LOG_NAME, records.HUB_NAME}
_BEFORE_CHECKPOINT |= {records.SKIPPED_NAME, records.INDEX_NAME, records.TOKENIZER_NAME, "runs"}


def rotate(output_dir: str | Path, limit: int | None, step: int) -> None:
    """Delete all but the newest `limit` checkpoints (0, None: no limit) up to `step`, and unsealed folders of killed
    starts. Later checkpoints, which this start skipped as damaged, stay."""
    old = newest_first(output_dir, step)[limit:] if limit else []
    for path in [*old, *(set(all_folders(output_dir)) - {*newest_first(output_dir)})]:
        shutil.rmtree(path, ignore_errors=True)


def all_folders(output_dir: str | Path) -> list[Path]:
    """The checkpoint folders of a run, newest first, including unsealed ones."""
    folders = Path(output_dir).glob("checkpoint-*")
    return sorted((path for path in folders if path.name.removeprefix("checkpoint-").isdecimal()), key=step_of)[::-1]


def newest_first(output_dir: str | Path, last_step: float = math.inf) -> list[Path]:
    """The sealed checkpoints of a run up to `last_step`, newest first, including damaged ones."""
    sealed = [path for path in all_folders(output_dir) if (path / durable.MANIFEST).is_file()]
    return [path for path in sealed if step_of(path) <= last_step]


def step_of(folder: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(folder.name.removeprefix("checkpoint-"))


def resume(
    args: TrainingArguments,
    fingerprint: dict[str, Any],
    despite_changes: bool | None = None,
    data_keys: Container[str] = (),
    alike: dict[str, Any] | None = None,
) -> tuple[str | None, dict[str, Any] | None]:
    """(checkpoint to resume from, its state as by `load_state`), the same on all ranks; (None, None) for a new run.

    The newest intact checkpoint of the output folder, else `resume_from_checkpoint`. Raises `InputError` if all
    are damaged or of another program, if the named one is damaged or the folder has newer ones, or if the ranks have
    different fingerprints or flags that decide when they communicate (`alike`: those of the script).
    """
    first, *others = gather_object([{name: getattr(args, name) for name in _ALIKE} | (alike or {}) | fingerprint])
    for rank, other in enumerate(others, 1):
        if names := durable.differences(first, other):
            each = "; ".join(f"{key}={first.get(key)!r} on rank 0, {other.get(key)!r} on rank {rank}" for key in names)
            raise InputError(f"processes have different settings: {each}; use one command on each machine")
    path = on_first_process(args, lambda: _find(args.output_dir, args.resume_from_checkpoint))
    return path, path and load_state(path, fingerprint, layout(args), despite_changes, data_keys)


def _find(output_dir: str, named: str | None) -> str | None:
    checkpoints, folders = newest_first(output_dir), all_folders(output_dir)
    if folders and not checkpoints and not Path(output_dir, records.LOG_NAME).is_file():  # rotation would delete them
        raise InputError(
            f"output_dir={output_dir} has checkpoints of another program ({folders[0].name}): name another output_dir, "
            f"with --model_name_or_path {folders[0]} to use its weights"
        )
    if named is not None and Path(named).resolve() in [path.resolve() for path in checkpoints[1:]]:
        raise InputError(f"resume_from_checkpoint={named}: {output_dir} has newer checkpoints; move them away first")
    for path in folders:
        if (damage := durable.damage(path)) is None:
            return str(path)
        logger.warning(f"Skipped {path}: {damage}")
    if checkpoints:
        raise InputError(
            f"no checkpoint in output_dir={output_dir} is intact (skipped: "
            f"{', '.join(path.name for path in checkpoints)}); move them away to start from the beginning"
        )
    if named is not None and (damage := durable.damage(named, (STATE_NAME,))):
        raise InputError(f"resume_from_checkpoint={named} cannot be used: {damage}")
    return named


def layout(args: TrainingArguments) -> dict[str, Any]:
    """Processes, device, kernels and versions: they may change between two starts of a run, which changes rounding and
    dropout draws. Under DeepSpeed, processes, ZeRO stage and `_STATE_ORDER` must not change."""
    plugin = args.deepspeed_plugin
    zero = plugin.deepspeed_config["zero_optimization"] if plugin else {}
    on_gpu, threads = args.device.type == "cuda", counted(torch.get_num_threads(), "thread")
    return {
        "processes": args.world_size,
        "zero_stage": plugin.zero_stage if plugin else None,
        "deepspeed_config": durable.fingerprint(plugin.deepspeed_config) if plugin else None,
        **{name: zero[name] for name in _STATE_ORDER if zero.get(name)},
        "device": torch.cuda.get_device_name() if on_gpu else f"{args.device.type}, {threads}",
        "torch": torch.__version__,
        **values_of(args, "layout"),
    }


def read_state(checkpoint: str | Path) -> dict[str, Any]:
    """The `recipe_state.json` of a sealed checkpoint. Raises `InputError` for another version of the recipe."""
    state = read_input_json(Path(checkpoint, STATE_NAME))
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise InputError(
            f"{checkpoint} was written by another version of this recipe: resume it with that version, or start a new "
            "run from its weights with --model_name_or_path"
        )
    return state


def load_state(
    checkpoint: str,
    fingerprint: dict[str, Any],
    layout_now: dict[str, Any],
    despite_changes: bool | None = None,
    data_keys: Container[str] = (),
) -> dict[str, Any]:
    """The `recipe_state.json` of a checkpoint, plus "changed" (names of changed settings).

    Raises `InputError` if the fingerprint has changed, unless `despite_changes` (None: the script has no such flag).
    With `despite_changes`, a change of one of `data_keys` (settings of the order of blocks) restarts the data.
    """
    state, fix = read_state(checkpoint), "start as before, or a new run from its weights with --model_name_or_path"
    other_layout = durable.differences(state["layout"], layout_now)
    uses_zero = {state["layout"]["zero_stage"], layout_now["zero_stage"]} != {None}
    changed = durable.differences(state["fingerprint"], fingerprint)
    differ = {**changed, **other_layout}
    names = ("processes", "zero_stage", "bf16", "fp16", *_STATE_ORDER)
    if uses_zero and (fixed := [differ[name] for name in names if name in differ]):
        raise InputError(
            f"{checkpoint} has DeepSpeed's optimizer state, which cannot be converted ({'; '.join(fixed)}): {fix}"
        )
    listed = "; ".join(changed.values())
    if changed and not despite_changes:
        override = "" if despite_changes is None else ", or resume anyway with --resume_despite_changes true"
        raise InputError(
            f"{checkpoint} belongs to another run: {listed}. Start it as before, or name another output_dir{override}"
        )
    # arguments of our own optimizers are hyperparameters, which `optimizers.restore_hyperparameters` sets after loading
    of_state = {"optim"} if fingerprint.get("optim") in optimizers.custom_names() else {"optim", "optim_args"}
    if changed.keys() & of_state:
        raise InputError(f"{checkpoint} has the state of another optimizer ({listed}): {fix}")
    if changed:
        logger.warning(f"Resuming from {checkpoint} despite changes: {listed}")
    if other_layout:
        logger.info(
            f"Resuming in another layout ({'; '.join(other_layout.values())}): examples and mathematics are the same, "
            "rounding and dropout draws differ"
        )
    if any(name in data_keys for name in changed):
        state |= {"position": 0, "skipped_blocks": []}
    return {**state, "changed": list(changed)}


def state_hashes(trainer: "DurableTrainer", folder: Path) -> dict[str, str]:
    """Hashes of the weights in `folder`, the optimizer's state (under DeepSpeed, of all ranks), and the scheduler with
    hyperparameters; complete on rank 0. Call it on all ranks."""
    first = trainer.args.should_save
    if trainer.is_deepspeed_enabled:
        state = gather_object([hash_of(trainer.optimizer.state_dict())])
    else:
        state = trainer.optimizer.state_dict()["state"] if first else None
    groups = optimizers.hyperparameters(trainer.optimizer)
    scheduler = {"scheduler": trainer.lr_scheduler.state_dict(), "groups": groups}
    hashes = {"optimizer": hash_of(state), "scheduler": hash_of(scheduler)}
    return {"weights": hash_of_weights(folder), **hashes} if first else hashes


def hash_of_weights(folder: str | Path) -> str:
    """The hash of all weights in the safetensors files of `folder`, independent of the shards."""
    hasher, files = hashlib.sha256(), {}
    for path in Path(folder).glob("*.safetensors"):
        file = safe_open(path, "pt")
        files |= dict.fromkeys(file.keys(), file)
    for name in sorted(files):
        _feed(hasher, name)
        _feed(hasher, files[name].get_tensor(name))
    return hasher.hexdigest()[:16]


def hash_of(state: Any) -> str:
    """The hash of nested dicts and lists of tensors (dtype, shape, bytes) and JSON values, without other objects."""
    hasher = hashlib.sha256()
    _feed(hasher, state)
    return hasher.hexdigest()[:16]


def _feed(hasher: Any, value: Any) -> None:
    """Update `hasher` with kind, size and content of a value, so that different states give different bytes."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        hasher.update(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        hasher.update(f"dict {len(value)}\n".encode())
        for name in sorted(value, key=str):
            _feed(hasher, str(name))
            _feed(hasher, value[name])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"list {len(value)}\n".encode())
        for item in value:
            _feed(hasher, item)
    elif isinstance(value, (bool, int, float, str, type(None))):
        hasher.update(f"{value!r}\n".encode())


def prepare_folder(args: TrainingArguments, extend: bool, token_cache: str | None = None) -> None:
    """Create and lock the output folder, on rank 0. To overwrite nothing, raises `InputError` on all ranks if another
    process uses it, or if it holds files without a checkpoint, or a finished run (unless its time limit ended it).
    `extend`: also resume a finished run that has fewer than `max_steps` steps. The folder may contain the run's
    `token_cache`, or be the cache itself."""
    steps = args.max_steps if args.max_steps > 0 else math.inf  # with num_train_epochs, the steps are not known yet
    on_first_process(args, lambda: _prepare_folder(Path(args.output_dir), steps if extend else 0, token_cache))


def _prepare_folder(path: Path, max_steps: float, token_cache: str | None = None) -> None:
    durable.make_folder(path)
    durable.lock(path)
    check_unfinished(path, max_steps)
    cache = Path(token_cache or os.devnull).resolve()
    entries = [entry for entry in path.iterdir() if entry.resolve() not in (cache, *cache.parents)]
    others = {entry.name for entry in entries if not durable.TEMPORARY.search(entry.name)} - _BEFORE_CHECKPOINT
    if others and path.resolve() != cache and not all_folders(path):
        raise InputError(
            f"output_dir={path} already holds files and no checkpoint; name another folder with --output_dir, or move "
            "this one away"
        )
    durable.remove_stale(path)


def check_unfinished(path: Path, max_steps: float) -> None:
    """Raise `InputError` if a folder holds a run that ended at `max_steps` or later, unless its time limit ended it."""
    if not (path / records.RECORD_NAME).exists():
        return
    advice = "name another folder with --output_dir"
    record = records.read_record(path / records.RECORD_NAME, ("steps", "stopped_by"), advice)
    if record["stopped_by"] != records.TIME_LIMIT and record["steps"] >= max_steps:
        raise InputError(
            f"output_dir={path} already holds a finished run (make push uploads it): name another folder, or train it "
            "longer with a higher --max_steps or --num_train_epochs and --resume_despite_changes true (which stretches "
            "the schedule)"
        )
