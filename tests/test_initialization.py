"""Mimetic initialization: closed form on top of the normal draw, stock checkpoints, refused values; unigram output
bias."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

import train_mlm
from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.model import initialization
from tools import evaluate

SHAPE = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"intermediate_size": 64, "max_position_embeddings": 66, "pad_token_id": 1}


def fresh(family, text):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(family, **SHAPE))
    initialization.initialize(model, text)
    return dict(model.named_parameters())


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", initialization.MODEL_TYPES)
@pytest.mark.parametrize(
    ("text", "positions", "query_key", "value_output"),
    [
        ("mimetic", 2, 0.7, 0.5),
        ("mimetic, query_key=0.3,positions=1,value_output=0", 1, 0.3, 0),
        ("mimetic,value_output=-0.4", 2, 0.7, -0.4),
    ],
)
def test_what_is_added_is_the_closed_form(family, text, positions, query_key, value_output):
    normal, mimetic = fresh(family, None), fresh(family, text)
    added = {name: mimetic[name].detach() - normal[name].detach() for name in normal}
    layers = {name.rpartition("attention.")[0] for name in normal if "attention." in name}
    drawn, modules = [], ("self.query", "self.key", "self.value", "output.dense")
    for layer in layers:
        query, key, value, output = (added.pop(f"{layer}attention.{name}.weight") for name in modules)
        close(query, key)
        for head in query.split(8):
            close(head @ head.T, query_key**2 * torch.eye(8))
        close(output @ value, value_output * abs(value_output) * torch.eye(32))
        drawn += [*query.split(8), *([value[:8]] if value_output else [])]
    assert len(layers) == 2 and len(drawn) >= 8
    assert not any(torch.allclose(a, b, atol=0.05) for a in drawn for b in drawn if a is not b)
    (table,) = [name for name in added if name.endswith("position_embeddings.weight")]
    rows, first = added.pop(table), 0 if family == "bert" else 2
    assert not rows[:first].any()
    for position, row in enumerate(rows[first:]):
        angles = [position * 10000 ** (-2 * i / 32) for i in range(16)]
        expected = [*map(math.sin, angles), *map(math.cos, angles)]
        close(row, positions * 0.02 * math.sqrt(2) * torch.tensor(expected))
    assert len(added) > 20 and not any(weight.any() for weight in added.values())


def test_a_run_trains_saves_and_resumes_a_stock_model(preset, tmp_path):
    text = "mimetic,unigram_bias=1"
    words = ["--config", preset, "--initialization", text, "--save_strategy", "steps", "--save_steps", "2"]
    record = train_mlm.main(words)
    assert record["resolved_args"]["initialization"] == text and "initialization" in record["shown_args"]
    train_mlm.main(["--config", preset, "--output_dir", str(tmp_path / "normal")])
    assert durable.read_json(tmp_path / "run/config.json") == durable.read_json(tmp_path / "normal/config.json")
    model, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "run", output_loading_info=True)
    assert type(model).__module__ == "transformers.models.roberta.modeling_roberta" and not any(report.values())
    # a checkpoint is measured as it is, under the run's own preset
    metrics, _ = evaluate.main(["--config", f"{tmp_path}/run/preset.yaml", "--model_name_or_path", f"{tmp_path}/run"])
    assert metrics["eval_loss"] == pytest.approx(record["metrics"]["eval_loss"], rel=1e-6)

    assert train_mlm.main([*words, "--output_dir", str(tmp_path / "again")])["state_digests"] == record["state_digests"]
    resume = ["--resume_from_checkpoint", str(tmp_path / "run/checkpoint-2"), "--output_dir", str(tmp_path / "b")]
    with pytest.raises(InputError, match=f"initialization was '{text}', is None"):
        train_mlm.main(["--config", preset, *resume])


@pytest.mark.parametrize("family", [*initialization.MODEL_TYPES, "albert", "modernbert"])
def test_the_output_bias_is_the_log_frequency(family):
    counts = np.arange(390) % 7
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(family, **SHAPE))
    initialization.set_output_bias(model, "normal,unigram_bias=1", counts)
    bias = model.get_output_embeddings().bias.detach().clone()
    close(bias[:390].softmax(0), torch.tensor((counts + 0.5) / (counts + 0.5).sum()).float())
    assert not bias[390:].any() and abs(bias.mean()) < 1e-6
    initialization.set_output_bias(model, "mimetic,unigram_bias=0.5", counts)
    close(model.get_output_embeddings().bias.detach(), bias / 2)


def test_with_the_unigram_bias_a_run_begins_at_the_unigram_entropy_of_the_training_text(preset, tmp_path):
    flags = ["--config", preset, "--max_steps", "2", "--logging_steps", "1", "--logging_first_step", "true"]
    losses = {}
    for text in ("normal", "normal,unigram_bias=1", "mimetic,unigram_bias=1"):
        run = train_mlm.main([*flags, "--initialization", text, "--output_dir", str(tmp_path / text)])
        losses[text] = run["loss_at_steps"]["train"][0][1]
    assert losses["normal"] - losses["normal,unigram_bias=1"] > 1
    assert losses["normal,unigram_bias=1"] == pytest.approx(run["unigram_entropy"], abs=0.2)
    assert losses["mimetic,unigram_bias=1"] == pytest.approx(run["unigram_entropy"], abs=0.2)
    folder = tmp_path / "no_bias.json"
    folder.write_text(json.dumps({"model_type": "modernbert", "decoder_bias": False, **SHAPE}))
    with pytest.raises(InputError, match="a 'modernbert' model has no output bias"):
        train_mlm.main([*flags, "--initialization", "normal,unigram_bias=1", "--config_name", str(folder)])


def test_a_decoder_in_two_parts_has_no_output_bias_of_the_vocabulary():
    config = AutoConfig.for_model("deberta-v2", **SHAPE, legacy=False)
    with pytest.raises(InputError, match="a 'deberta-v2' model has no output bias"):
        initialization.set_output_bias(AutoModelForMaskedLM.from_config(config), "normal,unigram_bias=1", np.ones(390))


@pytest.mark.parametrize(
    "text",
    ["mimic", "mimetic,keys=1", "mimetic,positions=-1", "mimetic,value_output=-inf", "mimetic,positions=nan"]
    + ["normal,positions=2", "normal,unigram_bias=-1", "unigram_bias=1"],
)
def test_unknown_values_are_refused(preset, text):
    message = f"initialization={text}: .* normal,unigram_bias=0 or mimetic,positions=2,query_key=0.7,value_output=0.5,"
    with pytest.raises(InputError, match=message):
        train_mlm.main(["--config", preset, "--initialization", text])


def test_checkpoints_and_other_architectures_are_refused(preset, tmp_path, model_dir):
    flags = ["--config", preset, "--initialization", "mimetic"]
    with pytest.raises(InputError, match=r"initialization=mimetic and model_name_or_path=.* exclude each other"):
        train_mlm.main([*flags, "--model_name_or_path", model_dir])
    (tmp_path / "other.json").write_text(json.dumps({"model_type": "albert", **SHAPE}))
    with pytest.raises(InputError, match=r"supports roberta, .*bert, not 'albert'"):
        train_mlm.main([*flags, "--config_name", str(tmp_path / "other.json"), "--tokenizer_name", "before it is read"])
