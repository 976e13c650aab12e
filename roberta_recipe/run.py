"""What every run does around its training: checks, batch arithmetic, `Trainer` with exact figures, run record.

The paper's batch (section 4.3 and Table 9: 8K sequences) is a property of the recipe, so accumulation is derived.
"""

import logging
import math
import os
import platform
import resource
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import yaml
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from roberta_recipe import durable, estimate
from roberta_recipe.args import ROOT, InputError, RunError
from roberta_recipe.checkpoint import PARTIAL, newest_first

logger = logging.getLogger("recipe")

RECORD_NAME, PRESET_NAME, CURVE_NAME = "run_record.json", "preset.yaml", "loss_curve.png"
HUB_NAME = "hub.json"  # which of the Hub's repositories are this run's
SUMMARY_NAME, BEST_NAME = "summary.json", "best"  # of all runs of a fine-tuning; the folder of a run's best epoch


def set_up_logging() -> None:
    """Our log lines and progress bars on stderr; the libraries' only where something is wrong."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
    logger.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    transformers.utils.logging.set_verbosity_warning()
    datasets.utils.logging.set_verbosity_warning()
    transformers.utils.logging.disable_progress_bar()  # of loading and writing weights, not of training
    # of DeepSpeed's calls, at every one
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
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


def check_output_dir(output_dir: str) -> None:
    """Raise `InputError` where the folder holds something else than a run that can go on, so that nothing is written
    over."""
    if not is_first_process():
        return  # the first may have begun to write
    path = Path(output_dir)
    if path.exists() and not path.is_dir():
        raise InputError(f"output_dir={output_dir} is a file; name a folder")
    if (path / RECORD_NAME).exists():
        raise InputError(
            f"output_dir={output_dir} already holds a finished run; name another folder with --output_dir, or move "
            "this one away"
        )
    # a preset and half a checkpoint are what a run leaves that was stopped before its first checkpoint
    others = (
        [entry for entry in path.iterdir() if entry.name not in (PRESET_NAME, HUB_NAME, PARTIAL)]
        if path.is_dir()
        else []
    )
    if others and not newest_first(path):
        raise InputError(
            f"output_dir={output_dir} already holds files, and no checkpoint to go on from; name another folder with "
            "--output_dir, or move this one away"
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


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is not above `at_most`, which is at least 1."""
    return max(size for size in range(1, at_most + 1) if number % size == 0)


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


def check_precision(args: TrainingArguments) -> None:
    """Raise `InputError` where `accelerate` was told another precision than the preset: `Trainer` would take either.

    `accelerate launch` passes on that of `--mixed_precision`, its launch file or the user's `accelerate config`.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    preset = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    if launched not in ("no", preset):
        raise InputError(
            f"accelerate launch has mixed_precision={launched}, the preset bf16={str(args.bf16).lower()} and "
            f"fp16={str(args.fp16).lower()}; precision belongs to the preset: drop --mixed_precision (or the line in "
            "accelerate's configuration), or set bf16 or fp16"
        )


def check_processes(args: TrainingArguments) -> None:
    """Raise `InputError` where a launcher started several processes and each would train for itself, or where one
    process would train on several GPUs."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != args.world_size:
        raise InputError(
            f"{started} processes were started, and each trains alone, as there is no GPU: add --use_cpu, which joins "
            "them on the CPU"
        )
    if args.n_gpu > 1:  # `Trainer` would split each micro-batch over them with DataParallel
        raise InputError(
            f"one process and {args.n_gpu} GPUs: start one for each with accelerate launch --num_processes "
            f"{args.n_gpu} ..., or show it one with CUDA_VISIBLE_DEVICES=0"
        )


def check_deepspeed(args: TrainingArguments) -> None:
    """Raise `InputError` for a DeepSpeed configuration by flag: it would be filled in before the batch is derived."""
    if args.deepspeed:
        raise InputError(
            f"deepspeed={args.deepspeed}: name a launch file in its place, e.g. accelerate launch --config_file "
            "ds_configs/accelerate/zero2.yaml train_mlm.py ..."
        )


def build_models_whole() -> None:
    """Under ZeRO 3, have `from_pretrained` build whole models: it would leave each process a part, before `Trainer`.

    Whoever edits weights first (a padded vocabulary) would edit nothing. `Trainer` puts the setting back.
    """
    unset_hf_deepspeed_config()


def leave_process_group() -> None:
    """End together: no process closes its connections while another still works."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def deepspeed_settings(args: TrainingArguments) -> dict[str, Any]:
    """DeepSpeed's configuration as its JSON has it, given by `--deepspeed` or by the launcher; empty without it."""
    if args.deepspeed:
        return args.deepspeed if isinstance(args.deepspeed, dict) else durable.read_json(args.deepspeed)
    return args.deepspeed_plugin.deepspeed_config if args.deepspeed_plugin else {}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of a GPU or of the machine."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def fit_micro_batch(
    args: TrainingArguments, model: torch.nn.Module, global_batch_size: int, seq_len: int, mlm_probability: float
) -> None:
    """Halve `per_device_train_batch_size` until forward and backward of full blocks fit into memory beside the
    optimizer, in all processes; accumulation is derived anew. Raises `RunError` where not even one block fits."""
    micro = args.per_device_train_batch_size
    while not _fits(args, model, micro, seq_len, mlm_probability):
        if micro == 1:
            raise RunError(f"not even one block of {seq_len} tokens fits into memory: take a smaller model, or ZeRO")
        micro = largest_divisor(micro, micro // 2)
        logger.info(f"Out of memory: trying per_device_train_batch_size={micro}")
    if args.world_size > 1:
        smallest = torch.tensor(micro, device=args.device)
        torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN)
        micro = int(smallest)
    args.per_device_train_batch_size = micro
    args.gradient_accumulation_steps = accumulation_steps(global_batch_size, micro, args.world_size)


def _fits(args: TrainingArguments, model: torch.nn.Module, micro: int, seq_len: int, mlm_probability: float) -> bool:
    """Whether one micro-batch can be trained on, with Adam's two moments (and DDP's buckets) reserved."""
    device, half = args.device, torch.bfloat16 if args.bf16 else torch.float16
    reserved = (8 + 4 * (args.world_size > 1)) * model.num_parameters()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            model.to(device).train()
            optimizer = torch.empty(reserved, dtype=torch.uint8, device=device)
            input_ids = torch.full((micro, seq_len), 4, device=device)
            labels = torch.where(torch.rand(input_ids.shape, device=device) < mlm_probability, input_ids, -100)
            with torch.autocast(device.type, half, enabled=args.bf16 or args.fp16):
                loss = model(input_ids, labels=labels).loss
            loss.backward()
            del loss, optimizer
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def model_flops_utilisation(flops_per_second: float) -> float | None:
    """Share of one device's peak (`estimate.DEVICES`); None where the peak is not known."""
    if not torch.cuda.is_available():
        return None
    device = estimate.device_named(torch.cuda.get_device_name())
    return flops_per_second / device.peak_flops if device else None


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


def run_record(trainer: Trainer, metrics: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """What is kept of a run: `parts` as given, with where and on what it ran, and what it cost."""
    trainer.count_consumed()  # those behind the last log line
    tokens, history = trainer.state.num_input_tokens_seen, trainer.state.log_history
    rates = [entry["tokens_per_second"] for entry in history if "tokens_per_second" in entry]
    return {
        "metrics": metrics,
        "steps": trainer.state.global_step,
        "tokens_seen": tokens,
        # median over the log; a run too short for a line of it has its mean
        "tokens_per_second": sorted(rates)[len(rates) // 2] if rates else round(tokens / trainer.train_seconds),
        "train_seconds": round(trainer.train_seconds, 1),  # of all starts
        "restarts": trainer.restarts,
        **trainer.record(),
        "peak_memory_bytes": peak_memory_bytes(),
        # under ZeRO 3 a parameter is a part of itself, and `ds_numel` the size of the whole
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters()),
        "loss_at_steps": {
            "train": loss_at_steps(history, "loss"),
            "validation": loss_at_steps(history, "eval_loss"),
        },
        "tokens_at_steps": loss_at_steps(history, "tokens_seen"),
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


def finite(value: Any) -> Any:
    """`value` with null for numbers that JSON cannot write."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_preset(values: dict[str, Any], output_dir: str) -> None:
    """The resolved arguments as `<output_dir>/preset.yaml`, from which `--config` repeats the run."""
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    (Path(output_dir) / PRESET_NAME).write_text(text, encoding="utf-8")


def write_record(record: dict[str, Any], output_dir: str) -> None:
    """`<output_dir>/run_record.json`, whole or not at all."""
    durable.write_json(Path(output_dir) / RECORD_NAME, finite(record))
