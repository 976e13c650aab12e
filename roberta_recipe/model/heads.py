"""A checkpoint as a model to fine-tune (paper, section 5): its head kept or fresh, and a rate for each layer."""

from typing import Any

import torch
from transformers import AutoModelForQuestionAnswering

from roberta_recipe.errors import InputError
from roberta_recipe.log import logger
from roberta_recipe.model import weights

# Where Hugging Face's configs keep the dropout of a head.
_HEAD_DROPOUT = ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "cls_dropout")


def load_with_head(
    cls: Any, name: str, head_dropout: float | None, random_weights: bool = False, **settings: Any
) -> torch.nn.Module:
    """A checkpoint as a model of the Auto class `cls`, `settings` in its config. The head is the checkpoint's where
    it has the right size, else fresh; the log says which. With `random_weights`, the whole model is fresh. Raises
    `InputError` where there is no such checkpoint, or it is damaged, or its head reads the last token."""
    config = weights.read_config(name, **settings)
    if getattr(config, "summary_type", None) == "last" and cls is not AutoModelForQuestionAnswering:
        raise InputError(
            f"the head of {name!r} reads the last token (summary_type=last, as XLNet's), and batches are padded on the "
            "right; name a model of another family"
        )
    for field in _HEAD_DROPOUT:
        if head_dropout is not None and hasattr(config, field):
            setattr(config, field, head_dropout)
    if random_weights:
        weights.check(name)
        logger.info("Weights     random")
        return _with_head_dropout(weights.fresh(cls, name, config), head_dropout)
    model, info = weights.load(cls, name, config=config, fresh_head=True)
    replaced, why = {key.partition(".")[0] for key, *_ in info["mismatched_keys"]}, "has another size"
    before = weights.read_config(name).id2label
    if not replaced and not info["missing_keys"] and _permuted(before, config.id2label):
        body = f"{model.base_model_prefix}."
        replaced = {key.partition(".")[0] for key, _ in model.named_parameters() if not key.startswith(body)}
        why = f"has its labels in another order: {', '.join(before.values())}"
    for head in replaced:  # the whole head, as in fairseq, not only the layer of another size
        for module in getattr(model, head).modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=getattr(config, "initializer_range", 0.02))
                torch.nn.init.zeros_(module.bias)
    fresh = f"fresh, as the checkpoint's {why}" if replaced else "fresh" if info["missing_keys"] else "kept"
    logger.info(f"Head        {fresh}")
    return _with_head_dropout(model, head_dropout)


def _permuted(before: dict[int, str], now: dict[int, str]) -> bool:
    """Whether two heads have the same labels in another order."""
    names = [[str(of[number]).lower() for number in sorted(of)] for of in (before, now)]
    return names[0] != names[1] and sorted(names[0]) == sorted(names[1])


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
    appendix B). Raises `InputError` where the model is not one stack of layers."""
    count, modules = getattr(model.config, "num_hidden_layers", None), dict(model.named_modules())
    stacks = [
        name for name, module in modules.items() if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    if len(stacks) != 1:
        raise InputError(
            f"layer_decay={layer_decay}: {type(model).__name__} is no single stack of {count} layers, each with "
            "weights of its own; leave it at 1"
        )
    rates, layers = {}, f"{stacks[0]}."
    for name, _ in model.named_parameters():
        if name.startswith(layers):
            depth = count - int(name.removeprefix(layers).partition(".")[0])
        else:
            embeds = isinstance(modules[name.rpartition(".")[0]], torch.nn.Embedding) or "embedding" in name
            depth = count + 1 if embeds else 0
        rates[name] = learning_rate * layer_decay**depth
    return rates
