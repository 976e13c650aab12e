"""Every flag of the scripts, changed in the middle of a run: the weights at the end, bit for bit, or why not.

    python benchmarks/flags.py [--script train_mlm] [--flags eval_steps seeds]    # about a second a flag

A tiny model with dropout trains for half of its steps, is ended, and is resumed under each flag that may differ at each
start ("free" in its declaration, `roberta_recipe/settings.py`), with another value. The weights after the last step
must be those of the run that was not ended. Flags that change the rounding ("layout") run too, and must say so. The
exit code is 1 where a flag is not what it is declared to be.
"""

import argparse
import dataclasses
import hashlib
import logging
import multiprocessing
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
from conftest import make_documents, write_parquet
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
from roberta_recipe.training.durable_trainer import DurableTrainer

CLASSES = {  # of the arguments, by script
    "train_mlm": (train_mlm.MlmArguments, MlmTrainingArguments),
    "finetune_glue": (finetune_glue.GlueArguments, FinetuneTrainingArguments),
    "finetune_squad": (finetune_squad.SquadArguments, FinetuneTrainingArguments),
    "finetune_race": (finetune_race.RaceArguments, FinetuneTrainingArguments),
    "finetune_ner": (finetune_ner.NerArguments, FinetuneTrainingArguments),
}
STEPS = 6  # of a run here; it is ended after half of them
# another value of a flag, where its type does not say which value means something; and what has to go with it
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
    """The words of a command line that give a flag of `cls` another value than `default`."""
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
    """Texts, a tokenizer, and a tiny model with dropout, below `folder`."""
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
    """The flags of the run that is repeated here."""
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
    """What a run in this process comes to: a digest of its weights after the last step and its log lines, or the error
    that it ended in. It is ended behind the checkpoint of step `end_after`."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"weights": [], "lines": []}
    train, save = Trainer.train, DurableTrainer._save_checkpoint

    def train_and_look(self, *args, **kwargs):
        output = train(self, *args, **kwargs)
        found["weights"].append(weights_digest(self.model))
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


def weights_digest(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def forked(function, *args) -> Any:
    """`function(*args)` in a child of this process, which has everything loaded, so that nothing is left behind."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run():
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
            sender.send(function(*args))
            os._exit(0)  # at once: what the parent registered for its own end is not the child's

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    found = receiver.recv() if receiver.poll(120) else {"broken": "no answer in two minutes", "weights": []}
    child.join(5)
    child.kill()
    return found


def verdict(scope: str, found: dict[str, Any], wanted: str) -> tuple[bool, str]:
    """Whether a flag is what it is declared to be, and in words."""
    if "refused" in found:
        return True, f"refused: {found['refused'][:150]}"
    if "broken" in found or not found["weights"]:
        return False, f"BROKEN: {found.get('broken', 'no run')[:300]}"
    same = found["weights"][0] == wanted
    said = any("another layout" in line for line in found["lines"])
    if scope == "layout":
        return said or same, f"{'the same' if same else 'other'} weights, {'said' if said else 'NOT SAID'}"
    return same, "the same weights" if same else "OTHER WEIGHTS"


def half_run(script: str, folder: Path) -> str:
    """Train whole and to its half (`folder/script/half`); returns the digest of the weights of the whole run."""
    module, own = sys.modules[script], folder / script
    whole = forked(outcome, module, command_line(script, folder, own / "whole"))
    if not whole["weights"]:
        raise SystemExit(f"the run to compare with failed: {whole}")
    forked(outcome, module, command_line(script, folder, own / "half"), STEPS // 2)
    return whole["weights"][0]


def resumed(script: str, folder: Path, words: list[str], name: str) -> dict[str, Any]:
    """The outcome of the run that was ended at its half, resumed with further `words` on its command line."""
    target = folder / script / name
    shutil.copytree(folder / script / "half", target)
    try:
        return forked(outcome, sys.modules[script], [*command_line(script, folder, target), *words])
    finally:
        shutil.rmtree(target, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", choices=list(CLASSES), nargs="+", default=["train_mlm", "finetune_glue"])
    parser.add_argument("--flags", nargs="+", help="these only")
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
                    if flag in ("output_dir", "deepspeed", "sweep"):  # all runs have their own; a launcher; other runs
                        continue
                    words = [str(folder / "cache")] if flag == "token_cache" else None
                    words = [f"--{flag}", *words] if words else changed(cls, flag, defaults[flag])
                    right, said = verdict(facts.scope, resumed(script, folder, words, flag), wanted)
                    wrong += not right
                    print(f"  {facts.scope:<7} {' '.join(words):<60} {said}", flush=True)
    print(f"{wrong} flags are not what they are declared to be")
    raise SystemExit(wrong > 0)


def default_of(field: dataclasses.Field) -> Any:
    """The default of a dataclass field."""
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


if __name__ == "__main__":
    main()
