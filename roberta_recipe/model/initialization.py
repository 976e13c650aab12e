"""Mimetic initialization of fresh weights (Trockman and Kolter 2023, arXiv 2305.09828), on top of the normal draw.

Trained attention weights have a simple structure: neighbouring positions have similar embeddings, queries resemble
keys, and value times output is close to a multiple of the identity (negative for the paper's vision models, positive
here). A model with this structure attends to neighbours from the first step; from the normal draw alone, the search for
them is most of the unigram plateau. The default factors are ours (docs/pretraining.md has the runs).
"""

import math

import torch
from torch import nn
from transformers import PreTrainedModel

from roberta_recipe.errors import InputError
from roberta_recipe.model import architectures

_DEFAULTS = {"positions": 2.0, "query_key": 0.7, "value_output": 0.5}
FAMILIES = ("roberta", "xlm-roberta", "camembert", "bert")  # with BERT's modules under BERT's names
_STD = 0.02  # of the normal draw: `initializer_range` of BERT and RoBERTa


def factors(text: str | None) -> dict[str, float] | None:
    """The factors of "mimetic,name=number,..."; None for "normal" and None. Raises `InputError`."""
    if text in (None, "normal"):
        return None
    name, _, options = text.replace(" ", "").partition(",")
    try:
        pairs = [pair.split("=") for pair in options.split(",") if pair]
        given = {key: float(value) for key, value in pairs}
        if name != "mimetic" or given.keys() - _DEFAULTS.keys() or not all(0 <= v < math.inf for v in given.values()):
            raise ValueError
    except ValueError:
        defaults = ",".join(f"{key}={value:g}" for key, value in _DEFAULTS.items())
        raise InputError(
            f"initialization={text}: must be normal or mimetic, optionally with non-negative factors: "
            f"mimetic,{defaults}"
        ) from None
    return {**_DEFAULTS, **given}


def sinusoids(positions: int, size: int) -> torch.Tensor:
    """(positions, size): sines of position x 10000^(-2i/size) in the first half of the columns, cosines in the second
    (Vaswani et al. 2017, section 3.5)."""
    angles = torch.arange(positions)[:, None] * 10000 ** (-torch.arange(0, size, 2) / size)
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :size]


def orthonormal(rows: int, columns: int) -> torch.Tensor:
    """(rows, columns) with orthonormal rows, at most as many as columns, by QR of a normal draw."""
    return nn.init.orthogonal_(torch.empty(rows, columns))


@torch.no_grad()
def initialize(model: PreTrainedModel, text: str | None) -> None:
    """Add what `text` asks for to the fresh weights of a model, drawn from torch's generator. Raises `InputError` for a
    family with other modules than BERT's."""
    if (factor := factors(text)) is None:
        return
    config = model.config
    if config.model_type not in FAMILIES:
        raise InputError(
            f"initialization={text} supports {', '.join(FAMILIES)}, not {config.model_type!r}: use --initialization "
            "normal"
        )
    size, heads = config.hidden_size, config.num_attention_heads
    first = architectures.TABLE[config.model_type].first_position(config)
    table = model.base_model.embeddings.position_embeddings.weight  # (rows, size); no token uses those before `first`
    table[first:] += factor["positions"] * _STD * math.sqrt(2) * sinusoids(len(table) - first, size)
    for layer in model.base_model.encoder.layer:
        own, output = layer.attention.self, layer.attention.output.dense
        shared = torch.cat([orthonormal(size // heads, size) for _ in range(heads)])  # (size, size)
        own.query.weight += factor["query_key"] * shared
        own.key.weight += factor["query_key"] * shared
        rotation = orthonormal(size, size)
        own.value.weight += factor["value_output"] * rotation
        output.weight += factor["value_output"] * rotation.T
