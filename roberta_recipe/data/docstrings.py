"""The embedded corpus: docstrings of the Python that is installed, as documents.

Text that every machine with this repository's requirements already has, so that the demonstration needs no
network. It stands where the paper has its five corpora (section 3.2); nothing else is claimed for it.
"""

import ast
import gc
import hashlib
import importlib.metadata
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
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstring_file(max_bytes: int | None = None) -> Path:
    """A Parquet file (column `text`, a docstring a row), made on first use and cached by installed versions.

    Documents are the distinct docstrings of the standard library, then of the distributions in requirements.txt
    and what they need, module by module in sorted order, until `max_bytes` of UTF-8 (`MAX_BYTES`) are reached; then in
    the order of their hashes, so that a chunk is a sample of all. A file that is no longer as it was written, by the
    JSON file beside it, is made again.
    """
    max_bytes = max_bytes or MAX_BYTES
    distributions = _required_distributions()
    versions = [f"python=={sys.version}"] + [f"{d.metadata['Name']}=={d.version}" for d in distributions]
    fingerprint = hashlib.sha256("\n".join([*versions, str(max_bytes), "by hash"]).encode()).hexdigest()[:16]
    path = Path(datasets.config.HF_DATASETS_CACHE) / "roberta_recipe" / f"docstrings-{fingerprint}.parquet"
    if not _is_whole(path):
        durable.make_folder(path.parent, "HF_HOME's cache")
        durable.check_output_file(path, "HF_HOME's cache", "set HF_HOME to a folder that can be written")
        documents = _collect(_standard_library() + [f for d in distributions for f in _python_files(d)], max_bytes)
        if not documents:
            raise InputError(f"no docstrings below {sysconfig.get_paths()['stdlib']}; was Python run with -OO?")
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


def _is_whole(path: Path) -> bool:
    try:
        return durable.read_sealed(path.with_suffix(".json"))["sha256"] == durable.sha256(path)
    except (OSError, ValueError):
        return False


def _required_distributions() -> list[importlib.metadata.Distribution]:
    """The installed distributions of requirements.txt, then what they require, breadth first."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    names = deque(re.match(r"[\w.-]+", line).group() for line in lines if re.match(r"\w", line))
    found: dict[str, importlib.metadata.Distribution] = {}
    while names:
        name = re.sub(r"[-_.]+", "-", names.popleft()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an optional requirement, or one for another platform
        needs = [need for need in found[name].requires or [] if "extra ==" not in need]
        names.extend(sorted(re.match(r"[\w.-]+", need).group() for need in needs))
    return list(found.values())


def _standard_library() -> list[Path]:
    root, outside = Path(sysconfig.get_paths()["stdlib"]), {"site-packages", "dist-packages", "test", "tests"}
    return sorted(path for path in root.rglob("*.py") if not outside & set(path.relative_to(root).parts))


def _python_files(distribution: importlib.metadata.Distribution) -> list[Path]:
    return sorted(Path(str(file.locate())) for file in distribution.files or [] if file.suffix == ".py")


def _docstrings(paths: list[Path]) -> list[str]:
    """The docstrings in these source files, indentation removed; a file that does not parse has none."""
    gc.disable()  # syntax trees are many small objects and no cycles: half of the time was the collector's
    found = []
    for path in paths:
        try:
            pending = [ast.parse(path.read_bytes())]
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        while pending:
            node = pending.pop()
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                # A docstring may hold a lone surrogate ("\ud800"), which is no text that UTF-8 can write.
                found.append(text.encode("utf-8", "ignore").decode())
            for block in ("finalbody", "handlers", "orelse", "body"):  # popped last to first: source order
                pending.extend(reversed(getattr(node, block, ())))
    return found


def _collect(files: list[Path], max_bytes: int) -> list[str]:
    """Distinct docstrings in file order, parsed by all cores, stopped once `max_bytes` are there."""
    tasks = [files[i : i + _FILES_PER_TASK] for i in range(0, len(files), _FILES_PER_TASK)]
    documents: dict[str, None] = {}
    total = 0
    # "spawn", since the caller may have threads (datasets, tokenizers) that a fork would copy half of.
    with (
        ProcessPoolExecutor(mp_context=get_context("spawn")) as pool,
        Bar(total=max_bytes, unit="B", unit_scale=True, desc="Collecting docstrings") as bar,
    ):
        for texts in pool.map(_docstrings, tasks):
            for text in texts:
                if text.strip() and text not in documents and total < max_bytes:
                    documents[text] = None
                    total += len(text.encode())
            bar.update(min(total, max_bytes) - bar.n)
            if total >= max_bytes:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return list(documents)
