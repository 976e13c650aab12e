"""The documents of a corpus (paper, section 3.2), read file by file; held-out documents; checks before training."""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from roberta_recipe.data import readers
from roberta_recipe.data.corpus import Corpus, Source, check_unchanged, check_validation_files
from roberta_recipe.data.order import file_order, interleave
from roberta_recipe.data.readers import DECOMPRESSORS, READERS, BadRow, NoColumn, Text, open_file
from roberta_recipe.errors import InputError, first_line
from roberta_recipe.log import logger

_CHECKED_BYTES = 1 << 20  # of the text of each file
_BYTES_OF_A_ROW = 100  # of other columns, at least
_MOST_WITHOUT = 1000  # rows on end without a value in the text column


class BadShard(InputError):
    """A file that cannot be read to its end."""


def read_file(source: Source, format: str, path: str, start: int = 0) -> Iterator[Text]:
    """The text of each document of one file, from row `start` on; `BadRow` for a row that cannot be read. Transient
    errors (I/O errors; most errors of remote files) are retried from the current row, after each of `RETRY_DELAYS_S`.
    Raises `BadShard` for a file that cannot be read, and `InputError` for a file that contradicts the preset."""
    where, options = f"source {source.name!r}", {"filters": source.filters} if source.filters else {}
    row, delays = start, iter(readers.RETRY_DELAYS_S)
    with_value = start - 1  # the last row that has a value; those before `start` are not known
    while True:
        try:
            with open_file(path) as stream:
                for text in READERS[format](stream, source.text_column, row, **options):
                    if not isinstance(text, Text):
                        kind = type(text).__name__
                        raise InputError(f"{where}: column {source.text_column!r} of {path} holds {kind}, not text")
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
        except NoColumn as missing:
            raise InputError(
                f"{where}: {path} has no column {source.text_column!r}; it has {missing.args[0]} (set text_column)"
            ) from None
        except Exception as error:  # pyarrow, json, zlib, fsspec: each has its own exceptions
            if not readers.wait_for_retry(error, delays, path, f"{where}: reading {path} at row {row}"):
                raise _bad_shard(source, path, row, f"{type(error).__name__}: {first_line(error)}") from error


def _bad_shard(source: Source, path: str, row: int, reason: str) -> BadShard:
    return BadShard(
        f"source {source.name!r}: cannot read {path}: {reason} (row {row}); fix or remove it, or pass over what "
        "cannot be read with `on_bad_shard: skip` in a corpus preset of these files"
    )


def _no_value(source: Source, path: str, first: int, last: int) -> InputError:
    return InputError(
        f"source {source.name!r}: rows {first} to {last} of {path} have no value in column {source.text_column!r} "
        "(missing or null); set text_column, or remove the rows"
    )


def _parquet_footer(path: str) -> pq.FileMetaData | None:
    """None where it cannot be read."""
    with contextlib.suppress(Exception), open_file(path) as stream:
        return pq.read_metadata(stream)


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
    The documents of the other split are appended to `others`."""
    format, _ = corpus.files(source, split)
    share = None if source.validation_files else corpus.validation_share
    number, empty, other_split, lost, warned, broken = start, 0, 0, 0, False, None
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
        broken = bad
    check_unchanged(corpus, path)
    if broken and corpus.on_bad_shard != "skip":
        raise broken
    if broken:
        logger.warning(f"{broken}; skipped, with what follows row {number}")
        footer = _parquet_footer(path) if format == "parquet" else None
        lost += max(footer.num_rows - number, 0) if footer else 0
    yield Row(number, None, empty, other_split, int(broken is not None), lost)


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
    """About how many bytes of text the training files hold: the size of the text column in the footers of Parquet
    files, of other files the size; None where a file is remote or compressed."""
    total = 0
    for source in corpus.sources:
        format, files = corpus.files(source, "train")
        for path in files:
            if "://" in path or Path(path).suffix.lower() in DECOMPRESSORS:
                return None
            footer = _parquet_footer(path) if format == "parquet" else None
            groups = map(footer.row_group, range(footer.num_row_groups)) if footer else ()
            columns = (column for group in groups for column in map(group.column, range(group.num_columns)))
            sizes = (
                column.total_uncompressed_size for column in columns if column.path_in_schema == source.text_column
            )
            total += sum(sizes) if footer else os.path.getsize(path)
    return total


def check_sources(corpus: Corpus) -> None:
    """Raise `InputError`, before training, for a local file that cannot be read at its beginning, a source without a
    document to train on, a validation file that is trained on, and a corpus that holds out nothing (a source alone is
    warned of). Files that cannot be read are left for `on_bad_shard: skip` to pass over."""
    without = []
    for source in corpus.sources:
        for path in corpus.files(source, "train")[1]:
            size = 0
            for row in file_rows(corpus, source, "train", path) if "://" not in path else ():
                size += len(row.text or "")
                if size + _BYTES_OF_A_ROW * row.number > _CHECKED_BYTES:
                    break
        if next(documents(corpus, source, "train", seed=0), None) is None:
            raise InputError(f"source {source.name!r} is empty: none of its documents has text to train on")
        if not any("://" in path for path in corpus.files(source, "validation")[1]):  # up to the first, or the whole
            without += [source.name] * (next(documents(corpus, source, "validation", seed=0), None) is None)
    said = (
        f"no document is held out of {', '.join(without)}, so there is nothing to measure the loss on; name validation "
        "files, or raise validation_share in a corpus preset"
    )
    if len(without) == len(corpus.sources):
        raise InputError(said)
    if without:
        logger.warning(said)
    check_validation_files(corpus)
