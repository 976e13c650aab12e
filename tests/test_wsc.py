"""WNLI by WSC: finding pronouns, fairseq's candidates, scores of masked phrases, losses summed over schemas."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, RobertaForSequenceClassification, Trainer, TrainingArguments

from roberta_recipe.data.masking import IGNORED
from roberta_recipe.data.phrases import load_spacy
from roberta_recipe.errors import InputError
from roberta_recipe.tasks import wsc
from roberta_recipe.training.modeling import RobertaForMaskedLM

TEXT = "The cat follows a small dog near the sea , but it leaves at night."


def row(text=TEXT, query="The cat", pronoun="it", index=10, label=True, **others):
    target = {"span1_text": query, "span1_index": 0, "span2_text": pronoun, "span2_index": index}
    return {"text": text, "target": target, "idx": 0, **({} if label is None else {"label": label}), **others}


def read(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n", encoding="utf-8")
    return wsc.read_wsc(path)


def schema(text, query, pronoun, label=True):
    """A schema whose pronoun is the last occurrence of `pronoun` between spaces."""
    start = text.rindex(f" {pronoun} ") + 1
    return wsc.Schema(0, text, start, start + len(pronoun), query, label, "rows.jsonl:1")


# numbers of candidates: 2, 1, 3, 1
SCHEMAS = [
    (schema("The cat sees a small dog near the sea, and it leaves at night.", "The cat", "it"), ["a small dog", "sea"]),
    (schema("My old friend likes the teacher, but she forgets.", "the teacher", "she"), ["My old friend"]),
    (schema("The red boat follows this house, and it leaves.", "The red boat", "it"), ["this house", "house", "dog"]),
    (schema("Every child paints the river as it carries a wall.", "the river", "it"), ["Every child"]),
]


@pytest.fixture
def features(tokenizer):
    return [wsc.build_features(positive, candidates, tokenizer) for positive, candidates in SCHEMAS]


@pytest.fixture
def model(config):
    torch.manual_seed(0)
    return RobertaForMaskedLM(config).eval()


@pytest.mark.parametrize(
    ("text", "pronoun", "index", "marked"),
    [
        (TEXT, "it", 10, "The cat follows a small dog near the sea, but [it] leaves at night."),
        ("Mark was near Mr. Singer 's dog. He left", "He", 7, "Mark was near Mr. Singer's dog. [He] left"),
        ('Ann ran as she was "it".', "it", 5, 'Ann ran as she was "[it]".'),
        ("A tree, beside it, a book", "it,", 3, "A tree, beside [it], a book"),
        ("One day they might use it , but it broke", "it", 4, "One day they might use [it], but it broke"),
        ("Ann and Bo: THEY left", "they", 3, "Ann and Bo: [THEY] left"),
        ("Ann thinks he's late", "he", 2, "Ann thinks [he]'s late"),
        ('He said " no way " and " yes " as  he\nleft .', "he", 10, 'He said "no way" and "yes" as [he] left.'),
        ("It is n't the captain ’s ; take him .", "him", 7, "It isn't the captain’s; take [him]."),
        # "the" does not match "he", "its" does not match "it"
        ("This is the dog he saw", "he", 2, "This is the dog [he] saw"),
        ("They hear its bark as it ran", "it", 3, "They hear its bark as [it] ran"),
    ],
)
def test_pronouns_are_found(tmp_path, text, pronoun, index, marked):
    (found,) = read(tmp_path, row(text, "x", pronoun, index))
    assert f"{found.text[: found.start]}[{found.text[found.start : found.end]}]{found.text[found.end :]}" == marked


def test_queries_and_labels(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(wsc.logger, "warning", warnings.append)
    rows = [
        row(query="the cat.", label=False),
        "",
        row(query="The\nCAT ,", label=None),
        row(query="cats and dogs", idx=7),
        row(query="og near"),  # the query is not whole words of the text
    ]
    found = read(tmp_path, *rows)
    assert [s.query for s in found] == ["the cat", "The CAT", "cats and dogs", "og near"]
    assert [s.label for s in found] == [False, None, True, True]
    assert found[2].idx == 7 and found[2].where == f"{tmp_path}/rows.jsonl:4"
    assert len(warnings) == 1 and "2 queries" in warnings[0] and "4 ('cats and dogs'), 5 ('og near')" in warnings[0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "rows.jsonl:2 is not JSON"),
        ("[1]", "rows.jsonl:2 is not a row of SuperGLUE's WSC"),
        (row(target="it"), "rows.jsonl:2 is not a row of SuperGLUE's WSC"),
        ({"text": "a", "idx": 0}, "rows.jsonl:2 is not a row of SuperGLUE's WSC .*'target'"),
        ({**row(), "target": {"span1_text": "a", "span2_index": 1}}, "is not a row of SuperGLUE's WSC .*'span2_text'"),
        (row(index="10"), "rows.jsonl:2 is not a row of SuperGLUE's WSC .*TypeError"),
        (row(query=""), "query '', pronoun 'it' or label True is wrong"),
        (row(pronoun=" "), "query 'The cat', pronoun '' or label True is wrong"),
        (row(query=" ."), "query '', pronoun 'it' or label True is wrong"),
        (row(label="True"), "query 'The cat', pronoun 'it' or label 'True' is wrong"),
        (row(index=3), r"rows.jsonl:2: span2_text 'it' is not at word 3 "),
        (row(index=-5), "is not at word -5"),
        (row(index=99), "is not at word 99"),
        (row(pronoun="its"), "span2_text 'its' is not at word 10"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, bad, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, row(), bad)


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match="has no rows"):
        read(tmp_path, "")
    with pytest.raises(InputError, match=r"none\.jsonl is missing; name a \.jsonl file of SuperGLUE's WSC"):
        wsc.read_wsc(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    with pytest.raises(InputError, match=r"not UTF-8 text .* at byte 13"):
        wsc.read_wsc(tmp_path / "latin.jsonl")


class Parse(list):
    """A stand-in for a spaCy `Doc`, with what `noun_phrases` reads."""

    def __init__(self, tagged, chunks):
        super().__init__()
        self.text = ""
        for word in tagged.split():
            word, tag = word.rsplit("/", 1)
            gap = "" if tag in ("PUNCT", "PART") or not self else " "
            self.append(SimpleNamespace(text=word, pos_=tag, idx=len(self.text + gap)))
            self.text += gap + word
        self.noun_chunks = [SimpleNamespace(start=start, end=end) for start, end in chunks]


def test_noun_phrases():
    parse = Parse(
        "The/DET city/NOUN councilmen/NOUN refused/VERB Ann/PROPN 's/PART permit/NOUN as/SCONJ they/PRON saw/VERB "
        "their/PRON own/ADJ dog/NOUN Rex/PROPN and/CCONJ she/PRON herself/PRON ran/VERB home/NOUN",
        [(0, 3), (4, 7), (8, 9), (10, 14), (15, 17)],
    )
    assert parse.text.startswith("The city councilmen refused Ann's permit as they saw their own dog Rex")
    # chunks, and their runs of nouns and of names; without pronouns, but with chunks that begin with a possessive
    everything = ["The city councilmen", "city councilmen", "Ann", "Ann's permit", "permit", "their own dog Rex"]
    everything += ["dog", "Rex", "home"]
    assert wsc.noun_phrases(parse.text, parse, "nobody") == everything
    # phrases that hold the query or are within the query, case aside, are no candidates
    assert wsc.noun_phrases(parse.text, parse, "ann") == everything[:2] + everything[4:]
    assert wsc.noun_phrases(parse.text, parse, "The City Councilmen") == everything[2:]
    assert wsc.noun_phrases(parse.text, parse, "city") == everything[2:]
    assert wsc.noun_phrases("", Parse("", []), "x") == []


def test_twice_in_the_text_is_twice_a_candidate():
    parse = Parse("Ann/PROPN saw/VERB Bo/PROPN and/CCONJ Bo/PROPN left/VERB", [(0, 1), (2, 3), (4, 5)])
    assert wsc.noun_phrases(parse.text, parse, "Ann") == ["Bo", "Bo"]


def test_features_of_byte_level_bpe(tokenizer):
    positive, candidates = SCHEMAS[0]
    made = wsc.build_features(positive, candidates, tokenizer)
    assert made["label"] == 1 and len(made["input_ids"]) == 3
    for phrase, ids, targets in zip([positive.query, *candidates], made["input_ids"], made["targets"], strict=True):
        masked = [token == tokenizer.mask_token_id for token in ids]
        assert masked == [target != IGNORED for target in targets]
        hidden = [target for target in targets if target != IGNORED]
        # the masked text has the space before the phrase, and the phrase's case
        assert tokenizer.decode(hidden) == f" {phrase}"
        whole = [target if hit else token for token, target, hit in zip(ids, targets, masked, strict=True)]
        text = f"The cat sees a small dog near the sea, and {phrase} leaves at night."
        assert whole == tokenizer(text)["input_ids"]
        assert tokenizer.decode(whole, skip_special_tokens=True) == text
    first = wsc.Schema(0, "It leaves, as she’s old.", 0, 2, "The cat", None, "")
    made = wsc.build_features(first, [], tokenizer)
    assert tokenizer.decode([t for t in made["targets"][0] if t != IGNORED]) == "The cat"  # without a space
    assert made["label"] == IGNORED
    # each of the three bytes of "…" is a mask, and so is a space that no token can begin with
    made = [wsc.build_features(with_dots, ["…"], tokenizer)["targets"][1] for with_dots in (first, positive)]
    assert [sum(target != IGNORED for target in targets) for targets in made] == [3, 4]


@pytest.fixture(scope="module")
def wordpiece():
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "the", "cat", "##s", "leave", "at", "night", ",", "and"]
    backend = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "mask", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_features_of_wordpiece(wordpiece):
    night_schema = wsc.Schema(0, "At night, they leave.", 10, 14, "The cats", False, "rows.jsonl:1")
    made = wsc.build_features(night_schema, ["night"], wordpiece)
    assert wordpiece.convert_ids_to_tokens([t for t in made["targets"][0] if t != IGNORED]) == ["the", "cat", "##s"]
    shown = wordpiece.convert_ids_to_tokens(made["input_ids"][1])
    assert shown == ["at", "night", ",", "[MASK]", "leave", "[UNK]"]
    assert made["label"] == 0
    with pytest.raises(InputError, match="no tokens for the phrase"):
        wsc.build_features(night_schema, ["\x00"], wordpiece)  # the normalizer drops control characters


def test_features_that_cannot_be_made(tokenizer, wordpiece):
    night_schema = SCHEMAS[0][0]
    shorter, longest = map(len, wsc.build_features(night_schema, ["the sea near the river"], tokenizer)["input_ids"])
    assert shorter < longest
    wsc.build_features(night_schema, ["the sea near the river"], tokenizer, max_length=longest)
    message = (
        f"rows.jsonl:1: {longest} tokens with the phrase 'the sea near the river', more than the {longest - 1} that fit"
    )
    with pytest.raises(InputError, match=message):
        wsc.build_features(night_schema, ["the sea near the river"], tokenizer, max_length=longest - 1)
    long = schema("The cat sees it. " * 200 + "And it leaves.", "The cat", "it")
    with pytest.raises(InputError, match="more than the 512 that fit"):
        wsc.build_features(long, [], tokenizer)
    maskless = PreTrainedTokenizerFast(tokenizer_object=wordpiece.backend_tokenizer, pad_token="[PAD]")
    with pytest.raises(InputError, match="has no mask token"):
        wsc.build_features(night_schema, [], maskless)
    slow = SimpleNamespace(mask_token_id=3, is_fast=False, name_or_path="slow/tokenizer")
    with pytest.raises(InputError, match="'slow/tokenizer' has no character offsets"):
        wsc.build_features(night_schema, [], slow)


def test_training_uses_positives_with_another_candidate(tokenizer, features):
    negative, unknown = ({**features[0], "label": label} for label in (0, IGNORED))
    alone = wsc.build_features(SCHEMAS[0][0], [], tokenizer)
    kept, left_out = wsc.training_features([negative, features[1], alone, unknown, negative, features[2]])
    assert kept == features[1:3]
    assert left_out == {"negative": 2, "without a label": 1, "without another candidate": 1}


def test_collator(tokenizer, features):
    batch = wsc.WscCollator(tokenizer)([features[0], {**features[1], "label": 0}])
    assert batch["group_sizes"].tolist() == [3, 2] and batch["labels"].tolist() == [1, 0]
    rows = features[0]["input_ids"] + features[1]["input_ids"]
    width = max(map(len, rows))
    assert batch["input_ids"].shape == batch["targets"].shape == batch["attention_mask"].shape == (5, width)
    assert batch["attention_mask"].sum(dim=1).tolist() == [len(ids) for ids in rows]
    for ids, padded, targets in zip(rows, batch["input_ids"].tolist(), batch["targets"].tolist(), strict=True):
        assert padded == ids + [tokenizer.pad_token_id] * (width - len(ids))
        assert targets[len(ids) :] == [IGNORED] * (width - len(ids))


def test_score_is_the_mean_log_probability(tokenizer, features, model, config):
    stock = transformers.RobertaForMaskedLM(config).eval()
    stock.load_state_dict(model.state_dict())
    batch = wsc.WscCollator(tokenizer)(features)
    tensors = batch["input_ids"], batch["attention_mask"], batch["targets"]
    ours, theirs = wsc.score(model, *tensors), wsc.score(stock, *tensors)
    by_hand = []
    for example in features:
        for ids, targets in zip(example["input_ids"], example["targets"], strict=True):
            logits = stock(torch.tensor([ids])).logits[0].double()  # a batch of 1, so nothing is padded
            positions = [position for position, target in enumerate(targets) if target != IGNORED]
            chosen = [(logits[p, targets[p]] - logits[p].exp().sum().log()).item() for p in positions]
            by_hand.append(sum(chosen) / len(chosen))
    assert len({len([t for t in row if t != IGNORED]) for row in features[0]["targets"]}) > 1  # a mean is no sum
    assert ours.tolist() == pytest.approx(by_hand, abs=1e-5)
    assert theirs.tolist() == pytest.approx(by_hand, abs=1e-5)


def test_losses_by_hand():
    query, others = torch.tensor(-1.0), torch.tensor([-2.0, -1.2, -0.5])
    # margins: -2+1+.4 < 0, -1.2+1+.4 = .2, -.5+1+.4 = .9; the query's log-probability counts once a candidate
    assert wsc.wsc_loss(query, others, "margin").item() == pytest.approx(3 * 1.0 + 5 * (0.2 + 0.9))
    assert wsc.wsc_loss(query, others, "margin", alpha=1.0, beta=0.0).item() == pytest.approx(3 + 0.5)
    exps = [math.exp(score) for score in (-1.0, -2.0, -1.2, -0.5)]
    assert wsc.wsc_loss(query, others, "cross_entropy").item() == pytest.approx(-math.log(exps[0] / sum(exps)))


def test_prediction():
    query = torch.tensor(-1.0)
    assert wsc.margin(query, torch.tensor([-2.0, -1.0])) == 0  # a tie goes to the query, as in fairseq
    assert wsc.margin(query, torch.tensor([-2.0, -0.9])).item() == pytest.approx(-0.1)
    assert wsc.margin(query, torch.tensor([])) == torch.inf


@pytest.mark.parametrize("form", ["margin", "cross_entropy"])
def test_gradient_does_not_depend_on_accumulation(tokenizer, features, model, form):
    def gradient(batches):
        model.zero_grad()
        total = 0.0
        for examples in batches:
            loss, _ = wsc.run_batch(model, wsc.WscCollator(tokenizer)(examples), form=form)
            (loss / len(features)).backward()
            total += loss.item()
        return total, [parameter.grad.clone() for parameter in model.parameters()]

    whole, once = gradient([features])
    halves, twice = gradient([features[:2], features[2:]])
    assert whole == pytest.approx(halves, rel=1e-6) and whole > 1
    assert max(float(grad.abs().max()) for grad in once) > 1e-2
    for at_once, in_halves in zip(once, twice, strict=True):
        torch.testing.assert_close(at_once, in_halves, rtol=1e-4, atol=1e-6)


def test_schemas_that_are_not_positive_have_no_loss(tokenizer, features, model):
    def run(labels):
        examples = [{**example, "label": label} for example, label in zip(features, labels, strict=True)]
        return wsc.run_batch(model, wsc.WscCollator(tokenizer)(examples))

    everything, predictions = run([1, 1, 1, 1])
    some, same = run([1, 0, IGNORED, 1])
    of_two = sum(run([int(number == positive) for number in range(4)])[0].item() for positive in (0, 3))
    assert some.item() == pytest.approx(of_two, rel=1e-6) and 0 < some.item() < everything.item()
    assert predictions.equal(same) and len(predictions) == 4
    none, _ = run([0, 0, 0, IGNORED])
    none.backward()
    assert none.item() == 0 and all(not parameter.grad.any() for parameter in model.parameters())


class WscTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.counts = [*getattr(self, "counts", []), int(num_items_in_batch)]
        return wsc.run_batch(model, inputs, form=self.form)[0] / num_items_in_batch


@pytest.mark.parametrize("form", ["margin", "cross_entropy"])
def test_training_gets_the_schemas_right(tokenizer, features, model, form, tmp_path):
    collator = wsc.WscCollator(tokenizer)
    with torch.no_grad():
        before, guesses = wsc.run_batch(model, collator(features), form=form)
    assert not (guesses >= 0).all()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=40,
        learning_rate=3e-3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        remove_unused_columns=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = WscTrainer(model, arguments, train_dataset=features, data_collator=collator)
    trainer.form = form
    trainer.train()
    assert set(trainer.counts) == {4}  # counts schemas of both micro-batches, not rows or masks
    model.eval()
    with torch.no_grad():
        after, predictions = wsc.run_batch(model, collator(features), form=form)
    assert (predictions >= 0).all() and len(predictions) == 4
    assert after < 0.5 * before
    # the same texts with another candidate as the query
    asked = [
        wsc.build_features(wsc.Schema(0, s.text, s.start, s.end, others[0], False, ""), [s.query], tokenizer)
        for s, others in SCHEMAS
    ]
    with torch.no_grad():
        assert (wsc.run_batch(model, collator(asked))[1] < 0).all()


def test_spacy_is_asked_for_by_its_command(monkeypatch):
    command = "run `pip install spacy`, then `python -m spacy download en_core_web_lg`, or name another"
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(InputError, match=command):
        load_spacy("en_core_web_lg", "WNLI")

    def load(model):
        if model != "there":
            raise OSError(f"[E050] Can't find model {model!r}")
        return lambda text: SimpleNamespace(has_annotation=lambda name: True)

    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace(load=load))
    with pytest.raises(InputError, match=command):
        load_spacy("en_core_web_lg", "WNLI")
    assert callable(load_spacy("there", "WNLI"))


def test_a_checkpoint_needs_its_head(model, config, tmp_path):
    model.save_pretrained(tmp_path / "mlm")  # the file has no decoder weight, which is tied to the embedding
    loaded = wsc.load_masked_lm(str(tmp_path / "mlm"))
    assert type(loaded) is RobertaForMaskedLM
    assert torch.equal(loaded.lm_head.dense.weight, model.lm_head.dense.weight)
    RobertaForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    with pytest.raises(
        InputError, match=r"classifier' has no weights for lm_head\..* masked-LM head; name a checkpoint"
    ):
        wsc.load_masked_lm(str(tmp_path / "classifier"))
    random = wsc.load_masked_lm(str(tmp_path / "classifier"), random_weights=True)
    assert type(random) is RobertaForMaskedLM and random.dtype == torch.float32
    assert random.lm_head.decoder.weight is random.roberta.embeddings.word_embeddings.weight
    random = wsc.load_masked_lm(str(tmp_path / "mlm"), random_weights=True)
    assert not torch.equal(random.lm_head.dense.weight, model.lm_head.dense.weight)
    with pytest.raises(InputError, match="no model config at model_name_or_path='nothing/here'"):
        wsc.load_masked_lm("nothing/here")
    sizes = dict(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    assert type(wsc.load_masked_lm(str(tmp_path / "bert"))) is transformers.BertForMaskedLM
