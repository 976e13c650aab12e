"""Advice at start-up on the likely bottleneck: tokenization, or a micro-batch too small for a GPU. Each function
returns a log line or None."""

import math

from roberta_recipe.log import counted

_TOKENIZED_PER_CORE = 480_000  # tokens/s that a core reads and packs (docs/pretraining.md, "Pack once")
_TRAINED_SHARE = 0.35  # of the matrix rate: base at 512 on an H200, compiled, no dropout (results/gpu_h200.json)
_TOKENS_ENOUGH = 16_384  # of a micro-batch, 32 x 512: assumed


def on_tokenization(
    cores: float, processes: int, matrix_rate: float, flops_per_token: float, preset: str
) -> str | None:
    """A warning where tokenization is slower than training. Every process, and every data worker of it, tokenizes the
    whole text with `cores` cores; `matrix_rate` in FLOP/s of a device; `preset`: path of this run's preset."""
    tokenized, trained = _TOKENIZED_PER_CORE * cores, processes * _TRAINED_SHARE * matrix_rate / flops_per_token
    if tokenized >= trained:
        return None
    return (
        f"Tokenization is the bottleneck: each process and data worker tokenizes the whole text, some "
        f"{tokenized / 1e6:.2f} M tokens/s on {cores:g} cores each, and {counted(processes, 'process')} "
        f"can train some {trained / 1e6:.2f} M tokens/s. Pack the text once, then start with --token_cache DIR: "
        f"python tools/pack.py --config {preset} --token_cache DIR"
    )


def on_micro_batch(micro_batch: int, seq_length: int, global_batch: int, processes: int) -> str | None:
    """Where a GPU's micro-batch (sequences) has too few tokens to keep it busy: the flags of a larger one, under the
    same global batch where that has enough sequences for each process."""
    if micro_batch * seq_length >= _TOKENS_ENOUGH:
        return None
    enough, share = math.ceil(_TOKENS_ENOUGH / seq_length), global_batch // processes
    if share >= enough:
        size = next(size for size in range(enough, share + 1) if share % size == 0)
        flags = f"--per_device_train_batch_size {size} (the global batch stays {global_batch})"
    else:
        flags = f"--per_device_train_batch_size {enough} --global_batch_size {enough * processes} (another run)"
    return (
        f"A micro-batch of {micro_batch} x {seq_length} tokens may leave the GPU idle for most of a step; where memory "
        f"allows: {flags}"
    )
