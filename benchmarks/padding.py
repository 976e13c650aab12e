"""The gain of batches of like length: on GLUE beside padding every example to 128, as the stock run_glue.py does, and
on RACE beside padding every sequence to 512.

    python benchmarks/padding.py --model_name_or_path FacebookAI/roberta-base [--data_dir glue] [--race_dir RACE]

Speed: forward and backward of the same number of batches, alternating between the two ways so that both run under
the same load; prints examples/s, and tokens without padding / tokens computed.
With --epochs, RTE is trained for that number of epochs both ways at the same rate and batch, the stock way by Trainer
with its defaults and the stock loss. The validation scores are of a single seed, which says little.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

import numpy as np
import torch
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import finetune_glue
from roberta_recipe.data import tokenization
from roberta_recipe.record import picked_setting
from roberta_recipe.tasks import glue, race
from roberta_recipe.training.finetune_trainer import LengthGroupedSampler, length_of

STOCK_LENGTH = 128  # run_glue.py: max_seq_length, pad_to_max_length
RACE_LENGTH = 512


def examples_of(name: str, split: str, data_dir: str | None, tokenizer) -> tuple[list[dict], list[dict], int]:
    """(our features, cut to 512; stock features, cut to 128; number of examples that the stock way cuts)."""
    task = glue.TASKS[name]
    examples = glue.read_split(task, name, split, data_dir)
    args = finetune_glue.GlueArguments(max_seq_length=512)
    ours, _ = finetune_glue.make_features(args, task, {split: examples}, tokenizer)
    texts = [list(column) for column in zip(*examples.texts, strict=True)]
    padded = tokenizer(*texts, truncation=True, max_length=STOCK_LENGTH, padding="max_length")
    stock = [dict(zip(padded, values, strict=True)) for values in zip(*padded.values(), strict=True)]
    for feature, label in zip(stock, examples.labels, strict=True):
        feature["labels"] = label
    return ours[split], stock, sum(len(feature["input_ids"]) > STOCK_LENGTH for feature in ours[split])


def step_s(model, batch: dict[str, torch.Tensor]) -> float:
    """Seconds of a forward and backward pass."""
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    model(**batch).loss.backward()
    model.zero_grad()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def speed(name: str, model, features: dict[str, list[dict]], collate, batch: int, batches: int, unit: str) -> None:
    """Print a line for each of the two ways, "ours" and "stock"."""
    lengths = [length_of(feature) for feature in features["ours"]]
    order = {
        "ours": list(LengthGroupedSampler(lengths, batch, seed=0)),
        "stock": np.random.default_rng(0).permutation(len(lengths)).tolist(),
    }
    seconds, counted, computed = {}, {}, {}
    for number in range(-2, batches):  # two batches warm up
        for way in features:
            start = max(number, 0) * batch
            tensors = collate([features[way][index] for index in order[way][start : start + batch]])
            elapsed_s = step_s(model, tensors)
            if number >= 0:
                seconds[way] = seconds.get(way, 0) + elapsed_s
                counted[way] = counted.get(way, 0) + int(tensors["attention_mask"].sum())
                computed[way] = computed.get(way, 0) + tensors["attention_mask"].numel()
    for way in features:
        rate = batches * batch / seconds[way]
        ratio = f"{seconds['stock'] / seconds['ours']:.2f} x stock" if way == "ours" else ""
        print(f"{name:<6}{way:<7}{rate:>8.2f} {unit}/s{counted[way] / computed[way]:>8.1%} of tokens count   {ratio}")


def measure_glue(args, name: str, model, tokenizer) -> list[dict]:
    """Print the speed on a GLUE task, beside padding to 128; returns the stock features."""
    ours, stock, cut = examples_of(name, "train", args.data_dir, tokenizer)
    collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    speed(name, model, {"ours": ours, "stock": stock}, collate, args.batch, args.batches, "examples")
    print(f"      the stock way cuts {cut:,} of {len(stock):,} examples")
    return stock


def measure_race(args, tokenizer, device: str) -> None:
    """Print the speed on RACE, four sequences a question, beside padding each sequence to 512."""
    model = AutoModelForMultipleChoice.from_pretrained(args.model_name_or_path).train().to(device)
    questions = race.read_folder(Path(args.race_dir), "train", race.LEVELS)
    rows = race.features(questions, tokenizer, RACE_LENGTH, 128).rows
    fixed = [{**row, "length": RACE_LENGTH} for row in rows]
    collate = race.RaceCollator(tokenizer, RACE_LENGTH)
    few = max(args.batches // 8, 2), max(args.batch // 4, 1)
    speed("race", model, {"ours": rows, "stock": fixed}, collate, few[1], few[0], "questions")


def trained_stock(arguments, tokenizer, train: list[dict], validation: list[dict]) -> float:
    """Validation accuracy of RTE after `Trainer` with its own defaults."""
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model_name_or_path, num_labels=2)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            num_train_epochs=arguments.epochs,
            learning_rate=arguments.learning_rate,
            per_device_train_batch_size=arguments.batch,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=1,
        )
        trainer = Trainer(model=model, args=args, train_dataset=train, data_collator=DataCollatorWithPadding(tokenizer))
        trainer.train()
        predictions = trainer.predict(validation).predictions.argmax(-1)
    return float((predictions == [feature["labels"] for feature in validation]).mean())


def trained_ours(arguments) -> float:
    """Validation accuracy of RTE after finetune_glue.py, at the best epoch of the seed."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            **{"model_name_or_path": arguments.model_name_or_path, "output_dir": folder, "seeds": 1, "keep": "none"},
            **{"max_steps": -1, "num_train_epochs": arguments.epochs, "warmup_steps": 0.06},
            **{"learning_rate": arguments.learning_rate, "global_batch_size": arguments.batch, "disable_tqdm": True},
            **{"per_device_train_batch_size": arguments.batch},
        }
        flags |= {"data_dir": arguments.data_dir} if arguments.data_dir else {}
        argv = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        summary = finetune_glue.main(["--config", "presets/glue/rte.yaml", *argv])
    return picked_setting(summary)["median"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", default="FacebookAI/roberta-base")
    parser.add_argument("--data_dir", help="folder of GLUE's TSV files; without it, the Hub")
    parser.add_argument("--race_dir", help="folder of RACE's files; without it, GLUE only")
    parser.add_argument("--batch", type=int, default=16, help="examples; for RACE, a quarter as many questions")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=0, help="of RTE, both ways; 0 for speed only")
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    args = parser.parse_args()

    tokenizer = tokenization.load_tokenizer(args.model_name_or_path, needed=("pad_token",))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, num_labels=2).train().to(device)
    train = measure_glue(args, "rte", model, tokenizer)
    measure_glue(args, "sst2", model, tokenizer)
    if args.race_dir:
        measure_race(args, tokenizer, device)
    if args.epochs:
        _, validation, _ = examples_of("rte", "validation", args.data_dir, tokenizer)
        print(f"rte, {args.epochs} epochs, accuracy: stock {trained_stock(args, tokenizer, train, validation):.3f}")
        print(f"rte, {args.epochs} epochs, accuracy at the best epoch: ours {trained_ours(args):.3f}")


if __name__ == "__main__":
    main()
