"""Pairs of segments and sentences: no lost text, true labels, half of each."""

import collections
import itertools
import math
import random

import pytest

from roberta_recipe.data import IGNORED, NSP, SOP
from roberta_recipe.data.chunks import PACKERS

BOS, EOS = 0, 2
FORMATS = [name for name in PACKERS if "_pair" in name]
LABELLED = [name for name in FORMATS if not name.endswith("in_order")]


def documents_of(rng, count, sentences=(1, 30), length=(3, 40)):
    """Documents with distinct tokens, which identify their position."""
    numbers = itertools.count(10)
    return [
        [[next(numbers) for _ in range(rng.randint(*length))] for _ in range(rng.randint(*sentences))]
        for _ in range(count)
    ]


def pack(name, documents, length, *key):
    return list(PACKERS[name](documents, length, BOS, EOS, key))


def packed_pairs(name, documents, length, *key):
    """(A, B, label) of all labelled pairs."""
    return [pair for block in pack(name, documents, length, *key) for pair in sequences(block) if pair[2] is not None]


def assert_half(labels, least):
    assert len(labels) > least and abs(sum(labels) / len(labels) - 0.5) < 4 * 0.5 / math.sqrt(len(labels))


def sequences(columns):
    """(A, B or None, label) of each sequence of a block, from its columns."""
    label = NSP if NSP in columns else SOP
    numbers = columns.get("sequence", [0] * len(columns["input_ids"]))
    rows = zip(columns["input_ids"], columns["token_type_ids"].tolist(), columns[label].tolist(), numbers, strict=True)
    for _, group in itertools.groupby(rows, key=lambda row: row[3]):
        ids, types, labels, _ = map(list, zip(*group, strict=True))
        assert ids[0] == BOS and ids[-1] == EOS and set(labels[1:]) <= {IGNORED} and types == sorted(types)
        first, second = ids[: types.count(0)], ids[types.count(0) :]
        if not second:
            assert first.count(EOS) == 1 and labels[0] == IGNORED
            yield first[1:-1], None, None
        else:
            assert first[-1] == EOS == second[0] and first.count(EOS) == 1 and second.count(EOS) == 2
            assert labels[0] in (0, 1)
            yield first[1:-1], second[1:-1], labels[0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(6))
def test_pairs_are_what_their_labels_say_and_no_text_is_lost(name, seed):
    rng = random.Random(seed)
    documents = documents_of(rng, rng.choice([0, 1, 2, 30]), (0, rng.choice([1, 6, 30])), (1, rng.choice([4, 40])))
    length = rng.randint(8, 130)
    of = {token: number for number, document in enumerate(documents) for sentence in document for token in sentence}
    begins = {sentence[0] for document in documents for sentence in document}
    seen, labels = [], []
    for columns in pack(name, documents, length, seed):
        assert len(columns["input_ids"]) <= length
        found = [*sequences(columns)]
        assert columns["document"] in {of[segment[0]] for segment in found[0][:2] if segment}
        for first, second, label in found:
            labels.append(label)
            if label and name.endswith("nsp"):
                assert of[second[0]] != of[first[0]] and second[0] in begins
                seen += first
            elif label is not None:
                one, two = (second, first) if label else (first, second)
                assert two[0] == one[-1] + 1 and two[0] in begins
            if not (label and name.endswith("nsp")):
                seen += first + (second or [])
            for segment in filter(None, (first, second)):
                assert segment == [*range(segment[0], segment[0] + len(segment))]
                assert of[segment[0]] == of[segment[-1]]
            if "sentence" in name and label is not None:
                assert not begins & {*first[1:], *second[1:]}  # a sentence each
    assert sorted(seen) == sorted(of)
    alone = name.endswith("nsp") and sum(map(bool, documents)) == 1  # no other document to draw from
    if alone or all(len(document) < 2 for document in documents) or name.endswith("in_order"):
        assert {*labels} <= ({None, 0} if name.endswith("in_order") and not alone else {None})


@pytest.mark.parametrize("name", [name for name in FORMATS if name.endswith("in_order")])
def test_pairs_without_an_objective_are_those_of_sop_none_swapped(name):
    documents = documents_of(random.Random(1), 40)
    in_order, sop = (packed_pairs(its, documents, 128) for its in (name, name.replace("in_order", "sop")))
    assert {label for *_, label in in_order} == {0} and {label for *_, label in sop} == {0, 1}
    assert in_order == [(second, first, 0) if label else (first, second, label) for first, second, label in sop]


@pytest.mark.parametrize("name", LABELLED)
def test_half_of_the_pairs_have_each_label_and_versions_are_independent(name):
    """For the same A in two versions, half of the labels differ. Segments of both labels have similar lengths."""
    documents, by_version = documents_of(random.Random(1), 400, sentences=(5, 30)), []
    for version in (0, 1, 2, 0):
        found = packed_pairs(name, documents, 128, 0, 0, 0, version)
        labels = [label for *_, label in found]
        assert_half(labels, 1000)
        fill = [sum(len(b) for _, b, label in found if label == one) / labels.count(one) for one in (0, 1)]
        assert fill[1] == pytest.approx(fill[0], rel=0.25)
        # a pair that is swapped has its earlier text behind
        by_version.append({min(one[0], two[0]) if "sop" in name else one[0]: label for one, two, label in found})
    assert by_version[0] == by_version[3]
    for one, other in itertools.combinations(by_version[:3], 2):
        shared = one.keys() & other.keys()
        assert len(shared) > 300
        assert sum(one[key] != other[key] for key in shared) / len(shared) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("name", LABELLED)
def test_many_small_files_have_both_labels(name):
    """Files of one document, or two for NSP: draws are independent between files."""
    labels = []
    for number in range(400):
        few = documents_of(random.Random(number), 1 + name.endswith("nsp"), sentences=(2, 4), length=(3, 9))
        labels += [label for *_, label in packed_pairs(name, few, 64, 0, number, 0, 0)]
    assert_half(labels, 360)


@pytest.mark.parametrize("name", [name for name in LABELLED if name.endswith("nsp")])
@pytest.mark.parametrize("sentences", [(1, 30), (300, 500)], ids=["articles", "books"])
def test_lengths_and_ends_of_segments_do_not_tell_their_label(name, sentences):
    """The best rule on one half of the pairs, tested on the other half. Second segments vary, and few of them start a
    document."""
    documents = documents_of(random.Random(6), 24000 // sum(sentences), sentences=sentences)
    ends = {sentence[-1] for document in documents for sentence in document}
    beginnings = {document[0][0] for document in documents}
    found = packed_pairs(name, documents, 128)
    told = [(len(a) // 8, len(b) // 8, b[-1] in ends, label) for a, b, label in found]
    random.Random(7).shuffle(told)
    known, asked = collections.Counter(told[::2]), told[1::2]
    right = sum((known[*of, 1] > known[*of, 0]) == label for *of, label in asked) / len(asked)
    assert len(asked) > 1000 and right < 0.55
    for label in (0, 1):
        whole = [b[-1] in ends for _, b, its in found if its == label]
        assert sum(whole) > 0.99 * len(whole)
    full = [[len(a) + len(b) > 96 for a, b, its in found if its == label] for label in (0, 1)]
    assert abs(sum(full[0]) / len(full[0]) - sum(full[1]) / len(full[1])) < 0.04  # blocks are as full for both labels
    drawn = collections.Counter(second[0] for _, second, label in found if label == 1)
    assert len(drawn) > 0.5 * drawn.total() and max(drawn.values()) <= 12
    assert sum(drawn[token] for token in beginnings) < 0.25 * drawn.total()


@pytest.mark.parametrize("objective", ["nsp", "sop"])
def test_a_tenth_of_the_pairs_are_shorter_where_they_are_wanted(objective):
    """As in BERT: any length from 2 tokens to a block's. With sentences of four tokens, all others fill their block,
    except those with text of another document, which may end earlier."""
    documents = documents_of(random.Random(4), 12, sentences=(3000, 3000), length=(4, 4))
    for name, share in ((f"segment_pair {objective}", 0.0), (f"segment_pair_short {objective}", 0.1)):
        found = packed_pairs(name, documents, 128)
        lengths = [len(one) + len(two) + 4 for one, two, label in found if label == 0 or objective == "sop"]
        short = [length for length in lengths if length <= 128 - 8]
        assert len(lengths) > 700
        told = len(short) / len(lengths) / (115 / 123)  # of 123 lengths, the longest 8 look like a whole block
        assert abs(told - share) < 4 * math.sqrt(share / len(lengths)) + 0.02 * (share == 0)
        if share:
            assert abs(sum(short) / len(short) - 62) < 4 * 34 / math.sqrt(len(short)) + 4
