"""The masked-LM head and its loss over the whole effective batch (paper, section 2.3), and the model from a config."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import MaskedLMOutput

from roberta_recipe.arithmetic import round_up
from roberta_recipe.data.masking import IGNORED
from roberta_recipe.errors import InputError
from roberta_recipe.training import families, sharing, weights
from roberta_recipe.training.attention import MASKED_BY_PAIRS
from roberta_recipe.training.cross_entropy import cross_entropy
from roberta_recipe.training.varlen import VARLEN, positions_within, unpad

UNSEEN_LOGIT = -1e4  # a logit no softmax sees (and that fp16 can hold)


@dataclass
class ObjectivesOutput(MaskedLMOutput):
    """`MaskedLMOutput` with the sum of the losses of each objective, which trainer and evaluation divide by the number
    of its targets in the whole effective batch, or in the whole validation set."""

    loss_sums: dict[str, torch.Tensor] | None = None  # nats, ()
    losses: torch.Tensor | None = None  # of the masked LM: nats, (predicted positions,)


class PredictedPositions:
    """In front of a stock masked LM of any family: the head run only where a label is set (for the families of
    `families.TABLE`), and the sum of the losses of each objective.

    Such a class has the stock class's name, parameters and config (`masked_lm_class`), so that what it saves is the
    stock class's checkpoint. `objectives` maps each objective to its label column, in which -100 is no target. A
    subclass with another objective adds its entry there, and overrides `other_losses`.
    """

    objectives: ClassVar[dict[str, str]] = {"mlm": "labels"}
    heads_of_objectives: tuple[str, ...] = ()  # how the names of weights begin that the stock class does not have

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
        other_targets = {column: kwargs.pop(column, None) for column in self.objectives.values() if column != "labels"}
        family, attention = families.TABLE.get(self.config.model_type), self.config._attn_implementation
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
            output = super().forward(**inputs, output_hidden_states=len(self.objectives) > 1, return_dict=True)
            hidden = (output.hidden_states or [None])[-1]
            logits = output.logits.flatten(0, 1).index_select(0, at)
        losses = cross_entropy(logits, targets)
        total = losses.sum()
        mean = total / (targets != IGNORED).sum().clamp(min=1)
        loss_sums = {"mlm": total, **self.other_losses(hidden, **other_targets)}
        return ObjectivesOutput(loss=mean, loss_sums=loss_sums, losses=losses)

    def other_losses(self, hidden: torch.Tensor, **targets: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """For subclasses: the sum of the losses in nats of each objective beside "mlm", from the last layer's output
        (batch, seq_len, hidden_size) and the label columns of these objectives."""
        return {}


class RobertaForMaskedLM(PredictedPositions, transformers.RobertaForMaskedLM):
    """RoBERTa's, for what trains no other family."""


def masked_lm_class(
    config: PreTrainedConfig, name: str = "config", of_objectives: type = PredictedPositions, **attributes: Any
) -> type[PredictedPositions]:
    """The stock class of a config's family (read from `name`, for an `InputError`) with `PredictedPositions`, or a
    subclass of it, in front, and class attributes; and what shares parts of layers, where a config asks for that."""
    stock = families.stock_class(config, name)
    between = (sharing.SharedParts,) if sharing.shares_parts(config) else ()
    return type(stock.__name__, (of_objectives, *between, stock), attributes)


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
    class_of: Callable[[PreTrainedConfig, str], type[PredictedPositions]] = masked_lm_class,
) -> PredictedPositions:
    """A masked LM with fresh weights from a config, or with those of a checkpoint, that fits tokenizer and block
    length; of `class_of(config, its name)`.

    `pad_vocab_to_multiple_of` adds rows to the embedding; the bias of such a row keeps it out of the softmax, so
    losses are those of the unpadded model. Raises `InputError` where vocabularies or lengths disagree.
    """
    source = model_name_or_path or config_name
    config = weights.read_config(source) if model_name_or_path else weights.fresh_config(source, config_overrides)
    if model_name_or_path:
        where = f"model_name_or_path={source!r}"
        sharing.resolve(config, where)
        if sharing.shares_parts(config):
            sharing.check_copies(weights.load(families.stock_class(config, source), source, config=config)[0], where)
    cls = class_of(config, source)
    padded = round_up(len(tokenizer), pad_vocab_to_multiple_of or 1)
    if config.vocab_size not in (len(tokenizer), padded):
        raise InputError(
            f"vocabularies disagree: {source!r} has vocab_size={config.vocab_size}, the tokenizer {len(tokenizer)} "
            f"entries; set vocab_size to {len(tokenizer)}, or name the model's own tokenizer with tokenizer_name"
            + (
                ", or set pad_vocab_to_multiple_of to what it was padded to"
                if config.vocab_size > len(tokenizer)
                else ""
            )
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
        if any(not name.startswith(cls.heads_of_objectives) for name in info["missing_keys"]):
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


def flops_per_token(
    config: PreTrainedConfig, seq_len: int, mlm_probability: float, objectives: Sequence[str] = ("mlm",)
) -> float:
    """FLOPs of forward and backward for one token of a `seq_len` block, the heads on predicted positions only.

    Body 6 x 12 x L x h^2 (with an intermediate size of 4h), attention 12 x L x S x h, head 6 x (h^2 + h x V) x p;
    2 a multiply-add, the backward pass twice the forward (Kaplan et al. 2020, appendix B; 6N). ALBERT: the embedding's
    projection is added, and the head is as narrow as the embedding; ModernBERT: three matrices in a feed-forward layer.
    The objective "sbo" has a second head, which reads two hidden states; what reads a block once, the head of pairs, is
    left out. Attention is counted as if every token saw all others, and without DeBERTa's relative positions.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    width = getattr(config, "embedding_size", hidden)
    matrices = 3 if config.model_type == "modernbert" else 2
    body = 6 * layers * (4 * hidden**2 + matrices * hidden * config.intermediate_size)
    embedding = 6 * hidden * width * (width != hidden)
    attention = 12 * layers * seq_len * hidden
    head = 6 * (hidden * width + width * config.vocab_size) * mlm_probability
    if "sbo" in objectives:
        head += 6 * (2 * hidden**2 + hidden * width + width * config.vocab_size) * mlm_probability
    return body + embedding + attention + head
