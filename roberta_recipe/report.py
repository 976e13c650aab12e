"""Plots of runs, made from their records."""

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt


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
            [math.nan if score is None else 100 * score for score in scores],
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


def percent(value: float | None) -> str:
    """A score times 100; one that is no number (a correlation with a constant) as nan."""
    return "nan" if value is None or not np.isfinite(value) else f"{100 * value:.1f}"


def _columns(points: list[list[float]]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]
