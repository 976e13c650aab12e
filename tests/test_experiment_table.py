"""Table of an experiment list, computed by hand: n, spread, differences, p, verdicts."""

import pytest

from experiments import lists, table


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """A function: a list whose rows have the given figures, by measure and name; None for a missing row."""

    def of(figures, claims=(), search=False):
        measures, names = list(figures), list(next(iter(figures.values())))
        seeds = list(range(1, 1 + max(len(of) for of in figures[measures[0]].values())))
        settings = [lists.Variant(name, claim=dict(claims).get(name)) for name in names]
        rows = [lists.Experiment(name, seed, tmp_path, [], {}, {}) for seed in seeds for name in names]
        monkeypatch.setattr(lists.Experiment, "figure", lambda row, measure: figures[measure][row.name][row.seed - 1])
        return lists.ExperimentList(tmp_path / "l.yaml", tmp_path, settings, seeds, measures, search, rows)

    return of


def lines_of(text):
    return {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in text.splitlines() if "|" in line
    }


LOW, HIGH = [3.0, 3.1, 3.2, 3.3, 3.4], [4.0, 4.1, 4.2, 4.3, 4.4]


def test_the_table_by_hand(listed):
    """Two samples of five seeds without overlap: 2 of 252 splits, with Holm's correction for three comparisons."""
    near = [3.05, 3.15, 3.1, 3.3, 3.45]
    names = {"first": LOW, "high": HIGH, "near": near, "higher": [4.1, 4.2, 4.3, 4.4, 4.5]}
    text = table.write(listed({"loss": names}, claims={"high": "worse", "higher": "better"}))
    rows = lines_of(text)
    # the standard error of 3.0 ... 3.4 is sqrt(0.025) / sqrt(5) = 0.0707, of the difference of two such 0.1
    assert rows["first"][1:] == ["5", "3.200 ± 0.071", "-", "-", "-"]
    assert rows["high"][1:] == ["5", "4.200 ± 0.071", "+1.00 ± 0.10", "0.024", "reproduced"]  # 3 x 2 / 252
    assert rows["higher"][1:] == ["5", "4.300 ± 0.071", "+1.10 ± 0.10", "0.024", "reversed"]
    assert rows["near"][3:] == ["+0.01 ± 0.10", rows["near"][4], "within noise"] and float(rows["near"][4]) > 0.5
    assert "exact permutation of 5 and 5 seeds, two-sided, with Holm's correction over 3 comparisons" in text
    assert "significant up to 0.05 if Welch's t-test agrees" in text


def test_words_of_one_piece_that_are_other_words_get_no_verdict(listed, monkeypatch):
    """The set of one-piece words depends on the reading with the lower figure, and on the tokenizer."""
    read_apart = {"first": 18, "same": 18, "other": 19}
    names = {"first": LOW, "same": HIGH, "other": HIGH}
    monkeypatch.setattr(
        lists.Experiment,
        "measured",
        lambda row, _: {
            "reading": "as written" if read_apart[row.name] == 19 else "sentences apart",
            "short_words": read_apart[row.name],
        },
    )
    text = table.write(listed({"words": names, "short_words": names}))
    assert lines_of(text)["same"][-3:] == ["+1.00 ± 0.10", "0.016", "worse"]
    assert lines_of(text)["other"][3:] == [
        "+1.00 ± 0.10",
        "0.016",
        "worse",
        "4.200 ± 0.071",
        "-",
        "-",
        "different words",
    ]
    assert (
        "Input format of words: sentences apart in first, same; as written in other; the one-piece words differ" in text
    )
    read_apart["other"] = 18
    assert "Input format of words" not in table.write(listed({"words": names, "short_words": names}))


def test_rows_that_are_missing_leave_cells_unfinished(listed):
    names = {"first": LOW, "begun": [3.0, None, None, None, None], "none": [None] * 5, "lost": [float("nan")] + LOW[1:]}
    rows = lines_of(table.write(listed({"loss": names, "blimp": dict.fromkeys(names, [60.0] * 5)})))
    assert rows["begun"][1:6] == ["1 of 5", "3.000", "-", "-", "unfinished"]
    assert rows["none"][1:6] == ["0 of 5", "not run", "-", "-", "not run"]
    assert rows["lost"][1:6] == ["5", "nan", "-", "-", "not finite"]
    assert rows["lost"][6:] == ["60.000", "0.000", "1", "within noise"]


def test_from_eight_seeds_on_a_seed_is_a_pair(listed):
    first = [3.0, 5.0, 7.0, 9.0, 2.0, 4.0, 6.0, 8.0]
    text = table.write(listed({"score": {"first": first, "more": [one + 0.1 for one in first]}}))
    assert lines_of(text)["more"][4:] == ["0.0078", "better"] and "of 8 pairs with equal seeds" in text  # 2 / 2^8
    assert "significant up to 0.05 (docs" in text  # Welch's test is of unpaired scores


def test_a_search_picks_and_says_nothing_else(listed):
    text = table.write(listed({"loss": {"first": HIGH, "low": LOW}}, search=True))
    assert "A search, so no verdicts: low has the best mean loss" in text
    assert lines_of(text)["low"] == ["low", "5", "3.200 ± 0.071"]
