"""Gradient accumulation steps, derived from the global batch size (paper, section 4.3 and Table 9: 8K sequences)."""

import math

from transformers import TrainingArguments

from roberta_recipe.errors import InputError
from roberta_recipe.log import counted


def accumulation_steps(global_batch_size: int, per_device: int, processes: int) -> int:
    """Micro-batches per process and optimizer step of `global_batch_size` sequences. Raises `InputError`."""
    if global_batch_size < 1 or per_device < 1:
        raise InputError(
            f"global_batch_size={global_batch_size} and per_device_train_batch_size={per_device} must be at least 1"
        )
    micro_batch = per_device * processes
    if micro_batch > global_batch_size:
        fits = global_batch_size // processes
        raise InputError(
            f"{counted(processes, 'process')} x per_device_train_batch_size={per_device} = {micro_batch} is above "
            f"global_batch_size={global_batch_size}: --global_batch_size {micro_batch}, or "
            + (f"--per_device_train_batch_size {fits}" if fits else "fewer processes")
        )
    if global_batch_size % micro_batch:
        above = math.ceil(global_batch_size / micro_batch) * micro_batch
        raise InputError(
            f"global_batch_size={global_batch_size} is not divisible by {counted(processes, 'process')} x {per_device} "
            f"per device = {micro_batch}; use {above - micro_batch} or {above}, or another per_device_train_batch_size"
        )
    return global_batch_size // micro_batch


def derive_batch(args: TrainingArguments, global_batch_size: int | None) -> tuple[int, int]:
    """(global batch size, gradient accumulation steps). Raises `InputError` where both are given and contradict."""
    micro_batch = args.per_device_train_batch_size * args.world_size
    if global_batch_size is None:
        return micro_batch * args.gradient_accumulation_steps, args.gradient_accumulation_steps
    steps = accumulation_steps(global_batch_size, args.per_device_train_batch_size, args.world_size)
    if args.gradient_accumulation_steps not in (1, steps):
        raise InputError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} x {micro_batch} is not "
            f"global_batch_size={global_batch_size}; leave gradient_accumulation_steps out (it is derived), or set "
            f"--global_batch_size {args.gradient_accumulation_steps * micro_batch}"
        )
    return global_batch_size, steps


def largest_micro_batch(global_batch_size: int, at_most: int, processes: int) -> int:
    """The largest micro-batch up to `at_most` that divides each process's share of a step."""
    share = accumulation_steps(global_batch_size, min(at_most, 1), processes)  # raises for 0
    return max(size for size in range(1, min(at_most, share) + 1) if share % size == 0)


def shared_micro_batch(global_batch_size: int | None, per_device: int, processes: int) -> int:
    """`per_device`, or less if the batch is enough for one process but not for all (the demonstration on 8 GPUs)."""
    if per_device <= (global_batch_size or 0) < per_device * processes:
        return largest_micro_batch(global_batch_size, per_device, processes)
    return per_device
