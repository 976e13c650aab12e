"""Estimates compared with real models, measured bytes, and records of finished runs."""

import dataclasses
import json
import weakref

import pytest
import torch
from conftest import make_documents, write_jsonl, write_parquet, write_text
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AlbertConfig, RobertaConfig

from roberta_recipe.errors import InputError
from roberta_recipe.input_files import ROOT
from roberta_recipe.model import objectives
from roberta_recipe.model.masked_lm import flops_per_token, masked_lm_class
from roberta_recipe.model.objectives import named
from roberta_recipe.model.weights import read_config
from roberta_recipe.training import optimizers
from roberta_recipe.training.arguments import MlmTrainingArguments
from roberta_recipe.training.mlm_trainer import MlmTrainer
from tools import estimate
from tools.estimate import GIB, Estimate, Hardware, Zero, memory_per_gpu, parse_hardware

# layers, hidden, heads, intermediate, vocabulary, batch, seq_len; batch x seq_len is no dimension of a weight
SHAPES = [(1, 64, 4, 256, 1000, 4, 32), (3, 128, 2, 512, 3000, 4, 64), (2, 128, 4, 256, 8000, 3, 128)]
KINDS = {"fp32": 4, "autocast": 2, "half": 2}  # bytes an element of a dropout mask on the CPU


def preset_config(name, **changes):
    config = read_config(f"presets/model/{name}.json")
    config.update(changes)
    return config


def make_config(layers, hidden, heads, intermediate, vocab_size, seq_len, dropout):
    """Without attention dropout, so that the CPU uses its flash kernel, which keeps the same tensors as CUDA's."""
    return RobertaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        vocab_size=vocab_size,
        max_position_embeddings=seq_len + 2,
        type_vocab_size=1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
    )


def make_batch(vocab_size, batch, seq_len):
    ids = torch.randint(5, vocab_size, (batch, seq_len))
    labels = torch.full_like(ids, -100)
    labels[:, : seq_len // 8] = ids[:, : seq_len // 8]
    return ids, labels


@pytest.mark.parametrize(("name", "count"), [("base", 124_697_433), ("large", 355_412_057)])
def test_parameters_are_those_of_the_authors_models(name, count):
    assert estimate.parameter_count(preset_config(name)) == count


def test_other_families_have_the_parameters_of_their_papers():
    """BERT base 110M; ALBERT base, all shared, E = 128: 12M; both over vocabularies of 30K."""
    bert = preset_config("bert_base")
    albert = preset_config("albert_base")
    bert.vocab_size, albert.vocab_size = 30_522, 30_000
    assert round(estimate.parameter_count(bert) / 1e6) == 110
    pooler = 768**2 + 768  # which the masked LM has not
    assert round((estimate.parameter_count(albert) + pooler) / 1e6) == 12


def test_a_family_of_other_layers_is_not_estimated(tmp_path):
    (tmp_path / "other.json").write_text('{"model_type": "modernbert"}')
    with pytest.raises(InputError, match="is a 'modernbert' model; the estimate is for roberta"):
        argv = ["--config", "presets/mlm/roberta_tiny.yaml", "--config_name", str(tmp_path / "other.json")]
        estimate.read_estimate([*argv, "--hardware", "H100"])


def test_measured_runs():
    """An estimate of a run's preset gives the parameters and tokens of its run record."""
    records = sorted(ROOT.glob("results/*/run_record.json"))
    for path in records:
        record = json.loads(path.read_text())
        args = record["resolved_args"]
        config = read_config(args["config_name"])
        assert estimate.parameter_count(config) == record["parameters"]
        at_most = record["steps"] * record["global_batch_size"] * args["max_seq_length"]
        assert 0.8 * at_most < record["tokens_seen"] <= at_most
    assert len(records) >= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_what_autograd_keeps(shape, kind):
    *dims, batch, seq_len = shape
    config = make_config(*dims, seq_len, dropout=0.1)
    model = masked_lm_class(config)(config).train()
    if kind == "half":
        model.to(torch.bfloat16)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    weights = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    kept = {}  # tensors by address; they are held, so that no address is used twice

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids, labels = make_batch(config.vocab_size, batch, seq_len)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"),
    ):
        model(input_ids=ids, labels=labels)
    casts = [t for t in kept.values() if kind == "autocast" and {t.shape, t.shape[::-1]} & weights]
    assert len(casts) == (6 * config.num_hidden_layers + 2) * (kind == "autocast")  # 2: dense, decoder of the head
    measured = sum(t.untyped_storage().nbytes() for t in kept.values())
    measured -= sum(t.untyped_storage().nbytes() for t in casts)
    layer, embeddings = estimate.activation_bytes(config, batch * seq_len, kind, mask_bytes=KINDS[kind])
    predicted = batch * (seq_len // 8)
    element, _, _, channel = estimate._SAVED_BYTES[kind]
    head = predicted * (element * config.vocab_size + channel * config.hidden_size)  # logits; the head's layers
    assert config.num_hidden_layers * layer + embeddings + head == pytest.approx(measured, rel=0.05)


def targets_of(objective, ids, labels):
    """Targets for these objectives: a span from the second token on, the label of a pair at the first."""
    inputs = {"input_ids": ids, "labels": labels.roll(1, dims=1)}
    if "sbo" in objective:
        inputs["sbo_labels"] = inputs["labels"].clone()
    for of_pairs in {"nsp", "sop"} & set(objective):
        pairs = inputs[objectives.TABLE[of_pairs].column] = torch.full_like(ids, -100)
        pairs[:, 0] = 1
    return inputs


class LiveBytes(TorchDispatchMode):
    """Context that measures the peak of bytes in tensors created within it; `known` tensors do not count."""

    def __init__(self, known):
        super().__init__()
        self.known, self.live, self.peak = {t.untyped_storage()._cdata for t in known}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def forget(self, key, size):
        self.known.discard(key)
        self.live -= size


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(2, 128, 2, 512, 16000, 16, 64), (2, 128, 2, 512, 20000, 1, 64)])
@pytest.mark.parametrize(
    ("family", "objective", "checkpointing"),
    [
        *(("roberta", ["mlm", *other], again) for other in ([], ["sbo"], ["nsp"]) for again in (False, True)),
        ("albert", ["mlm", "sop"], False),  # whose class recomputes nothing
    ],
)
def test_peak_of_a_backward_pass(shape, precision, family, objective, checkpointing):
    """The peak of a micro-batch is at the loss, that of a single sequence at the gradient of the embedding."""
    *dims, batch, seq_len = shape
    config = make_config(*dims, seq_len, dropout=0.0)
    if family == "albert":
        config = AlbertConfig(**{k: v for k, v in config.to_dict().items() if k != "model_type"}, embedding_size=32)
    model = masked_lm_class(config, objectives=named(objective))(config).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    inputs = targets_of(objective, *make_batch(config.vocab_size, batch, seq_len))
    tracker = LiveBytes([*inputs.values(), *model.parameters(), *model.buffers()])
    with tracker:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = sum(model(**inputs).loss_sums.values())
            loss.backward()
            del loss
    memory = memory_per_gpu(
        config,
        micro_batch=batch,
        seq_len=seq_len,
        mlm_probability=(seq_len // 8) / seq_len,
        precision=precision,
        activation_checkpointing=checkpointing,
        objective=objective,
    )
    weights = 4 * estimate.parameter_count(config, objective)
    assert memory.total - memory.optimizer == pytest.approx(tracker.peak + weights, rel=0.05)


@pytest.mark.parametrize("optim", list(optimizers.TABLE))
def test_states_are_what_an_optimizer_keeps(tmp_path, optim):
    args = MlmTrainingArguments(output_dir=str(tmp_path), max_steps=1, use_cpu=True, optim=optim)
    config = make_config(2, 64, 4, 256, 1000, 32, dropout=0.0)
    trainer = MlmTrainer(
        model=masked_lm_class(config)(config),
        args=args,
        flops_per_token=1.0,
        fingerprint={"global_batch_size": 1},
        resumed=None,
    )
    optimizer = trainer.create_optimizer()
    for weight in trainer.model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = sum(v.numel() for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    count = estimate.parameter_count(config)
    assert estimate._optimizer_elements(config, ["mlm"], optim) == pytest.approx(kept, abs=0.05 * count)


@pytest.mark.parametrize("objective", [["mlm"], ["mlm", "sbo"]])
def test_flops_are_those_that_torch_counts(objective):
    *dims, batch, seq_len = SHAPES[2]
    config = make_config(*dims, seq_len, dropout=0.0)
    config._attn_implementation = "eager"  # whose matrices are counted on every processor
    model = masked_lm_class(config, objectives=named(objective))(config).train()
    with FlopCounterMode(display=False) as counter:
        sum(
            model(**targets_of(objective, *make_batch(config.vocab_size, batch, seq_len))).loss_sums.values()
        ).backward()
    ours = batch * seq_len * flops_per_token(config, seq_len, (seq_len // 8) / seq_len, model.objectives)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)


def memory_of(stage=0, precision="fp16", processes=8, **zero):
    shape = {"micro_batch": 8, "seq_len": 512, "mlm_probability": 0.15}
    zero = Zero(stage, reduce_bucket_size=zero.pop("reduce_bucket_size", 0), **zero)
    return memory_per_gpu(preset_config("large"), **shape, precision=precision, processes=processes, zero=zero)


def test_zero_partitions_as_its_paper_says():
    count = estimate.parameter_count(preset_config("large"))
    for stage, gradients in ((1, 2 * count), (2, 2 * count / 8), (3, 2 * count / 8)):
        memory = memory_of(stage)
        assert memory.gradients == pytest.approx(gradients, abs=8)
        assert memory.optimizer == pytest.approx(12 * count / 8, abs=96)
        assert memory.parameters == pytest.approx(2 * count * (1 + (stage == 3) / 8), abs=8)
        # a single process partitions nothing: 2 + 2 + 12 bytes
        alone = memory_of(stage, processes=1)
        assert alone.gradients + alone.optimizer == 14 * count
    assert memory_of(2, reduce_bucket_size=10**6).gradients - memory_of(2).gradients == 2 * 10**6
    assert memory_of(1, fp32_accumulation=True, precision="bf16").gradients == 6 * count
    assert memory_of(2, fp32_accumulation=True).gradients == pytest.approx(4 * count / 8, abs=8)
    plain, alone = memory_of(0), memory_of(0, processes=1)
    assert (plain.optimizer, plain.gradients, alone.gradients) == (8 * count, 8 * count, 4 * count)


def test_offload_moves_bytes_to_the_host():
    count = estimate.parameter_count(preset_config("large"))
    for stage in (2, 3):
        here, there = memory_of(stage), memory_of(stage, offload_optimizer=True)
        assert here.host == 0 and there.optimizer == there.gradients == 0
        assert there.host > here.optimizer + here.gradients
        summed = memory_of(stage, offload_optimizer=True, fp32_accumulation=True, precision="bf16")
        assert summed.gradients == pytest.approx(4 * count / 8 * (stage == 2), abs=8)
    both = memory_of(3, offload_optimizer=True, offload_parameters=True)
    assert both.parameters == 2 * count and both.host == pytest.approx(there.host + 2 * count / 8, abs=8)


def test_zero_from_a_deepspeed_configuration():
    settings = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    assert Zero.from_deepspeed(settings, 768) == Zero(3, True, False, True, 768**2)
    assert Zero.from_deepspeed({"zero_optimization": {"stage": 1}}, 768) == Zero(1)


def test_hardware():
    assert parse_hardware("8xH200") == parse_hardware(" 8 x h200 ") == Hardware(8, "H200")
    assert parse_hardware("v100-32gb") == Hardware(1, "V100-32GB")
    assert parse_hardware("1024xV100-32GB") == Hardware(1024, "V100-32GB")
    for text in ("8xH20", "", "0xH200", "1.5xH200"):
        with pytest.raises(InputError, match=f"unknown GPU '{text.removeprefix('8x')}'"):
            parse_hardware(text)
    with pytest.raises(InputError, match="did you mean 'A100-"):
        parse_hardware("8xA100")


def make_run(**changes):
    values = {
        "config": preset_config("large", vocab_size=50304),
        "hardware": Hardware(1024, "V100-32GB"),
        "seq_len": 512,
        "mlm_probability": 0.15,
        "micro_batch": 8,
        "accumulation": 1,
        "max_steps": 100_000,
        "precision": "fp16",
        "gpu_hour_price": 2.0,
    }
    return Estimate(**{**values, **changes})


def test_the_papers_day():
    """Section 5: 100K steps of large, "1024 V100 GPUs for approximately one day"."""
    paper = make_run(utilisation=estimate.PAPER_UTILISATION)
    assert paper.days == pytest.approx(1, rel=0.02)
    assert paper.tokens == 100_000 * 8192 * 512
    assert paper.fits
    assert make_run(utilisation=0.152, hardware=Hardware(512, "V100-32GB"), accumulation=2).days == pytest.approx(
        paper.days
    )


@pytest.mark.parametrize(("name", "dropout"), [("eager", 0.1), ("without_dropout", 0.0)])
def test_memory_and_utilisation_are_those_of_base_on_an_h200(name, dropout):
    """Compared with results/gpu_h200.json: peak of the allocator, tokens/s."""
    parts = json.loads((ROOT / "results" / "gpu_h200.json").read_text())["parts"]
    measured, config = parts["profile"]["figures"][name], preset_config("base", vocab_size=50304)
    config.update({"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout})
    memory = memory_per_gpu(config, micro_batch=128, seq_len=512, mlm_probability=0.15, precision="bf16")
    assert memory.total / GIB == pytest.approx(measured["peak_gib"], rel=0.005)
    rate = measured["tokens_per_second"] * flops_per_token(config, 512, 0.15)
    assert measured["utilisation"] == pytest.approx(rate / parts["machine"]["figures"]["matrix_rate"], rel=1e-3)
    assert rate / estimate.DEVICES["H200"].peak_flops == pytest.approx(estimate.DEFAULT_UTILISATION, abs=0.04)


def test_table():
    config = preset_config("base", vocab_size=50304)
    shape = {"config": config, "micro_batch": 32, "accumulation": 32, "max_steps": 500_000, "precision": "bf16"}
    base = make_run(**shape, hardware=Hardware(8, "H200"), utilisation=0.4, blocks_per_pass=30e9 / 512)
    text = estimate.format_estimate(base)
    days = 500_000 * 8192 * 512 * flops_per_token(config, 512, 0.15) / (8 * 989e12 * 0.4) / 86_400
    for line in (
        "124,727,424 parameters",
        "8,192 sequences = 8 processes x 32 x 32 accumulated",
        "4,096,000,000 blocks, at most 2,097.152 B tokens, 69.91 epochs",
        "0.602 GFLOP a token",
        f"total       {base.memory.total / GIB:9.2f} GiB\n",
        "fits in 124.8 GiB",
        f"{days:,.2f} days at 40.0% of 8 x 989 TFLOP/s",
        f"${days * 24 * 8 * 2:,.2f} at $2.00 a GPU hour",
    ):
        assert line in text, line
    shares = [getattr(base.memory, name) for name in ("parameters", "gradients", "optimizer", "activations", "logits")]
    assert sum(shares) == base.memory.total and min(shares) > 0


def test_report_says_what_does_not_fit():
    small = make_run(hardware=Hardware(8, "V100-16GB"), micro_batch=32, accumulation=32, corpus_bytes=160e9)
    text = estimate.format_estimate(small)
    largest = small.largest_that_fits
    assert not small.fits and f"lower per_device_train_batch_size=32 to {largest}\n" in text
    assert f"{small.tokens / (160e9 / 4.5):,.2f} epochs of 160.0 GB at 4.5 bytes a token (an assumption)" in text
    for size, fits in ((largest, True), (2 * largest, False)):
        assert dataclasses.replace(small, micro_batch=size).fits is fits
    again = estimate.format_estimate(dataclasses.replace(small, activation_checkpointing=True))
    assert "TFLOP/s (recomputed layers are not counted: up to a third longer)\n" in again
    huge = dataclasses.replace(small, config=preset_config("large", num_hidden_layers=500), zero=Zero(2))
    assert huge.largest_that_fits == 0 and "not even 1 sequence fits" in estimate.format_estimate(huge)
    offloaded = dataclasses.replace(small, zero=Zero(2, offload_optimizer=True))
    assert f"{offloaded.memory.host / GIB:.2f} GiB a process" in estimate.format_estimate(offloaded)


def test_epochs_of_local_files(preset, tmp_path):
    """The estimated size of the text is right within a few per cent, in any format."""
    texts = make_documents(800, seed=6)
    size = sum(len(text.encode()) for text in texts)
    files = [write_parquet(tmp_path / "a.parquet", texts, other=["x" * 500] * len(texts))]
    files += [write_jsonl(tmp_path / "a.jsonl", texts), write_text(tmp_path / "a.txt", texts)]
    flags = ["--config", preset, "--hardware", "V100-32GB", "--train_file"]
    for path in files:
        cost = estimate.main([*flags, path])
        assert cost.corpus_bytes == pytest.approx(size, rel=0.1), path
        assert cost.epochs == pytest.approx(cost.tokens / (cost.corpus_bytes / 4.5))
    wide = ["--config_name", "presets/model/mini.json"]  # of 50,265 entries; the run has those of its tokenizer
    assert estimate.main([*flags, path, *wide]).config.vocab_size == 400
    few = estimate.main([*flags, path, "--max_train_samples", "4"])
    assert few.epochs == few.blocks / 4 and f"{few.epochs:,.2f} epochs of at most 4 blocks" in estimate.format_estimate(
        few
    )


def test_an_own_text_has_the_vocabulary_that_the_run_trains(tmp_path, model_dir, monkeypatch):
    path = write_text(tmp_path / "a.txt", make_documents(20, seed=0))
    flags = ["--train_file", path, "--hardware", "H200"]
    assert estimate.main(flags).config.vocab_size == 4096
    assert estimate.main([*flags, "--config_overrides", "vocab_size=800"]).config.vocab_size == 800
    continued = estimate.main([*flags, "--model_name_or_path", model_dir, "--max_seq_length", "64"])
    assert continued.config.vocab_size == 400
    with pytest.raises(InputError, match="max_seq_length=512 is more than the 64 positions of"):  # as in training
        estimate.main([*flags, "--model_name_or_path", model_dir])
    monkeypatch.setattr(estimate, "blocks_per_pass", lambda folder, corpus: 9_000)  # packed meanwhile
    cached = estimate.main([*flags, "--token_cache", "tokens"])
    assert cached.config.vocab_size == 4096 and cached.epochs == cached.blocks / 9_000
    shared = estimate.main([*flags, "--hardware", "8xH200", "--global_batch_size", "32"])
    assert shared.micro_batch == 4 and shared.accumulation == 1  # as in training


@pytest.mark.parametrize("here", [True, False])
def test_precision_is_that_of_the_estimated_hardware(monkeypatch, here):
    monkeypatch.setattr("roberta_recipe.hardware.has_bf16", lambda use_cpu: here)
    flags = ["--config", "presets/mlm/roberta_mini.yaml", "--hardware"]
    assert estimate.main([*flags, "H200"]).precision == "bf16" and estimate.main([*flags, "T4"]).precision == "fp32"


def test_a_run_ends_by_the_clock():
    flags = ["--config", "presets/mlm/roberta_mini.yaml", "--hardware", "T4", "--max_steps", "1000000"]
    whole, hour = estimate.main(flags), estimate.main([*flags, "--max_train_minutes", "60"])
    assert hour.days == 1 / 24 < whole.days and hour.steps < whole.steps == 1_000_000
    shares = hour.flops / whole.flops, hour.tokens / whole.tokens
    assert shares == pytest.approx((hour.days / whole.days,) * 2, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"utilisation": 40.0}, "utilisation=40.0 must be above 0 and at most 1"),
        ({"precision": "bf16"}, "V100-32GB has no bf16; set --fp16 true"),
    ],
)
def test_values_out_of_range(change, message):
    with pytest.raises(InputError, match=message):
        make_run(**change)
