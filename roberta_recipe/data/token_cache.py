"""A corpus tokenized and packed once, and read many times: 160 GB for 500K steps of 8K is some 60 passes (Table 9).

    <folder>/fingerprint.json                       what the cache was made from; another tokenizer, format or length
                                                    is refused
    <folder>/<source>/{train,validation}-<n>.arrow  the blocks of file n of the source, memory-mapped: 2 bytes a token
    <folder>/<source>/{train,validation}-<n>.json   written after it: its counts, size and SHA-256
    <folder>/manifest.json                          all of these; the cache is complete

Files are packed independently, each by one process, so that an interrupted build is resumed and a build spreads over
processes and machines; two processes that make the same shard make the same bytes.
"""

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from roberta_recipe import durable
from roberta_recipe.data.corpus import Corpus
from roberta_recipe.data.documents import Row, file_rows
from roberta_recipe.data.order import (
    WINDOWS,
    block_id,
    file_order,
    interleave,
    mixture,
    random_order,
    taken_of_source,
)
from roberta_recipe.data.packing import Columns
from roberta_recipe.data.stream import COUNTS, Block, SourceState, TextReader
from roberta_recipe.data.tokenization import corpus_encoder
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.log import logger

FINGERPRINT = "fingerprint.json"
_ROWS_PER_BATCH = 1024  # blocks: about 1 MB
_POLL_S = 2.0


class Shard(NamedTuple):
    """What one file of a source gives to one split."""

    source: int
    split: str
    file: int


class TokenCache:
    """The blocks of a complete cache, in the same order and with the same names as `TextReader` gives them.

    Nothing has to be read to start at any position. A `shuffle_window` of a whole pass costs 8 bytes a block of the
    source, in each data worker.
    """

    def __init__(self, folder: str | Path, corpus: Corpus, *, seed: int, shuffle_window: int = 0):
        self.folder, self.corpus, self.seed, self.shuffle_window = Path(folder), corpus, seed, shuffle_window
        self.manifest = durable.read_json(self.folder / durable.MANIFEST)
        self._batches: dict[Shard, list[dict[str, tuple[np.ndarray | None, np.ndarray]]]] = {}  # of the mapped files
        self._passes: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}
        self._windows: dict[int, tuple[tuple[int, int], np.ndarray]] = {}
        for shard in self.manifest["shards"]:
            path = self.folder / shard["path"]
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                raise InputError(
                    f"token_cache={folder}: {shard['path']} is missing or not of {shard['bytes']} bytes; pack it again "
                    "(python -m roberta_recipe.tools.pack)"
                )
        self._sizes = {  # blocks of each file
            split: [self._block_counts(source.name, split) for source in corpus.sources]
            for split in ("train", "validation")
        }
        for source, sizes in zip(corpus.sources, self._sizes["train"], strict=True):
            if not sizes.sum():
                raise InputError(f"source {source.name!r} is empty: none of its documents has text to train on")

    def _block_counts(self, source: str, split: str) -> np.ndarray:
        shards = [s for s in self.manifest["shards"] if s["source"] == source and s["part"] == split]
        return np.array([shard["counts"]["blocks"] for shard in shards], dtype=np.int64)

    def blocks(
        self, batches: Iterable[tuple[range, ...]], start: int = 0, states: list[dict] | None = None
    ) -> Iterator[Block]:
        """The blocks at the positions of `batches`; a cache ignores `start` and `states`."""
        for positions in itertools.chain.from_iterable(batches):
            for source, index in zip(*mixture(self.corpus.shares, positions.start, len(positions)), strict=True):
                yield self._block(int(source), int(index))

    def _block(self, source: int, index: int) -> Block:
        """The block that the endless sequence of a source has at `index`."""
        sizes = self._sizes["train"][source]
        total = int(sizes.sum())
        epoch, position = divmod(index, total)
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
        number = int(np.searchsorted(ends, position, side="right"))
        file = int(files[number])
        in_file = position - int(ends[number]) + int(sizes[file])
        return self._read(Shard(source, "train", file), in_file, epoch)

    def validation(self, limit: int | None) -> Iterator[Block]:
        """The held-out blocks in the order of `TextReader.validation`."""
        streams = [self._validation_of(number) for number in range(len(self.corpus.sources))]
        for number, block in enumerate(interleave(streams, self.corpus.shares)):
            if number == limit:
                return
            yield block

    def _validation_of(self, source: int) -> Iterator[Block]:
        sizes = self._sizes["validation"][source]
        for file in file_order(source, len(sizes), seed=self.seed, epoch=0):
            for index in range(sizes[file]):
                yield self._read(Shard(source, "validation", file), index, epoch=0)

    def _read(self, shard: Shard, index: int, epoch: int) -> Block:
        """A block; its arrays are views of the mapped file."""
        if shard not in self._batches:
            with pa.memory_map(str(self.folder / shard_path(self.corpus, shard)), "r") as source:
                reader = pa.ipc.open_file(source)
                self._batches[shard] = [_as_arrays(reader.get_batch(n)) for n in range(reader.num_record_batches)]
        batch, row = self._batches[shard][index // _ROWS_PER_BATCH], index % _ROWS_PER_BATCH
        columns = {
            name: values[offsets[row] : offsets[row + 1]] if offsets is not None else int(values[row])
            for name, (offsets, values) in batch.items()
        }
        return {**columns, "epoch": epoch, "block_id": block_id(shard.source, shard.file, index)}

    def fingerprint(self) -> dict[str, Any]:
        """What the blocks depend on, but for their order: what the cache was made from."""
        return durable.read_json(self.folder / FINGERPRINT)

    def count_table(self, split: str = "train") -> dict[str, dict[str, int]]:
        """What was read, split, held out and skipped in the one pass that was packed, by source."""
        table = {source.name: dict.fromkeys(COUNTS, 0) for source in self.corpus.sources}
        for shard in self.manifest["shards"]:
            if shard["part"] == split:
                for name, number in shard["counts"].items():
                    table[shard["source"]][name] += number
        return table

    def passes(self, positions: int) -> dict[str, float]:
        """How often each source has been seen when `positions` blocks are consumed."""
        taken = taken_of_source(self.corpus.shares, positions)
        sizes = [int(sizes.sum()) for sizes in self._sizes["train"]]
        return {s.name: round(n / size, 4) for s, n, size in zip(self.corpus.sources, taken, sizes, strict=True)}


def tokens_per_pass(folder: str | Path) -> int | None:
    """Tokens of a cache's training blocks; None where it is not complete."""
    path = Path(folder) / durable.MANIFEST
    shards = durable.read_json(path)["shards"] if path.exists() else []
    return sum(s["counts"]["tokens"] for s in shards if s["part"] == "train") or None


def shard_path(corpus: Corpus, shard: Shard) -> str:
    return f"{corpus.sources[shard.source].name}/{shard.split}-{shard.file:05d}.arrow"


def shards_of(corpus: Corpus) -> list[Shard]:
    """All shards: a training shard for each file, a validation shard for each file with held-out text."""
    found = []
    for number, source in enumerate(corpus.sources):
        for split in ("train", "validation"):
            found += [Shard(number, split, file) for file in range(len(corpus.files(source, split)[1]))]
    return found


def claim(folder: str | Path, fingerprint: dict[str, Any]) -> bool:
    """Whether `folder` holds a complete cache of this fingerprint; a new cache is begun where there is none.

    Raises `InputError` for a cache made from something else.
    """
    folder, path = Path(folder), Path(folder) / FINGERPRINT
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = [entry for entry in folder.iterdir() if entry.name != path.name and entry.suffix != ".tmp"]
        if others and not path.exists():
            raise InputError(f"token_cache={folder} holds other files; name an empty or a new folder")
        if not path.exists():
            durable.write_json(path, fingerprint)
    except OSError as error:
        raise InputError(f"token_cache={folder} cannot be made: {error.strerror}") from None
    try:
        before = durable.read_json(path)
    except ValueError:
        raise InputError(f"token_cache={folder}: fingerprint.json cannot be read; remove the folder") from None
    if found := durable.differences(before, fingerprint):
        raise InputError(
            f"token_cache={folder} was made from something else: {'; '.join(found.values())}. Name another folder "
            "for this corpus, tokenizer, format and length"
        )
    return (folder / durable.MANIFEST).exists()


def build(folder: str | Path, reader: TextReader, *, num_proc: int, machine: int = 0, machines: int = 1) -> bool:
    """Pack the files of one of `machines` (every `machines`-th, from `machine` on) that are not packed yet; returns
    whether the cache is complete.

    A shard that is there but is not what was written is made again. Raises `InputError` for a bad shard and `RunError`
    where the disk is full; what was finished stays.
    """
    folder, corpus = Path(folder), reader.corpus
    claim(folder, reader.fingerprint())
    # packing a file makes the shards of both splits, unless its source has validation files
    shards = shards_of(corpus)
    files = [file for file in shards if file.split == "train" or corpus.sources[file.source].validation_files]
    to_pack = [
        file
        for file in files[machine::machines]
        if not all(_is_whole(folder, corpus, shard) for shard in _made_with(corpus, file))
    ]
    started_s, tokens = time.monotonic(), 0
    bar = tqdm(total=len(to_pack), desc="Packing", unit=" files", smoothing=0.1, disable=None)
    try:
        for made in _pack_all(folder, reader, to_pack, num_proc):
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
        logger.info(f"Packed {len(to_pack)} files, {tokens:,} tokens, {tokens / elapsed_s:,.0f} tokens/s: {folder}")
    return finish(folder, corpus)


def _made_with(corpus: Corpus, file: Shard) -> list[Shard]:
    """The shards that packing a file makes: also the shard of the documents held out of it."""
    separate = corpus.sources[file.source].validation_files or file.split == "validation"
    return [file] if separate else [file, file._replace(split="validation")]


def _is_whole(folder: Path, corpus: Corpus, shard: Shard) -> bool:
    path = folder / shard_path(corpus, shard)
    try:
        facts = durable.read_json(path.with_suffix(".json"))
        return path.stat().st_size == facts["bytes"] and durable.sha256(path) == facts["sha256"]
    except (OSError, ValueError, KeyError):
        return False


def _pack_all(folder: Path, reader: TextReader, to_pack: list[Shard], num_proc: int) -> Iterator[int]:
    """Tokens of each file as it is packed; by threads of the tokenizer, or by processes with one thread each."""
    if num_proc <= 1 or len(to_pack) <= 1:
        yield from (pack_file(folder, reader, file) for file in to_pack)
        return
    threads = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked process cannot use the threads of its parent
    try:
        with ProcessPoolExecutor(num_proc, multiprocessing.get_context("fork")) as pool:
            futures = [pool.submit(pack_file, folder, reader, file) for file in to_pack]
            try:
                yield from (future.result() for future in as_completed(futures))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if threads is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = threads


def pack_file(folder: Path, reader: TextReader, file: Shard) -> int:
    """Write the shards of one file; returns the number of tokens in them."""
    corpus, encode, held_out = reader.corpus, corpus_encoder(reader.tokenizer), []
    source = corpus.sources[file.source]
    path = corpus.files(source, file.split)[1][file.file]
    rows = {file: file_rows(corpus, source, file.split, path, others=held_out)}
    rows |= {other: _held_out_rows(held_out) for other in _made_with(corpus, file)[1:]}
    tokens = 0
    for shard, documents in rows.items():
        state = SourceState()
        blocks = reader.pack_rows(documents, state, encode)
        _write_shard(folder / shard_path(corpus, shard), shard, reader, blocks, state)
        tokens += state.pack.tokens
    return tokens


def _held_out_rows(rows: list[Row]) -> Iterator[Row]:
    """The rows that reading the training split of a file has put aside, once it is read."""
    yield from rows
    yield Row(-1, None)


def _write_shard(path: Path, shard: Shard, reader: TextReader, blocks: Iterator[Columns], state: SourceState) -> None:
    """Write `blocks` as an Arrow file, then a JSON file with its counts; each whole or absent."""
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}.tmp")
    batches = iter(lambda: list(itertools.islice(blocks, _ROWS_PER_BATCH)), [])
    first = next(batches, None)
    # a file without blocks has a schema too
    example = first[0] if first else {"input_ids": np.zeros(0, reader.dtype)}
    schema = pa.schema({name: _arrow_type(value) for name, value in example.items()})
    try:
        with pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in itertools.chain([first] if first else [], batches):
                columns = [_arrow_column([block[name] for block in batch]) for name in schema.names]
                writer.write_batch(pa.record_batch(columns, schema=schema))
        durable.sync(aside)
        facts = {"bytes": aside.stat().st_size, "sha256": durable.sha256(aside)}
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    origin = {"source": reader.corpus.sources[shard.source].name, "part": shard.split, "file": shard.file}
    counts = dict(zip(COUNTS, state.table(), strict=True))
    durable.write_json(path.with_suffix(".json"), {**origin, **facts, "counts": counts})


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


def finish(folder: Path, corpus: Corpus) -> bool:
    """Write the manifest where all shards are there; returns whether they are."""
    shards = []
    for shard in shards_of(corpus):
        path = shard_path(corpus, shard)
        try:
            shards.append({"path": path, **durable.read_json((folder / path).with_suffix(".json"))})
        except OSError:
            return False
    durable.write_json(folder / durable.MANIFEST, {"shards": shards})
    return True


def ensure(folder: str | Path, reader: TextReader, *, num_proc: int, process: int = 0, processes: int = 1) -> None:
    """Make the cache complete before training, each of `processes` packing its share, and wait until all have."""
    folder = Path(folder)
    if claim(folder, reader.fingerprint()):
        return
    complete = build(folder, reader, num_proc=num_proc, machine=process, machines=processes)
    while not complete:  # no collective operation: packing may take longer than its time limit
        time.sleep(_POLL_S)
        complete = finish(folder, reader.corpus) if process == 0 else (folder / durable.MANIFEST).exists()
