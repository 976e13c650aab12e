"""Readers of single files, local or remote: text, JSON lines, Arrow, Parquet; decompression; retries."""

import bz2
import contextlib
import errno
import io
import itertools
import json
import lzma
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from roberta_recipe.errors import InputError, first_line
from roberta_recipe.log import logger

RETRY_DELAYS_S = (1, 2, 4, 8, 16)  # before each further attempt at a read
_PERMANENT = {None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP}
_BYTES_PER_READ = 1 << 16  # of a compressed file
_BYTES_PER_PIECE = 1 << 18  # decompressed at once
_PZSTD = b"P*M\x18\x04\0\0\0"  # pzstd's skippable frame, four bytes longer, announces the size of the next frame
# the empty member at the end of a file of bgzip
_BGZF_END = b"\x1f\x8b\x08\4\0\0\0\0\0\xff\6\0BC\2\0\x1b\0\3\0\0\0\0\0\0\0\0\0"
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # end-of-stream marker
_BLANKS = re.compile(r"\s*")
_DECODER = json.JSONDecoder(parse_int=len)  # numbers are not text, and int() refuses those of more than 4,300 digits
# Arrow's types of text, and those of its bytes, which need not be UTF-8
_AS_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}


class BadRow(NamedTuple):
    """A row that cannot be read; the reason names the line."""

    reason: str


class NoColumn(Exception):
    """The text column is missing; the argument is the list of the file's columns."""


Text = str | BadRow | None  # of a row; None where it has no value in the text column


def wait_for_retry(error: Exception, delays: Iterator[float], path: str, action: str) -> bool:
    """Whether to retry a read, after sleeping for the next of `delays`: not for a permanent error or after the last."""
    transient = _is_transient(error) if "://" in path else getattr(error, "errno", None) not in _PERMANENT
    delay_s = next(delays, None) if transient else None
    if delay_s is None:
        return False
    logger.warning(f"{action} failed ({first_line(error.__cause__ or error)}); again in {delay_s} s")
    time.sleep(delay_s)
    return True


def with_retries(attempt: Callable[[], Any], path: str, action: str) -> Any:
    """The result of `attempt()`, with the retries of reads. Raises `InputError`."""
    delays = iter(RETRY_DELAYS_S)
    while True:
        try:
            return attempt()
        except Exception as error:  # each file system has its own exceptions
            if not wait_for_retry(error, delays, path, action):
                cause = error.__cause__ or error
                raise InputError(f"{action} failed: {type(cause).__name__}: {first_line(cause)}") from None


def _is_transient(error: Exception) -> bool:
    """Whether a later attempt at a remote read may succeed: not for damaged content, missing permissions, an HTTP
    status 4xx or a missing file (fsspec raises `FileNotFoundError` from any error of a look-up: its cause counts)."""
    if isinstance(error, ValueError | ImportError | PermissionError):  # pyarrow's and json's errors are ValueErrors
        return False
    cause = error.__cause__ or error
    status = getattr(cause, "status", None) or getattr(getattr(cause, "response", None), "status_code", None)
    if status is not None:
        return status >= 500 or status in (408, 429)
    return not isinstance(error, FileNotFoundError) or (cause is not error and isinstance(cause, OSError))


@contextlib.contextmanager
def open_file(path: str) -> Iterator[BinaryIO]:
    """The bytes of a local or remote file, decompressed by its last suffix."""
    with fsspec.open(path, "rb") if "://" in path else open(path, "rb") as stream:
        if kind := DECOMPRESSORS.get(Path(path).suffix.lower()):
            stream = io.BufferedReader(_Chunks(_decompressed(stream, *kind)), _BYTES_PER_PIECE)
            if stream.peek(512)[257:262] == b"ustar":
                raise ValueError("it is a tar archive; unpack it")
        yield stream


def _zstd_decompressor() -> Any:
    try:
        from backports import zstd  # compression.zstd of Python 3.14; its files alone import it
    except ImportError as error:
        raise InputError(f".zst files need backports.zstd ({error}); pip install -r requirements.txt") from None
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 31})  # of `zstd --long=31`


# by suffix: a decompressor of one member (zstd: frame, xz: stream), and the byte that may pad the file after a member
DECOMPRESSORS: dict[str, tuple[Callable[[], Any], bytes]] = {
    ".gz": (lambda: zlib.decompressobj(31), b"\0"),
    ".bz2": (bz2.BZ2Decompressor, b""),
    ".xz": (lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), b"\0"),
    ".zst": (_zstd_decompressor, b""),
}


def _decompressed(stream: BinaryIO, new_member: Callable[[], Any], padding: bytes) -> Iterator[bytes]:
    """The content of all members of a file. Raises `EOFError` where the file ends inside a member or before one that
    must follow (pzstd, bgzip), and the library's error for damage and for anything but members and padding, which
    BZ2File, LZMAFile and ZstdFile ignore."""
    data, unfinished = stream.read(_BYTES_PER_READ), False
    while data:
        if len(data) < len(_BGZF_END):
            data += stream.read(_BYTES_PER_READ)
        blocked = data[:4] == _BGZF_END[:4] and data[12:14] == b"BC"
        unfinished = data.startswith(_PZSTD) or (blocked and not data.startswith(_BGZF_END))
        member = new_member()
        while not member.eof:
            # zlib has no `needs_input`: it returns the input that was too much as `unconsumed_tail`
            ended = not data and getattr(member, "needs_input", True) and not (data := stream.read(_BYTES_PER_READ))
            piece = member.decompress(data, _BYTES_PER_PIECE)
            data = getattr(member, "unconsumed_tail", b"")
            if piece:
                yield piece
            elif ended:
                raise EOFError("it ends inside compressed data: it was cut, or is not yet complete")
        data = member.unused_data or stream.read(_BYTES_PER_READ)
        while data and not (data := data.lstrip(padding)):
            data = stream.read(_BYTES_PER_READ)
    if unfinished:
        raise EOFError("it ends before a member that must follow: it was cut, or is not yet complete")


class _Chunks(io.RawIOBase):
    """A stream over chunks of bytes."""

    def __init__(self, chunks: Iterator[bytes]):
        self.chunks, self.left = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        self.left = self.left or next(self.chunks, b"")
        count = min(len(buffer), len(self.left))
        buffer[:count], self.left = self.left[:count], self.left[count:]
        return count


def _lines(stream: BinaryIO) -> io.TextIOWrapper:
    """The lines of a file, with "\n" for whatever ends them and without its byte order mark; bytes that are not UTF-8
    as half surrogate pairs."""
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape")


def text_rows(stream: BinaryIO, column: str, start: int = 0) -> Iterator[Text]:
    """The documents of a text file: `text.split("\n\n")` without empty strings, after every line of blanks (the white
    space of Unicode, as in fairseq's readers) has become an empty line."""
    return itertools.islice(_paragraphs(_lines(stream)), start, None)


def _paragraphs(lines: Iterable[str]) -> Iterator[Text]:
    document: list[str] = []
    number = 0
    for number, line in enumerate(lines, 1):
        if not line.isspace():
            document.append(line)
        elif not document:  # the second of two lines of blanks: its end is the beginning of the next document
            document = ["\n"]
        else:
            if text := "".join(document)[:-1]:
                yield _checked(text, number - len(document))
            document = []
    if document:
        yield _checked("".join(document), number - len(document) + 1)


def _checked(text: str, line: int) -> str | BadRow:
    """`text`, which begins with line number `line`, or a bad row where its bytes are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as bad:
        line, byte = line + text.count("\n", 0, bad.start), ord(text[bad.start]) - 0xDC00
        return BadRow(f"line {line} is not UTF-8 (byte {byte:#04x}); convert it, e.g. with iconv -t UTF-8")
    return text


def json_rows(stream: BinaryIO, column: str, start: int = 0) -> Iterator[Text]:
    """The text column of JSON lines, of objects that take several lines, or of one JSON list of objects or strings.
    Raises `NoColumn` at the end of a file of objects that all lack it."""
    keys: set[str] = set()
    for place, value in _json_values(_lines(stream), start):
        if isinstance(value, dict):
            if column not in keys:
                keys.update(value)
            place, value = f"column {column!r} of {place}", value.get(column)
        yield value if value is None or isinstance(value, BadRow) else _text_of(value, place)
    if keys and column not in keys and not start:
        raise NoColumn(sorted(keys))


def _text_of(value: Any, place: str) -> str | BadRow:
    if not isinstance(value, str):
        return BadRow(f"{place} is {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as bad:
        return BadRow(f"{place} holds {value[bad.start]!a}, half of a surrogate pair, which UTF-8 cannot write")
    return value


def _json_values(lines: io.TextIOWrapper, start: int) -> Iterator[tuple[str, Any]]:
    """(place, value) of each row from row `start` on; lines of blanks are no rows."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if not line.isspace())
    first = [*itertools.islice(numbered, 1)]
    opened = first[0][1].strip() if first else ""
    if opened == "{" or opened.startswith("["):
        values = _objects(first[0][1] + lines.read())
        for number, value in itertools.islice(enumerate(values if opened == "{" else next(values), 1), start, None):
            yield f"element {number}", value
        return
    for number, line in itertools.islice(itertools.chain(first, numbered), start, None):
        place, value = f"line {number}", _checked(line, number)
        if value is line:
            try:
                value = _DECODER.decode(line)
            except (ValueError, RecursionError) as error:
                value = BadRow(f"{place} is not JSON ({getattr(error, 'msg', error)})")
        yield place, value


def _objects(text: str) -> Iterator[Any]:
    """The JSON values of a text, with nothing but white space between them."""
    position = 0
    while (position := _BLANKS.match(text, position).end()) < len(text):
        value, position = _DECODER.raw_decode(text, position)
        yield value


def _decoded(text: bytes | None) -> Text:
    try:
        return None if text is None else text.decode()
    except UnicodeDecodeError as bad:
        return BadRow(f"its text is not UTF-8 (byte {text[bad.start]:#04x})")


def _column_rows(schema: pa.Schema, batches: Iterable[pa.RecordBatch], column: str, start: int) -> Iterator[Any]:
    """The values of a column from row `start` on. Raises `NoColumn`."""
    if column not in schema.names:
        raise NoColumn(schema.names)
    for batch in batches:
        batch.validate()
        kind = batch[column].type
        values = batch[column].cast(_AS_BYTES.get(kind, kind))
        values.validate(full=True)  # offsets that are damaged may point anywhere in memory
        yield from (_decoded(value.as_py()) if kind in _AS_BYTES else value.as_py() for value in values[start:])
        start = max(start - len(batch), 0)


def parquet_rows(
    stream: BinaryIO, column: str, start: int = 0, filters: list[list[Any]] | None = None
) -> Iterator[Any]:
    """The values of a column of a Parquet file, of the rows that pass `filters`. Raises `NoColumn`."""
    if not stream.read(1):
        return
    file = pq.ParquetFile(stream, buffer_size=_BYTES_PER_PIECE)  # by page: a row group may hold gigabytes
    batches = file.iter_batches(256, columns=[*{column, *(name for name, _, _ in filters or ())}])
    if filters:
        condition = pq.filters_to_expression([tuple(one) for one in filters])
        batches = (batch.filter(condition) for batch in batches)
    yield from _column_rows(file.schema_arrow, batches, column, start)


def arrow_rows(stream: BinaryIO, column: str, start: int = 0) -> Iterator[Any]:
    """The values of a column of an Arrow IPC file or stream (`save_to_disk` writes streams). Raises `NoColumn`, and
    `EOFError` for a stream without its end, as one cut between two batches is otherwise a shorter stream."""
    magic = stream.read(6)
    if not magic:
        return
    is_stream = magic != b"ARROW1"
    stream.seek(0)
    reader = pa.ipc.open_stream(stream) if is_stream else pa.ipc.open_file(stream)
    batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
    yield from _column_rows(reader.schema, batches, column, start)
    if is_stream and stream.seek(-len(_ARROW_END), io.SEEK_END) and stream.read() != _ARROW_END:
        raise EOFError("it ends without Arrow's end-of-stream marker: it was cut, or is not yet complete")


READERS: dict[str, Callable[..., Iterator[Any]]] = {
    "text": text_rows,
    "json": json_rows,
    "arrow": arrow_rows,
    "parquet": parquet_rows,
}
