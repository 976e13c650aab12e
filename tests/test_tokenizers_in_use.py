"""Training features equal the encoding by the saved tokenizer: generated tokenizers of three kinds, random options.

Each tokenizer is written as a user's folder, loaded as by the scripts, saved with a model, and loaded again with
`AutoTokenizer`, as by `pipeline`.
"""

import argparse
import json
import math
import random
from collections import Counter

import numpy as np
import pytest
import tokenizers
from conftest import make_documents
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
)

import finetune_glue
from roberta_recipe import durable
from roberta_recipe.data import masking, tokenization
from roberta_recipe.data.packing import Block
from roberta_recipe.errors import InputError
from roberta_recipe.model import masked_lm, weights
from roberta_recipe.tasks import glue, protocol, race, squad, wsc

TOKENIZERS, TEXTS = 40, 12
MARKS = ["[E1]", "[/E1]", "<user>", "@city", "héllo", "new york", "ﬁ", "the"]
ROBERTA = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
BOTH = {**ROBERTA, "cls": "[CLS]", "sep": "[SEP]"}  # blocks begin with the template's [CLS], not with <s>
DOCUMENTS = [*make_documents(60, seed=5), "Héllo new york, the ﬁrst café 12 times!"]


def unigram_pieces(names: list[str]) -> list[tuple[str, float]]:
    """Special tokens, frequent strings and their scores. (The library's trainer starts threads despite
    TOKENIZERS_PARALLELISM, for which a data worker forked by a later test would wait.)"""
    words = [f"▁{word}" for text in DOCUMENTS for word in text.split()]
    strings = (word[at : at + size] for word in words for size in range(1, 7) for at in range(len(word) - size + 1))
    return [*((name, 0.0) for name in names), *((s, math.log(n / 1e5)) for s, n in Counter(strings).most_common(400))]


def backend_of(rng: random.Random, names: list[str]) -> Tokenizer:
    """A trained backend of one of three kinds."""
    kind, unk = rng.choice(["bpe", "wordpiece", "unigram"]), names[-1]
    settings = {"vocab_size": 400, "special_tokens": names, "show_progress": False}
    if kind == "bpe":
        backend, alphabet = Tokenizer(models.BPE(unk_token=unk)), sorted(pre_tokenizers.ByteLevel.alphabet())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < 0.5)
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **settings)
    elif kind == "wordpiece":
        backend, trainer = Tokenizer(models.WordPiece(unk_token=unk)), trainers.WordPieceTrainer(**settings)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        backend, trainer = Tokenizer(models.Unigram(unigram_pieces(names), len(names) - 1)), None
        prepend = rng.choice(["always", "first", "never"])
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    backend.normalizer = rng.choice(
        [
            normalizers.Sequence([]),
            normalizers.NFKC(),
            normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
            normalizers.BertNormalizer(lowercase=rng.random() < 0.5, strip_accents=rng.random() < 0.5),
            normalizers.Lowercase(),
        ]
    )
    if trainer:
        backend.train_from_iterator(DOCUMENTS, trainer)
    return backend


def write_tokenizer(seed: int, folder) -> None:
    """Write a user's folder: random kind, roles, template, added tokens and options of tokenizer_config.json."""
    rng = random.Random(seed)
    roles = rng.choice([ROBERTA, BERT, BOTH])
    names = list(dict.fromkeys([*roles.values(), roles["unk"]]))
    names.append(names.pop(names.index(roles["unk"])))  # the last, as `backend_of` wants it
    backend = backend_of(rng, names)
    cls, sep = ((roles[role], backend.token_to_id(roles[role])) for role in ("cls", "sep"))
    pairs = [
        ("{0} $A {1}", "{0} $A {1} {1} $B {1}"),  # RoBERTa's
        ("{0} $A {1}", "{0} $A {1} $B:1 {1}:1"),  # BERT's
        ("$A {1}", "$A {1} $B:1 {1}:1"),
        None,
    ]
    if template := rng.choice(pairs):
        single, pair = (part.format(cls[0], sep[0]) for part in template)
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=[cls, sep])
    if rng.random() < 0.3:  # as all-MiniLM's tokenizer.json
        backend.enable_truncation(9)
        backend.enable_padding(length=9, direction=rng.choice(["left", "right"]), pad_token=roles["pad"])

    def mark(content: str, special: bool) -> AddedToken:
        flags = {name: rng.random() < 0.3 for name in ("lstrip", "rstrip", "single_word", "normalized")}
        return AddedToken(content, special=special, **flags)

    marks = rng.sample(MARKS, 5)
    own = [mark(content, True) for content in marks[:3]]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=own,
        **{f"{role}_token": name for role, name in roles.items()},
    )
    wrapped.add_tokens([mark(content, False) for content in marks[3:]])
    wrapped.save_pretrained(folder)
    options = {
        "padding_side": rng.choice(["left", "right"]),
        "truncation_side": rng.choice(["left", "right"]),
        "model_max_length": rng.choice([8, 512, int(1e30)]),
        "split_special_tokens": rng.random() < 0.1,
        "model_input_names": rng.choice([["input_ids", "attention_mask"], ["input_ids", "token_type_ids"]]),
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
    types = rng.choice([1, 2])
    AutoConfig.for_model("bert", type_vocab_size=types, vocab_size=len(wrapped)).save_pretrained(folder)


def texts_of(rng: random.Random, count: int, marks: list[str], least: int = 1) -> list[str]:
    """Words, added tokens and odd white space."""
    words = ["the", "Cat", "sees", "café", "newyork", "dog.", "it's", "12", "naïve", "[E1]s", *marks, *marks]
    spaces = ["", " ", " ", " ", "  ", "\t", "\n", "\u00a0", "\u3000"]
    pieces = [[rng.choice(words) + rng.choice(spaces) for _ in range(rng.randint(least, 12))] for _ in range(count)]
    return ["the" + "".join(some) for some in pieces]


class Saved:
    """A generated tokenizer, `loaded` by a script, and `used` from its saved folder."""

    def __init__(self, seed, folder, max_seq_length=16):
        write_tokenizer(seed, folder)
        self.seed = seed
        self.args = argparse.Namespace(
            model_name_or_path=str(folder), tokenizer_name=None, max_seq_length=max_seq_length
        )
        self.loaded = protocol.load_tokenizer(self.args)
        to_save = weights.for_saving(self.loaded, weights.read_config(str(folder)), max_seq_length)
        to_save.save_pretrained(folder / "best")
        self.used = AutoTokenizer.from_pretrained(folder / "best")


@pytest.fixture(scope="module", params=range(TOKENIZERS))
def saved(request, tmp_path_factory):
    return Saved(request.param, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def rng(saved):
    return random.Random(saved.seed)


def test_blocks_have_the_ids_of_the_saved_tokenizer(saved, rng):
    texts = texts_of(rng, TEXTS, MARKS)
    found = tokenization.corpus_encoder(saved.loaded)(texts)
    assert found == saved.used(texts, add_special_tokens=False).input_ids
    bounds = tokenization.boundary_ids(saved.loaded)
    if saved.used.num_special_tokens_to_add() == 2:  # a sentence alone is a block of <s> sentence </s>
        assert [[bounds["bos_id"], *ids, bounds["eos_id"]] for ids in found] == saved.used(texts).input_ids
    assert saved.used.padding_side == "right" and saved.used.model_max_length == 16


def test_texts_that_read_as_special_tokens_stay_text(saved, rng):
    names = {name: getattr(saved.loaded, name) for name in saved.loaded.special_tokens_map if name != "unk_token"}
    texts = texts_of(rng, TEXTS, sorted(set(names.values())))
    ids = {saved.loaded.convert_tokens_to_ids(name) for name in names.values()}
    features = make_features(saved, [(text,) for text in texts])
    assert not any(ids & set(found) for found in tokenization.corpus_encoder(saved.loaded)(texts))
    special = saved.used.num_special_tokens_to_add()
    assert all(len(ids & set(row["input_ids"].tolist())) <= special for row in features)


def make_features(saved: Saved, texts: list[tuple[str, ...]]) -> list[dict]:
    data = {"train": glue.Examples(texts, [0] * len(texts))}
    return finetune_glue.make_features(saved.args, glue.TASKS["rte"], data, saved.loaded)[0]["train"]


@pytest.mark.parametrize("columns", [1, 2])
def test_glue_features_are_those_of_the_saved_tokenizer(saved, rng, columns):
    texts = [texts_of(rng, TEXTS, MARKS) for _ in range(columns)]
    features = make_features(saved, list(zip(*texts, strict=True)))
    wanted = saved.used(*texts, truncation=True)  # to the length that is saved, as `pipeline` with truncation=True
    assert any(len(ids) == 16 for ids in wanted.input_ids)
    check(features, wanted)
    rows = weights.read_config(saved.args.model_name_or_path).type_vocab_size
    assert all(max(row.get("token_type_ids", [0])) < rows for row in features) and "attention_mask" in wanted


def check(features: list[dict], wanted) -> None:
    assert [row["input_ids"].tolist() for row in features] == wanted.input_ids
    assert ("token_type_ids" in features[0]) == ("token_type_ids" in wanted)
    if "token_type_ids" in wanted:
        assert [row["token_type_ids"].tolist() for row in features] == wanted.token_type_ids


def test_squad_windows_are_those_of_the_saved_tokenizer(saved, rng):
    """A context of one window; one of several, on the tokenizer's truncation side."""
    asked, contexts = texts_of(rng, TEXTS, MARKS), texts_of(rng, TEXTS, MARKS)
    questions = [
        squad.SquadExample(str(n), question, context, ())
        for n, (question, context) in enumerate(zip(asked, contexts, strict=True))
    ]
    check(squad.make_windows(questions, saved.loaded, 512, 0, 200).features, saved.used(asked, contexts))
    made = squad.make_windows(questions, saved.loaded, 200, 4, 180)
    short = {"truncation": "only_second", "max_length": 200, "stride": 4, "return_overflowing_tokens": True}
    check(made.features, saved.used(asked, contexts, **short))


def test_race_sequences_are_those_of_the_saved_tokenizer(saved, rng):
    texts = [race.fold(text) for text in texts_of(rng, TEXTS, MARKS)]
    options = tuple(race.fold(text) for text in texts_of(rng, 4, MARKS))
    questions = [race.RaceExample(f"{n}, 1", "high", text, "the _ ?", options, 0) for n, text in enumerate(texts)]
    for max_seq_length in (512, 90):
        rows = race.features(questions, saved.loaded, max_seq_length, 80).rows
        batch = race.RaceCollator(saved.loaded)(rows)
        for number, question in enumerate(questions):
            for choice, option in enumerate(options):
                wanted = saved.used(
                    question.with_option(option), question.article, truncation="only_second", max_length=max_seq_length
                )
                shown = batch["attention_mask"][number, choice].bool()
                assert batch["input_ids"][number, choice][shown].tolist() == wanted.input_ids
                assert ("token_type_ids" in batch) == ("token_type_ids" in wanted)
                if "token_type_ids" in batch:
                    assert batch["token_type_ids"][number, choice][shown].tolist() == wanted.token_type_ids


def test_wnli_features_are_those_of_the_saved_tokenizer(saved, rng):
    for text in texts_of(rng, TEXTS, MARKS):
        text = text.rstrip() + " it"
        schema = wsc.Schema(0, text, len(text) - 2, len(text), "the dog", True, "a test")
        row = wsc.build_features(schema, ["the cat"], saved.loaded, max_length=512)
        for ids, targets, phrase in zip(row["input_ids"], row["targets"], ("the dog", "the cat"), strict=True):
            found = np.where(np.array(targets) == wsc.IGNORED, ids, targets).tolist()
            assert found == saved.used(text[:-2] + phrase).input_ids


def test_masks_leave_out_what_stock_masks_leave_out(saved):
    """`DataCollatorForLanguageModeling` predicts no special token, including the user's own."""
    ids = np.arange(len(saved.loaded))
    stock = saved.loaded.get_special_tokens_mask(ids.tolist(), already_has_special_tokens=True)
    [seen] = masking.MlmCollator(saved.loaded, mlm_probability=1.0).seen_by_model([Block({"input_ids": ids}, 0)])
    assert (seen["labels"] == masking.IGNORED).tolist() == [bool(special) for special in stock]


def with_config(folder, tokenizer, **options):
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
    return tokenization.load_tokenizer(folder)


def test_only_own_special_tokens_change_the_fingerprint(tmp_path, tokenizer):
    """Without such tokens, the fingerprint equals that of earlier versions, in token caches and runs."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    former = {name: backend[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    assert tokenization.tokenizer_fingerprint(tokenizer) == durable.fingerprint(former)
    own = with_config(tmp_path, tokenizer, additional_special_tokens=["[E1]"])
    split = with_config(tmp_path, own, split_special_tokens=True)
    assert tokenization.tokenizer_fingerprint(own) != tokenization.tokenizer_fingerprint(split)


def test_a_tokenizer_without_a_template_gets_that_of_training(tmp_path, tokenizer):
    """In memory and, saved beside the model, for fine-tuning and `pipeline`; blocks, and so token caches, stay."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = processors.ByteLevel()
    bare = PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens_map)
    assert bare("the cat", "a dog").input_ids == [*tokenizer("the cat", "a dog", add_special_tokens=False).input_ids]
    loaded = with_config(tmp_path / "bare", bare)
    weights.for_saving(loaded, AutoConfig.for_model("roberta", pad_token_id=1)).save_pretrained(tmp_path / "saved")
    for one in (loaded, tokenization.load_tokenizer(str(tmp_path / "saved"), needed=("pad_token",))):
        for texts in (["the cat"], ["the cat", "a dog"]):
            assert one(*texts).input_ids == tokenizer(*texts).input_ids
        types = one("the cat", "a dog", return_token_type_ids=True)["token_type_ids"]
        assert types == sorted(types) and sum(types) == len(tokenizer("a dog").input_ids)  # </s> B </s>
    assert tokenization.tokenizer_fingerprint(loaded) == tokenization.tokenizer_fingerprint(bare)


@pytest.mark.parametrize("with_template", [True, False])
def test_a_tokenizer_without_begin_and_end_has_a_fingerprint(tmp_path, tokenizer, with_template):
    """As Qwen's and T5's, for fine-tuning, BLiMP and masked words."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    if not with_template:
        backend.post_processor = processors.ByteLevel()
    roles = {"pad_token": "<pad>", "mask_token": "<mask>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **roles).save_pretrained(tmp_path)
    loaded = tokenization.load_tokenizer(str(tmp_path), needed=("pad_token",))
    assert loaded.bos_token is loaded.cls_token is None
    assert set(tokenization.boundary_ids(loaded).values()) == ({0, 2} if with_template else {None})
    assert len(tokenization.tokenizer_fingerprint(loaded)) > 8


@pytest.mark.parametrize("role", ["eos_token", "bos_token", "mask_token"])
def test_a_padding_token_with_another_role_is_refused(tmp_path, tokenizer, role, config_file):
    """Embeddings of padding get no gradient, and RoBERTa's position ids skip each of them, in a block too."""
    roles = {**tokenizer.special_tokens_map, "pad_token": getattr(tokenizer, role)}
    shared = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **roles)
    loaded = with_config(tmp_path, shared)
    with pytest.raises(InputError, match=f"pads with '{getattr(tokenizer, role)}', which blocks have too"):
        masked_lm.build_model(loaded, config_name=config_file, max_seq_length=64)
    tiny = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
    bert = BertConfig(**tiny, vocab_size=len(loaded), pad_token_id=loaded.pad_token_id)
    BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    masked_lm.build_model(loaded, model_name_or_path=str(tmp_path / "bert"), max_seq_length=64)  # trained so


def test_a_class_that_drops_parts_of_a_tokenizer_is_warned_of(tmp_path, caplog):
    """transformers rebuilds `RobertaTokenizer` from vocabulary and merges; `PreTrainedTokenizerFast` keeps the rest."""
    lower = tokenizers.ByteLevelBPETokenizer(lowercase=True)
    special = [*tokenization.LEADING_TOKENS, "<mask>"]
    lower.train_from_iterator(make_documents(20, seed=0), vocab_size=300, special_tokens=special, show_progress=False)
    RobertaTokenizer(tokenizer_object=lower._tokenizer).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(lower.to_str())
    rebuilt = tokenization.load_tokenizer(str(tmp_path))
    assert rebuilt.tokenize("THE cat") != lower.encode("THE cat").tokens
    assert "RobertaTokenizer of transformers splits text in another way than its tokenizer.json" in caplog.text
    caplog.clear()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    assert tokenization.load_tokenizer(str(tmp_path)).tokenize("THE cat") == lower.encode("THE cat").tokens
    assert "in another way" not in caplog.text


@pytest.mark.parametrize("kind", ["WordPiece", "WordLevel"])
def test_special_tokens_written_in_a_text_stay_text(kind, tokenizer):
    """Also where the pre-tokenizer keeps them whole, and the vocabulary has them."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "cat", *map(chr, range(60, 63)), *["##s", "##>", "##/"]]
    backend = Tokenizer(getattr(models, kind)({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens_map)
    (ids,) = tokenization.corpus_encoder(wrapped)(["a </s> cat <mask>"])
    assert not {2, 4} & {*ids} and wrapped.convert_ids_to_tokens([ids[0]]) == ["a"] and names.index("cat") in ids
