"""A corpus tokenized and packed once, and read many times: 160 GB for 500K steps of 8K is some 60 passes (Table 9).

    <folder>/fingerprint.json                       what the cache was made from; another tokenizer, format or length
                                                    is refused
    <folder>/<source>/{train,validation}-<n>.arrow  the blocks of file n of the source, memory-mapped: 2 bytes a token,
                                                    and a checksum for each block, compared whenever it is read;
                                                    of pairs also train-<n>-1 to -9, the versions of later passes
    <folder>/<source>/{train,validation}-<n>.json   written after it: its counts, size and SHA-256
    <folder>/manifest.json                          all of these; the cache is complete

Files are packed independently, each by one process, so that an interrupted build is resumed and a build spreads over
processes and machines; two processes that make the same shard make the same bytes. The JSON files are sealed
(`durable.write_sealed`).
"""

import errno
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import signal
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa

from roberta_recipe import durable, lock
from roberta_recipe.data.corpus import Corpus
from roberta_recipe.data.documents import Row, file_rows, text_digest
from roberta_recipe.data.formats import has_pairs
from roberta_recipe.data.order import (
    WINDOWS,
    block_id,
    drawn_evenly,
    file_order,
    interleave,
    mixture,
    random_order,
    taken_of_source,
)
from roberta_recipe.data.packing import Columns
from roberta_recipe.data.pairs import VERSIONS
from roberta_recipe.data.stream import COUNTS, Block, SourceState, TextReader
from roberta_recipe.errors import InputError, RunError, first_line
from roberta_recipe.hardware import end_with_parent
from roberta_recipe.log import Bar, counted, logger
from roberta_recipe.record import HASHES_NAME

FINGERPRINT = "fingerprint.json"
_FORMAT = {"cache_format": "a checksum for each block, and the document it begins in"}  # for the fingerprint of a cache
_CHECKSUM = "crc32"  # the column of a shard
_REPACK = "pack it again: start the same command once more, or python -m roberta_recipe.tools.pack with its preset"
_ROWS_PER_BATCH = 1024  # blocks: about 1 MB
_POLL_S = 2.0
_packer: tuple[Any, ...] = ()  # of a packing process: the first arguments of `pack_file`


class Shard(NamedTuple):
    """The blocks of one file of a source for one split; of pairs, in one version."""

    source: int
    split: str
    file: int
    version: int = 0  # of pairs (`pairs.VERSIONS`)


class _Map(NamedTuple):
    """A shard that is mapped into memory."""

    path: str
    size: int  # bytes
    seed: int  # of its blocks' checksums
    batches: list[dict[str, tuple[np.ndarray | None, np.ndarray]]]


class TokenCache:
    """The blocks of a complete cache, in the same order and with the same names as `TextReader` gives them.

    Nothing has to be read to start at any position. A `shuffle_window` of a whole pass costs 8 bytes a block of the
    source, in each data worker. Raises `InputError` where the cache is not as it was written: names and sizes at once,
    the content of a block when it is read.
    """

    def __init__(self, folder: str | Path, corpus: Corpus, *, seed: int, shuffle_window: int = 0):
        self.folder, self.corpus, self.seed, self.shuffle_window = Path(folder), corpus, seed, shuffle_window
        self._fingerprint = _read_fingerprint(self.folder)
        self._made_from = durable.fingerprint(self._fingerprint)
        if found := _fault(self.folder, corpus, self._made_from):
            raise InputError(f"token_cache={folder}: {found}; {_REPACK}")
        self.manifest = durable.read_sealed(self.folder / durable.MANIFEST)
        sizes = [shard["bytes"] for shard in self.manifest["shards"]]
        self._bytes = dict(zip(shards_of(self.folder, corpus), sizes, strict=True))
        self._maps: dict[Shard, _Map] = {}
        self._passes: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}
        self._windows: dict[int, tuple[tuple[int, int], np.ndarray]] = {}
        self._sizes = {  # blocks of each file, (versions, files)
            split: [self._block_counts(source.name, split) for source in corpus.sources]
            for split in ("train", "validation")
        }
        self._ends = [np.cumsum(sizes.sum(axis=1)) for sizes in self._sizes["train"]]  # blocks up to each version's end
        for source, sizes in zip(corpus.sources, self._sizes["train"], strict=True):
            if not sizes.sum():
                raise InputError(f"source {source.name!r} is empty: none of its documents has text to train on")

    def _block_counts(self, source: str, split: str) -> np.ndarray:
        shards = [s for s in self.manifest["shards"] if s["source"] == source and s["part"] == split]
        versions = 1 + max((shard.get("version", 0) for shard in shards), default=0)
        return np.array([shard["counts"]["blocks"] for shard in shards], dtype=np.int64).reshape(versions, -1)

    def blocks(
        self, batches: Iterable[tuple[range, ...]], start: int = 0, states: list[dict] | None = None
    ) -> Iterator[Block]:
        """The blocks at the positions of `batches`; a cache ignores `start` and `states`."""
        for positions in itertools.chain.from_iterable(batches):
            for source, index in zip(*mixture(self.corpus.shares, positions.start, len(positions)), strict=True):
                yield self._block(int(source), int(index))

    def _block(self, source: int, index: int) -> Block:
        """The block that the endless sequence of a source has at `index`."""
        epoch, position, sizes = self._place(source, index)
        total = int(sizes.sum())
        size = max(self.shuffle_window, 1)
        window, position = divmod(position, size)
        if self._windows.get(source, (None,))[0] != (epoch, window):
            count = min(size, total - window * size)
            order = random_order(self.seed, WINDOWS, (source, epoch, window), count)
            self._windows[source] = ((epoch, window), order)
        if self._passes.get(source, (None,))[0] != epoch:
            files = np.array(file_order(source, len(sizes), seed=self.seed, epoch=epoch))
            self._passes[source] = (epoch, files, np.cumsum(sizes[files]))
        position = window * size + int(self._windows[source][1][position])
        _, files, ends = self._passes[source]
        return self._at(position, source, "train", files, ends, epoch)

    def _place(self, source: int, index: int) -> tuple[int, int, np.ndarray]:
        """(pass, position in it, blocks of each file in it) of the block that a source has at `index`."""
        ends = self._ends[source]
        cycle, position = divmod(index, int(ends[-1]))
        version = int(np.searchsorted(ends, position, side="right"))
        position -= int(ends[version - 1]) if version else 0
        return cycle * len(ends) + version, position, self._sizes["train"][source][version]

    def _at(self, position: int, source: int, split: str, files: np.ndarray, ends: np.ndarray, epoch: int) -> Block:
        """The block at `position` of a pass over `files`, at whose `ends` so many blocks have come."""
        number = int(np.searchsorted(ends, position, side="right"))
        begin = int(ends[number - 1]) if number else 0
        version = epoch % len(self._sizes[split][source])
        return self._read(Shard(source, split, int(files[number]), version), position - begin, epoch)

    def validation(self, limit: int | None) -> Iterator[Block]:
        """The held-out blocks of `TextReader.validation`, in its order."""
        read = [self._files_read(source, limit) for source in range(len(self.corpus.sources))]
        drawn = drawn_evenly([int(ends[-1]) for _, ends in read], self.corpus.shares, limit, self.seed)
        streams = [self._validation_of(number, *read[number], indices) for number, indices in enumerate(drawn)]
        return interleave(streams, self.corpus.shares)

    def _validation_of(self, source: int, files: np.ndarray, ends: np.ndarray, indices: np.ndarray) -> Iterator[Block]:
        """The blocks at `indices` of a source's held-out text, one file after another."""
        for index in indices.tolist():
            yield self._at(index, source, "validation", files, ends, epoch=0)

    def _files_read(self, source: int, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
        """(the files from which `validation` draws, in the order of a pass; the blocks up to the end of each), both
        (files,)."""
        [sizes] = self._sizes["validation"][source]
        files = np.array(file_order(source, len(sizes), seed=self.seed, epoch=0), dtype=np.int64)
        ends = np.cumsum(sizes[files])
        whole = limit is None or self.corpus.sources[source].validation_files
        read = len(files) if whole else int(np.searchsorted(ends, limit)) + 1
        return files[:read], ends[:read]

    def _read(self, shard: Shard, index: int, epoch: int) -> Block:
        """A block, its arrays copied out of the mapped file: what was checked is what is used."""
        mapped = self._maps.get(shard) or self._map(shard)
        try:
            # the map of a file that was cut would end the process with SIGBUS
            if os.stat(mapped.path).st_size != mapped.size:
                raise ValueError(f"it has no longer {mapped.size} bytes")
            batch, row = mapped.batches[index // _ROWS_PER_BATCH], index % _ROWS_PER_BATCH
            columns = {
                name: values[offsets[row] : offsets[row + 1]].copy() if offsets is not None else int(values[row])
                for name, (offsets, values) in batch.items()
            }
            if columns.pop(_CHECKSUM) != _checksum(mapped.seed, index, columns):
                raise ValueError(f"block {index} is not what was written (checksum)")
        except (OSError, ValueError, LookupError) as error:
            self._refuse(shard, error)
        return {**columns, "epoch": epoch, "block_id": block_id(shard.source, shard.file, index)}

    def _map(self, shard: Shard) -> _Map:
        path, size = str(self.folder / shard_path(self.corpus, shard)), self._bytes[shard]
        try:
            if os.stat(path).st_size != size:
                raise ValueError(f"it has not {size} bytes")
            with pa.memory_map(path, "r") as source:
                reader = pa.ipc.open_file(source)
                batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
                for batch in batches:
                    batch.validate()  # or damaged lengths would be followed out of the file
                seed = _checksum_seed(self._made_from, self.corpus, shard, reader.schema)
                self._maps[shard] = _Map(path, size, seed, [_as_arrays(batch) for batch in batches])
        except Exception as error:  # of Arrow, for damaged descriptions: a dozen kinds
            self._refuse(shard, error)
        return self._maps[shard]

    def _refuse(self, shard: Shard, error: Exception) -> NoReturn:
        """Raise `InputError` for a damaged shard; without its JSON file and the manifest, the next start makes it
        again."""
        path = shard_path(self.corpus, shard)
        try:
            (self.folder / durable.MANIFEST).unlink(missing_ok=True)
            (self.folder / path).with_suffix(".json").unlink(missing_ok=True)
            fix = _REPACK
        except OSError as not_removed:
            fix = f"remove it ({not_removed.strerror}), then {_REPACK}"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise InputError(f"token_cache={self.folder}: {path} is damaged: {reason}; {fix}") from None

    def fingerprint(self) -> dict[str, Any]:
        """What the blocks depend on, but for their order: what the cache was made from."""
        return {name: value for name, value in self._fingerprint.items() if name not in _FORMAT}

    def count_table(self, split: str = "train") -> dict[str, dict[str, int]]:
        """What was read, split, held out and skipped in the first pass, by source."""
        table = {source.name: dict.fromkeys(COUNTS, 0) for source in self.corpus.sources}
        for shard in self.manifest["shards"]:
            if shard["part"] == split and not shard.get("version"):
                for name, number in shard["counts"].items():
                    table[shard["source"]][name] += number
        return table

    def passes(self, positions: int) -> dict[str, float]:
        """How often each source has been seen when `positions` blocks are consumed."""
        taken = taken_of_source(self.corpus.shares, positions)
        places = [self._place(number, count) for number, count in enumerate(taken)]
        shares = [round(epoch + position / int(sizes.sum()), 4) for epoch, position, sizes in places]
        return {source.name: share for source, share in zip(self.corpus.sources, shares, strict=True)}


def tokens_per_pass(folder: str | Path) -> int | None:
    """Tokens of the training blocks of a cache's first pass; None where it is not complete."""
    shards = (_read_manifest(Path(folder)) or {"shards": []})["shards"]
    return sum(s["counts"]["tokens"] for s in shards if s["part"] == "train" and not s.get("version")) or None


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """A cache's manifest; None where there is none that is as it was written: `finish` makes it from the shards'."""
    try:
        return durable.read_sealed(folder / durable.MANIFEST)
    except (OSError, ValueError):
        return None


def _fault(folder: Path, corpus: Corpus, made_from: str) -> str | None:
    """What is wrong with a cache, as far as manifest, names and sizes tell; None where nothing is."""
    manifest = _read_manifest(folder)
    if manifest is None:
        return f"{durable.MANIFEST} is missing, or is not what was written"
    if manifest["made_from"] != made_from:
        return f"{durable.MANIFEST} is that of another cache"
    paths = [shard_path(corpus, shard) for shard in shards_of(folder, corpus)]
    if [shard["path"] for shard in manifest["shards"]] != paths:
        return f"{durable.MANIFEST} names other shards than the corpus has files"
    for shard in manifest["shards"]:
        try:
            size = os.stat(folder / shard["path"]).st_size
        except OSError:
            size = None
        if size != shard["bytes"]:
            return f"{shard['path']} is missing or not of {shard['bytes']} bytes"
    return None


def shard_path(corpus: Corpus, shard: Shard) -> str:
    version = f"-{shard.version}" if shard.version else ""
    return f"{corpus.sources[shard.source].name}/{shard.split}-{shard.file:05d}{version}.arrow"


def shards_of(folder: Path, corpus: Corpus) -> list[Shard]:
    """All shards of a cache: a training shard for each file (of pairs, for each of its versions), a validation shard
    for each file with held-out text."""
    versions = {"train": VERSIONS if has_pairs(_read_fingerprint(folder)["input_format"]) else 1, "validation": 1}
    found = []
    for number, source in enumerate(corpus.sources):
        for split, count in versions.items():
            files = range(len(corpus.files(source, split)[1]))
            found += [Shard(number, split, file, version) for version in range(count) for file in files]
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
    """What a cache was made from. Raises `InputError` where that is damaged, or of a former version of the recipe."""
    try:
        values = durable.read_json(folder / FINGERPRINT)
        if durable.SEAL not in values:
            raise InputError(
                f"token_cache={folder} was packed by a former version, without checksums; remove it, or name another "
                "folder, to have the text packed again"
            )
        return durable.unsealed(values)
    except InputError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"token_cache={folder}: {FINGERPRINT} cannot be read ({first_line(error)}); remove the folder"
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

    A shard that is there but is not what was written is made again: by its SHA-256, or without `by_content` by its
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
    return finish(folder, reader.corpus, made_from)


def _pack_missing(
    folder: Path, reader: TextReader, made_from: str, num_proc: int, machine: int, machines: int, by_content: bool
) -> None:
    """Pack one machine's files whose shards are not there or not whole, with a progress bar."""
    corpus = reader.corpus
    # packing a file makes the shards of both splits, unless its source has validation files
    shards = shards_of(folder, corpus)
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
    for shard in itertools.chain.from_iterable(_made_with(corpus, file) for file in to_pack):
        if _facts(folder, corpus, shard, made_from) is None:
            raise RunError(
                f"token_cache={folder}: {shard_path(corpus, shard)} is not what was written a moment ago: another "
                "program changes this folder, or the disk is faulty. Start the same command again: it is packed again"
            )
    if to_pack:
        elapsed_s = time.monotonic() - started_s
        logger.info(
            f"Packed {counted(len(to_pack), 'file')}, {tokens:,} tokens, {tokens / elapsed_s:,.0f} tokens/s: {folder}"
        )


def _made_with(corpus: Corpus, file: Shard) -> list[Shard]:
    """The shards that packing a file makes: also the shard of the documents held out of it."""
    separate = corpus.sources[file.source].validation_files or file.split == "validation" or file.version
    return [file] if separate else [file, file._replace(split="validation")]


def _facts(
    folder: Path, corpus: Corpus, shard: Shard, made_from: str, by_content: bool = False
) -> dict[str, Any] | None:
    """A shard's JSON file; None where the shard is not there, not of its size (with `by_content`, of its SHA-256) or
    not of this cache."""
    path = folder / shard_path(corpus, shard)
    try:
        facts = durable.read_sealed(path.with_suffix(".json"))
        whole = {**facts, **_origin(corpus, shard, made_from)} == facts and path.stat().st_size == facts["bytes"]
        return facts if whole and not (by_content and durable.sha256(path) != facts["sha256"]) else None
    except (OSError, ValueError):
        return None


def _origin(corpus: Corpus, shard: Shard, made_from: str) -> dict[str, Any]:
    """What names a shard, and the cache that it belongs to."""
    return {
        "made_from": made_from,
        "source": corpus.sources[shard.source].name,
        "part": shard.split,
        "file": shard.file,
        **({"version": shard.version} if shard.version else {}),
    }


def _pack_all(folder: Path, reader: TextReader, made_from: str, to_pack: list[Shard], num_proc: int) -> Iterator[int]:
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
    """Make this packing process end with its parent, to which it leaves Ctrl-C, and pack for it."""
    global _packer
    end_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _packer = packer


def _pack_in_worker(file: Shard) -> int:
    return pack_file(*_packer, file)


def pack_file(folder: Path, reader: TextReader, made_from: str, file: Shard) -> int:
    """Write the shards of one file; returns the number of tokens in them."""
    corpus, encode, held_out = reader.corpus, reader.encoder(), []
    source = corpus.sources[file.source]
    path = corpus.files(source, file.split)[1][file.file]
    rows = {file: file_rows(corpus, source, file.split, path, others=held_out)}
    rows |= {other: _held_out_rows(held_out, corpus.left_out) for other in _made_with(corpus, file)[1:]}
    tokens = 0
    for shard, documents in rows.items():
        state = SourceState(epoch=shard.version)
        blocks = reader.pack_rows(documents, state, encode)
        _write_shard(folder, made_from, shard, reader, blocks, state)
        tokens += state.pack.tokens
    return tokens


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


def _write_shard(
    folder: Path, made_from: str, shard: Shard, reader: TextReader, blocks: Iterator[Columns], state: SourceState
) -> None:
    """Write `blocks` as an Arrow file, then a JSON file with its counts; each whole or absent."""
    path = folder / shard_path(reader.corpus, shard)
    path.parent.mkdir(exist_ok=True)
    aside = durable.aside_of(path)
    batches = iter(lambda: list(itertools.islice(blocks, _ROWS_PER_BATCH)), [])
    first = next(batches, None)
    # a file without blocks has a schema too
    example = first[0] if first else {"input_ids": np.zeros(0, reader.dtype)}
    schema = pa.schema({name: _arrow_type(value) for name, value in example.items()} | {_CHECKSUM: pa.uint32()})
    seed, numbers = _checksum_seed(made_from, reader.corpus, shard, schema), itertools.count()
    try:
        with _HashedFile(aside) as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in itertools.chain([first] if first else [], batches):
                columns = [_arrow_column([block[name] for block in batch]) for name in example]
                checksums = [_checksum(seed, next(numbers), {name: block[name] for name in example}) for block in batch]
                writer.write_batch(pa.record_batch([*columns, pa.array(checksums, pa.uint32())], schema=schema))
        durable.sync(aside)
        facts = {"bytes": aside.stat().st_size, "sha256": sink.sha256}
        if durable.sha256(aside) != sink.sha256:
            raise OSError(errno.EIO, f"{path.name} is not what was written a moment ago: the disk is faulty")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    counts = dict(zip(COUNTS, state.table(), strict=True))
    origin = _origin(reader.corpus, shard, made_from)
    durable.write_sealed(path.with_suffix(".json"), {**origin, **facts, "counts": counts})


class _HashedFile(io.BufferedWriter):
    """A file to write, with the SHA-256 of what is written, whatever the disk makes of it."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "wb"))
        self._hasher = hashlib.sha256()

    def write(self, data) -> int:
        self._hasher.update(data)
        return super().write(data)

    @property
    def sha256(self) -> str:
        return self._hasher.hexdigest()


def _checksum_seed(made_from: str, corpus: Corpus, shard: Shard, schema: pa.Schema) -> int:
    """What the checksums of a shard's blocks begin with, so that a block of another shard, cache or type is no block
    of this shard."""
    columns = [(column.name, str(column.type)) for column in schema if column.name != _CHECKSUM]
    return zlib.crc32(json.dumps([_origin(corpus, shard, made_from), columns]).encode())


def _checksum(seed: int, index: int, columns: Columns) -> int:
    """CRC-32 of a block's columns, in their order; `index` is its number in the shard."""
    value = zlib.crc32(index.to_bytes(8, "little"), seed)
    for column in columns.values():
        data = column if isinstance(column, np.ndarray) else int(column).to_bytes(8, "little", signed=True)
        value = zlib.crc32(data, value)
    return value


def _arrow_type(value: np.ndarray | int) -> pa.DataType:
    """The type on disk of a block's column: a list of the array's type, or a whole number."""
    return pa.list_(pa.from_numpy_dtype(value.dtype)) if isinstance(value, np.ndarray) else pa.int64()


def _arrow_column(values: list[np.ndarray] | list[int]) -> pa.Array:
    """A column of a batch of blocks."""
    if not isinstance(values[0], np.ndarray):
        return pa.array(values, pa.int64())
    offsets = np.cumsum([0, *map(len, values)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), np.concatenate(values))


def _as_arrays(batch: pa.RecordBatch) -> dict[str, tuple[np.ndarray | None, np.ndarray]]:
    """(offsets of the blocks, values) of each column; a column of whole numbers has no offsets."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    return {
        name: (column.offsets.to_numpy(), column.values.to_numpy())
        if pa.types.is_list(column.type)
        else (None, column.to_numpy())
        for name, column in columns.items()
    }


def finish(folder: Path, corpus: Corpus, made_from: str) -> bool:
    """Write the manifest where all shards are there; returns whether they are."""
    shards = []
    for shard in shards_of(folder, corpus):
        facts = _facts(folder, corpus, shard, made_from)
        if facts is None:
            return False
        shards.append({"path": shard_path(corpus, shard), **facts})
    durable.write_sealed(folder / durable.MANIFEST, {"made_from": made_from, "shards": shards})
    return True


def ensure(folder: str | Path, reader: TextReader, *, num_proc: int, process: int = 0, processes: int = 1) -> None:
    """Make the cache complete before training, each of `processes` packing its share, and wait until all have."""
    folder, corpus = Path(folder), reader.corpus
    made_from = claim(folder, reader.fingerprint())
    if _fault(folder, corpus, made_from) is None:
        return
    build(folder, reader, num_proc=num_proc, machine=process, machines=processes, by_content=False)
    while _fault(folder, corpus, made_from):  # no collective operation: packing may take longer than its time limit
        time.sleep(_POLL_S)
        if process == 0:
            finish(folder, corpus, made_from)
