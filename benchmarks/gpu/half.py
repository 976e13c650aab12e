"""fp16 tests on a GPU: overflow of the loss scale; resuming after SIGKILL, bit for bit.

They train a small model (presets/mlm/roberta_tiny.yaml) on the packed text.
"""

import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.runs import Outcome, Work, kill
from roberta_recipe import durable
from roberta_recipe.errors import RunError
from roberta_recipe.record import RECORD_NAME
from roberta_recipe.training.checkpoint import newest_first

RATE = 1e-3
STEPS = 60  # optimizer steps
# without warm-up, the learning rate counts the steps that were not skipped: RATE x (1 - taken / all)
FLAGS = f"""--fp16 true --learning_rate {RATE} --warmup_steps 0 --lr_scheduler_type linear --logging_steps 1
--eval_strategy no --max_eval_samples 64 --save_strategy steps --save_steps 5 --save_total_limit 100
--disable_tqdm true --full_determinism true --report_to none""".split()
TOO_HIGH = 2.0**40  # a loss scale with which fp16 gradients overflow
COMPARED = ("step", "loss", "grad_norm", "learning_rate", "skipped_steps", "loss_scale", "digest")


def command(work: Work, name: str, scaler: dict[str, float]) -> list[str]:
    """The command of an fp16 run in `<folder>/<name>`, with the arguments `scaler` of `GradScaler`."""
    inside = ["benchmarks/gpu/inside.py", json.dumps(scaler), *FLAGS, "--max_steps", str(STEPS)]
    shape = ["--config_overrides", f"vocab_size={work.vocab_size},max_position_embeddings=130"]
    return [*inside, *work.text, *shape, "--output_dir", str(work.folder / name)]


def history(run: Path) -> list[dict[str, Any]]:
    """The training log entries of a finished run."""
    log = durable.read_json(newest_first(run)[0] / "trainer_state.json")["log_history"]
    return [{key: entry.get(key) for key in COMPARED} for entry in log if "loss" in entry]


def promises(run: Path, steps: int, first_scale: float) -> Outcome:
    """Properties of every fp16 run: the loss falls; the loss scale was halved once per skipped step (it grows after
    2,000 steps); the learning rate stays the same at skipped steps and falls at others."""
    log, record = history(run), durable.read_json(run / RECORD_NAME)
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
    """Whether the weights of two checkpoints differ."""
    files = [run / f"checkpoint-{step}" / "model.safetensors" for step in (first, second)]
    return durable.sha256(files[0]) != durable.sha256(files[1])


def overflow(work: Work, end_s: float) -> Outcome:
    """From a loss scale of 2^40: gradients overflow, weights stay, the scale is halved until gradients are finite."""
    run = work.run("overflow", command(work, "overflow", {"init_scale": TOO_HIGH}), end_s)
    passed, figures = promises(run, STEPS, TOO_HIGH)
    early, late = weights_changed(run, 5, 10), weights_changed(run, STEPS - 5, STEPS)
    figures |= {"weights_changed_while_skipped": early, "weights_changed_at_the_end": late}
    return passed and figures["skipped_steps"] >= 10 and not early and late, figures


def resume(work: Work, end_s: float) -> Outcome:
    """A run resumed after SIGKILL equals an uninterrupted one, bit for bit, with growth of the loss scale."""
    scaler = {"init_scale": 2.0**30, "growth_interval": 7}
    whole = work.run("whole", command(work, "whole", scaler), end_s)
    process = work.start("killed", command(work, "killed", scaler))
    kill_after(process, work.folder / "killed", "checkpoint-20", end_s)
    killed = work.run("killed", command(work, "killed", scaler), end_s)
    logs = [history(run) for run in (whole, killed)]
    weights = [durable.sha256(run / "model.safetensors") for run in (whole, killed)]
    record = durable.read_json(killed / RECORD_NAME)
    figures = {
        "resumes": record["resumes"],
        "skipped_steps": record["skipped_steps"],
        "loss_scales_seen": sorted({entry["loss_scale"] for entry in logs[1]}),
        "log_equal": logs[0] == logs[1],
        "weights_equal": weights[0] == weights[1],
    }
    return figures["log_equal"] and figures["weights_equal"] and figures["resumes"] == 1, figures


def kill_after(process: subprocess.Popen, run: Path, checkpoint: str, end_s: float) -> None:
    """SIGKILL to a run after a checkpoint. Raises `RunError` if it ends before, or at `end_s`."""
    try:
        while not (run / checkpoint).exists() and process.poll() is None and time.monotonic() < end_s:
            time.sleep(0.01)
    finally:
        kill(process)
    if not (run / checkpoint).exists() or (run / RECORD_NAME).exists():
        raise RunError(f"{run.name} had ended, or its time was over, before it could be killed after {checkpoint}")
