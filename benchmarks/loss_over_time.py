"""Validation loss over time of the demonstration and of the stock path (`stock_mlm.py`), on one core, with the same
text, tokenizer, model shape, batches, learning rate and steps.

    python benchmarks/loss_over_time.py --output results/loss_over_time.json
    python benchmarks/loss_over_time.py --until 2.7 --config my.yaml --seeds 1 2 3 4 5   # a row of results/speedrun.md

Each side has its own format (whole sentences, chunks), masks, precision and initialization, and is evaluated on its own
blocks of the same held-out documents, with 15% of the tokens masked. Minutes are CPU time (user and system), with
start-up and sixteen evaluations, without tokenizer training. Writes a JSON file and a plot. `--until` runs the recipe
only, once per seed, and prints the minutes to that validation loss.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from roberta_recipe.data.corpus import read_corpus, resolve
from roberta_recipe.data.documents import documents
from roberta_recipe.publishing.plots import subplots
from roberta_recipe.settings import load_yaml

PRESET, EVALUATIONS = "presets/mlm/demonstration.yaml", 16
LOSS = re.compile(r"validation  loss ([\d.]+)|'eval_loss': '?([\d.]+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="loss_over_time.json")
    parser.add_argument("--until", type=float, help="validation loss in nats; the stock path is not run")
    parser.add_argument("--config", default=PRESET, help="with --until: a preset with the same text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42], help="with --until")
    args = parser.parse_args()
    output, curves = Path(args.output), {}
    with tempfile.TemporaryDirectory() as folder:
        recipe, stock = commands(Path(folder), args.config)
        if args.until is None:
            curves["this recipe"] = curve(recipe)
            curves["stock run_mlm.py path"] = curve(stock)[:EVALUATIONS]  # the last step is evaluated three times
        else:
            for seed in args.seeds:
                # replaces the folder of `recipe`: the last of a repeated flag counts
                own = ["--seed", str(seed), "--output_dir", f"{folder}/seed-{seed}"]
                points = curves[f"seed {seed}"] = curve([*recipe, *own])
                reached = next(
                    (f"{minutes} minutes ({loss})" for minutes, loss in points if loss <= args.until), "never"
                )
                print(f"seed {seed}: {reached}; ends at {points[-1][1]} after {points[-1][0]}", flush=True)
    output.write_text(json.dumps(curves, indent=1))
    plot(curves, output.with_suffix(".png"))


def commands(folder: Path, config: str) -> tuple[list[str], list[str]]:
    """The commands of this recipe and of the stock path; trains the tokenizer, and writes the text as JSON lines for
    the stock path."""
    values, files = load_yaml(config), {"train": folder / "train.jsonl", "validation": folder / "validation.jsonl"}
    corpus, tokenizer = resolve(read_corpus(values["corpus"])), str(folder / "tokenizer")
    for split, path in files.items():
        texts = (text for source in corpus.sources for text in documents(corpus, source, split, seed=0))
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    subprocess.run(
        [sys.executable, "tokenizer/train_tokenizer.py", "--corpus", values["corpus"], "--vocab_size", "4096"]
        + ["--output_dir", tokenizer],
        cwd=ROOT,
        check=True,
    )
    steps, batch, length = (values[name] for name in ("max_steps", "global_batch_size", "max_seq_length"))
    stock = [
        "benchmarks/stock_mlm.py",
        *map(str, files.values()),
        tokenizer,
        values["config_name"],
        str(folder / "stock"),
    ]
    stock += [str(value) for value in (steps, batch, length, values["learning_rate"], steps // EVALUATIONS)]
    ours = ["train_mlm.py", "--config", config, "--tokenizer_name", tokenizer, "--output_dir", str(folder / "ours")]
    ours += ["--use_cpu", "--eval_steps", str(steps // EVALUATIONS)]
    return ours, stock


def curve(command: list[str]) -> list[list[float]]:
    """Run a command on one core; returns [minutes, validation loss] of each evaluation."""
    points = []
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            if loss := LOSS.search(line):
                times = psutil.Process(process.pid).cpu_times()
                points.append([round((times.user + times.system) / 60, 3), float(loss[1] or loss[2])])
    if process.returncode:
        sys.exit(f"{command[0]} ended with exit code {process.returncode}")
    return points


def plot(curves: dict[str, list[list[float]]], path: Path) -> None:
    """PNG of the curves."""
    figure, axes = subplots(1, 1, 8, 4.5)
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"{name}: {points[-1][1]:.2f}")
    axes.set(xlabel="minutes of process time, one CPU core", ylabel="validation loss, 15% masked (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
