"""A training step beside the stock `RobertaForMaskedLM`: the gain of a head on predicted positions only.

    python benchmarks/mlm_step.py [--config_name presets/model/small.json] [--batch 4] [--seq_len 512]

Forward and backward, alternating between the two models so that both run under the same load; prints medians and ratio.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

import torch
import transformers

from roberta_recipe.data.masking import IGNORED
from roberta_recipe.training.modeling import RobertaForMaskedLM, flops_per_token, load_config


def step_s(model, batch: dict[str, torch.Tensor], dtype: torch.dtype | None) -> float:
    """Seconds of a forward and backward pass."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    with torch.autocast(model.device.type, dtype=dtype, enabled=dtype is not None):
        loss = model(**batch).loss
    loss.backward()
    model.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config_name", default="presets/model/small.json")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if args.bf16 else None
    config = load_config(args.config_name)
    ids = torch.randint(5, config.vocab_size - 1, (args.batch, args.seq_len), device=device)
    labels = torch.where(torch.rand(ids.shape, device=device) < 0.15, ids, IGNORED)
    models = {
        "stock (dense head)": transformers.RobertaForMaskedLM(config).to(device).train(),
        "ours (predicted positions)": RobertaForMaskedLM(config).to(device).train(),
    }
    times: dict[str, list[float]] = {name: [] for name in models}
    peak: dict[str, int] = {}
    for step in range(args.steps + 2):
        for name, model in models.items():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            elapsed_s = step_s(model, {"input_ids": ids, "labels": labels}, dtype)
            if step >= 2:  # the first two steps warm up
                times[name].append(elapsed_s)
            if device == "cuda":
                peak[name] = torch.cuda.max_memory_allocated()

    tokens = ids.numel()
    rates = {name: tokens / statistics.median(values) for name, values in times.items()}
    print(f"{args.config_name}, {args.batch} x {args.seq_len} tokens, {device}, {'bf16' if args.bf16 else 'fp32'}")
    for name, rate in rates.items():
        memory = f", peak {peak[name] / 2**30:.2f} GiB with both models held" if name in peak else ""
        print(f"{name:<28}{rate:>12,.0f} tokens/s{memory}")
    stock, ours = rates.values()
    dense = flops_per_token(config, args.seq_len, 1.0) / flops_per_token(config, args.seq_len, 0.15)
    print(f"ratio {ours / stock:.2f} (FLOPs alone: {dense:.2f})")


if __name__ == "__main__":
    main()
