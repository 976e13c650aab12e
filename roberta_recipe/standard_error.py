"""Standard errors of losses over documents, and the format of figures with errors (docs/statistics.md)."""

import math

import numpy as np


def error_of_ratio(sums: np.ndarray, counts: np.ndarray) -> float | None:
    """Cluster-robust standard error of sum(sums) / sum(counts), both (clusters,); clusters, such as documents, are
    independent of each other. None for fewer than two.

    Linearised: sqrt(C / (C - 1) x sum of (sum_c - ratio x count_c)^2) / sum(counts) (Cochran 1977, section 2.11,
    without the correction for a finite population).
    """
    used = counts > 0
    clusters, total = int(used.sum()), counts.sum()
    if clusters < 2:
        return None
    residuals = (sums - sums.sum() / total * counts)[used]
    return float(math.sqrt(clusters / (clusters - 1) * (residuals**2).sum()) / total)


def decimals_of(error: float | None, most: int = 3) -> int:
    """Decimals for a figure with this standard error: down to the error's second digit, at most `most`."""
    if not error or not math.isfinite(error):
        return most
    return min(max(1 - math.floor(math.log10(error)), 0), most)


def with_error(value: float | None, error: float | None, most: int = 3) -> str:
    """A figure with its standard error, if any: "3.42 ± 0.05"; "nan" for None."""
    if value is None:
        return "nan"
    decimals = decimals_of(error, most)
    return f"{value:.{decimals}f}" + (f" ± {error:.{decimals}f}" if error else "")


def perplexity_with_error(perplexity: float | None, error_of_loss: float | None) -> str:
    """A perplexity with its standard error, derived from that of the loss in nats."""
    return with_error(perplexity, perplexity * error_of_loss if perplexity and error_of_loss else None, most=2)
