"""Measurements of `speed.py`: each function measures one contestant ("stock", "ours", "before") of a comparison, in its
own process, with the code of the task's checkout.

Stock is `RobertaForMaskedLM`, `DataCollatorForLanguageModeling`, `Trainer` and chunks of fixed size (`group_texts`), as
in transformers' run_mlm.py; examples truncated and padded to 128 tokens, as in run_glue.py; windows padded to their
full length, as in run_qa.py.
"""

import importlib
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
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {  # config, overrides, sequences per batch, tokens per sequence
    "mini": ("presets/model/mini.json", {}, 32, 128),
    "small": ("presets/model/small.json", {}, 8, 512),
    "6x384": (
        "presets/model/small.json",
        {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
        *(8, 512),
    ),
}
MASKED = 0.15
RUN_STEPS = 300
FINETUNE_BATCH = 16  # examples or windows
RTE_STEPS, SQUAD_STEPS = 12, 6
STOCK_LENGTH, OUR_LENGTH = 128, 512  # of GLUE
SQUAD_LENGTH, SQUAD_STRIDE, QUERY = 384, 128, 64
PRECISIONS = "stock in fp32, Trainer's default, ours in bf16 if the processor has it"
SCORED_ROWS, SCORED = 64, 256  # windows: of the longest length in a batch; in all


def seconds(task: dict[str, Any], function: Callable[[], Any]) -> float:
    clock = time.perf_counter if task["clock"] == "wall" else time.process_time
    start_s = clock()
    function()
    return clock() - start_s


def peak_gb() -> float:
    """Peak resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def prepared(model, bf16: bool):
    """The model with this checkout's attention and dropout; also configures its memory allocator."""
    from roberta_recipe import hardware
    from roberta_recipe.model import attention
    from roberta_recipe.training.arguments import RecipeTrainingArguments

    hardware.keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        args = RecipeTrainingArguments(output_dir=folder, bf16=bf16)
    args.attn_implementation = attention.choose(model.config, args)
    attention.set_up(model, args)
    return model


def step(task: dict[str, Any]) -> dict[str, float]:
    """Tokens/s of forward, backward and optimizer step on one batch."""
    _, shape, precision = task["of"].split("-")
    config_name, changes, sequences, length = SHAPES[shape]
    import torch
    import transformers

    from roberta_recipe.model import masked_lm

    importlib.import_module("transformers.trainer")  # 90 MB of datasets and pandas, which each run imports
    config = transformers.RobertaConfig.from_json_file(ROOT / config_name)
    config.update(changes)
    torch.manual_seed(0)
    ids = torch.randint(5, config.vocab_size - 1, (sequences, length))
    batch = {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape) < MASKED, ids, -100)}
    if task["way"] == "stock":
        model = transformers.RobertaForMaskedLM(config)
        batch["attention_mask"] = torch.ones_like(ids)  # as the stock collator makes it
    else:
        model = prepared(masked_lm.masked_lm_class(config)(config), precision == "bf16")
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
        flops = masked_lm.flops_per_token(config, length, MASKED)
        measured["utilisation"] = rate * flops / hardware.matrix_rate(device, dtype)
    return measured


def run(task: dict[str, Any]) -> dict[str, float]:
    """Tokens/s of a whole run of the mini shape, from raw text to checkpoint, with imports."""
    folder = Path(task["folder"])
    text, held_out, tokenizer, config = make_inputs(folder)
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    sizes = [str(RUN_STEPS), "32", "128", "1e-3"]
    if task["way"] == "stock":
        words = [ROOT / "benchmarks" / "stock_mlm.py", text, held_out, tokenizer, config, out, *sizes]
    else:
        words = ["train_mlm.py", "--config", "presets/mlm/roberta_mini.yaml", "--train_file", text]
        words += ["--validation_file", held_out, "--tokenizer_name", tokenizer, "--config_name", config]
        words += ["--learning_rate", sizes[3], "--mlm_probability", "0.3", "--max_grad_norm", "0", "--output_dir", out]
        words += ["--initialization", "normal", "--max_steps", sizes[0], "--eval_strategy", "no", *our_flags(task)]
    wall_s = wall_of(task, words)
    return {"rate": tokens_of(out, task["way"]) / wall_s}


def demo(task: dict[str, Any]) -> dict[str, float]:
    """Tokens/s of the demonstration, from raw text to predictions, with imports and tokenizer training."""
    out = Path(task["folder"]) / "demo"
    shutil.rmtree(out, ignore_errors=True)
    wall_s = wall_of(task, ["train_mlm.py", "--output_dir", out, *our_flags(task)])
    record = json.loads((out / "run_record.json").read_text())
    return {"rate": record["tokens_seen"] / wall_s, "eval_loss": record["metrics"]["eval_loss"]}


def in_bf16(task: dict[str, Any]) -> bool:
    """Whether a run or fine-tuning on this CPU is in bf16: by each side's default, fp32 for Trainer, and bf16 for this
    recipe where the processor has it."""
    from roberta_recipe.hardware import has_bf16

    return task["way"] != "stock" and has_bf16(use_cpu=True)


def our_flags(task: dict[str, Any]) -> list[str]:
    return ["--use_cpu", "--bf16", str(in_bf16(task)), "--report_to", "none", "--disable_tqdm", "true"]


def wall_of(task: dict[str, Any], words: list[Any]) -> float:
    """Wall-clock seconds of a script in the task's checkout; with the clock "process", its CPU seconds."""

    def once() -> None:
        done = subprocess.run([sys.executable, *map(str, words)], cwd=task["checkout"], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)

    wall_s = seconds(task | {"clock": "wall"}, once)
    used = os.times()
    return used.children_user + used.children_system if task["clock"] == "process" else wall_s


def tokens_of(out: Path, way: str) -> int:
    """Tokens of a finished run, without padding."""
    if way == "stock":
        return RUN_STEPS * 32 * 128
    return json.loads((out / "run_record.json").read_text())["tokens_seen"]


def make_inputs(folder: Path) -> tuple[Path, ...]:
    """Paths of text, held-out text, tokenizer and config; made from the docstrings of the installed packages."""
    names = "text.jsonl", "held_out.jsonl", "tokenizer", "config.json"
    text, held_out, tokenizer, config = (folder / name for name in names)
    if not text.is_file():
        from roberta_recipe.data import corpus as corpora
        from roberta_recipe.data.documents import check_sources, sample_documents
        from roberta_recipe.data.tokenizer_training import save_tokenizer, train_tokenizer

        corpus = corpora.resolve(corpora.read_corpus("presets/corpus/docstrings.yaml"))
        check_sources(corpus)
        texts = [text for _, text in sample_documents(corpus, "train", max_bytes=8_000_000, seed=0)]
        values = json.loads((ROOT / "presets" / "model" / "mini.json").read_text())
        save_tokenizer(train_tokenizer(texts, values["vocab_size"]), str(tokenizer))
        config.write_text(json.dumps(values))
        for path, own in ((held_out, texts[::20]), (text, [t for n, t in enumerate(texts) if n % 20])):
            path.write_text("".join(json.dumps({"text": document}) + "\n" for document in own))
    return text, held_out, tokenizer, config


def batches_of(task: dict[str, Any], lengths: list[int], steps: int) -> list[list[int]]:
    """The features of each step: random for stock; else batches of the sampler, evenly spaced by length, so that the
    mean length is that of an epoch."""
    if task["way"] == "stock":
        order = np.random.default_rng(0).permutation(len(lengths))
        return order[: steps * FINETUNE_BATCH].reshape(steps, -1).tolist()
    from roberta_recipe.training.finetune_trainer import LengthGroupedSampler

    sampler = LengthGroupedSampler(lengths, FINETUNE_BATCH, seed=0)
    batches = np.fromiter(sampler, int).reshape(-1, FINETUNE_BATCH)
    by_length = batches[np.argsort(np.asarray(lengths)[batches].max(1), kind="stable")]
    return by_length[((np.arange(steps) + 0.5) * len(batches) / steps).astype(int)].tolist()


def padded_to(task: dict[str, Any]) -> int | None:
    """`pad_to_multiple_of` of the checkout's collators; None for stock, which pads to a fixed length."""
    from roberta_recipe.training import finetune_trainer

    return None if task["way"] == "stock" else finetune_trainer.padded_to(OUR_LENGTH)


def fine_tune(
    task: dict[str, Any], model, loss_of: Callable[[Any, dict], Any], batches: list[dict]
) -> dict[str, float]:
    """Examples/s of forward, backward and optimizer step over the batches, after two warm-ups."""
    import torch

    half = in_bf16(task)
    model = (model if task["way"] == "stock" else prepared(model, half)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def once(batch: dict) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = loss_of(model, dict(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in batches[:: len(batches) - 1]:
        once(batch)
    elapsed_s = seconds(task, lambda: [once(batch) for batch in batches])
    return {"rate": len(batches) * FINETUNE_BATCH / elapsed_s, "peak_gb": peak_gb()}


def rte(task: dict[str, Any]) -> dict[str, float]:
    """Examples/s of fine-tuning on RTE."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    rows = [line.split("\t") for line in (Path(task["data_dir"]) / "train.tsv").read_text().splitlines()[1:]]
    padding = (
        {"padding": "max_length", "max_length": STOCK_LENGTH} if task["way"] == "stock" else {"max_length": OUR_LENGTH}
    )
    features = [
        {**tokenizer(row[1], row[2], truncation=True, **padding), "labels": int(row[3] == "not_entailment")}
        for row in rows
    ]
    collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=padded_to(task))
    chosen = batches_of(task, [len(feature["input_ids"]) for feature in features], RTE_STEPS)
    batches = [collate([features[number] for number in numbers]) for numbers in chosen]
    model = AutoModelForSequenceClassification.from_pretrained(task["model"], num_labels=2)
    return fine_tune(task, model, lambda model, batch: model(**batch).loss, batches)


def squad(task: dict[str, Any]) -> dict[str, float]:
    """Windows/s of fine-tuning on SQuAD 1.1."""
    import torch

    torch.manual_seed(0)
    script = importlib.import_module("finetune_squad")
    features, collate, model = windows_of(task, script)
    lengths = [len(feature["input_ids"]) for feature in features]
    batches = [collate([features[n] for n in numbers]) for numbers in batches_of(task, lengths, SQUAD_STEPS)]

    def loss(model, batch):
        if task["way"] == "stock":
            batch.pop("labels")
            return model(**batch).loss
        return script.span_loss(model, batch)[0] / FINETUNE_BATCH

    return fine_tune(task, model, loss, batches)


def squad_evaluation(task: dict[str, Any]) -> dict[str, float]:
    """Windows/s of evaluation on SQuAD 1.1."""
    import torch

    from roberta_recipe.training.finetune_trainer import token_batches

    script = importlib.import_module("finetune_squad")
    features, collate, model = windows_of(task, script)
    features = features[:: len(features) // SCORED][:SCORED]
    lengths = [len(feature["input_ids"]) for feature in features]
    if task["way"] == "stock":
        chosen = [range(start, start + SCORED_ROWS) for start in range(0, SCORED, SCORED_ROWS)]
    else:
        chosen = token_batches(lengths, SCORED_ROWS)
    half = in_bf16(task)
    model = (model if task["way"] == "stock" else prepared(model, half)).eval()
    batches = [collate([features[number] for number in numbers]) for numbers in chosen]

    def once(batch: dict) -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            script.span_loss(model, dict(batch))

    once(batches[-1])
    elapsed_s = seconds(task, lambda: [once(batch) for batch in batches])
    return {"rate": SCORED / elapsed_s, "peak_gb": peak_gb()}


def windows_of(task: dict[str, Any], script: ModuleType) -> tuple[list[dict], Callable, Any]:
    """(windows of SQuAD 1.1, collator, model with a span head) as in finetune_squad.py; stock pads all windows to the
    same length."""
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer, DataCollatorWithPadding

    from roberta_recipe.tasks import squad

    args = script.SquadArguments(
        model_name_or_path=task["model"],
        train_file=task["squad_file"],
        max_seq_length=SQUAD_LENGTH,
        doc_stride=SQUAD_STRIDE,
        max_query_length=QUERY,
    )
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    questions = script.read_split(args, "train")
    features = squad.make_windows(questions, tokenizer, SQUAD_LENGTH, SQUAD_STRIDE, QUERY).features
    if task["way"] == "stock":
        collate = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=SQUAD_LENGTH)
        return features, collate, AutoModelForQuestionAnswering.from_pretrained(task["model"])
    return features, DataCollatorWithPadding(tokenizer, pad_to_multiple_of=padded_to(task)), script.build_model(args)


COMPARISONS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, float]], str]] = {
    "step-mini-fp32": (step, "tokens; 4 layers of 256, 32 x 128 tokens, fp32"),
    "step-mini-bf16": (step, "tokens; 4 layers of 256, 32 x 128 tokens, bf16"),
    "step-small-fp32": (step, "tokens; 4 layers of 512, dropout, 50,265 entries, 8 x 512 tokens, fp32"),
    "step-small-bf16": (step, "tokens; 4 layers of 512, dropout, 50,265 entries, 8 x 512 tokens, bf16"),
    "step-6x384-fp32": (step, "tokens; 6 layers of 384, dropout, 50,265 entries, 8 x 512 tokens, fp32"),
    "step-6x384-bf16": (step, "tokens; 6 layers of 384, dropout, 50,265 entries, 8 x 512 tokens, bf16"),
    "run": (
        run,
        f"tokens; {RUN_STEPS} steps of the mini shape, raw text to checkpoint, with imports; {PRECISIONS}",
    ),
    "demo": (demo, "tokens; the demonstration, raw text to predictions, with imports"),
    "rte": (
        rte,
        f"examples; {RTE_STEPS} batches of {FINETUNE_BATCH} of RTE, {PRECISIONS}, stock truncated and padded to "
        f"{STOCK_LENGTH}",
    ),
    "squad": (
        squad,
        f"windows; {SQUAD_STEPS} batches of {FINETUNE_BATCH} of SQuAD 1.1, {PRECISIONS}, stock padded to "
        f"{SQUAD_LENGTH}",
    ),
    "squad-evaluation": (
        squad_evaluation,
        f"windows; evaluation on {SCORED} of SQuAD 1.1, batches of the tokens of {SCORED_ROWS} longest windows, "
        f"{PRECISIONS}, stock padded to {SQUAD_LENGTH}",
    ),
}
WITHOUT_STOCK = ("demo",)  # compared with another commit only
NEEDS = {  # required flags of `speed.py`
    "rte": ("model_name_or_path", "data_dir"),
    "squad": ("model_name_or_path", "squad_file"),
    "squad-evaluation": ("model_name_or_path", "squad_file"),
}
