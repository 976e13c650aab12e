"""Optimizer and schedule of a command line (paper, Table 9: Adam, linear decay): checked before training, and put back
after a checkpoint is loaded."""

import math
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler
from transformers.trainer_utils import SchedulerType

from roberta_recipe import hardware
from roberta_recipe.errors import InputError
from roberta_recipe.log import logger
from roberta_recipe.training import optimizers

_STEPS_SAMPLED = 50  # of a schedule


def check(args: TrainingArguments) -> None:
    """Raise `InputError` for an optimizer or a schedule that cannot be made, or that cannot be resumed, and for
    `optim_args` and `lr_scheduler_kwargs` that nothing takes."""
    _check_optimizer(args)
    steps = args.max_steps if args.max_steps > 0 else 1000  # the data decide how many epochs have
    kwargs, constant = args.lr_scheduler_kwargs or {}, SchedulerType.CONSTANT
    what = f"lr_scheduler_type={args.lr_scheduler_type.value}"
    if kwargs and args.lr_scheduler_type in (constant, SchedulerType.CONSTANT_WITH_WARMUP):
        raise InputError(f"lr_scheduler_kwargs={kwargs}: {what} takes none")
    if args.lr_scheduler_type is constant and args.warmup_steps:
        raise InputError(f"warmup_steps={args.warmup_steps:g}: {what} has no warm-up; constant_with_warmup has one")
    try:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
        scheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=kwargs,
        )
        share = scheduler.lr_lambdas[0]  # of the learning rate, by step
        shares = {step: share(step) for step in range(0, steps, math.ceil(steps / _STEPS_SAMPLED))}
    except (TypeError, ValueError, ArithmeticError, KeyError) as error:
        raise InputError(f"{what} with lr_scheduler_kwargs={kwargs}: {error}") from None
    for name in ("num_decay_steps", "num_stable_steps"):
        if (of := kwargs.get(name)) is not None and (not isinstance(of, int) or of < 1):
            raise InputError(f"lr_scheduler_kwargs={kwargs}: {name}={of} must be a whole number of steps, from 1 on")
    for step, value in shares.items():
        if isinstance(value, complex) or not 0 <= value <= 1 + 1e-6:
            raise InputError(
                f"{what} with lr_scheduler_kwargs={kwargs}: the rate at step {step} would be {value} x learning_rate, "
                "and must be from 0 to 1 of it"
            )
    if args.max_steps > 0:
        check_length(args, steps)


def check_length(args: TrainingArguments, steps: int) -> None:
    """Raise `InputError` where a run of so many steps ends within its warm-up, or where the phases of a trapezoid
    (WSD) have another length in all: the rate would fall to nothing, or stay high, without a word."""
    warmup = args.get_warmup_steps(steps)
    if warmup > steps:
        raise InputError(
            f"warmup_steps={args.warmup_steps:g} is more than the {steps:,} steps of the run, whose rate would never "
            f"come to learning_rate={args.learning_rate:g}: --warmup_steps {steps} or less; a number below 1 is a "
            "share of the steps, which fits any length (--warmup_steps 0.06: Tables 9 and 10)"
        )
    if args.lr_scheduler_type is not SchedulerType.WARMUP_STABLE_DECAY:
        return
    decay, stable = (args.lr_scheduler_kwargs.get(name) for name in ("num_decay_steps", "num_stable_steps"))
    phases = warmup + decay + (stable or 0)
    if phases > steps or (stable is not None and phases < steps):
        raise InputError(
            f"lr_scheduler_kwargs={args.lr_scheduler_kwargs}: warm-up of {warmup:,} steps and the phases given are "
            f"{phases:,} steps, and the run has {steps:,}: give num_decay_steps alone, at most {steps - warmup:,}; the "
            "stable phase is what is left"
        )


def _check_optimizer(args: TrainingArguments) -> None:
    name = optimizers.name_of(args)
    declared = optimizers.TABLE[name]
    if args.deepspeed_plugin and (lost := declared.lost_under_zero):
        raise InputError(f"optim={name}: ZeRO flattens {lost}; take adamw_torch, or start without DeepSpeed")
    try:
        optimizers.build(args, torch.nn.ModuleList([torch.nn.Linear(2, 2)]), ["0.weight"])
    except ImportError as error:
        raise InputError(f"optim={name}: {error}; pip install -r requirements.txt") from None
    except (TypeError, ValueError) as error:
        if not args.optim_args:
            numbers = f"adam_beta1={args.adam_beta1}, adam_beta2={args.adam_beta2}, adam_epsilon={args.adam_epsilon}"
            raise InputError(f"optim={name} with {numbers}: {error}") from None
        raise InputError(
            f"optim_args={args.optim_args}: optim={name} cannot take them ({error}); write them as "
            "name=value,name=value"
        ) from None
    if declared.needs_bf16 and not hardware.has_bf16(args.use_cpu):
        logger.warning(f"optim={name}: its matrix products are in bf16, which this machine emulates, many times slower")


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each parameter group: rate, decay and what else the optimizer was made with."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def put_back(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR, groups: list[dict[str, Any]]
) -> None:
    """Give optimizer and schedule the `hyperparameters` that they had before a checkpoint was loaded into them; the
    step of the schedule and the optimizer's moments stay the checkpoint's."""
    scheduler.base_lrs = [group["lr"] for group in groups]
    shares = [share(scheduler.last_epoch) for share in scheduler.lr_lambdas]
    rates = [rate * share for rate, share in zip(scheduler.base_lrs, shares, strict=True)]
    for group, before, rate in zip(optimizer.param_groups, groups, rates, strict=True):
        group.update(before, initial_lr=before["lr"], lr=rate)
    scheduler._last_lr = rates
