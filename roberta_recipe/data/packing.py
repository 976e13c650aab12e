"""Packing of tokenized documents into blocks: the input formats (paper, section 4.2; fairseq's `TokenBlockDataset`).

A packer is a pure function `pack(documents, max_seq_length, bos_id, eos_id, key)` of the documents of a chunk; `key`
(source, file, chunk, version) seeds its random choices. The layout depends on lengths and `key`, not on ids, so that
the same call packs a second column (`phrases`). A packer yields the columns of each block: `input_ids`, a list;
`document`, the index in the chunk of the block's first document; others, an integer or an array as long as `input_ids`.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from roberta_recipe.data import IGNORED

Document = list[list[int]]  # sentences of token ids
Columns = dict[str, Any]  # of a block
Packer = Callable[[list[Document], int, int, int, tuple[int, ...]], Iterable[Columns]]
_OPEN_BLOCKS = 16  # open bins of `pack_sequences`


class Block(dict):
    """The columns of a block: {"input_ids": (<= max_seq_length,) uint16 or int32, ...}. `id`: `order.block_id`;
    `epoch`: the pass; `document`: row number of the block's first document in its file."""

    def __init__(self, columns: Columns, id: int, epoch: int = 0, document: int = 0):
        super().__init__(columns)
        self.id, self.epoch, self.document = id, epoch, document


class PackedSequence(NamedTuple):
    """Tokens that attend to each other: a whole block, or one of several sequences in it."""

    ids: list[int]  # with special tokens
    document: int
    first: int  # length of the first segment with its special tokens; the whole length without a second one
    label: int = IGNORED  # of the pair of segments


def full_sentences(
    documents: list[Document], max_seq_length: int, bos_id: int, eos_id: int, key: tuple[int, ...] = ()
) -> Iterator[Columns]:
    """FULL-SENTENCES: `<s> d1s1 </s> d1s2 </s> </s> d2s1 </s>`, as many whole sentences as fit, across documents
    (fairseq's `--sample-break-mode complete`). If a block is full, the `</s>` between two documents begins the next. A
    sentence longer than a block begins a new block and is split; fairseq makes an overlong block of it.
    """
    room = max_seq_length - 1  # after <s>
    block, document = [bos_id], 0
    for number, ids in _with_ends(documents, eos_id):
        if len(block) > 1 and len(block) + len(ids) > max_seq_length:
            yield {"input_ids": block, "document": document}
            block = [bos_id]
        if len(block) == 1:
            document = number
        while len(ids) > room:
            yield {"input_ids": [bos_id, *ids[:room]], "document": number}
            ids = ids[room:]
        block += ids
    if len(block) > 1:
        yield {"input_ids": block, "document": document}


def _with_ends(documents: list[Document], eos_id: int) -> Iterator[tuple[int, list[int]]]:
    """(document, ids) of each sentence with its `</s>`, and of the `</s>` between two documents."""
    texts = [(number, sentences) for number, sentences in enumerate(documents) if sentences]
    for rank, (number, sentences) in enumerate(texts):
        if rank:
            yield number, [eos_id]
        yield from ((number, [*sentence, eos_id]) for sentence in sentences)


def contiguous(
    documents: list[Document], max_seq_length: int, bos_id: int, eos_id: int, key: tuple[int, ...] = ()
) -> Iterator[Columns]:
    """Blocks of fixed size: `<s>` and the next `max_seq_length - 1` ids, with `</s>` after every document. Only the
    last block of a chunk is shorter."""
    texts = [[*itertools.chain.from_iterable(sentences), eos_id] if sentences else [] for sentences in documents]
    ids, ends = [*itertools.chain.from_iterable(texts)], np.cumsum([len(text) for text in texts])
    for start in range(0, len(ids), max_seq_length - 1):
        document = int(np.searchsorted(ends, start, side="right"))
        yield {"input_ids": [bos_id, *ids[start : start + max_seq_length - 1]], "document": document}


def doc_sentences(
    documents: list[Document], max_seq_length: int, bos_id: int, eos_id: int, key: tuple[int, ...] = ()
) -> Iterator[Columns]:
    """DOC-SENTENCES: as `full_sentences`, but sequences end with their document (fairseq's `complete_doc`). Short
    sequences share a block, `<s> d1s1 </s> d1s2 </s> <s> d2s1 </s>`, so that a step has as many tokens as in
    FULL-SENTENCES (paper, section 4.2)."""
    sequences = (
        PackedSequence(block["input_ids"], number, len(block["input_ids"]))
        for number, sentences in enumerate(documents)
        for block in full_sentences([sentences], max_seq_length, bos_id, eos_id)
    )
    return pack_sequences(sequences, max_seq_length)


def pack_sequences(
    sequences: Iterable[PackedSequence], max_seq_length: int, label: str | None = None
) -> Iterator[Columns]:
    """Best-fit bin packing: each sequence goes into the fullest open block with room for it. The column `sequence`, the
    index of each token's sequence in its block, is for the attention mask. `label`: as in `columns_of`."""
    open_blocks: list[list[PackedSequence]] = []
    for sequence in sequences:
        fitting = [block for block in open_blocks if _size(block) + len(sequence.ids) <= max_seq_length]
        if fitting:
            max(fitting, key=_size).append(sequence)
        else:
            open_blocks.append([sequence])
        if len(open_blocks) > _OPEN_BLOCKS:
            yield _fullest(open_blocks, label)
    while open_blocks:
        yield _fullest(open_blocks, label)


def _size(block: list[PackedSequence]) -> int:
    return sum(len(sequence.ids) for sequence in block)


def _fullest(open_blocks: list[list[PackedSequence]], label: str | None) -> Columns:
    block = open_blocks.pop(open_blocks.index(max(open_blocks, key=_size)))
    numbers = np.repeat(np.arange(len(block)), [len(sequence.ids) for sequence in block])
    return {**columns_of(block, label), "sequence": numbers.astype(np.uint16)}


def columns_of(block: list[PackedSequence], label: str | None) -> Columns:
    """The columns of a block. With `label` also that column, -100 except at the `<s>` of a labelled pair, and
    `token_type_ids`, 1 in second segments."""
    ids = [*itertools.chain.from_iterable(sequence.ids for sequence in block)]
    columns: Columns = {"input_ids": ids, "document": block[0].document}
    if label is None:
        return columns
    labels, types, start = np.full(len(ids), IGNORED, dtype=np.int8), np.zeros(len(ids), dtype=np.uint8), 0
    for sequence in block:
        labels[start] = sequence.label
        types[start + sequence.first : start + len(sequence.ids)] = 1
        start += len(sequence.ids)
    return {**columns, "token_type_ids": types, label: labels}
