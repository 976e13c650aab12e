"""ds_configs/slurm/two_nodes.sbatch with a stub of SLURM: two nodes on this machine."""

import json
import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from accelerate.commands.launch import launch_command_parser
from conftest import wait_for_step
from test_docs import clone

import train_mlm

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & echo $! >> launchers; done
for pid in $(tail -n 2 launchers); do wait $pid; code=$?; worst=$((code > worst ? code : worst)); done
exit $worst
"""
SCONTROL = """#!/bin/sh
case $1 in show) printf '127.0.0.1\\n127.0.0.2\\n' ;; *) echo "$@" >> requeued ;; esac
"""
NOTED = """#!/bin/sh
printf '%s\\n' "$@" > words$SLURM_NODEID
exit $EXIT_CODE
"""


@pytest.fixture
def sbatch(root, tmp_path):
    """A function: start the job in `tmp_path/job` with a `python` and flags; returns the process."""

    def start(python, *flags, **env):
        folder, programs = tmp_path / "job", tmp_path / "job/.venv/bin"
        programs.mkdir(parents=True, exist_ok=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", python)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        env = {
            **os.environ,
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NNODES": "2",
            **env,
        }
        with open(tmp_path / "log", "a") as log:
            job = ["bash", root / "ds_configs/slurm/two_nodes.sbatch", *map(str, flags)]
            return subprocess.Popen(job, cwd=folder, env=env, stdout=log, stderr=log)

    return start


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (1, False), (65, True), (75, True)])
def test_each_node_launches_its_ranks_and_some_exit_codes_queue_the_job_again(sbatch, tmp_path, code, is_requeued):
    job = sbatch(NOTED, "--config", "a file.yaml", SLURM_GPUS_ON_NODE="8", EXIT_CODE=str(code))
    assert job.wait() == code
    assert (tmp_path / "job/requeued").exists() == is_requeued
    for rank in (0, 1):
        launcher, *words = (tmp_path / f"job/words{rank}").read_text().splitlines()
        args = launch_command_parser().parse_args(words)
        assert launcher == "tools/launch.py" and (args.num_machines, args.num_processes) == (2, 16)
        assert (args.machine_rank, args.main_process_ip) == (rank, "127.0.0.1")
        assert (args.training_script, args.training_script_args) == ("train_mlm.py", ["--config", "a file.yaml"])


@pytest.mark.slow
def test_a_job_that_is_preempted_is_the_same_run(root, sbatch, preset, tmp_path):
    flags = ["--config", preset, "--max_steps", "100", "--per_device_train_batch_size", "4", "--output_dir"]
    whole = train_mlm.main([*flags, str(tmp_path / "whole")])
    folder, run = clone(root, tmp_path / "job"), tmp_path / "preempted"
    shutil.copy(root / "requirements.txt", folder)
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    job = sbatch(python, *flags, run, SLURM_GPUS_ON_NODE="1", OMP_NUM_THREADS="1")
    wait_for_step(job, tmp_path / "log", 3)
    launchers = [psutil.Process(int(pid)) for pid in (folder / "launchers").read_text().split()]
    for process in [*launchers, *(child for one in launchers for child in one.children(recursive=True))]:
        process.send_signal(signal.SIGTERM)  # as SLURM signals a step
    assert job.wait() == 75, (tmp_path / "log").read_text()
    assert (folder / "requeued").read_text().split() == ["requeue", str(os.getpid())]
    assert sbatch(python, *flags, run, SLURM_GPUS_ON_NODE="1", OMP_NUM_THREADS="1").wait() == 0
    record = json.loads((run / "run_record.json").read_text())
    assert (record["resumes"], record["steps"], record["digest"]) == (1, 100, whole["digest"])
