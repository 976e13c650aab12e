"""Masked LM: head on predicted positions, sums of losses per objective (paper, section 2.3), construction, FLOPs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import MaskedLMOutput

from roberta_recipe.data import IGNORED
from roberta_recipe.data.tokenization import boundary_ids
from roberta_recipe.errors import InputError
from roberta_recipe.model import architectures, weights
from roberta_recipe.model.attention import TAKES_4D_MASK, VARLEN, positions_within, unpad

LOGITS_AT_ONCE = 1 << 22  # of the loss: fp32 copy and softmax take 34 MB, within an H100's L2 cache
EXCLUDED_LOGIT = -1e4  # zero after a softmax, and within fp16's range
_GATED = ("modernbert", "nomic_bert", "gte", "eurobert")  # feed-forward networks of three matrices


@dataclass
class ObjectivesOutput(MaskedLMOutput):
    """`MaskedLMOutput` with a loss sum per objective, for division by the targets of a batch or validation set."""

    loss_sums: dict[str, torch.Tensor] | None = None  # nats, ()
    losses: torch.Tensor | None = None  # of the masked LM: nats, (predicted positions,)


@dataclass(frozen=True)
class Objective:
    """Declaration of an objective. `head(model)` becomes the attribute `head_name` of the masked LM. `loss(model,
    hidden, labels)`: sum in nats (for a regression: of negative log-likelihoods), from the encoder's output (batch,
    seq_len, hidden_size) and the label column. With varlen attention they are (1, tokens, hidden_size) and (1, tokens):
    a label per block is impossible. A step's loss adds the objectives with weight 1."""

    column: str  # label column of a batch; -100: no target
    help: str = ""
    head_name: str = ""
    head: Callable[[PreTrainedModel], torch.nn.Module] | None = None  # None: the masked LM's own, and its loss
    loss: Callable[[PreTrainedModel, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    # a block's label column, computed from its masked-LM labels; None: packers write it
    labels_of_mask: Callable[[np.ndarray], np.ndarray] | None = None
    masking_units: tuple[str, ...] = ()  # supported ones; empty: all
    needs: str = "other text"  # for the error message if the validation blocks have no label
    # for FLOPs: (hidden_size, width of the token embedding) -> (inputs, outputs) of the linear layers of the head,
    # except the output layer over the vocabulary; empty: the head is not counted
    layers: Callable[[int, int], list[tuple[int, int]]] = lambda hidden, width: []


MLM = Objective("labels", layers=lambda hidden, width: [(hidden, width)])


class MaskedLmMixin:
    """Mixin for a stock masked LM: runs the head on predicted positions only (`architectures.TABLE`), and returns a sum
    of losses for each of `objectives`. Class name, parameters, config and checkpoints are those of the stock class."""

    objectives: ClassVar[dict[str, Objective]] = {"mlm": MLM}

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        for objective in self.other_objectives.values():
            setattr(self, objective.head_name, objective.head(self))
        if self.other_objectives:
            self.post_init()

    @property
    def other_objectives(self) -> dict[str, Objective]:
        """The objectives except the masked LM."""
        return {name: objective for name, objective in self.objectives.items() if objective.head}

    @property
    def heads_of_objectives(self) -> tuple[str, ...]:
        """Name prefixes of the parameters that the stock class does not have."""
        return tuple(f"{objective.head_name}." for objective in self.other_objectives.values())

    def forward(self, input_ids=None, attention_mask=None, labels=None, sequence=None, predicted=None, **kwargs):
        """Without labels: as the stock class. With labels (batch, seq_len), -100 where nothing is predicted, the output
        has losses and no logits (accelerate would copy them to fp32):

        `losses`: cross-entropies in nats (predicted positions,) in the order of `labels != -100`. `loss_sums["mlm"]`:
        their sum. `loss`: their mean over this batch, 0 if nothing is predicted. (From the stock class's mean alone,
        micro-batches with different counts cannot be accumulated.)

        `predicted` (positions,): flat positions of the labels, padded with -1, for which the loss is 0; without it,
        `nonzero` synchronizes with the device. `sequence` (batch, seq_len): index of each token's sequence in its row;
        the result is the same as with one sequence per row.
        """
        if getattr(self.config, "type_vocab_size", 0) < 2:  # RoBERTa separates segments by </s> alone
            kwargs.pop("token_type_ids", None)
        others = self.other_objectives
        other_targets = {name: kwargs.pop(objective.column, None) for name, objective in others.items()}
        architecture = architectures.TABLE.get(self.config.model_type)
        attention, first_position = self.config._attn_implementation, None
        if self.config.model_type in architectures.MULTI_SEQUENCE_MODELS:
            first_position = architecture.first_position(self.config)
        additive_dtype = self.dtype if attention == "eager" else None  # eager attention adds the mask to the scores
        if attention == VARLEN and labels is not None:
            unpadded = unpad(input_ids, attention_mask, sequence, first_position)
            input_ids, labels = unpadded.row(input_ids), unpadded.row(labels)
            other_targets = {name: unpadded.row(column) for name, column in other_targets.items()}
            attention_mask = None
            predicted = None if predicted is None else torch.searchsorted(unpadded.flat, predicted)
            kwargs = {name: unpadded.row(column) for name, column in kwargs.items()}  # token_type_ids
            kwargs |= {"position_ids": unpadded.position_ids, **unpadded.arguments}
        elif sequence is not None:  # block-diagonal (batch, 1, seq_len, seq_len); positions restart in each sequence
            same = sequence[:, None, :, None] == sequence[:, None, None, :]
            if attention_mask is not None:
                same &= attention_mask[:, None, None, :].bool()
            attention_mask = _additive(same, additive_dtype)
            begins = torch.nn.functional.pad(sequence.diff() != 0, (1, 0), value=True)
            kwargs["position_ids"] = positions_within(begins, first_position)
        elif attention_mask is not None and attention in TAKES_4D_MASK and first_position is not None:
            # for a 2-D mask, transformers calls `.all()`, which synchronizes; a 4-D mask is passed on
            attention_mask = _additive(attention_mask[:, None, None, :].bool(), additive_dtype)
        if labels is None:
            return super().forward(input_ids, attention_mask=attention_mask, **kwargs)
        if predicted is None:
            predicted = (labels.flatten() != IGNORED).nonzero()[:, 0]
        positions = predicted.clamp(min=0)
        targets = torch.where(predicted < 0, IGNORED, labels.flatten()[positions])
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        if architecture:
            hidden = self.base_model(**inputs, return_dict=True)[0]
            logits = architecture.head(self, hidden.flatten(0, 1).index_select(0, positions))  # (positions, vocab_size)
        else:
            output = super().forward(**inputs, output_hidden_states=bool(others), return_dict=True)
            hidden = (output.hidden_states or [None])[-1]
            logits = output.logits.flatten(0, 1).index_select(0, positions)
        losses = cross_entropy(logits, targets)
        total = losses.sum()
        mean = total / (targets != IGNORED).sum().clamp(min=1)
        loss_sums = {name: objective.loss(self, hidden, other_targets[name]) for name, objective in others.items()}
        return ObjectivesOutput(loss=mean, loss_sums={"mlm": total, **loss_sums}, losses=losses)


def masked_lm_class(
    config: PreTrainedConfig, source: str = "config", objectives: dict[str, Objective] | None = None
) -> type[MaskedLmMixin]:
    """The stock class of a config plus mixins: `MaskedLmMixin` with `objectives` (None: the masked LM) and, if needed,
    `architectures.SharedParts`. `source`: name of the config in error messages."""
    stock = architectures.stock_class(config, source)
    shared = (architectures.SharedParts,) if architectures.shares_parts(config) else ()
    attributes = {"objectives": objectives or MaskedLmMixin.objectives}
    return type(stock.__name__, (MaskedLmMixin, *shared, stock), attributes)


def _additive(mask: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """An additive mask of `dtype`: 0 where `mask` is True, the lowest number elsewhere; None: `mask` unchanged."""
    return torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype) if dtype else mask


def compile_encoder(model: MaskedLmMixin, backend: str | None = None, mode: str | None = None) -> None:
    """Compile `base_model` in place for a fixed batch shape; head and losses stay eager, parameter names unchanged."""
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
) -> MaskedLmMixin:
    """A masked LM with the heads of `objectives` (None: the masked LM), with fresh weights or those of a checkpoint.

    `pad_vocab_to_multiple_of` adds rows to the embedding; a bias hides them from the softmax, so that losses do not
    change. Fresh weights have the tokenizer's vocabulary and padding id, unless `config_overrides` names them. Raises
    `InputError` if tokenizer and model differ in vocabulary, or the model has too few positions.
    """
    source = model_name_or_path or config_name
    config = weights.config_of(config_name, config_overrides, model_name_or_path)
    if model_name_or_path and architectures.shares_parts(config):
        stock = architectures.stock_class(config, source)
        architectures.check_copies(weights.load(stock, source, config=config)[0], f"model_name_or_path={source!r}")
    cls = masked_lm_class(config, source, objectives)
    entries, multiple = len(tokenizer), pad_vocab_to_multiple_of or 1
    padded = math.ceil(entries / multiple) * multiple
    for name, value in {"vocab_size": entries, "pad_token_id": tokenizer.pad_token_id}.items():
        if not model_name_or_path and name not in weights.overridden(config_overrides):
            setattr(config, name, value)
    if config.vocab_size not in (entries, padded) or config.pad_token_id != tokenizer.pad_token_id:
        more = f"pad_vocab_to_multiple_of to {config.vocab_size}, " if config.vocab_size > entries else ""
        size = "the model's vocabulary (resize_token_embeddings)" if model_name_or_path else "vocab_size"
        raise InputError(
            f"vocabularies disagree: {source!r} has vocab_size={config.vocab_size} and pad_token_id="
            f"{config.pad_token_id}, the tokenizer {entries} entries and {tokenizer.pad_token_id}; set {size} to "
            f"{entries}, {more}or tokenizer_name to the model's own tokenizer"
        )
    in_blocks = (*boundary_ids(tokenizer).values(), tokenizer.mask_token_id)
    # a checkpoint may have been trained so (EuroBERT)
    if tokenizer.pad_token_id in in_blocks and (not model_name_or_path or weights.counts_from_padding(config)):
        raise InputError(
            f"the tokenizer pads with {tokenizer.pad_token!r}, which blocks have too, so its embedding would get no "
            "gradient and RoBERTa's positions would skip it: give the tokenizer a pad_token of its own"
        )
    weights.check_length(source, max_seq_length, config)
    if model_name_or_path:
        # a finished model has no heads of other objectives
        model, info = weights.load(cls, model_name_or_path, config=config, fresh_head=len(cls.objectives) > 1)
        if any(not name.startswith(model.heads_of_objectives) for name in info["missing_keys"]):
            raise InputError(f"model_name_or_path={model_name_or_path!r} has no weights for a masked-LM head")
        if (bias := getattr(model.get_output_embeddings(), "bias", None)) is not None:
            used = bias.data[:entries]
            used[used <= EXCLUDED_LOGIT / 2] = 0.0  # padding rows that tokens have been added to since
    else:
        config.vocab_size = padded
        model = weights.fresh(cls, config)
    if padded > entries:
        bias = getattr(model.get_output_embeddings(), "bias", None)
        if bias is None or len(bias) != model.config.vocab_size:
            raise InputError(
                f"pad_vocab_to_multiple_of: a {config.model_type!r} model has no bias in its head to hide padding rows "
                f"of the embedding; leave it out, with vocab_size={entries}"
            )
        model.resize_token_embeddings(padded, mean_resizing=False)
        model.get_output_embeddings().bias.data[entries:] = EXCLUDED_LOGIT
    return model


def embedding_width(config: PreTrainedConfig) -> int:
    """The width of the token embedding: ALBERT's is narrower than the hidden states."""
    return getattr(config, "embedding_size", config.hidden_size)


def layer_weights(config: PreTrainedConfig) -> int:
    """Number of matrix weights of one layer."""
    matrices = 3 if config.model_type in _GATED else 2
    intermediate = getattr(config, "intermediate_size", None)
    intermediate = intermediate or getattr(config, "hidden_dim", 4 * config.hidden_size)  # DistilBERT's; XLM's
    keys = getattr(config, "num_key_value_heads", None)  # EuroBERT's: one for several query heads
    keys = config.hidden_size * keys // config.num_attention_heads if keys else config.hidden_size
    return config.hidden_size * (2 * config.hidden_size + 2 * keys + matrices * intermediate)


def flops_per_token(
    config: PreTrainedConfig, seq_len: int, mlm_probability: float, objectives: dict[str, Objective] | None = None
) -> float:
    """Forward and backward FLOPs per token of a block of `seq_len` tokens, with heads on predicted positions only.

    Body 6 x 12 x L x h^2 (with an intermediate size of 4h), attention 12 x L x S x h, head 6 x (h^2 + h x V) x p: 2 per
    multiply-add, the backward pass twice the forward (Kaplan et al. 2020, appendix B). ALBERT adds the projection of
    the embedding, and its head has the embedding's width. Heads are counted by `Objective.layers`, attention as if
    every token attended to all others, without DeBERTa's relative positions.
    """
    hidden, layers, width = config.hidden_size, config.num_hidden_layers, embedding_width(config)
    body = 6 * layers * layer_weights(config)
    embedding = 6 * hidden * width * (width != hidden)
    attention = 12 * layers * seq_len * hidden
    head = 0.0
    for objective in (objectives or MaskedLmMixin.objectives).values():
        if head_layers := objective.layers(hidden, width):
            head += 6 * (sum(map(math.prod, head_layers)) + width * config.vocab_size) * mlm_probability
    return body + embedding + attention + head


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        index, rows = targets.clamp(min=0)[:, None], rows_at_once(logits.shape[1])  # any entry for `IGNORED`
        parts = zip(logits.split(rows), index.split(rows), strict=True)
        losses = [-torch.log_softmax(part, dim=-1, dtype=torch.float32).gather(1, at) for part, at in parts]
        ctx.save_for_backward(logits, index, targets != IGNORED)
        return torch.where(targets != IGNORED, torch.cat(losses)[:, 0], 0.0)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        logits, index, counts = ctx.saved_tensors
        out, grad = torch.empty_like(logits), torch.where(counts, grad, 0.0)[:, None]
        rows = rows_at_once(logits.shape[1])
        parts = (tensor.split(rows) for tensor in (logits, out, index, grad, torch.full_like(grad, -1.0)))
        for part, out_part, at, upstream, minus_one in zip(*parts, strict=True):
            # softmax - one-hot, in fp32, cast after the product with the upstream gradient (and its loss scale)
            probs = torch.softmax(part, dim=-1, dtype=torch.float32).scatter_add_(1, at, minus_one)
            out_part.copy_(probs.mul_(upstream))
        return out, None


def rows_at_once(vocab_size: int) -> int:
    """Positions per chunk."""
    return max(1, LOGITS_AT_ONCE // vocab_size)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(positions,) fp32: cross-entropies in nats of `logits` (positions, vocab_size) in any precision; 0, without a
    gradient, where the target is -100. Chunked, with recomputation in the backward pass: `functional.cross_entropy`
    keeps logits, log-probabilities and both gradients in fp32, 6 GB for 9,800 positions of 50,304; this keeps the
    logits and their gradient, in their own precision."""
    return _CrossEntropy.apply(logits, targets)
