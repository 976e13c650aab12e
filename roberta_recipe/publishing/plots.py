"""Plots of loss and metrics over steps, from run records."""

from pathlib import Path
from typing import Any

import numpy as np

from roberta_recipe.record import FinetuneRecord, PretrainingRecord


def subplots(rows: int, columns: int, width: float, height: float, **others: Any) -> tuple[Any, Any]:
    """(figure, axes) of `width` x `height` inches, without pyplot and its global state."""
    from matplotlib.figure import Figure  # a slow import

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **others)


def plot_loss(record: PretrainingRecord, path: str | Path) -> None:
    """PNG of training and validation loss over steps, the unigram entropy, and BLiMP if measured."""
    figure, axes = subplots(1, 1, 8, 4.5)
    curves, entropy = record["loss_at_steps"], record["unigram_entropy"]
    train, validation = columns(curves["train"]), columns(curves["validation"])
    axes.plot(*train, color="tab:blue", alpha=0.6, linewidth=1, label="training", **_markers(curves["train"]))
    axes.plot(*validation, color="tab:orange", marker="o", markersize=3, label="validation (fixed masks)")
    axes.axhline(entropy, color="grey", linestyle="--", linewidth=1, label=f"unigram entropy, {entropy:.2f}")
    if points := record.get("blimp_at_steps"):
        right = axes.twinx()
        steps, scores = columns(points)
        right.plot(steps, 100 * scores, color="tab:green", marker="s", markersize=3)
        right.set_ylabel("BLiMP, mean over paradigms (%)")
        axes.set_zorder(1)  # draw the legend above both axes
        axes.patch.set_visible(False)
        axes.plot([], [], color="tab:green", marker="s", markersize=3, label="BLiMP (right)")
    axes.set(xlabel="optimizer step", ylabel="masked-LM loss (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    final, tokens = record["metrics"]["eval_loss"], record["tokens_seen"]
    axes.set_title(f"validation loss {final:.3f} after {tokens / 1e6:,.1f} M tokens", fontsize=10)
    figure.savefig(path, dpi=120)


def plot_runs(records: list[FinetuneRecord], metric: str, path: str | Path) -> None:
    """PNG of training loss and validation `metric` x 100 over steps, of fine-tuning runs."""
    figure, (left, right) = subplots(1, 2, 10, 4)
    for record in records:
        args, losses = record["resolved_args"], record["loss_at_steps"]["train"]
        label = f"seed {args['seed']}, lr {args['learning_rate']:g}, batch {args['global_batch_size']}"
        left.plot(*columns(losses), linewidth=1, alpha=0.8, **_markers(losses))
        steps, scores = columns(record["score_at_steps"])
        right.plot(steps, 100 * scores, marker="o", markersize=3, label=label)
    for axes, title in ((left, "training loss"), (right, f"validation {metric} x 100")):
        axes.set(xlabel="optimizer step", ylabel=title)
        axes.grid(alpha=0.3)
    if len(records) <= 10:
        right.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _markers(points: list[list[float]]) -> dict[str, Any]:
    """Point markers for a short curve: a line of one point is invisible."""
    return {"marker": "o", "markersize": 3} if len(points) <= 20 else {}


def columns(points: list[list[float | None]]) -> np.ndarray:
    """(2, points): the steps and the values of a curve, nan for None."""
    return np.array(points, dtype=float).reshape(-1, 2).T
