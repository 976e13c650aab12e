"""Own text, own checkpoint, stock command lines: the applied preset, tokenizer and number of steps are logged."""

import contextlib
import errno
import math
import os
import re
from pathlib import Path

import pytest
import yaml
from conftest import make_documents, write_text
from transformers import AutoTokenizer

import train_mlm
from roberta_recipe import input_files
from roberta_recipe import record as records
from roberta_recipe.data import corpus as corpora
from roberta_recipe.data import tokenizer_training
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.training import pretraining
from roberta_recipe.training.arguments import MlmArguments
from roberta_recipe.training.pretraining import CONTINUE, DEMONSTRATION, preset_of
from tools import evaluate

ON_CPU = ["--use_cpu", "--bf16", "false"]
SECONDS = [
    *ON_CPU,
    "--disable_tqdm",
    "true",
    "--logging_steps",
    "1",
    "--eval_strategy",
    "no",
    "--max_eval_samples",
    "8",
]
SECONDS += ["--global_batch_size", "4", "--per_device_train_batch_size", "4"]


@pytest.fixture
def texts(tmp_path):
    """A glob of text files, 1,200 documents in all."""
    (tmp_path / "my").mkdir()
    for number in range(2):
        write_text(tmp_path / "my" / f"{number}.txt", make_documents(600, seed=20 + number))
    return str(tmp_path / "my" / "*.txt")


def entries_of(folder):
    return len(AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize(
    ("words", "preset"),
    [
        ("", DEMONSTRATION),
        ("--max_steps 700 --initialization mimetic --output_dir runs/a", DEMONSTRATION),
        ("--train_file my.txt", "mini"),
        ("--validation_file my.txt", "mini"),
        ("--corpus=my.yaml", "mini"),
        ("--token_cache tokens", "mini"),
        ("--tokenizer-name t --model-size=large", "large"),
        ("--config_name my.json --model_size base", "base"),
        ("--model_size tiny", "tiny"),
        ("--model_name_or_path m --tokenizer_name m --train_file my.txt --num_train_epochs 3", CONTINUE),
        ("--model_name_or_path m --config my.yaml", "my.yaml"),
    ],
)
def test_the_demonstration_runs_only_where_nothing_is_named(words, preset):
    assert preset_of(words.split())[0] == (preset if "." in preset else f"presets/mlm/roberta_{preset}.yaml")


def test_a_size_gives_the_recipe_without_its_text(root):
    words = ["--train_file", "my.txt", "--model_size", "small", "--output_dir", "runs/mine", *ON_CPU]
    (args, training), resolved = train_mlm.read_arguments(words)
    assert (args.corpus, args.fill_mask_examples, args.config_name) == (None, None, "presets/model/small.json")
    assert args.tokenizer_name == resolved["tokenizer_name"] == "runs/mine/tokenizer"
    assert (training.learning_rate, args.max_seq_length, training.output_dir) == (5e-4, 512, "runs/mine")
    base = [word.replace("small", "base") for word in words]  # its preset names a token cache
    assert train_mlm.read_arguments(base)[0][0].token_cache is None
    for other in (["--config", "presets/mlm/roberta_tiny.yaml"], ["--model_name_or_path", "m"]):
        with pytest.raises(InputError, match=rf"model_size=small .* remove it or {other[1]}"):
            train_mlm.read_arguments([*words, *other])


def test_a_checkpoint_alone_is_continued_by_dont_stop_pretraining(model_dir):
    """Table 13 of Gururangan et al. 2020, with the checkpoint's tokenizer."""
    (args, training), resolved = train_mlm.read_arguments(
        ["--model_name_or_path", model_dir, "--train_file", "a", *ON_CPU]
    )
    assert (training.learning_rate, args.global_batch_size, training.max_steps) == (5e-4, 2048, 12_500)
    assert training.get_warmup_steps(training.max_steps) == 750 and args.mlm_probability == 0.15
    assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-6)
    assert (training.weight_decay, args.max_seq_length, args.input_format) == (0.01, 512, "full_sentences")
    assert args.tokenizer_name == resolved["tokenizer_name"] == model_dir


def test_a_checkpoint_brings_its_tokenizer_whatever_the_preset_names(preset, model_dir):
    words = ["--config", preset, "--model_name_or_path", model_dir]
    assert train_mlm.read_arguments(words)[0][0].tokenizer_name == model_dir
    assert train_mlm.read_arguments([*words, "--tokenizer_name", "t"])[0][0].tokenizer_name == "t"


def test_a_vocabulary_grows_with_the_text():
    sizes = [tokenizer_training.size_for(size) for size in (0, 15_000_000, 100_000_000, 1_000_000_000, 160_000_000_000)]
    assert sizes[:2] == [4096, 4096] and sizes[3:] == [50_265, 50_265] and 12_000 < sizes[2] < 13_000


def test_passes_over_text_of_unknown_size_are_not_estimated(monkeypatch):
    """Compressed and remote files have no size."""
    monkeypatch.setattr(train_mlm.stream, "blocks_of_pass", lambda reader: None)
    for limit in (None, 100):
        args = MlmArguments(global_batch_size=32, max_train_samples=limit)
        assert train_mlm.passes(args, 4, None, None, []) == ""


def test_own_text_in_one_command(texts, tmp_path, capsys):
    """Tokenizer, preset and steps are logged; the vocabulary size follows from the text, of which 1% is held out. A
    resumed run trains no new tokenizer."""
    argv = ["--train_file", texts, "--model_size", "tiny", "--output_dir", str(tmp_path / "run"), *SECONDS]
    argv += ["--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2"]
    record = train_mlm.main(argv)
    made, lines = tmp_path / "run" / "tokenizer", capsys.readouterr().err
    entries = entries_of(made)
    assert 261 < entries < 4096 and f"vocabulary {entries:,}\n" in lines
    assert "Preset      presets/mlm/roberta_tiny.yaml (no --config given); another: --model_size\n" in lines
    assert f"Tokenizer   at most 4,096 entries, trained on 0.4 MB of the text: {made} (" in lines
    assert (
        "Recipe      presets/mlm/roberta_tiny.yaml: learning rate 0.003, warm-up 1 steps, 30% masked, seed 42" in lines
    )
    said = r"Steps       4 with sequences of 64 tokens, at most 1,024 tokens, about 0\.0\d+ passes over the text\n"
    assert re.search(said, lines)
    assert f"Corpus      train_file: {texts} 100.0%\n" in lines
    assert record["counts"]["train"]["train_file"]["held_out_documents"] > 0
    assert record["counts"]["validation"]["train_file"]["documents"] > 0
    assert yaml.safe_load((tmp_path / "run" / "preset.yaml").read_text())["tokenizer_name"] == str(made)

    for path in (tmp_path / "run" / "run_record.json", tmp_path / "run" / "checkpoint-4" / "manifest.json"):
        path.unlink()
    before = (made / "tokenizer.json").stat()
    again = train_mlm.main(argv)
    assert again["resumes"] == 1 and (made / "tokenizer.json").stat() == before
    assert again["metrics"]["eval_loss"] == record["metrics"]["eval_loss"]


def test_a_tokenizer_that_an_earlier_start_trained_on_other_text_is_refused(texts, tmp_path, monkeypatch):
    """A start that ended before its first checkpoint, and the command with another file."""

    def ended(*_, **__):
        raise RunError

    monkeypatch.setattr(pretraining, "build_readers", ended)
    argv = ["--model_size", "tiny", "--output_dir", str(tmp_path / "run"), *SECONDS, "--train_file"]
    other = write_text(tmp_path / "other.txt", make_documents(600, seed=30))
    for _ in range(2):
        with pytest.raises(RunError):
            train_mlm.main([*argv, texts])
    with pytest.raises(InputError, match=r"run/tokenizer was trained on other text \(source train_file"):
        train_mlm.main([*argv, other])
    (tmp_path / "run" / "checkpoint-4").mkdir()  # with one, --resume_despite_changes may change the text
    with pytest.raises(RunError):
        train_mlm.main([*argv, other])


def test_a_vocabulary_size_in_the_command_is_that_of_the_tokenizer(texts, tmp_path, monkeypatch):
    """Not that of a run of the same name in the repository."""
    (tmp_path / "repository" / "run" / "tokenizer").mkdir(parents=True)
    (tmp_path / "repository" / "presets").symlink_to(input_files.ROOT / "presets")
    monkeypatch.setattr(input_files, "ROOT", tmp_path / "repository")
    monkeypatch.chdir(tmp_path)
    argv = ["--train_file", texts, "--model_size", "tiny", "--output_dir", "run", *SECONDS]
    monkeypatch.setattr(records, "describe_machine", lambda: {"gpus": ["NVIDIA H200"] * 8})
    run = train_mlm.main([*argv, "--max_steps", "1", "--warmup_steps", "0", "--config_overrides", "vocab_size=300"])
    assert entries_of(tmp_path / "run" / "tokenizer") == 300
    assert run["hardware"]["gpus"] == []  # visible, but the run used none


def test_the_demonstration_in_a_folder_without_write_permission(tmp_path, monkeypatch):
    """Refused before its tokenizer is trained."""

    def refused(path, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "presets").symlink_to(input_files.ROOT / "presets")
    monkeypatch.setattr(input_files, "ROOT", tmp_path / "repository")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizer_training, "train_tokenizer", None)
    monkeypatch.setattr(Path, "touch", refused)
    with pytest.raises(InputError, match=r"tokenizer_name=tokenizer/.* cannot be written: Permission denied; name"):
        train_mlm.main(["--output_dir", str(tmp_path / "run"), *ON_CPU])


@pytest.mark.parametrize("machines", [1, 2])
def test_machines_that_train_the_tokenizer_of_a_shared_folder_at_once(texts, tmp_path, monkeypatch, machines):
    """The slower one finds it there. On a single machine, it belongs to another run."""
    argv = ["--train_file", texts, "--model_size", "tiny", "--output_dir", str(tmp_path / "run"), *SECONDS]
    argv += ["--config_overrides", "vocab_size=300"]
    (args, training_args), _ = train_mlm.read_arguments(argv)
    train = tokenizer_training.train_tokenizer

    def train_beside_another(*words, **options):
        tokenizer = train(*words, **options)
        tokenizer_training.save_tokenizer(tokenizer, args.tokenizer_name)
        return tokenizer

    monkeypatch.setattr(tokenizer_training, "train_tokenizer", train_beside_another)
    monkeypatch.setattr(train_mlm, "local_processes", lambda: training_args.world_size / machines)
    refused = pytest.raises(InputError, match="holds other files")
    with refused if machines == 1 else contextlib.nullcontext():
        corpus = corpora.resolve(pretraining.read_corpus(args))
        train_mlm.train_missing_tokenizer(argv, args, training_args, corpora.hash_files(corpus, os.devnull))
    assert entries_of(args.tokenizer_name) == 300


@pytest.mark.parametrize("cached", [False, True])
def test_epochs_are_steps_over_the_counted_blocks(preset, tmp_path, cached, capsys):
    argv = ["--config", preset, "--num_train_epochs", "2", "--global_batch_size", "32"]
    argv += ["--token_cache", str(tmp_path / "cache")] if cached else []
    record = train_mlm.main([*argv, "--warmup_steps", "0.06"])
    blocks = record["counts"]["train"]["train_file"]["blocks"] / 2
    assert record["steps"] == math.ceil(2 * blocks / 32) > 4 and 2 <= record["passes"]["train_file"] < 2.2
    assert ", 2.0 passes over the text\n" in capsys.readouterr().err
    saved = yaml.safe_load((tmp_path / "run" / "preset.yaml").read_text())
    assert saved["max_steps"] == record["steps"] and "num_train_epochs" not in saved


def test_epochs_that_make_no_run_are_refused(preset):
    flags = ["--config", preset, "--num_train_epochs"]
    with pytest.raises(InputError, match=r"max_steps=9, num_train_epochs=3: set one of them"):
        train_mlm.main([*flags, "3", "--max_steps", "9"])
    with pytest.raises(InputError, match=r"=0.5 over \d+ blocks is one step .*: lower the batch, or --num_") as refused:
        train_mlm.main([*flags, "0.5", "--global_batch_size", "2048"])
    epochs = str(refused.value).split()[-1]
    with pytest.raises(InputError, match=f"num_train_epochs={int(epochs) - 1} over .* is one step"):
        train_mlm.main([*flags, str(int(epochs) - 1), "--global_batch_size", "2048"])


def test_one_document_a_line_is_named_as_the_cause(tmp_path):
    (tmp_path / "lines.txt").write_text("\n".join(make_documents(300, seed=3)))
    argv = ["--train_file", str(tmp_path / "lines.txt"), "--output_dir", str(tmp_path / "run"), *SECONDS]
    with pytest.raises(InputError, match=r"no document is held out .* Only blank lines separate documents in \.txt"):
        train_mlm.main(argv)
    assert not (tmp_path / "run" / "tokenizer").exists()


def test_a_run_is_measured_by_its_own_preset_on_the_text_that_is_named(preset, tmp_path, texts, capsys):
    record, run = train_mlm.main(["--config", preset]), ["--model_name_or_path", str(tmp_path / "run"), *ON_CPU]
    capsys.readouterr()
    metrics, _ = evaluate.main(run)
    lines = capsys.readouterr().err
    assert metrics["eval_loss"] == record["metrics"]["eval_loss"]
    held_out = yaml.safe_load(Path(preset).read_text())["validation_file"][0]
    assert f"Preset      {tmp_path / 'run' / 'preset.yaml'}\n" in lines
    assert f"(held out: {held_out}) 100.0%\n" in lines
    other, _ = evaluate.main([*run, "--train_file", texts])
    assert (
        f"held out of train_file: {texts} 100.0%\n" in capsys.readouterr().err
        and other["eval_loss"] != metrics["eval_loss"]
    )
    (tmp_path / "run" / "preset.yaml").unlink()
    with pytest.raises(InputError, match="is not a folder with preset"):
        evaluate.main(run)
