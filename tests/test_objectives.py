"""The seam for further objectives: the library carries columns and losses that it does not know."""

import functools
import itertools
import json

import numpy as np
import pytest
import torch
from conftest import KeepGradients, corpus_of, end_well, forked_ranks, make_documents, write_parquet
from test_modeling import Blocks
from toy_objective import ToyArguments, ToyModel, halves

import train_mlm
from roberta_recipe.data import chunks, stream, token_cache
from roberta_recipe.data.corpus import Source
from roberta_recipe.data.masking import MlmCollator, fixed_masks
from roberta_recipe.data.packing import Block
from roberta_recipe.data.stream import TrainBlocks
from roberta_recipe.errors import InputError
from roberta_recipe.training.arguments import MlmTrainingArguments
from roberta_recipe.training.mlm_trainer import MlmTrainer
from roberta_recipe.training.pretraining import build_model

COLUMNS = {"input_ids", "token_type_ids", "toy_label"}


@pytest.fixture
def toy_config(config):
    config.type_vocab_size = 2
    return config


@pytest.fixture
def reader(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(chunks.PACKERS, "halves", halves)
    path = write_parquet(tmp_path / "text.parquet", make_documents(120, seed=3))
    corpus = corpus_of("c", [Source("s", files=path)], validation_share=0.3)
    return chunks.TextReader(corpus, tokenizer, input_format="halves", max_seq_length=64, seed=1)


def taken(blocks, count):
    return list(itertools.islice(blocks, count))


def same(block, other):
    places = [(one.id, one.epoch, one.document) for one in (block, other)]
    return (
        places[0] == places[1]
        and block.keys() == other.keys()
        and all(map(np.array_equal, block.values(), other.values()))
    )


def test_columns_pass_through_stream_cache_repetition_collator_and_fixed_masks(reader, tokenizer, tmp_path):
    blocks = taken(TrainBlocks(reader, batch_size=4), 40)
    assert all(set(block) == COLUMNS for block in blocks)
    assert {block["toy_label"] for block in blocks} == {-100, 0, 1}

    token_cache.build(tmp_path / "cache", reader, num_proc=1)
    cache = token_cache.TokenCache(tmp_path / "cache", reader.corpus, seed=1)
    cached = taken(TrainBlocks(cache, batch_size=4), 40)
    for block, other in zip(blocks, cached, strict=True):
        assert same(block, other) and other["token_type_ids"].dtype == np.uint8 and type(other["toy_label"]) is int
    held_out, from_cache = (list(stream.validation_blocks(provider, None)) for provider in (reader, cache))
    assert len(held_out) > 8 and all(map(same, held_out, from_cache))

    repeated = taken(TrainBlocks(cache, batch_size=4, limit=8), 24)
    assert {block.epoch for block in repeated} == {0, 1, 2} and all(set(block) == COLUMNS for block in repeated)

    collator = MlmCollator(tokenizer, seed=1, pad_to_multiple_of=8)
    batch = collator(cached[:6])
    assert batch["toy_label"].tolist() == [block["toy_label"] for block in cached[:6]]
    assert batch["token_type_ids"].shape == batch["input_ids"].shape and batch["token_type_ids"].dtype == torch.int64
    for row, block in zip(batch["token_type_ids"], cached, strict=False):
        wanted = np.zeros(len(row), dtype=int)
        wanted[: len(block["token_type_ids"])] = block["token_type_ids"]
        assert row.tolist() == wanted.tolist()
    changed = [Block({**block, "toy_label": 1 - max(block["toy_label"], 0)}, block.id) for block in cached[:6]]
    records = [stream.record_of(of, collator(of)) for of in (cached[:6], changed)]
    assert all(map(int.__ne__, records[0][1:], records[1][1:]))  # the checksums cover every column
    assert all(set(example) == COLUMNS | {"labels", "cluster"} for example in fixed_masks(held_out, tokenizer))


def one_step(config, tokenizer, blocks, micro_batch, folder):
    """(log line, gradients, evaluation metrics) of a single step over all `blocks`."""
    torch.manual_seed(0)
    keep, collator = KeepGradients(), MlmCollator(tokenizer, seed=1, pad_to_multiple_of=8)
    trainer = MlmTrainer(
        model=ToyModel(config),
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
        eval_dataset=fixed_masks(blocks, tokenizer),
        data_collator=collator,
        callbacks=[keep],
        flops_per_token=1.0,
        fingerprint={"global_batch_size": len(blocks)},
        resumed=None,
    )
    trainer.train()
    return trainer.state.log_history[0], keep.gradients, trainer.evaluate()


def by_definition(config, tokenizer, blocks):
    """(losses by objective, gradients) of all blocks at once, each loss a mean over its own targets."""
    torch.manual_seed(0)
    model = ToyModel(config)
    batch = MlmCollator(tokenizer, seed=1, pad_to_multiple_of=8)(blocks)
    labels, toy_label = batch["labels"], batch["toy_label"]
    hidden = model.roberta(
        batch["input_ids"], attention_mask=batch.get("attention_mask"), token_type_ids=batch["token_type_ids"]
    )[0]
    logits = model.lm_head(hidden)[labels != -100]
    mlm = torch.nn.functional.cross_entropy(logits, labels[labels != -100])  # mean over the targets
    toy = torch.nn.functional.cross_entropy(
        model.toy_head(hidden[:, 0])[toy_label != -100], toy_label[toy_label != -100]
    )
    (mlm + toy).backward()
    return {"mlm": mlm.item(), "toy": toy.item()}, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("micro_batch", [16, 8, 4, 1])
def test_the_gradient_of_both_means_is_the_same_in_any_layout(reader, toy_config, tokenizer, tmp_path, micro_batch):
    blocks = taken(stream.validation_blocks(reader, None), 16)
    assert 0 < sum(block["toy_label"] != -100 for block in blocks) < 16  # fewer targets than blocks
    losses, gradients = by_definition(toy_config, tokenizer, blocks)
    logged, found, metrics = one_step(toy_config, tokenizer, blocks, micro_batch, tmp_path / "run")
    assert logged["loss"] == pytest.approx(sum(losses.values()), rel=1e-5)
    assert logged["mlm_loss"] == pytest.approx(losses["mlm"], rel=1e-5)
    assert logged["toy_loss"] == pytest.approx(losses["toy"], rel=1e-5)
    assert found.keys() == gradients.keys() and "toy_head.weight" in found
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    evaluated, _ = by_definition(toy_config, tokenizer, fixed_masks(blocks, tokenizer))  # the learning rate is 0
    assert metrics["eval_toy_loss"] == pytest.approx(evaluated["toy"], rel=1e-5)
    assert metrics["eval_loss"] == pytest.approx(evaluated["mlm"], rel=1e-5)
    assert metrics["eval_bits"] == pytest.approx(metrics["eval_loss"] / np.log(2))  # the masked-LM loss alone


KEYS = ("loss", "mlm_loss", "toy_loss", "grad_norm", "digest")


def losses_of(folder):
    """(log lines of training, run record) of a run that saved step 4."""
    log = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    record = json.loads((folder / "run_record.json").read_text())
    return [{key: line[key] for key in KEYS} for line in log if "loss" in line], record


@pytest.fixture
def train_toy(preset, toy_config, tmp_path, monkeypatch):
    """train_mlm.py with the toy's objective, in this process."""
    toy_config.to_json_file(tmp_path / "config.json")
    monkeypatch.setitem(chunks.PACKERS, "halves", halves)
    monkeypatch.setattr(train_mlm, "MlmArguments", ToyArguments)
    monkeypatch.setattr(
        train_mlm, "build_model", functools.partial(build_model, class_of=lambda config, name: ToyModel)
    )

    def train(folder, *argv):
        flags = ["--config", preset, "--output_dir", folder, "--save_strategy", "steps", "--save_steps", 4, *argv]
        train_mlm.main(list(map(str, flags)))
        return losses_of(folder)

    return train


def test_two_processes_and_zero_give_the_losses_of_one_process(train_toy, tmp_path, deepspeed_ranks):
    alone, record = train_toy(tmp_path / "alone")
    assert len(alone) == 4 and {"eval_loss", "eval_toy_loss", "eval_perplexity"} <= record["metrics"].keys()
    for name, start in (("two", forked_ranks), ("zero", functools.partial(deepspeed_ranks, "zero3"))):
        folder = tmp_path / name
        call = functools.partial(train_toy, folder, "--per_device_train_batch_size", 2)
        end_well(start(lambda rank, call=call: call(), tmp_path))
        assert any((folder / "checkpoint-4").glob("global_step*")) == (name == "zero")
        lines, other = losses_of(folder)
        for line, wanted in zip(lines, alone, strict=True):
            assert line.pop("digest") == wanted["digest"]
            assert line == pytest.approx({key: wanted[key] for key in line}, rel=1e-4), name
        for loss in ("eval_loss", "eval_toy_loss"):
            assert other["metrics"][loss] == pytest.approx(record["metrics"][loss], rel=1e-4), name


def test_the_mean_of_each_objective_is_resumed_between_two_log_lines(train_toy, tmp_path):
    lines = ["--logging_steps", 4]
    whole, _ = train_toy(tmp_path / "whole", *lines)
    train_toy(tmp_path / "begun", *lines, "--save_steps", 2)
    start = ["--resume_from_checkpoint", tmp_path / "begun" / "checkpoint-2"]
    resumed, _ = train_toy(tmp_path / "resumed", *lines, *start)
    assert resumed == whole and len(whole) == 2  # steps 1 and 4


def test_the_search_for_a_micro_batch_runs_all_objectives(train_toy, tmp_path):
    lines, _ = train_toy(tmp_path / "run", "--auto_find_batch_size")
    assert lines == train_toy(tmp_path / "again")[0]


def test_a_checkpoint_of_other_objectives_is_another_run(preset, train_toy, tmp_path, monkeypatch):
    train_toy(tmp_path / "run")
    monkeypatch.setattr(ToyModel, "objectives", {"mlm": "labels"})
    with pytest.raises(InputError, match=r"objectives was \['mlm', 'toy'\], is \['mlm'\]"):
        train_toy(tmp_path / "other", "--resume_from_checkpoint", tmp_path / "run" / "checkpoint-4")
