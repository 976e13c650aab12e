"""Lock of a run's folder; no process outlives its launcher."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import Forked, wait_for_step, wait_until

import train_mlm
from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.training import checkpoint

LONG = ["--max_steps", "100000", "--save_strategy", "steps", "--save_steps", "2"]


def in_child(folder, log):
    """A child that locks `folder`, forks a worker, and sleeps."""

    def hold():
        durable.lock(folder)
        worker = os.fork()
        if not worker:
            time.sleep(100)
            os._exit(0)
        Path(f"{log}.worker").write_text(str(worker))
        time.sleep(100)

    child = Forked(hold, log)
    wait_until(lambda: Path(f"{log}.worker").exists() and Path(f"{log}.worker").read_text())
    return child, int(Path(f"{log}.worker").read_text())


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / ".lock").mkdir()  # rights do not hold for root
    with pytest.raises(InputError, match=rf"{tmp_path} cannot be written \(Is a directory\); name another folder"):
        durable.lock(tmp_path)


def test_the_second_is_told_who_works_there_and_a_dead_owner_holds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub_token", "hf_aVerySecretTokenOfNobody"])
    folder = tmp_path / "folder"
    folder.mkdir()
    child, worker = in_child(folder, tmp_path / "log")
    host = re.escape(os.uname().nodename)
    with pytest.raises(InputError, match=rf"folder is in use by process {child.pid} on {host} since \d"):
        durable.lock(folder)
    durable.lock(folder, ".another")  # another name is another lock
    child.kill()
    child.end()
    assert psutil.pid_exists(worker)  # it has inherited the lock file's descriptor
    durable.lock(folder)
    durable.lock(folder)  # held already
    os.kill(worker, signal.SIGKILL)
    held = (folder / ".lock").read_text()
    assert held.startswith(f"process {os.getpid()} on ") and held.endswith(" (train.py --hub_token ***)\n")


def test_of_two_starts_at_once_in_a_new_folder_one_runs(preset, tmp_path):
    def start(seed):
        argv = ["--config", preset, "--seed", seed, "--max_steps", "8", "--save_strategy", "steps", "--save_steps", "2"]
        return Forked(lambda: train_mlm.main([*argv, "--output_dir", str(tmp_path / "new")]), tmp_path / f"log{seed}")

    started = [start("1"), start("2")]
    codes = [process.end() for process in started]
    assert sorted(codes) == [0, 2], [process.log for process in started]
    winner, loser = sorted(started, key=lambda process: codes[started.index(process)])
    assert loser.log.startswith("error: ") and f"in use by process {winner.pid} on" in loser.log
    record = durable.read_json(tmp_path / "new" / "run_record.json")
    states = [durable.read_json(path / "recipe_state.json") for path in checkpoint.newest_first(tmp_path / "new")]
    seeds = {state["fingerprint"]["seed"] for state in states}
    assert seeds == {record["resolved_args"]["seed"]} == {1 + started.index(winner)} and len(states) == 4


def test_a_run_ends_with_its_launcher_and_saves_its_step(preset, tmp_path, root):
    """`kill -9` of accelerate launch: the training process saves its step, exits, and releases the lock."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu"]
    command += [root / "train_mlm.py", "--config", preset, "--dataloader_num_workers", "1", *LONG]
    with open(tmp_path / "log.txt", "wb") as log:
        launcher = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, cwd=tmp_path)
    try:
        wait_for_step(launcher, tmp_path / "log.txt", 4)
    finally:
        children = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
        launcher.wait()
        _, alive = psutil.wait_procs(children, timeout=60)
        for process in alive:
            process.kill()
    text = (tmp_path / "log.txt").read_text()
    assert not alive and len(children) >= 2, text
    assert "SIGTERM: saving step" in text and "\nstopped by SIGTERM: step" in text
    newest = checkpoint.newest_first(tmp_path / "run")[0]
    assert durable.damage(newest) is None
    durable.lock(tmp_path / "run")
