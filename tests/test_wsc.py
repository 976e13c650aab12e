"""WNLI by WSC: position of the pronoun, fairseq's candidates, scores of masked phrases, losses summed over schemas."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import RobertaForSequenceClassification

from roberta_recipe.data import IGNORED
from roberta_recipe.errors import InputError
from roberta_recipe.model.masked_lm import MaskedLmMixin, masked_lm_class
from roberta_recipe.tasks import wsc

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
    return masked_lm_class(config)(config).eval()


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
    assert len(warnings) == 1 and "2 queries" in warnings[0] and "rows.jsonl:4" in warnings[0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "rows.jsonl:2 is not JSON"),
        ("[1]", "rows.jsonl:2 is not a row of SuperGLUE's WSC"),
        ({"text": "a", "idx": 0}, "rows.jsonl:2 is not a row of SuperGLUE's WSC .*'target'"),
        (row(index="10"), "rows.jsonl:2 is not a row of SuperGLUE's WSC .*TypeError"),
        (row(query=" ."), "query '', pronoun 'it' or label True is wrong"),
        (row(pronoun=" "), "query 'The cat', pronoun '' or label True is wrong"),
        (row(label="True"), "query 'The cat', pronoun 'it' or label 'True' is wrong"),
        (row(index=3), r"rows.jsonl:2: span2_text 'it' is not at word 3 "),
        (row(index=99), "is not at word 99"),
        (row(pronoun="its"), "span2_text 'its' is not at word 10"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, bad, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, row(), bad)


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


def test_training_uses_positives_with_another_candidate(tokenizer, features):
    negative, unknown = ({**features[0], "label": label} for label in (0, IGNORED))
    alone = wsc.build_features(SCHEMAS[0][0], [], tokenizer)
    kept, left_out = wsc.training_features([negative, features[1], alone, unknown, negative, features[2]])
    assert kept == features[1:3]
    assert left_out == {"negative": 2, "without a label": 1, "without another candidate": 1}


def test_score_is_the_mean_log_probability(tokenizer, features, model, config):
    stock = transformers.RobertaForMaskedLM(config).eval()
    stock.load_state_dict(model.state_dict())
    batch = wsc.WscCollator(tokenizer)(features)
    tensors = batch["input_ids"], batch["attention_mask"], batch["targets"]
    ours, by_hand = wsc.phrase_log_probs(model, *tensors), []
    for example in features:
        for ids, targets in zip(example["input_ids"], example["targets"], strict=True):
            logits = stock(torch.tensor([ids])).logits[0].double()  # a batch of 1, so nothing is padded
            positions = [position for position, target in enumerate(targets) if target != IGNORED]
            chosen = [(logits[p, targets[p]] - logits[p].exp().sum().log()).item() for p in positions]
            by_hand.append(sum(chosen) / len(chosen))
    assert len({len([t for t in row if t != IGNORED]) for row in features[0]["targets"]}) > 1  # a mean is no sum
    assert ours.tolist() == pytest.approx(by_hand, abs=1e-5)


def test_losses_by_hand():
    query, others = torch.tensor(-1.0), torch.tensor([-2.0, -1.2, -0.5])
    # margins: -2+1+.4 < 0, -1.2+1+.4 = .2, -.5+1+.4 = .9; the query's log-probability counts once a candidate
    assert wsc.wsc_loss(query, others, "margin").item() == pytest.approx(3 * 1.0 + 5 * (0.2 + 0.9))
    exps = [math.exp(score) for score in (-1.0, -2.0, -1.2, -0.5)]
    assert wsc.wsc_loss(query, others, "cross_entropy").item() == pytest.approx(-math.log(exps[0] / sum(exps)))


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


@pytest.mark.parametrize("form", ["margin", "cross_entropy"])
def test_training_gets_the_schemas_right(tokenizer, features, model, form):
    batch, optimizer = wsc.WscCollator(tokenizer)(features), torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(40):
        loss, margins = wsc.run_batch(model, batch, form=form)
        assert step or not (margins >= 0).all()
        optimizer.zero_grad()
        (loss / len(features)).backward()
        optimizer.step()
    assert (wsc.run_batch(model, batch)[1] >= 0).all()
    # the same texts with another candidate as the query
    asked = [
        wsc.build_features(wsc.Schema(0, s.text, s.start, s.end, others[0], False, ""), [s.query], tokenizer)
        for s, others in SCHEMAS
    ]
    assert (wsc.run_batch(model, wsc.WscCollator(tokenizer)(asked))[1] < 0).all()


def test_a_checkpoint_needs_its_head(model, config, tmp_path):
    model.save_pretrained(tmp_path / "mlm")  # the file has no decoder weight, which is tied to the embedding
    loaded = wsc.load_masked_lm(str(tmp_path / "mlm"))
    assert isinstance(loaded, MaskedLmMixin) and isinstance(loaded, transformers.RobertaForMaskedLM)
    assert torch.equal(loaded.lm_head.dense.weight, model.lm_head.dense.weight)
    RobertaForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    with pytest.raises(InputError, match=r"classifier' has no weights for lm_head\..* masked-LM head; name a checkp"):
        wsc.load_masked_lm(str(tmp_path / "classifier"))
    random = wsc.load_masked_lm(str(tmp_path / "mlm"), random_weights=True)
    assert random.lm_head.decoder.weight is random.roberta.embeddings.word_embeddings.weight
    assert not torch.equal(random.lm_head.dense.weight, model.lm_head.dense.weight)


def test_features_that_cannot_be_made(tokenizer):
    with pytest.raises(InputError, match="tokens with phrase 'The cat', more than 9; shorten"):
        wsc.build_features(SCHEMAS[0][0], [], tokenizer, max_length=9)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.mask_token = None
    with pytest.raises(InputError, match="has no mask token"):
        wsc.build_features(SCHEMAS[0][0], [], tokenizer)
