"""Truncated, corrupted and incomplete checkpoints are refused; no weights are initialized instead."""

import copy
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    RobertaForSequenceClassification,
    RobertaModel,
    RobertaPreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.model import task_heads, weights
from roberta_recipe.model.masked_lm import build_model
from roberta_recipe.tasks import wsc
from tools import evaluate, fairseq

LAYER = "roberta.encoder.layer.1.output.dense.weight"


@pytest.fixture
def loaders(tokenizer):
    """Functions that load a model from a folder, by use."""
    return {
        "pretraining": lambda folder: build_model(tokenizer, model_name_or_path=str(folder), max_seq_length=64),
        "classifier": lambda folder: task_heads.load_with_head(AutoModelForSequenceClassification, str(folder), None),
        "wnli": lambda folder: wsc.load_masked_lm(str(folder)),
        "fairseq": lambda folder: fairseq.load_hugging_face(str(folder), None),
    }


def edit(folder, change):
    """Rewrite a checkpoint's weights after `change` of their dict."""
    stored = load_file(Path(folder, "model.safetensors"))
    change(stored)
    save_file(stored, Path(folder, "model.safetensors"), metadata={"format": "pt"})


def header_bytes(path):
    """Length of the part of a file in which a flipped bit is detectable without a hash."""
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0] if path.suffix == ".safetensors" else path.stat().st_size


def body_of(model):
    return {name: tensor for name, tensor in model.state_dict().items() if name.startswith("roberta.")}


@pytest.mark.parametrize("sharded", [False, True])
def test_a_truncated_or_flipped_file_is_refused_or_has_the_same_weights(model_dir, loaders, tmp_path, sharded):
    """Random truncations of every file, random bits of all JSON files and headers."""
    draw, outcomes = random.Random(1), {"refused": 0, "same": 0}
    model = loaders["wnli"](model_dir)
    whole = body_of(model)
    if sharded:
        (Path(model_dir) / "model.safetensors").unlink()
        model.save_pretrained(model_dir, max_shard_size="100KB")
    files = [path for path in Path(model_dir).iterdir() if path.name == "config.json" or "safetensors" in path.name]
    assert len(files) > 3 if sharded else len(files) == 2
    for trial in range(32):
        folder = tmp_path / f"damaged{trial}"
        shutil.copytree(model_dir, folder)
        path = folder / files[trial % len(files)].name
        content = bytearray(path.read_bytes())
        if trial // len(files) % 2:
            content = content[: draw.randrange(len(content))]
        else:
            content[draw.randrange(header_bytes(path))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        name = draw.choice(list(loaders))
        try:
            found = body_of(loaders[name](folder))
        except InputError as error:
            assert "\n" not in str(error) and str(folder) in str(error)
            outcomes["refused"] += 1
        else:
            assert found.keys() - {key for key in found if "pooler" in key} == whole.keys(), (trial, path, name)
            assert all(found[key].equal(whole[key]) for key in whole), (trial, path, name)
            outcomes["same"] += 1
    assert outcomes["refused"] > 16 and outcomes["same"], outcomes


def test_a_flipped_bit_of_the_weights_is_seen_where_there_is_a_manifest(model_dir, loaders, tmp_path):
    durable.move_into_place(Path(model_dir), tmp_path / "whole")
    for name, load in loaders.items():
        load(tmp_path / "whole")
        folder = tmp_path / name
        shutil.copytree(tmp_path / "whole", folder)
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-5] ^= 1
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(InputError, match=r"is damaged: model.safetensors does not match .* delete \S+json"):
            load(folder)
        (folder / "manifest.json").unlink()
        load(folder)


def test_a_masked_lm_without_its_head(model_dir, loaders, tmp_path):
    edit(model_dir, lambda stored: [stored.pop(key) for key in list(stored) if key.startswith("lm_head.")])
    for name in ("pretraining", "wnli", "fairseq"):
        with pytest.raises(InputError, match=r"has no weights for lm_head.\S+ and \d others"):
            loaders[name](model_dir)
    loaders["classifier"](model_dir)  # has another head


def test_a_head_that_is_there_in_part(model_dir, tmp_path):
    RobertaForSequenceClassification.from_pretrained(model_dir).save_pretrained(tmp_path / "tuned")
    task_heads.load_with_head(AutoModelForSequenceClassification, str(tmp_path / "tuned"), None)
    edit(tmp_path / "tuned", lambda stored: stored.pop("classifier.dense.bias"))
    with pytest.raises(InputError, match=r"has no weights for classifier.dense.bias$"):
        task_heads.load_with_head(AutoModelForSequenceClassification, str(tmp_path / "tuned"), None)
    task_heads.load_with_head(AutoModelForMultipleChoice, str(tmp_path / "tuned"), None, random_weights=True)


class MaxPooled(RobertaPreTrainedModel):
    """The encoder with a head of the user's own."""

    def __init__(self, config):
        super().__init__(config)
        self.roberta = RobertaModel(config, add_pooling_layer=False)
        self.classifier = torch.nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, **batch):
        return SequenceClassifierOutput(logits=self.classifier(self.roberta(**batch)[0].amax(1)))


class Misnamed(PreTrainedModel):
    """No weight of a checkpoint has the name of one in `encoder`."""

    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.encoder = RobertaModel(config, add_pooling_layer=False)
        self.post_init()


def test_a_head_of_the_users_own_is_on_the_pretrained_encoder(model_dir):
    stored, own = load_file(Path(model_dir, "model.safetensors")), task_heads.load_with_head(MaxPooled, model_dir, None)
    assert (
        {name for name, tensor in body_of(own).items() if torch.equal(tensor, stored[name])} == {*body_of(own)} > set()
    )
    own.set_attn_implementation("sdpa")
    assert own.config._attn_implementation == "sdpa"
    with pytest.raises(InputError, match="has no weights for Misnamed, whose base_model_prefix names no encoder"):
        task_heads.load_with_head(Misnamed, model_dir, None)


def test_a_tokenizer_with_more_tokens_than_the_model(model_dir, tokenizer):
    longer = copy.deepcopy(tokenizer)
    longer.add_tokens(["<one>", "<two>"])
    with pytest.raises(InputError, match=rf"\(resize_token_embeddings\) to {len(longer)}, or tokenizer_name to"):
        build_model(longer, model_name_or_path=model_dir, max_seq_length=64)


def without_a_layer(folder):
    edit(folder, lambda stored: [stored.pop(key) for key in list(stored) if ".layer.1." in key])


def with_a_nan(folder):
    edit(folder, lambda stored: stored[LAYER].view(-1)[7:8].fill_(torch.nan))


def as_a_pickle(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def configured(old, new):
    def change(folder):
        path = folder / "config.json"
        path.write_text(path.read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_layer, r"has no weights for roberta.encoder.layer.1.\S+ and 15 others"),
        (with_a_nan, f"has NaN or infinity in {LAYER}: it is damaged"),
        (as_a_pickle, r"no weights to load at .*no file named model.safetensors .*; rewrite a .bin with from"),
        (
            configured('layers": 2', 'layers": 1'),
            r"has no place for the weights roberta.encoder.layer.1.\S+ and",
        ),
        (
            configured('e_size": 64', 'e_size": 96'),
            r"other sizes than in its config.json, roberta.encoder.layer.0.",
        ),
        (lambda folder: (folder / "config.json").write_text("[]"), r"^no model config at model_name_or_path="),
        (lambda folder: (folder / "config.json").write_text('{"a'), r"^no model config at model_name_or_path="),
        (configured('"hidden_size": 32', '"hidden_size": "x"'), r"^no model config at model_name_or_path="),
    ],
)
def test_incomplete_checkpoints_are_refused(model_dir, loaders, preset, change, message):
    change(Path(model_dir))
    for load in loaders.values():
        with pytest.raises(InputError, match=message):
            load(model_dir)
    with pytest.raises(InputError, match=message):
        evaluate.main(["--config", preset, "--model_name_or_path", model_dir])


def test_the_identity_of_a_checkpoint_is_its_content(model_dir):
    before = weights.content_hash(model_dir)
    edit(model_dir, lambda stored: None)
    assert weights.content_hash(model_dir) == before
    edit(model_dir, lambda stored: stored[LAYER].view(-1)[7:8].add_(1))
    assert weights.content_hash(model_dir) != before
    edit(model_dir, lambda stored: stored[LAYER].view(-1)[7:8].sub_(1))
    configured('"hidden_dropout_prob": 0.0', '"hidden_dropout_prob": 0.1')(Path(model_dir))
    assert weights.content_hash(model_dir) != before
