"""Objectives beside the masked LM: SpanBERT's span-boundary objective (arXiv 1907.10529, section 3.2), BERT's next
sentence (arXiv 1810.04805, section 3.1), ALBERT's sentence order (arXiv 1909.11942, section 3.1).

Each has a head of its own, which is trained and kept in the checkpoints that a run is resumed from; the stock class has
none of them, so the finished model is saved without it.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig

from roberta_recipe.data.masking import IGNORED
from roberta_recipe.data.pairs import NSP, SOP
from roberta_recipe.errors import InputError
from roberta_recipe.training import modeling
from roberta_recipe.training.cross_entropy import cross_entropy

_MAX_SPAN = 64  # positions in a span that have an embedding; those behind share the last one
_POSITION_SIZE = 200  # of an embedding of a position in the span (SpanBERT, section 4.2)


class SpanBoundaryHead(nn.Module):
    """Predicts the tokens of a span from the two tokens beside it and the position in it: two layers with GELU and
    LayerNorm. `width`: that of the token embedding, narrower than the hidden states in ALBERT."""

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


class PairHead(nn.Module):
    """Tells the label of a pair of segments from its `<s>`, as BERT's pooler and the layer behind it."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.pooler, self.output = nn.Linear(config.hidden_size, config.hidden_size), nn.Linear(config.hidden_size, 2)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(pairs, 2) of `states` (pairs, hidden_size)."""
        return self.output(torch.tanh(self.pooler(states)))


COLUMNS = {"mlm": "labels", "sbo": "sbo_labels", "nsp": NSP, "sop": SOP}  # of each objective's labels


class OtherObjectives(modeling.PredictedPositions):
    """Masked LM and other objectives, those of `objectives`. The output layer of the span-boundary objective is tied to
    the masked LM's."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        if "sbo" in self.objectives:
            decoder = self.get_output_embeddings()
            if getattr(decoder, "out_features", None) != config.vocab_size:
                raise InputError(
                    f"objective sbo needs the output layer of the masked LM, which a {config.model_type!r} model does "
                    "not show; leave it out, or take another family"
                )
            self.sbo_head = SpanBoundaryHead(config, decoder.in_features)
        if self.objectives.keys() & {"nsp", "sop"}:
            self.pair_head = PairHead(config)
        self.post_init()

    def other_losses(self, hidden, **targets):
        found = {}
        for name, column in self.objectives.items():
            if name == "mlm":
                continue
            asked = targets[column] != IGNORED
            if name == "sbo":
                logits = self.get_output_embeddings()(self.sbo_head(hidden, asked))  # (predicted positions, vocab_size)
            else:
                logits = self.pair_head(hidden[asked])  # (pairs, 2)
            found[name] = cross_entropy(logits, targets[column][asked]).sum()
        return found


def model_class(
    objectives: Sequence[str], config: PreTrainedConfig, name: str = "config"
) -> type[modeling.PredictedPositions]:
    """The class of a model for some objectives, "mlm" among them, of the family of a config (read from `name`); its
    checkpoints are those of the stock class."""
    if list(objectives) == ["mlm"]:
        return modeling.masked_lm_class(config, name)
    columns = {name: COLUMNS[name] for name in COLUMNS if name in objectives}
    heads = ("sbo_head.", "pair_head.")
    return modeling.masked_lm_class(config, name, OtherObjectives, objectives=columns, heads_of_objectives=heads)
