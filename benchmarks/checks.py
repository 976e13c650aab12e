"""What the checks of data cost: a token cache's checksums, and the hashes of a corpus's files.

    python benchmarks/checks.py [--gb 1] [--folder DIR]

Writes a token cache of random tokens (blocks of 512) and a file of random bytes of that size into a temporary folder,
a few minutes on two CPU cores, and removes them.
"""

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

import numpy as np

from roberta_recipe import durable
from roberta_recipe.data import corpus as corpora
from roberta_recipe.data import token_cache
from roberta_recipe.data.corpus import Corpus, Source, check_unchanged, identified, resolve
from roberta_recipe.data.order import batches_of
from roberta_recipe.data.stream import SourceState
from roberta_recipe.data.token_cache import Shard, TokenCache

LENGTH = 512  # tokens in a block
BLOCKS_PER_FILE = 100_000  # about 100 MB


class RandomTokens:
    """What writing a shard wants of a reader."""

    dtype = np.uint16

    def __init__(self, corpus: Corpus):
        self.corpus = corpus


def timed(function):
    """(seconds, result) of a call."""
    start_s = time.perf_counter()
    result = function()
    return time.perf_counter() - start_s, result


def write_cache(folder: Path, files: int) -> Corpus:
    """A complete cache of `files` training shards of random tokens, and a validation shard of as many blocks for
    each; returns its corpus."""
    texts = [folder / f"{number}.txt" for number in range(files)]
    for path in texts:
        path.write_text(path.name)
    corpus = resolve(Corpus("random", [Source("random", files=[str(path) for path in texts])]))
    cache, rng = folder / "cache", np.random.default_rng(0)
    made_from = token_cache.claim(cache, {"input_format": "random tokens"})
    for shard in token_cache.shards_of(cache, corpus):
        state, count = SourceState(), BLOCKS_PER_FILE if shard.split == "train" else 10
        state.pack.blocks, state.pack.tokens = count, count * LENGTH
        blocks = ({"input_ids": rng.integers(0, 50265, LENGTH, dtype=np.uint16)} for _ in range(count))
        token_cache._write_shard(cache, made_from, shard, RandomTokens(corpus), blocks, state)
    assert token_cache.finish(cache, corpus, made_from)
    return corpus


def us_per_block(cache: TokenCache, count: int, checked: bool) -> float:
    """Microseconds of CPU time to read a block in shuffled order, with the checks or without."""

    def unchecked(shard: Shard, index: int, epoch: int) -> dict:
        batch, row = cache._maps[shard].batches[index // 1024], index % 1024
        offsets, values = batch["input_ids"]
        return {"input_ids": values[offsets[row] : offsets[row + 1]], "epoch": epoch, "block_id": index}

    def take() -> int:
        return sum(
            int(block["input_ids"][7]) for block in itertools.islice(cache.blocks(batches_of(0, 32, 1, 0)), count)
        )

    cache.__dict__.pop("_read", None)
    take()  # maps the files, warms the page cache
    if not checked:
        cache._read = unchecked
    measured_s = []
    for _ in range(3):
        start_s = time.process_time()  # of the CPU, so that a busy machine measures the same
        take()
        measured_s.append(time.process_time() - start_s)
    return min(measured_s) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the cache, and of the text file")
    parser.add_argument("--folder", help="where to write; default: the system's folder for temporary files")
    parser.add_argument("--reads", type=int, default=50_000, help="blocks read, in shuffled order")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        corpora._SETTLED_NS = -(10**9)  # the files are young, and do not change
        corpus = write_cache(folder, max(1, round(args.gb * 1e9 / (BLOCKS_PER_FILE * 2 * LENGTH))))
        manifest = durable.read_json(folder / "cache" / durable.MANIFEST)
        size = sum(shard["bytes"] for shard in manifest["shards"])
        made_from = token_cache.claim(folder / "cache", {"input_format": "random tokens"})
        start_s, fault = timed(lambda: token_cache._fault(folder / "cache", corpus, made_from))
        assert fault is None
        open_s, cache = timed(lambda: TokenCache(folder / "cache", corpus, seed=0, shuffle_window=10**9))
        before, after = (us_per_block(cache, args.reads, checked) for checked in (False, True))
        hash_s, _ = timed(lambda: [durable.sha256(folder / "cache" / shard["path"]) for shard in manifest["shards"]])
        print(f"token cache of {size / 1e9:.2f} GB, {len(manifest['shards'])} shards, blocks of {LENGTH} tokens")
        print(f"  at the start: names, sizes, seals {start_s * 1e3:.1f} ms; opened {open_s * 1e3:.1f} ms")
        print(f"  (the SHA-256 of all shards, which packing alone compares: {hash_s:.2f} s)")
        print(
            f"  a block: {before:.1f} us unchecked, {after:.1f} us with size and checksum ({1e6 / after:,.0f} blocks/s)"
        )

        with open(folder / "big.txt", "wb") as stream:
            for _ in range(round(args.gb * 1e9 / 1e7)):
                stream.write(np.random.default_rng(0).bytes(10_000_000))
        text = resolve(Corpus("c", [Source("text", files=str(folder / "big.txt"))]))
        first_s, first = timed(lambda: identified(text, folder / "run"))
        again_s, again = timed(lambda: identified(text, folder / "run"))
        assert first == again
        print(f"text file of {args.gb:g} GB: first start {first_s:.2f} s, next start {again_s * 1e3:.1f} ms")
        (folder / "many").mkdir()
        for number in range(10_000):
            (folder / "many" / f"{number}.txt").write_text("x")
        many = resolve(Corpus("c", [Source("many", files=str(folder / "many"))]))
        first_s, many = timed(lambda: identified(many, folder / "other run"))
        again_s, _ = timed(lambda: identified(many, folder / "other run"))
        unchanged_s, _ = timed(lambda: check_unchanged(many))
        print(
            f"10,000 files: first start {first_s:.2f} s, next start {again_s:.2f} s, all compared before a checkpoint "
            f"{unchanged_s * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
