"""Plots and texts of runs, made from their records."""

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import ScalarFormatter

from roberta_recipe import run


def plot_loss(record: dict[str, Any], path: str | Path) -> None:
    """Training and validation loss of a run record over steps, with the line of the unigram entropy, as a PNG."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    curves = record["loss_at_steps"]
    axes.plot(*_columns(curves["train"]), color="tab:blue", alpha=0.6, linewidth=1, label="training")
    axes.plot(
        *_columns(curves["validation"]), color="tab:orange", marker="o", markersize=3, label="validation (fixed masks)"
    )
    entropy = record["unigram_entropy"]
    axes.axhline(entropy, color="grey", linestyle="--", linewidth=1, label=f"unigram entropy, {entropy:.2f}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("masked-LM loss (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    final = record["metrics"]["eval_loss"]
    axes.set_title(f"validation loss {final:.3f} after {record['tokens_seen'] / 1e6:,.1f} M tokens", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_runs(records: list[dict[str, Any]], metric: str, path: str | Path) -> None:
    """Training loss, and the validation `metric` times 100, of fine-tuning runs over steps, as a PNG."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for record in records:
        args = record["resolved_args"]
        label = f"seed {args['seed']}, rate {args['learning_rate']:g}, batch {args['global_batch_size']}"
        left.plot(*_columns(record["loss_at_steps"]["train"]), linewidth=1, alpha=0.8)
        steps, scores = _columns(record["score_at_steps"])
        right.plot(
            steps,
            [_times_100(score) for score in scores],
            marker="o",
            markersize=3,
            label=label,
        )
    left.set_ylabel("training loss")
    right.set_ylabel(f"validation {metric} x 100")
    for axes in (left, right):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
    if len(records) <= 10:
        right.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_curves(records: dict[str, dict[str, Any]], path: str | Path) -> None:
    """Loss and perplexity of pretraining runs, by name, over tokens seen, as a PNG; dashed, the unigram entropy."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for number, (name, record) in enumerate(records.items()):
        color = f"C{number % 10}"
        logged = _columns([[0, 0], *record["tokens_at_steps"], [record["steps"], record["tokens_seen"]]])
        steps, losses = _columns(record["loss_at_steps"]["train"])
        left.plot(np.interp(steps, *logged) / 1e6, losses, color=color, alpha=0.4, linewidth=1)
        steps, losses = _columns(record["loss_at_steps"]["validation"])
        tokens = np.interp(steps, *logged) / 1e6
        label = f"{name}, {record['parameters'] / 1e6:.1f} M parameters"
        left.plot(tokens, losses, color=color, marker="o", markersize=3, label=label)
        left.axhline(record["unigram_entropy"], color=color, linestyle="--", linewidth=0.8)
        right.plot(
            tokens,
            [math.nan if loss is None else math.exp(loss) for loss in losses],
            color=color,
            marker="o",
            markersize=3,
            label=label,
        )
    left.set_ylabel("masked-LM loss (nats); dots: validation")
    right.set_ylabel("validation perplexity")
    right.set_yscale("log")
    for ticks in (right.yaxis.set_major_formatter, right.yaxis.set_minor_formatter):
        ticks(ScalarFormatter())
    for axes in (left, right):
        axes.set_xlabel("million tokens seen")
        axes.grid(alpha=0.3, which="both")
    left.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_scores(summaries: list[tuple[str, dict[str, Any]]], path: str | Path) -> None:
    """Validation score times 100 of (name, fine-tuning) over the share of their steps, as a PNG: a line a run, a panel
    a task."""
    tasks = list(dict.fromkeys(summary["task"] for _, summary in summaries))
    rows = -(-len(tasks) // 3) or 1
    figure, grid = plt.subplots(rows, 3, figsize=(11, 3.6 * rows), layout="constrained", squeeze=False)
    for axes in grid.flat[len(tasks) :]:
        axes.axis("off")
    for axes, task in zip(grid.flat, tasks, strict=False):
        mine = [(name, summary) for name, summary in summaries if summary["task"] == task]
        for number, (name, summary) in enumerate(mine):
            style = {"color": f"C{number}", "linestyle": ("-", "--")[number % 2], "marker": "o", "markersize": 3}
            for record in summary["runs"]:
                steps, scores = _columns(record["score_at_steps"])
                axes.plot([step / record["steps"] for step in steps], [_times_100(score) for score in scores], **style)
            axes.plot([], [], label=name, **style)
        axes.set_title(f"{task}, {mine[0][1]['metric']}", fontsize=10)
        axes.set_xlabel("share of the run's steps", fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16))  # beside the lines, never on them
    figure.savefig(path, dpi=110)
    plt.close(figure)


def print_result(record: dict[str, Any], output_dir: str | Path) -> None:
    """A pretraining run's figures, and where its files are."""
    print_validation(record["metrics"], record["unigram_entropy"], record["metrics_by_source"])
    print(
        f"{record['tokens_seen'] / 1e6:,.2f} M tokens in {record['steps']:,} steps, "
        f"{record['tokens_per_second']:,} tokens/s, {record['wall_clock_s']:,.0f} s in all\n"
        f"checkpoint  {output_dir}\n"
        f"run record  {Path(output_dir, run.RECORD_NAME)}\n"
        f"loss curve  {Path(output_dir, run.CURVE_NAME)}"
    )


def print_validation(metrics: dict[str, float], entropy: float, by_source: dict[str, dict[str, float]]) -> None:
    """The loss on the held-out text beside its unigram entropy (nats), and that of each source."""
    below = entropy - metrics["eval_loss"]
    print(
        f"\nvalidation loss {metrics['eval_loss']:.3f} nats (perplexity {metrics['eval_perplexity']:.2f}, "
        f"{metrics['eval_bits']:.3f} bits), {abs(below):.3f} {'below' if below > 0 else 'ABOVE'} the unigram entropy "
        f"of {entropy:.3f}"
    )
    for name, one in by_source.items():
        print(
            f"    {name:<16} {one['loss']:.3f} nats, perplexity {one['perplexity']:.2f}; unigram entropy "
            f"{one['unigram_entropy']:.3f}; {one['blocks']:,} blocks, {one['tokens']:,} tokens"
        )


def _times_100(score: float | None) -> float:
    return math.nan if score is None else 100 * score


def percent(value: float | None) -> str:
    """A score times 100; one that is no number (a correlation with a constant) as nan."""
    return "nan" if value is None or not np.isfinite(value) else f"{100 * value:.1f}"


def number(value: float | None, digits: int = 3) -> str:
    """A figure of a record, where one that is no number is null."""
    return "nan" if value is None else f"{value:.{digits}f}"


def markdown_table(head: tuple[str, ...], lines: list[tuple[Any, ...]]) -> str:
    """A table as README and model cards have it."""
    rows = [head, tuple("---" for _ in head), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in rows)


def _columns(points: list[list[float]]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]
