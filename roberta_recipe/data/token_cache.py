"""Token cache: a corpus tokenized and packed once, memory-mapped, for runs of many passes (paper, Table 9: about 60).

    <folder>/fingerprint.json                      settings; a cache of another corpus, tokenizer, format or length is
                                                   refused
    <folder>/<source>/{train,validation}-<n>.bin   shard of file n: chunks, 2 bytes a token (4 from 65,537 entries on);
                                                   for pairs also train-<n>-1 to -9, the versions of later passes
    <folder>/<source>/{train,validation}-<n>.json  written last: columns, and offset and hash of each chunk

A shard is a function of its file: any process or machine writes the same bytes, and an interrupted build continues.
JSON files have a checksum; a chunk's hash is verified when it is opened.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from roberta_recipe import durable
from roberta_recipe.data.chunks import Chunk, File, TextReader, pair_versions, sum_counts
from roberta_recipe.data.corpus import Corpus
from roberta_recipe.data.documents import Row, file_rows, text_hash
from roberta_recipe.data.packing import Columns
from roberta_recipe.errors import InputError, RunError, first_line
from roberta_recipe.hardware import end_with_parent
from roberta_recipe.input_files import explained
from roberta_recipe.log import Bar, counted, logger

FINGERPRINT = "fingerprint.json"
_FORMAT = {"cache_format": "chunks with a hash each"}  # for the fingerprint of a cache
_LENGTHS = "lengths"  # column: tokens of each block
_REPACK = "start the same command again, which packs it again"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_pack_in_worker: Callable[[list[File]], int]  # set in a packing process


class TokenCache:
    """Reader of chunks from a complete cache; seeking to a position reads no blocks. Raises `InputError` for a
    damaged shard: names and sizes are checked here, the hash of a chunk when it is opened."""

    def __init__(self, folder: str | Path, corpus: Corpus, *, seed: int, shuffle_window: int = 1):
        self.folder, self.corpus, self.seed, self.shuffle_window = Path(folder), corpus, seed, shuffle_window
        self._fingerprint = _read_fingerprint(self.folder)
        self.versions = pair_versions(self._fingerprint["input_format"])
        read = functools.partial(_read_metadata, self.folder, corpus, durable.fingerprint(self._fingerprint))
        self._metadata = {file: read(file) for file in itertools.chain(*shards_of(corpus, self.versions))}
        if missing := [shard_path(corpus, file) for file, metadata in self._metadata.items() if metadata is None]:
            raise InputError(f"token_cache={folder}: {missing[0]} is missing or damaged; {_REPACK}")

    def indexed_chunks(self, file: File) -> list[Chunk]:
        """All chunks of a file."""
        return [Chunk(*chunk) for chunk, *_ in self._metadata[file]["chunks"]]

    def chunks(self, file: File, skip: int = 0) -> Iterator[tuple[Chunk, Sequence[Columns]]]:
        """The chunks of a file, each opened lazily."""
        metadata, path = self._metadata[file], self.folder / shard_path(self.corpus, file)
        for chunk, (_, *place) in zip(self.indexed_chunks(file), metadata["chunks"], strict=True):
            yield chunk, CachedBlocks(path, metadata, chunk.blocks, *place)

    def fingerprint(self) -> dict[str, Any]:
        """All settings that the blocks depend on, except for their order."""
        return {name: value for name, value in self._fingerprint.items() if name not in _FORMAT}


class CachedBlocks(Sequence):
    """The `count` blocks of a chunk, `size` bytes of a shard at `offset`. For a damaged shard, raises `InputError` and
    removes its JSON file, so that the next start packs it again."""

    def __init__(self, path: Path, metadata: dict[str, Any], count: int, offset: int, size: int, hash: str):
        self._path, self._metadata, self._count = path, metadata, count
        self._offset, self._size, self._hash = offset, size, hash

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Columns:
        try:
            if os.stat(self._path).st_size != self._metadata["bytes"]:  # else the memory map raises SIGBUS
                raise ValueError("its size has changed")
            ends, block_columns, token_columns = self.opened
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):  # a read-only folder
                self._path.with_suffix(".json").unlink(missing_ok=True)
            raise InputError(f"{self._path} is damaged ({first_line(error)}); {_REPACK}") from None
        start, end = ends[index - 1] if index else 0, ends[index]
        block = {name: values[start:end].copy() for name, values in token_columns.items()}
        return block | {name: int(values[index]) for name, values in block_columns.items()}

    @functools.cached_property
    def opened(self) -> tuple[np.ndarray, Columns, Columns]:
        """(ends of the blocks in tokens, columns with one number per block, columns with one number per token)."""
        content = np.memmap(self._path, np.uint8, "r", self._offset, self._size)
        if xxhash.xxh3_128_hexdigest(content) != self._hash:
            raise ValueError(f"hash of bytes {self._offset} to {self._offset + self._size}")
        begin, ends, columns = 0, np.zeros(1, dtype=np.int64), {"block": {}, "token": {}}
        for name, (kind, each) in self._metadata["columns"].items():
            end = begin + int(self._count if each == "block" else ends[-1]) * np.dtype(kind).itemsize
            columns[each][name], begin = content[begin:end].view(kind), end
            if name == _LENGTHS:
                ends = np.cumsum(columns[each].pop(name), dtype=np.int64)
        return ends, columns["block"], columns["token"]


def shard_path(corpus: Corpus, file: File) -> str:
    version = f"-{file.version}" if file.version else ""
    return f"{corpus.sources[file.source].name}/{file.split}-{file.number:05d}{version}.bin"


def shards_of(corpus: Corpus, versions: int) -> list[list[File]]:
    """All shards of a cache, in groups that are written from one reading of a file: its training shard and the shard of
    its held-out documents. For pairs, each further version of a training file is a separate group."""
    shards: list[list[File]] = []
    for number, source in enumerate(corpus.sources):
        train, held_out = (
            [File(number, split, file) for file in range(len(corpus.files(source, split)[1]))]
            for split in ("train", "validation")
        )
        shards += zip([*train, *held_out]) if source.validation_files else zip(train, held_out, strict=True)
        shards += [(file._replace(version=version),) for version in range(1, versions) for file in train]
    return shards


def is_started(folder: str | Path) -> bool:
    """Whether a build of the cache has begun, from text that was checked."""
    return Path(folder, FINGERPRINT).exists()


def create_or_check(folder: str | Path, fingerprint: dict[str, Any]) -> str:
    """Create a cache in `folder`, or check that the existing one has this fingerprint; returns the hash that its shards
    carry. Raises `InputError` for another fingerprint."""
    folder, wanted = Path(folder), {**_FORMAT, **fingerprint}
    durable.make_folder(folder, "token_cache")
    if not is_started(folder):
        durable.write_sealed(folder / FINGERPRINT, wanted)
    before = _read_fingerprint(folder)
    if changed := durable.differences(before, wanted):
        raise InputError(f"token_cache={folder} has other settings: {'; '.join(changed.values())}. Name another folder")
    return durable.fingerprint(before)


def _read_fingerprint(folder: Path) -> dict[str, Any]:
    with explained(f"token_cache={folder}: {FINGERPRINT} cannot be read", "; remove the folder, or name another"):
        return durable.read_sealed(folder / FINGERPRINT)


def build(folder: str | Path, reader: TextReader, *, num_proc: int, machine: int = 0, machines: int = 1) -> bool:
    """Pack the share of one machine or rank (every `machines`-th file, from `machine` on), except for shards that are
    intact by JSON file and size; returns whether the cache is complete."""
    folder, made_from = Path(folder), create_or_check(folder, reader.fingerprint())
    read = functools.partial(_read_metadata, folder, reader.corpus, made_from)
    shards = shards_of(reader.corpus, reader.versions)
    if to_pack := [files for files in shards[machine::machines] if not all(map(read, files))]:
        for path in filter(Path.is_dir, (folder, *folder.iterdir())):
            durable.remove_stale(path)
        started_s, tokens = time.monotonic(), 0
        packed = _pack(functools.partial(pack_file, folder, reader, made_from), to_pack, num_proc)
        for count in Bar(packed, total=len(to_pack), desc="Packing", unit=" shards", smoothing=0.1):
            tokens += count
        rate = tokens / (time.monotonic() - started_s)
        logger.info(f"Packed {counted(len(to_pack), 'shard')}, {tokens:,} tokens, {rate:,.0f} tokens/s: {folder}")
    return all(map(read, itertools.chain(*shards)))


def _read_metadata(folder: Path, corpus: Corpus, made_from: str, file: File) -> dict[str, Any] | None:
    """The JSON file of a shard; None where the shard is missing, has another size, or belongs to another cache."""
    path = folder / shard_path(corpus, file)
    try:
        metadata = durable.read_sealed(path.with_suffix(".json"))
        belongs = _origin(corpus, file, made_from).items() <= metadata.items()
        return metadata if belongs and path.stat().st_size == metadata["bytes"] else None
    except (OSError, ValueError):
        return None


def _origin(corpus: Corpus, file: File, made_from: str) -> dict[str, Any]:
    return {"made_from": made_from, "name": corpus.sources[file.source].name, "file": list(file)}


def _pack(pack: Callable[[list[File]], int], to_pack: list[list[File]], num_proc: int) -> Iterator[int]:
    """Pack files in forked workers or, for one file or worker, here with tokenizer threads; yields token counts."""
    workers, context = min(num_proc, len(to_pack)), multiprocessing.get_context("fork")
    if workers <= 1:
        yield from map(pack, to_pack)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked process cannot use the threads of its parent
    # a fork inherits `initargs`, so that reader and tokenizer are not pickled
    with ProcessPoolExecutor(workers, context, initializer=_begin_worker, initargs=(os.getpid(), pack)) as pool:
        try:
            # Python swallows exceptions in its fork hooks, those of signal handlers too
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            tokens = pool.map(_pack_here, to_pack)  # forks all processes
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            yield from tokens
        except BrokenProcessPool:
            fix = f"pack with --num_proc below {workers} (python tools/pack.py)"
            raise RunError(f"a packing process died, perhaps out of memory: {fix}") from None
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _begin_worker(parent: int, pack: Callable[[list[File]], int]) -> None:
    """Set up a packing worker: SIGKILL when its parent dies; the parent alone handles Ctrl-C."""
    global _pack_in_worker
    end_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    _pack_in_worker = pack


def _pack_here(files: list[File]) -> int:
    return _pack_in_worker(files)


def pack_file(folder: Path, reader: TextReader, made_from: str, files: list[File]) -> int:
    """Write the shards of one file, of training and of held-out documents; returns the token count."""
    file, corpus, held_out = files[0], reader.corpus, []
    source = corpus.sources[file.source]
    path = corpus.files(source, file.split)[1][file.number]
    rows = file_rows(corpus, source, file.split, path, others=held_out), _held_out_rows(held_out, corpus.excluded)
    return sum(_write_shard(folder, made_from, *shard, reader) for shard in zip(files, rows, strict=False))


def _held_out_rows(rows: list[Row], excluded: frozenset[str]) -> Iterator[Row]:
    """Held-out rows of a file without those `excluded`. `rows`: the list that reading the training split has filled."""
    left = [row for row in rows if text_hash(row.text) not in excluded]
    yield from left
    yield Row(-1, None, held_out=len(rows) - len(left))


def _write_shard(folder: Path, made_from: str, file: File, rows: Iterator[Row], reader: TextReader) -> int:
    """Write the blocks of a file's rows, chunk by chunk, then a JSON file, each atomically; returns the token count."""
    path = folder / shard_path(reader.corpus, file)
    path.parent.mkdir(exist_ok=True)
    metadata: dict[str, Any] = {"columns": {}, "chunks": [], "bytes": 0}
    with durable.atomic_write(path) as temporary, open(temporary, "wb") as stream:
        for chunk, blocks in reader.pack_rows(rows, file):
            metadata["columns"] = metadata["columns"] or (_columns(blocks[0]) if blocks else {})
            content = _content(blocks, metadata["columns"])
            metadata["chunks"].append([chunk, metadata["bytes"], len(content), xxhash.xxh3_128_hexdigest(content)])
            metadata["bytes"] += stream.write(content)
    durable.write_sealed(path.with_suffix(".json"), {**_origin(reader.corpus, file, made_from), **metadata})
    return sum_counts(chunk for chunk, *_ in metadata["chunks"])["tokens"]


def _columns(block: Columns) -> dict[str, list[str]]:
    """name -> [type, "block" or "token"] of a block's columns, in their order on disk: columns with one number per
    block first, wide types first, so that each is aligned."""
    kinds = {
        name: [value.dtype.name, "token"] if isinstance(value, np.ndarray) else ["int64", "block"]
        for name, value in block.items()
    }
    kinds[_LENGTHS] = ["int32", "block"]
    return dict(sorted(kinds.items(), key=lambda column: (column[1][1], -np.dtype(column[1][0]).itemsize)))


def _content(blocks: list[Columns], columns: dict[str, list[str]]) -> bytes:
    """The columns of a chunk's blocks, and zeros up to a multiple of 8 bytes."""
    blocks = [{**block, _LENGTHS: len(block["input_ids"])} for block in blocks]
    columns = columns if blocks else {}
    parts = [np.hstack([block[name] for block in blocks]).astype(kind) for name, (kind, _) in columns.items()]
    content = b"".join(part.tobytes() for part in parts)
    return content + bytes(-len(content) % 8)
