"""Plots of runs, made from their records."""

import math
from pathlib import Path
from typing import Any

from roberta_recipe.record import FinetuneRecord, PretrainingRecord

_FEW_POINTS = 20


def subplots(rows: int, columns: int, width: float, height: float, **others: Any) -> tuple[Any, Any]:
    """(figure, axes) of `width` x `height` inches, without pyplot: no backend is chosen, no figure stays open."""
    from matplotlib.figure import Figure  # half a second

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **others)


def plot_loss(record: PretrainingRecord, path: str | Path) -> None:
    """Training and validation loss of a run record over steps, with the line of the unigram entropy, as a PNG."""
    figure, axes = subplots(1, 1, 8, 4.5)
    curves = record["loss_at_steps"]
    axes.plot(
        *columns(curves["train"]), color="tab:blue", alpha=0.6, linewidth=1, label="training", **_dots(curves["train"])
    )
    axes.plot(
        *columns(curves["validation"]), color="tab:orange", marker="o", markersize=3, label="validation (fixed masks)"
    )
    entropy = record["unigram_entropy"]
    axes.axhline(entropy, color="grey", linestyle="--", linewidth=1, label=f"unigram entropy, {entropy:.2f}")
    if points := record.get("blimp_at_steps"):
        right = axes.twinx()
        steps, scores = columns(points)
        right.plot(steps, times_100(scores), color="tab:green", marker="s", markersize=3)
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


def plot_runs(records: list[FinetuneRecord], metric: str, path: str | Path) -> None:
    """Training loss, and the validation `metric` times 100, of fine-tuning runs over steps, as a PNG."""
    figure, (left, right) = subplots(1, 2, 10, 4)
    for record in records:
        args = record["resolved_args"]
        label = f"seed {args['seed']}, rate {args['learning_rate']:g}, batch {args['global_batch_size']}"
        losses = record["loss_at_steps"]["train"]
        left.plot(*columns(losses), linewidth=1, alpha=0.8, **_dots(losses))
        steps, scores = columns(record["score_at_steps"])
        right.plot(steps, times_100(scores), marker="o", markersize=3, label=label)
    left.set_ylabel("training loss")
    right.set_ylabel(f"validation {metric} x 100")
    for axes in (left, right):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
    if len(records) <= 10:
        right.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def times_100(scores: list[float | None]) -> list[float]:
    """Scores in per cent; a score that is no number as nan."""
    return [math.nan if score is None else 100 * score for score in scores]


def _dots(points: list[list[float]]) -> dict[str, Any]:
    """Marks on the points of a curve that has few: a line through one point is nothing."""
    return {"marker": "o", "markersize": 3} if len(points) <= _FEW_POINTS else {}


def columns(points: list[list[float]]) -> tuple[list[float], list[float]]:
    """The steps and the values of a curve."""
    return [point[0] for point in points], [point[1] for point in points]
