"""Table of BLiMP scores with published ones for comparison (Warstadt et al. 2020, arXiv 1912.00582)."""

import statistics
from collections import namedtuple
from pathlib import Path

from roberta_recipe.log import counted
from roberta_recipe.model import weights
from roberta_recipe.record import BlimpRecord, percent

HEAD = ("model", "score", "mean of paradigms", "mean of phenomena", "random weights", "pairs")
EXPLANATION = (
    "BLiMP: percentage of sentence pairs in which the acceptable sentence has the higher score, with a 95% bootstrap "
    "interval over pairs. Random weights: mean of paradigms of the same architecture, untrained, on the same pairs; "
    "chance is not exactly 50, as pairs differ in length."
)
SHOWN = {"pll": "pseudo-log-likelihood", "within_word": "within-word pseudo-log-likelihood"}
Published = namedtuple("Published", "name score mean_of source")  # in per cent; the mean of "paradigms" or "phenomena"
_WARSTADT = "Warstadt et al. 2020, probabilities of whole sentences"
_BABYLM = "BabyLM 2023, on pairs filtered by vocabulary"
PUBLISHED = (
    Published("human", 88.6, "paradigms", "Warstadt et al. 2020"),
    Published("GPT-2", 83.0, "paradigms", _WARSTADT),
    Published("LSTM", 69.8, "paradigms", _WARSTADT),
    Published("Transformer-XL", 69.6, "paradigms", _WARSTADT),
    Published("n-gram", 61.2, "paradigms", _WARSTADT),
    Published("RoBERTa-base, 100 M words", 75.1, "phenomena", _BABYLM),
    Published("RoBERTa-base, 10 M words", 69.5, "phenomena", _BABYLM),
)


def rows(records: dict[str, BlimpRecord]) -> list[tuple[str, ...]]:
    """Rows of the table with the header `HEAD`: the models of `records`, then the published scores."""
    lines = []
    for name, record in records.items():
        pairs = f"{record['pairs']:,}" + f" (partial: {record['partial']})" * bool(record["partial"])
        for method, scores in record["scores"].items():
            means = [
                f"{percent(scores[mean])} ({' to '.join(map(percent, scores[f'{mean}_interval']))})"
                for mean in ("mean_of_paradigms", "mean_of_phenomena")
            ]
            lines.append((name, SHOWN[method], *means, _control_cell(record, method), pairs))
    for figure in PUBLISHED:
        means = [f"{figure.score}" if figure.mean_of == which else "-" for which in ("paradigms", "phenomena")]
        lines.append((figure.name, f"published: {figure.source}", *means, "-", "-"))
    return lines


def _control_cell(record: BlimpRecord, method: str) -> str:
    """The mean of paradigms with random weights, and its range over several seeds."""
    scores = [control[method]["mean_of_paradigms"] for control in record["random_weights"]]
    if not scores:
        return "not run"
    spread = f"{percent(min(scores))} to {percent(max(scores))}, " * (len(scores) > 1)
    return f"{percent(statistics.fmean(scores))} ({spread}{counted(len(scores), 'seed')})"


def is_stale(record: BlimpRecord, model: Path) -> bool:
    """Whether the scores belong to weights other than those in the folder `model`."""
    return (model / "model.safetensors").is_file() and record["weights"] != weights.content_hash(str(model))
