"""Input formats: exact layout, no lost tokens, no cuts except where a sentence does not fit."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roberta_recipe.data.packing import contiguous, doc_sentences, full_sentences

BOS, EOS = 0, 2
sentences = st.lists(st.integers(10, 99), min_size=1, max_size=30)
some_documents = st.lists(st.lists(sentences, max_size=6), max_size=8)


def pack(packer, documents, length):
    return [columns["input_ids"] for columns in packer(documents, length, BOS, EOS)]


@pytest.mark.parametrize(
    ("packer", "length", "documents", "blocks"),
    [
        #                                                           <s> d1s1    </s> d1s2 </s> </s> d2s1      </s>
        (full_sentences, 32, [[[11, 12], [13]], [[21, 22, 23]]], [[0, 11, 12, 2, 13, 2, 2, 21, 22, 23, 2]]),
        (full_sentences, 7, [[[11, 12], [13, 14], [15]]], [[0, 11, 12, 2, 13, 14, 2], [0, 15, 2]]),
        (full_sentences, 4, [[[11, 12]], [[21]]], [[0, 11, 12, 2], [0, 2, 21, 2]]),  # the boundary opens a block
        (full_sentences, 5, [[[10], [*range(20, 25)], [40]]], [[0, 10, 2], [0, 20, 21, 22, 23], [0, 24, 2, 40, 2]]),
        (contiguous, 4, [[[11, 12], [13]], [[21, 22, 23]]], [[0, 11, 12, 13], [0, 2, 21, 22], [0, 23, 2]]),
    ],
)
def test_layout(packer, length, documents, blocks):
    assert pack(packer, documents, length) == blocks


@given(some_documents, st.integers(4, 40), st.integers(0, 8))
def test_full_sentences_loses_nothing_and_cuts_only_what_cannot_fit(documents, length, cut):
    blocks = pack(full_sentences, documents, length)
    assert all(block[0] == BOS and BOS not in block[1:] and 2 <= len(block) <= length for block in blocks)
    texts = [[token for sentence in document for token in (*sentence, EOS)] for document in documents if document]
    joined = [token for number, text in enumerate(texts) for token in [EOS] * (number > 0) + text]
    assert [token for block in blocks for token in block[1:]] == joined
    if all(len(sentence) + 2 <= length for document in documents for sentence in document):
        assert all(block[-1] == EOS for block in blocks)
        for block, following in itertools.pairwise(blocks):  # greedy: the first sentence of the next block did not fit
            assert len(block) + following.index(EOS, 1) > length
    parts = sum(len(pack(full_sentences, part, length)) for part in (documents[:cut], documents[cut:]))
    assert parts <= len(blocks) + 1  # a chunk's end costs a block at most


@given(some_documents, st.integers(4, 40))
def test_contiguous_fills_every_block_but_the_last_and_names_the_document_of_its_first_token(documents, length):
    owned = [(token, n) for n, own in enumerate(documents) if own for token in (*itertools.chain(*own), EOS)]
    blocks = [*contiguous(documents, length, BOS, EOS)]
    assert [token for block in blocks for token in block["input_ids"][1:]] == [token for token, _ in owned]
    assert [block["document"] for block in blocks] == [owner for _, owner in owned][:: length - 1]
    assert all(block["input_ids"][0] == BOS for block in blocks)
    assert all(len(block["input_ids"]) == length for block in blocks[:-1])


@given(some_documents, st.integers(4, 40))
def test_sequences_of_doc_sentences_are_those_of_each_document_alone(documents, length):
    alone = [pack(full_sentences, [document], length) for document in documents]
    found = []
    for columns in doc_sentences(documents, length, BOS, EOS):
        ids, numbers = columns["input_ids"], columns["sequence"]
        assert 2 <= len(ids) <= length and numbers.dtype == "uint16" and len(numbers) == len(ids)
        assert (np.diff(numbers.astype(int)) == (np.array(ids[1:]) == BOS)).all()
        sequences = [part.tolist() for part in np.split(ids, np.flatnonzero(np.equal(ids, BOS)))[1:]]
        assert sequences[0] in alone[columns["document"]]
        found += sequences
    assert sorted(found) == sorted(itertools.chain(*alone))


def test_blocks_of_doc_sentences_are_as_full_as_those_of_full_sentences():
    """Documents of 40 to 900 tokens in blocks of 512: equal numbers of tokens per step."""
    rng = random.Random(0)
    documents = [[[9] * rng.randint(5, 40) for _ in range(rng.randint(2, 40))] for _ in range(400)]
    doc, full = (np.mean([*map(len, pack(packer, documents, 512))]) / 512 for packer in (doc_sentences, full_sentences))
    assert doc > 0.97 * full > 0.9
