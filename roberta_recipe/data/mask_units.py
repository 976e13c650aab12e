"""What is masked together: whole words (BERT's later models), spans (SpanBERT, arXiv 1907.10529, section 3.1), n-grams
(ALBERT, arXiv 1909.11942, section 4.1). Lengths are counted in words, and no unit goes across a special token.
"""

import itertools
from collections.abc import Iterator
from typing import Literal

import numpy as np

Unit = Literal["token", "whole_word", "span", "ngram"]

_SPAN_P, _SPAN_MOST, _NGRAM_MOST = 0.2, 10, 3  # of the papers
_PLACES = 32  # that are tried for a length; text of shorter sentences has none for it
_TRIES_A_WORD = 4  # of all lengths; a block that has no more room stays below its budget


def _cumulative(weights: np.ndarray) -> np.ndarray:
    return np.cumsum(weights) / weights.sum()


LENGTHS = {  # cumulative probabilities of 1, 2, ... words
    "span": _cumulative((1 - _SPAN_P) ** np.arange(_SPAN_MOST)),  # geometric, cut at 10: 3.8 words on average
    "ngram": _cumulative(1 / np.arange(1, _NGRAM_MOST + 1)),
}


def begins_of(starts: np.ndarray, special: np.ndarray) -> np.ndarray:
    """(length,) bool: where words begin, also behind a special token within a word whose beginning is in another block;
    from where the tokenizer's words begin and which tokens are special."""
    begins = starts & ~special
    begins[0] = not special[0]
    begins[1:] |= special[:-1] & ~special[1:]
    return begins


def words_of(begins: np.ndarray, special: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first, end, text): of each word its first position, the position behind its last, and the number of special
    tokens before it, which is the same for words without one between them."""
    borders = np.flatnonzero(begins | special)
    is_word = begins[borders]
    end = np.append(borders[1:], len(begins))
    return borders[is_word], end[is_word], np.cumsum(~is_word)[is_word]


def chosen_words(
    begins: np.ndarray, special: np.ndarray, pick: np.ndarray, probability: float, count: int | None
) -> np.ndarray:
    """(length,) bool: the positions of words that are chosen with `probability` each; with `count`, so many of them,
    without replacement. `pick`: uniform draws, (length,)."""
    of_word = pick[begins]
    if count is None:
        chosen = of_word < probability
    else:
        chosen = np.zeros(len(of_word), dtype=bool)
        chosen[np.argsort(of_word)[:count]] = True
    if not len(chosen):
        return np.zeros(len(begins), dtype=bool)
    return chosen[np.cumsum(begins) - 1] & ~special  # what stands before the first word is special


def chosen_spans(
    first: np.ndarray, end: np.ndarray, text: np.ndarray, unit: str, budget: int, draws: np.random.Generator
) -> list[tuple[int, int]]:
    """Spans (first position, position behind) of `budget` tokens in all, in the order in which they are drawn.

    A length is drawn from `LENGTHS`, then places until one has so many words that are free, so that lengths keep their
    law. A word stays between two spans, which shows their ends (for a span-boundary objective). The last span is cut to
    the budget; of a word that is too long for what is left of it, chance takes as many as make it right on average.
    """
    words, spans, tried = len(first), [], 0
    lengths = itertools.chain.from_iterable(_lengths(unit, draws))
    first, end, text = first.tolist(), end.tolist(), text.tolist()
    held = bytearray(words + 2)  # 1 at a word's number + 1: it is in a span, or beside one
    length = next(lengths)
    for word in itertools.chain.from_iterable(_places(words, draws)):
        if budget < 1:
            break
        last, tried = word + length - 1, tried + 1
        if last >= words or text[last] != text[word] or held.find(1, word + 1, last + 2) >= 0:
            if tried == _PLACES:
                length, tried = next(lengths), 0
            continue
        while last > word and end[last] - first[word] > budget:
            last -= 1
        size = end[last] - first[word]
        if size > budget and draws.random() * size >= budget:
            break
        spans.append((first[word], end[last]))
        held[word : last + 3] = b"\1" * (last + 3 - word)
        budget -= size
        length, tried = next(lengths), 0
    return spans


def _lengths(unit: str, draws: np.random.Generator) -> Iterator[list[int]]:
    """Lengths without end, some at a time."""
    while True:
        yield (1 + np.searchsorted(LENGTHS[unit], draws.random(16))).tolist()


def _places(words: int, draws: np.random.Generator) -> Iterator[list[int]]:
    """The numbers of words to begin at, some at a time."""
    for _ in range(1 + _TRIES_A_WORD * words // _PLACES):
        yield (draws.random(_PLACES) * words).astype(np.int64).tolist()
