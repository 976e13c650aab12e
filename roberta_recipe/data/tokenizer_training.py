"""Training of a byte-level BPE vocabulary with RoBERTa's ids (paper, section 4.4; Radford et al. 2019)."""

import glob
import json
import math
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, RobertaTokenizer

from roberta_recipe import durable
from roberta_recipe.data.tokenization import LEADING_TOKENS, build_tokenizer
from roberta_recipe.errors import InputError, interruptible

SMALLEST, LARGEST = 4096, 50_265  # entries
_SMALL_BYTES, SAMPLE_BYTES = 15_000_000, 1_000_000_000

_LONG = 1000  # characters; training time grows with the square of a word's length


def size_for(text_bytes: int) -> int:
    """Vocabulary size for `text_bytes` of text: the demonstration's 4,096 up to 15 MB, the paper's 50,265 from 1 GB on
    (our sample of its text); between them it grows with the text to the power of 0.6, as distinct words do (Heaps'
    law: 0.4 to 0.6). By Zipf's law, the rarest entry then occurs about 100 times in 15 MB, and 460 times in 1 GB."""
    power = math.log(LARGEST / SMALLEST) / math.log(SAMPLE_BYTES / _SMALL_BYTES)
    entries = int(SMALLEST * (text_bytes / _SMALL_BYTES) ** power)
    return LARGEST if text_bytes >= SAMPLE_BYTES else max(SMALLEST, entries // 64 * 64)


def train_tokenizer(texts: Iterable[str], vocab_size: int, at_most: bool = False) -> RobertaTokenizer:
    """A byte-level BPE of `vocab_size` entries, trained on `texts` (read once). Memory grows with the distinct words;
    words of over 1,000 characters are split. Raises `InputError` if the texts give fewer entries, unless `at_most`."""
    smallest = len(LEADING_TOKENS) + 256 + 1
    if vocab_size < smallest:
        raise InputError(f"vocab_size={vocab_size} is too small: special tokens and single bytes alone are {smallest}")
    backend = Tokenizer(models.BPE())
    short = pre_tokenizers.FixedLength(_LONG)  # for training only; the saved one has RoBERTa's
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False), short])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # <mask> comes last, after the merges
        min_frequency=2,
        special_tokens=LEADING_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    interruptible(lambda: backend.train_from_iterator(texts, trainer))
    model = json.loads(backend.to_str())["model"]
    entries = len(model["vocab"]) + 1
    if entries < vocab_size and not at_most:  # no pair of tokens is left that occurs twice
        raise InputError(f"vocab_size={vocab_size}: the sample gives only {entries}; lower it, or add text")
    return build_tokenizer(model["vocab"], [tuple(pair) for pair in model["merges"]])


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Save a tokenizer atomically, with a manifest that `load_tokenizer` checks. Raises `InputError` for a folder that
    is not empty."""
    folder = Path(folder).resolve()  # a rename would replace a link to an empty folder
    durable.check_new_folder(folder, "tokenizer")
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = folder.with_name(f".{folder.name}")
    durable.remove_stale(folder.parent, glob.escape(hidden.name))
    temporary = durable.temporary_path(hidden)
    try:
        tokenizer.save_pretrained(temporary)
        durable.move_into_place(temporary, folder, replace=False)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
