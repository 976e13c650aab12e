"""The launcher of this process (torchrun, accelerate launch), and the command that resumes a run."""

import contextlib
import functools
import os
import shlex
import sys
from pathlib import Path

import psutil

_LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND")  # of torchrun and `accelerate launch`


@functools.cache
def launcher_pid() -> int | None:
    """The PID of torchrun or `accelerate launch`; None for a process that was started by hand. Cached at the first call
    (in `exit_on_error`), for data workers, and as `TrainingArguments` sets one of the variables for `torch_compile`."""
    return os.getppid() if any(name in os.environ for name in _LAUNCHER_VARIABLES) else None


def user_set_omp_threads() -> bool:
    """Whether OMP_NUM_THREADS comes from the user; launchers set it to 1 where it is unset."""
    if os.environ.get("OMP_NUM_THREADS") != "1" or launcher_pid() is None:
        return "OMP_NUM_THREADS" in os.environ
    with contextlib.suppress(psutil.Error):
        return "OMP_NUM_THREADS" in psutil.Process(launcher_pid()).environ()
    return False


@functools.cache
def resume_hint() -> str:
    """A sentence with the command that resumes a run: the launcher's or, without one, this process's."""
    words = sys.orig_argv
    with contextlib.suppress(psutil.Error):
        words = (launcher_pid() and psutil.Process(launcher_pid()).cmdline()) or words
        words = words[1:] if Path((*words, "")[1]).name in ("accelerate", "torchrun") else words  # without "python"
    return f"Continue with: {shlex.join(words)}"
