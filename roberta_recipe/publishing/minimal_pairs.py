"""BLiMP's scores as a table and a chart, beside the published figures (Warstadt et al. 2020, arXiv 1912.00582)."""

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from roberta_recipe.record import BlimpRecord, percent
from roberta_recipe.tasks import blimp

HEAD = ("model", "score", "mean of paradigms", "mean of phenomena", "random weights", "pairs")
EXPLAINED = (
    "BLiMP: the share of pairs of sentences in which the acceptable one has the higher score, times 100, with the 95% "
    "interval of a bootstrap over pairs. Random weights: the mean of paradigms of the same architecture, untrained, on "
    "the same pairs; chance is near 50, and not 50, as pairs differ in length."
)
_SHOWN = {"pll": "pseudo-log-likelihood", "within_word": "within-word pseudo-log-likelihood"}
_NONE = "-"


def lines(records: dict[str, BlimpRecord]) -> list[tuple[str, ...]]:
    """Lines below `HEAD`: the models of `records` by name, then the published figures."""
    found = []
    for name, record in records.items():
        pairs = f"{record['pairs']:,}" + f" (partial: {record['partial']})" * bool(record["partial"])
        for method, scores in record["scores"].items():
            means = [
                f"{percent(scores[mean])} ({' to '.join(map(percent, scores[f'{mean}_interval']))})"
                for mean in ("mean_of_paradigms", "mean_of_phenomena")
            ]
            found.append((name, _SHOWN[method], *means, _of_random(record, method), pairs))
    for figure in blimp.PUBLISHED:
        means = [f"{figure.score}" if figure.mean_of == which else _NONE for which in ("paradigms", "phenomena")]
        found.append((figure.name, f"published: {figure.source}", *means, _NONE, _NONE))
    return found


def _of_random(record: BlimpRecord, method: str) -> str:
    """The control's mean of paradigms: of one seed, or the mean and range of several."""
    scores = [control[method]["mean_of_paradigms"] for control in record["random_weights"]]
    if not scores:
        return "not run"
    if len(scores) == 1:
        return f"{percent(scores[0])} (1 seed)"
    return (
        f"{percent(statistics.fmean(scores))} ({percent(min(scores))} to {percent(max(scores))}, {len(scores)} seeds)"
    )


def by_phenomenon(record: BlimpRecord) -> list[tuple[str, ...]]:
    """(phenomenon, a score for each method, the control's for each method) in per cent."""
    found = []
    for name in next(iter(record["scores"].values()))["by_phenomenon"]:
        own = [percent(scores["by_phenomenon"][name]) for scores in record["scores"].values()]
        control = [percent(_mean(record["random_weights"], method, name)) for method in record["scores"]]
        found.append((name, *own, *(control if record["random_weights"] else [])))
    return found


def _mean(controls: list, method: str, phenomenon: str) -> float | None:
    """The mean of the controls' scores on a phenomenon, None without a control."""
    scores = [control[method]["by_phenomenon"][phenomenon] for control in controls]
    return statistics.fmean(scores) if scores else None


def plot(record: BlimpRecord, path: str | Path) -> None:
    """Bars by phenomenon, of the model with its interval and of random weights; beside them the means and the published
    figures, as a PNG."""
    method, scores = next(iter(record["scores"].items()))
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.5), layout="constrained", sharex=True)
    names = list(scores["by_phenomenon"])[::-1]
    own = [100 * scores["by_phenomenon"][name] for name in names]
    ends = [[100 * end for end in scores["by_phenomenon_interval"][name]] for name in names]
    errors = [[max(0.0, x - low) for x, (low, _) in zip(own, ends, strict=True)],
              [max(0.0, high - x) for x, (_, high) in zip(own, ends, strict=True)]]  # fmt: skip
    rows = range(len(names))
    left.barh([p + 0.2 for p in rows], own, 0.4, xerr=errors, color="C0", label=record["model"])
    if record["random_weights"]:
        control = [100 * _mean(record["random_weights"], method, name) for name in names]
        left.barh([p - 0.2 for p in rows], control, 0.4, color="C7", label="random weights")
    left.set_yticks(list(rows), [name.replace("_", " ") for name in names])
    left.set_xlabel(f"acceptable sentence higher, %, by {_SHOWN[method]}", fontsize=9)
    left.legend(fontsize=8, loc="lower right")
    bars = [(f"{record['model']}, {mean.replace('_', ' ')}", 100 * scores[mean], "C0")
            for mean in ("mean_of_paradigms", "mean_of_phenomena")]  # fmt: skip
    bars += [(f"random weights {seed}, mean of paradigms", 100 * control[method]["mean_of_paradigms"], "C7")
             for seed, control in enumerate(record["random_weights"], 1)]  # fmt: skip
    bars += [(f"{f.name}, mean of {f.mean_of}\n({f.source})", f.score, "C1") for f in blimp.PUBLISHED]
    labels, values, colors = zip(*bars[::-1], strict=True)
    for number, bar in enumerate(right.barh(range(len(bars)), values, color=colors)):
        right.text(bar.get_width() - 1, number, f"{values[number]:.1f}", va="center", ha="right", fontsize=8)
    right.set_yticks(range(len(bars)), labels, fontsize=7)
    partial = f"; partial: {record['partial']}" * bool(record["partial"])
    figure.suptitle(f"BLiMP, {record['pairs']:,} pairs{partial}", fontsize=10)
    for axes in (left, right):
        axes.set_xlim(0, 100)
        axes.grid(alpha=0.3, axis="x")
        axes.axvline(50, color="grey", linestyle="--", linewidth=0.8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
