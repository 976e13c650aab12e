"""DOC-SENTENCES: sequences in the same block do not attend to each other, and runs resume exactly."""

import numpy as np
import pytest
import torch
from conftest import losses
from test_varlen import attention_by_definition

import train_mlm
from roberta_recipe.data.masking import IGNORED, MlmCollator
from roberta_recipe.data.packing import Block
from roberta_recipe.model import attention, cpu_kernels
from roberta_recipe.model.attention import register
from roberta_recipe.model.masked_lm import masked_lm_class


@pytest.fixture
def blocks(tokenizer):
    """Three blocks of 5, 1 and 2 sequences."""
    rng, made = np.random.default_rng(0), []
    for lengths in ([4, 9, 2, 6, 12], [40], [20, 13]):
        ids = [[0, *rng.integers(261, 390, n - 2), 2] for n in lengths]
        numbers = np.repeat(np.arange(len(lengths)), lengths).astype(np.uint16)
        made.append(Block({"input_ids": np.concatenate(ids), "sequence": numbers}, len(made)))
    return made


@pytest.mark.parametrize("attention", ["sdpa", "eager", cpu_kernels.BLOCKWISE, attention.VARLEN])
def test_losses_and_gradients_are_those_of_a_row_a_sequence(config, tokenizer, blocks, attention, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attention_by_definition)
    register()
    torch.manual_seed(0)
    config.initializer_range = 0.5
    model = masked_lm_class(config)(config)
    model.set_attn_implementation(attention)
    together = MlmCollator(tokenizer, mlm_probability=0.4)(blocks)
    given = {name: together[name] for name in ("input_ids", "labels", "attention_mask", "sequence")}
    model(**given).loss_sums["mlm"].backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    whole = model(**given).loss_sums["mlm"].item()
    model.zero_grad()
    total, rows = 0.0, 0
    for ids, labels in rows_of(given):
        loss = model(input_ids=ids[None], labels=labels[None]).loss_sums["mlm"]
        loss.backward()
        total, rows = total + loss.item(), rows + 1
    assert rows == 8 and (given["labels"] != IGNORED).sum() > 20
    assert whole == pytest.approx(total, rel=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-4)
    without = model(**{name: value for name, value in given.items() if name != "sequence"}).loss_sums["mlm"].item()
    assert abs(without - total) > 0.1  # they would see each other


def rows_of(given):
    """(ids, labels) of each sequence."""
    for row in range(3):
        kept = given["attention_mask"][row].bool()
        numbers = given["sequence"][row][kept]
        for number in numbers.unique():
            own = numbers == number
            yield given["input_ids"][row][kept][own], given["labels"][row][kept][own]


def test_a_run_is_the_same_with_other_micro_batches_and_from_a_cache(preset, tmp_path):
    flags = ["--config", preset, "--input_format", "doc_sentences"]
    whole = train_mlm.main([*flags, "--output_dir", str(tmp_path / "whole")])
    cached = train_mlm.main([*flags, "--output_dir", str(tmp_path / "c"), "--token_cache", str(tmp_path / "cache")])
    split = train_mlm.main([*flags, "--output_dir", str(tmp_path / "s"), "--per_device_train_batch_size", "2"])
    assert whole["digest"] == cached["digest"] == split["digest"]
    assert cached["state_digests"] == whole["state_digests"]
    assert losses(split) == pytest.approx(losses(whole), rel=1e-4)
