"""LAMB (You et al. 2020, arXiv 1904.00962; ALBERT was trained with it) and Muon (Jordan et al. 2024,
kellerjordan.github.io/posts/muon), from the libraries that keep them."""

import math
from typing import Any, Literal

import torch
from torch import nn
from transformers import TrainingArguments

# those whose runs are resumed bit for bit (tests/test_flags.py)
Optimizer = Literal["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "lamb", "muon"]
# fp32 numbers that each keeps for a weight, of Adafactor's few; Muon for a matrix that it takes, AdamW has the rest
STATES = {"adamw_torch": 2, "adamw_torch_fused": 2, "adafactor": 0, "sgd": 0, "adagrad": 1, "rmsprop": 1, "lamb": 2}
STATES_OF_MUON = 1
OWN = ("lamb", "muon")  # those that `TrainingArguments` does not know
MUON_LEARNING_RATE = 0.02  # its author's, for the update whose scale is adjusted by a matrix's shape alone
_OF_MUON = {"lr": float, "weight_decay": float, "momentum": float, "ns_steps": int, "adjust_lr_fn": str}
_RANGES = {"lr": (0, math.inf), "weight_decay": (0, math.inf), "momentum": (0, 1), "ns_steps": (1, 100)}


class MuonAndAdamW(torch.optim.Optimizer):
    """AdamW and Muon as one optimizer: its groups are AdamW's, then Muon's, and its state is that of both."""

    def __init__(self, adamw: torch.optim.AdamW, muon: torch.optim.Muon):
        self._both = (adamw, muon)
        super().__init__([*adamw.param_groups, *muon.param_groups], dict(adamw.defaults))  # schedules read a rate there
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:  # `load_state_dict` makes new groups and a new state
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        adamw, muon = self._both
        first = len(adamw.param_groups)
        adamw.param_groups, muon.param_groups = self.param_groups[:first], self.param_groups[first:]
        adamw.state = muon.state = self.state

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self._both:
            optimizer.step()
        return loss


def matrices_of_layers(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear modules in the layers of the body: no embedding, no head, no projection of an embedding."""
    found = {}  # each once, in the order of the model
    for layers in getattr(model, "base_model", model).modules():
        if isinstance(layers, nn.ModuleList):
            found |= {id(layer.weight): layer.weight for layer in layers.modules() if isinstance(layer, nn.Linear)}
    return [weight for weight in found.values() if weight.requires_grad]


def build(
    args: TrainingArguments, optim_args: dict[str, str], groups: list[dict[str, Any]], matrices: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer that `args.optim` names, one of `OWN`, over `groups` of weights, first those that decay; under
    Muon, `matrices` are taken out of them. Raises `TypeError` and `ValueError` for `optim_args` that it cannot take."""
    common = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if unknown := [name for name in optim_args if args.optim != "muon" or name not in _OF_MUON]:
        raise TypeError(f"it has no {unknown[0]}")
    if args.optim == "lamb":
        from pytorch_optimizer import Lamb

        class Unclamped(Lamb):
            clamp = float("inf")  # of a weight's norm: 10 in the paper's first version, no limit in the authors' code

        # the decay is a part of the update whose norm is taken (Algorithm 2); `adam_debias` leaves the rate as it is;
        # `adam`, the norms out: in the authors' code, of what is not decayed (a bias of padding would be its norm)
        groups = [{**group, "adam": number > 0} for number, group in enumerate(groups)]
        return Unclamped(groups, **common, weight_decouple=False, adam_debias=True)
    given = {name: _OF_MUON[name](value) for name, value in optim_args.items()}
    for name, value in given.items():
        least, below = _RANGES.get(name, (None, None))
        if least is not None and not least <= value < below:
            raise ValueError(f"{name}={value} must be from {least} to below {below:g}")
    taken = set(map(id, matrices))
    rest = [{**group, "params": [weight for weight in group["params"] if id(weight) not in taken]} for group in groups]
    adamw = torch.optim.AdamW(rest, **common)
    muon = {"lr": MUON_LEARNING_RATE, "weight_decay": args.weight_decay, **given}
    return MuonAndAdamW(adamw, torch.optim.Muon(matrices, **muon))
