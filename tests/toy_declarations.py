"""A toy objective and a toy optimizer: a declaration each and, for the labels, a packer.

The packer adds token types (first half, second half) and a label (none, 0 or 1 in turn) to FULL-SENTENCES; a head
predicts it from `<s>`. The optimizer is SGD with signs of a running mean.
"""

import numpy as np
import torch

from roberta_recipe.data import chunks, packing
from roberta_recipe.model import objectives
from roberta_recipe.training import optimizers


def halves(*documents_and_layout):
    """FULL-SENTENCES with two more columns."""
    for number, columns in enumerate(packing.full_sentences(*documents_and_layout)):
        length = len(columns["input_ids"])
        token_type_ids = (np.arange(length) >= length // 2).astype(np.uint8)
        yield {**columns, "token_type_ids": token_type_ids, "toy_label": (-100, 0, 1)[number % 3]}


def toy_loss(model, hidden, labels):
    logits = model.toy_head(hidden[:, 0]).float()
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


OBJECTIVE = objectives.Objective(
    "toy_label",
    "a toy: the number of a block",
    head_name="toy_head",
    head=lambda model: torch.nn.Linear(model.config.hidden_size, 2),
    loss=toy_loss,
)


class SignDescent(torch.optim.Optimizer):
    """Steps of the size of the learning rate, with the signs of a running mean of the gradients."""

    def __init__(self, groups, lr, momentum):
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                weight -= group["lr"] * (mean.sign() + group["weight_decay"] * weight)


OPTIMIZER = optimizers.Optimizer(
    1,
    {"momentum": float},
    lambda args, groups, matrices, momentum=0.9: SignDescent(groups, args.learning_rate, momentum),
    "a toy: signs of a running mean",
    breaks_under_zero="nothing, but a toy has not been tried",
)


def declare(set_item):
    """Add the toys to the tables by `set_item(table, name, entry)`."""
    set_item(objectives.TABLE, "toy", OBJECTIVE)
    set_item(chunks.PACKERS, "full_sentences toy", halves)
    set_item(optimizers.TABLE, "toy", OPTIMIZER)
