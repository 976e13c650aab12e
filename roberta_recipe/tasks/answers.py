"""A run's answers to the validation examples, the worst first, as a TSV table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roberta_recipe import durable

ANSWERS_NAME = "validation_answers.tsv"  # in the folder of the best run, beside its best epoch


@dataclass(frozen=True)
class Answer:
    """A row of the table: its columns by name, and its sort key, the highest first."""

    columns: dict[str, Any]
    badness: tuple[float, ...]


def of_classes(
    examples: Sequence[dict[str, str]],
    names: Sequence[str],
    labels: Sequence[int],
    predictions: np.ndarray,
    probabilities: np.ndarray | None = None,
) -> list[Answer]:
    """Classification among `names`: wrong answers first, those with the least probable label at the top. `examples`:
    the columns before the answer; labels and predictions (examples,): class numbers; `probabilities` (examples,
    classes): None where examples are compared with each other."""
    found = []
    for number, (example, label, prediction) in enumerate(zip(examples, labels, predictions, strict=True)):
        columns = {**example, "label": names[label], "prediction": names[prediction]}
        of_label = 0.0
        if probabilities is not None:
            columns["probability"], of_label = probabilities[number, prediction], probabilities[number, label]
        columns["verdict"] = "right" if prediction == label else "wrong"
        found.append(Answer(columns, (prediction != label, -of_label)))
    return found


def of_numbers(examples: Sequence[dict[str, str]], labels: Sequence[float], predictions: np.ndarray) -> list[Answer]:
    """Regression: the largest error first."""
    rows = [
        {**example, "label": label, "prediction": predicted, "error": abs(predicted - label)}
        for example, label, predicted in zip(examples, labels, predictions, strict=True)
    ]
    return [Answer(row, (row["error"],)) for row in rows]


def write(path: Path, answers: Sequence[Answer]) -> None:
    """The table as a TSV without quotes: a tab or a line end in a text becomes a space."""
    worst_first = sorted(answers, key=lambda answer: answer.badness, reverse=True)
    rows = [list(answers[0].columns), *(answer.columns.values() for answer in worst_first)]
    durable.write_text(path, "".join("\t".join(map(_cell, row)) + "\n" for row in rows))


def _cell(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return f"{value:.4f}"
    return " ".join(str(value).replace("\t", " ").splitlines())
