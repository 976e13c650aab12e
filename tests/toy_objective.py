"""A toy sentence-level objective with columns of its own: what a new objective needs of `train_mlm.py`.

Its input format gives each block token types (first half, second
half) and a label: none, 0 or 1 in turn, by the block's number in its chunk. Its model predicts the label from `<s>`.
"""

from dataclasses import dataclass

import numpy as np
import torch

from roberta_recipe.args import setting
from roberta_recipe.data import packing
from roberta_recipe.training.modeling import RobertaForMaskedLM
from roberta_recipe.training.pretraining import MlmArguments


def halves(*documents_and_layout):
    """FULL-SENTENCES with two further columns."""
    for number, columns in enumerate(packing.full_sentences(*documents_and_layout)):
        length = len(columns["input_ids"])
        token_type_ids = (np.arange(length) >= length // 2).astype(np.uint8)
        yield {**columns, "token_type_ids": token_type_ids, "toy_label": (-100, 0, 1)[number % 3]}


class ToyModel(RobertaForMaskedLM):
    """RoBERTa with a second head."""

    objectives = {"mlm": "labels", "toy": "toy_label"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.toy_head = torch.nn.Linear(config.hidden_size, 2)
        self.post_init()

    def other_losses(self, hidden, toy_label):
        logits = self.toy_head(hidden[:, 0]).float()
        return {"toy": torch.nn.functional.cross_entropy(logits, toy_label, ignore_index=-100, reduction="sum")}


@dataclass
class ToyArguments(MlmArguments):
    """train_mlm.py's flags, with the toy's input format."""

    input_format: str = setting("halves", "The toy's.", "data", shown=True)
