"""Families of masked LMs beside RoBERTa (BERT, arXiv 1810.04805; ALBERT, 1909.11942; ModernBERT, 2412.13663;
DeBERTa-v3, 2111.09543), and where the head of each lies.

Any family of `AutoModelForMaskedLM` trains with the exact loss; one that is in the table runs its head on the
predicted positions alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import MODEL_FOR_MASKED_LM_MAPPING, PreTrainedConfig, PreTrainedModel, TrainingArguments

from roberta_recipe.errors import InputError


class Family(NamedTuple):
    """`head(model, hidden)`: logits (positions, vocab_size) of the body's last states (positions, hidden_size).
    `first_position(config)`: the position id of a sequence's first token, None where sequences that share a row cannot
    be told apart by position ids and a mask."""

    head: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor]
    first_position: Callable[[PreTrainedConfig], int] | None = None


def _deberta_head(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    if model.legacy:
        return model.cls(hidden)
    return model.lm_predictions(hidden, model.deberta.embeddings.word_embeddings)


_LIKE_ROBERTA = Family(lambda model, hidden: model.lm_head(hidden), lambda config: config.pad_token_id + 1)
TABLE = {
    "roberta": _LIKE_ROBERTA,
    "xlm-roberta": _LIKE_ROBERTA,
    "camembert": _LIKE_ROBERTA,
    "bert": Family(lambda model, hidden: model.cls(hidden), lambda config: 0),
    "albert": Family(lambda model, hidden: model.predictions(hidden), lambda config: 0),
    "modernbert": Family(lambda model, hidden: model.decoder(model.head(hidden))),
    "deberta-v2": Family(_deberta_head),
}


def stock_class(config: PreTrainedConfig, name: str) -> type[PreTrainedModel]:
    """The class that `AutoModelForMaskedLM` makes of a config. Raises `InputError` where there is none; `name` is what
    the config was read from."""
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise InputError(
            f"{name!r} is a {config.model_type!r} model, which transformers has no masked LM of; name one of another "
            f"family: {', '.join(TABLE)} or any other of AutoModelForMaskedLM"
        )
    return MODEL_FOR_MASKED_LM_MAPPING[type(config)]


def can_checkpoint(config: PreTrainedConfig) -> bool:
    """Whether transformers' models of this family recompute activations; ALBERT's do not."""
    return getattr(MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None), "supports_gradient_checkpointing", True)


def check_checkpointing(config: PreTrainedConfig, args: TrainingArguments) -> None:
    """Raise `InputError` for `activation_checkpointing` where the family has none."""
    if args.activation_checkpointing and not can_checkpoint(config):
        raise InputError(
            f"activation_checkpointing=true: transformers' {config.model_type!r} models have none; leave it out, and "
            f"lower per_device_train_batch_size={args.per_device_train_batch_size} (the global batch stays)"
        )


def check_shared_rows(config: PreTrainedConfig, input_format: str) -> None:
    """Raise `InputError` for a format whose sequences share a row, where the family cannot keep them apart."""
    able = [name for name, family in TABLE.items() if family.first_position]
    if config.model_type not in able:
        raise InputError(
            f"input_format={input_format} has several sequences in a row, which a {config.model_type!r} model cannot "
            f"keep apart; take full_sentences, segment_pair or contiguous, or a model of {', '.join(able)}"
        )
