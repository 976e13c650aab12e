"""Word boundaries among the tokens of a block, for masks of whole words, spans and n-grams.

A word is a piece of the tokenizer's pre-tokenizer: with RoBERTa's, "can't." is three words, can, 't and the full stop.
With byte-level BPE, a word begins at a blank, or where letters, digits and other characters meet: a table of token ids
knows these. Elsewhere, as in a character of several tokens, the pre-tokenizer itself splits the text around it.
"""

import itertools
import json
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from roberta_recipe.errors import InputError

_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")  # words of their own in GPT-2's rule
_SPECIAL, _LETTERS, _DIGITS, _OTHERS, _CONTRACTION, _BLANK, _CUT = range(7)  # what a token is, behind a leading blank
_KIND, _BLANK_FIRST, _LONE_BLANK, _UNCLEAR = 7, 8, 16, 32  # bits of a token's code: that, and more
_ANSWERS = 10_000  # of the pre-tokenizer, that are kept
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}

WordStarts = Callable[[np.ndarray], np.ndarray]


def word_starts(tokenizer: PreTrainedTokenizerBase) -> WordStarts:
    """A function from a block's ids (length,) to the tokens that begin a word: (length,) bool. Special tokens do not; a
    token behind one of them does. Raises `InputError` for a tokenizer of another kind."""
    backend = tokenizer.backend_tokenizer
    rule = json.loads(backend.to_str())["pre_tokenizer"]
    types = set(_types_of(rule))
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = np.zeros(len(tokenizer), dtype=bool)
    special[tokenizer.all_special_ids] = True
    if "BertPreTokenizer" in types:
        return partial(np.take, ~special & [not token.startswith("##") for token in tokens])
    if "ByteLevel" in types:
        is_gpt2 = rule["type"] == "ByteLevel" and rule["use_regex"]
        return ByteLevelWords(backend.pre_tokenizer, [_bytes_of(token) for token in tokens], special, is_gpt2)
    if "Metaspace" in types:
        return partial(_of_table, _codes([token.replace("▁", " ") for token in tokens], special))
    raise InputError(
        f"the tokenizer {tokenizer.name_or_path!r} does not tell where words begin: its pre-tokenizer is "
        f"{', '.join(sorted(types)) or 'none'}; name one with byte-level BPE, WordPiece or SentencePiece, or set "
        "masking_unit=token"
    )


class ByteLevelWords:
    """`word_starts` of byte-level BPE. `is_gpt2`: the pre-tokenizer has GPT-2's rule, which borders follow."""

    def __init__(self, pre_tokenizer: Any, tokens: list[bytes], special: np.ndarray, is_gpt2: bool):
        texts = [token.decode("utf-8", "replace") for token in tokens]
        self._pre_tokenizer, self._tokens, self._special = pre_tokenizer, tokens, special
        self._codes, self._answers = _codes(texts, special), {}
        kind, lone_blank = self._codes & _KIND, self._codes & _LONE_BLANK > 0
        unclear = (kind == _CUT) | ((kind == _BLANK) & ~lone_blank)
        whole = set(_CONTRACTIONS) <= set(texts)  # so a contraction is never made of several tokens
        unclear |= np.array([not is_gpt2 or (not whole and text.startswith("'")) for text in texts])
        self._codes[unclear & ~special] |= _UNCLEAR

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        codes = self._codes[ids]
        starts = _of_borders(codes)
        unclear = codes & _UNCLEAR
        unclear[1:] |= codes[:-1] & codes[1:] << 1 & _LONE_BLANK  # a blank, and a token that begins with another
        if unclear.any():  # ask about the text around it, from what surely begins a word to what does so again
            sure = (codes & _KIND == _SPECIAL) | ((codes & _BLANK_FIRST > 0) & ~unclear.astype(bool))
            borders = np.concatenate(([0], np.flatnonzero(sure), [len(ids)]))
            ends = np.unique(np.searchsorted(borders, np.flatnonzero(unclear), "right"))
            begins = borders[ends - 1]
            begins += self._special[ids[begins]]
            for begin, end in zip(begins.tolist(), borders[ends].tolist(), strict=True):
                starts[begin:end] = self._asked(ids[begin:end])
        return starts

    def _asked(self, ids: np.ndarray) -> list[bool]:
        """By the pre-tokenizer itself, for tokens none of which is special. The same few, like "n’t", come often."""
        if (known := self._answers.get(key := ids.tobytes())) is not None:
            return known
        tokens = [self._tokens[token] for token in ids.tolist()]
        # bytes that are no text, as at the end of a block that ends within a character, count as one each
        text = b"".join(tokens).decode("utf-8", "surrogateescape")
        byte_at = [0, *itertools.accumulate(len(c.encode("utf-8", "surrogateescape")) for c in text)]
        shown = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
        words = {byte_at[start] for _, (start, _) in self._pre_tokenizer.pre_tokenize_str(shown)}
        if len(self._answers) == _ANSWERS:
            self._answers.clear()
        self._answers[key] = [begin in words for begin in itertools.accumulate(map(len, tokens[:-1]), initial=0)]
        return self._answers[key]


def _of_table(codes: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return _of_borders(codes[ids])


def _of_borders(code: np.ndarray) -> np.ndarray:
    """A blank begins a word, and belongs to it where it is a token of its own; and two kinds meet between words."""
    kind = code & _KIND
    starts = kind != _SPECIAL
    meet = (kind[1:] != kind[:-1]) | (kind[1:] == _CONTRACTION)
    starts[1:] &= (code[1:] & _BLANK_FIRST > 0) | (meet & (code[:-1] & _LONE_BLANK == 0))
    return starts


def _codes(texts: list[str], special: np.ndarray) -> np.ndarray:
    """The code of each token."""
    found = [_kind_of(t) | _BLANK_FIRST * t.startswith(" ") | _LONE_BLANK * (t == " ") for t in texts]
    return np.where(special, _SPECIAL, found).astype(np.uint8)


def _kind_of(text: str) -> int:
    if "\ufffd" in text:
        return _CUT
    if text in _CONTRACTIONS:
        return _CONTRACTION
    if not (bare := text.removeprefix(" ")) or bare[0].isspace():
        return _BLANK
    return {"L": _LETTERS, "N": _DIGITS}.get(unicodedata.category(bare[0])[0], _OTHERS)


def _types_of(rule: Any) -> Iterator[str]:
    """The types of a pre-tokenizer and of those that it is a sequence of."""
    if rule:
        yield rule["type"]
        for part in rule.get("pretokenizers", ()):
            yield from _types_of(part)


def _bytes_of(token: str) -> bytes:
    """What a token of byte-level BPE stands for; a special token has no text."""
    return bytes(_BYTE_OF.get(character, 0) for character in token)
