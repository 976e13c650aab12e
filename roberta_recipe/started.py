"""How this process was started: by a launcher or by hand, and the command that continues its run."""

import contextlib
import functools
import os
import shlex
import sys
from pathlib import Path

import psutil

# set by torchrun and by `accelerate launch` for the processes that they start
_SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND")


@functools.cache
def _parent() -> int:
    """The parent process at the first call, which `exit_on_error` makes while it lives; workers inherit the answer."""
    return os.getppid()


def launcher() -> int | None:
    """The PID of torchrun or `accelerate launch`; None for a process that was started by hand."""
    return _parent() if any(name in os.environ for name in _SET_BY_LAUNCHERS) else None


def threads_are_the_users() -> bool:
    """Whether the user has set OMP_NUM_THREADS, which launchers set to 1 for the processes that they start."""
    if os.environ.get("OMP_NUM_THREADS") != "1" or launcher() is None:
        return "OMP_NUM_THREADS" in os.environ
    with contextlib.suppress(psutil.Error):
        return "OMP_NUM_THREADS" in psutil.Process(launcher()).environ()
    return False


@functools.cache
def continue_with() -> str:
    """A sentence with the command that continues a run: the launcher's or, without one, this process's."""
    return f"Continue with: {shlex.join(_words())}"


def _words() -> list[str]:
    with contextlib.suppress(psutil.Error):
        words = (launcher() and psutil.Process(launcher()).cmdline()) or sys.orig_argv
        return words[1:] if Path((*words, "")[1]).name in ("accelerate", "torchrun") else words  # without "python"
    return sys.orig_argv
