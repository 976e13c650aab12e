"""Masks of whole words, spans and n-grams: words are those of the tokenizer; distributions are those of the papers."""

import functools
import itertools
import math
import shutil
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import train_mlm
from roberta_recipe.data import mask_units
from roberta_recipe.data.mask_units import LENGTHS, Words, choose_spans, word_starts, words_of_blocks
from roberta_recipe.data.masking import IGNORED, MlmCollator
from roberta_recipe.data.packing import Block
from roberta_recipe.data.tokenization import corpus_backend, corpus_encoder
from roberta_recipe.data.tokenizer_training import train_tokenizer
from roberta_recipe.errors import InputError

UNITS = ("whole_word", "span", "ngram")
TEXT = st.text(
    st.one_of(
        st.sampled_from("aabcdest'''  ...,!?\"-19"),
        st.sampled_from("éü語ß😀½²\u0301\u00a0\u2028\t\n–“”²"),
        st.characters(exclude_categories=["Cs"], max_codepoint=0x2FFFF),
    ),
    min_size=1,
    max_size=40,
)


def special_tokens(*names):
    return {f"{name}_token": f"<{name}>" for name in names}


@pytest.fixture(scope="module")
def sentencepiece():
    """A tokenizer that splits at spaces only, like ALBERT's and DeBERTa-v2's."""
    named = ["<pad>", "<bos>", "<eos>", "<mask>", "<unk>"]
    text = "The cat's toy isn't under the old table; nobody has seen it since 1987. (Tuesday)"
    words = ["▁" + word for word in text.split()]  # not trained: the trainer's threads would hang a forked data worker
    pieces = sorted({*"".join(words), *(word[:4] for word in words if word[1:4].isalpha())})
    vocabulary = [(piece, 0.0) for piece in named] + [(piece, -4.0 + 0.5 * len(piece)) for piece in pieces]
    raw = Tokenizer(models.Unigram(vocabulary, unk_id=4))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    raw.add_special_tokens(named)
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special_tokens("pad", "bos", "eos", "mask", "unk"))


@pytest.fixture(scope="module")
def english():
    """A byte-level BPE in which each contraction of GPT-2's pattern is a token."""
    texts = ["It's what I've said, I'm sure they're here, we'll see, he'd know and can't. The cat isn't 19 or 1987! "]
    return train_tokenizer(texts * 50, 310)


@pytest.fixture(scope="module")
def blanks():
    """A byte-level BPE with tokens of several blanks, as RoBERTa's."""
    return train_tokenizer([f"a{' ' * n}# it's{' ' * n}\n" for n in (1, 2, 3, 4, 8)] * 50, 274)


@functools.cache
def words_and_encoders(tokenizer):
    return word_starts(tokenizer), corpus_backend(tokenizer)


def own_starts(tokenizer, text):
    """(ids, word starts) by the tokenizer, from the text."""
    encoded = words_and_encoders(tokenizer)[1].encode(text, add_special_tokens=False)
    return encoded.ids, [n == 0 or encoded.word_ids[n] != encoded.word_ids[n - 1] for n in range(len(encoded.ids))]


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=4))
def test_words_of_byte_level_bpe_are_the_tokenizers_own(tokenizer, english, texts):
    for its in (tokenizer, english):
        ids, expected = [its.bos_token_id], [False]
        for text in texts:
            own_ids, starts = own_starts(its, text)
            ids += [*own_ids, its.eos_token_id]
            expected += [*starts, False]
        assert words_and_encoders(its)[0](np.array(ids)).tolist() == expected


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.sampled_from(["a", "it's", "#", "\n", *(" " * n for n in (1, 2, 4, 8))]), max_size=12))
def test_words_between_runs_of_blanks_are_the_tokenizers_own(blanks, parts):
    ids, starts = own_starts(blanks, "".join(parts))
    assert words_and_encoders(blanks)[0](np.array(ids, dtype=int)).tolist() == starts


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("abcdesthe cat's , . -"), min_size=1, max_size=40))
def test_words_of_wordpiece_are_the_tokenizers_own(wordpiece, text):
    ids, starts = own_starts(wordpiece, text)
    known = [token not in wordpiece.all_special_ids for token in ids]  # [UNK] is never masked
    found = words_and_encoders(wordpiece)[0](np.array(ids, dtype=int))
    assert found.tolist() == np.logical_and(starts, known).tolist()


def test_words_of_sentencepiece_end_at_punctuation(sentencepiece):
    ids = corpus_encoder(sentencepiece)(["The cat's toy isn't old; (Tuesday) 1987."])[0]
    starts, words = word_starts(sentencepiece)(np.array(ids)), []
    for token, begins in zip(sentencepiece.convert_ids_to_tokens(ids), starts, strict=True):
        words += [""] * int(begins)
        words[-1] += token
    assert " ".join(words) == "▁The ▁cat ' s ▁toy ▁isn ' t ▁old ; ▁( Tuesday ) ▁1987 ."


def test_a_tokenizer_without_words_is_refused():
    raw = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    without = PreTrainedTokenizerFast(tokenizer_object=raw, mask_token="<mask>", pad_token="<pad>")
    with pytest.raises(InputError, match="has no word boundaries: its pre-tokenizer is none; name a byte-level"):
        MlmCollator(without, masking_unit="span")


@pytest.fixture(scope="module")
def blocks(english):
    """Sentences of 1 to 60 words of 1 to 3 tokens each, in blocks of 256."""
    rng = np.random.default_rng(0)
    words = [
        english(word, add_special_tokens=False)["input_ids"] for word in (" cat", " the", " zq", " 1987", " ü", ",")
    ]
    made = []
    for number in range(400):
        ids = [english.bos_token_id]
        while len(ids) < 250:
            for _ in range(rng.integers(1, 60)):
                ids += words[rng.integers(len(words))]
            ids.append(english.eos_token_id)
        made.append(Block({"input_ids": np.array(ids[:256], dtype=np.uint16)}, number))
    return made


def masked(collator, blocks):
    """(ids, input ids with masks, predicted, word starts, word ends) of each block."""
    starts, all_special = word_starts(collator.tokenizer), collator.tokenizer.all_special_ids
    is_special = np.isin(np.arange(len(collator.tokenizer)), all_special)
    words = words_of_blocks([block["input_ids"] for block in blocks], starts, is_special, all_special[0])
    for block, columns, (begins, special, borders) in zip(blocks, collator.seen_by_model(blocks), words, strict=True):
        ids, seen, labels = block["input_ids"].astype(np.int64), columns["input_ids"], columns["labels"]
        predicted = labels != IGNORED
        assert (labels[predicted] == ids[predicted]).all() and (seen[~predicted] == ids[~predicted]).all()
        assert (special == np.isin(ids, all_special)).all() and not (predicted & special).any()
        is_word = begins[borders[:-1]]
        yield ids, seen, predicted, borders[:-1][is_word], borders[1:][is_word]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("probability", [0.15, 0.3])
def test_words_are_masked_whole_and_the_share_is_right(english, blocks, unit, probability):
    shares = []
    collator = MlmCollator(english, masking_unit=unit, mlm_probability=probability)
    for _, _, predicted, first, end in masked(collator, blocks):
        whole = [predicted[begin:behind].mean() for begin, behind in zip(first, end, strict=True)]
        assert set(whole) <= {0.0, 1.0}
        shares.append(predicted.sum() / (end - first).sum())
    assert abs(np.mean(shares) - probability) < 4 * np.std(shares) / math.sqrt(len(shares))
    assert len(set(shares)) > 3


def text_block(rng, length):
    """(length,) tokens of words of 1 to 3 tokens; three of four blocks have a special token somewhere."""
    begins = np.zeros(length, dtype=bool)
    ends = np.cumsum(rng.integers(1, 4, length))
    begins[ends[ends < length]] = True
    special = np.zeros(length, dtype=bool)
    special[rng.integers(length, size=int(rng.random() < 0.75))] = True
    begins = (begins & ~special) | np.r_[True, special[:-1]] & ~special
    return Words(begins, special, np.r_[np.flatnonzero(begins | special), length])


@pytest.mark.parametrize("unit", ["span", "ngram"])
@pytest.mark.parametrize("probability", [0.15, 0.3])
@pytest.mark.parametrize("length", [64, 128, 512])
def test_lengths_have_the_papers_law_in_blocks_of_any_length(unit, probability, length):
    """All spans, the last of a block included, at the right masked share; no span is divided or next to another."""
    law = np.diff(LENGTHS[unit], prepend=0)
    by_paper = [0.2 * 0.8**n for n in range(10)] if unit == "span" else [1, 1 / 2, 1 / 3]
    assert law == pytest.approx(np.array(by_paper) / sum(by_paper))
    mean = (law * np.arange(1, len(law) + 1)).sum()
    assert unit == "ngram" or mean == pytest.approx(3.8, abs=0.01)  # as the paper has it
    found, draws, tokens, wanted = Counter(), np.random.default_rng(0), 0, 0
    while found.total() < 20_000:
        words = text_block(draws, length)
        budget = int(probability * (~words.special).sum() + draws.random())
        spans = sorted(zip(*choose_spans(words, unit, budget, draws), strict=True))
        assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))  # a word between
        for begin, end in spans:
            assert {begin, end} <= set(words.borders.tolist()) and not words.special[begin:end].any()
            found[int(words.begins[begin:end].sum())] += 1
            tokens += end - begin
        wanted += budget
    counts = np.array([found[n + 1] for n in range(len(law))])
    assert stats.chisquare(counts, law * counts.sum()).pvalue > 1e-4
    assert (counts * np.arange(1, len(law) + 1)).sum() / counts.sum() == pytest.approx(mean, rel=0.02)
    assert counts[0] / counts.sum() == pytest.approx(law[0], abs=0.01)
    assert tokens / wanted == pytest.approx(1, abs=0.02)  # its standard error is up to 0.007


def test_spans_of_a_text_of_short_sentences_are_no_longer_than_these():
    special = np.arange(61) % 4 == 0  # sentences of three words
    draws, sizes = np.random.default_rng(0), []
    for _ in range(4000):
        begins, ends = choose_spans(Words(~special, special, np.arange(62)), "span", 9, draws)
        sizes += (np.array(ends) - begins).tolist()
    assert set(sizes) == {1, 2, 3} and sum(sizes) / 4000 == pytest.approx(9, rel=0.02)
    nothing = Words(np.zeros(3, dtype=bool), np.ones(3, dtype=bool), np.arange(4))
    assert choose_spans(nothing, "span", 1, draws) == ([], [])


def test_every_word_is_as_likely():
    """In a text of one sentence, fewer spans cover the words near its ends; all other words are equally likely."""
    hits, draws = np.zeros(200), np.random.default_rng(1)
    one_sentence = Words(np.ones(200, dtype=bool), np.zeros(200, dtype=bool), np.arange(201))
    for _ in range(4000):
        for begin, end in zip(*choose_spans(one_sentence, "span", 30, draws), strict=True):
            hits[begin:end] += 1
    inner = hits[10:-10] / 4000
    assert inner.std() < 1.5 * math.sqrt(0.15 * 0.85 / 4000)
    assert hits.mean() / 4000 == pytest.approx(0.15, rel=0.02)


@pytest.mark.parametrize("unit", UNITS)
def test_shares_of_what_is_shown(english, blocks, unit):
    """80/10/10: for all tokens of a span together, else for each token."""
    shown, together = Counter(), []
    for ids, seen, predicted, *_ in masked(MlmCollator(english, masking_unit=unit), blocks):
        kinds = np.where(seen == english.mask_token_id, 0, np.where(seen == ids, 2, 1))
        edges = np.flatnonzero(np.diff(np.r_[0, predicted.astype(int), 0]))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            of_run = kinds[begin:end]
            if end - begin > 1:
                together.append(len(set(of_run.tolist())) == 1)
            if unit == "span":
                shown[int(of_run[0])] += 1
            else:
                shown.update(of_run.tolist())
    total = shown.total()
    # a random token is the token itself once in a vocabulary, so rarely that only the tolerance sees it
    for kind, share in enumerate((0.8, 0.1, 0.1)):
        assert abs(shown[kind] / total - share) < 4 * math.sqrt(share * (1 - share) / total) + 0.1 / 400, (kind, shown)
    assert np.mean(together) > 0.995 if unit == "span" else np.mean(together) < 0.9


@pytest.mark.parametrize("unit", ["token", "span"])
def test_static_masks_come_again(english, blocks, unit):
    few = blocks[:8]
    static, dynamic = (MlmCollator(english, masking_unit=unit, static_masks=k, seed=3) for k in (4, 0))

    def of(collator, epoch):
        return collator([Block(block, block.id, epoch) for block in few])["labels"].tolist()

    passes = [of(static, epoch) for epoch in range(8)]
    assert passes[:4] == passes[4:] == [of(dynamic, epoch) for epoch in range(4)]
    assert all(one != other for n, one in enumerate(passes[:4]) for other in passes[:n])
    assert of(dynamic, 4) not in passes


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 309), min_size=1, max_size=60),
    unit=st.sampled_from(UNITS),
    probability=st.floats(0.02, 0.99),
    exact=st.booleans(),
)
def test_any_ids_can_be_masked(english, ids, unit, probability, exact):
    """Including blocks that begin within a word or a character, of special tokens only, or densely masked."""
    count = "exact" if exact and unit == "whole_word" else "bernoulli"
    collator = MlmCollator(english, masking_unit=unit, mlm_probability=probability, mask_count=count)
    array = np.array(ids) % len(english)
    [columns] = collator.seen_by_model([Block({"input_ids": array}, 1)])
    seen, labels = columns["input_ids"], columns["labels"]
    special = np.isin(array, english.all_special_ids)
    predicted = labels != IGNORED
    assert not (predicted & special).any() and (seen[~predicted] == array[~predicted]).all()


def test_an_exact_count_is_of_words(english, blocks):
    collator = MlmCollator(english, masking_unit="whole_word", mask_count="exact")
    for _, _, predicted, first, *_ in masked(collator, blocks[:50]):
        words = predicted[first].sum()
        assert words in (math.floor(0.15 * len(first)), math.floor(0.15 * len(first)) + 1)


def test_a_run_with_another_mask_resumes_as_itself(preset, tmp_path, capsys, monkeypatch):
    """Four steps at once, and two and two, over ten blocks, with alternating static masks."""
    flags = ["--config", preset, "--masking_unit", "span", "--static_masks", "2", "--max_train_samples", "10"]
    flags += ["--save_strategy", "steps", "--save_steps", "2"]
    whole = train_mlm.main([*flags, "--output_dir", str(tmp_path / "whole")])
    assert "masked by token (training: by span)" in capsys.readouterr().err
    for name in ("again", "other", "drawn_before"):
        shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / name / "checkpoint-2")
    resumed = train_mlm.main([*flags, "--output_dir", str(tmp_path / "again")])
    assert resumed["resumes"] == 1 and resumed["digest"] == whole["digest"]
    with pytest.raises(InputError, match="masking_unit"):
        train_mlm.main([*flags, "--masking_unit", "ngram", "--output_dir", str(tmp_path / "other")])
    monkeypatch.setattr(mask_units, "REVISION", 1)  # a checkpoint of a former version
    with pytest.raises(InputError, match="mask_revision was 3, is 1"):
        train_mlm.main([*flags, "--output_dir", str(tmp_path / "drawn_before")])


def test_words_of_other_tokenizers(tokenizer):
    """BPE with a suffix at the end of a word (HerBERT), WordPiece with its own prefix and pre-tokenizer, and BPE whose
    normalizer writes blanks as letters (Gemma)."""
    special, words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], ["the", "lazy", "dogs"]

    def starts(model, pre_tokenizer, normalizer=None):
        backend = Tokenizer(model)
        backend.pre_tokenizer, backend.normalizer = pre_tokenizer, normalizer
        other = PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens_map)
        ids = np.array([0, *other("the lazy dogs", add_special_tokens=False).input_ids, 2, *other("the").input_ids])
        assert len(ids) > 8  # words of several tokens
        tokens = other.convert_ids_to_tokens(ids)
        return [token for token, begins in zip(tokens, word_starts(other)(ids), strict=True) if begins]

    letters = sorted({*"".join(words)})
    pieces = [*special, *letters, *(f"{letter}</w>" for letter in letters)]
    herbert = models.BPE({piece: n for n, piece in enumerate(pieces)}, [], unk_token="<unk>", end_of_word_suffix="</w>")
    assert starts(herbert, pre_tokenizers.BertPreTokenizer()) == ["t", "l", "d", "t"]
    pieces = [*special, *letters, *(f"@@{letter}" for letter in letters)]
    prefixed = models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="<unk>")
    prefixed.continuing_subword_prefix = "@@"
    assert starts(prefixed, pre_tokenizers.Whitespace()) == ["t", "l", "d", "t"]
    pieces = [*special, *letters, "▁"]
    gemma = models.BPE({piece: n for n, piece in enumerate(pieces)}, [], unk_token="<unk>")
    normalizer = normalizers.Replace(" ", "▁")
    assert starts(gemma, pre_tokenizers.Split(" ", "merged_with_previous"), normalizer) == ["t", "▁", "▁", "t"]
