"""Flags of transformers' example scripts (`run_mlm.py`, `run_glue.py`, `run_qa.py`, `run_swag.py`) with another name
here, or none. A flag that cannot change a result is accepted and logged; any other is refused with its name here."""

import argparse
import functools
from collections.abc import Collection
from typing import Any

from roberta_recipe.errors import InputError
from roberta_recipe.log import logger

_NEVER, _ALWAYS, _ANY = ("false",), ("true",), ("true", "false")
# name: (accepted values; none: any number, and the reason why it changes nothing)
ACCEPTED: dict[str, tuple[tuple[str, ...], str]] = {
    "dtype": (("float32",), "weights are fp32 always"),
    "group_by_length": (_ALWAYS, "rows of like length come together always"),
    "ignore_mismatched_sizes": (_ANY, "a head of another size is made fresh, and logged"),
    "low_cpu_mem_usage": (_ANY, "weights are loaded without a second copy always"),
    "model_revision": (("main",), "the main branch is read always"),
    "no_pad_to_max_length": (_ANY, "loss and gradient do not depend on padding"),
    "overwrite_cache": (_ANY, "no stale cache is used: caches are checked against text and tokenizer"),
    "pad_to_max_length": (_ANY, "loss and gradient do not depend on padding"),
    "preprocessing_num_workers": ((), "every core is used where text is tokenized ahead"),
    "save_safetensors": (_ALWAYS, "checkpoints are safetensors always"),
    "streaming": (_ANY, "text is streamed always"),
    "torch_dtype": (("float32",), "weights are fp32 always"),
    "trust_remote_code": (_NEVER, "code from the Hub never runs"),
    "use_auth_token": (_ANY, "the token of `hf auth login` or HF_TOKEN is used always"),
    "use_fast_tokenizer": (_ALWAYS, "tokenizers are fast always"),
}
_DTYPE = "weights are fp32; arithmetic in half precision is --bf16 or --fp16"
_OVERWRITE = "no run is overwritten: the same command resumes; delete the folder, or name another --output_dir"
_PINNED = "a dataset on the Hub, its configuration and its revision are a source of a corpus preset: --corpus"
_MEASURED = "every row is scored, as validation picks the best epoch: name a shorter file"
_OWN_TABLE = "your own task: docs/adapting.md, section 6"
# name: hint, or the hint of the script that has the flag named first
REFUSED: dict[str, str | dict[str, str]] = {
    "cache_dir": "set the environment variable HF_HUB_CACHE (models) or HF_DATASETS_CACHE",
    "config_name": "the checkpoint's config is used; --random_weights takes its architecture alone",
    "dataset_config_name": {"corpus": _PINNED, "task_name": _OWN_TABLE, "": "see --dataset_name"},
    "dataset_name": {
        "corpus": f"{_PINNED} (docs/adapting.md, section 1)",
        "task_name": _OWN_TABLE,
        "level": "this script reads RACE (the Hub's without --data_dir); another dataset needs its reader in a copy",
    },
    "dtype": _DTYPE,
    "evaluation_strategy": "--eval_strategy",
    "group_by_length": "rows of like length come together always; leave it out",
    "line_by_line": 'a line as a block: JSON lines ({"text": ...}) with --input_format doc_sentences',
    "logging_dir": "logs are in --output_dir; trackers read TENSORBOARD_LOGGING_DIR and the like",
    "max_eval_samples": _MEASURED,
    "max_length": "--max_seq_length",
    "max_predict_samples": _MEASURED,
    "model_revision": "hf download MODEL --revision R --local-dir my_model, then --model_name_or_path my_model",
    "model_type": "--config_name FILE (presets/model/*.json, with any model_type), and --config_overrides",
    "no_cuda": "--use_cpu",
    "no_use_fast_tokenizer": "a fast tokenizer is needed: leave it out",
    "null_score_diff_threshold": "--no_answer null_score tunes the threshold on validation",
    "overwrite_output": _OVERWRITE,
    "overwrite_output_dir": _OVERWRITE,
    "per_gpu_eval_batch_size": "--per_device_eval_batch_size",
    "per_gpu_train_batch_size": "--per_device_train_batch_size",
    "save_safetensors": "checkpoints are safetensors always; leave it out",
    "test_file": {
        "version_2_with_negative": "validation is predicted: --validation_file, then predictions.json",
        "task_name": _OWN_TABLE,
        "": "--do_predict with the test folder of --data_dir",
    },
    "token": "it would be visible in process lists: run hf auth login, or set HF_TOKEN",
    "torch_dtype": _DTYPE,
    "train_file": {"task_name": _OWN_TABLE, "level": "--data_dir, with RACE's files"},
    "trust_remote_code": "code from the Hub never runs; leave it out",
    "use_auth_token": "it would be visible in process lists: run hf auth login, or set HF_TOKEN",
    "use_fast_tokenizer": "a fast tokenizer is needed: leave it out",
    "validation_file": {"task_name": _OWN_TABLE, "level": "--data_dir, with RACE's files"},
    "validation_split_percentage": "validation_share of a corpus preset (--corpus), or --validation_file; default: 1%",
    "warmup_ratio": "--warmup_steps, which below 1 is a share of the steps",
}


def without_accepted(argv: list[str], known: Collection[str]) -> list[str]:
    """`argv` without the accepted flags that a script with the flags `known` lacks, which are logged. Raises
    `InputError` for a value that is not accepted."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in ACCEPTED.keys() - known:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, nargs="?", const="true")
    given, others = parser.parse_known_args(argv)
    for name, value in vars(given).items():
        values, reason = ACCEPTED[name]
        if value.lower() not in values if values else not value.isdigit():  # the value may be a secret
            fix = hint(name, known) or f"it takes {' or '.join(values) or 'a number'}"
            raise InputError(f"unknown argument '--{name}' with this value; here: {fix}")
        _log_once(f"Flags       --{name} has no effect: {reason}")
    return others


def hint(name: str, known: Collection[str]) -> str | None:
    """The hint for a refused flag in a script with the flags `known`; None for a flag of no example script."""
    hints: Any = REFUSED.get(name.replace("-", "_"))
    return (
        next((text for flag, text in hints.items() if flag in {*known, ""}), None) if isinstance(hints, dict) else hints
    )


@functools.cache
def _log_once(line: str) -> None:  # fine-tuning parses its command line for each seed
    logger.info(line)
