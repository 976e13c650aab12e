"""Files of a run: atomic writes with fsync, manifests of SHA-256 hashes that detect damage, and lock files."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import psutil

from roberta_recipe.credentials import redact
from roberta_recipe.errors import InputError
from roberta_recipe.log import logger

MANIFEST = "manifest.json"
LOCK_NAME = ".lock"
TEMPORARY = re.compile(r"-\d+\.tmp$")  # the end of a `temporary_path` of any machine and process
SEAL = "checksum"  # key of a JSON file: the hash of its other values
_held_locks: dict[Path, int] = {}  # file descriptors


def sha256(path: str | Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint(values: Any) -> str:
    """A short hash of JSON values, and of dates."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def sync(path: str | Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_path(path: Path) -> Path:
    """This process's temporary file or folder for an atomic write of `path`."""
    return path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}.tmp")


def remove_stale(folder: Path, targets: str = "*") -> None:
    """Remove temporary files (`targets`: glob of their final names) of dead processes of this machine. A leftover file
    with our PID belongs to a dead process: call this before writing."""
    for path in folder.glob(f"{targets}.{glob.escape(os.uname().nodename)}-*.tmp"):
        pid = path.name.removesuffix(".tmp").rpartition("-")[2]
        if pid.isdigit() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_folder(path: Path, named: str = "output_dir") -> None:
    """Create a folder and its parents. Raises `InputError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{named}={path} cannot be created ({error.strerror}); name another folder") from None


def check_new_folder(path: Path, named: str = "output_dir") -> None:
    """Raise `InputError` unless `path` is absent or an empty folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{named}={path} is a file, or holds other files; name a new or an empty folder")


def check_output_file(path: Path, named: str = "output", fix: str = "make its folder, or name another file") -> None:
    """Raise `InputError` if the file `path` cannot be written: a check before a long computation."""
    temporary = temporary_path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise InputError(f"{named}={path} cannot be written: {error.strerror}; {fix}") from None


def write_json(path: str | Path, values: Any) -> None:
    """Atomic write of a JSON file."""
    write_text(path, json.dumps(values, indent=1, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Atomic write of a text file."""
    with atomic_write(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary file to write; then fsync, rename to `path`, fsync of the folder. Removed on an exception."""
    temporary = temporary_path(path)
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write_sealed(path: str | Path, values: dict[str, Any]) -> None:
    """`write_json` with an added hash of `values`, for `read_sealed`."""
    values = {name: value for name, value in json.loads(json.dumps(values)).items() if name != SEAL}
    write_json(path, {**values, SEAL: fingerprint(values)})


def read_sealed(path: str | Path) -> dict[str, Any]:
    """The values of a `write_sealed` file. Raises `ValueError` for a damaged file, and `OSError`."""
    return unsealed(read_json(path))


def unsealed(values: Any) -> dict[str, Any]:
    """`values` without their hash. Raises `ValueError` where it does not match."""
    if not isinstance(values, dict) or values.pop(SEAL, None) != fingerprint(values):
        raise ValueError("its content does not match its checksum")
    return values


def seal(folder: Path) -> None:
    """fsync the files of a finished folder, write their sizes and SHA-256 into its manifest, and give them the mode of
    the manifest: safetensors 0.8 creates files with mode 0600, whatever the umask (safetensors#782)."""
    paths = [path for path in sorted(folder.rglob("*")) if path != folder / MANIFEST]
    for path in (*paths, folder, folder.parent):
        sync(path)
    names = {path: path.relative_to(folder).as_posix() for path in paths if path.is_file()}
    write_json(folder / MANIFEST, {"files": {names[path]: [path.stat().st_size, sha256(path)] for path in names}})
    for path in names:
        with contextlib.suppress(OSError):  # a file system without modes
            path.chmod((folder / MANIFEST).stat().st_mode)


def move_into_place(temporary: Path, target: Path, replace: bool = True) -> None:
    """Seal the finished folder `temporary` and rename it to `target`. `replace` deletes an older `target` first;
    without it, a non-empty `target` raises `InputError`."""
    seal(temporary)
    if replace:
        shutil.rmtree(target, ignore_errors=True)
    try:
        os.replace(temporary, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise InputError(f"{target} was written by another process; use it, or name another folder") from None
    sync(target.parent)


def move_files_into_place(temporary: Path, target: Path) -> None:
    """Move the files of the finished folder `temporary` into the existing folder `target`, the manifest last, so that
    a manifest never covers files of two folders."""
    seal(temporary)
    (target / MANIFEST).unlink(missing_ok=True)
    sync(target)
    for path in sorted(temporary.iterdir(), key=lambda path: path.name == MANIFEST):
        path.replace(target / path.name)
    sync(target)
    temporary.rmdir()


def keep_only(folder: str | Path, name: str) -> None:
    """Delete the files of a sealed folder except `name`; a damaged folder stays as it is."""
    folder = Path(folder)
    others = [path for path in folder.glob("*") if path.name not in (name, MANIFEST)]
    if others and not damage(folder, (name,), only=name.__eq__):
        # before the deletion, after which the old manifest would report missing files
        write_json(folder / MANIFEST, {"files": {name: read_json(folder / MANIFEST)["files"][name]}})
        for path in others:
            path.unlink()


def damage(folder: str | Path, needed: Collection[str] = (), only: Callable[[str], bool] | None = None) -> str | None:
    """Description of the first damaged or missing file of a sealed folder; None for an intact folder that has the files
    `needed`. `only`: a filter of the names to check."""
    folder = Path(folder)
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / MANIFEST).is_file():
        return f"it has no {MANIFEST}: its writing was interrupted, or another program wrote it"
    try:
        hashes = {name: expected for name, (_, expected) in read_json(folder / MANIFEST)["files"].items()}
        if absent := [name for name in needed if name not in hashes]:
            return f"{absent[0]} is missing"
        for name, expected in hashes.items():
            if (only is None or only(name)) and sha256(folder / name) != expected:
                return f"{name} does not match its SHA-256"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    return None if hashes else f"its {MANIFEST} lists no files"


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """The keys in which two fingerprints differ: key -> "key was X, is Y"."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return {name: f"{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in names}


def lock(folder: str | Path, name: str = LOCK_NAME) -> None:
    """Lock `<folder>/<name>` until this process ends, however it ends (a POSIX lock, which forked workers do not
    inherit). Raises `InputError` that names the owner."""
    if (path := Path(folder, name).resolve()) in _held_locks:  # opening and closing it again would release the lock
        return
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}); name another folder") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        time.sleep(0.1)  # the owner writes its line when it has the lock
        owner = path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
        os.close(file)
        raise InputError(f"{folder} is in use by {owner}; wait for it, end it, or name another folder") from None
    except OSError as error:  # a file system without locks
        logger.warning(f"{path} cannot be locked ({error.strerror}): start no second run in this folder")
    os.ftruncate(file, 0)
    owner = f"process {os.getpid()} on {os.uname().nodename} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    os.write(file, f"{owner} ({redact(shlex.join(sys.argv))})\n".encode(errors="backslashreplace"))
    _held_locks[path] = file
