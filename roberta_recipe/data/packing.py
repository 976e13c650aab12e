"""Input formats (paper, section 4.2; fairseq's `TokenBlockDataset`): tokenized documents become blocks.

A packer is a generator over documents (a document is a list of sentences, a sentence a list of token ids), and all
that it remembers is its `PackState`. The state that is saved at a block, given to a new packer with the documents from
`state.documents` on, resumes the packing as if it had not been interrupted.

A packer yields columns: `input_ids`, a list of token ids; `document`, the number in its file of the document in which
the block begins; and whatever else its format has, either a whole number a block (`next_sentence_label`) or an array as
long as `input_ids`, of the type that it should have on disk (`token_type_ids`). Token cache, reader, repetition,
collator, fixed masks and evaluation carry all columns without knowing them.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Document = list[list[int]]
Columns = dict[str, Any]  # of a block
NO_LABEL = -100
_BLOCKS_IN_WORK = 16  # unfinished blocks, of formats with several sequences in a block


@dataclass
class PackState:
    """Where a packer stands. Token counts are of the text: `<s>` and `</s>` are not among them."""

    open: list[int] = field(default_factory=list)  # the block being filled; empty before its <s>
    documents: int = 0  # documents wholly taken; the next document is in progress
    empty_documents: int = 0  # of these, the documents without a sentence
    item: int = 0  # sentences (and document boundaries) of the document in progress already taken
    token: int = 0  # tokens of the sentence in progress already taken, where it is split
    sentences: int = 0
    split_sentences: int = 0  # longer than a block, so cut into several
    tokens: int = 0
    blocks: int = 0
    begun_in: int = 0  # the document in which the block being filled begins
    version: int = 0  # of the pairs (`pairs.VERSIONS`)
    # what another format has to remember, as JSON can hold it; its values are replaced and never changed
    extra: dict[str, Any] = field(default_factory=dict)


def full_sentences(
    documents: Iterable[Document], state: PackState, *, max_seq_length: int, bos_id: int, eos_id: int
) -> Iterator[Columns]:
    """FULL-SENTENCES: whole sentences, greedily, across documents; at most `max_seq_length` ids a block.

    `<s> d1s1 </s> d1s2 </s> </s> d2s1 </s>`: one `<s>` a block, `</s>` after every sentence, another `</s>` between
    two documents (it moves to the next block where this block is full, as in fairseq's `--sample-break-mode complete`).
    Taking `<s>` off and joining the blocks gives back exactly the sentences and boundaries that went in. A sentence
    longer than a block is split into blocks of its own and counted; fairseq makes a block of it that is too long, which
    a size filter may drop.
    """
    room = max_seq_length - 1  # after <s>
    state.open = state.open or [bos_id]
    for sentences in documents:
        boundary = [[eos_id]] if sentences and state.documents > state.empty_documents else []
        items = boundary + [sentence + [eos_id] for sentence in sentences]
        while state.item < len(items):
            item = items[state.item]
            too_long = len(item) > room
            if len(state.open) > 1 and (too_long or len(state.open) + len(item) > max_seq_length):
                yield _close(state, bos_id)
                continue
            if too_long:
                state.split_sentences += state.token == 0
                while len(item) - state.token > room:
                    state.open += item[state.token : state.token + room]
                    state.token += room
                    state.tokens += room
                    yield _close(state, bos_id)
                item = item[state.token :]
                state.token = 0
            state.open += item
            state.tokens += len(item) - 1
            state.sentences += state.item >= len(boundary)
            state.item += 1
        next_document(state, sentences)
    if len(state.open) > 1:
        yield _close(state, bos_id)


def contiguous(
    documents: Iterable[Document], state: PackState, *, max_seq_length: int, bos_id: int, eos_id: int
) -> Iterator[Columns]:
    """Fixed-size chunks: `<s>` and the next `max_seq_length - 1` ids, `</s>` after every document, nothing dropped.

    Only the last block is shorter, so batches need no padding and no attention mask.
    """
    state.open = state.open or [bos_id]
    for sentences in documents:
        ids = [token for sentence in sentences for token in sentence] + [eos_id] if sentences else []
        while state.token < len(ids):
            if len(state.open) == 1:
                state.begun_in = state.documents
            taken = ids[state.token : state.token + max_seq_length - len(state.open)]
            state.open += taken
            state.token += len(taken)
            state.tokens += len(taken) - (state.token == len(ids))
            if len(state.open) == max_seq_length:
                yield _close(state, bos_id)
        state.token = 0
        state.sentences += len(sentences)
        next_document(state, sentences)
    if len(state.open) > 1:
        yield _close(state, bos_id)


def doc_sentences(
    documents: Iterable[Document], state: PackState, *, max_seq_length: int, bos_id: int, eos_id: int
) -> Iterator[Columns]:
    """DOC-SENTENCES: as `full_sentences`, but a sequence ends with its document (fairseq's `complete_doc`).

    Sequences are short then, so a block is as many of them as fit: `<s> d1s1 </s> d1s2 </s> <s> d2s1 </s>`, with the
    column `sequence`, the number of each token's sequence in the block, by which the model keeps them apart. So a block
    has as many tokens as one of `full_sentences`, and a step of so many blocks too (paper, section 4.2), while the
    order of blocks stays a function of their positions. A finished sequence goes into the fullest of the unfinished
    blocks (`_BLOCKS_IN_WORK` at most) that has room for it.
    """
    room = max_seq_length - 1  # after <s>
    state.open = state.open or [bos_id]
    for sentences in documents:
        items = [sentence + [eos_id] for sentence in sentences]
        while state.item < len(items):
            item = items[state.item][state.token :]
            if len(state.open) > 1 and len(state.open) + min(len(item), room) > max_seq_length:
                yield from _put_away(state, max_seq_length, bos_id)
                continue
            state.split_sentences += state.token == 0 and len(item) > room
            taken = item[:room]
            state.open += taken
            state.tokens += len(taken) - (len(taken) == len(item))
            if len(taken) == len(item):
                state.sentences += 1
                state.item, state.token = state.item + 1, 0
            else:
                state.token += len(taken)
        if len(state.open) > 1:
            yield from _put_away(state, max_seq_length, bos_id)
        next_document(state, sentences)
    yield from rest_of_blocks(state)


def _put_away(state: PackState, max_seq_length: int, bos_id: int) -> Iterator[Columns]:
    """Put the finished sequence `state.open` into a block."""
    ids, state.open = state.open, [bos_id]
    yield from put_into_block(state, state.documents, Sequence(ids, len(ids)), max_seq_length)


class Sequence(NamedTuple):
    """What the model sees by itself: a block, or one of several in a block."""

    ids: list[int]  # with special tokens
    first: int  # of the ids, those of the first of two segments, up to the `</s>` behind it; all where there is one
    label: int = NO_LABEL  # of the pair of segments


def put_into_block(
    state: PackState, document: int, sequence: Sequence, max_seq_length: int, label: str | None = None
) -> Iterator[Columns]:
    """Put a sequence of a document into the fullest unfinished block with room for it, or a new block; yields the
    fullest block where there are too many. `label` names the column of the labels of pairs."""
    in_work = state.extra.get("in_work", [])  # (document of the first sequence, the sequences) of each block
    sizes = [_size(sequences) for _, sequences in in_work]
    fitting = [n for n, size in enumerate(sizes) if size + len(sequence.ids) <= max_seq_length]
    if fitting:
        best = max(fitting, key=sizes.__getitem__)
        begun_in, sequences = in_work[best]
        in_work = [*in_work[:best], [begun_in, [*sequences, sequence]], *in_work[best + 1 :]]
    else:
        in_work = [*in_work, [document, [sequence]]]
    state.extra = {**state.extra, "in_work": in_work}
    if len(in_work) > _BLOCKS_IN_WORK:
        yield _fullest(state, label)


def rest_of_blocks(state: PackState, label: str | None = None) -> Iterator[Columns]:
    """The unfinished blocks."""
    while state.extra.get("in_work"):
        yield _fullest(state, label)


def _fullest(state: PackState, label: str | None) -> Columns:
    in_work = state.extra["in_work"]
    best = max(range(len(in_work)), key=lambda n: _size(in_work[n][1]))
    document, sequences = in_work[best]
    state.extra = {**state.extra, "in_work": [*in_work[:best], *in_work[best + 1 :]]}
    sequences = [Sequence(*sequence) for sequence in sequences]  # which JSON makes lists of
    numbers = np.repeat(np.arange(len(sequences)), [len(sequence.ids) for sequence in sequences])
    return {**columns_of(state, document, sequences, label), "sequence": numbers.astype(np.uint16)}


def _size(sequences: list[Sequence]) -> int:
    return sum(len(ids) for ids, *_ in sequences)


def columns_of(state: PackState, document: int, sequences: list[Sequence], label: str | None) -> Columns:
    """A finished block of sequences. With `label`, the column of the labels of pairs, NO_LABEL except at the `<s>` of a
    pair, and `token_type_ids`, 1 in second segments."""
    state.blocks += 1
    ids = [*itertools.chain.from_iterable(sequence.ids for sequence in sequences)]
    if label is None:
        return {"input_ids": ids, "document": document}
    labels, types, start = np.full(len(ids), NO_LABEL, dtype=np.int8), np.zeros(len(ids), dtype=np.uint8), 0
    for its_ids, first, its_label in sequences:
        labels[start], types[start + first : start + len(its_ids)] = its_label, 1
        start += len(its_ids)
    return {"input_ids": ids, "document": document, "token_type_ids": types, label: labels}


def _close(state: PackState, bos_id: int) -> Columns:
    """Finish the open block and open the next block."""
    block, state.open = state.open, [bos_id]
    state.blocks += 1
    document, state.begun_in = state.begun_in, state.documents
    return {"input_ids": block, "document": document}


def next_document(state: PackState, sentences: Document) -> None:
    """The document in progress is wholly taken."""
    state.item = 0
    state.documents += 1
    state.empty_documents += not sentences
