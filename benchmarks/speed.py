"""Every speed comparison: this recipe beside the stock Hugging Face path, and beside another commit of this recipe.

    python benchmarks/speed.py --output runs/bench.json [--of step-mini-fp32 ...] [--before DIR] [--data_dir glue/RTE]

Each measurement is a process of its own, and the ways alternate, so that all of them meet the same load. Prints the
median of each, its lowest and highest, and the ratio to the stock path; the JSON has every value. `--before` names a
checkout of another commit. Rates are of wall-clock time; with `--clock process`, of the processor time of all threads,
for a machine that is shared. The stock path is `RobertaForMaskedLM`, `DataCollatorForLanguageModeling`, `Trainer` and
chunks of fixed size (`group_texts`), as transformers' run_mlm.py has them, and padding to 128 tokens, as run_glue.py.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {  # config, sequences, tokens of each
    "mini": ("presets/model/mini.json", 32, 128),
    "small": ("presets/model/small.json", 8, 512),
}
MASKED = 0.15
RUN_STEPS = 300
RTE_STEPS = 12
RTE_BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="+", choices=COMPARISONS, help="these comparisons only")
    parser.add_argument("--repeats", type=int, default=5, help="of every measurement")
    parser.add_argument("--before", help="a checkout of another commit, measured too")
    parser.add_argument("--data_dir", help="folder of RTE's official files, for the comparison rte")
    parser.add_argument("--model_name_or_path", help="checkpoint that the comparison rte fine-tunes")
    parser.add_argument("--clock", choices=["wall", "process"], default="wall")
    parser.add_argument("--output", help="the results as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        task = json.loads(args.child)
        sys.path.insert(0, task["checkout"])
        print(json.dumps(COMPARISONS[task["of"]][0](task)))
        return

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.of or COMPARISONS:
            if reason := impossible(name, args):
                print(f"{name}: not run: {reason}")
                continue
            results[name] = compare(name, args, folder)
            print(table(name, results[name]), flush=True)
            if args.output:
                write(args, results)


def impossible(name: str, args: argparse.Namespace) -> str:
    """Why a comparison cannot be run here; empty where it can."""
    sys.path.insert(0, str(ROOT))
    from roberta_recipe.hardware import has_bf16

    if name.endswith("bf16") and not has_bf16():
        return "this device has no bf16"
    missing = name == "rte" and not (args.data_dir and args.model_name_or_path)
    return "it needs --data_dir and --model_name_or_path" if missing else ""


def compare(name: str, args: argparse.Namespace, folder: str) -> dict[str, list[dict[str, float]]]:
    """What each way measured, by way: "stock", "ours", with `--before` "before"."""
    checkouts = {"stock": ROOT, "ours": ROOT} | ({"before": args.before} if args.before else {})
    found: dict[str, list[dict[str, float]]] = {way: [] for way in checkouts}
    for way in itertools.chain.from_iterable([*checkouts] for _ in range(args.repeats)):
        task = {"of": name, "way": way, "checkout": str(Path(checkouts[way]).resolve()), "folder": folder}
        task |= {"clock": args.clock, "data_dir": whole(args.data_dir), "model": whole(args.model_name_or_path)}
        command = [sys.executable, __file__, "--child", json.dumps(task)]
        done = subprocess.run(command, cwd=task["checkout"], capture_output=True, text=True, env=environment())
        if done.returncode:
            sys.exit(f"{name}, {way}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        found[way].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def whole(path: str | None) -> str | None:
    """A path as a process in another folder needs it; a Hub id as it is."""
    return str(Path(path).resolve()) if path and Path(path).exists() else path


def environment() -> dict[str, str]:
    """No network, and no words of libraries."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "true"}


def table(name: str, found: dict[str, list[dict[str, float]]]) -> str:
    """A line for each way of a comparison."""
    rates = {way: [value["rate"] for value in values] for way, values in found.items()}
    stock, lines = statistics.median(rates["stock"]), [f"{name} ({COMPARISONS[name][1]})"]
    for way, values in rates.items():
        median, others = statistics.median(values), ""
        for figure in ("utilisation", "peak_gb"):
            if figure in found[way][0]:
                others += f"  {figure} {statistics.median(value[figure] for value in found[way]):.2f}"
        lines.append(
            f"  {way:<7}{median:>11,.1f}/s  from {min(values):,.1f} to {max(values):,.1f}  x {median / stock:.2f} of "
            f"stock{others}"
        )
    if "before" in rates:
        before = statistics.median(rates["before"])
        lines.append(f"  ours x {statistics.median(rates['ours']) / before:.2f} of before")
    return "\n".join(lines)


def write(args: argparse.Namespace, results: dict[str, Any]) -> None:
    from roberta_recipe.durable import write_json
    from roberta_recipe.hardware import describe_machine
    from roberta_recipe.record import git_commit, versions

    before = args.before and subprocess.check_output(["git", "-C", args.before, "rev-parse", "HEAD"], text=True).strip()
    about = {"date": datetime.now(UTC).date().isoformat(), "commit": git_commit(), "before": before}
    about |= {"hardware": describe_machine(), "versions": versions(), "clock": args.clock, "repeats": args.repeats}
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(args.output), {**about, "results": results})


# In a child: a measurement, with the checkout's code


def seconds(task: dict[str, Any], function: Callable[[], Any]) -> float:
    clock = time.perf_counter if task["clock"] == "wall" else time.process_time
    start_s = clock()
    function()
    return clock() - start_s


def peak_gb() -> float:
    """Most resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def module_of(*names: str) -> ModuleType:
    """The first module of these names that the checkout has: the packages are younger than some commits."""
    for name in names:
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"roberta_recipe.{name}")
    raise ImportError(f"this checkout has none of {', '.join(names)}")


def prepared(model, bf16: bool):
    """A model with the attention and the dropout, in a process with the allocator, that a run of this checkout has."""
    try:
        from roberta_recipe import hardware
        from roberta_recipe.training import attention
        from roberta_recipe.training.arguments import RecipeTrainingArguments
    except ImportError:  # a commit before
        return model
    hardware.keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        args = RecipeTrainingArguments(output_dir=folder, bf16=bf16)
    args.attn_implementation = attention.choose(model.config, args)
    attention.set_up(model, args)
    return model


def step(task: dict[str, Any]) -> dict[str, float]:
    """Tokens a second of forward, backward and optimizer step on one batch."""
    _, shape, precision = task["of"].split("-")
    config_name, sequences, length = SHAPES[shape]
    import torch
    import transformers

    modeling = module_of("training.modeling", "modeling")
    config = transformers.RobertaConfig.from_json_file(ROOT / config_name)
    torch.manual_seed(0)
    ids = torch.randint(5, config.vocab_size - 1, (sequences, length))
    batch = {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape) < MASKED, ids, -100)}
    if task["way"] == "stock":
        model = transformers.RobertaForMaskedLM(config)
        batch["attention_mask"] = torch.ones_like(ids)  # as the stock collator makes it
    else:
        model = prepared(modeling.RobertaForMaskedLM(config), precision == "bf16")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batch = model.train().to(device), {name: tensor.to(device) for name, tensor in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def once() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        once()
    rate = ids.numel() / statistics.median(seconds(task, once) for _ in range(7))
    measured = {"rate": rate, "peak_gb": peak_gb()}
    if task["way"] == "ours" and task["clock"] == "wall":
        from roberta_recipe import hardware

        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        flops = modeling.flops_per_token(config, length, MASKED)
        measured["utilisation"] = rate * flops / hardware.matrix_rate(device, dtype)
    return measured


def run(task: dict[str, Any]) -> dict[str, float]:
    """Tokens a second of a whole run of the mini shape: raw text to checkpoint, imports included."""
    folder = Path(task["folder"])
    text, held_out, tokenizer, config = make_inputs(folder)
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    sizes = [str(RUN_STEPS), "32", "128", "1e-3"]
    if task["way"] == "stock":
        words = [__file__.replace("speed.py", "stock_mlm.py"), text, held_out, tokenizer, config, out, *sizes]
    else:
        words = ["train_mlm.py", "--config", "presets/mlm/roberta_mini.yaml", "--train_file", text]
        words += ["--tokenizer_name", tokenizer, "--config_name", config, "--output_dir", out, "--use_cpu"]
        words += [
            "--validation_file",
            held_out,
            "--max_steps",
            sizes[0],
            "--eval_strategy",
            "no",
            "--bf16",
            "false",
            "--report_to",
            "none",
        ]
        words += ["--disable_tqdm", "true"]
    command = [sys.executable, *map(str, words)]

    def once() -> None:
        done = subprocess.run(command, cwd=task["checkout"], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)

    wall_s = seconds(task | {"clock": "wall"}, once)
    if task["clock"] == "process":
        used = os.times()
        return {"rate": tokens_of(out, task["way"]) / (used.children_user + used.children_system)}
    return {"rate": tokens_of(out, task["way"]) / wall_s}


def tokens_of(out: Path, way: str) -> int:
    """Tokens of a finished run that are no padding."""
    if way == "stock":
        return RUN_STEPS * 32 * 128
    return json.loads((out / "run_record.json").read_text())["tokens_seen"]


def make_inputs(folder: Path) -> tuple[Path, ...]:
    """Text, held-out text, tokenizer and config, made once from the docstrings of the installed Python."""
    names = "text.jsonl", "held_out.jsonl", "tokenizer", "config.json"
    text, held_out, tokenizer, config = (folder / name for name in names)
    if not text.is_file():
        from roberta_recipe.data import corpus as corpora
        from roberta_recipe.data.documents import check_sources, sample_documents
        from roberta_recipe.data.tokenizer_training import save_tokenizer, train_tokenizer

        corpus = corpora.read_corpus("presets/corpus/docstrings.yaml")
        check_sources(corpus)
        texts = [text for _, text in sample_documents(corpus, "train", max_bytes=8_000_000, seed=0)]
        values = json.loads((ROOT / "presets" / "model" / "mini.json").read_text())
        save_tokenizer(train_tokenizer(texts, values["vocab_size"]), str(tokenizer))
        config.write_text(json.dumps(values))
        for path, own in ((held_out, texts[::20]), (text, [t for n, t in enumerate(texts) if n % 20])):
            path.write_text("".join(json.dumps({"text": document}) + "\n" for document in own))
    return text, held_out, tokenizer, config


def rte(task: dict[str, Any]) -> dict[str, float]:
    """Examples a second of fine-tuning on RTE: forward, backward and optimizer step, of batches as they come."""
    import numpy as np
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    batches_of = module_of("training.finetune_trainer", "finetuning")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    rows = [line.split("\t") for line in (Path(task["data_dir"]) / "train.tsv").read_text().splitlines()[1:]]
    stock = task["way"] == "stock"
    padding = {"padding": "max_length", "max_length": 128} if stock else {"max_length": 512}
    features = [tokenizer(row[1], row[2], truncation=True, **padding) for row in rows]
    labels = [int(row[3] == "not_entailment") for row in rows]
    lengths = [len(feature["input_ids"]) for feature in features]
    shuffled = np.random.default_rng(0).permutation(len(rows))
    order = shuffled if stock else np.fromiter(batches_of.LengthGroupedSampler(lengths, RTE_BATCH, seed=0), int)
    collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    batches = [
        collate([{**features[n], "labels": labels[n]} for n in order[start : start + RTE_BATCH]])
        for start in range(0, RTE_BATCH * RTE_STEPS, RTE_BATCH)
    ]
    model = AutoModelForSequenceClassification.from_pretrained(task["model"], num_labels=2)
    model = (model if stock else prepared(model, False)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def once(batch) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in batches[:2]:
        once(batch)
    elapsed_s = seconds(task, lambda: [once(batch) for batch in batches])
    return {"rate": RTE_BATCH * RTE_STEPS / elapsed_s, "peak_gb": peak_gb()}


COMPARISONS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, float]], str]] = {
    "step-mini-fp32": (step, "tokens; 4 layers of 256, 32 x 128 tokens, fp32"),
    "step-mini-bf16": (step, "tokens; 4 layers of 256, 32 x 128 tokens, bf16"),
    "step-small-fp32": (step, "tokens; 4 layers of 512, dropout, 50,265 entries, 8 x 512 tokens, fp32"),
    "step-small-bf16": (step, "tokens; 4 layers of 512, dropout, 50,265 entries, 8 x 512 tokens, bf16"),
    "run": (run, f"tokens; {RUN_STEPS} steps of the mini shape, fp32, raw text to checkpoint, imports included"),
    "rte": (rte, f"examples; {RTE_STEPS} batches of {RTE_BATCH} of RTE, fp32, the stock way cut and padded to 128"),
}

if __name__ == "__main__":
    main()
