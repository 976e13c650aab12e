"""fairseq's layout and forward pass, written by hand, against the converted model."""

import argparse
import json
import os

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from roberta_recipe.errors import InputError
from roberta_recipe.tools import fairseq

HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 16, 3, 4, 24, 34
NORMS = ("self_attn_layer_norm", "final_layer_norm", "layernorm_embedding", "layer_norm")


def by_hand(vocab_size, classes=3):
    """Random weights under fairseq's names; none has its initial value."""
    generator, weights = torch.Generator().manual_seed(0), {}

    def add(name, *shape):
        norm = name.rpartition(".")[0].endswith(NORMS) and name.endswith("weight")
        weights[name] = torch.randn(*shape, generator=generator) * 0.3 + norm

    body = "encoder.sentence_encoder."
    add(f"{body}embed_tokens.weight", vocab_size, HIDDEN)
    add(f"{body}embed_positions.weight", POSITIONS, HIDDEN)
    for kind in ("weight", "bias"):
        add(f"{body}layernorm_embedding.{kind}", HIDDEN)
    for layer in range(LAYERS):
        sizes = {f"self_attn.{letter}_proj": (HIDDEN, HIDDEN) for letter in ("q", "k", "v", "out")}
        for name, (out, into) in {**sizes, "fc1": (INNER, HIDDEN), "fc2": (HIDDEN, INNER)}.items():
            add(f"{body}layers.{layer}.{name}.weight", out, into)
            add(f"{body}layers.{layer}.{name}.bias", out)
        for name in NORMS[:2]:
            for kind in ("weight", "bias"):
                add(f"{body}layers.{layer}.{name}.{kind}", HIDDEN)
    add("encoder.lm_head.dense.weight", HIDDEN, HIDDEN)
    for name in ("dense.bias", "layer_norm.weight", "layer_norm.bias"):
        add(f"encoder.lm_head.{name}", HIDDEN)
    add("encoder.lm_head.bias", vocab_size)
    weights["encoder.lm_head.weight"] = weights[f"{body}embed_tokens.weight"]
    add("classification_heads.mnli.dense.weight", HIDDEN, HIDDEN)
    add("classification_heads.mnli.dense.bias", HIDDEN)
    add("classification_heads.mnli.out_proj.weight", classes, HIDDEN)
    add("classification_heads.mnli.out_proj.bias", classes)
    return weights


def forward(weights, ids, head=None):
    """fairseq's forward pass: post-norm, positions count from padding id + 1; without padding."""

    def linear(x, name):
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x, name):
        return functional.layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    body = "encoder.sentence_encoder."
    positions = torch.arange(ids.shape[1]) + 2
    x = weights[f"{body}embed_tokens.weight"][ids] + weights[f"{body}embed_positions.weight"][positions]
    x = norm(x, f"{body}layernorm_embedding")
    for number in range(LAYERS):
        layer = f"{body}layers.{number}."
        q, k, v = (
            linear(x, f"{layer}self_attn.{letter}_proj").unflatten(-1, (HEADS, -1)).transpose(1, 2) for letter in "qkv"
        )
        share = torch.softmax(q @ k.transpose(-1, -2) / (HIDDEN / HEADS) ** 0.5, dim=-1)
        x = norm(x + linear((share @ v).transpose(1, 2).flatten(2), f"{layer}self_attn.out_proj"), f"{layer}{NORMS[0]}")
        x = norm(x + linear(functional.gelu(linear(x, f"{layer}fc1")), f"{layer}fc2"), f"{layer}{NORMS[1]}")
    if head:
        first = torch.tanh(linear(x[:, 0], f"classification_heads.{head}.dense"))
        return linear(first, f"classification_heads.{head}.out_proj")
    x = norm(functional.gelu(linear(x, "encoder.lm_head.dense")), "encoder.lm_head.layer_norm")
    return functional.linear(x, weights["encoder.lm_head.weight"], weights["encoder.lm_head.bias"])


@pytest.fixture
def checkpoint(tokenizer, tmp_path):
    weights = by_hand(len(tokenizer))
    arguments = argparse.Namespace(encoder_attention_heads=HEADS, dropout=0.1, attention_dropout=0.1)
    torch.save({"args": arguments, "model": weights, "extra_state": {"epoch": 1}}, tmp_path / "model.pt")
    return tmp_path / "model.pt", weights


@pytest.fixture
def ids(tokenizer):
    return torch.randint(4, len(tokenizer), (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("head", [None, "mnli"])
def test_there_and_back_the_logits_are_the_same(checkpoint, ids, tokenizer, tokenizer_dir, tmp_path, head):
    path, weights = checkpoint
    named = ["--head", head] if head else []
    there = ["to_hf", "--checkpoint", str(path), "--output_dir", str(tmp_path / "hf"), *named]
    fairseq.main([*there, "--tokenizer_name", tokenizer_dir])
    cls = AutoModelForSequenceClassification if head else AutoModelForMaskedLM
    model = cls.from_pretrained(tmp_path / "hf").eval()
    wanted = forward(weights, ids, head)
    with torch.no_grad():
        assert (model(ids).logits - wanted).abs().max() < 1e-6 * wanted.abs().max().clamp(min=1)
    if head:
        assert model.config.id2label == {0: "contradiction", 1: "neutral", 2: "entailment"}
    back = ["to_fairseq", "--model_name_or_path", str(tmp_path / "hf"), "--output_dir", str(tmp_path / "back"), *named]
    fairseq.main(back)
    again, arguments = fairseq.read_checkpoint(tmp_path / "back" / "model.pt")
    expected = {n for n in weights if not n.startswith("encoder.lm_head." if head else "classification_heads.")}
    assert set(again) == expected and all(again[name].equal(weights[name]) for name in expected)
    assert (arguments["encoder_attention_heads"], arguments["max_positions"]) == (HEADS, POSITIONS - 2)
    # fairseq's three files give back every id of the vocabulary
    files = [str(tmp_path / "back" / name) for name in ("dict.txt", "encoder.json", "vocab.bpe")]
    vocabulary = ["--dict", files[0], "--encoder", files[1], "--bpe", files[2]]
    again = ["to_hf", "--checkpoint", str(tmp_path / "back" / "model.pt"), "--output_dir", str(tmp_path / "twice")]
    fairseq.main([*again, *vocabulary, *named])
    twice = AutoTokenizer.from_pretrained(tmp_path / "twice")
    text = "The cat sees <mask> in the garden, naïvely 🎉."
    assert twice.get_vocab() == tokenizer.get_vocab() and twice(text).input_ids == tokenizer(text).input_ids


def test_merges_of_hashes_are_no_comments(tmp_path):
    tokens = ["a", "#", "##", "Ġ", "Ġ##"]
    (tmp_path / "dict.txt").write_text("".join(f"{number} 1\n" for number in range(len(tokens))))
    (tmp_path / "encoder.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n# #\nĠ ##\n")
    files = [tmp_path / name for name in ("dict.txt", "encoder.json", "vocab.bpe")]
    assert fairseq.read_vocabulary(*files).tokenize("a##a ##") == ["a", "##", "a", "Ġ##"]


def test_old_names_and_packed_projections(checkpoint, ids):
    _, weights = checkpoint
    old = {}
    for name, tensor in weights.items():
        name = name.replace("encoder.", "decoder.", 1).replace("layernorm_embedding", "emb_layer_norm")
        if ".q_proj." in name:
            chunks = [weights[name.replace("decoder.", "encoder.", 1).replace("q_proj", f"{p}_proj")] for p in "qkv"]
            old[name.replace("q_proj.", "in_proj_")] = torch.cat(chunks)
        elif ".k_proj." not in name and ".v_proj." not in name:
            old[name] = tensor
    old["decoder.sentence_encoder.version"] = torch.tensor(1)
    again = fairseq.modern(old)
    assert set(again) == set(weights) and all(again[name].equal(weights[name]) for name in weights)


def test_what_fairseq_lacks_is_folded_in(config, tokenizer, ids):
    """fairseq has no token-type vector, and no embedding rows without a token."""
    config.vocab_size, config.hidden_size, config.num_attention_heads = len(tokenizer) + 5, HIDDEN, HEADS
    config.num_hidden_layers = LAYERS
    torch.manual_seed(0)
    model = fairseq.RobertaForMaskedLM(config).eval()
    model.roberta.embeddings.token_type_embeddings.weight.data.normal_()
    weights = fairseq.to_fairseq(model, len(tokenizer))
    with torch.no_grad():
        wanted = model(ids).logits[..., : len(tokenizer)]
    assert (forward(weights, ids) - wanted).abs().max() < 1e-5
    assert len(weights["encoder.lm_head.bias"]) == len(tokenizer)


def test_labels_of_mnli_are_put_in_fairseqs_order(config):
    config.id2label = {0: "ENTAILMENT", 1: "NEUTRAL", 2: "CONTRADICTION"}
    config.num_labels = 3
    model = fairseq.RobertaForSequenceClassification(config)
    found = fairseq.to_fairseq(model, config.vocab_size, "mnli")["classification_heads.mnli.out_proj.weight"]
    assert found.equal(model.classifier.out_proj.weight[[2, 1, 0]])
    config.id2label = {0: "yes", 1: "no", 2: "maybe"}
    with pytest.raises(InputError, match="head=mnli has the labels contradiction, neutral, entailment"):
        fairseq.to_fairseq(fairseq.RobertaForSequenceClassification(config), config.vocab_size, "mnli")
    with pytest.raises(InputError, match=r"no module for classifier\S+; name a head"):
        fairseq.to_fairseq(model, config.vocab_size)


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


def test_nothing_of_a_pickle_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "args": Harmful()}, "model.pt")
    with pytest.raises(InputError, match="cannot be read without running what it holds"):
        fairseq.read_checkpoint(tmp_path / "model.pt")
    assert not (tmp_path / "harmed").exists()


def test_bad_checkpoints_are_named(checkpoint, tmp_path, tokenizer_dir):
    path, weights = checkpoint
    with pytest.raises(InputError, match=r"none.pt is missing"):
        fairseq.read_checkpoint(tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("no pickle")
    with pytest.raises(InputError, match=r"text.pt cannot be read"):
        fairseq.read_checkpoint(tmp_path / "text.pt")
    torch.save({"weights": {}}, tmp_path / "other.pt")
    with pytest.raises(InputError, match=r"other.pt is no checkpoint of fairseq"):
        fairseq.read_checkpoint(tmp_path / "other.pt")
    with pytest.raises(InputError, match=r"no RoBERTa of fairseq: it has no 'encoder.sentence_encoder.embed_tokens"):
        fairseq.to_hugging_face({}, {})
    with pytest.raises(InputError, match="head=rte is none of the checkpoint's: mnli"):
        fairseq.to_hugging_face(weights, {}, "rte", HEADS)
    with pytest.raises(InputError, match="5 attention heads do not divide the hidden size 16"):
        fairseq.to_hugging_face(weights, {}, None, 5)
    lacking = {name: tensor for name, tensor in weights.items() if "layers.1.fc2.bias" not in name}
    with pytest.raises(InputError, match=r"lacks roberta.encoder.layer.1.output.dense.bias"):
        fairseq.to_hugging_face(lacking, {}, None, HEADS)
    with pytest.raises(InputError, match=r"1 weights are not RoBERTa's, decoder.other"):
        fairseq.to_hugging_face({**weights, "decoder.other": torch.zeros(1)}, {}, None, HEADS)
    argv = ["to_hf", "--checkpoint", str(path), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(InputError, match="name dict, encoder and bpe"):
        fairseq.main([*argv, "--dict", "x"])
    with pytest.raises(InputError, match="name dict, encoder and bpe"):
        fairseq.main(argv)
    (tmp_path / "dict.txt").write_text("0 1\n99 1\n")
    (tmp_path / "encoder.json").write_text(json.dumps({"a": 0}))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    files = [tmp_path / name for name in ("dict.txt", "encoder.json", "vocab.bpe")]
    with pytest.raises(InputError, match=r"dict.txt, line 2: '99' is no token"):
        fairseq.read_vocabulary(*files)
    (tmp_path / "dict.txt").write_text("0 1\nmadeupword0000 0\n")
    with pytest.raises(InputError, match="the tokenizer has 7 entries, the embedding"):
        fairseq.main([*argv, "--dict", str(files[0]), "--encoder", str(files[1]), "--bpe", str(files[2])])
    assert not (tmp_path / "out").exists()
