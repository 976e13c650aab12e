"""Atomic writes of files and folders, with fsync, and manifests of SHA-256 hashes that find damage later."""

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil

from roberta_recipe.errors import InputError

MANIFEST = "manifest.json"
SEAL = "checksum"  # key of a JSON file: the hash of its other values


def sha256(path: str | Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint(values: Any) -> str:
    """A short hash of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def sync(path: str | Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aside_of(path: Path) -> Path:
    """The temporary file of this process that is renamed to `path`."""
    return path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}.tmp")


def is_aside(name: str) -> bool:
    """Whether a file name is a temporary one (`aside_of`) of any machine and process."""
    return re.search(r"-\d+\.tmp$", name) is not None


def remove_left(folder: Path, of: str = "*") -> None:
    """Remove temporary files (`of`: glob of their targets) of dead processes of this machine. A leftover file with our
    PID belongs to a dead process: call this before writing."""
    for path in folder.glob(f"{of}.{glob.escape(os.uname().nodename)}-*.tmp"):
        pid = path.name.removesuffix(".tmp").rpartition("-")[2]
        if pid.isdigit() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_folder(path: Path, named: str = "output_dir") -> None:
    """Make a folder and its parents. Raises `InputError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{named}={path} cannot be made ({error.strerror}); name another folder") from None


def check_new_folder(path: Path, named: str = "output_dir") -> None:
    """Raise `InputError` unless `path` is absent or an empty folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{named}={path} is a file, or holds other files; name a new or an empty folder")


def check_output_file(path: Path, named: str = "output", fix: str = "make its folder, or name another file") -> None:
    """Raise `InputError` where the file `path` cannot be written; for commands that work long before they write it."""
    aside = aside_of(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        aside.touch()
        aside.unlink()
    except OSError as error:
        raise InputError(f"{named}={path} cannot be written: {error.strerror}; {fix}") from None


def write_json(path: str | Path, values: Any) -> None:
    """Atomic write of a JSON file."""
    write_text(path, json.dumps(values, indent=1, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Atomic write of a text file: temporary file, fsync, rename, fsync of the folder."""
    path = Path(path)
    aside = aside_of(path)
    try:
        aside.write_text(text, encoding="utf-8")
        sync(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write_sealed(path: str | Path, values: dict[str, Any]) -> None:
    """`write_json` with a hash of `values` beside them, for `read_sealed`."""
    values = {name: value for name, value in json.loads(json.dumps(values)).items() if name != SEAL}
    write_json(path, {**values, SEAL: fingerprint(values)})


def create_sealed(path: str | Path, values: dict[str, Any]) -> None:
    """`write_sealed` of a file that does not exist yet: of two processes at the same time, one writes it."""
    path = Path(path)
    aside = aside_of(path.with_name(f"{path.name}.new"))
    try:
        write_sealed(aside, values)
        os.link(aside, path)  # fails where `path` exists, which a rename does not
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        write_sealed(path, values)  # a file system without hard links
    finally:
        aside.unlink(missing_ok=True)


def read_sealed(path: str | Path) -> dict[str, Any]:
    """What `write_sealed` wrote. Raises `ValueError` for a damaged file, and `OSError`."""
    return unsealed(read_json(path))


def unsealed(values: Any) -> dict[str, Any]:
    """`values` without their hash. Raises `ValueError` where it does not match."""
    if not isinstance(values, dict) or values.pop(SEAL, None) != fingerprint(values):
        raise ValueError("it is not what was written (checksum)")
    return values


def seal(folder: Path) -> None:
    """fsync the files of a finished folder, then write their sizes and SHA-256 into its manifest."""
    paths = [path for path in sorted(folder.rglob("*")) if path != folder / MANIFEST]
    for path in (*paths, folder, folder.parent):
        sync(path)
    files = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, sha256(path)] for path in paths if path.is_file()
    }
    write_json(folder / MANIFEST, {"files": files})


def move_into_place(aside: Path, target: Path, replace: bool = True) -> None:
    """Seal the finished folder `aside` and rename it to `target`, in place of an older folder; without `replace`,
    raises `OSError` where that is not empty."""
    seal(aside)
    if replace:
        shutil.rmtree(target, ignore_errors=True)
    os.replace(aside, target)
    sync(target.parent)


def move_files_into_place(aside: Path, target: Path) -> None:
    """Move the files of the finished folder `aside` into the existing folder `target`, the manifest last: files of two
    folders never stand under one manifest."""
    seal(aside)
    (target / MANIFEST).unlink(missing_ok=True)
    sync(target)
    for path in sorted(aside.iterdir(), key=lambda path: path.name == MANIFEST):
        path.replace(target / path.name)
    sync(target)
    aside.rmdir()


def keep_only(folder: str | Path, kept: str) -> None:
    """Delete the files of a sealed folder except `kept`; a damaged folder stays as it is."""
    folder = Path(folder)
    others = [path for path in folder.glob("*") if path.name not in (kept, MANIFEST)]
    if others and not fault(folder, (kept,), only=kept.__eq__):
        # the manifest comes first: deleted files must not be missing
        write_json(folder / MANIFEST, {"files": {kept: read_json(folder / MANIFEST)["files"][kept]}})
        for path in others:
            path.unlink()


def fault(folder: str | Path, needed: Collection[str] = (), only: Callable[[str], bool] | None = None) -> str | None:
    """What is damaged or missing in a sealed folder, among the files whose names are `only` these; None for a whole
    folder that has the files `needed`."""
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        return f"it has no {MANIFEST}: writing it was not finished, or it is not this recipe's"
    try:
        hashes = {name: written for name, (_, written) in read_json(folder / MANIFEST)["files"].items()}
        if absent := [name for name in needed if name not in hashes]:
            return f"{absent[0]} is missing"
        for name, written in hashes.items():
            if (only is None or only(name)) and sha256(folder / name) != written:
                return f"{name} is not what was written (SHA-256)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    return None if hashes else f"its {MANIFEST} names no file"


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """The keys in which two fingerprints differ: key -> "key was X, is Y"."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return {name: f"{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in names}
