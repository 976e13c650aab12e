"""`--report_to`: each start and each seed is a named run with its metrics by step. A recorder replaces the tracker;
installed ones (`pip install wandb tensorboard trackio mlflow`) are tested too, offline."""

import json
import sqlite3
import sys
import types
from pathlib import Path

import pytest
from glue_runs import data_dir, flags  # noqa: F401
from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

import finetune_glue
import train_mlm
from roberta_recipe.errors import InputError

SEEDS = ["rte/lr0.001-batch8-seed1", "rte/lr0.001-batch8-seed2"]


@pytest.fixture
def runs(flags, preset, tmp_path):  # noqa: F811
    """A function: train with a tracker, stopped after a step and resumed, then fine-tune on two seeds."""

    def run(tracker):
        steps = ["--save_strategy", "steps", "--save_steps", "2", "--eval_strategy", "steps", "--eval_steps", "2"]
        argv = ["--config", preset, "--report_to", tracker, *steps]
        train_mlm.main([*argv, "--max_train_minutes", "0.00001"])
        train_mlm.main(argv)
        finetune_glue.main([*flags("rte"), "--report_to", tracker, "--seeds", "1", "2", "--do_predict", "true"])

    return run


class Recorder(TrainerCallback):
    """A stand-in for WandbCallback: it logs to the run of its module, and opens one if there is none."""

    def on_train_begin(self, args, state, control, **kwargs):
        if not wandb.run:
            wandb.run = types.SimpleNamespace(name=args.run_name, logged=[], finish=lambda: setattr(wandb, "run", None))
            wandb.runs.append(wandb.run)

    def on_log(self, args, state, control, logs=None, **kwargs):
        wandb.run.logged.append((state.global_step, set(logs)))


wandb = types.SimpleNamespace(run=None, runs=[])


def test_a_seed_is_a_run_of_its_own(runs, monkeypatch):
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "wandb", Recorder)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    runs("wandb")
    assert [run.name for run in wandb.runs] == ["run", "run", *SEEDS] and wandb.run is None
    steps = [sorted({step for step, _ in run.logged}) for run in wandb.runs]
    assert steps == [[1], [2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    metrics = [set().union(*(names for _, names in run.logged)) for run in wandb.runs]
    assert {"loss", "learning_rate", "tokens_seen", "eval_perplexity"} < metrics[1]
    assert metrics[2] == metrics[3] > {"loss", "eval_accuracy"}


def test_an_error_of_a_tracker_is_one_line(preset, monkeypatch):
    module = {"__name__": "mlflow.store"}
    exec("class StoreError(Exception): pass\ndef begin(*_, **__): raise StoreError('use a database')", module)
    monkeypatch.setattr(Recorder, "on_train_begin", module["begin"])
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "wandb", Recorder)
    with pytest.raises(InputError, match="report_to: StoreError: use a database"):
        train_mlm.main(["--config", preset, "--report_to", "wandb"])


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for path in sorted(folder.rglob("*.tfevents.*"), key=lambda path: path.stat().st_mtime):
        events = EventAccumulator(str(path)).Reload()
        yield path.parents[2].name, {event.step for event in events.Scalars("train/loss")}


def read_wandb(folder):
    for path in sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime):
        stored = path.read_bytes()
        yield next(name for name in (*SEEDS, "run") if name.encode() in stored), b"train/loss" in stored


def read_trackio(folder):
    with sqlite3.connect(next(folder.rglob("huggingface.db"))) as store:
        rows = store.execute("SELECT run_name, metrics FROM metrics ORDER BY id").fetchall()
    logged = [(name, json.loads(metrics)) for name, metrics in rows]
    for run in dict.fromkeys(name for name, _ in logged):
        yield run, {entry["train/global_step"] for name, entry in logged if name == run and "train/loss" in entry}


def read_mlflow(folder):
    with sqlite3.connect(folder / "mlflow.db") as store:
        runs = store.execute("SELECT run_uuid, name, status FROM runs ORDER BY start_time").fetchall()
        for run, name, status in runs:
            assert status == "FINISHED"
            logged = store.execute("SELECT step FROM metrics WHERE run_uuid = ? AND key = 'loss'", (run,))
            yield name, {step for (step,) in logged}


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_an_installed_tracker_has_every_run(runs, tracker, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    pytest.importorskip(tracker)  # trackio reads its folder at the import
    runs(tracker)
    read = {"tensorboard": read_tensorboard, "wandb": read_wandb, "trackio": read_trackio, "mlflow": read_mlflow}
    found = list(read[tracker](Path(tmp_path)))
    seeds, every = SEEDS, {1, 2, 3, 4, 5, 6}
    if tracker == "tensorboard":  # named by their folders
        seeds = [Path(name).name for name in SEEDS]
    resumed = [("run", {1, 2, 3, 4})] if tracker == "trackio" else [("run", {1}), ("run", {2, 3, 4})]
    expected = [*resumed, *((name, every) for name in seeds)]
    if tracker == "wandb":  # its files are not for reading
        expected = [(name, True) for name, _ in expected]
    assert found == expected
