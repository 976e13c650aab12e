"""train_mlm.py through its command line: output files, and errors before training."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from conftest import Forked, copied, end_well, forked_ranks, losses, make_documents, run_python, train, write_text
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling

import train_mlm
from roberta_recipe import record as records
from roberta_recipe.data import docstrings, masking, tokenizer_training
from roberta_recipe.data.corpus import resolve
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.training import batch, checkpoint, launching, pretraining
from roberta_recipe.training.mlm_trainer import MlmTrainer
from tools import evaluate, pack


def test_the_commit_is_that_of_the_recipe_alone(tmp_path, monkeypatch):
    """A copy of `roberta_recipe` in another repository has no commit."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "another"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(records, "ROOT", tmp_path.resolve())
    records.git_commit.cache_clear()
    launching.set_up_process()
    commit = records.git_commit()
    assert re.fullmatch("[0-9a-f]{40}", commit)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "while it trains"], check=True)
    assert records.git_commit() == commit
    (tmp_path / "copied").mkdir()
    records.git_commit.cache_clear()
    monkeypatch.setattr(records, "ROOT", tmp_path.resolve() / "copied")
    assert records.git_commit() is None
    records.git_commit.cache_clear()


def test_a_run_as_a_user_starts_it(preset, tmp_path, root):
    """`accelerate launch` of the script, copied with `roberta_recipe` to an empty folder: evaluation, predictions, and
    all output files."""
    script = copied("train_mlm.py", tmp_path / "mine")
    done = run_python(
        *["-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"],
        *["--mixed_precision", "no", "--dynamo_backend", "no", script, "--config", preset],
        *["--max_steps", "6", "--eval_strategy", "steps", "--eval_steps", "3", "--save_strategy", "steps"],
        *["--save_steps", "3", "--fill_mask_examples", "The cat <mask> a dog."],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "run"
    names = {path.name for path in out.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert {"preset.yaml", "run_record.json", "loss_curve.png", "checkpoint-3", "checkpoint-6"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    assert (out / "loss_curve.png").read_bytes().startswith(b"\x89PNG")

    record = json.loads((out / "run_record.json").read_text())
    wanted = "metrics unigram_entropy tokens_seen tokens_per_second peak_memory_bytes wall_clock_s counts resolved_args"
    assert set(wanted.split()) | {"versions", "commit", "hardware", "loss_at_steps", "steps"} <= record.keys()
    assert record["steps"] == 6 and record["stopped_by"] == "max_steps"
    assert 0 < record["tokens_seen"] <= 6 * 8 * 64
    metrics = record["metrics"]
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    assert metrics["eval_bits"] == pytest.approx(metrics["eval_loss"] / math.log(2))
    assert [step for step, _ in record["loss_at_steps"]["train"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in record["loss_at_steps"]["validation"]] == [3, 6]
    counts = record["counts"]["train"]["train_file"]
    assert counts["documents"] > 0 and counts["blocks"] >= 48 and counts["held_out_documents"] == 0

    assert f"Recipe      {preset}: learning rate 0.001, warm-up 0 steps, 15% masked, seed 42" in done.stderr
    assert "Steps       6 with sequences of 64 tokens" in done.stderr and "Batch       8 sequences = 1" in done.stderr
    assert done.stderr.count("unigram entropy") == 1 and done.stderr.count("  validation  loss ") == 2
    assert "The cat <mask> a dog.\n" in done.stdout and done.stdout.rstrip().endswith("loss_curve.png")
    assert yaml.safe_load((out / "preset.yaml").read_text())["max_steps"] == 6


def test_a_machine_without_a_gpu_packs_for_a_machine_with_gpus(preset, tmp_path, capsys):
    """The preset asks for bf16, which `TrainingArguments` refuses without a GPU."""
    values = yaml.safe_load(Path(preset).read_text())
    del values["use_cpu"]
    Path(preset).write_text(yaml.safe_dump(values | {"bf16": True}))
    flags = ["--config", preset, "--token_cache", str(tmp_path / "cache"), "--num_proc", "1"]
    assert pack.main([*flags, "--machine", "1/2"]) is False
    assert pack.main([*flags, "--machine", "2/2"]) is True
    assert list((tmp_path / "cache").rglob("*.bin")) and not (tmp_path / "run").exists()
    [[chunk, *_]] = json.loads((tmp_path / "cache" / "train_file" / "train-00000.json").read_text())["chunks"]
    lines = capsys.readouterr().err
    assert f"train {chunk[-1]['blocks']} blocks, {chunk[-1]['tokens']:,} tokens of 200 documents\n" in lines
    assert " tokens of 20 documents\n            0 sentences longer than a block were split; left out: 0 empty" in lines
    with pytest.raises(InputError, match="machine='3/2' must look like 2/4"):
        pack.main([*flags, "--machine", "3/2"])
    with pytest.raises(InputError, match="token_cache is not set"):
        pack.main(["--config", preset])


def test_the_preset_of_a_shuffled_cache_is_evaluated_on_other_text(preset, tmp_path):
    text = write_text(tmp_path / "a.txt", make_documents(20, seed=0))
    values = yaml.safe_load(Path(preset).read_text()) | {"token_cache": "away", "shuffle_window": 64}
    (tmp_path / "preset.yaml").write_text(yaml.safe_dump(values))
    for others in (["--token_cache", ""], ["--train_file", text]):
        argv = ["--model_name_or_path", str(tmp_path), *others]
        (args, _), _ = pretraining.read_arguments(argv, "", preset=evaluate.preset_of(argv))
        pretraining.check_data(args)
        assert args.shuffle_window == 1 and not args.token_cache


def test_a_preset_of_a_shuffled_cache_that_is_not_here_is_evaluated_on_its_text(preset, tmp_path):
    train(preset, "--output_dir", tmp_path / "model")
    values = yaml.safe_load(Path(preset).read_text()) | {"token_cache": str(tmp_path / "away"), "shuffle_window": 64}
    (tmp_path / "shuffled.yaml").write_text(yaml.safe_dump(values))
    argv = ["--config", str(tmp_path / "shuffled.yaml"), "--model_name_or_path", str(tmp_path / "model")]
    metrics, _ = evaluate.main(argv)
    assert metrics["eval_loss"] == evaluate.main([*argv[2:], "--config", str(preset)])[0]["eval_loss"]


@pytest.mark.parametrize("size", ["base", "large"])
def test_the_full_recipe_packs_first(preset, root, tmp_path, monkeypatch, size):
    """With an empty --token_cache, it trains from text: the same blocks and masks, without packing."""
    values = yaml.safe_load((root / f"presets/mlm/roberta_{size}.yaml").read_text())
    values |= yaml.safe_load(Path(preset).read_text()) | {"eval_strategy": "no", "dataloader_num_workers": 0}
    del values["corpus"]
    Path(preset).write_text(yaml.safe_dump(values))
    monkeypatch.chdir(tmp_path)
    from_text = train(preset, "--token_cache", "")
    assert not Path("runs").exists()
    packed = train(preset, "--output_dir", "packed")
    assert list(Path("runs/roberta_tokens").rglob("*.bin"))
    shutil.rmtree("runs")
    measured, _ = evaluate.main(["--model_name_or_path", "packed"])  # where the cache is not
    assert not Path("runs").exists()
    assert measured["eval_loss"] == packed["metrics"]["eval_loss"]
    assert packed["digest"] == from_text["digest"] and losses(packed) == losses(from_text)


def test_a_saved_preset_repeats_the_run(preset, tmp_path):
    first = train(preset, "--mask_count", "exact", "--output_dir", tmp_path / "a")
    again = train(tmp_path / "a" / "preset.yaml", "--output_dir", tmp_path / "b")
    assert losses(again) == losses(first) and len(losses(first)) == 4
    assert again["metrics"]["eval_loss"] == first["metrics"]["eval_loss"]
    assert again["resolved_args"] == {**first["resolved_args"], "output_dir": str(tmp_path / "b")}


@pytest.mark.parametrize("micro_batch", [8, 2])
def test_the_golden_curve(preset, tmp_path, root, micro_batch, request):
    """Fifty steps compared with a committed curve, to detect any change of blocks, masks, initial weights, loss or
    optimizer.

    Hashes of blocks and masks are equal; losses have a tolerance for other processors' summation order.
    """
    flags = ["--max_steps", 50, "--learning_rate", "2e-3", "--warmup_steps", 10, "--save_strategy", "steps"]
    record = train(preset, *flags, "--save_steps", 50, "--per_device_train_batch_size", micro_batch)
    log = json.loads((tmp_path / "run" / "checkpoint-50" / "trainer_state.json").read_text())["log_history"]
    curve = {
        "loss": [entry["loss"] for entry in log if "loss" in entry],
        "grad_norm": [entry["grad_norm"] for entry in log if "loss" in entry],
        "digest": [entry["digest"] for entry in log if "loss" in entry],
        "eval_loss": record["metrics"]["eval_loss"],
    }
    path = root / "tests" / "golden_loss.json"
    if request.config.getoption("--write-golden") and micro_batch == 8:
        path.write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")
    golden = json.loads(path.read_text(encoding="utf-8"))
    assert len(curve["loss"]) == 50 and curve["digest"] == golden["digest"]
    assert golden["loss"][0] - golden["loss"][-1] > 0.5  # the model learns
    for name in ("loss", "grad_norm", "eval_loss"):
        assert curve[name] == pytest.approx(golden[name], rel=1e-4), name


def test_transformers_own_collator_drops_in(preset, tmp_path, monkeypatch):
    """It makes the training masks; held-out examples keep ours, as the loss of constant weights shows."""
    own = train(preset, "--learning_rate", 0, "--output_dir", tmp_path / "own")
    monkeypatch.setattr(pretraining, "build_collator", lambda *args: DataCollatorForLanguageModeling(args[-1], seed=0))
    stock = train(preset, "--learning_rate", 0, "--output_dir", tmp_path / "stock")
    assert stock["metrics"]["eval_loss"] == pytest.approx(own["metrics"]["eval_loss"], rel=1e-6)
    assert stock["blocks_digest"] == own["blocks_digest"] and stock["digest"] != own["digest"]
    assert len(losses(stock)) == 4 and losses(stock) != losses(own)


def test_a_run_depends_neither_on_micro_batch_nor_on_data_worker(preset, tmp_path):
    """The same blocks, masks and gradients give the same curve; the validation loss is equal for any evaluation
    batch."""
    whole = train(preset, "--output_dir", tmp_path / "a")
    small = train(
        preset, "--output_dir", tmp_path / "b", "--per_device_train_batch_size", 2, "--dataloader_num_workers", 1
    )
    assert losses(small) == pytest.approx(losses(whole), rel=1e-5)
    assert small["metrics"]["eval_loss"] == pytest.approx(whole["metrics"]["eval_loss"], rel=1e-5)
    assert small["tokens_seen"] == whole["tokens_seen"]
    batches = train(preset, "--output_dir", tmp_path / "c", "--per_device_eval_batch_size", 3)
    assert batches["metrics"]["eval_loss"] == pytest.approx(whole["metrics"]["eval_loss"], rel=1e-6)


def test_validation_loss_agrees_with_the_definition(preset, tmp_path, tokenizer):
    """Computed by the stock class on the saved checkpoint, block by block."""
    record = train(preset, "--output_dir", tmp_path / "a")
    (args, training_args), _ = train_mlm.read_arguments(["--config", preset])
    _, reader = pretraining.build_readers(args, training_args, resolve(pretraining.read_corpus(args)), tokenizer)
    blocks, _ = pretraining.validation_set(args, reader, tokenizer)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "a").eval()
    total = predicted = 0
    for example in masking.fixed_masks(blocks, tokenizer):
        labels = torch.from_numpy(example["labels"])[None]
        with torch.no_grad():
            logits = model(torch.from_numpy(example["input_ids"])[None]).logits
        total += torch.nn.functional.cross_entropy(
            logits[labels != -100], labels[labels != -100], reduction="sum"
        ).item()
        predicted += int((labels != -100).sum())
    assert record["metrics"]["eval_loss"] == pytest.approx(total / predicted, rel=1e-5)


def test_sources_are_measured_apart_and_a_checkpoint_alone(preset, tmp_path, tokenizer, capsys):
    """The record has the loss of each source; `tools/evaluate.py` gives the same losses for the checkpoint, and writes
    no file."""
    sources = []
    for name, documents, seed in (("animals", 160, 1), ("others", 80, 2)):
        write_text(tmp_path / f"{name}.txt", make_documents(documents, seed=seed))
        sources.append({"name": name, "files": str(tmp_path / f"{name}.txt"), "size_gb": documents})
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(yaml.safe_dump({"validation_share": 0.5, "sources": sources}))
    corpus = ["--corpus", mixture, "--per_device_eval_batch_size", 2]
    record = train(preset, *corpus, "--max_steps", 2)
    by_source, capsys_out = record["metrics_by_source"], capsys.readouterr().out
    assert list(by_source) == ["animals", "others"] and "    animals  " in capsys_out
    blocks = [measured["blocks"] for measured in by_source.values()]
    assert min(blocks) > 1 and by_source["animals"]["loss"] != by_source["others"]["loss"]
    for name in ("tokens", "unigram_entropy", "documents"):  # of the source, not of all
        assert by_source["animals"][name] != by_source["others"][name], name
    assert record["metrics"]["eval_documents"] == sum(measured["documents"] for measured in by_source.values())
    of_sources = [measured["loss"] for measured in by_source.values()]
    assert min(of_sources) < record["metrics"]["eval_loss"] < max(of_sources)

    before = sorted(path.name for path in tmp_path.rglob("*"))
    flags = ["--config", preset, *map(str, corpus), "--output_dir", str(tmp_path / "run")]
    metrics, again = evaluate.main([*flags, "--model_name_or_path", str(tmp_path / "run")])
    assert again == by_source
    assert metrics["eval_loss"] == record["metrics"]["eval_loss"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    shown = capsys.readouterr().out.splitlines()
    wanted = [line for line in capsys_out.splitlines() if line.startswith(("validation loss", "    "))]
    assert len(wanted) == 3 and [line for line in shown if line.startswith(("validation loss", "    "))] == wanted
    with pytest.raises(InputError, match="model_name_or_path is not set"):
        evaluate.main(flags)
    with pytest.raises(InputError, match=r"absent is not a folder with preset.yaml: name a run's folder"):
        evaluate.main(["--use_cpu", "--model_name_or_path", str(tmp_path / "absent")])
    with pytest.raises(
        InputError, match="train_file only: name a run's folder, --corpus, or text as both --train_file and --valid"
    ):
        evaluate.main(["--model_name_or_path", str(tmp_path / "run"), "--validation_file", "a.txt"])


def test_a_checkpoint_is_measured_in_the_precision_of_its_run(preset, tmp_path):
    record = train(preset, "--bf16", "true", "--max_steps", 2)
    metrics, _ = evaluate.main(["--config", preset, "--bf16", "true", "--model_name_or_path", str(tmp_path / "run")])
    assert metrics["eval_loss"] == record["metrics"]["eval_loss"]


def test_a_checkpoint_is_measured_with_its_own_tokenizer(preset, tmp_path, capsys):
    """Even if the preset names another one of equal size; one that is named on the command line is used, with a
    warning."""
    other = tmp_path / "other"
    tokenizer_training.train_tokenizer(make_documents(300, seed=9)[::-1], vocab_size=400).save_pretrained(other)
    record, run = train(preset, "--max_steps", 2), tmp_path / "run"
    values = yaml.safe_load(Path(preset).read_text()) | {"tokenizer_name": str(other)}
    Path(preset).write_text(yaml.safe_dump(values))
    argv = ["--config", preset, "--model_name_or_path", str(run)]
    capsys.readouterr()
    metrics, _ = evaluate.main(argv)
    assert metrics["eval_loss"] == record["metrics"]["eval_loss"] and "differs" not in capsys.readouterr().err
    metrics, _ = evaluate.main([*argv, f"--tokenizer-name={other}"])
    assert f"tokenizer_name='{other}' differs from the tokenizer of" in capsys.readouterr().err
    (args, _), _ = train_mlm.read_arguments([*argv, f"--tokenizer-name={other}"])
    assert pretraining.load_tokenizer(args).name_or_path == str(other)  # to train on; the same warning
    assert f"tokenizer_name='{other}' differs from the tokenizer of" in capsys.readouterr().err
    assert metrics["eval_loss"] != record["metrics"]["eval_loss"]
    # a checkpoint without tokenizer: its config alone gives transformers a tokenizer of special tokens
    for path in (*run.glob("tokenizer*"), *run.glob("vocab*"), *run.glob("merges*"), *run.glob("special*")):
        path.unlink()
    with pytest.raises(InputError, match=r"run' has no tokenizer for a masked LM; .*: --tokenizer_name NAME"):
        evaluate.main(argv)


def test_training_starts_from_a_checkpoint(preset, tmp_path):
    first = train(preset, "--output_dir", tmp_path / "a", "--max_steps", 30, "--learning_rate", "5e-3")
    second = train(
        preset, "--output_dir", tmp_path / "b", "--model_name_or_path", tmp_path / "a", "--learning_rate", "1e-9"
    )
    assert second["metrics"]["eval_loss"] == pytest.approx(first["metrics"]["eval_loss"], rel=1e-4)


def test_the_last_step_is_measured_once(preset, tmp_path):
    for every, steps in (("2", [2, 4]), ("3", [3, 4])):
        flags = ["--eval_strategy", "steps", "--eval_steps", every, "--output_dir", str(tmp_path / every)]
        record = train(preset, *flags)
        assert [step for step, _ in record["loss_at_steps"]["validation"]] == steps
        assert record["metrics"]["eval_loss"] == record["loss_at_steps"]["validation"][-1][1]


def test_a_run_too_short_for_its_log(preset, capsys):
    """The last step is always logged, so that the curve has a point."""
    record = train(preset, "--logging_steps", 100)
    assert record["tokens_per_second"] > 0 and [step for step, _ in record["loss_at_steps"]["train"]] == [1, 4]
    paths = re.findall(r"^(?:checkpoint|run record|loss curve)  (/.*)$", capsys.readouterr().out, re.M)
    assert len(paths) == 3 and all(Path(path).exists() for path in paths)


def test_a_folder_with_nothing_but_a_preset_is_used(preset, tmp_path):
    """A run that fails in its first step leaves such a folder."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "preset.yaml").write_text("max_steps: 1")
    assert train(preset)["steps"] == 4


def test_a_bare_command_is_the_demonstration(tmp_path, monkeypatch):
    """With small values and no --config, the run uses docstrings as its text, and trains a tokenizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(docstrings, "MAX_BYTES", 600_000)
    monkeypatch.setattr(train_mlm, "resolve_path", Path)  # the repository may have a tokenizer of its demonstration
    argv = ["--output_dir", "run", "--max_steps", "3", "--max_eval_samples", "64", "--logging_steps", "1", "--use_cpu"]
    run = Forked(lambda: train_mlm.main([*argv, "--disable_tqdm", "true"]), tmp_path / "log")
    assert run.end() == 0, run.log
    assert "This is the demonstration" in run.log and train_mlm.FULL_RECIPE in run.log
    made = tmp_path / "tokenizer" / "docstrings"
    assert (made / "tokenizer.json").exists()
    assert json.loads((made / "tokenizer_config.json").read_text())["model_max_length"] == 64
    assert run.log.count("<mask>") >= 3 and "the unigram entropy of" in run.log


def test_other_text_is_no_demonstration(tmp_path, train_file):
    """No tokenizer is trained on other text; a missing one is an error."""
    with pytest.raises(InputError, match="no tokenizer at tokenizer_name='absent'"):
        train_mlm.main(
            ["--train_file", train_file, "--tokenizer_name", "absent", "--output_dir", str(tmp_path / "run")]
        )


# Bad input


BAD = {
    "unknown key": (["--config", "{bad_key}"], ["bad_key.yaml", "unknown key 'max_stepz'"]),
    "missing file": (["--train_file", "absent.txt"], ["'absent.txt' does not exist"]),
    "no readable file": (["--train_file", "{unreadable}"], ["has no file that can be read", "unreadable"]),
    "column": (["--text_column", "body"], ["has no column 'body'", "['text']"]),
    "empty corpus": (["--train_file", "{empty}"], ["is empty"]),
    "vocabularies": (["--config_overrides", "vocab_size=500"], ["vocab_size=500", "the tokenizer 400"]),
    "output folder": (["--output_dir", "{full}"], ["already holds", "--output_dir"]),
    "output file": (["--output_dir", "{text}"], ["File exists"]),
    "batch": (["--global_batch_size", "12"], ["global_batch_size=12", "8 or 16"]),
    "micro-batch": (
        ["--per_device_train_batch_size", "32"],
        ["per_device_train_batch_size=32", "above global_batch_size=8", "--global_batch_size 32", "_batch_size 8"],
    ),
    "accumulation": (
        ["--gradient_accumulation_steps", "3"],
        ["gradient_accumulation_steps=3", "--global_batch_size 24"],
    ),
    "length": (["--max_seq_length", "128"], ["max_seq_length=128", "64 positions"]),
    "short": (["--max_seq_length", "4"], ["max_seq_length=4"]),
    "probability": (["--mlm_probability", "15"], ["mlm_probability=15.0", "0.15"]),
    "validation alone": (["--config", "presets/mlm/roberta_tiny.yaml", "--validation_file", "{text}"], ["train_file"]),
    "resume": (["--resume_from_checkpoint", "true"], ["resume_from_checkpoint=true cannot be used"]),
    "example": (["--fill_mask_examples", "No blank here."], ["'No blank here.'", "must have one <mask>"]),
    "weights": (["--model_name_or_path", "{full}"], ["model_name_or_path="]),
    "limit": (["--max_train_samples", "0"], ["max_train_samples=0"]),
    "window of blocks": (["--shuffle_window", "4096"], ["shuffle_window=4096", "--token_cache"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_training(case, preset, tmp_path, monkeypatch):
    paths = {name: tmp_path / name for name in ("unreadable", "full", "empty", "text", "bad_key")}
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable" / "a.doc").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").write_text("x")
    for name, content in {"empty": "\n\n", "text": "A text.\n"}.items():
        paths[name] = tmp_path / f"{name}.txt"
        paths[name].write_text(content)
    paths["bad_key"] = tmp_path / "bad_key.yaml"
    paths["bad_key"].write_text(Path(preset).read_text() + "max_stepz: 3\n")
    argv, named = BAD[case]
    monkeypatch.setattr(MlmTrainer, "train", lambda *a, **k: pytest.fail("it trained"))
    with pytest.raises(InputError) as error:
        train_mlm.main(["--config", preset, *(arg.format(**paths) for arg in argv)])
    assert all(word in str(error.value) for word in named), error.value
    left = {path.name for path in (tmp_path / "run").glob("*")}
    assert left <= {".lock", ".file_hashes.json"}
    assert (tmp_path / "full" / "model.safetensors").read_text() == "x"


def test_bad_text_met_by_a_data_worker_is_one_line(preset, tmp_path):
    path = tmp_path / "late.jsonl"
    lines = [json.dumps({"text": text}) for text in make_documents(3500, seed=1, sentences=(30, 30))]
    path.write_bytes("\n".join(lines).encode() + b'\n{"text": "Caf\xe9"}\n')
    assert path.stat().st_size > 4 << 20  # beyond what the check before training reads
    flags = ["--train_file", path, "--max_steps", "9", "--dataloader_num_workers", "1"]
    run = Forked(lambda: train(preset, *flags), tmp_path / "log")
    assert run.end() == InputError.exit_code, run.log
    assert run.log.splitlines()[-1].startswith(
        f"error: source 'train_file': cannot read {path}: line 3501 is not UTF-8"
    )


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(preset, tmp_path):
    with pytest.raises(RunError, match=r"loss of step 3 is not finite \(blocks 16 to 23\).*checkpoint-2") as error:
        train(preset, "--learning_rate", "1e30", "--warmup_steps", 2, "--save_strategy", "steps", "--save_steps", 1)
    assert error.value.exit_code == 1
    assert checkpoint.newest_first(tmp_path / "run")[0].name == "checkpoint-2"
    assert not (tmp_path / "run" / "run_record.json").exists()


def test_a_finished_run_is_not_written_over(preset, tmp_path):
    train(preset)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(InputError, match=r"already holds a finished run \(make push.*--max_steps"):
        train(preset)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()} == before


def test_batch_arithmetic():
    assert batch.accumulation_steps(8192, 32, 8) == 32
    said = r"global_batch_size=8192 is not divisible by 3 processes x 32 per device = 96; use 8160 or 8256"
    with pytest.raises(InputError, match=said):
        batch.accumulation_steps(8192, 32, 3)
    with pytest.raises(InputError, match=r"above global_batch_size=8: --global_batch_size 64, or .*batch_size 4$"):
        batch.accumulation_steps(8, 32, 2)
    with pytest.raises(InputError, match=r"--global_batch_size 16, or fewer processes$"):
        batch.accumulation_steps(8, 1, 16)
    # the demonstration's batch on one process, eight, and three; of the paper's, each process has enough
    assert [batch.shared_micro_batch(32, 32, processes) for processes in (1, 8)] == [32, 4]
    assert batch.shared_micro_batch(8192, 32, 8) == batch.shared_micro_batch(None, 32, 8) == 32
    with pytest.raises(InputError, match="global_batch_size=32 is not divisible by 3 processes"):
        batch.shared_micro_batch(32, 32, 3)
    assert batch.shared_micro_batch(8, 32, 2) == 32  # above the batch by itself: an error, as on one process


def test_loss_at_steps_is_thinned_and_keeps_the_last():
    history = [{"step": step, "loss": float(step)} for step in range(1, 1004)] + [{"step": 1003, "eval_loss": 2.0}]
    points = records.loss_at_steps(history, "loss", at_most=200)
    assert len(points) <= 201 and points[-1] == [1003, 1003.0] and points[0] == [6, 6.0]
    assert (
        records.loss_at_steps(history, "eval_loss") == [[1003, 2.0]] and records.loss_at_steps(history, "absent") == []
    )
    assert records.loss_at_steps(history[:5], "loss") == [[s, float(s)] for s in range(1, 6)]


def test_two_processes_give_the_curve_of_one_process(preset, tmp_path):
    """Both processes read the same stream, and each takes its share of a step."""
    single = train(preset, "--output_dir", tmp_path / "single")
    ranks = forked_ranks(lambda rank: train(preset, "--per_device_train_batch_size", "2"), tmp_path)
    end_well(ranks)
    two = json.loads((tmp_path / "run" / "run_record.json").read_text())
    assert losses(two) == pytest.approx(losses(single), rel=1e-5) and len(losses(two)) == 4
    assert two["metrics"]["eval_loss"] == pytest.approx(single["metrics"]["eval_loss"], rel=1e-5)
    assert two["tokens_seen"] == single["tokens_seen"]
    assert ["checkpoint  " in rank.log for rank in ranks] == [True, False]


def test_held_out_text_of_a_single_document_has_no_error(preset, tmp_path, capsys):
    """A standard error over documents needs two; the log line omits it."""
    held_out = " ".join(make_documents(60, seed=7)).replace("\n", " ")
    (tmp_path / "one.txt").write_text(held_out, encoding="utf-8")
    flags = ["--validation_file", tmp_path / "one.txt", "--per_device_eval_batch_size", 2]
    record = train(preset, *flags, "--max_steps", 2, "--eval_strategy", "steps", "--eval_steps", 1)
    assert record["metrics"]["eval_documents"] == 1 and "eval_loss_error" not in record["metrics"]
    assert "±" not in capsys.readouterr().out
