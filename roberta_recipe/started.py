"""How this process was started: by a launcher or by hand, with which command and which environment."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import psutil

# torchrun sets the first for what it starts, `accelerate launch` the second; nobody sets them by hand
_SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND")
_parent = os.getppid()  # at the beginning, when it lives


def by_launcher() -> bool:
    """Whether torchrun or `accelerate launch` started this process."""
    return any(name in os.environ for name in _SET_BY_LAUNCHERS)


def launcher() -> int | None:
    """The process of the launcher, on Linux; else None."""
    return _parent if sys.platform == "linux" and by_launcher() else None


def launcher_is_gone() -> bool:
    """Whether the launcher that started this process has ended, if only its main thread so far; False where none did,
    or none is known."""
    if launcher() is None:
        return False
    try:
        return os.getppid() != _parent or psutil.Process(_parent).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def continue_with() -> str:
    """A sentence with the command that this process, or its launcher, was started with."""
    return f"Continue with: {_command}"


def threads_are_the_users() -> bool:
    """Whether the user has set OMP_NUM_THREADS, which launchers set to 1 for what they start; where the system does not
    tell, a 1 is taken for a launcher's."""
    if "OMP_NUM_THREADS" not in os.environ or not by_launcher():
        return "OMP_NUM_THREADS" in os.environ
    if os.environ["OMP_NUM_THREADS"] != "1":
        return True
    return any(entry.startswith(b"OMP_NUM_THREADS=") for entry in _of_process(launcher(), "environ"))


def _of_process(pid: int | None, name: str) -> list[bytes]:
    """The entries of a file of Linux's /proc that are separated by null bytes; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []


def _as_typed(words: list[str]) -> str:
    """A command as a user types it: a launcher without the interpreter in front of it, programs without the folder in
    which the shell finds them, or relative to the current folder."""
    if Path(words[0]).name.startswith("python") and Path((*words, "")[1]).name in ("accelerate", "torchrun"):
        words = words[1:]
    program = Path(words[0])
    if program.is_absolute() and shutil.which(program.name) == str(program):
        words = [program.name, *words[1:]]
    elif program.is_relative_to(Path.cwd()):
        words = [str(program.relative_to(Path.cwd())), *words[1:]]
    return shlex.join(words)


def _words() -> list[str]:
    """The command line of the launcher or, without one, of this process; of systems without /proc too."""
    try:
        return (by_launcher() and psutil.Process(_parent).cmdline()) or sys.orig_argv
    except psutil.Error:
        return sys.orig_argv


_command = _as_typed(_words())
