"""Runner of experiment lists: variants x seeds, their measures, and one table.

    python experiments/run.py presets/experiments/rates.yaml --dry_run   # commands and states
    python experiments/run.py presets/experiments/rates.yaml --jobs 2    # two rows at once
    python experiments/run.py presets/experiments/rates.yaml --table     # finished rows only

A list names variants (a preset and flags that override it), seeds and measures; a variant with a seed is a row, with
its own folder. Stop it with Ctrl-C, SIGTERM or kill -9 and start it again with the same command: finished rows are
skipped, the others resume from their checkpoints. docs/statistics.md describes lists and verdicts.
"""

import argparse
import contextlib
import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from experiments import checks, lists, table
from experiments.lists import MEASURES, ROW_NAME, Experiment, ExperimentList, words_of
from roberta_recipe import durable
from roberta_recipe.errors import InputError, RunError, Stopped, exit_on_error
from roberta_recipe.hardware import end_with_parent
from roberta_recipe.launcher import resume_hint
from roberta_recipe.log import counted, duration, logger, set_up_logging
from roberta_recipe.settings import RecipeParser
from tools import estimate

_POLL_S = 0.2
_BY = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


@dataclass
class RunningRow:
    """A row in progress."""

    row: Experiment
    cores: list[int]
    to_do: dict[str, list[str]]  # commands to start later
    process: subprocess.Popen
    name: str  # the current command's
    begun_s: float  # time.monotonic()
    signals: int = 0  # number forwarded to the process


class Runner:
    """Runs the rows of a list in parallel, each once and on its own cores."""

    def __init__(self, listed: ExperimentList, jobs: int):
        self.rows, self.waiting = listed.rows, [row for row in listed.rows if row.to_do()]
        self.measures = listed.measures
        self.free = split_cores(jobs)
        self.running: list[RunningRow] = []
        self.failed: list[str] = []
        self.signals: list[int] = []

    def run(self) -> None:
        """Run all rows; returns early when a signal has ended the running ones."""
        with self._signals():
            while self.running or (self.waiting and not self.signals):
                for running in list(self.running):
                    for number in self.signals[running.signals :]:
                        running.process.send_signal(number)
                        running.signals += 1
                    self._advance(running)
                while self.free and self.waiting and not self.signals:
                    self._begin(self.waiting.pop(0))
                time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Collect Ctrl-C and SIGTERM, to forward each once: the rows have their own process groups."""
        before = {number: signal.getsignal(number) for number in _BY}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # ignored in a shell's background job
                signal.signal(number, lambda number, _: self.signals.append(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _begin(self, row: Experiment) -> None:
        """Start the first command of a row."""
        state, to_do, cores = row.state(), row.to_do(), self.free.pop(0)
        row.folder.mkdir(parents=True, exist_ok=True)
        durable.remove_stale(row.folder)
        write_row_state(row)
        if "run" in to_do:  # delete measures of other weights
            for measure in row.measures:
                row.output_of(measure).unlink(missing_ok=True)
        name = next(iter(to_do))
        process = start(to_do.pop(name), row.log, cores)
        self.running.append(RunningRow(row, cores, to_do, process, name, time.monotonic()))
        where = f"cores {','.join(map(str, cores))}" if len(cores) > 1 else f"core {cores[0]}"
        logger.info(f"starts  {row.title}: {state}; {where}, log {row.log}")

    def _advance(self, running: RunningRow) -> None:
        """When the command has ended, start the row's next one, or end the row after its last or a failed one."""
        if (code := running.process.poll()) is None:
            return
        done = code == 0 and running.name not in running.row.to_do()
        if done and running.to_do and not self.signals:
            running.name = next(iter(running.to_do))
            running.process = start(running.to_do.pop(running.name), running.row.log, running.cores)
            running.signals = 0
            return
        self.running.remove(running)
        self.free.append(running.cores)
        write_row_state(running.row, time.monotonic() - running.begun_s)
        if done and not running.to_do:
            figures = (f"{MEASURES[name].title} {running.row.figure(name):.4g}" for name in self.measures)
            logger.info(f"done    {running.row.title}: {', '.join(figures)}; {self._left()}")
        elif self.signals:
            logger.info(f"stopped {running.row.title}: {running.row.state()}")
        else:
            self.failed.append(running.row.title)
            line = last_line(running.row.log) if code else "it wrote no result"
            logger.info(
                f"failed  {running.row.title} ({running.name}, exit code {code}): {line}; log {running.row.log}"
            )

    def _left(self) -> str:
        """The number of rows left, and an ETA from the mean time of the finished ones."""
        left = len(self.waiting) + len(self.running)
        if not left:
            return "no rows left"
        spent = [row.stored()["seconds"] for row in self.rows if not row.to_do()]
        running_s = sum(time.monotonic() - running.begun_s for running in self.running)
        eta_s = (left * sum(spent) / len(spent) - running_s) / (len(self.running) + len(self.free))
        return f"{left} left, ETA {duration(max(eta_s, 0))}"


def split_cores(jobs: int) -> list[list[int]]:
    """Disjoint sets of this process's cores, one per row in progress."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if not 1 <= jobs <= len(cores):
        raise InputError(f"jobs={jobs} must be from 1 to {len(cores)}, the cores of this process")
    each = len(cores) // jobs
    return [cores[number * each : (number + 1) * each] for number in range(jobs)]


def write_row_state(row: Experiment, seconds: float = 0.0) -> None:
    """Write `row.json`: the settings and measures of this run, and the time spent plus `seconds`."""
    stored = row.stored()
    measures = {**stored["measures"], **row.measures}
    spent = round(stored["seconds"] + seconds, 1)
    durable.write_sealed(row.folder / ROW_NAME, {"settings": row.settings, "measures": measures, "seconds": spent})


def start(words: list[str], log: Path, cores: list[int]) -> subprocess.Popen:
    """Start a command on these cores, with its output appended to `log`; it gets SIGTERM when this process dies."""
    with open(log, "ab") as stream:
        stream.write(f"$ {shlex.join(words)}\n".encode())
        stream.flush()
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(len(cores))},
            process_group=0,  # the runner forwards Ctrl-C
            preexec_fn=functools.partial(_set_up_child, os.getpid(), cores),
        )


def _set_up_child(parent: int, cores: list[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    end_with_parent(parent, signal.SIGTERM)


def last_line(log: Path) -> str:
    """The last non-empty line of a log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


def print_states(listed: ExperimentList) -> None:
    for row in listed.rows:
        print(f"{row.title}: {row.state()}")
        for words in row.to_do().values():
            print(f"    {shlex.join(words)}")


def costs(listed: ExperimentList, hardware: str) -> list[str]:
    """Lines with time and cost of each variant, and of all, on `hardware` (`tools/estimate.py`)."""
    if "score" in listed.measures:
        raise InputError(f"hardware={hardware}: costs are estimated for pretraining only; leave --hardware out")
    costs_by_name, days, dollars = [], 0.0, 0.0
    for variant in listed.variants:
        flags = [word.replace(lists.SEED, str(listed.seeds[0])) for word in words_of(variant.flags, variant.name)]
        argv = [*variant.preset, *flags, "--hardware", hardware]
        cost = lists.prefix_errors(f"{listed.path}, row {variant.name!r}", estimate.read_estimate, argv)
        fits = "" if cost.fits else ", and does not fit into memory"
        costs_by_name.append(f"{variant.name}: {duration(86_400 * cost.days)}, ${cost.cost:,.2f} a seed{fits}")
        days, dollars = days + cost.days, dollars + cost.cost
    seeds = len(listed.seeds)
    total = f"{duration(86_400 * seeds * days)} on {hardware}, ${seeds * dollars:,.2f}"
    return [*costs_by_name, f"All rows with {counted(seeds, 'seed')}: {total} (assumptions of tools/estimate.py)\n"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("list", metavar="LIST.yaml", help="experiment list (docs/statistics.md)")
    parser.add_argument("--scale", help="scale of a list with several (presets/tables: demo, mini, paper)")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="FLAG=VALUE",
        help="override a flag of all rows and of measures with it (--set corpus=my_corpus.yaml), or of a measure "
        "(--set blimp.data_dir=blimp)",
    )  # fmt: skip
    parser.add_argument("--hardware", help="print the estimated cost on these GPUs first: 8xH100")
    parser.add_argument("--jobs", type=int, default=1, help="rows to run at once, each on a share of the cores")
    parser.add_argument("--dry_run", action="store_true", help="only print the state and commands of each row")
    parser.add_argument("--table", action="store_true", help="only write the table of the finished rows")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Any:
    """Run the command line `argv` and print the table. Raises `InputError` before a row starts, `RunError` if rows
    failed, `Stopped` after a signal."""
    set_up_logging()
    args = parse(argv)
    listed = lists.read(args.list, args.scale, args.set)
    if listed.estimate and not (args.hardware or args.dry_run or args.table):
        raise InputError(
            f"{listed.path} takes days on GPUs at this scale: name them (--hardware 8xH100) to see the cost first"
        )
    if args.hardware:
        print("\n".join(lists.in_child(costs, listed, args.hardware)), flush=True)
    if args.dry_run:
        return print_states(listed)
    if not args.table:
        checks.check_rows(listed)
        run(listed, args.jobs)
    print(table.write(listed), end="")


def run(listed: ExperimentList, jobs: int) -> None:
    """Run the unfinished rows. Raises `RunError`, after writing the table, if rows failed, `Stopped` after a signal,
    and `InputError` if another runner uses the list."""
    durable.make_folder(listed.folder, f"{listed.path}: output_dir")
    durable.lock(listed.folder)
    runner = Runner(listed, jobs)
    finished = len(listed.rows) - len(runner.waiting)
    rows = counted(len(listed.rows), "row")
    logger.info(f"{listed.path}: {rows}, {finished} of them finished; {jobs} at once\n")
    runner.run()
    finished = sum(not row.to_do() for row in listed.rows)
    if runner.signals and finished < len(listed.rows):
        by = _BY[runner.signals[0]]
        raise Stopped(f"stopped by {by}: {finished} of {len(listed.rows)} rows are finished. {resume_hint()}", by)
    if runner.failed:
        print(table.write(listed), end="")
        raise RunError(
            f"{len(runner.failed)} of {len(listed.rows)} rows failed: {'; '.join(runner.failed)}. See their logs; "
            f"finished rows are kept. {resume_hint()}"
        )


if __name__ == "__main__":
    exit_on_error(main)
