"""Masks of named entities and noun phrases: phrases and words alternate, equally from text and token cache."""

import itertools
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import corpus_of
from hypothesis import given, settings
from hypothesis import strategies as st

import train_mlm
from roberta_recipe.data import chunks
from roberta_recipe.data.chunks import TextReader
from roberta_recipe.data.corpus import Source
from roberta_recipe.data.mask_units import Words, choose_phrases
from roberta_recipe.data.masking import IGNORED, MlmCollator
from roberta_recipe.data.phrases import COLUMN, Phrases, encoder_with_marks
from roberta_recipe.data.stream import blocks_at
from roberta_recipe.data.tokenization import corpus_encoder
from roberta_recipe.errors import InputError

PHRASE = re.compile(r"the (old )?\w+|my \w+ \w+")


class Pipeline:
    """A stand-in for a spaCy pipeline that finds `PHRASE`."""

    max_length = 100

    def __init__(self, annotations=("DEP", "POS")):
        self.annotations = set(annotations)
        self.pipe_names = ["tok2vec", *annotations]

    def __call__(self, text):
        return SimpleNamespace(has_annotation=self.annotations.__contains__, noun_chunks=(), ents=())

    def pipe(self, texts, batch_size):
        for text in texts:
            assert len(text) <= self.max_length
            spans = [SimpleNamespace(start_char=m.start(), end_char=m.end()) for m in PHRASE.finditer(text)]
            yield SimpleNamespace(noun_chunks=spans)


# datasets asks spaCy, where it is loaded, for the class of its pipelines
FAKE = SimpleNamespace(load=lambda model: Pipeline(), Language=Pipeline)


@pytest.fixture
def spacy(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", FAKE)


PIECES = st.sampled_from(["the ", "old ", "cat ", "my ", "é", "😀", "x", " ", "."])
PHRASES = Phrases("noun_phrase", "made_up")


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.lists(PIECES, max_size=12).map("".join), max_size=5))
def test_marked_tokens_are_those_of_the_phrase_and_the_ids_are_the_same(tokenizer, texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "spacy", FAKE)
        found_ids, found_marks = encoder_with_marks(tokenizer, PHRASES)(texts)
    assert found_ids == corpus_encoder(tokenizer)(texts)
    for text, ids, marks in zip(texts, found_ids, map(np.array, found_marks), strict=True):
        assert len(ids) == len(marks)
        found = [match.group() for match in PHRASE.finditer(text)]
        begins = np.flatnonzero(marks == 1).tolist()
        assert len(begins) == len(found)
        for begin, phrase in zip(begins, found, strict=True):
            end = begin + 1 + next((n for n, mark in enumerate(marks[begin + 1 :]) if mark != 2), len(marks))
            assert phrase in tokenizer.decode(ids[begin:end]) and set(marks[begin + 1 : end].tolist()) <= {2}


def words_of(lengths):
    """Words of the given numbers of tokens, between two special tokens."""
    begins = np.zeros(sum(lengths) + 2, dtype=bool)
    first = 1 + np.cumsum([0, *lengths[:-1]])
    begins[first] = True
    special = np.zeros_like(begins)
    special[[0, -1]] = True
    return Words(begins, special, np.array([0, *first, len(begins) - 1, len(begins)]))


def test_phrases_and_words_in_turn_as_likely():
    draws, words = np.random.default_rng(0), words_of([2] * 200)
    marks = np.zeros(402, dtype=np.uint8)
    for begin in range(1, 400, 20):  # twenty phrases of three words
        marks[begin : begin + 6] = [1, 2, 2, 2, 2, 2]
    are_phrases, shares = [], []
    for _ in range(2000):
        spans = [*zip(*choose_phrases(words, marks, 60, draws), strict=True)]
        positions = [position for span in spans for position in range(*span)]
        assert len(positions) == len({*positions}) == 60
        assert all(marks[begin] == 1 or end - begin == 2 for begin, end in spans)
        are_phrases += [end - begin == 6 for begin, end in spans[:8]]  # while there are enough of both
        shares.append((marks[positions] > 0).mean())
    # a word that is in a phrase already is drawn again, so phrases are as likely as words only where few are masked
    assert abs(np.mean(are_phrases) - 0.5) < 0.03
    assert 0.6 < np.mean(shares) < 0.9


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.integers(0, 40), st.integers(0, 99), st.data())
def test_any_marks_give_whole_words(lengths, budget, seed, data):
    """Including marks that begin or end within a word, or have no beginning."""
    words = words_of(lengths)
    inner = data.draw(st.lists(st.integers(0, 2), min_size=sum(lengths), max_size=sum(lengths)))
    marks = np.array([0, *inner, 0], dtype=np.uint8)
    begins, ends = choose_phrases(words, marks, budget, np.random.default_rng(seed))
    borders, total = set(words.borders.tolist()), np.zeros(len(marks), dtype=int)
    for begin, end in zip(begins, ends, strict=True):
        assert {begin, end} <= borders
        total[begin:end] += 1
    assert total.max(initial=0) <= 1 and not total[[0, -1]].any()
    assert total.sum() <= max(budget, 0) + max(lengths) - 1


def test_a_run_from_text_and_from_a_cache_is_one_run(preset, spacy, tmp_path, monkeypatch):
    flags = ["--config", preset, "--masking_unit", "noun_phrase"]
    whole = train_mlm.main([*flags, "--output_dir", str(tmp_path / "whole")])
    flags += ["--token_cache", str(tmp_path / "cache")]
    cached = train_mlm.main([*flags, "--output_dir", str(tmp_path / "cached")])
    assert cached["digest"] == whole["digest"] and cached["state_digests"] == whole["state_digests"]
    monkeypatch.delitem(sys.modules, "spacy")  # a cache has the marks already
    with pytest.raises(InputError, match="phrases"):
        train_mlm.main([*flags, "--masking_unit", "entity", "--output_dir", str(tmp_path / "other")])


@pytest.mark.parametrize("input_format", ["full_sentences", "doc_sentences", "contiguous", "sentence_pair nsp"])
def test_marks_go_with_every_format(train_file, tokenizer, spacy, monkeypatch, input_format):
    """Marked tokens are phrases in every format, and are masked more often than other text."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3000)
    corpus, found = corpus_of("c", [Source("s", files=train_file)]), 0
    reader = TextReader(corpus, tokenizer, packer=input_format, max_seq_length=64, seed=0, phrases=PHRASES)
    blocks = [*blocks_at(reader, [(range(50),)])]
    for block in blocks:
        ids, marks = block["input_ids"], block[COLUMN]
        assert marks.dtype == np.uint8 and len(marks) == len(ids) and not marks[ids <= 2].any()
        for begin in np.flatnonzero(marks == 1):
            size = 1 + len([*itertools.takewhile(lambda mark: mark == 2, marks[begin + 1 :])])
            if begin + size < len(ids):  # where a block ends, a phrase may be cut
                assert PHRASE.search(tokenizer.decode(ids[begin : begin + size])), block.id
                found += 1
    assert found > 50
    rows = MlmCollator(tokenizer, masking_unit="noun_phrase").seen_by_model(blocks)
    assert all(COLUMN not in row for row in rows)
    predicted = np.concatenate([row["labels"] != IGNORED for row in rows])
    inside = np.concatenate([block[COLUMN] > 0 for block in blocks])
    assert predicted[inside].mean() > 1.5 * predicted[~inside].mean() > 0


@pytest.mark.parametrize(("unit", "without"), [("entity", "ENT_IOB"), ("noun_phrase", "DEP"), ("noun_phrase", "POS")])
def test_a_pipeline_that_would_find_no_phrases_is_refused(preset, monkeypatch, unit, without):
    annotations = [name for name in ("DEP", "POS", "ENT_IOB") if name != without]
    fake = SimpleNamespace(load=lambda model: Pipeline(annotations), Language=Pipeline)
    monkeypatch.setitem(sys.modules, "spacy", fake)
    flags = ["--config", preset, "--masking_unit", unit, "--spacy_model", "mine"]
    with pytest.raises(InputError, match=f"'mine' finds no {unit} for masking_unit={unit}: .* gives {without};"):
        train_mlm.main(flags)
