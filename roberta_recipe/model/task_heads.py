"""Fine-tuning models: a checkpoint with a task head (paper, section 5), and layer-wise learning rates."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForMultipleChoice, AutoModelForSequenceClassification

from roberta_recipe.errors import InputError
from roberta_recipe.log import logger
from roberta_recipe.model import weights

# config keys of a head's dropout in Hugging Face's models; some (MPNet) have none
_HEAD_DROPOUT = ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "cls_dropout")


def load_with_head(
    cls: Any, name: str, head_dropout: float | None, random_weights=False, labels: Sequence[str] = (), **settings: Any
) -> torch.nn.Module:
    """A checkpoint as a model of the Auto class `cls`, with `labels` (of the outputs) and `settings` in its config.
    The head is fresh if missing, of another size, or with the same labels in another order, else kept (see the log);
    `random_weights`: all is fresh. Raises `InputError` for a missing or damaged checkpoint, a missing class, or a
    head that reads the last token."""
    if labels:
        settings |= {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}
    config = weights.read_config(name, **settings)
    if type(config) not in getattr(cls, "_model_mapping", [type(config)]):
        raise InputError(f"{name!r} is a {config.model_type!r} model, for which transformers has no {cls.__name__}")
    summarizes = cls in (AutoModelForMultipleChoice, AutoModelForSequenceClassification)
    if summarizes and getattr(config, "summary_type", None) == "last":
        raise InputError(
            f"the head of {name!r} reads the last token (summary_type=last, as XLNet's), and batches are padded on the "
            "right; use another architecture"
        )
    for field in _HEAD_DROPOUT:
        if head_dropout is not None and hasattr(config, field):
            setattr(config, field, head_dropout)
    if random_weights:
        weights.check(name)
        model = weights.fresh(cls, config)
        logger.info("Weights     random")
    else:
        model, info = weights.load(cls, name, config=config, fresh_head=True)
        logger.info(f"Head        {_refresh_head(model, info, weights.read_config(name).id2label)}")
    for key, module in model.named_modules():
        in_head = not key.startswith(f"{model.base_model_prefix}.")
        if head_dropout is not None and in_head and isinstance(module, torch.nn.Dropout):
            module.p = head_dropout
    return model


def _refresh_head(model: torch.nn.Module, info: dict[str, Any], labels: dict[int, str]) -> str:
    """Reinitialize the whole head if its size or its `labels`' order differs (as in fairseq); returns a log text."""
    replaced, reason = {key.partition(".")[0] for key, *_ in info["mismatched_keys"]}, "has another size"
    before, now = ([str(names[id]).lower() for id in sorted(names)] for names in (labels, model.config.id2label))
    if not replaced and not info["missing_keys"] and before != now and sorted(before) == sorted(now):
        replaced = {key.partition(".")[0] for key, _ in model.named_parameters()} - {model.base_model_prefix}
        reason = f"has its labels in another order: {', '.join(labels.values())}"
    for head in replaced:
        for module in getattr(model, head).modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=getattr(model.config, "initializer_range", 0.02))
                if module.bias is not None:  # ModernBERT's has none
                    torch.nn.init.zeros_(module.bias)
    if replaced:
        return f"fresh, as the checkpoint's {reason}"
    fresh = {key.removeprefix(f"{model.base_model_prefix}.").partition(".")[0] for key in info["missing_keys"]}
    return f"fresh ({', '.join(sorted(fresh))})" if fresh else "kept"


def layer_learning_rates(model: torch.nn.Module, learning_rate: float, layer_decay: float) -> dict[str, float]:
    """Layer-wise learning rates by parameter name: `learning_rate` for the head, times `layer_decay` per layer from the
    top down to the embeddings (ULMFiT, arXiv 1801.06146, section 3.2; ELECTRA, arXiv 2003.10555, appendix B). Raises
    `InputError` for a model without a single stack of layers (ALBERT)."""
    count, modules = getattr(model.config, "num_hidden_layers", None), dict(model.named_modules())
    stacks = [name for name, each in modules.items() if isinstance(each, torch.nn.ModuleList) and len(each) == count]
    if len(stacks) != 1:
        raise InputError(f"layer_decay={layer_decay}: {type(model).__name__} has no single stack of layers; use 1")
    rates, layers = {}, f"{stacks[0]}."
    for name, _ in model.named_parameters():
        depth = 0
        if name.startswith(layers):
            depth = count - int(name.removeprefix(layers).partition(".")[0])
        elif isinstance(modules[name.rpartition(".")[0]], torch.nn.Embedding) or "embedding" in name:
            depth = count + 1
        rates[name] = learning_rate * layer_decay**depth
    return rates
