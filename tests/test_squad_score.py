"""tools/squad_score.py: official files with missing predictions, ties and odds above 1; refused files.

Expected figures are derived by hand from the official scripts; `benchmarks/against_squad.py` runs those.
"""

import json
import re

import pytest
from conftest import run_python

from roberta_recipe.errors import InputError
from tools import squad_score

# question -> gold answers; "2" and "4" have none in version 2.0
GOLD = {"1": ["red boat", "boat"], "2": [], "3": ["the"], "4": [], "5": ["sea"]}
TEXTS = {"1": "a red boat", "2": "", "3": "", "4": "Paris", "5": "the North Sea"}


@pytest.fixture
def score(tmp_path):
    """A function: write the files of a case and score them."""

    def of(gold, texts, odds=None, version="2.0"):
        entries = [
            {"id": name, "question": "Who?", "answers": [{"text": text, "answer_start": 0} for text in answers]}
            for name, answers in gold.items()
        ]
        data = {"data": [{"paragraphs": [{"context": "A context.", "qas": entries}]}]}
        argv = ["--version_2_with_negative"] if version == "2.0" else []
        contents = {"validation_file": data, "predictions": texts} | ({} if odds is None else {"null_odds": odds})
        for flag, content in contents.items():
            path = tmp_path / f"{flag}.json"
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
            argv += [f"--{flag}", str(path)]
        return squad_score.main(argv)

    return of


def test_version_1_counts_what_is_left_out_as_wrong(score, capsys):
    """Even if the empty text would be right: the gold answer of "3" has no words."""
    gold = {name: answers for name, answers in GOLD.items() if answers}
    texts = {"5": "sea", "other": "x", "1": "a red boat"}
    assert score(gold, texts, version="1.1") == {"exact_match": 200 / 3, "f1": 200 / 3}
    said = capsys.readouterr().err
    assert "no prediction for 1 of 3 questions (3); they count as wrong" in said
    assert "1 ids match no question: other" in said
    assert score(gold, texts | {"3": ""}, version="1.1") == {"exact_match": 100.0, "f1": 200 / 3}
    assert "wrong" not in capsys.readouterr().err
    assert score(gold, {}, version="1.1") == {"exact_match": 0.0, "f1": 0.0}
    assert "no prediction for 3 of 3 questions (1, 3, 5)" in capsys.readouterr().err


def test_version_2_needs_all_predictions_and_all_odds(score):
    texts = {name: text for name, text in TEXTS.items() if name not in "24"}
    with pytest.raises(InputError, match=r"no prediction for 2 of 5 questions \(2, 4\); the official 2.0 script"):
        score(GOLD, texts)
    with pytest.raises(InputError, match=r"null_odds.json has no odds for 4 of 5 questions \(2, 3, 4, 5\)"):
        score(GOLD, TEXTS, {"1": 0.5})


def test_equal_odds_are_taken_in_the_order_of_their_file(score):
    """All odds are equal, so that the best score is that of a prefix of the file's questions."""
    late, early = {"4": 0.5, "1": 0.5, "3": 0.5}, {"1": 0.5, "3": 0.5, "4": 0.5}
    rest = {"2": 0.5, "5": 0.75, "not asked for": 0.1}
    found = {name: score(GOLD, TEXTS, odds | rest) for name, odds in (("late", late), ("early", early))}
    # two unanswerable questions: 2; then -1, +1, +1, against +1, +1, -1; "5" adds 0 to exact, 2/3 to F1
    assert [found[name]["best_exact"] for name in ("late", "early")] == [60.0, 80.0]
    assert [found[name]["best_exact_thresh"] for name in ("late", "early")] == [0.5, 0.5]
    assert found["late"]["best_f1"] == pytest.approx(100 * (3 + 2 / 3) / 5) and found["late"]["best_f1_thresh"] == 0.75
    assert found["early"]["best_f1"] == 80.0 and found["early"]["best_f1_thresh"] == 0.5
    assert found["late"]["exact"] == found["early"]["exact"] == 60.0


def test_odds_above_1_withhold_an_answer_and_are_said(score, capsys):
    """Log odds: as in the official script, the threshold is 1, except for the best scores."""
    plain = score(GOLD, TEXTS)
    assert (plain["exact"], plain["HasAns_exact"], plain["NoAns_exact"]) == (60.0, pytest.approx(200 / 3), 50.0)
    assert "best_exact" not in plain
    odds = {"1": 2.5, "2": 7, "3": -3.0, "4": 1.5, "5": -4.25}
    found = score(GOLD, TEXTS, odds)
    assert (found["exact"], found["HasAns_exact"], found["NoAns_exact"]) == (60.0, pytest.approx(100 / 3), 100.0)
    assert found["f1"] == pytest.approx(100 * (0 + 1 + 1 + 1 + 2 / 3) / 5)
    # 2, then "5" 0, "3" +1, "4" -1, "1" +1, "2" 0
    assert (found["best_exact"], found["best_exact_thresh"]) == (60.0, -3.0)
    said = capsys.readouterr().err
    assert "the odds of 3 of 5 questions are above 1 (1, 2, 4)" in said and "unanswered in all but the best" in said
    score(GOLD, TEXTS, dict.fromkeys(GOLD, 1))
    assert "above 1" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("texts", "odds", "said"),
    [
        ("[]", None, "predictions.json must be a JSON object, question id to prediction"),
        (TEXTS | {"1": 1}, None, "the prediction of question 1 is 1"),
        (TEXTS | {"other": None}, None, "the prediction of question other is None"),
        (TEXTS, dict.fromkeys(GOLD, "0.5"), "the odds of question 1 is '0.5'"),
        (TEXTS, dict.fromkeys(GOLD, True), "the odds of question 1 is True"),
    ],
)
def test_what_cannot_be_scored_is_named(score, texts, odds, said):
    with pytest.raises(InputError, match=re.escape(said)):
        score(GOLD, texts, odds)


def test_it_starts_without_the_libraries_of_training(root):
    loaded = "import tools.squad_score, sys; print(*{'torch', 'datasets', 'evaluate'} & sys.modules.keys())"
    done = run_python("-c", loaded, cwd=root)
    assert done.returncode == 0 and done.stdout.strip() == "", done.stderr
