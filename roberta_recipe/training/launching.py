"""Launch: checks of its configuration (precision, process group, accelerate, DeepSpeed), process set-up (threads,
allocator, exit when the launcher dies), broadcast from rank 0, waiting for all ranks."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from accelerate.utils.memory import clear_device_cache
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from roberta_recipe.errors import InputError
from roberta_recipe.hardware import cpu_cores, end_with_parent, has_bf16, keep_freed_memory, local_processes
from roberta_recipe.launcher import launcher_pid, user_set_omp_threads
from roberta_recipe.log import counted, logger
from roberta_recipe.record import git_commit

# plugins of accelerate, enabled by environment variables, that `Trainer` would use silently
_REFUSED_PLUGINS = {
    "FSDP": "FSDP, whose checkpoints cannot be resumed here",
    "MEGATRON_LM": "Megatron-LM, which has its own loss and batch",
    "PARALLELISM_CONFIG": "a parallelism_config, whose processes share examples",
}
_WORKERS_PER_CORE = 16  # limit
_TRUE = ("1", "true", "yes", "y", "on", "t")  # as in accelerate
# values of missing keys, as DeepSpeed's own defaults clip gradients at 1.0, and sum them in half precision
DEEPSPEED_DEFAULTS = {
    "gradient_clipping": "auto",
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
}
_REPLACED_SECTIONS = ("optimizer", "scheduler", "amp", "torch_autocast")  # of a DeepSpeed configuration


def check_launch(args: TrainingArguments) -> None:
    """Raise `InputError` if the process group, the device, or the launcher's configuration (which accelerate applies
    silently) contradicts the flags."""
    for name, what in _REFUSED_PLUGINS.items():
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in _TRUE:
            raise InputError(f"accelerate is configured to use {what}; start with a file of ds_configs/accelerate")
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend not in ("no", args.torch_compile_backend):
        raise InputError(f"accelerate has dynamo_backend={backend}: unset it, or set --torch_compile_backend {backend}")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != args.world_size:
        raise InputError(f"{started} processes were started without a process group: without a GPU, add --use_cpu")
    gpus, ranks = torch.cuda.device_count(), local_processes()
    # accelerate puts two ranks on a GPU, which NCCL refuses; `Trainer` would split micro-batches with DataParallel
    shares = args.device.type == "cuda" and ranks > gpus and "TORCHELASTIC_RUN_ID" in os.environ
    if shares or args.n_gpu > 1:
        fix = f"--num_processes {gpus * args.world_size // ranks}" + ", or set CUDA_VISIBLE_DEVICES=0" * (not shares)
        raise InputError(f"{counted(ranks, 'process')}, {counted(gpus, 'GPU')} on a machine: accelerate launch {fix}")
    if args.dataloader_num_workers > _WORKERS_PER_CORE * cpu_cores():
        why = f"each is a process, and this machine has {counted(cpu_cores(), 'core')}; one or two per device suffice"
        raise InputError(f"dataloader_num_workers={args.dataloader_num_workers}: {why}")
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", "bf16" if args.bf16 else "fp16" if args.fp16 else "no"):
        raise InputError(
            f"accelerate launch has mixed_precision={launched}, the preset bf16={str(args.bf16).lower()} and "
            f"fp16={str(args.fp16).lower()}: remove --mixed_precision, or set bf16 or fp16"
        )
    if args.fp16 and args.device.type == "cpu" and not args.deepspeed_plugin:  # accelerate would train in fp32
        raise InputError("fp16=true: a CPU has no fp16 training; use --fp16 false, with or without --bf16 true")
    if args.bf16 and args.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise InputError(f"bf16=true: {torch.cuda.get_device_name()} has no bf16, only emulation: use --fp16 true")
    if args.bf16 and args.device.type == "cpu" and not has_bf16(use_cpu=True):
        logger.warning("bf16=true: this processor has no bf16 and emulates it, many times slower than --bf16 false")


def check_deepspeed(args: TrainingArguments) -> None:
    """Fill a launcher's DeepSpeed configuration with `DEEPSPEED_DEFAULTS`. Raise `InputError` if it contradicts `args`,
    and for `--deepspeed` (its "auto" is filled in before the batch is derived). Call it after `arguments.derive`."""
    if args.deepspeed:
        command = "accelerate launch --config_file ds_configs/accelerate/zero2.yaml train_mlm.py ..."
        raise InputError(f"deepspeed={args.deepspeed}: use a launch file, e.g. {command}")
    if not args.deepspeed_plugin:
        return
    if not args.deepspeed_plugin.zero_stage:
        raise InputError("zero_stage=0 shards nothing: use stage 1, 2 or 3, or a launch file without DeepSpeed")
    for key, value in DEEPSPEED_DEFAULTS.items():
        args.deepspeed_plugin.deepspeed_config.setdefault(key, value)
    # a copy: "auto" stays for Trainer to fill in
    config = HfTrainerDeepSpeedConfig(args.deepspeed_plugin.deepspeed_config)
    config.trainer_config_process(args)
    differences = [line.removeprefix("- ds ") for line in config.mismatches]
    differences += [f"section {name!r}" for name in _REPLACED_SECTIONS if name in config.config]
    optim, force = getattr(args.optim, "value", args.optim), "zero_force_ds_cpu_optimizer"
    is_offloaded = config.get_value("zero_optimization.offload_optimizer.device", "none") != "none"
    replaces = is_offloaded and not optim.startswith("adamw")  # accelerate, by DeepSpeed's Adam
    if replaces and args.deepspeed_plugin.deepspeed_config.setdefault(force, False):
        differences.append(f"{force}={config.config[force]} vs optim={optim} (set it to false)")
    if differences:
        raise InputError(
            f'the DeepSpeed configuration contradicts the flags: {"; ".join(differences)}. Write "auto" for values '
            "there and leave sections out, or change the flags"
        )


def set_up_process() -> None:
    """Exit when the launcher dies, free the memory of an earlier run in this process, have glibc reuse freed memory,
    and divide the cores among this machine's processes, for training on the CPU and offloaded optimizers.

    Launchers set OMP_NUM_THREADS=1, which leaves cores idle; a user's own setting stays.
    """
    if (parent := launcher_pid()) is not None:  # without a launcher, `nohup` must work
        end_with_parent(parent, signal.SIGTERM)
    clear_device_cache(garbage_collection=True)  # an earlier run's trainer has reference cycles
    keep_freed_memory()
    git_commit()  # cached now: the checkout may change during training
    if parent and not user_set_omp_threads():
        torch.set_num_threads(max(1, cpu_cores() // local_processes()))


def on_first_process(args: TrainingArguments, call: Callable[[], Any]) -> Any:
    """The result of `call()` on rank 0, broadcast to all ranks; its `InputError` is raised on all ranks."""
    result: list[Any] = [None]
    if args.process_index == 0:
        try:
            result = [call()]
        except InputError as error:
            result = [error]
    if args.world_size > 1:
        broadcast_object_list(result)
    if isinstance(result[0], InputError):
        raise result[0]
    return result[0]


@contextlib.contextmanager
def end_together() -> Iterator[None]:
    """Wait for all ranks at the end of the block, without a time limit."""
    group = _group_without_timeout()
    yield
    _wait(group)


@contextlib.contextmanager
def first_process_first(args: TrainingArguments) -> Iterator[None]:
    """Run the block on rank 0 of each machine, then on its other ranks: `main_process_first` without a time limit."""
    is_first, group = args.local_process_index == 0, _group_without_timeout()
    if not is_first:
        _wait(group)
    try:
        yield
    except Exception:
        if is_first:
            _wait(group)  # the other ranks fail in the same way; a signal ends this process at once
        raise
    if is_first:
        _wait(group)


def _group_without_timeout() -> torch.distributed.ProcessGroup | None:
    """A gloo process group without timeout (30 days): a rank can pack or hash for hours. None for a single process."""
    if torch.distributed.is_initialized():
        return torch.distributed.new_group(backend="gloo", timeout=timedelta(days=30))
    return None


def _wait(group: torch.distributed.ProcessGroup | None) -> None:
    """A barrier that a signal interrupts. Raises the error of a lost rank."""
    if group:
        arrived = torch.distributed.barrier(group, async_op=True)
        while not arrived.is_completed():
            time.sleep(0.1)
        arrived.wait()


def leave_process_group() -> None:
    """Barrier, then end of the process group, so that no rank closes its connections while another still works."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
