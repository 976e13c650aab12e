"""The masked-LM head and its loss over the whole effective batch (paper, section 2.3), and the model from a config."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import MaskedLMOutput

from roberta_recipe.arithmetic import round_up
from roberta_recipe.data import IGNORED
from roberta_recipe.errors import InputError
from roberta_recipe.model import albert, architectures, weights
from roberta_recipe.model.attention import MASKED_BY_PAIRS
from roberta_recipe.model.cross_entropy import cross_entropy
from roberta_recipe.model.varlen import VARLEN, positions_within, unpad

UNSEEN_LOGIT = -1e4  # a logit no softmax sees (and that fp16 can hold)


@dataclass
class ObjectivesOutput(MaskedLMOutput):
    """`MaskedLMOutput` with the sum of the losses of each objective, which trainer and evaluation divide by the number
    of its targets in the whole effective batch, or in the whole validation set."""

    loss_sums: dict[str, torch.Tensor] | None = None  # nats, ()
    losses: torch.Tensor | None = None  # of the masked LM: nats, (predicted positions,)


@dataclass(frozen=True)
class Objective:
    """`head(model)` becomes the attribute `head_name` of a masked LM. `loss(model, hidden, labels)` is the sum of the
    losses in nats, of the last layer's output (batch, seq_len, hidden_size) and the objective's label column."""

    column: str  # of a batch; -100 is no target
    help: str = ""
    head_name: str = ""
    head: Callable[[PreTrainedModel], torch.nn.Module] | None = None  # None: the masked LM's own, and its loss
    loss: Callable[[PreTrainedModel, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    # the column of a block, of its masked-LM labels; None: packers write it
    labels_of_mask: Callable[[np.ndarray], np.ndarray] | None = None
    masking_units: tuple[str, ...] = ()  # that it goes with; empty: all
    needs: str = "other held-out text"  # where the validation blocks have no label of it
    # (hidden_size, width of the token embedding) -> (inputs, outputs) of the layers that a predicted position goes
    # through before the output layer over the vocabulary; none where a block is read once, which is not counted
    layers: Callable[[int, int], list[tuple[int, int]]] = lambda hidden, width: []


MLM = Objective("labels", layers=lambda hidden, width: [(hidden, width)])


class PredictedPositions:
    """In front of a stock masked LM of any family: the head run only where a label is set (for the families of
    `architectures.TABLE`), and the sum of the losses of each objective.

    Such a class has the stock class's name, parameters and config (`masked_lm_class`), so that what it saves is the
    stock class's checkpoint. `objectives` has the masked LM under "mlm", and others with their heads.
    """

    objectives: ClassVar[dict[str, Objective]] = {"mlm": MLM}

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        for objective in self.other_objectives.values():
            setattr(self, objective.head_name, objective.head(self))
        if self.other_objectives:
            self.post_init()

    @property
    def other_objectives(self) -> dict[str, Objective]:
        """Those beside the masked LM."""
        return {name: objective for name, objective in self.objectives.items() if objective.head}

    @property
    def heads_of_objectives(self) -> tuple[str, ...]:
        """The prefixes of the names of weights that the stock class does not have."""
        return tuple(f"{objective.head_name}." for objective in self.other_objectives.values())

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        sequence: torch.Tensor | None = None,
        predicted: torch.Tensor | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        """Without labels: as the stock class. With labels (batch, seq_len), -100 where nothing is predicted, the output
        has losses and no logits, which accelerate would copy to fp32:

        `losses` are the cross-entropies in nats (predicted positions,) in the order of `labels != -100`,
        `loss_sums["mlm"]` is their sum, and `loss` their mean over this batch (0 where nothing is predicted). The stock
        class has the mean alone, which is not what accumulated micro-batches of unequal counts need.

        `predicted` (positions,) has the flat positions of the labels, padded with -1, for which a loss is 0; without
        it, `nonzero` synchronises with the device. With `sequence` (batch, seq_len), the number of each token's
        sequence in its row, the result is that of a batch in which every sequence is a row of its own.
        """
        if getattr(self.config, "type_vocab_size", 0) < 2:  # as RoBERTa: separators alone tell segments apart
            kwargs.pop("token_type_ids", None)
        others = self.other_objectives
        other_targets = {name: kwargs.pop(objective.column, None) for name, objective in others.items()}
        family, attention = architectures.TABLE.get(self.config.model_type), self.config._attn_implementation
        first_position = family.first_position(self.config) if family and family.first_position else None
        # the eager attention adds the mask to scores of the weights' precision
        added = self.dtype if attention == "eager" else None
        if attention == VARLEN and labels is not None:
            unpadded = unpad(input_ids, attention_mask, sequence, first_position)
            input_ids, labels = unpadded.row(input_ids), unpadded.row(labels)
            other_targets = {name: unpadded.row(column) for name, column in other_targets.items()}
            attention_mask = None
            predicted = None if predicted is None else torch.searchsorted(unpadded.flat, predicted)
            kwargs = {name: unpadded.row(column) for name, column in kwargs.items()}  # token_type_ids
            kwargs |= {"position_ids": unpadded.position_ids, **unpadded.arguments}
        elif sequence is not None:
            attention_mask, kwargs["position_ids"] = apart(sequence, attention_mask, first_position, added)
        elif attention_mask is not None and attention in MASKED_BY_PAIRS and first_position is not None:
            # transformers takes a 4-D mask as it is; on a 2-D mask it calls `.all()`, which synchronises
            attention_mask = _as_added(attention_mask[:, None, None, :].bool(), added)
        if labels is None:
            return super().forward(input_ids, attention_mask=attention_mask, **kwargs)
        if predicted is None:
            predicted = (labels.flatten() != IGNORED).nonzero()[:, 0]
        at = predicted.clamp(min=0)
        targets = torch.where(predicted < 0, IGNORED, labels.flatten()[at])
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        if family:
            hidden = self.base_model(**inputs, return_dict=True)[0]
            logits = family.head(self, hidden.flatten(0, 1).index_select(0, at))  # (predicted positions, vocab_size)
        else:
            output = super().forward(**inputs, output_hidden_states=bool(others), return_dict=True)
            hidden = (output.hidden_states or [None])[-1]
            logits = output.logits.flatten(0, 1).index_select(0, at)
        losses = cross_entropy(logits, targets)
        total = losses.sum()
        mean = total / (targets != IGNORED).sum().clamp(min=1)
        loss_sums = {name: objective.loss(self, hidden, other_targets[name]) for name, objective in others.items()}
        return ObjectivesOutput(loss=mean, loss_sums={"mlm": total, **loss_sums}, losses=losses)


class RobertaForMaskedLM(PredictedPositions, transformers.RobertaForMaskedLM):
    """RoBERTa's, for what trains no other family."""


def masked_lm_class(
    config: PreTrainedConfig, source: str = "config", objectives: dict[str, Objective] | None = None
) -> type[PredictedPositions]:
    """The stock class of a config's family (read from `source`, for an `InputError`) with `PredictedPositions` of
    `objectives` (None: the masked LM) in front; and what shares parts of layers, where a config asks for that."""
    stock = architectures.stock_class(config, source)
    between = (albert.SharedParts,) if albert.shares_parts(config) else ()
    attributes = {"objectives": objectives or PredictedPositions.objectives}
    return type(stock.__name__, (PredictedPositions, *between, stock), attributes)


def apart(
    sequence: torch.Tensor, attention_mask: torch.Tensor | None, first_position: int, added: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What keeps the sequences of a row apart: the attention mask (batch, 1, seq_len, seq_len), in which a token sees
    its own sequence alone, True or, of a type `added`, 0; and position ids (batch, seq_len) that begin anew in each,
    from `first_position` on."""
    same = sequence[:, None, :, None] == sequence[:, None, None, :]
    if attention_mask is not None:
        same &= attention_mask[:, None, None, :].bool()
    begins = torch.ones_like(sequence, dtype=torch.bool)
    begins[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    return _as_added(same, added), positions_within(begins, first_position)


def _as_added(mask: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A bool mask, or with `dtype` 0 where it is True and that type's lowest number elsewhere."""
    return torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype) if dtype else mask


def compile_encoder(model: PredictedPositions, backend: str | None = None, mode: str | None = None) -> None:
    """Compile `base_model` in place for a fixed batch shape; head and losses stay eager, parameter names unchanged.
    `backend` defaults to inductor."""
    model.base_model.compile(backend=backend or "inductor", mode=mode, dynamic=False)


def build_model(
    tokenizer: PreTrainedTokenizerBase,
    *,
    config_name: str | None = None,
    config_overrides: str | None = None,
    model_name_or_path: str | None = None,
    max_seq_length: int = 512,
    pad_vocab_to_multiple_of: int | None = None,
    objectives: dict[str, Objective] | None = None,
) -> PredictedPositions:
    """A masked LM with fresh weights from a config, or with those of a checkpoint, that fits tokenizer and block
    length; with the heads of `objectives` (None: the masked LM).

    `pad_vocab_to_multiple_of` adds rows to the embedding; the bias of such a row keeps it out of the softmax, so
    losses are those of the unpadded model. Raises `InputError` where vocabularies or lengths disagree.
    """
    source = model_name_or_path or config_name
    config = weights.config_of(config_name, config_overrides, model_name_or_path)
    if model_name_or_path:
        where = f"model_name_or_path={source!r}"
        albert.resolve(config, where)
        if albert.shares_parts(config):
            albert.check_copies(
                weights.load(architectures.stock_class(config, source), source, config=config)[0], where
            )
    cls = masked_lm_class(config, source, objectives)
    padded = round_up(len(tokenizer), pad_vocab_to_multiple_of or 1)
    if config.vocab_size not in (len(tokenizer), padded):
        raise InputError(
            f"vocabularies disagree: {source!r} has vocab_size={config.vocab_size}, the tokenizer {len(tokenizer)} "
            f"entries; set vocab_size to {len(tokenizer)}, name the model's own tokenizer with tokenizer_name, or set "
            "pad_vocab_to_multiple_of to what it was padded to"
        )
    if config.pad_token_id != tokenizer.pad_token_id:
        raise InputError(
            f"vocabularies disagree: {source!r} has pad_token_id={config.pad_token_id}, the tokenizer "
            f"{tokenizer.pad_token_id}"
        )
    positions = weights.positions(config)
    if positions is not None and max_seq_length > positions:
        rows = config.max_position_embeddings - positions + max_seq_length
        raise InputError(
            f"max_seq_length={max_seq_length} is longer than the {positions} positions of {source!r}; "
            f"set max_position_embeddings to {rows}, or shorten the blocks"
        )
    if model_name_or_path:
        # the heads of other objectives are not in a finished model
        model, info = weights.load(cls, model_name_or_path, config=config, fresh_head=len(cls.objectives) > 1)
        if any(not name.startswith(model.heads_of_objectives) for name in info["missing_keys"]):
            raise InputError(f"model_name_or_path={model_name_or_path!r} has no weights for a masked-LM head")
        if padded != config.vocab_size:
            model.resize_token_embeddings(padded, mean_resizing=False)
    else:
        config.vocab_size = padded
        model = weights.fresh(cls, source, config)
    if padded > len(tokenizer):
        hide_rows_of_padding(model, len(tokenizer))
    return model


def hide_rows_of_padding(model: PreTrainedModel, entries: int) -> None:
    """Keep the rows of the embedding from `entries` on, which no token has, out of the softmax. Raises `InputError` for
    a head without a bias for each row."""
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is None or len(bias) != model.config.vocab_size:
        raise InputError(
            f"a {model.config.model_type!r} model has no bias in its head that could keep rows of padding out of the "
            f"softmax: leave pad_vocab_to_multiple_of out, with vocab_size={entries}"
        )
    with torch.no_grad():
        bias[entries:] = UNSEEN_LOGIT


def embedding_width(config: PreTrainedConfig) -> int:
    """Of the token embedding: ALBERT's is narrower than the hidden states."""
    return getattr(config, "embedding_size", config.hidden_size)


def layer_weights(config: PreTrainedConfig) -> int:
    """Weights of the matrices of one layer; ModernBERT has three in a feed-forward layer."""
    matrices = 3 if config.model_type == "modernbert" else 2
    return config.hidden_size * (4 * config.hidden_size + matrices * config.intermediate_size)


def flops_per_token(
    config: PreTrainedConfig, seq_len: int, mlm_probability: float, objectives: dict[str, Objective] | None = None
) -> float:
    """FLOPs of forward and backward for one token of a `seq_len` block, the heads on predicted positions only.

    Body 6 x 12 x L x h^2 (with an intermediate size of 4h), attention 12 x L x S x h, head 6 x (h^2 + h x V) x p;
    2 a multiply-add, the backward pass twice the forward (Kaplan et al. 2020, appendix B; 6N). ALBERT: the embedding's
    projection is added, and the head is as narrow as the embedding. The heads are those of the objectives
    (`Objective.layers`); what reads a block once is left out. Attention is counted as if every token saw all others,
    and without DeBERTa's relative positions.
    """
    hidden, layers, width = config.hidden_size, config.num_hidden_layers, embedding_width(config)
    objectives = objectives or PredictedPositions.objectives
    body = 6 * layers * layer_weights(config)
    embedding = 6 * hidden * width * (width != hidden)
    attention = 12 * layers * seq_len * hidden
    heads = filter(None, (objective.layers(hidden, width) for objective in objectives.values()))
    head = 6 * sum(sum(map(math.prod, of_head)) + width * config.vocab_size for of_head in heads) * mlm_probability
    return body + embedding + attention + head
