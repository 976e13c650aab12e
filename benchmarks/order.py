"""Shuffling quality of the block order, token-cache read rate, and time to resume within a pass.

    python benchmarks/order.py --corpus presets/corpus/docstrings.yaml --tokenizer_name tokenizer/docstrings \\
        --token_cache DIR [--batch 256]

Shuffling, by shuffle window: the share of neighbouring blocks of a file that are in the same batch (for a permutation
of the whole pass, batch / blocks of the source); and blocks read per second of CPU time. Resuming after 1, 10 and 50%
of a pass: CPU seconds to the first batch, from the token cache and from text with a run's chunk index, and those of a
fresh start.
"""

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

import numpy as np

from roberta_recipe.data import corpus as corpora
from roberta_recipe.data import stream, token_cache, tokenization
from roberta_recipe.data.chunks import TextReader
from roberta_recipe.data.order import batches_of, place_of


def mixing(cache: token_cache.TokenCache, batch: int, names: list[int]) -> list[tuple[str, float, float]]:
    """(source, share of neighbours in the same batch, that share in a random permutation), over the blocks `names` of a
    pass."""
    position = {name: number for number, name in enumerate(names)}
    rows = []
    for number, source in enumerate(cache.corpus.sources):
        pairs = [(name, name + 1) for name in position if place_of(name)[0] == number and name + 1 in position]
        same_batch = [position[left] // batch == position[right] // batch for left, right in pairs]
        together = np.mean(same_batch) if pairs else 0.0
        share = cache.corpus.shares[number]
        blocks = stream.count_table(cache, "train")[source.name]["blocks"]
        rows.append((source.name, float(together), batch * share / blocks))
    return rows


def first_batch_s(reader: stream.Reader, batch: int, start: int) -> float:
    began_s = time.process_time()
    list(itertools.islice(stream.blocks_at(reader, batches_of(start, batch, 1, 0)), batch))
    return time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--tokenizer_name", required=True)
    parser.add_argument("--token_cache", required=True)
    parser.add_argument("--max_seq_length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args()
    corpus = corpora.hash_files(corpora.resolve(corpora.read_corpus(args.corpus)), cache_folder=args.token_cache)
    tokenizer = tokenization.load_tokenizer(args.tokenizer_name)
    settings = {"packer": "full_sentences", "max_seq_length": args.max_seq_length, "seed": 0}
    token_cache.build(args.token_cache, TextReader(corpus, tokenizer, **settings), num_proc=1)

    for window in (0, 1, 8, 10**7):
        cache = token_cache.TokenCache(args.token_cache, corpus, seed=0, shuffle_window=window)
        blocks = sum(counts["blocks"] for counts in stream.count_table(cache, "train").values())
        began_s = time.process_time()
        read = itertools.islice(stream.blocks_at(cache, batches_of(0, args.batch, 1, 0)), blocks)
        names = [block.id for block in read]
        rate = blocks / (time.process_time() - began_s)
        rows = mixing(cache, args.batch, names)
        shown = ", ".join(f"{name} {100 * met:.2f}% ({100 * least:.2f}%)" for name, met, least in rows)
        print(f"window {window:>8}: {rate:,.0f} blocks/s; neighbours in the same batch (random permutation): {shown}")

    cache = token_cache.TokenCache(args.token_cache, corpus, seed=0)
    print(f"\nCPU seconds to the first batch of {args.batch}")
    with tempfile.TemporaryDirectory() as folder:
        text = TextReader(corpus, tokenizer, **settings, index_folder=folder)
        from_cache, from_text = (first_batch_s(reader, args.batch, 0) for reader in (cache, text))
        print(f"fresh start: cache {from_cache:.3f}, text {from_text:.1f}")
        wanted = {int(blocks * share) // args.batch * args.batch: share for share in (0.01, 0.1, 0.5)}
        for number, _ in enumerate(stream.blocks_at(text, batches_of(0, args.batch, 1, 0)), 1):
            if number in wanted:
                again = TextReader(corpus, tokenizer, **settings, index_folder=folder)
                cache = token_cache.TokenCache(args.token_cache, corpus, seed=0)
                from_cache, from_text = (first_batch_s(one, args.batch, number) for one in (cache, again))
                print(f"after {wanted[number]:.0%} of a pass: cache {from_cache:.3f}, text {from_text:.1f}", flush=True)
            if number >= max(wanted):
                break


if __name__ == "__main__":
    main()
