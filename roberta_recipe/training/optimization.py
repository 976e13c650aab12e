"""Optimizer and schedule of a command line (paper, Table 9: Adam, linear decay): checked before training, and put back
after a checkpoint is loaded."""

import copy
import math
from collections.abc import Container
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.trainer_utils import SchedulerType

from roberta_recipe import hardware
from roberta_recipe.errors import InputError
from roberta_recipe.log import logger
from roberta_recipe.training import optimizers

# what ZeRO, which flattens and splits the weights, takes away
_LOST_UNDER_ZERO = {
    "adafactor": "the matrices that Adafactor takes rows and columns of",
    "lamb": "the tensors whose norms LAMB takes",
    "muon": "the matrices that Muon orthogonalizes",
}
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
    if args.deepspeed_plugin and (lost := _LOST_UNDER_ZERO.get(name_of(args))):
        raise InputError(f"optim={name_of(args)}: ZeRO flattens {lost}; take adamw_torch, or start without DeepSpeed")
    if not args.optim_args and args.optim not in optimizers.OWN:  # `libraries.check` makes it
        return
    try:
        given = parsed(args.optim_args)
        with_all = _groups(args, given)
    except ImportError as error:
        raise InputError(f"optim={name_of(args)}: {error}; pip install -r requirements.txt") from None
    except (TypeError, ValueError) as error:
        if not args.optim_args:
            raise InputError(f"optim={name_of(args)}: {error}") from None
        raise InputError(
            f"optim_args={args.optim_args}: optim={name_of(args)} cannot take them ({error}); write them as "
            "name=value,name=value"
        ) from None
    if args.optim == "muon" and not hardware.has_bf16(args.use_cpu):
        logger.warning("optim=muon: its matrix products are in bf16, which this machine emulates, many times slower")
    if args.optim in optimizers.OWN:  # whose arguments are listed
        return
    idle = [key for key in given if _groups_without(args, given, key) == with_all]
    if idle:
        raise InputError(
            f"optim_args={args.optim_args}: {idle[0]}={given[idle[0]]} changes nothing of optim={name_of(args)}; "
            "leave it out (rate, decay, betas and epsilon have flags of their own)"
        )


def make(args: TrainingArguments, model: torch.nn.Module, decayed: Container[str]) -> torch.optim.Optimizer:
    """The optimizer of a model where `args.optim` is one of `optimizers.OWN`; `decayed` names the weights that decay.
    Raises `InputError` for Muon without a matrix."""
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for name, weight in named if name in decayed], "weight_decay": args.weight_decay},
        {"params": [weight for name, weight in named if name not in decayed], "weight_decay": 0.0},
    ]
    matrices = optimizers.matrices_of_layers(model)
    if args.optim == "muon" and not matrices:
        raise InputError(f"optim=muon: no layer of this {model.config.model_type!r} model has a linear module to train")
    return optimizers.build(args, parsed(args.optim_args), groups, matrices)


def name_of(args: TrainingArguments) -> str:
    """Of the optimizer, as it is written on a command line."""
    return getattr(args.optim, "value", args.optim)


def parsed(optim_args: str | None) -> dict[str, str]:
    """`optim_args` by name. Raises `ValueError` where they are not name=value,name=value."""
    pairs = [pair.split("=") for pair in (optim_args or "").replace(" ", "").split(",") if pair]
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _groups(args: TrainingArguments, optim_args: dict[str, str]) -> list[dict[str, Any]]:
    """The hyperparameters of an optimizer with these `optim_args`, made as a trainer makes it."""
    if args.optim in optimizers.OWN:
        matrix, vector = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
        groups = [{"params": [matrix, vector], "weight_decay": args.weight_decay}]
        return hyperparameters(optimizers.build(args, optim_args, groups, [matrix]))
    args = copy.copy(args)
    args.optim_args = ",".join(f"{key}={value}" for key, value in optim_args.items())
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    parameter = torch.nn.Parameter(torch.zeros(1))
    return hyperparameters(cls([{"params": [parameter], "weight_decay": args.weight_decay}], **kwargs))


def _groups_without(args: TrainingArguments, optim_args: dict[str, str], key: str) -> list[dict[str, Any]] | None:
    """`_groups` without one of `optim_args`; None where the others need it."""
    try:
        return _groups(args, {name: value for name, value in optim_args.items() if name != key})
    except ValueError:
        return None


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
