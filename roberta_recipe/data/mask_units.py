"""Masking units: whole words (BERT's later models), spans (SpanBERT, arXiv 1907.10529, section 3.1), n-grams (ALBERT,
arXiv 1909.11942, section 4.1), phrases (SpanBERT, section 6.1). Lengths are in words; no unit crosses a special token.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from roberta_recipe.data.word_starts import WordStarts

REVISION = 3  # of multi-token units; part of the fingerprint
_SPAN_P, _SPAN_MOST, _NGRAM_MOST = 0.2, 10, 3  # the papers' values
_POSITIONS = 32  # attempts to place a span
_PHRASE_SHARE = 0.5  # share of phrases among the drawn units; the others are words
_WEIGHTS = {  # of 1, 2, ... words
    "span": (1 - _SPAN_P) ** np.arange(_SPAN_MOST),  # geometric, cut at 10: 3.8 words on average
    "ngram": 1 / np.arange(1, _NGRAM_MOST + 1),
}
LENGTHS = {unit: np.cumsum(weights) / weights.sum() for unit, weights in _WEIGHTS.items()}  # cumulative probabilities


class Words(NamedTuple):
    """The words of a block: `begins` and `special` (length,) bool, the first tokens of words and the special tokens;
    `borders` (words + special tokens + 1,), the first position of each word or special token, then the length."""

    begins: np.ndarray
    special: np.ndarray
    borders: np.ndarray


def words_of_blocks(
    blocks: list[np.ndarray], starts: WordStarts, is_special: np.ndarray, between: int
) -> Iterator[Words]:
    """The words of each block of ids. `is_special`: (vocabulary,) bool; `between`: a special id. A word continued from
    another block begins after the special token before it."""
    # all blocks at once, as NumPy's call overhead dominates for short blocks
    separator = np.array([between])
    ids = np.concatenate([part for block in blocks for part in (block, separator)])
    special = is_special[ids]
    begins = starts(ids) & ~special
    begins[0] = not special[0]
    begins[1:] |= special[:-1] & ~special[1:]
    borders = np.flatnonzero(begins | special)
    block_starts = np.cumsum([0, *(len(block) + 1 for block in blocks)])
    before = np.searchsorted(borders, block_starts).tolist()
    starts_and_ends = zip(itertools.pairwise(block_starts.tolist()), itertools.pairwise(before), strict=True)
    for (start, end), (first, behind) in starts_and_ends:
        yield Words(begins[start : end - 1], special[start : end - 1], borders[first:behind] - start)


def choose_words(words: Words, pick: np.ndarray, probability: float, count: int | None) -> np.ndarray:
    """(length,) bool: the positions of chosen words, each word with `probability`, or exactly `count` words. `pick`:
    uniform draws (length,)."""
    word_draws = pick[words.begins]
    chosen = word_draws < probability
    if count is not None:
        chosen[:] = False
        chosen[np.argsort(word_draws)[:count]] = True
    if not len(chosen):
        return np.zeros(len(pick), dtype=bool)
    return chosen[np.cumsum(words.begins) - 1] & ~words.special  # tokens before the first word are special


def choose_spans(words: Words, unit: str, budget: int, draws: np.random.Generator) -> tuple[list[int], list[int]]:
    """(begins, ends) of spans with `budget` tokens in all on average; an end is the position after the last token.

    Their number is budget / expected tokens of a span, rounded up or down at random. Lengths are drawn from `LENGTHS`,
    limited to the longest run of words in the block, and never cut, so that they keep their distribution. The longest
    spans are placed first, each at a random free place, if any. At least one word separates two spans, for the
    span-boundary objective.
    """
    borders = words.borders.data  # indexing a memoryview is faster
    # 1: a special token, or a word in a span or next to one; padded with 1 at both ends
    occupied = bytearray(b"\1%b\1" % words.special[words.borders[:-1]].tobytes())
    count, longest = len(occupied) - 2, max(map(len, occupied.split(b"\1")))
    if not longest:
        return [], []
    law = LENGTHS[unit][:longest]
    chunks = iter(lambda: draws.random(64).tolist(), None)  # endless; a single draw takes five times as long
    uniform, law = itertools.chain.from_iterable(chunks).__next__, (law / law[-1]).tolist()
    tokens_per_word = (len(words.special) - np.count_nonzero(words.special)) / occupied.count(0)
    expected = (len(law) - sum(law[:-1])) * tokens_per_word  # of a span
    spans = range(int(budget / expected + uniform()))
    begins, ends = [], []
    for length in sorted((1 + bisect_right(law, uniform()) for _ in spans), reverse=True):
        for _ in range(_POSITIONS):
            begin = int(uniform() * count)
            if occupied.count(0, begin + 1, begin + 1 + length) == length:
                occupied[begin : begin + length + 2] = b"\1" * (length + 2)
                begins.append(borders[begin])
                ends.append(borders[begin + length])
                break
    return begins, ends


def choose_phrases(
    words: Words, marks: np.ndarray, budget: int, draws: np.random.Generator
) -> tuple[list[int], list[int]]:
    """(begins, ends) of units with `budget` tokens in all on average: each a phrase or a word with equal probability,
    while both are left. `marks` (length,): `phrases.COLUMN`. The last phrase is cut to the rest of the budget; a longer
    word is masked with probability rest / length, which keeps the average."""
    borders, free = words.borders.tolist(), (~words.special[words.borders[:-1]]).tolist()
    ranges = _phrases(words.borders, marks)
    phrase_queue = [ranges[n] for n in draws.permutation(len(ranges))]
    word_queue = [(n, n + 1) for n in draws.permutation(len(free)).tolist()]
    begins, ends = [], []
    while budget > 0 and (phrase_queue or word_queue):
        queue = phrase_queue if phrase_queue and (not word_queue or draws.random() < _PHRASE_SHARE) else word_queue
        begin, end = queue.pop()
        if not all(free[begin:end]):
            continue
        while end > begin + 1 and borders[end] - borders[begin] > budget:
            end -= 1
        size = borders[end] - borders[begin]
        if size > budget and draws.random() * size >= budget:
            break
        begins.append(borders[begin])
        ends.append(borders[end])
        free[begin:end] = [False] * (end - begin)
        budget -= size
    return begins, ends


def _phrases(borders: np.ndarray, marks: np.ndarray) -> list[tuple[int, int]]:
    """Word range [first, end) of each phrase, widened to whole words. A phrase that continues from another block begins
    at its first token in this block."""
    inside = marks > 0
    begins = marks == 1
    begins[0] |= inside[0]
    begins[1:] |= inside[1:] & ~inside[:-1]
    ends = inside.copy()
    ends[:-1] &= begins[1:] | ~inside[1:]
    first = np.searchsorted(borders, np.flatnonzero(begins), "right") - 1
    last = np.searchsorted(borders, np.flatnonzero(ends), "right") - 1
    return list(zip(first.tolist(), (last + 1).tolist(), strict=True))
