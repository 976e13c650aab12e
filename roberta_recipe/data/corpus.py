"""The sources of a corpus (paper, section 3.2): their files, the content of these, and their shares of the mixture."""

import contextlib
import functools
import glob
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import datasets
import fsspec

from roberta_recipe import durable
from roberta_recipe.data.docstrings import docstring_file
from roberta_recipe.data.readers import DECOMPRESSORS, READERS, open_file, with_retries
from roberta_recipe.errors import InputError, RunError, first_line
from roberta_recipe.hardware import cpu_cores
from roberta_recipe.input_files import read_input_json, resolve_path, taken_apart
from roberta_recipe.log import Bar
from roberta_recipe.record import HASHES_NAME
from roberta_recipe.settings import check_mapping, load_yaml

TEXT_FORMATS = {".jsonl": "json", ".json": "json", ".txt": "text", ".text": "text"}  # also compressed
FORMATS = {".parquet": "parquet", **TEXT_FORMATS, ".arrow": "arrow"}
_NAME = re.compile(r"[\w-]{1,60}")  # of a source: a folder of the token cache has it
# 4,096 of the 4.1e9 blocks of the paper's longest run: a smaller share is two units in one preset (bytes beside GB)
_LEAST_SHARE = 1e-6
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_THREADS = 8  # a disk's worth; hashing frees Python's lock
_SETTLED_NS = 2_000_000_000  # file times may tick this slowly, so a younger file may change and keep its times
_VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified")  # in fsspec's file systems, the most exact first


@dataclass(frozen=True)
class Source:
    """One entry of a corpus preset. Exactly one of `dataset`, `files`, `builtin` says where it is."""

    name: str
    dataset: str | None = None  # Hub id, or a local dataset folder
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    files: str | list[str] | None = None  # file, folder or glob; `${NAME}` in it is a variable of the environment
    builtin: Literal["docstrings"] | None = None
    text_column: str = "text"
    filters: list[list[Any]] | None = None  # [column, operator, value] triples, all of which hold; Parquet only
    size_gb: float | None = None  # the share of the mixture: sizes of text,
    weight: float | None = None  # or plain weights; one kind for all sources
    validation_files: str | list[str] | None = None  # held-out text; without it, `validation_share` of the documents

    def __post_init__(self):
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"source name {self.name!r}: a name becomes a folder, and has 1 to 60 letters, digits, `_` and `-`"
            )
        where, given = (
            f"source {self.name!r}",
            [k for k in ("dataset", "files", "builtin") if getattr(self, k) is not None],
        )
        if len(given) != 1:
            raise InputError(f"{where} must have exactly one of dataset, files, builtin, and has {given or 'none'}")
        if self.dataset and not self.revision and not Path(self.dataset).exists():
            raise InputError(f"{where}: pin the dataset {self.dataset!r} with `revision:` (a commit of its repository)")
        for key in ("size_gb", "weight"):
            if getattr(self, key) is not None and not 0 < getattr(self, key) < float("inf"):
                raise InputError(f"{where}: {key} is {getattr(self, key)}, and must be above 0 and finite")


class Identity(NamedTuple):
    """A file's content."""

    values: list[Any]  # name, size, SHA-256; of a remote file URL, size, version; of an unreadable one name, reason
    stamp: list[int] | None  # size, times, inode; None for a remote file


@dataclass(frozen=True)
class Corpus:
    """A corpus preset. `resolve` fills `found` and `left_out`, `identified` fills `identities`."""

    name: str
    sources: list[Source]
    validation_share: float = 0.01  # of the documents, chosen by a hash of their text
    language: str = "en"  # two or three letters (ISO 639), for the sentence splitter and the model card
    # held-out documents to leave out, as `tools/contamination.py --held_out --leave_out FILE` has written them
    leave_out: str | None = None
    on_bad_shard: Literal["stop", "skip"] = "stop"  # rows that cannot be read, files that break off
    found: Mapping[tuple[str, str], tuple[str, list[str]]] = field(default_factory=dict, repr=False)
    left_out: frozenset[str] = frozenset()  # `text_digest` of each document of `leave_out`
    identities: Mapping[str, Identity] = field(default_factory=dict, repr=False)  # by path

    def __post_init__(self):
        where, names = f"corpus {self.name!r}", [source.name for source in self.sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(f"{where}: two sources are named {twice[0]!r}; names must differ")
        kinds = {tuple(k for k in ("size_gb", "weight") if getattr(s, k) is not None) for s in self.sources}
        if len(self.sources) > 1 and kinds not in ({("size_gb",)}, {("weight",)}):
            raise InputError(f"{where}: every source needs a share, all by size_gb or all by weight")
        for name, share in zip(names, self.shares, strict=True):
            if not share >= _LEAST_SHARE:
                raise InputError(
                    f"{where}: source {name!r} has a share of {share:.2g} of the mixture, and the least is "
                    f"{_LEAST_SHARE:g}; leave it out, or give all sources their sizes in one unit"
                )
        if not re.fullmatch("[a-z]{2,3}", self.language):
            raise InputError(f"{where}: language is {self.language!r}, and must be a code such as en or de")
        if not 0 < self.validation_share < 1:
            raise InputError(f"{where}: validation_share is {self.validation_share}, and must be between 0 and 1")

    @property
    def shares(self) -> list[float]:
        """Share of the mixture by source; they sum to 1."""
        sizes = [source.size_gb or source.weight or 1.0 for source in self.sources]
        return [size / sum(sizes) for size in sizes]

    def files(self, source: Source, split: str) -> tuple[str, list[str]]:
        """Format (of `READERS`) and sorted paths of a source's split ("train" or "validation")."""
        return self.found[source.name, split]


def read_corpus(path: str | Path) -> Corpus:
    """The corpus of a preset, its variables replaced; no source is opened. Raises `InputError`."""
    values, sources = load_yaml(path), []
    entries = values.pop("sources", None)
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{path}: `sources:` must be a list of sources, each with a name and where it is")
    for number, entry in enumerate(entries, 1):
        where = f"{path}, source {entry.get('name', number)}"
        entry = check_mapping(entry, [Source], where)
        if "name" not in entry:
            raise InputError(f"{where} has no name; name it with `name:`")
        patterns = {key: entry[key] for key in ("files", "validation_files") if entry.get(key)}
        sources.append(Source(**entry | {key: _with_variables(of, where) for key, of in patterns.items()}))
    made = ("name", "sources", "found", "left_out", "identities")
    return Corpus(name=Path(path).stem, sources=sources, **check_mapping(values, [Corpus], str(path), without=made))


def _with_variables(patterns: str | list[str], where: str) -> str | list[str]:
    """File patterns with the environment's value for each `${NAME}`. Raises `InputError` where it is unset or empty."""
    if isinstance(patterns, list):
        return [_with_variables(pattern, where) for pattern in patterns]
    for name in _VARIABLE.findall(patterns):
        if not os.environ.get(name):
            raise InputError(
                f"{where}: the environment variable {name} is not set or empty, and the files are {patterns!r}; set it "
                f"to the folder of your files before the command: export {name}=..."
            )
    return _VARIABLE.sub(lambda found: glob.escape(os.environ[found[1]]), patterns)


def corpus_of_files(
    train_file: list[str], validation_file: list[str] | None, text_column: str, language: str = "en"
) -> Corpus:
    """The corpus of `--train_file` and `--validation_file`: one source."""
    source = Source(name="train_file", files=train_file, validation_files=validation_file, text_column=text_column)
    return Corpus(name="train_file", sources=[source], language=language)


def resolve(corpus: Corpus) -> Corpus:
    """`corpus` with its files, and the digests of the documents left out. Raises `InputError`."""
    found = {}
    for source in corpus.sources:
        train = validation = _locate(source)
        if source.validation_files is not None:
            validation = _list_files(source.name, source.validation_files)
        for split, (format, paths) in (("train", train), ("validation", validation)):
            if source.filters is not None and format != "parquet":
                raise InputError(f"source {source.name!r}: filters work on Parquet only, and its files are {format}")
            found[source.name, split] = format, paths
    left_out: list[str] = []
    if corpus.leave_out is not None:
        made_by = "python -m roberta_recipe.tools.contamination --held_out --leave_out FILE"
        with taken_apart(corpus.leave_out, f"a file of {made_by}"):
            left_out = read_input_json(resolve_path(corpus.leave_out))["documents"]
    return replace(corpus, found=found, left_out=frozenset(left_out))


def _locate(source: Source) -> tuple[str, list[str]]:
    """Format and the sorted files of a source's training split. Raises `InputError`."""
    if source.builtin:
        return "parquet", [str(docstring_file())]
    if source.files:
        return _list_files(source.name, source.files)
    try:
        builder = datasets.load_dataset_builder(source.dataset, source.config, revision=source.revision)
    except Exception as error:  # the Hub client raises a dozen kinds
        no_cache = isinstance(error, PermissionError | NotADirectoryError)
        raise InputError(
            f"source {source.name!r}: cannot open dataset {source.dataset!r} (config {source.config!r}, revision "
            f"{source.revision!r}): {first_line(error)}" + "; set HF_HOME to a folder that can be written" * no_cache
        ) from None
    splits = builder.config.data_files or {}
    if source.split not in splits:
        raise InputError(
            f"source {source.name!r}: {source.dataset!r} has no split {source.split!r}; it has {sorted(splits)}"
        )
    paths = sorted(splits[source.split])
    if builder.name not in READERS or any(path.endswith(".zip") for path in paths):
        raise InputError(
            f"source {source.name!r}: {paths[0]} is no text, JSON, Parquet or Arrow; convert or unpack the files of "
            "the dataset, and name them with `files:`"
        )
    return builder.name, paths


def _list_files(name: str, patterns: str | list[str]) -> tuple[str, list[str]]:
    """Format and sorted paths of files, folders (searched to the bottom) and globs, local or of any `fsspec` URL."""
    found: dict[str, str] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if "://" in pattern:
            attempt = functools.partial(_remote_paths, pattern)
            paths = with_retries(attempt, pattern, f"source {name!r}: listing {pattern!r}")
        else:
            paths = _local_paths(resolve_path(pattern))
        readable = {path: format for path in _of_saved_datasets(name, paths) if (format := _format_of(path))}
        if not readable:
            seen = ", ".join(sorted({Path(path).suffix or "no suffix" for path in paths}))
            what = f"holds no file that can be read (found {seen})" if seen else "does not exist, or is empty"
            raise InputError(
                f"source {name!r}: {pattern!r} {what}; readable are {', '.join(FORMATS)}, text and JSON also "
                f"compressed ({', '.join(DECOMPRESSORS)}); hidden files of a folder are passed over"
            )
        found.update(readable)
    if len(set(found.values())) > 1:
        kinds = ", ".join(sorted(set(found.values())))
        raise InputError(f"source {name!r}: {patterns!r} mixes formats ({kinds}); name files of one format with a glob")
    return next(iter(found.values())), sorted(found)


def _local_paths(path: Path) -> list[str]:
    """A file; the files of a glob; or those below a folder that are not hidden, each folder behind links once."""
    if not path.is_dir():
        return [str(path)] if path.is_file() else glob.glob(str(path), recursive=True)
    found, searched = [], set()
    for parent, folders, names in os.walk(path, followlinks=True):
        if (place := os.path.realpath(parent)) in searched:
            folders.clear()
            continue
        searched.add(place)
        folders[:] = sorted(name for name in folders if name[0] != ".")
        found += [path for name in names if name[0] != "." and os.path.isfile(path := os.path.join(parent, name))]
    return found


def _remote_paths(pattern: str) -> list[str]:
    """The files of a URL (s3://, gs://, https://, ...), hidden ones only by a pattern such as `.x*`."""
    system, path = fsspec.core.url_to_fs(pattern)
    folder, paths = path.rstrip("/"), [path]
    if "*" in path:
        folder, paths = path[: path.index("*")].rpartition("/")[0], system.glob(path)
    elif system.info(path)["type"] == "directory" or not _format_of(path):  # http: a folder's URL is a file's too
        paths = system.find(path)
    if "/." not in path[len(folder) :]:
        paths = [path for path in paths if "/." not in path[len(folder) :]]
    return [system.unstrip_protocol(path) for path in paths]


def _of_saved_datasets(name: str, paths: list[str]) -> list[str]:
    """`paths`, but of a folder of `Dataset.save_to_disk` the files alone that its state.json lists: the others are
    metadata, and caches of `map`. Raises `InputError` for a folder of `DatasetDict`, which would mix the splits."""
    listed = set(paths)
    for folder in sorted({path.rpartition("/")[0] for path in paths}):
        state, info = f"{folder}/state.json", f"{folder}/dataset_info.json"
        if f"{folder}/dataset_dict.json" in listed:
            raise InputError(f"source {name!r}: {folder} is a DatasetDict; name the folder of one of its splits")
        if all(path in listed or os.path.isfile(path) for path in (state, info)):  # a glob may have found neither
            with taken_apart(state, "a file of save_to_disk"), open_file(state) as stream:
                kept = {f"{folder}/{one['filename']}" for one in json.load(stream)["_data_files"]}
            if state in listed and (missing := sorted(kept - listed)):
                raise InputError(
                    f"source {name!r}: {missing[0]} is missing, and {state} lists it; copy the folder again"
                )
            paths = [path for path in paths if path.rpartition("/")[0] != folder or path in kept]
    return paths


def _format_of(path: str) -> str | None:
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in DECOMPRESSORS:
        return TEXT_FORMATS.get(suffixes[-2]) if suffixes[1:] else None
    return FORMATS.get(suffixes[-1]) if suffixes else None


def identified(corpus: Corpus, kept_in: str | Path) -> Corpus:
    """A resolved corpus with the content of its files, hashed once and kept in the folder `kept_in`; hashed again where
    size, times or inode differ. Raises `InputError` for a file that changes meanwhile."""
    path, settled_ns = Path(kept_in, HASHES_NAME), time.time_ns() - _SETTLED_NS
    try:
        known = {name: Identity(*entry) for name, entry in durable.read_sealed(path)["files"].items()}
    except (OSError, ValueError, KeyError):  # there is none, or it is damaged
        known = {}
    found = identify([name for _, names in corpus.found.values() for name in names], known)
    hashed = {name: one for name, one in found.items() if one.stamp and len(one.values) == 3}
    kept = {name: one for name, one in hashed.items() if max(one.stamp[1:3]) < settled_ns}
    if kept != known:
        with contextlib.suppress(OSError):  # a full or read-only disk: hashed again at the next start
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.write_sealed(path, {"files": kept})
    return replace(corpus, identities=found)


def identify(paths: Iterable[str], known: Mapping[str, Identity]) -> dict[str, Identity]:
    """The identity of each file; those not `known` by their size, times and inode are hashed by a few threads. A remote
    file is its URL, size and version as the server has them; `hf://` names hold the revision. Raises `InputError` for a
    file that changes meanwhile."""
    stamps = {path: _stamp(path) for path in paths}
    new = [path for path, stamp in stamps.items() if path not in known or known[path].stamp != stamp]
    with ThreadPoolExecutor(min(_THREADS, cpu_cores())) as threads:
        hashed = Bar(threads.map(_identity, new), total=len(new), desc="Hashing files", delay=2, leave=False)
        made = dict(zip(new, hashed, strict=True))
    return {path: made.get(path) or known[path] for path in stamps}


def _stamp(path: str) -> list[int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _identity(path: str) -> Identity:
    if path.startswith("hf://"):
        return Identity([path], None)
    if "://" in path:
        system, inner = fsspec.core.url_to_fs(path)
        info = with_retries(lambda: system.info(inner), path, f"looking up {path}")
        version = next((str(info[name]) for name in _VERSIONS if info.get(name)), None)
        return Identity([path, info.get("size"), version], None)
    before = _stamp(path)
    try:
        digest = durable.sha256(path)
    except OSError as error:
        return Identity([os.path.basename(path), error.strerror], before)
    if before is None or _stamp(path) != before:
        raise InputError(f"{path} changed while it was read; start again when it is complete")
    return Identity([os.path.basename(path), before[0], digest[:32]], before)


def corpus_fingerprint(corpus: Corpus) -> dict[str, Any]:
    """What two `identified` corpora must agree in to give the same blocks: the sources' settings, and their files by
    name and content."""
    contents = {}
    for source in corpus.sources:
        files = [corpus.files(source, split)[1] for split in ("train", "validation")]
        values = [[corpus.identities[path].values for path in paths] for paths in files]
        digest = durable.fingerprint([source.text_column, source.filters, values])
        contents[f"source {source.name}"] = f"{len(files[0])} files, {digest}"
    if corpus.left_out:
        contents["leave_out"] = durable.fingerprint(sorted(corpus.left_out))
    if any(format == "text" for format, _ in corpus.found.values()):
        contents["text_files"] = "a line of blanks separates documents"  # former versions took it for text
    return {**contents, "validation_share": corpus.validation_share, "language": corpus.language}


def check_unchanged(corpus: Corpus, path: str | None = None) -> None:
    """Raise `RunError` where a local file of an `identified` corpus (or the file `path` of it) has another content than
    then: a few microseconds a file."""
    before = corpus.identities
    for name in before if path is None else before.keys() & {path}:
        if _stamp(name) != before[name].stamp and identify([name], {})[name].values != before[name].values:
            raise RunError(
                f"{name} was changed, replaced or removed while this run reads it; what was saved is of the text as it "
                "was. Put that file back and start the same command again, or begin another run in another output_dir"
            )


def check_validation_files(corpus: Corpus) -> None:
    """Raise `InputError` where a validation file is a training file too, by its content: files of one size are
    hashed."""
    train = [path for source in corpus.sources for path in corpus.files(source, "train")[1]]
    held_out = {path: s.name for s in corpus.sources if s.validation_files for path in corpus.files(s, "validation")[1]}
    sizes = {path: path if "://" in path else os.path.getsize(path) for path in (*train, *held_out)}
    shared = {sizes[path] for path in train} & {sizes[path] for path in held_out} - {0}
    content = identify([path for path in sizes if sizes[path] in shared], corpus.identities)
    trained_on = {str(content[path].values[1:]): path for path in train if path in content}
    for path, name in held_out.items():
        if path in content and (same := trained_on.get(str(content[path].values[1:]))):
            raise InputError(
                f"source {name!r}: the validation file {path} is the training file {same}, so its loss would be that "
                "of text trained on; name held-out text, or leave the validation file out: a share of the documents is "
                "then held out"
            )
