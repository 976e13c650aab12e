"""Time to hash the chunks of a token cache and the files of a corpus.

    python benchmarks/checks.py [--gb 1] [--folder DIR]

Writes a token cache of random tokens (blocks of 512, chunks of 4,000 blocks) and a file of random bytes, `--gb` each,
to a temporary folder, and deletes them. A minute on two CPU cores.
"""

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

import numpy as np

from roberta_recipe.data import stream, token_cache
from roberta_recipe.data.chunks import Chunk, File
from roberta_recipe.data.corpus import Corpus, Source, check_unchanged, hash_files, resolve
from roberta_recipe.data.order import batches_of
from roberta_recipe.data.token_cache import TokenCache

LENGTH = 512  # tokens in a block
BLOCKS_PER_CHUNK, CHUNKS_PER_FILE = 4000, 25  # about 100 MB a file
READS = 50_000  # blocks, in shuffled order


def timed(function):
    """(seconds, result) of a call."""
    start_s = time.perf_counter()
    result = function()
    return time.perf_counter() - start_s, result


class RandomTokens:
    """A packer of random tokens, in place of `TextReader`."""

    def __init__(self, corpus: Corpus):
        self.corpus = corpus

    def pack_rows(self, rows, file: File):
        rng, chunks = np.random.default_rng(file.number), CHUNKS_PER_FILE if file.split == "train" else 1
        for number in range(chunks):
            ids = rng.integers(0, 50265, (BLOCKS_PER_CHUNK, LENGTH), dtype=np.uint16)
            counts = {"blocks": BLOCKS_PER_CHUNK, "tokens": ids.size}
            chunk = Chunk(number, number + 1, number * BLOCKS_PER_CHUNK, BLOCKS_PER_CHUNK, number + 1 == chunks, counts)
            yield chunk, [{"input_ids": row, "document": number} for row in ids]


def write_cache(folder: Path, files: int) -> Corpus:
    """Write a complete cache of random tokens, a training and a validation shard per file; returns its corpus."""
    texts = [folder / f"{number}.txt" for number in range(files)]
    for path in texts:
        path.write_text(path.name)
    corpus = resolve(Corpus("random", [Source("random", files=[str(path) for path in texts])]))
    made_from = token_cache.create_or_check(folder / "cache", {"input_format": "full_sentences"})
    for file in itertools.chain.from_iterable(token_cache.shards_of(corpus, 1)):
        token_cache._write_shard(folder / "cache", made_from, file, iter(()), RandomTokens(corpus))
    return corpus


def us_per_block(cache: TokenCache, count: int) -> float:
    """Microseconds of CPU time to read a block, with opening of chunks."""
    start_s = time.process_time()  # independent of the machine's load
    for block in itertools.islice(stream.blocks_at(cache, batches_of(0, 32, 1, 0)), count):
        int(block["input_ids"][7])
    return (time.process_time() - start_s) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the cache, and of the text file")
    parser.add_argument("--folder", help="parent of the temporary folder; default: the system's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        size = BLOCKS_PER_CHUNK * CHUNKS_PER_FILE * 2 * LENGTH
        corpus = write_cache(folder, max(1, round(args.gb * 1e9 / size)))
        open_s, cache = timed(lambda: TokenCache(folder / "cache", corpus, seed=0))
        us_per_block(cache, READS)  # warms the page cache
        checked = min(us_per_block(cache, READS) for _ in range(3))
        file = File(0, "train", 0)
        chunks = [blocks for _, blocks in cache.chunks(file)]
        hash_s, _ = timed(lambda: [blocks.opened for blocks in chunks])
        print(f"token cache of {args.gb:g} GB, blocks of {LENGTH} tokens: opened in {open_s * 1e3:.1f} ms")
        print(f"  the hash of a chunk of {BLOCKS_PER_CHUNK:,} blocks: {hash_s / len(chunks) * 1e3:.2f} ms")
        print(f"  a block, its share of the hash included: {checked:.1f} us ({1e6 / checked:,.0f} blocks/s)")

        with open(folder / "big.txt", "wb") as out:
            for _ in range(round(args.gb * 1e9 / 1e7)):
                out.write(np.random.default_rng(0).bytes(10_000_000))
        text = resolve(Corpus("c", [Source("text", files=str(folder / "big.txt"))]))
        hash_s, _ = timed(lambda: hash_files(text, folder / "run"))
        print(f"text file of {args.gb:g} GB: hashed in {hash_s:.2f} s")
        (folder / "many").mkdir()
        for number in range(10_000):
            (folder / "many" / f"{number}.txt").write_text("x")
        many = resolve(Corpus("c", [Source("many", files=str(folder / "many"))]))
        hash_s, many = timed(lambda: hash_files(many, folder / "run"))
        unchanged_s, _ = timed(lambda: check_unchanged(many))
        print(f"10,000 files: hashed in {hash_s:.2f} s, all compared before a checkpoint in {unchanged_s * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
