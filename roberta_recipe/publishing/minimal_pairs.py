"""BLiMP's scores as a table, beside the published figures (Warstadt et al. 2020, arXiv 1912.00582)."""

import statistics
from typing import NamedTuple

from roberta_recipe.record import BlimpRecord, percent

HEAD = ("model", "score", "mean of paradigms", "mean of phenomena", "random weights", "pairs")
EXPLAINED = (
    "BLiMP: the share of pairs of sentences in which the acceptable one has the higher score, times 100, with the 95% "
    "interval of a bootstrap over pairs. Random weights: the mean of paradigms of the same architecture, untrained, on "
    "the same pairs; chance is near 50, and not 50, as pairs differ in length."
)
SHOWN = {"pll": "pseudo-log-likelihood", "within_word": "within-word pseudo-log-likelihood"}


class Published(NamedTuple):
    """A published score, in per cent."""

    name: str
    score: float
    mean_of: str  # "paradigms" or "phenomena": two different means
    source: str


_WARSTADT = "Warstadt et al. 2020, probabilities of whole sentences"
_BABYLM = "BabyLM 2023, on pairs that were filtered by vocabulary"
PUBLISHED = (
    Published("human", 88.6, "paradigms", "Warstadt et al. 2020"),
    Published("GPT-2", 83.0, "paradigms", _WARSTADT),
    Published("LSTM", 69.8, "paradigms", _WARSTADT),
    Published("Transformer-XL", 69.6, "paradigms", _WARSTADT),
    Published("n-gram", 61.2, "paradigms", _WARSTADT),
    Published("RoBERTa-base, 100 M words", 75.1, "phenomena", _BABYLM),
    Published("RoBERTa-base, 10 M words", 69.5, "phenomena", _BABYLM),
)


def lines(records: dict[str, BlimpRecord]) -> list[tuple[str, ...]]:
    """Rows below `HEAD`: the models of `records` by name, then the published figures."""
    rows = []
    for name, record in records.items():
        pairs = f"{record['pairs']:,}" + f" (partial: {record['partial']})" * bool(record["partial"])
        for method, scores in record["scores"].items():
            means = [
                f"{percent(scores[mean])} ({' to '.join(map(percent, scores[f'{mean}_interval']))})"
                for mean in ("mean_of_paradigms", "mean_of_phenomena")
            ]
            rows.append((name, SHOWN[method], *means, _of_random(record, method), pairs))
    for figure in PUBLISHED:
        means = [f"{figure.score}" if figure.mean_of == which else "-" for which in ("paradigms", "phenomena")]
        rows.append((figure.name, f"published: {figure.source}", *means, "-", "-"))
    return rows


def _of_random(record: BlimpRecord, method: str) -> str:
    """The control's mean over paradigms, and its range over several seeds."""
    scores = [control[method]["mean_of_paradigms"] for control in record["random_weights"]]
    if not scores:
        return "not run"
    if len(scores) == 1:
        return f"{percent(scores[0])} (1 seed)"
    return (
        f"{percent(statistics.fmean(scores))} ({percent(min(scores))} to {percent(max(scores))}, {len(scores)} seeds)"
    )
