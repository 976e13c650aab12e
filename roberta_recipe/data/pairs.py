"""Pairs of segments (BERT; RoBERTa, section 4.2; ALBERT, arXiv 1909.11942, section 3.1): `<s> A </s> </s> B </s>`.

NSP: B is what follows A (label 0), or as often text of an earlier document of the same file (label 1), from a sentence
at random on, and what follows A is used again; the labels are those of `BertForPreTraining`. SOP: A and B follow each
other, as often the other way round (label 1, as in `AlbertForPreTraining`). Text without a second sentence is a
sequence without a pair and without a label, so that no label can be told from there being one sentence. Half of the
labelled pairs have each label, unless `share_of_ones` of 0 leaves all in order. Pass e has the pairs of pass e mod 10.
"""

import itertools
import zlib
from collections.abc import Iterable, Iterator

import numpy as np

from roberta_recipe.data.packing import (
    Columns,
    Document,
    PackState,
    Sequence,
    columns_of,
    next_document,
    put_into_block,
    rest_of_blocks,
)

NSP, SOP = "next_sentence_labels", "sentence_order_labels"  # columns
_SPECIAL = 4  # <s> A </s> </s> B </s>
_DONORS = 64  # documents at most of which text for B is kept
_KEPT = 1 << 15  # tokens of theirs, in all: an earlier book serves a whole book
VERSIONS = 10  # of the pairs of a text, taken by the passes in turn (BERT's code: dupe_factor)
REVISION = 5  # of how pairs are made: packed text and checkpoints of another are not taken up
SHORT = 0.1  # the share of shorter pairs, where they are wanted (BERT's code: short_seq_prob)
_SEED = 1


def segment_pair(
    documents: Iterable[Document], state: PackState, *, label: str, short: float = 0.0, **lengths: int
) -> Iterator[Columns]:
    """SEGMENT-PAIR: A and B are as many sentences as fit into a block, divided at random; a pair a block. The share
    `short` of them has a length at random in index of the block's, though not less than a sentence."""
    for document, sequence in _pairs(documents, state, label, most_sentences=None, short=short, **lengths):
        yield columns_of(state, document, [sequence], label)


def sentence_pair(documents: Iterable[Document], state: PackState, *, label: str, **lengths: int) -> Iterator[Columns]:
    """SENTENCE-PAIR: A and B are a sentence each. As many of these short pairs as fit share a block, which the model
    keeps apart, so that a step has as many tokens as with other formats (`packing.doc_sentences`)."""
    for document, sequence in _pairs(documents, state, label, most_sentences=2, **lengths):
        yield from put_into_block(state, document, sequence, lengths["max_seq_length"], label)
    yield from rest_of_blocks(state, label)


def _pairs(
    documents: Iterable[Document],
    state: PackState,
    label: str,
    most_sentences: int | None,
    max_seq_length: int,
    bos_id: int,
    eos_id: int,
    short: float = 0.0,
    share_of_ones: float = 0.5,
) -> Iterator[tuple[int, Sequence]]:
    """(document of A, sequence) of one pair, or one segment without a second, after the other."""
    room = max_seq_length - _SPECIAL
    for sentences in documents:
        while state.item < len(sentences):
            chunk, length = _chunk(state, sentences, room, most_sentences), room
            draws, donors = _draws(state, chunk), state.extra.get("donors", [])
            if short and draws.random() < short:
                chunk, length = _shortened(chunk, int(draws.integers(2, room + 1)))
            if len(chunk) == 1 or (label == NSP and not donors):
                ids = [bos_id, *(token for sentence in chunk for token in sentence), eos_id]
                _take(state, chunk, sentences)
                yield state.documents, Sequence(ids, len(ids))
                continue
            cut = int(draws.integers(1, len(chunk)))
            its_label = int(draws.random() < share_of_ones)
            first, second = chunk[:cut], chunk[cut:]
            _take(state, first if label == NSP and its_label else chunk, sentences)
            if its_label and label == NSP:
                goes_on = state.item + len(second) < len(sentences)
                most = None if goes_on and most_sentences is None else len(second)
                second = _of_another(donors, length - sum(map(len, first)), most, draws)
            elif its_label:
                first, second = second, first
            one, two = ([token for sentence in part for token in sentence] for part in (first, second))
            ids = [bos_id, *one, eos_id, eos_id, *two, eos_id]
            yield state.documents, Sequence(ids, len(one) + 2, its_label)
        if label == NSP and sentences:
            _keep_donor(state, sentences, room)
        next_document(state, sentences)


def _of_another(donors: list[Document], room: int, most: int | None, draws: np.random.Generator) -> list[list[int]]:
    """B from another document, from any sentence on that fits: `most` sentences at most, those that would have followed
    up to the end of their document; or (None), where these fill the block, from where there is as much text. A B that
    ends within a sentence, or mostly begins a document, or is longer or shorter, would tell its label."""
    for wanted in (room, 0) if most is None else (0,):
        if able := [donor for donor in donors if next(_begins(donor, room, wanted), None) is not None]:
            donor = able[int(draws.integers(len(able)))]
            return _fitting(donor[int(draws.choice([*_begins(donor, room, wanted)])) :], room, most)
    return _fitting(donors[int(draws.integers(len(donors)))], room, most)


def _chunk(state: PackState, sentences: Document, room: int, most: int | None) -> list[list[int]]:
    """The next sentences of a document that fit together, `most` at most; of a sentence that is longer, what fits."""
    rest = sentences[state.item][state.token :]
    return _fitting([rest, *sentences[state.item + 1 :]], room, most)


def _shortened(chunk: list[list[int]], length: int) -> tuple[list[list[int]], int]:
    """The first sentences of `chunk`, as many as have `length` tokens but at least one; and that length, or theirs."""
    kept = chunk[:1]
    for sentence in chunk[1:]:
        if sum(map(len, kept)) + len(sentence) > length:
            break
        kept.append(sentence)
    return kept, max(length, sum(map(len, kept)))


def _fitting(sentences: list[list[int]], room: int, most: int | None) -> list[list[int]]:
    taken, size = [], 0
    for sentence in sentences[:most]:
        if size + len(sentence) > room:
            break
        taken.append(sentence)
        size += len(sentence)
    return taken or [sentences[0][:room]]


def _take(state: PackState, taken: list[list[int]], sentences: Document) -> None:
    """Count what `_chunk` gave, or its first sentences, as taken."""
    size = sum(map(len, taken))
    state.tokens += size
    if len(taken) == 1 and state.token + size < len(sentences[state.item]):  # a sentence that is longer than a block
        state.split_sentences += state.token == 0
        state.token += size
    else:
        state.sentences += len(taken)
        state.item, state.token = state.item + len(taken), 0


def _draws(state: PackState, text: list[list[int]]) -> np.random.Generator:
    """The random generator of the next pair of the file (or of what is kept of a document), keyed by its number, its
    text and the version, so that another file and another version have other draws."""
    number = state.extra.get("pairs", 0)
    state.extra = {**state.extra, "pairs": number + 1}
    checksum = zlib.crc32(np.fromiter(itertools.chain.from_iterable(text), dtype=np.int64).tobytes())
    return np.random.Generator(np.random.Philox(key=_SEED, counter=[0, number, checksum, state.version]))


def _begins(sentences: list[list[int]], room: int, wanted: int) -> Iterator[int]:
    """The numbers of the sentences of at most `room` tokens from which on there are `wanted` tokens or more."""
    rest = sum(map(len, sentences))
    for number, sentence in enumerate(sentences):
        if rest < wanted:
            return
        if len(sentence) <= room:
            yield number
        rest -= len(sentence)


def _keep_donor(state: PackState, sentences: Document, room: int) -> None:
    """Keep text of a finished document, from a sentence at random on, and of each before it no more than its share."""
    draws, donors = _draws(state, sentences), state.extra.get("donors", [])
    if len(donors) == _DONORS:
        index = int(draws.integers(_DONORS))
        donors = [*donors[:index], *donors[index + 1 :]]
    share = max(room, _KEPT // (len(donors) + 1))
    begins = [*_begins(sentences, share, share)] or [next(_begins(sentences, share, 0), 0)]
    donors = [_fitting(kept, share, None) for kept in [*donors, sentences[int(draws.choice(begins)) :]]]
    state.extra = {**state.extra, "donors": donors}
