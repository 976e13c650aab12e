"""Documents of a corpus (paper, section 3.2): reading with retries, validation split, checks, sentence splitting."""

import errno
import hashlib
import itertools
import lzma
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from sentencex import segment

from roberta_recipe.data.corpus import Corpus, Source, check_unchanged
from roberta_recipe.data.file_formats import READERS, BadRow, Text, open_file
from roberta_recipe.data.order import FILES, interleave, random_order
from roberta_recipe.errors import InputError, first_line
from roberta_recipe.log import logger

RETRY_DELAYS_S = (1, 2, 4, 8, 16)
_TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)  # of network file systems
_CHECKED_DOCUMENTS = 100  # of each file, before training
_HUGE = 20_000_000  # characters; no book is that long
_LINE_WINDOW = 20_000  # characters
_WIDE_SPACE = re.compile(r"[^\S\x00-\x7f]")
_BLANK_LINES = "Only blank lines separate documents in .txt; for one per line, run: sed G lines.txt > docs.txt"


class BadShard(InputError):
    """A file that cannot be read to the end."""


def _bad_shard(source: Source, path: str, row: int, reason: str) -> BadShard:
    what = f"source {source.name!r}: cannot read {path}: {reason} (row {row})"
    return BadShard(f"{what}; fix or remove it, or set `on_bad_shard: skip` in a corpus preset")


def read_file(source: Source, format: str, path: str, start: int = 0) -> Iterator[Text]:
    """The text of each row of a file, from row `start` on; `BadRow` for an unreadable row. Transient errors are retried
    from the current row. Raises `BadShard` for an unreadable file, and `InputError` for one that contradicts the
    preset."""
    options = {"filters": source.filters} if source.filters else {}
    row, has_values, delays = start, False, iter(RETRY_DELAYS_S)
    while True:
        try:
            with open_file(path) as stream:
                for text in READERS[format](stream, source.text_column, row, **options):
                    yield text
                    row, has_values, delays = row + 1, has_values or text is not None, iter(RETRY_DELAYS_S)
            break
        except InputError as error:
            raise InputError(f"source {source.name!r}: {path} {error}") from None
        except Exception as error:  # pyarrow, json and fsspec raise many types
            reason, delay_s = f"{type(error).__name__}: {first_line(error.__cause__ or error)}", next(delays, None)
            # an error of decompression or Parquet; those of networks have a number or another type
            is_damaged = isinstance(error, EOFError | lzma.LZMAError) or (type(error) is OSError and not error.errno)
            if not _is_transient(error, path) or (is_damaged and delay_s is None):
                raise _bad_shard(source, path, row, reason) from error
            if delay_s is None:  # an outage, not a bad file: `on_bad_shard: skip` does not apply
                raise InputError(f"source {source.name!r}: cannot read {path}: {reason} (row {row})") from error
            logger.warning(f"reading {path} failed at row {row} ({reason}); retry in {delay_s} s")
            time.sleep(delay_s)
    if row and not start and not has_values:
        raise InputError(f"source {source.name!r}: no row of {path} has a {source.text_column!r} (set text_column)")


def _is_transient(error: Exception, path: str) -> bool:
    """Whether a retry may succeed. fsspec raises `FileNotFoundError` for HTTP status 503, too."""
    if "://" in path:
        return not isinstance(error, ValueError | ImportError | PermissionError)
    return isinstance(error, OSError) and error.errno in _TRANSIENT


def text_hash(text: str) -> str:
    """Hash of a document's text: 16 hexadecimal digits."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class Row(NamedTuple):
    """A document with its row number, and counts of the rows skipped before it."""

    number: int
    text: str | None  # None: the end of the file
    empty: int = 0
    held_out: int = 0  # train: held-out documents; validation: those of `Corpus.excluded`
    bad_files: int = 0  # 1 in the last `Row` of a file that broke off (`on_bad_shard: skip`)
    lost_rows: int = 0  # unreadable rows


def file_rows(
    corpus: Corpus, source: Source, split: str, path: str, start: int = 0, others: list[Row] | None = None
) -> Iterator[Row]:
    """The documents of a file that belong to `split` ("train", "validation"), from row `start` on; then a `Row` without
    text. Documents of the other split are appended to `others`."""
    format, _ = corpus.files(source, split)
    # held out by the hash of a document's text, so that duplicates are in the same split
    limit = None if source.validation_files else corpus.validation_share * 2**64
    number, empty, other_split, lost, warned, broken = start, 0, 0, 0, False, None
    try:
        for text in read_file(source, format, path, start):
            if isinstance(text, BadRow):
                bad = _bad_shard(source, path, number, text.reason)
                if corpus.on_bad_shard != "skip":
                    raise bad
                if not warned:
                    logger.warning(f"{bad}; skipped, as are later bad rows of this file")
                lost, warned = lost + 1, True
            elif text is None or not text.strip():
                empty += 1
            elif limit is not None and (int(text_hash(text), 16) < limit) != (split == "validation"):
                other_split += split == "train"
                if others is not None:
                    others.append(Row(number, text))
            elif split == "validation" and corpus.excluded and text_hash(text) in corpus.excluded:
                other_split += 1
            else:
                yield Row(number, text, empty, other_split, lost_rows=lost)
                empty = other_split = lost = 0
            number += 1
    except BadShard as bad:
        broken = bad
    check_unchanged(corpus, path)  # a file damaged during the run ends it, even with `skip`
    if broken:
        if corpus.on_bad_shard != "skip":
            raise broken
        logger.warning(f"{broken}; the rest of the file is skipped")
    yield Row(number, None, empty, other_split, int(broken is not None), lost)


def documents(corpus: Corpus, source: Source, split: str, *, seed: int) -> Iterator[str]:
    """One pass over a source: files in the order of the first pass, rows in file order."""
    _, files = corpus.files(source, split)
    for number in random_order(seed, FILES, (corpus.sources.index(source), 0), len(files)):
        yield from (row.text for row in file_rows(corpus, source, split, files[number]) if row.text is not None)


def sample_documents(corpus: Corpus, split: str, *, max_bytes: int, seed: int) -> Iterator[tuple[str, str]]:
    """(source name, text) in the proportions of the mixture, up to `max_bytes` of UTF-8 or one pass."""
    streams = [zip(itertools.repeat(s.name), documents(corpus, s, split, seed=seed)) for s in corpus.sources]
    total = 0
    for name, text in interleave(streams, corpus.shares, cost=lambda item: len(item[1].encode())):
        yield name, text
        total += len(text.encode())
        if total >= max_bytes:
            return


def check_sources(corpus: Corpus) -> None:
    """Read the first documents of each local file. Raises `InputError` for an unreadable file, a source without a
    training document, and a corpus without a validation document; warns of a source without one, and of a text file
    with a huge document."""
    without = []
    for source in corpus.sources:
        for path in corpus.files(source, "train")[1]:
            if "://" not in path:
                rows = itertools.islice(file_rows(corpus, source, "train", path), _CHECKED_DOCUMENTS)
                longest = max((len(row.text or "") for row in rows), default=0)
                if longest > _HUGE and corpus.files(source, "train")[0] == "text":
                    logger.warning(f"{path} has one document of {longest:,} characters, packed at once. {_BLANK_LINES}")
        if next(documents(corpus, source, "train", seed=0), None) is None:
            raise InputError(f"source {source.name!r} is empty: none of its documents has text to train on")
        is_remote = any("://" in path for path in corpus.files(source, "validation")[1])
        if not is_remote and next(documents(corpus, source, "validation", seed=0), None) is None:
            without.append(source.name)
    message = f"no document is held out of {', '.join(without)}; name a --validation_file, or in a corpus preset "
    message += "validation_files or a higher validation_share"
    if any(corpus.files(source, "train")[0] == "text" for source in corpus.sources):
        message += f". {_BLANK_LINES}"
    if len(without) == len(corpus.sources):
        raise InputError(message)
    if without:
        logger.warning(message)


def split_sentences(text: str, language: str = "en") -> list[str]:
    """The non-empty sentences of a document; a line break always ends a sentence (wikimedia/sentencex)."""
    sentences = (sentence.strip() for line in text.splitlines() for sentence in _split_line(line, language))
    return [sentence for sentence in sentences if sentence]


def _split_line(line: str, language: str) -> Iterator[str]:
    """Split a line with sentencex, window by window: its time grows with the square of the length."""
    start, end = 0, _LINE_WINDOW
    while end < len(line):
        *whole, rest = _segment(line[start:end], language)
        if not whole:  # a sentence longer than the window, and far longer than a block, is split here
            whole, rest = [rest], ""
        yield from whole
        start = end - len(rest)
        end = start + _LINE_WINDOW
    yield from _segment(line[start:], language)


def _segment(text: str, language: str) -> list[str]:
    """Workaround for sentencex 1.0.32, which panics on multi-byte white space between a letter and a full stop: it is
    replaced by a blank; sentences are cut from the original text. If sentencex still panics, there is one sentence."""
    try:
        lengths = [len(sentence) for sentence in segment(language, _WIDE_SPACE.sub(" ", text))]
    except BaseException as error:  # a panic is not an Exception
        if type(error).__name__ != "PanicException":
            raise
        return [text]
    if sum(lengths) != len(text):
        return [text]
    return [text[end - length : end] for length, end in zip(lengths, itertools.accumulate(lengths), strict=True)]
