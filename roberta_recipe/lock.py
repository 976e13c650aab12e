"""Lock file of a folder, for one process at a time. The system frees it when its owner ends, however it ends."""

import fcntl
import os
import shlex
import sys
import time
from pathlib import Path

from roberta_recipe.credentials import redact
from roberta_recipe.errors import InputError
from roberta_recipe.log import logger

LOCK_NAME = ".lock"
_held: dict[Path, int] = {}  # file descriptors


class InUse(InputError):
    """Another process holds the lock."""


def take(folder: str | Path, name: str = LOCK_NAME) -> None:
    """Hold `<folder>/<name>` until this process ends (a POSIX lock, which forked workers do not inherit). Raises
    `InUse` that names the owner."""
    if (path := Path(folder, name).resolve()) in _held:  # opening and closing it again would free it
        return
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        time.sleep(0.1)  # the owner writes its line when it has the lock
        owner = path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
        os.close(file)
        raise InUse(f"{folder} is in use by {owner}; wait for it, end it, or name another folder") from None
    except OSError as error:  # a file system without locks
        logger.warning(f"{path} cannot be locked ({error.strerror}): start no second run in this folder")
    os.ftruncate(file, 0)
    owner = f"process {os.getpid()} on {os.uname().nodename} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    os.write(file, f"{owner} ({redact(shlex.join(sys.argv))})\n".encode())
    _held[path] = file


def release(folder: str | Path, name: str = LOCK_NAME) -> None:
    """Free a lock of `take` before the process ends."""
    if file := _held.pop(Path(folder, name).resolve(), None):
        os.close(file)
