"""Flags of transformers' example scripts (`run_mlm.py`, `run_glue.py`, `run_qa.py`, `run_swag.py`) with another name
here, or none. A flag that cannot change a result is accepted and logged; any other is refused with its name here."""

import argparse
from collections.abc import Collection

from roberta_recipe.errors import InputError
from roberta_recipe.log import log_once

_NEVER, _ALWAYS, _ANY = ("false",), ("true",), ("true", "false")
# flag: (accepted values, empty for any number; the reason why it has no effect)
ACCEPTED: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(("dtype", "torch_dtype"), (("float32",), "weights are fp32; half precision is --bf16 or --fp16")),
    "group_by_length": (_ALWAYS, "sequences of similar length are always batched together"),
    "ignore_mismatched_sizes": (_ANY, "a head of another size is reinitialized, and logged"),
    "low_cpu_mem_usage": (_ANY, "weights are always loaded without a second copy"),
    "model_revision": (("main",), "main is loaded; for another: hf download MODEL --revision R --local-dir my_model"),
    "overwrite_cache": (_ANY, "caches are checked against text and tokenizer"),
    **dict.fromkeys(("no_pad_to_max_length", "pad_to_max_length"), (_ANY, "the loss does not depend on padding")),
    "preprocessing_num_workers": ((), "tokenization before training uses all cores"),
    "save_safetensors": (_ALWAYS, "checkpoints are always safetensors"),
    "streaming": (_ANY, "text is always streamed"),
    "trust_remote_code": (_NEVER, "code from the Hub never runs"),
    "use_auth_token": (_ANY, "the token of `hf auth login` or HF_TOKEN is always used"),
    "use_fast_tokenizer": (_ALWAYS, "tokenizers are always fast"),
}
_OVERWRITE = "no run is overwritten: the same command resumes; delete the folder, or name another --output_dir"
_MEASURED = "every row is scored, as validation picks the best epoch: name a shorter file"
_OWN = "this script reads its task's data (--data_dir, else the Hub's); your own: docs/adapting.md, section 6"
_TEXT = "a source of a corpus preset names dataset, config and revision: --corpus (docs/adapting.md, section 1)"
# flag: the hint in the error message, with its name here
REFUSED: dict[str, str] = {
    **dict.fromkeys(("dataset_name", "dataset_config_name", "train_file", "validation_file"), _OWN),
    **dict.fromkeys(("max_eval_samples", "max_predict_samples"), _MEASURED),
    **dict.fromkeys(("overwrite_output", "overwrite_output_dir"), _OVERWRITE),
    "cache_dir": "set the environment variable HF_HUB_CACHE (models) or HF_DATASETS_CACHE",
    "config_name": "the checkpoint's config is used; --random_weights takes its architecture alone",
    "evaluation_strategy": "--eval_strategy",
    "line_by_line": 'one line per block: JSON lines ({"text": ...}) with --input_format doc_sentences',
    "logging_dir": "logs are in --output_dir; trackers read TENSORBOARD_LOGGING_DIR and similar variables",
    "max_length": "--max_seq_length",
    "model_type": "--config_name FILE (presets/model/*.json, with any model_type), and --config_overrides",
    "no_cuda": "--use_cpu",
    "null_score_diff_threshold": "--no_answer null_score tunes the threshold on validation",
    "test_file": "--do_predict with the test rows of --data_dir; finetune_squad.py predicts --validation_file",
    "token": "it would be visible in process lists: run hf auth login, or set HF_TOKEN",
    "validation_split_percentage": "validation_share of a corpus preset (--corpus), or --validation_file; default: 1%",
    "warmup_ratio": "--warmup_steps, which below 1 is a share of the steps",
}
REFUSED_IN_PRETRAINING = dict.fromkeys(("dataset_name", "dataset_config_name"), _TEXT)


def without_accepted(argv: list[str], known: Collection[str]) -> list[str]:
    """Remove `ACCEPTED` flags from `argv`, and log them; flags that the script has itself (`known`) stay. Raises
    `InputError` for a value that is not accepted."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in ACCEPTED.keys() - known:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, nargs="?", const="true")
    given, others = parser.parse_known_args(argv)
    for name, value in vars(given).items():
        values, reason = ACCEPTED[name]
        if value.lower() not in values if values else not value.isdigit():  # the value may be a secret
            raise InputError(f"unsupported value of '--{name}'; here: {reason}")
        log_once(f"Flags       --{name} has no effect: {reason}")
    return others


def hint(name: str, known: Collection[str]) -> str | None:
    """The hint for a refused flag in a script with the flags `known`; None for a flag of no example script."""
    return (REFUSED | (REFUSED_IN_PRETRAINING if "corpus" in known else {})).get(name.replace("-", "_"))
