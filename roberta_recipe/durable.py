"""Files that are whole or absent: written aside, made durable, renamed; and the check that they are still whole.

The paper trains for 500K steps (Table 9); a run of that length meets full disks, killed processes and flipped bits.
"""

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
SEAL = "checksum"  # key of a JSON file that carries a checksum of its other values


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint(values: Any) -> str:
    """A short hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def sync(path: str | Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aside_of(path: Path) -> Path:
    """Where this process writes what it then renames to `path`: another process's is another file."""
    return path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}.tmp")


def is_aside(name: str) -> bool:
    """Whether a file of this name is one of `aside_of`, of any machine and process."""
    return re.search(r"-\d+\.tmp$", name) is not None


def remove_left(folder: Path, of: str = "*") -> None:
    """Remove what processes of this machine were writing aside when they were killed; `of`: glob of what it was to be.
    Called as a process begins: one of its own number is of another that had it before."""
    for path in folder.glob(f"{of}.{glob.escape(os.uname().nodename)}-*.tmp"):
        pid = path.name.removesuffix(".tmp").rpartition("-")[2]
        if pid.isdigit() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_folder(path: Path, named: str = "output_dir") -> None:
    """Make a folder, and those around it. Raises `InputError` where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{named}={path} is a file; name a folder") from None
    except OSError as error:
        raise InputError(f"{named}={path} cannot be made: {error.strerror}") from None


def check_new_folder(path: Path, named: str = "output_dir") -> None:
    """Raise `InputError` where `path` is a file, or a folder that is not empty."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{named}={path} is a file; name a folder")
    if path.is_dir() and any(path.iterdir()):
        raise InputError(f"{named}={path} holds other files; name a new or an empty folder")


def check_output_file(path: Path, named: str = "output", fix: str = "make its folder, or name another file") -> None:
    """Raise `InputError` where the file `path` could not be written: asked before the work that gives its content."""
    if path.is_dir():
        raise InputError(f"{named}={path} is a folder; name a file")
    aside = aside_of(path)
    try:
        aside.touch()
        aside.unlink()
    except OSError as error:
        raise InputError(f"{named}={path} cannot be written: {error.strerror}; {fix}") from None


def write_json(path: str | Path, values: Any) -> None:
    """`values` as a JSON file, whole or not at all; an older file of that name stays until it is replaced."""
    write_text(path, json.dumps(values, indent=1, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """`text` as a file, whole or not at all; an older file of that name stays until it is replaced."""
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
    """`write_json` with a checksum of `values` beside them, in place of one that they have, for `read_sealed`."""
    values = {name: value for name, value in json.loads(json.dumps(values)).items() if name != SEAL}
    write_json(path, {**values, SEAL: fingerprint(values)})


def create_sealed(path: str | Path, values: dict[str, Any]) -> None:
    """`write_sealed` where there is no such file yet: of two processes that do it at the same time, one has written."""
    path = Path(path)
    aside = aside_of(path.with_name(f"{path.name}.new"))
    try:
        write_sealed(aside, values)
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)  # fails where `path` exists, which a rename does not
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        write_sealed(path, values)  # a file system without links
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def read_sealed(path: str | Path) -> dict[str, Any]:
    """What `write_sealed` wrote. Raises `ValueError` where it is not what was written, and `OSError`."""
    return unsealed(read_json(path))


def unsealed(values: Any) -> dict[str, Any]:
    """`values` as `write_sealed` got them. Raises `ValueError` where their checksum says that they are others."""
    if not isinstance(values, dict) or values.pop(SEAL, None) != fingerprint(values):
        raise ValueError("it is not what was written (checksum)")
    return values


def seal(folder: Path) -> None:
    """Make the files of a finished folder durable, then write their sizes and SHA-256 into its manifest."""
    paths = [path for path in sorted(folder.rglob("*")) if path != folder / MANIFEST]
    for path in (*paths, folder, folder.parent):
        sync(path)
    files = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, sha256(path)] for path in paths if path.is_file()
    }
    write_json(folder / MANIFEST, {"files": files})


def move_into_place(aside: Path, target: Path, replace: bool = True) -> None:
    """Seal the finished folder `aside` and rename it to `target`.

    An older folder of that name is deleted only when the new folder is on the disk; without `replace`, raises `OSError`
    where it is not empty.
    """
    seal(aside)
    if replace:
        shutil.rmtree(target, ignore_errors=True)
    os.replace(aside, target)
    sync(target.parent)


def move_files_into_place(aside: Path, target: Path) -> None:
    """Move the files of the finished folder `aside` into the existing folder `target`, with a manifest of them alone.

    While they are moved, `target` has no manifest: files of two folders never stand under one.
    """
    seal(aside)
    (target / MANIFEST).unlink(missing_ok=True)
    sync(target)
    for path in sorted(aside.iterdir(), key=lambda path: path.name == MANIFEST):  # it comes last
        path.replace(target / path.name)
    sync(target)
    aside.rmdir()


def keep_only(folder: str | Path, kept: str) -> None:
    """Delete the files of a folder that is sealed, except `kept`; the manifest then lists `kept` alone, as
    it was written. A folder whose manifest cannot be read stays as it is: `fault` says so to its next reader."""
    folder = Path(folder)
    others = [path for path in folder.glob("*") if path.name not in (kept, MANIFEST)]
    try:
        remaining = {kept: read_json(folder / MANIFEST)["files"][kept]}
    except (OSError, ValueError, KeyError, TypeError):
        return
    if others:
        write_json(folder / MANIFEST, {"files": remaining})  # first: what is deleted must not be missing
    for path in others:
        path.unlink()


def fault(
    folder: str | Path, needed: Collection[str] = (), only: Callable[[str], bool] = lambda name: True
) -> str | None:
    """What is wrong with a folder that is sealed, or with the files of it whose names are `only` these:
    None where it is as it was written, and has the files `needed`."""
    folder = Path(folder)
    try:
        files = {name: (size, digest) for name, (size, digest) in read_json(folder / MANIFEST)["files"].items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}: writing it was not finished, or it is not this recipe's"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__})"
    if absent := [name for name in needed if name not in files]:
        return f"{absent[0]} is missing"
    for name, (size, digest) in files.items():
        if not only(name):
            continue
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes of {size}"
            if sha256(path) != digest:
                return f"{name} is not what was written (SHA-256)"
        except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
            return f"{name} cannot be read ({error})"
    return None if files else f"its {MANIFEST} names no file"


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Where two fingerprints disagree: name -> "name was X, is Y"."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return {name: f"{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in names}
