"""Subprocesses with time limits, results file and archive of the GPU benchmark."""

import contextlib
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from roberta_recipe import durable
from roberta_recipe.errors import RunError
from roberta_recipe.hardware import end_with_parent
from roberta_recipe.input_files import ROOT

PAIRS = 100  # per BLiMP paradigm
TASKS = "tasks.tar.xz"  # in the carried folder
MODEL = "roberta_h100"  # name of the training run
SAVED_S = 30.0  # interval of saving while a command runs
LAST_LINES = 15  # of the log of a failed part, in the results
KEPT = {".json", ".jsonl", ".log", ".png", ".yaml", ".txt"}  # file types in the archive
LEFT_OUT = ("site", "tasks", "tokens", "checkpoint-")  # prefixes of folders that are not archived

Outcome = tuple[bool, dict[str, Any]]  # whether a part passed, and its figures


@dataclass
class Work:
    """Folders, time limit and results of the benchmark; `output` is flat and small."""

    carried: Path
    folder: Path  # runs, logs, unpacked files
    output: Path
    tiny: bool
    end_s: float  # time limit, by time.monotonic
    results: dict[str, Any] = field(default_factory=dict)
    suffix: str = ""  # of the files in `output`
    model: Path = Path(MODEL)  # trained, or fine-tuned
    listed: str | None = None  # path of an experiment list

    @property
    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    @property
    def environment(self) -> dict[str, str]:
        """Environment of commands: carried packages take precedence over installed ones."""
        path = os.pathsep.join([str(self.folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
        text = {"FIVE_DOMAINS": str(self.carried / "text")}
        return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **text}

    @property
    def tokenizer(self) -> Path:
        return self.carried / "tokenizer"

    @property
    def vocab_size(self) -> int:
        return Tokenizer.from_file(str(self.tokenizer / "tokenizer.json")).get_vocab_size()

    @property
    def text(self) -> list[str]:
        """Flags of the carried text, packed in blocks of 128 tokens."""
        flags = ["--corpus", "presets/corpus/five_domains.yaml", "--tokenizer_name", str(self.tokenizer)]
        return [*flags, "--token_cache", str(self.folder / "tokens"), *("--max_seq_length", "128")]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def last_lines(self, name: str) -> list[str]:
        """The tail of a command's log."""
        lines = self.log(name).read_text(errors="replace").splitlines() if self.log(name).exists() else []
        return lines[-LAST_LINES:]

    def start(self, name: str, command: Sequence[str], **environment: str) -> subprocess.Popen:
        """Start a Python command in its own process group, with its output appended to `<folder>/<name>.log`; it is
        killed when this process dies."""
        with open(self.log(name), "ab") as stream:
            return subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                env={**self.environment, **environment},
                preexec_fn=functools.partial(end_with_parent, os.getpid(), signal.SIGKILL),
            )

    def wait(self, name: str, process: subprocess.Popen, end_s: float) -> Path:
        """Wait for a command, and kill it at `end_s`; returns `<folder>/<name>`. Raises `RunError`, with the tail of
        its log, after a failure or a timeout."""
        try:
            code = process.wait(timeout=max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RunError(f"{name}: time limit", *self.last_lines(name)) from None
        finally:
            kill(process)
        if code:
            raise RunError(f"{name}: exit code {code}", *self.last_lines(name))
        return self.folder / name

    def save_while(self, process: subprocess.Popen, spare_s: float) -> Iterator[None]:
        """Call `save`, and yield, every `SAVED_S` seconds until the process ends or `spare_s` are left."""
        while process.poll() is None and self.left_s > spare_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(SAVED_S, self.left_s - spare_s))
            self.save()
            yield

    def run(self, name: str, command: Sequence[str], end_s: float) -> Path:
        """`start` and `wait`."""
        return self.wait(name, self.start(name, command), end_s)

    def part(self, name: str, function: Callable[["Work"], Outcome]) -> None:
        """Run a part and save its results; exceptions are recorded, not raised."""
        start_s, found = time.monotonic(), {"figures": {}}
        self.results.setdefault("parts", {})[name] = found
        try:
            passed, found["figures"] = function(self)
            found["result"] = "passed" if passed else "FAILED"
        except Exception as error:  # the other parts still run
            lines = [str(line) for line in error.args] or [""]
            found |= {"result": "FAILED", "why": f"{type(error).__name__}: {lines[0]}", "last_lines": lines[1:]}
        found["seconds"] = round(time.monotonic() - start_s, 1)
        self.save()
        shown = found.get("why") or ", ".join(f"{key} {value}" for key, value in found["figures"].items())
        print(f"{name:<10} {found['result']:<7} {found['seconds']:>6} s  {shown[:600]}", flush=True)

    def save(self) -> None:
        """Write results and archive to the output folder."""
        path = self.output / f"results{self.suffix}.json"
        durable.write_text(path, json.dumps(self.results, indent=1, default=str))  # a loss may be NaN
        aside = self.folder / "records.tar.xz"
        with tarfile.open(aside, "w:xz") as archive:
            for folder, folders, files in os.walk(self.folder):
                folders[:] = [name for name in folders if not name.startswith(LEFT_OUT)]
                for path in (Path(folder, name) for name in files):
                    with contextlib.suppress(OSError):  # replaced by a parallel run
                        if path.suffix in KEPT:
                            archive.add(path, path.relative_to(self.folder))
        shutil.copyfile(aside, self.output / f"records{self.suffix}.tar.xz")


def install(work: Work) -> Outcome:
    """Unpack the carried packages and files, and add the packages to `sys.path`."""
    site, wheels = work.folder / "site", sorted((work.carried / "wheels").glob("*.whl"))
    if wheels and not site.exists():
        command = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        work.run("pip", [*command, *map(str, wheels)], work.end_s)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    if not (work.folder / "tasks").exists():
        with tarfile.open(work.carried / TASKS) as archive:
            archive.extractall(work.folder / "tasks", filter="data")
    return True, {"wheels": [wheel.name for wheel in wheels]}


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a command and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
