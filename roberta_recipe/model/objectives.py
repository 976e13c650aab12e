"""The objectives, a declaration each in `TABLE`: the masked LM, SpanBERT's span-boundary objective (arXiv 1907.10529,
section 3.2), BERT's next sentence (arXiv 1810.04805, section 3.1), ALBERT's sentence order (arXiv 1909.11942, 3.1).

A new objective is an entry of `TABLE`; flag, checks, model, logged losses, checkpoints and estimates follow from it.
Its labels are made of the mask, or by packers: entries "format objective" of `chunks.PACKERS`. Heads are trained and
kept in checkpoints; the stock class has none of them, so the finished model is saved without.
"""

from collections.abc import Callable, Collection

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from roberta_recipe.data import IGNORED
from roberta_recipe.data.pairs import NSP, SOP
from roberta_recipe.errors import InputError
from roberta_recipe.model.cross_entropy import cross_entropy
from roberta_recipe.model.masked_lm import MLM, Objective

_MAX_SPAN = 64  # positions in a span that have an embedding; those behind share the last one
_POSITION_SIZE = 200  # of an embedding of a position in the span (SpanBERT, section 4.2)


class SpanBoundaryHead(nn.Module):
    """Predicts the tokens of a span from the two tokens beside it and the position in it: two layers with GELU and
    LayerNorm. `width`: that of the token embedding, narrower than the hidden states in ALBERT. The output layer behind
    it is the masked LM's."""

    def __init__(self, config: PreTrainedConfig, width: int):
        super().__init__()
        size, eps = config.hidden_size, getattr(config, "layer_norm_eps", 1e-5)
        self.position_embeddings = nn.Embedding(_MAX_SPAN, _POSITION_SIZE)
        self.first, self.first_norm = nn.Linear(2 * size + _POSITION_SIZE, size), nn.LayerNorm(size, eps)
        self.second, self.second_norm = nn.Linear(size, width), nn.LayerNorm(width, eps)

    def forward(self, hidden: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        """(predicted positions, width) of `hidden` (batch, seq_len, hidden_size); `predicted` (batch, seq_len) is
        True in spans, none of which touches the end of its row."""
        at = torch.arange(predicted.shape[1], device=predicted.device).expand_as(predicted)
        left = torch.where(predicted, -1, at).cummax(dim=1).values  # the last position before that is in no span
        right = torch.where(predicted, predicted.shape[1], at).flip(1).cummin(dim=1).values.flip(1)
        rows, positions = predicted.nonzero(as_tuple=True)
        left, right = left[predicted], right[predicted]
        relative = self.position_embeddings((positions - left - 1).clamp(max=_MAX_SPAN - 1))
        states = torch.cat([hidden[rows, left], hidden[rows, right], relative], dim=-1)
        states = self.first_norm(functional.gelu(self.first(states)))
        return self.second_norm(functional.gelu(self.second(states)))


def _span_boundary_head(model: PreTrainedModel) -> SpanBoundaryHead:
    decoder, config = model.get_output_embeddings(), model.config
    if getattr(decoder, "out_features", None) != config.vocab_size:
        raise InputError(
            f"objective sbo needs the output layer of the masked LM, which a {config.model_type!r} model does not "
            "show; leave it out, or take another family"
        )
    return SpanBoundaryHead(config, decoder.in_features)


def _span_boundary_loss(model: PreTrainedModel, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    asked = labels != IGNORED
    logits = model.get_output_embeddings()(model.sbo_head(hidden, asked))  # (predicted positions, vocab_size)
    return cross_entropy(logits, labels[asked]).sum()


def _within(labels: np.ndarray) -> np.ndarray:
    """A block's `labels` without those of a span that touches its first or last position."""
    shown = labels == IGNORED
    within = np.logical_or.accumulate(shown) & np.logical_or.accumulate(shown[::-1])[::-1]
    return np.where(within, labels, IGNORED)


class PairHead(nn.Module):
    """Tells the label of a pair of segments from its `<s>`, as BERT's pooler and the layer behind it."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.pooler, self.output = nn.Linear(config.hidden_size, config.hidden_size), nn.Linear(config.hidden_size, 2)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(pairs, 2) of `states` (pairs, hidden_size)."""
        return self.output(torch.tanh(self.pooler(states)))


def _pair_loss(model: PreTrainedModel, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    asked = labels != IGNORED
    return cross_entropy(model.pair_head(hidden[asked]), labels[asked]).sum()


_PAIR = ("pair_head", lambda model: PairHead(model.config), _pair_loss)
TABLE = {
    "mlm": MLM,
    "sbo": Objective(
        "sbo_labels",
        "SpanBERT: the tokens of a span from the two beside it",
        *("sbo_head", _span_boundary_head, _span_boundary_loss, _within),
        masking_units=("span",),
        layers=lambda hidden, width: [(2 * hidden, hidden), (hidden, width)],
    ),
    "nsp": Objective(
        *(NSP, "BERT: whether the second segment follows", *_PAIR),
        needs="files with several held-out documents of two sentences or more: second segments come from others of the "
        "same chunk",
    ),
    "sop": Objective(
        *(SOP, "ALBERT: the order of two segments", *_PAIR), needs="held-out documents of two sentences or more"
    ),
}


def named(names: Collection[str]) -> dict[str, Objective]:
    """The objectives of these names, in the order of the table."""
    return {name: objective for name, objective in TABLE.items() if name in names}


def labels_of_mask(names: Collection[str]) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """The label columns of objectives that are made of masks (`MlmCollator.labels_of_mask`)."""
    return {of.column: of.labels_of_mask for of in named(names).values() if of.labels_of_mask}
