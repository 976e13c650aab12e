"""Masked-LM architectures and their heads: RoBERTa, BERT (arXiv 1810.04805), ALBERT (1909.11942), ModernBERT
(2412.13663), DeBERTa-v3 (2111.09543).

Any architecture of `AutoModelForMaskedLM` trains with the exact loss; those of the table run their head on predicted
positions only. `SharedParts` shares a part of ALBERT's layers.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AlbertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)

from roberta_recipe.errors import InputError

SHARED = "shared_parameters"  # config key of ALBERT
# modules of an `AlbertLayer`, including LayerNorms
_PARTS = {"attention": ("attention",), "feed_forward": ("ffn", "ffn_output", "full_layer_layer_norm")}
_KINDS = ("all", *_PARTS, "none")


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


def set_groups(config: PreTrainedConfig, name: str) -> None:
    """Set `num_hidden_groups` according to `shared_parameters` of the config `name`, if any. Raises `InputError`."""
    shared = getattr(config, SHARED, None)
    if shared is None:
        return
    if not isinstance(config, AlbertConfig) or shared not in _KINDS:
        raise InputError(
            f"{name} has {SHARED}={shared!r} in a {config.model_type!r} model; use one of {', '.join(_KINDS)} in an "
            "ALBERT"
        )
    if shared in _PARTS and config.inner_group_num > 1:
        raise InputError(f"{name} has {SHARED}={shared}, so inner_group_num={config.inner_group_num} must be 1")
    config.num_hidden_groups = 1 if shared == "all" else config.num_hidden_layers


def shares_parts(config: PreTrainedConfig) -> bool:
    """Whether the model needs `SharedParts`."""
    return getattr(config, SHARED, None) in _PARTS and config.num_hidden_layers > 1


def _shared_modules(model: PreTrainedModel) -> Iterator[tuple[nn.Module, nn.Module, str]]:
    """(layer, first layer, attribute) for each module that a layer shares with the first layer."""
    first, *others = (group.albert_layers[0] for group in model.base_model.encoder.albert_layer_groups)
    for layer in others:
        for part in _PARTS[getattr(model.config, SHARED)]:
            yield layer, first, part


class SharedParts:
    """Mixin for a stock ALBERT with shared attention or shared feed-forward networks (arXiv 1909.11942, section 3.1 and
    Table 4); transformers' can share whole layers only (`num_hidden_groups`).

    The model has one group per layer, and all groups use the first group's modules. Checkpoints repeat the shared
    weights in each group, so that the stock class computes the same; training in it would let the groups diverge.
    """

    def __init__(self, config: AlbertConfig):
        super().__init__(config)
        for layer, first, part in _shared_modules(self):
            setattr(layer, part, getattr(first, part))

    def save_pretrained(self, save_directory: Any, state_dict: dict[str, torch.Tensor] | None = None, **kwargs: Any):
        """As the stock class, with the shared weights repeated in each group."""
        state, first = dict(self.state_dict() if state_dict is None else state_dict), {}
        encoder = f"{self.base_model_prefix}.encoder"
        for name, weight in self.base_model.encoder.named_parameters(encoder, remove_duplicate=False):
            original = first.setdefault(id(weight), name)
            if original != name and original in state:
                state[name] = state[original].clone()
        return super().save_pretrained(save_directory, state_dict=state, **kwargs)


def check_copies(stock: PreTrainedModel, where: str) -> None:
    """Raise `InputError` if shared weights differ between the groups of a checkpoint, loaded as the stock class."""
    for layer, first, part in _shared_modules(stock):
        pairs = zip(getattr(layer, part).parameters(), getattr(first, part).parameters(), strict=True)
        if not all(torch.equal(*pair) for pair in pairs):
            shared = getattr(stock.config, SHARED)
            raise InputError(
                f"{where} has {SHARED}={shared} in its config, and layers whose {part} differ: it was trained in the "
                f'stock class. Set "{SHARED}": "none" in its config.json to continue without sharing'
            )
