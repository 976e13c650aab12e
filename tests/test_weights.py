"""Checkpoints that are cut, flipped or incomplete: a line, or the weights that were saved; never weights drawn anew."""

import json
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
    RobertaForSequenceClassification,
)

import train_mlm
from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.model import heads, weights
from roberta_recipe.model.masked_lm import build_model
from roberta_recipe.tasks import wsc
from tools import evaluate, fairseq

LAYER = "roberta.encoder.layer.1.output.dense.weight"


@pytest.fixture
def loaders(tokenizer):
    """What loads a checkpoint, by name: each as a function from a folder to a model."""
    return {
        "pretraining": lambda folder: build_model(tokenizer, model_name_or_path=str(folder), max_seq_length=64),
        "classifier": lambda folder: heads.load_with_head(AutoModelForSequenceClassification, str(folder), None),
        "wnli": lambda folder: wsc.load_masked_lm(str(folder)),
        "fairseq": lambda folder: fairseq.load_hugging_face(str(folder), None),
    }


def edit(folder, change):
    """Rewrite a checkpoint's weights with `change` applied to their dict."""
    stored = load_file(Path(folder, "model.safetensors"))
    change(stored)
    save_file(stored, Path(folder, "model.safetensors"), metadata={"format": "pt"})


def header_bytes(path):
    """Bytes of a file that a flipped bit may change unseen by anything but a checksum begin here."""
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0] if path.suffix == ".safetensors" else path.stat().st_size


def into_shards(folder):
    """The checkpoint in two shards and an index."""
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, files = sorted(stored), ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    for file, part in zip(files, parts, strict=True):
        save_file({name: stored[name] for name in part}, folder / file, metadata={"format": "pt"})
    where = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def body_of(model):
    return {name: tensor for name, tensor in model.state_dict().items() if name.startswith("roberta.")}


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_that_is_cut_or_flipped_is_refused_or_the_same(model_dir, loaders, tmp_path, sharded):
    """Random cuts of every file, random bits of every JSON and header: no other weights, and one line each."""
    draw, outcomes = random.Random(1), {"refused": 0, "same": 0}
    if sharded:
        into_shards(Path(model_dir))
    whole = body_of(loaders["wnli"](model_dir))
    files = [path for path in Path(model_dir).iterdir() if path.name == "config.json" or "safetensors" in path.name]
    assert len(files) == (4 if sharded else 2)
    for trial in range(48):
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
            pooled = {key for key in found if "pooler" in key}
            assert found.keys() - pooled == whole.keys(), (trial, path, name)
            assert all(found[key].equal(whole[key]) for key in whole), (trial, path, name)
            outcomes["same"] += 1
        shutil.rmtree(folder)
    assert outcomes["refused"] > 24 and outcomes["same"], outcomes


def test_a_flipped_bit_of_the_weights_is_seen_where_there_is_a_manifest(model_dir, loaders, tmp_path):
    durable.move_into_place(Path(model_dir), tmp_path / "whole")
    for name, load in loaders.items():
        load(tmp_path / "whole")
        folder = tmp_path / name
        shutil.copytree(tmp_path / "whole", folder)
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-5] ^= 1
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(InputError, match=r"is damaged: model.safetensors is not what was .* delete \S+json"):
            load(folder)
        (folder / "manifest.json").unlink()
        load(folder)


def test_weights_that_are_missing_are_named(model_dir, loaders, tmp_path):
    for name, load in loaders.items():
        shutil.copytree(model_dir, tmp_path / name)
        edit(tmp_path / name, lambda stored: [stored.pop(key) for key in list(stored) if ".layer.1." in key])
        with pytest.raises(InputError, match=r"has no weights for roberta.encoder.layer.1.\S+ and 15 others"):
            load(tmp_path / name)


def test_a_masked_lm_without_its_head(model_dir, loaders, tmp_path):
    edit(model_dir, lambda stored: [stored.pop(key) for key in list(stored) if key.startswith("lm_head.")])
    for name in ("pretraining", "wnli", "fairseq"):
        with pytest.raises(InputError, match=r"has no weights for lm_head.\S+ and \d others"):
            loaders[name](model_dir)
    loaders["classifier"](model_dir)  # which has a head of its own


def test_a_head_that_is_there_in_part(model_dir, tmp_path):
    """The half that is missing is not drawn anew beside the half that is there."""
    RobertaForSequenceClassification.from_pretrained(model_dir).save_pretrained(tmp_path / "tuned")
    heads.load_with_head(AutoModelForSequenceClassification, str(tmp_path / "tuned"), None)
    edit(tmp_path / "tuned", lambda stored: stored.pop("classifier.dense.bias"))
    with pytest.raises(InputError, match=r"has no weights for classifier.dense.bias$"):
        heads.load_with_head(AutoModelForSequenceClassification, str(tmp_path / "tuned"), None)
    heads.load_with_head(AutoModelForMultipleChoice, str(tmp_path / "tuned"), None, random_weights=True)


def test_layers_that_the_config_leaves_out(model_dir, loaders):
    path = Path(model_dir) / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    for load in loaders.values():
        with pytest.raises(InputError, match=r"its config.json has no room for roberta.encoder.layer.1.\S+ and 15 oth"):
            load(model_dir)


def test_sizes_that_the_config_does_not_have(model_dir, loaders):
    path = Path(model_dir) / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 64', '"intermediate_size": 96'))
    for load in loaders.values():
        with pytest.raises(InputError, match=r"other sizes than its config.json says, roberta.encoder.layer.0.inter"):
            load(model_dir)


def test_weights_that_are_not_finite(model_dir, loaders):
    edit(model_dir, lambda stored: stored[LAYER].view(-1)[7:8].fill_(torch.nan))
    for load in loaders.values():
        with pytest.raises(InputError, match=rf"{LAYER} not finite"):
            load(model_dir)


def test_a_pickle_is_not_loaded(model_dir, loaders):
    folder = Path(model_dir)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for load in loaders.values():
        with pytest.raises(InputError, match=r"It has a pickle, which is not loaded; .* save it anew: python -c"):
            load(folder)


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"model_type": "roberta", "hidden_size": "x"}', '{"a'])
def test_a_config_that_is_none(model_dir, loaders, content):
    (Path(model_dir) / "config.json").write_text(content)
    for load in loaders.values():
        with pytest.raises(InputError, match=r"^no model config at model_name_or_path=.*"):
            load(model_dir)


def test_the_commands_refuse_such_a_checkpoint(model_dir, preset):
    """Both ran to their end on weights drawn at random, exit code 0."""
    edit(model_dir, lambda stored: [stored.pop(key) for key in list(stored) if ".layer.1." in key])
    for main in (train_mlm.main, evaluate.main):
        with pytest.raises(InputError, match=r"has no weights for roberta.encoder.layer.1.\S+ and 15 others"):
            main(["--config", preset, "--model_name_or_path", model_dir])


def test_the_identity_of_a_checkpoint_is_its_content(model_dir):
    before = weights.identity(model_dir)
    assert weights.identity(model_dir) == before
    path = Path(model_dir) / "model.safetensors"
    content = path.read_bytes()
    middle = bytearray(content)
    middle[len(middle) // 2] ^= 1
    path.write_bytes(middle)
    assert weights.identity(model_dir) != before
    path.write_bytes(content)
    assert weights.identity(model_dir) == before
    config = Path(model_dir) / "config.json"
    config.write_text(config.read_text().replace('"hidden_dropout_prob": 0.0', '"hidden_dropout_prob": 0.1'))
    assert weights.identity(model_dir) != before
