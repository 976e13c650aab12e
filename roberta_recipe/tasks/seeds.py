"""The runs of a fine-tuning protocol, and the median and spread of their scores over seeds (paper, section 5.1)."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roberta_recipe.record import Baseline, FinetuneRecord, Scores, SettingScores


@dataclass(frozen=True)
class Run:
    """A run of a protocol."""

    learning_rate: float
    batch: int
    seed: int
    output_dir: Path

    @property
    def setting(self) -> tuple[float, int]:
        return self.learning_rate, self.batch


def runs_of(rates: list[float], batches: list[int], seeds: list[int], output_dir: str) -> list[Run]:
    """Every rate with every batch and seed, each in a folder of its own below `output_dir`."""
    return [
        Run(rate, size, seed, Path(output_dir, f"lr{rate:g}-batch{size}-seed{seed}"))
        for rate in rates
        for size in batches
        for seed in seeds
    ]


def of_setting(runs: list[Run], row: SettingScores) -> list[Run]:
    """The runs of a setting."""
    return [run for run in runs if run.setting == (row["learning_rate"], row["global_batch_size"])]


def summarise(runs: list[Run], records: list[FinetuneRecord], metric: str) -> dict[str, Any]:
    """The fields of a `Summary` that come from scores: median and spread over seeds of each setting, by `metric`; the
    setting with the best median, and its best run."""
    by_setting: dict[tuple[float, int], dict[Run, FinetuneRecord]] = {}
    for run, record in zip(runs, records, strict=True):
        by_setting.setdefault(run.setting, {})[run] = record
    rows: list[SettingScores] = []
    for (rate, size), scored in by_setting.items():
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


def over_seeds(metrics: dict[int, dict[str, float | None]], metric: str) -> Scores:
    """Median and spread over seeds of `metric`, and the medians of all metrics, from seed -> metrics."""
    seeds = {seed: comparable(of_seed[metric]) for seed, of_seed in metrics.items()}
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
    """A score, or -inf for a score that is no number (a correlation with a constant)."""
    return -math.inf if value is None or math.isnan(value) else value


def constant_answer(
    wanted: dict[str, list[Any]], names: Sequence[str], measure: Callable[[str, np.ndarray], dict[str, float]]
) -> Baseline | None:
    """The scores of one answer to everything: the most frequent label of the first validation split (of equals, the
    first). `wanted`: split -> labels; `names` of the classes; `measure` scores (split, answers (examples,)). None
    without classes: a correlation with a constant has no value."""
    if not names:
        return None
    first, *_ = wanted
    answer = int(np.bincount(wanted[first]).argmax())
    metrics: dict[str, float | None] = {}
    for split, labels in wanted.items():
        scores = measure(split, np.full(len(labels), answer))
        metrics |= {name if split == first else name_on_split(name, split): scores[name] for name in scores}
    return {"answer": names[answer], "metrics": metrics}


def name_on_split(metric: str, split: str) -> str:
    """The name of a metric on a validation split other than the first: `accuracy_mismatched`."""
    return f"{metric}_{split.partition('_')[2]}"
