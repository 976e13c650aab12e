"""`tools/launch.py`: the script's exit code, only its output, and Ctrl-C, which it forwards and waits for."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import run_python

SCRIPT = """
import os, signal, sys, time
def end(number, _):
    for other in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a terminal's comes again through torchrun
        signal.signal(other, signal.SIG_IGN)
    time.sleep(0.5)
    os.write(1, b"saved\\n")  # at once, as two processes write
    sys.exit({signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGHUP: 129}[number])
if sys.argv[1] == "wait":
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, end)
    os.write(1, b"ready\\n")
    time.sleep(60)
if sys.argv[1] in ("SIGKILL", "SIGTERM"):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
os.write(1, os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"].encode() + b"\\n")
os.write(2, b"error: said once\\n")
sys.exit(int(sys.argv[1]))
"""
TWO = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]


@pytest.fixture
def script(tmp_path, root):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def launch(script, root, *argv):
    return run_python(root / "tools" / "launch.py", *argv, cwd=script.parent, env={"PYTHONPATH": str(root)})


def start(script, root, *argv, before=()):
    """A launcher of a script that waits for a signal, in a session of its own."""
    command = [*before, sys.executable, root / "tools" / "launch.py", *argv, script, "wait"]
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if before else subprocess.STDOUT,  # nohup's own line
        text=True,
        start_new_session=True,
    )


def test_the_exit_code_and_the_lines_are_the_script_s(script, root):
    done = launch(script, root, *TWO, script, 75)
    assert done.returncode == 75, done.stderr
    assert set(done.stderr.splitlines()) == {"error: said once"}
    assert set(done.stdout.splitlines()) == {"600"}  # seconds to save in


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [("SIGKILL", 137, ", often out of memory (see the system log). C"), ("SIGTERM", 75, ". Checkpoints are complete")],
)
def test_a_process_that_was_killed_is_named(script, root, number, code, said):
    done = launch(script, root, script, number)
    assert done.returncode == code
    assert done.stderr.startswith(f"error: the process was killed by {number}{said}")
    assert len(done.stderr.splitlines()) == 1


def test_what_accelerate_refuses_is_one_line(script, root):
    done = launch(script, root, "--config_file", "nofile.yaml", script, "0")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: accelerate cannot launch this: ") and "nofile.yaml" in done.stderr


@pytest.mark.parametrize(
    ("number", "to_all", "processes", "code"),
    [
        (signal.SIGTERM, False, 1, 75),
        (signal.SIGTERM, False, "quiet", 75),
        (signal.SIGINT, False, 1, 130),
        (signal.SIGINT, True, 2, 130),
        (signal.SIGHUP, True, 2, 129),
    ],
    ids=[
        "SIGTERM to the launcher",
        "the same, -q",
        "SIGINT to the launcher",
        "Ctrl-C, two processes",
        "SIGHUP, two processes",
    ],
)
def test_a_signal_reaches_the_script_and_its_end_is_waited_for(script, root, number, to_all, processes, code):
    flags, processes = {2: TWO, "quiet": ["-q"]}.get(processes, []), 2 if processes == 2 else 1
    child = start(script, root, *flags)
    lines = [child.stdout.readline() for _ in range(processes)]
    time.sleep(0.2)
    (os.killpg if to_all else os.kill)(child.pid, number)
    lines += child.communicate(timeout=60)[0].splitlines(keepends=True)
    assert child.returncode == code and lines == ["ready\n"] * processes + ["saved\n"] * processes


def test_nohup_protects_from_the_end_of_a_session(script, root):
    child = start(script, root, *TWO, before=["nohup"])
    assert [child.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    os.killpg(child.pid, signal.SIGHUP)
    time.sleep(1)
    os.kill(child.pid, signal.SIGTERM)
    assert "saved\n" in child.communicate(timeout=60)[0] and child.returncode == 75
