"""Data (paper, section 3.2): the sources of a corpus, their files, and the documents in these."""

import errno
import glob
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import datasets
import fsspec
import pyarrow.parquet as pq

from roberta_recipe.args import InputError, check_mapping, load_yaml, resolve_path
from roberta_recipe.docstrings import docstring_file
from roberta_recipe.durable import fingerprint
from roberta_recipe.order import FILES, random_order

logger = logging.getLogger("recipe")

FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text", ".text": "text"}
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
RETRY_DELAYS_S = (1, 2, 4, 8, 16)  # before each further attempt at a read
_CHECKED_BYTES = 4 << 20  # of each file
_SAMPLED_BYTES = 1 << 16  # of either end of a file, for its fingerprint


class BadShard(InputError):
    """A file that cannot be read to its end."""


@dataclass
class Source:
    """One entry of a corpus preset. Exactly one of `dataset`, `files`, `builtin` says where it is."""

    name: str
    dataset: str | None = None  # Hub id, or a local dataset folder
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    files: str | list[str] | None = None  # file, folder or glob
    builtin: Literal["docstrings"] | None = None
    text_column: str = "text"
    filters: list[list[Any]] | None = None  # [column, operator, value] triples, all of which hold; Parquet only
    size_gb: float | None = None  # the share of the mixture: sizes of text,
    weight: float | None = None  # or plain weights; one kind for all sources
    validation_files: str | list[str] | None = None  # held-out text; without it, `validation_share` of the documents

    def __post_init__(self):
        given = [key for key in ("dataset", "files", "builtin") if getattr(self, key) is not None]
        if len(given) != 1:
            raise InputError(
                f"source {self.name!r} must have exactly one of dataset, files, builtin, and has {given or 'none'}"
            )
        if self.dataset and not self.revision and not Path(self.dataset).exists():
            raise InputError(
                f"source {self.name!r}: pin the dataset {self.dataset!r} with `revision:` (a commit of its repository)"
            )
        for key in ("size_gb", "weight"):
            if getattr(self, key) is not None and getattr(self, key) <= 0:
                raise InputError(f"source {self.name!r}: {key} is {getattr(self, key)}, and must be above 0")


@dataclass
class Corpus:
    """A checked corpus preset: its sources, and how much of those without validation files is held out."""

    name: str
    sources: list[Source]
    validation_share: float = 0.01  # of the documents, chosen by a hash of their text
    language: str = "en"  # for the sentence splitter
    on_bad_shard: Literal["stop", "skip"] = "stop"  # a file that cannot be read, or breaks off
    _files: dict[tuple[str, str], tuple[str, list[str]]] = field(default_factory=dict, repr=False)

    @property
    def shares(self) -> list[float]:
        """What each source gets of the mixture; they sum to 1."""
        sizes = [source.size_gb or source.weight or 1.0 for source in self.sources]
        return [size / sum(sizes) for size in sizes]

    def files(self, source: Source, part: str) -> tuple[str, list[str]]:
        """Format and files of a source's part ("train" or "validation"), looked up once."""
        separate = part == "validation" and source.validation_files is not None
        key = (source.name, "validation" if separate else "train")
        if key not in self._files:
            self._files[key] = _locate(source, separate)
        return self._files[key]


def read_corpus(path: str | Path) -> Corpus:
    """The corpus that a preset describes. Opens no source. Raises `InputError`."""
    values = load_yaml(path)
    sources = values.pop("sources", None)
    if not isinstance(sources, list) or not sources or not all(isinstance(entry, dict) for entry in sources):
        raise InputError(f"{path}: `sources:` must be a list of sources, each with a name and a place")
    where = [f"{path}, source {entry.get('name', number)}" for number, entry in enumerate(sources, 1)]
    checked = [check_mapping(entry, [Source], place) for entry, place in zip(sources, where, strict=True)]
    if unnamed := [place for entry, place in zip(checked, where, strict=True) if "name" not in entry]:
        raise InputError(f"{unnamed[0]} has no name; give it one with `name:`")
    settings = check_mapping(values, [Corpus], str(path), without=("name", "sources", "on_bad_shard", "_files"))
    return check_corpus(Corpus(name=Path(path).stem, sources=[Source(**entry) for entry in checked], **settings))


def check_corpus(corpus: Corpus) -> Corpus:
    """`corpus`, or an `InputError` for names given twice, shares of two kinds, or a share that is none."""
    names = [source.name for source in corpus.sources]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"corpus {corpus.name!r}: two sources are named {twice[0]!r}; names must differ")
    kinds = {tuple(k for k in ("size_gb", "weight") if getattr(s, k) is not None) for s in corpus.sources}
    if len(corpus.sources) > 1 and kinds not in ({("size_gb",)}, {("weight",)}):
        raise InputError(f"corpus {corpus.name!r}: every source needs a share, all by size_gb or all by weight")
    if not 0 < corpus.validation_share < 1:
        raise InputError(
            f"corpus {corpus.name!r}: validation_share is {corpus.validation_share}, and must be between 0 and 1"
        )
    return corpus


def corpus_of_files(train_file: list[str], validation_file: list[str] | None, text_column: str) -> Corpus:
    """The corpus of `--train_file` and `--validation_file`: one source."""
    source = Source(name="train_file", files=train_file, validation_files=validation_file, text_column=text_column)
    return Corpus(name="train_file", sources=[source])


def _locate(source: Source, separate_validation: bool) -> tuple[str, list[str]]:
    """Format (a builder of `datasets`) and the sorted files of a source. Raises `InputError`."""
    if separate_validation:
        return _list_files(source.name, source.validation_files)
    if source.builtin:
        return "parquet", [str(docstring_file())]
    if source.files:
        return _list_files(source.name, source.files)
    try:
        builder = datasets.load_dataset_builder(source.dataset, source.config, revision=source.revision)
    except Exception as error:  # the Hub client raises a dozen kinds
        raise InputError(
            f"source {source.name!r}: cannot open dataset {source.dataset!r} (config {source.config!r}, revision "
            f"{source.revision!r}): {str(error).splitlines()[0]}"
        ) from None
    splits = builder.config.data_files or {}
    if source.split not in splits:
        raise InputError(
            f"source {source.name!r}: {source.dataset!r} has no split {source.split!r}; it has {sorted(splits)}"
        )
    return builder.name, sorted(splits[source.split])


def _list_files(name: str, patterns: str | list[str]) -> tuple[str, list[str]]:
    """Format and sorted paths of files, folders (searched to the bottom) and globs, local or of any `fsspec` URL."""
    found: dict[str, str] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        paths = _remote_paths(name, pattern) if "://" in pattern else _local_paths(resolve_path(pattern))
        readable = {p: f for p in paths if (f := _format_of(p))}
        if not readable:
            seen = sorted({Path(p).suffix or "no suffix" for p in paths})
            what = (
                f"holds no file that can be read (found {', '.join(seen)})" if paths else "does not exist, or is empty"
            )
            raise InputError(f"source {name!r}: {pattern!r} {what}; readable are {', '.join(FORMATS)}, also compressed")
        found.update(readable)
    if len(set(found.values())) > 1:
        kinds = ", ".join(sorted(set(found.values())))
        raise InputError(f"source {name!r}: {patterns!r} mixes formats ({kinds}); name one with a glob")
    return next(iter(found.values())), sorted(found)


def _local_paths(path: Path) -> list[str]:
    """The files below a folder, a file itself, or those that a glob finds."""
    if path.is_dir():
        return [str(p) for p in path.rglob("*") if p.is_file()]
    return [str(path)] if path.is_file() else glob.glob(str(path), recursive=True)


def _remote_paths(name: str, pattern: str) -> list[str]:
    """The same of a URL (s3://, gs://, https://, ...). Raises `InputError`."""
    try:
        system, path = fsspec.core.url_to_fs(pattern)
        paths = system.find(path) if system.isdir(path) else system.glob(path) if "*" in path else [path]
        return [system.unstrip_protocol(p) for p in paths if system.exists(p)]
    except Exception as error:  # each file system has its own
        raise InputError(f"source {name!r}: cannot list {pattern!r}: {type(error).__name__}: {error}") from None


def _format_of(path: str) -> str | None:
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None


def read_file(source: Source, format: str, path: str, start: int = 0) -> Iterator[str | None]:
    """The text of each document of one file, from row `start` on, streamed by `datasets`.

    A read that fails for a reason that may pass (an I/O error; anything, of a remote file) is tried again, from the
    row that it had come to, after each of `RETRY_DELAYS_S`. Raises `BadShard` for a file that cannot be read, and
    `InputError` for one that is not as the preset says; both name it.
    """
    if source.filters is not None and format != "parquet":
        raise InputError(f"source {source.name!r}: filters work on Parquet only, and its files are {format}")
    if "://" not in path and "::" in path:
        raise InputError(
            f"source {source.name!r}: rename {path}; datasets reads a '::' in a name as a chain of protocols"
        )
    row, delays = start, iter(RETRY_DELAYS_S)
    while True:
        try:
            for text in _read_rows(source, format, path, row):
                yield text
                row, delays = row + 1, iter(RETRY_DELAYS_S)
            return
        except InputError:
            raise
        except Exception as error:  # pyarrow, json, codecs, fsspec: each has its own
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
        options = {"sample_by": "paragraph", "encoding": "utf-8-sig"}  # an empty line parts documents
    elif format == "parquet":
        # the other columns are not even fetched; a row group may hold gigabytes, or (then it has no size) nothing
        options = {"columns": [source.text_column], "batch_size": 256}
    if source.filters is not None:
        options["filters"] = [tuple(condition) for condition in source.filters]
    local = "://" not in path
    if local and os.path.getsize(path) == 0:
        return
    pattern = glob.escape(path) if local else path  # or brackets in a name would be read as a pattern
    column = "text" if format == "text" else source.text_column
    rows = datasets.load_dataset(format, data_files=[pattern], split="train", streaming=True, **options)
    # `iter`, since `__iter__` would divide the rows among the workers of a DataLoader
    for row in (rows.skip(start) if start else rows).iter(batch_size=1):
        if column not in row:
            raise _no_column(source, path, column, sorted(row))
        (text,) = row[column]
        if not isinstance(text, str | None):
            raise InputError(
                f"source {source.name!r}: column {column!r} of {path} holds {type(text).__name__}, not text"
            )
        yield text


def _bad_shard(source: Source, path: str, row: int, reason: str) -> BadShard:
    return BadShard(
        f"source {source.name!r}: cannot read {path}: {reason} (row {row}); mend or remove it, or pass over what "
        "cannot be read with --on_bad_shard skip"
    )


def _no_column(source: Source, path: str, column: str, columns: list[str]) -> InputError:
    return InputError(f"source {source.name!r}: {path} has no column {column!r}; it has {columns} (set text_column)")


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
    return (
        _bad_line(format, path)
        or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    )


def _bad_line(format: str, path: str, max_bytes: float = float("inf")) -> str | None:
    """The first line of a local text or JSON lines file that cannot be read, looked for in its first `max_bytes`."""
    if format not in ("text", "json") or not Path(path).is_file() or Path(path).suffix.lower() in COMPRESSED:
        return None
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                decoded = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if format == "json" and decoded.strip():
                    json.loads(decoded)
            except UnicodeDecodeError as bad:
                return f"line {number} is not UTF-8 (byte {line[bad.start]:#04x}); convert it, e.g. with iconv -t UTF-8"
            except json.JSONDecodeError as bad:
                return f"line {number} is not JSON ({bad.msg})"
            max_bytes -= len(line)
            if max_bytes < 0:
                return None
    return None


def held_out(text: str, share: float) -> bool:
    """Whether a document belongs to validation: by a hash, so that copies of a text are on the same side."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class Row(NamedTuple):
    """A row of a file that holds a document, and what was passed over between the last such row and this one."""

    number: int
    text: str | None  # None behind the last row of the file
    empty: int = 0  # documents without text
    held_out: int = 0  # documents of validation, passed over in training
    bad_files: int = 0  # 1 where the file broke off here and `on_bad_shard` is "skip"
    lost_rows: int = 0  # those behind the break, as far as the file still tells


def file_rows(
    corpus: Corpus, source: Source, part: str, path: str, start: int = 0, others: list[Row] | None = None
) -> Iterator[Row]:
    """The documents of one part ("train", "validation") of a file, from row `start` on; then a `Row` without text.

    Those of the other part are put into `others`.
    """
    format, _ = corpus.files(source, part)
    share = None if source.validation_files else corpus.validation_share
    number, empty, other_part = start, 0, 0
    try:
        for text in read_file(source, format, path, start):
            if text is None or not text.strip():
                empty += 1
            elif share is not None and held_out(text, share) != (part == "validation"):
                other_part += part == "train"
                if others is not None:
                    others.append(Row(number, text))
            else:
                yield Row(number, text, empty, other_part)
                empty = other_part = 0
            number += 1
    except BadShard as bad:
        if corpus.on_bad_shard != "skip":
            raise
        lost = max((_parquet_rows(path) or number) - number, 0) if format == "parquet" else 0
        logger.warning(f"{bad}; skipped, with what follows row {number} ({lost or 'an unknown number of'} rows)")
        yield Row(number, None, empty, other_part, bad_files=1, lost_rows=lost)
        return
    yield Row(number, None, empty, other_part)


def file_order(corpus: Corpus, source: Source, part: str, *, seed: int, epoch: int) -> list[int]:
    """The numbers of a source's files in the order of one pass, drawn from (seed, epoch)."""
    place = (corpus.sources.index(source), epoch)
    return random_order(seed, FILES, place, len(corpus.files(source, part)[1])).tolist()


def documents(corpus: Corpus, source: Source, part: str, *, seed: int, epoch: int = 0) -> Iterator[str]:
    """One pass over the documents of a source: files in the order of the pass, rows in file order."""
    _, files = corpus.files(source, part)
    for number in file_order(corpus, source, part, seed=seed, epoch=epoch):
        yield from (row.text for row in file_rows(corpus, source, part, files[number]) if row.text is not None)


def corpus_fingerprint(corpus: Corpus) -> dict[str, Any]:
    """What two corpora must agree in to give the same blocks: the sources' settings, and their files by name and
    content (a local file's size and both its ends; a Hub file's name holds its revision)."""
    parts = {}
    for source in corpus.sources:
        files = [corpus.files(source, part)[1] for part in ("train", "validation")]
        content = [source.text_column, source.filters, [[file_identity(path) for path in paths] for paths in files]]
        parts[f"source {source.name}"] = f"{len(files[0])} files, {fingerprint(content)}"
    return {**parts, "validation_share": corpus.validation_share, "language": corpus.language}


def file_identity(path: str) -> list[Any]:
    """A file's name, size and a hash of its ends."""
    if "://" in path:
        return [path]
    try:
        with open(path, "rb") as stream:
            size, digest = os.path.getsize(path), hashlib.blake2b(digest_size=8)
            digest.update(stream.read(_SAMPLED_BYTES))
            stream.seek(max(size - _SAMPLED_BYTES, 0))
            digest.update(stream.read(_SAMPLED_BYTES))
        return [os.path.basename(path), size, digest.hexdigest()]
    except OSError as error:
        return [os.path.basename(path), error.strerror]


def interleave(
    streams: list[Iterator[Any]], shares: list[float], cost: Callable[[Any], float] = lambda item: 1.0
) -> Iterator[Any]:
    """Items of several streams, always from the one that is furthest behind its share (ties: the first).

    With no randomness to save: at any point, a stream is at most one item ahead of its share of what was taken, and at
    most (number of streams x share) items behind. A stream that ends drops out.
    """
    behind = [(0.0, number) for number in range(len(streams))]
    while behind:
        taken, number = min(behind)
        behind.remove((taken, number))
        for item in itertools.islice(streams[number], 1):
            behind.append((taken + cost(item) / shares[number], number))
            yield item


def sample_documents(corpus: Corpus, part: str, *, max_bytes: int, seed: int) -> Iterator[tuple[str, str]]:
    """(source name, text) in the proportions of the mixture, one pass at most, until `max_bytes` of UTF-8 are given."""
    streams = [zip(itertools.repeat(s.name), documents(corpus, s, part, seed=seed)) for s in corpus.sources]
    total = 0
    for name, text in interleave(streams, corpus.shares, cost=lambda item: len(item[1].encode())):
        yield name, text
        total += len(text.encode())
        if total >= max_bytes:
            return


def check_sources(corpus: Corpus) -> None:
    """Raise `InputError` for what cannot be read, before training: the first document of every source, and of local
    files the Parquet columns, or the first `_CHECKED_BYTES` of text and JSON lines. Files that cannot be read are left
    for `on_bad_shard: skip` to pass over."""
    for source in corpus.sources:
        format, files = corpus.files(source, "train")
        for path in files:
            lines = corpus.on_bad_shard == "stop" and (format == "text" or Path(path).suffix == ".jsonl")
            if lines and (bad := _bad_line(format, path, _CHECKED_BYTES)):
                raise _bad_shard(source, path, 0, bad)
            columns = _parquet_columns(path) if format == "parquet" and "://" not in path else []
            if columns and source.text_column not in columns:
                raise _no_column(source, path, source.text_column, columns)
        if next(documents(corpus, source, "train", seed=0), None) is None:
            raise InputError(f"source {source.name!r} is empty: none of its documents has text to train on")
