"""fairseq's layout and forward pass, written by hand, compared with the converted model."""

import argparse
import json
import os
import random
import re
from collections import Counter

import pytest
import torch
from tokenizers import normalizers, pre_tokenizers
from torch.nn import functional
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from roberta_recipe.errors import InputError
from tools import fairseq

HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 16, 3, 4, 24, 34
NORMS = ("self_attn_layer_norm", "final_layer_norm", "layernorm_embedding", "layer_norm")


def by_hand(vocab_size, classes=3, layers=LAYERS, untied=False, seed=0):
    """Random weights under fairseq's names; none has its initial value."""
    generator, weights = torch.Generator().manual_seed(seed), {}

    def add(name, *shape):
        norm = name.rpartition(".")[0].endswith(NORMS) and name.endswith("weight")
        weights[name] = torch.randn(*shape, generator=generator) * 0.3 + norm

    body = "encoder.sentence_encoder."
    add(f"{body}embed_tokens.weight", vocab_size, HIDDEN)
    add(f"{body}embed_positions.weight", POSITIONS, HIDDEN)
    for kind in ("weight", "bias"):
        add(f"{body}layernorm_embedding.{kind}", HIDDEN)
    for layer in range(layers):
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
    if untied:
        add("encoder.lm_head.weight", vocab_size, HIDDEN)
    add("classification_heads.mnli.dense.weight", HIDDEN, HIDDEN)
    add("classification_heads.mnli.dense.bias", HIDDEN)
    add("classification_heads.mnli.out_proj.weight", classes, HIDDEN)
    add("classification_heads.mnli.out_proj.bias", classes)
    return weights


ACTIVATIONS = {  # by fairseq's names
    "gelu": functional.gelu,
    "gelu_accurate": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu_squared": lambda x: torch.relu(x) ** 2,
    "tanh": torch.tanh,
    "linear": lambda x: x,
}


def forward(weights, ids, head=None, heads=HEADS, activation="gelu", pooler="tanh"):
    """fairseq's forward pass: post-norm, positions count from padding id + 1; without padding."""

    def linear(x, name):
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x, name):
        return functional.layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    body, act = "encoder.sentence_encoder.", ACTIVATIONS[activation]
    positions = torch.arange(ids.shape[1]) + 2
    x = weights[f"{body}embed_tokens.weight"][ids] + weights[f"{body}embed_positions.weight"][positions]
    x = norm(x, f"{body}layernorm_embedding")
    for number in range(len({name.split(".")[3] for name in weights if ".layers." in name})):
        layer = f"{body}layers.{number}."
        q, k, v = (
            linear(x, f"{layer}self_attn.{letter}_proj").unflatten(-1, (heads, -1)).transpose(1, 2) for letter in "qkv"
        )
        share = torch.softmax(q @ k.transpose(-1, -2) / (HIDDEN / heads) ** 0.5, dim=-1)
        x = norm(x + linear((share @ v).transpose(1, 2).flatten(2), f"{layer}self_attn.out_proj"), f"{layer}{NORMS[0]}")
        x = norm(x + linear(act(linear(x, f"{layer}fc1")), f"{layer}fc2"), f"{layer}{NORMS[1]}")
    if head:
        first = ACTIVATIONS[pooler](linear(x[:, 0], f"classification_heads.{head}.dense"))
        return linear(first, f"classification_heads.{head}.out_proj")
    x = norm(act(linear(x, "encoder.lm_head.dense")), "encoder.lm_head.layer_norm")
    return functional.linear(x, weights["encoder.lm_head.weight"], weights["encoder.lm_head.bias"])


@pytest.fixture
def checkpoint(tokenizer, tmp_path):
    weights = by_hand(len(tokenizer))
    arguments = argparse.Namespace(encoder_attention_heads=HEADS, dropout=0.1, attention_dropout=0.1)
    torch.save({"args": arguments, "model": weights, "extra_state": {"epoch": 1}}, tmp_path / "model.pt")
    return tmp_path / "model.pt", weights


def settings_in(form, settings):
    """A checkpoint's settings as in fairseq's releases; newer ones include the rest of the configuration."""
    namespace = argparse.Namespace(**settings)
    return {
        "args": {"args": namespace},
        "cfg": {"args": None, "cfg": {"model": namespace, "task": {"_name": "masked_lm"}, "bpe": None}},
        "cfg, a mapping": {"args": None, "cfg": {"model": {"encoder_layers_to_keep": None, **settings}}},
    }[form]


FORMS = ["args", "cfg", "cfg, a mapping"]


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
    again, settings = fairseq.read_checkpoint(tmp_path / "back" / "model.pt")
    expected = {n for n in weights if not n.startswith("encoder.lm_head." if head else "classification_heads.")}
    assert all(again[name].equal(weights[name]) for name in expected)
    # fairseq's model has a masked-LM head always
    assert set(again) == {n for n in weights if head or not n.startswith("classification_heads.")}
    assert (settings["encoder_attention_heads"], settings["max_positions"]) == (HEADS, POSITIONS - 2)
    assert settings["load_checkpoint_heads"] and settings["pooler_dropout"] == 0.0 and settings["dropout"] == 0.1
    # fairseq's three files give back every id of the vocabulary
    files = [str(tmp_path / "back" / name) for name in ("dict.txt", "encoder.json", "vocab.bpe")]
    vocabulary = ["--dict", files[0], "--encoder", files[1], "--bpe", files[2]]
    again = ["to_hf", "--checkpoint", str(tmp_path / "back" / "model.pt"), "--output_dir", str(tmp_path / "twice")]
    fairseq.main([*again, *vocabulary, *named])
    twice = AutoTokenizer.from_pretrained(tmp_path / "twice")
    assert twice.model_max_length == POSITIONS - 2
    text = "The cat sees <mask> in the garden, naïvely 🎉."
    assert twice.get_vocab() == tokenizer.get_vocab() and twice(text).input_ids == tokenizer(text).input_ids


def test_merges_of_hashes_are_no_comments(tmp_path):
    tokens = ["a", "#", "##", "Ġ", "Ġ##"]
    (tmp_path / "dict.txt").write_text("".join(f"{number} 1\n" for number in range(len(tokens))))
    (tmp_path / "encoder.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n# #\nĠ ##\n")
    files = [tmp_path / name for name in ("dict.txt", "encoder.json", "vocab.bpe")]
    assert fairseq.read_vocabulary(*files).tokenize("a##a ##") == ["a", "##", "a", "Ġ##"]
    (tmp_path / "dict.txt").write_text("0 1\n1 1\n3 1\n4 1\n")  # of fairseq-preprocess on a text without ## in a word
    with pytest.raises(InputError, match=r"dict.txt lacks ##, from which .*vocab.bpe merges tokens that it has"):
        fairseq.read_vocabulary(*files)


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
    again = fairseq.upgrade_names(old)
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


ODD = {  # settings that Hugging Face's RoBERTa does not compute
    "encoder_normalize_before": True,
    "layernorm_embedding": False,
    "encoder_learned_pos": False,
    "no_token_positional_embeddings": True,
    "no_scale_embedding": False,
    "encoder_layers_to_keep": "0,2",
    "encoder_xformers_att_config": "linformer",
    "quant_noise_pq": 0.1,
    "quant_noise_scalar": 0.5,
    "mha_heads_to_keep": 2,
    "ffn_blocks_to_remove": 8,
}
PLAIN = {  # settings that change no logits
    "encoder_normalize_before": False,
    "layernorm_embedding": True,
    "encoder_learned_pos": True,
    "no_scale_embedding": True,
    "quant_noise_pq": 0,
    "mha_heads_to_keep": -1,
    "encoder_layerdrop": 0.2,
    "activation_dropout": 0.1,
    "adaptive_input": False,
    "dropout": 0.3,
}


def draw(rng, number):
    """Random settings, matching weights, and the settings for which they must be refused, if any."""
    settings = {name: value for name, value in PLAIN.items() if rng.random() < 0.5}
    head, form, layers = rng.choice([None, "mnli"]), FORMS[number // 2 % len(FORMS)], rng.randint(1, 3)
    wanted = {"heads": rng.choice([1, 2, 4, 8]), "activation": "gelu", "pooler": "tanh"}
    settings |= {"encoder_attention_heads": wanted["heads"], "encoder_layers": layers}
    if rng.random() < 0.7:
        settings["activation_fn"] = wanted["activation"] = list(ACTIVATIONS)[number % len(ACTIVATIONS)]
    if rng.random() < 0.5:
        settings["pooler_activation_fn"] = wanted["pooler"] = rng.choice(["tanh", "tanh", "tanh", "relu"])
    if untied := rng.random() < 0.3:
        settings["untie_weights_roberta"] = True
    refused = [list(ODD)[number // 3 % len(ODD)]] if number % 3 == 0 else []
    settings |= {name: ODD[name] for name in refused}
    refused += ["activation_fn"] * (not head and wanted["activation"] != "gelu")
    refused += ["pooler_activation_fn"] * (head is not None and wanted["pooler"] != "tanh")
    return settings, form, head, wanted, by_hand(40, layers=layers, untied=untied, seed=number), refused


def test_random_settings_give_fairseqs_logits_or_are_refused(tmp_path):
    rng, seen = random.Random(0), Counter()
    ids = torch.randint(4, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    for number in range(90):
        settings, form, head, wanted, weights, refused = draw(rng, number)
        torch.save({"model": weights, **settings_in(form, settings)}, tmp_path / "model.pt")
        found, said = fairseq.read_checkpoint(tmp_path / "model.pt")
        if refused:
            pattern = "|".join(re.escape(f"{name}={settings[name]!r}") for name in refused)
            with pytest.raises(InputError, match=pattern):
                fairseq.to_hugging_face(found, said, head)
            seen.update(refused)
            continue
        model = fairseq.to_hugging_face(found, said, head)
        expected = forward(weights, ids, head, **wanted)
        with torch.no_grad():
            gap = (model(ids).logits - expected).abs().max() / expected.abs().max()
        assert gap < 1e-5, (gap, settings, form, head)
        seen.update([form, head, wanted["heads"], wanted["activation"], len(found)])
    assert set(seen) >= {*FORMS, *ACTIVATIONS, *ODD, None, "mnli", 1, 2, 4, 8, "activation_fn", "pooler_activation_fn"}
    assert sum(seen[form] for form in FORMS) > 35


def test_untied_both_ways(tokenizer, tokenizer_dir, ids, tmp_path):
    weights = by_hand(len(tokenizer), untied=True)
    settings = {"encoder_attention_heads": HEADS, "untie_weights_roberta": True}
    torch.save({"model": weights, **settings_in("cfg", settings)}, tmp_path / "model.pt")
    there = ["to_hf", "--checkpoint", str(tmp_path / "model.pt"), "--output_dir", str(tmp_path / "hf")]
    fairseq.main([*there, "--tokenizer_name", tokenizer_dir])
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    assert model.config.tie_word_embeddings is False
    wanted = forward(weights, ids)
    with torch.no_grad():
        assert (model(ids).logits - wanted).abs().max() < 1e-6 * wanted.abs().max()
    model.lm_head.bias.data.normal_()  # without tying, Hugging Face computes with the decoder's bias
    model.save_pretrained(tmp_path / "hf")
    fairseq.main(["to_fairseq", "--model_name_or_path", str(tmp_path / "hf"), "--output_dir", str(tmp_path / "back")])
    again, said = fairseq.read_checkpoint(tmp_path / "back" / "model.pt")
    expected = {name for name in weights if not name.startswith("classification_heads.")}
    assert set(again) == expected and all(again[name].equal(weights[name]) for name in expected)
    assert said["untie_weights_roberta"] is True
    with pytest.raises(InputError, match=r"untie_weights_roberta=False, and encoder.lm_head.weight is not"):
        fairseq.to_hugging_face(weights, {**settings, "untie_weights_roberta": False}, None)


def test_a_classifier_gets_an_empty_masked_lm_head_that_is_not_taken_for_a_trained_head(config):
    config.num_labels = 3
    model = fairseq.RobertaForSequenceClassification(config)
    content = fairseq.build_checkpoint(model, config.vocab_size, "topic")
    hidden = torch.randn(2, config.hidden_size)
    head = {name.removeprefix("encoder.lm_head."): tensor for name, tensor in content["model"].items()}
    x = functional.gelu(functional.linear(hidden, head["dense.weight"], head["dense.bias"]))
    x = functional.layer_norm(x, (config.hidden_size,), head["layer_norm.weight"], head["layer_norm.bias"], 1e-5)
    assert not functional.linear(x, head["weight"], head["bias"]).any()  # every token is equally probable
    assert head["weight"].equal(content["model"]["encoder.sentence_encoder.embed_tokens.weight"])
    assert content["args"].untie_weights_roberta is False
    with pytest.raises(InputError, match="the masked-LM head is empty"):
        fairseq.to_hugging_face(content["model"], vars(content["args"]), None)
    # what fairseq's `_upgrade_state_dict` reads of a checkpoint of today
    assert {"optimizer_name", "lr_scheduler_state", "num_updates"} <= set(content["optimizer_history"][-1])
    assert content["extra_state"] == {}


@pytest.mark.parametrize(
    ("changed", "head", "message"),
    [
        ({"hidden_act": "relu"}, None, "hidden_act='relu': fairseq supports gelu$"),
        (
            {"hidden_act": "silu"},
            "topic",
            "hidden_act='silu': fairseq supports gelu, gelu_new, relu, relu2, tanh, linear",
        ),
        ({"layer_norm_eps": 1e-12}, None, "layer_norm_eps=1e-12, but fairseq's RoBERTa uses 1e-05"),
        ({"pad_token_id": 0}, None, "pad_token_id=0, but fairseq's RoBERTa uses 1"),
        ({"is_decoder": True}, None, "is_decoder=True"),
        ({"type_vocab_size": 2}, None, "no token types, and the model has type_vocab_size=2"),
    ],
)
def test_what_fairseq_does_not_compute_is_refused(config, changed, head, message):
    for name, value in changed.items():
        setattr(config, name, value)
    cls = fairseq.RobertaForSequenceClassification if head else fairseq.RobertaForMaskedLM
    with pytest.raises(InputError, match=message):
        fairseq.to_fairseq(cls(config), config.vocab_size, head)


def test_a_head_that_a_checkpoint_lacks_is_never_drawn_at_random(config, tokenizer, tmp_path):
    fairseq.RobertaForMaskedLM(config).save_pretrained(tmp_path / "mlm")
    fairseq.RobertaForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    for name in ("mlm", "classifier"):
        tokenizer.save_pretrained(tmp_path / name)
    argv = ["to_fairseq", "--output_dir", str(tmp_path / "out"), "--model_name_or_path"]
    with pytest.raises(InputError, match=r"mlm' has no weights for classifier.dense.bias .*: leave --head out"):
        fairseq.main([*argv, str(tmp_path / "mlm"), "--head", "topic"])
    with pytest.raises(InputError, match=r"classifier' has no weights for lm_head.*: name the --head"):
        fairseq.main([*argv, str(tmp_path / "classifier")])
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_fairseqs_bpe_does_not_follow_is_refused(tokenizer_dir, tmp_path):
    added = AutoTokenizer.from_pretrained(tokenizer_dir)
    added.add_tokens(["<entity>"])
    vocab = added.get_vocab()
    assert vocab["<entity>"] == len(vocab) - 1
    with pytest.raises(InputError, match="ids are not RoBERTa's"):
        fairseq.write_vocabulary(added, tmp_path)
    ordinary = AutoTokenizer.from_pretrained(tokenizer_dir)
    ordinary.add_tokens([sorted(vocab)[20]])  # a token of the BPE, now found before all merges
    with pytest.raises(InputError, match="fairseq's BPE has no added tokens"):
        fairseq.write_vocabulary(ordinary, tmp_path)
    lower = AutoTokenizer.from_pretrained(tokenizer_dir)
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(InputError, match="normalizer has type='Lowercase', but fairseq's BPE uses None"):
        fairseq.write_vocabulary(lower, tmp_path)
    prefixed = AutoTokenizer.from_pretrained(tokenizer_dir)
    prefixed.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(InputError, match="pre_tokenizer has add_prefix_space=True"):
        fairseq.write_vocabulary(prefixed, tmp_path)
    assert not list(tmp_path.iterdir())


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
    with pytest.raises(InputError, match="cannot be read without running code") as refusal:
        fairseq.read_checkpoint(tmp_path / "model.pt")
    code = str(refusal.value).split('python -c "')[1].removesuffix('"')  # of the command that saves it anew
    compile(code, "command", "exec")
    assert f"load_checkpoint_to_cpu('{tmp_path}/model.pt')" in code and f"'{tmp_path}/plain_model.pt'" in code
    assert not (tmp_path / "harmed").exists()


def test_bad_checkpoints_are_named(checkpoint, tmp_path, tokenizer_dir):
    path, weights = checkpoint
    (tmp_path / "text.pt").write_text("no pickle")
    with pytest.raises(InputError, match=r"text.pt cannot be read"):
        fairseq.read_checkpoint(tmp_path / "text.pt")
    settings = {"encoder_attention_heads": HEADS}
    with pytest.raises(InputError, match="the checkpoint has no settings"):
        fairseq.to_hugging_face(weights, {}, None)
    with pytest.raises(
        InputError, match=r"not a RoBERTa of fairseq \(KeyError: 'encoder.sentence_encoder.embed_tokens"
    ):
        fairseq.to_hugging_face({}, settings, None)
    with pytest.raises(InputError, match="head=rte is not one of the checkpoint's: mnli"):
        fairseq.to_hugging_face(weights, settings, "rte")
    other = {name.replace("heads.mnli.", "heads.my-head."): tensor for name, tensor in weights.items()}
    assert fairseq.to_hugging_face(other, settings, "my-head").config.num_labels == 3
    with pytest.raises(InputError, match=r"head=a\.b: torch allows no dot"):
        fairseq.main(["to_fairseq", "--model_name_or_path", "x", "--output_dir", "y", "--head", "a.b"])
    lacking = {name: tensor for name, tensor in weights.items() if "layers.1.fc2.bias" not in name}
    pruned = {**weights, "encoder.sentence_encoder.layers.0.self_attn.q_proj.weight": torch.zeros(8, HIDDEN)}
    for damaged, said in ((lacking, "layer.1.output.dense.bias"), (pruned, "query.weight.*8, 16")):
        torch.save({"args": argparse.Namespace(**settings), "model": damaged}, tmp_path / "damaged.pt")
        argv = ["to_hf", "--checkpoint", str(tmp_path / "damaged.pt"), "--output_dir", str(tmp_path / "out")]
        with pytest.raises(InputError, match=r"damaged\.pt is not a RoBERTa of fairseq"):
            fairseq.main([*argv, "--tokenizer_name", tokenizer_dir])
        with pytest.raises(RuntimeError, match=said):
            fairseq.to_hugging_face(damaged, settings, None)
    with pytest.raises(InputError, match=r"1 weights are not RoBERTa's, such as decoder.other"):
        fairseq.to_hugging_face({**weights, "decoder.other": torch.zeros(1)}, settings, None)
    argv = ["to_hf", "--checkpoint", str(path), "--output_dir", str(tmp_path / "out")]
    (tmp_path / "dict.txt").write_text("0 1\n99 1\n")
    (tmp_path / "encoder.json").write_text(json.dumps({"a": 0}))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    files = [tmp_path / name for name in ("dict.txt", "encoder.json", "vocab.bpe")]
    with pytest.raises(InputError, match=r"dict.txt, line 2: '99' is not a token"):
        fairseq.read_vocabulary(*files)
    (tmp_path / "dict.txt").write_text("0 1\nmadeupword0000 0\n")
    with pytest.raises(InputError, match="the tokenizer has 7 entries, the embedding"):
        fairseq.main([*argv, "--dict", str(files[0]), "--encoder", str(files[1]), "--bpe", str(files[2])])
    assert not (tmp_path / "out").exists()
