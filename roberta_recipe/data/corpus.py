"""Corpus presets (paper, section 3.2): sources, their files and content hashes, their shares of the mixture."""

import contextlib
import glob
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import datasets
import fsspec
import pyarrow.parquet as pq
from datasets.data_files import resolve_pattern
from pydantic import Field

from roberta_recipe import durable
from roberta_recipe.data.docstrings import docstring_file
from roberta_recipe.data.file_formats import COMPRESSIONS, READERS
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.input_files import HUB_COMMIT, explained, read_input_json, resolve_path
from roberta_recipe.log import Bar, counted, log_once
from roberta_recipe.record import HASHES_NAME, LISTS_NAME
from roberta_recipe.settings import check_mapping, load_yaml

TEXT_FORMATS = {".jsonl": "json", ".json": "json", ".txt": "text", ".text": "text"}  # also compressed
FORMATS = {".parquet": "parquet", **TEXT_FORMATS, ".arrow": "arrow"}
# 4,096 of the 4.1e9 blocks of the paper's longest run; a smaller share means a preset with mixed units (bytes and GB)
_LEAST_SHARE = 1e-6
_HASHING_THREADS = 8
BYTES_PER_TOKEN = 4.5  # English text in a 50K byte-level BPE; an assumption, used without a token cache
TRAIN_FILE = "train_file"  # name of the corpus of `--train_file`, and of its source
_MTIME_RESOLUTION_NS = 2_000_000_000  # of the coarsest file systems: a newer file may change without new timestamps
# keys of fsspec's `info`, the most reliable first
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "Content-MD5", "blob_id", "mtime", "LastModified", "Last-Modified")
_SPLIT = re.compile(r"(train|validation|valid|val|dev|test)(?=[-.]|$)")  # first word of a file or folder of a data set

Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Files = tuple[str, list[str]]  # format (of `READERS`), sorted paths


@dataclass(frozen=True)
class Source:
    """One entry of a corpus preset. Exactly one of `dataset`, `files`, `builtin` gives its location."""

    name: str  # also a folder of the token cache
    dataset: str | None = None  # Hub id, or a local dataset folder
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    files: str | list[str] | None = None  # file, folder, glob or URL; `${NAME}` is an environment variable
    builtin: Literal["docstrings"] | None = None
    text_column: str = "text"
    filters: list[list[Any]] | None = None  # [column, operator, value] triples, combined by AND; Parquet only
    size_gb: Share | None = None  # share of the mixture by size of text
    weight: Share | None = None  # share of the mixture by weight; all sources use the same kind
    validation_files: str | list[str] | None = None  # held-out text; without it, `validation_share` of the documents

    def __post_init__(self):
        where = f"source {self.name!r}"
        if not re.fullmatch(r"[\w-]{1,60}", self.name):
            raise InputError(f"{where}: a name must be 1 to 60 letters, digits, `_` and `-`")
        if [self.dataset, self.files, self.builtin].count(None) != 2:
            raise InputError(f"{where} must have exactly one of dataset, files, builtin")
        if self.dataset and not self.revision and not Path(self.dataset).exists():
            raise InputError(f"{where}: pin the dataset {self.dataset!r} with `revision:` (a commit of its repository)")
        if self.filters:
            with explained(f"{where}: filters={self.filters} is not a list of [column, operator, value]"):
                pq.filters_to_expression([tuple(one) for one in self.filters])


class FileHash(NamedTuple):
    """Hash of a file's content."""

    values: list[Any]  # local: name, size, SHA-256; remote: URL, size, version; hf:// with a commit: URL
    stamp: list[int] | None  # size, times, inode; None for a remote file


@dataclass(frozen=True)
class Corpus:
    """A corpus preset. `resolve` fills `resolved` and `excluded`, `hash_files` fills `file_hashes`."""

    name: str
    sources: list[Source]
    validation_share: Annotated[float, Field(gt=0, lt=1)] = 0.01  # of the documents, chosen by a hash of their text
    language: str = "en"  # ISO 639-1, for sentence splitter (`deu` would get the rules of `en`) and model card
    # validation documents to exclude: a file written by `tools/contamination.py --held_out --leave_out FILE`
    leave_out: str | None = None
    on_bad_shard: Literal["stop", "skip"] = "stop"  # for rows that cannot be read and files that break off
    resolved: Mapping[tuple[str, str], Files] = field(default_factory=dict, repr=False)  # by source name and split
    excluded: frozenset[str] = frozenset()  # `text_hash` of each document of `leave_out`
    file_hashes: dict[str, FileHash] = field(default_factory=dict, repr=False)  # by path

    def __post_init__(self):
        where, names = f"corpus {self.name!r}", [source.name for source in self.sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(f"{where}: two sources are named {twice[0]!r}; names must differ")
        kinds = {tuple(k for k in ("size_gb", "weight") if getattr(s, k) is not None) for s in self.sources}
        if len(self.sources) > 1 and kinds not in ({("size_gb",)}, {("weight",)}):
            raise InputError(f"{where}: every source needs a share, all by size_gb or all by weight")
        if not re.fullmatch("[a-z]{2,3}", self.language):
            raise InputError(f"{where}: language is {self.language!r}, and must be a code such as en or de")
        if not min(self.shares) >= _LEAST_SHARE:
            raise InputError(f"{where}: a source has a share of {min(self.shares):.2g}; give all sizes in one unit")

    @property
    def shares(self) -> list[float]:
        """Share of the mixture by source; they sum to 1."""
        sizes = [source.size_gb or source.weight or 1.0 for source in self.sources]
        return [size / sum(sizes) for size in sizes]

    def files(self, source: Source, split: str) -> Files:
        """The files of a source's split ("train" or "validation")."""
        return self.resolved[source.name, split]


def read_corpus(path: str | Path) -> Corpus:
    """Parse a corpus preset and expand its environment variables; no source is opened. Raises `InputError`."""
    values, sources = load_yaml(path), []
    entries = values.pop("sources", None)
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{path}: `sources:` must be a list of sources, each with a name and a location")
    for number, entry in enumerate(entries, 1):
        where = f"{path}, source {entry.get('name', number)}"
        if "name" not in entry:
            raise InputError(f"{where} has no name; name it with `name:`")
        entry = check_mapping(entry, [Source], where)
        for key in ("files", "validation_files"):
            if patterns := entry.get(key):
                patterns = [patterns] if isinstance(patterns, str) else patterns
                entry[key] = [os.path.expandvars(pattern) for pattern in patterns]
                if unset := re.search(r"\$\{(\w+)\}", " ".join(entry[key])):
                    raise InputError(f"{where}: environment variable {unset[1]} is not set; export {unset[1]}=FOLDER")
        sources.append(Source(**entry))
    computed = ("name", "sources", "resolved", "excluded", "file_hashes")
    return Corpus(name=Path(path).stem, sources=sources, **check_mapping(values, [Corpus], str(path), without=computed))


def corpus_of_files(
    train_file: list[str], validation_file: list[str] | None, text_column: str, language: str = "en"
) -> Corpus:
    """The corpus of `--train_file` and `--validation_file`: one source."""
    source = Source(name=TRAIN_FILE, files=train_file, validation_files=validation_file, text_column=text_column)
    return Corpus(name=TRAIN_FILE, sources=[source], language=language)


def resolve(corpus: Corpus, token_cache: str | None = None) -> Corpus:
    """List the files of each source, and read the hashes of excluded documents. Raises `InputError`. A `token_cache`
    stores the lists of Hub datasets at a commit, which cannot change, so that a complete one needs no network."""
    path, lists, resolved = Path(token_cache or os.devnull, LISTS_NAME), {}, {}
    with contextlib.suppress(OSError, ValueError):  # missing or damaged
        lists = durable.read_sealed(path)
    stored, on_hub = len(lists), hub_ids(corpus)
    for source in corpus.sources:
        key = durable.fingerprint([source.dataset, source.config, source.revision, source.split])
        train = tuple(lists[key]) if key in lists else _locate(source)
        if source.dataset in on_hub and re.fullmatch(HUB_COMMIT, source.revision):
            lists[key] = train
        held_out = _list_files(source.name, source.validation_files) if source.validation_files else train
        resolved |= {(source.name, "train"): train, (source.name, "validation"): held_out}
        if source.filters and {train[0], held_out[0]} != {"parquet"}:
            raise InputError(f"source {source.name!r}: filters work on Parquet only; its files are {train[0]}")
    excluded: list[str] = []
    if corpus.leave_out:
        with explained(f"{corpus.leave_out} is not a file of tools/contamination.py --held_out --leave_out"):
            excluded = read_input_json(resolve_path(corpus.leave_out))["documents"]
    if token_cache and len(lists) > stored:
        with contextlib.suppress(OSError):  # a full or read-only disk
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.write_sealed(path, lists)
    return replace(corpus, resolved=resolved, excluded=frozenset(excluded))


def _locate(source: Source) -> Files:
    """The files of a source's training split."""
    if source.builtin:
        return "parquet", [str(docstring_file())]
    if source.files:
        return _list_files(source.name, source.files)
    where = f"source {source.name!r}: dataset {source.dataset!r} (config {source.config!r}, {source.revision!r})"
    # in an empty cache folder, as `datasets` would else open a cached table, which lists no files
    with explained(f"{where} cannot be opened"), tempfile.TemporaryDirectory() as new:
        builder = datasets.load_dataset_builder(source.dataset, source.config, revision=source.revision, cache_dir=new)
    splits = builder.config.data_files or {}
    if source.split not in splits:
        raise InputError(f"{where} has no split {source.split!r}; it has {sorted(splits)}")
    if builder.name not in READERS:
        raise InputError(f"{where} is {builder.name} data; convert it to one of {', '.join(READERS)}, and use `files:`")
    return builder.name, sorted(splits[source.split])


def _list_files(name: str, patterns: str | list[str]) -> Files:
    """Files, folders and globs, local or of any `fsspec` URL."""
    formats: dict[str, str] = {}  # by path
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        # an empty path would be the current folder
        paths = _remote_paths(name, pattern) if "://" in pattern else _local_paths(resolve_path(pattern or os.devnull))
        readable = {path: format for path in paths if (format := _format_of(path))}
        if not readable:
            raise InputError(
                f"source {name!r}: {pattern!r} does not exist, or has no file that can be read: {', '.join(FORMATS)}, "
                f"text and JSON also compressed ({', '.join(COMPRESSIONS)}); hidden files of a folder are ignored"
            )
        if others := [path for path in paths if path not in readable]:
            log_once(f"Ignored     {counted(len(others), 'file')} of {pattern} in other formats, such as {others[0]}")
        formats.update(readable)
    kinds = sorted(set(formats.values()))
    if len(kinds) > 1:
        raise InputError(f"{patterns!r} mixes formats ({', '.join(kinds)}): select one with a glob, or use a --corpus")
    return kinds[0], sorted(formats)


def _local_paths(path: Path) -> list[str]:
    """Paths of a file, of a glob, or of all files below a folder; a file with several symlinks is listed once."""
    if path.is_file():
        return [str(path)]
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():  # of `Dataset.save_to_disk`
        with explained(f"{path} is not a folder of save_to_disk"):  # it may also hold caches of `map`
            return [shard["filename"] for shard in datasets.load_from_disk(path).cache_files]
    if (path / "dataset_dict.json").is_file():  # of `DatasetDict.save_to_disk`
        raise InputError(f"{path} has several splits: name one, such as {path / 'train'}, and one as --validation_file")
    pattern = f"{glob.escape(str(path))}/**" if path.is_dir() else str(path)
    paths = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)), reverse=True)
    if path.is_dir():  # a data set in the Hub's layout: train/, or train-00000.parquet
        names = [(one, Path(one).relative_to(path).parts) for one in paths if _format_of(one)]
        splits = {found[0]: one for one, parts in names if (found := _SPLIT.match(parts[0]) or _SPLIT.match(parts[-1]))}
        if "train" in splits and len(splits) > 1:
            example = Path(splits["train"])
            first, *below = example.relative_to(path).parts
            is_folder = below and _SPLIT.match(first)
            named = path / first / "**" if is_folder else example.parent / f"train*{example.suffix}"
            raise InputError(
                f"{path} has files of several splits ({', '.join(sorted(splits.values()))}): name one, such as "
                f"{str(named)!r}, or all, {str(path / '**')!r}"
            )
    return list({os.path.realpath(one): one for one in paths}.values())


def _remote_paths(name: str, pattern: str) -> list[str]:
    """URLs of the files behind a remote file, glob or folder (s3://, gs://, https://, ...). Raises `InputError`."""
    is_folder = "*" not in pattern and not _format_of(pattern)
    with explained(f"source {name!r}: cannot list {pattern!r}"):
        return resolve_pattern(f"{pattern.rstrip('/')}/**" if is_folder else pattern, "")


def text_bytes(corpus: Corpus) -> int | None:
    """Bytes of the training text: the uncompressed text column of Parquet files, the `_text_share` of JSON lines, else
    the file sizes; None where a file is remote or compressed."""
    total = 0.0
    for source in corpus.sources:
        format, files = corpus.files(source, "train")
        if any("://" in path or Path(path).suffix.lower() in COMPRESSIONS for path in files):
            return None
        share = _text_share(files[0], source.text_column) if format == "json" else 1.0
        for path in files:
            if format != "parquet":
                total += share * Path(path).stat().st_size
                continue
            with explained(f"{path} is not a Parquet file"):
                footer = pq.read_metadata(path)
            groups = map(footer.row_group, range(footer.num_row_groups))
            columns = (group.column(number) for group in groups for number in range(group.num_columns))
            total += sum(one.total_uncompressed_size for one in columns if one.path_in_schema == source.text_column)
    return round(total)


def _text_share(path: str, column: str) -> float:
    """Bytes of text / bytes of a JSON-lines file, in its first megabyte; 1.0 if that cannot be read."""
    with (
        contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
        open(path, "rb") as file,
    ):
        lines = file.readlines(1 << 20)
        return sum(len(json.loads(line)[column].encode()) for line in lines) / sum(map(len, lines))
    return 1.0


def in_words(corpus: Corpus) -> str:
    """A corpus as text: its name, and each source with its share; for `--train_file`, with its files."""
    shares = zip(corpus.sources, corpus.shares, strict=True)
    return f"{corpus.name}: " + ", ".join(f"{_where(source)} {share:.1%}" for source, share in shares)


def _where(source: Source) -> str:
    if source.name != TRAIN_FILE or not source.files:
        return source.name
    held_out = f" (held out: {' '.join(source.validation_files)})" if source.validation_files else ""
    return " ".join(source.files) + held_out


def hub_ids(corpus: Corpus) -> list[str]:
    """The datasets of a corpus that are on the Hub."""
    return sorted({each.dataset for each in corpus.sources if each.dataset and not Path(each.dataset).exists()})


def _format_of(path: str) -> str | None:
    stem, suffix = os.path.splitext(path.lower())
    return TEXT_FORMATS.get(os.path.splitext(stem)[1]) if suffix in COMPRESSIONS else FORMATS.get(suffix)


def hash_files(corpus: Corpus, cache_folder: str | Path) -> Corpus:
    """Fill `file_hashes` of a resolved corpus. Hashes are cached in a file of `cache_folder`, and computed again where
    size, times or inode differ. Raises `InputError` for a validation file that is also a training file."""
    path, newest_ns = Path(cache_folder, HASHES_NAME), time.time_ns() - _MTIME_RESOLUTION_NS
    cached: dict[str, FileHash] = {}
    with contextlib.suppress(OSError, ValueError, KeyError):  # missing or damaged
        cached = {name: FileHash(*entry) for name, entry in durable.read_sealed(path)["files"].items()}
    names = sorted({name for _, names in corpus.resolved.values() for name in names})
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:  # hashing releases the GIL
        hashed = threads.map(lambda name: _hash_file(name, cached.get(name)), names)
        hashed = Bar(hashed, total=len(names), desc="Hashing files", delay=2, leave=False)
        try:
            file_hashes = dict(zip(names, hashed, strict=True))
        except OSError as error:  # also with `on_bad_shard: skip`, as the fingerprint needs every file
            raise InputError(f"a file of the corpus cannot be hashed: {error}; fix it, or leave it out") from None
    cacheable = {name: one for name, one in file_hashes.items() if one.stamp and max(one.stamp[1:3]) < newest_ns}
    if cacheable != cached:
        with contextlib.suppress(OSError):  # a full or read-only disk: hashed again at the next start
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.write_sealed(path, {"files": cacheable})
    corpus = replace(corpus, file_hashes=file_hashes)
    _check_held_out(corpus)
    return corpus


def _hash_file(path: str, cached: FileHash | None = None) -> FileHash:
    """The hash of a file; the `cached` one if the file still has its stamp."""
    if re.match(f"hf://[^@]+@{HUB_COMMIT}/", path):  # a branch may change
        return FileHash([path], None)
    if "://" in path:
        system, inner = fsspec.core.url_to_fs(path)
        info = system.info(inner)
        version = next((str(info[name]) for name in _VERSION_KEYS if info.get(name)), None)
        return FileHash([path, info.get("size"), version], None)
    stat = os.stat(path)  # before hashing, so that a change during it invalidates the cached hash
    stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    if cached and cached.stamp == stamp:
        return cached
    return FileHash([os.path.basename(path), stamp[0], durable.sha256(path)[:32]], stamp)


def _check_held_out(corpus: Corpus) -> None:
    """Raise `InputError` for a validation file with the content of a training file, whatever its name."""
    content = {path: str(one.values[1:] if one.stamp else one.values) for path, one in corpus.file_hashes.items()}
    trained = {content[path]: path for source in corpus.sources for path in corpus.files(source, "train")[1]}
    trained = {one: path for one, path in trained.items() if corpus.file_hashes[path].values[1:2] != [0]}  # not empty
    for source in corpus.sources:
        for path in corpus.files(source, "validation")[1] if source.validation_files else ():
            if same := trained.get(content[path]):
                raise InputError(
                    f"source {source.name!r}: the validation file {path} is the training file {same}; name held-out "
                    "text, or leave validation_files out: a share of the documents is then held out"
                )


def corpus_fingerprint(corpus: Corpus) -> dict[str, Any]:
    """The settings of a hashed corpus that its blocks depend on: the sources' settings, and files' contents."""
    contents = {}
    for source in corpus.sources:
        files = [corpus.files(source, split)[1] for split in ("train", "validation")]
        values = [[corpus.file_hashes[path].values for path in paths] for paths in files]
        digest = durable.fingerprint([source.text_column, source.filters, values])
        contents[f"source {source.name}"] = f"{len(files[0])} files, {digest}"
    if corpus.excluded:
        contents["leave_out"] = durable.fingerprint(sorted(corpus.excluded))
    if any(format == "text" for format, _ in corpus.resolved.values()):
        contents["text_files"] = "a line of blanks separates documents"  # in earlier versions, it was part of the text
    return {**contents, "validation_share": corpus.validation_share, "language": corpus.language}


def check_unchanged(corpus: Corpus, path: str | None = None) -> None:
    """Raise `RunError` if a local file (with `path`: that file) has changed since `hash_files`. Takes microseconds per
    file: it is hashed again only if size, times or inode differ from those of its last hash."""
    hashes = corpus.file_hashes
    for name in hashes if path is None else hashes.keys() & {path}:
        try:
            now = _hash_file(name, hashes[name]) if hashes[name].stamp else hashes[name]
        except OSError:
            now = None
        if not now or now.values != hashes[name].values:
            raise RunError(
                f"{name} was changed, replaced or removed during this run. Restore the file and start the "
                "same command again, or start a new run in another output_dir"
            )
        hashes[name] = now
