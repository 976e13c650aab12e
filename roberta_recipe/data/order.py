"""The order of blocks: a pure function of corpus, seed and position, without state.

A run consumes positions 0, 1, 2, ... of one endless sequence; optimizer step k, from 0 on, consumes [k x B,
(k + 1) x B), for any number of processes, micro-batches and data workers.

Sources are mixed by share: an item is due at the time (cost of its source's earlier items) / (share of the source), and
items are sorted by due time (ties: the first source). `interleave` does this for streams of any length, `mixture` at
any position of endless streams.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from roberta_recipe.errors import InputError

Skipped = Sequence[range]  # positions that a run skips: ascending, with gaps between them

_FILE_SHIFT, _SOURCE_SHIFT = 28, 52
FILES, WINDOWS, REPEATS, DRAW = range(4)  # purposes of `random_order`: independent draws from one seed
_ENDED = object()


def block_id(source: int, file: int, index: int) -> int:
    """A block's id, the same in every pass and run; below 2^63 for 2,048 sources of 2^24 files of 2^28 blocks."""
    return source << _SOURCE_SHIFT | file << _FILE_SHIFT | index


def place_of(block: int) -> tuple[int, int, int]:
    """(source, file, index) of a `block_id`."""
    source, of_source = divmod(block, 1 << _SOURCE_SHIFT)
    return source, *divmod(of_source, 1 << _FILE_SHIFT)


def mixture(shares: list[float], start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(source, index of the block in its source), both (count,) int64, at `count` positions from `start` on. Block i
    of a source is due at i / share: a source is < 1 block ahead of its share, at most (sources x share) behind."""
    rate = np.asarray(shares, dtype=np.float64)  # blocks of each source per position
    # at most `start` blocks are due before this time: they are counted by formula, only the later ones are sorted
    time = max(start - len(shares), 0)
    earlier = np.maximum(np.ceil(time * rate).astype(np.int64), 0)
    # correct rounding errors: the last counted block must be due before `time`, the next one must not
    earlier -= (earlier > 0) & ((earlier - 1) / rate >= time)
    earlier += earlier / rate < time
    missing = start - int(earlier.sum())
    # in any interval a source gets at least its share minus one block: n blocks are due within n + len(shares)
    lengths = np.ceil((missing + count + len(shares)) * rate).astype(np.int64) + 2
    sources = np.repeat(np.arange(len(shares)), lengths)
    indices = np.concatenate([np.arange(n) for n in lengths]) + earlier[sources]
    first = np.lexsort((sources, indices / rate[sources]))[missing : missing + count]
    return sources[first], indices[first]


def blocks_by_source(shares: list[float], positions: int) -> list[int]:
    """The number of blocks of each source in the first `positions` positions."""
    # this many positions include at least one block of each source
    sources, indices = mixture(shares, positions, 2 * len(shares) + int(2 / min(shares)))
    return [int(indices[sources == number][0]) for number in range(len(shares))]


def interleave(
    streams: list[Iterator[Any]], shares: list[float], cost: Callable[[Any], float] = lambda item: 1.0
) -> Iterator[Any]:
    """Items of several streams by due time (module docstring); a stream that ends drops out."""
    costs = {number: 0.0 for number in range(len(streams))}  # of the items so far
    while costs:
        number = min(costs, key=lambda stream: (costs[stream] / shares[stream], stream))
        item = next(streams[number], _ENDED)
        if item is _ENDED:
            del costs[number]
        else:
            costs[number] += cost(item)
            yield item


def sample_evenly(counts: list[int], shares: list[float], limit: int | None, seed: int) -> list[np.ndarray]:
    """A stratified sample: ascending indices into the `counts` items of each source, `limit` (None: all) in all, in
    proportion to `shares` until a source runs out. One random item is drawn from each of its equal strata."""
    owners = interleave([itertools.repeat(number, count) for number, count in enumerate(counts)], shares)
    wanted = np.bincount([*itertools.islice(owners, limit)], minlength=len(counts)).tolist()
    drawn = []
    for number, (count, taken) in enumerate(zip(counts, wanted, strict=True)):
        ends = np.arange(taken + 1) * count // max(taken, 1)
        drawn.append(_generator(seed, DRAW, number).integers(ends[:-1], ends[1:]))
    return drawn


def random_order(seed: int, purpose: int, key: tuple[int, ...], count: int) -> np.ndarray:
    """A permutation of `count` items, drawn from (seed, purpose, key): (count,) int64."""
    return _generator(seed, purpose, *key, len(key)).permutation(count)


def _generator(*entropy: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def read_ranges(words: Iterable[str]) -> Skipped:
    """Parse positions: "41000-41063" (inclusive) or "17". Raises `InputError`."""
    ranges = []
    for word in words:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"skip_blocks: {word!r} must look like 41000-41063, from the first block to the last")
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return union(ranges)


def union(ranges: Iterable[range]) -> Skipped:
    """All positions of `ranges`, which may overlap."""
    merged: list[range] = []
    for added in sorted(filter(None, ranges), key=lambda positions: positions.start):
        if merged and added.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, added.stop))
        else:
            merged.append(added)
    return merged


def in_words(positions: Sequence[range]) -> str:
    """Positions as text: "41,000 to 41,063 and 50,000"."""
    return " and ".join(f"{part.start:,} to {part[-1]:,}" if len(part) > 1 else f"{part.start:,}" for part in positions)


def unskipped(start: int, count: int, skipped: Skipped) -> tuple[range, ...]:
    """The first `count` positions from `start` on that are not `skipped`."""
    parts, left = [], count
    end = range(start + count + sum(map(len, skipped)), 0)  # sentinel: no gap after the last
    for gap in [*skipped, end]:
        if part := range(start, min(start + left, gap.start)):
            parts.append(part)
            left -= len(part)
        start = max(start, gap.stop)
    return tuple(parts)


def position_after(start: int, count: int, skipped: Skipped) -> int:
    """The next position after `count` blocks were consumed from `start` on."""
    return unskipped(start, count + 1, skipped)[-1][-1]


def batches_of(
    start: int, batch_size: int, processes: int, process: int, workers: int = 1, worker: int = 0, skipped: Skipped = ()
) -> Iterator[tuple[range, ...]]:
    """The positions of each batch of one data worker: one range, or several around `skipped` positions. Processes take
    batches in turn, and so do the workers of a process, as in a `DataLoader`."""
    for number in itertools.count(worker, workers):
        before = (number * processes + process) * batch_size
        yield unskipped(position_after(start, before, skipped), batch_size, skipped)
