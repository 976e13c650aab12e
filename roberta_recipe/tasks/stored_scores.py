"""A run's scores of the test sets, stored so that the weights of all runs need not be: `test_scores.npz`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from roberta_recipe.errors import InputError, first_line
from roberta_recipe.record import TestScores
from roberta_recipe.tasks.seeds import Run, over_seeds
from roberta_recipe.training.finetune_trainer import validation_scores

NAME = "test_scores.npz"


def write(folder: Path, rows: str, scores: dict[str, np.ndarray]) -> None:
    """Store scores by split; `rows`: fingerprint of the tests' rows."""
    aside = folder / f"unfinished_{NAME}"
    np.savez(aside, rows=rows, **scores)
    aside.replace(folder / NAME)


def read(run: Run, rows: str) -> dict[str, np.ndarray] | None:
    """A run's scores by split; None where none are stored, or they are of other rows. Raises `InputError` where the
    file is damaged."""
    path = run.output_dir / NAME
    if not path.is_file():
        return None
    try:
        with np.load(path) as archive:
            stored = dict(archive)  # compares the zip's checksums
        of_rows = str(stored.pop("rows"))
    except Exception as error:  # zipfile, zlib and numpy have their own
        raise InputError(
            f"{path} is damaged ({first_line(error)}): move it away to have the tests scored again"
        ) from None
    return stored if of_rows == rows else None


def scores_of_tests(runs: list[Run], rows: str) -> list[dict[str, np.ndarray]]:
    """The scores of every run. Raises `InputError` where a run has none."""
    stored = [read(run, rows) for run in runs]
    if absent := [run.output_dir for run, scores in zip(runs, stored, strict=True) if scores is None]:
        raise InputError(
            f"{absent[0]} was run without do_predict, or on other test rows, and its weights are gone: move it away to "
            "have it run again"
        )
    return stored


def measure(
    runs: list[Run],
    rows: str,
    splits: dict[str, int],
    measured: Callable[[str, np.ndarray, np.ndarray], dict[str, float]],
    metric: str,
) -> dict[str, TestScores]:
    """The metrics of the runs with stored scores on the test `splits` (with their number of examples), by
    `Job.measure`. Raises `InputError` where no run has any."""
    scored = [run for run in runs if read(run, rows)] or runs
    stored, of_validation = scores_of_tests(scored, rows), [validation_scores(run.output_dir) for run in scored]
    found: dict[str, TestScores] = {}
    for split, examples in splits.items():
        both = zip(scored, stored, of_validation, strict=True)
        metrics = {run.seed: measured(split, scores[split], best) for run, scores, best in both}
        found[split] = {**over_seeds(metrics, metric), "examples": examples}
    return found
