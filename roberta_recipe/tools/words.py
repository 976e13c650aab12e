"""A figure across vocabularies, input formats and families: masked whole words, in bits a word and a character.

    python -m roberta_recipe.tools.words --model_name_or_path runs/roberta_mini --corpus my_corpus.yaml
    python -m roberta_recipe.tools.words --model_name_or_path google-bert/bert-base-cased --text_file held_out.txt

A document is cut into windows of 64 words; 15% of the words of each are masked, all their pieces at once, and the loss
is summed over the pieces. Which words are masked depends on the text alone, so every masked LM with a fast tokenizer
answers the same questions, whatever its pieces; a model of few positions has less of a window around them. Words are
runs of letters and their accents with no letter, digit, underscore or apostrophe beside them, which no common tokenizer
joins with what is beside them; where one does, or has no pieces for a word, that is counted and said. An uncased model
need not tell Paris from paris, and has an easier task.

Each window is put to the model twice: as it is written, and as FULL-SENTENCES are (paper, section 4.2), each sentence
tokenized by itself with a separator behind it. A model is used to one of the two; what counts is what it does better.
"""

import argparse
import functools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import regex
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from roberta_recipe import durable
from roberta_recipe.data.corpus import Corpus, corpus_of_files, read_corpus, resolve
from roberta_recipe.data.documents import check_sources, documents, text_digest
from roberta_recipe.data.tokenization import boundary_ids, split_sentences
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.log import Bar, counted, logger, set_up_logging
from roberta_recipe.settings import RecipeParser
from roberta_recipe.significance import error_of_ratio, with_error
from roberta_recipe.training import predictions, processes, weights

SHARE = 0.15  # of the words of a window
WINDOW = 64  # words
WINDOWS = 16  # of a document at most: a book does not outweigh a library
_LETTER, _OTHER = r"\p{L}\p{Nl}\p{No}", r"\p{Nd}_'’"
_WORD = regex.compile(rf"(?<![{_LETTER}\p{{M}}{_OTHER}])[{_LETTER}][{_LETTER}\p{{M}}]*(?![{_LETTER}\p{{M}}{_OTHER}])")
_LOGITS_AT_ONCE = 1 << 26
_TOKENS_AT_ONCE = 1 << 13


class Window(NamedTuple):
    """Consecutive words of a document, with the words that are masked."""

    document: int
    text: str
    spans: list[tuple[int, int]]  # [first, end) characters of each masked word, ascending


class Loss(NamedTuple):
    """What a model says of the masked words of a window."""

    document: int
    bits: float
    words: int
    characters: int
    pieces: int
    joined: int  # words of which a piece reaches beyond the word
    unknown: int  # words that the tokenizer has no pieces for
    short_bits: float  # of the words that are one piece: no mask unit but this is asked more of them than another
    short_words: int


# The ids of a text, and the [first, end) characters of each; those of special tokens are empty.
Encoded = tuple[list[int], list[tuple[int, int]]]
Reading = Callable[[PreTrainedTokenizerBase, str], Encoded]


def as_written(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoded:
    """As the tokenizer has it."""
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    return list(encoded["input_ids"]), encoded["offset_mapping"]


def sentences_apart(tokenizer: PreTrainedTokenizerBase, text: str, language: str = "en") -> Encoded:
    """As `packing.full_sentences` has the sentences of one document."""
    special, begin = boundary_ids(tokenizer), 0
    ids, spans = [special["bos_id"]], [(0, 0)]
    for sentence in split_sentences(text, language):
        begin = text.index(sentence, begin)
        encoded = tokenizer(sentence, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids += [*encoded["input_ids"], special["eos_id"]]
        spans += [*((begin + first, begin + end) for first, end in encoded["offset_mapping"]), (0, 0)]
        begin += len(sentence)
    return ids, spans


def windows_of(texts: Iterable[str]) -> Iterator[Window]:
    """The windows of each document, its white space made blanks, at most `WINDOWS` of it. Windows and words are drawn
    from the document's text."""
    for number, text in enumerate(texts):
        words = text.split()
        draws = np.random.Generator(np.random.Philox(key=int(text_digest(" ".join(words)), 16)))
        total = -(-len(words) // WINDOW)
        for index in sorted(draws.permutation(total)[:WINDOWS].tolist()):
            window = " ".join(words[index * WINDOW : (index + 1) * WINDOW])
            candidates = [match.span() for match in _WORD.finditer(window)]
            count = round(SHARE * len(candidates))
            if count:
                chosen = sorted(draws.choice(len(candidates), size=count, replace=False).tolist())
                yield Window(number, window, [candidates[one] for one in chosen])


class Question(NamedTuple):
    """A window as a model is asked it."""

    ids: list[int]  # with its words masked
    targets: dict[int, int]  # position -> the id that stands there
    short: set[int]  # the positions of words that are one piece
    joined: int  # as in `Loss`
    unknown: int


def masked(tokenizer: PreTrainedTokenizerBase, window: Window, reading: Reading = as_written) -> Question:
    """The question that a window is."""
    ids, offsets = reading(tokenizer, window.text)
    targets, short, joined, unknown = {}, set(), 0, 0
    pieces = [(position, *span) for position, span in enumerate(offsets) if span[0] < span[1]]
    for first, end in window.spans:
        own = [(position, a, b) for position, a, b in pieces if a < end and b > first]
        joined += any(window.text[a:first].strip() or window.text[end:b].strip() for _, a, b in own)
        unknown += any(ids[position] == tokenizer.unk_token_id for position, _, _ in own)
        targets |= {position: ids[position] for position, _, _ in own}
        short |= {position for position, _, _ in own if len(own) == 1}
    for position in targets:
        ids[position] = tokenizer.mask_token_id
    return Question(ids, targets, short, joined, unknown)


def divided(
    tokenizer: PreTrainedTokenizerBase, window: Window, positions: int, reading: Reading = as_written
) -> list[Window]:
    """`window`, or where it has more pieces than a model has positions, its halves, and theirs: the same words are
    masked, and less stands around them. Raises `InputError` where a word alone is too long."""
    text, spans = window.text, window.spans
    if not spans:
        return []
    if len(reading(tokenizer, text)[0]) <= positions:
        return [window]
    blanks = [match.start() for match in re.finditer(" ", text)]
    # at a blank; within a long word, as an address is, outside of what is masked
    cuts = blanks or [at for at in range(1, len(text)) if not any(first < at < end for first, end in spans)]
    if not cuts:
        raise InputError(f"the word {text[:40]!r} has more pieces than the model's {positions} positions")
    cut = min(cuts, key=lambda at: abs(at - len(text) / 2))
    start = cut + bool(blanks)
    of_right = [(first - start, end - start) for first, end in spans if first >= start]
    halves = (text[:cut], spans[: len(spans) - len(of_right)]), (text[start:], of_right)
    return [part for half in halves for part in divided(tokenizer, Window(window.document, *half), positions, reading)]


def losses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, windows: list[Window], reading: Reading = as_written
) -> list[Loss]:
    """What the model says of each window; windows of like length are computed together."""
    if limit := weights.positions(model.config):
        whole = len(windows)
        windows = [part for window in windows for part in divided(tokenizer, window, limit, reading)]
        if len(windows) > whole:
            logger.info(f"Divided     {whole:,} windows into {len(windows):,}: the model has {limit} positions")
    asked = [masked(tokenizer, window, reading) for window in windows]
    found: dict[int, Loss] = {}
    look = {"unit": " windows", "desc": "Masked words", "mininterval": 1, "leave": False}
    with Bar(total=len(windows), **look) as bar:
        for batch in _batches(asked, model.config.vocab_size):
            inputs = tokenizer.pad({"input_ids": [asked[number].ids for number in batch]}, return_tensors="pt")
            targets = [asked[number].targets for number in batch]
            positions = torch.zeros(inputs["input_ids"].shape, dtype=torch.bool)
            for row, of_row in enumerate(targets):
                positions[row, list(of_row)] = True
            ids = torch.tensor([of_row[position] for of_row in targets for position in sorted(of_row)])
            given = {name: tensor.to(model.device) for name, tensor in inputs.items()}
            log_p = predictions.log_probabilities(model, given, positions.to(model.device), ids.to(model.device))
            for number, of_row in zip(batch, log_p.double().split(list(map(len, targets))), strict=True):
                found[number] = _loss(windows[number], asked[number], -of_row / math.log(2))
            bar.update(len(batch))
    return [found[number] for number in range(len(windows))]


def _loss(window: Window, asked: Question, bits: torch.Tensor) -> Loss:
    """Of the bits of each masked position, in order."""
    short = torch.tensor([position in asked.short for position in sorted(asked.targets)])
    characters = sum(end - first for first, end in window.spans)
    counts = len(window.spans), characters, len(bits), asked.joined, asked.unknown
    of_short = float(bits[short.to(bits.device)].sum())
    return Loss(window.document, float(bits.sum()), *counts, of_short, len(asked.short))


def _batches(asked: list[Question], vocab_size: int) -> Iterator[list[int]]:
    """Windows of like length, as many as memory is meant for."""
    batch: list[int] = []
    targets = 0
    for number in sorted(range(len(asked)), key=lambda number: -len(asked[number].ids)):
        longest = len(asked[batch[0]].ids) if batch else 0
        targets += len(asked[number].targets)
        if batch and ((len(batch) + 1) * longest > _TOKENS_AT_ONCE or targets * vocab_size > _LOGITS_AT_ONCE):
            yield batch
            batch, targets = [], len(asked[number].targets)
        batch.append(number)
    yield batch


def summarise(found: list[Loss]) -> dict[str, Any]:
    """The figures with their standard errors over documents."""
    table = np.array([loss[1:] for loss in found])
    _, document = np.unique([loss.document for loss in found], return_inverse=True)
    by_document = np.zeros((document.max() + 1, table.shape[1]))
    np.add.at(by_document, document, table)
    bits, words, characters, pieces, joined, unknown, short_bits, short_words = by_document.T
    return {
        "bits_per_word": float(bits.sum() / words.sum()),
        "bits_per_word_error": error_of_ratio(bits, words),
        "bits_per_character": float(bits.sum() / characters.sum()),
        "bits_per_character_error": error_of_ratio(bits, characters),
        "bits_per_short_word": float(short_bits.sum() / short_words.sum()) if short_words.any() else None,
        "words": int(words.sum()),
        "short_words": int(short_words.sum()),
        "pieces_per_word": float(pieces.sum() / words.sum()),
        "documents": len(by_document),
        "joined_words": int(joined.sum()),
        "unknown_words": int(unknown.sum()),
    }


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, windows: list[Window], language: str
) -> dict[str, Any]:
    """The figures of the better reading, and of each; and a digest of what was asked."""
    readings = {"as written": as_written, "sentences apart": functools.partial(sentences_apart, language=language)}
    found = {name: summarise(losses(model, tokenizer, windows, reading)) for name, reading in readings.items()}
    better = min(found, key=lambda name: found[name]["bits_per_word"])
    digest = durable.fingerprint([window[1:] for window in windows])
    return {**found[better], "reading": better, "readings": found, "windows_digest": digest}


def check_text(args: argparse.Namespace) -> Corpus:
    """The corpus of the held-out text, with the files that `text_file` names found. Raises `InputError`."""
    if not args.text_file:
        return read_corpus(args.corpus)
    return resolve(corpus_of_files(args.text_file, args.text_file, "text"))


def read_windows(args: argparse.Namespace) -> tuple[list[Window], str]:
    """The windows of the held-out text, those of `max_documents` documents of each source, and its language. Raises
    `InputError`."""
    corpus = check_text(args)
    texts: list[str] = []
    if not args.text_file:
        corpus = resolve(corpus)
        check_sources(corpus)
    for source in corpus.sources:
        own = list(documents(corpus, source, "validation", seed=0))
        texts += sorted(own, key=text_digest)[: args.max_documents]  # the same whatever the order of the files is
    windows = list(windows_of(texts))
    if not windows:
        raise InputError("the held-out text has no words to mask: name another corpus or text_file")
    return windows, corpus.language


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("--model_name_or_path", required=True, help="a masked LM, with its tokenizer")
    parser.add_argument("--corpus", help="corpus preset, whose held-out documents are taken")
    parser.add_argument("--text_file", nargs="+", help="in place of corpus: held-out text, JSONL or Parquet")
    parser.add_argument("--max_documents", type=int, default=500, help="of each source, by a hash of their text")
    parser.add_argument("--output", help="JSON file of the figures")
    args = parser.parse_args(argv)
    if bool(args.corpus) == bool(args.text_file):
        raise InputError("name corpus or text_file, one of the two")
    if args.max_documents < 1:
        raise InputError(f"max_documents={args.max_documents} must be at least 1")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the command line `argv`; prints and returns the figures. Raises `InputError`."""
    set_up_logging()
    processes.set_up_process()
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.output:
        durable.check_output_file(Path(args.output))
    model, tokenizer = predictions.load(args.model_name_or_path)
    figures = measure(model, tokenizer, *read_windows(args))
    word, character = (
        with_error(figures[f"bits_per_{unit}"], figures[f"bits_per_{unit}_error"]) for unit in ("word", "character")
    )
    print(
        f"masked whole words, {SHARE:.0%} of windows of {WINDOW}: {word} bits a word, {character} bits a character "
        f"({figures['words']:,} words of {counted(figures['documents'], 'document')}, "
        f"{figures['pieces_per_word']:.2f} pieces a word)"
    )
    others = (f"{name} {of['bits_per_word']:.2f}" for name, of in figures["readings"].items())
    print(f"bits a word by how a window is put to the model: {', '.join(others)}; the lower is taken")
    if figures["joined_words"]:
        print(
            f"{figures['joined_words']:,} words are joined with other text by this tokenizer, so that more than the "
            "word is masked: not quite comparable"
        )
    if figures["unknown_words"]:
        print(
            f"{figures['unknown_words']:,} words are {tokenizer.unk_token} to this tokenizer, which is easier to tell "
            "than the word: not quite comparable"
        )
    if args.output:
        durable.write_sealed(Path(args.output), {"model_name_or_path": args.model_name_or_path, **figures})
    return figures


if __name__ == "__main__":
    exit_on_error(main)
