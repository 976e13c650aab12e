"""Odd values and files: an error message of one line with value and fix, before training."""

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
        ("--adam_beta1 2", r"adam_beta1=2.0, .*: Invalid beta parameter at index 0: 2.0"),
        ("--lr_scheduler_type warmup_stable_decay", "num_decay_steps"),
        ("--max_steps 10 --warmup_steps 122", "warmup_steps=122 is more than the 10 steps .* --warmup_steps 10 "),
    ],
)
def test_an_optimizer_or_schedule_that_a_library_refuses_is_named(preset, words, said):
    (_, training_args), _ = train_mlm.read_arguments(["--config", preset, *words.split()])
    with pytest.raises(InputError, match=said):
        pretraining.check_training(training_args)


def test_seeds_and_warm_up_of_a_fine_tuning():
    with pytest.raises(InputError, match=r"seeds=4294967296 must be .* below 2\^32"):
        finetune_race.read_arguments(["--seeds", "1", "4294967296"])
    (_, training_args), _ = finetune_race.read_arguments(["--warmup_steps", "100", "--use_cpu"])
    assert protocol.steps_of(training_args, examples=100, batch_size=16) == 24  # 4 epochs of 6 whole batches
    with pytest.raises(InputError, match="warmup_steps=100 is more than the 28 steps"):
        protocol.optimizers.check_length(training_args, 28)


def test_all_that_a_shorter_length_asks_for_is_in_one_message():
    for length, fits in ((128, "--doc_stride 32 --max_query_length 16"), (64, "--doc_stride 16 --max_query_length 8")):
        argv = ["--max_seq_length", str(length), "--use_cpu"]
        filled, _ = finetune_squad.read_arguments(argv)
        with pytest.raises(InputError, match=f"max_seq_length={length} leaves .*: {fits} fits$"):
            finetune_squad.check_arguments(*filled)
        (args, _), _ = finetune_squad.read_arguments([*argv, *fits.split()])
        assert args.doc_stride < length - args.max_query_length - finetune_squad.SPECIAL_TOKENS
    filled, _ = finetune_race.read_arguments(["--max_seq_length", "128", "--use_cpu"])
    with pytest.raises(InputError, match=r"leaves room for the article; .*: --max_option_length 32$"):
        finetune_race.check_arguments(*filled)


def test_files_of_fairseq_of_another_shape_are_a_line(tmp_path):
    for name in ("dict.txt", "vocab.bpe"):
        (tmp_path / name).write_text("#version: 0.2\na b c\n")
    names = {"dict": "dict.txt", "encoder": "encoder.json", "bpe": "vocab.bpe"}
    files = [f"--{flag}={tmp_path / name}" for flag, name in names.items()]
    for content in ("[[]]", '{"a": []}', '"text"'):
        (tmp_path / "encoder.json").write_text(content)
        with pytest.raises(InputError, match=r"encoder\.json"):
            fairseq.main(["to_hf", "--checkpoint", "none", *files, "--output_dir", str(tmp_path / "out")])


def test_a_sample_of_odd_flags_and_damaged_files(tmp_path):
    """A sample of the cases of `benchmarks/flag_fuzz.py`."""
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
