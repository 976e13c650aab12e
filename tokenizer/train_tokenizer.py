"""Train a byte-level BPE vocabulary with RoBERTa's ids (paper, section 4.4).

    python tokenizer/train_tokenizer.py --corpus presets/corpus/roberta_160gb.yaml --output_dir tokenizer/roberta

Default: 50,265 entries from 1 GB of the model's training corpus, sampled in the proportions of its mixture. The
tokenizer loads with `AutoTokenizer`; the same text gives the same bytes. The last lines are held-out statistics.
"""

import argparse
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from roberta_recipe import durable
from roberta_recipe.data import corpus as corpora
from roberta_recipe.data.documents import sample_documents
from roberta_recipe.data.tokenization import corpus_encoder, load_tokenizer
from roberta_recipe.data.tokenizer_training import save_tokenizer, train_tokenizer
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.hardware import peak_memory_bytes
from roberta_recipe.log import Bar, set_up_logging
from roberta_recipe.settings import RecipeParser


def main(argv: list[str] | None = None) -> None:
    set_up_logging()
    args = parse(argv)
    started_s = time.monotonic()
    if args.train_file:
        corpus = corpora.resolve(corpora.corpus_of_files(args.train_file, args.validation_file, args.text_column))
    else:
        corpus = corpora.resolve(corpora.read_corpus(args.corpus))

    others = {args.compare_with: load_tokenizer(args.compare_with, needed=())} if args.compare_with else {}
    sizes: Counter[str] = Counter()
    tokenizer = train_tokenizer(sample(corpus, args, sizes), args.vocab_size)
    if not sizes.total():
        raise InputError("the training text is empty: name other files")
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
    parser.add_argument("--train_file", nargs="+", help="text, JSONL, Parquet or Arrow: files, folders or globs")
    parser.add_argument("--validation_file", nargs="+", help="held-out text (default: 1%% of train_file's documents)")
    parser.add_argument("--text_column", default="text", help="column that holds the text")
    parser.add_argument("--output_dir", required=True, help="folder to write the tokenizer to")
    parser.add_argument("--vocab_size", type=int, default=50265, help="entries, special tokens included")
    parser.add_argument("--sample_mb", type=float, default=1000, help="text to train on, in MB")
    parser.add_argument("--validation_mb", type=float, default=1, help="held-out text of each source, in MB")
    parser.add_argument("--compare_with", help="another tokenizer (folder or Hub id) to measure on the same text")
    parser.add_argument("--seed", type=int, default=42, help="order of the corpus files")
    args = parser.parse_args(argv)
    if bool(args.corpus) == bool(args.train_file):
        raise InputError("give either --corpus or --train_file")
    if args.corpus and (args.validation_file or args.text_column != "text"):
        raise InputError("validation_file and text_column need --train_file; a corpus preset has its own")
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


def print_sample(corpus: corpora.Corpus, sizes: Counter[str]) -> None:
    """Print the sample's shares and the mixture's: a source that ran out has less than its share."""
    total = sum(sizes.values())
    print(f"trained on {total / 1e6:.1f} MB (a source whose text is used up has less than its share of the mixture):")
    for source, share in zip(corpus.sources, corpus.shares, strict=True):
        got = sizes[source.name]
        print(f"  {source.name:<16}{got / 1e6:>8.1f} MB  {got / total:>6.1%} (mixture {share:.1%})")


def print_statistics(
    corpus: corpora.Corpus, tokenizers: dict[str, PreTrainedTokenizerBase], validation_mb: float
) -> None:
    """UTF-8 bytes per token and tokens per word (words are separated by white space), on the held-out text of each
    source, by each tokenizer."""
    print(f"\n{'held-out text':<16}{'MB':>6}  {'tokenizer':<32}{'bytes/token':>12}{'tokens/word':>12}")
    for source in corpus.sources:
        alone = dataclasses.replace(corpus, sources=[source])
        held_out = sample_documents(alone, "validation", max_bytes=int(validation_mb * 1e6), seed=0)
        texts = [text for _, text in Bar(held_out, f"Reading {source.name}", unit=" documents", leave=False)]
        size, words = sum(len(text.encode()) for text in texts), sum(len(text.split()) for text in texts)
        if not words:
            print(f"{source.name:<16}  none")
            continue
        for name, tokenizer in tokenizers.items():
            tokens = sum(map(len, corpus_encoder(tokenizer)(texts)))
            rates = f"{size / tokens:>12.3f}{tokens / words:>12.3f}"
            print(f"{source.name:<16}{size / 1e6:>6.2f}  {name:<32}{rates}")


if __name__ == "__main__":
    exit_on_error(main)
