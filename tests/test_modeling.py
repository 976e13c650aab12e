"""Masked-LM head and loss: gradient of the effective batch, checkpoints for the stock class."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import KeepGradients, run_python
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from transformers import AutoConfig, AutoModelForMaskedLM, DataCollatorForLanguageModeling, Trainer

from roberta_recipe.data.masking import IGNORED, MlmCollator
from roberta_recipe.data.packing import Block
from roberta_recipe.errors import InputError
from roberta_recipe.model import attention, masked_lm
from roberta_recipe.model.masked_lm import EXCLUDED_LOGIT, build_model, flops_per_token, layer_weights, masked_lm_class
from roberta_recipe.model.weights import read_config
from roberta_recipe.training.arguments import MlmTrainingArguments
from roberta_recipe.training.mlm_trainer import MlmTrainer


def make_blocks(tokenizer, count=16, seed=0):
    """Blocks of 20 to 60 ids, so that micro-batches differ in padding and in the number of predicted positions."""
    rng = np.random.default_rng(seed)
    ids = (np.r_[0, rng.integers(261, len(tokenizer) - 1, rng.integers(20, 60)), 2] for _ in range(count))
    return [Block({"input_ids": of_block.astype(np.uint16)}, number) for number, of_block in enumerate(ids)]


class Blocks(torch.utils.data.IterableDataset):
    def __init__(self, blocks):
        self.blocks = blocks

    def __iter__(self):
        yield from self.blocks


def one_step(model, collator, blocks, micro_batch, folder, trainer_class=MlmTrainer, **others):
    """(trainer, gradients) after one optimizer step over all of `blocks`, with a learning rate of 0."""
    keep = KeepGradients()
    if trainer_class is MlmTrainer:
        others |= {"flops_per_token": 1.0, "fingerprint": {"global_batch_size": len(blocks)}, "resumed": None}
    trainer = trainer_class(
        model=model,
        args=MlmTrainingArguments(
            output_dir=str(folder),
            max_steps=1,
            learning_rate=0.0,
            per_device_train_batch_size=micro_batch,
            per_device_eval_batch_size=micro_batch,
            gradient_accumulation_steps=len(blocks) // micro_batch,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Blocks(blocks),
        data_collator=collator,
        callbacks=[keep],
        **others,
    )
    trainer.train()
    return trainer, keep.gradients


def seeded(cls, config):
    torch.manual_seed(0)
    return cls(config)


def difference(gradients, reference):
    """Largest difference of a parameter's gradient, relative to the norm of that gradient.

    A key's bias shifts all scores of a row alike, so its gradient is rounding error only; it is compared with the norm
    of all gradients.
    """
    whole = torch.stack([g.norm() for g in reference.values()]).norm()
    return max(
        float((gradients[name] - g).norm() / (whole if name.endswith("key.bias") else g.norm()))
        for name, g in reference.items()
    )


@pytest.fixture
def collator(tokenizer):
    return MlmCollator(tokenizer, seed=0, pad_to_multiple_of=8)


@pytest.fixture
def dense(config, tokenizer, collator):
    return by_definition(config, collator(make_blocks(tokenizer)))


def by_definition(config, batch):
    """Reference loss and gradients: stock model, undivided batch, mean over predicted positions."""
    model = seeded(transformers.RobertaForMaskedLM, config)
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    predicted = batch["labels"] != IGNORED
    loss = (
        -torch.log_softmax(logits[predicted], dim=-1).gather(1, batch["labels"][predicted][:, None]).sum()
        / predicted.sum()
    )
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("micro_batch", [16, 8, 4, 1])
def test_gradient_of_the_batch_in_any_layout(config, tokenizer, collator, dense, tmp_path, micro_batch):
    model = seeded(masked_lm_class(config), config)
    trainer, gradients = one_step(model, collator, make_blocks(tokenizer), micro_batch, tmp_path)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(dense[0], rel=1e-6)
    assert gradients.keys() == dense[1].keys()
    assert difference(gradients, dense[1]) < 1e-6


def test_the_stock_collator_in_place_of_ours(config, tokenizer, tmp_path):
    blocks = make_blocks(tokenizer)
    collator, again = (DataCollatorForLanguageModeling(tokenizer, seed=0) for _ in range(2))
    trainer, gradients = one_step(seeded(masked_lm_class(config), config), collator, blocks, 16, tmp_path)
    expected, reference = by_definition(config, again(sorted(blocks, key=lambda block: -len(block["input_ids"]))))
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-6)
    assert difference(gradients, reference) < 1e-6


def test_the_stock_class_has_another_gradient_in_every_layout(config, tokenizer, collator, dense, tmp_path):
    """The bug that our loss fixes; if this test fails, the stock class is fixed."""

    def stock_columns(blocks):
        batch = collator(blocks)
        return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}

    model = seeded(transformers.RobertaForMaskedLM, config)
    trainer, gradients = one_step(model, stock_columns, make_blocks(tokenizer), 4, tmp_path, Trainer)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(4 * dense[0], rel=0.05)
    assert difference(gradients, dense[1]) > 1


def test_a_micro_batch_with_nothing_predicted(config, tokenizer):
    model = masked_lm_class(config)(config)
    ids = torch.full((2, 10), 300)
    loss = model(ids, labels=torch.full_like(ids, IGNORED)).loss
    assert loss.item() == 0.0
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and torch.isfinite(g).all() and not g.any() for g in gradients)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_micro_batch_waits_for_no_device(config, tokenizer, attention):
    """Fake tensors have no values, so that synchronising operations raise."""
    batch = MlmCollator(tokenizer, seed=0)(make_blocks(tokenizer, 4))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model = masked_lm_class(config)(config)
        model.set_attn_implementation(attention)
        names = ("input_ids", "attention_mask", "labels", "predicted")
        columns = {name: fake.from_tensor(batch[name]) for name in names}
        model(**columns).loss_sums["mlm"].backward()
        del columns["predicted"]
        with pytest.raises(DynamicOutputShapeException, match="nonzero"):
            model(**columns)


def test_losses_and_gradients_of_many_rows_are_torchs(monkeypatch):
    """More rows than one chunk, in each precision; an ignored row has neither loss nor gradient."""
    torch.manual_seed(0)
    monkeypatch.setattr(masked_lm, "LOGITS_AT_ONCE", 50 * 128)
    targets = torch.randint(0, 50, (2 * 128 + 7,))
    targets[::5] = IGNORED
    upstream = torch.rand(len(targets))
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.01), (torch.float16, 0.01)):
        logits = (3 * torch.randn(len(targets), 50)).to(dtype)
        ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
        losses = masked_lm.cross_entropy(ours, targets)
        expected = torch.nn.functional.cross_entropy(theirs.float(), targets, reduction="none")
        torch.testing.assert_close(losses, expected, rtol=0, atol=0)
        (losses * upstream).sum().backward()
        (expected * upstream).sum().backward()
        assert ours.grad.dtype == dtype and not ours.grad[::5].any()
        assert (ours.grad - theirs.grad).norm() <= tolerance * theirs.grad.norm()


@pytest.mark.parametrize(("capability", "left_out"), [((9, 0), True), ((8, 0), False)])
def test_cudnns_attention_is_left_out_on_hopper(config, monkeypatch, caplog, capability, left_out):
    model, allowed = masked_lm_class(config)(config), []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", allowed.append)
    args = SimpleNamespace(device=torch.device("cuda"), attn_implementation="sdpa", bf16=True, fp16=False)
    with caplog.at_level("INFO"):
        attention.set_up(model, args)
    assert allowed == [False] * left_out
    assert ("#196678" in caplog.text) == left_out


@pytest.mark.parametrize(
    ("name", "parameters", "flops"),
    [("base", 124_697_433, 0.602e9), ("large", 355_412_057, 2.010e9), ("small", 38_923_865, None)],
)
def test_sizes_are_the_papers(name, parameters, flops):
    """Parameters of FacebookAI/roberta-base and -large with their MLM head (the paper rounds to 125M and 355M)."""
    config = read_config(f"presets/model/{name}.json")
    with torch.device("meta"):
        model = masked_lm_class(config)(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert (config.max_position_embeddings, config.type_vocab_size, config.layer_norm_eps) == (514, 1, 1e-5)
    assert (config.vocab_size, config.initializer_range) == (50265, 0.02)
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob, config.hidden_act) == (0.1, 0.1, "gelu")
    if flops:
        assert flops_per_token(config, 512, 0.15) == pytest.approx(flops, rel=1e-3)


def test_flops_of_distilbert_and_xlm_are_those_of_six_layers_of_bert():
    """Its config has other names for the widths."""
    distilbert, bert = AutoConfig.for_model("distilbert"), AutoConfig.for_model("bert", num_hidden_layers=6)
    assert flops_per_token(distilbert, 512, 0.15) == flops_per_token(bert, 512, 0.15)
    xlm = AutoConfig.for_model("xlm", emb_dim=768, n_layers=6, n_heads=12, vocab_size=bert.vocab_size)
    assert flops_per_token(xlm, 512, 0.15) == flops_per_token(bert, 512, 0.15)


def test_flops_count_gated_feed_forward_networks_and_shared_keys():
    """Against the parameters of a layer of transformers' own classes."""
    for name, values in (("nomic_bert", {}), ("gte", {}), ("modernbert", {}), ("eurobert", {"num_key_value_heads": 4})):
        config = AutoConfig.for_model(name, **values)
        with torch.device("meta"):
            parameters = AutoModelForMaskedLM.from_config(config).named_parameters()
        layer = sum(p.numel() for name, p in parameters if "layers.1." in name and p.ndim == 2)
        assert layer_weights(config) == layer, name


def test_tokens_that_are_added_into_padding_rows_can_be_predicted(config_file, tokenizer, tmp_path):
    """Padding rows are hidden by a bias of -1e4; a row that the tokenizer has now must not be."""
    build_model(tokenizer, config_name=config_file, max_seq_length=64, pad_vocab_to_multiple_of=64).save_pretrained(
        tmp_path
    )
    extended = copy.deepcopy(tokenizer)
    for added, multiple in ((2, 64), (46, None)):  # some padding rows are left; none is
        extended.add_tokens([f"<{added}-{i}>" for i in range(added)])
        start = {"model_name_or_path": str(tmp_path), "pad_vocab_to_multiple_of": multiple}
        bias = build_model(extended, max_seq_length=64, **start).get_output_embeddings().bias
        assert not bias[: len(extended)].any() and (bias[len(extended) :] == EXCLUDED_LOGIT).all()


def test_padding_the_embedding_changes_no_loss_and_no_gradient(config_file, tokenizer, tmp_path):
    torch.manual_seed(0)
    plain = build_model(tokenizer, config_name=config_file, max_seq_length=64)
    plain.save_pretrained(tmp_path / "plain")
    pad = {"max_seq_length": 64, "pad_vocab_to_multiple_of": 64}
    padded = build_model(tokenizer, model_name_or_path=str(tmp_path / "plain"), **pad)
    assert padded.config.vocab_size == 448 and plain.config.vocab_size == len(tokenizer) == 400
    batch = MlmCollator(tokenizer, seed=0)(make_blocks(tokenizer))
    losses = [model(**batch).loss for model in (plain, padded)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    rows = padded.roberta.embeddings.word_embeddings.weight.grad
    torch.testing.assert_close(rows[:400], plain.roberta.embeddings.word_embeddings.weight.grad)
    assert not rows[400:].any() and not padded.lm_head.bias.grad[400:].any()
    fresh = build_model(tokenizer, config_name=config_file, **pad)
    assert fresh.config.vocab_size == 448 and (fresh.lm_head.bias[400:] == -1e4).all()
    fresh.save_pretrained(tmp_path / "padded")
    again = build_model(tokenizer, model_name_or_path=str(tmp_path / "padded"), **pad)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), again.parameters(), strict=True))


def test_a_checkpoint_is_the_stock_classs(config, tokenizer, tmp_path):
    """Saved here, loaded by a process without this repository: same logits."""
    torch.manual_seed(0)
    model = masked_lm_class(config)(config).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    ids = torch.arange(300, 320)[None]
    script = f"""
import sys, torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
sys.modules["roberta_recipe"] = None  # the installed library cannot be imported
model, report = AutoModelForMaskedLM.from_pretrained({str(tmp_path / "model")!r}, output_loading_info=True)
assert not any(report.values()), report
assert AutoTokenizer.from_pretrained({str(tmp_path / "model")!r}).mask_token == "<mask>"
torch.save(model.eval()(torch.arange(300, 320)[None]).logits, {str(tmp_path / "logits.pt")!r})
print(type(model).__module__)
"""
    done = run_python("-I", "-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "transformers.models.roberta.modeling_roberta"
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), model(ids).logits, rtol=0, atol=0)
    assert sorted(p.name for p in (tmp_path / "model").glob("*.safetensors")) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("max_position_embeddings=64", r"max_seq_length=64 is more than the 62 positions"),
        ("pad_token_id=0", r"pad_token_id=0, the tokenizer 400 entries and 1"),
        ("vocab_size=448", r"set vocab_size to 400, pad_vocab_to_multiple_of to 448, or tokenizer_name to"),
        ("hidden_size=33", r"a 'roberta' model with these values cannot be built \(ValueError: The hidden size \(33\)"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tokenizer, config_file, overrides, message):
    with pytest.raises(InputError, match=message):
        build_model(tokenizer, config_name=config_file, config_overrides=overrides, max_seq_length=64)


def test_fresh_weights_have_the_tokenizers_vocabulary_and_padding_id(tokenizer, config, tmp_path):
    other = {**config.to_dict(), "vocab_size": 900, "pad_token_id": 0}  # as of a BERT
    config.__class__.from_dict(other).to_json_file(tmp_path / "other.json")
    model = build_model(tokenizer, config_name=str(tmp_path / "other.json"), max_seq_length=64)
    assert (model.config.vocab_size, model.config.pad_token_id) == (400, 1)
    assert model.get_input_embeddings().padding_idx == 1
    overrides = {"config_overrides": "type_vocab_size=2", "max_seq_length": 64}
    types = build_model(tokenizer, config_name=str(tmp_path / "other.json"), **overrides)
    assert (types.config.vocab_size, types.config.type_vocab_size) == (400, 2)
