"""fp16 on a GPU: overflow of the loss scale, SIGKILL and resuming, bit for bit.

They train a small model (presets/mlm/roberta_tiny.yaml) on the text that is packed already, as what they
show does not depend on its size.
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
# no warm-up, so that the rate says how many steps were taken: it is RATE x (1 - taken / all)
FLAGS = f"""--fp16 true --learning_rate {RATE} --warmup_steps 0 --lr_scheduler_type linear --logging_steps 1
--eval_strategy no --max_eval_samples 64 --save_strategy steps --save_steps 5 --save_total_limit 100
--disable_tqdm true --full_determinism true --report_to none""".split()
TOO_HIGH = 2.0**40  # a loss scale at which gradients overflow in half precision
COMPARED = ("step", "loss", "grad_norm", "learning_rate", "skipped_steps", "loss_scale", "digest")


def command(work: Work, name: str, scaler: dict[str, float]) -> list[str]:
    """The command that trains in fp16 into `<folder>/<name>`, with the first loss scale and its growth as in
    `scaler`."""
    inside = ["benchmarks/gpu/inside.py", json.dumps(scaler), *FLAGS, "--max_steps", str(STEPS)]
    shape = ["--config_overrides", f"vocab_size={work.vocab_size},max_position_embeddings=130"]
    return [*inside, *work.text, *shape, "--output_dir", str(work.folder / name)]


def history(run: Path) -> list[dict[str, Any]]:
    """The log lines of a finished run that have a loss."""
    log = durable.read_json(newest_first(run)[0] / "trainer_state.json")["log_history"]
    return [{key: entry.get(key) for key in COMPARED} for entry in log if "loss" in entry]


def promises(run: Path, steps: int, first_scale: float) -> Outcome:
    """What every fp16 run must show: the loss falls; as many steps are skipped as the loss scale was halved (it grows
    after 2,000 steps); the rate stays at a skipped step and falls at every other."""
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
    """Whether the weights of two checkpoints differ in a bit."""
    files = [run / f"checkpoint-{step}" / "model.safetensors" for step in (first, second)]
    return durable.sha256(files[0]) != durable.sha256(files[1])


def overflow(work: Work, end_s: float) -> Outcome:
    """A loss scale of 2^40: gradients overflow, weights stay, the scale is halved until it fits."""
    run = work.run("overflow", command(work, "overflow", {"init_scale": TOO_HIGH}), end_s)
    passed, figures = promises(run, STEPS, TOO_HIGH)
    early, late = weights_changed(run, 5, 10), weights_changed(run, STEPS - 5, STEPS)
    figures |= {"weights_changed_while_skipped": early, "weights_changed_at_the_end": late}
    return passed and figures["skipped_steps"] >= 10 and not early and late, figures


def resume(work: Work, end_s: float) -> Outcome:
    """Killed with SIGKILL and started again, a run is the same run, bit for bit, with its loss scale and its growth."""
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
    """SIGKILL to a run once it has written a checkpoint. Raises `RunError` where it ended before, or at `end_s`."""
    try:
        while not (run / checkpoint).exists() and process.poll() is None and time.monotonic() < end_s:
            time.sleep(0.01)
    finally:
        kill(process)
    if not (run / checkpoint).exists() or (run / RECORD_NAME).exists():
        raise RunError(f"{run.name} had ended, or its time was over, before it could be killed after {checkpoint}")
