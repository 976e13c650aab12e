"""`--torch_compile true`: one graph, the encoder, for all batches; losses equal those of the uncompiled run."""

import pytest
import torch
from conftest import losses
from test_modeling import make_blocks
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import train_mlm
from roberta_recipe.data.masking import MlmCollator
from roberta_recipe.model import masked_lm


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Discard compiled graphs of other tests."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def batches(tokenizer, **shape):
    """Six micro-batches with different longest blocks and numbers of targets."""
    collator = MlmCollator(tokenizer, mlm_probability=0.5, mask_count="exact", **shape)  # `<s>` is predicted too
    made = [collator(make_blocks(tokenizer, 4, seed)) for seed in range(6)]
    return [{name: value for name, value in batch.items() if isinstance(value, torch.Tensor)} for batch in made]


def test_every_batch_has_one_graph_without_a_break(config, tokenizer):
    model, counter = masked_lm.masked_lm_class(config)(config).train(), CompileCounter()
    expected = [model(**batch).loss_sums["mlm"].item() for batch in batches(tokenizer, pad_to_multiple_of=8)]
    padded = batches(tokenizer, pad_to_multiple_of=64, predicted_multiple=16)
    assert len({len(batch["predicted"]) for batch in padded}) > 1
    masked_lm.compile_encoder(model, counter)
    for batch, loss in zip(padded, expected, strict=True):
        output = model(**batch)
        output.loss_sums["mlm"].backward()
        assert output.loss_sums["mlm"].item() == pytest.approx(loss, rel=1e-5)
    assert counter.frame_count == 1 and not counters["graph_break"]


def test_a_run_compiles_one_graph_and_evaluates_without(preset, tmp_path, monkeypatch):
    counter, compile_encoder = CompileCounter(), masked_lm.compile_encoder
    monkeypatch.setattr(masked_lm, "compile_encoder", lambda model, *names: compile_encoder(model, counter))
    flags = ["--config", preset, "--eval_strategy", "steps", "--eval_steps", "2", "--per_device_train_batch_size", "4"]
    plain = train_mlm.main([*map(str, flags), "--output_dir", str(tmp_path / "plain")])
    torch.backends.cuda.matmul.allow_tf32 = True  # as accelerate does on a GPU
    compiled = train_mlm.main([*map(str, flags), "--torch_compile", "true", "--output_dir", str(tmp_path / "compiled")])
    assert torch.backends.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert counter.frame_count == 1 and not counters["graph_break"]
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)
    assert compiled["metrics"]["eval_loss"] == pytest.approx(plain["metrics"]["eval_loss"], rel=1e-4)
    assert compiled["digest"] == plain["digest"] and compiled["tokens_seen"] == plain["tokens_seen"]
