"""Fine-tuning scores over seeds (paper, section 5.1): median and spread, majority baseline, validation predictions,
stored test-set scores, and the printed table."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roberta_recipe import durable
from roberta_recipe import record as records
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import explained
from roberta_recipe.training.finetune_trainer import WEIGHTS, validation_scores

ANSWERS_NAME = "validation_answers.tsv"  # in the folder of the best run
TEST_SCORES = "test_scores.npz"  # in every run's folder: only the best run keeps its weights


@dataclass(frozen=True)
class Run:
    """A learning rate, batch size and seed, with the run's folder."""

    learning_rate: float
    batch: int
    seed: int
    output_dir: Path

    @property
    def setting(self) -> tuple[float, int]:
        return self.learning_rate, self.batch


def runs_of(rates: list[float], batches: list[int], seeds: list[int], output_dir: str | Path) -> list[Run]:
    """A run for every learning rate, batch size and seed, each in a folder below `output_dir`."""
    return [
        Run(rate, size, seed, Path(output_dir, f"lr{rate:g}-batch{size}-seed{seed}"))
        for rate, size, seed in itertools.product(rates, batches, seeds)
    ]


def of_setting(runs: list[Run], row: records.Scores) -> list[Run]:
    """The runs with the learning rate and batch size of `row`."""
    return [run for run in runs if run.setting == (row["learning_rate"], row["global_batch_size"])]


def summarise(runs: list[Run], results: list[records.FinetuneRecord], metric: str) -> dict[str, Any]:
    """Scores of a `Summary`: median and spread of `metric` over seeds by setting; the setting of the best median."""
    rows: list[records.Scores] = []
    pairs = zip(runs, results, strict=True)  # the seeds of a setting are neighbours
    for (rate, size), group in itertools.groupby(pairs, lambda pair: pair[0].setting):
        scored = dict(group)
        scores = over_seeds({run.seed: record["metrics"] for run, record in scored.items()}, metric)
        rows.append(
            {
                "learning_rate": rate,
                "global_batch_size": size,
                **scores,
                "degenerate_seeds": [run.seed for run, record in scored.items() if record["degenerate"]],
                "best_run": str(max(scored, key=lambda run, seeds=scores["seeds"]: seeds[run.seed]).output_dir),
            }
        )
    return {"metric": metric, "settings": rows, "picked": max(range(len(rows)), key=lambda n: rows[n]["median"])}


def over_seeds(metrics: dict[int, dict[str, float | None]], metric: str) -> records.Scores:
    """Median and spread of `metric`, and the medians of all metrics, from metrics by seed."""
    seeds = {seed: comparable(values[metric]) for seed, values in metrics.items()}
    names = next(iter(metrics.values()))
    return {
        "median": statistics.median(seeds.values()),
        "mean": statistics.fmean(seeds.values()),
        "lowest": min(seeds.values()),
        "highest": max(seeds.values()),
        "seeds": seeds,
        "medians": {name: statistics.median(comparable(m[name]) for m in metrics.values()) for name in names},
    }


def comparable(value: float | None) -> float:
    """A score, or -inf for NaN (a correlation with a constant)."""
    return -math.inf if value is None or math.isnan(value) else value


def majority_answer(
    labels: dict[str, list[Any]], names: Sequence[str], measure: Callable[[str, np.ndarray], dict[str, float]]
) -> records.Baseline | None:
    """The majority baseline: metrics of the first validation split's most frequent label as the prediction for every
    example. `labels`: by split; `names`: of the classes; `measure`: metrics of (split, predictions (examples,)). None
    without `names`: for a regression, correlation is undefined. Raises `InputError` for an empty split."""
    if empty := [split for split, rows in labels.items() if not len(rows)]:
        raise InputError(f"{empty[0]} has no examples")
    if not names:
        return None
    first, *_ = labels
    answer = int(np.bincount(labels[first]).argmax())
    metrics: dict[str, float | None] = {}
    for split in labels:
        scores = measure(split, np.full(len(labels[split]), answer))
        metrics |= {name if split == first else name_on_split(name, split): scores[name] for name in scores}
    return {"answer": names[answer], "metrics": metrics}


def name_on_split(metric: str, split: str) -> str:
    """A metric's name on a validation split other than the first: `accuracy_mismatched`."""
    return f"{metric}_{split.partition('_')[2]}"


def class_answers(
    examples: Sequence[dict[str, str]],
    names: Sequence[str],
    labels: Sequence[int],
    predictions: np.ndarray,
    probabilities: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """Rows for `write_answers`: wrong predictions first, by the label's probability. `examples`: the first columns;
    `labels` and `predictions` (examples,): class numbers; `probabilities` (examples, classes): None for rankings."""
    right, rows = predictions == np.array(labels), []
    label_probabilities = right if probabilities is None else probabilities[np.arange(len(labels)), labels]
    for number in np.lexsort((label_probabilities, right)):
        row = {**examples[number], "label": names[labels[number]], "prediction": names[predictions[number]]}
        if probabilities is not None:
            row["probability"] = probabilities[number, predictions[number]]
        rows.append({**row, "verdict": "right" if right[number] else "wrong"})
    return rows


def write_answers(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write predictions as a TSV without quoting; tabs and line ends in a text become spaces."""
    lines = [list(rows[0])]
    for row in rows:
        cells = (f"{cell:.4f}" if isinstance(cell, float | np.floating) else str(cell) for cell in row.values())
        lines.append([" ".join(cell.replace("\t", " ").splitlines()) for cell in cells])
    durable.write_text(path, "".join("\t".join(cells) + "\n" for cells in lines))


def write_test_scores(folder: Path, test_hash: str, scores: dict[str, np.ndarray]) -> None:
    """Store a run's test scores by split, and the hash of the test set."""
    with durable.atomic_write(folder / TEST_SCORES) as temporary, temporary.open("wb") as stream:
        np.savez(stream, rows=test_hash, **scores)


def read_test_scores(run: Run, test_hash: str) -> dict[str, np.ndarray] | None:
    """A run's test scores by split; None without scores of this test set (hash). Raises `InputError` if damaged."""
    path = run.output_dir / TEST_SCORES
    if not path.is_file():
        return None
    with explained(f"{path} is damaged", ": move it away to score the test set again"), np.load(path) as archive:
        stored = dict(archive)  # checks the zip's CRCs
        stored_hash = str(stored.pop("rows"))
    return stored if stored_hash == test_hash else None


def all_test_scores(runs: list[Run], test_hash: str) -> list[dict[str, np.ndarray]]:
    """The test scores of every run. Raises `InputError` if a run has none."""
    stored = [read_test_scores(run, test_hash) for run in runs]
    if absent := [run.output_dir for run, scores in zip(runs, stored, strict=True) if scores is None]:
        raise InputError(
            f"{absent[0]} has no scores on this test set, and its weights are deleted: move it away to run it again "
            "with --do_predict"
        )
    return stored


def summarise_tests(
    runs: list[Run], test_hash: str, splits: dict[str, int], measure: Callable[..., dict[str, float]], metric: str
) -> dict[str, records.Scores]:
    """Median and spread on labelled test splits, over the runs with stored scores; `splits`: numbers of examples;
    `measure`: `Job.measure`. Raises `InputError` if no run has scores."""
    scored = [run for run in runs if read_test_scores(run, test_hash)] or runs
    metrics: dict[str, dict[int, dict[str, float]]] = {split: {} for split in splits}
    for run, scores in zip(scored, all_test_scores(scored, test_hash), strict=True):
        on_validation = validation_scores(run.output_dir)
        for split in splits:
            metrics[split][run.seed] = measure(split, scores[split], on_validation)
    return {split: {**over_seeds(metrics[split], metric), "examples": count} for split, count in splits.items()}


def table(summary: records.Summary, paper: str, others: tuple[str, ...] = ()) -> str:
    """The printed summary: a line per setting (median, spread, seeds, medians of the metrics `others`), the line
    `paper`, the majority baseline, the test sets, and the best run's files."""
    metric, settings = summary["metric"], summary["settings"]
    lines = [f"\n{summary['task']}, validation {metric} x 100"]
    lines += [f"{'rate':>10}{'batch':>7}{'median':>8}{'lowest':>8}{'highest':>9}  seeds"]
    for number, row in enumerate(settings):
        seeds = ", ".join(f"{seed}: {records.percent(value)}" for seed, value in row["seeds"].items())
        picked = number == summary["picked"] and len(settings) > 1
        lines.append(
            f"{row['learning_rate']:>10g}{row['global_batch_size']:>7}{records.percent(row['median']):>8}"
            f"{records.percent(row['lowest']):>8}{records.percent(row['highest']):>9}  {seeds}"
            f"{'  <- best median, picked on validation' * picked}"
        )
        if others:
            medians = ", ".join(f"{name} {records.percent(row['medians'][name])}" for name in others)
            lines.append(f"{'':>10}medians: {medians}")
        if row["degenerate_seeds"]:
            listed = ", ".join(map(str, row["degenerate_seeds"]))
            lines.append(f"{'':>10}degenerate (the same prediction for every example): seed {listed}")
    lines += [line for line in (paper, _majority_line(summary)) if line]
    lines += test_set_lines(summary)
    best = Path(records.picked_setting(summary)["best_run"])
    if (best / records.BEST_NAME / WEIGHTS).is_file():
        lines.append(f"best epoch  {best / records.BEST_NAME}")
    lines += [f"answers     {best / ANSWERS_NAME}", f"summary     {best.parent / records.SUMMARY_NAME}"]
    return "\n".join(lines)


def test_set_lines(summary: records.Summary) -> list[str]:
    """A line for each labelled test split, with its medians."""
    lines = []
    for split, scores in summary.get("tests", {}).items():
        medians = ", ".join(f"{name} {records.percent(value)}" for name, value in scores["medians"].items())
        seeds = ", ".join(map(str, scores["seeds"]))
        lines.append(f"{split} set ({scores['examples']:,} examples), medians of seeds {seeds}: {medians}")
    return lines


def _majority_line(summary: records.Summary) -> str:
    """The majority baseline's score, with warnings: no seed is above it; the best seed is degenerate."""
    row = records.picked_setting(summary)
    best = max(row["seeds"], key=row["seeds"].get)
    value = (summary["baseline"] or {"metrics": {}})["metrics"].get(summary["metric"])
    warnings = ["no seed is above it"] if value is not None and row["highest"] <= value else []
    if best in row["degenerate_seeds"]:
        warnings.append(f"the saved model, seed {best}, predicts the same for every example")
    if value is None:
        return f"Warning: {warnings[0]}" if warnings else ""
    line = f"Majority answer: {records.percent(value)} (always {summary['baseline']['answer']})"
    return f"{line}: {'; '.join(warnings)}" if warnings else line
