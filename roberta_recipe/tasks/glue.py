"""GLUE (Wang et al. 2018, arXiv 1804.07461; paper, section 5.1): its tasks, the official TSV layout, the Hub's."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from roberta_recipe.errors import InputError
from roberta_recipe.input_files import load_from_hub, read_text
from roberta_recipe.log import logger
from roberta_recipe.record import DatasetCard
from roberta_recipe.tasks.glue_scores import FUNCTIONS, GLUE_METRICS
from roberta_recipe.tasks.seeds import name_on_split

HUB_DATASET = "nyu-mll/glue"
SWEEP_FOLDER = "sweep"  # of the paper's grid, below a task's output_dir
_HUB_METRICS = {"pearson": "pearsonr", "spearman": "spearmanr"}  # where the Hub has another name


def tsv_splits(
    train: int | None = None, validation: int | None = None, test: int | None = None
) -> dict[str, tuple[str, int | None]]:
    """The usual files, with the number of rows of each (None: any number)."""
    return {"train": ("train.tsv", train), "validation": ("dev.tsv", validation), "test": ("test.tsv", test)}


@dataclass(frozen=True)
class Task:
    """What is particular about a task: where its rows are, what they hold, how it is measured."""

    folder: str  # of the official archive
    columns: tuple[str, ...]  # of the TSV: one text or two
    hub_columns: tuple[str, ...] = ()  # of the Hub's table; empty for a task that is not on the Hub
    splits: dict[str, tuple[str, int | None]] = field(default_factory=tsv_splits)  # name on the Hub -> (file, rows)
    label_column: str = "label"
    labels: tuple[str, ...] = ()  # by class number, as in the TSV; empty: a score from 0 to 5
    metrics: tuple[str, ...] = ("accuracy",)  # of glue_scores.py; the first picks the best epoch
    headers: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of the splits whose files have no header
    submission: dict[str, str] = field(default_factory=dict)  # test split -> file of the submission
    words: bool = False  # labels of the submission are words, not class numbers
    skip_broken: bool = False  # the official file has rows of another number of columns, which everybody drops

    @property
    def metric(self) -> str:
        return self.metrics[0]

    def splits_of(self, kind: str) -> list[str]:
        """Names of the "train", "validation" or "test" splits; the split of the matched genres first."""
        return [name for name in self.splits if name.partition("_")[0] == kind]


_PAIR, _RTE_LABELS = ("sentence1", "sentence2"), ("entailment", "not_entailment")
_MNLI_LABELS = ("entailment", "neutral", "contradiction")

# Numbers of rows are those of the official archive and of the Hub; the first metric is that of the paper's Table 5.
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
        "gold_label", _MNLI_LABELS, words=True,
        submission={"test_matched": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"},
    ),
    "qnli": Task(
        "QNLI", ("question", "sentence"), ("question", "sentence"), tsv_splits(104743, 5463, 5463),
        labels=_RTE_LABELS, words=True, submission={"test": "QNLI.tsv"},
    ),
    "rte": Task(
        "RTE", _PAIR, _PAIR, tsv_splits(2490, 277, 3000), labels=_RTE_LABELS, words=True,
        submission={"test": "RTE.tsv"},
    ),
    "wnli": Task(
        "WNLI", _PAIR, _PAIR, tsv_splits(635, 71, 146), labels=("0", "1"), submission={"test": "WNLI.tsv"}
    ),
}  # fmt: skip
# The diagnostic set: no training data, predicted by the MNLI model.
AX = Task(
    "diagnostic", _PAIR, ("premise", "hypothesis"), {"test": ("diagnostic.tsv", 1104)}, labels=_MNLI_LABELS,
    words=True, submission={"test": "AX.tsv"},
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


def check_metrics(name: str, task: Task) -> None:
    """Raise `InputError` for an unknown metric, or a metric that does not fit the number of classes."""
    classes = len(task.labels)
    for metric in task.metrics:
        if metric not in FUNCTIONS:
            raise InputError(f"{name}: {metric} is no metric of {', '.join(FUNCTIONS)}")
        needs = {"accuracy": "classes", "pearson": "scores", "spearman": "scores"}.get(metric, "two classes")
        if not {"classes": classes > 0, "scores": not classes, "two classes": classes == 2}[needs]:
            found = f"{classes} classes" if classes else "scores"
            fix = "accuracy" if classes else "pearson"
            raise InputError(f"{name}: {metric} is of {needs}, and the task has {found}; metrics=({fix!r},)")


def dataset_card(name: str, task: Task, other_rows: bool) -> DatasetCard:
    """What the model card says of the data of the task `name`: GLUE's where `task` is in the table above, and the rows
    are the official rows."""
    known = name in TASKS and TASKS[name] == replace(task, splits=TASKS[name].splits)
    official = known and not other_rows
    first, *others = task.splits_of("validation")
    metrics = [*task.metrics, *(name_on_split(metric, split) for split in others for metric in task.metrics)]
    return {
        "name": f"GLUE {name}" if official else f"{name} (other_rows)" if other_rows else name,
        "hub_id": HUB_DATASET if official else None,
        "hub_config": name if official else None,
        "split": first,
        "task_type": "text-classification",
        "hub_metrics": {metric: _HUB_METRICS.get(metric, metric) for metric in metrics},
        "note": "trained on the schemas of SuperGLUE's WSC" if known and name == "wnli" else "",
    }


@dataclass
class Examples:
    """Rows of one split, in the file's order."""

    texts: list[tuple[str, ...]]
    labels: list[int] | list[float] | None  # class numbers, or scores from 0 to 5; None for a test set without answers
    skipped: int = 0  # broken rows
    schemas: Sequence[Any] = ()  # WNLI: the `wsc.Schema` of each row
    counts: dict[str, int] = field(default_factory=dict)  # WNLI: of test rows, by how their schema was found

    def __len__(self):
        return len(self.texts)


def with_files_of(task: Task, data_dir: str | None) -> Task:
    """The task without the validation sets behind its first (MNLI's mismatched genres) that `data_dir` lacks; a warning
    names each."""
    absent = []
    for split in task.splits_of("validation")[1:] if data_dir else []:
        path = Path(data_dir, task.folder, task.splits[split][0])
        if not path.is_file():
            logger.warning(f"{path} is missing: nothing is measured on {split}")
            absent.append(split)
    return replace(task, splits={split: file for split, file in task.splits.items() if split not in absent})


def read_split(task: Task, name: str, split: str, data_dir: str | None) -> Examples:
    """One split of the task that the Hub calls `name`. Raises `InputError` that names file, line and value."""
    examples = _from_tsv(task, split, Path(data_dir)) if data_dir else _from_hub(task, name, split)
    if not examples.texts:
        raise InputError(f"{task.splits[split][0]} of {task.folder} has no rows")
    return examples


def _from_hub(task: Task, name: str, split: str) -> Examples:
    if not task.hub_columns:
        raise InputError(f"{name} is not on the Hub: name the folder that holds {task.folder}/ with --data_dir")
    instead = "the folder of the official TSV files with --data_dir"
    rows = load_from_hub(HUB_DATASET, name, split=split, instead=instead)
    labels = None if split.startswith("test") and len(set(rows["label"])) < 2 else list(rows["label"])
    return Examples(list(zip(*(rows[column] for column in task.hub_columns), strict=True)), labels)


def _from_tsv(task: Task, split: str, data_dir: Path) -> Examples:
    path = data_dir / task.folder / task.splits[split][0]
    hint = f": data_dir={data_dir} must hold GLUE's folders ({task.folder}) as they come"
    lines = read_text(path, hint).removesuffix("\n").split("\n")  # quoting off: a tab ends a field, \n a row
    rows = ((number, line.rstrip("\r").split("\t")) for number, line in enumerate(lines, 1) if lines != [""])
    header = list(task.headers.get(split) or next(rows, (0, []))[1])
    is_test = split.startswith("test")
    wanted = [*task.columns, *([] if is_test else [task.label_column])]
    if absent := [column for column in wanted if column not in header]:
        raise InputError(f"{path}: no column {absent[0]!r} in its first line, which is {' '.join(header)!r}")
    positions = [header.index(column) for column in task.columns]
    examples, labels = Examples([], None), {}
    for number, fields in rows:
        if len(fields) != len(header):
            if not task.skip_broken:
                raise InputError(f"{path}, line {number}: {len(fields)} columns, and {len(header)} are wanted")
            examples.skipped += 1
            continue
        examples.texts.append(tuple(fields[position] for position in positions))
        if task.label_column in header:
            labels[number] = fields[header.index(task.label_column)]
    if not is_test or len(set(labels.values())) > 1:  # the same for every test row is a placeholder
        examples.labels = [_label(task, text, path, number) for number, text in labels.items()]
    return examples


def _label(task: Task, text: str, path: Path, number: int) -> int | float:
    """Class number, or score."""
    if task.labels:
        if text not in task.labels:
            raise InputError(f"{path}, line {number}: label {text!r} is none of {', '.join(task.labels)}")
        return task.labels.index(text)
    if not is_score(text):
        raise InputError(f"{path}, line {number}: score {text!r} is no number from 0 to 5")
    return float(text)


def duplicates(train: Examples, validation: Examples) -> dict[str, int]:
    """How many validation examples are in the training set too, case and spaces aside, and with the same label.

    Where a text comes twice in training with different labels, either counts as the same.
    """
    labels: dict[tuple[str, ...], set] = {}
    for texts, label in zip(train.texts, train.labels, strict=True):
        labels.setdefault(_normalised(texts), set()).add(label)
    found = [
        (labels[key], label)
        for texts, label in zip(validation.texts, validation.labels, strict=True)
        if (key := _normalised(texts)) in labels
    ]
    return {"in_train": len(found), "with_the_same_label": sum(label in known for known, label in found)}


def _normalised(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(" ".join(text.casefold().split()) for text in texts)


def write_predictions(path: Path, predictions: list[str]) -> None:
    """A file of the submission: `index` and `prediction`, in the order of the test set."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (f"{number}\t{prediction}\n" for number, prediction in enumerate(predictions))
    path.write_text("index\tprediction\n" + "".join(rows), encoding="utf-8")


def submission_labels(task: Task) -> tuple[str, ...]:
    """Labels by class number as the server wants them; empty for a score."""
    return task.labels if task.words else tuple(str(number) for number in range(len(task.labels)))


def is_score(text: str) -> bool:
    """Whether a line of the submission is a score from 0 to 5."""
    try:
        return 0 <= float(text) <= 5
    except ValueError:
        return False


def answers(task: Task, predictions: np.ndarray) -> list[str]:
    """Class numbers (or scores, clipped to [0, 5]) as the server wants them."""
    if not task.labels:
        return [f"{score:.4f}" for score in np.clip(predictions, 0, 5)]
    words = submission_labels(task)
    return [words[number] for number in predictions]
