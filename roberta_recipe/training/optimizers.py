"""Optimizers and checks of learning-rate schedules (paper, Table 9: Adam, linear decay).

In addition to Trainer's own: LAMB (You et al. 2020, arXiv 1904.00962; used for ALBERT) and Muon (Jordan et al. 2024,
kellerjordan.github.io/posts/muon). A new optimizer is an entry of `TABLE`, from which flag, checks, ZeRO, resuming and
the memory estimate are derived.
"""

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.trainer_utils import SchedulerType

from roberta_recipe.errors import InputError
from roberta_recipe.input_files import explained


@dataclass(frozen=True)
class Optimizer:
    """`build(args, groups, matrices, **optim_args)` returns the optimizer over two parameter groups, the first with
    weight decay; None for Trainer's own optimizers. `arguments`: names and types of its `optim_args`."""

    states: int  # fp32 numbers for each weight
    arguments: dict[str, type] = field(default_factory=dict)
    build: Callable[..., torch.optim.Optimizer] | None = None
    help: str = ""
    matrix_states: int | None = None  # `states` of the `matrices_of_layers`, if they differ
    breaks_under_zero: str = ""  # the structure that its updates need and ZeRO's flat shards destroy


def custom_names() -> list[str]:
    """The optimizers that `TrainingArguments` does not support."""
    return [name for name, optimizer in TABLE.items() if optimizer.build]


class MuonInFp32(torch.optim.Muon):
    """`torch.optim.Muon` with fp32 matrix products; its own are in bf16, which a CPU without bf16 instructions emulates
    (15 s a step for roberta_mini's 24 matrices; in fp32 0.4 s)."""

    @torch.no_grad()
    def step(self, closure=None):
        from pytorch_optimizer.optimizer.utils import zero_power_via_newton_schulz_5

        for group in self.param_groups:
            momentum, lr, decay = (group[key] for key in ("momentum", "lr", "weight_decay"))
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                if "momentum_buffer" not in self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
                buffer = self.state[weight]["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                nesterov = weight.grad.lerp(buffer, momentum)
                update = zero_power_via_newton_schulz_5(nesterov, group["ns_steps"], dtype=torch.float32)
                rows, columns = weight.shape
                match_rms = group["adjust_lr_fn"] == "match_rms_adamw"
                scale = 0.2 * math.sqrt(max(rows, columns)) if match_rms else math.sqrt(max(1, rows / columns))
                weight.mul_(1 - lr * decay).add_(update, alpha=-lr * scale)


class MuonAndAdamW(torch.optim.Optimizer):
    """AdamW and Muon as one optimizer with a common state; AdamW's parameter groups come first."""

    def __init__(self, adamw: torch.optim.AdamW, muon: torch.optim.Muon):
        self._both, self._first = (adamw, muon), len(adamw.param_groups)
        super().__init__([*adamw.param_groups, *muon.param_groups], dict(adamw.defaults))  # schedules read lr there

    def step(self, closure=None):
        parts = self.param_groups[: self._first], self.param_groups[self._first :]
        for optimizer, groups in zip(self._both, parts, strict=True):
            optimizer.param_groups, optimizer.state = groups, self.state  # `load_state_dict` replaces both
            optimizer.step()


def matrices_of_layers(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear modules in the encoder layers, without embeddings, their projections, and heads."""
    matrices = {}  # shared ones once, in the order of the model
    for layers in getattr(model, "base_model", model).modules():
        if isinstance(layers, nn.ModuleList):
            matrices |= {id(layer.weight): layer.weight for layer in layers.modules() if isinstance(layer, nn.Linear)}
    return [weight for weight in matrices.values() if weight.requires_grad]


def build(args: TrainingArguments, model: nn.Module, decayed: Container[str]) -> torch.optim.Optimizer:
    """The optimizer of `args` over a model's parameters, with weight decay for the names in `decayed`. Raises
    `TypeError` or `ValueError` for unknown `optim_args`, some of which Trainer would ignore."""
    optim_args = dict(pair.split("=") for pair in (args.optim_args or "").replace(" ", "").split(",") if pair)
    declared = TABLE[args.optim]
    if unknown := optim_args.keys() - declared.arguments.keys():
        takes = ", ".join(declared.arguments) or "none"
        raise TypeError(
            f"unknown argument {min(unknown)} (valid: {takes}); learning rate, decay, betas and epsilon are flags"
        )
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for name, weight in named if name in decayed], "weight_decay": args.weight_decay},
        {"params": [weight for name, weight in named if name not in decayed], "weight_decay": 0.0},
    ]
    if declared.build:
        given = {name: declared.arguments[name](value) for name, value in optim_args.items()}
        return declared.build(args, groups, matrices_of_layers(model), **given)
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    return cls(groups, **kwargs)


def _adam_options(args: TrainingArguments) -> dict[str, Any]:
    return {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def _lamb(args: TrainingArguments, groups: list[dict[str, Any]], matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
    from pytorch_optimizer import Lamb

    class Unclamped(Lamb):
        clamp = float("inf")  # limit of a weight's norm: 10 in the paper's first version, none in the authors' code

    # the decay is part of the update that is normalized (Algorithm 2); `adam_debias`: no bias correction;
    # `adam`: no trust ratio, as in the authors' code for weights without decay (a bias of padding would dominate it)
    groups = [{**group, "adam": number > 0} for number, group in enumerate(groups)]
    return Unclamped(groups, **_adam_options(args), weight_decouple=False, adam_debias=True)


def _muon(
    args: TrainingArguments, groups: list[dict[str, Any]], matrices: list[nn.Parameter], **optim_args: Any
) -> torch.optim.Optimizer:
    ids = set(map(id, matrices))
    rest = [{**group, "params": [weight for weight in group["params"] if id(weight) not in ids]} for group in groups]
    # 0.02 is the author's, for updates scaled by a matrix's shape alone
    muon = {"lr": 0.02, "weight_decay": args.weight_decay, **optim_args}
    cls = torch.optim.Muon if args.bf16 else MuonInFp32
    return MuonAndAdamW(torch.optim.AdamW(rest, **_adam_options(args)), cls(matrices, **muon))


# all of these resume bit for bit (tests/test_flags.py)
TABLE = {
    "adamw_torch": Optimizer(2),
    "adamw_torch_fused": Optimizer(2),
    "adafactor": Optimizer(0, breaks_under_zero="the matrices whose rows and columns Adafactor uses"),  # few numbers
    "sgd": Optimizer(0, {"momentum": float, "dampening": float, "nesterov": bool}),
    "adagrad": Optimizer(
        1,
        {"lr_decay": float, "eps": float},
        breaks_under_zero="the parameter groups that torch's Adagrad is built with",
    ),
    "rmsprop": Optimizer(1, {"momentum": float, "alpha": float, "eps": float, "centered": bool}),
    "lamb": Optimizer(2, {}, _lamb, "You et al. 2020; ALBERT", breaks_under_zero="the tensors whose norms LAMB uses"),
    "muon": Optimizer(
        2,
        {"lr": float, "weight_decay": float, "momentum": float, "ns_steps": int, "adjust_lr_fn": str},
        _muon,
        "for the matrices of layers, with its own learning rate (--optim_args lr=0.02), and AdamW for the rest",
        matrix_states=1,
        breaks_under_zero="the matrices that Muon orthogonalizes",
    ),
}


def check(args: TrainingArguments) -> None:
    """Raise `InputError` for an optimizer or a schedule that cannot be built, and for arguments that have no effect."""
    name = getattr(args.optim, "value", args.optim)  # also of transformers' enum
    schedule, kwargs = args.lr_scheduler_type, args.lr_scheduler_kwargs or {}
    if args.deepspeed_plugin and (lost := TABLE[name].breaks_under_zero):
        raise InputError(f"optim={name}: ZeRO flattens {lost}; use adamw_torch, or start without DeepSpeed")
    numbers = f"adam_beta1={args.adam_beta1}, adam_beta2={args.adam_beta2}, adam_epsilon={args.adam_epsilon}"
    with explained(f"optim={name} with {numbers} and optim_args={args.optim_args}, name=value,name=value"):
        build(args, nn.ModuleList([nn.Linear(2, 2)]), ["0.weight"])

    where = f"lr_scheduler_type={schedule.value}"
    if kwargs and schedule in (SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP):
        raise InputError(f"lr_scheduler_kwargs={kwargs}: {where} takes none")
    if schedule is SchedulerType.CONSTANT and args.warmup_steps:
        raise InputError(f"warmup_steps={args.warmup_steps:g}: {where} has no warm-up; use constant_with_warmup")
    steps = args.max_steps if args.max_steps > 0 else 1000  # a number of epochs: as long as the data
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    with explained(f"{where} with lr_scheduler_kwargs={kwargs}"):
        get_scheduler(schedule, optimizer, args.get_warmup_steps(steps), steps, kwargs)
    if args.max_steps > 0:
        check_length(args, steps)


def check_length(args: TrainingArguments, steps: int) -> None:
    """Raise `InputError` where a run of `steps` steps ends within its warm-up, or where the phases of
    warmup_stable_decay do not add up to `steps`: the learning rate would end too early or stay high."""
    warmup = args.get_warmup_steps(steps)
    if warmup > steps:
        raise InputError(
            f"warmup_steps={args.warmup_steps:g} is more than the {steps:,} steps of the run: --warmup_steps {steps} "
            "or less; a number below 1 is a share of the steps (--warmup_steps 0.06: Tables 9 and 10)"
        )
    if args.lr_scheduler_type is SchedulerType.WARMUP_STABLE_DECAY:
        kwargs = args.lr_scheduler_kwargs
        decay, stable = kwargs["num_decay_steps"], kwargs.get("num_stable_steps")
        most = steps - warmup
        if not isinstance(decay, int) or not 1 <= decay <= most or stable not in (None, most - decay):
            raise InputError(
                f"lr_scheduler_kwargs={kwargs}: the run has {steps:,} steps, {warmup:,} of them warm-up; set "
                f"num_decay_steps alone, a whole number from 1 to {most:,}; the stable phase is the rest"
            )


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of each parameter group."""
    others = ("params", "foreach", "fused", "capturable", "differentiable")
    return [{name: value for name, value in group.items() if name not in others} for group in optimizer.param_groups]


def restore_hyperparameters(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR, groups: list[dict[str, Any]]
) -> None:
    """Restore `hyperparameters` after loading a checkpoint; schedule step and moments stay the checkpoint's."""
    scheduler.base_lrs = [group["lr"] for group in groups]
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    rates = [lr * factor for lr, factor in zip(scheduler.base_lrs, factors, strict=True)]
    for group, before, lr in zip(optimizer.param_groups, groups, rates, strict=True):
        group.update(before, initial_lr=before["lr"], lr=lr)
    scheduler._last_lr = rates
