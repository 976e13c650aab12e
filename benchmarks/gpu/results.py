"""The steps in their order, and results.json, which is written after each of them."""

import argparse
import inspect
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer

from benchmarks.gpu import machine
from benchmarks.gpu.runs import TINY, Runs, Sizes
from benchmarks.gpu.steps import STEPS, described
from roberta_recipe import durable
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.hardware import describe_machine
from roberta_recipe.record import SUMMARY_NAME, git_commit, versions
from roberta_recipe.training.trainer_internals import CHECKED_WITH, INTERNALS

RESULTS_NAME = "results.json"


def main(args: argparse.Namespace, lacking: list[str]) -> None:
    """Run the steps that have not passed yet. Raises `InputError` where none can be run."""
    names = [name for name in STEPS if name in (args.steps or STEPS)]
    if unknown := set(args.steps or ()) - set(STEPS):
        raise InputError(f"steps: {sorted(unknown)[0]!r} is none of {', '.join(STEPS)}")
    if args.dry_run:
        for name in names:
            print(f"{name:<12} at most {STEPS[name].limit_s:>3.0f} s  {described(STEPS[name])}")
        return
    if why := cannot_run(args.tiny):
        raise InputError(f"not run: {why}")
    end_s, path = time.monotonic() + 60 * args.minutes, args.output_dir / RESULTS_NAME
    found = begin(args, lacking)
    runs = Runs(
        args.output_dir.resolve(),
        TINY if args.tiny else Sizes(),
        tokenizer=whole(args.tokenizer_name),
        data_dir=whole(args.data_dir),
        model=whole(args.model_name_or_path),
    )
    for name in names:
        if found["steps"].get(name, {}).get("result") == "passed":
            print(f"{name:<12} passed before", flush=True)
            continue
        found["steps"][name] = run_step(name, runs, end_s)
        durable.write_json(path, found)
        print(line(name, found["steps"][name]), flush=True)
    print(for_the_ledger(args.output_dir, found["steps"]))
    raise SystemExit(any(found["steps"][name]["result"] == "FAILED" for name in names))


def whole(path: str | None) -> str | None:
    """A path as a process in another folder needs it; a Hub id as it is."""
    return str(Path(path).resolve()) if path and Path(path).exists() else path


def cannot_run(tiny: bool) -> str | None:
    """Why nothing can be run here: no GPU, or a transformers whose `Trainer` is another than ours builds on."""
    if not (tiny or torch.cuda.is_available()):
        return "no CUDA device"
    source = inspect.getsource(Trainer)
    for internal in INTERNALS:
        found = getattr(Trainer, internal.name, None)
        same = found is not None and tuple(inspect.signature(found).parameters) == internal.parameters
        if not (same if internal.parameters else f"self.{internal.name}" in source):
            wanted = f"transformers {transformers.__version__} has another Trainer.{internal.name} than {CHECKED_WITH}"
            return f"{wanted}, which is pinned.\n{machine.how_to_carry()}"
    return None


def begin(args: argparse.Namespace, lacking: list[str]) -> dict[str, Any]:
    """What results.json has before the steps, or what an earlier start on the same machine has left of them. Raises
    `InputError` for a folder of something else."""
    here = {"hardware": describe_machine(), "versions": versions(), "commit": git_commit(), "tiny": args.tiny}
    here, path = {**here, "lacking": lacking}, args.output_dir / RESULTS_NAME
    if path.exists():
        before = durable.read_json(path)
        if other := [name for name, value in here.items() if before.get(name) != value]:
            raise InputError(f"{path} is of another {other[0]}; name another folder")
        return before
    if args.output_dir.exists() and (not args.output_dir.is_dir() or any(args.output_dir.iterdir())):
        raise InputError(f"output_dir={args.output_dir} is not empty; name another folder")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    return {**here, "steps": {}}


def run_step(name: str, runs: Runs, end_s: float) -> dict[str, Any]:
    """What a step gave, as results.json has it."""
    start_s, figures, why, step = time.monotonic(), {}, None, STEPS[name]
    try:
        runs.begin(step.limit_s, end_s)
        passed, figures = step.run(runs)
        result = "passed" if passed else "FAILED"
    except InputError as error:
        result, why = "not run", str(error)
    except (RunError, OSError, LookupError, ValueError, TypeError, ArithmeticError) as error:
        result, why = "FAILED", f"{type(error).__name__}: {error}"
    found = {"result": result, "why": why, "seconds": round(time.monotonic() - start_s, 1), "figures": figures}
    return found | ({"last_lines": runs.last_lines()} if result == "FAILED" else {})


def line(name: str, found: dict[str, Any]) -> str:
    """A step's line on the screen."""
    figures = ", ".join(f"{key} {value}" for key, value in found["figures"].items())
    return f"{name:<12} {found['result']:<8} {found['seconds']:>6} s  {found['why'] or figures}"


def for_the_ledger(folder: Path, steps: dict[str, dict[str, Any]]) -> str:
    """The commands that add what has run to the ledger."""
    added = [
        record
        for name, found in steps.items()
        for record in STEPS[name].records
        if found["result"] == "passed" and (folder / record).is_dir()
    ]
    lines = [
        f"    python results/report.py --add {folder / record}"
        + (" --name gpu_curve" if (folder / record / SUMMARY_NAME).exists() else "")
        for record in added
    ]
    return "\n".join([f"results     {folder / RESULTS_NAME}", "For the ledger, of what has passed:", *lines])
