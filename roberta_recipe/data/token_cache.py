"""Token cache: a corpus tokenized and packed once, memory-mapped, for runs of many passes (paper, Table 9: some 60).

    <folder>/fingerprint.json                      all that the cache was made from; another tokenizer, format or length
                                                   is refused
    <folder>/<source>/{train,validation}-<n>.bin   shard of file n of the source, chunk after chunk, 2 bytes a token; of
                                                   pairs also train-<n>-1 to -9, the versions of later passes
    <folder>/<source>/{train,validation}-<n>.json  written after it: columns, and of each chunk its place and hash

Each file is packed by one process, independently of the others, so that an interrupted build is resumed and a build
spreads over processes and machines; any two make the same bytes. The JSON files are sealed (`durable.write_sealed`); a
chunk is compared with its hash when it is opened.
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
_REPACK = "pack it again: start the same command once more, or python tools/pack.py with its preset"
_pack_in_worker: Callable[[list[File]], int]  # of a packing process


class TokenCache:
    """Chunks of a complete cache; nothing has to be read to start at any position. Raises `InputError` for a damaged
    shard: names and sizes are checked at once, the content of a chunk when it is opened."""

    def __init__(self, folder: str | Path, corpus: Corpus, *, seed: int, shuffle_window: int = 1):
        self.folder, self.corpus, self.seed, self.shuffle_window = Path(folder), corpus, seed, shuffle_window
        self._fingerprint = _read_fingerprint(self.folder)
        self.versions = versions(self._fingerprint["input_format"])
        facts_of = functools.partial(_facts, self.folder, corpus, durable.fingerprint(self._fingerprint))
        self._facts = {file: facts_of(file) for file in itertools.chain(*shards_of(corpus, self.versions))}
        if missing := [shard_path(corpus, file) for file, facts in self._facts.items() if facts is None]:
            raise InputError(f"token_cache={folder}: {missing[0]} is missing, or is not what was written; {_REPACK}")
        self._chunks = {file: [Chunk(*chunk) for chunk, *_ in facts["chunks"]] for file, facts in self._facts.items()}

    def known(self, file: File) -> list[Chunk]:
        """All chunks of a file."""
        return self._chunks[file]

    def chunks(self, file: File, skip: int = 0) -> Iterator[tuple[Chunk, Sequence[Columns]]]:
        """The chunks of a file; each is opened when one of its blocks is asked for."""
        facts, path = self._facts[file], self.folder / shard_path(self.corpus, file)
        for chunk, (_, *place) in zip(self._chunks[file], facts["chunks"], strict=True):
            yield chunk, CachedBlocks(path, facts, chunk.blocks, *place)

    def fingerprint(self) -> dict[str, Any]:
        """All that the blocks depend on, but for their order."""
        return {name: value for name, value in self._fingerprint.items() if name not in _FORMAT}


class CachedBlocks(Sequence):
    """The `count` blocks of a chunk: `size` bytes of a shard from `offset` on, with a hash. Raises `InputError` for a
    damaged shard, and removes its JSON file, so that the next start packs it again."""

    def __init__(self, path: Path, facts: dict[str, Any], count: int, offset: int, size: int, hash: str):
        self._path, self._facts, self._count = path, facts, count
        self._offset, self._size, self._hash = offset, size, hash

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Columns:
        try:
            # the map of a file that was cut would end the process with SIGBUS
            if os.stat(self._path).st_size != self._facts["bytes"]:
                raise ValueError(f"it has not {self._facts['bytes']} bytes")
            ends, of_blocks, of_tokens = self.opened
            start, end = ends[index - 1] if index else 0, ends[index]
            block = {name: values[start:end].copy() for name, values in of_tokens.items()}
            return block | {name: int(values[index]) for name, values in of_blocks.items()}
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):  # a read-only folder
                self._path.with_suffix(".json").unlink(missing_ok=True)
            folder, name = self._path.parent.parent, self._path.relative_to(self._path.parent.parent)
            raise InputError(f"token_cache={folder}: {name} is damaged: {first_line(error)}; {_REPACK}") from None

    @functools.cached_property
    def opened(self) -> tuple[np.ndarray, Columns, Columns]:
        """(ends of the blocks in tokens, columns of a number a block, columns of a number a token)."""
        content = np.memmap(self._path, np.uint8, "r", self._offset, self._size)
        if xxhash.xxh3_128_hexdigest(content) != self._hash:
            raise ValueError(f"bytes {self._offset} to {self._offset + self._size} are not what was written (hash)")
        begin, ends, columns = 0, np.zeros(1, dtype=np.int64), {"block": {}, "token": {}}
        for name, (kind, each) in self._facts["columns"].items():
            end = begin + int(self._count if each == "block" else ends[-1]) * np.dtype(kind).itemsize
            columns[each][name], begin = content[begin:end].view(kind), end
            if name == _LENGTHS:
                ends = np.cumsum(columns[each].pop(name), dtype=np.int64)
        return ends, columns["block"], columns["token"]


def tokens_per_pass(folder: str | Path) -> int | None:
    """Tokens of the training blocks of a cache's first pass; None where it holds none."""
    try:
        shards = [durable.read_sealed(path)["chunks"] for path in Path(folder).glob("*/train-?????.json")]
    except (OSError, ValueError, KeyError):  # KeyError: of a former version, which is refused later
        return None
    return sum(total(Chunk(*chunk) for chunk, *_ in chunks)["tokens"] for chunks in shards) or None


def shard_path(corpus: Corpus, file: File) -> str:
    version = f"-{file.version}" if file.version else ""
    return f"{corpus.sources[file.source].name}/{file.split}-{file.number:05d}{version}.bin"


def shards_of(corpus: Corpus, versions: int) -> list[list[File]]:
    """All shards of a cache, those that are packed together in one list: the training shard of a file, and the shard of
    the documents held out of it. Of pairs, each training file has a shard for each version."""
    found: list[list[File]] = []
    for number, source in enumerate(corpus.sources):
        train, held_out = (
            [File(number, split, file) for file in range(len(corpus.files(source, split)[1]))]
            for split in ("train", "validation")
        )
        together = zip(train, held_out, strict=True) if not source.validation_files else zip([*train, *held_out])
        found += map(list, together)
        found += [[file._replace(version=version)] for version in range(1, versions) for file in train]
    return found


def claim(folder: str | Path, fingerprint: dict[str, Any]) -> str:
    """Begin a cache of this fingerprint in `folder` where there is none; returns the hash that its shards carry. Of
    two processes that begin at the same time, one writes the fingerprint. Raises `InputError` for a cache made from
    something else."""
    folder, path, wanted = Path(folder), Path(folder) / FINGERPRINT, {**_FORMAT, **fingerprint}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in folder.iterdir()} - {
            FINGERPRINT,
            HASHES_NAME,
        }  # another process writes shards after its fingerprint
        if not path.exists():
            if not all(durable.is_aside(name) or name.startswith(lock.LOCK_NAME) for name in names):
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


def ensure(folder: str | Path, reader: TextReader, *, num_proc: int, process: int = 0, processes: int = 1) -> None:
    """Make the cache complete before training, each of `processes` packing its share, and wait until all have."""
    share = {"num_proc": num_proc, "machine": process, "machines": processes, "by_content": False}
    while not build(folder, reader, **share):  # no collective operation: packing may outlast its time limit
        time.sleep(5)


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

    A damaged shard is packed again; damage is found by hash, or without `by_content` by size. Raises `InputError` for a
    bad corpus, and where another process packs this share; `RunError` where the disk is full, or a shard is damaged as
    soon as it is packed. Finished shards stay.
    """
    folder, made_from = Path(folder), claim(folder, reader.fingerprint())
    packed = functools.partial(_facts, folder, reader.corpus, made_from)
    shards = shards_of(reader.corpus, reader.versions)
    own = shards[machine::machines]
    del shards[machine::machines]
    if to_pack := [files for files in own if not all(packed(file, by_content) for file in files)]:
        share = f"{lock.LOCK_NAME}-{machine + 1}-of-{machines}"
        lock.take(folder, share)
        try:
            for path in (folder, *filter(Path.is_dir, folder.iterdir())):
                durable.remove_left(path)
            _pack(folder, reader, made_from, to_pack, num_proc)
        finally:
            lock.release(folder, share)
        if lost := [shard_path(reader.corpus, file) for file in itertools.chain(*own) if not packed(file)]:
            raise RunError(f"token_cache={folder}: {lost[0]} was damaged after it was packed; {_REPACK}")
    return all(map(packed, itertools.chain(*shards)))


def _facts(folder: Path, corpus: Corpus, made_from: str, file: File, by_content: bool = False) -> dict[str, Any] | None:
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


def _pack(folder: Path, reader: TextReader, made_from: str, to_pack: list[list[File]], num_proc: int) -> None:
    """Write the shards of `to_pack`, with a progress bar. Raises `RunError`."""
    started_s, tokens = time.monotonic(), 0
    made = _pack_all(functools.partial(pack_file, folder, reader, made_from), to_pack, num_proc)
    try:
        for count in Bar(made, total=len(to_pack), desc="Packing", unit=" files", smoothing=0.1):
            tokens += count
    except BrokenProcessPool:
        raise RunError(
            f"a packing process died, perhaps for want of memory: pack with fewer than {num_proc} processes first "
            "(python tools/pack.py --num_proc N); the finished shards are kept"
        ) from None
    except OSError as error:
        raise RunError(
            f"token_cache={folder} cannot be written: {error.strerror or error}; start again when that is fixed: the "
            "finished shards are kept"
        ) from None
    rate = tokens / (time.monotonic() - started_s)
    logger.info(f"Packed {counted(len(to_pack), 'file')}, {tokens:,} tokens, {rate:,.0f} tokens/s: {folder}")


def _pack_all(pack: Callable[[list[File]], int], to_pack: list[list[File]], num_proc: int) -> Iterator[int]:
    """Tokens of each file as it is packed; by threads of the tokenizer, or by processes with one thread each."""
    if num_proc <= 1 or len(to_pack) <= 1:
        yield from map(pack, to_pack)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked process cannot use the threads of its parent
    workers, context = min(num_proc, len(to_pack)), multiprocessing.get_context("fork")  # it forks all of them at once
    # `initargs` are inherited by the fork, and nothing of them is sent
    with ProcessPoolExecutor(workers, context, initializer=_begin_worker, initargs=(os.getpid(), pack)) as pool:
        try:
            yield from pool.map(_pack_here, to_pack)
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _begin_worker(parent: int, pack: Callable[[list[File]], int]) -> None:
    """Start of a packing process, which ends with its parent and leaves Ctrl-C to it."""
    global _pack_in_worker
    end_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _pack_in_worker = pack


def _pack_here(files: list[File]) -> int:
    return _pack_in_worker(files)


def pack_file(folder: Path, reader: TextReader, made_from: str, files: list[File]) -> int:
    """Write the shards of one file, its own and that of the documents held out of it; returns their tokens."""
    file, corpus, held_out = files[0], reader.corpus, []
    source = corpus.sources[file.source]
    path = corpus.files(source, file.split)[1][file.number]
    rows = file_rows(corpus, source, file.split, path, others=held_out), _held_out_rows(held_out, corpus.left_out)
    return sum(_write_shard(folder, made_from, *shard, reader) for shard in zip(files, rows, strict=False))


def _held_out_rows(rows: list[Row], left_out: frozenset[str]) -> Iterator[Row]:
    """The held-out `rows` of a file, filled as its training split is read, without those `left_out`."""
    passed_over = 0
    for row in itertools.chain(rows, [Row(-1, None)]):
        if left_out and row.text is not None and text_digest(row.text) in left_out:
            passed_over += 1
        else:
            yield row._replace(held_out=passed_over)
            passed_over = 0


def _write_shard(folder: Path, made_from: str, file: File, rows: Iterator[Row], reader: TextReader) -> int:
    """Write the blocks of a file's rows, chunk by chunk, then a JSON file; each whole or absent. Returns tokens."""
    path = folder / shard_path(reader.corpus, file)
    path.parent.mkdir(exist_ok=True)
    aside = durable.aside_of(path)
    facts: dict[str, Any] = {"columns": {}, "chunks": [], "bytes": 0}
    try:
        with open(aside, "wb") as stream:
            for chunk, blocks in reader.pack_rows(rows, file):
                facts["columns"] = facts["columns"] or (_columns(blocks[0]) if blocks else {})
                content = _content(blocks, facts["columns"])
                facts["chunks"].append([chunk, facts["bytes"], len(content), xxhash.xxh3_128_hexdigest(content)])
                facts["bytes"] += stream.write(content)
        durable.sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    durable.write_sealed(path.with_suffix(".json"), {**_origin(reader.corpus, file, made_from), **facts})
    return total(chunk for chunk, *_ in facts["chunks"])["tokens"]


def _columns(block: Columns) -> dict[str, list[str]]:
    """name -> [type, "block" or "token"] of the columns of blocks like `block`, in their order on disk: first those of
    a number a block, then the widest types, so that each is aligned."""
    kinds = {
        name: [value.dtype.name, "token"] if isinstance(value, np.ndarray) else ["int64", "block"]
        for name, value in block.items()
    }
    kinds[_LENGTHS] = ["int32", "block"]
    return dict(sorted(kinds.items(), key=lambda column: (column[1][1], -np.dtype(column[1][0]).itemsize)))


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
