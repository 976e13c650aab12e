"""Data (paper, section 3.2): sources, their mixture, and the endless stream of blocks that a run consumes.

Each source is read, tokenized and packed on its own, and the mixture takes whole blocks: shares of blocks are shares
of tokens, whatever the length of a source's documents (drawing documents in proportion to size would hand a corpus of
books a thousand times its share).
"""

import glob
import hashlib
import itertools
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import fsspec
import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedTokenizerBase

from roberta_recipe.args import InputError, check_mapping, load_yaml, resolve_path
from roberta_recipe.docstrings import docstring_file
from roberta_recipe.packing import PACKERS, PackState
from roberta_recipe.tokenization import corpus_encoder, split_sentences

logger = logging.getLogger("recipe")

FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text", ".text": "text"}
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
COUNTS = (
    "passes",
    "documents",
    "empty_documents",
    "held_out_documents",
    "sentences",
    "split_sentences",
    "tokens",
    "blocks",
)
_TEXT_PER_CALL = 1 << 19  # characters given to the tokenizer at once: enough to occupy the cores, little to wait for
_CHECKED_BYTES = 4 << 20  # of each file
_SOURCE_STRIDE = 1 << 40  # block ids of one source in one pass


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
    settings = check_mapping(values, [Corpus], str(path), without=("name", "sources", "_files"))
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
        return _local_files(source.name, source.validation_files)
    if source.builtin:
        return "parquet", [str(docstring_file())]
    if source.files:
        return _local_files(source.name, source.files)
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


def _local_files(name: str, patterns: str | list[str]) -> tuple[str, list[str]]:
    """Format and sorted paths of files, folders (searched to the bottom) and globs."""
    found: dict[str, str] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = resolve_path(pattern)
        if path.is_dir():
            paths = [str(p) for p in path.rglob("*") if p.is_file()]
        else:
            paths = [str(path)] if path.is_file() else glob.glob(str(path), recursive=True)
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


def _format_of(path: str) -> str | None:
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None


def read_file(source: Source, format: str, path: str) -> Iterator[str | None]:
    """The text of each document in one file, streamed by `datasets`. Raises `InputError` that names the file."""
    options: dict[str, Any] = {}
    if format == "text":
        options = {"sample_by": "paragraph", "encoding": "utf-8-sig"}  # an empty line parts documents
    elif format == "parquet":
        # the other columns are not even fetched; a row group may hold gigabytes, or (then it has no size) nothing
        options = {"columns": [source.text_column], "batch_size": 256}
    if source.filters is not None:
        if format != "parquet":
            raise InputError(f"source {source.name!r}: filters work on Parquet only, and its files are {format}")
        options["filters"] = [tuple(condition) for condition in source.filters]
    local = "://" not in path
    if local and os.path.getsize(path) == 0:
        return
    if local and "::" in path:
        raise InputError(
            f"source {source.name!r}: rename {path}; datasets reads a '::' in a name as a chain of protocols"
        )
    pattern = glob.escape(path) if local else path  # or brackets in a name would be read as a pattern
    column = "text" if format == "text" else source.text_column
    try:
        for row in datasets.load_dataset(format, data_files=[pattern], split="train", streaming=True, **options):
            if column not in row:
                raise _no_column(source, path, column, sorted(row))
            if not isinstance(row[column], str | None):
                raise InputError(
                    f"source {source.name!r}: column {column!r} of {path} holds {type(row[column]).__name__}, not text"
                )
            yield row[column]
    except InputError:
        raise
    except Exception as error:  # pyarrow, json, codecs, fsspec: each has its own
        if format == "parquet" and (columns := _parquet_columns(path)) and column not in columns:
            raise _no_column(source, path, column, columns) from None
        raise InputError(f"source {source.name!r}: cannot read {path}: {_reason(format, path, error)}") from error


def _no_column(source: Source, path: str, column: str, columns: list[str]) -> InputError:
    return InputError(f"source {source.name!r}: {path} has no column {column!r}; it has {columns} (set text_column)")


def _parquet_columns(path: str) -> list[str]:
    """The columns of a Parquet file; none where not even its schema can be read."""
    try:
        with fsspec.open(path) as stream:
            return pq.read_schema(stream).names
    except Exception:
        return []


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


def documents(
    corpus: Corpus, source: Source, part: str, *, seed: int, epoch: int = 0, counts: "torch.Tensor | None" = None
) -> Iterator[str]:
    """One pass over the documents of a source: files in an order drawn from (seed, epoch), rows in file order."""
    format, files = corpus.files(source, part)
    order = _generator(seed, epoch, corpus.sources.index(source)).permutation(len(files))
    share = None if source.validation_files else corpus.validation_share
    counts = torch.zeros(len(COUNTS), dtype=torch.int64) if counts is None else counts
    for number in order:
        for text in read_file(source, format, files[number]):
            if text is None or not text.strip():
                counts[COUNTS.index("empty_documents")] += 1
            elif share is not None and held_out(text, share) != (part == "validation"):
                counts[COUNTS.index("held_out_documents")] += part == "train"
            else:
                yield text


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


def _generator(seed: int, *position: int) -> np.random.Generator:
    """A counter-based generator for one place of the stream: no state to carry, none to save."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *position])))


def shuffle_in_windows(numbered: Iterator[tuple[int, Any]], seed: int) -> Iterator[Any]:
    """Items of (window number, item), those of each window in an order drawn from (seed, window number).

    For each item that goes out one is read ahead: after the first window, no step waits for a whole one.
    """
    ahead = deque(itertools.islice(numbered, 1))
    while ahead:
        window = ahead[0][0]
        while ahead[-1][0] == window and (following := next(numbered, None)) is not None:
            ahead.append(following)
        current = []
        while ahead and ahead[0][0] == window:
            current.append(ahead.popleft()[1])
        for position in _generator(seed, window).permutation(len(current)):
            yield current[position]
            ahead.extend(itertools.islice(numbered, 1))


def number_windows(blocks: Iterator[dict[str, Any]], size: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(window, block): a window ends after `size` blocks, or where all of its sources have begun another pass.

    So a corpus smaller than a window is shuffled whole, pass by pass, and no block comes twice before all have come.
    """
    window, count, first_pass, ended = 0, 0, {}, set()
    for block in blocks:
        source = block["block_id"] // _SOURCE_STRIDE
        if block["epoch"] > first_pass.setdefault(source, block["epoch"]):
            ended.add(source)
        if count == size or len(ended) == len(first_pass):
            window, count, first_pass, ended = window + 1, 0, {source: block["epoch"]}, set()
        count += 1
        yield window, block


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
    files the Parquet columns, or the first `_CHECKED_BYTES` of text and JSON lines."""
    for source in corpus.sources:
        format, files = corpus.files(source, "train")
        for path in files:
            if (format == "text" or Path(path).suffix == ".jsonl") and (bad := _bad_line(format, path, _CHECKED_BYTES)):
                raise InputError(f"source {source.name!r}: cannot read {path}: {bad}")
            columns = _parquet_columns(path) if format == "parquet" and "://" not in path else []
            if columns and source.text_column not in columns:
                raise _no_column(source, path, source.text_column, columns)
        if next(documents(corpus, source, "train", seed=0), None) is None:
            raise InputError(f"source {source.name!r} is empty: none of its documents has text to train on")


class BlockStream(torch.utils.data.IterableDataset):
    """The blocks of a corpus: `{"input_ids": (<= max_seq_length,) uint16 or int32, "epoch", "block_id"}`.

    `part="train"` has no end: each source starts again when it is through, its files in a new order, and `epoch`
    counts its passes. `part="validation"` is one pass. `limit` keeps the first blocks only (and `train` then repeats
    these, in a new order each time). `counts` is (sources, len(COUNTS)), in shared memory: it is right also when a
    data worker does the reading, and runs ahead of training by what is prefetched. `threads_in_worker` lets such a
    worker tokenize on all cores; a forked one hangs if its parent has done so before (TOKENIZERS_PARALLELISM=false
    keeps it from that).
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        *,
        part: Literal["train", "validation"],
        input_format: str,
        max_seq_length: int,
        seed: int,
        shuffle_window: int = 0,
        limit: int | None = None,
        threads_in_worker: bool = False,
    ):
        self.corpus, self.tokenizer, self.part = corpus, tokenizer, part
        self.input_format, self.max_seq_length = input_format, max_seq_length
        self.seed, self.shuffle_window, self.limit = seed, shuffle_window, limit
        self.threads_in_worker = threads_in_worker
        self.dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.int32
        self.counts = torch.zeros(len(corpus.sources), len(COUNTS), dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise InputError(f"dataloader_num_workers={worker.num_workers}: a stream of text has one order; use 0 or 1")
        if worker is not None and self.threads_in_worker:
            os.environ["TOKENIZERS_PARALLELISM"] = "true"
        self.counts.zero_()
        encode = corpus_encoder(self.tokenizer)
        streams = [self._source_blocks(number, encode) for number in range(len(self.corpus.sources))]
        blocks = interleave(streams, self.corpus.shares)
        if self.limit is not None and self.part == "train":
            yield from self._first_blocks(blocks, self.limit)
        if self.shuffle_window > 1:
            blocks = shuffle_in_windows(number_windows(blocks, self.shuffle_window), self.seed)
        yield from itertools.islice(blocks, self.limit)

    def _first_blocks(self, blocks: Iterator[dict[str, Any]], limit: int) -> Iterator[dict[str, Any]]:
        """The first blocks, at most `limit` and one pass, again and again, in a new order each time."""
        first = itertools.takewhile(lambda numbered: numbered[0] == 0, number_windows(blocks, limit))
        kept = list({block["block_id"]: block for _, block in first}.values())
        if len(kept) < limit:
            logger.warning(f"max_train_samples={limit}: the corpus has {len(kept)} blocks, and all are used")
        for epoch in itertools.count():
            for position in _generator(self.seed, epoch).permutation(len(kept)):
                yield {**kept[position], "epoch": epoch}

    def count_table(self) -> dict[str, dict[str, int]]:
        """What was read, split, held out and skipped so far, by source."""
        rows = zip(self.corpus.sources, self.counts.tolist(), strict=True)
        return {source.name: dict(zip(COUNTS, row, strict=True)) for source, row in rows}

    def _source_blocks(self, number: int, encode: Callable[[list[str]], list[list[int]]]) -> Iterator[dict[str, Any]]:
        """The blocks of one source, pass after pass (one pass of validation)."""
        source, counts = self.corpus.sources[number], self.counts[number]
        for epoch in itertools.count():
            state, before = PackState(), counts.clone()
            texts = documents(self.corpus, source, self.part, seed=self.seed, epoch=epoch, counts=counts)
            packed = PACKERS[self.input_format](
                _tokenize(texts, encode, self.input_format, self.corpus.language),
                state,
                max_seq_length=self.max_seq_length,
                bos_id=self.tokenizer.bos_token_id,
                eos_id=self.tokenizer.eos_token_id,
            )
            for index, block in enumerate(packed):
                for name in ("documents", "sentences", "split_sentences", "tokens", "blocks"):
                    counts[COUNTS.index(name)] = before[COUNTS.index(name)] + getattr(state, name)
                yield {
                    "input_ids": np.asarray(block, dtype=self.dtype),
                    "epoch": epoch,
                    "block_id": number * _SOURCE_STRIDE + index,
                }
            counts[COUNTS.index("passes")] += 1
            if self.part == "validation":
                return
            if state.blocks == 0:
                raise InputError(f"source {source.name!r} is empty: none of its documents has text to train on")


def _tokenize(
    texts: Iterable[str], encode: Callable[[list[str]], list[list[int]]], input_format: str, language: str
) -> Iterator[list[list[int]]]:
    """Documents as lists of sentences as ids, `_TEXT_PER_CALL` characters of documents at a time."""
    texts = iter(texts)
    for first in texts:
        batch, size = [first], len(first)
        while size < _TEXT_PER_CALL and (text := next(texts, None)) is not None:
            batch.append(text)
            size += len(text)
        split = [[text] if input_format == "contiguous" else split_sentences(text, language) for text in batch]
        ids = iter(encode([sentence for sentences in split for sentence in sentences]))
        for sentences in split:
            yield list(itertools.islice(ids, len(sentences)))
