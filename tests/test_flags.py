"""Flags of all scripts: another value is refused, or changes the fingerprint, or leaves the weights unchanged."""

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import sys
import types
from unittest import mock

import pytest
import torch
from conftest import make_documents, train, write_parquet
from torch.nn import functional
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

import train_mlm
from roberta_recipe import durable
from roberta_recipe.data import tokenization
from roberta_recipe.data.corpus import hash_files, resolve
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import ROOT
from roberta_recipe.settings import Flag, fixed_values, flags_of, values_of
from roberta_recipe.tasks import protocol
from roberta_recipe.training import launching, optimizers, pretraining
from roberta_recipe.training.arguments import FinetuneTrainingArguments, MlmTrainingArguments
from roberta_recipe.training.finetune_trainer import FinetuneTrainer

spec = importlib.util.spec_from_file_location("benchmark_of_flags", ROOT / "benchmarks" / "flags.py")
flags = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(flags)
SAVING = ["--save_strategy", "steps", "--save_steps", "2"]


# Every flag


PRESETS = {
    "train_mlm": "presets/mlm/roberta_tiny.yaml",
    "finetune_glue": "presets/glue/rte.yaml",
    "finetune_squad": "presets/squad/v1.1.yaml",
    "finetune_race": "presets/race/paper.yaml",
    "finetune_ner": "presets/ner/own.yaml",
}


def arguments(script, argv):
    """The filled dataclasses of a script's command line, after its checks."""
    flags = ["--config", str(ROOT / PRESETS[script]), "--use_cpu", "true", "--bf16", "false", *argv]
    flags += ["--train_file", "my.conll"] if script == "finetune_ner" and "--train_file" not in argv else []
    filled, _ = sys.modules[script].read_arguments(flags)
    return filled


def check(script, filled):
    if script == "train_mlm":
        pretraining.check_data(filled[0])
        pretraining.check_training(filled[1])
    else:
        task = (sys.modules[script].task_of(filled[0], filled[1].do_predict),) if script == "finetune_glue" else ()
        sys.modules[script].check_arguments(*filled, *task)


@pytest.mark.parametrize("script", flags.CLASSES)
def test_every_flag_is_refused_or_fingerprinted_or_declared(script, monkeypatch, tmp_path, model_dir):
    """With another value. Flags of scope "free" are tested by benchmarks/flags.py, and by the sample below."""
    monkeypatch.setattr(protocol.weights, "check_length", lambda *args: None)
    base, seen = arguments(script, []), dict.fromkeys(("refused", "fixed", "layout", "free", "start", "content"), 0)
    for position, cls in enumerate(flags.CLASSES[script]):
        # the flags of TrainingArguments are the same in all fine-tuning scripts
        if cls is FinetuneTrainingArguments and script != "finetune_glue":
            continue
        for field in dataclasses.fields(cls):
            if not field.init:
                continue
            name, scope = field.name, flags_of(cls)[field.name].scope
            words = flags.changed(cls, name, getattr(base[position], name))
            try:
                filled = arguments(script, words)
                if scope not in ("content", "start") and name not in ("deepspeed", "use_cpu"):
                    check(script, filled)
            except InputError:
                seen["refused"] += 1
                continue
            assert scope != "locked", f"{' '.join(words)} was taken"
            before, now = base[position], filled[position]
            if scope in ("fixed", "data"):
                assert fixed_values(before)[name] != fixed_values(now)[name], words
                scope = "fixed"
            elif scope == "layout":
                assert name in values_of(now, "layout")
            seen[scope] += 1
    assert seen["fixed"] >= (5 if script in ("finetune_squad", "finetune_race", "finetune_ner") else 20), seen


def test_a_locked_flag_names_its_default_and_why(preset):
    classes = (MlmTrainingArguments, FinetuneTrainingArguments)
    locked = [(cls, name) for cls in classes for name, flag in flags_of(cls).items() if flag.scope == "locked"]
    assert len(locked) == 57 and (MlmTrainingArguments, "save_only_model") in locked
    for name, value, said in (
        ("save_only_model", "true", "save_only_model must stay False, not True: a checkpoint without optimizer"),
        ("accelerator_config", '{"even_batches": true}', "accelerator_config must stay .*'even_batches': False"),
        ("optim_target_modules", "all-linear", "optim_target_modules must stay None, not all-linear: no optimizer"),
        ("label_smoothing_factor", "0.1", "label_smoothing_factor must stay 0.0, not 0.1: perplexity"),
    ):
        with pytest.raises(InputError, match=said):
            train_mlm.read_arguments(["--config", preset, f"--{name}", value])
    for wrong in ({"resume": "locked"}, {"resume": "free", "because": "of nothing"}, {"resume": "no scope"}):
        with pytest.raises(TypeError):
            Flag(**wrong)


STOCK = """
--load_best_model_at_end --metric_for_best_model eval_accuracy --greater_is_better true --enable_jit_checkpoint
--include_num_input_tokens_seen true --dataloader_drop_last --dataloader_persistent_workers --label_smoothing_factor 0.1
--data_seed 7
"""


def test_flags_of_stock_command_lines_that_are_so_already_are_taken(monkeypatch):
    """Features of Trainer that the recipe replaces are off."""
    monkeypatch.setattr(protocol.weights, "check_length", lambda *args: None)
    for words in ([], ["--dataloader_num_workers", "1"]):
        _, taken = filled = arguments("finetune_glue", [*STOCK.split(), *words])
        check("finetune_glue", filled)
        assert not (taken.load_best_model_at_end or taken.enable_jit_checkpoint or taken.dataloader_drop_last)
        assert taken.include_num_input_tokens_seen == "no" and taken.dataloader_persistent_workers == bool(words)
        assert fixed_values(taken)["label_smoothing_factor"] == 0.1 and fixed_values(taken)["data_seed"] == 7
    with pytest.raises(InputError, match=r"label_smoothing_factor=0.1 .* is for classification only"):
        check("finetune_squad", arguments("finetune_squad", ["--label_smoothing_factor", "0.1"]))


def test_label_smoothing_is_torchs():
    logits, labels = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    trainer = types.SimpleNamespace(
        args=types.SimpleNamespace(label_smoothing_factor=0.1),
        loss_sum=flags.finetune_glue.classification_loss,
        loss_of_batch=lambda losses, count: losses.sum() / count,
    )
    loss = FinetuneTrainer.compute_loss(
        trainer, lambda: types.SimpleNamespace(logits=logits), {"labels": labels}, num_items_in_batch=6
    )
    assert loss.item() == pytest.approx(functional.cross_entropy(logits, labels, label_smoothing=0.1).item())


def test_data_seed_draws_the_order_of_all_seeds():
    def order(**seeds):
        features = [{"input_ids": [0] * size} for size in range(1, 33)]
        args = types.SimpleNamespace(per_device_train_batch_size=4, dataloader_persistent_workers=True, **seeds)
        trainer = mock.MagicMock(train_dataset=features, fingerprint={"global_batch_size": 4}, args=args)
        FinetuneTrainer.get_train_dataloader(trainer)
        assert trainer._loader.call_args.kwargs["persistent_workers"]
        return list(trainer.sampler)

    assert order(seed=1, data_seed=7) == order(seed=2, data_seed=7) == order(seed=7, data_seed=None)
    assert order(seed=1, data_seed=None) != order(seed=2, data_seed=None)


def test_values_that_break_the_gradient_or_follow_evaluations_are_refused(preset):
    for argv, said in (
        (["--gradient_checkpointing_kwargs", '{"preserve_rng_state": false}'], "preserve_rng_state must stay true"),
        (["--lr_scheduler_type", "greedy", "--eval_strategy", "steps"], "lr_scheduler_type=greedy needs evaluations"),
        (["--save_strategy", "best"], "--save_strategy.*invalid choice: 'best'"),
    ):
        with pytest.raises(InputError, match=said):
            train_mlm.read_arguments(["--config", preset, *argv])


def fingerprint(argv):
    (args, training_args), _ = train_mlm.read_arguments(argv)
    corpus = hash_files(resolve(pretraining.read_corpus(args)), cache_folder=os.devnull)
    tokenizer = tokenization.load_tokenizer(args.tokenizer_name)
    pretraining.derive(args, training_args)
    model = pretraining.build_model(args, training_args, tokenizer)
    reader = pretraining.text_reader(args, corpus, tokenizer, pretraining.data_seed(training_args))
    return pretraining.run_fingerprint(args, training_args, model, tokenizer, reader)[0]


def test_what_names_content_is_fingerprinted_by_its_content(preset, tmp_path, config, model_dir):
    base = fingerprint(["--config", preset])
    other = write_parquet(tmp_path / "other.parquet", make_documents(200, seed=9))
    (tmp_path / "corpus.yaml").write_text(f"sources: [{{name: other, files: {other}}}]\n")
    config.num_hidden_layers = 1
    config.to_json_file(tmp_path / "small.json")
    torch.manual_seed(1)
    pretraining.masked_lm.build_model(
        tokenization.load_tokenizer(model_dir), config_name=str(tmp_path / "config.json"), max_seq_length=64
    ).save_pretrained(tmp_path / "model-2")
    tokenization.load_tokenizer(model_dir).save_pretrained(tmp_path / "model-2")
    changes = {
        "train_file": ["--train_file", other],
        "validation_file": ["--validation_file", other],
        "corpus": ["--corpus", str(tmp_path / "corpus.yaml")],
        "language": ["--language", "de"],
        "config_name": ["--config_name", str(tmp_path / "small.json")],
        "config_overrides": ["--config_overrides", "num_hidden_layers=1"],
        "pad_vocab_to_multiple_of": ["--pad_vocab_to_multiple_of", "64"],
        "model_name_or_path": ["--model_name_or_path", model_dir],
    }
    named = {name for name, flag in flags_of(train_mlm.MlmArguments).items() if flag.scope == "content"}
    assert named - {"text_column", "tokenizer_name"} == set(changes)  # both are in the reader's fingerprint
    for name, words in changes.items():
        assert fingerprint(["--config", preset, *words]) != base, name
    # the same shape, other weights
    first, second = (
        fingerprint(["--config", preset, "--model_name_or_path", str(m)]) for m in (model_dir, tmp_path / "model-2")
    )
    assert first != second


# Declared free: a sample of benchmarks/flags.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flags")
    flags.prepare(folder)
    return folder


def test_a_resume_under_other_free_flags_is_the_same_run(folder):
    wanted = flags.half_run("train_mlm", folder)
    sample = {
        "free": [
            [
                *("--eval_strategy", "steps", "--eval_steps", "1", "--dataloader_num_workers", "1"),
                *("--dataloader_persistent_workers", "true", "--dataloader_drop_last", "true"),
            ],
            [*("--logging_steps", "4", "--save_steps", "1", "--save_total_limit", "1", "--eval_on_start", "true")],
            [*("--token_cache", str(folder / "cache"), "--max_eval_samples", "4")],
        ],
        "layout": [["--per_device_train_batch_size", "4"]],
    }
    for scope, lines in sample.items():
        for words in lines:
            found = flags.resumed("train_mlm", folder, words, "case")
            right, said = flags.verdict(scope, found, wanted)
            assert right and "refused" not in said, (words, said)
            assert (found["weights"] == [wanted]) == (scope == "free")
            said = [line for line in found["lines"] if line.startswith("Resuming in another layout")]
            assert len(said) == (scope == "layout")
    assert "per_device_train_batch_size was 8, is 4" in said[0] and "gradient_accumulation_steps was 1, is 2" in said[0]


# Launcher


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ACCELERATE_USE_FSDP", "true", "FSDP, whose checkpoints cannot be resumed here"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "parallelism_config"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "--torch_compile_backend inductor"),
        ("ACCELERATE_DYNAMO_BACKEND", "NO", None),  # from `accelerate launch` itself
    ],
)
def test_a_launcher_that_contradicts_the_preset_is_refused(preset, monkeypatch, name, value, said):
    (_, training_args), _ = train_mlm.read_arguments(["--config", preset])
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=said) if said else contextlib.nullcontext():
        launching.check_launch(training_args)


@pytest.mark.parametrize(
    ("processes", "launcher", "world", "said"),
    [
        (
            "1",
            None,
            1,
            "1 process, 4 GPUs on a machine: accelerate launch --num_processes 4, or set CUDA_VISIBLE_DEVICES=0",
        ),
        ("8", "none", 8, "8 processes, 4 GPUs on a machine: accelerate launch --num_processes 4$"),
        ("8", "none", 16, "accelerate launch --num_processes 8$"),  # two machines
        ("8", None, 8, None),  # a GPU is visible to each process
        ("4", "none", 8, None),
        ("2", "none", 2, None),
    ],
)
def test_each_process_has_a_gpu(preset, monkeypatch, processes, launcher, world, said):
    """Launch files have eight processes; on fewer GPUs, accelerate gives one to two ranks."""
    gpu = types.SimpleNamespace(bf16=False, fp16=True, device=torch.device("cuda"), dataloader_num_workers=0)
    vars(gpu).update(world_size=world, n_gpu=4 if processes == "1" else 1, torch_compile_backend=None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    if launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launcher)
    with pytest.raises(InputError, match=said) if said else contextlib.nullcontext():
        launching.check_launch(gpu)


# Optimizer and schedule


KWARGS = {
    "cosine_with_restarts": '{"num_cycles": 2}',
    "polynomial": '{"power": 2.0, "lr_end": 1e-6}',
    "cosine_with_min_lr": '{"min_lr_rate": 0.1}',
    "cosine_warmup_with_min_lr": '{"min_lr_rate": 0.1}',
    "warmup_stable_decay": '{"num_decay_steps": 2}',
}
OPTIMIZERS = tuple(optimizers.TABLE)
OPTIM_ARGS = {
    "muon": "lr=0.02,adjust_lr_fn=match_rms_adamw",
    "sgd": "momentum=0.9,nesterov=true",
    "rmsprop": "alpha=0.9,centered=true",
    "adagrad": "lr_decay=0.1",
}
SCHEDULES = [name.value for name in SchedulerType if name.value not in ("greedy", "reduce_lr_on_plateau")]


@pytest.mark.parametrize(("schedule", "optim"), zip(SCHEDULES, itertools.cycle(OPTIMIZERS)))
def test_every_optimizer_and_schedule_resumes_bit_for_bit(dropout, tmp_path, schedule, optim):
    words = ["--lr_scheduler_type", schedule, "--optim", optim, "--max_eval_samples", "4", *SAVING]
    words += ["--lr_scheduler_kwargs", KWARGS[schedule]] if schedule in KWARGS else []
    words += ["--optim_args", OPTIM_ARGS[optim]] if optim in OPTIM_ARGS else []
    words += ["--warmup_steps", "1"] if schedule != "constant" else []
    train(dropout, *words)
    again = ["--resume_from_checkpoint", tmp_path / "run" / "checkpoint-2", "--output_dir", tmp_path / "again"]
    train(dropout, *words, *again)
    first, second = (tmp_path / run / "checkpoint-4" for run in ("run", "again"))
    assert durable.sha256(first / "model.safetensors") == durable.sha256(second / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt"):
        assert equal(*(torch.load(run / name, weights_only=True) for run in (first, second))), name


def test_every_other_optimizer_and_schedule_is_refused(preset):
    others = [("optim", name.value) for name in OptimizerNames if name.value not in OPTIMIZERS]
    others += [("lr_scheduler_type", name.value) for name in SchedulerType if name.value not in SCHEDULES]
    assert len(others) > 30 and len(SCHEDULES) > len(OPTIMIZERS)  # each optimizer is tried above
    for flag, value in others:
        with pytest.raises(InputError, match=value):
            argv = ["--config", preset, f"--{flag}", value, "--eval_strategy", "steps", "--eval_steps", "2"]
            (_, training_args), _ = train_mlm.read_arguments(argv)
            pretraining.check_training(training_args)


def equal(first, second):
    """Whether two nested values are equal, tensors bit for bit."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


@pytest.mark.parametrize("change", [["--config_overrides", "num_hidden_layers=1"], ["--objective", "mlm"]])
def test_a_change_of_the_weights_is_refused(preset, tmp_path, change):
    """Layers of other number, or heads of other objectives, whatever --resume_despite_changes says."""
    pairs = ["--input_format", "sentence_pair", "--objective", "mlm", "nsp", *SAVING]
    train(preset, *pairs)
    resume = ["--resume_from_checkpoint", tmp_path / "run" / "checkpoint-2", "--resume_despite_changes", "true"]
    with pytest.raises(InputError, match=r"checkpoint-2 has other weights than this model \(.*--model_name_or_path"):
        train(preset, *pairs, *change, *resume, "--output_dir", tmp_path / "b")


def test_a_change_that_was_asked_for_reaches_any_optimizer(preset, tmp_path):
    train(preset, "--optim", "adafactor", "--lr_scheduler_type", "cosine", *SAVING)
    resume = ["--resume_from_checkpoint", tmp_path / "run" / "checkpoint-2", "--resume_despite_changes", "true"]
    new = ["--learning_rate", "4e-3", "--lr_scheduler_type", "linear", "--weight_decay", "0.5", "--output_dir"]
    train(preset, "--optim", "adafactor", *SAVING, *resume, *new, tmp_path / "b")
    log = durable.read_json(tmp_path / "b" / "checkpoint-4" / "trainer_state.json")["log_history"]
    assert [entry["learning_rate"] for entry in log if entry.get("step") == 3] == [pytest.approx(4e-3 * 2 / 4)]
    groups = torch.load(tmp_path / "b" / "checkpoint-4" / "optimizer.pt", weights_only=True)["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    with pytest.raises(InputError, match=r"the state of another optimizer .*optim was 'adafactor', is 'sgd'"):
        train(preset, "--optim", "sgd", *SAVING, *resume, "--output_dir", tmp_path / "c")
