"""What only a GPU can show, on a machine with one GPU and no network.

    python benchmarks/gpu.py --output_dir runs/gpu [--minutes 25] [--steps overflow resume]
    python benchmarks/gpu.py --output_dir runs/gpu --dry_run          # lists the steps; needs no GPU

Each step trains the demonstration's model (presets/mlm/roberta_tiny.yaml) on the docstrings of the installed Python,
through the command line, and prints a line: passed or FAILED, with its figures, which are in
<output_dir>/results.json too. The exit code is 1 where a step failed or the time was over, 2 where nothing was run (no
GPU). Without DeepSpeed, its steps are not run. This script itself has not been run on a GPU so far.
"""

import argparse
import contextlib
import functools
import importlib.util
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import accelerate
import torch
import transformers
from transformers import Trainer

from roberta_recipe import durable
from roberta_recipe.errors import InputError, RunError, exit_on_error
from roberta_recipe.hardware import describe_machine
from roberta_recipe.training.checkpoint import newest_first
from roberta_recipe.training.trainer_internals import CHECKED_WITH, INTERNALS

RATE = 1e-3
SHORT, LONG = 60, 300  # optimizer steps
# no warm-up, so that the rate says how many steps were taken: it is RATE x (1 - taken / all)
FLAGS = f"""--fp16 true --learning_rate {RATE} --warmup_steps 0 --lr_scheduler_type linear --logging_steps 1
--shuffle_window 64 --eval_strategy no --max_eval_samples 64 --save_strategy steps --save_steps 5 --save_total_limit 100
--disable_tqdm true --full_determinism true""".split()
TOO_HIGH = 2.0**40  # a loss scale at which gradients overflow in half precision
COMPARED = ("step", "loss", "grad_norm", "learning_rate", "skipped_steps", "loss_scale", "digest")

Outcome = tuple[bool, dict[str, Any]]  # whether the step passed, and its figures


class Runs:
    """Starts trainings below `folder`, all of them until `deadline_s` (of `time.monotonic`)."""

    def __init__(self, folder: Path, deadline_s: float):
        self.folder, self.deadline_s = folder, deadline_s

    def start(
        self, name: str, steps: int, scaler: dict[str, float], launcher: list[str], flags: list[str]
    ) -> subprocess.Popen:
        """`train_mlm.py` in its own process group, with the first loss scale and its growth as in `scaler`; the log
        is `<folder>/<name>.log`."""
        launcher = launcher or [sys.executable]
        command = [*launcher, __file__, "--inside", json.dumps(scaler), *FLAGS, *flags, "--max_steps", str(steps)]
        command += ["--tokenizer_name", str(self.folder / "tokenizer"), "--output_dir", str(self.folder / name)]
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        with open(self.log(name), "ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True, env=environ)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def train(
        self,
        name: str,
        steps: int,
        *,
        scaler: dict[str, float] | None = None,
        launcher: list[str] | None = None,
        flags: list[str] | None = None,
    ) -> Path:
        """Train to the end; returns the folder of the run. Raises `RunError` with the last line of its log."""
        process = self.start(name, steps, scaler or {}, launcher or [], flags or [])
        try:
            code = process.wait(timeout=max(1.0, self.deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill(process)
            raise RunError("the time is over") from None
        if code:
            lines = self.log(name).read_text(errors="replace").strip().splitlines()
            raise RunError(f"exit code {code}: {lines[-1] if lines else 'nothing was logged'}")
        return self.folder / name


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a command and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def inside(scaler: dict[str, float], argv: list[str]) -> None:
    """`train_mlm.py` with the first loss scale and its growth as in `scaler`, for which it has no flags."""
    import train_mlm

    accelerate.accelerator.get_grad_scaler = functools.partial(accelerate.accelerator.get_grad_scaler, **scaler)
    sys.argv = ["train_mlm.py", *argv]
    exit_on_error(train_mlm.main)


def history(run: Path) -> list[dict[str, Any]]:
    """The log lines of a finished run that have a loss."""
    log = durable.read_json(newest_first(run)[0] / "trainer_state.json")["log_history"]
    return [{key: entry.get(key) for key in COMPARED} for entry in log if "loss" in entry]


def promises(run: Path, steps: int, first_scale: float) -> Outcome:
    """What every fp16 run must show: the loss falls; as many steps are skipped as the loss scale was halved (it grows
    after 2,000 steps, or 1,000 under DeepSpeed); the rate stays at a skipped step and falls at every other."""
    log, record = history(run), durable.read_json(run / "run_record.json")
    halvings = round(math.log2(first_scale / log[-1]["loss_scale"]))
    skipped, rates_hold = 0, True
    for entry in log:
        rate = RATE * (1 - (entry["step"] - 1 - skipped) / steps)
        rates_hold &= math.isclose(entry["learning_rate"], rate, rel_tol=1e-6)
        rates_hold &= (entry["grad_norm"] is None) == (entry["skipped_steps"] > skipped)
        skipped = entry["skipped_steps"]
    losses = [entry["loss"] for entry in log]
    taken = [entry["loss"] for entry in log if entry["grad_norm"] is not None]
    figures = {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "skipped_steps": record["skipped_steps"],
        "halvings": halvings,
        "loss_scale": log[-1]["loss_scale"],
        "rates_hold": rates_hold,
        "tokens_per_second": record["tokens_per_second"],
        "peak_memory_bytes": record["peak_memory_bytes"],
    }
    passed = rates_hold and len(taken) > 10 and losses[-1] < taken[0] and record["steps"] == steps
    return passed and record["skipped_steps"] == halvings, figures


def weights_changed(run: Path, first: int, second: int) -> bool:
    """Whether the weights of two checkpoints differ in a bit."""
    files = [run / f"checkpoint-{step}" / "model.safetensors" for step in (first, second)]
    return durable.sha256(files[0]) != durable.sha256(files[1])


def step_fp16(runs: Runs) -> Outcome:
    """fp16 trains: the loss falls, skipped steps are counted, the rate follows the steps that were taken"""
    return promises(runs.train("fp16", LONG, flags=["--save_steps", str(LONG)]), LONG, 2.0**16)


def step_overflow(runs: Runs) -> Outcome:
    """a loss scale of 2^40: gradients overflow, weights stay, the scale is halved until it fits"""
    run = runs.train("overflow", SHORT, scaler={"init_scale": TOO_HIGH})
    passed, figures = promises(run, SHORT, TOO_HIGH)
    early, late = weights_changed(run, 5, 10), weights_changed(run, SHORT - 5, SHORT)
    figures |= {"weights_changed_while_skipped": early, "weights_changed_at_the_end": late}
    return passed and figures["skipped_steps"] >= 10 and not early and late, figures


def step_resume(runs: Runs) -> Outcome:
    """killed with SIGKILL and started again, a run is the same run, bit for bit, with its loss scale and its growth"""
    scaler = {"init_scale": 2.0**30, "growth_interval": 7}
    whole = runs.train("whole", SHORT, scaler=scaler)
    process = runs.start("killed", SHORT, scaler, [], [])
    while not (runs.folder / "killed" / "checkpoint-20").exists() and process.poll() is None:
        if time.monotonic() > runs.deadline_s:
            kill(process)
            raise RunError("the time is over")
        time.sleep(0.01)
    kill(process)
    if (runs.folder / "killed" / "run_record.json").exists():
        raise RunError("the run had ended before it was killed")
    killed = runs.train("killed", SHORT, scaler=scaler)
    logs = [history(run) for run in (whole, killed)]
    weights = [durable.sha256(run / "model.safetensors") for run in (whole, killed)]
    record = durable.read_json(killed / "run_record.json")
    figures = {
        "resumes": record["resumes"],
        "skipped_steps": record["skipped_steps"],
        "loss_scales_seen": sorted({entry["loss_scale"] for entry in logs[1]}),
        "log_equal": logs[0] == logs[1],
        "weights_equal": weights[0] == weights[1],
    }
    return figures["log_equal"] and figures["weights_equal"] and figures["resumes"] == 1, figures


def zero(runs: Runs, stage: int) -> Outcome:
    """A run under ZeRO from a loss scale that is too high."""
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError("deepspeed is not installed")
    config = durable.read_json(ROOT / "ds_configs" / f"zero{stage}.json")
    config["fp16"] |= {"initial_scale_power": 32, "hysteresis": 1}
    file = runs.folder / f"zero{stage}.json"
    durable.write_json(file, config)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--main_process_port", "0"]
    launcher += ["--config_file", f"ds_configs/accelerate/zero{stage}.yaml", "--deepspeed_config_file", str(file)]
    return promises(runs.train(f"zero{stage}", SHORT, launcher=launcher), SHORT, 2.0**32)


def step_zero1(runs: Runs) -> Outcome:
    """fp16 under ZeRO 1, from a loss scale of 2^32"""
    return zero(runs, 1)


def step_zero2(runs: Runs) -> Outcome:
    """fp16 under ZeRO 2, from a loss scale of 2^32"""
    return zero(runs, 2)


def step_ddp(runs: Runs) -> Outcome:
    """fp16 in DistributedDataParallel, one process, from a loss scale of 2^40"""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    run = runs.train("ddp", SHORT, launcher=launcher, scaler={"init_scale": TOO_HIGH})
    return promises(run, SHORT, TOO_HIGH)


STEPS: dict[str, Callable[[Runs], Outcome]] = {
    "fp16": step_fp16,
    "overflow": step_overflow,
    "resume": step_resume,
    "zero1": step_zero1,
    "zero2": step_zero2,
    "ddp": step_ddp,
}


def cannot_run() -> str | None:
    """Why nothing can be run here: no GPU, or a transformers whose `Trainer` is another than ours builds on."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    source = inspect.getsource(Trainer)
    for internal in INTERNALS:
        found = getattr(Trainer, internal.name, None)
        same = found is not None and tuple(inspect.signature(found).parameters) == internal.parameters
        if not (same if internal.parameters else f"self.{internal.name}" in source):
            return f"transformers {transformers.__version__} has another Trainer.{internal.name} than {CHECKED_WITH}"
    return None


def run_step(name: str, runs: Runs) -> dict[str, Any]:
    """What a step gave, as results.json has it."""
    start_s, figures, why = time.monotonic(), {}, None
    try:
        if start_s > runs.deadline_s:
            raise RunError("the time is over")
        passed, figures = STEPS[name](runs)
        result = "passed" if passed else "FAILED"
    except InputError as error:
        result, why = "not run", str(error)
    except (RunError, OSError, KeyError, IndexError, ValueError) as error:
        result, why = "FAILED", f"{type(error).__name__}: {error}"
    return {
        "step": name,
        "result": result,
        "why": why,
        "seconds": round(time.monotonic() - start_s, 1),
        "figures": figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="a folder that is empty or does not exist")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all steps together")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="which steps")
    parser.add_argument("--dry_run", action="store_true", help="list the steps, run nothing")
    args = parser.parse_args()
    if args.dry_run:
        for name in args.steps:
            print(f"{name:<10} {inspect.getdoc(STEPS[name])}")
        return
    if args.output_dir.exists() and (not args.output_dir.is_dir() or any(args.output_dir.iterdir())):
        raise InputError(f"output_dir={args.output_dir} is not empty; name another folder")
    if why := cannot_run():
        raise InputError(f"not run: {why}")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    runs = Runs(args.output_dir.resolve(), time.monotonic() + 60 * args.minutes)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, accelerate)}
    results: dict[str, Any] = {"hardware": describe_machine(), "versions": versions, "steps": []}
    for name in args.steps:
        found = run_step(name, runs)
        results["steps"].append(found)
        durable.write_json(args.output_dir / "results.json", results)
        figures = ", ".join(f"{key} {value}" for key, value in found["figures"].items())
        print(f"{name:<10} {found['result']:<8} {found['seconds']:>6} s  {found['why'] or figures}", flush=True)
    raise SystemExit(any(found["result"] == "FAILED" for found in results["steps"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(json.loads(sys.argv[2]), sys.argv[3:])
    else:
        exit_on_error(main)
