"""Around a training process: cores, launcher, precision, output folder, the end of a process group."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig  # accelerate.utils has it only where DeepSpeed is installed
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

from roberta_recipe import durable, lock
from roberta_recipe.errors import InputError, first_line
from roberta_recipe.hardware import (
    cpu_cores,
    end_with_parent,
    free_memory,
    has_bf16,
    keep_freed_memory,
    local_processes,
)
from roberta_recipe.input_files import read_input_json, taken_apart
from roberta_recipe.log import counted, logger
from roberta_recipe.record import (
    HASHES_NAME,
    HUB_NAME,
    INDEX_NAME,
    LOG_NAME,
    PRESET_NAME,
    RECORD_NAME,
    SKIPPED_NAME,
    TIME_LIMIT,
    read_record,
)
from roberta_recipe.started import launcher, threads_are_the_users
from roberta_recipe.training.checkpoint import all_folders, newest_first
from roberta_recipe.training.processes import from_first_process

_MOST_WORKERS = 16  # data workers a core; they are processes
_BUILD_BEGINS_S = 10.0  # between an extension's lock and its compiler
_NOT_BY_LAUNCHER = {
    "FSDP": "FSDP, whose checkpoints are not resumed here",
    "MEGATRON_LM": "Megatron-LM, which has losses and batches of its own",
    "PARALLELISM_CONFIG": "a parallelism_config, under which processes share their examples",
}


def set_up_process() -> None:
    """End with the launcher, also where it is killed; free what a run before held, and keep memory that is freed
    (`keep_freed_memory`); share the cores among this machine's processes where they train on them.

    Launchers give a CPU process OMP_NUM_THREADS=1 and leave the other cores idle; what the user has set is kept.
    """
    if (parent := launcher()) is not None:
        end_with_parent(parent, signal.SIGTERM)
    free_memory()
    keep_freed_memory()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        from torch.utils.cpp_extension import get_default_build_root  # imports setuptools

        remove_stale_locks(Path(get_default_build_root()))
        check_deepspeed_file(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none"))
    if not torch.cuda.is_available() and launcher() and not threads_are_the_users():
        torch.set_num_threads(max(1, cpu_cores() // local_processes()))


def remove_stale_locks(root: Path) -> None:
    """Remove the locks below `root` of extensions that nobody builds: the start that was killed as it built one has
    left its lock, and without this every start after it would wait for ever."""
    built = {process.info["cwd"] for process in psutil.process_iter(["name", "cwd"]) if "ninja" in process.info["name"]}
    for path in root.glob("*/*/lock"):
        with contextlib.suppress(OSError):  # another process has removed it
            if str(path.parent) not in built and time.time() - path.stat().st_mtime > _BUILD_BEGINS_S:
                path.unlink()
                logger.info(f"Removed {path}: the build that it was of was killed")


def take_output_dir(args: TrainingArguments, extend: bool) -> None:
    """Make the output folder and lock it, on the first process. Raises `InputError`, in all processes, where another
    run works there, and where it holds anything other than a run that can be continued, so that nothing is overwritten.
    `extend`: a finished run is one, if `max_steps` is more than it has.
    """
    from_first_process(args, lambda: _take(args.output_dir, args.max_steps if extend else 0))


def _take(output_dir: str, max_steps: int) -> None:
    path = Path(output_dir)
    if (path / lock.LOCK_NAME).exists():  # who works there, before what is there
        lock.take(path)
    _check_content(path, max_steps)
    durable.make_folder(path)
    lock.take(path)
    durable.remove_left(path)
    _check_content(path, max_steps)  # another run may have begun and ended in between


_OF_TENSORBOARD = "runs"  # where transformers has it write, below the output folder


def _check_content(path: Path, max_steps: int) -> None:
    if (path / RECORD_NAME).exists() and not _can_continue(path, max_steps):
        longer = (
            "to train this one longer, raise --max_steps and add --resume_despite_changes true (the rate then follows "
            "the schedule of the longer run)"
            if newest_first(path)
            else "this one saved no checkpoint, so a longer run starts anew too"
        )
        raise InputError(
            f"output_dir={path} already holds a finished run. For another run, name another folder with --output_dir, "
            f"or move this folder away; {longer}"
        )
    # a run that was stopped before its first checkpoint leaves these
    left = (
        lock.LOCK_NAME,
        HASHES_NAME,
        PRESET_NAME,
        LOG_NAME,
        HUB_NAME,
        SKIPPED_NAME,
        INDEX_NAME,
        _OF_TENSORBOARD,
    )
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    if any(name not in left and not durable.is_aside(name) for name in names) and not all_folders(path):
        raise InputError(
            f"output_dir={path} already holds files, and no checkpoint to resume from; name another folder with "
            "--output_dir, or move this folder away"
        )


def _can_continue(path: Path, max_steps: int) -> bool:
    """Whether a run that has left its record was ended by `max_train_minutes`, or is to be extended to `max_steps`."""
    record = read_record(path / RECORD_NAME, ("steps", "stopped_by"), "name another folder with --output_dir")
    return record["stopped_by"] == TIME_LIMIT or record["steps"] < max_steps


def check_precision(args: TrainingArguments) -> None:
    """Raise `InputError` where `accelerate` was told another precision than the preset, as `Trainer` would take either,
    and where the device lacks it: accelerate would train in fp32 for fp16 on a CPU, and torch emulates bf16 on a GPU.

    `accelerate launch` passes on the precision of `--mixed_precision`, its launch file or `accelerate config`.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    preset = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    if launched not in ("no", preset):
        raise InputError(
            f"accelerate launch has mixed_precision={launched}, the preset bf16={str(args.bf16).lower()} and "
            f"fp16={str(args.fp16).lower()}; precision belongs to the preset: drop --mixed_precision (or the line in "
            "accelerate's configuration), or set bf16 or fp16"
        )
    if args.fp16 and args.device.type == "cpu" and not args.deepspeed_plugin:  # DeepSpeed has it, or says so itself
        raise InputError(
            "fp16=true: a CPU has no fp16 training; --fp16 false trains in fp32, and --fp16 false --bf16 true in bf16 "
            "where the CPU has it"
        )
    if args.bf16 and args.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise InputError(f"bf16=true: {torch.cuda.get_device_name()} has no bf16 (torch would emulate it); --fp16 true")
    if args.bf16 and args.device.type == "cpu" and not has_bf16(use_cpu=True):
        logger.warning("bf16=true: this processor has no bf16 and emulates it, many times slower than --bf16 false")


_SECTIONS_OF_FLAGS = ("optimizer", "scheduler", "amp", "torch_autocast")  # of a DeepSpeed configuration
_TRUE = ("1", "true", "yes", "y", "on", "t")  # as accelerate reads the environment


def check_processes(args: TrainingArguments) -> None:
    """Raise `InputError` where a launcher started several processes and each would train for itself, or where one
    process would train on several GPUs."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != args.world_size:
        raise InputError(
            f"{started} processes were started, and each trains alone, as there is no GPU: add --use_cpu, which joins "
            "them on the CPU"
        )
    if args.n_gpu > 1:  # `Trainer` would split each micro-batch over them with DataParallel
        raise InputError(
            f"one process and {args.n_gpu} GPUs: start a process for each with accelerate launch --num_processes "
            f"{args.n_gpu} ..., or show it a single GPU with CUDA_VISIBLE_DEVICES=0"
        )


def check_launcher(args: TrainingArguments) -> None:
    """Raise `InputError` where `accelerate` was told, by its flags or `accelerate config`, what belongs to the preset
    and would be done in silence: accelerate reads it from the environment."""
    for name, what in _NOT_BY_LAUNCHER.items():
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in _TRUE:
            raise InputError(f"accelerate was told to use {what}; start with a file of ds_configs/accelerate instead")
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend not in ("no", args.torch_compile_backend):
        raise InputError(
            f"accelerate was told to compile with dynamo_backend={backend}; compilation belongs to the preset: drop it "
            f"there, or set --torch_compile_backend {backend}"
        )


def check_deepspeed_file(path: str) -> None:
    """Raise `InputError` for a DeepSpeed configuration that accelerate cannot read; "none" is no file."""
    if path != "none":
        content = read_input_json(path)
        with taken_apart(path, "a DeepSpeed configuration"):
            DeepSpeedPlugin(hf_ds_config=HfDeepSpeedConfig(content)).set_mixed_precision("no")


def check_deepspeed(args: TrainingArguments) -> None:
    """Raise `InputError` for a DeepSpeed configuration by flag, which would be resolved before the batch is derived,
    and for a launcher's configuration with values that differ from `args`: all of them in one line. Needs the derived
    batch."""
    if args.deepspeed:
        raise InputError(
            f"deepspeed={args.deepspeed}: name a launch file instead, e.g. accelerate launch --config_file "
            "ds_configs/accelerate/zero2.yaml train_mlm.py ..."
        )
    if not args.deepspeed_plugin:
        return
    if args.auto_find_batch_size:
        raise InputError(
            "auto_find_batch_size=true tries a whole model on each device, which ZeRO divides: leave it out, and set "
            "per_device_train_batch_size (python tools/estimate.py says what fits)"
        )
    config = HfTrainerDeepSpeedConfig(deepspeed_settings(args))  # a copy: "auto" stays for Trainer to fill in
    config.config.setdefault("gradient_clipping", 0.0)  # DeepSpeed's default, which Trainer does not compare
    config.trainer_config_process(args)
    found = [f"the section {name!r}, which the flags replace" for name in _SECTIONS_OF_FLAGS if name in config.config]
    for line in config.mismatches:  # "- ds fp16.enabled=True vs hf fp16|fp16_full_eval=False"
        line = line.removeprefix("- ds ").replace("train_batch_size (calculated)", "global_batch_size")
        found.append(re.sub(r"\|\w+(?==)", "", line).replace(" vs hf ", " against "))
    if found:
        raise InputError(
            f'the DeepSpeed configuration contradicts the flags: {"; ".join(found)}. There, write "auto" for values '
            "(a missing gradient_accumulation_steps is 1, a missing gradient_clipping 0) and leave sections out, or "
            "change the flags"
        )
    from deepspeed.runtime.config import DeepSpeedConfig  # two seconds

    # without the batch: until the process group is DeepSpeed's, it takes the run for one process
    settings = {name: value for name, value in config.config.items() if name != "train_batch_size"}
    try:
        DeepSpeedConfig(settings)
    except Exception as error:  # pydantic's and DeepSpeed's
        reason = " ".join(str(error).partition("For further information")[0].split())
        raise InputError(f"the DeepSpeed configuration is refused by DeepSpeed: {reason}") from None


def check_machine(args: TrainingArguments) -> None:
    """Raise `InputError` for data workers, trackers or a compiler that this machine does not have."""
    if args.dataloader_num_workers > _MOST_WORKERS * cpu_cores():
        raise InputError(
            f"dataloader_num_workers={args.dataloader_num_workers}: each is a process, and this machine has "
            f"{counted(cpu_cores(), 'core')}; one or two feed a device"
        )
    if args.dataloader_prefetch_factor == 0:  # which torch looks at when the workers have started
        raise InputError("dataloader_prefetch_factor=0 must be at least 1; leave it out for torch's 2")
    try:
        for tracker in get_reporting_integration_callbacks(args.report_to):
            tracker()
    except (ValueError, RuntimeError, ImportError) as error:
        raise InputError(f"report_to={args.report_to}: {error}") from None
    backend, mode = args.torch_compile_backend, args.torch_compile_mode
    try:
        if args.torch_compile:
            torch.compile(torch.nn.Identity(), backend=backend, mode=mode)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"torch_compile_backend={backend} with torch_compile_mode={mode}: {first_line(error)}"
        ) from None


def build_models_whole() -> None:
    """Under ZeRO 3, make `from_pretrained` build whole models, where it would leave each process a shard of them.

    An edit of sharded weights (a padded vocabulary) would edit nothing. `Trainer` restores the setting.
    """
    unset_hf_deepspeed_config()


def leave_process_group() -> None:
    """End together: no process closes its connections while another still works."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def deepspeed_settings(args: TrainingArguments) -> dict[str, Any]:
    """DeepSpeed's configuration as its JSON has it, given by `--deepspeed` or by the launcher; empty without it."""
    if args.deepspeed:
        return args.deepspeed if isinstance(args.deepspeed, dict) else read_input_json(args.deepspeed)
    return args.deepspeed_plugin.deepspeed_config if args.deepspeed_plugin else {}
