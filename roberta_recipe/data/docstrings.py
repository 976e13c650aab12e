"""Embedded corpus of the demonstration: docstrings of the installed Python packages, so that it needs no network (in
place of the paper's five corpora, section 3.2)."""

import ast
import contextlib
import gc
import hashlib
import importlib.metadata
import re
import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from roberta_recipe import durable
from roberta_recipe.input_files import ROOT
from roberta_recipe.log import Bar

MAX_BYTES = 15_000_000  # about 4 M tokens: more than the demonstration reads in one pass
_WHEEL = "roberta-recipe"  # its name in pyproject.toml
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstring_file() -> Path:
    """A Parquet file with one docstring per row (column `text`), created on first use and cached by package versions.

    Distinct docstrings of the standard library, then of the packages in requirements.txt, by sorted path, up to
    `MAX_BYTES` of UTF-8; then sorted by hash, so that each chunk is a random sample.
    """
    distributions = _requirements()
    versions = [f"python=={sys.version}"] + [f"{d.metadata['Name']}=={d.version}" for d in distributions]
    fingerprint = hashlib.sha256("\n".join([*versions, str(MAX_BYTES), "by hash"]).encode()).hexdigest()[:16]
    path = Path(datasets.config.HF_DATASETS_CACHE) / "roberta_recipe" / f"docstrings-{fingerprint}.parquet"
    if path.exists():
        return path
    durable.make_folder(path.parent, "HF_HOME's cache")
    root, outside = Path(sysconfig.get_paths()["stdlib"]), {"site-packages", "dist-packages", "test", "tests"}
    files = sorted(path for path in root.rglob("*.py") if not outside & set(path.relative_to(root).parts))
    for distribution in distributions:
        files += sorted(Path(str(file.locate())) for file in distribution.files or [] if file.suffix == ".py")
    documents = _collect(files)
    documents.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    with durable.atomic_write(path) as temporary:
        pq.write_table(pa.table({"text": documents}), temporary, row_group_size=4096)
    return path


def _requirements() -> list[importlib.metadata.Distribution]:
    """The installed packages of requirements.txt or, in a wheel, of its metadata."""
    path = ROOT / "requirements.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else importlib.metadata.requires(_WHEEL)
    distributions = []
    for name in [found.group() for line in lines if (found := re.match(r"[\w.-]+", line))]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # optional, or for another platform
            distributions.append(importlib.metadata.distribution(name))
    return distributions


def _docstrings(path: Path) -> list[str]:
    """The docstrings of a source file, without indentation; none if it does not parse."""
    try:
        pending = [ast.parse(path.read_bytes())]
    except (SyntaxError, ValueError, OSError, RecursionError):
        return []
    found = []
    while pending:
        node = pending.pop()
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            found.append(text.encode("utf-8", "ignore").decode())  # without lone surrogates ("\ud800")
        for block in ("finalbody", "handlers", "orelse", "body"):  # popped last to first: source order
            pending.extend(reversed(getattr(node, block, ())))
    return found


def _collect(files: list[Path]) -> list[str]:
    """Distinct docstrings in file order, parsed by all cores, up to `MAX_BYTES`."""
    documents: dict[str, None] = {}
    # "spawn", as the caller may have threads (datasets, tokenizers), which do not survive a fork; without garbage
    # collection, which takes half of the time on syntax trees
    with (
        ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=gc.disable) as pool,
        Bar(total=MAX_BYTES, unit="B", unit_scale=True, desc="Collecting docstrings") as bar,
    ):
        for text in (text for found in pool.map(_docstrings, files, chunksize=64) for text in found):
            if text.strip() and text not in documents:
                documents[text] = None
                bar.update(len(text.encode()))
            if bar.n >= MAX_BYTES:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return list(documents)
