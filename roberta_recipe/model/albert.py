"""Parameter sharing between the layers of an ALBERT (arXiv 1909.11942, section 3.1 and Table 4): all, attention,
feed-forward network, or none.

transformers' ALBERT shares whole layers (`num_hidden_groups`). To share a part, each layer is a group here, with one
module in all of them. Checkpoints have the shared weights once for each group, so that the stock class loads them.
"""

from typing import Any

import torch
from transformers import AlbertConfig, PreTrainedConfig, PreTrainedModel

from roberta_recipe.errors import InputError

SHARED = "shared_parameters"  # the key of a config
# modules of an `AlbertLayer`; each part with the LayerNorm behind it
_PARTS = {
    "attention": ("attention",),
    "feed_forward": ("ffn", "ffn_output", "full_layer_layer_norm"),
}
_KINDS = ("all", *_PARTS, "none")


def resolve(config: PreTrainedConfig, name: str) -> None:
    """Set `num_hidden_groups` by a config's `shared_parameters`, if any. Raises `InputError`; `name`: of the config."""
    shared = getattr(config, SHARED, None)
    if shared is None:
        return
    if not isinstance(config, AlbertConfig) or shared not in _KINDS:
        raise InputError(
            f"{name} has {SHARED}={shared!r}, which a {config.model_type!r} model cannot do; an ALBERT takes one of "
            f"{', '.join(_KINDS)}"
        )
    config.num_hidden_groups = 1 if shared == "all" else config.num_hidden_layers


class SharedParts:
    """Mixin before a stock ALBERT class whose layers share attention or feed-forward networks."""

    def __init__(self, config: AlbertConfig):
        super().__init__(config)
        first, *others = self.base_model.encoder.albert_layer_groups
        for group in others:
            for layer, of_first in zip(group.albert_layers, first.albert_layers, strict=True):
                for part in _PARTS[getattr(config, SHARED)]:
                    setattr(layer, part, getattr(of_first, part))

    def save_pretrained(self, save_directory: Any, state_dict: dict[str, torch.Tensor] | None = None, **kwargs: Any):
        """As the stock class, with the shared weights of each group."""
        state, first = dict(self.state_dict() if state_dict is None else state_dict), {}
        encoder = f"{self.base_model_prefix}.encoder"
        for name, weight in self.base_model.encoder.named_parameters(encoder, remove_duplicate=False):
            of = first.setdefault(id(weight), name)
            if of != name and of in state:
                state[name] = state[of].clone()
        return super().save_pretrained(save_directory, state_dict=state, **kwargs)


def check_copies(stock: PreTrainedModel, where: str) -> None:
    """Raise `InputError` where a checkpoint, read as the stock class, has unequal copies of shared weights."""
    first, *others = stock.base_model.encoder.albert_layer_groups
    shared = getattr(stock.config, SHARED)
    for group in others:
        for layer, of_first in zip(group.albert_layers, first.albert_layers, strict=True):
            for part in _PARTS[shared]:
                pairs = zip(getattr(layer, part).parameters(), getattr(of_first, part).parameters(), strict=True)
                if not all(torch.equal(*pair) for pair in pairs):
                    raise InputError(
                        f"{where} has {SHARED}={shared} in its config, and layers whose {part} differ: it was trained "
                        f"without sharing. Write {SHARED}: none into its config.json to continue like that"
                    )


def shares_parts(config: PreTrainedConfig) -> bool:
    """Whether `SharedParts` is needed to train the model."""
    return getattr(config, SHARED, None) in _PARTS and config.num_hidden_layers > 1
