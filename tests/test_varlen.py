"""Unpadded (varlen) rows compared with SDPA on padded rows; FlashAttention, which needs CUDA, is replaced by its
definition."""

import pytest
import torch
from test_families import config_of
from torch.nn import functional

import train_mlm
from roberta_recipe.data import NSP
from roberta_recipe.data.masking import IGNORED
from roberta_recipe.errors import InputError
from roberta_recipe.model import architectures, attention, masked_lm
from roberta_recipe.model.objectives import named
from roberta_recipe.training.arguments import MlmTrainingArguments

LENGTHS = (24, 9, 17)


def attention_by_definition(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale):
    """`torch.nn.attention.varlen.varlen_attn` for (tokens, heads, head_size): SDPA over each sequence by itself."""
    lengths = cu_seq_q.diff()
    assert torch.equal(cu_seq_q, cu_seq_k) and cu_seq_q.dtype == torch.int32 and cu_seq_q[-1] == len(query)
    assert lengths.min() > 0 and lengths.max() <= max_q == max_k
    heads_first = [tensor.transpose(0, 1).split(lengths.tolist(), dim=1) for tensor in (query, key, value)]
    out = [functional.scaled_dot_product_attention(*qkv, scale=scale) for qkv in zip(*heads_first, strict=True)]
    return torch.cat(out, dim=1).transpose(0, 1)


def padded_batch(objectives):
    """Three rows of `LENGTHS`, with every third token predicted, and the label columns of `objectives`."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(261, 390, (3, max(LENGTHS)), generator=rng)
    kept = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    chosen = kept & (torch.arange(max(LENGTHS)) % 3 == 1)
    batch = {"input_ids": torch.where(kept, ids, 1), "attention_mask": kept.long()}
    batch["labels"] = torch.where(chosen, ids, IGNORED)
    batch["predicted"] = batch["labels"].flatten().ne(IGNORED).nonzero()[:, 0]
    if "sbo" in objectives:  # no span at a row's end
        batch["sbo_labels"] = torch.where(kept.roll(-1, 1), batch["labels"], IGNORED)
    if "nsp" in objectives:
        batch[NSP] = torch.full_like(ids, IGNORED)
        batch[NSP][:, 0] = torch.tensor([1, 0, 1])
        batch["token_type_ids"] = (torch.arange(max(LENGTHS)) > 6).long().expand_as(ids)
    return batch


@pytest.mark.parametrize("objectives", [["mlm"], ["mlm", "sbo"], ["mlm", "nsp"]])
@pytest.mark.parametrize("name", [name for name, family in architectures.TABLE.items() if family.first_position])
def test_losses_and_gradients_are_those_of_padded_rows(name, objectives, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attention_by_definition)
    attention.register()
    config = config_of(name)
    config.initializer_range = 0.3
    torch.manual_seed(0)
    model, found = masked_lm.masked_lm_class(config, objectives=named(objectives))(config), {}
    batch = padded_batch(objectives)
    assert {objective.column for objective in model.objectives.values()} <= set(batch)
    for way in ("sdpa", attention.VARLEN):
        model.set_attn_implementation(way)
        model.zero_grad()
        output = model(**batch)
        sum(output.loss_sums.values()).backward()
        found[way] = output, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    (padded, expected), (unpadded, gradients) = found.values()
    assert list(padded.loss_sums) == objectives
    for objective in objectives:
        torch.testing.assert_close(unpadded.loss_sums[objective], padded.loss_sums[objective], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(unpadded.losses, padded.losses, rtol=1e-3, atol=1e-3)
    assert gradients.keys() == expected.keys() and len(gradients) > 15
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm() + 1e-3, name


def test_logits_without_labels_are_those_of_padded_rows():
    """As called by `pipeline` and BLiMP."""
    attention.register()
    model = masked_lm.masked_lm_class(config_of("roberta"))(config_of("roberta")).eval()
    given = {name: column for name, column in padded_batch(["mlm"]).items() if name in ("input_ids", "attention_mask")}
    logits = {}
    for way in ("sdpa", attention.VARLEN):
        model.set_attn_implementation(way)
        logits[way] = model(**given).logits[given["attention_mask"].bool()]
    torch.testing.assert_close(logits[attention.VARLEN], logits["sdpa"])


@pytest.mark.parametrize(
    ("model_type", "changes", "can_unpad", "message"),
    [
        ("roberta", {}, False, "it is for pretraining only"),
        ("modernbert", {}, True, "a 'modernbert' model has no position ids"),
        (
            "roberta",
            {"attention_probs_dropout_prob": 0.1},
            True,
            "has no dropout, and the model's attention has a dropout of 0.1",
        ),
    ],
)
def test_models_that_cannot_be_unpadded_are_refused(tmp_path, monkeypatch, model_type, changes, can_unpad, message):
    monkeypatch.setattr(MlmTrainingArguments, "device", torch.device("cuda"))
    args = MlmTrainingArguments(str(tmp_path), max_steps=1, attn_implementation="varlen", bf16=True, use_cpu=True)
    assert attention.choose(config_of("roberta"), args, can_unpad=True) == "varlen"
    args.torch_compile = True
    with pytest.raises(InputError, match="torch_compile needs fixed shapes, and would recompile for every batch"):
        attention.choose(config_of("roberta"), args, can_unpad=True)
    args.torch_compile = False
    config = config_of(model_type)
    config.update(changes)
    with pytest.raises(InputError, match=message):
        attention.choose(config, args, can_unpad)


def test_blockwise_attention_of_a_cpus_preset_is_refused_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(MlmTrainingArguments, "device", torch.device("cuda"))
    args = MlmTrainingArguments(str(tmp_path), max_steps=1, attn_implementation="blockwise", use_cpu=True)
    with pytest.raises(InputError, match="attn_implementation=blockwise: it is for CPUs; this run is on cuda"):
        attention.choose(config_of("roberta"), args)


def test_a_cpu_is_refused(preset):
    with pytest.raises(InputError, match="varlen: it needs CUDA and bf16 or fp16; this run is fp32 on cpu"):
        train_mlm.main(["--config", str(preset), "--attn_implementation", "varlen"])
