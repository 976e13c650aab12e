"""Pairs of segments and sentences: nothing of the text is lost, labels are what the text says, half of each."""

import collections
import itertools
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roberta_recipe.data import pairs
from roberta_recipe.data.formats import PACKERS
from roberta_recipe.data.packing import NO_LABEL, PackState
from roberta_recipe.data.pairs import NSP, SOP

BOS, EOS = 0, 2
FORMATS = [name for name in PACKERS if "_pair" in name]


def documents_of(rng, count, sentences=(1, 30), length=(3, 40)):
    """Documents whose every token is another number, so that each says where it comes from."""
    numbers = itertools.count(10)
    return [
        [[next(numbers) for _ in range(rng.randint(*length))] for _ in range(rng.randint(*sentences))]
        for _ in range(count)
    ]


def pack(name, documents, length, state=None):
    state = state or PackState()
    return list(PACKERS[name](documents, state, max_seq_length=length, bos_id=BOS, eos_id=EOS)), state


def sequences(columns):
    """(A, B or None, label) of each sequence of a block, from its columns."""
    label = NSP if NSP in columns else SOP
    numbers = columns.get("sequence", [0] * len(columns["input_ids"]))
    rows = zip(columns["input_ids"], columns["token_type_ids"].tolist(), columns[label].tolist(), numbers, strict=True)
    for _, group in itertools.groupby(rows, key=lambda row: row[3]):
        ids, types, labels, _ = map(list, zip(*group, strict=True))
        assert ids[0] == BOS and ids[-1] == EOS and set(labels[1:]) <= {NO_LABEL} and types == sorted(types)
        first, second = ids[: types.count(0)], ids[types.count(0) :]
        if not second:
            assert first.count(EOS) == 1 and labels[0] == NO_LABEL
            yield first[1:-1], None, None
        else:
            assert first[-1] == EOS == second[0] and first.count(EOS) == 1 and second.count(EOS) == 2
            assert labels[0] in (0, 1)
            yield first[1:-1], second[1:-1], labels[0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("length", [24, 128])
def test_pairs_are_what_their_labels_say_and_no_text_is_lost(name, length):
    documents = documents_of(random.Random(0), 60)
    of = {token: number for number, document in enumerate(documents) for sentence in document for token in sentence}
    begins = {sentence[0] for document in documents for sentence in document}
    blocks, state = pack(name, documents, length)
    seen = []
    for columns in blocks:
        assert len(columns["input_ids"]) <= length
        for first, second, label in sequences(columns):
            if label is None:
                seen += first
            elif name.endswith("nsp") and label:
                assert of[second[0]] < of[first[0]]  # of an earlier document
                seen += first
            else:
                in_order = (second, first) if label else (first, second)
                assert in_order[1][0] == in_order[0][-1] + 1 and in_order[1][0] in begins
                seen += [*in_order[0], *in_order[1]]
            for segment in filter(None, (first, second)):
                assert segment == [*range(segment[0], segment[0] + len(segment))]
                assert of[segment[0]] == of[segment[-1]]
            if "sentence" in name and label is not None:
                assert not begins & {*first[1:], *second[1:]}  # a sentence each
    everything = [token for document in documents for sentence in document for token in sentence]
    assert sorted(seen) == everything
    assert state.tokens == len(everything) and state.sentences == sum(map(len, documents))
    assert state.split_sentences == sum(len(sentence) > length - 4 for document in documents for sentence in document)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.endswith("in_order")])
def test_pairs_without_an_objective_follow_each_other(name):
    """The pairs of SOP, of which none is swapped."""
    documents = documents_of(random.Random(1), 40)
    found = [[*map(sequences, pack(its, documents, 128)[0])] for its in (name, name.replace("in_order", "sop"))]
    in_order, sop = ([pair for block in blocks for pair in block] for blocks in found)
    assert {label for _, _, label in in_order} == {0, None} and 1 in {label for _, _, label in sop}
    assert in_order == [(second, first, 0) if label else (first, second, label) for first, second, label in sop]


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.endswith("in_order")])
def test_half_of_the_labelled_pairs_have_each_label(name):
    """And segments are of like length under both, or the length would tell."""
    blocks, _ = pack(name, documents_of(random.Random(1), 800), 128)
    found = [found for columns in blocks for found in sequences(columns)]
    labels = [label for _, _, label in found if label is not None]
    assert len(labels) > 2000 and abs(sum(labels) / len(labels) - 0.5) < 4 * 0.5 / math.sqrt(len(labels))
    fill = [sum(len(b) for _, b, label in found if label == wanted) / labels.count(wanted) for wanted in (0, 1)]
    assert fill[1] == pytest.approx(fill[0], rel=0.25)


@pytest.mark.parametrize("name", [name for name in FORMATS if "in_order" not in name])
def test_a_pair_has_another_label_in_another_version(name):
    """Where A is the same text in two versions: independent halves, so that half of the labels differ."""
    documents, by_version = documents_of(random.Random(1), 400, sentences=(5, 30)), []
    for version in (0, 1, 2, 0):
        blocks, _ = pack(name, documents, 64, PackState(version=version))
        pairs_of = [pair for columns in blocks for pair in sequences(columns) if pair[2] is not None]
        labels = [label for _, _, label in pairs_of]
        assert abs(sum(labels) / len(labels) - 0.5) < 0.05
        # a pair that is swapped has its earlier text behind
        by_version.append({min(one[0], two[0]) if "sop" in name else one[0]: label for one, two, label in pairs_of})
    assert by_version[0] == by_version[3]
    for one, other in itertools.combinations(by_version[:3], 2):
        shared = one.keys() & other.keys()
        assert len(shared) > 300
        assert sum(one[key] != other[key] for key in shared) / len(shared) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.endswith("nsp")])
@pytest.mark.parametrize("sentences", [(1, 30), (300, 500)], ids=["articles", "books"])
def test_how_long_two_segments_are_does_not_tell_their_label(name, sentences):
    """The rule that says most often right in one half of the pairs, from the lengths of both, asked of the other."""
    documents = documents_of(random.Random(6), 24000 // sum(sentences), sentences=sentences)
    found = [found for columns in pack(name, documents, 128)[0] for found in sequences(columns)]
    told = [(len(a) // 8, len(b) // 8, label) for a, b, label in found if label is not None]
    random.Random(7).shuffle(told)
    known, asked = collections.Counter(told[::2]), told[1::2]
    right = sum((known[a, b, 1] > known[a, b, 0]) == label for a, b, label in asked) / len(asked)
    assert len(asked) > 1000 and right < 0.55


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.endswith("in_order")])
def test_many_small_files_have_both_labels(name):
    """A document a file, or the two that NSP needs: what is drawn is not that of the same pair of every other file."""
    labels = []
    for number in range(600):
        few = documents_of(random.Random(number), 1 + name.endswith("nsp"), sentences=(2, 4), length=(3, 9))
        documents = [[[token + 1000 * number for token in sentence] for sentence in document] for document in few]
        labels += [label for columns in pack(name, documents, 64)[0] for *_, label in sequences(columns)]
    labels = [label for label in labels if label is not None]
    assert len(labels) > 550 and abs(sum(labels) / len(labels) - 0.5) < 4 * 0.5 / math.sqrt(len(labels))


@pytest.mark.parametrize("name", [name for name in FORMATS if name.endswith("nsp")])
def test_how_a_second_segment_ends_does_not_tell_its_label(name):
    """That of another document, too, ends with a sentence."""
    documents = documents_of(random.Random(3), 800)
    ends = {sentence[-1] for document in documents for sentence in document}
    pairs_of = {0: [], 1: []}
    for columns in pack(name, documents, 64)[0]:
        for _, second, label in sequences(columns):
            if label is not None:
                pairs_of[label].append(second[-1] in ends)
    whole = [sum(found) / len(found) for found in pairs_of.values()]
    assert min(map(len, pairs_of.values())) > 2000 and min(whole) > 0.99


@pytest.mark.parametrize("objective", ["nsp", "sop"])
def test_a_tenth_of_the_pairs_are_shorter_where_they_are_wanted(objective):
    """BERT: any length from 2 tokens to a block's. Of sentences of four tokens, all others fill their block, but for
    those with text of another document, which may end before."""
    documents = documents_of(random.Random(4), 20, sentences=(3000, 3000), length=(4, 4))
    for name, share in ((f"segment_pair {objective}", 0.0), (f"segment_pair_short {objective}", 0.1)):
        label, blocks = {"nsp": NSP, "sop": SOP}[objective], pack(name, documents, 128)[0]
        lengths = [len(columns["input_ids"]) for columns in blocks if columns[label][0] < 1 or label == SOP]
        short = [length for length in lengths if length <= 128 - 8]
        assert len(lengths) > (1500 if label == SOP else 1200)
        found = len(short) / len(lengths) / (115 / 123)  # of 123 lengths, the longest 8 look like a whole block
        assert abs(found - share) < 4 * math.sqrt(share / len(lengths)) + 0.02 * (share == 0)
        if share:
            assert abs(sum(short) / len(short) - 62) < 4 * 34 / math.sqrt(len(short)) + 4


@pytest.mark.parametrize("name", [name for name in FORMATS if name.endswith("nsp")])
def test_the_second_segments_of_books_are_not_a_few_texts_again_and_again(name):
    """BERT's code draws a sentence of another document anew for each. Of eight books in a file, it can be no more than
    the text of the seven before the last; what it remembers of them stays small."""
    books = documents_of(random.Random(5), 8, sentences=(1500, 2500), length=(5, 35))
    blocks, state = pack(name, books, 128)
    begins = collections.Counter(
        second[0] for columns in blocks for _, second, label in sequences(columns) if label == 1
    )
    assert begins.total() > 1200
    assert len(begins) > 0.5 * begins.total() and max(begins.values()) <= 12
    assert len(json.dumps(state.extra["donors"])) < 8 * pairs._KEPT


def test_a_step_of_sentence_pairs_has_as_many_tokens():
    documents = documents_of(random.Random(2), 200, length=(5, 40))
    fill = {}
    for name in ("sentence_pair nsp", "full_sentences"):
        blocks, _ = pack(name, documents, 512)
        fill[name] = sum(len(columns["input_ids"]) for columns in blocks) / (512 * len(blocks))
    assert fill["sentence_pair nsp"] > 0.97 * fill["full_sentences"]


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(8, 40))
def test_a_packer_is_resumed_from_json(name, seed, length):
    documents = documents_of(random.Random(seed), 6, sentences=(0, 6), length=(1, 30))
    whole, _ = pack(name, documents, length)
    state, saved = PackState(), []
    for _ in PACKERS[name](iter(documents), state, max_seq_length=length, bos_id=BOS, eos_id=EOS):
        saved.append(json.dumps(vars(state)))
    for done in {1, len(saved) // 3, len(saved) * 2 // 3, len(saved)} & {*range(1, len(saved) + 1)}:
        state = PackState(**json.loads(saved[done - 1]))
        rest, _ = pack(name, documents[state.documents :], length, state)
        for columns, other in zip(rest, whole[done:], strict=True):
            assert columns.keys() == other.keys()
            assert all(list(columns[key]) == list(other[key]) for key in columns if key != "document")
            assert columns["document"] == other["document"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_one_document_or_of_one_sentence_documents_has_no_labels(name):
    one = documents_of(random.Random(3), 1)
    short = documents_of(random.Random(3), 9, sentences=(1, 1))
    for documents in (short, *([one] if name.endswith("nsp") else [])):
        blocks, _ = pack(name, documents, 64)
        assert all(label is None for columns in blocks for _, _, label in sequences(columns))
