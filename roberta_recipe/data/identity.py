"""What a file is: a hash of its whole content, computed once and remembered by size, times and inode.

A run's text must be the text that its blocks, checkpoints and token cache were made from; a name does not say that, nor
do a file's ends.
"""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import fsspec

from roberta_recipe import durable
from roberta_recipe.data.readers import with_retries
from roberta_recipe.errors import InputError
from roberta_recipe.hardware import cpu_cores
from roberta_recipe.log import Bar

_MEMO = "file_hashes.json"
_BYTES_PER_READ = 1 << 20
_SHOWN_BYTES = 1 << 30  # so much to hash has a progress bar
_THREADS = 8  # a disk's worth; hashing frees Python's lock
_SETTLED_NS = 2_000_000_000  # file times may tick this slowly, so a younger file may change and keep its times
_ETAGS = ("ETag", "etag", "md5Hash", "mtime", "LastModified")  # of fsspec's file systems, the most telling first


class Identity(NamedTuple):
    """A file as it was found."""

    values: list[Any]  # name, size, SHA-256; of a file that cannot be read, name and reason
    stamp: list[int] | None  # size, times, inode; None for a remote file


def identify(paths: list[str]) -> dict[str, Identity]:
    """The identity of each file, hashed by a few threads where it is not remembered.

    Raises `InputError` for a file that changes meanwhile. A remote file is its URL and what its server says of its
    version; `hf://` names hold the revision.
    """
    memo = _read_memo()
    found = {path: _stamp(path) for path in paths}
    known = {
        path: Identity([os.path.basename(path), stamp[0], memo[os.path.abspath(path)][-1]], stamp)
        for path, stamp in found.items()
        if stamp and memo.get(os.path.abspath(path), [])[:-1] == stamp
    }
    new = [path for path in found if path not in known]
    size = sum(found[path][0] for path in new if found[path])
    now_ns = time.time_ns()
    with (
        Bar(total=size, unit="B", unit_scale=True, desc="Hashing files", disable=size < _SHOWN_BYTES or None) as bar,
        ThreadPoolExecutor(min(_THREADS, cpu_cores())) as threads,
    ):
        made = dict(zip(new, threads.map(lambda path: _identity(path, bar), new), strict=True))
    settled = {
        os.path.abspath(path): [*one.stamp, one.values[2]]
        for path, one in made.items()
        if one.stamp and len(one.values) == 3 and max(one.stamp[1:3]) < now_ns - _SETTLED_NS
    }
    if settled:
        _add_to_memo(settled)
    return {path: known.get(path) or made[path] for path in paths}


def is_unchanged(path: str, before: Identity) -> bool:
    """Whether a file still has the content that it had. Hashes it again only where its size, times or inode differ."""
    return _stamp(path) == before.stamp or identify([path])[path].values == before.values


def _stamp(path: str) -> list[int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _identity(path: str, bar: Bar) -> Identity:
    if "://" in path:
        return Identity(_remote_identity(path), None)
    before, digest, buffer = _stamp(path), hashlib.sha256(), bytearray(_BYTES_PER_READ)
    try:
        with open(path, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                bar.update(count)
    except OSError as error:
        return Identity([os.path.basename(path), error.strerror], before)
    if before is None or _stamp(path) != before:
        raise InputError(f"{path} changed while it was read; start again when it is complete")
    return Identity([os.path.basename(path), before[0], digest.hexdigest()[:32]], before)


def _remote_identity(path: str) -> list[Any]:
    """A URL, and the size and version that its server tells."""
    if path.startswith("hf://"):
        return [path]
    system, inner = fsspec.core.url_to_fs(path)
    info = with_retries(lambda: system.info(inner), path, f"looking up {path}")
    version = next((str(info[name]) for name in _ETAGS if info.get(name)), None)
    return [path, info.get("size"), version]


def _memo_path() -> Path:
    return Path(datasets.config.HF_DATASETS_CACHE) / "roberta_recipe" / _MEMO


def _read_memo() -> dict[str, list[Any]]:
    """[size, times, inode, hash] by absolute path; empty where there is none, or it is damaged."""
    try:
        return durable.read_sealed(_memo_path())["files"]
    except (OSError, ValueError, KeyError):
        return {}


def _add_to_memo(files: dict[str, list[Any]]) -> None:
    """Remember `files` beside what is remembered of files that still exist; without a file to keep it in, nothing."""
    kept = {path: value for path, value in _read_memo().items() if os.path.exists(path)}
    try:
        _memo_path().parent.mkdir(parents=True, exist_ok=True)
        durable.write_sealed(_memo_path(), {"files": kept | files})
    except OSError:
        pass  # a full or read-only disk: hashed again at the next start
