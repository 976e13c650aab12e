"""A corpus tokenized and packed once, and read many times: 160 GB for 500K steps of 8K is some 60 passes (Table 9).

    <folder>/fingerprint.json                       made from what; another tokenizer, format or length is refused
    <folder>/<source>/{train,validation}-<n>.arrow  the blocks of file n of the source, memory-mapped: 2 bytes a token
    <folder>/<source>/{train,validation}-<n>.json   written behind it: its counts, size and SHA-256
    <folder>/manifest.json                          all of these; the cache is complete

Files are packed independently, each by one process, so that building goes on where it stopped and spreads over
processes and machines; two that make the same shard make the same bytes.
"""

import itertools
import logging
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from roberta_recipe import durable
from roberta_recipe.args import InputError, RunError
from roberta_recipe.corpus import Corpus, Row, file_order, file_rows, interleave
from roberta_recipe.order import WINDOWS, block_id, mixture, random_order, taken_of_source
from roberta_recipe.stream import COUNTS, Block, SourceState, TextReader
from roberta_recipe.tokenization import corpus_encoder

logger = logging.getLogger("recipe")

FINGERPRINT = "fingerprint.json"
_ROWS_PER_BATCH = 1024  # blocks: about 1 MB
_POLL_S = 2.0


class Task(NamedTuple):
    """A file to pack."""

    source: int
    part: str
    file: int


class TokenCache:
    """The blocks of a complete cache, in the same order and with the same names as `TextReader` gives them.

    Nothing has to be read to start at any place. A `shuffle_window` of a whole pass costs 8 bytes a block of the
    source, in each data worker.
    """

    def __init__(self, folder: str | Path, corpus: Corpus, *, seed: int, shuffle_window: int = 0):
        self.folder, self.corpus, self.seed, self.shuffle_window = Path(folder), corpus, seed, shuffle_window
        self.manifest = durable.read_json(self.folder / durable.MANIFEST)
        self._shards: dict[Task, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._passes: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}
        self._windows: dict[int, tuple[tuple[int, int], np.ndarray]] = {}
        for shard in self.manifest["shards"]:
            path = self.folder / shard["path"]
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                raise InputError(
                    f"token_cache={folder}: {shard['path']} is missing or not of {shard['bytes']} bytes; --pack_only "
                    "makes it again"
                )
        self._sizes = {  # blocks of each file
            part: [self._block_counts(source.name, part) for source in corpus.sources]
            for part in ("train", "validation")
        }
        for source, sizes in zip(corpus.sources, self._sizes["train"], strict=True):
            if not sizes.sum():
                raise InputError(f"source {source.name!r} is empty: none of its documents has text to train on")

    def _block_counts(self, source: str, part: str) -> np.ndarray:
        shards = [s for s in self.manifest["shards"] if s["source"] == source and s["part"] == part]
        return np.array([shard["counts"]["blocks"] for shard in shards], dtype=np.int64)

    def blocks(self, batches: Iterable[range], start: int = 0, states: list[dict] | None = None) -> Iterator[Block]:
        """The blocks at the places of `batches`; `start` and `states` say nothing that a cache needs to know."""
        for batch in batches:
            for source, index in zip(*mixture(self.corpus.shares, batch.start, len(batch)), strict=True):
                yield self._block(int(source), int(index))

    def _block(self, source: int, index: int) -> Block:
        """The block that the endless sequence of a source has at `index`."""
        sizes = self._sizes["train"][source]
        total = int(sizes.sum())
        epoch, place = divmod(index, total)
        size = max(self.shuffle_window, 1)
        window, place = divmod(place, size)
        if self._windows.get(source, (None,))[0] != (epoch, window):
            count = min(size, total - window * size)
            order = random_order(self.seed, WINDOWS, (source, epoch, window), count)
            self._windows[source] = ((epoch, window), order)
        if self._passes.get(source, (None,))[0] != epoch:
            files = np.array(file_order(self.corpus, self.corpus.sources[source], "train", seed=self.seed, epoch=epoch))
            self._passes[source] = (epoch, files, np.cumsum(sizes[files]))
        place = window * size + int(self._windows[source][1][place])
        _, files, ends = self._passes[source]
        number = int(np.searchsorted(ends, place, side="right"))
        file = int(files[number])
        in_file = place - int(ends[number]) + int(sizes[file])
        ids = self._ids(Task(source, "train", file), in_file)
        return {"input_ids": ids, "epoch": epoch, "block_id": block_id(source, file, in_file)}

    def validation(self, limit: int | None) -> Iterator[Block]:
        """The held-out blocks in the order of `TextReader.validation`."""
        streams = [self._validation_of(number) for number in range(len(self.corpus.sources))]
        for number, block in enumerate(interleave(streams, self.corpus.shares)):
            if number == limit:
                return
            yield block

    def _validation_of(self, source: int) -> Iterator[Block]:
        for file in file_order(self.corpus, self.corpus.sources[source], "validation", seed=self.seed, epoch=0):
            for index in range(self._sizes["validation"][source][file]):
                ids = self._ids(Task(source, "validation", file), index)
                yield {"input_ids": ids, "epoch": 0, "block_id": block_id(source, file, index)}

    def _ids(self, task: Task, index: int) -> np.ndarray:
        """A block's ids, a view of the mapped file."""
        if task not in self._shards:
            with pa.memory_map(str(self.folder / shard_path(self.corpus, task)), "r") as source:
                reader = pa.ipc.open_file(source)
                columns = [reader.get_batch(n).column(0) for n in range(reader.num_record_batches)]
            self._shards[task] = [(column.offsets.to_numpy(), column.values.to_numpy()) for column in columns]
        offsets, values = self._shards[task][index // _ROWS_PER_BATCH]
        row = index % _ROWS_PER_BATCH
        return values[offsets[row] : offsets[row + 1]]

    def fingerprint(self) -> dict[str, Any]:
        """What the blocks depend on, but for their order: what the cache was made from."""
        return durable.read_json(self.folder / FINGERPRINT)

    def count_table(self, part: str = "train") -> dict[str, dict[str, int]]:
        """What was read, split, held out and skipped in the one pass that was packed, by source."""
        table = {source.name: dict.fromkeys(COUNTS, 0) for source in self.corpus.sources}
        for shard in self.manifest["shards"]:
            if shard["part"] == part:
                for name, number in shard["counts"].items():
                    table[shard["source"]][name] += number
        return table

    def passes(self, places: int) -> dict[str, float]:
        """How often each source has been seen when `places` blocks are consumed."""
        taken = taken_of_source(self.corpus.shares, places)
        sizes = [int(sizes.sum()) for sizes in self._sizes["train"]]
        return {s.name: round(n / size, 4) for s, n, size in zip(self.corpus.sources, taken, sizes, strict=True)}


def tokens_per_pass(folder: str | Path) -> int | None:
    """Tokens of the training part of a cache; None where it is not complete."""
    path = Path(folder) / durable.MANIFEST
    shards = durable.read_json(path)["shards"] if path.exists() else []
    return sum(s["counts"]["tokens"] for s in shards if s["part"] == "train") or None


def shard_path(corpus: Corpus, task: Task) -> str:
    return f"{corpus.sources[task.source].name}/{task.part}-{task.file:05d}.arrow"


def tasks(corpus: Corpus) -> list[Task]:
    """All shards: one of training for each file, and one of validation for each file that has some."""
    found = []
    for number, source in enumerate(corpus.sources):
        for part in ("train", "validation"):
            found += [Task(number, part, file) for file in range(len(corpus.files(source, part)[1]))]
    return found


def claim(folder: str | Path, fingerprint: dict[str, Any]) -> bool:
    """Whether `folder` holds a complete cache of this fingerprint; a new one is begun where there is none.

    Raises `InputError` for a cache made from something else.
    """
    folder, place = Path(folder), Path(folder) / FINGERPRINT
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = [entry for entry in folder.iterdir() if entry.name != place.name and entry.suffix != ".tmp"]
        if others and not place.exists():
            raise InputError(f"token_cache={folder} holds other files; name an empty or a new folder")
        if not place.exists():
            durable.write_json(place, fingerprint)
    except OSError as error:
        raise InputError(f"token_cache={folder} cannot be made: {error.strerror}") from None
    try:
        before = durable.read_json(place)
    except ValueError:
        raise InputError(f"token_cache={folder}: fingerprint.json cannot be read; remove the folder") from None
    if found := durable.differences(before, fingerprint):
        raise InputError(
            f"token_cache={folder} was made from something else: {'; '.join(found.values())}. Name another folder "
            "for this corpus, tokenizer, format and length"
        )
    return (folder / durable.MANIFEST).exists()


def build(folder: str | Path, reader: TextReader, *, num_proc: int, part: int = 0, parts: int = 1) -> bool:
    """Pack every `parts`-th file from the `part`-th on that is not packed yet; returns whether the cache is complete.

    A shard that is there but is not what was written is made again. Raises `InputError` for a bad shard and `RunError`
    where the disk is full; what was finished stays.
    """
    folder, corpus = Path(folder), reader.corpus
    claim(folder, reader.fingerprint())
    mine = [task for task in tasks(corpus) if task.part == "train" or corpus.sources[task.source].validation_files]
    mine = [
        task for task in mine[part::parts] if not all(_is_whole(folder, corpus, t) for t in _made_with(corpus, task))
    ]
    started_s, tokens = time.monotonic(), 0
    bar = tqdm(total=len(mine), desc="Packing", unit=" files", smoothing=0.1, disable=None)
    try:
        for made in _pack_all(folder, reader, mine, num_proc):
            tokens += made
            bar.update()
            bar.set_postfix_str(f"{tokens / (time.monotonic() - started_s) / 1e6:.2f} M tokens/s")
    except BrokenProcessPool:
        raise RunError(
            f"a packing process died, perhaps for want of memory; lower num_proc={num_proc} and start again: it goes "
            "on from the shards that are finished"
        ) from None
    except OSError as error:
        raise RunError(
            f"token_cache={folder} cannot be written: {error.strerror or error}; start again when that is mended: it "
            "goes on from the shards that are finished"
        ) from None
    finally:
        bar.close()
    if mine:
        elapsed_s = time.monotonic() - started_s
        logger.info(f"Packed {len(mine)} files, {tokens:,} tokens, {tokens / elapsed_s:,.0f} tokens/s: {folder}")
    return finish(folder, corpus)


def _made_with(corpus: Corpus, task: Task) -> list[Task]:
    """The shards that packing a file makes: also that of the documents held out of it."""
    separate = corpus.sources[task.source].validation_files or task.part == "validation"
    return [task] if separate else [task, task._replace(part="validation")]


def _is_whole(folder: Path, corpus: Corpus, task: Task) -> bool:
    path = folder / shard_path(corpus, task)
    try:
        shard = durable.read_json(path.with_suffix(".json"))
        return path.stat().st_size == shard["bytes"] and durable.sha256(path) == shard["sha256"]
    except (OSError, ValueError, KeyError):
        return False


def _pack_all(folder: Path, reader: TextReader, mine: list[Task], num_proc: int) -> Iterator[int]:
    """Tokens of each file as it is packed; by threads of the tokenizer, or by processes with one thread each."""
    if num_proc <= 1 or len(mine) <= 1:
        yield from (pack_file(folder, reader, task) for task in mine)
        return
    threads = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked process cannot use the threads of its parent
    try:
        with ProcessPoolExecutor(num_proc, multiprocessing.get_context("fork")) as pool:
            futures = [pool.submit(pack_file, folder, reader, task) for task in mine]
            try:
                yield from (future.result() for future in as_completed(futures))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if threads is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = threads


def pack_file(folder: Path, reader: TextReader, task: Task) -> int:
    """Write the shards of one file; returns the number of tokens in them."""
    corpus, encode, held_out = reader.corpus, corpus_encoder(reader.tokenizer), []
    source = corpus.sources[task.source]
    path = corpus.files(source, task.part)[1][task.file]
    rows = {task: file_rows(corpus, source, task.part, path, others=held_out)}
    rows |= {other: _held_out_rows(held_out) for other in _made_with(corpus, task)[1:]}
    tokens = 0
    for shard, documents in rows.items():
        state = SourceState()
        blocks = reader.pack_rows(documents, state, encode)
        _write_shard(folder / shard_path(corpus, shard), shard, reader, blocks, state)
        tokens += state.pack.tokens
    return tokens


def _held_out_rows(rows: list[Row]) -> Iterator[Row]:
    """What the training part of the file has left, once that is through."""
    yield from rows
    yield Row(-1, None)


def _write_shard(path: Path, task: Task, reader: TextReader, blocks: Iterator[np.ndarray], state: SourceState) -> None:
    """An Arrow file of `blocks`, and behind it what it holds; each whole or absent."""
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}.tmp")
    schema = pa.schema({"input_ids": pa.list_(pa.from_numpy_dtype(reader.dtype))})
    try:
        with pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            while batch := list(itertools.islice(blocks, _ROWS_PER_BATCH)):
                offsets = np.cumsum([0, *map(len, batch)])
                column = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), np.concatenate(batch))
                writer.write_batch(pa.record_batch([column], schema=schema))
        durable.sync(aside)
        facts = {"bytes": aside.stat().st_size, "sha256": durable.sha256(aside)}
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    place = {"source": reader.corpus.sources[task.source].name, "part": task.part, "file": task.file}
    counts = dict(zip(COUNTS, state.table(), strict=True))
    durable.write_json(path.with_suffix(".json"), {**place, **facts, "counts": counts})


def finish(folder: Path, corpus: Corpus) -> bool:
    """Write the manifest where all shards are there; returns whether they are."""
    shards = []
    for task in tasks(corpus):
        path = shard_path(corpus, task)
        try:
            shards.append({"path": path, **durable.read_json((folder / path).with_suffix(".json"))})
        except OSError:
            return False
    durable.write_json(folder / durable.MANIFEST, {"shards": shards})
    return True


def ensure(folder: str | Path, reader: TextReader, *, num_proc: int, process: int = 0, processes: int = 1) -> None:
    """Make the cache complete before training, each of `processes` packing its part, and wait until all have."""
    folder = Path(folder)
    if claim(folder, reader.fingerprint()):
        return
    complete = build(folder, reader, num_proc=num_proc, part=process, parts=processes)
    while not complete:  # no collective: packing may take longer than one may wait in it
        time.sleep(_POLL_S)
        complete = finish(folder, reader.corpus) if process == 0 else (folder / durable.MANIFEST).exists()
