"""What every run does around its training: checks, batch arithmetic, `Trainer` with exact figures, run record.

The paper's batch (section 4.3 and Table 9: 8K sequences) is a property of the recipe, so accumulation is derived.
"""

import json
import logging
import math
import os
import platform
import re
import resource
import subprocess
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import yaml
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from roberta_recipe.args import ROOT, InputError

logger = logging.getLogger("recipe")

RECORD_NAME, PRESET_NAME, CURVE_NAME = "run_record.json", "preset.yaml", "loss_curve.png"

# Dense FLOP/s of the tensor cores in bf16 or fp16, from NVIDIA's data sheets; the first name that the device's has.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def set_up_logging() -> None:
    """Our log lines and progress bars on stderr; the libraries' only where something is wrong."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
    logger.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    transformers.utils.logging.set_verbosity_warning()
    datasets.utils.logging.set_verbosity_warning()
    transformers.utils.logging.disable_progress_bar()  # of loading and writing weights, not of training
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator")


def is_first_process() -> bool:
    """Whether this is the process, of those that a launcher started, that writes and speaks."""
    return os.environ.get("RANK", "0") == "0"


def use_all_cores() -> None:
    """Share the cores among this machine's processes where they train on them.

    `accelerate launch` gives a CPU process OMP_NUM_THREADS=1 and leaves the other cores idle; any other value of it is
    somebody's choice and stays.
    """
    if not torch.cuda.is_available() and os.environ.get("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(max(1, cpu_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def check_output_dir(output_dir: str, resuming: bool) -> None:
    """Raise `InputError` where the folder holds another run, so that none is written over."""
    if not is_first_process():
        return  # the first may have begun to write
    path = Path(output_dir)
    if path.is_dir() and (path / RECORD_NAME).exists():
        raise InputError(
            f"output_dir={output_dir} already holds a finished run; name another folder with --output_dir, or move "
            "this one away"
        )
    if path.exists() and not path.is_dir():
        raise InputError(f"output_dir={output_dir} is a file; name a folder")
    # a preset alone is what a run leaves that failed before its first checkpoint
    if path.is_dir() and any(entry.name != PRESET_NAME for entry in path.iterdir()) and not resuming:
        raise InputError(
            f"output_dir={output_dir} already holds files, perhaps of an unfinished run; name another folder with "
            "--output_dir, move this one away, or go on from one of its checkpoints with --resume_from_checkpoint"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output_dir={output_dir} cannot be made: {error.strerror}") from None


def accumulation_steps(global_batch_size: int, per_device: int, processes: int) -> int:
    """Micro-batches that each process takes for one optimizer step of `global_batch_size` sequences."""
    if global_batch_size < 1 or per_device < 1:
        raise InputError(
            f"global_batch_size={global_batch_size} and per_device_train_batch_size={per_device} must be at least 1"
        )
    at_once = per_device * processes
    if global_batch_size % at_once:
        below, above = global_batch_size // at_once * at_once, -(-global_batch_size // at_once) * at_once
        nearest = " or ".join(str(size) for size in (below, above) if size)
        raise InputError(
            f"global_batch_size={global_batch_size} is not divisible by {processes} processes x {per_device} per "
            f"device = {at_once}; the nearest that is: {nearest}, or choose another per_device_train_batch_size"
        )
    return global_batch_size // at_once


def derive_batch(args: TrainingArguments, global_batch_size: int | None) -> int:
    """Set `gradient_accumulation_steps` on `args` and return the global batch size (sequences an optimizer step)."""
    if args.auto_find_batch_size:
        raise InputError(
            "auto_find_batch_size would shrink the global batch unseen; set per_device_train_batch_size instead"
        )
    at_once = args.per_device_train_batch_size * args.world_size
    if global_batch_size is None:
        return at_once * args.gradient_accumulation_steps
    steps = accumulation_steps(global_batch_size, args.per_device_train_batch_size, args.world_size)
    if args.gradient_accumulation_steps not in (1, steps):
        raise InputError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} x {at_once} is not "
            f"global_batch_size={global_batch_size}; leave gradient_accumulation_steps out, it is derived"
        )
    args.gradient_accumulation_steps = steps
    return global_batch_size


class TimeLimit(TrainerCallback):
    """Stops training, with everything that follows it still done, once `minutes` of it have passed.

    The first process's clock decides for all, or some would go on alone.
    """

    def __init__(self, minutes: float):
        self.minutes, self.reached = minutes, False

    def on_train_begin(self, args, state, control, **kwargs):
        self.start_s = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        over = torch.tensor(time.monotonic() - self.start_s > 60 * self.minutes, device=args.device)
        if args.world_size > 1:
            torch.distributed.broadcast(over, src=0)
        if over and state.global_step < state.max_steps:
            self.reached = control.should_training_stop = True
            logger.info(f"max_train_minutes={self.minutes:g} reached at step {state.global_step} of {state.max_steps}")


class RecipeTrainer(Trainer):
    """`Trainer` with an evaluation that is exact, and throughput in the log.

    Stock evaluation averages the means of batches; here eval_loss is the sum of cross-entropies over all predicted
    positions / their number, in nats, so it does not depend on the batch. Batches carry `num_tokens`.
    """

    def __init__(self, *args, flops_per_token: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.flops_per_token = flops_per_token
        self._tokens = self._logged_tokens = 0  # of this process since it was counted; of all at the last log line
        self._logged_s, self._evaluating_s = None, 0.0

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self._logged_s is None:  # the clock starts at the first batch: filling the stream is not throughput
            self._logged_s, self._logged_tokens = time.monotonic(), self.state.num_input_tokens_seen
        self._tokens += inputs.pop("num_tokens")
        return super().training_step(model, inputs, num_items_in_batch)

    def _count_tokens(self) -> None:
        """Add the tokens of all processes since the last call to those seen."""
        tokens = torch.tensor(self._tokens, device=self.args.device)
        self.state.num_input_tokens_seen += int(self.accelerator.reduce(tokens, "sum"))
        self._tokens = 0

    def log(self, logs, start_time=None):
        if "loss" in logs:
            elapsed_s = time.monotonic() - self._logged_s - self._evaluating_s
            self._count_tokens()
            rate = (self.state.num_input_tokens_seen - self._logged_tokens) / elapsed_s
            logs["tokens_per_second"] = round(rate)
            if self.args.bf16 or self.args.fp16:  # the peaks are those of half precision
                utilisation = model_flops_utilisation(rate * self.flops_per_token / self.args.world_size)
                logs |= {"mfu": round(utilisation, 4)} if utilisation else {}
            logs["tokens_seen"] = self.state.num_input_tokens_seen
            self._logged_s, self._evaluating_s = time.monotonic(), 0.0
            self._logged_tokens = self.state.num_input_tokens_seen
        # Trainer would add its "epoch", which on an endless stream is the share of max_steps
        epoch, self.state.epoch = self.state.epoch, None
        super().log(logs, start_time)
        self.state.epoch = epoch

    def _save_checkpoint(self, model, trial):
        self._count_tokens()  # those behind the last log line belong to the checkpoint
        super()._save_checkpoint(model, trial)

    def evaluate(self, *args, **kwargs):
        start_s = time.monotonic()
        metrics = super().evaluate(*args, **kwargs)
        self._evaluating_s += time.monotonic() - start_s
        return metrics

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        # not the DDP wrapper: its forward waits for processes that may have one batch less
        model = self.model_wrapped if self.is_deepspeed_enabled else self.model
        model.eval()
        sums = torch.zeros(
            3, dtype=torch.float64, device=self.args.device
        )  # cross-entropy, predicted positions, blocks
        for inputs in dataloader:
            inputs.pop("num_tokens")
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                sums[0] += model(**inputs, num_items_in_batch=1).loss.double()
            sums[1] += (inputs["labels"] != -100).sum()
            sums[2] += len(inputs["labels"])
        total, predicted, examples = self.accelerator.reduce(sums, "sum").tolist()
        loss = total / predicted  # `main` has seen that something is predicted
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits": loss / math.log(2)}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=int(examples))


def model_flops_utilisation(flops_per_second: float) -> float | None:
    """Share of one device's peak (`PEAK_FLOPS`); None where the peak is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    peaks = (peak for key, peak in PEAK_FLOPS.items() if re.search(rf"\b{key}\b", name))
    return next((flops_per_second / peak for peak in peaks), None)


def peak_memory_bytes() -> int:
    """Most memory taken so far: of the GPU where there is one, else resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def loss_at_steps(log_history: list[dict[str, Any]], key: str, at_most: int = 200) -> list[list[float]]:
    """[step, value] pairs of a logged value, evenly thinned to `at_most`, the last always kept."""
    points = [[entry["step"], entry[key]] for entry in log_history if key in entry]
    stride = -(-len(points) // at_most) or 1
    return points[stride - 1 :: stride] if len(points) % stride == 0 else [*points[stride - 1 :: stride], points[-1]]


def run_record(trainer: RecipeTrainer, metrics: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """What is kept of a run: `parts` as given, with where and on what it ran, and what it cost."""
    trainer._count_tokens()  # those behind the last log line
    tokens, history = trainer.state.num_input_tokens_seen, trainer.state.log_history
    summary = next(entry for entry in reversed(history) if "train_runtime" in entry)
    rates = [entry["tokens_per_second"] for entry in history if "tokens_per_second" in entry]
    return {
        "metrics": metrics,
        "steps": trainer.state.global_step,
        "tokens_seen": tokens,
        # median over the log; a run too short for a line of it has its mean
        "tokens_per_second": sorted(rates)[len(rates) // 2] if rates else round(tokens / summary["train_runtime"]),
        "train_seconds": summary["train_runtime"],
        "peak_memory_bytes": peak_memory_bytes(),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "loss_at_steps": {
            "train": loss_at_steps(history, "loss"),
            "validation": loss_at_steps(history, "eval_loss"),
        },
        **parts,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "datasets", "tokenizers", "accelerate")},
        },
        "commit": git_commit(),
        "hardware": hardware(),
    }


def git_commit() -> str | None:
    """The repository's commit, with "-dirty" where files differ from it; None outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> dict[str, Any]:
    """Processor, cores that this process may use, GPUs."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"machine": platform.machine(), "system": platform.system(), "cpu_cores": cpu_cores(), "gpus": gpus}


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_resume(checkpoint: str, max_steps: int, output_dir: str) -> None:
    """Raise `InputError` where `checkpoint` is none of `Trainer`'s, or has done all its steps."""
    state = Path(checkpoint) / "trainer_state.json"
    if not state.is_file():
        there = sorted(str(path) for path in Path(output_dir).glob("checkpoint-*"))
        raise InputError(
            f"resume_from_checkpoint={checkpoint} is no checkpoint folder (it has no trainer_state.json); "
            f"{output_dir} has {', '.join(there) or 'none'}"
        )
    done = json.loads(state.read_text())["global_step"]
    if done >= max_steps:
        raise InputError(
            f"resume_from_checkpoint={checkpoint} has done {done} steps of max_steps={max_steps}; raise max_steps"
        )


def _finite(value: Any) -> Any:
    """`value` with null for numbers that JSON cannot write."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_preset(values: dict[str, Any], output_dir: str) -> None:
    """The resolved arguments as `<output_dir>/preset.yaml`, from which `--config` repeats the run."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    (Path(output_dir) / PRESET_NAME).write_text(text, encoding="utf-8")


def write_record(record: dict[str, Any], output_dir: str) -> None:
    """`<output_dir>/run_record.json`, whole or not at all."""
    path = Path(output_dir) / RECORD_NAME
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(_finite(record), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    aside.replace(path)
