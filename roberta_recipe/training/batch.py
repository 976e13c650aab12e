"""Batch arithmetic. The paper's batch (section 4.3 and Table 9: 8K sequences) is a property of the recipe, so
accumulation is derived from it."""

from collections.abc import Callable

import torch
from transformers import TrainingArguments

from roberta_recipe.arithmetic import largest_divisor, round_up
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.hardware import give_back_freed_memory, is_out_of_memory
from roberta_recipe.log import counted, logger


def accumulation_steps(global_batch_size: int, per_device: int, processes: int) -> int:
    """Micro-batches that each process takes for one optimizer step of `global_batch_size` sequences."""
    if global_batch_size < 1 or per_device < 1:
        raise InputError(
            f"global_batch_size={global_batch_size} and per_device_train_batch_size={per_device} must be at least 1"
        )
    at_once = per_device * processes
    if global_batch_size % at_once:
        below, above = global_batch_size // at_once * at_once, round_up(global_batch_size, at_once)
        nearest = " or ".join(str(size) for size in (below, above) if size)
        raise InputError(
            f"global_batch_size={global_batch_size} is not divisible by {counted(processes, 'process')} x {per_device} "
            f"per device = {at_once}; the nearest divisible sizes are {nearest}, or choose another "
            "per_device_train_batch_size"
        )
    return global_batch_size // at_once


def derive_batch(args: TrainingArguments, global_batch_size: int | None) -> tuple[int, int]:
    """The global batch size (sequences an optimizer step), and the accumulation steps that make it."""
    at_once = args.per_device_train_batch_size * args.world_size
    if global_batch_size is None:
        return at_once * args.gradient_accumulation_steps, args.gradient_accumulation_steps
    steps = accumulation_steps(global_batch_size, args.per_device_train_batch_size, args.world_size)
    if args.gradient_accumulation_steps not in (1, steps):
        raise InputError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} x {at_once} is not "
            f"global_batch_size={global_batch_size}; leave gradient_accumulation_steps out, it is derived"
        )
    return global_batch_size, steps


def largest_micro_batch(global_batch_size: int, at_most: int, processes: int) -> int:
    """The largest micro-batch up to `at_most` of which every process takes a whole number for one step."""
    accumulation_steps(global_batch_size, 1, processes)
    share = global_batch_size // processes
    return largest_divisor(share, max(min(at_most, share), 1))


def lower_to_memory(
    args: TrainingArguments,
    model: torch.nn.Module,
    global_batch_size: int,
    full_batch: Callable[[int], dict[str, torch.Tensor]],
) -> int:
    """`per_device_train_batch_size`, halved until forward and backward of so many full blocks (`full_batch`) fit into
    memory beside the optimizer, in all processes. Raises `RunError` where not even a single block fits.

    `auto_find_batch_size` asks for this search; Trainer's own search would shrink the global batch.
    """
    if args.activation_checkpointing:  # as Trainer does when it trains
        kept = dict(args.activation_checkpointing_kwargs or {})
        own = {name: kept.pop(name) for name in ("every_n_layers", "offload") if name in kept}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kept or None, **own)
    micro = args.per_device_train_batch_size
    while not _fits(args, model, full_batch(micro), accumulation_steps(global_batch_size, micro, args.world_size)):
        if micro == 1:
            raise RunError("not even one full block fits into memory: take a smaller model, or ZeRO")
        micro = largest_divisor(micro, micro // 2)
        logger.info(f"Out of memory: trying per_device_train_batch_size={micro}")
    if args.world_size > 1:
        smallest = torch.tensor(micro, device=args.device)
        torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN)
        micro = int(smallest)
    return micro


def _fits(args: TrainingArguments, model: torch.nn.Module, inputs: dict[str, torch.Tensor], accumulation: int) -> bool:
    """Whether a micro-batch can be trained on, with Adam's two moments (and DDP's buckets) reserved, also the second of
    a step, beside the gradient of the first."""
    device, half = args.device, torch.bfloat16 if args.bf16 else torch.float16
    reserved = (8 + 4 * (args.world_size > 1)) * model.num_parameters()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            model.to(device).train()
            optimizer = torch.empty(reserved, dtype=torch.uint8, device=device)
            inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
            for _ in range(min(accumulation, 2)):
                with torch.autocast(device.type, half, enabled=args.bf16 or args.fp16):
                    loss = sum(model(**inputs).loss_sums.values())
                loss.backward()
                del loss
            del optimizer
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            give_back_freed_memory()
