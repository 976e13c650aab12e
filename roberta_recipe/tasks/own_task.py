"""Tasks on the user's tables: CSV, TSV, JSON lines, Parquet, a dataset on the Hub; classification and regression."""

import contextlib
import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

from roberta_recipe.errors import InputError
from roberta_recipe.input_files import explained, is_text, load_from_hub, parse_json, read_text
from roberta_recipe.log import listed, logger
from roberta_recipe.settings import setting
from roberta_recipe.tasks.glue import Examples, Task
from roberta_recipe.training.arguments import FinetuneArguments

# default text columns: the first of these that the table has
_TEXTS = (("sentence1", "sentence2"), ("text", "text_pair"), ("text",), ("sentence",))
_HELD_OUT = slice(4, None, 10)  # a tenth of the rows in the order of their labels
_SPLIT_SEED = 0
_MISSING = ("", "NA", "N/A", "n/a", "#N/A", "#NA", "<NA>", "None", "null", "NULL", "\\N")  # of pandas and databases

# flag -> flags of which it requires one
REQUIRES_ONE_OF = {
    "validation_file": ("train_file",),
    "test_file": ("train_file",),
    "dataset_config_name": ("dataset_name",),
}
REQUIRES_ONE_OF |= dict.fromkeys(("text_column", "text_pair_column", "label_column"), ("train_file", "dataset_name"))

Rows = list[dict[str, Any]]


@dataclass
class OwnFileArguments(FinetuneArguments):
    """The flags that name the user's files."""

    _argument_group_name = "your files"

    train_file: str | None = setting(None, "Training file: JSON lines, Parquet, CSV, or TSV without quotes.", "content")
    validation_file: str | None = setting(None, "Validation file; default: a tenth of the training rows.", "content")
    test_file: str | None = setting(None, "File to predict, with do_predict.", "content")
    dataset_name: str | None = setting(None, "A dataset on the Hub, in place of train_file.", "content")
    dataset_config_name: str | None = setting(None, "Configuration of dataset_name.", "content")


@dataclass
class OwnTaskArguments(OwnFileArguments):
    """The flags of a task on the user's tables."""

    _argument_group_name = "a task on your tables"

    text_column: str | None = setting(None, "Default: sentence1 + sentence2, text (+ text_pair), sentence.", "content")
    text_pair_column: str | None = setting(None, "Column of the second text of a pair.", "content")
    label_column: str = setting("label", "Labels, or lists of labels; decimal points mean a regression.", "content")


def read_task(args: OwnTaskArguments, do_predict: bool) -> Task:
    """The task with its rows; labels are the sorted training labels. Raises `InputError` with file, row and value."""
    tables = read_tables(args, read_table, do_predict)
    columns, label = _columns(args, tables), args.label_column
    where, rows = tables["train"]
    names, scale = _labels(where, label, [row.get(label) for row in rows])
    multi_label = isinstance(rows[0].get(label), list)
    examples = {
        split: Examples(
            [_texts(f"{where}, row {number}", row, columns) for number, row in enumerate(rows, 1)],
            _encode_labels(split, where, label, rows, names, multi_label),
        )
        for split, (where, rows) in tables.items()
    }
    held_out = "validation" not in examples
    if held_out:
        whole = examples["train"]
        examples["train"], examples["validation"] = (
            Examples([whole.texts[row] for row in part], [whole.labels[row] for row in part])
            for part in hold_out(whole.labels)
        )
    if len(values := {*examples["validation"].labels}) < (1 if names else 2):
        fault = f"{where} has {len(rows)} rows, too few per label to hold out a tenth: name a validation_file"
        if not held_out:
            fault = f"{tables['validation'][0]}: {label} is {min(values)} in all rows; a correlation needs two scores"
        raise InputError(f"{fault}{_about_scores(names)}")
    metrics = ("accuracy", "f1" if len(names) == 2 else "macro_f1") if names else ("pearson", "spearman")
    files = {split: Path(getattr(args, f"{split}_file") or split).name for split in examples}
    return Task(
        folder="",
        columns=columns,
        splits={split: (file, None) for split, file in files.items()},
        label_column=label,
        labels=names,
        scale=scale,
        multi_label=multi_label,
        metrics=("micro_f1", "macro_f1") if multi_label else metrics,
        note="a tenth of its rows held out for validation" if held_out else "",
        examples=examples,
    )


def check_sources(args: OwnFileArguments, do_predict: bool) -> None:
    """Raise `InputError` for a flag without effect: the flag of its source, or `do_predict`, is missing."""
    for name in [name for name in REQUIRES_ONE_OF if hasattr(args, name)]:
        value, sources = getattr(args, name), REQUIRES_ONE_OF[name]
        if value not in (None, getattr(type(args), name)) and not any(getattr(args, source) for source in sources):
            raise InputError(f"{name}={value} has no effect without {' or '.join(sources)}")
    if args.test_file and not do_predict:
        raise InputError(f"test_file={args.test_file} has no effect without --do_predict")


def read_tables(args: OwnFileArguments, read: Callable[[str], Rows], do_predict: bool) -> dict[str, tuple[str, Rows]]:
    """(name, rows) of each split, from files by `read` or the Hub (class names); test only with `do_predict`. Raises
    `InputError` if it is missing, or a split is empty."""
    splits = ("train", "validation", "test") if do_predict else ("train", "validation")
    if args.train_file:
        tables = {split: (file, read(file)) for split in splits if (file := getattr(args, f"{split}_file"))}
    else:
        tables = _of_hub(args, splits)
    if do_predict and "test" not in tables:
        fix = "name a test_file" if args.train_file else "save its splits as files: --train_file, --test_file"
        raise InputError(f"do_predict: {args.train_file or args.dataset_name} has no test set; {fix}")
    if empty := [where for where, rows in tables.values() if not rows]:
        raise InputError(f"{empty[0]} has no rows")
    return tables


def _of_hub(args: OwnFileArguments, splits: Sequence[str]) -> dict[str, tuple[str, Rows]]:
    config = [args.dataset_config_name] if args.dataset_config_name else []
    dataset = load_from_hub(args.dataset_name, *config, split=None, instead="a file with --train_file")
    if "train" not in dataset:
        raise InputError(f"dataset_name={args.dataset_name} has no train split, but {', '.join(dataset)}")
    if "validation" not in dataset and (others := [name for name in dataset if name.startswith(("val", "dev"))]):
        logger.warning(
            f"{args.dataset_name} has no split 'validation': a tenth of train is held out, {listed(others)} is not "
            "read; to score on it, save both as files, --train_file and --validation_file"
        )
    found = {split: dataset[split] for split in splits if split in dataset}
    rows = {split: _name_classes(table.to_list(), table.features.to_dict()) for split, table in found.items()}
    return {split: (f"{args.dataset_name}, {split}", of_split) for split, of_split in rows.items()}


def _name_classes(rows: Rows, features: dict[str, Any]) -> Rows:
    """The rows with names in place of class numbers, by `datasets.Features` as a dictionary."""
    for column, feature in features.items():
        kind = feature.get("feature", feature) if isinstance(feature, dict) else {}  # `feature`: of a list
        if isinstance(kind, dict) and kind.get("_type") == "ClassLabel":
            names = dict(enumerate(kind["names"]))  # -1: no label
            for row in rows:
                label = row.get(column)
                row[column] = [*map(names.get, label)] if isinstance(label, list) else names.get(label)
    return rows


def read_table(path: str) -> Rows:
    """The rows of a file by its extension."""
    kind = Path(path).suffix.lower()
    if kind not in (".csv", ".tsv", ".jsonl", ".json", ".parquet"):
        raise InputError(f"{path}: name a file that ends in .csv, .tsv, .jsonl, .json or .parquet")
    with explained(f"{path} is not a table in the format of {kind}"):
        if kind == ".parquet":
            table = pyarrow.parquet.read_table(path)
            described = parse_json((table.schema.metadata or {}).get(b"huggingface", "{}"), path)
            return _name_classes(table.to_pylist(), described.get("info", {}).get("features", {}))
        text = read_text(path)
        if kind == ".csv":
            return _delimited(path, text)
        if kind == ".tsv":  # as GLUE's: a tab ends a column, a line end a row
            return _delimited(path, text, delimiter="\t", quoting=csv.QUOTE_NONE)
        if re.match(r'\s*{"[^"]*":\s*{"0":', text):
            raise InputError(f"{path} has columns, not rows: in pandas, use to_json(FILE, orient='records')")
        if text.lstrip().startswith("["):
            return [dict(row) for row in parse_json(text, path)]
        lines = enumerate(text.split("\n"), 1)
        return [dict(parse_json(line, f"{path}, line {number}")) for number, line in lines if line.strip()]


def _delimited(path: str, text: str, **dialect: Any) -> Rows:
    header = text.replace("\r", "\n").partition("\n")[0]
    if ";" in header and dialect.get("delimiter", ",") not in header:
        raise InputError(f"{path}: the header has ';': save it with {'tabs' if dialect else 'commas'}")
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # the default is 131,072 characters
    reader, rows = csv.reader(io.StringIO(text.rstrip("\r\n"), newline=""), strict=True, **dialect), []
    names = next(reader, [])
    if repeated := sorted({name for name in names if name and names.count(name) > 1}):
        raise InputError(f"{path} has several columns {', '.join(map(repr, repeated))}: rename or remove all but one")
    try:
        for cells in reader:
            cells = cells or [""] * (len(names) == 1)  # an empty line of a single column is an empty text
            if cells and len(cells) != len(names):
                raise InputError(f"{path}, line {reader.line_num}: another number of columns than in the header")
            if cells:
                rows.append(dict(zip(names, cells, strict=True)))
    except csv.Error as error:
        raise InputError(f"{path}, row {len(rows) + 1}: {error} (a quote inside quotes is written twice)") from None
    return rows


def _columns(args: OwnTaskArguments, tables: dict[str, tuple[str, Rows]]) -> tuple[str, ...]:
    """The text columns. Raises `InputError` for a table without them, or without labels unless it is the test set's."""
    names = {split: {name: None for row in rows for name in row} for split, (_, rows) in tables.items()}
    default = next((columns for columns in _TEXTS if set(columns) <= names["train"].keys()), ("text",))
    columns = (args.text_column,) if args.text_column else default
    if args.text_pair_column:
        columns = (columns[0], args.text_pair_column)
    for split, (where, _) in tables.items():
        needed = columns if split == "test" else (*columns, args.label_column)
        if missing := [column for column in needed if column not in names[split]]:
            raise InputError(
                f"{where} has no column {missing[0]!r}, but {', '.join(map(repr, names[split]))}: name its columns "
                "with --text_column, --text_pair_column and --label_column (the same in all files)"
            )
    return columns


def _texts(where: str, row: dict[str, Any], columns: tuple[str, ...]) -> tuple[str, ...]:
    for column in columns:
        if not is_text(row.get(column)) or not row[column].strip():
            raise InputError(f"{where}: {column} is {row.get(column)!r}, not text; correct or remove the row")
    return tuple(row[column] for column in columns)


def _number(value: Any) -> int | float | None:
    """The number that a label is or spells; None for a word. NaN for a missing label."""
    if value is None or value in _MISSING:
        return math.nan
    if not isinstance(value, str):
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return None


def _labels(where: str, column: str, values: list[Any]) -> tuple[tuple[str, ...], tuple[float, float]]:
    """(sorted class names, empty for a regression; (lowest, highest) score). Raises `InputError`."""
    has_lists = any(isinstance(value, list) for value in values)
    for row, value in enumerate(values, 1):
        if fault := _fault(value, has_lists):
            raise InputError(f"{where}, row {row}: {column} is {value!r}, {fault}")
    if has_lists and any(values):
        return tuple(sorted({str(name) for value in values for name in value})), (0.0, 1.0)
    numbers = [_number(value) for value in values]
    score = next((value for value, number in zip(values, numbers, strict=True) if isinstance(number, float)), None)
    if None in numbers:
        row = numbers.index(None)
        word = f"{where}, row {row + 1}: {column} is {values[row]!r}"
        if all(re.fullmatch(r"-?\d+(,\d+)?", str(value)) for value in values):
            raise InputError(f"{word}: write 1,5 as 1.5 and 1,000 as 1000")
        if score is not None:
            raise InputError(f"{word}, not a number like {score!r}; correct the row")
    if len({*map(str, values)} if score is None else {*numbers}) < 2:
        raise InputError(f"{where}: {column} is {values[0]!r} in all {len(values):,} rows; name another label_column")
    if score is not None:
        return (), (float(min(numbers)), float(max(numbers)))
    order = {str(value): (number is None, number or 0) for value, number in zip(values, numbers, strict=True)}
    return tuple(sorted(order, key=lambda name: (order[name], name))), (0.0, 1.0)


def is_label(value: Any) -> bool:
    """Whether a list of labels may have this element: a whole number, or a word that fits into a cell of a TSV."""
    return type(value) is int or (is_text(value) and bool(re.fullmatch(r"\S([^\t\r\n]*\S)?", value)))


def _fault(value: Any, has_lists: bool) -> str:
    """The fault of a label, for the error message; empty for a good one."""
    if has_lists:
        is_good = isinstance(value, list) and all(map(is_label, value))
        return "" if is_good else "not a list of words or whole numbers (other rows have lists)"
    if not isinstance(value, str | int | float | None):
        return "but a label must be a string, an integer or a float"
    if isinstance(number := _number(value), float):
        return "" if math.isfinite(number) else "which means a missing label: remove the row, or rename the class"
    if isinstance(value, str) and not is_label(value):
        return "with blanks around it, a tab, a line end or invalid Unicode; correct it"
    return "and lists of labels need JSON lines or Parquet" if re.fullmatch(r"(?s)\[.*\]", str(value)) else ""


def _encode_labels(
    split: str, where: str, column: str, rows: Rows, names: tuple[str, ...], multi_label: bool
) -> list[Any] | None:
    """Class numbers, scores, or a 0 or 1 for each class; None for a test set without labels, or with a placeholder."""
    values = [row.get(column) for row in rows]
    if split == "test" and len(set(map(str, values))) < 2:
        logger.info(f"Test set    {column} is missing, or {values[0]!r} in all rows: not scored")
        return None
    numbers = {name: number for number, name in enumerate(names)}
    if multi_label:
        sets = [{*map(str, value)} if isinstance(value, list) else {None} for value in values]
        labels = [tuple(int(name in each) for name in names) if each <= {*names} else None for each in sets]
    else:
        labels = [numbers.get(str(value)) if names else _number(value) for value in values]
    for row, (label, value) in enumerate(zip(labels, values, strict=True), 1):
        if label is None or not np.isfinite(label).all():
            wanted = f"none of the training labels {listed(names, 20)}{_about_scores(names)}" if names else "no number"
            wanted += "; a test set has labels in all rows or in none" * (split == "test" and not value)
            raise InputError(f"{where}, row {row}: {column} is {value!r}, {wanted}")
    return labels


def _about_scores(names: tuple[str, ...]) -> str:
    is_score = names and all(name.lstrip("-").isdecimal() for name in names)
    return "; whole numbers are classes, so write scores with a decimal point (7.0)" if is_score else ""


def hold_out(labels: list[Any]) -> tuple[list[int], list[int]]:
    """(training rows, held-out rows): a stratified split that holds out every tenth row, sorted by label and shuffled
    within a label. Each class keeps a training row."""
    draws, classes = np.random.default_rng(_SPLIT_SEED).random(len(labels)), np.asarray(labels)
    _, order, counts = np.unique(classes, axis=0, return_inverse=True, return_counts=True)
    rows = np.lexsort((draws, order))[_HELD_OUT]
    single = counts[order] == 1 if classes.ndim == 1 else classes[:, classes.sum(0) == classes[rows].sum(0)].any(1)
    held_out = {row for row in rows.tolist() if classes.dtype.kind == "f" or not single[row]}
    return [row for row in range(len(labels)) if row not in held_out], sorted(held_out)
