"""GLUE's files (Wang et al. 2018, arXiv 1804.07461): the official TSV layout, the Hub's, the server's submission."""

import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from roberta_recipe import durable
from roberta_recipe.args import InputError
from roberta_recipe.protocol import load_from_hub
from roberta_recipe.report import percent
from roberta_recipe.run import SUMMARY_NAME

HUB_DATASET = "nyu-mll/glue"


@dataclass(frozen=True)
class Task:
    """What is particular about a task. `splits`: name on the Hub -> (file in the official archive, rows there)."""

    folder: str  # of the official archive
    columns: tuple[str, ...]  # of the TSV: one text or two
    hub_columns: tuple[str, ...]
    splits: dict[str, tuple[str, int]]
    label_column: str = "label"
    labels: tuple[str, ...] = ()  # by class number, as in the TSV; none: a score from 0 to 5
    metric: str = "accuracy"  # picks the best epoch, and is what the paper reports
    headers: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of files that have none
    submission: dict[str, str] = field(default_factory=dict)  # test split -> file of the submission
    words: bool = False  # labels of the submission are words, not class numbers
    skip_broken: bool = False  # the official file has rows of another number of columns, which everybody drops

    def split(self, part: str) -> list[str]:
        """Names of the splits of "train", "validation" or "test"; that of the matched genres first."""
        return [name for name in self.splits if name.partition("_")[0] == part]


@dataclass
class Examples:
    """Rows of one split, in the file's order."""

    texts: list[tuple[str, ...]]
    labels: list[int] | list[float] | None  # class numbers, or scores from 0 to 5; None for a test set
    skipped: int = 0  # broken rows

    def __len__(self):
        return len(self.texts)


def read_split(task: Task, name: str, split: str, data_dir: str | None) -> Examples:
    """One split of the task that the Hub calls `name`. Raises `InputError` that names file, line and value."""
    examples = _from_tsv(task, split, Path(data_dir)) if data_dir else _from_hub(task, name, split)
    if not examples.texts:
        raise InputError(f"{task.splits[split][0]} of {task.folder} has no rows")
    return examples


def _from_hub(task: Task, name: str, split: str) -> Examples:
    instead = "the folder of the official TSV files with --data_dir"
    rows = load_from_hub(HUB_DATASET, name, split=split, instead=instead)
    labels = None if split.startswith("test") else rows["label"]
    return Examples(list(zip(*(rows[column] for column in task.hub_columns), strict=True)), labels and list(labels))


def _from_tsv(task: Task, split: str, data_dir: Path) -> Examples:
    file, _ = task.splits[split]
    path = data_dir / task.folder / file
    if not path.is_file():
        raise InputError(
            f"{path} is missing: data_dir={data_dir} must hold GLUE's folders ({task.folder}) as they come"
        )
    try:
        return _rows(task, split, path)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def _rows(task: Task, split: str, path: Path) -> Examples:
    labelled = not split.startswith("test")
    examples = Examples([], [] if labelled else None)
    with open(path, encoding="utf-8-sig", newline="\n") as stream:  # quoting off: a tab ends a field, \n a row
        lines = ((number, line.rstrip("\r\n").split("\t")) for number, line in enumerate(stream, 1))
        header = list(task.headers.get(split) or next(lines, (0, []))[1])
        wanted = [*task.columns, *([task.label_column] if labelled else [])]
        if absent := [column for column in wanted if column not in header]:
            raise InputError(f"{path}: no column {absent[0]!r} in its first line, which is {' '.join(header)!r}")
        places = [header.index(column) for column in task.columns]
        for number, fields in lines:
            if len(fields) != len(header):
                if not task.skip_broken:
                    raise InputError(f"{path}, line {number}: {len(fields)} columns, and {len(header)} are wanted")
                examples.skipped += 1
                continue
            examples.texts.append(tuple(fields[place] for place in places))
            if labelled:
                examples.labels.append(_label(task, fields[header.index(task.label_column)], path, number))
    return examples


def _label(task: Task, text: str, path: Path, number: int) -> int | float:
    """Class number, or score."""
    if task.labels:
        if text not in task.labels:
            raise InputError(f"{path}, line {number}: label {text!r} is none of {', '.join(task.labels)}")
        return task.labels.index(text)
    try:
        score = float(text)
    except ValueError:
        score = -1.0
    if not 0 <= score <= 5:
        raise InputError(f"{path}, line {number}: score {text!r} is no number from 0 to 5")
    return score


def duplicates(train: Examples, validation: Examples) -> dict[str, int]:
    """How many validation examples stand in the training set too, but for case and spaces, and with the same label.

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
    return {"in_train": len(found), "with_the_same_label": sum(label in there for there, label in found)}


def _normalised(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(" ".join(text.casefold().split()) for text in texts)


def write_predictions(path: Path, predictions: list[str]) -> None:
    """A file of the submission: `index` and `prediction`, in the order of the test set."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (f"{number}\t{prediction}\n" for number, prediction in enumerate(predictions))
    path.write_text("index\tprediction\n" + "".join(rows), encoding="utf-8")


def zip_submission(
    tasks: dict[str, Task], folders: dict[str, Path], path: Path, official_rows: bool = True
) -> list[str]:
    """The eleven files, each checked (header, order, rows, labels), as the zip that the GLUE server takes; their names.

    `folders`: task -> where its files are. Raises `InputError` that names what is missing or wrong.
    """
    files, faults = {}, []
    for name, task in tasks.items():
        for split, file in task.submission.items():
            source = folders[name] / file
            files[file] = source
            fault = _submission_fault(task, source, task.splits[split][1] if official_rows else None)
            faults += [f"{source}: {fault}"] if fault else []
    if faults:
        raise InputError(f"no submission: {len(faults)} of {len(files)} files are not in order. " + "; ".join(faults))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, source in files.items():
            archive.write(source, file)
    return list(files)


def _submission_fault(task: Task, path: Path, rows: int | None) -> str | None:
    if not path.is_file():
        return "missing; run its task with --do_predict"
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    if header != "index\tprediction":
        return f"its first line is {header!r}"
    if rows is not None and len(lines) != rows:
        return f"{len(lines)} rows, and the test set has {rows}"
    allowed = set(submission_labels(task))
    for number, line in enumerate(lines):
        index, _, prediction = line.partition("\t")
        if index != str(number):
            return f"index {index} stands where {number} should"
        if not (prediction in allowed if allowed else _is_score(prediction)):
            return f"row {number}: {prediction!r} is no label of {task.folder}"
    return None


def submission_labels(task: Task) -> tuple[str, ...]:
    """Labels by class number as the server wants them; none for a score."""
    return task.labels if task.words else tuple(str(number) for number in range(len(task.labels)))


def _is_score(text: str) -> bool:
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


# In the order of Table 5.
_COLUMNS = ("mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb", "wnli")


def collect(
    folder: str,
    below: str,
    tasks: dict[str, Task],
    paper: dict[str, dict[str, float]],
    with_submission: bool,
    official_rows: bool,
) -> dict[str, str]:
    """Print the tasks finished in `<folder>/<task>/<below>` as Table 5's row of validation scores, and zip their
    predictions."""
    medians = {}
    for name in _COLUMNS:
        path = Path(folder, name, below, SUMMARY_NAME)
        if path.is_file():
            summary = durable.read_json(path)
            medians[name] = percent(summary["settings"][summary["picked"]]["median"])
    if not medians:
        where = Path("<task>", below, SUMMARY_NAME)
        raise InputError(f"collect={folder} holds no finished task ({where}): make glue TASK=rte makes one")
    rows = {"RoBERTa-large, Table 5": paper["large"], "RoBERTa-base, fairseq": paper["base"], "ours": medians}
    print(" " * 24 + "".join(f"{name:>9}" for name in _COLUMNS))
    for title, row in rows.items():
        missing = "not run" if row is medians else "-"
        print(f"{title:<24}" + "".join(f"{row[n]:>9}" if n in row else f"{missing:>9}" for n in _COLUMNS))
    if with_submission:
        folders = {name: Path(folder, "mnli" if name == "ax" else name, below, "submission") for name in tasks}
        path = Path(folder, below, "submission.zip")
        path.parent.mkdir(exist_ok=True)
        print(f"{path}: {', '.join(zip_submission(tasks, folders, path, official_rows))}")
    return medians
