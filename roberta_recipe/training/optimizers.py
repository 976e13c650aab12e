"""The optimizers, a declaration each in `TABLE`: Trainer's own, LAMB (You et al. 2020, arXiv 1904.00962; ALBERT was
trained with it) and Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), from the libraries that keep them.

A new optimizer is an entry of `TABLE`; flag, checks, ZeRO, resuming and the estimate of memory follow from it.
"""

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from roberta_recipe.errors import InputError


@dataclass(frozen=True)
class Optimizer:
    """`build(args, groups, matrices, **optim_args)`: the optimizer over parameter groups, first the group that decays;
    None for one of Trainer's. `arguments` are the `optim_args` that it takes: type and, for `build`, a number's range.
    """

    states: int  # fp32 numbers for each weight
    arguments: dict[str, tuple] = field(default_factory=dict)
    build: Callable[..., torch.optim.Optimizer] | None = None
    help: str = ""
    matrix_states: int | None = None  # fp32 numbers for a weight of `matrices_of_layers`, where it treats them apart
    lost_under_zero: str = ""  # what ZeRO, which flattens and splits the weights, takes away; empty: nothing
    needs_bf16: bool = False  # its matrix products are in bf16, which some machines emulate


def own() -> list[str]:
    """The names that `TrainingArguments` does not know."""
    return [name for name, optimizer in TABLE.items() if optimizer.build]


def name_of(args: TrainingArguments) -> str:
    """The optimizer's name, as it is written on a command line."""
    return getattr(args.optim, "value", args.optim)


class MuonAndAdamW(torch.optim.Optimizer):
    """AdamW and Muon as one optimizer: its groups are AdamW's, then Muon's, and its state is that of both."""

    def __init__(self, adamw: torch.optim.AdamW, muon: torch.optim.Muon):
        self._both, self._first = (adamw, muon), len(adamw.param_groups)
        super().__init__([*adamw.param_groups, *muon.param_groups], dict(adamw.defaults))  # schedules read a rate there

    def step(self, closure=None):
        parts = self.param_groups[: self._first], self.param_groups[self._first :]
        for optimizer, groups in zip(self._both, parts, strict=True):
            optimizer.param_groups, optimizer.state = groups, self.state  # `load_state_dict` has made new ones
            optimizer.step()


def matrices_of_layers(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear modules in the layers of the body: no embedding, no head, no projection of an embedding."""
    found = {}  # each once, in the order of the model
    for layers in getattr(model, "base_model", model).modules():
        if isinstance(layers, nn.ModuleList):
            found |= {id(layer.weight): layer.weight for layer in layers.modules() if isinstance(layer, nn.Linear)}
    return [weight for weight in found.values() if weight.requires_grad]


def build(args: TrainingArguments, model: nn.Module, decayed: Container[str]) -> torch.optim.Optimizer:
    """The optimizer of a model that `args` name; `decayed` names the weights that decay. Raises `TypeError` and
    `ValueError` for `optim_args` that it cannot take, some of which Trainer passes over."""
    name, optim_args = name_of(args), parsed(args.optim_args)
    declared, matrices = TABLE[name], matrices_of_layers(model)
    if unknown := optim_args.keys() - declared.arguments.keys():
        takes = ", ".join(declared.arguments) or "none"
        raise TypeError(
            f"it has no {min(unknown)}, it takes {takes}; rate, decay, betas and epsilon have flags of their own"
        )
    given = {name: declared.arguments[name][0](value) for name, value in optim_args.items()}
    for key, value in given.items():
        _, *limits = declared.arguments[key]
        if limits and not limits[0] <= value < limits[1]:
            raise ValueError(f"{key}={value} must be from {limits[0]} to below {limits[1]:g}")
    if declared.matrix_states is not None and not matrices:
        kind = model.config.model_type
        raise InputError(f"optim={name}: no layer of this {kind!r} model has a linear module to train")
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for name, weight in named if name in decayed], "weight_decay": args.weight_decay},
        {"params": [weight for name, weight in named if name not in decayed], "weight_decay": 0.0},
    ]
    if declared.build:
        return declared.build(args, groups, matrices, **given)
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    return cls(groups, **kwargs)


def parsed(optim_args: str | None) -> dict[str, str]:
    """`optim_args` by name. Raises `ValueError` where they are not name=value,name=value."""
    pairs = [pair.split("=") for pair in (optim_args or "").replace(" ", "").split(",") if pair]
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _of_adam(args: TrainingArguments) -> dict[str, Any]:
    return {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def _lamb(args: TrainingArguments, groups: list[dict[str, Any]], matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
    from pytorch_optimizer import Lamb

    class Unclamped(Lamb):
        clamp = float("inf")  # of a weight's norm: 10 in the paper's first version, no limit in the authors' code

    # the decay is a part of the update whose norm is taken (Algorithm 2); `adam_debias` leaves the rate as it is;
    # `adam`, the norms out: in the authors' code, of what is not decayed (a bias of padding would be its norm)
    groups = [{**group, "adam": number > 0} for number, group in enumerate(groups)]
    return Unclamped(groups, **_of_adam(args), weight_decouple=False, adam_debias=True)


def _muon(
    args: TrainingArguments, groups: list[dict[str, Any]], matrices: list[nn.Parameter], **optim_args: Any
) -> torch.optim.Optimizer:
    taken = set(map(id, matrices))
    rest = [{**group, "params": [weight for weight in group["params"] if id(weight) not in taken]} for group in groups]
    # 0.02 is its author's, for the update whose scale is adjusted by a matrix's shape alone
    muon = {"lr": 0.02, "weight_decay": args.weight_decay, **optim_args}
    return MuonAndAdamW(torch.optim.AdamW(rest, **_of_adam(args)), torch.optim.Muon(matrices, **muon))


_ANY, _POSITIVE = (float,), (float, 0, math.inf)
# those whose runs are resumed bit for bit (tests/test_flags.py)
TABLE = {
    "adamw_torch": Optimizer(2),
    "adamw_torch_fused": Optimizer(2),
    "adafactor": Optimizer(0, lost_under_zero="the matrices that Adafactor takes rows and columns of"),  # few numbers
    "sgd": Optimizer(0, {"momentum": _ANY, "dampening": _ANY, "nesterov": (bool,)}),
    "adagrad": Optimizer(1, {"lr_decay": _ANY, "eps": _ANY}),
    "rmsprop": Optimizer(1, {"momentum": _ANY, "alpha": _ANY, "eps": _ANY, "centered": (bool,)}),
    "lamb": Optimizer(2, {}, _lamb, "You et al. 2020, ALBERT's", lost_under_zero="the tensors whose norms LAMB takes"),
    "muon": Optimizer(
        2,
        {"lr": _POSITIVE, "weight_decay": _POSITIVE, "momentum": (float, 0, 1)}
        | {"ns_steps": (int, 1, 100), "adjust_lr_fn": (str,)},
        _muon,
        "for the matrices of layers, with a rate of its own (--optim_args lr=0.02), and AdamW for the rest",
        matrix_states=1,
        lost_under_zero="the matrices that Muon orthogonalizes",
        needs_bf16=True,
    ),
}
