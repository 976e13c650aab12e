"""How this process was started: by a launcher or by hand, with which command and which environment."""

import contextlib
import functools
import os
import shlex
import shutil
import sys
from pathlib import Path

import psutil

# torchrun sets the first for what it starts, `accelerate launch` the second; nobody sets them by hand
_SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND")


@functools.cache
def _parent() -> int:
    """The parent process at the first call, which `exit_on_error` makes while it lives; workers inherit the answer."""
    return os.getppid()


def by_launcher() -> bool:
    """Whether torchrun or `accelerate launch` started this process."""
    return any(name in os.environ for name in _SET_BY_LAUNCHERS)


def launcher() -> int | None:
    """The process of the launcher; None where there is none."""
    return _parent() if by_launcher() else None


def threads_are_the_users() -> bool:
    """Whether the user has set OMP_NUM_THREADS, which launchers set to 1 for what they start; where the system does not
    say, a 1 is taken for a launcher's."""
    if os.environ.get("OMP_NUM_THREADS") != "1" or not by_launcher():
        return "OMP_NUM_THREADS" in os.environ
    with contextlib.suppress(psutil.Error):
        return "OMP_NUM_THREADS" in psutil.Process(_parent()).environ()
    return False


@functools.cache
def continue_with() -> str:
    """A sentence with the command that continues a run: the launcher's or, without one, this process's, as a user types
    it (a launcher without its interpreter, programs as the shell finds them or relative to the current folder)."""
    words = _words()
    if Path(words[0]).name.startswith("python") and Path((*words, "")[1]).name in ("accelerate", "torchrun"):
        words = words[1:]
    program = Path(words[0])
    if program.is_absolute() and shutil.which(program.name) == str(program):
        words = [program.name, *words[1:]]
    elif program.is_relative_to(Path.cwd()):
        words = [str(program.relative_to(Path.cwd())), *words[1:]]
    return f"Continue with: {shlex.join(words)}"


def _words() -> list[str]:
    with contextlib.suppress(psutil.Error):
        return (by_launcher() and psutil.Process(_parent()).cmdline()) or sys.orig_argv
    return sys.orig_argv
