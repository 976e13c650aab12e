"""GLUE (Wang et al. 2018, arXiv 1804.07461; paper, section 5.1): task table, TSV reader, submission files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from roberta_recipe.errors import InputError
from roberta_recipe.input_files import load_from_hub, read_text
from roberta_recipe.record import DatasetCard
from roberta_recipe.tasks.glue_scores import GLUE_METRICS
from roberta_recipe.tasks.summaries import name_on_split

HUB_DATASET = "nyu-mll/glue"
_HUB_DATA = {"wnli": ("aps/super_glue", "wsc")}  # id and configuration of the rows that are scored, if not GLUE's
SWEEP_FOLDER = "sweep"  # for the paper's grid, in a task's output_dir
_HUB_METRICS = {"pearson": "pearsonr", "spearman": "spearmanr", "macro_f1": "f1", "micro_f1": "f1"}  # the Hub's names
_SCALE_NOTE = "Its output is a share of the range of scores: 0 stands for {:.12g}, 1 for {:.12g}."


def tsv_splits(
    train: int | None = None, validation: int | None = None, test: int | None = None
) -> dict[str, tuple[str, int | None]]:
    """The usual files, with their number of rows (None: any)."""
    return {"train": ("train.tsv", train), "validation": ("dev.tsv", validation), "test": ("test.tsv", test)}


@dataclass(frozen=True)
class Task:
    """Files, columns, labels and metrics of a task."""

    folder: str  # of the official archive
    columns: tuple[str, ...]  # of the TSV: one text or two
    hub_columns: tuple[str, ...] = ()  # on the Hub; empty for a task that is not there
    splits: dict[str, tuple[str, int | None]] = field(default_factory=tsv_splits)  # name on the Hub -> (file, rows)
    label_column: str = "label"
    labels: tuple[str, ...] = ()  # by class number, as in the TSV; empty: regression
    scale: tuple[float, float] = (0.0, 5.0)  # lowest and highest score of a regression
    multi_label: bool = False  # a label is a tuple with a 0 or 1 for each class
    metrics: tuple[str, ...] = ("accuracy",)  # of glue_scores.py; the first selects the best epoch
    headers: dict[str, tuple[str, ...]] = field(default_factory=dict)  # column names of splits without a header line
    submission: dict[str, str] = field(default_factory=dict)  # test split -> file of the submission
    skip_broken: bool = False  # drop rows with a wrong number of columns, as in the official file
    note: str = ""  # of the model card, on the data
    examples: dict[str, "Examples"] = field(default_factory=dict)  # by split, of a task on the user's tables

    @property
    def metric(self) -> str:
        return self.metrics[0]

    def splits_of(self, kind: str) -> list[str]:
        """Names of the "train", "validation" or "test" splits; MNLI's matched one first."""
        return [name for name in self.splits if name.partition("_")[0] == kind]


_PAIR, _RTE_LABELS = ("sentence1", "sentence2"), ("entailment", "not_entailment")
_MNLI_LABELS = ("entailment", "neutral", "contradiction")

# Row counts are the official archive's and the Hub's; the first metric is that of the paper's Table 5.
TASKS = {
    "cola": Task(
        "CoLA", ("sentence",), ("sentence",), tsv_splits(8551, 1043, 1063), labels=("0", "1"),
        metrics=GLUE_METRICS["cola"],
        headers=dict.fromkeys(("train", "validation"), ("source", "label", "original", "sentence")),
        submission={"test": "CoLA.tsv"},
    ),
    "sst2": Task(
        "SST-2", ("sentence",), ("sentence",), tsv_splits(67349, 872, 1821), labels=("0", "1"),
        submission={"test": "SST-2.tsv"},
    ),
    "mrpc": Task(
        "MRPC", ("#1 String", "#2 String"), _PAIR, tsv_splits(3668, 408, 1725), "Quality", ("0", "1"),
        metrics=GLUE_METRICS["mrpc"], submission={"test": "MRPC.tsv"},
    ),
    "stsb": Task(
        "STS-B", _PAIR, _PAIR, tsv_splits(5749, 1500, 1379), "score", metrics=GLUE_METRICS["stsb"],
        submission={"test": "STS-B.tsv"},
    ),
    "qqp": Task(
        "QQP", ("question1", "question2"), ("question1", "question2"), tsv_splits(363846, 40430, 390965),
        "is_duplicate", ("0", "1"), metrics=GLUE_METRICS["qqp"], submission={"test": "QQP.tsv"}, skip_broken=True,
    ),
    "mnli": Task(
        "MNLI", _PAIR, ("premise", "hypothesis"),
        {
            "train": ("train.tsv", 392702),
            "validation_matched": ("dev_matched.tsv", 9815),
            "validation_mismatched": ("dev_mismatched.tsv", 9832),
            "test_matched": ("test_matched.tsv", 9796),
            "test_mismatched": ("test_mismatched.tsv", 9847),
        },
        "gold_label", _MNLI_LABELS,
        submission={"test_matched": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"},
    ),
    "qnli": Task(
        "QNLI", ("question", "sentence"), ("question", "sentence"), tsv_splits(104743, 5463, 5463),
        labels=_RTE_LABELS, submission={"test": "QNLI.tsv"},
    ),
    "rte": Task(
        "RTE", _PAIR, _PAIR, tsv_splits(2490, 277, 3000), labels=_RTE_LABELS,
        submission={"test": "RTE.tsv"},
    ),
    "wnli": Task(
        "WNLI", _PAIR, _PAIR, tsv_splits(635, 71, 146), labels=("0", "1"), submission={"test": "WNLI.tsv"},
        note="trained and validated on SuperGLUE's WSC",
    ),
}  # fmt: skip
# The diagnostic set: no training data, predicted by the MNLI model.
AX = Task(
    "diagnostic", _PAIR, ("premise", "hypothesis"), {"test": ("diagnostic.tsv", 1104)}, labels=_MNLI_LABELS,
    submission={"test": "AX.tsv"},
)  # fmt: skip

# Validation scores, one model for each task, times 100: large in the paper's Table 5 (medians of five runs), base in
# fairseq's examples/roberta/README.md. MNLI on the matched genres; WNLI is in the paper only.
PAPER = {
    "base": {
        "mnli": 87.6, "qnli": 92.8, "qqp": 91.9, "rte": 78.7, "sst2": 94.8, "mrpc": 90.2, "cola": 63.6, "stsb": 91.2,
    },
    "large": {
        "mnli": 90.2, "qnli": 94.7, "qqp": 92.2, "rte": 86.6, "sst2": 96.4, "mrpc": 90.9, "cola": 68.0, "stsb": 92.4,
        "wnli": 91.3,
    },
}  # fmt: skip


def dataset_card(name: str, task: Task, other_rows: bool) -> DatasetCard:
    """The model card's dataset entry; GLUE's only if `task` is in `TASKS` and on the Hub, with the official rows."""
    known = TASKS.get(name) == task and task.hub_columns
    hub_id, hub_config = _HUB_DATA.get(name, (HUB_DATASET, name)) if known and not other_rows else (None, None)
    first, *others = task.splits_of("validation")
    metrics = {metric: _HUB_METRICS.get(metric, metric) for metric in task.metrics}
    on_others = {name_on_split(metric, split): metrics[metric] for split in others for metric in metrics}
    return {
        "name": f"GLUE {name}" if hub_id else f"{name} (other_rows)" if other_rows else name,
        "hub_id": hub_id,
        "hub_config": hub_config,
        "split": first,
        "task_type": "text-classification",
        "hub_metrics": metrics | on_others,
        "note": task.note,
        **({} if task.labels else {"loading_note": _SCALE_NOTE.format(*task.scale)}),
    }


@dataclass
class Examples:
    """Examples of a split, in file order."""

    texts: list[tuple[str, ...]]
    labels: list[Any] | None  # class numbers, scores or tuples (`multi_label`); None for a test set without labels
    skipped: int = 0  # broken rows
    schemas: Sequence[Any] = ()  # WNLI: a `wsc.Schema` per row
    counts: dict[str, int] = field(default_factory=dict)  # WNLI: test rows by the origin of their schema

    def __len__(self):
        return len(self.texts)


def read_split(task: Task, name: str, split: str, data_dir: str | None) -> Examples:
    """A split of the task, on the Hub named `name`. Raises `InputError` with file, line and value."""
    if task.examples:
        return task.examples[split]
    if data_dir:
        return _from_tsv(task, split, Path(data_dir))
    if not task.hub_columns:
        raise InputError(f"{name} is not on the Hub: name the folder that holds {task.folder}/ with --data_dir")
    instead = "the folder of the official TSV files with --data_dir"
    rows = load_from_hub(HUB_DATASET, name, split=split, instead=instead)
    labels = None if split.startswith("test") and len(set(rows["label"])) < 2 else list(rows["label"])
    return Examples(list(zip(*(rows[column] for column in task.hub_columns), strict=True)), labels)


def _from_tsv(task: Task, split: str, data_dir: Path) -> Examples:
    path = data_dir / task.folder / task.splits[split][0]
    lines = read_text(path, f": data_dir={data_dir} must hold GLUE's folders").removesuffix("\n").split("\n")
    # no quoting: a tab ends a field, a line feed a row
    rows = ((number, line.rstrip("\r").split("\t")) for number, line in enumerate(lines, 1))
    header = list(task.headers.get(split) or next(rows)[1])
    is_test = split.startswith("test")
    for column in [*task.columns, *([] if is_test else [task.label_column])]:
        if column not in header:
            raise InputError(f"{path}: no column {column!r} in its first line, which is {' '.join(header)!r}")
    positions = [header.index(column) for column in task.columns]
    examples, labels = Examples([], None), {}
    for number, fields in rows:
        if len(fields) != len(header):
            if not task.skip_broken:
                raise InputError(f"{path}, line {number}: {len(fields)} columns instead of {len(header)}")
            examples.skipped += 1
            continue
        examples.texts.append(tuple(fields[position] for position in positions))
        if task.label_column in header:
            labels[number] = fields[header.index(task.label_column)]
    if not is_test or len(set(labels.values())) > 1:  # a single label in a test set is a placeholder
        examples.labels = [_label(task, text, f"{path}, line {number}") for number, text in labels.items()]
    return examples


def _label(task: Task, text: str, where: str) -> int | float:
    """Class number, or score."""
    if task.labels and text in task.labels:
        return task.labels.index(text)
    if not task.labels and is_score(text):
        return float(text)
    raise InputError(f"{where}: label {text!r} is not one of {', '.join(task.labels) or 'the scores from 0 to 5'}")


def duplicates(train: Examples, validation: Examples) -> dict[str, int]:
    """Leakage check: counts of validation examples that are in the training set, ignoring case and spaces, and of those
    with the same label there (or with one of several)."""
    labels: dict[tuple[str, ...], set] = {}
    for texts, label in zip(train.texts, train.labels, strict=True):
        labels.setdefault(_normalised(texts), set()).add(label)
    counts = {"in_train": 0, "with_the_same_label": 0}
    for texts, label in zip(validation.texts, validation.labels, strict=True):
        in_train = labels.get(_normalised(texts), set())
        counts["in_train"] += bool(in_train)
        counts["with_the_same_label"] += label in in_train
    return counts


def _normalised(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(" ".join(text.casefold().split()) for text in texts)


def is_score(text: str) -> bool:
    """Whether a text is a score from 0 to 5."""
    try:
        return 0 <= float(text) <= 5
    except ValueError:
        return False


def answers(task: Task, predictions: np.ndarray) -> list[str]:
    """Predictions in the submission format: labels, JSON lists of labels, or scores clipped to the task's scale."""
    if not task.labels:
        return [f"{score:.12g}" if task.examples else f"{score:.4f}" for score in np.clip(predictions, *task.scale)]
    if task.multi_label:
        return [json.dumps([*compress(task.labels, row)]) for row in predictions]
    return [task.labels[number] for number in predictions]
