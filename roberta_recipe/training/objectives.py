"""Objectives beside the masked LM: SpanBERT's span-boundary objective (arXiv 1907.10529, section 3.2).

Each has a head of its own, which is trained and kept in the checkpoints that a run is resumed from; the stock class has
no place for it, so the finished model is saved without it.
"""

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers import RobertaConfig

from roberta_recipe.data.masking import IGNORED
from roberta_recipe.training import modeling

_PLACES = 64  # in a span, tokens; those further on share the last


class SpanBoundaryHead(nn.Module):
    """Predicts the tokens of a span from the two tokens beside it and the place in it: two layers with GELU and
    LayerNorm. The paper does not say how wide a place's embedding is; here as the hidden states."""

    def __init__(self, config: RobertaConfig):
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        self.places = nn.Embedding(_PLACES, size)
        self.first, self.first_norm = nn.Linear(3 * size, size), nn.LayerNorm(size, eps)
        self.second, self.second_norm = nn.Linear(size, size), nn.LayerNorm(size, eps)

    def forward(self, hidden: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        """(predicted positions, hidden_size) of `hidden` (batch, seq_len, hidden_size); `predicted` (batch, seq_len) is
        True in spans, none of which touches the end of its row."""
        at = torch.arange(predicted.shape[1], device=predicted.device).expand_as(predicted)
        left = torch.where(predicted, -1, at).cummax(dim=1).values  # the last position before that is in no span
        right = torch.where(predicted, predicted.shape[1], at).flip(1).cummin(dim=1).values.flip(1)
        rows, positions = predicted.nonzero(as_tuple=True)
        left, right = left[predicted], right[predicted]
        places = self.places((positions - left - 1).clamp(max=_PLACES - 1))
        states = torch.cat([hidden[rows, left], hidden[rows, right], places], dim=-1)
        states = self.first_norm(functional.gelu(self.first(states)))
        return self.second_norm(functional.gelu(self.second(states)))


class SpanBoundaryModel(modeling.RobertaForMaskedLM):
    """Masked LM and span-boundary objective. The latter's output layer is tied to the former's."""

    objectives: ClassVar = {"mlm": "labels", "sbo": "sbo_labels"}
    heads_of_objectives = ("sbo_head.",)

    def __init__(self, config: RobertaConfig):
        super().__init__(config)
        self.sbo_head = SpanBoundaryHead(config)
        self.post_init()

    def other_losses(self, hidden, sbo_labels):
        predicted = sbo_labels != IGNORED
        logits = self.lm_head.decoder(self.sbo_head(hidden, predicted))  # (predicted positions, vocab_size)
        return {"sbo": functional.cross_entropy(logits.float(), sbo_labels[predicted], reduction="sum")}


SpanBoundaryModel.__name__ = modeling.RobertaForMaskedLM.__name__  # of the class that its checkpoint is
MODELS: dict[tuple[str, ...], type[modeling.RobertaForMaskedLM]] = {
    ("mlm",): modeling.RobertaForMaskedLM,
    ("mlm", "sbo"): SpanBoundaryModel,
}
