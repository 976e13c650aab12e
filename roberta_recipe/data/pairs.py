"""Pairs of segments (BERT; RoBERTa, section 4.2; ALBERT, arXiv 1909.11942, section 3.1): `<s> A </s> </s> B </s>`.

NSP: B follows A (label 0), or is from another document of the same chunk (label 1, as in `BertForPreTraining`; then the
text after A is used again). SOP: A and B follow each other (0) or are swapped (1, as in `AlbertForPreTraining`).
Text without a second sentence is a sequence without a label. Pass e has the pairs of pass e mod 10.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from roberta_recipe.data import NSP
from roberta_recipe.data.packing import Columns, Document, PackedSequence, columns_of, pack_sequences

_TRIES = 16  # documents drawn to find a B that fits
VERSIONS = 10  # different pairs drawn from a text (BERT's code: dupe_factor)
SHORT = 0.1  # share of shorter pairs (BERT's code: short_seq_prob)


def segment_pair(
    documents: list[Document], max_seq_length: int, *ids: Any, label: str, **options: Any
) -> Iterator[Columns]:
    """SEGMENT-PAIR: one pair per block, as many sentences as fit, split into A and B at random."""
    return (columns_of([pair], label) for pair in _pairs(documents, max_seq_length, *ids, label=label, **options))


def sentence_pair(
    documents: list[Document], max_seq_length: int, *ids: Any, label: str, **options: Any
) -> Iterator[Columns]:
    """SENTENCE-PAIR: A and B are one sentence each; several of these short pairs share a block."""
    pairs = _pairs(documents, max_seq_length, *ids, label=label, most_sentences=2, **options)
    return pack_sequences(pairs, max_seq_length, label)


def _pairs(
    documents: list[Document],
    max_seq_length: int,
    bos_id: int,
    eos_id: int,
    key: tuple[int, ...] = (),
    *,
    label: str,
    most_sentences: int | None = None,
    short: float = 0.0,
    share_of_ones: float = 0.5,
) -> Iterator[PackedSequence]:
    """Pairs and single segments in text order. A share `short` of them is cut to a random length, at most the block's
    and at least one sentence."""
    room = max_seq_length - 4  # <s> A </s> </s> B </s>
    draws = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    donors = _Donors(documents) if label == NSP else None
    for number, sentences in enumerate(documents):
        rest = [*sentences]
        while rest:
            text, length = _fitting(rest, room, most_sentences), room
            if short and draws.random() < short:
                length = int(draws.integers(2, room + 1))
                text = text[: max(1, int(np.searchsorted(np.cumsum([*map(len, text)]), length, side="right")))]
                length = max(length, sum(map(len, text)))
            if len(text) == 1 or (donors and donors.numbers == [number]):
                _consume(rest, text)
                ids = [bos_id, *(token for sentence in text for token in sentence), eos_id]
                yield PackedSequence(ids, number, len(ids))
                continue
            cut, value = int(draws.integers(1, len(text))), int(draws.random() < share_of_ones)
            first, second = text[:cut], text[cut:]
            _consume(rest, first if donors and value else text)
            if value and donors:
                most = None if len(rest) > len(second) and most_sentences is None else len(second)
                second = donors.draw(number, length - sum(map(len, first)), most, draws)
            elif value:
                first, second = second, first
            one, two = ([token for sentence in part for token in sentence] for part in (first, second))
            yield PackedSequence([bos_id, *one, eos_id, eos_id, *two, eos_id], number, len(one) + 2, value)


def _fitting(sentences: Document, room: int, most: int | None, start: int = 0) -> Document:
    """The sentences from `start` on that fit, at most `most`; a first sentence that is too long is truncated."""
    size, end = 0, start
    for sentence in itertools.islice(sentences, start, None if most is None else start + most):
        size += len(sentence)
        if size > room:
            break
        end += 1
    return sentences[start:end] or [sentences[start][:room]]


def _consume(rest: Document, used: Document) -> None:
    """Remove `used`, the first sentences of `rest` or a prefix of its first sentence."""
    cut = len(used) == 1 and len(used[0]) < len(rest[0])
    rest[: len(used)] = [rest[0][len(used[0]) :]] if cut else []


class _Donors:
    """Sampler of NSP's negative examples: draws segment B from another document of the chunk."""

    def __init__(self, documents: list[Document]):
        self._documents = {number: sentences for number, sentences in enumerate(documents) if sentences}
        self.numbers = [*self._documents]
        self._sizes = {number: np.array([*map(len, sentences)]) for number, sentences in self._documents.items()}
        # tokens from each sentence to the end of its document
        self._rest = {number: sizes[::-1].cumsum()[::-1] for number, sizes in self._sizes.items()}

    def draw(self, number: int, room: int, most: int | None, draws: np.random.Generator) -> Document:
        """B from a document other than `number`: at most `most` sentences, beginning with a random one that fits. With
        `most=None`, preferably with at least `room` tokens left, so that B's length does not give the label away."""
        others = [n for n in self.numbers if n != number] if len(self.numbers) < _TRIES else self.numbers
        for wanted in [room] * _TRIES * (most is None) + [0] * _TRIES:
            donor = others[int(draws.integers(len(others)))]
            begins = np.flatnonzero((self._rest[donor] >= wanted) & (self._sizes[donor] <= room))
            if donor != number and len(begins):
                return _fitting(self._documents[donor], room, most, int(begins[draws.integers(len(begins))]))
        other = next(n for n in self.numbers if n != number)
        return _fitting(self._documents[other], room, most)
