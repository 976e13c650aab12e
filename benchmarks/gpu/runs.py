"""The recipe's commands in processes of their own, each with an end in time, and what the steps train."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.machine import ROOT
from roberta_recipe import durable
from roberta_recipe.errors import RunError
from roberta_recipe.hardware import end_with_parent
from roberta_recipe.record import LOG_NAME, RECORD_NAME

Outcome = tuple[bool, dict[str, Any]]  # whether a step passed, and its figures
LAST_LINES = 15  # of a log, in the results of a step that failed
SHORTEST_S = 5.0  # a step with less time than this is not begun


@dataclass(frozen=True)
class Sizes:
    """What the steps train. Lengths in tokens, batches in sequences."""

    text: tuple[str, ...] = ("--corpus", "presets/corpus/docstrings.yaml")
    entries: int = 32_000  # of the tokenizer: 15 MB of docstrings have no 50,265 pairs that occur twice
    vocab_size: int = 50_304  # rows of the embedding, those of base and large; what is above `entries` is padding
    shape: dict[str, int] = field(default_factory=dict)  # what differs from presets/model/base.json and large.json
    max_seq_length: int = 512
    batch: int = 8192
    most_per_device: int = 128
    steps: dict[str, int] = field(default_factory=lambda: {"base": 8, "large": 4})  # optimizer steps, for throughput
    curve: tuple[int, int, int] = (400, 256, 40)  # steps, batch, steps of warm-up
    compared: tuple[int, int] = (100, 32)  # steps and batch of bf16 beside fp32
    zero_steps: int = 60
    validation: int = 256  # blocks
    rows: tuple[int, int] = (1000, 277)  # of the made-up task: training, validation
    tuning: tuple[str, ...] = ("--max_steps", "300", "--warmup_steps", "18")  # of the made-up task
    device: tuple[str, ...] = ()
    reserved_s: float = 60.0  # of a run's time, for its start, its evaluation and its checkpoint


# The same steps on a CPU, for their test
TINY = Sizes(
    text=("--train_file", "train.txt", "--validation_file", "validation.txt"),  # below the output folder
    entries=400,
    vocab_size=448,
    shape={
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
        "max_position_embeddings": 66,
    },
    max_seq_length=64,
    batch=32,
    most_per_device=8,
    steps={"base": 3, "large": 2},
    curve=(8, 8, 2),
    compared=(4, 8),
    zero_steps=3,
    validation=32,
    rows=(16, 8),
    tuning=("--max_steps", "2", "--warmup_steps", "1", "--global_batch_size", "8", "--max_seq_length", "64"),
    device=("--use_cpu", "true"),
    reserved_s=0.0,
)


class Runs:
    """Starts commands below `folder`; those of a step end before `deadline_s` (of `time.monotonic`).

    `tokenizer`, `data_dir` (of GLUE's files) and `model` (to fine-tune) are the user's; None where the steps make them.
    """

    def __init__(
        self,
        folder: Path,
        sizes: Sizes = Sizes(),
        *,
        tokenizer: str | None = None,
        data_dir: str | None = None,
        model: str | None = None,
    ):
        self.folder, self.sizes, self.data_dir, self.model = folder, sizes, data_dir, model
        self.tokenizer, self.makes_tokenizer = tokenizer or str(folder / "tokenizer"), tokenizer is None
        self.deadline_s = 0.0
        self.started: list[str] = []  # names of the step's runs

    def begin(self, limit_s: float, end_s: float) -> None:
        """A step begins: it has `limit_s`, and no more than there is until `end_s`. Raises `RunError` for no time."""
        now_s = time.monotonic()
        self.deadline_s, self.started = min(now_s + limit_s, end_s), []
        if self.deadline_s - now_s < SHORTEST_S:
            raise RunError("the time is over")

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def last_lines(self) -> list[str]:
        """The end of the log of the step's last run."""
        if not self.started or not self.log(self.started[-1]).exists():
            return []
        return self.log(self.started[-1]).read_text(errors="replace").strip().splitlines()[-LAST_LINES:]

    def start(self, name: str, command: Sequence[str], again: bool = False) -> subprocess.Popen:
        """Start a command, with its log in `<folder>/<name>.log`. What an earlier attempt left in `<folder>/<name>` is
        removed, unless it is started `again` to be resumed."""
        self.started.append(name)
        if not again:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            self.log(name).unlink(missing_ok=True)
        return spawn(command, self.log(name))

    def run(self, name: str, command: Sequence[str], again: bool = False) -> Path:
        """Run a command to its end; returns `<folder>/<name>`. Raises `RunError` with the last line of its log."""
        process = self.start(name, command, again)
        try:
            code = process.wait(timeout=max(0.1, self.left_s))
        except subprocess.TimeoutExpired:
            raise RunError(f"{name}: its time is over") from None
        finally:
            kill(process)
        if code:
            lines = self.last_lines()
            raise RunError(f"{name}: exit code {code}: {lines[-1] if lines else 'nothing was logged'}")
        return self.folder / name

    def pretrain(self, name: str, flags: Sequence[str], launcher: Sequence[str] = ()) -> Path:
        """`train_mlm.py`; the first run packs the text into the token cache that the others read."""
        fixed = ["--tokenizer_name", self.tokenizer, "--token_cache", str(self.folder / "tokens"), *self.text]
        fixed += ["--max_seq_length", str(self.sizes.max_seq_length), *self.sizes.device]
        fixed += ["--pad_vocab_to_multiple_of", str(self.sizes.vocab_size), "--output_dir", str(self.folder / name)]
        fixed += ["--max_eval_samples", str(self.sizes.validation), "--report_to", "none", "--disable_tqdm", "true"]
        fixed += ["--save_strategy", "no", "--logging_steps", "1"]
        return self.run(name, [*launcher, "train_mlm.py", *fixed, *flags])

    @property
    def text(self) -> list[str]:
        """The flags that name the text."""
        return [str(self.folder / word) if word.endswith(".txt") else word for word in self.sizes.text]


def spawn(command: Sequence[str], log: Path) -> subprocess.Popen:
    """A Python command in its own process group, which ends when this process does."""
    with open(log, "ab") as stream:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
            preexec_fn=functools.partial(end_with_parent, os.getpid(), signal.SIGKILL),
        )


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a command and to all that it has started: a launcher gives its processes groups of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def record_of(run: Path) -> dict[str, Any]:
    """The run record of a finished run."""
    return durable.read_json(run / RECORD_NAME)


def log_of(run: Path) -> list[dict[str, Any]]:
    """The log entries of a run that have a loss."""
    entries = map(json.loads, (run / LOG_NAME).read_text(encoding="utf-8").splitlines())
    return [entry for entry in entries if "loss" in entry]
