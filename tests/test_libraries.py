"""What flags and files make the libraries raise is a line with value and fix, said before the long part."""

import importlib.util
import random
import sys
from collections import Counter

import pytest

import finetune_race
import finetune_squad
import train_mlm
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import ROOT
from roberta_recipe.tasks import protocol
from roberta_recipe.training import pretraining
from tools import fairseq

sys.path.insert(0, str(ROOT / "benchmarks"))
spec = importlib.util.spec_from_file_location("benchmark_flag_fuzz", ROOT / "benchmarks" / "flag_fuzz.py")
fuzz = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--learning_rate nan", "learning_rate=nan must be a number from 0 on"),
        ("--adam_beta1 2", r"adam_beta1=2.0, .*: Invalid beta parameter at index 0: 2.0"),
        ("--adam_epsilon -1", "adam_epsilon=-1.0 must be a number from 0 on"),
        ("--dataloader_num_workers -1", "dataloader_num_workers=-1 must be a number from 0 on"),
        ("--dataloader_num_workers 100000", "dataloader_num_workers=100000: each is a process"),
        (
            "--dataloader_num_workers 1 --dataloader_prefetch_factor 0",
            "prefetch_factor=0 must be at least 1",
        ),
        ("--lr_scheduler_type warmup_stable_decay", "num_decay_steps"),
        ("--optim adamw_bnb_8bit", "argument --optim: invalid choice: .adamw_bnb_8bit. .choose from"),
        ("--accelerator_config nofile.json", "accelerator_config=nofile.json"),
        ("--logging_steps 0", "logging_steps=0.0: ValueError: logging strategy"),
        ("--torch_compile_mode much", "torch_compile_mode=much: Unrecognized mode"),
        ("--torch_compile_backend much", "torch_compile_backend=much"),
        ("--report_to wandb", "report_to=.*wandb.* requires wandb to be installed"),
        ("--seed 4294967296", r"seed=4294967296 must be below 2\^32"),
        (
            "--max_steps 10 --warmup_steps 122",
            "warmup_steps=122 is more than the 10 steps .* --warmup_steps 10 ",
        ),
    ],
)
def test_a_value_that_a_library_does_not_take_is_named_with_the_librarys_words(preset, words, said):
    with pytest.raises(InputError, match=said):
        (_, training_args), _ = train_mlm.read_arguments(["--config", preset, *words.split()])
        pretraining.check_training(training_args)


def test_numbers_of_a_preset_are_checked_too(tmp_path):
    (tmp_path / "preset.yaml").write_text("save_total_limit: -3\n")
    with pytest.raises(InputError, match="save_total_limit=-3 must be a number from 0 on"):
        train_mlm.read_arguments(["--config", str(tmp_path / "preset.yaml")])


def test_a_bug_of_ours_keeps_its_traceback(preset, monkeypatch):
    monkeypatch.setattr(pretraining.environment, "check_launcher", lambda args: {}["bug"])
    (_, training_args), _ = train_mlm.read_arguments(["--config", preset])
    with pytest.raises(KeyError):
        pretraining.check_training(training_args)


def test_seeds_and_warm_up_of_a_fine_tuning(monkeypatch):
    with pytest.raises(InputError, match=r"seeds=4294967296 must be below 2\^32"):
        finetune_race.read_arguments(["--seeds", "1", "4294967296"])
    (_, training_args), _ = finetune_race.read_arguments(["--warmup_steps", "100", "--use_cpu"])
    assert protocol.steps_of(training_args, examples=100, batch_size=16) == 24  # 4 epochs of 6 whole batches
    with pytest.raises(InputError, match="warmup_steps=100 is more than the 28 steps"):
        protocol.optimizers.check_length(training_args, 28)


def test_all_that_a_shorter_length_asks_for_is_in_one_message():
    for length, fits in ((128, "--doc_stride 32 --max_query_length 16"), (64, "--doc_stride 16 --max_query_length 8")):
        filled, _ = finetune_squad.read_arguments(["--max_seq_length", str(length), "--use_cpu"])
        with pytest.raises(InputError, match=f"max_seq_length={length} leaves .*; what fits: {fits}$"):
            finetune_squad.check_arguments(*filled)
        argv = ["--max_seq_length", str(length), "--use_cpu", *fits.split()]
        (args, _), _ = finetune_squad.read_arguments(argv)
        assert args.doc_stride < length - args.max_query_length - finetune_squad.SPECIAL_TOKENS
    filled, _ = finetune_race.read_arguments(["--max_seq_length", "128", "--use_cpu"])
    with pytest.raises(InputError, match=r"leaves room for the article; .*: --max_option_length 32$"):
        finetune_race.check_arguments(*filled)


def test_files_of_fairseq_of_another_shape_are_a_line(tmp_path):
    for content in ("[[]]", '{"a": []}', '"text"'):
        (tmp_path / "encoder.json").write_text(content)
        for name in ("dict.txt", "vocab.bpe"):
            (tmp_path / name).write_text("#version: 0.2\na b c\n")
        files = [f"--{flag}={tmp_path / name}" for flag, name in zip(("dict", "encoder", "bpe"), FILES, strict=True)]
        with pytest.raises(InputError, match=r"encoder\.json"):
            fairseq.main(["to_hf", "--checkpoint", "none", *files, "--output_dir", str(tmp_path / "out")])


FILES = ("dict.txt", "encoder.json", "vocab.bpe")


def test_a_sample_of_odd_flags_and_damaged_files(tmp_path, monkeypatch):
    """As `benchmarks/flag_fuzz.py` has them all."""
    rng, shared = random.Random(7), tmp_path / "inputs"
    shared.mkdir()
    fuzz.prepare(shared)
    chosen = ("train_mlm", "train_mlm of corpus_jsonl", "train_mlm of a corpus", "finetune_glue", "train_tokenizer")
    lines = {name: command for name, command in fuzz.commands().items() if name in chosen}
    odd = [case for case in fuzz.of_flags(lines, [], rng, draws=1) if "compile" not in case[1]]  # it takes a minute
    assert len(odd) > 250 and len(lines) == len(chosen)
    cases, seen = [*rng.sample(odd, 10), *fuzz.of_files(lines, rng, 2)], Counter()
    for case in cases:
        outcome, what, said = fuzz.tried(case, lines, shared)
        assert outcome in ("run", "refused"), (what, said)
        seen[outcome] += 1
    assert seen["refused"] > 5
