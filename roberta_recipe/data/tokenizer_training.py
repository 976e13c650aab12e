"""Training a byte-level BPE vocabulary with RoBERTa's ids (paper, section 4.4; Radford et al. 2019); its figures."""

import glob
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import regex
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, RobertaTokenizer

from roberta_recipe import durable
from roberta_recipe.data.tokenization import LEADING_TOKENS, build_tokenizer, corpus_encoder
from roberta_recipe.errors import InputError, interruptible
from roberta_recipe.log import logger

_LONG = 1000  # characters; training time grows with the square of a word's length
_RUN = regex.compile(r"\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+|\s+")  # of one class of GPT-2's pattern


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> RobertaTokenizer:
    """A byte-level BPE of `vocab_size` entries, trained on `texts` (read once). Memory grows with the distinct words;
    words of thousands of characters are cut. Raises `InputError` where the texts hold too few words for it."""
    smallest = len(LEADING_TOKENS) + 256 + 1
    if vocab_size < smallest:
        raise InputError(f"vocab_size={vocab_size} is too small: special tokens and single bytes alone are {smallest}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # <mask> comes last, after the merges
        min_frequency=2,
        special_tokens=LEADING_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    counts: Counter[str] = Counter()
    interruptible(lambda: backend.train_from_iterator(_without_long_words(texts, counts), trainer))
    if counts:
        logger.warning(
            f"Long words  {counts['cuts']:,} cuts in runs of {_LONG:,} and more letters, digits, signs or blanks; "
            f"texts with such runs: {counts['texts']:,}"
        )
    model = json.loads(backend.to_str())["model"]
    if len(model["vocab"]) < vocab_size - 1:
        raise InputError(
            f"the sample gives only {len(model['vocab']) + 1} entries (no pair of tokens is left that occurs twice); "
            f"ask for vocab_size={len(model['vocab']) + 1} or less, or give it more text"
        )
    return build_tokenizer(model["vocab"], [tuple(pair) for pair in model["merges"]])


def _without_long_words(texts: Iterable[str], counts: Counter[str]) -> Iterator[str]:
    """The texts, cut inside long words: after each `_LONG` characters of one class (letters, digits, ...), so that no
    word reaches twice that length. Adds the number of `cuts`, and of `texts` with cuts, to `counts`."""
    for text in texts:
        start = 0
        for end in range(_LONG, len(text), _LONG):
            if _RUN.fullmatch(text, end - _LONG, end):
                counts["cuts"] += 1
                counts["texts"] += start == 0
                yield text[start:end]
                start = end
        yield text[start:]


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a tokenizer's folder, whole or not at all, with a manifest that `load_tokenizer` checks. Raises
    `InputError` for a folder that is not empty."""
    folder = Path(folder).resolve()  # a link to an empty folder is no folder to a rename
    durable.check_new_folder(folder, "tokenizer")
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = folder.with_name(f".{folder.name}")
    durable.remove_left(folder.parent, glob.escape(hidden.name))
    aside = durable.aside_of(hidden)
    try:
        tokenizer.save_pretrained(aside)
        durable.move_into_place(aside, folder, replace=False)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def held_out_statistics(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> dict[str, float]:
    """Bytes of UTF-8 a token, and tokens a word (words are what white space separates), over `texts`."""
    encode, tokens, size, words = corpus_encoder(tokenizer), 0, 0, 0
    for text in texts:
        tokens += len(encode([text])[0])
        size += len(text.encode())
        words += len(text.split())
    return {
        "bytes": size,
        "words": words,
        "bytes_per_token": size / max(tokens, 1),
        "tokens_per_word": tokens / max(words, 1),
    }
