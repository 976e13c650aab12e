"""Error of the bf16 gradient of the stock masked LM and of ours, by attention implementation.

    python benchmarks/precision.py [--model_name_or_path runs/mlm/roberta_tiny] [--batches 4]

Batches of 32 docstrings of at most 64 tokens, 15% masked, no dropout. The reference is the stock class's gradient in
fp64. Prints, per batch, the norm of the difference / the norm of the gradient, of all weights and of query and key.
Without a checkpoint: fresh weights of `presets/model/tiny.json`.
"""

import argparse
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

import numpy as np
import pyarrow.parquet as pq
import torch
import transformers
from transformers import AutoTokenizer

from roberta_recipe.data.docstrings import docstring_file
from roberta_recipe.data.masking import MlmCollator
from roberta_recipe.data.packing import Block
from roberta_recipe.data.tokenizer_training import train_tokenizer
from roberta_recipe.model.masked_lm import build_model, masked_lm_class

WAYS = [("stock", "sdpa", "fp32"), ("ours", "eager", "fp32")]
WAYS += [(name, attention, "bf16") for attention in ("sdpa", "eager") for name in ("stock", "ours")]


def gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor], precision: str) -> dict[str, torch.Tensor]:
    """Name of the weight -> gradient of the mean loss, in fp64."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model.eval()(**batch).loss
    loss.backward()
    return {name: weight.grad.double() for name, weight in model.named_parameters()}


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], parts: tuple[str, ...] = ("",)) -> float:
    """Relative error (2-norm) of a gradient, over the weights with one of `parts` in their name."""
    names = [name for name in exact if any(part in name for part in parts)]
    squares = [(((found[name] - exact[name]) ** 2).sum(), (exact[name] ** 2).sum()) for name in names]
    return float((sum(apart for apart, _ in squares) / sum(whole for _, whole in squares)).sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--batches", type=int, default=4)
    args = parser.parse_args()
    texts = pq.read_table(docstring_file())["text"].to_pylist()
    name = args.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name) if name else train_tokenizer(texts, 4096)

    torch.manual_seed(0)
    source = {"model_name_or_path": name} if name else {"config_name": str(ROOT / "presets" / "model" / "tiny.json")}
    built = build_model(tokenizer, max_seq_length=64, **source)

    def model(way: str, attention: str) -> torch.nn.Module:
        built.config._attn_implementation = attention
        found = (transformers.RobertaForMaskedLM if way == "stock" else masked_lm_class(built.config))(built.config)
        found.load_state_dict(built.state_dict())
        return found

    errors: dict[tuple[str, str, str], list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(args.batches):
        chosen = random.Random(number).sample(texts, 32)
        ids = [np.array(row) for row in tokenizer(chosen, truncation=True, max_length=64)["input_ids"]]
        masked = MlmCollator(tokenizer, seed=number)(
            [Block({"input_ids": row}, block) for block, row in enumerate(ids)]
        )
        batch = {name: masked[name] for name in ("input_ids", "attention_mask", "labels")}
        exact = gradients(model("stock", "eager").double(), batch, "fp64")
        for way in WAYS:
            found = gradients(model(*way[:2]), batch, way[2])
            errors[way].append((error(found, exact), error(found, exact, ("query", "key"))))
    print(f"{'class':<8}{'attention':<11}{'precision':<11}{'all weights':<{10 * args.batches}}query and key")
    for way, found in errors.items():
        columns = ["".join(f"{value:<10.1e}" for value in column) for column in zip(*found, strict=True)]
        print(f"{way[0]:<8}{way[1]:<11}{way[2]:<11}" + "".join(columns))


if __name__ == "__main__":
    main()
