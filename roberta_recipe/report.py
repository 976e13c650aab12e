"""Plots of runs, made from their records."""

from pathlib import Path
from typing import Any

import matplotlib

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


def _columns(points: list[list[float]]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]
