"""A checkpoint's config and weights, whole or refused (paper, section 5: every fine-tuning starts from one).

`from_pretrained` draws at random what a file lacks, and warns; here, nothing is drawn that the file should have.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers import logging as transformers_logging

from roberta_recipe import durable
from roberta_recipe.data.tokenization import FILES
from roberta_recipe.errors import InputError, first_line
from roberta_recipe.input_files import path_or_hub_id, resolve_path
from roberta_recipe.log import counted
from roberta_recipe.model import albert

MODEL_ARGUMENT = "model_name_or_path"
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "embedding_size", "num_hidden_layers", "num_attention_heads"),
    *("inner_group_num", "num_hidden_groups", "max_position_embeddings"),
)


def check(name: str) -> None:
    """Raise `InputError` where a checkpoint's folder has a manifest, and its files are not what it says; those
    of its tokenizer, which need not be used, are checked when they are loaded."""
    folder = resolve_path(name)
    if (folder / durable.MANIFEST).is_file() and (fault := durable.fault(folder, only=lambda file: file not in FILES)):
        raise InputError(
            f"{MODEL_ARGUMENT}={name!r} is damaged: {fault}. Copy or train it again; if you changed it on purpose, "
            f"delete {folder / durable.MANIFEST}"
        )


def read_config(name: str, argument: str = MODEL_ARGUMENT, **settings: Any) -> PreTrainedConfig:
    """A checkpoint's config, with `settings` in it. Raises `InputError` where there is none that can be read."""
    try:
        return AutoConfig.from_pretrained(path_or_hub_id(name), **settings)
    except Exception as error:  # what a file's content makes transformers raise has no end
        raise InputError(f"no model config at {argument}={name!r}: {_reason(error)}") from error


def fresh_config(name: str, overrides: str | None = None) -> PreTrainedConfig:
    """The config `name` of a model with fresh weights, with `overrides` (key=value,key=value) in it. Raises
    `InputError`."""
    config = read_config(name, "config_name")
    where = f"config_name={name!r}" + (f" with config_overrides={overrides!r}" if overrides else "")
    if overrides:
        try:
            _override(config, overrides.replace(" ", ""))
        except Exception as error:  # values of each config's own checks too
            raise InputError(
                f"config_overrides={overrides!r} does not go into {name!r}: {_reason(error)}; write them as "
                "key=value,key=value, with keys of the config"
            ) from error
    albert.resolve(config, where)
    for field in _SIZES:
        if getattr(config, field, 1) < 1:
            raise InputError(f"{where}: {field}={getattr(config, field)} must be at least 1")
    size, heads = getattr(config, "hidden_size", 0), getattr(config, "num_attention_heads", 1)
    if not hasattr(config, "head_dim") and size % heads:  # ALBERT does not tell
        raise InputError(f"{where}: hidden_size={size} is not divisible by {heads} heads")
    return config


def config_of(config_name: str | None, overrides: str | None, model_name_or_path: str | None) -> PreTrainedConfig:
    """The config of a checkpoint, where one is named, or of fresh weights. Raises `InputError`."""
    return read_config(model_name_or_path) if model_name_or_path else fresh_config(config_name, overrides)


def _override(config: PreTrainedConfig, overrides: str) -> None:
    """`PreTrainedConfig.update_from_string`. Raises `ValueError` also for what would have no effect, or another."""
    names = [pair.partition("=")[0] for pair in overrides.split(",")]
    if len(set(names)) < len(names):
        raise ValueError("a key is given twice")
    if "model_type" in names:
        raise ValueError("model_type is the family: name the config of another one")
    if "num_hidden_groups" in names and hasattr(config, albert.SHARED):
        raise ValueError(f"num_hidden_groups follows from {albert.SHARED}={getattr(config, albert.SHARED)}")
    config.update_from_string(overrides)
    for name in names:
        if isinstance(value := getattr(config, name), float) and not math.isfinite(value):
            raise ValueError(f"{name}={value} is no number")


def positions(config: PreTrainedConfig) -> int | None:
    """The tokens that a model takes at once, None where no table of positions limits them; RoBERTa counts positions
    from its padding id + 1, so it never uses the rows of the table before that."""
    rows = getattr(config, "max_position_embeddings", None)
    if rows is None or rows < 1:  # XLNet's is -1
        return None
    if "roberta" in config.model_type or config.model_type in ("camembert", "longformer", "mpnet"):
        rows -= config.pad_token_id + 1
    return rows


@contextlib.contextmanager
def fitted(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, max_length: int | None = None
) -> Iterator[None]:
    """Sets `model_max_length` while a tokenizer is saved beside a model, so that `pipeline` truncates to `max_length`,
    by default the model's positions. Restored afterwards: fingerprints have the loaded value."""
    before = tokenizer.model_max_length
    tokenizer.model_max_length = max_length or positions(config) or before
    try:
        yield
    finally:
        tokenizer.model_max_length = before


def load(
    cls: Any, name: str, *, config: PreTrainedConfig, fresh_head: bool = False, advice: str = ""
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A checkpoint as `cls` (an Auto class too), float32, and transformers' `output_loading_info`.

    Raises `InputError` where a weight is missing (tied weights aside), of another size than the config says, not
    finite, or of a layer that the config has no room for, and where the files are not as they were written. With
    `fresh_head`, modules outside of the body may be missing as a whole, or of other sizes, and are then drawn at
    random. `advice` ends the line on weights that are missing.
    """
    check(name)
    where, verbosity = f"{MODEL_ARGUMENT}={name!r}", transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report on missing weights: the lines here say what matters
    try:
        model, info = cls.from_pretrained(
            path_or_hub_id(name),
            config=config,
            dtype=torch.float32,
            use_safetensors=True,  # a pickle can run code
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except InputError:
        raise
    except Exception as error:  # as above
        raise InputError(f"no weights to load at {where}: {_reason(error)}{_pickle_hint(name)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    _check_names(model, info, where, fresh_head, advice)
    if bad := [key for key, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]:
        raise InputError(f"{where}: {_listed(bad)} not finite: the file is damaged, or its training diverged")
    return model, info


def fresh(cls: Any, name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """A model of a class, or of an Auto class, with fresh weights. Raises `InputError` for a config (that of `name`)
    of which no such model can be made."""
    try:
        return cls.from_config(config, dtype=torch.float32) if hasattr(cls, "from_config") else cls(config)
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"no model can be made from {name!r}: {_reason(error)}") from error


def _check_names(model: PreTrainedModel, info: dict[str, Any], where: str, fresh_head: bool, advice: str) -> None:
    """Raise `InputError` for weights that are missing, of other sizes, or left over; as `load`."""
    body, missing = f"{model.base_model_prefix}.", set(info["missing_keys"])
    resized = {key for key, *_ in info["mismatched_keys"]}
    if fresh_head:  # a pooler belongs to the heads that use it
        replaced = {_module(key) for key in resized if not key.startswith(body)}
        found = {_module(key) for key in model.state_dict().keys() - missing}
        missing = {
            key
            for key in missing
            if (key.startswith(body) and "pooler" not in key)
            or (not key.startswith(body) and _module(key) in found - replaced)
        }
        resized = {key for key in resized if key.startswith(body)}
    if missing:
        raise InputError(f"{where} has no weights for {_listed(missing)}{advice and f': {advice}'}")
    if resized:
        raise InputError(f"{where}: its weights have other sizes than its config.json says, {_listed(resized)}")
    if left := [key for key in info["unexpected_keys"] if key.startswith(body) and "pooler" not in key]:
        raise InputError(f"{where}: its config.json has no room for {_listed(left)} in its weights")


def _module(key: str) -> str:
    return key.partition(".")[0]


def _listed(keys: Any) -> str:
    """The first name and the number of the others."""
    first, *others = sorted(keys)
    return f"{first} and {counted(len(others), 'other')}" if others else first


def _reason(error: Exception) -> str:
    said = first_line(error)
    return said if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {said}"


def _pickle_hint(name: str) -> str:
    folder = resolve_path(name)
    if not folder.is_dir() or list(folder.glob("*.safetensors*")) or not list(folder.glob("*.bin")):
        return ""
    return (
        '. It has a pickle, which is not loaded; where you trust it, save it anew: python -c "from transformers '
        f"import AutoModelForMaskedLM as M; M.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )


def identity(name: str) -> str:
    """A fingerprint of a checkpoint's content: config and weight files of a folder, the commit of a Hub id."""
    folder = Path(resolve_path(name))
    if not folder.is_dir():
        return str(getattr(read_config(name), "_commit_hash", None))
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
    return durable.fingerprint([[path.name, path.stat().st_size, durable.sha256(path)[:32]] for path in files])
