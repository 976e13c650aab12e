"""The order of blocks: a function of corpus, seed and place alone, so that nothing of it has to be saved.

A run takes places 0, 1, 2, ... of one endless sequence; optimizer step k takes places [k x B, (k + 1) x B) of it,
whatever the number of processes, micro-batches and data workers. `mixture` says which source stands at a place and
which of its blocks; the blocks of a source come pass after pass, in each its files in another order and its blocks
shuffled within windows.
"""

import itertools
from collections.abc import Iterator

import numpy as np

_FILE_SHIFT, _SOURCE_SHIFT = 28, 52
FILES, WINDOWS, REPEATS = range(3)  # what a random order is for


def block_id(source: int, file: int, index: int) -> int:
    """A block's name, the same in every pass and run: its source, the number of its file (in sorted order), and its
    number in that file; below 2^63 for 2,048 sources of 2^24 files of 2^28 blocks."""
    return source << _SOURCE_SHIFT | file << _FILE_SHIFT | index


def source_of(block: int) -> int:
    """The source's number in a block's name."""
    return block >> _SOURCE_SHIFT


def mixture(shares: list[float], start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(source, index): both (count,) int64, for the places from `start` on; index counts the source's own blocks.

    The i-th block of a source is due at time i / share, and blocks come by time (ties: the first source). So at any
    place a source is less than one block ahead of its share, and no more than (number of sources x share) behind.
    """
    per_place = np.asarray(shares, dtype=np.float64)
    # those due before a time at which no more than `start` have come, then the rest by sorting
    time = max(start - len(shares), 0)
    taken = np.maximum(np.ceil(time * per_place).astype(np.int64), 0)
    taken -= (taken > 0) & ((taken - 1) / per_place >= time)
    taken += taken / per_place < time
    missing = start - int(taken.sum())
    # in a stretch of time a source has at least its share less one: n blocks take at most n + len(shares) of time
    lengths = np.ceil((missing + count + len(shares)) * per_place).astype(np.int64) + 2
    sources = np.repeat(np.arange(len(shares)), lengths)
    indices = np.concatenate([np.arange(n) for n in lengths]) + taken[sources]
    first = np.lexsort((sources, indices / per_place[sources]))[missing : missing + count]
    return sources[first], indices[first]


def taken_of_source(shares: list[float], places: int) -> list[int]:
    """How many blocks of each source stand at the first `places` places."""
    sources, indices = mixture(shares, places, 2 * len(shares) + int(2 / min(shares)))  # each comes at least once
    following = [indices[sources == number] for number in range(len(shares))]
    return [int(numbers[0]) for numbers in following]


def random_order(seed: int, purpose: int, place: tuple[int, ...], count: int) -> np.ndarray:
    """A permutation of `count` things, drawn from (seed, purpose, place): (count,) int64."""
    sequence = np.random.SeedSequence([seed, purpose, *place, len(place)])
    return np.random.Generator(np.random.Philox(sequence)).permutation(count)


def batches_of(
    start: int, batch_size: int, processes: int, process: int, workers: int = 1, worker: int = 0
) -> Iterator[range]:
    """The places of each micro-batch that one data worker of one process makes.

    Processes take micro-batches in turn, and of those of a process its workers take every `workers`-th, which is the
    order in which a `DataLoader` asks them.
    """
    for number in itertools.count(worker, workers):
        first = start + (number * processes + process) * batch_size
        yield range(first, first + batch_size)
