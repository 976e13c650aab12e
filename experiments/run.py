"""Run a list of experiments, and make one table of it.

    python experiments/run.py presets/experiments/rates.yaml --dry_run   # what would run, and states
    python experiments/run.py presets/experiments/rates.yaml --jobs 2    # two rows side by side
    python experiments/run.py presets/experiments/rates.yaml --table     # of what has finished

A list names variants (a preset and the flags that differ), seeds and measures; a variant with a seed is a row, in a
folder. Stop it at any time, with Ctrl-C, SIGTERM or kill -9, and start it again with the same command: finished rows
are kept, the others continue from their checkpoints. docs/statistics.md describes the list and the verdicts.
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
    """A running row."""

    row: Experiment
    cores: list[int]
    to_do: dict[str, list[str]]  # commands still to start
    process: subprocess.Popen
    name: str  # of the running command
    begun_s: float  # time.monotonic()
    signals: int = 0  # passed on to it


class Runner:
    """Runs the rows of a list side by side, each on its own cores; each row is started once."""

    def __init__(self, listed: ExperimentList, jobs: int):
        self.rows, self.waiting = listed.rows, [row for row in listed.rows if row.to_do()]
        self.measures = listed.measures
        self.free = split_cores(jobs)
        self.jobs: list[RunningRow] = []
        self.failed: list[str] = []
        self.signals: list[int] = []

    def run(self) -> None:
        """Return when all rows have been run, or a signal has ended the running ones."""
        with self._signals():
            while self.jobs or (self.waiting and not self.signals):
                for job in list(self.jobs):
                    self._pass_signals(job)
                    self._look_at(job)
                while self.free and self.waiting and not self.signals:
                    self._begin(self.waiting.pop(0))
                time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Collect Ctrl-C and SIGTERM; the jobs, in their own process groups, get each of them once."""
        before = {number: signal.getsignal(number) for number in _BY}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # as of a shell's background job
                signal.signal(number, lambda number, _: self.signals.append(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_signals(self, job: RunningRow) -> None:
        for number in self.signals[job.signals :]:
            job.process.send_signal(number)
            job.signals += 1

    def _begin(self, row: Experiment) -> None:
        """Start the first command of a row."""
        state, to_do, cores = row.state(), row.to_do(), self.free.pop(0)
        row.folder.mkdir(parents=True, exist_ok=True)
        durable.remove_stale(row.folder)
        remember(row)
        if "run" in to_do:  # measures of other weights
            for measure in row.measures:
                row.output_of(measure).unlink(missing_ok=True)
        name = next(iter(to_do))
        process = start(to_do.pop(name), row.log, cores)
        self.jobs.append(RunningRow(row, cores, to_do, process, name, time.monotonic()))
        where = f"cores {','.join(map(str, cores))}" if len(cores) > 1 else f"core {cores[0]}"
        logger.info(f"begins  {row.title}: {state}; {where}, log {row.log}")

    def _look_at(self, job: RunningRow) -> None:
        """Start the next command of a job when one has ended; end the job after its last, or when one has failed."""
        if (code := job.process.poll()) is None:
            return
        done = code == 0 and job.name not in job.row.to_do()
        if done and job.to_do and not self.signals:
            job.name = next(iter(job.to_do))
            job.process = start(job.to_do.pop(job.name), job.row.log, job.cores)
            job.signals = 0
            return
        self.jobs.remove(job)
        self.free.append(job.cores)
        remember(job.row, time.monotonic() - job.begun_s)
        if done and not job.to_do:
            figures = (f"{MEASURES[name].title} {job.row.figure(name):.4g}" for name in self.measures)
            logger.info(f"done    {job.row.title}: {', '.join(figures)}; {self._left()}")
        elif self.signals:
            logger.info(f"stopped {job.row.title}: {job.row.state()}")
        else:
            self.failed.append(job.row.title)
            line = last_line(job.row.log) if code else "it ended without its result"
            logger.info(f"failed  {job.row.title} ({job.name}, exit code {code}): {line}; log {job.row.log}")

    def _left(self) -> str:
        """The number of rows left, and an ETA by the mean time of the finished ones."""
        left = len(self.waiting) + len(self.jobs)
        if not left:
            return "it was the last"
        spent = [row.stored()["seconds"] for row in self.rows if not row.to_do()]
        running_s = sum(time.monotonic() - job.begun_s for job in self.jobs)
        eta_s = (left * sum(spent) / len(spent) - running_s) / (len(self.jobs) + len(self.free))
        return f"{left} left, ETA {duration(max(eta_s, 0))}"


def split_cores(jobs: int) -> list[list[int]]:
    """Disjoint sets of this process's cores, one for each job."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if not 1 <= jobs <= len(cores):
        raise InputError(f"jobs={jobs} must be from 1 to {len(cores)}, the cores that this process may use")
    each = len(cores) // jobs
    return [cores[number * each : (number + 1) * each] for number in range(jobs)]


def remember(row: Experiment, seconds: float = 0.0) -> None:
    """Write `row.json`: settings and measures as they are run, and the time spent, increased by `seconds`."""
    stored = row.stored()
    measures = {**stored["measures"], **row.measures}
    spent = round(stored["seconds"] + seconds, 1)
    durable.write_sealed(row.folder / ROW_NAME, {"settings": row.settings, "measures": measures, "seconds": spent})


def start(words: list[str], log: Path, cores: list[int]) -> subprocess.Popen:
    """Start a command on these cores, with its output appended to `log`. When this process ends, in whatever way, the
    command gets SIGTERM and saves its step."""
    with open(log, "ab") as stream:
        stream.write(f"$ {shlex.join(words)}\n".encode())
        stream.flush()
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(len(cores))},
            process_group=0,  # the terminal's Ctrl-C is for the runner, which passes it on
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
    """Time and cost of each name, and of all, on a machine of GPUs (`tools/estimate.py`); a line each."""
    said, days, dollars = [], 0.0, 0.0
    for variant in listed.variants:
        flags = words_of(variant.flags, variant.name)
        cost = lists.named(
            f"{listed.path}, row {variant.name!r}",
            estimate.read_estimate,
            ["--config", variant.config, *flags, "--hardware", hardware],
        )
        fits = "" if cost.fits else ", and does not fit into memory"
        said.append(f"{variant.name}: {cost.days:,.2f} days, ${cost.cost:,.2f} a seed{fits}")
        days, dollars = days + cost.days, dollars + cost.cost
    seeds = len(listed.seeds)
    all_of_it = f"{seeds * days:,.1f} days on {hardware}, ${seeds * dollars:,.2f}"
    return [*said, f"All rows with {counted(seeds, 'seed')}: {all_of_it} (assumptions: the estimate's)\n"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("list", metavar="LIST.yaml", help="the experiments, as docs/statistics.md describes them")
    parser.add_argument("--scale", help="the size to run at, of a list for several (presets/tables: demo, mini, paper)")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="FLAG=VALUE",
        help="a flag for all rows, and for the measures that have it (--set corpus=my_corpus.yaml), or for a measure "
        "(--set blimp.data_dir=blimp)",
    )  # fmt: skip
    parser.add_argument("--hardware", help="print first what it costs there: 8xH100 (see the estimate)")
    parser.add_argument("--jobs", type=int, default=1, help="rows side by side, each on its share of the cores")
    parser.add_argument("--dry_run", action="store_true", help="print the state and the commands of each row only")
    parser.add_argument("--table", action="store_true", help="make the table of what has finished only")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Any:
    """Run the command line `argv`; prints the table. Raises `InputError` before anything starts, `RunError` where rows
    failed, `Stopped` where a signal ended the rest."""
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
    """Run what is not finished. Raises `RunError`, with the table written, where rows failed, `Stopped`, and
    `InputError` where another runner has the list."""
    durable.make_folder(listed.folder, f"{listed.path}: output_dir")
    durable.lock(listed.folder)
    runner = Runner(listed, jobs)
    finished = len(listed.rows) - len(runner.waiting)
    rows = counted(len(listed.rows), "row")
    logger.info(f"{listed.path}: {rows}, {finished} of them finished; {jobs} side by side\n")
    runner.run()
    finished = sum(not row.to_do() for row in listed.rows)
    if runner.signals and finished < len(listed.rows):
        by = _BY[runner.signals[0]]
        raise Stopped(f"stopped by {by}: {finished} of {len(listed.rows)} rows are finished. {resume_hint()}", by)
    if runner.failed:
        print(table.write(listed), end="")
        raise RunError(
            f"{len(runner.failed)} of {len(listed.rows)} rows failed: {'; '.join(runner.failed)}. Their logs say why; "
            f"finished rows are kept. {resume_hint()}"
        )


if __name__ == "__main__":
    exit_on_error(main)
