"""From documents to the blocks of a run (paper, sections 3.2 and 4.2), read as they are needed.

Each file is tokenized and packed by itself, so that its blocks are the same in every pass (those of pairs, in every
tenth); the mixture takes whole blocks, so that shares of blocks are shares of tokens whatever the length of a source's
documents (drawing documents in proportion to size would hand a corpus of books a thousand times its share).
`token_cache` gives the same blocks in the same order from disk.
"""

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from roberta_recipe.data.corpus import Corpus, check_unchanged, corpus_fingerprint
from roberta_recipe.data.documents import Row, file_rows
from roberta_recipe.data.formats import PACKERS, has_pairs
from roberta_recipe.data.order import (
    REPEATS,
    WINDOWS,
    Skipped,
    batches_of,
    block_id,
    drawn_evenly,
    file_order,
    interleave,
    mixture,
    random_order,
    source_of,
    taken_of_source,
)
from roberta_recipe.data.packing import Columns, PackState
from roberta_recipe.data.pairs import REVISION, VERSIONS
from roberta_recipe.data.phrases import COLUMN, Phrases, marking_encoder, without_marks
from roberta_recipe.data.tokenization import boundary_ids, corpus_encoder, split_sentences, tokenizer_fingerprint
from roberta_recipe.errors import InputError
from roberta_recipe.log import Bar, counted, logger

COUNTS = (
    "passes",
    "documents",
    "empty_documents",
    "held_out_documents",
    "sentences",
    "split_sentences",
    "tokens",
    "blocks",
    "bad_files",
    "lost_rows",
)
_PACKED = ("documents", "sentences", "split_sentences", "tokens", "blocks")  # of these, what a packer counts
_TEXT_PER_CALL = 1 << 19  # characters a call of the tokenizer: enough to occupy the cores, little to wait for
_POSITIONS_PER_CALL = 4096
_NARROW = (np.uint8, np.uint16, np.int32, np.int64)  # of a column that a data worker sends

# {"input_ids": (<= max_seq_length,) uint16 or int32, "epoch": int, "block_id": int}, and the packer's other columns
Block = dict[str, Any]


@dataclass
class SourceState:
    """Where the reading of one source stands, at the border between two of its blocks."""

    taken: int = 0  # blocks since the beginning of the run
    epoch: int = 0  # pass
    block: int = 0  # blocks of this pass already made
    file: int = 0  # files of this pass already done
    row: int = 0  # of the file: the document in progress; -1 after the last document
    pack: PackState = field(default_factory=PackState)  # of the file
    counts: list[int] = field(default_factory=lambda: [0] * len(COUNTS))  # as in COUNTS, without this file's `pack`

    def copy(self) -> "SourceState":
        pack = replace(self.pack, open=[*self.pack.open])
        return replace(self, pack=pack, counts=[*self.counts])

    def count(self, name: str, number: int) -> None:
        self.counts[COUNTS.index(name)] += number

    def table(self) -> list[int]:
        """All counts up to here."""
        return [
            n + (getattr(self.pack, name) if name in _PACKED else 0)
            for name, n in zip(COUNTS, self.counts, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "SourceState":
        return cls(**{**values, "pack": PackState(**values["pack"])})


class TextReader:
    """Makes blocks from text. `counts` is (sources, len(COUNTS)) int64 in shared memory: right also when a data worker
    does the reading, and ahead of training by what is shuffled and prefetched."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        *,
        input_format: str,
        max_seq_length: int,
        seed: int,
        shuffle_window: int = 0,
        phrases: Phrases | None = None,
    ):
        self.corpus, self.tokenizer, self.phrases = corpus, tokenizer, phrases
        self.input_format, self.max_seq_length = input_format, max_seq_length
        self.seed, self.shuffle_window = seed, shuffle_window
        self.dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.int32
        self.counts = torch.zeros(len(corpus.sources), len(COUNTS), dtype=torch.int64).share_memory_()

    def blocks(
        self, batches: Iterable[tuple[range, ...]], start: int = 0, states: list[dict] | None = None
    ) -> Iterator[Block]:
        """The blocks at the positions of `batches` (ascending); everything from position `start` on is read for them.

        The last block of each batch carries `"states"`: the `SourceState` of every source at the beginning of the
        window that it was in. With them, as `to_dict` gives them, a later call can resume at any later `start` without
        reading what came before. They are shared by the batches of a window: with NSP, each has 32,768 tokens of
        earlier documents.
        """
        encode = self.encoder()
        windows = [SourceState.from_dict(state) for state in states or []] or [
            SourceState() for _ in self.corpus.sources
        ]
        shuffled = []
        for number, taken in enumerate(taken_of_source(self.corpus.shares, start)):
            self._share_counts(number, windows[number])
            from_window = self._shuffled(number, windows[number].copy(), encode)
            shuffled.append(itertools.islice(from_window, taken - windows[number].taken, None))
        sources = _sources_from(self.corpus.shares, start)
        for batch in batches:
            for positions in batch:
                for position in range(start, positions.stop):
                    number = next(sources)
                    block, windows[number] = next(shuffled[number])
                    if position == batch[-1][-1]:
                        block["states"] = [*windows]
                    if position in positions:
                        yield block
                start = positions.stop

    def encoder(self) -> Callable[[list[str]], list[list[int]]]:
        """What makes ids of texts, with `phrases` marked where they are wanted."""
        return marking_encoder(self.tokenizer, self.phrases) if self.phrases else corpus_encoder(self.tokenizer)

    def validation(self, limit: int | None) -> Iterator[Block]:
        """Blocks drawn evenly from the held-out text of each source, in the proportions of the mixture as far as each
        source goes. With a limit, files of a source are read, in an order drawn from the seed, until they hold as many
        blocks; all of its own validation files, and all files without a limit, which takes all blocks."""
        encode = self.encoder()
        sources = range(len(self.corpus.sources))
        with Bar(desc="Reading validation", unit=" blocks", mininterval=1, leave=False) as bar:
            held_out: list[list[Block]] = [[] for _ in sources]
            for number in sources:
                enough = None if self.corpus.sources[number].validation_files else limit
                for block in self._in_file_order(number, SourceState(), encode, "validation", enough):
                    held_out[number].append(block)
                    bar.update()
        drawn = drawn_evenly([*map(len, held_out)], self.corpus.shares, limit, self.seed)
        streams = [map(held_out[number].__getitem__, indices) for number, indices in enumerate(drawn)]
        return interleave(streams, self.corpus.shares)

    def _shuffled(
        self, number: int, state: SourceState, encode: Callable[[list[str]], list[list[int]]]
    ) -> Iterator[tuple[Block, SourceState]]:
        """(block, state at the beginning of its window): the blocks of one source, shuffled within windows.

        A window ends after `shuffle_window` blocks, or with the pass. For each block that is given out a block is read
        ahead: after the first window, no step waits for a whole window.
        """
        size = max(self.shuffle_window, 1)
        reading = self._in_file_order(number, state, encode, "train")
        ahead: deque[tuple[tuple[int, int], SourceState, Block]] = deque()

        def read_ahead() -> None:
            before = state.copy()
            block = next(reading)
            window = (block["epoch"], (state.block - 1) // size)
            first = ahead[-1][1] if ahead and ahead[-1][0] == window else before
            ahead.append((window, first, block))

        read_ahead()
        while True:
            window, begun, _ = ahead[0]
            while ahead[-1][0] == window:
                read_ahead()
            current = []
            while ahead[0][0] == window:
                current.append(ahead.popleft()[2])
            for position in random_order(self.seed, WINDOWS, (number, *window), len(current)):
                yield current[position], begun
                read_ahead()

    def _in_file_order(
        self,
        number: int,
        state: SourceState,
        encode: Callable[[list[str]], list[list[int]]],
        split: str,
        enough: int | None = None,
    ) -> Iterator[Block]:
        """The blocks of one source from `state` on, which is kept up to date: pass after pass of training text, or one
        pass of validation text, which ends with the file that makes it `enough`."""
        source = self.corpus.sources[number]
        _, files = self.corpus.files(source, split)
        while True:
            order = file_order(number, len(files), seed=self.seed, epoch=state.epoch)
            for file in order[state.file :]:
                rows = file_rows(self.corpus, source, split, files[file], start=state.row) if state.row >= 0 else ()
                for columns in self.pack_rows(rows, state, encode):
                    state.taken += 1
                    state.block += 1
                    self._share_counts(number, state)
                    name = block_id(number, file, state.pack.blocks - 1)
                    yield {**columns, "epoch": state.epoch, "block_id": name}
                state.counts = state.table()
                state.file, state.row, state.pack = state.file + 1, 0, PackState()
                if enough is not None and state.taken >= enough:
                    break
            state.count("passes", 1)
            self._share_counts(number, state)
            if split == "validation":
                return
            if state.block == 0:
                raise InputError(f"source {source.name!r} is empty: none of its documents has text to train on")
            state.epoch, state.block, state.file = state.epoch + 1, 0, 0

    def pack_rows(
        self, rows: Iterable[Row], state: SourceState, encode: Callable[[list[str]], list[list[int]]]
    ) -> Iterator[Columns]:
        """The blocks of the rows of one file, `input_ids` as an array of `dtype`; `state` is kept up to date."""
        state.pack.version = state.epoch % VERSIONS
        packed = PACKERS[self.input_format](
            _in_progress(_tokenize(rows, encode, self.input_format, self.corpus.language), state),
            state.pack,
            max_seq_length=self.max_seq_length,
            **boundary_ids(self.tokenizer),
        )
        for columns in packed:
            ids = columns["input_ids"]
            if self.phrases:
                ids, columns[COLUMN] = without_marks(ids)
            yield {**columns, "input_ids": np.asarray(ids, dtype=self.dtype)}

    def _share_counts(self, number: int, state: SourceState) -> None:
        worker = torch.utils.data.get_worker_info()
        if worker is None or worker.id == 0:
            self.counts.numpy()[number] = state.table()  # the same memory, without a tensor for each block

    def fingerprint(self) -> dict[str, Any]:
        """What the blocks depend on, but for their order."""
        return {
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "input_format": self.input_format,
            "max_seq_length": self.max_seq_length,
            **({"phrases": list(self.phrases)} if self.phrases else {}),
            **({"revision": REVISION} if has_pairs(self.input_format) else {}),
            **corpus_fingerprint(self.corpus),
        }

    def check_unchanged(self) -> None:
        """Raise `RunError` where a file of the corpus is no longer what the fingerprint was made from."""
        check_unchanged(self.corpus)

    def passes(self, positions: int) -> dict[str, int]:
        """How often each source has been read to its end; `positions` is not needed: passes are counted."""
        return {name: counts["passes"] for name, counts in self.count_table().items()}

    def count_table(self, split: str = "train") -> dict[str, dict[str, int]]:
        """What was read, split, held out and skipped so far, by source; a reader reads one split."""
        rows = zip(self.corpus.sources, self.counts.tolist(), strict=True)
        return {source.name: dict(zip(COUNTS, row, strict=True)) for source, row in rows}


class TrainBlocks(torch.utils.data.IterableDataset):
    """One process's share of the endless sequence of training blocks, from position `start` on, without `skipped`.

    `reader` is a `TextReader` or a `TokenCache`. `batch_size`: blocks of an optimizer step that are this process's.
    With `limit`, the first so many blocks only, again and again in a new order each time. `threads_in_worker` lets a
    data worker tokenize on all cores; a forked worker hangs if its parent has done so before
    (TOKENIZERS_PARALLELISM=false prevents that in the parent).
    """

    def __init__(
        self,
        reader: Any,
        *,
        batch_size: int,
        processes: int = 1,
        process: int = 0,
        start: int = 0,
        states: list[dict] | None = None,
        skipped: Skipped | None = None,
        limit: int | None = None,
        threads_in_worker: bool = False,
    ):
        self.reader, self.batch_size, self.processes, self.process = reader, batch_size, processes, process
        self.skipped = skipped
        self.start, self.states, self.limit, self.threads_in_worker = start, states, limit, threads_in_worker

    def __iter__(self) -> Iterator[Block]:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and self.threads_in_worker:
            os.environ["TOKENIZERS_PARALLELISM"] = "true"
        shard = (worker.num_workers, worker.id) if worker else (1, 0)
        return self.blocks(batches_of(self.start, self.batch_size, self.processes, self.process, *shard, self.skipped))

    def blocks(self, batches: Iterable[tuple[range, ...]]) -> Iterator[Block]:
        """The blocks at the positions of `batches`, ascending and from `start` on."""
        return self._repeated(batches) if self.limit else self.reader.blocks(batches, self.start, self.states)

    def _repeated(self, batches: Iterable[tuple[range, ...]]) -> Iterator[Block]:
        """The first `limit` blocks (at most one pass), again and again."""
        kept, ended = {}, set()
        for block in self.reader.blocks([(range(self.limit),)]):
            if block["epoch"]:
                ended.add(source_of(block["block_id"]))
            if len(ended) == len(self.reader.corpus.sources):
                has = counted(len(kept), "block")
                logger.warning(f"max_train_samples={self.limit}: the corpus has {has}, and all are used")
                break
            kept.setdefault(block["block_id"], {name: block[name] for name in block if name not in ("epoch", "states")})
        kept, epoch, order = list(kept.values()), None, None
        for position in itertools.chain.from_iterable(itertools.chain.from_iterable(batches)):
            if position // len(kept) != epoch:
                epoch = position // len(kept)
                order = random_order(self.reader.seed, REPEATS, (epoch,), len(kept))
            yield {**kept[order[position % len(kept)]], "epoch": epoch}


@dataclass
class MicroBatches:
    """A collate function: a process's blocks of an optimizer step to its micro-batches of `size` blocks, each made by
    `collate`; as `packed` sends them. The last has the blocks' `states`, where they have some.

    Blocks of like length come together, the longest first, so that fewer positions are padded: a step's gradient does
    not depend on how its blocks are divided.
    """

    collate: Callable[[list[Block]], dict[str, Any]]
    size: int

    def __call__(self, blocks: list[Block]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        states = {"states": blocks[-1].pop("states")} if "states" in blocks[-1] else {}
        blocks = sorted(blocks, key=lambda block: -len(block["input_ids"]))
        made = [self.collate(blocks[start : start + self.size]) for start in range(0, len(blocks), self.size)]
        made[-1] |= states
        return packed(made)


def packed(micro_batches: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """(columns, micro-batches): one 1-D tensor per column, in the narrowest integer type that holds it, and the
    micro-batches with shapes in place of tensors. A data worker sends each tensor through /dev/shm, as a file
    descriptor."""
    columns: dict[str, list[np.ndarray]] = {}
    for name, value in itertools.chain.from_iterable(micro_batch.items() for micro_batch in micro_batches):
        if isinstance(value, torch.Tensor):
            columns.setdefault(name, []).append(value.numpy().ravel())
    shapes = [{name: v.shape if name in columns else v for name, v in batch.items()} for batch in micro_batches]
    return {name: _narrowed(np.concatenate(parts)) for name, parts in columns.items()}, shapes


def _narrowed(values: np.ndarray) -> torch.Tensor:
    low, high = values.min(initial=0), values.max(initial=0)
    fitting = (dtype for dtype in _NARROW if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)
    return torch.from_numpy(values.astype(next(fitting)))


def unpacked(columns: dict[str, torch.Tensor], shapes: list[dict[str, Any]], device: Any) -> list[dict[str, Any]]:
    """The micro-batches that were `packed`: int64 tensors on `device`, views of one tensor per column."""
    parts = {}
    for name, column in columns.items():
        sizes = [math.prod(batch[name]) for batch in shapes if name in batch]
        parts[name] = iter(column.to(device, non_blocking=True).long().split(sizes))
    return [
        {name: next(parts[name]).view(value) if name in parts else value for name, value in batch.items()}
        for batch in shapes
    ]


class MicroBatchLoader(torch.utils.data.DataLoader):
    """A `DataLoader` over `TrainBlocks` that gives one micro-batch after another, on `device`; `collate_fn` is a
    `MicroBatches`. It waits for the data of a step within `waiting()`."""

    def __init__(self, *args, device: torch.device, waiting: Callable[[], AbstractContextManager], **kwargs):
        super().__init__(*args, **kwargs)
        self.device, self.waiting = device, waiting

    def __iter__(self) -> Iterator[dict[str, Any]]:
        steps = super().__iter__()
        while True:
            with self.waiting():
                step = next(steps, None)
            if step is None:
                return
            yield from unpacked(*step, self.device)


def _sources_from(shares: list[float], start: int) -> Iterator[int]:
    """The number of the source at each position from `start` on."""
    for position in itertools.count(start, _POSITIONS_PER_CALL):
        yield from mixture(shares, position, _POSITIONS_PER_CALL)[0].tolist()


def _in_progress(rows: Iterable[tuple[Row, list[list[int]]]], state: SourceState) -> Iterator[list[list[int]]]:
    """Documents as a packer wants them; `state` is told of each as it is taken."""
    for row, sentences in rows:
        state.row = row.number if row.text is not None else -1
        state.count("empty_documents", row.empty)
        state.count("held_out_documents", row.held_out)
        state.count("bad_files", row.bad_files)
        state.count("lost_rows", row.lost_rows)
        if row.text is not None:
            yield sentences


def _tokenize(
    rows: Iterable[Row], encode: Callable[[list[str]], list[list[int]]], input_format: str, language: str
) -> Iterator[tuple[Row, list[list[int]]]]:
    """Each row with its sentences as ids, `_TEXT_PER_CALL` characters of documents at a time."""
    rows = iter(rows)
    for first in rows:
        batch, size = [first], len(first.text or "")
        while size < _TEXT_PER_CALL and (row := next(rows, None)) is not None:
            batch.append(row)
            size += len(row.text or "")
        split = [_sentences(row.text or "", input_format, language) for row in batch]
        ids = iter(encode([sentence for sentences in split for sentence in sentences]))
        for row, sentences in zip(batch, split, strict=True):
            # a normalizer can take all of a sentence away, as BERT's does with a soft hyphen: no ids, no sentence
            yield row, [sentence for sentence in itertools.islice(ids, len(sentences)) if sentence]


def _sentences(text: str, input_format: str, language: str) -> list[str]:
    """The pieces of a document that are tokenized separately."""
    if input_format == "contiguous":
        return [text]
    before = " " if has_pairs(input_format) else ""  # of sentences that stand side by side in a segment
    return [before + sentence for sentence in split_sentences(text, language)]
