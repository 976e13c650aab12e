"""Parts of `make gpu` after `install`: machine, profile, training with fp16 tests in parallel, evaluation; experiment
list; fine-tuning."""

import contextlib
import re
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from safetensors.torch import load_file, save

from benchmarks.gpu import half
from benchmarks.gpu.runs import PAIRS, SAVED_S, Outcome, Work, kill
from roberta_recipe import durable, hardware
from roberta_recipe.errors import RunError
from roberta_recipe.input_files import ROOT
from roberta_recipe.record import git_commit, versions
from roberta_recipe.settings import load_yaml

PRESET = "presets/mlm/roberta_h100.yaml"
# time limits in seconds; training gets the rest
SECONDS = {"profile": 90.0, "evaluate": 30.0}
START_S, END_S = 20.0, 12.0  # of training: before its first step, after its last
COPY_BYTES = 2**31
PART_BYTES = 15_000_000  # of the weights, as output files are limited to 16 MiB
FILES = 5  # files of weights of a list, of eight output files
TINY = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64"
TINY_TRAINING = """--max_steps 6 --warmup_steps 2 --global_batch_size 8 --per_device_train_batch_size 8
--logging_steps 1 --per_device_eval_batch_size 4 --max_eval_samples 16 --eval_steps 3 --save_steps 3
--dataloader_num_workers 1 --use_cpu true"""
# Ten parallel processes on an H200 took 64 ms per step each, for 390 to 2,350 tokens, and 1.5 s per evaluation with
# checkpoint
TUNED = {  # name of the results -> (preset, flags)
    "cola": ("glue/cola", "--num_train_epochs 3 --global_batch_size 64 --per_device_train_batch_size 64"),
    "mrpc": ("glue/mrpc", "--num_train_epochs 5 --global_batch_size 32 --per_device_train_batch_size 32"),
    "sst2_1000": (
        "glue/sst2",
        "--num_train_epochs 10 --global_batch_size 32 --per_device_train_batch_size 32 --max_train_samples 1000",
    ),
    "squad": (
        "squad/v1.1",
        "--learning_rate 3e-4 --global_batch_size 128 --per_device_train_batch_size 128 --doc_stride 64 "
        "--max_query_length 48 --save_strategy no",
    ),
}
TUNING = "--max_seq_length 128 --learning_rate 1e-4 --warmup_steps 0.06 --keep none --disable_tqdm true"
TINY_TUNING = """--use_cpu true --seeds 1 2 --num_train_epochs 1 --max_train_samples 16
--global_batch_size 8 --per_device_train_batch_size 8"""


def measure_machine(work: Work) -> Outcome:
    """Versions, GPU, open-file limit, shared memory; rates of copies and of matrix products."""
    check_trainer()
    work.results |= {"versions": versions(), "commit": git_commit(), "machine": hardware.describe_machine()}
    figures: dict[str, Any] = {
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "shared_memory_gb": round(shutil.disk_usage("/dev/shm").total / 1e9, 2),
        "matrix_rate": hardware.matrix_rate(torch.device("cpu" if work.tiny else "cuda"), torch.bfloat16),
    }
    if not work.tiny:
        free, total = torch.cuda.mem_get_info()
        figures |= {"copy_bytes_per_second": copy_rate(), "memory_bytes": total, "free_memory_bytes": free}
        torch.cuda.empty_cache()
    return True, figures


def check_trainer() -> None:
    """Raise `RunError` unless transformers has the pinned version, as our trainers depend on private methods."""
    pinned = re.search(r"^transformers==(\S+)", (ROOT / "requirements.txt").read_text(), re.M)[1]
    if transformers.__version__ != pinned:
        wanted = f"transformers {transformers.__version__} is installed, and requirements.txt pins {pinned}"
        raise RunError(f"{wanted}: carry the wheels that --dry_run lists")


def copy_rate() -> float:
    """Memory bandwidth of a copy on the GPU: bytes read and written per second."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target, seconds = torch.empty_like(source), []
    for _ in range(5):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start_s)
    return 2 * COPY_BYTES / min(seconds)


def profiled(work: Work) -> Outcome:
    """RoBERTa-base at 512 tokens, by variant (`benchmarks.gpu.profile`); packs the text in parallel."""
    start_s, output = time.monotonic(), work.folder / "profile.json"
    cores = max(1, hardware.cpu_cores() - 4)  # some are left for the profile
    tool = ["tools/pack.py", "--config", PRESET]
    flags = ["--tokenizer", str(work.tokenizer), "--output", str(output), *["--tiny"] * work.tiny]
    flags += ["--matrix_rate", str(work.results["parts"]["machine"]["figures"]["matrix_rate"])]
    packing = work.start("pack", [*tool, *work.text, "--num_proc", str(cores)])
    error = ""
    try:
        work.run(
            "profile", ["-m", "benchmarks.gpu.profile", *flags], start_s + (3 if work.tiny else 1) * SECONDS["profile"]
        )
    except RunError as failed:  # earlier variants are in `output`
        error = failed.args[0]
    work.wait("pack", packing, work.end_s)
    found = durable.read_json(output) if output.exists() else {}
    return not error and not any("error" in of for of in found.values()), {**found, "error": error}


def train(work: Work) -> Outcome:
    """Train `roberta_h100`, stopped halfway if on the unigram plateau; fp16 tests (`half`) in parallel."""
    end_s = work.end_s - SECONDS["evaluate"]
    profile = work.results["parts"]["profile"]["figures"]
    compiled = "error" not in profile.get("same_losses", {"error": "not measured"})
    minutes = (end_s - time.monotonic() - START_S - END_S) / 60
    halfway_s = time.monotonic() + START_S + 30 * minutes
    flags = ["--config", PRESET, *work.text, "--output_dir", str(work.model), "--torch_compile", str(compiled).lower()]
    flags += ["--max_train_minutes", f"{minutes:.3f}", "--disable_tqdm", "true", "--report_to", "none"]
    if work.tiny:
        flags += ["--config_overrides", f"{TINY},vocab_size={work.vocab_size}", *TINY_TRAINING.split()]
    process = work.start(work.model.name, ["train_mlm.py", *flags])
    with ThreadPoolExecutor(1) as beside:
        done = beside.submit(half_precision, work, end_s)
        try:
            for _ in work.save_while(process, SAVED_S):
                if time.monotonic() > halfway_s and on_plateau(work):
                    raise RunError("stopped halfway: the validation loss is above the unigram entropy")
            work.wait(work.model.name, process, work.end_s - 10)
        finally:
            kill(process)
            work.results["half"] = done.result()
    record = durable.read_json(work.model / "run_record.json")
    names = ("steps", "tokens_seen", "tokens_per_second", "train_seconds", "stopped_by", "parameters", "passes")
    figures = {name: record[name] for name in (*names, "peak_memory_bytes", "unigram_entropy", "metrics")}
    figures |= {"compiled": compiled, "losses": record["loss_at_steps"]["validation"]}
    figures["loss_by_source"] = {name: of["loss"] for name, of in record["metrics_by_source"].items()}
    return work.tiny or record["metrics"]["eval_loss"] < record["unigram_entropy"], figures


def on_plateau(work: Work) -> bool:
    """Whether the latest validation loss in the training log is above the unigram entropy."""
    log = work.log(work.model.name).read_text()
    losses = re.findall(r"validation  loss ([\d.]+)", log)
    return bool(losses) and float(losses[-1]) > float(re.search(r"unigram entropy ([\d.]+)", log)[1])


def half_precision(work: Work, end_s: float) -> dict[str, Any]:
    """Results of the fp16 tests, "not run" on a CPU."""
    found = {}
    for name, function in {"overflow": half.overflow, "resume": half.resume}.items():
        try:
            passed, figures = function(work, end_s) if not work.tiny else (None, {"why": "fp16 needs a GPU"})
            found[name] = {"result": {True: "passed", False: "FAILED", None: "not run"}[passed], "figures": figures}
        except Exception as error:  # the other test and training go on
            found[name] = {"result": "FAILED", "why": f"{type(error).__name__}: {error}"}
    return found


def evaluate(work: Work) -> Outcome:
    """BLiMP of the model and of random weights; exports the weights."""
    flags = ["--model_name_or_path", str(work.model), "--data_dir", str(work.folder / "tasks" / "blimp")]
    process = work.start("blimp", ["tools/blimp.py", *flags, "--pairs", str(2 if work.tiny else PAIRS), "--bf16"])
    export(work.model, work.output, "model")
    work.wait("blimp", process, work.end_s)
    record = durable.read_json(work.model / "blimp.json")
    figures = {name: of["mean_of_paradigms"] for name, of in record["scores"].items()}
    random = {f"random_{name}": of["mean_of_paradigms"] for name, of in record["random_weights"][0].items()}
    return True, {**figures, **random, "pairs": record["pairs"], "seconds": record["wall_clock_s"]}


def export(model: Path, output: Path, name: str) -> None:
    """Write the weights in bf16 as parts of `<name>.safetensors`, to be joined by `cat`."""
    weights = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    content = save(weights, metadata={"format": "pt"})
    for number, start in enumerate(range(0, len(content), PART_BYTES)):
        (output / f"{name}.safetensors.{number}").write_bytes(content[start : start + PART_BYTES])


def run_list(work: Work) -> Outcome:
    """Rows of an experiment list in parallel, until the time limit; then the table, and weights of the first seed."""
    listed, folder, text = load_yaml(work.listed), work.folder / "list", named(work.text)
    listed["output_dir"] = str(folder)
    listed["flags"] = {**listed.get("flags", {}), **text, "disable_tqdm": True}
    own = {"words": {"corpus": text["corpus"]}, "blimp": {"data_dir": str(work.folder / "tasks" / "blimp")}}
    measures = listed.get("measures", {}).items()
    listed["measures"] = {name: {**(flags or {}), **own.get(name, {})} for name, flags in measures}
    if work.tiny:
        listed["flags"] |= {"config_overrides": f"{TINY},vocab_size={work.vocab_size}", **named(TINY_TRAINING.split())}
    (work.folder / "list.yaml").write_text(yaml.safe_dump(listed))
    work.run("pack", ["tools/pack.py", "--config", listed["config"], *work.text], work.end_s)
    runner = ["experiments/run.py", str(work.folder / "list.yaml")]
    jobs = min(len(listed["rows"]) * len(listed["seeds"]), hardware.cpu_cores())
    with side_by_side():
        process = work.start("list", [*runner, "--jobs", str(jobs)])
        for _ in work.save_while(process, END_S + SAVED_S):
            pass
        ended = process.poll() == 0
        kill(process)
    runs = {row["name"]: folder / row["name"] / f"seed-{listed['seeds'][0]}" / "run" for row in listed["rows"]}
    done = [name for name, run in runs.items() if (run / "run_record.json").exists()]
    for name in done[:FILES]:
        export(runs[name], work.output, name)
    work.run("table", [*runner, "--table"], work.end_s)  # last, as it may take longer than what is left
    return ended, {"table": work.log("table").read_text(), "exported": done[:FILES], "jobs": jobs}


def named(words: list[str]) -> dict[str, str]:
    """A command line "--flag value ..." as a dict."""
    return {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}


@contextlib.contextmanager
def side_by_side() -> Iterator[None]:
    """Context with NVIDIA's multi-process service (MPS), if it is installed: kernels of several processes overlap."""
    if service := shutil.which("nvidia-cuda-mps-control"):
        subprocess.run([service, "-d"], check=False)
    try:
        yield
    finally:
        if service:
            subprocess.run([service], input="quit -t 5", text=True, check=False)


def fine_tune(work: Work) -> Outcome:
    """Fine-tune on each task of `TUNED`, from the model and from random weights, in parallel, until the time limit."""
    processes = {}
    for name, (preset, own) in TUNED.items():
        kind = preset.partition("/")[0]
        for twin, random in ((name, "false"), (f"{name}_random", "true")):
            flags = ["--config", f"presets/{preset}.yaml", "--model_name_or_path", str(work.model), *TUNING.split()]
            flags += [*own.split(), "--random_weights", random, "--data_dir", str(work.folder / "tasks" / kind)]
            flags += ["--output_dir", str(work.folder / "tuned" / twin), *(TINY_TUNING.split() if work.tiny else [])]
            flags += ["--other_rows", "true"] if work.tiny and kind == "glue" else []
            processes[twin] = work.start(f"tuned_{twin}", [f"finetune_{kind}.py", *flags], OMP_NUM_THREADS="1")
    ended, figures = True, {}
    for twin, process in processes.items():
        try:
            work.wait(f"tuned_{twin}", process, work.end_s - 5)
        except RunError as error:  # finished seeds count
            ended = False
            work.results.setdefault("not_ended", {})[twin] = [str(line) for line in error.args]
        figures[twin] = seeds_of(work, twin)
    return ended, figures


def seeds_of(work: Work, name: str) -> dict[str, Any]:
    """Median and scores (the task's metric) of the finished seeds."""
    scores = {}
    for path in sorted((work.folder / "tuned" / name).glob("*/run_record.json")):
        record = durable.read_json(path)
        scores[path.parent.name.rpartition("seed")[2]] = record["metrics"][record["metric"]]
    return {"median": statistics.median(scores.values()) if scores else None, "seeds": scores}


PRETRAINING = {"machine": measure_machine, "profile": profiled, "train": train, "evaluate": evaluate}
LIST = {"machine": measure_machine, "list": run_list}
FINE_TUNING = {"fine_tune": fine_tune}
