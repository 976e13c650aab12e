"""Standard errors and significance tests, compared with simulation and definition."""

import itertools
import math
import re

import numpy as np
import pytest
import scipy.stats

from roberta_recipe.standard_error import decimals_of, error_of_ratio, with_error
from tools import significance
from tools.significance import (
    LEVEL,
    MOST_SEEDS,
    PAIRS,
    holm,
    mean_and_error,
    permutation_p,
    sign_flip_p,
    verdict,
)


def compare(scores, first):
    """Scores of the same seeds, in their order."""
    return significance.compare(dict(enumerate(scores)), dict(enumerate(first)))


def test_the_error_over_documents_is_the_spread_of_repeated_draws():
    """Documents differ in level, so that an error over tokens would be far too small."""
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


def by_definition(first, second):
    """Reference: p of a permutation test, split by split."""
    everything = [*first, *second]
    gaps = []
    for chosen in itertools.combinations(range(len(everything)), len(first)):
        one = [everything[n] for n in chosen]
        two = [everything[n] for n in range(len(everything)) if n not in chosen]
        gaps.append(abs(np.mean(one) - np.mean(two)))
    return np.mean([gap >= gaps[0] - 1e-9 for gap in gaps])


def test_permutations_of_seeds():
    """By hand: of the 6 ways to split 1, 2, 3, 4 into pairs, 2 have the difference of {3, 4} and {1, 2}, 4 at least
    that of {2, 4}."""
    assert permutation_p([3, 4], [1, 2]) == pytest.approx(2 / 6)
    assert permutation_p([2, 4], [1, 3]) == pytest.approx(4 / 6)
    assert permutation_p([1, 4], [2, 3]) == 1.0
    rng = np.random.default_rng(0)
    for sizes in ((3, 3), (2, 4), (5, 3), (5, 5)):
        groups = [rng.integers(0, 6, size).tolist() for size in sizes]  # with ties
        assert permutation_p(*groups) == pytest.approx(by_definition(*groups))
        low, high = [[float(one) + 9 * side for one in range(size)] for side, size in enumerate(sizes)]
        assert permutation_p(low, high) == pytest.approx(significance.least_p(*sizes))
    assert permutation_p([0.1 + 0.2, 0.5], [0.3, 0.5]) == 1.0  # equal but for rounding


def test_signs_of_pairs():
    """By hand: of the 8 signs of 1, 2, 4, two sums are 7 or -7; two more are 5 or -5."""
    assert sign_flip_p([1, 2, 4]) == pytest.approx(2 / 8) == significance.least_paired_p(3)
    assert sign_flip_p([-1, 2, 4]) == pytest.approx(4 / 8)
    rng = np.random.default_rng(0)
    for count in (2, 5, 8):
        values = rng.normal(0.5, 1, count)
        sums = [abs(np.dot(signs, values)) for signs in itertools.product((1, -1), repeat=count)]
        assert sign_flip_p(values) == pytest.approx(np.mean([total >= sums[0] - 1e-9 for total in sums]))


def test_seeds_are_paired_where_there_are_enough_of_them():
    few, many = np.arange(5.0), np.arange(float(PAIRS))
    assert compare(few + 0.1, few).p > 0.8 and compare(few + 0.1, few).least_p == pytest.approx(2 / 252)
    assert compare(many + 0.1, many)[2:] == (2 / 2**PAIRS, 2 / 2**PAIRS, None)
    assert compare(many + 0.1, many).error == pytest.approx(0, abs=1e-12)
    assert compare(few + 0.1, few).error == pytest.approx(math.hypot(*[math.sqrt(2.5 / 5)] * 2))
    assert compare([1.0], [2.0]) == (-1.0, None, 1.0, 1.0, None)

    scores = dict(enumerate(many))
    assert significance.compare(scores, dict(reversed([(seed, one - 0.1) for seed, one in scores.items()]))).p < 0.01
    others = {seed + 1: one - 0.1 for seed, one in scores.items()}  # of other seeds, so not paired
    assert significance.compare(scores, others).p > 0.8
    assert significance.compare({1: 3.0, 2: 4.0}, {1: 1.0, 2: 2.0, 3: 2.5}).least_p == 1 / 10
    assert compare(range(MOST_SEEDS + 1), range(MOST_SEEDS + 1)).least_p < 2**-MOST_SEEDS < compare(many, many).least_p


def rejected(draw, repeats=1000):
    """The share of comparisons of random scores with p <= LEVEL."""
    rng = np.random.default_rng(0)
    return np.mean([compare(*draw(rng)).p <= LEVEL for _ in range(repeats)])


@pytest.mark.parametrize("noise", ["standard_normal", "standard_cauchy"])
@pytest.mark.parametrize(("seeds", "level"), [(5, 12 / 252), (PAIRS, 12 / 256)])
def test_level_of_both_tests(seeds, level, noise):
    """Without a difference, for any noise: the largest multiple of two arrangements up to 5%."""
    found = rejected(lambda rng: getattr(rng, noise)((2, seeds)))
    assert found == pytest.approx(level, abs=0.02) and found < 0.068


UNEQUAL = [14.18, 14.21, 14.18, 14.30, 14.21], [15.32, 14.40, 14.43, 14.18, 16.06]  # results/experiments.md, Table 3


def test_welch_s_p_where_noise_is_unequal():
    """For bits a word with batches of 8 and 64; compared with scipy for other counts, spreads and differences."""
    found = compare(*UNEQUAL[::-1])
    assert found.p <= LEVEL and found.welch_p == pytest.approx(0.135, abs=1e-3)
    assert verdict(found.difference, found.p, found.least_p, "worse", found.welch_p) == "unequal noise"
    rng, seen = np.random.default_rng(0), 0
    for sizes in itertools.product((2, 3, 5, 7), repeat=2):
        for spread, shift in itertools.product((0.0, 0.01, 0.1, 0.5, 1.0, 16.0), (0.0, 1.0, 30.0)):
            first, second = rng.standard_normal(sizes[0]), spread * rng.standard_normal(sizes[1]) + shift
            deviations = sorted((np.std(first, ddof=1), np.std(second, ddof=1)))
            p = significance.welch_p_if_unequal(first, second)
            assert (p is None) == (deviations[1] <= 4 * deviations[0])
            if p is not None:
                seen += 1
                assert p == pytest.approx(scipy.stats.ttest_ind(first, second, equal_var=False).pvalue, abs=1e-3)
    assert seen > 150
    assert significance.welch_p_if_unequal([1.0], [2.0, 5.0]) is None


def test_unequal_noise_is_no_difference():
    """Equal means, five seeds each: a permutation test alone rejects in 10% of tables."""
    rng, alone, called, repeats, ratio = np.random.default_rng(0), 0, 0, 1000, 16
    for _ in range(repeats):
        one = compare(ratio * rng.standard_normal(5), rng.standard_normal(5))
        alone += one.p <= LEVEL
        called += verdict(one.difference, one.p, one.least_p, None, one.welch_p) in ("better", "worse")
    assert alone / repeats > 0.08 and called / repeats < 0.06
    apart = compare(ratio * rng.standard_normal(5) + 9 * ratio, rng.standard_normal(5))
    assert verdict(apart.difference, apart.p, apart.least_p, "better", apart.welch_p) == "reproduced"


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.6, 0.5]) == [1.0, 1.0] and holm([]) == [] and holm([0.02]) == [0.02]


@pytest.mark.parametrize(
    ("gain", "p", "least", "claim", "said"),
    [
        (1.0, 0.05, 0.008, None, "better"),
        (-1.0, 0.01, 0.008, "worse", "reproduced"),
        (1.0, 0.01, 0.008, "worse", "reversed"),
        (1.0, 0.051, 0.008, "better", "within noise"),
        (1.0, 0.1, 0.1, "better", "too few seeds"),
        (1.0, 0.03, 0.17, "better", "reproduced"),  # last in Holm's order, behind tests of more seeds
    ],
)
def test_verdicts(gain, p, least, claim, said):
    assert verdict(gain, p, least, claim) == said


def test_the_page_s_example_is_computed(root):
    """docs/statistics.md: the scores of its first table give the results in its text."""
    page = (root / "docs" / "statistics.md").read_text(encoding="utf-8")
    section = page.split("## A worked example")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (\w+) \|((?: \d\.\d+ \|){5})$", section, re.M)
    scores = {name: [float(value) for value in values.strip(" |").split("|")] for name, values in lines}
    assert list(scores) == ["static", "dynamic", "nsp"]
    static, *others = scores.values()
    compared = [compare(other, static) for other in others]
    corrected = holm([one.p for one in compared])
    assert f"static {with_error(*mean_and_error(static))}" in section
    for (name, claim), of, one, p in zip(
        (("dynamic", "better"), ("nsp", "worse")), others, compared, corrected, strict=True
    ):
        said = verdict(-one.difference, p, one.least_p * len(others), claim)
        shown = f"{'+' * (one.difference > 0)}{with_error(one.difference, one.error)}"
        assert (
            f"{name} {with_error(*mean_and_error(of))}, {shown}, p {one.p:.2g}, corrected {p:.2g}: *{said}*" in section
        )
    groups = re.findall(r"least p of (\d+) and \d+ seeds is\s+(\d\.\d+)", page)
    pairs = re.findall(r"(\d+) pairs give\s+(\d\.\d+)", page)
    assert dict(groups) == {count: f"{significance.least_p(int(count), int(count)):.2g}" for count in ("3", "5")}
    assert dict(pairs) == {count: f"{significance.least_paired_p(int(count)):.2g}" for count in ("5", "8")}
