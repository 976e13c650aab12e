"""Chunks: consecutive rows of one file, about 8 MB of text, tokenized and packed together (paper, section 4.2).

The blocks of a chunk are a function of its documents, its position and the format; no block crosses the end of a chunk,
so one block in thousands is short. `TextReader` packs chunks from text and records them in a `ChunkIndex`;
`token_cache.TokenCache` reads packed chunks from disk.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from roberta_recipe import durable
from roberta_recipe.data import NSP, SOP, packing, pairs
from roberta_recipe.data.corpus import Corpus, corpus_fingerprint
from roberta_recipe.data.documents import Row, file_rows, split_sentences
from roberta_recipe.data.packing import Columns, Document, Packer
from roberta_recipe.data.phrases import COLUMN, Phrases, encoder_with_marks
from roberta_recipe.data.tokenization import boundary_ids, corpus_encoder, tokenizer_fingerprint
from roberta_recipe.record import INDEX_NAME

CHUNK_BYTES = 8_000_000  # of UTF-8 text; a chunk ends with the document that reaches it
REVISION = "chunks of 8 MB"  # in fingerprints: caches and checkpoints of other revisions are refused
_SPLITTER = "1.0.32"  # of sentencex; any other version is in fingerprints, as it may split differently
_TEXT_PER_CALL = 1 << 19  # characters per tokenizer call: enough for all cores

# Packers by input format; for pairs by "format objective": nsp, sop, or in_order (no pair objective, text order)
PAIRS = {
    "segment_pair": pairs.segment_pair,
    "segment_pair_short": partial(pairs.segment_pair, short=pairs.SHORT),
    "sentence_pair": pairs.sentence_pair,
}
PACKERS: dict[str, Packer] = {
    "full_sentences": packing.full_sentences,
    "doc_sentences": packing.doc_sentences,
    "contiguous": packing.contiguous,
    **{f"{name} nsp": partial(packer, label=NSP) for name, packer in PAIRS.items()},
    **{f"{name} sop": partial(packer, label=SOP) for name, packer in PAIRS.items()},
    **{f"{name} in_order": partial(packer, label=SOP, share_of_ones=0.0) for name, packer in PAIRS.items()},
}


def pair_versions(input_format: str) -> int:
    """Number of packings of a text that successive passes cycle through: `pairs.VERSIONS` for pairs, else 1."""
    return pairs.VERSIONS if input_format.split()[0] in PAIRS else 1


class File(NamedTuple):
    """A file of a source, for one split and one version of its blocks."""

    source: int
    split: str
    number: int  # in sorted order
    version: int = 0


class Chunk(NamedTuple):
    """Position and size of a chunk; the rows include those of the other split, which are skipped."""

    row: int  # first row in the file
    end: int  # row after the last
    first_block: int  # index of its first block in the file
    blocks: int
    last: bool  # whether the file ends here
    counts: dict[str, int]  # as in `_counts`


def _counts(rows: list[Row], documents: list[Document], blocks: int, longest: float) -> dict[str, int]:
    """Statistics of a chunk, for run records. `longest`: tokens of the longest sentence that is not split."""
    sizes = [len(sentence) for sentences in documents for sentence in sentences]
    return {
        "documents": len(documents),
        "empty_documents": sum(row.empty for row in rows),
        "held_out_documents": sum(row.held_out for row in rows),
        "sentences": len(sizes),
        "split_sentences": sum(size > longest for size in sizes),
        "tokens": sum(sizes),
        "blocks": blocks,
        "bad_files": sum(row.bad_files for row in rows),
        "lost_rows": sum(row.lost_rows for row in rows),
    }


COUNTS = tuple(_counts([], [], 0, 0))


def sum_counts(chunks: Iterable[Chunk]) -> dict[str, int]:
    """Sum the counts of several chunks."""
    counts = [chunk.counts for chunk in chunks]
    return {name: sum(row.get(name, 0) for row in counts) for name in COUNTS}


class ChunkIndex:
    """Index of the packed chunks by file: a text file to which all processes of a run append lines. Damaged lines and
    lines of another text (`made_from`) are ignored, and their chunks are packed again."""

    def __init__(self, path: str | Path = os.devnull, made_from: str = ""):
        self._path, self._text_crc, self._bytes_read = path, zlib.crc32(made_from.encode()), 0
        self._chunks: dict[File, list[Chunk]] = {}

    def chunks(self, file: File) -> list[Chunk]:
        """The chunks of a file, including those that other processes have appended."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as stream:
            stream.seek(self._bytes_read)
            for line in stream:
                if not line.endswith(b"\n"):  # being written
                    break
                self._bytes_read += len(line)
                checksum, _, entry = line.rstrip(b"\n").partition(b" ")
                if checksum == b"%08x" % zlib.crc32(entry, self._text_crc):
                    key, number, chunk = json.loads(entry)
                    if number == len(chunks := self._chunks.setdefault(File(*key), [])):
                        chunks.append(Chunk(*chunk))
        return self._chunks.setdefault(file, [])

    def add(self, file: File, number: int, chunk: Chunk) -> None:
        """Append the chunk `number` of a file if it is not in the index."""
        if number == len(self.chunks(file)):
            self._chunks[file].append(chunk)
            entry = json.dumps([file, number, chunk]).encode()
            # on a full or read-only disk, the chunk is packed again after a restart
            with contextlib.suppress(OSError), open(self._path, "ab", buffering=0) as stream:
                stream.write(b"%08x %b\n" % (zlib.crc32(entry, self._text_crc), entry))


@dataclass(eq=False)
class TextReader:
    """Reader of chunks from text, tokenized and packed on demand."""

    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    packer: str  # a key of `PACKERS`
    max_seq_length: int
    seed: int
    shuffle_window: int = 1  # chunks whose blocks are permuted together; 0 keeps the order of the files
    phrases: Phrases | None = None
    index_folder: str | Path | None = None  # of the chunk index

    def __post_init__(self):
        self.versions = pair_versions(self.packer)  # more than 1: pairs
        self.dtype = np.uint16 if len(self.tokenizer) <= 1 << 16 else np.int32
        self.progress = torch.zeros(1, dtype=torch.int64).share_memory_()  # encoded texts, in data workers too

    @functools.cached_property
    def index(self) -> ChunkIndex:
        """The chunk index. Opened lazily: it needs file hashes, which `tools/evaluate.py` does not compute."""
        if not self.index_folder:
            return ChunkIndex()
        return ChunkIndex(Path(self.index_folder, INDEX_NAME), durable.fingerprint(self.fingerprint()))

    def indexed_chunks(self, file: File) -> list[Chunk]:
        """The chunks of a file that any process of the run has packed."""
        return self.index.chunks(file)

    def chunks(self, file: File, skip: int = 0) -> Iterator[tuple[Chunk, Sequence[Columns]]]:
        """The chunks of a file with their blocks. Indexed chunks within the first `skip` blocks are not read, and come
        without blocks."""
        skipped = [chunk for chunk in self.indexed_chunks(file) if chunk.first_block + chunk.blocks <= skip]
        yield from ((chunk, ()) for chunk in skipped)
        if skipped and skipped[-1].last:
            return
        row, first_block = (skipped[-1].end, skipped[-1].first_block + skipped[-1].blocks) if skipped else (0, 0)
        source = self.corpus.sources[file.source]
        path = self.corpus.files(source, file.split)[1][file.number]
        rows = file_rows(self.corpus, source, file.split, path, start=row)
        for number, (chunk, blocks) in enumerate(self.pack_rows(rows, file, row, first_block), len(skipped)):
            self.index.add(file, number, chunk)
            yield chunk, blocks

    def pack_rows(
        self, rows: Iterable[Row], file: File, row: int = 0, first_block: int = 0
    ) -> Iterator[tuple[Chunk, list[Columns]]]:
        """Yield each chunk with its blocks (`input_ids`: arrays of `dtype`). `rows`: a file's, from row `row` on."""
        for chunk_rows in _split_by_chunk(rows):
            texts = [one for one in chunk_rows if one.text is not None]
            documents, marks = self._tokenize([one.text for one in texts])
            key = (file.source, file.number, row, file.version)
            blocks = self._pack(documents, key, **boundary_ids(self.tokenizer))
            if self.phrases:
                for block, units in zip(blocks, self._pack(marks, key, bos_id=0, eos_id=0), strict=True):
                    block[COLUMN] = units["input_ids"].astype(np.uint8)
            for block in blocks:
                block["document"] = texts[block["document"]].number
            special = 4 if self.versions > 1 else 2  # special tokens of a block with one sentence
            longest = math.inf if self.packer == "contiguous" else self.max_seq_length - special
            counts = _counts(chunk_rows, documents, len(blocks), longest)
            last, end = chunk_rows[-1].text is None, chunk_rows[-1].number + 1
            yield Chunk(row, end, first_block, len(blocks), last, counts), blocks
            row, first_block = end, first_block + len(blocks)

    def _pack(self, documents: list[Document], key: tuple[int, ...], bos_id: int, eos_id: int) -> list[Columns]:
        packed = PACKERS[self.packer](documents, self.max_seq_length, bos_id, eos_id, key)
        return [{**block, "input_ids": np.asarray(block["input_ids"], dtype=self.dtype)} for block in packed]

    @functools.cached_property
    def _encode(self) -> Callable[[list[str]], tuple[list[list[int]], ...]]:
        """A function from texts to (ids,), or with phrases (ids, phrase marks)."""
        if self.phrases:
            return encoder_with_marks(self.tokenizer, self.phrases)
        encode = corpus_encoder(self.tokenizer)
        return lambda texts: (encode(texts),)

    def _tokenize(self, texts: list[str]) -> tuple[list[Document], list[Document]]:
        """(ids, phrase marks) by document and sentence; without phrases, no marks."""
        columns: tuple[list[Document], list[Document]] = [], []
        ends = itertools.accumulate(map(len, texts))
        for _, part in itertools.groupby(zip(ends, texts, strict=True), key=lambda item: item[0] // _TEXT_PER_CALL):
            split = [self._sentences(text) for _, text in part]
            encoded = self._encode([sentence for sentences in split for sentence in sentences])
            for column, rows in zip(columns, map(iter, encoded), strict=False):
                for sentences in split:
                    document = itertools.islice(rows, len(sentences))
                    # a normalizer may remove a whole sentence, as BERT's does with a soft hyphen;
                    # arrays, as lists would take 70 MB a chunk
                    column.append([array("i", sentence) for sentence in document if sentence])
            self.progress += len(split)
        return columns

    def _sentences(self, text: str) -> list[str]:
        """The parts of a document that are tokenized separately."""
        if self.packer == "contiguous":
            return [text]
        before = " " if self.versions > 1 else ""  # sentences of a segment follow each other without </s>
        return [before + sentence for sentence in split_sentences(text, self.corpus.language)]

    def fingerprint(self) -> dict[str, Any]:
        """All settings that the blocks depend on, except for their order."""
        splitter = version("sentencex")
        return {
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "input_format": self.packer,
            "max_seq_length": self.max_seq_length,
            "chunks": REVISION,
            **({"phrases": list(self.phrases)} if self.phrases else {}),
            **({"sentencex": splitter} if self.packer != "contiguous" and splitter != _SPLITTER else {}),
            **corpus_fingerprint(self.corpus),
        }


def _split_by_chunk(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Group rows into chunks. The last chunk ends with the end-of-file `Row` (no text), and may have no document."""
    chunk_rows, size = [], 0
    for row in rows:
        chunk_rows.append(row)
        size += len((row.text or "").encode())
        if size >= CHUNK_BYTES or row.text is None:
            yield chunk_rows
            chunk_rows, size = [], 0
