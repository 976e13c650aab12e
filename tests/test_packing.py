"""Input formats: exact layout, nothing lost, nothing cut, and a state that a packer can be restored from."""

import copy
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roberta_recipe.data.formats import PACKERS
from roberta_recipe.data.packing import PackState, contiguous, doc_sentences, full_sentences

BOS, EOS = 0, 2
IDS = {"bos_id": BOS, "eos_id": EOS}
sentences = st.lists(st.integers(10, 99), min_size=1, max_size=30)
some_documents = st.lists(st.lists(sentences, max_size=6), max_size=8)


def pack(packer, documents, length):
    state = PackState()
    packed = packer(documents, state, max_seq_length=length, **IDS)
    return [columns["input_ids"] for columns in packed], state


def test_layout_of_full_sentences():
    documents = [[[11, 12], [13]], [[21, 22, 23]]]
    blocks, state = pack(full_sentences, documents, 32)
    #  <s> d1s1    </s> d1s2 </s> </s> d2s1      </s>
    assert blocks == [[0, 11, 12, 2, 13, 2, 2, 21, 22, 23, 2]]
    assert (state.documents, state.sentences, state.split_sentences, state.tokens) == (2, 3, 0, 6)


def test_a_block_is_as_full_as_whole_sentences_allow():
    documents = [[[11, 12], [13, 14], [15]]]
    assert pack(full_sentences, documents, 7)[0] == [[0, 11, 12, 2, 13, 14, 2], [0, 15, 2]]
    assert pack(full_sentences, documents, 6)[0] == [[0, 11, 12, 2], [0, 13, 14, 2, 15, 2][:6]]


def test_a_boundary_that_finds_its_block_full_opens_the_next():
    assert pack(full_sentences, [[[11, 12]], [[21]]], 4)[0] == [[0, 11, 12, 2], [0, 2, 21, 2]]


def test_a_sentence_longer_than_a_block_is_split_and_counted():
    blocks, state = pack(full_sentences, [[[10], list(range(20, 31)), [40]]], 5)
    assert blocks == [[0, 10, 2], [0, 20, 21, 22, 23], [0, 24, 25, 26, 27], [0, 28, 29, 30, 2], [0, 40, 2]]
    assert (state.split_sentences, state.sentences, state.tokens) == (1, 3, 13)
    # the longest sentence that fits is not split
    assert pack(full_sentences, [[[10, 11, 12]]], 5)[1].split_sentences == 0
    assert pack(full_sentences, [[[10, 11, 12, 13]]], 5)[1].split_sentences == 1


def test_layout_of_contiguous():
    blocks, state = pack(contiguous, [[[11, 12], [13]], [[21, 22, 23]]], 4)
    assert blocks == [[0, 11, 12, 13], [0, 2, 21, 22], [0, 23, 2]]
    assert (state.documents, state.tokens) == (2, 6)


def stream_of(documents, between):
    """The ids that the joined blocks must have without their `<s>`."""
    ids = []
    for document in filter(None, documents):
        if ids and between:
            ids.append(EOS)
        for sentence in document:
            ids += sentence + ([EOS] if between else [])
        ids += [] if between else [EOS]
    return ids


@given(some_documents, st.integers(4, 40))
def test_full_sentences_loses_nothing_and_cuts_only_what_cannot_fit(documents, length):
    blocks, state = pack(full_sentences, documents, length)
    assert all(block[0] == BOS and BOS not in block[1:] and 2 <= len(block) <= length for block in blocks)
    assert [token for block in blocks for token in block[1:]] == stream_of(documents, between=True)
    flat = [sentence for document in documents for sentence in document]
    assert state.tokens == sum(map(len, flat)) and state.sentences == len(flat)
    assert state.split_sentences == sum(len(sentence) + 2 > length for sentence in flat)
    assert sum(block[-1] != EOS for block in blocks) >= state.split_sentences  # a split ends without </s>
    if not state.split_sentences:
        assert all(block[-1] == EOS for block in blocks)
        for block, following in itertools.pairwise(blocks):  # greedy: the first sentence of the next block did not fit
            first = following[1 : following.index(EOS, 1) + 1]
            assert len(block) + len(first) > length
    assert (state.blocks, state.documents, state.empty_documents) == (len(blocks), len(documents), documents.count([]))


@given(some_documents, st.integers(4, 40))
def test_a_contiguous_block_names_the_document_that_it_begins_in(documents, length):
    state, position = PackState(), 0
    owners = [number for number, document in enumerate(documents) for _ in [*itertools.chain(*document), *document[:1]]]
    for columns in contiguous(documents, state, max_seq_length=length, **IDS):
        assert columns["document"] == owners[position]
        position += len(columns["input_ids"]) - 1
    assert position == len(owners)


def sequences_of(columns):
    """The sequences of a block, by its column."""
    pairs = zip(columns["input_ids"], columns["sequence"].tolist(), strict=True)
    return [[token for token, _ in own] for _, own in itertools.groupby(pairs, key=lambda pair: pair[1])]


@given(some_documents, st.integers(4, 40))
def test_sequences_of_doc_sentences_are_those_of_each_document_alone(documents, length):
    state = PackState()
    blocks = list(doc_sentences(documents, state, max_seq_length=length, **IDS))
    alone = [pack(full_sentences, [document], length) for document in documents]
    expected = [sequence for sequences, _ in alone for sequence in sequences]
    assert sorted(sequence for columns in blocks for sequence in sequences_of(columns)) == sorted(expected)
    for columns in blocks:
        assert 2 <= len(columns["input_ids"]) <= length and columns["sequence"].dtype == "uint16"
        first = sequences_of(columns)[0]
        assert first in alone[columns["document"]][0]
    assert state.blocks == len(blocks) and state.documents == len(documents)
    for name in ("sentences", "split_sentences", "tokens"):
        assert getattr(state, name) == sum(getattr(its, name) for _, its in alone)


def test_blocks_of_doc_sentences_are_as_full_as_those_of_full_sentences():
    """Documents of 40 to 900 tokens in blocks of 512: a step has as many tokens."""
    rng = random.Random(0)
    documents = [[[9] * rng.randint(5, 40) for _ in range(rng.randint(2, 40))] for _ in range(400)]
    fill = {}
    for packer in (doc_sentences, full_sentences):
        blocks, _ = pack(packer, documents, 512)
        fill[packer.__name__] = sum(map(len, blocks)) / (512 * len(blocks))
    assert fill["doc_sentences"] > 0.97 * fill["full_sentences"] > 0.9, fill


@given(some_documents, st.integers(4, 40))
def test_contiguous_loses_nothing_and_fills_every_block_but_the_last(documents, length):
    blocks, state = pack(contiguous, documents, length)
    assert [token for block in blocks for token in block[1:]] == stream_of(documents, between=False)
    assert all(block[0] == BOS for block in blocks)
    assert all(len(block) == length for block in blocks[:-1])
    assert state.tokens == sum(len(s) for d in documents for s in d)


@pytest.mark.parametrize("name", [name for name in PACKERS if "_pair" not in name])  # which test_pairs.py has
@given(documents=some_documents, length=st.integers(4, 40))
def test_a_packer_restored_from_any_block_resumes_as_if_it_had_not_been_interrupted(name, documents, length):
    whole, end = pack(PACKERS[name], documents, length)
    state = PackState()
    saved = [copy.deepcopy(state)]
    for _ in PACKERS[name](iter(documents), state, max_seq_length=length, **IDS):
        saved.append(copy.deepcopy(state))
    assert len(saved) == len(whole) + 1
    for done, state in enumerate(saved):
        rest = PACKERS[name](documents[state.documents :], state, max_seq_length=length, **IDS)
        assert [columns["input_ids"] for columns in rest] == whole[done:]
        assert state == end
