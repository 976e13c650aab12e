"""The steps of `make gpu`, the most valuable first, and what each of them shows."""

import functools
import json
import math
import random
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import RobertaConfig

from benchmarks.gpu import half
from benchmarks.gpu.machine import ROOT, cannot_import
from benchmarks.gpu.runs import Outcome, Runs, Sizes, log_of, record_of
from roberta_recipe import durable
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.record import SUMMARY_NAME, picked_setting
from roberta_recipe.tools.estimate import GIB, Zero, memory_per_gpu
from roberta_recipe.training.modeling import flops_per_token

TARGET = 0.6  # utilisation: share of the measured rate of matrix products
MASKED = 0.15  # share of the positions that the presets predict
CURVE_RATE = 2e-4  # of base with a batch of 256 and so few steps: ours, between Table 3's 1e-4 and Table 9's 6e-4
ROOM = 0.6  # of the GPU's memory, for what the estimate counts: it leaves out masks of attention and fragmentation
PLAIN = Zero()  # no DeepSpeed
SAME_LOSS = 0.01  # relative difference of mean losses up to which two ways of computing them agree


def step_prepare(runs: Runs) -> Outcome:
    """a tokenizer of the installed Python's docstrings, configs of base and large, a made-up task"""
    sizes, folder = runs.sizes, runs.folder
    if sizes.device:
        pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
        (folder / "train.txt").write_text("\n\n".join(pages[1:]), encoding="utf-8")
        (folder / "validation.txt").write_text(pages[0], encoding="utf-8")
    for shape in ("base", "large"):
        config = durable.read_json(ROOT / "presets" / "model" / f"{shape}.json")
        config |= {"vocab_size": sizes.vocab_size, **sizes.shape}
        durable.write_json(folder / f"{shape}.json", config)
        without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        durable.write_json(folder / f"{shape}_without_dropout.json", config | without)
    write_task(folder / "made_up", *sizes.rows)
    if not runs.makes_tokenizer:
        return True, {"tokenizer": "--tokenizer_name"}
    entries = ["--vocab_size", str(sizes.entries), "--output_dir", runs.tokenizer]
    runs.run("tokenizer", ["tokenizer/train_tokenizer.py", *runs.text, *entries])
    return True, {"tokenizer": f"{sizes.entries} entries of the text that is trained on"}


def write_task(folder: Path, train: int, validation: int) -> None:
    """A made-up task in RTE's official layout: whether a sentence is one of the three before it."""
    rng = random.Random(0)
    names = ("Anna", "Ben", "Carla", "David", "Elena", "Felix")
    things = ("book", "coat", "key", "letter", "map", "ring")
    places = ("attic", "barn", "car", "drawer", "garden", "hall", "kitchen", "office")
    (folder / "RTE").mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("dev", validation)):
        lines = ["index\tsentence1\tsentence2\tlabel"]
        for number in range(count):
            facts = [(name, rng.choice(things), rng.choice(places)) for name in rng.sample(names, 3)]
            name, thing, place = rng.choice(facts)
            entailed = number % 2 == 0
            if not entailed:
                place = rng.choice([other for other in places if other != place])
            premise = " ".join(f"{who} keeps the {what} in the {where}." for who, what, where in facts)
            hypothesis = f"The {thing} of {name} is in the {place}."
            lines.append(f"{number}\t{premise}\t{hypothesis}\t{'entailment' if entailed else 'not_entailment'}")
        (folder / "RTE" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def config_of(runs: Runs, shape: str) -> RobertaConfig:
    """The config of a shape as `step_prepare` has written it. Raises `RunError` where it has not."""
    path = runs.folder / f"{shape}.json"
    if not path.exists():
        raise RunError("prepare has not run")
    return RobertaConfig.from_json_file(str(path))


def device_bytes() -> int | None:
    """Memory of the GPU; None on a CPU."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def estimated(config: RobertaConfig, sizes: Sizes, micro_batch: int, zero: Zero = PLAIN) -> int:
    """Bytes that the estimate expects at the peak, in bf16."""
    length = {"seq_len": sizes.max_seq_length, "mlm_probability": MASKED}
    return memory_per_gpu(config, micro_batch=micro_batch, precision="bf16", zero=zero, **length).total


def micro_batch(config: RobertaConfig, sizes: Sizes, batch: int) -> int:
    """Sequences of a micro-batch to begin with: the largest power of two that takes `ROOM` of the GPU by the estimate,
    up to `most_per_device` and `batch`."""
    size, room = 1, device_bytes()
    while 2 * size <= min(sizes.most_per_device, batch):
        if room and estimated(config, sizes, 2 * size) > ROOM * room:
            break
        size *= 2
    return size


def figures_of(runs: Runs, run: Path, config: RobertaConfig, zero: Zero = PLAIN) -> dict[str, Any]:
    """Throughput, utilisation and memory of a finished run, the estimate's beside it."""
    record, log = record_of(run), log_of(run)
    # the micro-batch as it was found: `--auto_find_batch_size` may have lowered the preset's
    micro = int(re.search(r"Batch .* processes x (\d+) x", runs.log(run.name).read_text())[1])
    flops = flops_per_token(config, runs.sizes.max_seq_length, MASKED)
    utilisation = record["tokens_per_second"] * flops / record["matrix_rate"]
    expected, peak = estimated(config, runs.sizes, micro, zero), record["peak_memory_bytes"]
    return {
        "steps": record["steps"],
        "stopped_by": record["stopped_by"],
        "micro_batch": micro,
        "tokens_per_second": record["tokens_per_second"],
        "matrix_tflops": round(record["matrix_rate"] / 1e12, 3),
        "utilisation": round(utilisation, 4),
        "peak_gib": round(peak / GIB, 3),
        "estimate_gib": round(expected / GIB, 3),
        # resident memory of a CPU process has Python and its libraries in it
        "estimate_over_peak": round(expected / peak, 4) if record["hardware"]["gpus"] else None,
        "first_loss": log[0]["loss"],
        "last_loss": log[-1]["loss"],
        "validation_loss": record["metrics"]["eval_loss"],
        "unigram_entropy": round(record["unigram_entropy"], 4),
    }


def limited(runs: Runs) -> list[str]:
    """Flags with which a run that is slow ends in time, with its record."""
    return ["--max_train_minutes", f"{max(runs.left_s - runs.sizes.reserved_s, runs.left_s / 3) / 60:.3f}"]


def step_speed(runs: Runs, shape: str, variant: str = "") -> Outcome:
    """throughput, utilisation and memory in bf16 at the paper's length and batch"""
    sizes, config = runs.sizes, config_of(runs, shape)
    name = f"gpu_{shape}_{variant}" if variant else f"gpu_{shape}"
    flags = ["--config", f"presets/mlm/roberta_{shape}.yaml", "--config_name", str(runs.folder / f"{shape}.json")]
    flags += ["--global_batch_size", str(sizes.batch), "--max_steps", str(sizes.steps[shape])]
    flags += ["--per_device_train_batch_size", str(micro_batch(config, sizes, sizes.batch))]
    flags += ["--auto_find_batch_size", "true", "--eval_strategy", "no", "--warmup_steps", "0.5", *limited(runs)]
    flags += {
        "": [],
        "compiled": ["--torch_compile", "true"],
        # no block is padded, so that attention needs no mask and has a faster kernel
        "contiguous": ["--input_format", "contiguous", "--token_cache", str(runs.folder / "tokens_contiguous")],
    }[variant]
    run = runs.pretrain(name, flags)
    figures = figures_of(runs, run, config)
    figures |= {"target": TARGET, "target_reached": figures["utilisation"] >= TARGET}
    # the first step warms up; the median of two or more is of another
    return figures["steps"] >= 2 and math.isfinite(figures["last_loss"]), figures


def curve_flags(runs: Runs, steps: int, batch: int, config: str = "base") -> list[str]:
    """Flags of base on small batches: constant rate after the curve's warm-up, so that shorter runs are its begin."""
    flags = ["--config", "presets/mlm/roberta_base.yaml", "--config_name", str(runs.folder / f"{config}.json")]
    size = min(64, micro_batch(config_of(runs, "base"), runs.sizes, batch))
    flags += ["--global_batch_size", str(batch), "--per_device_train_batch_size", str(size)]
    flags += ["--learning_rate", str(CURVE_RATE), "--lr_scheduler_type", "constant_with_warmup"]
    return [*flags, "--max_steps", str(steps), "--warmup_steps", str(runs.sizes.curve[2])]


def step_curve(runs: Runs) -> Outcome:
    """the loss curve of base in bf16, a few hundred steps, with held-out text: the checkpoint that is fine-tuned"""
    steps, batch, _ = runs.sizes.curve
    evaluated = ["--eval_strategy", "steps", "--eval_steps", str(steps // 4)]
    run = runs.pretrain("gpu_curve", [*curve_flags(runs, steps, batch), *evaluated, *limited(runs)])
    figures = figures_of(runs, run, config_of(runs, "base"))
    figures["validation_losses"] = record_of(run)["loss_at_steps"]["validation"]
    return figures["validation_loss"] < figures["first_loss"], figures


def step_precision(runs: Runs) -> Outcome:
    """the curve of bf16 beside that of fp32, base without dropout: the same loss within 1%"""
    steps, batch = runs.sizes.compared
    losses, figures = {}, {}
    for precision, flag in (("bf16", "true"), ("fp32", "false")):
        flags = [*curve_flags(runs, steps, batch, "base_without_dropout"), "--bf16", flag, "--eval_strategy", "no"]
        run = runs.pretrain(f"gpu_{precision}", flags)
        losses[precision] = [entry["loss"] for entry in log_of(run)]
        figures |= {f"{precision}_tokens_per_second": record_of(run)["tokens_per_second"]}
    return agreement(losses["bf16"], losses["fp32"], figures)


def agreement(ours: list[float], others: list[float], figures: dict[str, Any]) -> Outcome:
    """Whether two curves agree: the mean of their last quarter, and as a figure the largest difference at a step."""
    quarter = max(1, len(others) // 4)
    means = [statistics.fmean(losses[-quarter:]) for losses in (ours, others)]
    largest = max(abs(a / b - 1) for a, b in zip(ours, others, strict=True))
    figures |= {"last_losses": means, "relative": abs(means[0] / means[1] - 1), "largest_relative": largest}
    return figures["relative"] <= SAME_LOSS, figures


def step_zero(runs: Runs, stage: int) -> Outcome:
    """base in bf16 under ZeRO beside the curve's first steps: the same loss within 1%; memory"""
    file = ROOT / "ds_configs" / f"zero{stage}.json"
    config, steps, launcher = config_of(runs, "base"), runs.sizes.zero_steps, half.with_zero(stage, file)
    flags = [*curve_flags(runs, steps, runs.sizes.curve[1]), "--eval_strategy", "no"]
    run = runs.pretrain(f"gpu_zero{stage}", flags, launcher)
    zero = Zero.from_deepspeed(durable.read_json(file), config.hidden_size)
    figures = figures_of(runs, run, config, zero)
    losses, curve = [entry["loss"] for entry in log_of(run)], runs.folder / "gpu_curve"
    if not (curve / "run_record.json").exists():
        raise RunError("there is no curve to compare it with: run the step curve first")
    plain = [entry["loss"] for entry in log_of(curve)][:steps]
    return agreement(losses, plain, figures)


def step_tune(runs: Runs) -> Outcome:
    """five seeds of RTE: the official files of --data_dir, else a made-up task in their layout"""
    if why := cannot_import("finetune_glue"):
        raise InputError(why)
    model = runs.model or str(runs.folder / "gpu_curve")
    if not runs.model and not (runs.folder / "gpu_curve" / "run_record.json").exists():
        raise InputError("no checkpoint: run the step curve first, or name one with --model_name_or_path")
    name = "gpu_rte" if runs.data_dir else "gpu_made_up_task"
    data = ["--data_dir", runs.data_dir or str(runs.folder / "made_up")]
    if not runs.data_dir:
        data += ["--other_rows", "true", *runs.sizes.tuning]
    flags = ["--config", "presets/glue/rte.yaml", "--model_name_or_path", model, *data, *runs.sizes.device]
    folder = runs.folder / name
    try:
        runs.run(name, ["finetune_glue.py", *flags, "--output_dir", str(folder)], again=True)
    except RunError as error:
        raise RunError(f"{error}; {len(seeds_of(folder))} seeds have ended, and another start keeps them") from None
    summary = durable.read_json(folder / SUMMARY_NAME)
    scores = picked_setting(summary)
    figures = {
        "data": "RTE" if runs.data_dir else "made up in RTE's layout: no result for the ledger's RTE",
        "model": "--model_name_or_path" if runs.model else "gpu_curve",
        **{key: scores[key] for key in ("median", "lowest", "highest", "seeds", "degenerate_seeds")},
        "majority_answer": (summary["baseline"] or {"metrics": {}})["metrics"].get("accuracy"),
        "peak_gib": [round(record_of(path.parent)["peak_memory_bytes"] / GIB, 3) for path in seeds_of(folder)],
    }
    return len(scores["seeds"]) == 5, figures


def seeds_of(folder: Path) -> list[Path]:
    """The run records of the seeds that have ended."""
    return sorted(folder.glob("*/run_record.json"))


class Step(NamedTuple):
    """A step: what it does, at most how long, and the folders of its runs that are worth a line of the ledger."""

    run: Callable[[Runs], Outcome]
    limit_s: float
    records: tuple[str, ...] = ()


# The most valuable first, so that a machine that is taken away early leaves something.
STEPS: dict[str, Step] = {
    "prepare": Step(step_prepare, 150),
    "base": Step(functools.partial(step_speed, shape="base"), 270, ("gpu_base",)),
    "curve": Step(step_curve, 300, ("gpu_curve",)),
    "fp16": Step(half.step_fp16, 120),
    "overflow": Step(half.step_overflow, 120),
    "large": Step(functools.partial(step_speed, shape="large"), 330, ("gpu_large",)),
    "precision": Step(step_precision, 210),
    "tune": Step(step_tune, 600, ("gpu_rte",)),
    **{f"zero{n}": Step(functools.partial(step_zero, stage=n), 120) for n in (1, 2, 3)},
    **{f"zero{n}_fp16": Step(functools.partial(half.step_zero, stage=n), 90) for n in (1, 2, 3)},
    "resume": Step(half.step_resume, 150),
    "ddp": Step(half.step_ddp, 90),
    "contiguous": Step(functools.partial(step_speed, shape="base", variant="contiguous"), 270),
    "compiled": Step(functools.partial(step_speed, shape="base", variant="compiled"), 300),
}


def described(step: Step) -> str:
    """What a step does, of its function's first line."""
    function = step.run.func if isinstance(step.run, functools.partial) else step.run
    given = json.dumps(step.run.keywords)[1:-1].replace('"', "") if isinstance(step.run, functools.partial) else ""
    return (function.__doc__ or "").strip() + (f" ({given})" if given else "")
