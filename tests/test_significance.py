"""Errors and tests, against simulation and the definition."""

import math

import numpy as np
import pytest

from roberta_recipe.significance import decimals_of, error_of_ratio, with_error


def test_the_error_over_documents_is_the_spread_of_repeated_draws():
    """Documents have levels of their own: an error over tokens would be far too small."""
    rng = np.random.default_rng(0)
    ratios, errors, naive = [], [], []
    for _ in range(400):
        counts = rng.integers(5, 60, size=80)
        losses = [rng.normal(3 + rng.normal(0, 0.5), 1.0, size=count) for count in counts]
        sums = np.array([loss.sum() for loss in losses])
        ratios.append(sums.sum() / counts.sum())
        errors.append(error_of_ratio(sums, counts))
        pooled = np.concatenate(losses)
        naive.append(pooled.std() / math.sqrt(len(pooled)))
    spread = np.std(ratios)
    assert np.mean(errors) == pytest.approx(spread, rel=0.1)
    assert np.mean(naive) < spread / 2


def test_no_error_of_a_single_document():
    assert error_of_ratio(np.array([3.0, 0.0]), np.array([2.0, 0.0])) is None


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (3.41649, 0.0517, "3.416 ± 0.052"),
        (3.41649, 0.517, "3.42 ± 0.52"),
        (30.46, 5.17, "30.5 ± 5.2"),
        (304.6, 51.7, "305 ± 52"),
        (3.41649, 0.00012, "3.416 ± 0.000"),
        (3.41649, None, "3.416"),
    ],
)
def test_a_figure_has_the_digits_that_its_error_allows(value, error, text):
    assert with_error(value, error) == text
    assert decimals_of(math.inf) == 3
