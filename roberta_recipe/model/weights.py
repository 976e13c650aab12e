"""Config and weight loading; missing weights, which `from_pretrained` draws at random with a warning, are errors."""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers import logging as transformers_logging
from transformers.utils import cached_file

from roberta_recipe import durable
from roberta_recipe.data.tokenization import FILES
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import explained, path_or_hub_id, resolve_path
from roberta_recipe.log import listed
from roberta_recipe.model import architectures

MODEL_ARGUMENT = "model_name_or_path"
# further model types with positions from the padding id + 1 on
_OFFSET = ["camembert", "data2vec-text", "ibert", "lilt", "longformer", "luke", "mpnet", "xmod"]


def check(name: str) -> None:
    """Raise `InputError` if a checkpoint's files differ from its manifest. Tokenizer files are checked by
    `load_tokenizer`, as another tokenizer may be used."""
    folder = resolve_path(name)
    has_manifest = (folder / durable.MANIFEST).is_file()
    if has_manifest and (damage := durable.damage(folder, only=lambda file: file not in FILES)):
        raise InputError(
            f"{MODEL_ARGUMENT}={name!r} is damaged: {damage}. Copy or train it again; if you changed it on purpose, "
            f"delete {folder / durable.MANIFEST}"
        )


def read_config(name: str, argument: str = MODEL_ARGUMENT, **settings: Any) -> PreTrainedConfig:
    """A checkpoint's config, updated with `settings`. Raises `InputError`."""
    with explained(f"no model config at {argument}={name!r}, a folder or a Hub id"):
        return AutoConfig.from_pretrained(path_or_hub_id(name), trust_remote_code=False, **settings)


def overridden(overrides: str | None) -> set[str]:
    """The keys of `overrides` (key=value,key=value)."""
    return {pair.partition("=")[0].strip() for pair in (overrides or "").split(",")}


def fresh_config(name: str, overrides: str | None = None) -> PreTrainedConfig:
    """The config for fresh weights, with `overrides` (key=value,key=value). Raises `InputError`."""
    config = read_config(name, "config_name")
    if overrides:
        derived = {"model_type", "num_hidden_groups"} if hasattr(config, architectures.SHARED) else {"model_type"}
        for key in derived & overridden(overrides):
            raise InputError(f"config_overrides={overrides!r}: {key} follows from config_name={name!r}")
        fix = "; write key=value,key=value, with keys of the config"
        with explained(f"config_overrides={overrides!r} does not fit {name!r}", fix):
            config.update_from_string(overrides.replace(" ", ""))
            layer_types = getattr(config, "layer_types", None)  # ModernBERT's, one per layer
            if layer_types and len(layer_types) != config.num_hidden_layers:
                config = config.from_dict({**config.to_dict(), "layer_types": None})
    architectures.set_groups(config, f"config_name={name!r}")
    return config


def config_of(config_name: str | None, overrides: str | None, model_name_or_path: str | None) -> PreTrainedConfig:
    """The config of a checkpoint or, if none is named, for fresh weights. Raises `InputError`."""
    if not model_name_or_path:
        return fresh_config(config_name, overrides)
    config = read_config(model_name_or_path)
    architectures.set_groups(config, f"{MODEL_ARGUMENT}={model_name_or_path!r}")
    return config


def counts_from_padding(config: PreTrainedConfig) -> bool:
    """Whether positions begin at the padding id + 1, as RoBERTa's."""
    return "roberta" in config.model_type or config.model_type in _OFFSET


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest sequence of a model in tokens, without unused positions; None without absolute positions."""
    rows = getattr(config, "max_position_embeddings", None)
    if rows is None or rows < 1 or not getattr(config, "position_biased_input", True):  # XLNet's is -1; DeBERTa-v3
        return None
    if counts_from_padding(config):
        rows -= config.pad_token_id + 1
    return rows


def check_length(name: str, max_seq_length: int, config: PreTrainedConfig | None = None) -> None:
    """Raise `InputError` if the model `name` (with `config`, if given) has fewer than `max_seq_length` positions."""
    config = config or read_config(name)
    longest = max_positions(config)
    if longest is not None and longest < 1:
        raise InputError(
            f"{name!r} has max_position_embeddings={config.max_position_embeddings}, and positions begin after the "
            f"tokenizer's pad_token_id={config.pad_token_id}: use a tokenizer whose padding token is among the first, "
            "or a model with positions from 0 (--config_name presets/model/bert_base.json)"
        )
    if longest and max_seq_length > longest:
        raise InputError(
            f"max_seq_length={max_seq_length} is more than the {longest} positions of {name!r}: use "
            f"--max_seq_length {longest} or, for fresh weights, another max_position_embeddings"
        )


def set_input_names(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Set the tokenizer's `model_input_names` for a model: always a mask, without which a row would depend on the
    others of its batch, and token types where the model has embeddings for both segments."""
    types = tokenizer("a", "b", return_token_type_ids=True)["token_type_ids"]
    unknown = math.inf if "token_type_ids" in tokenizer.model_input_names else 0  # ALBERT's tokenizer omits it
    names = ["input_ids", "token_type_ids", "attention_mask"]
    if getattr(config, "type_vocab_size", unknown) <= max(1, *types):
        names.remove("token_type_ids")  # RoBERTa with BERT's tokenizer
    if set(names) != set(tokenizer.model_input_names):
        tokenizer.model_input_names = names
        tokenizer.init_kwargs = {**tokenizer.init_kwargs, "model_input_names": names}  # this is saved


def for_saving(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, max_length: int | None = None
) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer, to be saved with a model: with the model's input names, and a `model_max_length` of
    `max_length` (default: the model's maximum), so that `pipeline` truncates."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.model_max_length = max_length or max_positions(config) or tokenizer.model_max_length
    set_input_names(tokenizer, config)
    return tokenizer


def load(
    cls: Any, name: str, *, config: PreTrainedConfig, fresh_head: bool = False, advice: str = ""
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """(model of the class or Auto class `cls` in float32, transformers' `output_loading_info`).

    Raises `InputError` for weights that are missing (tied weights aside), unexpected, not finite, or of another size
    than in the config, and for files that differ from the manifest. With `fresh_head`, whole modules outside of the
    encoder may be missing or of other sizes, and are initialized at random. `advice` is appended to the message about
    missing weights.
    """
    check(name)
    where, verbosity = f"{MODEL_ARGUMENT}={name!r}", transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report on missing weights
    try:
        with explained(f"no weights to load at {where}", "; rewrite a .bin with from_pretrained and save_pretrained"):
            model, info = cls.from_pretrained(
                path_or_hub_id(name),
                config=config,
                dtype=torch.float32,
                use_safetensors=True,  # a pickle can run code
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    finally:
        transformers_logging.set_verbosity(verbosity)
    _check_names(model, info, where, fresh_head, advice)
    if bad := [key for key, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]:
        raise InputError(f"{where} has NaN or infinity in {listed(sorted(bad), 1)}: it is damaged or has diverged")
    return model, info


def fresh(cls: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """A float32 model of the class or Auto class `cls` with fresh weights. Raises `InputError`."""
    with explained(f"a {config.model_type!r} model with these values cannot be built"):
        return cls.from_config(config, dtype=torch.float32) if hasattr(cls, "from_config") else cls(config)


def _check_names(model: PreTrainedModel, info: dict[str, Any], where: str, fresh_head: bool, advice: str) -> None:
    """Raise `InputError` for weights that are missing, of other sizes, or unexpected, as in `load`."""
    body, missing = f"{model.base_model_prefix}.", set(info["missing_keys"])
    resized = {key for key, *_ in info["mismatched_keys"]}
    if fresh_head:  # poolers belong to the heads that use them
        resized_heads = {key.partition(".")[0] for key in resized if not key.startswith(body)}
        loaded = {key.partition(".")[0] for key in model.state_dict().keys() - missing} - resized_heads
        if not loaded:
            raise InputError(
                f"{where} has no weights for {type(model).__name__}, whose base_model_prefix names no encoder"
            )
        loaded.add(model.base_model_prefix)
        resized = {key for key in resized if key.startswith(body)}
        missing = {key for key in missing if key.partition(".")[0] in loaded and f"{body}pooler" not in key}
    if missing:
        raise InputError(f"{where} has no weights for {listed(sorted(missing), 1)}{advice and f': {advice}'}")
    if resized:
        raise InputError(f"{where}: weights have other sizes than in its config.json, {listed(sorted(resized), 1)}")
    if left := [key for key in info["unexpected_keys"] if key.startswith(body) and f"{body}pooler" not in key]:
        raise InputError(f"{where}: its config.json has no place for the weights {listed(sorted(left), 1)}")


def content_hash(name: str) -> str:
    """Hash of a checkpoint: of its config and weight files or, for a Hub id, the commit."""
    folder = resolve_path(name)
    if not folder.is_dir():
        return Path(cached_file(name, "config.json")).parent.name  # of the Hub's cache: snapshots/<commit>
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
    return durable.fingerprint([[path.name, path.stat().st_size, durable.sha256(path)[:32]] for path in files])
