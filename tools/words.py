"""Loss on masked whole words in bits per word and per character, comparable across vocabularies and model families.

    python tools/words.py --model_name_or_path runs/roberta_mini --corpus my_corpus.yaml
    python tools/words.py --model_name_or_path google-bert/bert-base-cased --text_file held_out.txt

Documents are split into windows of 64 words; 15% of each window's words are masked, with all their pieces, and the loss
is summed over pieces. The words are chosen by the text alone, so the targets are the same for every masked LM with a
fast tokenizer; a model with few positions has less context. Words are runs of letters without adjacent digits,
underscores or apostrophes, which common tokenizers do not join with their neighbours; exceptions and unknown words are
counted. The task is easier for an uncased model. Scripts need spaces between words.

Each window is read twice: as written, and as FULL-SENTENCES (paper, section 4.2), each sentence tokenized by itself and
followed by a separator. A model is trained on one of them; the better reading counts.
"""

import argparse
import functools
import heapq
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import regex
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from roberta_recipe import durable
from roberta_recipe.data.corpus import corpus_of_files, read_corpus, resolve
from roberta_recipe.data.documents import check_sources, documents, split_sentences, text_hash
from roberta_recipe.data.tokenization import boundary_ids
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.log import Bar, counted, logger, set_up_logging
from roberta_recipe.model import weights
from roberta_recipe.settings import RecipeParser
from roberta_recipe.standard_error import error_of_ratio, with_error
from roberta_recipe.tasks import pseudo_likelihood
from roberta_recipe.training import launching

SHARE = 0.15  # of a window's words
WINDOW = 64  # words
WINDOWS = 16  # maximum per document, so that long books do not dominate
_LETTER, _OTHER = r"\p{L}\p{Nl}\p{No}", r"\p{Nd}_'’"
_WORD = regex.compile(rf"(?<![{_LETTER}\p{{M}}{_OTHER}])[{_LETTER}][{_LETTER}\p{{M}}]*(?![{_LETTER}\p{{M}}{_OTHER}])")
_LOGITS_AT_ONCE = 1 << 26
_TOKENS_AT_ONCE = 1 << 13


class Window(NamedTuple):
    """Consecutive words of a document, some of them masked."""

    document: int
    text: str
    spans: list[tuple[int, int]]  # [first, end) characters of each masked word, ascending


class Loss(NamedTuple):
    """A model's loss on a window's masked words, with counts."""

    document: int
    bits: float
    words: int
    characters: int
    pieces: int
    joined: int  # words with a piece that extends beyond the word
    unknown: int  # words with an unknown token
    short_bits: float  # of one-piece words, which every masking unit trains
    short_words: int


# Token ids of a text, and the [first, end) characters of each, empty for special tokens.
Encoded = tuple[list[int], list[tuple[int, int]]]
Reading = Callable[[PreTrainedTokenizerBase, str], Encoded]


def as_written(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoded:
    """The text encoded as it is."""
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    return list(encoded["input_ids"]), encoded["offset_mapping"]


def sentences_apart(tokenizer: PreTrainedTokenizerBase, text: str, language: str = "en") -> Encoded:
    """The sentences encoded as in `packing.full_sentences`."""
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
    """At most `WINDOWS` windows per document, with whitespace normalised; draws are seeded by the document's text."""
    for number, text in enumerate(texts):
        words = text.split()
        draws = np.random.Generator(np.random.Philox(key=int(text_hash(" ".join(words)), 16)))
        total = -(-len(words) // WINDOW)
        for index in sorted(draws.permutation(total)[:WINDOWS].tolist()):
            window = " ".join(words[index * WINDOW : (index + 1) * WINDOW])
            candidates = [match.span() for match in _WORD.finditer(window)]
            count = round(SHARE * len(candidates))
            if count:
                chosen = sorted(draws.choice(len(candidates), size=count, replace=False).tolist())
                yield Window(number, window, [candidates[one] for one in chosen])


class MaskedWindow(NamedTuple):
    """A tokenized window with its words masked."""

    ids: list[int]
    targets: dict[int, int]  # position -> original id
    short: set[int]  # positions of one-piece words
    joined: int  # as in `Loss`
    unknown: int


def masked(tokenizer: PreTrainedTokenizerBase, window: Window, reading: Reading = as_written) -> MaskedWindow:
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
    return MaskedWindow(ids, targets, short, joined, unknown)


def split_window(
    tokenizer: PreTrainedTokenizerBase, window: Window, positions: int, reading: Reading = as_written
) -> list[Window]:
    """`window`, halved until it fits the model's positions: the same masked words with less context. Raises
    `InputError` for a word that is too long."""
    text, spans = window.text, window.spans
    if not spans:
        return []
    if len(reading(tokenizer, text)[0]) <= positions:
        return [window]
    blanks = [match.start() for match in re.finditer(" ", text)]
    # at a blank, or inside a long unmasked word, such as an address
    cuts = blanks or [at for at in range(1, len(text)) if not any(first < at < end for first, end in spans)]
    if not cuts:
        raise InputError(f"the word {text[:40]!r} has more pieces than the model's {positions} positions")
    cut = min(cuts, key=lambda at: abs(at - len(text) / 2))
    start = cut + bool(blanks)
    of_right = [(first - start, end - start) for first, end in spans if first >= start]
    halves = (text[:cut], spans[: len(spans) - len(of_right)]), (text[start:], of_right)
    return [
        part for half in halves for part in split_window(tokenizer, Window(window.document, *half), positions, reading)
    ]


def losses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, windows: list[Window], reading: Reading = as_written
) -> list[Loss]:
    """The loss of each window, in batches of similar length."""
    if limit := weights.max_positions(model.config):
        whole = len(windows)
        windows = [part for window in windows for part in split_window(tokenizer, window, limit, reading)]
        if len(windows) > whole:
            logger.info(f"Split       {whole:,} windows into {len(windows):,}: the model has {limit} positions")
    asked = [masked(tokenizer, window, reading) for window in windows]
    found: dict[int, Loss] = {}
    with Bar(total=len(windows), unit=" windows", desc="Masked words", mininterval=1, leave=False) as bar:
        for batch in _batches(asked, model.config.vocab_size):
            rows = {"input_ids": [asked[number].ids for number in batch]}
            inputs = tokenizer.pad(rows, return_tensors="pt", return_attention_mask=True)
            targets = [asked[number].targets for number in batch]
            positions = torch.zeros(inputs["input_ids"].shape, dtype=torch.bool)
            for row, of_row in enumerate(targets):
                positions[row, list(of_row)] = True
            ids = torch.tensor([of_row[position] for of_row in targets for position in sorted(of_row)])
            given = {name: tensor.to(model.device) for name, tensor in inputs.items()}
            log_p = pseudo_likelihood.at_positions(model, given, positions.to(model.device), ids.to(model.device))
            for number, of_row in zip(batch, log_p.double().split(list(map(len, targets))), strict=True):
                found[number] = _loss(windows[number], asked[number], -of_row / math.log(2))
            bar.update(len(batch))
    return [found[number] for number in range(len(windows))]


def _loss(window: Window, asked: MaskedWindow, bits: torch.Tensor) -> Loss:
    """`bits`: per masked position, in order."""
    short = torch.tensor([position in asked.short for position in sorted(asked.targets)])
    characters = sum(end - first for first, end in window.spans)
    counts = len(window.spans), characters, len(bits), asked.joined, asked.unknown
    of_short = float(bits[short.to(bits.device)].sum())
    return Loss(window.document, float(bits.sum()), *counts, of_short, len(asked.short))


def _batches(asked: list[MaskedWindow], vocab_size: int) -> Iterator[list[int]]:
    """Indices of windows of similar length, within the limits on tokens and logits."""
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
    """The metrics, with standard errors over documents."""
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


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, windows: list[Window], language: str
) -> dict[str, Any]:
    """The metrics of the better reading, of both readings, and a hash of the windows."""
    readings = {"as written": as_written}
    if None not in boundary_ids(tokenizer).values():
        readings["sentences apart"] = functools.partial(sentences_apart, language=language)
    found = {name: summarise(losses(model, tokenizer, windows, reading)) for name, reading in readings.items()}
    better = min(found, key=lambda name: found[name]["bits_per_word"])
    digest = durable.fingerprint([window[1:] for window in windows])
    return {**found[better], "reading": better, "readings": found, "windows_digest": digest}


def read_windows(args: argparse.Namespace) -> tuple[list[Window], str]:
    """Windows of `max_documents` held-out documents per source, and the language. Raises `InputError`."""
    if args.text_file:
        corpus = resolve(corpus_of_files(args.text_file, args.text_file, args.text_column, args.language))
    else:
        corpus = resolve(read_corpus(args.corpus))
        check_sources(corpus)
    texts: list[str] = []
    for source in corpus.sources:
        held_out = documents(corpus, source, "validation", seed=0)
        texts += heapq.nsmallest(args.max_documents, held_out, key=text_hash)  # independent of the order of files
    windows = list(windows_of(texts))
    if not windows:
        raise InputError("the held-out text has no words to mask: name another corpus or text_file")
    return windows, corpus.language


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("--model_name_or_path", required=True, help="masked LM with a tokenizer: a folder or a Hub id")
    parser.add_argument("--corpus", help="corpus preset; its held-out documents are used")
    parser.add_argument("--text_file", nargs="+", help="held-out text, JSONL or Parquet, in place of --corpus")
    parser.add_argument("--max_documents", type=int, default=500, help="documents per source, chosen by a hash")
    parser.add_argument("--text_column", default="text", help="column of text_file that holds the text")
    parser.add_argument("--language", default="en", help="language of text_file, for the sentence splitter")
    parser.add_argument("--output", help="JSON file for the metrics")
    args = parser.parse_args(argv)
    if bool(args.corpus) == bool(args.text_file):
        raise InputError("name either corpus or text_file")
    if args.corpus and (args.text_column, args.language) != ("text", "en"):
        raise InputError("text_column and language need text_file; a corpus preset has its own")
    if args.max_documents < 1:
        raise InputError(f"max_documents={args.max_documents} must be at least 1")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the command line `argv`; prints and returns the metrics. Raises `InputError`."""
    set_up_logging()
    launching.set_up_process()
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.output:
        durable.check_output_file(Path(args.output))
    model, tokenizer = pseudo_likelihood.load_masked_lm(args.model_name_or_path)
    figures = evaluate(model, tokenizer, *read_windows(args))
    word, character = (
        with_error(figures[f"bits_per_{unit}"], figures[f"bits_per_{unit}_error"]) for unit in ("word", "character")
    )
    print(
        f"masked whole words, {SHARE:.0%} of windows of {WINDOW}: {word} bits a word, {character} bits a character "
        f"({figures['words']:,} words of {counted(figures['documents'], 'document')}, "
        f"{figures['pieces_per_word']:.2f} pieces a word)"
    )
    others = (f"{name} {metrics['bits_per_word']:.2f}" for name, metrics in figures["readings"].items())
    print(f"bits a word by input format: {', '.join(others)}; the lower one is reported")
    for key, reason in (("joined_words", "joined with other text"), ("unknown_words", tokenizer.unk_token)):
        if figures[key]:
            print(f"{figures[key]:,} words are {reason} for this tokenizer: not quite comparable")
    if args.output:
        durable.write_sealed(Path(args.output), {"model_name_or_path": args.model_name_or_path, **figures})
    return figures


if __name__ == "__main__":
    exit_on_error(main)
