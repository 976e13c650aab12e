"""The sources of a corpus (paper, section 3.2), their shares of the mixture, and their files."""

import functools
import glob
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import fsspec

from roberta_recipe.data.docstrings import docstring_file
from roberta_recipe.data.identity import Identity, identify, is_unchanged
from roberta_recipe.data.readers import DECOMPRESSORS, open_file, with_retries
from roberta_recipe.durable import fingerprint
from roberta_recipe.errors import InputError, RunError, first_line
from roberta_recipe.input_files import read_input_json, resolve_path, taken_apart
from roberta_recipe.log import logger
from roberta_recipe.presets import check_mapping, load_yaml

TEXT_FORMATS = {".jsonl": "json", ".json": "json", ".txt": "text", ".text": "text"}  # also compressed
FORMATS = {".parquet": "parquet", **TEXT_FORMATS, ".arrow": "arrow"}
_NAME = re.compile(r"[\w-]{1,60}")  # of a source: a folder of the token cache has it
# 4,096 of the 4.1e9 blocks of the paper's longest run: a smaller share is two units in one preset (bytes beside GB)
_LEAST_SHARE = 1e-6
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass
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
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InputError(
                f"source name {self.name!r}: a name becomes a folder, and has 1 to 60 letters, digits, `_` and `-`"
            )
        given = [key for key in ("dataset", "files", "builtin") if getattr(self, key) is not None]
        if len(given) != 1:
            raise InputError(
                f"source {self.name!r} must have exactly one of dataset, files, builtin, and has {given or 'none'}"
            )
        if self.dataset and not self.revision and not Path(self.dataset).exists():
            raise InputError(
                f"source {self.name!r}: pin the dataset {self.dataset!r} with `revision:` (a commit of its repository)"
            )
        for key in ("size_gb", "weight"):
            if getattr(self, key) is not None and not 0 < getattr(self, key) < float("inf"):
                raise InputError(f"source {self.name!r}: {key} is {getattr(self, key)}, and must be above 0 and finite")


@dataclass
class Corpus:
    """A checked corpus preset: its sources, and how much is held out of sources without validation files."""

    name: str
    sources: list[Source]
    validation_share: float = 0.01  # of the documents, chosen by a hash of their text
    language: str = "en"  # two or three letters (ISO 639), for the sentence splitter and the model card
    # held-out documents to leave out, as `tools/contamination.py --held_out --leave_out FILE` has written them
    leave_out: str | None = None
    on_bad_shard: Literal["stop", "skip"] = "stop"  # rows that cannot be read, files that break off
    _files: dict[tuple[str, str], tuple[str, list[str]]] = field(default_factory=dict, repr=False)
    _identities: dict[str, Identity] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def left_out(self) -> frozenset[str]:
        """`text_digest` of each document of `leave_out`. Raises `InputError`."""
        if self.leave_out is None:
            return frozenset()
        found = read_input_json(resolve_path(self.leave_out))
        documents = found.get("documents") if isinstance(found, dict) else None
        if not isinstance(documents, list) or not all(isinstance(digest, str) for digest in documents):
            raise InputError(
                f"leave_out={self.leave_out}: make it with python -m roberta_recipe.tools.contamination --held_out "
                "--leave_out FILE"
            )
        return frozenset(documents)

    @property
    def shares(self) -> list[float]:
        """What each source gets of the mixture; they sum to 1."""
        sizes = [source.size_gb or source.weight or 1.0 for source in self.sources]
        return [size / sum(sizes) for size in sizes]

    def files(self, source: Source, split: str) -> tuple[str, list[str]]:
        """Format and files of a source's split ("train" or "validation"), looked up once."""
        separate = split == "validation" and source.validation_files is not None
        key = (source.name, "validation" if separate else "train")
        if key not in self._files:
            self._files[key] = _locate(source, separate)
        return self._files[key]

    def identities(self) -> dict[str, Identity]:
        """What every file holds, hashed once: what this run takes for its text."""
        files = [path for s in self.sources for split in ("train", "validation") for path in self.files(s, split)[1]]
        self._identities |= identify([path for path in dict.fromkeys(files) if path not in self._identities])
        return self._identities


def read_corpus(path: str | Path) -> Corpus:
    """The corpus that a preset describes, its variables replaced. Opens no source. Raises `InputError`."""
    values = load_yaml(path)
    sources = values.pop("sources", None)
    if not isinstance(sources, list) or not sources or not all(isinstance(entry, dict) for entry in sources):
        raise InputError(f"{path}: `sources:` must be a list of sources, each with a name and where it is")
    where = [f"{path}, source {entry.get('name', number)}" for number, entry in enumerate(sources, 1)]
    checked = [check_mapping(entry, [Source], name) for entry, name in zip(sources, where, strict=True)]
    if unnamed := [name for entry, name in zip(checked, where, strict=True) if "name" not in entry]:
        raise InputError(f"{unnamed[0]} has no name; name it with `name:`")
    for entry, name in zip(checked, where, strict=True):
        entry |= {key: _with_variables(entry[key], name) for key in ("files", "validation_files") if entry.get(key)}
    settings = check_mapping(values, [Corpus], str(path), without=("name", "sources", "_files", "_identities"))
    return check_corpus(Corpus(name=Path(path).stem, sources=[Source(**entry) for entry in checked], **settings))


def _with_variables(patterns: str | list[str], where: str) -> str | list[str]:
    """File patterns with the environment's value for each `${NAME}`. Raises `InputError` where it is unset or empty."""
    if isinstance(patterns, list):
        return [_with_variables(pattern, where) for pattern in patterns]
    for name in _VARIABLE.findall(patterns):
        if not os.environ.get(name):
            state = "is empty" if name in os.environ else "is not set"
            raise InputError(
                f"{where}: the environment variable {name} {state}, and the files are {patterns!r}; set it to the "
                f"folder of your files before the command: export {name}=..."
            )
    return _VARIABLE.sub(lambda found: glob.escape(os.environ[found[1]]), patterns)


def check_corpus(corpus: Corpus) -> Corpus:
    """`corpus`, or an `InputError` for names given twice, shares of two kinds or too small to be meant, a validation
    share out of range, or a language that is no code."""
    names = [source.name for source in corpus.sources]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"corpus {corpus.name!r}: two sources are named {twice[0]!r}; names must differ")
    kinds = {tuple(k for k in ("size_gb", "weight") if getattr(s, k) is not None) for s in corpus.sources}
    if len(corpus.sources) > 1 and kinds not in ({("size_gb",)}, {("weight",)}):
        raise InputError(f"corpus {corpus.name!r}: every source needs a share, all by size_gb or all by weight")
    for source, share in zip(corpus.sources, corpus.shares, strict=True):
        if not share >= _LEAST_SHARE:
            raise InputError(
                f"corpus {corpus.name!r}: source {source.name!r} has a share of {share:.2g} of the mixture, and the "
                f"least is {_LEAST_SHARE:g}; leave it out, or give all sources their sizes in one unit"
            )
    if not re.fullmatch("[a-z]{2,3}", corpus.language):
        raise InputError(
            f"corpus {corpus.name!r}: language is {corpus.language!r}, and must be a code such as en or de"
        )
    if not 0 < corpus.validation_share < 1:
        raise InputError(
            f"corpus {corpus.name!r}: validation_share is {corpus.validation_share}, and must be between 0 and 1"
        )
    return corpus


def corpus_of_files(
    train_file: list[str], validation_file: list[str] | None, text_column: str, language: str = "en"
) -> Corpus:
    """The corpus of `--train_file` and `--validation_file`: one source."""
    source = Source(name="train_file", files=train_file, validation_files=validation_file, text_column=text_column)
    return check_corpus(Corpus(name="train_file", sources=[source], language=language))


def _locate(source: Source, separate_validation: bool) -> tuple[str, list[str]]:
    """Format (a builder of `datasets`) and the sorted files of a source. Raises `InputError`."""
    if separate_validation:
        return _list_files(source.name, source.validation_files)
    if source.builtin:
        return "parquet", [str(docstring_file())]
    if source.files:
        return _list_files(source.name, source.files)
    try:
        with tempfile.TemporaryDirectory() as folder:  # a local dataset needs no cache
            builder = datasets.load_dataset_builder(
                source.dataset,
                source.config,
                revision=source.revision,
                cache_dir=folder if Path(source.dataset).exists() else None,
            )
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
    if archives := [path for path in splits[source.split] if path.endswith(".zip")]:
        raise InputError(f"source {source.name!r}: unpack {archives[0]}, and name its files with `files:`")
    return builder.name, sorted(splits[source.split])


def _list_files(name: str, patterns: str | list[str]) -> tuple[str, list[str]]:
    """Format and sorted paths of files, folders (searched to the bottom) and globs, local or of any `fsspec` URL."""
    found: dict[str, str] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if "://" in pattern:
            attempt, action = functools.partial(_remote_paths, pattern), f"source {name!r}: listing {pattern!r}"
            paths, hidden = with_retries(attempt, pattern, action)
        else:
            paths, hidden = _local_paths(resolve_path(pattern))
        paths = _of_saved_datasets(name, paths)
        readable = {p: f for p in paths if (f := _format_of(p))}
        passed_over = sum(_format_of(p) is not None for p in hidden)
        if not readable:
            seen = sorted({Path(p).suffix or "no suffix" for p in paths}) + ["hidden files"] * bool(passed_over)
            what = (
                f"holds no file that can be read (found {', '.join(seen)})" if seen else "does not exist, or is empty"
            )
            raise InputError(
                f"source {name!r}: {pattern!r} {what}; readable are {', '.join(FORMATS)}, text and JSON also "
                f"compressed ({', '.join(DECOMPRESSORS)})"
            )
        if passed_over:
            logger.info(f"source {name!r}: hidden files of {pattern} (.name), passed over: {passed_over:,}")
        found.update(readable)
    if len(set(found.values())) > 1:
        kinds = ", ".join(sorted(set(found.values())))
        raise InputError(f"source {name!r}: {patterns!r} mixes formats ({kinds}); name files of one format with a glob")
    return next(iter(found.values())), sorted(found)


def _local_paths(path: Path) -> tuple[list[str], list[str]]:
    """The files below a folder, a file itself, or the files that a glob finds; and the hidden files of a folder, which
    a glob does not find either."""
    if path.is_dir():
        return _without_hidden([*_files_below(str(path))], str(path))
    return [str(path)] if path.is_file() else glob.glob(str(path), recursive=True), []


def _files_below(folder: str) -> Iterator[str]:
    """The files below a folder, those behind links too; a folder that links lead to again is searched once, and once
    more as a hidden one, so that a hidden link hides nothing."""
    searched = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        if (place := (os.path.realpath(parent), "/." in parent[len(folder) :])) in searched:
            folders.clear()
            continue
        searched.add(place)
        yield from (path for name in names if os.path.isfile(path := os.path.join(parent, name)))


def _remote_paths(pattern: str) -> tuple[list[str], list[str]]:
    """The paths below a URL (s3://, gs://, https://, ...), and the hidden ones."""
    system, path = fsspec.core.url_to_fs(pattern)
    root = path[: path.index("*")].rpartition("/")[0] if "*" in path else path.rstrip("/")
    if "*" in path:
        paths = system.glob(path)
    elif system.info(path)["type"] == "directory" or not _format_of(path):  # http: a folder's URL is a file's too
        paths = system.find(path)
    else:
        paths = [path]
    asked_for = "/." in path[len(root) :]  # by a pattern such as `.x*`
    shown, hidden = (paths, []) if asked_for else _without_hidden(paths, root)
    return [system.unstrip_protocol(path) for path in shown], hidden


def _without_hidden(paths: list[str], folder: str) -> tuple[list[str], list[str]]:
    """The paths below a folder, and apart from them those in which a name below it begins with a dot."""
    hidden = {path for path in paths if "/." in path[len(folder) :]}
    return [path for path in paths if path not in hidden], [*hidden]


def _of_saved_datasets(name: str, paths: list[str]) -> list[str]:
    """`paths`, but of a folder of `Dataset.save_to_disk` the files alone that its state.json lists: the others are
    metadata, and caches of `map`. Raises `InputError` for a folder of `DatasetDict`, which would mix the splits."""
    listed = set(paths)
    for folder in sorted({path.rpartition("/")[0] for path in paths}):
        of_splits, state, info = (
            f"{folder}/{file}" for file in ("dataset_dict.json", "state.json", "dataset_info.json")
        )
        if of_splits in listed:
            splits = _saved_json(of_splits, lambda saved: [*saved["splits"]])
            raise InputError(
                f"source {name!r}: {folder} is a DatasetDict of the splits {', '.join(splits)}; name the folder of one "
                f"split: {folder}/{splits[0]}"
            )
        if all(path in listed or os.path.isfile(path) for path in (state, info)):  # a glob may have found neither
            kept = _saved_json(state, lambda saved: {one["filename"] for one in saved["_data_files"]})
            if state in listed and (missing := sorted({f"{folder}/{file}" for file in kept} - listed)):
                raise InputError(
                    f"source {name!r}: {missing[0]} is missing, which {state} lists; copy the folder again"
                )
            paths = [path for path in paths if path.rpartition("/")[0] != folder or path.rpartition("/")[2] in kept]
    return paths


def _saved_json(path: str, of: Callable[[Any], Any]) -> Any:
    with taken_apart(path, "a file of save_to_disk"), open_file(path) as stream:
        return of(json.load(stream))


def _format_of(path: str) -> str | None:
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in DECOMPRESSORS:
        return TEXT_FORMATS.get(suffixes[-2]) if suffixes[1:] else None
    return FORMATS.get(suffixes[-1]) if suffixes else None


def corpus_fingerprint(corpus: Corpus) -> dict[str, Any]:
    """What two corpora must agree in to give the same blocks: the sources' settings, and their files by name and
    content (`identify`)."""
    contents, identities = {}, corpus.identities()
    for source in corpus.sources:
        files = [corpus.files(source, split)[1] for split in ("train", "validation")]
        content = [source.text_column, source.filters, [[identities[path].values for path in paths] for paths in files]]
        contents[f"source {source.name}"] = f"{len(files[0])} files, {fingerprint(content)}"
    left_out = {"leave_out": fingerprint(sorted(corpus.left_out))} if corpus.left_out else {}
    return {**contents, **left_out, "validation_share": corpus.validation_share, "language": corpus.language}


def check_unchanged(corpus: Corpus, path: str | None = None) -> None:
    """Raise `RunError` where a local file of the corpus (or the file `path`) is no longer what `Corpus.identities`
    found: a few microseconds a file."""
    for name in [path] if path is not None else list(corpus._identities):
        before = corpus._identities.get(name)
        if before is not None and not is_unchanged(name, before):
            raise RunError(
                f"{name} was changed, replaced or removed while this run reads it; what was saved is of the text as it "
                "was. Put that file back and start the same command again, or begin another run in another output_dir"
            )


def check_validation_files(corpus: Corpus) -> None:
    """Raise `InputError` where a validation file is a training file too, by its content."""
    identities, train = corpus.identities(), {}
    for source in corpus.sources:
        train |= {str(_content(path, identities[path])): path for path in corpus.files(source, "train")[1]}
    for source in corpus.sources:
        for path in corpus.files(source, "validation")[1] if source.validation_files else ():
            if identities[path].values[1:2] != [0] and (same := train.get(str(_content(path, identities[path])))):
                raise InputError(
                    f"source {source.name!r}: the validation file {path} is the training file {same}, so its loss "
                    "would be that of text trained on; name held-out text, or leave the validation file out: a share "
                    "of the documents is then held out"
                )


def _content(path: str, identity: Identity) -> Any:
    return identity.values[1:] if identity.stamp else path
