"""The blocks of a run: one order over two providers of chunks, text and token cache (paper, sections 3.2 and 4.2).

`order.mixture` gives the source at each position of a run, whole blocks of it, so that shares of blocks are shares of
tokens whatever the length of a source's documents (drawing documents in proportion to size would hand a corpus of books
a thousand times its share). The blocks of a source come pass after pass, in each pass its files in another order, and
the blocks of `shuffle_window` chunks permuted together. The number of consumed blocks is the whole state of a run:
`chunks.ChunkIndex`, or the token cache, knows where the chunks begin.
"""

import itertools
import math
import os
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from roberta_recipe.data.chunks import COUNTS, Chunk, File, total
from roberta_recipe.data.corpus import Corpus
from roberta_recipe.data.order import (
    REPEATS,
    WINDOWS,
    Skipped,
    batches_of,
    block_id,
    drawn_evenly,
    file_order,
    interleave,
    mixture,
    random_order,
    source_of,
    taken_of_source,
)
from roberta_recipe.data.packing import Block, Columns
from roberta_recipe.errors import InputError
from roberta_recipe.log import Bar, counted, logger

_NARROW = (np.uint8, np.uint16, np.int32, np.int64)  # of a column that a data worker sends
_OF_BATCH = ("predicted", "attention_mask")  # columns that depend on the other blocks of a batch


class Provider(Protocol):
    """Chunks of a corpus: `chunks.TextReader`, `token_cache.TokenCache`."""

    corpus: Corpus
    seed: int
    shuffle_window: int  # chunks whose blocks are permuted together; 0 keeps the order of the files
    versions: int

    def chunks(self, file: File, skip: int = 0) -> Iterator[tuple[Chunk, Sequence[Columns]]]:
        """The chunks of a file with their blocks; those within the first `skip` blocks may come without."""

    def known(self, file: File) -> list[Chunk]:
        """The first chunks of a file, as far as the provider knows them without reading it."""

    def fingerprint(self) -> dict[str, Any]:
        """All that the blocks depend on, but for their order."""


class _Window(NamedTuple):
    """Chunks of a source that follow each other in a pass."""

    source: int
    epoch: int
    first: int  # number of its first block in the source's endless sequence
    chunks: list[tuple[File, Chunk, Sequence[Columns]]]
    ends: list[int]  # blocks up to the end of each chunk
    permutation: np.ndarray | None = None

    def block(self, index: int) -> Block:
        """The block `index` of the window's permutation."""
        index = int(index if self.permutation is None else self.permutation[index])
        number = bisect_right(self.ends, index)
        file, chunk, blocks = self.chunks[number]
        index -= self.ends[number - 1] if number else 0
        columns = {**blocks[index]}
        document = columns.pop("document")
        return Block(columns, block_id(self.source, file.number, chunk.first_block + index), self.epoch, document)


def _windows(provider: Provider, source: int, index: int) -> Iterator[_Window]:
    """The windows of a source, without end, from that with block `index` of its sequence on or from an earlier one."""
    size, position, pass_blocks = max(provider.shuffle_window, 1), 0, cache(partial(_pass_blocks, provider, source))
    for epoch in itertools.count():
        known = pass_blocks(epoch % provider.versions)
        if known and position + known <= index:
            position += known
            continue
        begun, number, window = position, 0, []
        for file in _files(provider, source, "train", epoch):
            for chunk, blocks in provider.chunks(file, skip=index - position):
                window.append((file, chunk, blocks))
                position += chunk.blocks
                if len(window) == size:
                    yield _window(provider, source, epoch, number, position, window)
                    number, window = number + 1, []
        if window:
            yield _window(provider, source, epoch, number, position, window)
        if position == begun:
            name = provider.corpus.sources[source].name
            raise InputError(f"source {name!r} is empty: none of its documents has text to train on")


def _window(
    provider: Provider, source: int, epoch: int, number: int, end: int, chunks: list[tuple[File, Chunk, Any]]
) -> _Window:
    ends = [*itertools.accumulate(chunk.blocks for _, chunk, _ in chunks)]
    shuffled = provider.shuffle_window > 0
    order = random_order(provider.seed, WINDOWS, (source, epoch, number), ends[-1]) if shuffled else None
    return _Window(source, epoch, end - ends[-1], chunks, ends, order)


def _files(provider: Provider, source: int, split: str, epoch: int) -> list[File]:
    """The files of a source in the order of a pass."""
    _, paths = provider.corpus.files(provider.corpus.sources[source], split)
    version = epoch % provider.versions if split == "train" else 0
    numbers = file_order(source, len(paths), seed=provider.seed, epoch=epoch)
    return [File(source, split, number, version) for number in numbers]


def blocks_at(provider: Provider, batches: Iterable[tuple[range, ...]]) -> Iterator[Block]:
    """The blocks at the positions of `batches`, which ascend."""
    shares = provider.corpus.shares
    windows: dict[int, Iterator[_Window]] = {}
    current: dict[int, _Window] = {}
    for positions in itertools.chain.from_iterable(batches):
        places = mixture(shares, positions.start, len(positions))
        for source, index in zip(*(part.tolist() for part in places), strict=True):
            if source not in windows:
                windows[source] = _windows(provider, source, index)
                current[source] = next(windows[source])
            while index >= current[source].first + current[source].ends[-1]:
                current[source] = next(windows[source])
            yield current[source].block(index - current[source].first)


def validation_blocks(provider: Provider, limit: int | None) -> Iterator[Block]:
    """At most `limit` held-out blocks in the proportions of the mixture, as far as each source goes, drawn evenly from
    its text: of a share of the training files, as many files in the order of a pass as have `limit` blocks; all of its
    own validation files, and all files without a limit, which takes all blocks."""
    held_out = []
    with Bar(desc="Reading validation", unit=" blocks", mininterval=1, leave=False) as bar:
        for number, source in enumerate(provider.corpus.sources):
            chunks, count = [], 0
            for file in _files(provider, number, "validation", epoch=0):
                for chunk, blocks in provider.chunks(file):
                    chunks.append((file, chunk, blocks))
                    count += chunk.blocks
                    bar.update(chunk.blocks)
                if limit is not None and count >= limit and not source.validation_files:
                    break
            ends = itertools.accumulate(chunk.blocks for _, chunk, _ in chunks)
            held_out.append(_Window(number, 0, 0, chunks, [*ends]))
    counts = [window.ends[-1] for window in held_out]
    drawn = drawn_evenly(counts, provider.corpus.shares, limit, provider.seed)
    streams = [map(window.block, indices) for window, indices in zip(held_out, drawn, strict=True)]
    return interleave(streams, provider.corpus.shares)


def _pass_blocks(provider: Provider, source: int, version: int) -> int | None:
    """Blocks of a pass over a source; None where one of its files has not been read to its end."""
    files = [provider.known(file) for file in _files(provider, source, "train", version)]
    whole = all(chunks and chunks[-1].last for chunks in files)
    return sum(chunks[-1].first_block + chunks[-1].blocks for chunks in files) if whole else None


def _pass_counts(provider: Provider, source: int, epoch: int, split: str = "train") -> Counter[str]:
    """The counts of a pass, as far as the files have been read."""
    return total(itertools.chain.from_iterable(map(provider.known, _files(provider, source, split, epoch))))


def count_table(provider: Provider, split: str) -> dict[str, dict[str, int]]:
    """The counts of one pass over a split, by source, as far as its files have been read."""
    counts = [_pass_counts(provider, number, 0, split) for number in range(len(provider.corpus.sources))]
    return _by_source(provider, counts)


def consumed(provider: Provider, positions: int) -> tuple[dict[str, dict[str, int]], dict[str, float]]:
    """(counts, passes) by source, up to the chunks of the first `positions` blocks. Passes are whole numbers as long as
    the length of a pass is not known."""
    tables, passes = [], {}
    for number, taken in enumerate(taken_of_source(provider.corpus.shares, positions)):
        pass_blocks = cache(partial(_pass_blocks, provider, number))
        pass_counts = cache(lambda version, number=number: _pass_counts(provider, number, version))
        counts, epoch = Counter(), 0
        while (known := pass_blocks(epoch % provider.versions)) and known <= taken:
            counts += pass_counts(epoch % provider.versions)
            taken, epoch = taken - known, epoch + 1
        passes[provider.corpus.sources[number].name] = epoch + (round(taken / known, 4) if known else 0)
        for chunk in itertools.chain.from_iterable(map(provider.known, _files(provider, number, "train", epoch))):
            if taken <= 0:
                break
            counts, taken = counts + total([chunk]), taken - chunk.blocks
        tables.append(counts)
    return _by_source(provider, tables), passes


def _by_source(provider: Provider, counts: list[Counter[str]]) -> dict[str, dict[str, int]]:
    sources = zip(provider.corpus.sources, counts, strict=True)
    return {source.name: {name: of[name] for name in COUNTS} for source, of in sources}


class TrainBlocks(torch.utils.data.IterableDataset):
    """One process's share of the endless sequence of training blocks, from position `start` on, without `skipped`.

    `batch_size`: blocks of an optimizer step that are this process's. With `limit`, the first so many blocks only,
    again and again in a new order each time. `threads_in_worker` lets a data worker tokenize on all cores; a forked
    worker hangs if its parent has done so before (TOKENIZERS_PARALLELISM=false prevents that in the parent).
    """

    def __init__(
        self,
        reader: Provider,
        *,
        batch_size: int,
        processes: int = 1,
        process: int = 0,
        start: int = 0,
        skipped: Skipped | None = None,
        limit: int | None = None,
        threads_in_worker: bool = False,
    ):
        self.reader, self.batch_size, self.processes, self.process = reader, batch_size, processes, process
        self.skipped, self.start, self.limit, self.threads_in_worker = skipped, start, limit, threads_in_worker

    def __iter__(self) -> Iterator[Block]:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and self.threads_in_worker:
            os.environ["TOKENIZERS_PARALLELISM"] = "true"
        shard = (worker.num_workers, worker.id) if worker else (1, 0)
        return self.blocks(batches_of(self.start, self.batch_size, self.processes, self.process, *shard, self.skipped))

    def blocks(self, batches: Iterable[tuple[range, ...]]) -> Iterator[Block]:
        """The blocks at the positions of `batches`, which ascend."""
        return self._repeated(batches) if self.limit else blocks_at(self.reader, batches)

    def _repeated(self, batches: Iterable[tuple[range, ...]]) -> Iterator[Block]:
        """The first `limit` blocks (at most one pass), again and again."""
        kept, ended = {}, set()
        for block in blocks_at(self.reader, [(range(self.limit),)]):
            if block.epoch:
                ended.add(source_of(block.id))
            if len(ended) == len(self.reader.corpus.sources):
                has = counted(len(kept), "block")
                logger.warning(f"max_train_samples={self.limit}: the corpus has {has}, and all are used")
                break
            kept.setdefault(block.id, block)
        kept, epoch, order = list(kept.values()), None, None
        for position in itertools.chain.from_iterable(itertools.chain.from_iterable(batches)):
            if position // len(kept) != epoch:
                epoch = position // len(kept)
                order = random_order(self.reader.seed, REPEATS, (epoch,), len(kept))
            block = kept[order[position % len(kept)]]
            yield Block(block, block.id, epoch, block.document)


class StepRecord(NamedTuple):
    """A process's blocks of an optimizer step: tokens (padding is none), and sums over blocks of a checksum of each, as
    it was read (`blocks_digest`) and as the model sees it (`digest`)."""

    tokens: int
    blocks_digest: int
    digest: int


def record_of(blocks: list[Block], batch: dict[str, Any]) -> StepRecord:
    """The record of the blocks that a collator has made `batch` of."""
    columns = {name: value.numpy() for name, value in sorted(batch.items()) if name not in _OF_BATCH}
    seen = []
    for row, block in enumerate(blocks):
        size = len(block["input_ids"])
        seen.append({name: values[row][:size] if values.ndim > 1 else values[row] for name, values in columns.items()})
    digests = (sum(map(_checksum, blocks, of)) for of in (blocks, seen))
    return StepRecord(sum(len(block["input_ids"]) for block in blocks), *digests)


def _checksum(block: Block, columns: dict[str, Any]) -> int:
    """A checksum of `columns`, and of the block's number."""
    checksum = block.id & 0xFFFFFFFF
    for name in sorted(columns):
        checksum = zlib.crc32(np.asarray(columns[name], dtype=np.int64).tobytes(), checksum)
    return checksum


@dataclass
class MicroBatches:
    """A collate function: a process's blocks of an optimizer step to its micro-batches of `size` blocks, each made by
    `collate` (`masking.MlmCollator`, or transformers' own), as `packed` sends them, and the `StepRecord`.

    Blocks of like length come together, the longest first, so that fewer positions are padded: a step's gradient does
    not depend on how its blocks are divided.
    """

    collate: Callable[[list[Block]], dict[str, Any]]
    size: int

    def __call__(self, blocks: list[Block]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], StepRecord]:
        blocks = sorted(blocks, key=lambda block: -len(block["input_ids"]))
        parts = [blocks[start : start + self.size] for start in range(0, len(blocks), self.size)]
        batches = [{**self.collate(part)} for part in parts]
        records = map(record_of, parts, batches)
        return *packed(batches), StepRecord(*map(sum, zip(*records, strict=True)))


def packed(micro_batches: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """(columns, micro-batches): one 1-D tensor per column, in the narrowest integer type that holds it, and the
    micro-batches with shapes in place of tensors. A data worker sends each tensor through /dev/shm, as a file
    descriptor."""
    columns: dict[str, list[np.ndarray]] = {}
    for name, value in itertools.chain.from_iterable(micro_batch.items() for micro_batch in micro_batches):
        if isinstance(value, torch.Tensor):
            columns.setdefault(name, []).append(value.numpy().ravel())
    shapes = [{name: v.shape if name in columns else v for name, v in batch.items()} for batch in micro_batches]
    return {name: _narrowed(np.concatenate(parts)) for name, parts in columns.items()}, shapes


def _narrowed(values: np.ndarray) -> torch.Tensor:
    low, high = values.min(initial=0), values.max(initial=0)
    fitting = (dtype for dtype in _NARROW if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)
    return torch.from_numpy(values.astype(next(fitting)))


def unpacked(columns: dict[str, torch.Tensor], shapes: list[dict[str, Any]], device: Any) -> list[dict[str, Any]]:
    """The micro-batches that were `packed`: int64 tensors on `device`, views of one tensor per column."""
    parts = {}
    for name, column in columns.items():
        sizes = [math.prod(batch[name]) for batch in shapes if name in batch]
        parts[name] = iter(column.to(device, non_blocking=True).long().split(sizes))
    return [
        {name: next(parts[name]).view(value) if name in parts else value for name, value in batch.items()}
        for batch in shapes
    ]


class MicroBatchLoader(torch.utils.data.DataLoader):
    """A `DataLoader` over `TrainBlocks` that gives one micro-batch after another, on `device`, the first of a step with
    its `StepRecord` as "record"; `collate_fn` is a `MicroBatches`. It waits for the data of a step within `waiting()`.
    """

    def __init__(self, *args, device: torch.device, waiting: Callable[[], AbstractContextManager], **kwargs):
        super().__init__(*args, **kwargs)
        self.device, self.waiting = device, waiting

    def __iter__(self) -> Iterator[dict[str, Any]]:
        steps = super().__iter__()
        while True:
            with self.waiting():
                step = next(steps, None)
            if step is None:
                return
            *columns, record = step
            first, *others = unpacked(*columns, self.device)
            yield {**first, "record": record}
            yield from others
