"""Majority baseline and numbers of scored examples of fine-tuning runs."""

import math
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from glue_runs import data_dir  # noqa: F401

import finetune_glue
import finetune_race
import finetune_squad
from roberta_recipe.errors import InputError
from roberta_recipe.tasks import glue, glue_scores, race, squad, summaries
from roberta_recipe.tasks.squad_scores import score_2


def accuracy(wanted):
    return lambda split, answers: {"accuracy": float(np.mean(answers == np.array(wanted[split])))}


def test_the_first_split_says_which_answer_is_the_most_frequent():
    wanted = {"validation_matched": [0, 2, 2, 1], "validation_mismatched": [0, 0, 0, 2, 1]}
    found = summaries.majority_answer(wanted, ("yes", "maybe", "no"), accuracy(wanted))
    assert found == {"answer": "no", "metrics": {"accuracy": 0.5, "accuracy_mismatched": 0.2}}
    wanted = {"validation": [1, 0, 0, 1]}
    assert summaries.majority_answer(wanted, "AB", accuracy(wanted))["answer"] == "A"  # of equals, the first
    assert summaries.majority_answer({"validation": [2.5, 0.0]}, (), None) is None  # scores, not classes
    with pytest.raises(InputError, match="validation_mismatched has no examples"):
        summaries.majority_answer({**wanted, "validation_mismatched": []}, "AB", accuracy(wanted))


def glue_job(name, labels, model_dir, tokenizer):
    """The job of a task whose only validation split has these labels."""
    task = glue.TASKS[name]
    args = finetune_glue.GlueArguments(task_name=name, model_name_or_path=model_dir)
    data = {split: glue.Examples([("a",)] * len(labels), labels) for split in ("train", *task.splits_of("validation"))}
    form = SimpleNamespace(build_model=None, features={}, collator=None, loss_sum=None)
    return finetune_glue.job_of(args, task, data, form, tokenizer, {})


@pytest.mark.parametrize(
    ("name", "answer", "metrics"),
    [  # two of three labels are 1; F1 of "1" to everything: precision 2/3, recall 1
        ("cola", "1", {"matthews_correlation": 0.0}),
        ("mrpc", "1", {"accuracy": 2 / 3, "f1": 0.8}),
        ("rte", "not_entailment", {"accuracy": 2 / 3}),
        ("mnli", "neutral", {"accuracy": 2 / 3, "accuracy_mismatched": 2 / 3}),
    ],
)
def test_glue(name, answer, metrics, model_dir, tokenizer):
    job = glue_job(name, [1, 0, 1], model_dir, tokenizer)
    assert job.scored_examples == dict.fromkeys(glue.TASKS[name].splits_of("validation"), 3)
    assert job.baseline["answer"] == answer and job.baseline["metrics"] == pytest.approx(metrics)


def test_a_correlation_has_no_majority(model_dir, tokenizer):
    job = glue_job("stsb", [2.5, 5.0, 2.5, 0.0], model_dir, tokenizer)
    assert job.baseline is None and job.scored_examples == {"validation": 4}
    of_constant = glue_scores.scores(glue.TASKS["stsb"].metrics, np.full(4, 2.5), np.array([2.5, 5.0, 2.5, 0.0]))
    assert all(math.isnan(value) for value in of_constant.values())


def test_race(model_dir, tokenizer):
    rows = [("middle", 1), ("middle", 1), ("high", 1), ("high", 0), ("high", 3)]
    questions = [race.RaceExample("q", level, "text", "a _", tuple("abcd"), answer) for level, answer in rows]
    args = finetune_race.RaceArguments(model_name_or_path=model_dir)
    features = {split: SimpleNamespace(rows=[]) for split in ("train", "validation")}
    job = finetune_race.job_of(args, {"train": [], "validation": questions}, features, tokenizer, {})
    assert job.scored_examples == {"validation": 5, "middle": 2, "high": 3}
    assert job.baseline["answer"] == "B"
    assert job.baseline["metrics"] == pytest.approx({"accuracy": 0.6, "middle": 1.0, "high": 1 / 3})


@pytest.mark.parametrize("version_2", [False, True])
def test_squad(version_2, model_dir, tokenizer):
    answers = [(("a dog", 0),), (), (), (("the", 0),)]  # "the" is nothing but an article: the official script drops it
    questions = [squad.SquadExample(str(n), "who", "a dog", found) for n, found in enumerate(answers)]
    args = finetune_squad.SquadArguments(model_name_or_path=model_dir, version_2_with_negative=version_2)
    windows = {split: SimpleNamespace(features=[{}] * 9) for split in ("train", "validation")}
    job = finetune_squad.job_of(args, {"train": [], "validation": questions}, windows, tokenizer, {})
    assert job.scored_examples == {"validation": 4}  # questions, not windows
    if not version_2:
        assert job.baseline is None
        return
    gold = {question.id: [text for text, _ in question.answers] for question in questions}
    official = score_2(dict.fromkeys(gold, ""), gold)
    assert job.baseline["answer"] == "no answer" and job.baseline["metrics"]["exact"] == 0.75
    assert {name: value / 100 for name, value in official.items() if "total" not in name} == job.baseline["metrics"]


def test_the_samples_of_the_frozen_probe_are_whole(root, data_dir, model_dir, monkeypatch, capsys):  # noqa: F811
    """`benchmarks/frozen_probe.py`: CoLA has too few examples for five disjoint samples of 2,000."""
    flags = ["--model_name_or_path", model_dir, "--data_dir", data_dir, "--task_name", "cola", "--examples", "5"]
    monkeypatch.setattr(sys, "argv", ["frozen_probe.py", *map(str, flags)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(root / "benchmarks" / "frozen_probe.py"), run_name="__main__")
    assert "5 disjoint samples of 5 are 25 of 24 examples" in capsys.readouterr().err
