"""One run at a time in a folder: the second start is told who works there.

The system frees a lock with the process that holds it, however that ends, so that nobody has to tell a dead owner's
lock from a living one's. The file stays, and says who held it last.
"""

import errno
import fcntl
import json
import os
import shlex
import sys
import time
from pathlib import Path

from roberta_recipe.credentials import redact
from roberta_recipe.errors import InputError
from roberta_recipe.log import logger

LOCK_NAME = ".lock"
_OWNER_READS = 10
_held: dict[tuple[int, int], int] = {}  # descriptor by the (device, inode) of a lock file that this process holds


class InUse(InputError):
    """Another process holds the lock."""


def _close_in_child() -> None:
    """A data worker that outlives its trainer for a moment must not keep the trainer's lock."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def take(folder: str | Path, name: str = LOCK_NAME) -> None:
    """Hold `<folder>/<name>` until this process ends; the folder must exist. A lock that it holds already stays.

    Raises `InUse` that names the owner where another process has it, and `InputError` where the file cannot be written.
    A file system without locks is warned of.
    """
    path = Path(folder, name)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); name another folder") from None
    found = os.fstat(descriptor)
    if (found.st_dev, found.st_ino) in _held:
        os.close(descriptor)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner, command = _owner(path)
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise InUse(
                f"{folder} is in use by {owner}; wait for it, end it, or name another folder{command}"
            ) from None
        logger.warning(f"{path} cannot be locked ({error.strerror}): start no second run in this folder")
        return
    _held[found.st_dev, found.st_ino] = descriptor
    owner = {"pid": os.getpid(), "host": os.uname().nodename, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps({**owner, "command": redact(shlex.join(sys.argv))}) + "\n").encode(), 0)


def release(folder: str | Path, name: str = LOCK_NAME) -> None:
    """Give back a lock of `take` before the process ends; a lock that is not held, or whose file is gone, is passed
    over."""
    try:
        found = os.stat(Path(folder, name))
    except OSError:
        return
    if (descriptor := _held.pop((found.st_dev, found.st_ino), None)) is not None:
        os.close(descriptor)


def _owner(path: Path) -> tuple[str, str]:
    """Who holds a lock and by which command, as its file says it, which is written a moment after the lock is taken."""
    for _ in range(_OWNER_READS):
        try:
            owner = json.loads(path.read_text(encoding="utf-8"))
            who = f"process {owner['pid']} on {owner['host']} since {owner['since']}"
            return who, f". Its command: {owner['command']}"
        except (OSError, ValueError, KeyError, TypeError):
            time.sleep(0.05)
    return "another process", ""
