"""Plots of runs, made from their records."""

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import ScalarFormatter

from roberta_recipe.record import FinetuneRecord, PretrainingRecord, Summary

_FEW_POINTS = 20


class LedgerEntry(Summary):
    """A fine-tuning in the ledger (`results/`): only its picked setting, and the runs of that setting."""

    note: str  # on data that are no official split; may be empty
    runs: list[FinetuneRecord]  # shortened


def plot_loss(record: PretrainingRecord, path: str | Path) -> None:
    """Training and validation loss of a run record over steps, with the line of the unigram entropy, as a PNG."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    curves = record["loss_at_steps"]
    axes.plot(
        *_columns(curves["train"]), color="tab:blue", alpha=0.6, linewidth=1, label="training", **_dots(curves["train"])
    )
    axes.plot(
        *_columns(curves["validation"]), color="tab:orange", marker="o", markersize=3, label="validation (fixed masks)"
    )
    entropy = record["unigram_entropy"]
    axes.axhline(entropy, color="grey", linestyle="--", linewidth=1, label=f"unigram entropy, {entropy:.2f}")
    if points := record.get("blimp_at_steps"):
        right = axes.twinx()
        steps, scores = _columns(points)
        right.plot(steps, _times_100(scores), color="tab:green", marker="s", markersize=3)
        right.set_ylabel("BLiMP, mean over paradigms (%)")
        axes.set_zorder(1)  # the legend above both
        axes.patch.set_visible(False)
        axes.plot([], [], color="tab:green", marker="s", markersize=3, label="BLiMP (right)")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("masked-LM loss (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    final = record["metrics"]["eval_loss"]
    axes.set_title(f"validation loss {final:.3f} after {record['tokens_seen'] / 1e6:,.1f} M tokens", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_runs(records: list[FinetuneRecord], metric: str, path: str | Path) -> None:
    """Training loss, and the validation `metric` times 100, of fine-tuning runs over steps, as a PNG."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for record in records:
        args = record["resolved_args"]
        label = f"seed {args['seed']}, rate {args['learning_rate']:g}, batch {args['global_batch_size']}"
        losses = record["loss_at_steps"]["train"]
        left.plot(*_columns(losses), linewidth=1, alpha=0.8, **_dots(losses))
        steps, scores = _columns(record["score_at_steps"])
        right.plot(steps, _times_100(scores), marker="o", markersize=3, label=label)
    left.set_ylabel("training loss")
    right.set_ylabel(f"validation {metric} x 100")
    for axes in (left, right):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
    if len(records) <= 10:
        right.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_curves(records: dict[str, PretrainingRecord], path: str | Path) -> None:
    """Loss and perplexity of pretraining runs, by name, over tokens seen, as a PNG; dashed, the unigram entropy. Where
    a run has BLiMP's curve, a third panel has it."""
    panels = 2 + any(record.get("blimp_at_steps") for record in records.values())
    figure, (left, right, *others) = plt.subplots(1, panels, figsize=(5.5 * panels, 4.5), layout="constrained")
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
        perplexities = [math.nan if loss is None else math.exp(loss) for loss in losses]
        right.plot(tokens, perplexities, color=color, marker="o", markersize=3, label=label)
        if points := record.get("blimp_at_steps"):
            steps, scores = _columns(points)
            tokens = np.interp(steps, *logged) / 1e6
            others[0].plot(tokens, _times_100(scores), color=color, marker="o", markersize=3, label=label)
            others[0].set_ylabel("BLiMP, mean over paradigms (%)")
    left.set_ylabel("masked-LM loss (nats); dots: validation")
    right.set_ylabel("validation perplexity")
    right.set_yscale("log")
    for ticks in (right.yaxis.set_major_formatter, right.yaxis.set_minor_formatter):
        ticks(ScalarFormatter())
    for axes in (left, right, *others):
        axes.set_xlabel("million tokens seen")
        axes.grid(alpha=0.3, which="both")
    left.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_scores(entries: list[tuple[str, LedgerEntry]], path: str | Path) -> None:
    """Validation score times 100 of (name, fine-tuning) over the share of its steps, as a PNG: a line for each run, a
    panel for each task."""
    tasks = list(dict.fromkeys(entry["task"] for _, entry in entries))
    rows = -(-len(tasks) // 3) or 1
    figure, grid = plt.subplots(rows, 3, figsize=(11, 3.6 * rows), layout="constrained", squeeze=False)
    for axes in grid.flat[len(tasks) :]:
        axes.axis("off")
    for axes, task in zip(grid.flat, tasks, strict=False):
        of_task = [(name, entry) for name, entry in entries if entry["task"] == task]
        for number, (name, entry) in enumerate(of_task):
            style = {"color": f"C{number}", "linestyle": ("-", "--")[number % 2], "marker": "o", "markersize": 3}
            for record in entry["runs"]:
                steps, scores = _columns(record["score_at_steps"])
                axes.plot([step / record["steps"] for step in steps], _times_100(scores), **style)
            axes.plot([], [], label=name, **style)
        axes.set_title(f"{task}, {of_task[0][1]['metric']}", fontsize=10)
        axes.set_xlabel("share of the run's steps", fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16))  # below the axes, never on the lines
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _times_100(scores: list[float | None]) -> list[float]:
    return [math.nan if score is None else 100 * score for score in scores]


def _dots(points: list[list[float]]) -> dict[str, Any]:
    """Marks on the points of a curve that has few: a line through one point is nothing."""
    return {"marker": "o", "markersize": 3} if len(points) <= _FEW_POINTS else {}


def _columns(points: list[list[float]]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]
