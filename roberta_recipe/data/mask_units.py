"""Masking units: whole words (BERT's later models), spans (SpanBERT, arXiv 1907.10529, section 3.1), n-grams (ALBERT,
arXiv 1909.11942, section 4.1), phrases (SpanBERT, section 6.1). Lengths are in words; no unit crosses a special token.

A word is a piece of the tokenizer's pre-tokenizer: with RoBERTa's, "can't." is three words, can, 't and the full stop.
With byte-level BPE, a word begins at a blank, and where letters, digits and other characters meet, according to a
table of token kinds. In unclear cases, such as a character of several tokens, the pre-tokenizer splits the text.
"""

import itertools
import json
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from roberta_recipe.errors import InputError

REVISION = 3  # of multi-token units; part of the fingerprint
_SPAN_P, _SPAN_MOST, _NGRAM_MOST = 0.2, 10, 3  # the papers' values
_POSITIONS = 32  # attempts to place a span
_PHRASE_SHARE = 0.5  # share of phrases among the drawn units; the others are words
_WEIGHTS = {  # of 1, 2, ... words
    "span": (1 - _SPAN_P) ** np.arange(_SPAN_MOST),  # geometric, cut at 10: 3.8 words on average
    "ngram": 1 / np.arange(1, _NGRAM_MOST + 1),
}
LENGTHS = {unit: np.cumsum(weights) / weights.sum() for unit, weights in _WEIGHTS.items()}  # cumulative probabilities

_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")  # words by GPT-2's rule
_SPECIAL, _LETTERS, _DIGITS, _OTHERS, _CONTRACTION, _BLANK, _CUT = range(7)  # kind of a token, without a leading blank
_KIND, _BLANK_FIRST, _LONE_BLANK, _UNCLEAR = 7, 8, 16, 32  # bits of a token's code
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}

WordStarts = Callable[[np.ndarray], np.ndarray]


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


def word_starts(tokenizer: PreTrainedTokenizerBase) -> WordStarts:
    """A function from a block's ids (length,) to word starts (length,) bool. Special tokens do not start a word; a
    token after one does. Raises `InputError` for an unsupported tokenizer."""
    backend = tokenizer.backend_tokenizer
    state = json.loads(backend.to_str())
    model, rule = state["model"], state["pre_tokenizer"] or {"type": "none"}
    types = {part["type"] for part in rule.get("pretokenizers", [rule])}
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = np.zeros(len(tokenizer), dtype=bool)
    special[tokenizer.all_special_ids] = True
    if prefix := model.get("continuing_subword_prefix"):  # WordPiece, or a BPE with a prefix
        begins = ~special & [not token.startswith(prefix) for token in tokens]
        return lambda ids: begins[ids]
    if suffix := model.get("end_of_word_suffix"):  # BPE without byte level, such as HerBERT's
        ends = special | [token.endswith(suffix) for token in tokens]
        return lambda ids: ~special[ids] & np.concatenate(([True], ends[ids[:-1]]))
    if "ByteLevel" in types:
        is_gpt2 = rule["type"] == "ByteLevel" and rule["use_regex"]
        token_bytes = [bytes(_BYTE_OF.get(character, 0) for character in token) for token in tokens]
        return ByteLevelWords(backend.pre_tokenizer, token_bytes, special, is_gpt2)
    if "Metaspace" in types or "▁" in json.dumps(state["normalizer"], ensure_ascii=False):  # Gemma's normalizer
        codes = _codes([token.replace("▁", " ") for token in tokens], special)
        return lambda ids: _starts_by_code(codes[ids])
    raise InputError(
        f"the tokenizer {tokenizer.name_or_path!r} has no word boundaries: its pre-tokenizer is "
        f"{', '.join(sorted(types))}; name a byte-level BPE, WordPiece or SentencePiece, or set masking_unit=token"
    )


class ByteLevelWords:
    """`word_starts` of byte-level BPE. `is_gpt2`: the pre-tokenizer has GPT-2's rule, as the codes assume."""

    def __init__(self, pre_tokenizer: Any, tokens: list[bytes], special: np.ndarray, is_gpt2: bool):
        texts = [token.decode("utf-8", "replace") for token in tokens]
        self._pre_tokenizer, self._tokens, self._special = pre_tokenizer, tokens, special
        self._codes = _codes(texts, special)
        self._split = lru_cache(10_000)(self._split_text)  # a few texts, such as "n’t", are frequent
        kind, lone_blank = self._codes & _KIND, self._codes & _LONE_BLANK > 0
        unclear = (kind == _CUT) | ((kind == _BLANK) & ~lone_blank)
        whole = set(_CONTRACTIONS) <= set(texts)  # so a contraction is never made of several tokens
        unclear |= np.array([not is_gpt2 or (not whole and text.startswith("'")) for text in texts])
        self._codes[unclear & ~special] |= _UNCLEAR

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        codes = self._codes[ids]
        starts = _starts_by_code(codes)
        unclear = codes & _UNCLEAR
        # a token that begins with a blank, after blanks
        unclear[1:] |= (codes[:-1] & _KIND == _BLANK) & (codes[1:] & _BLANK_FIRST > 0)
        if unclear.any():  # split the text between two certain word starts
            sure = (codes & _KIND == _SPECIAL) | ((codes & _BLANK_FIRST > 0) & ~unclear.astype(bool))
            borders = np.concatenate(([0], np.flatnonzero(sure), [len(ids)]))
            ends = np.unique(np.searchsorted(borders, np.flatnonzero(unclear), "right"))
            begins = borders[ends - 1]
            begins += self._special[ids[begins]]
            for begin, end in zip(begins.tolist(), borders[ends].tolist(), strict=True):
                starts[begin:end] = self._split(tuple(ids[begin:end].tolist()))
        return starts

    def _split_text(self, ids: tuple[int, ...]) -> list[bool]:
        """Word starts of tokens without special tokens, by the pre-tokenizer."""
        tokens = [self._tokens[token] for token in ids]
        # invalid bytes, as in a block that ends within a character, count as one character each
        text = b"".join(tokens).decode("utf-8", "surrogateescape")
        byte_at = [0, *itertools.accumulate(len(c.encode("utf-8", "surrogateescape")) for c in text)]
        shown = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
        words = {byte_at[start] for _, (start, _) in self._pre_tokenizer.pre_tokenize_str(shown)}
        return [begin in words for begin in itertools.accumulate(map(len, tokens[:-1]), initial=0)]


def _starts_by_code(codes: np.ndarray) -> np.ndarray:
    """Word starts by token kind: a blank begins a word, even as a separate token, and so does a change of kind."""
    kind = codes & _KIND
    starts = kind != _SPECIAL
    meet = (kind[1:] != kind[:-1]) | (kind[1:] == _CONTRACTION)
    starts[1:] &= (codes[1:] & _BLANK_FIRST > 0) | (meet & (codes[:-1] & _LONE_BLANK == 0))
    return starts


def _codes(texts: list[str], special: np.ndarray) -> np.ndarray:
    codes = [_kind_of(text) | _BLANK_FIRST * text.startswith(" ") | _LONE_BLANK * (text == " ") for text in texts]
    return np.where(special, _SPECIAL, codes).astype(np.uint8)


def _kind_of(text: str) -> int:
    if "\ufffd" in text:
        return _CUT
    if text in _CONTRACTIONS:
        return _CONTRACTION
    if not (bare := text.removeprefix(" ")) or bare[0].isspace():
        return _BLANK
    return {"L": _LETTERS, "N": _DIGITS}.get(unicodedata.category(bare[0])[0], _OTHERS)
