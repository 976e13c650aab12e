"""Scenarios of the census: inputs, commands, and the results to compare.

Each case has its own folder with a copy of the inputs. Commands run in it with relative paths, so that two runs of a
command write the same bytes.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from conftest import PLACES, SUBJECTS, VERBS, make_documents, write_jsonl, write_parquet, write_text
from official_files import write_glue

import finetune_glue
import train_mlm
from roberta_recipe import durable
from roberta_recipe.data import tokenizer_training
from roberta_recipe.input_files import ROOT
from roberta_recipe.model.masked_lm import build_model
from roberta_recipe.record import INDEX_NAME
from tokenizer import train_tokenizer
from tools import pack

PRESET = """
validation_file: [inputs/text/validation.parquet]
tokenizer_name: inputs/tokenizer
max_seq_length: 64
learning_rate: 1e-3
warmup_steps: 2
max_steps: 12
logging_steps: 1
eval_strategy: steps
eval_steps: 4
save_strategy: steps
save_steps: 3
use_cpu: true
disable_tqdm: true
"""
CONFIG = {
    **{"model_type": "roberta", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 64, "max_position_embeddings": 66, "type_vocab_size": 1, "vocab_size": 400},
}
GLUE_FLAGS = {
    **{"data_dir": "inputs/glue", "model_name_or_path": "inputs/weights", "output_dir": "out/glue", "use_cpu": True},
    **{"max_seq_length": 64, "global_batch_size": 8, "per_device_train_batch_size": 4, "learning_rate": 1e-3},
    **{"max_steps": 12, "eval_strategy": "steps", "eval_steps": 4, "warmup_steps": 1, "logging_steps": 1},
    **{"other_rows": True, "disable_tqdm": True},
}
GLUE_ROWS = {"train": 32, "dev": 16, "test": 8}
TEXTS = {
    "parquet": "inputs/text/train*.parquet",
    "jsonl": "inputs/text/train.jsonl",
    "text": "inputs/text/train.txt",
}

SHARDS = (*(f"train-{number:05d}" for number in range(4)), "validation-00000")  # of the complete token cache

Result = dict[str, Any]  # name -> value that must be equal


def make_inputs(folder: Path) -> None:
    """Write the inputs of all scenarios to `<folder>/inputs`."""
    inputs = folder / "inputs"
    (inputs / "text").mkdir(parents=True)
    tokenizer = tokenizer_training.train_tokenizer(make_documents(300, seed=0), vocab_size=400)
    tokenizer.save_pretrained(inputs / "tokenizer")
    (inputs / "config.json").write_text(json.dumps(CONFIG))
    (inputs / "preset.yaml").write_text(PRESET)
    for number in range(4):
        write_parquet(inputs / "text" / f"train{number}.parquet", make_documents(80, seed=number + 1))
    write_parquet(inputs / "text" / "validation.parquet", make_documents(16, seed=9))
    # more than 64 KB, so that a run reads past the first buffer
    write_jsonl(inputs / "text" / "train.jsonl", make_documents(700, seed=5))
    write_text(inputs / "text" / "train.txt", make_documents(700, seed=6))
    torch.manual_seed(0)
    model = build_model(tokenizer, config_name=inputs / "config.json", max_seq_length=64)
    model.save_pretrained(inputs / "weights")
    tokenizer.save_pretrained(inputs / "weights")
    write_glue(inputs / "glue", rows=GLUE_ROWS, text=_sentence)
    for unused in set((inputs / "glue").iterdir()) - {inputs / "glue" / "RTE"}:
        shutil.rmtree(unused)


def _sentence(rng: random.Random) -> str:
    return f"{rng.choice(SUBJECTS).capitalize()} {rng.choice(VERBS)} {rng.choice(SUBJECTS)} {rng.choice(PLACES)}."


@dataclass(frozen=True)
class Scenario:
    """A command with globs of the files that it reads and writes, relative to the folder of the case."""

    name: str
    program: str  # the script or module
    argv: tuple[str, ...]
    inputs: tuple[str, ...]  # input files
    writes: tuple[str, ...]  # files that appear when something is being written
    lasting: tuple[str, ...]  # output files that it may read again
    announced: str  # log text (or "glob:" and a glob) that shows that settings and names of inputs were read
    processes: int = 1
    launcher: tuple[str, ...] = ()  # words between the interpreter and the script's flags
    helpers: bool = False  # whether it has data workers or packing processes
    prepared: str | None = None  # scenario that makes its initial output

    def main(self) -> Callable[[list[str]], Any]:
        mains = {
            **{"train_mlm.py": train_mlm.main, "finetune_glue.py": finetune_glue.main},
            **{"tools/pack.py": pack.main, "tokenizer/train_tokenizer.py": train_tokenizer.main},
        }
        return mains[self.program]

    @property
    def pretrains(self) -> bool:
        return self.program == "train_mlm.py"

    def finished(self, folder: Path) -> bool:
        """Whether the output is complete."""
        marks = {
            **{"train_mlm.py": ["out/run/run_record.json"], "finetune_glue.py": ["out/glue/summary.json"]},
            **{"tools/pack.py": [f"out/cache/*/{shard}.json" for shard in SHARDS]},
            **{"tokenizer/train_tokenizer.py": ["out/tokenizer/tokenizer.json"]},
        }
        return all(any(folder.glob(mark)) for mark in marks[self.program])

    def remembered(self, folder: Path) -> bool:
        """Whether the output has a fingerprint of flags and inputs, after which another value is refused."""
        if self.program.endswith("pack.py"):
            return (folder / "out/cache/fingerprint.json").exists()
        marks = ("out/run/checkpoint-*/manifest.json", "out/glue/*/checkpoint-*/manifest.json")
        return any(path for mark in (*marks, "out/glue/*/run_record.json") for path in folder.glob(mark))

    def result(self, folder: Path) -> Result:
        """The content of the output. Raises if it cannot be read."""
        results = {
            **{"train_mlm.py": pretraining_result, "finetune_glue.py": glue_result},
            **{"tools/pack.py": cache_result, "tokenizer/train_tokenizer.py": tokenizer_result},
        }
        return results[self.program](folder / "out")


def pretraining_result(out: Path, name: str = "run") -> Result:
    """Hashes of weights and other files, record, log entries and data digest of the finished run `name`."""
    run = out / name
    record = durable.read_json(run / "run_record.json")
    names = ("metrics", "metrics_by_source", "unigram_entropy", "steps", "tokens_seen", "skipped_steps", "stopped_by")
    names += ("loss_at_steps", "tokens_at_steps", "parameters", "global_batch_size", "resolved_args", "skipped_blocks")
    names += ("blocks_digest", "state_digests", "counts")
    volatile = {"run_record.json", "loss_curve.png", "log.jsonl", INDEX_NAME}
    found = {f"record: {name}": _timeless(record[name]) for name in names} | {"digest": record["digest"]}
    for path in sorted(run.iterdir()):
        if path.is_file() and path.name not in volatile and not path.name.startswith("."):
            found[f"file: {path.name}"] = durable.sha256(path)
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen", "blocks_digest", "digest", "eval_loss")
    history = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    found["history"] = [{key: entry[key] for key in keys if key in entry} for entry in history]
    return found


def glue_result(out: Path) -> Result:
    """Scores and curves of all seeds, hashes of the best epoch's weights and scores. A best/ folder that does not match
    its manifest is omitted, as its readers get a warning."""
    summary = durable.read_json(out / "glue" / "summary.json")
    found: Result = {"settings": summary["settings"], "picked": summary["picked"]}
    for path in sorted((out / "glue").glob("lr*/run_record.json")):
        record = durable.read_json(path)
        names = ("metrics", "steps", "tokens_seen", "loss_at_steps", "score_at_steps", "best_step")
        found |= {f"{path.parent.name}: {name}": _timeless(record[name]) for name in names}
        best = path.parent / "best"
        for file in sorted(best.glob("*")) if durable.damage(best) is None else []:
            found[f"{path.parent.name}: {file.name}"] = durable.sha256(file)
    return found


def cache_result(out: Path) -> Result:
    """Hashes of the blocks and counts of each shard. A shard that does not match its hashes is omitted, as its readers
    get an error."""
    found: Result = {}
    for path in sorted(out.glob("cache/*/*.json")):
        try:
            facts, content = durable.read_sealed(path), path.with_suffix(".bin").read_bytes()
        except (OSError, ValueError):
            continue
        parts = [(content[offset : offset + size], digest) for _, offset, size, digest in facts["chunks"]]
        if all(xxhash.xxh3_128_hexdigest(part) == digest for part, digest in parts):
            found[f"blocks: {path.stem}"] = hashlib.sha256(content).hexdigest()
            found[f"counts: {path.stem}"] = [chunk for chunk, *_ in facts["chunks"]]
    return found


def tokenizer_result(out: Path) -> Result:
    return {f"file: {path.name}": durable.sha256(path) for path in sorted((out / "tokenizer").iterdir())}


def _timeless(value: Any) -> Any:
    """A record's value without timings, as JSON text, in which NaN equals NaN."""
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if not key.endswith(("runtime", "per_second"))}
    return json.dumps(value, sort_keys=True)


def differences(wanted: Result, found: Result) -> list[str]:
    """The names of values that differ."""
    return [name for name in sorted({*wanted, *found}) if wanted.get(name) != found.get(name)]


def _pretraining(name: str, text: str, *flags: str, **others: Any) -> Scenario:
    argv = ("--config", "inputs/preset.yaml", "--train_file", TEXTS[text], "--output_dir", "out/run")
    argv += ("--global_batch_size", "32", "--per_device_eval_batch_size", "8")
    read = (TEXTS[text], "inputs/text/validation.parquet", "inputs/tokenizer/*", "inputs/preset.yaml")
    writes = [f"out/run/checkpoint-{step}/*" for step in (3, 6, 9, 12)]
    lasting = ["out/run/checkpoint-*/*"]
    if "--model_name_or_path" in flags:
        read += ("inputs/weights/*",)
    else:
        flags, read = (*flags, "--config_name", "inputs/config.json"), (*read, "inputs/config.json")
    if "--token_cache" in flags:
        lasting += ["out/cache/*", "out/cache/*/*"]
        if "prepared" not in others:
            writes += ["out/cache/*.tmp", "out/cache/*/*.tmp"]
    else:
        lasting, writes = [*lasting, f"out/run/{INDEX_NAME}"], [*writes, f"out/run/{INDEX_NAME}"]
    return Scenario(
        name, "train_mlm.py", (*argv, *flags), read, tuple(writes), tuple(lasting), "Output      ", **others
    )


def _glue(name: str, *flags: str, **others: Any) -> Scenario:
    values = [str(word) for key, value in GLUE_FLAGS.items() for word in (f"--{key}", value)]
    argv = ("--config", str(ROOT / "presets" / "glue" / "rte.yaml"), *values, *flags)
    read, writes = ("inputs/weights/*", "inputs/glue/RTE/*"), ("out/glue/*/checkpoint-*/*", "out/glue/*/*.tmp")
    lasting = ("out/glue/*/best/*", "out/glue/*/run_record.json", "out/glue/*/checkpoint-*/*")
    return Scenario(name, "finetune_glue.py", argv, read, writes, lasting, "  loss ", **others)


def _pack(name: str, processes: int) -> Scenario:
    argv = ("--config", "inputs/preset.yaml", "--train_file", TEXTS["parquet"], "--token_cache", "out/cache")
    argv += ("--num_proc", str(processes))
    read = (TEXTS["parquet"], "inputs/text/validation.parquet", "inputs/tokenizer/*", "inputs/preset.yaml")
    writes, lasting = ("out/cache/*.tmp", "out/cache/*/*.tmp"), ("out/cache/*", "out/cache/*/*")
    mark = "glob:out/cache/fingerprint.json"
    return Scenario(name, "tools/pack.py", argv, read, writes, lasting, mark, helpers=processes > 1)


_TOKENIZER_FLAGS = ("--train_file", *(f"inputs/text/train{number}.parquet" for number in range(4)))
_TOKENIZER_FLAGS += ("--validation_file", "inputs/text/validation.parquet", "--vocab_size", "400")
_CACHE = ("--token_cache", "out/cache")
_TWO = ("--per_device_train_batch_size", "4")  # four micro-batches per step on two processes
_LAUNCH = ("-m", "accelerate.commands.launch")
_SCRIPT = str(ROOT / "train_mlm.py")


def _zero(stage: int) -> Scenario:
    launcher = (*_LAUNCH, "--config_file", str(ROOT / f"ds_configs/accelerate/zero{stage}.yaml"))
    launcher += ("--deepspeed_config_file", str(ROOT / f"ds_configs/zero{stage}.json"))
    launcher += ("--num_processes", "2", "--main_process_port", "0", _SCRIPT)
    return _pretraining(f"ZeRO {stage}, 2 processes", "parquet", *_TWO, processes=2, launcher=launcher)


WARM = [
    _pretraining("text", "text", "--per_device_train_batch_size", "16"),
    _pretraining("JSONL, bf16", "jsonl", "--per_device_train_batch_size", "8", "--bf16", "true"),
    _pretraining("2 workers", "parquet", *_TWO, "--dataloader_num_workers", "2", helpers=True),
    _pretraining("from weights", "jsonl", *_TWO, "--model_name_or_path", "inputs/weights"),
    _pretraining("2 processes", "text", *_TWO, "--dataloader_num_workers", "1", processes=2, helpers=True),
    _pretraining("new cache", "parquet", *_TWO, *_CACHE, helpers=True),
    _pretraining("ready cache", "parquet", *_TWO, *_CACHE, prepared="pack, 1 process"),
    _pretraining("cache, 2 processes", "parquet", *_TWO, *_CACHE, processes=2),
    _pretraining(
        *("segment_pair, NSP", "jsonl", *_TWO, "--input_format", "segment_pair", "--objective", "mlm", "nsp"),
        *("--masking_unit", "whole_word", "--static_masks", "2"),
    ),
    _pretraining(
        *("doc_sentences, SBO, cache", "parquet", *_TWO, *_CACHE, "--input_format", "doc_sentences"),
        *("--masking_unit", "span", "--objective", "mlm", "sbo"),
        helpers=True,
    ),
    _pack("pack, 1 process", 1),
    _pack("pack, 2 processes", 2),
    Scenario(
        name="tokenizer",
        program="tokenizer/train_tokenizer.py",
        argv=(*_TOKENIZER_FLAGS, "--output_dir", "out/tokenizer"),
        inputs=("inputs/text/train*.parquet",),
        writes=("out/tokenizer/*",),
        lasting=(),
        announced="entries in",
    ),
    _glue("GLUE, 2 seeds", "--seeds", "1", "2"),
    _glue("GLUE, saving", "--seeds", "1", "--save_strategy", "steps", "--save_steps", "3"),
    _glue(
        *("GLUE, epochs", "--seeds", "1", "--save_strategy", "steps", "--save_steps", "2", "--eval_strategy", "epoch"),
        *("--max_steps", "-1", "--num_train_epochs", "3"),
    ),
]
LAUNCHED = [
    _pretraining(
        *("torchrun, 2 processes", "text", *_TWO, "--dataloader_num_workers", "1"),
        **{"processes": 2, "helpers": True},
        launcher=("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", _SCRIPT),
    ),
    _pretraining("accelerate", "parquet", *_TWO, *_CACHE, launcher=(*_LAUNCH, "--num_processes", "1", _SCRIPT)),
    *(_zero(stage) for stage in (1, 2, 3)),
]
SCENARIOS = {scenario.name: scenario for scenario in [*WARM, *LAUNCHED]}
