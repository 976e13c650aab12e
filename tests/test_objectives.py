"""New objectives and optimizers are a single declaration (toy_declarations.py), and appear nowhere else in the
library."""

import functools
import itertools
import json

import numpy as np
import pytest
import torch
from conftest import ROOT, corpus_of, end_well, forked_ranks, make_documents, run_python, write_parquet
from safetensors.torch import load_file
from test_modeling import one_step
from toy_declarations import declare
from transformers import AutoModelForMaskedLM

import train_mlm
from roberta_recipe.data import chunks, stream, token_cache
from roberta_recipe.data.corpus import Source
from roberta_recipe.data.masking import MlmCollator, fixed_masks
from roberta_recipe.data.packing import Block
from roberta_recipe.data.stream import TrainBlocks
from roberta_recipe.errors import InputError
from roberta_recipe.model.masked_lm import masked_lm_class
from roberta_recipe.model.objectives import named
from roberta_recipe.training.data_loading import count_consumed

COLUMNS = {"input_ids", "token_type_ids", "toy_label"}


@pytest.fixture
def toy_config(config):
    config.type_vocab_size = 2
    return config


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    declare(monkeypatch.setitem)


def toy_model(config):
    return masked_lm_class(config, objectives=named(["mlm", "toy"]))(config)


@pytest.fixture
def reader(tmp_path, tokenizer):
    path = write_parquet(tmp_path / "text.parquet", make_documents(120, seed=3))
    corpus = corpus_of("c", [Source("s", files=path)], validation_share=0.3)
    return chunks.TextReader(corpus, tokenizer, packer="full_sentences toy", max_seq_length=64, seed=1)


def first(blocks, count):
    return list(itertools.islice(blocks, count))


def same(block, other):
    places = [(one.id, one.epoch, one.document) for one in (block, other)]
    return (
        places[0] == places[1]
        and block.keys() == other.keys()
        and all(map(np.array_equal, block.values(), other.values()))
    )


def test_columns_pass_through_stream_cache_repetition_collator_and_fixed_masks(reader, tokenizer, tmp_path):
    blocks = first(TrainBlocks(reader, batch_size=4), 40)
    assert all(set(block) == COLUMNS for block in blocks)
    assert {block["toy_label"] for block in blocks} == {-100, 0, 1}
    token_cache.build(tmp_path / "cache", reader, num_proc=1)
    cache = token_cache.TokenCache(tmp_path / "cache", reader.corpus, seed=1)
    cached = first(TrainBlocks(cache, batch_size=4), 40)
    assert all(map(same, blocks, cached)) and cached[0]["token_type_ids"].dtype == np.uint8
    held_out, from_cache = (list(stream.validation_blocks(provider, None)) for provider in (reader, cache))
    assert len(held_out) > 8 and all(map(same, held_out, from_cache))
    repeated = first(TrainBlocks(cache, batch_size=4, limit=8), 24)
    assert {block.epoch for block in repeated} == {0, 1, 2} and all(set(block) == COLUMNS for block in repeated)

    collator = MlmCollator(tokenizer, seed=1, pad_to_multiple_of=8)
    batch = collator(cached[:6])
    assert batch["toy_label"].tolist() == [block["toy_label"] for block in cached[:6]]
    for row, block in zip(batch["token_type_ids"], cached, strict=False):
        types = block["token_type_ids"].tolist()
        assert row.tolist() == types + [0] * (len(row) - len(types))
    changed = [Block({**block, "toy_label": 1 - max(block["toy_label"], 0)}, block.id) for block in cached[:6]]
    records = [count_consumed(of, collator(of)) for of in (cached[:6], changed)]
    assert (records[0][1:] != records[1][1:]).all()  # the hashes cover every column
    assert all(set(example) == COLUMNS | {"labels", "document"} for example in fixed_masks(held_out, tokenizer))


def by_definition(config, tokenizer, blocks):
    """Reference (losses by objective, gradients) of the undivided batch; each loss is a mean over its own targets."""
    torch.manual_seed(0)
    model = toy_model(config)
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


@pytest.mark.parametrize("micro_batch", [16, 4, 1])
def test_the_gradient_of_both_means_is_the_same_in_any_layout(reader, toy_config, tokenizer, tmp_path, micro_batch):
    blocks = first(stream.validation_blocks(reader, None), 16)
    assert 0 < sum(block["toy_label"] != -100 for block in blocks) < 16  # fewer targets than blocks
    losses, gradients = by_definition(toy_config, tokenizer, blocks)
    torch.manual_seed(0)
    collator, held_out = MlmCollator(tokenizer, seed=1, pad_to_multiple_of=8), fixed_masks(blocks, tokenizer)
    trainer, found = one_step(toy_model(toy_config), collator, blocks, micro_batch, tmp_path, eval_dataset=held_out)
    logged, metrics = trainer.state.log_history[0], trainer.evaluate()
    assert logged["loss"] == pytest.approx(sum(losses.values()), rel=1e-5)
    assert logged["mlm_loss"] == pytest.approx(losses["mlm"], rel=1e-5)
    assert logged["toy_loss"] == pytest.approx(losses["toy"], rel=1e-5)
    assert found.keys() == gradients.keys() and "toy_head.weight" in found
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    evaluated, _ = by_definition(toy_config, tokenizer, held_out)  # the learning rate is 0
    assert metrics["eval_toy_loss"] == pytest.approx(evaluated["toy"], rel=1e-5)
    assert metrics["eval_loss"] == pytest.approx(evaluated["mlm"], rel=1e-5)
    assert metrics["eval_bits"] == pytest.approx(metrics["eval_loss"] / np.log(2))  # the masked-LM loss alone


KEYS = ("loss", "mlm_loss", "toy_loss", "grad_norm", "digest")


def losses_of(folder):
    """(training log lines, run record) of a run that saved step 4."""
    log = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    record = json.loads((folder / "run_record.json").read_text())
    return [{key: line[key] for key in KEYS} for line in log if "loss" in line], record


@pytest.fixture
def train_toy(preset, toy_config, tmp_path):
    """Run train_mlm.py with the toy objective, in this process."""
    toy_config.to_json_file(tmp_path / "config.json")

    def train(folder, *argv):
        flags = ["--config", preset, "--output_dir", folder, "--save_strategy", "steps", "--save_steps", 4]
        flags += ["--objective", "mlm", "toy", *argv]
        train_mlm.main(list(map(str, flags)))
        return losses_of(folder)

    return train


def test_two_processes_and_zero_give_the_losses_of_one_process(train_toy, tmp_path, deepspeed_ranks):
    alone, record = train_toy(tmp_path / "alone")
    assert [loss for _, loss in record["loss_at_steps"]["train"]] == [line["mlm_loss"] for line in alone]
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
    lines = ["--logging_steps", 4, "--save_steps", 2]
    whole, _ = train_toy(tmp_path / "whole", *lines)
    train_toy(tmp_path / "begun", *lines)
    start = ["--resume_from_checkpoint", tmp_path / "begun" / "checkpoint-2"]
    resumed, _ = train_toy(tmp_path / "resumed", *lines, *start)
    assert resumed == whole and len(whole) == 3  # steps 1, 2 (it is saved) and 4


def test_a_checkpoint_of_other_objectives_is_another_run(train_toy, tmp_path):
    train_toy(tmp_path / "run")
    resume = ["--resume_from_checkpoint", tmp_path / "run" / "checkpoint-4"]
    with pytest.raises(InputError, match=r"objectives was \['mlm', 'toy'\], is \['mlm'\]"):
        train_toy(tmp_path / "other", *resume, "--objective", "mlm")


DECLARED_FIRST = """
import json, sys
from toy_declarations import declare
declare(dict.__setitem__)
import train_mlm  # flags are made of the tables
from roberta_recipe.errors import InputError
from tools import estimate, evaluate

flags, (whole, again) = ["--config", *sys.argv[1:-2]], sys.argv[-2:]
records = [train_mlm.main([*flags, "--output_dir", whole])]
resume = ["--resume_from_checkpoint", f"{whole}/checkpoint-2"]
records.append(train_mlm.main([*flags, *resume, "--output_dir", again]))
metrics, _ = evaluate.main([*flags, "--model_name_or_path", whole])
found = {"records": records, "eval_loss": metrics["eval_loss"], "errors": []}
one_card = [*flags, "--hardware", "1xH200", "--optim"]
found["states"] = [estimate.main([*one_card, name]).memory.optimizer for name in ("toy", "lamb")]
for words in (["--optim_args", "speed=1"], ["--input_format", "contiguous"]):
    try:
        train_mlm.main([*flags, *words])
    except InputError as error:
        found["errors"].append(str(error))
print("\\n" + json.dumps(found))
train_mlm.main(["--help"])
"""


def test_flags_checks_run_and_tools_follow_from_the_declarations(preset, toy_config, tmp_path):
    """In a subprocess, as flags are defined on import."""
    toy_config.to_json_file(tmp_path / "config.json")
    flags = ["--objective", "mlm", "toy", "--optim", "toy", "--optim_args", "momentum=0.8", "--save_strategy", "steps"]
    flags += ["--save_steps", "2", "--eval_strategy", "steps", "--eval_steps", "2", tmp_path / "run", tmp_path / "b"]
    path = {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "COLUMNS": "500"}
    done = run_python("-c", DECLARED_FIRST, preset, *flags, cwd=ROOT, env=path)
    assert done.returncode == 0, done.stderr
    found, usage = (part for part in done.stdout.split("\n{")[-1].split("\n", 1))
    found = json.loads("{" + found)
    whole, again = found["records"]
    assert again["resumes"] == 1 and again["state_digests"] == whole["state_digests"]
    assert whole["metrics"]["eval_toy_loss"] > 0 and found["eval_loss"] == pytest.approx(whole["metrics"]["eval_loss"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "toy_loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval_toy_loss" in line] == [2, 4]
    kept, finished = (load_file(tmp_path / "run" / part / "model.safetensors") for part in ("checkpoint-4", "."))
    assert kept.keys() - finished.keys() == {"toy_head.weight", "toy_head.bias"}
    _, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "run", output_loading_info=True)
    assert not any(report.values()), report
    state = torch.load(tmp_path / "run" / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert {group["momentum"] for group in state["param_groups"]} == {0.8}
    assert all(of_weight.keys() == {"mean"} for of_weight in state["state"].values()) and len(state["state"]) > 20
    assert 2 * found["states"][0] == found["states"][1] > 0  # a number for each weight, and two
    assert "unknown argument speed (valid: momentum" in found["errors"][0]
    assert "objective toy needs input_format=full_sentences, not contiguous" in found["errors"][1]
    assert "toy (a toy: the number of a block)" in usage and "toy: a toy: signs of a running mean." in usage
