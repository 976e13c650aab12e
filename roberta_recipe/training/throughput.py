"""Throughput: tokens per second, and model-FLOPs utilisation (MFU).

MFU is the model's FLOPs per second by formula / the machine's matrix rate in the run's precision, measured when
training begins. On a CPU the rate is measured again at the first log line and the maximum is used, as the threads of a
new process may share a core at first. FLOPs count a multiply-add as 2, the backward pass as twice the forward (Kaplan
et al. 2020, appendix B; 6N), real tokens only, and no recomputation.
"""

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Literal

import torch
from transformers import PreTrainedConfig, TrainerCallback, TrainingArguments

from roberta_recipe.hardware import matrix_rate
from roberta_recipe.log import counted, logger
from roberta_recipe.model import attention

# architectures with BERT's matrix products in each layer, and BERT's config keys
BERT_LIKE = ("albert", "bert", "camembert", "electra", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@functools.cache  # for several fine-tuning runs in one process
def _probe(device: torch.device, dtype: torch.dtype, at_end: bool) -> float:
    return matrix_rate(device, dtype)


def encoder_flops(config: PreTrainedConfig, tokens: int, squares: int) -> float | None:
    """Forward and backward FLOPs of an encoder's layers, without the head, over sequences with `tokens` in all and the
    sum `squares` of squared lengths. None for an architecture that is not `BERT_LIKE`.

    Per token: body 6 x 12 x L x h^2 (with an intermediate size of 4h), attention 12 x L x S x h at sequence length S.
    """
    if config.model_type not in BERT_LIKE:
        return None
    hidden, layers = config.hidden_size, config.num_hidden_layers
    body = 6 * layers * (4 * hidden**2 + 2 * hidden * config.intermediate_size)
    return float(body * tokens + 12 * layers * hidden * squares)


class Throughput(TrainerCallback):
    """Tokens per second and MFU of all processes, and this process's data wait, since the last log entry."""

    def __init__(self, args: TrainingArguments):
        self.args = args
        self.matrix_rate: float | None = None  # FLOP/s of this process's device
        self._since_s: float | None = None
        self._seconds, self._tokens, self._flops = Counter(), 0, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        """Measure `matrix_rate`."""
        precision, device = attention.precision(args), args.device
        self.matrix_rate = _probe(device, _DTYPES[precision], at_end=False)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # the probe has raised it
        threads = counted(torch.get_num_threads(), "thread")
        where = torch.cuda.get_device_name() if device.type == "cuda" else threads
        logger.info(f"Machine     {where}: {self.matrix_rate / 1e9:,.0f} GFLOP/s in {precision}")

    def on_step_begin(self, args, state, control, **kwargs):
        if self._since_s is None:  # excludes the wait for the first batch
            self._restart()

    @contextlib.contextmanager
    def timing(self, what: Literal["excluded", "waited"]) -> Iterator[None]:
        """Context for non-training work ("excluded" from the time) or for a wait for data ("waited": `data_wait`)."""
        start_s = time.monotonic()
        yield
        self._seconds[what] += time.monotonic() - start_s

    def count(self, tokens: int, flops: float | None) -> None:
        """Add the work of all processes; `flops` is None for an architecture without a formula."""
        self._tokens += tokens
        self._flops += math.nan if flops is None else flops

    def figures(self) -> dict[str, float]:
        """`tokens_per_second`, `data_wait` (share of this process's time) and, if known, `mfu` since the last call."""
        elapsed_s = time.monotonic() - self._since_s - self._seconds["excluded"]
        figures = {
            "tokens_per_second": round(self._tokens / elapsed_s),
            "data_wait": round(self._seconds["waited"] / elapsed_s, 4),
        }
        if not math.isnan(self._flops):
            if self.args.device.type == "cpu":  # a GPU may have no free memory for the probe
                measured = _probe(self.args.device, _DTYPES[attention.precision(self.args)], at_end=True)
                self.matrix_rate = max(self.matrix_rate, measured)
            figures["mfu"] = round(self._flops / elapsed_s / self.args.world_size / self.matrix_rate, 4)
        self._restart()
        return figures

    def _restart(self) -> None:
        self._since_s, self._seconds, self._tokens, self._flops = time.monotonic(), Counter(), 0, 0.0
