"""SQuAD's exact match and F1, computed by hand for difficult cases."""

import evaluate
import pytest

from roberta_recipe.tasks.squad_metric import Squad
from roberta_recipe.tasks.squad_scores import f1, normalise


def test_official_definitions_on_awkward_cases():
    assert normalise("The  “Theatre”, a Man's an_d 1,000!") == "“theatre” mans and 1000"
    assert normalise("A.N.") == "" and normalise("t.h.e.o") == "theo"
    assert f1("a", "the", empty_matches=True) == 1.0 and f1("a", "the", empty_matches=False) == 0.0
    assert f1("x", "the", empty_matches=True) == 0.0
    assert f1("red red boat", "the red boat", False) == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    rows = [
        ("several", "the Denver Broncos", ["Denver Broncos", "Broncos"], 1, 1),
        ("partial", "in Denver", ["Denver Broncos", "Denver"], 0, 2 / 3),
        ("comma", "1,000", ["1000"], 1, 1),
        ("unicode", "“Theatre”", ["Theatre"], 0, 0),
        ("dash", "apple-tree", ["apple tree"], 0, 0),
        ("case", "DENVER", ["denver"], 1, 1),
    ]
    predictions = [{"id": name, "prediction_text": text} for name, text, *_ in rows]
    references = [{"id": name, "answers": gold} for name, _, gold, *_ in rows]
    found = Squad("1.1").compute(predictions=predictions, references=references[::-1])  # paired by id
    assert found["exact_match"] == pytest.approx(100 * 3 / 6) and found["f1"] == pytest.approx(100 * (3 + 2 / 3) / 6)
    with pytest.raises(ValueError, match="the same ids"):
        Squad("1.1").compute(predictions=[*predictions[1:], predictions[1]], references=references)


def test_version_2_by_hand():
    rows = [
        ("right", "Denver", 0.1, ["Denver"]),
        ("withheld", "", 0.9, ["Denver"]),
        ("rightly withheld", "", 0.8, []),
        ("made up", "Paris", 0.3, []),
        ("only an article", "", 0.2, ["the"]),  # a gold answer without words: the empty text is right
    ]
    predictions = [{"id": n, "prediction_text": t, "no_answer_probability": p} for n, t, p, _ in rows]
    references = [{"id": n, "answers": gold} for n, _, _, gold in rows]
    found = Squad("2.0").compute(predictions=predictions, references=references)
    assert (found["exact"], found["total"]) == (60.0, 5)
    assert (found["HasAns_exact"], found["HasAns_total"]) == (pytest.approx(200 / 3), 3)
    assert (found["NoAns_exact"], found["NoAns_total"]) == (50.0, 2)
    # from a score of 2 (two unanswerable questions): +1 (0.1), +1 (0.2), -1 (0.3), 0, 0
    assert (found["best_exact"], found["best_exact_thresh"]) == (80.0, 0.2)
    without = [{**row, "no_answer_probability": None} for row in predictions]
    assert "best_f1" not in Squad("2.0").compute(predictions=without, references=references)


def test_the_metric_loads_from_its_path(root):
    metric = evaluate.load(str(root / "roberta_recipe" / "tasks" / "squad_metric.py"), "1.1")
    found = metric.compute(
        predictions=[{"id": "x", "prediction_text": "a boat"}], references=[{"id": "x", "answers": ["the boat", "sea"]}]
    )
    assert found == {"exact_match": 100.0, "f1": 100.0}
    with pytest.raises(KeyError, match="'3' is not a version of SQuAD"):
        Squad("3")
