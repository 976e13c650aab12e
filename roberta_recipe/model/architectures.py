"""Masked-LM architectures and their heads: RoBERTa, BERT (arXiv 1810.04805), ALBERT (1909.11942), ModernBERT
(2412.13663), DeBERTa-v3 (2111.09543).

Any architecture of `AutoModelForMaskedLM` trains with the exact loss; those of the table run their head on predicted
positions only.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import MODEL_FOR_MASKED_LM_MAPPING, PreTrainedConfig, PreTrainedModel, TrainingArguments

from roberta_recipe.errors import InputError


class Architecture(NamedTuple):
    """`head(model, hidden)`: logits (positions, vocab_size) from the encoder's output (positions, hidden_size).
    `first_position(config)`: first position id; None if position ids and a mask cannot separate a row's sequences."""

    head: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor]
    first_position: Callable[[PreTrainedConfig], int] | None = None


def _deberta_head(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    if model.legacy:
        return model.cls(hidden)
    return model.lm_predictions(hidden, model.deberta.embeddings.word_embeddings)


_LIKE_ROBERTA = Architecture(lambda model, hidden: model.lm_head(hidden), lambda config: config.pad_token_id + 1)
TABLE = {
    "roberta": _LIKE_ROBERTA,
    "xlm-roberta": _LIKE_ROBERTA,
    "camembert": _LIKE_ROBERTA,
    "bert": Architecture(lambda model, hidden: model.cls(hidden), lambda config: 0),
    "albert": Architecture(lambda model, hidden: model.predictions(hidden), lambda config: 0),
    "modernbert": Architecture(lambda model, hidden: model.decoder(model.head(hidden))),
    "deberta-v2": Architecture(_deberta_head),
}
MULTI_SEQUENCE_MODELS = tuple(name for name, architecture in TABLE.items() if architecture.first_position)


def stock_class(config: PreTrainedConfig, name: str) -> type[PreTrainedModel]:
    """The `AutoModelForMaskedLM` class of the config of `name`. Raises `InputError` if there is none."""
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING or config.is_encoder_decoder:
        raise InputError(
            f"{name!r} is a {config.model_type!r} model, for which transformers has no masked LM; name one of "
            f"{', '.join(TABLE)} or another architecture of AutoModelForMaskedLM"
        )
    return MODEL_FOR_MASKED_LM_MAPPING[type(config)]


def check_checkpointing(config: PreTrainedConfig, args: TrainingArguments) -> None:
    """Raise `InputError` for `activation_checkpointing` where transformers does not support it (ALBERT)."""
    stock = MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None)
    if args.gradient_checkpointing and not getattr(stock, "supports_gradient_checkpointing", True):
        raise InputError(
            f"activation_checkpointing=true: transformers' {config.model_type!r} models do not support it; lower "
            f"per_device_train_batch_size={args.per_device_train_batch_size} instead (the global batch stays)"
        )
