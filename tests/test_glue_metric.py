"""GLUE metrics compared with scikit-learn and scipy, and loaded by `evaluate`."""

import ast
import math
import sys

import evaluate
import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import example, given
from hypothesis import strategies as st

from roberta_recipe.tasks import glue_metric, glue_scores
from roberta_recipe.tasks.glue import TASKS

CLASSES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=40)
BINARY = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)
SCORES = st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 5)), min_size=3, max_size=40)


def columns(pairs):
    return np.array([a for a, _ in pairs], dtype=float), np.array([b for _, b in pairs], dtype=float)


@given(CLASSES)
def test_accuracy(pairs):
    predictions, references = columns(pairs)
    wanted = sklearn.metrics.accuracy_score(references, predictions)
    assert glue_scores.accuracy(predictions, references) == pytest.approx(wanted, abs=1e-12)


@given(BINARY)
def test_f1_and_matthews_correlation(pairs):
    predictions, references = columns(pairs)
    wanted = sklearn.metrics.f1_score(references, predictions, zero_division=0.0)
    assert glue_scores.f1(predictions, references) == pytest.approx(wanted, abs=1e-12)
    wanted = sklearn.metrics.matthews_corrcoef(references, predictions)
    assert glue_scores.matthews_correlation(predictions, references) == pytest.approx(wanted, abs=1e-12)


@example([(0.1, 1.0), (0.1, 2.0), (0.1, 3.0)])  # the mean of three 0.1 is not 0.1
@given(SCORES)
@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_correlations_of_scores(pairs):
    predictions, references = columns(pairs)
    for ours, scipys in ((glue_scores.pearson, scipy.stats.pearsonr), (glue_scores.spearman, scipy.stats.spearmanr)):
        wanted, got = scipys(predictions, references).statistic, ours(predictions, references)
        assert got == pytest.approx(wanted, abs=1e-9) or (math.isnan(wanted) and math.isnan(got))


def test_each_task_has_its_metrics_in_python_and_from_its_path(root, tmp_path, monkeypatch):
    loaded = evaluate.load(str(root / "roberta_recipe/tasks/glue_metric.py"), "mrpc", cache_dir=str(tmp_path))
    for metric in (loaded, glue_metric.Glue("mrpc", cache_dir=str(tmp_path))):
        got = metric.compute(predictions=[1, 1, 0, 0], references=[1, 0, 1, 0])
        assert got == {"accuracy": 0.5, "f1": 0.5}
    scores = glue_metric.Glue("stsb", cache_dir=str(tmp_path)).compute(
        predictions=[0.1, 2.5, 3.0], references=[0, 2, 5]
    )
    assert set(scores) == {"pearson", "spearman"} and scores["spearman"] == pytest.approx(1.0)
    used = {name for task in TASKS.values() for name in task.metrics}
    assert {*used, "macro_f1", "micro_f1"} == set(glue_scores.FUNCTIONS) and len(TASKS) == 9
    assert {name: task.metrics for name, task in TASKS.items()} == glue_scores.GLUE_METRICS
    with pytest.raises(KeyError, match="not a task of GLUE"):
        glue_metric.Glue("glue")


@pytest.mark.parametrize(("name", "others"), [("glue_metric", {"glue_scores"}), ("squad_metric", {"squad_scores"})])
def test_a_metric_module_needs_nothing_else_of_the_repository(root, name, others):
    """`evaluate` copies only a module and its relative imports."""
    for module, wanted in ((name, {"datasets", "evaluate", *others}), (*others, {"numpy", *sys.stdlib_module_names})):
        tree = ast.parse((root / f"roberta_recipe/tasks/{module}.py").read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[0] for name in names} <= wanted
