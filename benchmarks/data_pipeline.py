"""Speed of each stage of the data pipeline: reading, sentence splitting, tokenizing, packing, masking.

    python benchmarks/data_pipeline.py [--corpus presets/corpus/docstrings.yaml] [--tokenizer_name tokenizer/docstrings]

Tokens/s of each stage alone, over the same documents in one process, and the ratio to tokenizing; then masking by our
collator and the stock one.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

import numpy as np
from transformers import DataCollatorForLanguageModeling

from roberta_recipe.data import corpus as corpora
from roberta_recipe.data import masking, tokenization
from roberta_recipe.data.documents import check_sources, sample_documents
from roberta_recipe.data.packing import Block, full_sentences
from roberta_recipe.data.tokenizer_training import train_tokenizer


def timed(function):
    """(seconds, result) of a call."""
    start_s = time.perf_counter()
    result = function()
    return time.perf_counter() - start_s, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="presets/corpus/docstrings.yaml")
    parser.add_argument("--tokenizer_name", help="default: one of 4,096 entries, trained first")
    parser.add_argument("--mb", type=float, default=8, help="megabytes of text")
    parser.add_argument("--max_seq_length", type=int, default=512)
    args = parser.parse_args()

    corpus = corpora.resolve(corpora.read_corpus(args.corpus))
    max_bytes = int(args.mb * 1e6)
    check_sources(corpus)  # collects the docstrings, which is not timed
    reading_s, texts = timed(
        lambda: [text for _, text in sample_documents(corpus, "train", max_bytes=max_bytes, seed=0)]
    )
    tokenizer = (
        tokenization.load_tokenizer(args.tokenizer_name) if args.tokenizer_name else train_tokenizer(texts, 4096)
    )
    encode = tokenization.corpus_encoder(tokenizer)
    splitting_s, split = timed(lambda: [tokenization.split_sentences(text, corpus.language) for text in texts])
    flat = [sentence for sentences in split for sentence in sentences]
    encoding_s, ids = timed(lambda: encode(flat))
    tokens = sum(map(len, ids))
    iterator = iter(ids)
    documents = [list(itertools.islice(iterator, len(sentences))) for sentences in split]
    special = tokenization.boundary_ids(tokenizer)
    packing_s, blocks = timed(lambda: list(full_sentences(documents, args.max_seq_length, **special)))
    examples = [
        Block({"input_ids": np.asarray(block["input_ids"], dtype="uint16")}, number)
        for number, block in enumerate(blocks)
    ]
    batches = [examples[i : i + 32] for i in range(0, len(examples), 32)]
    ours, stock = masking.MlmCollator(tokenizer), DataCollatorForLanguageModeling(tokenizer)
    masking_s, _ = timed(lambda: [ours(batch) for batch in batches])
    as_lists = [[{"input_ids": example["input_ids"].tolist()} for example in batch] for batch in batches]
    stock_s, _ = timed(lambda: [stock(batch) for batch in as_lists])

    print(f"\n{sum(len(t.encode()) for t in texts) / 1e6:.1f} MB, {len(texts):,} documents, {tokens:,} tokens")
    print(f"{'stage':<28}{'M tokens/s':>12}{'x tokenizing':>14}")
    stages = {
        "read and hold out": reading_s,
        "split into sentences": splitting_s,
        "tokenize (all cores)": encoding_s,
        "pack": packing_s,
        "mask and collate": masking_s,
        "stock collator": stock_s,
    }
    for name, elapsed_s in stages.items():
        print(f"{name:<28}{tokens / elapsed_s / 1e6:>12.2f}{encoding_s / elapsed_s:>14.1f}")


if __name__ == "__main__":
    main()
