"""Run a list of experiments, and make one table of it.

    python -m roberta_recipe.tools.experiments presets/experiments/rates.yaml --dry_run   # what would run, and states
    python -m roberta_recipe.tools.experiments presets/experiments/rates.yaml --jobs 2    # two rows side by side
    python -m roberta_recipe.tools.experiments presets/experiments/rates.yaml --table     # of what has finished

A list names settings (a preset and what differs from it), seeds, and what is measured; each setting with each seed is a
row with a folder of its own. Stop it at any time, with Ctrl-C, SIGTERM or kill -9, and start it again with the same
command: finished rows are kept, the others continue from their checkpoints. docs/statistics.md says what a
list may have, and what the table's verdicts mean.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roberta_recipe import durable, lock
from roberta_recipe.errors import InputError, RunError, Stopped, exit_on_error
from roberta_recipe.hardware import end_with_parent
from roberta_recipe.log import counted, duration, logger, set_up_logging
from roberta_recipe.settings import RecipeParser
from roberta_recipe.started import continue_with
from roberta_recipe.tools import estimate, experiment_checks, experiment_list, experiment_table
from roberta_recipe.tools.experiment_list import FAILED_NAME, MEASURES, ROW_NAME, Experiments, Row, words_of

_POLL_S = 0.2
_IN_USE_S = 2.0  # after which a row that another process works on is looked at again
_BY = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
_STOPPED = tuple(Stopped.EXIT_CODES.values())


@dataclass
class Job:
    """A row that is being run."""

    row: Row
    cores: list[int]
    to_do: dict[str, list[str]]  # commands still to start
    process: subprocess.Popen
    name: str  # of the command that runs
    begun_s: float  # time.monotonic()
    told: int = 0  # signals that were passed on to it


class Runner:
    """Rows of a list side by side, each on cores of its own; one start of each at most."""

    def __init__(self, listed: Experiments, jobs: int):
        self.rows, self.waiting = listed.rows, [row for row in listed.rows if row.to_do()]
        self.measures = listed.measures
        self.free = split_cores(jobs)
        self.jobs: list[Job] = []
        self.failed: list[str] = []
        self.signals: list[int] = []
        self.look_again_s: dict[Path, float] = {}  # by folder of a row that is in use

    def run(self) -> None:
        """Until all rows have been run, by this process or another, or a signal has ended those that run."""
        with self._signals():
            while self.jobs or (self.waiting and not self.signals):
                for job in list(self.jobs):
                    self._tell(job)
                    self._look_at(job)
                while self.free and not self.signals and self._begin_next():
                    pass
                time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Within, Ctrl-C and SIGTERM are noted; the jobs, in process groups of their own, get each of them once."""
        before = {number: signal.getsignal(number) for number in _BY}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # as of a shell's background job
                signal.signal(number, lambda number, _: self.signals.append(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _tell(self, job: Job) -> None:
        for number in self.signals[job.told :]:
            job.process.send_signal(number)
            job.told += 1

    def _begin_next(self) -> bool:
        """Begin the first waiting row that nobody works on; returns whether one was begun, or found finished."""
        for row in self.waiting:
            if self.look_again_s.get(row.folder, 0.0) > time.monotonic():
                continue
            try:
                take(row)
                if to_do := row.to_do():
                    self._begin(row, to_do)
                else:  # run by another runner, meanwhile
                    lock.release(row.folder)
            except lock.InUse as error:
                if row.folder not in self.look_again_s:
                    logger.info(f"waits   {row.title}: {str(error).split('; ')[0]}")
                self.look_again_s[row.folder] = time.monotonic() + _IN_USE_S
                continue
            except (InputError, OSError) as error:  # of its folder, or a file there
                lock.release(row.folder)
                self._say_failed(row, f": {error}")
            self.waiting.remove(row)
            return True
        return False

    def _begin(self, row: Row, to_do: dict[str, list[str]]) -> None:
        state, cores = row.state(), self.free[0]
        remember(row)
        (row.folder / FAILED_NAME).unlink(missing_ok=True)
        if "run" in to_do:  # what was measured was of other weights
            for measure in row.measures:
                row.output_of(measure).unlink(missing_ok=True)
        name = next(iter(to_do))
        process = start(to_do.pop(name), row.log, cores)
        self.free.remove(cores)
        self.jobs.append(Job(row, cores, to_do, process, name, time.monotonic()))
        where = f"cores {','.join(map(str, cores))}" if len(cores) > 1 else f"core {cores[0]}"
        logger.info(f"begins  {row.title}: {state}; {where}, log {row.log}")

    def _look_at(self, job: Job) -> None:
        """Start the next command of a job whose command has ended; end the job behind the last, or where one failed."""
        if (code := job.process.poll()) is None:
            return
        done = code == 0 and job.name not in job.row.to_do()
        if done and job.to_do and not self.signals:
            job.name = next(iter(job.to_do))
            job.process = start(job.to_do.pop(job.name), job.row.log, job.cores)
            job.told = 0
            return
        self.jobs.remove(job)
        self.free.append(job.cores)
        remember(job.row, time.monotonic() - job.begun_s)
        if done and not job.to_do:
            self._say_done(job.row)
        elif self.signals:
            logger.info(f"stopped {job.row.title}: {job.row.state()}")
        else:
            self._fail(job, code)
        lock.release(job.row.folder)

    def _say_done(self, row: Row) -> None:
        try:
            logger.info(f"done    {row.title}: {figures(row, self.measures)}; {self._left()}")
        except InputError as error:  # what was measured cannot be read
            self._say_failed(row, f": {error}")

    def _say_failed(self, row: Row, why: str) -> None:
        self.failed.append(row.title)
        logger.info(f"failed  {row.title}{why}")

    def _fail(self, job: Job, code: int) -> None:
        line = last_line(job.row.log) if code else f"{job.name} ended without its result"
        line = f"killed by {signal.Signals(-code).name}; the end of its log: {line}" if code < 0 else line
        if code not in _STOPPED:
            durable.write_sealed(job.row.folder / FAILED_NAME, {"exit_code": code, "line": line})
        self._say_failed(job.row, f" ({job.name}, exit code {code}): {line}; log {job.row.log}")

    def _left(self) -> str:
        """How many rows are left, and for how long by the mean of the finished ones."""
        left = len(self.waiting) + len(self.jobs)
        spent = [row.stored()["seconds"] for row in self.rows if not row.to_do()]
        if not left:
            return "it was the last"
        running_s = sum(time.monotonic() - job.begun_s for job in self.jobs)
        eta_s = (left * sum(spent) / len(spent) - running_s) / (len(self.jobs) + len(self.free))
        return f"{left} left, ETA {duration(max(eta_s, 0))}"


def split_cores(jobs: int) -> list[list[int]]:
    """Disjoint cores for each job, of those that this process may use; without pinning where the system has none."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if not 1 <= jobs <= len(cores):
        raise InputError(f"jobs={jobs} must be from 1 to {len(cores)}, the cores that this process may use")
    each = len(cores) // jobs
    return [cores[number * each : (number + 1) * each] for number in range(jobs)]


def take(row: Row) -> None:
    """Lock the folder of a row. Raises `lock.InUse` where another runner has it, or where what a killed runner had
    started still saves its step."""
    row.folder.mkdir(parents=True, exist_ok=True)
    lock.take(row.folder)
    if row.run.is_dir():
        try:
            lock.take(row.run)
        except lock.InUse:
            lock.release(row.folder)
            raise
        lock.release(row.run)
    durable.remove_left(row.folder)


def remember(row: Row, seconds: float = 0.0) -> None:
    """`row.json`: the settings and measures that are run, and the time that was spent, more by `seconds`."""
    stored = row.stored()
    measures = {**stored["measures"], **row.measures}
    spent = round(stored["seconds"] + seconds, 1)
    durable.write_sealed(row.folder / ROW_NAME, {"settings": row.settings, "measures": measures, "seconds": spent})


def start(words: list[str], log: Path, cores: list[int]) -> subprocess.Popen:
    """Start a command on these cores, its output behind that of the starts before it. It ends with this process, by
    SIGTERM, so that it saves its step, however this process ends."""
    parent = os.getpid()

    def pin() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        end_with_parent(parent, signal.SIGTERM)

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
            preexec_fn=pin,
        )


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def figures(row: Row, measures: list[str]) -> str:
    """The figures of a finished row."""
    return ", ".join(f"{MEASURES[name].title} {row.figure(name):.4g}" for name in measures)


def print_states(listed: Experiments) -> None:
    for row in listed.rows:
        print(f"{row.title}: {row.state()}")
        for words in row.to_do().values():
            print(f"    {shlex.join(words)}")


def costs(listed: Experiments, hardware: str) -> list[str]:
    """A line for each name, and one for all: how long a machine of GPUs takes for them, by the estimate."""
    if MEASURES[listed.measures[0]].of != "pretraining":
        raise InputError(
            f"--hardware {hardware}: the estimate is of pretraining, and {listed.path} is of fine-tuning; leave it out"
        )
    said, days, dollars = [], 0.0, 0.0
    for setting in listed.settings:
        flags = words_of(setting.flags, setting.name)
        cost = experiment_list.named(
            f"{listed.path}, row {setting.name!r}",
            estimate.read_estimate,
            ["--config", setting.config, *flags, "--hardware", hardware],
        )
        fits = "" if cost.fits else ", and does not fit into memory"
        said.append(f"{setting.name}: {cost.days:,.2f} days, {estimate.dollars(cost.cost)} a seed{fits}")
        days, dollars = days + cost.days, dollars + cost.cost
    seeds = len(listed.seeds)
    all_of_it = f"{seeds * days:,.1f} days on {hardware}, {estimate.dollars(seeds * dollars)}"
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
    parser.add_argument("--hardware", help="say first what it costs there: 8xH100 (see the estimate)")
    parser.add_argument("--jobs", type=int, default=1, help="rows side by side, each on its share of the cores")
    parser.add_argument("--dry_run", action="store_true", help="print the state and the commands of each row only")
    parser.add_argument("--table", action="store_true", help="make the table of what has finished only")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Any:
    """Run the command line `argv`; prints the table. Raises `InputError` before anything starts, `RunError` where rows
    failed, `Stopped` where a signal ended the rest."""
    set_up_logging()
    args = parse(argv)
    listed = experiment_list.read(args.list, args.scale, args.set)
    if listed.estimate and not (args.hardware or args.dry_run or args.table):
        raise InputError(
            f"{listed.path} at this scale takes days on GPUs: name them, and their number, with --hardware 8xH100, and "
            "what it costs is said first"
        )
    if args.hardware:
        print("\n".join(experiment_list.in_child(costs, listed, args.hardware)), flush=True)
    if args.dry_run:
        return print_states(listed)
    if not args.table:
        experiment_checks.check_rows(listed)
        experiment_checks.check_inputs(listed)
        run(listed, args.jobs)
    print(experiment_table.write(listed), end="")


def run(listed: Experiments, jobs: int) -> None:
    """Run what is not finished. Raises `RunError`, with the table written, where rows failed, and `Stopped`."""
    durable.make_folder(listed.folder, f"{listed.path}: output_dir")
    runner = Runner(listed, jobs)
    finished = len(listed.rows) - len(runner.waiting)
    rows = counted(len(listed.rows), "row")
    logger.info(f"{listed.path}: {rows}, {finished} of them finished; {jobs} side by side\n")
    runner.run()
    finished = sum(not row.to_do() for row in listed.rows)
    if runner.signals and finished < len(listed.rows):
        by = _BY[runner.signals[0]]
        raise Stopped(f"stopped by {by}: {finished} of {len(listed.rows)} rows are finished. {continue_with()}", by)
    if runner.failed:
        print(experiment_table.write(listed), end="")
        raise RunError(
            f"{len(runner.failed)} of {len(listed.rows)} rows failed: {'; '.join(runner.failed)}. Their logs say why; "
            f"finished rows are kept. {continue_with()}"
        )


if __name__ == "__main__":
    exit_on_error(main)
