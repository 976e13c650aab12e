"""Word boundaries in tokenized blocks, for masks of whole words, spans and n-grams.

A word is a piece of the tokenizer's pre-tokenizer: with RoBERTa's, "can't." is three words, can, 't and the full stop.
With byte-level BPE, a word begins at a blank, and where letters, digits and other characters meet, according to a
table of token kinds. In unclear cases, such as a character of several tokens, the pre-tokenizer splits the text.
"""

import itertools
import json
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from roberta_recipe.errors import InputError

_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")  # words by GPT-2's rule
_SPECIAL, _LETTERS, _DIGITS, _OTHERS, _CONTRACTION, _BLANK, _CUT = range(7)  # kind of a token, without a leading blank
_KIND, _BLANK_FIRST, _LONE_BLANK, _UNCLEAR = 7, 8, 16, 32  # bits of a token's code
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}

WordStarts = Callable[[np.ndarray], np.ndarray]


def word_starts(tokenizer: PreTrainedTokenizerBase) -> WordStarts:
    """A function from a block's ids (length,) to word starts (length,) bool. Special tokens do not start a word; a
    token after one does. Raises `InputError` for an unsupported tokenizer."""
    backend = tokenizer.backend_tokenizer
    rule = json.loads(backend.to_str())["pre_tokenizer"] or {"type": "none"}
    types = {part["type"] for part in rule.get("pretokenizers", [rule])}
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = np.zeros(len(tokenizer), dtype=bool)
    special[tokenizer.all_special_ids] = True
    if "BertPreTokenizer" in types:
        begins = ~special & [not token.startswith("##") for token in tokens]
        return lambda ids: begins[ids]
    if "ByteLevel" in types:
        is_gpt2 = rule["type"] == "ByteLevel" and rule["use_regex"]
        token_bytes = [bytes(_BYTE_OF.get(character, 0) for character in token) for token in tokens]
        return ByteLevelWords(backend.pre_tokenizer, token_bytes, special, is_gpt2)
    if "Metaspace" in types:
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
