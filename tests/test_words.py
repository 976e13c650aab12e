"""tools/words.py: the same masked words for every model, scored as by definition."""

import itertools
import json
import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from roberta_recipe.data import documents, tokenization
from roberta_recipe.data.packing import full_sentences
from roberta_recipe.errors import InputError
from roberta_recipe.tasks import pseudo_likelihood
from tools import words

TEXTS = [
    "The cat's toy isn't under the old table; nobody has seen it since Tuesday. " * 12,
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich, und x86 bleibt x86. " * 9,
    "short one",
]
SIZES = dict(vocab_size=90, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
FAMILIES = {
    "roberta": {**SIZES, "max_position_embeddings": 40},
    "bert": SIZES,
    "albert": {**SIZES, "embedding_size": 8},
    "distilbert": {"vocab_size": 90, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "electra": {**SIZES, "embedding_size": 8},
    "mpnet": {**SIZES, "max_position_embeddings": 40},
    "deberta-v2": SIZES,
    "mobilebert": {**SIZES, "embedding_size": 8, "intra_bottleneck_size": 16},
    "modernbert": {
        **SIZES,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_the_whole_model(family):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    ids, mask = torch.randint(5, 90, (4, 12)), torch.ones(4, 12, dtype=torch.long)
    mask[1, 9:] = mask[3, 5:] = 0
    positions = (torch.rand(4, 12) < 0.3) & (mask == 1)
    targets = torch.randint(5, 90, (int(positions.sum()),))
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        whole = model(**inputs).logits.log_softmax(-1)[positions]
    found = pseudo_likelihood.at_positions(model, inputs, positions, targets)
    torch.testing.assert_close(found, whole.gather(1, targets[:, None])[:, 0])
    with torch.no_grad():  # nothing is left behind in the model
        assert model(**inputs).logits.shape == (4, 12, 90)


def by_definition(model, tokenizer, window, reading=words.as_written):
    """Reference: bits of the masked words of a window, and of one-piece words, character by character."""
    ids, offsets = reading(tokenizer, window.text)
    of_word = [[n for n, (a, b) in enumerate(offsets) if {*range(a, b)} & {*range(*span)}] for span in window.spans]
    shown = torch.tensor([ids])
    shown[0, [*itertools.chain(*of_word)]] = tokenizer.mask_token_id
    with torch.no_grad():
        log_p = model(shown).logits.log_softmax(-1)[0]
    bits = [-sum(log_p[n, ids[n]].item() for n in own) / math.log(2) for own in of_word]
    return sum(bits), sum(of for of, own in zip(bits, of_word, strict=True) if len(own) == 1)


@pytest.mark.parametrize("reading", [words.as_written, words.sentences_apart])
def test_bits_are_those_of_the_definition(config, tokenizer, reading):
    torch.manual_seed(0)
    config.max_position_embeddings = 514
    config.initializer_range = 0.5  # else every piece has the same probability
    model = transformers.RobertaForMaskedLM(config).eval()
    windows = list(words.windows_of(TEXTS * 2))
    found = words.losses(model, tokenizer, windows, reading)
    for window, loss in zip(windows, found, strict=True):
        whole, short = by_definition(model, tokenizer, window, reading)
        assert (loss.bits, loss.short_bits) == pytest.approx((whole, short), rel=1e-4)
        assert loss.characters == sum(end - first for first, end in window.spans) and not loss.joined
    figures = words.summarise(found)
    assert figures["bits_per_word"] == pytest.approx(sum(loss.bits for loss in found) / figures["words"])
    assert figures["words"] == sum(len(window.spans) for window in windows) and figures["documents"] == 4
    assert 0 < figures["short_words"] < figures["words"]
    short = sum(loss.short_bits for loss in found) / figures["short_words"]
    assert figures["bits_per_short_word"] == pytest.approx(short) != figures["bits_per_word"]


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abcdefgh .!?A,\nÄ", max_size=120))
def test_sentences_apart_are_the_block_of_full_sentences(tokenizer, text):
    text = " ".join(text.split())
    ids, offsets = words.sentences_apart(tokenizer, text)
    document = tokenization.corpus_encoder(tokenizer)(documents.split_sentences(text)) if text else []
    blocks = full_sentences([document], 4096, **tokenization.boundary_ids(tokenizer))
    assert ids == next(blocks, {"input_ids": ids[:1]})["input_ids"]
    covered = {at for span in offsets for at in range(*span)}  # by two pieces of a character, twice
    assert {at for at, character in enumerate(text) if character != " "} <= covered <= {*range(len(text))}
    assert [span for span in offsets if any(span)] == sorted(span for span in offsets if any(span))


def test_the_words_are_those_of_the_text_whatever_stands_before_it():
    alone = [window[1:] for window in words.windows_of(TEXTS[1:2])]
    assert [window[1:] for window in words.windows_of(TEXTS) if window.document == 1] == alone
    assert alone[0] != next(words.windows_of([TEXTS[1] + " More."]))[1:]


@settings(max_examples=200)
@given(st.text(alphabet="abÄé '’_-.,1\n", max_size=900))
def test_words_stand_alone_and_windows_are_few(text):
    windows = list(words.windows_of([text]))
    assert len(windows) <= words.WINDOWS
    for window in windows:
        for first, end in window.spans:
            assert window.text[first:end].isalpha()
            beside = window.text[max(first - 1, 0) : first] + window.text[end : end + 1]
            assert not any(character.isalnum() or character in "_'’" for character in beside)
        assert all(one[1] <= two[0] for one, two in zip(window.spans, window.spans[1:], strict=False))


def test_words_without_pieces_are_counted(wordpiece, capsys, tmp_path):
    """A model that encodes a word as [UNK] has to predict [UNK]."""
    windows = list(words.windows_of(TEXTS))
    config = transformers.BertConfig(**SIZES | {"vocab_size": len(wordpiece)})
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "model")
    wordpiece.save_pretrained(tmp_path / "model")
    asked = [window.text[first:end] for window in windows for first, end in window.spans]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    figures = words.main(["--model_name_or_path", str(tmp_path / "model"), "--text_file", str(tmp_path / "text.jsonl")])
    assert 0 < figures["unknown_words"] == sum(not word.isascii() for word in asked) < len(asked)
    assert f"{figures['unknown_words']} words are [UNK] for this tokenizer" in capsys.readouterr().out


def test_command_line(tmp_path, config, tokenizer, capsys):
    config.max_position_embeddings = 514
    folder, text = tmp_path / "model", tmp_path / "text.jsonl"
    transformers.RobertaForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in TEXTS), encoding="utf-8")
    flags = ["--model_name_or_path", str(folder), "--text_file", str(text)]
    figures = words.main([*flags, "--output", str(tmp_path / "words.json")])
    out = capsys.readouterr().out
    assert "bits a word" in out and f"({figures['words']:,} words of 2 documents" in out and "±" in out
    (folder / "tokenizer_config.json").write_text(  # padding is masked all the same
        json.dumps(json.loads((folder / "tokenizer_config.json").read_text()) | {"model_input_names": ["input_ids"]})
    )
    assert words.main(flags)["bits_per_word"] == pytest.approx(figures["bits_per_word"])
    capsys.readouterr()
    assert json.loads((tmp_path / "words.json").read_text())["bits_per_word"] == figures["bits_per_word"]
    by_reading = {name: of["bits_per_word"] for name, of in figures["readings"].items()}
    assert by_reading[figures["reading"]] == min(by_reading.values()) == figures["bits_per_word"]
    assert len(set(by_reading.values())) == 2 and "the lower one is reported" in out
    # a fresh model knows nothing: log2 of the vocabulary for each piece
    expected = math.log2(config.vocab_size) * figures["pieces_per_word"]
    assert figures["bits_per_word"] == pytest.approx(expected, rel=0.05)
    text.write_text(text.read_text(encoding="utf-8").replace("table", "chair"), encoding="utf-8")  # as many words
    edited = words.main(flags)
    assert edited["words"] == figures["words"] and edited["windows_digest"] != figures["windows_digest"]
    with pytest.raises(InputError, match="name either corpus or text_file"):
        words.main(flags[:2])
    with pytest.raises(
        InputError, match=r"output=.*none/words.json cannot be written: No such file .*; make its folder"
    ):
        words.main(["--model_name_or_path", "none", *flags[2:], "--output", str(tmp_path / "none" / "words.json")])


def test_the_language_of_a_text_file_is_that_of_its_splitter(tmp_path):
    (tmp_path / "t.txt").write_text("Sie kamen am 3. Mai mit dem Zug nach Hause. " * 20, encoding="utf-8")
    named = ["--model_name_or_path", "m", "--language", "de"]
    assert words.read_windows(words.parse([*named, "--text_file", str(tmp_path / "t.txt")]))[1] == "de"
    with pytest.raises(InputError, match="language need text_file; a corpus preset has its own"):
        words.parse([*named, "--corpus", "c.yaml"])


def test_a_model_of_few_positions_is_asked_the_same_words(config, tokenizer, caplog):
    """With 64 and 24 positions, windows are divided, and each loss is that of its part."""
    torch.manual_seed(0)
    windows = list(words.windows_of([" ".join(TEXTS), "No antidisestablishment.today.".replace("t", "tt") * 30]))
    asked = [window.text[first:end] for window in windows for first, end in window.spans]
    for positions in (66, 26):
        config.max_position_embeddings, config.initializer_range = positions, 0.5
        model = transformers.RobertaForMaskedLM(config).eval()
        parts = [part for window in windows for part in words.split_window(tokenizer, window, positions - 2)]
        assert [part.text[first:end] for part in parts for first, end in part.spans] == asked
        found = words.losses(model, tokenizer, windows)
        assert len(found) == len(parts) > len(windows)
        for part, loss in zip(parts, found, strict=True):
            assert loss.bits == pytest.approx(by_definition(model, tokenizer, part)[0], rel=1e-4)
    assert "Split  " in caplog.text and "the model has 24 positions" in caplog.text
    with pytest.raises(InputError, match=r"the word 'Nebucha.* has more pieces than the model's 24 positions"):
        words.split_window(tokenizer, words.Window(0, "Nebuchadnezzar" * 4, [(0, 56)]), 24)
