"""Run records: types of `run_record.json`, `summary.json` and `blimp.json`; names of the files in a run folder."""

import functools
import json
import math
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch

from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.hardware import Machine, describe_machine, peak_memory_bytes
from roberta_recipe.input_files import ROOT, explained, read_input_json
from roberta_recipe.log import is_first_process
from roberta_recipe.settings import dump_yaml

RECORD_NAME, PRESET_NAME, CURVE_NAME = "run_record.json", "preset.yaml", "loss_curve.png"
LOG_NAME = "log.jsonl"  # all log entries, one per line
TIME_LIMIT = "max_train_minutes"  # `stopped_by` of a run that the same command resumes
SKIPPED_NAME = "skipped_blocks.json"  # loss spikes, and the blocks skipped because of them
TOKENIZER_NAME = "tokenizer"  # folder of a tokenizer trained by the run
INDEX_NAME = "chunks.index"  # `chunks.ChunkIndex`
HASHES_NAME = ".file_hashes.json"  # cached hashes of text files, also in a token cache
LISTS_NAME = ".hub_files.json"  # in a token cache: the files of Hub datasets at a commit
HUB_NAME = "hub.json"  # the run's id, also in the card of its repository on the Hub
BLIMP_NAME = "blimp.json"  # BLiMP scores, in the folder of the weights
SUMMARY_NAME, BEST_NAME = "summary.json", "best"  # of a fine-tuning protocol; folder of a run's best epoch
_LOCAL = {"train_file", "validation_file", "test_file", "data_dir", "wsc_dir", "blimp_dir", "token_cache"}  # paths
_LOCAL |= {"output_dir", "best_run"}


class RunRecord(TypedDict):
    """`run_record.json` of any run."""

    metrics: dict[str, Any]  # null for NaN
    steps: int  # optimizer steps
    tokens_seen: int
    tokens_per_second: int  # median over the log; without a log line, the mean
    train_seconds: float  # of all starts
    resumes: int  # number of restarts
    matrix_rate: NotRequired[float]  # measured FLOP/s of a device, the denominator of `mfu` in the log
    peak_memory_bytes: int
    parameters: int
    loss_at_steps: dict[str, list[list[float]]]  # "train", "validation": [step, loss]
    tokens_at_steps: list[list[float]]  # [step, tokens seen]
    skipped_steps: int  # because of fp16 overflow
    state_digests: dict[str, str]  # hashes: "weights" of the finished model, "optimizer", "scheduler" of the last step
    fingerprint: dict[str, Any]  # of settings, model and text
    resolved_args: dict[str, Any]  # a valid preset
    shown_args: list[str]  # arguments for the model card and the results
    wall_clock_s: float  # of this start
    versions: dict[str, str]
    commit: str | None
    hardware: Machine


class SourceMetrics(TypedDict):
    """Metrics on the held-out blocks of one source; losses and entropy in nats."""

    loss: float
    perplexity: float
    bits: float
    loss_error: NotRequired[float | None]  # standard error of the loss over documents; None for a single one
    documents: NotRequired[int]  # number of documents in which blocks begin; older records lack both
    unigram_entropy: float
    blocks: int
    tokens: int


class PretrainingRecord(RunRecord):
    """`run_record.json` of a pretraining run."""

    metrics_by_source: dict[str, SourceMetrics]  # empty for one source
    unigram_entropy: float  # of the held-out text, nats
    global_batch_size: int
    stopped_by: str  # "max_steps", or `TIME_LIMIT`
    datasets: NotRequired[list[str]]  # Hub ids of the text
    blimp_at_steps: NotRequired[list[list[float]]]  # [step, mean over paradigms]; empty without `blimp_dir`
    passes: dict[str, float]  # by source
    counts: dict[str, dict[str, dict[str, int]]]  # split -> source -> `chunks.COUNTS`
    skipped_blocks: list[list[int]]  # [first, end) positions
    # order-independent hashes of the data only, not of learning rates, weights or arithmetic
    blocks_digest: str  # of all consumed blocks, as read
    digest: str  # of the same blocks as the model saw them, with masks and labels


class BlimpScores(TypedDict):
    """BLiMP accuracies, 0 to 1; intervals are 95% bootstrap intervals over pairs, [lower, upper]."""

    mean_of_paradigms: float
    mean_of_paradigms_interval: list[float]
    mean_of_phenomena: float
    mean_of_phenomena_interval: list[float]
    by_phenomenon: dict[str, float]
    by_phenomenon_interval: dict[str, list[float]]
    by_paradigm: dict[str, float]
    ties: int  # pairs that count half


class BlimpRecord(TypedDict):
    """`blimp.json`: a model's scores on BLiMP."""

    model: str  # folder name or Hub id
    parameters: int
    scores: dict[str, BlimpScores]  # by method: "pll", "within_word"
    random_weights: list[dict[str, BlimpScores]]  # scores of untrained controls, seed 1, 2, ...; may be empty
    pairs: int
    partial: str  # description of missing official pairs; empty if complete
    pairs_digest: str  # hash of the sentences
    bf16: bool  # precision of matrix products
    weights: str  # hash of the weight files, or the Hub's commit
    tokenizer: str  # hash
    wall_clock_s: float
    versions: dict[str, str]
    commit: str | None
    hardware: Machine


class DatasetCard(TypedDict):
    """The evaluation dataset of a task, for the model card."""

    name: str  # display name: "GLUE rte"
    hub_id: str | None  # "nyu-mll/glue"; None for data that are not on the Hub
    hub_config: str | None
    split: str  # of the scores
    task_type: str  # the Hub's name: "text-classification"
    hub_metrics: dict[str, str]  # published metrics -> the Hub's names
    note: str  # about the training data; may be empty
    loading_note: NotRequired[str]  # what a loaded model lacks


class Baseline(TypedDict):
    """Scores of the most frequent answer, given to every validation example."""

    answer: str  # "entailment", "C", "no answer"
    metrics: dict[str, float | None]  # the task's own, by the names of `RunRecord.metrics`


class FinetuneRecord(RunRecord):
    """`run_record.json` of one run of a fine-tuning protocol."""

    task: str
    metric: str  # selects the epoch
    dataset: DatasetCard
    examples: dict[str, int]  # model inputs by split (SQuAD: windows)
    # denominators of the metrics by validation split (SQuAD: questions), and by metric where they differ (RACE: middle,
    # high)
    scored_examples: dict[str, int]
    baseline: Baseline | None  # None for correlations, several labels, and SQuAD 1.1
    degenerate: bool  # the same answer to all examples
    best_step: int
    score_at_steps: list[list[float]]  # [step, validation score]
    duplicates: dict[str, Any]
    features: dict[str, Any]


class Scores(TypedDict):
    """The scores of one setting over its seeds, on one split."""

    median: float
    mean: float
    lowest: float
    highest: float
    seeds: dict[Any, float]
    medians: dict[str, float]  # of every metric
    learning_rate: NotRequired[float]  # on validation, as the next three
    global_batch_size: NotRequired[int]
    degenerate_seeds: NotRequired[list[int]]
    best_run: NotRequired[str]  # folder
    examples: NotRequired[int]  # on a test split


class Summary(TypedDict):
    """`summary.json` of a fine-tuning protocol."""

    metric: str
    settings: list[Scores]
    picked: int  # index of the setting with the best median
    task: str
    dataset: DatasetCard
    scored_examples: dict[str, int]  # as in `FinetuneRecord`
    baseline: Baseline | None
    resolved_args: dict[str, Any]
    shown_args: list[str]
    tests: NotRequired[dict[str, Scores]]  # by test split, if it is labelled
    duplicates: NotRequired[dict[str, Any]]
    features: NotRequired[dict[str, Any]]


def picked_setting(summary: Summary) -> Scores:
    """The scores of the setting with the best median."""
    return summary["settings"][summary["picked"]]


def read_record(path: Path, needed: tuple[str, ...], advice: str) -> Any:
    """Values of a file of `write_record` (`run_record.json`, `summary.json`, ...). Raises `InputError` for a damaged
    file and, with `advice`, for a file of another version, which lacks one of the fields `needed`."""
    values = read_input_json(path)
    if isinstance(values, dict) and (missing := [name for name in (*needed, durable.SEAL) if name not in values]):
        raise InputError(f"{path} has no {missing[0]!r}: it was written by another version of this recipe; {advice}")
    with explained(f"{path} is damaged", "; copy it again, or move its folder away to repeat the run"):
        return durable.unsealed(values)


def loss_at_steps(log_history: list[dict[str, Any]], key: str, at_most: int = 200) -> list[list[float]]:
    """[step, value] pairs of a logged value, evenly subsampled to `at_most`, including the last."""
    points = [[entry["step"], entry[key]] for entry in log_history if key in entry]
    stride = math.ceil(len(points) / at_most) or 1
    return points[stride - 1 :: stride] if len(points) % stride == 0 else [*points[stride - 1 :: stride], points[-1]]


def run_record(trainer: Any, metrics: dict[str, Any], **others: Any) -> Any:
    """The run record of a finished `DurableTrainer`; `others`: the fields of a record's subclass."""
    trainer.count_consumed()
    tokens, history = trainer.state.num_input_tokens_seen, trainer.state.log_history
    rates = [entry["tokens_per_second"] for entry in history if "tokens_per_second" in entry]
    on_gpu, processes = trainer.args.device.type == "cuda", trainer.args.world_size
    return {
        "metrics": metrics,
        "steps": trainer.state.global_step,
        "tokens_seen": tokens,
        "tokens_per_second": sorted(rates)[len(rates) // 2] if rates else round(tokens / trainer.train_seconds),
        "train_seconds": round(trainer.train_seconds, 1),
        "resumes": trainer.resumes,
        **trainer.record(),
        "peak_memory_bytes": peak_memory_bytes(),
        # `ds_numel`: under ZeRO 3, the size of the unsharded parameter
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters()),
        "loss_at_steps": {
            # of the masked LM, as for validation; "loss" is the sum over objectives
            "train": loss_at_steps(history, "mlm_loss") or loss_at_steps(history, "loss"),
            "validation": loss_at_steps(history, "eval_loss"),
        },
        "tokens_at_steps": loss_at_steps(history, "tokens_seen"),
        **others,
        "versions": versions(),
        "commit": git_commit(),
        "hardware": {**describe_machine(), "gpus": [torch.cuda.get_device_name()] * processes if on_gpu else []},
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the main libraries."""
    names = ("torch", "transformers", "datasets", "tokenizers", "accelerate")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


@functools.cache
def git_commit() -> str | None:
    """The recipe's commit at the first call, with "-dirty" for uncommitted changes; None outside of its own
    repository."""
    if not (ROOT / ".git").exists():  # a folder, or a file in a worktree; a repository around ROOT does not count
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def finite(value: Any) -> Any:
    """`value` as JSON types, with None for numbers that are not finite."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def portable(value: Any, name: str = "", local: tuple[str, ...] = ()) -> Any:
    """`value` of the flag or field `name`, with local paths cut to file names; `local`: further path fields."""
    if isinstance(value, dict):
        return {key: portable(item, key, local) for key, item in value.items()}
    if isinstance(value, list):
        return [portable(item, name, local) for item in value]
    is_path = isinstance(value, str) and "://" not in value and (name in (*_LOCAL, *local) or os.path.isabs(value))
    return Path(value).name if is_path else value


def write_preset(values: dict[str, Any], output_dir: str | Path) -> None:
    """Write the resolved arguments as `<output_dir>/preset.yaml`, for `--config`, on rank 0."""
    if is_first_process():
        durable.write_text(Path(output_dir) / PRESET_NAME, dump_yaml(values))


def write_record(record: RunRecord | Summary | BlimpRecord, path: Path) -> None:
    """Atomic write of a JSON file for `read_record`; NaN and infinity become null."""
    durable.write_sealed(path, finite(record))


def percent(value: float | None) -> str:
    """A score times 100; "nan" for None or NaN (a correlation with a constant)."""
    return "nan" if value is None or not math.isfinite(value) else f"{100 * value:.1f}"
