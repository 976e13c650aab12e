"""The stream of training blocks, from text or from a token cache in the same order (paper, sections 3.2 and 4.2).

`order.mixture` assigns a source to each position of a run. Sources are mixed by blocks, not by documents: drawing
documents in proportion to size would give a corpus of books a thousand times its share of tokens. Within a source, each
pass has its files in another order, and the blocks of `shuffle_window` chunks are shuffled together. The number of
consumed blocks is the whole state of the data order.
"""

import itertools
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache, lru_cache, partial

import torch

from roberta_recipe.data import order
from roberta_recipe.data.chunks import Chunk, File, TextReader, sum_counts
from roberta_recipe.data.order import Skipped, batches_of, interleave, random_order
from roberta_recipe.data.packing import Block, Columns
from roberta_recipe.data.token_cache import TokenCache
from roberta_recipe.errors import InputError
from roberta_recipe.log import Bar, counted, logger

Reader = TextReader | TokenCache
_FileChunk = tuple[File, Chunk, Sequence[Columns]]


@dataclass
class _Window:
    """A shuffle window: consecutive chunks of one pass over a source, with a permutation of their blocks."""

    source: int
    epoch: int
    first: int  # index of its first block in the source's endless sequence
    chunks: list[_FileChunk]
    order_of: Callable[[int], Sequence[int]] = range

    def __post_init__(self):
        self.ends = [*itertools.accumulate(chunk.blocks for _, chunk, _ in self.chunks)]
        self.order = self.order_of(self.ends[-1])

    def block(self, index: int) -> Block:
        """The block at position `index` of the shuffled window."""
        index = int(self.order[index])
        number = bisect_right(self.ends, index)
        file, chunk, blocks = self.chunks[number]
        index -= self.ends[number - 1] if number else 0
        columns = {**blocks[index]}
        document = columns.pop("document")
        return Block(columns, order.block_id(self.source, file.number, chunk.first_block + index), self.epoch, document)


def _windows(reader: Reader, source: int, index: int) -> Iterator[_Window]:
    """Infinite stream of a source's shuffle windows, starting at or before the window of block `index`."""
    size, first = max(reader.shuffle_window, 1), 0
    pass_counts = cache(lambda version: _pass_counts(reader, source, "train", version))
    for epoch in itertools.count():
        counts, complete = pass_counts(epoch % reader.versions)
        if complete and 0 < counts["blocks"] <= index - first:
            first += counts["blocks"]
            continue
        chunks = _chunks(reader, source, epoch, index - first)
        for number in itertools.count():
            if not (window := [*itertools.islice(chunks, size)]):
                break
            shuffled = partial(random_order, reader.seed, order.WINDOWS, (source, epoch, number))
            yield _Window(source, epoch, first, window, shuffled if reader.shuffle_window else range)
            first += sum(chunk.blocks for _, chunk, _ in window)


def _chunks(reader: Reader, source: int, epoch: int, skip: int) -> Iterator[_FileChunk]:
    """The chunks of a training pass; those within the first `skip` blocks may come without their blocks. Raises
    `InputError` for an empty source."""
    read = 0
    for file in _files(reader, source, "train", epoch):
        for chunk, blocks in reader.chunks(file, skip - read):
            read += chunk.blocks
            yield file, chunk, blocks
    if not read:
        name = reader.corpus.sources[source].name
        raise InputError(f"source {name!r} is empty: none of its documents has text to train on")


def _files(reader: Reader, source: int, split: str, epoch: int) -> list[File]:
    """The files of a source in the order of a pass."""
    _, paths = reader.corpus.files(reader.corpus.sources[source], split)
    version = epoch % reader.versions if split == "train" else 0
    numbers = random_order(reader.seed, order.FILES, (source, epoch), len(paths)).tolist()
    return [File(source, split, number, version) for number in numbers]


def blocks_at(reader: Reader, batches: Iterable[tuple[range, ...]]) -> Iterator[Block]:
    """The blocks at the ascending positions of `batches`."""
    windows: dict[int, Iterator[_Window]] = {}
    current: dict[int, _Window] = {}
    for positions in itertools.chain.from_iterable(batches):
        places = order.mixture(reader.corpus.shares, positions.start, len(positions))
        for source, index in zip(*(part.tolist() for part in places), strict=True):
            if source not in windows:
                windows[source] = _windows(reader, source, index)
                current[source] = next(windows[source])
            while index >= current[source].first + current[source].ends[-1]:
                current[source] = next(windows[source])
            yield current[source].block(index - current[source].first)


def validation_blocks(reader: Reader, limit: int | None) -> Iterator[Block]:
    """At most `limit` held-out blocks in the mixture's proportions; a short source gives all it has. Each source is
    sampled evenly: its validation files or, without these, training files until `limit` blocks are held out."""
    windows, shares = [], reader.corpus.shares
    with Bar(desc="Reading validation", unit=" blocks", mininterval=1, leave=False) as bar:
        for number, source in enumerate(reader.corpus.sources):
            chunks, count = [], 0
            for file in _files(reader, number, "validation", epoch=0):
                for chunk, blocks in reader.chunks(file):
                    chunks.append((file, chunk, blocks))
                    count += chunk.blocks
                    bar.update(chunk.blocks)
                if limit is not None and count >= limit and not source.validation_files:
                    break
            windows.append(_Window(number, 0, 0, chunks))
    samples = order.sample_evenly([window.ends[-1] for window in windows], shares, limit, reader.seed)
    return interleave([map(window.block, sample) for window, sample in zip(windows, samples, strict=True)], shares)


def _pass_counts(reader: Reader, source: int, split: str, epoch: int = 0) -> tuple[dict[str, int], bool]:
    """The counts of the indexed chunks of a pass, and whether all its files are indexed to the end."""
    files = [reader.indexed_chunks(file) for file in _files(reader, source, split, epoch)]
    return sum_counts(itertools.chain(*files)), all(chunks and chunks[-1].last for chunks in files)


def blocks_of_pass(reader: Reader, pack: bool = False) -> int | None:
    """Number of training blocks in one pass over all sources; None if a file is not packed to its end. With `pack`, the
    rest is packed first, to count it."""
    sources = range(len(reader.corpus.sources))
    if pack:
        with Bar(desc="Counting blocks", unit=" blocks", mininterval=1, leave=False) as bar:
            for _, chunk, _ in itertools.chain(*(_chunks(reader, source, 0, sys.maxsize) for source in sources)):
                bar.update(chunk.blocks)
    counts = [_pass_counts(reader, source, "train") for source in sources]
    return sum(of_source["blocks"] for of_source, _ in counts) if all(complete for _, complete in counts) else None


def count_table(reader: Reader, split: str) -> dict[str, dict[str, int]]:
    """Counts of one pass over a split, by source; chunks that are not packed yet are missing."""
    return {source.name: _pass_counts(reader, n, split)[0] for n, source in enumerate(reader.corpus.sources)}


def consumed(
    reader: Reader, positions: int, limit: int | None = None
) -> tuple[dict[str, dict[str, int]], dict[str, float]]:
    """(counts, passes) by source over the chunks of the first `positions` blocks. `passes` is an exact float or, if the
    length of the last pass is unknown, an int: the number of complete passes. With `limit`, the first `limit` blocks
    (at most one pass) repeat: they are counted once, and `passes` are over them."""
    counts, passes, repeated = {}, {}, min(blocks_of_pass(reader) or limit, limit) if limit else sys.maxsize
    for number, left in enumerate(order.blocks_by_source(reader.corpus.shares, min(positions, repeated))):
        chunks, read, epoch = [], 0, 0
        while left > 0:
            before = left
            # indexed chunks come without their blocks; chunks lost with a damaged index are packed again
            for _, chunk, _ in _chunks(reader, number, epoch, sys.maxsize):
                chunks.append(chunk)
                left -= chunk.blocks
                if left <= 0:
                    break
            pass_counts, complete = _pass_counts(reader, number, "train", epoch)
            read += min(before / pass_counts["blocks"], 1) if complete else 0
            epoch += 1
        name = reader.corpus.sources[number].name
        counts[name], passes[name] = sum_counts(chunks), round(positions / repeated if limit else read, 4)
    return counts, passes


@dataclass(eq=False)
class TrainBlocks(torch.utils.data.IterableDataset):
    """One process's share of the endless sequence of training blocks, from position `start` on, without `skipped`.

    `batch_size`: blocks per process and optimizer step. With `limit`, the first `limit` blocks repeat, each time in a
    new order. `threads_in_worker`: data workers tokenize with threads; a forked worker would hang if its parent has
    done so before, which TOKENIZERS_PARALLELISM=false prevents.
    """

    reader: Reader
    _: KW_ONLY
    batch_size: int
    processes: int = 1
    process: int = 0
    start: int = 0
    skipped: Skipped = ()
    limit: int | None = None
    threads_in_worker: bool = False

    def __iter__(self) -> Iterator[Block]:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and self.threads_in_worker:
            os.environ["TOKENIZERS_PARALLELISM"] = "true"
        shard = (worker.num_workers, worker.id) if worker else (1, 0)
        return self.blocks(batches_of(self.start, self.batch_size, self.processes, self.process, *shard, self.skipped))

    def blocks(self, batches: Iterable[tuple[range, ...]]) -> Iterator[Block]:
        """The blocks at the ascending positions of `batches`."""
        return self._repeated(batches) if self.limit else blocks_at(self.reader, batches)

    def _repeated(self, batches: Iterable[tuple[range, ...]]) -> Iterator[Block]:
        """The first `limit` blocks (at most one pass), repeated."""
        blocks, finished = {}, set()
        for block in blocks_at(self.reader, [(range(self.limit),)]):
            if block.epoch:
                finished.add(order.place_of(block.id)[0])
            if len(finished) == len(self.reader.corpus.sources):
                break
            blocks.setdefault(block.id, block)
        if len(blocks) < self.limit:  # a source that ends before the others begins again
            logger.warning(f"max_train_samples={self.limit}: found only {counted(len(blocks), 'different block')}")
        blocks = [*blocks.values()]
        order_of = lru_cache(1)(lambda epoch: random_order(self.reader.seed, order.REPEATS, (epoch,), len(blocks)))
        for position in itertools.chain.from_iterable(itertools.chain.from_iterable(batches)):
            epoch, index = divmod(position, len(blocks))
            block = blocks[order_of(epoch)[index]]
            yield Block(block, block.id, epoch, block.document)
