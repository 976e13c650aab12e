"""Other architectures than RoBERTa: logits and losses of the stock class, whole runs, unsupported combinations."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import end_well, forked_ranks
from torch.nn import functional
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification

import train_mlm
from roberta_recipe.data.masking import IGNORED, MlmCollator
from roberta_recipe.data.packing import Block
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.model import architectures, masked_lm
from roberta_recipe.model.objectives import named
from roberta_recipe.model.task_heads import load_with_head
from roberta_recipe.training import pretraining
from roberta_recipe.training.arguments import MlmTrainingArguments

SHAPE = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 72,
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2},
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True}
CONFIGS = {
    "roberta": {},
    "xlm-roberta": {},
    "camembert": {},
    "bert": {"type_vocab_size": 2},
    "albert": {"embedding_size": 16},
    "modernbert": {"embedding_dropout": 0.0, "mlp_dropout": 0.0, "attention_dropout": 0.0, "local_attention": 16},
    "deberta-v2": RELATIVE,
    "deberta-v2, its own head": {"legacy": False, **RELATIVE},
    # not in the table
    "electra": {"embedding_size": 16},
    "mpnet": {},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "dropout": 0.0, "attention_dropout": 0.0},
    "convbert": {"embedding_size": 32},
}
TRAINED = ("bert", "albert", "modernbert", "deberta-v2", "electra")


def config_of(name):
    return AutoConfig.for_model(name.partition(",")[0], **{**SHAPE, **CONFIGS[name]})


@pytest.fixture
def batch(tokenizer):
    """Three rows of different lengths."""
    rng = torch.Generator().manual_seed(0)
    lengths = (64, 40, 51)
    blocks = [Block({"input_ids": torch.randint(261, 390, (n,), generator=rng).numpy()}, n) for n in lengths]
    batch = MlmCollator(tokenizer, mlm_probability=0.3)(blocks)
    return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_losses_and_gradients_are_the_stock_classs(name, batch):
    config = config_of(name)
    assert architectures.TABLE.keys() < set(CONFIGS)
    torch.manual_seed(0)
    ours = masked_lm.masked_lm_class(config)(config)
    stock = AutoModelForMaskedLM.from_config(config)
    stock.load_state_dict(ours.state_dict())
    assert type(ours).__name__ == type(stock).__name__
    for model in (ours, stock):
        model.set_attn_implementation("eager")
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(5)  # logits that differ
    predicted, labels = batch["labels"] != IGNORED, batch.pop("labels")
    expected = stock(**batch).logits[predicted]
    output = ours(**batch, labels=labels)
    assert output.logits is None and expected.shape == (predicted.sum(), 400) and expected.std() > 0.01
    losses = functional.cross_entropy(expected, labels[predicted], reduction="none")
    torch.testing.assert_close(output.losses, losses, rtol=1e-5, atol=1e-5)
    losses.sum().backward()
    output.loss_sums["mlm"].backward()
    compared = 0
    for (_, one), (_, other) in zip(ours.named_parameters(), stock.named_parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared > 15
    torch.testing.assert_close(ours(**batch).logits, stock(**batch).logits)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_a_head_with_its_labels_in_another_order_is_fresh(name, tmp_path):
    """ModernBERT's has a linear layer without bias."""
    config = config_of(name)
    config.id2label, config.label2id = {0: "no", 1: "yes"}, {"no": 0, "yes": 1}
    stock = AutoModelForSequenceClassification.from_config(config)
    stock.save_pretrained(tmp_path)
    loaded = load_with_head(AutoModelForSequenceClassification, str(tmp_path), None, labels=["yes", "no"])
    assert not torch.equal(loaded.classifier.weight, stock.classifier.weight)


def test_rows_of_padding_that_no_bias_can_hide_are_refused(tokenizer, tmp_path):
    AutoModelForMaskedLM.from_config(config_of("deberta-v2, its own head")).save_pretrained(tmp_path)
    start = {"model_name_or_path": str(tmp_path), "max_seq_length": 64}
    with pytest.raises(InputError, match="has no bias in its head to hide padding rows"):
        masked_lm.build_model(tokenizer, **start, pad_vocab_to_multiple_of=64)


@pytest.mark.parametrize("name", ["bert", "roberta", "electra"])
def test_padding_ends_at_the_last_position(name, tokenizer):
    """A block of a length that is no multiple of 8, with several sequences where the model can have them."""
    config = config_of(name)
    length = config.max_position_embeddings = {"roberta": 68}.get(name, 66)
    length -= {"roberta": 2}.get(name, 0)
    args = train_mlm.MlmArguments(max_seq_length=length)
    collator = pretraining.build_collator(args, MlmTrainingArguments("unused", max_steps=1, use_cpu=True), tokenizer)
    block = Block({"input_ids": np.full(length, 300), "sequence": np.zeros(length, dtype=int)}, length)
    batch = collator([block])
    if name not in architectures.MULTI_SEQUENCE_MODELS:
        batch.pop("sequence")
    assert masked_lm.masked_lm_class(config)(config)(**batch).loss > 0


@pytest.mark.parametrize("name", [name for name, family in architectures.TABLE.items() if family.first_position])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sequences_of_a_row_are_kept_apart(name, attention):
    config = config_of(name)
    torch.manual_seed(0)
    model = masked_lm.masked_lm_class(config)(config).eval()
    model.set_attn_implementation(attention)
    ids = torch.randint(261, 390, (1, 24))
    sequence = torch.tensor([[0] * 5 + [1] * 9 + [2] * 10])
    together = model(ids, sequence=sequence).logits[0]
    apart = torch.cat([model(ids[:, sequence[0] == number]).logits[0] for number in range(3)])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


def test_weights_in_bf16_keep_the_sequences_of_a_row_apart_too():
    """As under DeepSpeed, without autocast."""
    torch.manual_seed(0)
    model = masked_lm.masked_lm_class(config_of("roberta"))(config_of("roberta")).eval().bfloat16()
    ids, sequence = torch.randint(261, 390, (1, 12)), torch.tensor([[0] * 5 + [1] * 7])
    found = {}
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        found[attention] = model(ids, sequence=sequence).logits.float()
    torch.testing.assert_close(found["eager"], found["sdpa"], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("objectives", [["mlm", "sbo"], ["mlm", "nsp"]])
@pytest.mark.parametrize("name", TRAINED)
def test_other_objectives_have_heads_that_fit(name, objectives, batch):
    config = config_of(name)
    model = masked_lm.masked_lm_class(config, objectives=named(objectives))(config)
    other = torch.full_like(batch["labels"], IGNORED)
    other[:, 0 if "nsp" in objectives else 5] = 1
    losses = model(**batch, **{model.objectives[objectives[1]].column: other}).loss_sums
    sum(losses.values()).backward()
    assert list(losses) == objectives and all(loss.isfinite() and loss > 0 for loss in losses.values())
    heads = [weight for key, weight in model.named_parameters() if key.startswith(model.heads_of_objectives)]
    assert heads and all(weight.grad is not None for weight in heads)


@pytest.mark.parametrize("name", ["albert", "modernbert", "electra", "distilbert"])
def test_a_run_of_another_architecture_resumes_and_loads_in_stock_classes(name, preset, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(name).to_dict()))
    flags = ["--config", preset, "--config_name", str(tmp_path / "config.json"), "--save_strategy", "steps"]
    flags += ["--save_steps", "2"]
    whole = train_mlm.main([*flags, "--output_dir", str(tmp_path / "whole")])
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    resumed = train_mlm.main([*flags, "--output_dir", str(tmp_path / "again")])
    assert resumed["resumes"] == 1 and resumed["state_digests"] == whole["state_digests"]
    _, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not any(report.values()), report
    again = train_mlm.main(
        ["--config", preset, "--model_name_or_path", str(tmp_path / "whole"), "--output_dir", str(tmp_path / "more")]
    )
    assert again["loss_at_steps"]["train"][0][1] < whole["loss_at_steps"]["train"][0][1]


def test_weights_that_no_step_uses_are_named_in_several_processes(preset, tmp_path):
    """FNet's pooler."""
    config = tmp_path / "fnet.json"
    config.write_text(json.dumps({**SHAPE, "model_type": "fnet"}))
    argv = ["--config", str(preset), "--config_name", str(config), "--output_dir", str(tmp_path / "run")]
    argv += ["--per_device_train_batch_size", "4"]
    ranks = forked_ranks(lambda rank: exit_on_error(lambda: train_mlm.main(argv)), tmp_path)
    assert [rank.end() for rank in ranks] == [1, 1], ranks[0].log
    assert any("no step uses: add --ddp_find_unused_parameters true" in rank.log for rank in ranks)
    argv += ["--ddp_find_unused_parameters", "true"]
    end_well(forked_ranks(lambda rank: train_mlm.main(argv), tmp_path))


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"model_type": "gpt2"}, [], "is a 'gpt2' model, for which transformers has no masked LM; name one of"),
        ({"model_type": "bart"}, [], "is a 'bart' model, for which transformers has no masked LM; name one of"),
        ({"model_type": "modernbert"}, ["--input_format", "doc_sentences"], "cannot separate; use full_sentences"),
        (
            {"model_type": "modernbert", "decoder_bias": False},
            ["--pad_vocab_to_multiple_of", "64"],
            "has no bias in its head to hide padding rows",
        ),
        (
            {"model_type": "deberta-v2", "legacy": False},
            ["--masking_unit", "span", "--objective", "mlm", "sbo"],
            "objective sbo: a 'deberta-v2' model has no output layer that can be shared",
        ),
    ],
)
def test_unsupported_combinations_are_refused(preset, tmp_path, changes, flags, message):
    (tmp_path / "other.json").write_text(json.dumps({**SHAPE, **changes}))
    with pytest.raises(InputError, match=message):
        train_mlm.main(["--config", preset, "--config_name", str(tmp_path / "other.json"), *flags])
