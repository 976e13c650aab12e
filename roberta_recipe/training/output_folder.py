"""Output folder of a run: creation, lock, and a check for files of other runs."""

import os
from pathlib import Path

from transformers import TrainingArguments

from roberta_recipe import durable
from roberta_recipe import record as records
from roberta_recipe.errors import InputError
from roberta_recipe.training.checkpoint import all_folders
from roberta_recipe.training.processes import on_first_process

# files of a run that ended before its first checkpoint; "runs" is TensorBoard's
_BEFORE_CHECKPOINT = {durable.LOCK_NAME, records.HASHES_NAME, records.PRESET_NAME, records.LOG_NAME, records.HUB_NAME}
_BEFORE_CHECKPOINT |= {records.SKIPPED_NAME, records.INDEX_NAME, records.TOKENIZER_NAME, "runs"}


def prepare(args: TrainingArguments, extend: bool, token_cache: str | None = None) -> None:
    """Create and lock the output folder, on rank 0. To overwrite nothing, raises `InputError` on all ranks if another
    process uses it, or if it holds files without a checkpoint, or a finished run (unless its time limit ended it).
    `extend`: also resume a finished run that has fewer than `max_steps` steps. The folder may contain the run's
    `token_cache`, or be the cache itself."""
    on_first_process(args, lambda: _prepare(Path(args.output_dir), args.max_steps if extend else 0, token_cache))


def _prepare(path: Path, max_steps: int, token_cache: str | None = None) -> None:
    durable.make_folder(path)
    durable.lock(path)
    if (path / records.RECORD_NAME).exists():
        advice = "name another folder with --output_dir"
        record = records.read_record(path / records.RECORD_NAME, ("steps", "stopped_by"), advice)
        if record["stopped_by"] != records.TIME_LIMIT and record["steps"] >= max_steps:
            raise InputError(
                f"output_dir={path} already holds a finished run (make push uploads it): name another folder, or train "
                "it longer with a higher --max_steps and --resume_despite_changes true (which stretches the schedule)"
            )
    cache = Path(token_cache or os.devnull).resolve()
    entries = [entry for entry in path.iterdir() if entry.resolve() not in (cache, *cache.parents)]
    others = {entry.name for entry in entries if not durable.TEMPORARY.search(entry.name)} - _BEFORE_CHECKPOINT
    if others and path.resolve() != cache and not all_folders(path):
        raise InputError(
            f"output_dir={path} already holds files and no checkpoint; name another folder with --output_dir, or move "
            "this one away"
        )
    durable.remove_stale(path)
