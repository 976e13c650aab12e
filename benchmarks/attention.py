"""Speed of the attention implementations, which roberta_recipe/model/attention.py chooses from.

    python benchmarks/attention.py [--threads 1]

Forward and backward of each attention over 4,096 tokens, in each precision of the device, with and without attention
dropout, at several lengths; the implementations alternate. Prints median milliseconds and the fastest one.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.roberta.modeling_roberta import eager_attention_forward

from roberta_recipe import hardware
from roberta_recipe.model.cpu_kernels import BLOCKWISE, blockwise_attention

TOKENS, HEADS, SIZE = 4096, 4, 64
LENGTHS = (64, 128, 256, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=hardware.cpu_cores())
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hardware.keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ways = {"sdpa": sdpa_attention_forward, "eager": eager_attention_forward}
    ways |= {BLOCKWISE: blockwise_attention} if device.type == "cpu" else {}
    processor = hardware.describe_machine()["processor"]
    print(f"{processor}, {args.threads} threads, torch {torch.__version__}: ms of forward and backward")
    print(f"{'':<8}{'dropout':>8}{'length':>8}" + "".join(f"{name:>12}" for name in ways) + "   fastest")
    for dtype in (torch.float32, *([torch.bfloat16] if hardware.has_bf16() else [])):
        for dropout in (0.0, 0.1):
            for length in LENGTHS:
                found = measured(ways, length, dropout, dtype, device, args.repeats)
                row = "".join(f"{value:>12.1f}" for value in found.values())
                name = str(dtype).removeprefix("torch.")
                print(f"{name:<8}{dropout:>8}{length:>8}{row}   {min(found, key=found.get)}", flush=True)


def measured(ways, length: int, dropout: float, dtype, device, repeats: int) -> dict[str, float]:
    """Median milliseconds of each implementation."""
    x = torch.randn(3, TOKENS // length, length, HEADS, SIZE, device=device, dtype=dtype)
    times: dict[str, list[float]] = {name: [] for name in ways}
    module = torch.nn.Module().train()
    module.is_causal = False
    for repeat in range(repeats + 2):
        for name, way in ways.items():
            q, k, v = (tensor.transpose(1, 2).detach().requires_grad_() for tensor in x)
            start_s = time.perf_counter()
            out, _ = way(module, q, k, v, None, scaling=SIZE**-0.5, dropout=dropout)
            out.backward(torch.ones_like(out))
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat >= 2:  # after two warm-ups
                times[name].append(1e3 * (time.perf_counter() - start_s))
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
