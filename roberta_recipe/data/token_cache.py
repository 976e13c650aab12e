"""A corpus tokenized and packed once, and read many times: 160 GB for 500K steps of 8K is some 60 passes (Table 9).

    <folder>/fingerprint.json                      all that the cache was made from; another tokenizer, format or length
                                                   is refused
    <folder>/<source>/{train,validation}-<n>.bin   the blocks of file n of the source, chunk after chunk, memory-mapped:
                                                   2 bytes a token; of pairs also train-<n>-1 to -9, the versions of
                                                   later passes
    <folder>/<source>/{train,validation}-<n>.json  written after it: columns, and of each chunk its place and hash

Files are packed independently, each by one process, so that an interrupted build is resumed and a build spreads over
processes and machines; two processes that make the same shard make the same bytes. The JSON files are sealed
(`durable.write_sealed`); a chunk is compared with its hash when it is opened.
"""

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from roberta_recipe import durable, lock
from roberta_recipe.data.chunks import Chunk, File, TextReader, total, versions
from roberta_recipe.data.corpus import Corpus
from roberta_recipe.data.documents import Row, file_rows, text_digest
from roberta_recipe.data.packing import Columns
from roberta_recipe.errors import InputError, RunError, first_line
from roberta_recipe.hardware import end_with_parent
from roberta_recipe.log import Bar, counted, logger
from roberta_recipe.record import HASHES_NAME

FINGERPRINT = "fingerprint.json"
_FORMAT = {"cache_format": "chunks with a hash each"}  # for the fingerprint of a cache
_LENGTHS = "lengths"  # the column of each block's tokens
_REPACK = "pack it again: start the same command once more, or python -m roberta_recipe.tools.pack with its preset"
_POLL_S = 2.0
_packer: tuple[Any, ...] = ()  # of a packing process: the first arguments of `pack_file`


class TokenCache:
    """Chunks of a complete cache; nothing has to be read to start at any position. Raises `InputError` where the cache
    is not as it was written: names and sizes at once, the content of a chunk when it is opened."""

    def __init__(self, folder: str | Path, corpus: Corpus, *, seed: int, shuffle_window: int = 1):
        self.folder, self.corpus, self.seed, self.shuffle_window = Path(folder), corpus, seed, shuffle_window
        self._fingerprint = _read_fingerprint(self.folder)
        self.versions = versions(self._fingerprint["input_format"])
        made_from = durable.fingerprint(self._fingerprint)
        self._facts = {file: _facts(self.folder, corpus, file, made_from) for file in shards_of(corpus, self.versions)}
        for file, facts in self._facts.items():
            if facts is None:
                path = shard_path(corpus, file)
                raise InputError(f"token_cache={folder}: {path} is missing, or is not what was written; {_REPACK}")
        self._chunks = {file: [Chunk(*chunk) for chunk, *_ in facts["chunks"]] for file, facts in self._facts.items()}
        for number, source in enumerate(corpus.sources):
            chunks = (of for file, of in self._chunks.items() if file[:2] == (number, "train"))
            if not any(chunk.blocks for chunk in itertools.chain.from_iterable(chunks)):
                raise InputError(f"source {source.name!r} is empty: none of its documents has text to train on")

    def known(self, file: File) -> list[Chunk]:
        """All chunks of a file."""
        return self._chunks[file]

    def chunks(self, file: File, skip: int = 0) -> Iterator[tuple[Chunk, Sequence[Columns]]]:
        """The chunks of a file; each is opened when one of its blocks is asked for."""
        facts, path = self._facts[file], self.folder / shard_path(self.corpus, file)
        for chunk, (_, *place) in zip(self._chunks[file], facts["chunks"], strict=True):
            yield chunk, CachedBlocks(path, facts, chunk.blocks, *place)

    def fingerprint(self) -> dict[str, Any]:
        """All that the blocks depend on, but for their order: what the cache was made from."""
        return {name: value for name, value in self._fingerprint.items() if name not in _FORMAT}


class CachedBlocks(Sequence):
    """The `count` blocks of a chunk: `size` bytes of a shard from `offset` on, with a hash. Raises `InputError` for a
    damaged shard, whose JSON file it removes, so that the next start packs it again."""

    def __init__(self, path: Path, facts: dict[str, Any], count: int, offset: int, size: int, hash: str):
        self._path, self._facts, self._count = path, facts, count
        self._offset, self._size, self._hash = offset, size, hash
        self._ends, self._of_blocks, self._of_tokens = np.zeros(0), {}, {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Columns:
        try:
            # the map of a file that was cut would end the process with SIGBUS
            if os.stat(self._path).st_size != self._facts["bytes"]:
                raise ValueError(f"it has not {self._facts['bytes']} bytes")
            if not len(self._ends):
                self._open()
            start, end = self._ends[index - 1] if index else 0, self._ends[index]
            of_tokens = {name: values[start:end].copy() for name, values in self._of_tokens.items()}
            return of_tokens | {name: int(values[index]) for name, values in self._of_blocks.items()}
        except (OSError, ValueError) as error:
            self._refuse(error)

    def _open(self) -> None:
        content = np.memmap(self._path, np.uint8, "r", self._offset, self._size)
        if xxhash.xxh3_128_hexdigest(content) != self._hash:
            raise ValueError(f"bytes {self._offset} to {self._offset + self._size} are not what was written (hash)")
        begin = 0
        for name, (kind, each) in self._facts["columns"].items():
            columns, count = (self._of_blocks, self._count) if each == "block" else (self._of_tokens, self._ends[-1])
            end = begin + int(count) * np.dtype(kind).itemsize
            columns[name], begin = content[begin:end].view(kind), end
            if name == _LENGTHS:
                self._ends = np.cumsum(columns.pop(name), dtype=np.int64)

    def _refuse(self, error: Exception) -> None:
        try:
            self._path.with_suffix(".json").unlink(missing_ok=True)
            fix = _REPACK
        except OSError as not_removed:
            fix = f"remove it ({not_removed.strerror}), then {_REPACK}"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        folder, name = self._path.parent.parent, self._path.relative_to(self._path.parent.parent)
        raise InputError(f"token_cache={folder}: {name} is damaged: {reason}; {fix}") from None


def tokens_per_pass(folder: str | Path) -> int | None:
    """Tokens of the training blocks of a cache's first pass; None where it holds none."""
    tokens = 0
    for path in Path(folder).glob("*/train-?????.json"):
        try:
            tokens += total(Chunk(*chunk) for chunk, *_ in durable.read_sealed(path)["chunks"])["tokens"]
        except (OSError, ValueError, KeyError):  # KeyError: of a former version, which is refused later
            return None
    return tokens or None


def shard_path(corpus: Corpus, file: File) -> str:
    version = f"-{file.version}" if file.version else ""
    return f"{corpus.sources[file.source].name}/{file.split}-{file.number:05d}{version}.bin"


def shards_of(corpus: Corpus, versions: int) -> list[File]:
    """All shards of a cache: a training shard for each file (of pairs, for each of its versions), a validation shard
    for each file with held-out text."""
    of_split = {"train": versions, "validation": 1}
    found = []
    for number, source in enumerate(corpus.sources):
        for split, count in of_split.items():
            files = range(len(corpus.files(source, split)[1]))
            found += [File(number, split, file, version) for version in range(count) for file in files]
    return found


def claim(folder: str | Path, fingerprint: dict[str, Any]) -> str:
    """Begin a cache of this fingerprint in `folder` where there is none; returns the hash that its shards carry. Of
    two processes that begin at the same time, one writes the fingerprint.

    Raises `InputError` for a cache made from something else.
    """
    folder, path, wanted = Path(folder), Path(folder) / FINGERPRINT, {**_FORMAT, **fingerprint}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in folder.iterdir()} - {path.name, HASHES_NAME}
        others = [name for name in names if not (durable.is_aside(name) or name.startswith(lock.LOCK_NAME))]
        if not path.exists():
            if others:
                raise InputError(f"token_cache={folder} holds other files; name an empty or a new folder")
            durable.create_sealed(path, wanted)
    except OSError as error:
        raise InputError(f"token_cache={folder} cannot be made: {error.strerror}") from None
    before = _read_fingerprint(folder)
    if found := durable.differences(before, wanted):
        raise InputError(
            f"token_cache={folder} was made from something else: {'; '.join(found.values())}. Name another folder "
            "for this corpus, tokenizer, format and length"
        )
    return durable.fingerprint(before)


def _read_fingerprint(folder: Path) -> dict[str, Any]:
    """The fingerprint of a cache. Raises `InputError` where it cannot be read, or is not as it was written."""
    try:
        return durable.read_sealed(folder / FINGERPRINT)
    except (OSError, ValueError) as error:
        raise InputError(
            f"token_cache={folder}: {FINGERPRINT} cannot be read ({first_line(error)}); remove the folder, or name "
            "another, to have the text packed again"
        ) from None


def build(
    folder: str | Path,
    reader: TextReader,
    *,
    num_proc: int,
    machine: int = 0,
    machines: int = 1,
    by_content: bool = True,
) -> bool:
    """Pack the files of one of `machines` (every `machines`-th, from `machine` on) that are not packed yet; returns
    whether the cache is complete.

    A shard that is there but is not what was written is made again: by its hashes, or without `by_content` by its
    size. Raises `InputError` for a bad shard, and where another process packs this share; `RunError` where the disk is
    full; what was finished stays.
    """
    folder, made_from = Path(folder), claim(folder, reader.fingerprint())
    share = f"{lock.LOCK_NAME}-{machine + 1}-of-{machines}"
    lock.take(folder, share)
    for path in (folder, *filter(Path.is_dir, folder.iterdir())):
        durable.remove_left(path)
    try:
        _pack_missing(folder, reader, made_from, num_proc, machine, machines, by_content)
    finally:
        lock.release(folder, share)
    return _is_complete(folder, reader, made_from)


def _pack_missing(
    folder: Path, reader: TextReader, made_from: str, num_proc: int, machine: int, machines: int, by_content: bool
) -> None:
    """Pack one machine's files whose shards are not there or not whole, with a progress bar."""
    corpus = reader.corpus
    # packing a file makes the shards of both splits, unless its source has validation files
    shards = shards_of(corpus, reader.versions)
    files = [file for file in shards if file.split == "train" or corpus.sources[file.source].validation_files]
    to_pack = [
        file
        for file in files[machine::machines]
        if not all(_facts(folder, corpus, shard, made_from, by_content) for shard in _made_with(corpus, file))
    ]
    started_s, tokens = time.monotonic(), 0
    bar = Bar(total=len(to_pack), desc="Packing", unit=" files", smoothing=0.1)
    try:
        for made in _pack_all(folder, reader, made_from, to_pack, num_proc):
            tokens += made
            bar.update()
            bar.set_postfix_str(f"{tokens / (time.monotonic() - started_s) / 1e6:.2f} M tokens/s")
    except BrokenProcessPool:
        raise RunError(
            f"a packing process died, perhaps for want of memory: pack with fewer than {num_proc} processes first "
            "(python -m roberta_recipe.tools.pack --num_proc N); the finished shards are kept"
        ) from None
    except OSError as error:
        raise RunError(
            f"token_cache={folder} cannot be written: {error.strerror or error}; start again when that is fixed: the "
            "finished shards are kept"
        ) from None
    finally:
        bar.close()
    if to_pack:
        elapsed_s = time.monotonic() - started_s
        logger.info(
            f"Packed {counted(len(to_pack), 'file')}, {tokens:,} tokens, {tokens / elapsed_s:,.0f} tokens/s: {folder}"
        )


def _made_with(corpus: Corpus, file: File) -> list[File]:
    """The shards that packing a file makes: also the shard of the documents held out of it."""
    separate = corpus.sources[file.source].validation_files or file.split == "validation" or file.version
    return [file] if separate else [file, file._replace(split="validation")]


def _facts(folder: Path, corpus: Corpus, file: File, made_from: str, by_content: bool = False) -> dict[str, Any] | None:
    """A shard's JSON file; None where the shard is not there, not of its size (with `by_content`, not of its hashes) or
    not of this cache."""
    path = folder / shard_path(corpus, file)
    try:
        facts = durable.read_sealed(path.with_suffix(".json"))
        if {**facts, **_origin(corpus, file, made_from)} != facts or path.stat().st_size != facts["bytes"]:
            return None
        for _, offset, size, hash in facts["chunks"] if by_content else ():
            if xxhash.xxh3_128_hexdigest(np.fromfile(path, np.uint8, size, offset=offset)) != hash:
                return None
        return facts
    except (OSError, ValueError):
        return None


def _origin(corpus: Corpus, file: File, made_from: str) -> dict[str, Any]:
    """The names of a shard and of the cache that it belongs to."""
    return {"made_from": made_from, "name": corpus.sources[file.source].name, "file": list(file)}


def _pack_all(folder: Path, reader: TextReader, made_from: str, to_pack: list[File], num_proc: int) -> Iterator[int]:
    """Tokens of each file as it is packed; by threads of the tokenizer, or by processes with one thread each."""
    if num_proc <= 1 or len(to_pack) <= 1:
        yield from (pack_file(folder, reader, made_from, file) for file in to_pack)
        return
    threads = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked process cannot use the threads of its parent
    try:
        with ProcessPoolExecutor(
            min(num_proc, len(to_pack)),  # it forks all of them at once
            multiprocessing.get_context("fork"),
            initializer=_begin_worker,
            initargs=(os.getpid(), folder, reader, made_from),  # inherited by the fork: nothing is sent
        ) as pool:
            futures = [pool.submit(_pack_in_worker, file) for file in to_pack]
            try:
                yield from (future.result() for future in as_completed(futures))
            except BaseException:
                for worker in multiprocessing.active_children():
                    worker.terminate()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if threads is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = threads


def _begin_worker(parent: int, *packer: Any) -> None:
    """Start of a packing process, which ends with its parent and leaves Ctrl-C to it."""
    global _packer
    end_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _packer = packer


def _pack_in_worker(file: File) -> int:
    return pack_file(*_packer, file)


def pack_file(folder: Path, reader: TextReader, made_from: str, file: File) -> int:
    """Write the shards of one file; returns the number of tokens in them."""
    corpus, held_out = reader.corpus, []
    source = corpus.sources[file.source]
    path = corpus.files(source, file.split)[1][file.number]
    rows = {file: file_rows(corpus, source, file.split, path, others=held_out)}
    rows |= {other: _held_out_rows(held_out, corpus.left_out) for other in _made_with(corpus, file)[1:]}
    return sum(_write_shard(folder, made_from, shard, reader, of_shard) for shard, of_shard in rows.items())


def _held_out_rows(rows: list[Row], left_out: frozenset[str]) -> Iterator[Row]:
    """The rows that reading the training split of a file has put aside, once it is read, without those `left_out`."""
    passed_over = 0
    for row in rows:
        if left_out and text_digest(row.text) in left_out:
            passed_over += 1
        else:
            yield row._replace(held_out=passed_over)
            passed_over = 0
    yield Row(-1, None, held_out=passed_over)


def _write_shard(folder: Path, made_from: str, file: File, reader: TextReader, rows: Iterator[Row]) -> int:
    """Write the blocks of a file's rows, chunk by chunk, then a JSON file; each whole or absent. Returns tokens."""
    path = folder / shard_path(reader.corpus, file)
    path.parent.mkdir(exist_ok=True)
    aside = durable.aside_of(path)
    facts: dict[str, Any] = {"columns": {}, "chunks": [], "bytes": 0}
    tokens = 0
    try:
        with open(aside, "wb") as stream:
            for chunk, blocks in reader.pack_rows(rows, file):
                facts["columns"] = facts["columns"] or (_columns(blocks[0]) if blocks else {})
                content = _content(blocks, facts["columns"])
                facts["chunks"].append([chunk, facts["bytes"], len(content), xxhash.xxh3_128_hexdigest(content)])
                facts["bytes"] += stream.write(content)
                tokens += chunk.counts["tokens"]
        durable.sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    durable.write_sealed(path.with_suffix(".json"), {**_origin(reader.corpus, file, made_from), **facts})
    return tokens


def _columns(block: Columns) -> dict[str, list[str]]:
    """name -> [type, "block" or "token"] of the columns of blocks like `block`, in their order on disk: first those of
    a number a block, then the widest types, so that each is aligned."""
    of_block = {name: ["int64", "block"] for name, value in block.items() if not isinstance(value, np.ndarray)}
    of_token = {name: [value.dtype.name, "token"] for name, value in block.items() if isinstance(value, np.ndarray)}
    widest_first = sorted(of_token.items(), key=lambda column: -np.dtype(column[1][0]).itemsize)
    return {**of_block, _LENGTHS: ["int32", "block"], **dict(widest_first)}


def _content(blocks: list[Columns], columns: dict[str, list[str]]) -> bytes:
    """The columns of a chunk's blocks, and zeros up to a multiple of 8 bytes."""
    blocks = [{**block, _LENGTHS: len(block["input_ids"])} for block in blocks]
    parts = [
        np.array([block[name] for block in blocks], kind)
        if each == "block"
        else np.concatenate([block[name] for block in blocks]).astype(kind, copy=False)
        for name, (kind, each) in (columns.items() if blocks else ())
    ]
    content = b"".join(part.tobytes() for part in parts)
    return content + bytes(-len(content) % 8)


def _is_complete(folder: Path, reader: TextReader, made_from: str) -> bool:
    shards = shards_of(reader.corpus, reader.versions)
    return all(_facts(folder, reader.corpus, file, made_from) for file in shards)


def ensure(folder: str | Path, reader: TextReader, *, num_proc: int, process: int = 0, processes: int = 1) -> None:
    """Make the cache complete before training, each of `processes` packing its share, and wait until all have."""
    folder, made_from = Path(folder), claim(folder, reader.fingerprint())
    if _is_complete(folder, reader, made_from):
        return
    build(folder, reader, num_proc=num_proc, machine=process, machines=processes, by_content=False)
    while not _is_complete(folder, reader, made_from):  # no collective operation: packing may outlast its time limit
        time.sleep(_POLL_S)
