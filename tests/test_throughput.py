"""Throughput of fine-tuning: the FLOPs formula, utilisation in the log, evaluation batches by tokens."""

import itertools
import json
from typing import ClassVar

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from official_files import write_glue
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
)

import finetune_glue
import finetune_race
import finetune_squad
from roberta_recipe.tasks import race
from roberta_recipe.training import finetune_trainer, monitor
from roberta_recipe.training.arguments import FinetuneTrainingArguments

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 100,
}


@pytest.mark.parametrize("family", monitor.BERT_LIKE)
def test_the_formula_is_what_torch_counts(family):
    """Forward and backward of each family's layers by torch's FLOP counter, without embeddings and heads."""
    config = AutoConfig.for_model(family, **SHAPE, attn_implementation="eager")
    model = AutoModel.from_config(config)
    lengths, counted = (40, 7), 0
    for length in lengths:
        with FlopCounterMode(display=False) as counter:
            model(input_ids=torch.arange(10, 10 + length)[None])[0].sum().backward()
        of_modules = counter.get_flop_counts()
        of_encoder = {name: sum(flops.values()) for name, flops in of_modules.items() if ".encoder" in name}
        # ALBERT's encoder widens its embeddings
        widened = sum(flops for name, flops in of_encoder.items() if name.endswith("embedding_hidden_mapping_in"))
        counted += next(flops for name, flops in of_encoder.items() if name.endswith(".encoder")) - widened
    formula = monitor.encoder_flops(config, sum(lengths), sum(length**2 for length in lengths))
    assert formula == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize("family", ["deberta-v2", "distilbert", "modernbert", "xlnet", "longformer"])
def test_another_family_has_no_figure(family):
    assert monitor.encoder_flops(AutoConfig.for_model(family), 100, 1000) is None


@pytest.fixture
def flags(root, tmp_path, model_dir):
    write_glue(tmp_path / "data", rows={"train": 24, "dev": 9, "test": 7})
    values = {
        **{"data_dir": tmp_path / "data", "model_name_or_path": model_dir, "output_dir": tmp_path / "rte"},
        **{"max_seq_length": 64, "global_batch_size": 8, "per_device_train_batch_size": 4, "max_steps": 6},
        **{"warmup_steps": 1, "logging_steps": 2, "other_rows": True, "use_cpu": True, "disable_tqdm": True},
        **{"seeds": "1 2", "save_strategy": "no", "bf16": "false"},
    }
    argv = [word for name, value in values.items() for word in (f"--{name}", *str(value).split())]
    return ["--config", str(root / "presets/glue/rte.yaml"), *argv]


class Tracker(transformers.TrainerCallback):
    """The names logged to a tracker like wandb, which Trainer calls before other callbacks."""

    seen: ClassVar[set[str]] = set()

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.update(logs)


def test_utilisation_is_in_the_log_and_the_machine_is_probed_twice(flags, tmp_path, capsys, monkeypatch):
    """For the steps between two log lines: FLOPs of their tokens by the formula / time without evaluations."""
    rates, counted = iter((1e8, 5e10)), []  # the threads of a process that begins may share a core
    monitor._probe.cache_clear()
    monkeypatch.setattr(monitor, "matrix_rate", lambda device, dtype: next(rates))
    count = monitor.Throughput.count
    monkeypatch.setattr(monitor.Throughput, "count", lambda self, *of: counted.append(of) or count(self, *of))
    monkeypatch.setattr(transformers.trainer, "get_reporting_integration_callbacks", lambda names: [Tracker])
    finetune_glue.main(flags)
    assert {"loss", "tokens_per_second", "mfu"} <= Tracker.seen
    assert monitor._probe.cache_info().misses == 2  # in two seeds
    monitor._probe.cache_clear()
    assert capsys.readouterr().err.count("GFLOP/s in fp32") == 2
    for seed in (1, 2):
        run = tmp_path / "rte" / f"lr2e-05-batch8-seed{seed}"
        record = json.loads((run / "run_record.json").read_text())
        log = list(map(json.loads, (run / "log.jsonl").read_text().splitlines()))
        losses = [entry for entry in log if "loss" in entry]
        assert [entry["step"] for entry in losses] == [1, 2, 4, 6]
        assert all(entry["mfu"] > 0 and entry["tokens_per_second"] > 0 for entry in losses)
        assert record["matrix_rate"] == 5e10
        assert record["tokens_per_second"] == sorted(entry["tokens_per_second"] for entry in losses)[2]
    tokens, flops = np.sum(counted[: len(counted) // 2], axis=0)
    assert tokens == record["tokens_seen"] and flops > tokens * monitor.encoder_flops(
        AutoConfig.from_pretrained(tmp_path / "model"), 1, 1
    )


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=80), batch_size=st.integers(1, 20))
def test_token_batches_hold_all_features_once_within_tokens_and_padding(lengths, batch_size):
    batches = finetune_trainer.token_batches(lengths, batch_size)
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(len(lengths)))
    room = batch_size * -(-max(lengths) // 8) * 8
    widths = [max(lengths[number] for number in batch) for batch in batches]
    assert widths == sorted(widths, reverse=True)
    for batch, width, behind in itertools.zip_longest(batches, widths, batches[1:]):
        padding = sum(width - lengths[number] for number in batch)
        assert len(batch) * width <= room and padding <= room / 16
        if behind:  # the next feature would have been too much
            padding += width - lengths[behind[0]]
            assert (len(batch) + 1) * -(-width // 8) * 8 > room or padding > room // 16


def test_an_evaluation_before_the_first_step_takes_no_time_of_training(monkeypatch, tmp_path):
    now = iter([10.0, 40.0, 50.0, 54.0, 54.0])
    monkeypatch.setattr(monitor.time, "monotonic", lambda: next(now))
    clock = monitor.Throughput(FinetuneTrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    with clock.timing("excluded"):
        pass
    clock.on_step_begin(None, None, None)
    clock.count(200, None)
    assert clock.figures() == {"tokens_per_second": 50, "data_wait": 0.0}


def test_only_a_gpu_pads_to_a_multiple(monkeypatch):
    for has_gpu, wanted in ((True, [8, None]), (False, [None, None])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert [finetune_trainer.padded_to(length) for length in (512, 100)] == wanted


def trainer_of(model, collator, loss_sum, tokenizer, folder, **values):
    args = FinetuneTrainingArguments(output_dir=str(folder), use_cpu=True, eval_strategy="no", **values)
    return finetune_trainer.FinetuneTrainer(
        **{"model": model, "args": args, "data_collator": collator, "processing_class": tokenizer},
        **{"loss_sum": loss_sum, "measure": None, "best_metric": "f1", "layer_decay": 1.0},
        **{"fingerprint": {}, "resumed": None},
    )


def test_scores_are_those_of_each_feature_alone_in_its_position(model_dir, tokenizer, tmp_path):
    """For random lengths: spans, with scores as long as the sequence, and questions with four sequences."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.r_[rng.integers(4, 20, 40), rng.integers(20, 65, 10)]).tolist()
    spans = [
        {"input_ids": rng.integers(5, 300, n), "labels": 1, "start_positions": 0, "end_positions": 1} for n in lengths
    ]
    collate = DataCollatorWithPadding(tokenizer)
    model = AutoModelForQuestionAnswering.from_pretrained(model_dir)
    trainer = trainer_of(model, collate, finetune_squad.span_loss, tokenizer, tmp_path, per_device_eval_batch_size=4)
    state = torch.get_rng_state()
    passes, found = [], None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainer, "loss_sum", lambda m, b: passes.append(b["input_ids"].shape) or finetune_squad.span_loss(m, b)
        )
        found = trainer.scores(spans)
    assert torch.equal(torch.get_rng_state(), state) and found.shape == (50, max(lengths), 2)
    assert len(passes) < 50 and max(rows * width for rows, width in passes) <= 4 * 64
    for feature, length, scores in zip(spans, lengths, found, strict=True):
        with torch.no_grad():
            _, alone = finetune_squad.span_loss(model.eval(), collate([feature]))
        np.testing.assert_allclose(scores[:length], alone[0].numpy(), atol=1e-5)
        assert (scores[length:] < -50).all()  # padding, and what is behind the batch

    choices = [[rng.integers(5, 300, k) for k in rng.integers(6, 60, 4)] for _ in range(30)]
    rows = [{"input_ids": four, "labels": 0, "length": max(map(len, four))} for four in choices]
    model = AutoModelForMultipleChoice.from_pretrained(model_dir)
    collate = race.RaceCollator(tokenizer)
    trainer = trainer_of(model, collate, finetune_race.choice_loss, tokenizer, tmp_path, per_device_eval_batch_size=2)
    found = trainer.scores(rows)
    with torch.no_grad():
        alone = torch.cat([finetune_race.choice_loss(model.eval(), collate([row]))[1] for row in rows])
    np.testing.assert_allclose(found, alone.numpy(), atol=1e-5)
