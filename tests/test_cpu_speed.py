"""CPU speed-ups that leave results the same: dropout, attention and its choice, bf16, memory."""

import contextlib
import os
import runpy
import sys

import datasets
import pytest
import torch
import transformers
from conftest import ROOT, Forked, make_documents, run_python, train, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

import train_mlm
from benchmarks import comparisons, loss_over_time, speed
from roberta_recipe import hardware
from roberta_recipe.errors import InputError
from roberta_recipe.model import attention, cpu_kernels
from roberta_recipe.settings import value_of
from roberta_recipe.training.arguments import RecipeTrainingArguments


@pytest.mark.parametrize("p", [0.1, 0.003])
def test_dropout_keeps_its_share(p):
    """The mean is 1, so the expectation is the input; the dropped share is within four standard errors."""
    torch.manual_seed(0)
    x = torch.ones(1_000_003, requires_grad=True)
    layer = cpu_kernels.Dropout(p)
    y = layer(x)
    share = cpu_kernels.keep_probability(p)
    assert abs(share - (1 - p)) < 2**-17
    assert y.unique().tolist() == [0.0, pytest.approx(1 / share)]
    assert abs((y == 0).float().mean() - (1 - share)) < 4 * (p * (1 - p) / len(x)) ** 0.5
    y.sum().backward()
    assert torch.equal(x.grad, y)  # what was dropped has no gradient, what was kept has the factor
    neighbours = (y[1:] == 0).float() @ (y[:-1] == 0).float() / (len(x) - 1)
    assert abs(neighbours - (1 - share) ** 2) < 5 * p / len(x) ** 0.5
    assert torch.equal(layer.eval()(x), x)


def test_dropout_is_a_function_of_the_generator():
    """So that a resumed run continues the draws, and activation checkpointing recomputes the same mask."""
    layer, x = cpu_kernels.Dropout(0.2), torch.ones(1000)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = layer(x), layer(x)
    torch.set_rng_state(state)
    assert torch.equal(layer(x), first) and torch.equal(layer(x), second) and not torch.equal(first, second)


def reference(q, k, v, mask, dropped):
    """Attention by definition, in fp64; `dropped` multiplies the attention weights."""
    scores = q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, -torch.inf)
    return ((scores.softmax(-1) * dropped) @ v.double()).transpose(1, 2)


@settings(max_examples=40)
@given(
    batch=st.integers(1, 4),
    heads=st.integers(1, 5),
    length=st.integers(1, 70),
    size=st.sampled_from([4, 8, 24]),
    p=st.sampled_from([0.0, 0.1, 0.7]),
    at_once=st.sampled_from([1, 5000, 1 << 18]),
    masked=st.sampled_from(["nothing", "padding", "by query", "by head"]),
    seed=st.integers(0, 2**30),
)
def test_blockwise_attention_is_attention(batch, heads, length, size, p, at_once, masked, seed):
    """Output and all gradients equal the definition with the drawn mask, for any grouping of heads."""
    torch.manual_seed(seed)
    tensors = [torch.randn(batch, length, heads, size).transpose(1, 2).requires_grad_() for _ in range(3)]
    lengths = torch.randint(1, length + 1, (batch,)) if masked == "padding" else torch.full((batch,), length)
    mask = (torch.arange(length) < lengths[:, None])[:, None, None, :].expand(batch, 1, length, length)
    if masked.startswith("by"):
        by_query = torch.rand(batch, heads if masked == "by head" else 1, length, length) < 0.5
        mask = by_query | torch.eye(length, dtype=torch.bool)
    grad = torch.randn(batch, length, heads, size)
    drawn, draw = [], cpu_kernels.keep_mask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "_WEIGHTS_AT_ONCE", at_once)
        patch.setattr(cpu_kernels, "keep_mask", lambda shape, p: drawn.append(draw(shape, p)) or drawn[-1])
        out, _ = cpu_kernels.blockwise_attention(
            torch.nn.Module(), *tensors, None if masked == "nothing" else mask, dropout=p
        )
        out.backward(grad)
    found = [out, *(tensor.grad for tensor in tensors)]
    kept = torch.cat(drawn).view(batch, heads, length, length) if drawn else torch.ones(1)
    again = [tensor.detach().double().requires_grad_() for tensor in tensors]
    wanted = reference(*again, mask, kept / (cpu_kernels.keep_probability(p) if p else 1))
    wanted.backward(grad.double())
    for one, other in zip(found, [wanted, *(tensor.grad for tensor in again)], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    assert bool(drawn) == bool(p)


SMALL = {"vocab_size": 300, "pad_token_id": 1, "hidden_size": 32, "intermediate_size": 64}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        transformers.RobertaConfig(**SMALL, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0),
        transformers.EuroBertConfig(**SMALL, num_key_value_heads=2),  # two query heads share a key
        transformers.ModernBertConfig(**SMALL, local_attention=16),
    ],
    ids=lambda config: config.model_type,
)
def test_every_attention_gives_a_model_the_same_loss_and_gradient(config, padded):
    ids = torch.randint(5, 300, (6, 40), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids}
    if padded:
        inputs["attention_mask"] = (torch.arange(40) < torch.tensor([[40], [3], [17], [40], [1], [39]])).long()
        inputs["labels"] = ids.where(inputs["attention_mask"] == 1, -100)  # padding far from tokens attends to nothing
    found = {}
    attention.register()
    for name in ("sdpa", "eager", "blockwise"):
        torch.manual_seed(0)
        model = transformers.AutoModelForMaskedLM.from_config(config).train()
        model.set_attn_implementation(name)
        cpu_kernels.use_fast_dropout(model)
        loss = model(**inputs).loss
        loss.backward()
        found[name] = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for name in ("eager", "blockwise"):
        torch.testing.assert_close(found[name], found["sdpa"], rtol=1e-4, atol=1e-6)


def test_a_decoder_sees_no_later_token_with_any_attention():
    """With or without padding in the batch; SDPA leaves its mask out where nothing is padded."""
    config = transformers.Qwen2Config(**SMALL, num_key_value_heads=2, num_labels=3)
    model, ids = (
        transformers.AutoModelForSequenceClassification.from_config(config).eval(),
        torch.randint(5, 300, (4, 20)),
    )
    attention.register()
    logits = []
    for name in ("eager", "sdpa", "blockwise"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits.append(model(ids, attention_mask=torch.ones_like(ids)).logits)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-4, atol=1e-6)


def arguments(tmp_path, **values):
    return RecipeTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **values)


@pytest.mark.parametrize(
    ("half", "dropout", "name"),
    [(False, 0.0, "sdpa"), (False, 0.1, "blockwise"), (True, 0.0, "eager"), (True, 0.1, "blockwise")],
)
def test_the_fastest_attention_is_chosen(tmp_path, config, half, dropout, name):
    config.attention_probs_dropout_prob = dropout
    assert attention.choose(config, arguments(tmp_path, bf16=half)) == name
    assert attention.choose(config, arguments(tmp_path, attn_implementation="eager")) == "eager"
    distilbert = transformers.DistilBertConfig(attention_dropout=dropout)  # another name for it
    assert attention.choose(distilbert, arguments(tmp_path, bf16=half)) == name
    with pytest.raises(InputError, match="flex_attention: it has no dropout") if dropout else contextlib.nullcontext():
        attention.choose(distilbert, arguments(tmp_path, attn_implementation="flex_attention"))
    assert attention.choose(transformers.DebertaV2Config(), arguments(tmp_path)) == "eager"  # its own
    with pytest.raises(InputError, match="attn_implementation=blockwise: 'deberta-v2' models have their own attention"):
        attention.choose(transformers.DebertaV2Config(), arguments(tmp_path, attn_implementation="blockwise"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["flex_attention", "--input_format", "doc_sentences"], "flex_attention cannot separate"),
        (["flex_attention", "--config_overrides", "attention_probs_dropout_prob=0.1"], "flex.*: it has no dropout"),
        (["flash"], "attn_implementation=flash"),
    ],
)
def test_an_attention_that_cannot_be_used_is_an_error(preset, flags, message):
    with pytest.raises(InputError, match=message):
        train_mlm.main(["--config", preset, "--attn_implementation", *flags])


def test_the_attention_is_kept_in_checkpoint_and_preset(preset, tmp_path):
    saving = ["--save_strategy", "steps", "--save_steps", "2"]
    record = train(preset, *saving, "--max_steps", "2")
    assert record["resolved_args"]["attn_implementation"] == record["fingerprint"]["attn_implementation"] == "sdpa"
    assert record["resolved_args"]["bf16"] is False
    assert "attn_implementation: sdpa" in (tmp_path / "run" / "preset.yaml").read_text()
    assert "attn" not in (tmp_path / "run" / "config.json").read_text()  # it belongs to the machine, not to the model
    (tmp_path / "run" / "run_record.json").unlink()
    with pytest.raises(InputError, match="attn_implementation"):
        train(preset, *saving, "--attn_implementation", "eager")


def test_bf16_where_the_device_has_it(tmp_path, monkeypatch):
    assert arguments(tmp_path).bf16 is False
    monkeypatch.setattr(hardware, "has_bf16", lambda use_cpu=False: True)
    assert arguments(tmp_path).bf16 is True
    assert arguments(tmp_path, bf16=False).bf16 is False
    if not torch.cuda.is_available():
        assert RecipeTrainingArguments(output_dir=str(tmp_path)).use_cpu  # or Trainer would refuse bf16
        fp16 = RecipeTrainingArguments(output_dir=str(tmp_path), fp16=True)
        assert not fp16.bf16 and not fp16.use_cpu
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        assert RecipeTrainingArguments(output_dir=str(tmp_path), bf16=False).use_cpu  # float64 sums of evaluations


def test_both_precisions_learn_alike(preset, tmp_path):
    """Loss curves of bf16 and fp32, with the same weights, masks and order, are close."""
    flags = ["--max_steps", "30", "--logging_steps", "30", "--lr_scheduler_type", "constant"]
    losses = [
        train(preset, *flags, "--bf16", value, "--output_dir", tmp_path / value)["metrics"]["eval_loss"]
        for value in ("true", "false")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=0.03) and losses[0] != losses[1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_memory_is_kept():
    """After the first steps, steps that allocate and free 120 MB cause few page faults."""
    script = """
import resource, torch
from roberta_recipe.hardware import keep_freed_memory
assert keep_freed_memory()
for step in range(40):
    if step == 20: before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(10_000_000) for _ in range(3)]
    del kept
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults = int(run_python("-c", script, cwd=ROOT).stdout)
    assert faults < 20 * 3 * 9000 / 4, faults  # 9,766 pages a tensor without


@pytest.mark.parametrize(("quota", "cores"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 8), (None, 8)])
def test_a_container_s_quota_limits_the_cores(tmp_path, monkeypatch, quota, cores):
    """`docker run --cpus 2.5` on a machine of eight cores."""
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(hardware, "_CPU_QUOTA", tmp_path / "cpu.max")
    if quota:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert hardware.cpu_cores() == cores


def test_an_allocator_of_the_user_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert hardware.keep_freed_memory() is False


def test_a_data_worker_tokenizes_after_its_parent_has(preset, tmp_path):
    """A worker that is forked after the parent used the tokenizer's threads hung."""
    argv = ["--config", preset, "--dataloader_num_workers", "1", "--fill_mask_examples", "a <mask>", "b <mask>"]

    def train():
        os.environ["TOKENIZERS_PARALLELISM"] = "true"  # a user's
        train_mlm.main(argv)

    run = Forked(train, tmp_path / "log")
    assert run.end() == 0, run.log


def test_the_stock_path_tokenizes_in_every_repeat(root, tmp_path, tokenizer_dir, config_file, monkeypatch):
    """`benchmarks/stock_mlm.py` uses no cache outside of its output folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "shared")
    files = [write_jsonl(tmp_path / f"{seed}.jsonl", make_documents(20, seed)) for seed in (1, 2)]
    words = [*files, tokenizer_dir, config_file, tmp_path / "out", 1, 4, 32, 1e-3]
    monkeypatch.setattr(sys, "argv", ["stock_mlm.py", *map(str, words)])
    runpy.run_path(str(root / "benchmarks" / "stock_mlm.py"), run_name="__main__")
    assert (tmp_path / "out" / "model.safetensors").is_file() and not (tmp_path / "shared").exists()


def test_each_seed_of_a_speedrun_has_a_folder(tmp_path, monkeypatch, capsys):
    """The second seed was refused, as the folder had a finished run."""
    ran, command = [], ["train_mlm.py", "--output_dir", "ours"]
    monkeypatch.setattr(loss_over_time, "commands", lambda folder, config: (command, []))
    monkeypatch.setattr(loss_over_time, "curve", lambda argv: ran.append(argv) or [[1.5, 2.9], [2.5, 2.6]])
    words = ["--until", "2.7", "--seeds", "1", "2", "--output", tmp_path / "curves.json"]
    monkeypatch.setattr(sys, "argv", ["loss_over_time.py", *map(str, words)])
    loss_over_time.main()
    assert [value_of(argv, "seed") for argv in ran] == ["1", "2"]
    assert len({value_of(argv, "output_dir") for argv in ran} - {"ours"}) == 2
    assert "seed 2: 2.5 minutes (2.6); ends at 2.6 after 2.5" in capsys.readouterr().out


def test_the_speed_comparison_measures_both_sides(monkeypatch, config_file):
    monkeypatch.setitem(comparisons.SHAPES, "mini", (config_file, {}, 2, 16))
    assert set(speed.COMPARISONS) >= {"step-mini-fp32", "step-mini-bf16", "step-small-fp32", "step-small-bf16", "run"}
    task = {"of": "step-mini-fp32", "checkout": str(ROOT), "clock": "wall"}
    found = {way: [comparisons.step({**task, "way": way}) for _ in range(2)] for way in ("stock", "ours")}
    assert all(value["rate"] > 0 for values in found.values() for value in values)
    assert found["ours"][0]["utilisation"] > 0 and "utilisation" not in found["stock"][0]
    lines = speed.table("step-mini-fp32", found).splitlines()
    assert len(lines) == 3 and "x 1.00 of stock" in lines[1]
    monkeypatch.setattr(hardware, "has_bf16", lambda: False)
    assert speed.impossible("step-mini-bf16", None) == "this device has no bf16"
