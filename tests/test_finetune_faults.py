"""What damages a fine-tuning: the same run, or a line; and what its fingerprint covers."""

import copy
import itertools
import json
import random
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import second_of_training
from official_files import write_glue
from tokenizers import processors

import finetune_glue
import finetune_race
import finetune_squad
import train_mlm
from roberta_recipe import durable
from roberta_recipe.errors import InputError, RunError, Stopped
from roberta_recipe.model import heads
from roberta_recipe.publishing import hub, plots
from roberta_recipe.tasks import protocol, summaries
from roberta_recipe.training import finetune_trainer
from roberta_recipe.training.finetune_trainer import FinetuneTrainer

RUN = "lr0.001-batch8-seed1"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue")
    write_glue(folder, rows={"train": 16, "dev": 9, "test": 7})
    return folder


@pytest.fixture
def flags(root, data_dir, model_dir, tmp_path, monkeypatch):
    """A function that makes a command line of a second's training from further flags."""
    monkeypatch.setattr(plots, "plot_runs", lambda *_: None)  # two seconds each

    def of(*others):
        own = {"data_dir": data_dir, "model_name_or_path": model_dir, "output_dir": tmp_path / "rte"}
        own |= {"global_batch_size": 8, "per_device_train_batch_size": 8, "max_steps": 4, "other_rows": True}
        return second_of_training(root / "presets/glue/rte.yaml", *others, **own)

    return of


@pytest.fixture
def finished(flags, tmp_path):
    """The folder of a finished run with test scores."""
    finetune_glue.main(flags("--do_predict"))
    return tmp_path / "rte" / RUN


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_flipped_bit_of_a_finished_run_is_refused_or_changes_nothing(flags, finished, tmp_path):
    """Every file that a second start, a push or the ledger reads: no other score comes out."""
    draw, refused, names = random.Random(3), [], ["run_record.json", "test_scores.npz"]
    names += ["best/validation_scores.npy", "best/manifest.json", "best/model.safetensors", "best/config.json"]
    before = finetune_glue.main(flags("--do_predict"))
    for name in names:
        whole = (finished / name).read_bytes()
        for _ in range(6):
            flip(finished / name, draw.randrange(8 * len(whole)))
            try:
                after = finetune_glue.main(flags("--do_predict"))
                assert after == before, name
                hub.prepare("me/rte", tmp_path / "rte")
            except InputError as error:
                assert "\n" not in str(error) and str(finished) in str(error)
                refused.append(name)
            (finished / name).write_bytes(whole)
    assert set(refused) == set(names) and len(refused) > 24
    flip(tmp_path / "rte" / "summary.json", 900)
    with pytest.raises(InputError, match=r"summary.json: it is not what was written \(checksum\)|summary.json is not"):
        hub.prepare("me/rte", tmp_path / "rte")


def test_a_changed_digit_of_a_record_does_not_reach_the_median(flags, finished):
    path = finished / "run_record.json"
    score = json.loads(path.read_text())["metrics"]["accuracy"]
    path.write_text(path.read_text().replace(f'"accuracy": {score}', '"accuracy": 0.99'))
    with pytest.raises(InputError, match=r"run_record.json: it is not what was written \(checksum\); copy it again"):
        finetune_glue.main(flags())
    values = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in values.items() if name != durable.SEAL}))
    with pytest.raises(InputError, match=r"has no 'checksum': it was written by another version"):
        finetune_glue.main(flags())


def test_scores_of_a_run_whose_weights_are_dropped_stay_checked(flags, finished):
    summary = finetune_glue.main(flags("--do_predict", "--keep", "none"))
    best = finished / "best"
    assert {path.name for path in best.iterdir()} == {"validation_scores.npy", "manifest.json"}
    assert finetune_glue.main(flags("--do_predict", "--keep", "none"))["settings"] == summary["settings"]
    assert durable.fault(best) is None and "is missing" in durable.fault(best, needed=("model.safetensors",))
    flip(best / "validation_scores.npy", 8 * 140)
    with pytest.raises(InputError, match=r"best cannot be used: validation_scores.npy is not what was written .*Move"):
        finetune_glue.main(flags("--do_predict", "--keep", "none"))


def test_damaged_test_scores_are_named(flags, finished):
    for content in (b"", b"PK", (finished / "test_scores.npz").read_bytes()[:-30]):
        (finished / "test_scores.npz").write_bytes(content)
        with pytest.raises(InputError, match=r"test_scores.npz is damaged \(.*\): move it away to score the"):
            finetune_glue.main(flags("--do_predict"))
    (finished / "test_scores.npz").unlink()
    finetune_glue.main(flags("--do_predict"))
    assert (finished / "test_scores.npz").is_file()


def test_a_best_epoch_of_another_run_is_refused(flags, finished, tmp_path):
    """Whole by its manifest, but not what this run picked."""
    scores = np.load(finished / "best" / "validation_scores.npy")
    shutil.copytree(finished / "best", tmp_path / "other")
    (tmp_path / "other" / "manifest.json").unlink()
    np.save(tmp_path / "other" / "validation_scores.npy", -scores)
    durable.move_into_place(tmp_path / "other", finished / "best")
    (finished / "test_scores.npz").unlink()
    with pytest.raises(InputError, match=r"best is not the epoch that this run picked: its accuracy is 0\.\d+"):
        finetune_glue.main(flags("--do_predict"))


def test_a_damaged_best_epoch_of_a_run_that_is_resumed(flags, tmp_path, monkeypatch):
    """The run is refused at its end, unless a later epoch was better and so replaced the damaged one."""
    saving = ["--save_strategy", "steps", "--save_steps", 1, "--eval_strategy", "steps", "--eval_steps", 1]
    step = FinetuneTrainer.training_step
    for better in (False, True):  # the first epoch is the best, or the last
        calls = itertools.count(0 if better else 100, 1 if better else -1)
        scored = {}  # by the scores, so that the same epoch scores the same

        def measure(*args, scored=scored, calls=calls):
            key = args[3].tobytes()
            return {"accuracy": scored.setdefault(key, next(calls) if key not in scored else 0) / 1000}

        def killed(self, *args, **kwargs):
            if self.state.global_step == 2:
                raise RunError("killed")
            return step(self, *args, **kwargs)

        monkeypatch.setattr(finetune_glue, "measure", measure)
        with monkeypatch.context() as patch:
            patch.setattr(FinetuneTrainer, "training_step", killed)
            with pytest.raises(RunError, match="killed"):
                finetune_glue.main(flags(*saving, "--output_dir", tmp_path / str(better)))
        flip(tmp_path / str(better) / RUN / "best" / "model.safetensors", -100)
        again = flags(*saving, "--output_dir", tmp_path / str(better))
        if better:
            finetune_glue.main(again)
        else:
            with pytest.raises(InputError, match=r"best cannot be used: model.safetensors is not what was written"):
                finetune_glue.main(again)


def test_a_best_epoch_that_a_resumed_run_does_not_reach_again(flags, tmp_path, monkeypatch):
    """Killed behind a best epoch that no checkpoint has, and resumed with another rounding: the checkpoint's counts."""
    coming, given = iter([0.2, 0.3, 0.9]), {}

    def measure(task, form, split, scores, *_):
        key = scores.tobytes()
        given[key] = given[key] if key in given else next(coming)
        return {"accuracy": given[key]}

    def step_7_fails(self, *args, **kwargs):
        if self.state.global_step == 6:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    step = FinetuneTrainer.training_step
    monkeypatch.setattr(finetune_glue, "measure", measure)
    monkeypatch.setattr(FinetuneTrainer, "training_step", step_7_fails)
    saving = ["--max_steps", 8, "--eval_strategy", "steps", "--eval_steps", 2, "--save_strategy", "steps"]
    saving += ["--save_steps", 4]
    with pytest.raises(Stopped):
        finetune_glue.main(flags(*saving))
    monkeypatch.setattr(FinetuneTrainer, "training_step", step)
    run, coming = tmp_path / "rte" / RUN, iter([0.1, 0.2])
    given = {key: value for key, value in given.items() if value == 0.3}
    summary = finetune_glue.main(flags(*saving))
    record = durable.read_json(run / "run_record.json")
    assert (record["best_step"], summary["settings"][0]["median"]) == (4, 0.3)
    assert {path.name for path in run.iterdir() if path.is_dir()} == {"best"}


def test_scores_that_are_not_finite_end_the_run(flags, tmp_path, monkeypatch):
    """argmax of NaN is 0, which was printed as an accuracy of one half."""
    monkeypatch.setattr(
        finetune_glue,
        "classification_loss",
        lambda model, batch: (
            model(**{k: v for k, v in batch.items() if k != "labels"}).logits.sum(),
            torch.full((len(batch["labels"]), 2), torch.nan),
        ),
    )
    with pytest.raises(
        RunError, match=r"seed 1: the model's scores after step 2 are not finite; nothing of it was saved"
    ):
        finetune_glue.main(flags())
    assert not (tmp_path / "rte" / RUN / "run_record.json").exists()


def test_a_loss_that_is_not_finite_ends_the_run(flags, tmp_path, monkeypatch):
    loss_of = finetune_glue.classification_loss
    calls = []

    def lost(model, batch):
        total, logits = loss_of(model, batch)
        calls.append(model.training)
        return (total * torch.nan if calls.count(True) == 3 else total), logits

    monkeypatch.setattr(finetune_glue, "classification_loss", lost)
    with pytest.raises(RunError, match=r"seed 1: the loss of step 3 is not finite; nothing of it was saved"):
        finetune_glue.main(flags())
    assert not (tmp_path / "rte" / RUN / "run_record.json").exists()


def test_the_fingerprint_covers_each_file_that_is_read(flags, data_dir, model_dir, tmp_path, monkeypatch):
    """One thing is changed at a time, in the middle of its file; each gives another fingerprint."""
    for path in (data_dir, Path(model_dir)):
        shutil.copytree(path, tmp_path / "inputs" / path.name)
    data, model = (tmp_path / "inputs" / path.name for path in (data_dir, Path(model_dir)))
    seen = {}
    monkeypatch.setattr(protocol, "run_all", lambda argv, runs, job, *others: seen.update(job=job) or [])
    monkeypatch.setattr(protocol, "finish", lambda *args: None)
    monkeypatch.setattr(summaries, "table", lambda *args: "")
    monkeypatch.setattr(finetune_glue, "write_submission", lambda *args: None)

    def inputs():
        finetune_glue.main(flags("--do_predict", "--data_dir", data, "--model_name_or_path", model))
        return {**seen["job"].inputs, "tests": seen["job"].test_rows}

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
    """What its vocabulary alone does not tell: special tokens around texts, padding, the side that is cut."""
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


@pytest.mark.parametrize("script", [train_mlm, finetune_glue, finetune_squad, finetune_race])
def test_fsdp_is_refused(script, preset, flags, model_dir, tmp_path, monkeypatch):
    """By the launcher's word, which no flag of the script shows."""
    tuning = ["--model_name_or_path", model_dir, "--use_cpu", "--output_dir", str(tmp_path / "out")]
    argv = {train_mlm: ["--config", preset], finetune_glue: flags()}.get(script, tuning)
    with monkeypatch.context() as patch, pytest.raises(InputError, match="accelerate was told to use FSDP"):
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        patch.setattr(heads, "check_length", lambda *_: None)  # the presets' lengths are those of large models
        script.main(argv)


def test_two_fine_tunings_in_one_folder(flags, tmp_path):
    """The second is told who holds the folder, before it writes anything."""
    out = tmp_path / "rte"
    out.mkdir()
    hold = "import sys; from roberta_recipe import lock; lock.take(sys.argv[1]); print('held', flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=rf"rte is in use by process {other.pid} on"):
            finetune_glue.main(flags())
        assert [path.name for path in out.iterdir()] == [".lock"]
    finally:
        other.communicate("\n", timeout=30)
    finetune_glue.main(flags())
    assert (out / "summary.json").is_file() and finetune_trainer.WEIGHTS in {
        path.name for path in (out / RUN / "best").iterdir()
    }
