"""Damage to fine-tuning runs: the same run, or an error message; coverage of the fingerprint."""

import copy
import json
import random
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from glue_runs import data_dir, flags  # noqa: F401
from tokenizers import processors

import finetune_glue
import finetune_ner
import finetune_race
import finetune_squad
import train_mlm
from roberta_recipe import durable
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.model import weights
from roberta_recipe.publishing import hub, plots
from roberta_recipe.tasks import protocol, summaries

RUN = "lr0.001-batch8-seed1"


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr(plots, "plot_runs", lambda *_: None)  # two seconds each


@pytest.fixture
def finished(flags, tmp_path):
    """A finished run with test scores."""
    finetune_glue.main(flags("rte", "--do_predict"))
    return tmp_path / "glue" / "rte" / RUN


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_flipped_bit_of_a_finished_run_is_refused_or_changes_nothing(flags, finished, tmp_path):
    """In every file that a second start, a push or the ledger reads: never another score."""
    draw, refused, names = random.Random(3), [], ["run_record.json", "test_scores.npz"]
    names += ["best/validation_scores.npy", "best/manifest.json", "best/model.safetensors", "best/config.json"]
    before = finetune_glue.main(flags("rte", "--do_predict"))
    for name in names:
        whole = (finished / name).read_bytes()
        for _ in range(6):
            flip(finished / name, draw.randrange(8 * len(whole)))
            try:
                after = finetune_glue.main(flags("rte", "--do_predict"))
                assert after == before, name
                hub.prepare("me/rte", tmp_path / "glue" / "rte")
            except InputError as error:
                assert "\n" not in str(error) and str(finished) in str(error)
                refused.append(name)
            (finished / name).write_bytes(whole)
    assert set(refused) == set(names) and len(refused) > 24
    flip(tmp_path / "glue" / "rte" / "summary.json", 900)
    with pytest.raises(InputError, match=r"summary.json: its content does not match its checksum|summary.json is not"):
        hub.prepare("me/rte", tmp_path / "glue" / "rte")


def test_a_changed_digit_of_a_record_does_not_reach_the_median(flags, finished):
    path = finished / "run_record.json"
    score = json.loads(path.read_text())["metrics"]["accuracy"]
    path.write_text(path.read_text().replace(f'"accuracy": {score}', '"accuracy": 0.99'))
    with pytest.raises(InputError, match=r"run_record.json is damaged .*does not match its checksum\); copy it again"):
        finetune_glue.main(flags("rte"))
    values = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in values.items() if name != durable.SEAL}))
    with pytest.raises(InputError, match=r"has no 'checksum': it was written by another version"):
        finetune_glue.main(flags("rte"))


def test_scores_of_a_run_whose_weights_are_dropped_stay_checked(flags, finished):
    summary = finetune_glue.main(flags("rte", "--do_predict", "--keep", "none"))
    best = finished / "best"
    assert {path.name for path in best.iterdir()} == {"validation_scores.npy", "manifest.json"}
    assert finetune_glue.main(flags("rte", "--do_predict", "--keep", "none"))["settings"] == summary["settings"]
    assert durable.damage(best) is None and "is missing" in durable.damage(best, needed=("model.safetensors",))
    flip(best / "validation_scores.npy", 8 * 140)
    with pytest.raises(InputError, match=r"best cannot be used: validation_scores.npy does not match .*Move"):
        finetune_glue.main(flags("rte", "--do_predict", "--keep", "none"))


def test_damaged_test_scores_are_named(flags, finished, capfd):
    for content in (b"", b"PK", (finished / "test_scores.npz").read_bytes()[:-30]):
        (finished / "test_scores.npz").write_bytes(content)
        with pytest.raises(InputError, match=r"test_scores.npz is damaged \(.*\): move it away to score the"):
            finetune_glue.main(flags("rte", "--do_predict"))
    (finished / "test_scores.npz").unlink()
    finetune_glue.main(flags("rte", "--do_predict"))
    assert (finished / "test_scores.npz").is_file()
    assert "Predict     seed 1" in capfd.readouterr().err


def test_a_best_epoch_of_another_run_is_refused(flags, finished, tmp_path):
    """It matches its manifest, but was not selected by this run."""
    scores = np.load(finished / "best" / "validation_scores.npy")
    shutil.copytree(finished / "best", tmp_path / "other")
    (tmp_path / "other" / "manifest.json").unlink()
    np.save(tmp_path / "other" / "validation_scores.npy", -scores)
    durable.move_into_place(tmp_path / "other", finished / "best")
    (finished / "test_scores.npz").unlink()
    with pytest.raises(InputError, match=r"best is not this run's best epoch: its accuracy is 0\.\d+"):
        finetune_glue.main(flags("rte", "--do_predict"))


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (True, "the loss of step 3 is not finite"),
        (False, "the model's scores after step 3 are not finite"),  # argmax of NaN is 0, an accuracy of one half
    ],
)
def test_numbers_that_are_not_finite_end_the_run(flags, tmp_path, monkeypatch, training, said):
    loss_of, calls = finetune_glue.classification_loss, []

    def lost(model, batch):
        total, logits = loss_of(model, batch)
        calls.append(model.training)
        if model.training == training and calls.count(True) == 3:
            return total * torch.nan, logits * torch.nan
        return total, logits

    monkeypatch.setattr(finetune_glue, "classification_loss", lost)
    with pytest.raises(RunError, match=f"seed 1: {said}; the step was not saved"):
        finetune_glue.main(flags("rte"))
    assert not (tmp_path / "glue" / "rte" / RUN / "run_record.json").exists()


def test_the_fingerprint_covers_each_file_that_is_read(flags, data_dir, model_dir, tmp_path, monkeypatch):
    """Each change in the middle of a file gives another fingerprint."""
    for path in (data_dir, Path(model_dir)):
        shutil.copytree(path, tmp_path / "inputs" / path.name)
    data, model = (tmp_path / "inputs" / path.name for path in (data_dir, Path(model_dir)))
    seen = {}
    monkeypatch.setattr(protocol, "run_all", lambda argv, runs, job, *others: seen.update(job=job) or [])
    monkeypatch.setattr(protocol, "finish", lambda *args: None)
    monkeypatch.setattr(summaries, "table", lambda *args: "")
    monkeypatch.setattr(finetune_glue, "write_submission", lambda *args: None)

    def inputs():
        finetune_glue.main(flags("rte", "--do_predict", "--data_dir", data, "--model_name_or_path", model))
        return {**seen["job"].inputs, "tests": seen["job"].test_hash}

    def change(path, old, new):
        text = path.read_text()
        assert old in text, path
        path.write_text(text.replace(old, new, 1))
        return path, text

    before = inputs()
    assert inputs() == before
    row = (data / "RTE/test.tsv").read_text().splitlines()[4].split("\t")[1]
    for name, path, old, new in (
        ("data", data / "RTE/train.tsv", "\tnot_entailment", "\tentailment"),
        ("data", data / "RTE/dev.tsv", "\tnot_entailment", "\tentailment"),
        ("tests", data / "RTE/test.tsv", row, f"{row} too"),
        ("weights", model / "config.json", '"layer_norm_eps": 1e-05', '"layer_norm_eps": 1e-12'),
    ):
        path, text = change(path, old, new)
        try:
            changed = [key for key, value in inputs().items() if value != before[key]]
            assert changed == [name], (path, changed)
        finally:
            path.write_text(text)
    flip(model / "model.safetensors", 4 * (model / "model.safetensors").stat().st_size)
    assert [key for key, value in inputs().items() if value != before[key]] == ["weights"]


def test_the_fingerprint_covers_the_tokenizer(tokenizer, model_dir):
    """Beyond its vocabulary: special tokens of its template, padding, truncation side."""
    args = types.SimpleNamespace(model_name_or_path=model_dir)

    def of(**changes):
        other = copy.deepcopy(tokenizer)
        for name, value in changes.items():
            setattr(other, name, value)
        return protocol.inputs_fingerprint(args, other, [])["tokenizer"]

    around = copy.deepcopy(tokenizer)
    around.backend_tokenizer.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 0))
    found = [of(), of(truncation_side="left"), of(pad_token="</s>"), of(mask_token="<unk>")]
    found.append(protocol.inputs_fingerprint(args, around, [])["tokenizer"])
    assert of() == found[0] and len(set(found)) == len(found)


@pytest.mark.parametrize("script", [train_mlm, finetune_glue, finetune_squad, finetune_race, finetune_ner])
def test_fsdp_is_refused(script, preset, flags, model_dir, tmp_path, monkeypatch):
    """Enabled by the launcher, without a flag of the script."""
    tuning = ["--model_name_or_path", model_dir, "--use_cpu", "--output_dir", str(tmp_path / "out")]
    argv = {train_mlm: ["--config", preset], finetune_glue: flags("rte")}.get(script, tuning)
    argv += ["--train_file", "my.conll"] if script is finetune_ner else []
    with monkeypatch.context() as patch, pytest.raises(InputError, match="accelerate is configured to use FSDP"):
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        patch.setattr(weights, "max_positions", lambda *_: None)  # the presets' lengths are those of large models
        script.main(argv)
