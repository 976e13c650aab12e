"""Span-boundary, next-sentence and sentence-order objectives: targets, heads, runs."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from conftest import losses, write_parquet
from transformers import AutoModelForMaskedLM

import train_mlm
from roberta_recipe.data.masking import IGNORED, MlmCollator
from roberta_recipe.data.packing import Block
from roberta_recipe.errors import InputError
from roberta_recipe.model.masked_lm import masked_lm_class
from roberta_recipe.model.objectives import TABLE, labels_of_mask, named
from tools import evaluate

SBO = ["--masking_unit", "span", "--objective", "mlm", "sbo"]


@pytest.fixture
def model(config):
    torch.manual_seed(0)
    config.initializer_range = 0.3
    return masked_lm_class(config, objectives=named(["mlm", "sbo"]))(config).eval()


def by_definition(model, ids, labels):
    """Reference: the sum of losses of a row, token by token."""
    head, total = model.sbo_head, torch.zeros(())
    hidden = model.roberta(ids[None])[0][0]
    for at in (labels != IGNORED).nonzero()[:, 0].tolist():
        left = max(n for n in range(at) if labels[n] == IGNORED)
        right = min(n for n in range(at, len(labels)) if labels[n] == IGNORED)
        state = torch.cat([hidden[left], hidden[right], head.position_embeddings.weight[at - left - 1]])
        for layer, norm in ((head.first, head.first_norm), (head.second, head.second_norm)):
            state = norm(torch.nn.functional.gelu(layer(state)))
        logits = model.roberta.embeddings.word_embeddings.weight @ state + model.lm_head.bias
        total = total - torch.log_softmax(logits, -1)[labels[at]]
    return total


def test_the_loss_is_that_of_the_definition(model, tokenizer):
    rng = np.random.default_rng(0)
    lengths = [60, 33, 9]
    blocks = [Block({"input_ids": np.array([0, *rng.integers(261, 390, n - 2), 2])}, n) for n in lengths]
    settings = {"masking_unit": "span", "mlm_probability": 0.4, "labels_of_mask": labels_of_mask(["sbo"])}
    batch = MlmCollator(tokenizer, **settings)(blocks)
    given = {name: batch[name] for name in ("input_ids", "labels", "attention_mask", "sbo_labels")}
    found = model(**given).loss_sums
    targets = (batch["sbo_labels"] != IGNORED).sum()
    assert targets == (batch["labels"] != IGNORED).sum() > 20  # <s> and </s> are beside the first and the last span
    rows = zip(batch["input_ids"], batch["sbo_labels"], lengths, strict=True)
    expected = sum(by_definition(model, ids[:length], labels[:length]) for ids, labels, length in rows)
    assert found["sbo"].item() == pytest.approx(expected.item(), rel=1e-4)
    stock = model(**{**given, "sbo_labels": torch.full_like(batch["labels"], IGNORED)}).loss_sums
    assert stock["sbo"] == 0 and stock["mlm"] == found["mlm"]


def test_a_span_at_the_end_of_a_block_is_no_target(tokenizer):
    """In a block that was cut within a sentence."""
    block = {"input_ids": np.array([0, *range(261, 300)])}
    at_end = 0
    for epoch in range(60):
        collator = MlmCollator(tokenizer, masking_unit="span", labels_of_mask=labels_of_mask(["sbo"]))
        [seen] = collator.seen_by_model([Block(block, 1, epoch)])
        labels, targets = seen["labels"], seen["sbo_labels"]
        last = np.flatnonzero(labels == IGNORED)[-1]
        assert (targets[last:] == IGNORED).all() and (targets[:last] == labels[:last]).all()
        at_end += last < 39
    assert 0 < at_end < 40


def test_a_run_resumed_and_split_is_one_run(preset, tmp_path):
    flags = ["--config", preset, *SBO, "--save_strategy", "steps", "--save_steps", "2", "--output_dir"]
    whole = train_mlm.main([*flags, str(tmp_path / "whole")])
    assert 0 < whole["metrics"]["eval_sbo_loss"] < 10
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    resumed = train_mlm.main([*flags, str(tmp_path / "again")])
    assert resumed["resumes"] == 1 and resumed["state_digests"] == whole["state_digests"]
    split = train_mlm.main([*flags, str(tmp_path / "split"), "--per_device_train_batch_size", "2"])
    assert losses(split) == pytest.approx(losses(whole), rel=1e-4)


def test_a_finished_model_is_measured_and_trains_on_with_a_new_head(preset, tmp_path):
    flags = ["--config", preset, *SBO]
    record = train_mlm.main(flags)
    start = [*flags, "--model_name_or_path", str(tmp_path / "run")]
    metrics, _ = evaluate.main(start)
    assert metrics["eval_loss"] == pytest.approx(record["metrics"]["eval_loss"], rel=1e-5)
    assert "eval_sbo_loss" not in metrics
    assert train_mlm.main([*start, "--output_dir", str(tmp_path / "on")])["steps"] == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--objective", "mlm", "sbo"], "objective sbo needs masking_unit=span, not token"),
        (["--objective", "sbo"], "objective='sbo': name mlm and any of the others, once each"),
        (["--objective", "mlm", "nsp", "sop"], "nsp and sop exclude each other"),
    ],
)
def test_impossible_objectives_are_refused(preset, flags, message):
    with pytest.raises(InputError, match=message):
        train_mlm.main(["--config", preset, *flags])


def test_an_objective_without_labels_is_refused(preset, monkeypatch):
    monkeypatch.setitem(TABLE, "mine", dataclasses.replace(TABLE["nsp"], column="my_label"))
    with pytest.raises(InputError, match="objective mine has no labels: declare labels_of_mask, or 'FORMAT mine'"):
        train_mlm.main(["--config", preset, "--objective", "mlm", "mine"])


def test_padding_is_no_target(tokenizer):
    blocks = [Block({"input_ids": np.full(n, 300), "my_label": np.zeros(n)}, n) for n in (4, 8)]
    assert (MlmCollator(tokenizer)(blocks)["my_label"] == IGNORED).sum() == 4


@pytest.mark.parametrize("types", [1, 2])
def test_the_loss_of_pairs_is_that_of_the_definition(config, tokenizer, preset, tmp_path, types):
    """With token types if the model has them."""
    config.initializer_range, config.type_vocab_size = 0.3, types
    torch.manual_seed(0)
    model = masked_lm_class(config, objectives=named(["mlm", "nsp"]))(config).eval()
    rng = np.random.default_rng(0)
    blocks = []
    for n in range(4, 16):
        columns = {
            "input_ids": np.array([0, *rng.integers(261, 390, 9), 2, 2, *rng.integers(261, 390, n), 2]),
            "token_type_ids": np.array([0] * 11 + [1] * (n + 2)),
            "next_sentence_labels": np.array([n % 3 - 1 if n % 3 else IGNORED] + [IGNORED] * (n + 12)),
        }
        blocks.append(Block(columns, n))
    found = model(**MlmCollator(tokenizer)(blocks)).loss_sums["nsp"].item()
    expected = 0.0
    for block in blocks:
        seen = torch.from_numpy(MlmCollator(tokenizer).seen_by_model([block])[0]["input_ids"])[None]
        segments = {"token_type_ids": torch.from_numpy(block["token_type_ids"])[None]} if types == 2 else {}
        state = model.roberta(seen, **segments)[0][0, 0]
        logits = model.pair_head.output(torch.tanh(model.pair_head.pooler(state)))
        label = block["next_sentence_labels"][0]
        expected -= torch.log_softmax(logits, -1)[label].item() if label != IGNORED else 0.0
    assert found == pytest.approx(expected, rel=1e-4) and expected > 1


@pytest.mark.parametrize(("input_format", "objective"), [("segment_pair", "nsp"), ("sentence_pair", "sop")])
def test_a_run_over_pairs_resumed_and_cached_is_one_run(preset, tmp_path, input_format, objective):
    flags = ["--config", preset, "--input_format", input_format, "--objective", "mlm", objective]
    flags += ["--save_strategy", "steps", "--save_steps", "2", "--output_dir"]
    whole = train_mlm.main([*flags, str(tmp_path / "whole")])
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    resumed = train_mlm.main([*flags, str(tmp_path / "again")])
    cached = train_mlm.main([*flags, str(tmp_path / "cached"), "--token_cache", str(tmp_path / "cache")])
    assert resumed["resumes"] == 1 and f"eval_{objective}_loss" in whole["metrics"]
    assert resumed["state_digests"] == cached["state_digests"] == whole["state_digests"]
    _, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]


@pytest.mark.parametrize(
    ("objective", "texts", "needs"),
    [
        ("nsp", [" ".join(["A dog sees the cat."] * 200)], "files with several documents"),
        ("sop", ["A dog sees the cat near the sea."] * 200, "documents of two sentences or more"),
    ],
)
def test_text_without_pairs_is_refused(preset, tmp_path, objective, texts, needs):
    path = write_parquet(tmp_path / "text.parquet", texts)
    held_out = write_parquet(tmp_path / "held_out.parquet", [text.replace("dog", "cat") for text in texts])
    flags = ["--train_file", path, "--validation_file", held_out, "--input_format", "segment_pair"]
    with pytest.raises(InputError, match=f"objective {objective}: no validation block has a label \\(needs: {needs}"):
        train_mlm.main(["--config", preset, *flags, "--objective", "mlm", objective])
