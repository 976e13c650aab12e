"""`model_max_length` of saved tokenizers equals the number of positions of the model."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, pipeline

import train_mlm
from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import ROOT
from roberta_recipe.model import weights
from roberta_recipe.model.masked_lm import masked_lm_class
from roberta_recipe.model.weights import read_config
from roberta_recipe.settings import load_yaml

PRESETS = [path for path in sorted((ROOT / "presets" / "mlm").glob("*.yaml")) if path.stem != "continue"]  # no config
assert len(PRESETS) == 12
LONG = "The cat sees <mask> in the garden. " + "Every child follows this house near the sea. " * 200


def long_text_is_completed(folder):
    """Truncation without an explicit length, as in `pipeline`."""
    assert len(pipeline("fill-mask", model=folder, device="cpu")(LONG, tokenizer_kwargs={"truncation": True})) == 5
    encoded = AutoTokenizer.from_pretrained(folder)(LONG, truncation=True, return_tensors="pt")
    with torch.no_grad():
        return AutoModel.from_pretrained(folder)(**encoded).last_hidden_state.shape[1]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_the_tokenizer_of_every_preset_truncates_to_the_model(preset, tokenizer, tmp_path):
    """The preset's positions, one small layer."""
    values = load_yaml(preset)
    config = read_config(values["config_name"])
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    config.update({**sizes, "vocab_size": len(tokenizer), "pad_token_id": 1, "layer_types": ["full_attention"]})
    config.max_position_embeddings = min(config.max_position_embeddings, 1024)  # shorter than the text
    positions = config.max_position_embeddings - 2 * (config.model_type == "roberta")
    assert weights.max_positions(config) == positions >= values["max_seq_length"]
    before = tokenization.files_fingerprint(tokenizer)
    masked_lm_class(config)(config).save_pretrained(tmp_path)
    weights.for_saving(tokenizer, config).save_pretrained(tmp_path)
    assert long_text_is_completed(str(tmp_path)) == positions
    assert tokenizer.model_max_length == 512 and tokenization.files_fingerprint(tokenizer) == before


def test_a_run_saves_it_with_every_checkpoint_and_resumes(preset, tmp_path, tokenizer_dir, monkeypatch):
    """The original tokenizer and the fingerprint stay unchanged, with and without HF_HUB_OFFLINE."""
    saving = ["--config", preset, "--save_strategy", "steps", "--save_steps", "2"]
    before = {path.name: path.read_bytes() for path in Path(tokenizer_dir).iterdir()}
    whole = train_mlm.main(saving)
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-2"):
        assert long_text_is_completed(str(folder)) == 64
    for name in ("run_record.json", "manifest.json"):
        (tmp_path / "run" / name).unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    again = train_mlm.main(saving)
    assert again["state_digests"] == whole["state_digests"] and again["fingerprint"] == whole["fingerprint"]
    assert {path.name: path.read_bytes() for path in Path(tokenizer_dir).iterdir()} == before


def test_models_without_a_table_of_positions(config):
    assert weights.max_positions(config) == 64
    assert weights.max_positions(AutoConfig.for_model("data2vec-text", max_position_embeddings=514)) == 512
    config.model_type, config.max_position_embeddings = "xlnet", -1
    assert weights.max_positions(config) is None


def test_relative_positions_alone_have_no_longest_sequence():
    """DeBERTa-v3 takes sequences longer than in pretraining; a DeBERTa with a table of positions does not."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "vocab_size": 40}
    both = AutoConfig.for_model("deberta-v2", max_position_embeddings=24, **sizes, **relative)
    late = AutoConfig.for_model("roberta", max_position_embeddings=130, pad_token_id=50283)  # ModernBERT's tokenizer
    with pytest.raises(InputError, match=r"max_position_embeddings=130, and .* pad_token_id=50283: use a tokenizer"):
        weights.check_length("model", 48, late)
    with pytest.raises(InputError, match="max_seq_length=48 is more than the 24 positions"):
        weights.check_length("model", 48, both)
    both.position_biased_input = False
    weights.check_length("model", 48, both)
    assert weights.max_positions(both) is None
    assert AutoModel.from_config(both)(torch.randint(4, 40, (2, 48)))[0].isfinite().all()


@pytest.mark.parametrize("layers", [2, 7])
def test_another_number_of_layers_of_modernbert(layers, tmp_path):
    """Its config lists each layer's attention: with a list of another length, no model is built or none is saved."""
    config = weights.fresh_config("presets/model/modernbert_mini.json", f"num_hidden_layers={layers}")
    assert config.layer_types == (["full_attention", *2 * ["sliding_attention"]] * 3)[:layers]
    config.save_pretrained(tmp_path)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("names", [["input_ids", "token_type_ids"], ["input_ids", "attention_mask"]])
def test_the_saved_tokenizer_makes_the_columns_of_the_model(config, wordpiece, tmp_path, rows, names, monkeypatch):
    """A pair's second segment has type 1 in BERT's tokenizer, RoBERTa's embedding one row; ALBERT's tokenizer does not
    name types, and its model embeds two."""
    monkeypatch.setattr(wordpiece, "model_input_names", names)
    before = tokenization.files_fingerprint(wordpiece)
    config.type_vocab_size = rows
    weights.for_saving(wordpiece, config).save_pretrained(tmp_path)
    expected = {"input_ids", "attention_mask"} | ({"token_type_ids"} if rows == 2 else set())
    assert set(AutoTokenizer.from_pretrained(tmp_path)("a", "b")) == expected
    assert wordpiece.model_input_names == names and tokenization.files_fingerprint(wordpiece) == before
