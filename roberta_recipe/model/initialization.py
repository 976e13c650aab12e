"""Mimetic initialization (Trockman and Kolter 2023, arXiv 2305.09828) and a unigram output bias (Meister et al. 2023,
arXiv 2212.09686), in addition to the normal initialization.

Trained attention has a simple structure: neighbouring positions have similar embeddings, queries resemble keys, value
times output is near a multiple of the identity. Learning it takes most of the unigram plateau. Before that, a model
learns token frequencies: with a zero output bias, it moves all hidden states in one direction, from which a
post-norm model may not recover. The factors are ours (docs/pretraining.md).
"""

import math

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from roberta_recipe.errors import InputError
from roberta_recipe.model import architectures

_BIAS = {"unigram_bias": 0.0}
_DEFAULTS = {"normal": _BIAS, "mimetic": {"positions": 2.0, "query_key": 0.7, "value_output": 0.5, **_BIAS}}
MODEL_TYPES = ("roberta", "xlm-roberta", "camembert", "bert")  # modules as BERT's, under the same names
_STD = 0.02  # `initializer_range` of BERT and RoBERTa


def factors(text: str | None) -> dict[str, float]:
    """The factors of "normal", "mimetic" or "mimetic,name=number,..."; None is "normal". Raises `InputError`."""
    name, *options = ("normal" if text is None else text).replace(" ", "").split(",")
    defaults = _DEFAULTS.get(name, {})
    try:
        given = {key: float(value) for key, value in (option.split("=") for option in options)}
        sizes = {**given, "value_output": abs(given.get("value_output", 0))}
        valid = defaults and given.keys() <= defaults.keys() and all(0 <= v < math.inf for v in sizes.values())
    except ValueError:
        valid = False
    if not valid:
        ways = (",".join([way, *(f"{key}={value:g}" for key, value in own.items())]) for way, own in _DEFAULTS.items())
        message = "use normal or mimetic, with factors from 0 on (value_output may be negative)"
        raise InputError(f"initialization={text}: {message}: {' or '.join(ways)}")
    return {**defaults, **given}


def check_family(text: str | None, family: str) -> None:
    """Raise `InputError` for a `model_type` that mimetic initialization does not support."""
    if family not in MODEL_TYPES:
        types = ", ".join(MODEL_TYPES)
        raise InputError(f"initialization={text} supports {types}, not {family!r}: use --initialization normal")


@torch.no_grad()
def initialize(model: PreTrainedModel, text: str | None) -> None:
    """Add the structure of `text` (as in `factors`) to a model's fresh weights, with torch's generator. Raises
    `InputError` for architectures other than `MODEL_TYPES`."""
    if "query_key" not in (factor := factors(text)):
        return
    check_family(text, family := model.config.model_type)
    config = model.config
    size, heads = config.hidden_size, config.num_attention_heads
    first = architectures.TABLE[family].first_position(config)
    table = model.base_model.embeddings.position_embeddings.weight  # (rows, size); those before `first` are unused
    angles = torch.arange(len(table) - first)[:, None] * 10000 ** (-torch.arange(0, size, 2) / size)
    sinusoids = torch.cat([angles.sin(), angles.cos()], dim=1)[:, :size]  # Vaswani et al. 2017, section 3.5
    table[first:] += factor["positions"] * _STD * math.sqrt(2) * sinusoids
    for layer in model.base_model.encoder.layer:
        attention, output = layer.attention.self, layer.attention.output.dense
        # orthonormal rows, by QR decomposition of a normal matrix
        by_head = [nn.init.orthogonal_(torch.empty(size // heads, size)) for _ in range(heads)]
        shared = torch.cat(by_head)  # (size, size)
        attention.query.weight += factor["query_key"] * shared
        attention.key.weight += factor["query_key"] * shared
        rotation = nn.init.orthogonal_(torch.empty(size, size))
        attention.value.weight += abs(factor["value_output"]) * rotation  # the sign is that of the product
        output.weight += factor["value_output"] * rotation.T


@torch.no_grad()
def set_output_bias(model: PreTrainedModel, text: str | None, counts: np.ndarray) -> None:
    """Set the output bias to `unigram_bias` times the log of `counts` (vocab_size,) + 0.5, less its mean. Raises
    `InputError` for a model without an output bias."""
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is None or len(bias) < len(counts):
        raise InputError(f"initialization={text}: a {model.config.model_type!r} model has no output bias")
    log_counts = torch.from_numpy(np.log(counts + 0.5))
    bias[: len(counts)] = (factors(text)["unigram_bias"] * (log_counts - log_counts.mean())).to(bias.dtype)
