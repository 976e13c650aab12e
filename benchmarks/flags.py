"""Check of the resume scope of every flag: changed at a restart, it leaves the final weights the same, bit for bit.

    python benchmarks/flags.py [--script train_mlm] [--flags eval_steps seeds]    # about a second a flag

A tiny model with dropout trains for half of its steps, stops, and is resumed once per flag of scope "free" (see
`roberta_recipe/settings.py`) with another value. The final weights must equal those of an uninterrupted run. With flags
of scope "layout", which change rounding, they may differ if the log says so. The exit code is 1 if a flag has the wrong
scope.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
import tempfile
import typing
from enum import Enum
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
from conftest import Forked, make_documents, write_parquet
from official_files import write_glue
from transformers import RobertaConfig, Trainer

import finetune_glue
import finetune_ner
import finetune_race
import finetune_squad
import train_mlm
from roberta_recipe.data.tokenizer_training import train_tokenizer
from roberta_recipe.errors import InputError
from roberta_recipe.model.masked_lm import build_model
from roberta_recipe.settings import flags_of
from roberta_recipe.training.arguments import FinetuneTrainingArguments, MlmTrainingArguments
from roberta_recipe.training.checkpoint import hash_of
from roberta_recipe.training.durable_trainer import DurableTrainer

CLASSES = {  # script -> argument dataclasses
    "train_mlm": (train_mlm.MlmArguments, MlmTrainingArguments),
    "finetune_glue": (finetune_glue.GlueArguments, FinetuneTrainingArguments),
    "finetune_squad": (finetune_squad.SquadArguments, FinetuneTrainingArguments),
    "finetune_race": (finetune_race.RaceArguments, FinetuneTrainingArguments),
    "finetune_ner": (finetune_ner.NerArguments, FinetuneTrainingArguments),
}
STEPS = 6  # per run; the first start stops after half of them
# values of flags whose type does not determine a valid one, with further flags that they need
VALUES: dict[str, list[str]] = {
    "accelerator_config": ['{"even_batches": true, "split_batches": true}'],
    "activation_checkpointing_kwargs": ['{"use_reentrant": false}', "--activation_checkpointing", "true"],
    "cooldown_share": ["0.5", "--max_train_minutes", "60", "--lr_scheduler_type", "constant_with_warmup"],
    "dataloader_persistent_workers": ["true", "--dataloader_num_workers", "1"],
    "dataloader_prefetch_factor": ["3", "--dataloader_num_workers", "1"],
    "ddp_backend": ["gloo"],
    "debug": ["underflow_overflow"],
    "eval_steps": ["2", "--eval_strategy", "steps"],
    "eval_strategy": ["steps", "--eval_steps", "1"],
    "fill_mask_examples": ["the <mask>"],
    "gradient_accumulation_steps": ["2", "--per_device_train_batch_size", "4"],
    "gradient_checkpointing_kwargs": ['{"use_reentrant": false}', "--gradient_checkpointing", "true"],
    "include_for_metrics": ["inputs"],
    "initialization": ["mimetic"],
    "liger_kernel_config": ['{"rope": false}'],
    "log_level": ["error"],
    "log_level_replica": ["error"],
    "lr_scheduler_kwargs": ['{"num_cycles": 0.25}', "--lr_scheduler_type", "cosine"],
    "max_train_minutes": ["60"],
    "metric_for_best_model": ["loss"],
    "num_train_epochs": ["7"],
    "optim_args": ["momentum=0.9", "--optim", "sgd"],
    "per_device_train_batch_size": ["4"],
    "report_to": ["mlflow"],
    "seeds": ["1", "2"],
    "max_eval_samples": ["4"],
    "torch_compile": ["true", "--torch_compile_backend", "eager"],
    "torch_compile_backend": ["eager"],
    "torch_compile_mode": ["default", "--torch_compile_backend", "eager"],
}


def changed(cls: type, name: str, default: Any) -> list[str]:
    """Command-line words that set a flag of `cls` to a value other than `default`."""
    if name in VALUES:
        return [f"--{name}", *VALUES[name]]
    return [f"--{name}", _other(typing.get_type_hints(cls)[name], default)]


def _other(hint: Any, default: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        kinds = [kind for kind in inner if kind not in (type(None), dict) and typing.get_origin(kind) is not dict]
        return _other(next((kind for kind in kinds if kind is bool), (kinds or [dict])[0]), default)
    if origin is typing.Literal:
        return str(next(value for value in inner if value != default))
    if origin is list:
        return _other(inner[0], None)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(member.value for member in hint if member.value != getattr(default, "value", default))
    if hint is bool:
        return "false" if default is True else "true"
    if hint is int:
        return str(3 if default in (None, 0, -1) else default + 1)
    if hint is float:
        return str(0.5 if not default or default < 0 else default / 2)
    if hint is dict:
        return '{"changed": 1}'
    return "changed"


def prepare(folder: Path) -> None:
    """Write texts, a tokenizer and a tiny model with dropout to `folder`."""
    documents = make_documents(200, seed=1)
    for name, texts in (("train", documents[:150]), ("valid", documents[150:])):
        write_parquet(folder / f"{name}.parquet", texts)
    tokenizer = train_tokenizer(documents, vocab_size=400)
    tokenizer.save_pretrained(folder / "tokenizer")
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "layer_norm_eps": 1e-5,
    }
    (folder / "preset.yaml").write_text("seed: 42\nmlm_probability: 0.15\n", encoding="utf-8")
    RobertaConfig(
        **{"vocab_size": len(tokenizer), "max_position_embeddings": 130, "type_vocab_size": 1, **shape}
    ).to_json_file(folder / "config.json")
    torch.manual_seed(0)
    model = build_model(tokenizer, config_name=str(folder / "config.json"), max_seq_length=64)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_glue(
        folder / "glue",
        rows={"train": 48, "dev": 9, "test": 7},
        text=lambda rng: " ".join(rng.choice(documents).split()[4:14]),
    )


def command_line(script: str, folder: Path, output_dir: Path) -> list[str]:
    """The flags of the run."""
    shared = {
        **{"output_dir": output_dir, "max_seq_length": 64, "global_batch_size": 8, "per_device_train_batch_size": 8},
        **{"per_device_eval_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-3, "logging_steps": 1},
        **{"save_strategy": "steps", "save_steps": STEPS // 2, "use_cpu": True, "disable_tqdm": True},
    }
    if script == "train_mlm":
        own = {"train_file": folder / "train.parquet", "validation_file": folder / "valid.parquet"}
        own |= {"tokenizer_name": folder / "tokenizer", "config_name": folder / "config.json"}
    else:
        own = {"data_dir": folder / "glue", "model_name_or_path": folder / "model", "other_rows": True, "seeds": 1}
        own |= {"warmup_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    preset = folder / "preset.yaml" if script == "train_mlm" else ROOT / "presets/glue/rte.yaml"
    return ["--config", str(preset), *(str(w) for k, v in {**own, **shared}.items() for w in (f"--{k}", v))]


def outcome(module: ModuleType, argv: list[str], end_after: int | None = None) -> dict[str, Any]:
    """Run a script in this process; returns a hash of the final weights and the log lines, or the error. It stops after
    the checkpoint of step `end_after`."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"weights": [], "lines": []}
    train, save = Trainer.train, DurableTrainer._save_checkpoint

    def train_and_look(self, *args, **kwargs):
        output = train(self, *args, **kwargs)
        found["weights"].append(hash_of(self.model.state_dict()))
        return output

    def save_and_end(self, *args):
        save(self, *args)
        if self.state.global_step == end_after:
            raise KeyboardInterrupt

    Trainer.train = train_and_look
    DurableTrainer._save_checkpoint = save_and_end
    logger = logging.getLogger("recipe")
    logger.addFilter(lambda line: found["lines"].append(line.getMessage()) or True)
    try:
        module.main(argv)
    except KeyboardInterrupt:
        pass
    except InputError as error:
        found["refused"] = str(error)
    except Exception as error:
        found["broken"] = f"{type(error).__name__}: {error}"
    finally:
        Trainer.train, DurableTrainer._save_checkpoint = train, save
        logger.filters.clear()
    return found


def forked(function, *args) -> Any:
    """The result of `function(*args)` in a forked process, so that it has no effect on this one."""
    with tempfile.NamedTemporaryFile() as result:
        child = Forked(lambda: Path(result.name).write_text(json.dumps(function(*args))), os.devnull)
        with contextlib.suppress(AssertionError):  # after the timeout
            child.end(120)
        return json.loads(Path(result.name).read_text() or '{"broken": "no answer", "weights": []}')


def verdict(scope: str, found: dict[str, Any], wanted: str) -> tuple[bool, str]:
    """(whether the scope of a flag is right, description of the outcome)."""
    if "refused" in found:
        return True, f"refused: {found['refused'][:150]}"
    if "broken" in found or not found["weights"]:
        return False, f"BROKEN: {found.get('broken', 'no run')[:300]}"
    same = found["weights"][0] == wanted
    said = any("another layout" in line for line in found["lines"])
    if scope == "layout":
        return said or same, f"{'same' if same else 'other'} weights, {'logged' if said else 'NOT LOGGED'}"
    return same, "same weights" if same else "OTHER WEIGHTS"


def half_run(script: str, folder: Path) -> str:
    """Train an uninterrupted run and a stopped one (`folder/script/half`); returns the first one's hash of weights."""
    module, own = sys.modules[script], folder / script
    whole = forked(outcome, module, command_line(script, folder, own / "whole"))
    if not whole["weights"]:
        raise SystemExit(f"the uninterrupted run failed: {whole}")
    forked(outcome, module, command_line(script, folder, own / "half"), STEPS // 2)
    return whole["weights"][0]


def resumed(script: str, folder: Path, words: list[str], name: str) -> dict[str, Any]:
    """The outcome of the stopped run, resumed with the further command-line `words`."""
    target = folder / script / name
    shutil.copytree(folder / script / "half", target)
    try:
        return forked(outcome, sys.modules[script], [*command_line(script, folder, target), *words])
    finally:
        shutil.rmtree(target, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", choices=list(CLASSES), nargs="+", default=["train_mlm", "finetune_glue"])
    parser.add_argument("--flags", nargs="+", help="only these flags")
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for script in args.script:
            wanted = half_run(script, folder)
            again = verdict("free", resumed(script, folder, [], "again"), wanted)
            print(f"{script}: resumed at step {STEPS // 2} of {STEPS} without a change: {again[1]}", flush=True)
            wrong += not again[0]
            for cls in CLASSES[script]:
                defaults = {f.name: default_of(f) for f in dataclasses.fields(cls)}
                for flag, facts in flags_of(cls).items():
                    if facts.scope not in ("free", "layout") or (args.flags and flag not in args.flags):
                        continue
                    if flag in ("output_dir", "deepspeed", "sweep"):  # differs anyway; a launcher's; other runs
                        continue
                    words = [str(folder / "cache")] if flag == "token_cache" else None
                    words = [f"--{flag}", *words] if words else changed(cls, flag, defaults[flag])
                    right, said = verdict(facts.scope, resumed(script, folder, words, flag), wanted)
                    wrong += not right
                    print(f"  {facts.scope:<7} {' '.join(words):<60} {said}", flush=True)
    print(f"{wrong} flags have the wrong scope")
    raise SystemExit(wrong > 0)


def default_of(field: dataclasses.Field) -> Any:
    """The default of a dataclass field."""
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


if __name__ == "__main__":
    main()
