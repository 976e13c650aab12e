"""Profile of RoBERTa-base in bf16 on one GPU: tokens/s, utilisation, memory, synchronisations, kernels, by variant.

    python -m benchmarks.gpu.profile --tokenizer DIR --matrix_rate 8e14 --output profile.json

Training steps without Trainer: random ids, masks of the recipe's collator, AdamW. Also compares gradients of varlen and
SDPA, and losses of the compiled encoder and the plain one. The output file is updated after each variant.
"""

import argparse
import functools
import json
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from torch.profiler import ProfilerActivity, profile

from roberta_recipe import durable, hardware
from roberta_recipe.data import tokenization
from roberta_recipe.data.masking import IGNORED, MlmCollator
from roberta_recipe.data.packing import Block
from roberta_recipe.model import masked_lm
from roberta_recipe.training import pretraining
from tools.estimate import GIB, memory_per_gpu

MASKED = 0.15
WARM_UP, STEPS, PROFILED = 3, 8, 2
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SAME_LOSS = 0.01  # largest relative difference of a step's loss, compiled and plain
MOST_KERNELS = 25

Figures = dict[str, Any]


class Variant(NamedTuple):
    """A training variant. Rows have 94 to 100% of the maximum length or, if `mixed`, 12.5 to 100%."""

    dropout: bool = False
    mixed: bool = False
    attention: str = "sdpa"
    compiled: bool = False
    kernels: bool = False  # whether to list the slowest kernels


VARIANTS = {
    "eager": Variant(dropout=True, kernels=True),
    "without_dropout": Variant(),
    "padded": Variant(mixed=True),
    "varlen": Variant(mixed=True, attention="varlen"),
    "compiled": Variant(compiled=True, kernels=True),
}


class Batch(NamedTuple):
    """Model inputs on the device, number of tokens without padding, number of predicted positions."""

    inputs: dict[str, torch.Tensor]
    tokens: int
    targets: int


class Bench:
    """The recipe's model, collator and loss with batches of random ids."""

    def __init__(self, tokenizer: str, matrix_rate: float, tiny: bool):
        self.tokenizer, self.matrix_rate = tokenization.load_tokenizer(tokenizer), matrix_rate
        self.device = torch.device("cpu" if tiny else "cuda")
        self.length, self.rows, multiple = (64, 4, 64) if tiny else (512, 128, 50304)
        self.flags = ["--config", "presets/mlm/roberta_base.yaml", "--tokenizer_name", tokenizer]
        self.flags += ["--max_seq_length", str(self.length), "--pad_vocab_to_multiple_of", str(multiple)]
        self.flags += ["--use_cpu", "true"] * tiny
        self.shape = {"vocab_size": math.ceil(len(self.tokenizer) / multiple) * multiple, **(TINY if tiny else {})}

    def build(self, variant: Variant, half: bool = True, **shape: Any) -> tuple[torch.nn.Module, MlmCollator]:
        """(model, collator) of a variant; the weights are the same for all."""
        dropout = {} if variant.dropout else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        overrides = ",".join(f"{name}={value}" for name, value in (self.shape | dropout | shape).items())
        flags = [*self.flags, "--config_overrides", overrides, "--attn_implementation", variant.attention]
        flags += ["--torch_compile", str(variant.compiled), "--bf16", str(half)]
        (args, training_args), _ = pretraining.read_arguments(flags, "")
        model = pretraining.build_model(args, training_args, self.tokenizer).to(self.device).train()
        if variant.compiled:
            masked_lm.compile_encoder(model)
        return model, pretraining.build_collator(args, training_args, self.tokenizer)

    def batches(self, collator: MlmCollator, count: int, rows: int, mixed: bool) -> list[Batch]:
        """Masked batches of (rows, length)."""
        rng, batches = np.random.default_rng(0), []
        for number in range(count):
            lengths = rng.integers(self.length // 8 if mixed else self.length * 15 // 16, self.length, rows)
            lengths[0] = self.length  # the same shape for all batches
            blocks = [rng.integers(5, len(self.tokenizer), length) for length in lengths]
            of = [Block({"input_ids": ids}, rows * number + row) for row, ids in enumerate(blocks)]
            batch = collator(of)
            targets = int((batch["labels"] != IGNORED).sum())
            batches.append(
                Batch({name: value.to(self.device) for name, value in batch.items()}, int(lengths.sum()), targets)
            )
        return batches

    def loss(self, model: torch.nn.Module, batch: Batch, half: bool = True) -> torch.Tensor:
        """Mean loss of a batch, nats."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            return model(**batch.inputs).loss_sums["mlm"] / batch.targets

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self, variant: Variant) -> Iterator[Figures]:
        """Figures of a variant, in an order in which failures come last."""
        model, collator = self.build(variant)
        batches = self.batches(collator, 4, self.rows, variant.mixed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.device.type == "cuda")

        def step(number: int) -> torch.Tensor:
            loss = self.loss(model, batches[number % len(batches)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # the estimate's peak includes existing gradients
            return loss.detach()

        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begun_s = time.perf_counter()
        losses = [step(0)]
        self.synchronize()
        first_s = time.perf_counter() - begun_s
        losses += [step(number) for number in range(1, WARM_UP)]
        self.synchronize()
        begun_s = time.perf_counter()
        losses += [step(number) for number in range(WARM_UP, WARM_UP + STEPS)]
        self.synchronize()
        seconds = time.perf_counter() - begun_s
        tokens = sum(batches[number % len(batches)].tokens for number in range(WARM_UP, WARM_UP + STEPS))
        peak = hardware.peak_memory_bytes()
        flops = masked_lm.flops_per_token(model.config, self.length, MASKED)
        size = {"micro_batch": self.rows, "seq_len": self.length, "mlm_probability": MASKED, "precision": "bf16"}
        values = [loss.item() for loss in losses]
        yield {
            "tokens_per_second": round(tokens / seconds),
            "positions_per_second": round(STEPS * self.rows * self.length / seconds),
            "utilisation": round(tokens / seconds * flops / self.matrix_rate, 4),
            "step_ms": round(1000 * seconds / STEPS, 2),
            "first_step_s": round(first_s, 2),
            "peak_gib": round(peak / GIB, 3),
            "estimate_gib": round(memory_per_gpu(model.config, **size).total / GIB, 3),
            "losses": values,
        }
        if not all(map(math.isfinite, values)):
            raise ValueError("a loss is not finite")
        if self.device.type == "cuda":
            yield {"synchronisations": synchronisations(lambda: step(0))}
        if variant.kernels:
            yield {"kernels": slowest_kernels(step, self.device)}

    def varlen_errors(self) -> Iterator[Figures]:
        """Relative errors of loss and gradient in bf16, of varlen attention and of SDPA, against SDPA in fp32: two
        layers, rows of mixed length. Raises `ValueError` if varlen's error is more than twice SDPA's."""
        exact = self._loss_and_gradient(Variant(), half=False)
        errors = {}
        for name in ("sdpa", "varlen"):
            found = self._loss_and_gradient(Variant(attention=name))
            for what, ours, wanted in zip(("loss", "gradient"), found, exact, strict=True):
                errors[f"{name}_{what}"] = ((ours - wanted).norm() / wanted.norm()).item()
        yield errors
        if not errors["varlen_gradient"] <= 2 * errors["sdpa_gradient"]:
            raise ValueError("varlen is less exact than SDPA")

    def _loss_and_gradient(self, variant: Variant, half: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        model, collator = self.build(variant, half, num_hidden_layers=2)
        (batch,) = self.batches(collator, 1, 8, mixed=True)
        loss = self.loss(model, batch, half)
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def synchronisations(call: Callable[[], Any]) -> dict[str, int]:
    """Number of synchronisations with the GPU in `call`, by Python line."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)]
    return dict(Counter(places))


def control() -> Iterator[Figures]:
    """Check of `synchronisations` itself. Raises `ValueError` if it misses one."""
    found = synchronisations(torch.zeros((), device="cuda").item)
    yield {"synchronisations": found}
    if not found:
        raise ValueError("a synchronisation was not counted")


def slowest_kernels(step: Callable[[int], Any], device: torch.device) -> list[tuple[str, float, int]]:
    """(name, total ms, calls) of the slowest kernels in `PROFILED` steps; on a CPU, of PyTorch's operators."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
        for number in range(PROFILED):
            step(number)
        if on_gpu:
            torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if not on_gpu or e.device_type == torch.autograd.DeviceType.CUDA]
    of = {e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.count) for e in events}
    slowest = sorted(of.items(), key=lambda item: -item[1][0])[:MOST_KERNELS]
    return [(name[:160], round(us / 1000, 3), count) for name, (us, count) in slowest]


def same_losses(found: dict[str, Figures]) -> Iterator[Figures]:
    """Relative differences of losses, compiled and plain, with the same weights and batches. Raises `ValueError` above
    `SAME_LOSS`."""
    pairs = zip(found["compiled"]["losses"], found["without_dropout"]["losses"], strict=True)
    differences = [abs(ours / plain - 1) for ours, plain in pairs]
    yield {"relative_differences": differences}
    if not all(difference <= SAME_LOSS for difference in differences):  # nor is it NaN
        raise ValueError("losses of the compiled encoder differ")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.profile", description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="folder")
    parser.add_argument("--matrix_rate", type=float, required=True, help="FLOP/s of a product of large bf16 matrices")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args(argv)
    bench = Bench(args.tokenizer, args.matrix_rate, args.tiny)
    found: dict[str, Figures] = {}
    calls = {name: functools.partial(bench.measure, variant) for name, variant in VARIANTS.items()}
    compiled = calls.pop("compiled")  # last, as it takes longest
    if args.tiny:  # varlen attention is for GPUs
        calls.pop("varlen")
    else:
        calls |= {"varlen_errors": bench.varlen_errors, "control": control}
    calls |= {"compiled": compiled, "same_losses": functools.partial(same_losses, found)}
    for name, call in calls.items():
        begun_s = time.perf_counter()
        found[name] = {}
        try:
            for figures in call():
                found[name] |= figures
        except Exception as error:  # the other variants still run
            found[name]["error"] = f"{type(error).__name__}: {str(error)[:2000]}"
        found[name]["seconds"] = round(time.perf_counter() - begun_s, 1)
        clear_device_cache(garbage_collection=True)
        durable.write_text(args.output, json.dumps(found))


if __name__ == "__main__":
    main()
