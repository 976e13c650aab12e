"""The documents of a corpus (paper, section 3.2), read file by file; held-out documents; checks before training."""

import contextlib
import glob
import hashlib
import io
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from roberta_recipe.data import readers
from roberta_recipe.data.corpus import Corpus, Source, check_unchanged, check_validation_files
from roberta_recipe.data.order import file_order, interleave
from roberta_recipe.data.readers import AS_BYTES, DECOMPRESSORS, READERS, BadRow, NoColumn, Text, decoded, open_file
from roberta_recipe.errors import InputError, first_line
from roberta_recipe.log import counted, logger

_CHECKED_BYTES = 4 << 20  # of the text of each file
_BYTES_OF_A_ROW = 100  # of other columns, at least
_LINES_OF_A_SAMPLE = 1024  # of a JSON lines file
_MOST_WITHOUT = 1000  # rows on end without a value in the text column


class BadShard(InputError):
    """A file that cannot be read to its end."""


def read_file(source: Source, format: str, path: str, start: int = 0) -> Iterator[Text]:
    """The text of each document of one file, from row `start` on; `BadRow` for a row that cannot be read.

    Transient errors of our readers (I/O errors; most errors of remote files) are retried from the current row, after
    each of `RETRY_DELAYS_S`; `datasets` retries its own reads. Raises `BadShard` for a file that cannot be read, and
    `InputError` for a file that contradicts the preset; both name it.
    """
    row, delays = start, iter(readers.RETRY_DELAYS_S)
    with_value = start - 1  # the last row that has a value; those before `start` are not known
    while True:
        try:
            for text in _read_rows(source, format, path, row):
                if not isinstance(text, Text):
                    raise InputError(
                        f"source {source.name!r}: column {source.text_column!r} of {path} holds "
                        f"{type(text).__name__}, not text"
                    )
                if text is not None:
                    with_value = row
                elif row - with_value == _MOST_WITHOUT:
                    raise _no_value(source, path, with_value + 1, row)
                yield text
                row, delays = row + 1, iter(readers.RETRY_DELAYS_S)
            if row and with_value < 0:
                raise _no_value(source, path, 0, row - 1)
            return
        except InputError:
            raise
        except NoColumn as error:
            raise _no_column(source, path, *error.args) from None
        except Exception as error:  # pyarrow, json, zlib, fsspec: each has its own exceptions
            action = f"source {source.name!r}: reading {path} at row {row}"
            if format not in READERS or not readers.wait_for_retry(error, delays, path, action):
                raise _bad_shard(source, path, row, f"{type(error).__name__}: {first_line(error)}") from error


def _read_rows(source: Source, format: str, path: str, start: int) -> Iterator[Any]:
    """One attempt at `read_file`. Parquet and the other formats of Hub datasets are streamed by `datasets`."""
    if format in READERS:
        with open_file(path) as stream:
            yield from READERS[format](stream, source.text_column, start)
        return
    options: dict[str, Any] = {}
    kind = None
    if format == "parquet":
        if (kind := _parquet_type(source, path)) is None:
            return
        features = datasets.Features.from_arrow_schema(pa.schema({source.text_column: AS_BYTES.get(kind, kind)}))
        # the other columns are not even fetched; a row group may hold gigabytes, or (then it has no size) nothing
        options = {"columns": [source.text_column], "features": features, "batch_size": 256}
        if source.filters is not None:
            options["filters"] = [tuple(condition) for condition in source.filters]
    pattern = path if "://" in path else glob.escape(path)  # or brackets in a name would be read as a pattern
    with tempfile.TemporaryDirectory() as cache:  # stays empty; the cache below HF_HOME may not be writable
        options |= {"data_files": [pattern], "split": "train", "cache_dir": cache}
        rows = datasets.load_dataset(format, streaming=True, **options)
        # `iter`, since `__iter__` would divide the rows among the workers of a DataLoader
        for row in (rows.skip(start) if start else rows).iter(batch_size=1):
            if source.text_column not in row:
                raise _no_column(source, path, sorted(row))
            [value] = row[source.text_column]
            yield decoded(value) if kind in AS_BYTES else value


def _bad_shard(source: Source, path: str, row: int, reason: str) -> BadShard:
    return BadShard(
        f"source {source.name!r}: cannot read {path}: {reason} (row {row}); fix or remove it, or pass over what "
        "cannot be read with `on_bad_shard: skip` in a corpus preset of these files"
    )


def _no_column(source: Source, path: str, columns: list[str]) -> InputError:
    column = source.text_column
    return InputError(f"source {source.name!r}: {path} has no column {column!r}; it has {columns} (set text_column)")


def _no_value(source: Source, path: str, first: int, last: int) -> InputError:
    return InputError(
        f"source {source.name!r}: rows {first} to {last} of {path} have no value in column {source.text_column!r} "
        "(missing or null); set text_column, or remove the rows"
    )


def _parquet_type(source: Source, path: str) -> pa.DataType | None:
    """The type of the text column by a Parquet file's footer; None of an empty file. Raises `InputError` where there is
    no such column, or nothing but nulls in it."""
    with open_file(path) as stream:
        if not stream.read(1):
            return None
        footer = pq.read_metadata(stream)
    schema = footer.schema.to_arrow_schema()
    if source.text_column not in schema.names:
        raise _no_column(source, path, schema.names)
    statistics = [chunk.statistics for chunk in _text_chunks(source, footer)]
    if footer.num_rows and footer.num_rows == sum(s.null_count for s in statistics if s and s.has_null_count):
        raise _no_value(source, path, 0, footer.num_rows - 1)
    return schema.field(source.text_column).type


def _parquet_footer(path: str) -> pq.FileMetaData | None:
    """The footer of a Parquet file; None where it cannot be read."""
    try:
        with open_file(path) as stream:
            return pq.read_metadata(stream)
    except Exception:
        return None


def _text_chunks(source: Source, footer: pq.FileMetaData) -> list[pq.ColumnChunkMetaData]:
    """The text column's chunk of each row group."""
    groups = map(footer.row_group, range(footer.num_row_groups))
    chunks = (chunk for group in groups for chunk in map(group.column, range(group.num_columns)))
    return [chunk for chunk in chunks if chunk.path_in_schema == source.text_column]


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
    lost_rows: int = 0  # rows that could not be read; after a break, as far as the file still tells


def file_rows(
    corpus: Corpus, source: Source, split: str, path: str, start: int = 0, others: list[Row] | None = None
) -> Iterator[Row]:
    """The documents of one split ("train", "validation") of a file, from row `start` on; then a `Row` without text.

    The documents of the other split are put into `others`.
    """
    format, _ = corpus.files(source, split)
    share = None if source.validation_files else corpus.validation_share
    number, empty, other_split, lost, warned = start, 0, 0, 0, False
    try:
        for text in read_file(source, format, path, start):
            if isinstance(text, BadRow):
                bad = _bad_shard(source, path, number, text.reason)
                if corpus.on_bad_shard != "skip":
                    raise bad
                if not warned:
                    logger.warning(f"{bad}; row {number} is skipped, and so are later rows of this file like it")
                lost, warned = lost + 1, True
            elif text is None or not text.strip():
                empty += 1
            elif share is not None and held_out(text, share) != (split == "validation"):
                other_split += split == "train"
                if others is not None:
                    others.append(Row(number, text))
            elif split == "validation" and corpus.left_out and text_digest(text) in corpus.left_out:
                other_split += 1
            else:
                yield Row(number, text, empty, other_split, lost_rows=lost)
                empty = other_split = lost = 0
            number += 1
    except BadShard as bad:
        check_unchanged(corpus, path)
        if corpus.on_bad_shard != "skip":
            raise
        footer = _parquet_footer(path) if format == "parquet" else None
        rest = max(footer.num_rows - number, 0) if footer else 0
        rows = counted(rest, "row") if rest else "an unknown number of rows"
        logger.warning(f"{bad}; skipped, with what follows row {number} ({rows})")
        yield Row(number, None, empty, other_split, bad_files=1, lost_rows=lost + rest)
        return
    check_unchanged(corpus, path)
    yield Row(number, None, empty, other_split, lost_rows=lost)


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
        format, files = corpus.files(source, "train")
        sizes += [_text_bytes(source, format, path) for path in files]
    return None if None in sizes else sum(sizes)


def _text_bytes(source: Source, format: str, path: str) -> int | None:
    """`text_bytes` of a file."""
    if "://" in path or Path(path).suffix.lower() in DECOMPRESSORS:
        return None
    if format == "parquet":
        footer = _parquet_footer(path)
        return footer and sum(chunk.total_uncompressed_size for chunk in _text_chunks(source, footer))
    size = os.path.getsize(path)
    if format == "json":
        with open(path, "rb") as stream:
            sample = b"".join(itertools.islice(stream, _LINES_OF_A_SAMPLE))
        texts = READERS["json"](io.BytesIO(sample), source.text_column)
        try:
            size = int(size * sum(len(text.encode()) for text in texts if isinstance(text, str)) / max(len(sample), 1))
        except (ValueError, NoColumn):  # a list that is longer than the sample
            return None
    return size


def check_sources(corpus: Corpus) -> None:
    """Raise `InputError`, before training, for a local file that cannot be read at its beginning, a source without a
    document to train on, a validation file that is trained on, and a corpus that holds out nothing (a source alone is
    warned of). Files that cannot be read are left for `on_bad_shard: skip` to pass over."""
    without = []
    for source in corpus.sources:
        format, files = corpus.files(source, "train")
        for path in files:
            if "://" not in path:
                _check_file(corpus, source, format, path)
        if next(documents(corpus, source, "train", seed=0), None) is None:
            raise InputError(f"source {source.name!r} is empty: none of its documents has text to train on")
        if not any("://" in path for path in corpus.files(source, "validation")[1]):  # up to the first, or the whole
            without += [source.name] * (next(documents(corpus, source, "validation", seed=0), None) is None)
    advice = "name validation files, or raise validation_share in a corpus preset"
    if len(without) == len(corpus.sources):
        raise InputError(
            f"no document is held out of {', '.join(without)}, so there is nothing to validate on; {advice}"
        )
    for name in without:
        logger.warning(f"source {name!r} holds out no document, so it is not measured; {advice}")
    check_validation_files(corpus)


def _check_file(corpus: Corpus, source: Source, format: str, path: str) -> None:
    """Raise `InputError` for what cannot be read in the first `_CHECKED_BYTES` of a file; of Parquet, in its footer."""
    if format == "parquet":
        with contextlib.suppress(OSError, pa.ArrowException):  # damage is named, or passed over, as the file is read
            _parquet_type(source, path)
        return
    size = 0
    try:
        for row, text in enumerate(read_file(source, format, path)):
            if isinstance(text, BadRow):
                raise _bad_shard(source, path, row, text.reason)
            size += len(text or "") + _BYTES_OF_A_ROW
            if size > _CHECKED_BYTES:
                return
    except BadShard:
        if corpus.on_bad_shard == "stop":
            raise
