"""Train a byte-level BPE vocabulary with RoBERTa's ids (paper, section 4.4).

    python tokenizer/train_tokenizer.py --corpus presets/corpus/roberta_160gb.yaml --output_dir tokenizer/roberta

50,265 entries from 1 GB of the corpus that the model is trained on, drawn in the proportions of its mixture. The
tokenizer loads with `AutoTokenizer`; the same text gives the same bytes. The last lines are figures on held-out text.
"""

import argparse
import dataclasses
import glob
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import regex
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, RobertaTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from roberta_recipe import durable
from roberta_recipe.args import RecipeParser
from roberta_recipe.data import corpus as corpora
from roberta_recipe.data.documents import sample_documents
from roberta_recipe.data.tokenization import LEADING_TOKENS, build_tokenizer, corpus_encoder, load_tokenizer
from roberta_recipe.errors import InputError, exit_on_error, interruptible
from roberta_recipe.hardware import peak_memory_bytes
from roberta_recipe.log import Bar, logger, set_up_logging

_LONG = 1000  # characters; training time grows with the square of a word's length
_RUN = regex.compile(r"\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+|\s+")  # of one class of GPT-2's pattern


def main(argv: list[str] | None = None) -> None:
    set_up_logging()
    args = parse(argv)
    started_s = time.monotonic()
    if args.train_file:
        corpus = corpora.resolve(corpora.corpus_of_files(args.train_file, args.validation_file, args.text_column))
    else:
        corpus = corpora.resolve(corpora.read_corpus(args.corpus))

    others = {args.compare_with: load_tokenizer(args.compare_with)} if args.compare_with else {}
    sizes: Counter[str] = Counter()
    tokenizer = train_tokenizer(sample(corpus, args, sizes), args.vocab_size)
    save_tokenizer(tokenizer, args.output_dir)
    print(
        f"{len(tokenizer):,} entries in {args.output_dir}, {time.monotonic() - started_s:.0f} s, "
        f"peak memory {peak_memory_bytes() / 1e9:.2f} GB"
    )
    print_sample(corpus, sizes)
    print_statistics(corpus, {args.output_dir: tokenizer, **others}, args.validation_mb)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("--corpus", help="corpus preset, as for train_mlm.py")
    parser.add_argument(
        "--train_file", nargs="+", help="text, JSONL, Parquet or Arrow instead of the corpus: files, folders or globs"
    )
    parser.add_argument(
        "--validation_file", nargs="+", help="held-out text for train_file (default: 1%% of its documents)"
    )
    parser.add_argument("--text_column", default="text", help="column that holds the text")
    parser.add_argument("--output_dir", required=True, help="folder to write the tokenizer to")
    parser.add_argument("--vocab_size", type=int, default=50265, help="entries, special tokens included")
    parser.add_argument("--sample_mb", type=float, default=1000, help="text to train on, in MB")
    parser.add_argument(
        "--validation_mb", type=float, default=1, help="held-out text of each source to measure on, in MB"
    )
    parser.add_argument("--compare_with", help="another tokenizer (folder or Hub id) to measure on the same text")
    parser.add_argument("--seed", type=int, default=42, help="order of the corpus files")
    args = parser.parse_args(argv)
    if bool(args.corpus) == bool(args.train_file):
        raise InputError("give either --corpus or --train_file")
    for name in ("sample_mb", "validation_mb"):
        if not 0 < getattr(args, name) < float("inf"):
            raise InputError(f"{name}={getattr(args, name)} must be a number above 0")
    durable.check_new_folder(Path(args.output_dir))
    durable.make_folder(Path(args.output_dir))
    return args


def sample(corpus: corpora.Corpus, args: argparse.Namespace, sizes: Counter[str]) -> Iterator[str]:
    """The training sample, with a progress bar; bytes by source are added to `sizes`."""
    max_bytes = int(args.sample_mb * 1e6)
    with Bar(total=max_bytes, unit="B", unit_scale=True, desc="Reading sample", mininterval=1) as bar:
        for name, text in sample_documents(corpus, "train", max_bytes=max_bytes, seed=args.seed):
            sizes[name] += len(text.encode())
            bar.update(len(text.encode()))
            yield text


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
    interruptible(lambda: backend.train_from_iterator(_without_long_words(texts), trainer))
    model = json.loads(backend.to_str())["model"]
    entries = len(model["vocab"]) + 1
    if entries < vocab_size:  # no pair of tokens is left that occurs twice
        raise InputError(f"vocab_size={vocab_size}: the sample gives only {entries}; ask for these, or add text")
    return build_tokenizer(model["vocab"], [tuple(pair) for pair in model["merges"]])


def _without_long_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts, cut inside long words: after each `_LONG` characters of one class (letters, digits, ...), so that no
    word reaches twice that length. Logs the number of cuts."""
    cuts = 0
    for text in texts:
        start = 0
        for end in range(_LONG, len(text), _LONG):
            if _RUN.fullmatch(text, end - _LONG, end):
                yield text[start:end]
                start, cuts = end, cuts + 1
        yield text[start:]
    if cuts:
        logger.warning(f"Long words  {cuts:,} cuts in runs of {_LONG:,} and more letters, digits, signs or blanks")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a tokenizer's folder, whole or not at all, with a manifest that `load_tokenizer` checks. Raises
    `InputError` for a folder that is not empty."""
    folder = Path(folder).resolve()  # a rename would replace a link to an empty folder
    durable.check_new_folder(folder, "tokenizer")
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = folder.with_name(f".{folder.name}")
    durable.remove_left(folder.parent, glob.escape(hidden.name))
    temporary = durable.aside_of(hidden)
    try:
        tokenizer.save_pretrained(temporary)
        durable.move_into_place(temporary, folder, replace=False)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def print_sample(corpus: corpora.Corpus, sizes: Counter[str]) -> None:
    """Print the sample beside the mixture: a source that ran out has less than its share."""
    total = sum(sizes.values())
    print(f"trained on {total / 1e6:.1f} MB (a source whose text is used up has less than its share of the mixture):")
    for source, share in zip(corpus.sources, corpus.shares, strict=True):
        got = sizes[source.name]
        print(f"  {source.name:<16}{got / 1e6:>8.1f} MB  {got / total:>6.1%} (mixture {share:.1%})")


def print_statistics(
    corpus: corpora.Corpus, tokenizers: dict[str, PreTrainedTokenizerBase], validation_mb: float
) -> None:
    """Bytes of UTF-8 a token, and tokens a word (words are separated by white space), on the held-out text of each
    source, by each tokenizer."""
    print(f"\n{'held-out text':<16}{'MB':>6}  {'tokenizer':<32}{'bytes/token':>12}{'tokens/word':>12}")
    for source in corpus.sources:
        alone = dataclasses.replace(corpus, sources=[source])
        held_out = sample_documents(alone, "validation", max_bytes=int(validation_mb * 1e6), seed=0)
        texts = [text for _, text in Bar(held_out, f"Reading {source.name}", unit=" documents", leave=False)]
        size, words = sum(len(text.encode()) for text in texts), sum(len(text.split()) for text in texts)
        for name, tokenizer in tokenizers.items():
            tokens = sum(map(len, corpus_encoder(tokenizer)(texts)))
            rates = f"{size / max(tokens, 1):>12.3f}{tokens / max(words, 1):>12.3f}"
            print(f"{source.name:<16}{size / 1e6:>6.2f}  {name:<32}{rates}")


if __name__ == "__main__":
    exit_on_error(main)
