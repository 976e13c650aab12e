"""The steps in fp16, which only a GPU has: loss scale, overflow, a kill, DistributedDataParallel, ZeRO.

They train the demonstration's model (presets/mlm/roberta_tiny.yaml), as what they show does not depend on its size.
"""

import importlib.util
import json
import math
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.runs import Outcome, Runs, kill, record_of
from roberta_recipe import durable
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.training.checkpoint import newest_first

RATE = 1e-3
SHORT, LONG = 60, 300  # optimizer steps
# no warm-up, so that the rate says how many steps were taken: it is RATE x (1 - taken / all)
FLAGS = f"""--fp16 true --learning_rate {RATE} --warmup_steps 0 --lr_scheduler_type linear --logging_steps 1
--shuffle_window 64 --eval_strategy no --max_eval_samples 64 --save_strategy steps --save_steps 5 --save_total_limit 100
--disable_tqdm true --full_determinism true --report_to none""".split()
TOO_HIGH = 2.0**40  # a loss scale at which gradients overflow in half precision
COMPARED = ("step", "loss", "grad_norm", "learning_rate", "skipped_steps", "loss_scale", "digest")


def command(
    runs: Runs,
    name: str,
    steps: int,
    scaler: dict[str, float] | None = None,
    launcher: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> list[str]:
    """The command that trains in fp16 for so many steps into `<folder>/<name>`, with the first loss scale and its
    growth as in `scaler`. The first such run trains the demonstration's tokenizer. Raises `InputError` on a CPU."""
    if runs.sizes.device:
        raise InputError("fp16 needs a GPU")
    inside = ["benchmarks/gpu/inside.py", json.dumps(scaler or {}), *FLAGS, *flags, "--max_steps", str(steps)]
    folders = ["--tokenizer_name", str(runs.folder / "tokenizer_tiny"), "--output_dir", str(runs.folder / name)]
    return [*launcher, *inside, *folders]


def history(run: Path) -> list[dict[str, Any]]:
    """The log lines of a finished run that have a loss."""
    log = durable.read_json(newest_first(run)[0] / "trainer_state.json")["log_history"]
    return [{key: entry.get(key) for key in COMPARED} for entry in log if "loss" in entry]


def promises(run: Path, steps: int, first_scale: float) -> Outcome:
    """What every fp16 run must show: the loss falls; as many steps are skipped as the loss scale was halved (it grows
    after 2,000 steps, or 1,000 under DeepSpeed); the rate stays at a skipped step and falls at every other."""
    log, record = history(run), record_of(run)
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
    run = runs.run("fp16", command(runs, "fp16", LONG, flags=["--save_steps", str(LONG)]))
    return promises(run, LONG, 2.0**16)


def step_overflow(runs: Runs) -> Outcome:
    """a loss scale of 2^40: gradients overflow, weights stay, the scale is halved until it fits"""
    run = runs.run("overflow", command(runs, "overflow", SHORT, {"init_scale": TOO_HIGH}))
    passed, figures = promises(run, SHORT, TOO_HIGH)
    early, late = weights_changed(run, 5, 10), weights_changed(run, SHORT - 5, SHORT)
    figures |= {"weights_changed_while_skipped": early, "weights_changed_at_the_end": late}
    return passed and figures["skipped_steps"] >= 10 and not early and late, figures


def step_resume(runs: Runs) -> Outcome:
    """killed with SIGKILL and started again, a run is the same run, bit for bit, with its loss scale and its growth"""
    scaler = {"init_scale": 2.0**30, "growth_interval": 7}
    whole = runs.run("whole", command(runs, "whole", SHORT, scaler))
    process = runs.start("killed", command(runs, "killed", SHORT, scaler))
    wait_for(runs, "killed", "checkpoint-20", process)
    killed = runs.run("killed", command(runs, "killed", SHORT, scaler), again=True)
    logs = [history(run) for run in (whole, killed)]
    weights = [durable.sha256(run / "model.safetensors") for run in (whole, killed)]
    record = record_of(killed)
    figures = {
        "resumes": record["resumes"],
        "skipped_steps": record["skipped_steps"],
        "loss_scales_seen": sorted({entry["loss_scale"] for entry in logs[1]}),
        "log_equal": logs[0] == logs[1],
        "weights_equal": weights[0] == weights[1],
    }
    return figures["log_equal"] and figures["weights_equal"] and figures["resumes"] == 1, figures


def wait_for(runs: Runs, name: str, checkpoint: str, process: subprocess.Popen) -> None:
    """Kill a run once it has written a checkpoint. Raises `RunError` where it has ended before, or the time is over."""
    try:
        while not (runs.folder / name / checkpoint).exists() and process.poll() is None:
            if runs.left_s < 0:
                raise RunError(f"{name}: its time is over")
            time.sleep(0.01)
    finally:
        kill(process)
    if not (runs.folder / name / checkpoint).exists() or (runs.folder / name / "run_record.json").exists():
        raise RunError(f"{name} had ended before it was killed")


def with_zero(stage: int, settings: str | Path) -> list[str]:
    """Python's flags for `accelerate launch` of a process under ZeRO with a DeepSpeed configuration. Raises
    `InputError` without DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError("deepspeed is not installed")
    launcher = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--main_process_port", "0"]
    return [
        *launcher,
        *["--config_file", f"ds_configs/accelerate/zero{stage}.yaml", "--deepspeed_config_file", str(settings)],
    ]


def step_zero(runs: Runs, stage: int) -> Outcome:
    """fp16 under ZeRO, from a loss scale of 2^32"""
    config = durable.read_json(ROOT / "ds_configs" / f"zero{stage}.json")
    config["fp16"] |= {"initial_scale_power": 32, "hysteresis": 1}
    file, name = runs.folder / f"zero{stage}.json", f"zero{stage}_fp16"
    durable.write_json(file, config)
    return promises(runs.run(name, command(runs, name, SHORT, launcher=with_zero(stage, file))), SHORT, 2.0**32)


def step_ddp(runs: Runs) -> Outcome:
    """fp16 in DistributedDataParallel, one process, from a loss scale of 2^40"""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    run = runs.run("ddp", command(runs, "ddp", SHORT, {"init_scale": TOO_HIGH}, launcher))
    return promises(run, SHORT, TOO_HIGH)
