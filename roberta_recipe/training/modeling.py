"""The masked-LM head and its loss over the whole effective batch (paper, section 2.3), and the model from a config."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import transformers
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, RobertaConfig
from transformers.modeling_outputs import MaskedLMOutput

from roberta_recipe.arithmetic import round_up
from roberta_recipe.data.masking import IGNORED
from roberta_recipe.errors import InputError
from roberta_recipe.training import weights

UNSEEN_LOGIT = -1e4  # a logit no softmax sees (and that fp16 can hold)


@dataclass
class ObjectivesOutput(MaskedLMOutput):
    """`MaskedLMOutput` with the sum of the losses of each objective, which trainer and evaluation divide by the number
    of its targets in the whole effective batch, or in the whole validation set."""

    loss_sums: dict[str, torch.Tensor] | None = None  # nats, ()
    losses: torch.Tensor | None = None  # of the masked LM: nats, (predicted positions,) in the order of `logits`


class RobertaForMaskedLM(transformers.RobertaForMaskedLM):
    """The stock class with the head run only where a label is set, and the sum of the losses of each objective.

    It has the stock class's name, parameters and config, so that what it saves is the stock class's checkpoint.
    `objectives` maps each objective to its label column, in which -100 is no target. A subclass with another objective
    adds its entry there, and overrides `other_losses`.
    """

    objectives: ClassVar[dict[str, str]] = {"mlm": "labels"}
    heads_of_objectives: tuple[str, ...] = ()  # how the names of weights begin that the stock class has no place for

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        sequence: torch.Tensor | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        """Without labels: as the stock class. With labels (batch, seq_len), -100 where nothing is predicted:

        logits are (predicted positions, vocab_size), in the order of `labels != -100`; `loss_sums["mlm"]` is the sum of
        their cross-entropies in nats, and `loss` their mean over this batch (0 where nothing is predicted). The stock
        class has the mean alone, which is not what accumulated micro-batches of unequal counts need.

        With `sequence` (batch, seq_len), the number of each token's sequence in its row, the result is that of a batch
        in which every sequence is a row of its own.
        """
        if self.config.type_vocab_size == 1:  # as RoBERTa: separators alone tell segments apart
            kwargs.pop("token_type_ids", None)
        if sequence is not None:
            attention_mask, kwargs["position_ids"] = apart(
                sequence, attention_mask, self.config.pad_token_id, self.config._attn_implementation
            )
        other_targets = {column: kwargs.pop(column, None) for column in self.objectives.values() if column != "labels"}
        if labels is None:
            return super().forward(input_ids, attention_mask=attention_mask, **kwargs)
        hidden = self.roberta(input_ids, attention_mask=attention_mask, return_dict=True, **kwargs)[0]
        predicted = labels != IGNORED
        logits = self.lm_head(hidden[predicted])  # (predicted positions, vocab_size)
        losses = functional.cross_entropy(logits.float(), labels[predicted], reduction="none")
        total = losses.sum()
        mean = total / predicted.sum().clamp(min=1)
        loss_sums = {"mlm": total, **self.other_losses(hidden, **other_targets)}
        return ObjectivesOutput(loss=mean, logits=logits, loss_sums=loss_sums, losses=losses)

    def other_losses(self, hidden: torch.Tensor, **targets: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """For subclasses: the sum of the losses in nats of each objective beside "mlm", from the last layer's output
        (batch, seq_len, hidden_size) and the label columns of these objectives."""
        return {}


def apart(
    sequence: torch.Tensor, attention_mask: torch.Tensor | None, padding_id: int, attn_implementation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What keeps the sequences of a row apart: the attention mask (batch, 1, seq_len, seq_len), in which a token sees
    its own sequence alone, and position ids (batch, seq_len) that begin anew in each, as RoBERTa's do, behind
    `padding_id`."""
    same = sequence[:, None, :, None] == sequence[:, None, None, :]
    if attention_mask is not None:
        same &= attention_mask[:, None, None, :].bool()
    if attn_implementation == "eager":  # which adds it to the scores
        same = torch.where(same, 0.0, torch.finfo(torch.float32).min)
    places = torch.arange(sequence.shape[1], device=sequence.device).expand_as(sequence)
    begins = torch.ones_like(sequence, dtype=torch.bool)
    begins[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    positions = places - torch.where(begins, places, 0).cummax(dim=1).values + padding_id + 1
    return same, positions


def load_config(config_name: str, argument: str = "config_name") -> RobertaConfig:
    """A RoBERTa config from a JSON file, a folder or the Hub; `argument` is the flag that an `InputError` names."""
    config = weights.read_config(config_name, argument)
    if config.model_type != "roberta":
        raise InputError(f"{config_name!r} is a {config.model_type!r} model; this recipe trains 'roberta'")
    return config


def build_model(
    tokenizer: PreTrainedTokenizerBase,
    *,
    config_name: str | None = None,
    model_name_or_path: str | None = None,
    max_seq_length: int = 512,
    pad_vocab_to_multiple_of: int | None = None,
    cls: type[RobertaForMaskedLM] = RobertaForMaskedLM,
) -> RobertaForMaskedLM:
    """A `cls` with fresh weights from a config, or with those of a checkpoint, that fits tokenizer and block length.

    `pad_vocab_to_multiple_of` adds rows to the embedding; the bias of such a row keeps it out of the softmax, so
    losses are those of the unpadded model. Raises `InputError` where vocabularies or lengths disagree.
    """
    source = model_name_or_path or config_name
    config = load_config(source, "model_name_or_path" if model_name_or_path else "config_name")
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
    if max_seq_length > positions:
        raise InputError(
            f"max_seq_length={max_seq_length} is longer than the {positions} positions of {source!r}; "
            f"set max_position_embeddings to {max_seq_length + config.pad_token_id + 1}, or shorten the blocks"
        )
    if model_name_or_path:
        # the heads of other objectives are not in a finished model
        model, info = weights.load(cls, model_name_or_path, config=config, fresh_head=len(cls.objectives) > 1)
        if any(name.startswith("lm_head.") for name in info["missing_keys"]):
            raise InputError(f"model_name_or_path={model_name_or_path!r} has no weights for a masked-LM head")
        if padded != config.vocab_size:
            model.resize_token_embeddings(padded, mean_resizing=False)
    else:
        config.vocab_size = padded
        model = weights.fresh(cls, source, config)
    with torch.no_grad():
        model.lm_head.bias[len(tokenizer) :] = UNSEEN_LOGIT
    return model


def flops_per_token(config: RobertaConfig, seq_len: int, mlm_probability: float) -> float:
    """FLOPs of forward and backward for one token of a `seq_len` block, the head on predicted positions only.

    Body 6 x 12 x L x h^2 (with an intermediate size of 4h), attention 12 x L x S x h, head 6 x (h^2 + h x V) x p;
    2 a multiply-add, the backward pass twice the forward (Kaplan et al. 2020, appendix B; 6N).
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    body = 6 * layers * (4 * hidden**2 + 2 * hidden * config.intermediate_size)
    attention = 12 * layers * seq_len * hidden
    head = 6 * (hidden**2 + hidden * config.vocab_size) * mlm_probability
    return body + attention + head
