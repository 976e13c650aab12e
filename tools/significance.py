"""Significance tests between settings over seeds, and verdicts (docs/statistics.md)."""

import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

LEVEL = 0.05  # significance level of the corrected p
PAIRS = 8  # number of seeds from which tests are paired; five pairs give p = 0.06 at best, eight 0.008
UNEQUAL = 4  # ratio of standard deviations above which Welch's t-test must agree with the permutation test
MOST_SEEDS = 16  # per setting of a list: the paired test enumerates all 2^n signs
_MOST_SPLITS = 1 << 20  # permutations to enumerate; for more, a random sample is drawn
_DRAWN = 1 << 17  # size of the sample
Verdict = Literal["reproduced", "reversed", "better", "worse", "within noise", "unequal noise", "too few seeds"]


class Comparison(NamedTuple):
    """Scores over seeds compared with those of a baseline."""

    difference: float  # of means
    error: float | None  # its standard error; None for a single seed
    p: float  # two-sided, uncorrected
    least_p: float  # the least p for this number of seeds
    welch_p: float | None = None  # if standard deviations differ by more than `UNEQUAL` times


def mean_and_error(scores: Sequence[float]) -> tuple[float, float | None]:
    """Mean over seeds and its standard error, standard deviation (n - 1) / sqrt(n); None for a single seed and for
    non-finite scores."""
    mean = float(np.mean(scores))
    if len(scores) < 2 or not math.isfinite(mean):
        return mean, None
    return mean, float(np.std(scores, ddof=1)) / math.sqrt(len(scores))


def compare(scores: dict[int, float], first: dict[int, float]) -> Comparison:
    """Compare scores by seed with those of `first`: paired (`sign_flip_p`) for the same `PAIRS` to `MOST_SEEDS` seeds,
    else unpaired (`permutation_p`)."""
    if scores.keys() == first.keys() and PAIRS <= len(scores) <= MOST_SEEDS:
        differences = [scores[seed] - first[seed] for seed in sorted(scores)]
        return Comparison(*mean_and_error(differences), sign_flip_p(differences), least_paired_p(len(differences)))
    ours, theirs = [*scores.values()], [*first.values()]
    (mean, error), (other, other_error) = mean_and_error(ours), mean_and_error(theirs)
    together = None if error is None or other_error is None else math.hypot(error, other_error)
    p, least = permutation_p(ours, theirs), least_p(len(ours), len(theirs))
    return Comparison(mean - other, together, p, least, welch_p_if_unequal(ours, theirs))


def permutation_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p of a permutation test on the difference of means: the share of splits of the scores into groups of
    these sizes that differ at least as much. Over all splits or, above 2^20, over the observed and 2^17 random ones."""
    scores, size = np.array([*first, *second], dtype=float), len(first)
    if math.comb(len(scores), size) <= _MOST_SPLITS:
        chosen = np.array(list(itertools.combinations(range(len(scores)), size)))  # the first is `first`
    else:
        draws = np.random.default_rng(0).random((_DRAWN, len(scores))).argsort(axis=1)[:, :size]
        chosen = np.concatenate([np.arange(size)[None], draws])
    sums = scores[chosen].sum(1)
    gaps = np.abs(sums / size - (scores.sum() - sums) / (len(scores) - size))
    return float(np.mean(gaps >= gaps[0] - _rounding(scores)))


def least_p(first: int, second: int) -> float:
    """The least p of `permutation_p` for groups of these sizes: 0.10 for three and three, 0.008 for five."""
    splits = math.comb(first + second, first)
    return (2 if first == second else 1) / splits if splits <= _MOST_SPLITS else 1 / (_DRAWN + 1)


def welch_p_if_unequal(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Two-sided p of Welch's t-test if standard deviations differ by more than `UNEQUAL` times (the permutation test
    assumes equal ones), else None. P(|T| > t) by the trapezoidal rule over x = atan(T / sqrt(degrees of freedom)), with
    density cos(x)^(degrees - 1)."""
    counts = np.array([len(first), len(second)])
    if counts.min() < 2:
        return None
    deviations = np.array([np.std(first, ddof=1), np.std(second, ddof=1)])
    if deviations.max() <= UNEQUAL * deviations.min():
        return None
    errors = deviations**2 / counts
    degrees = errors.sum() ** 2 / (errors**2 / (counts - 1)).sum()
    t = abs(np.mean(first) - np.mean(second)) / math.sqrt(errors.sum())
    tail, whole = (np.linspace(start, math.pi / 2, 10_001) for start in (math.atan(t / math.sqrt(degrees)), 0.0))
    areas = [np.trapezoid(np.cos(angles) ** (degrees - 1), angles) for angles in (tail, whole)]
    return float(areas[0] / areas[1])


def sign_flip_p(differences: Sequence[float]) -> float:
    """Exact two-sided p of a paired sign-flip test: the share of sign assignments to the differences that sum to at
    least as far from 0."""
    values = np.array(differences, dtype=float)
    signs = 1 - 2 * (np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1)  # the first are all +1
    sums = np.abs(signs @ values)
    return float(np.mean(sums >= sums[0] - _rounding(values)))


def least_paired_p(pairs: int) -> float:
    """The least p of `sign_flip_p` for this number of pairs: 0.06 for five, 0.008 for eight."""
    return 2.0 ** (1 - pairs)


def _rounding(values: np.ndarray) -> float:
    """Tolerance for rounding in sums of `values`."""
    return 1e-12 * float(np.abs(values).sum())


def holm(ps: Sequence[float]) -> list[float]:
    """p-values with Holm's correction (1979), in the order of `ps`: bounds the family-wise error rate."""
    corrected, before = [0.0] * len(ps), 0.0
    for rank, number in enumerate(sorted(range(len(ps)), key=lambda number: ps[number])):
        before = corrected[number] = max(before, min(1.0, (len(ps) - rank) * ps[number]))
    return corrected


def verdict(
    gain: float,
    p: float,
    least: float,
    claim: Literal["better", "worse"] | None = None,
    welch_p: float | None = None,
) -> Verdict:
    """The verdict on a comparison from its corrected `p`, the `least` possible p, and Welch's p for unequal noise.
    `gain`: positive if the score is better; `claim`: the source's direction."""
    if p > LEVEL:
        return "too few seeds" if least > LEVEL else "within noise"
    if welch_p is not None and welch_p > LEVEL:
        return "unequal noise"
    found = "better" if gain > 0 else "worse"
    return found if claim is None else "reproduced" if found == claim else "reversed"
