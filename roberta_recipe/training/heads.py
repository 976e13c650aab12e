"""A checkpoint as a model to fine-tune (paper, section 5): its head kept or fresh, and a rate for each layer."""

import re
from typing import Any

import torch

from roberta_recipe.errors import InputError
from roberta_recipe.log import logger
from roberta_recipe.training import weights

# Where Hugging Face's configs keep the dropout of a head.
_HEAD_DROPOUT = ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "cls_dropout")
_LAYER = re.compile(r"\.layers?\.(\d+)\.")


def load_with_head(
    cls: Any, name: str, head_dropout: float | None, random_weights: bool = False, **settings: Any
) -> torch.nn.Module:
    """A checkpoint as a model of the Auto class `cls`, `settings` in its config. The head is the checkpoint's where
    it has the right size, else fresh; the log says which. With `random_weights`, the whole model is fresh. Raises
    `InputError` where there is no such checkpoint, or it is damaged."""
    config = weights.read_config(name, **settings)
    for field in _HEAD_DROPOUT:
        if head_dropout is not None and hasattr(config, field):
            setattr(config, field, head_dropout)
    if random_weights:
        weights.check(name)
        logger.info("Weights     random")
        return _with_head_dropout(weights.fresh(cls, name, config), head_dropout)
    model, info = weights.load(cls, name, config=config, fresh_head=True)
    replaced = {key.partition(".")[0] for key, *_ in info["mismatched_keys"]}
    for head in replaced:  # the whole head, as in fairseq, not only the layer of another size
        for module in getattr(model, head).modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=getattr(config, "initializer_range", 0.02))
                torch.nn.init.zeros_(module.bias)
    fresh = "fresh, as the checkpoint's has another size" if replaced else "fresh" if info["missing_keys"] else "kept"
    logger.info(f"Head        {fresh}")
    return _with_head_dropout(model, head_dropout)


def _with_head_dropout(model: torch.nn.Module, head_dropout: float | None) -> torch.nn.Module:
    """Set every dropout outside of the body, as some configs (DeBERTa's, ...) have no name for the head's."""
    if head_dropout is not None:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Dropout) and not name.startswith(f"{model.base_model_prefix}."):
                module.p = head_dropout
    return model


def check_length(name: str, max_seq_length: int) -> None:
    """Raise `InputError` where a checkpoint has fewer than `max_seq_length` positions."""
    positions = weights.positions(weights.read_config(name))
    if positions and max_seq_length > positions:
        raise InputError(
            f"max_seq_length={max_seq_length} is more than the {positions} positions of {name!r}: --max_seq_length "
            f"{positions}"
        )


def layer_rates(model: torch.nn.Module, learning_rate: float, layer_decay: float) -> dict[str, float]:
    """The rate of each parameter: `learning_rate` for the head, times `layer_decay` for each layer further down; the
    embeddings count as a layer below the lowest (ULMFiT, arXiv 1801.06146, section 3.2; ELECTRA, arXiv 2003.10555,
    appendix B). Raises `InputError` where the names do not number the layers."""
    numbers = {name: _LAYER.search(name) for name, _ in model.named_parameters()}
    layers = 1 + max((int(found[1]) for found in numbers.values() if found), default=-1)
    if not layers:
        raise InputError(f"layer_decay={layer_decay}: {type(model).__name__} has no numbered layers; leave it at 1")
    depths = {
        name: layers - int(found[1]) if found else layers + 1 if "embeddings" in name else 0
        for name, found in numbers.items()
    }
    return {name: learning_rate * layer_decay**depth for name, depth in depths.items()}
