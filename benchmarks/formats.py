"""Block statistics of each input format, and the speed of each masking unit.

    python benchmarks/formats.py --text_file 'text/*.parquet' --tokenizer_name tokenizer/roberta [--max_seq_length 512]

Per format: tokens per block, share of padding (steps of 32 blocks in micro-batches of 16, sorted by length), blocks
that span documents, sequences per block, labelled pairs, share of label 0, and tokens read from text per second of CPU
time. Per masking unit: the share of predicted tokens, and the collator's speed in micro-batches of 16, in blocks per
second of CPU time, the fastest of `--repeats` alternating measurements.
"""

import argparse
import itertools
import math
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from transformers import DataCollatorForLanguageModeling

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from roberta_recipe.data import NSP, SOP, order, stream, tokenization
from roberta_recipe.data import corpus as corpora
from roberta_recipe.data.chunks import PACKERS, TextReader
from roberta_recipe.data.masking import IGNORED, MlmCollator
from roberta_recipe.data.packing import Block
from roberta_recipe.model.objectives import labels_of_mask
from roberta_recipe.publishing.tables import markdown_table

MICRO_BATCH, STEP = 16, 32
MASKINGS = {
    "token": {},
    "token, exact count": {"mask_count": "exact"},
    "whole_word": {"masking_unit": "whole_word"},
    "span": {"masking_unit": "span"},
    "span, with sbo": {"masking_unit": "span", "labels_of_mask": labels_of_mask(["sbo"])},
    "ngram": {"masking_unit": "ngram"},
}


class Stock(DataCollatorForLanguageModeling):
    """The stock collator, including the conversion of arrays to lists that `datasets` does."""

    def torch_call(self, examples):
        return super().torch_call([{"input_ids": block["input_ids"].tolist()} for block in examples])


def blocks_of(args: argparse.Namespace, tokenizer, name: str, length: int) -> tuple[list[Block], float]:
    """(blocks of the text, CPU seconds to read them in batches, as in training)."""
    corpus = corpora.resolve(corpora.corpus_of_files(args.text_file, None, "text"))
    reader = TextReader(corpus, tokenizer, packer=name, max_seq_length=length, seed=0)
    begun_s = time.process_time()
    read = itertools.islice(stream.blocks_at(reader, order.batches_of(0, STEP, 1, 0)), args.blocks)
    blocks = list(itertools.takewhile(lambda block: not block.epoch, read))
    return blocks, time.process_time() - begun_s


def described(name: str, blocks: list[Block], seconds: float, eos_id: int) -> tuple[str, ...]:
    """A row of the table of formats."""
    lengths = np.array([len(block["input_ids"]) for block in blocks])
    padded = 0
    for start in range(0, len(lengths), STEP):
        ordered = np.sort(lengths[start : start + STEP])[::-1]
        for first in range(0, len(ordered), MICRO_BATCH):
            part = ordered[first : first + MICRO_BATCH]
            padded += part.max() * len(part)
    sequences = [int(block["sequence"].max()) + 1 if "sequence" in block else 1 for block in blocks]
    labels = np.concatenate([block.get(NSP, block.get(SOP, np.empty(0))) for block in blocks])
    labels = labels[labels != IGNORED]
    twice = [bool(((block["input_ids"][1:] == eos_id) & (block["input_ids"][:-1] == eos_id)).any()) for block in blocks]
    return (
        name,
        f"{len(blocks):,}",
        f"{lengths.mean():.1f}",
        f"{1 - lengths.sum() / padded:.1%}",
        f"{np.mean(twice):.1%}" if name == "full_sentences" else "",
        f"{np.mean(sequences):.2f}",
        f"{len(labels):,}" if len(labels) else "",
        f"{np.mean(labels == 0):.1%}" if len(labels) else "",
        f"{lengths.sum() / seconds:,.0f}",
    )


def timed(
    collators: dict[str, DataCollatorForLanguageModeling], blocks: list[Block], repeats: int
) -> dict[str, tuple[float, float]]:
    """name -> (blocks per second of CPU time, share of predicted tokens)."""
    elapsed_s, predicted = Counter(), Counter()
    for start in range(0, len(blocks), MICRO_BATCH):
        micro_batch, fastest_s = blocks[start : start + MICRO_BATCH], {}
        for _, (name, collator) in itertools.product(range(repeats), collators.items()):
            begun_s = time.process_time()
            labels = collator(micro_batch)["labels"]
            fastest_s[name] = min(fastest_s.get(name, math.inf), time.process_time() - begun_s)
            predicted[name] += int((labels != IGNORED).sum())
        elapsed_s.update(fastest_s)
    special = collators["token"].tokenizer.all_special_ids
    text = sum(int((~np.isin(block["input_ids"], special)).sum()) for block in blocks)
    return {name: (len(blocks) / elapsed_s[name], predicted[name] / repeats / text) for name in collators}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text_file", nargs="+", required=True)
    parser.add_argument("--tokenizer_name", required=True)
    parser.add_argument("--max_seq_length", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--blocks", type=int, default=2000, help="maximum per format")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    tokenizer = tokenization.load_tokenizer(args.tokenizer_name)
    for length in args.max_seq_length:
        rows, plain = [], None
        for name in PACKERS:
            blocks, seconds = blocks_of(args, tokenizer, name, length)
            plain = plain or blocks
            rows.append(described(name, blocks, seconds, tokenization.boundary_ids(tokenizer)["eos_id"]))
        head = "format", "blocks", "tokens a block", "padded", "documents meet", "sequences a block", "pairs", "label 0"
        head += ("read, tokens/s",)
        print(f"\n{length} tokens\n\n{markdown_table(head, rows)}\n")
        collators = {name: MlmCollator(tokenizer, **how) for name, how in MASKINGS.items()}
        collators["token, Hugging Face's"] = Stock(tokenizer)
        rates = timed(collators, plain, args.repeats)
        lines = [
            (name, f"{rate:,.0f}", f"{rate / rates['token'][0]:.2f}", f"{share:.2%}")
            for name, (rate, share) in rates.items()
        ]
        print(markdown_table(("masking", "blocks/s", "of token's", "predicted"), lines))


if __name__ == "__main__":
    main()
