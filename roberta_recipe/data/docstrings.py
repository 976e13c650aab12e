"""The embedded corpus: docstrings of the installed Python, which need no network. They stand in the demonstration where
the paper has its five corpora (section 3.2)."""

import ast
import contextlib
import gc
import hashlib
import importlib.metadata
import itertools
import re
import sys
import sysconfig
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import ROOT
from roberta_recipe.log import Bar

MAX_BYTES = 15_000_000  # some 4 M tokens: more than the demonstration reads in one pass
_FILES_PER_TASK = 64
_WHEEL = "roberta-recipe"  # its name in pyproject.toml
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstring_file() -> Path:
    """A Parquet file (column `text`, a docstring a row), made on first use and cached by installed versions.

    The distinct docstrings of the standard library, then of the distributions in requirements.txt and their
    requirements, in the order of sorted paths, until `MAX_BYTES` of UTF-8; then sorted by hash, so that a chunk is a
    sample of all. A file whose content is not that of the JSON file beside it is made again.
    """
    distributions = _required_distributions()
    versions = [f"python=={sys.version}"] + [f"{d.metadata['Name']}=={d.version}" for d in distributions]
    fingerprint = hashlib.sha256("\n".join([*versions, str(MAX_BYTES), "by hash"]).encode()).hexdigest()[:16]
    path = Path(datasets.config.HF_DATASETS_CACHE) / "roberta_recipe" / f"docstrings-{fingerprint}.parquet"
    with contextlib.suppress(OSError, ValueError):
        if durable.read_sealed(path.with_suffix(".json"))["sha256"] == durable.sha256(path):
            return path
    durable.make_folder(path.parent, "HF_HOME's cache")
    durable.check_output_file(path, "HF_HOME's cache", "set HF_HOME to a folder that can be written")
    root, outside = Path(sysconfig.get_paths()["stdlib"]), {"site-packages", "dist-packages", "test", "tests"}
    files = sorted(path for path in root.rglob("*.py") if not outside & set(path.relative_to(root).parts))
    for distribution in distributions:
        files += sorted(Path(str(file.locate())) for file in distribution.files or [] if file.suffix == ".py")
    documents = _collect(files)
    if not documents:
        raise InputError(f"no docstrings below {root}; was Python run with -OO?")
    documents.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    durable.remove_left(path.parent)
    aside = durable.aside_of(path)
    try:
        pq.write_table(pa.table({"text": documents}), aside, row_group_size=4096)
        durable.sync(aside)
        durable.write_sealed(path.with_suffix(".json"), {"sha256": durable.sha256(aside)})
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def _required_distributions() -> list[importlib.metadata.Distribution]:
    """The installed distributions of requirements.txt, then what they require, breadth first."""
    path = ROOT / "requirements.txt"  # of a clone; a wheel has its lines as metadata
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else importlib.metadata.requires(_WHEEL)
    names = deque(re.match(r"[\w.-]+", line).group() for line in lines if re.match(r"\w", line))
    found: dict[str, importlib.metadata.Distribution] = {}
    while names:
        name = re.sub(r"[-_.]+", "-", names.popleft()).lower()
        if name not in found:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # optional, or for another platform
                found[name] = importlib.metadata.distribution(name)
                needs = [need for need in found[name].requires or [] if "extra ==" not in need]
                names.extend(sorted(re.match(r"[\w.-]+", need).group() for need in needs))
    return list(found.values())


def _docstrings(paths: list[Path]) -> list[str]:
    """The docstrings in these source files, indentation removed; a file that does not parse has none."""
    gc.disable()  # syntax trees are many small objects without cycles: the collector took half of the time
    found = []
    for path in paths:
        try:
            pending = [ast.parse(path.read_bytes())]
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        while pending:
            node = pending.pop()
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                found.append(text.encode("utf-8", "ignore").decode())  # without lone surrogates ("\ud800")
            for block in ("finalbody", "handlers", "orelse", "body"):  # popped last to first: source order
                pending.extend(reversed(getattr(node, block, ())))
    return found


def _collect(files: list[Path]) -> list[str]:
    """Distinct docstrings in file order, parsed by all cores, up to `MAX_BYTES`."""
    tasks = [files[i : i + _FILES_PER_TASK] for i in range(0, len(files), _FILES_PER_TASK)]
    documents: dict[str, None] = {}
    total = 0
    # "spawn", since the caller may have threads (datasets, tokenizers) that a fork would copy half of.
    with (
        ProcessPoolExecutor(mp_context=get_context("spawn")) as pool,
        Bar(total=MAX_BYTES, unit="B", unit_scale=True, desc="Collecting docstrings") as bar,
    ):
        for text in itertools.chain.from_iterable(pool.map(_docstrings, tasks)):
            if text.strip() and text not in documents:
                documents[text] = None
                total += len(text.encode())
                bar.update(len(text.encode()))
            if total >= MAX_BYTES:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return list(documents)
