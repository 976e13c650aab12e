"""File readers: text, JSON lines, Arrow and Parquet, local or remote, compressed or not."""

import contextlib
import functools
import io
import itertools
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from roberta_recipe.errors import InputError
from roberta_recipe.input_files import explained

_PARQUET_BUFFER = 1 << 18  # bytes read at a time, as a row group may hold gigabytes
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # end-of-stream marker


class BadRow(NamedTuple):
    """An unreadable row."""

    reason: str


Text = str | BadRow | None  # None: a row without a value in the text column

COMPRESSIONS: dict[str, Callable[[BinaryIO], Any]] = {  # by suffix
    ".gz": functools.partial(pa.input_stream, compression="gzip"),
    ".bz2": functools.partial(pa.input_stream, compression="bz2"),
    ".zst": functools.partial(pa.input_stream, compression="zstd"),
    ".xz": lzma.LZMAFile,
}


@contextlib.contextmanager
def open_file(path: str) -> Iterator[BinaryIO]:
    """Open a local or remote file, decompressed according to its last suffix. Damaged or truncated compressed data
    raise `OSError` or `EOFError`."""
    decompressed = COMPRESSIONS.get(Path(path).suffix.lower(), lambda stream: stream)
    with fsspec.open(path, "rb") if "://" in path else open(path, "rb") as stream:
        yield decompressed(stream)


def _lines(stream: BinaryIO) -> io.TextIOWrapper:
    """A file as text with "\n" line ends, without a byte order mark; invalid UTF-8 becomes lone surrogates."""
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape")


def _checked(value: Any, place: str) -> Text:
    """`value` if it is None or valid Unicode text, else a `BadRow` (JSON may escape half of a surrogate pair)."""
    if not isinstance(value, str | None):
        return BadRow(f"{place} holds {type(value).__name__}, not text")
    try:
        (value or "").encode()
    except UnicodeEncodeError as bad:
        fix = "convert it (iconv -t UTF-8)" if "\udc80" <= value[bad.start] < "\udd00" else "half a surrogate pair"
        return BadRow(f"{place} is not UTF-8 (character {bad.start}): {fix}")
    return value


def text_rows(stream: BinaryIO, column: str, start: int = 0) -> Iterator[Text]:
    """The documents of a text file, separated by blank lines: `text.split("\n\n")` without empty strings, where a line
    of Unicode white space counts as empty (as in fairseq)."""
    return itertools.islice(_paragraphs(_lines(stream)), start, None)


def _paragraphs(lines: Iterable[str]) -> Iterator[Text]:
    document: list[str] = []
    number = 0
    for number, line in enumerate(lines, 1):
        if not line.isspace():
            document.append(line)
        elif not document:  # the second of two blank lines: its line end begins the next document
            document = ["\n"]
        else:
            if text := "".join(document)[:-1]:
                yield _checked(text, f"the document at line {number - len(document)}")
            document = []
    if document:
        yield _checked("".join(document), f"the document at line {number - len(document) + 1}")


def json_rows(stream: BinaryIO, column: str, start: int = 0) -> Iterator[Text]:
    """The text column of JSON lines (blank lines are skipped), or of one JSON list of objects or strings."""
    lines = _lines(stream)
    numbered = ((number, line) for number, line in enumerate(lines, 1) if not line.isspace())
    first = list(itertools.islice(numbered, 1))
    if first and first[0][1].lstrip().startswith("["):
        rows = json.loads(first[0][1] + lines.read())
        for number, row in enumerate(rows[start:], start + 1):
            yield _checked(row.get(column) if isinstance(row, dict) else row, f"element {number}")
        return
    for number, line in itertools.islice(itertools.chain(first, numbered), start, None):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield BadRow(f"line {number} is not JSON ({error})")
        else:
            yield _checked(row.get(column) if isinstance(row, dict) else row, f"line {number}")


def _column_rows(schema: pa.Schema, batches: Iterable[pa.RecordBatch], column: str, start: int) -> Iterator[Text]:
    """The values of a column from row `start` on."""
    if column not in schema.names:
        raise InputError(f"has no column {column!r}; it has {schema.names} (set text_column)")
    row = 0
    for batch in batches:
        batch.validate()
        values = batch[column]
        values.validate(full=True)  # damaged offsets may point anywhere in memory
        for number, value in enumerate(values[max(start - row, 0) :], max(start, row)):
            yield _checked(value.as_py(), f"row {number}")
        row += len(batch)


def parquet_rows(
    stream: BinaryIO, column: str, start: int = 0, filters: list[list[Any]] | None = None
) -> Iterator[Text]:
    """A column of the rows of a Parquet file that pass `filters`."""
    file = pq.ParquetFile(stream, buffer_size=_PARQUET_BUFFER)
    batches = file.iter_batches(256, columns=[column, *(name for name, _, _ in filters or ())])
    if filters:
        condition = pq.filters_to_expression([tuple(one) for one in filters])
        with explained(f"does not fit filters={filters}", f"; it has {file.schema_arrow.names}"):
            file.schema_arrow.empty_table().filter(condition)
        batches = (batch.filter(condition) for batch in batches)
    yield from _column_rows(file.schema_arrow, batches, column, start)


def arrow_rows(stream: BinaryIO, column: str, start: int = 0) -> Iterator[Text]:
    """A column of an Arrow IPC file or stream (`save_to_disk` writes streams). Raises `EOFError` for a stream
    without end-of-stream marker: cut between two batches, it would otherwise read as a shorter stream."""
    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    reader = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    yield from _column_rows(reader.schema, batches, column, start)
    if not is_file and stream.seek(-len(_ARROW_END), io.SEEK_END) and stream.read() != _ARROW_END:
        raise EOFError("it ends without Arrow's end-of-stream marker: it is truncated, or still being written")


READERS: dict[str, Callable[..., Iterator[Text]]] = {
    "text": text_rows,
    "json": json_rows,
    "arrow": arrow_rows,
    "parquet": parquet_rows,
}
