"""How well blocks are mixed, and the time to resume in the middle of a pass.

    python benchmarks/order.py --corpus presets/corpus/docstrings.yaml --tokenizer_name tokenizer/docstrings \\
        --token_cache DIR [--batch 256]

Mixing, by shuffle window: of all pairs of blocks that are neighbours in a file, the share that meets in the same batch
(an order without memory has batch / blocks of the source). Resuming, after 1, 10 and 50% of a pass: seconds to the
first batch from the token cache, and from text with the states of a checkpoint at that step, beside the seconds of a
fresh start.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

import numpy as np

from roberta_recipe.data import corpus as corpora
from roberta_recipe.data import token_cache, tokenization
from roberta_recipe.data.order import batches_of, source_of
from roberta_recipe.data.stream import TextReader


def mixing(cache: token_cache.TokenCache, batch: int, blocks: int) -> list[tuple[str, float, float]]:
    """(source, share of neighbours in the same batch, the same share in an order without memory), over the first
    `blocks`."""
    names = [block["block_id"] for block in itertools.islice(cache.blocks(batches_of(0, batch, 1, 0)), blocks)]
    position = {name: number for number, name in enumerate(names)}
    rows = []
    for number, source in enumerate(cache.corpus.sources):
        pairs = [(name, name + 1) for name in position if source_of(name) == number and name + 1 in position]
        same_batch = [position[left] // batch == position[right] // batch for left, right in pairs]
        together = np.mean(same_batch) if pairs else 0.0
        share = cache.corpus.shares[number]
        rows.append((source.name, float(together), batch * share / cache.count_table()[source.name]["blocks"]))
    return rows


def first_batch_s(reader, batch: int, start: int, states=None) -> float:
    began_s = time.perf_counter()
    list(itertools.islice(reader.blocks(batches_of(start, batch, 1, 0), start, states), batch))
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--tokenizer_name", required=True)
    parser.add_argument("--token_cache", required=True)
    parser.add_argument("--max_seq_length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--window", type=int, default=4096, help="for resuming")
    args = parser.parse_args()
    corpus = corpora.identified(corpora.resolve(corpora.read_corpus(args.corpus)), kept_in=args.token_cache)
    tokenizer = tokenization.load_tokenizer(args.tokenizer_name)
    settings = {"input_format": "full_sentences", "max_seq_length": args.max_seq_length, "seed": 0}
    token_cache.ensure(args.token_cache, TextReader(corpus, tokenizer, **settings), num_proc=1)

    for window in (0, 512, 4096, 10**7):
        cache = token_cache.TokenCache(args.token_cache, corpus, seed=0, shuffle_window=window)
        blocks = sum(counts["blocks"] for counts in cache.count_table().values())
        shown = (
            f"{name} {100 * met:.2f}% ({100 * least:.2f}%)" for name, met, least in mixing(cache, args.batch, blocks)
        )
        print(f"window {window:>8}: neighbours in the same batch (without memory): {', '.join(shown)}")

    cache = token_cache.TokenCache(args.token_cache, corpus, seed=0, shuffle_window=args.window)
    text = TextReader(corpus, tokenizer, **settings, shuffle_window=args.window)
    print(f"\nwindow {args.window}, seconds to the first batch of {args.batch}")
    print(
        f"fresh start: cache {first_batch_s(cache, args.batch, 0):.3f}, text {first_batch_s(text, args.batch, 0):.1f}"
    )
    wanted = {int(blocks * share) // args.batch * args.batch: share for share in (0.01, 0.1, 0.5)}
    for number, block in enumerate(text.blocks(batches_of(0, args.batch, 1, 0)), 1):
        if number in wanted and (start := number):
            again = TextReader(corpus, tokenizer, **settings, shuffle_window=args.window)
            fresh = token_cache.TokenCache(args.token_cache, corpus, seed=0, shuffle_window=args.window)
            print(
                f"after {wanted[start]:.0%} of a pass: cache {first_batch_s(fresh, args.batch, start):.3f}, text "
                f"{first_batch_s(again, args.batch, start, [state.to_dict() for state in block['states']]):.1f}",
                flush=True,
            )
        if number >= max(wanted):
            break


if __name__ == "__main__":
    main()
