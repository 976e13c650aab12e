"""The documents of a corpus (paper, section 3.2), read file by file, with what is held out and what cannot be read."""

import errno
import glob
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import fsspec
import pyarrow.parquet as pq

from roberta_recipe.data.corpus import COMPRESSED, Corpus, Source, check_unchanged, check_validation_files
from roberta_recipe.data.order import file_order, interleave
from roberta_recipe.errors import InputError, first_line
from roberta_recipe.log import counted, logger

RETRY_DELAYS_S = (1, 2, 4, 8, 16)  # before each further attempt at a read
_CHECKED_BYTES = 4 << 20  # of each file
_LINES_PER_BATCH = 1024  # of a text file
_MOST_WITHOUT = 1000  # rows on end without a value in the text column


class BadShard(InputError):
    """A file that cannot be read to its end."""


def read_file(source: Source, format: str, path: str, start: int = 0) -> Iterator[str | None]:
    """The text of each document of one file, from row `start` on, streamed by `datasets`.

    A read that fails for a reason that may pass (an I/O error; anything, of a remote file) is tried again, from the
    row that it had come to, after each of `RETRY_DELAYS_S`. Raises `BadShard` for a file that cannot be read, and
    `InputError` for a file that is not as the preset says; both name it.
    """
    if source.filters is not None and format != "parquet":
        raise InputError(f"source {source.name!r}: filters work on Parquet only, and its files are {format}")
    if "://" not in path and "::" in path:
        raise InputError(
            f"source {source.name!r}: rename {path}; datasets reads a '::' in a name as a chain of protocols"
        )
    row, delays = start, iter(RETRY_DELAYS_S)
    with_value = -1 if start == 0 else start - 1  # the last row that has a value; those before `start` are not known
    while True:
        try:
            for text in _read_rows(source, format, path, row):
                if text is not None:
                    with_value = row
                elif row - with_value == _MOST_WITHOUT:
                    raise _no_value(source, path, with_value + 1, row)
                yield text
                row, delays = row + 1, iter(RETRY_DELAYS_S)
            if row and with_value < 0:
                raise _no_value(source, path, 0, row - 1)
            return
        except InputError:
            raise
        except Exception as error:  # pyarrow, json, codecs, fsspec: each has its own exceptions
            passing = "://" in path or (isinstance(error, OSError) and error.errno not in (None, errno.ENOENT))
            delay_s = next(delays, None) if passing else None
            if delay_s is None:
                if format == "parquet" and (columns := _parquet_columns(path)) and source.text_column not in columns:
                    raise _no_column(source, path, source.text_column, columns) from None
                raise _bad_shard(source, path, row, _reason(format, path, error)) from error
            logger.warning(
                f"source {source.name!r}: reading {path} failed at row {row} ({error}); again in {delay_s} s"
            )
            time.sleep(delay_s)


def _read_rows(source: Source, format: str, path: str, start: int) -> Iterator[str | None]:
    """One attempt at `read_file`."""
    options: dict[str, Any] = {}
    if format == "text":
        options = {"sample_by": "line", "keep_linebreaks": True}
    elif format == "parquet":
        # the other columns are not even fetched; a row group may hold gigabytes, or (then it has no size) nothing
        options = {"columns": [source.text_column], "batch_size": 256}
    if source.filters is not None:
        options["filters"] = [tuple(condition) for condition in source.filters]
    local = "://" not in path
    if local and os.path.getsize(path) == 0:
        return
    pattern = glob.escape(path) if local else path  # or brackets in a name would be read as a pattern
    rows = datasets.load_dataset(format, data_files=[pattern], split="train", streaming=True, **options)
    if format == "text":
        yield from itertools.islice(_paragraphs(rows), start, None)
        return
    # `iter`, since `__iter__` would divide the rows among the workers of a DataLoader
    for row in (rows.skip(start) if start else rows).iter(batch_size=1):
        if source.text_column not in row:
            raise _no_column(source, path, source.text_column, sorted(row))
        (text,) = row[source.text_column]
        if not isinstance(text, str | None):
            raise InputError(
                f"source {source.name!r}: column {source.text_column!r} of {path} holds {type(text).__name__}, not text"
            )
        yield text


def _paragraphs(rows: datasets.IterableDataset) -> Iterator[str]:
    """The documents of a text file, given its lines with their ends ("\\n" whatever the file has).

    They are what `text.split("\\n\\n")` gives, without empty strings, once every line of blanks is an empty line.
    Blanks are what `str.strip` removes, as in fairseq's readers: tabs and the white space of Unicode too.
    """
    document: list[str] = []
    for line in _lines(rows):
        if not line.isspace():
            document.append(line)
        elif not document:  # the second of two lines of blanks: its end is the beginning of the next document
            document = ["\n"]
        else:
            if text := "".join(document)[:-1]:
                yield text
            document = []
    if document:
        yield "".join(document)


def _lines(rows: datasets.IterableDataset) -> Iterator[str]:
    """The lines of a text file, without its byte order mark (`datasets` uses `encoding` for plain local files only)."""
    batches = rows.with_format("arrow").iter(batch_size=_LINES_PER_BATCH)  # `iter`: see `_read_rows`
    lines = itertools.chain.from_iterable(batch["text"].to_pylist() for batch in batches)
    if first := next(lines, "").removeprefix("\ufeff"):
        yield first
    yield from lines


def text_file_rule(corpus: Corpus) -> dict[str, str]:
    """For fingerprints: how text files are read, where a corpus has some; others are unlike those of former versions,
    which took a line of blanks for text."""
    formats = {corpus.files(source, split)[0] for source in corpus.sources for split in ("train", "validation")}
    return {"text_files": "a line of blanks separates documents"} if "text" in formats else {}


def _bad_shard(source: Source, path: str, row: int, reason: str) -> BadShard:
    return BadShard(
        f"source {source.name!r}: cannot read {path}: {reason} (row {row}); fix or remove it, or pass over what "
        "cannot be read with `on_bad_shard: skip` in a corpus preset of these files"
    )


def _no_column(source: Source, path: str, column: str, columns: list[str]) -> InputError:
    return InputError(f"source {source.name!r}: {path} has no column {column!r}; it has {columns} (set text_column)")


def _no_value(source: Source, path: str, first: int, last: int) -> InputError:
    return InputError(
        f"source {source.name!r}: rows {first} to {last} of {path} have no value in column {source.text_column!r} "
        "(missing or null); set text_column, or remove the rows"
    )


def _parquet_columns(path: str) -> list[str]:
    """The columns of a Parquet file; none where not even its schema can be read."""
    try:
        with fsspec.open(path) as stream:
            return pq.read_schema(stream).names
    except Exception:
        return []


def _parquet_rows(path: str) -> int | None:
    """The number of rows of a Parquet file, as its footer has it; None where it cannot be read."""
    try:
        with fsspec.open(path) as stream:
            return pq.read_metadata(stream).num_rows
    except Exception:
        return None


def _reason(format: str, path: str, error: Exception) -> str:
    """Why a file could not be read: for text and JSON lines, the first line that is no UTF-8 or no JSON."""
    return _bad_line(format, path) or f"{type(error).__name__}: {first_line(error)}"


def _bad_line(format: str, path: str, max_bytes: float = float("inf"), source: Source | None = None) -> str | None:
    """The first line of a local text or JSON lines file that cannot be read, looked for in its first `max_bytes`.

    With `source`, raises `InputError` for JSON lines without a value in its text column.
    """
    if format not in ("text", "json") or not Path(path).is_file() or Path(path).suffix.lower() in COMPRESSED:
        return None
    row, with_value = 0, -1
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                decoded = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if format == "json" and decoded.strip():
                    values = json.loads(decoded)
                    if not isinstance(values, dict) or values.get(source.text_column if source else "") is not None:
                        with_value = row
                    elif source and row - with_value == _MOST_WITHOUT:
                        raise _no_value(source, path, with_value + 1, row)
                    row += 1
            except UnicodeDecodeError as bad:
                return f"line {number} is not UTF-8 (byte {line[bad.start]:#04x}); convert it, e.g. with iconv -t UTF-8"
            except json.JSONDecodeError as bad:
                return f"line {number} is not JSON ({bad.msg})"
            max_bytes -= len(line)
            if max_bytes < 0:
                return None
    if source and row and with_value < 0:
        if source.text_column not in values:
            raise _no_column(source, path, source.text_column, sorted(values))
        raise _no_value(source, path, 0, row - 1)
    return None


def text_digest(text: str) -> str:
    """16 hexadecimal digits that name a document by its text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def held_out(text: str, share: float) -> bool:
    """Whether a document belongs to validation: by a hash, so that copies of a text are on the same side."""
    return int(text_digest(text), 16) < share * 2**64


class Row(NamedTuple):
    """A row of a file that holds a document, and what was passed over between the last such row and this row."""

    number: int
    text: str | None  # None after the last row of the file
    empty: int = 0  # documents without text
    held_out: int = 0  # documents passed over: in training those of validation, in validation the corpus's `left_out`
    bad_files: int = 0  # 1 where the file broke off here and `on_bad_shard` is "skip"
    lost_rows: int = 0  # rows after the break, as far as the file still tells


def file_rows(
    corpus: Corpus, source: Source, split: str, path: str, start: int = 0, others: list[Row] | None = None
) -> Iterator[Row]:
    """The documents of one split ("train", "validation") of a file, from row `start` on; then a `Row` without text.

    The documents of the other split are put into `others`.
    """
    format, _ = corpus.files(source, split)
    share = None if source.validation_files else corpus.validation_share
    number, empty, other_split = start, 0, 0
    try:
        for text in read_file(source, format, path, start):
            if text is None or not text.strip():
                empty += 1
            elif share is not None and held_out(text, share) != (split == "validation"):
                other_split += split == "train"
                if others is not None:
                    others.append(Row(number, text))
            elif split == "validation" and corpus.left_out and text_digest(text) in corpus.left_out:
                other_split += 1
            else:
                yield Row(number, text, empty, other_split)
                empty = other_split = 0
            number += 1
    except BadShard as bad:
        check_unchanged(corpus, path)
        if corpus.on_bad_shard != "skip":
            raise
        lost = max((_parquet_rows(path) or number) - number, 0) if format == "parquet" else 0
        rows = counted(lost, "row") if lost else "an unknown number of rows"
        logger.warning(f"{bad}; skipped, with what follows row {number} ({rows})")
        yield Row(number, None, empty, other_split, bad_files=1, lost_rows=lost)
        return
    check_unchanged(corpus, path)
    yield Row(number, None, empty, other_split)


def documents(corpus: Corpus, source: Source, split: str, *, seed: int, epoch: int = 0) -> Iterator[str]:
    """One pass over the documents of a source: files in the order of the pass, rows in file order."""
    _, files = corpus.files(source, split)
    for number in file_order(corpus.sources.index(source), len(files), seed=seed, epoch=epoch):
        yield from (row.text for row in file_rows(corpus, source, split, files[number]) if row.text is not None)


def sample_documents(corpus: Corpus, split: str, *, max_bytes: int, seed: int) -> Iterator[tuple[str, str]]:
    """(source name, text) in the proportions of the mixture, one pass at most, until `max_bytes` of UTF-8 are given."""
    streams = [zip(itertools.repeat(s.name), documents(corpus, s, split, seed=seed)) for s in corpus.sources]
    total = 0
    for name, text in interleave(streams, corpus.shares, cost=lambda item: len(item[1].encode())):
        yield name, text
        total += len(text.encode())
        if total >= max_bytes:
            return


def text_bytes(corpus: Corpus) -> int | None:
    """About how many bytes of text the training files hold, by their sizes: None where one is remote or compressed. Of
    Parquet the text column as its footer has it, of JSON lines the share that the text has of the first lines."""
    sizes = []
    for source in corpus.sources:
        if not source.files:  # the Hub's, or made here
            return None
        format, files = corpus.files(source, "train")
        sizes += [_text_bytes(source, format, path) for path in files]
    return None if None in sizes else sum(sizes)


def _text_bytes(source: Source, format: str, path: str) -> int | None:
    """`text_bytes` of a file."""
    if "://" in path or Path(path).suffix.lower() in COMPRESSED:
        return None
    size = os.path.getsize(path)
    try:
        if format == "parquet":
            footer = pq.read_metadata(path)
            groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
            columns = [group.column(number) for group in groups for number in range(group.num_columns)]
            return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == source.text_column)
        if format == "json":
            with open(path, "rb") as stream:
                lines = list(itertools.islice(stream, _LINES_PER_BATCH))
            texts = [json.loads(line).get(source.text_column) or "" for line in lines if line.strip()]
            size = int(size * len("".join(texts).encode()) / max(sum(map(len, lines)), 1))
    except Exception:  # reading it says why
        return None
    return size


def check_sources(corpus: Corpus) -> None:
    """Raise `InputError` for what cannot be read, before training: the first document of every source, and of local
    files the Parquet columns, or the first `_CHECKED_BYTES` of text and JSON lines; then hash the files, so that one
    process does it before the others. Files that cannot be read are left for `on_bad_shard: skip` to pass over."""
    for source in corpus.sources:
        format, files = corpus.files(source, "train")
        for path in files:
            if format == "text" or Path(path).suffix == ".jsonl":
                bad = _bad_line(format, path, _CHECKED_BYTES, source)
                if bad and corpus.on_bad_shard == "stop":
                    raise _bad_shard(source, path, 0, bad)
            if format == "parquet" and "://" not in path:
                _check_parquet(source, path)
        if next(documents(corpus, source, "train", seed=0), None) is None:
            raise InputError(f"source {source.name!r} is empty: none of its documents has text to train on")
    _check_held_out(corpus)
    check_validation_files(corpus)


def _check_held_out(corpus: Corpus) -> None:
    """Raise `InputError` where no source holds out a document, and warn of each that does not: of local files, read up
    to their first document of validation (the whole of a source that has none)."""
    without = []
    for source in corpus.sources:
        files = corpus.files(source, "validation")[1]
        if not any("://" in path for path in files):
            without += [source.name] * (next(documents(corpus, source, "validation", seed=0), None) is None)
    advice = "name validation files, or raise validation_share in a corpus preset"
    if len(without) == len(corpus.sources):
        raise InputError(
            f"no document is held out of {', '.join(without)}, so there is nothing to validate on; {advice}"
        )
    for name in without:
        logger.warning(f"source {name!r} holds out no document, so it is not measured; {advice}")


def _check_parquet(source: Source, path: str) -> None:
    """Raise `InputError` for a Parquet file whose footer says that the text column is missing or has no value."""
    try:
        footer = pq.read_metadata(path)
    except Exception:
        return  # reading it says why
    columns = footer.schema.to_arrow_schema().names
    if source.text_column not in columns:
        raise _no_column(source, path, source.text_column, columns)
    column = footer.schema.names.index(source.text_column) if source.text_column in footer.schema.names else None
    if column is None or not footer.num_rows:
        return
    chunks = [footer.row_group(number).column(column) for number in range(footer.num_row_groups)]
    nulls = [c.statistics.null_count if c.statistics and c.statistics.has_null_count else 0 for c in chunks]
    if sum(nulls) == footer.num_rows:
        raise _no_value(source, path, 0, footer.num_rows - 1)
