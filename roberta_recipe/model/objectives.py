"""Pretraining objectives, declared in `TABLE`: masked LM, SpanBERT's span-boundary objective (arXiv 1907.10529, 3.2),
BERT's next-sentence prediction (arXiv 1810.04805, 3.1), ALBERT's sentence-order prediction (arXiv 1909.11942, 3.1).

A new objective is an entry of `TABLE`, from which flag, checks, model, logged losses, checkpoints and estimates are
derived. Its labels come from the mask, or from packers: entries "format objective" of `chunks.PACKERS`. Checkpoints of
a run include the heads; the finished model is saved without them, as the stock class.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from roberta_recipe.data import IGNORED, NSP, SOP
from roberta_recipe.errors import InputError
from roberta_recipe.model.masked_lm import MLM, Objective, cross_entropy

_MAX_SPAN = 64  # position embeddings in a span; later positions share the last one
_POSITION_SIZE = 200  # of a position embedding in a span (SpanBERT, section 4.2)


class SpanBoundaryHead(nn.Module):
    """Two layers with GELU and LayerNorm over the two boundary tokens of a span and the position in it, before the
    masked LM's output layer. `width`: of the token embedding, in ALBERT narrower than the hidden states."""

    def __init__(self, config: PreTrainedConfig, width: int):
        super().__init__()
        size, eps = config.hidden_size, getattr(config, "layer_norm_eps", 1e-5)
        self.position_embeddings = nn.Embedding(_MAX_SPAN, _POSITION_SIZE)
        self.first, self.first_norm = nn.Linear(2 * size + _POSITION_SIZE, size), nn.LayerNorm(size, eps)
        self.second, self.second_norm = nn.Linear(size, width), nn.LayerNorm(width, eps)

    def forward(self, hidden: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        """(predicted positions, width) from `hidden` (batch, seq_len, hidden_size); `predicted` (batch, seq_len): True
        in spans, none of which touches an end of its row."""
        at = torch.arange(predicted.shape[1], device=predicted.device).expand_as(predicted)
        left = torch.where(predicted, -1, at).cummax(dim=1).values  # last position before the span
        right = torch.where(predicted, predicted.shape[1], at).flip(1).cummin(dim=1).values.flip(1)
        rows, positions = predicted.nonzero(as_tuple=True)
        left, right = left[predicted], right[predicted]
        relative = self.position_embeddings((positions - left - 1).clamp(max=_MAX_SPAN - 1))
        states = torch.cat([hidden[rows, left], hidden[rows, right], relative], dim=-1)
        states = self.first_norm(functional.gelu(self.first(states)))
        return self.second_norm(functional.gelu(self.second(states)))


def _span_boundary_head(model: PreTrainedModel) -> SpanBoundaryHead:
    decoder = model.get_output_embeddings()
    if getattr(decoder, "out_features", None) != model.config.vocab_size:
        raise InputError(f"objective sbo: a {model.config.model_type!r} model has no output layer that can be shared")
    return SpanBoundaryHead(model.config, decoder.in_features)


def _span_boundary_loss(model: PreTrainedModel, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    predicted = labels != IGNORED
    logits = model.get_output_embeddings()(model.sbo_head(hidden, predicted))  # (predicted positions, vocab_size)
    return cross_entropy(logits, labels[predicted]).sum()


def _without_outer_spans(labels: np.ndarray) -> np.ndarray:
    """A block's `labels` without spans that touch its first or last position."""
    shown = labels == IGNORED
    inside = np.logical_or.accumulate(shown) & np.logical_or.accumulate(shown[::-1])[::-1]
    return np.where(inside, labels, IGNORED)


def _pair_head(model: PreTrainedModel) -> nn.Module:
    """BERT's pooler and classifier of a pair: logits (pairs, 2) from the states of its `<s>` (pairs, hidden_size)."""
    size = model.config.hidden_size
    return nn.Sequential(OrderedDict(pooler=nn.Linear(size, size), tanh=nn.Tanh(), output=nn.Linear(size, 2)))


def _pair_loss(model: PreTrainedModel, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    labelled = labels != IGNORED
    return cross_entropy(model.pair_head(hidden[labelled]), labels[labelled]).sum()


_PAIR = {"head_name": "pair_head", "head": _pair_head, "loss": _pair_loss}
TABLE = {
    "mlm": MLM,
    "sbo": Objective(
        "sbo_labels",
        "SpanBERT: the tokens of a span from its two boundary tokens",
        head_name="sbo_head",
        head=_span_boundary_head,
        loss=_span_boundary_loss,
        labels_of_mask=_without_outer_spans,
        masking_units=("span",),
        layers=lambda hidden, width: [(2 * hidden, hidden), (hidden, width)],
    ),
    "nsp": Objective(NSP, "BERT: whether the second segment follows", **_PAIR, needs="files with several documents"),
    "sop": Objective(SOP, "ALBERT: the order of two segments", **_PAIR, needs="documents of two sentences or more"),
}


def named(names: Collection[str]) -> dict[str, Objective]:
    """The objectives with these names, in the order of the table."""
    return {name: objective for name, objective in TABLE.items() if name in names}


def labels_of_mask(names: Collection[str]) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """The functions for label columns that are computed from masks (`MlmCollator.labels_of_mask`)."""
    return {each.column: each.labels_of_mask for each in named(names).values() if each.labels_of_mask}
