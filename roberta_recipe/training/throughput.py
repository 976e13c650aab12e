"""How fast training is: tokens a second, and how much of the machine it uses.

Utilisation is FLOPs of the model by formula / the rate that this machine multiplies matrices at, in the precision of
the run, as a probe measures it when training begins. On a CPU it is measured again at the first log line, and the
faster counts: the threads of a new process may share a core at first. FLOPs count a multiply-add as 2, the backward
pass as twice the forward (Kaplan et al. 2020, appendix B; 6N), real tokens only, and nothing that is computed again.
"""

import contextlib
import functools
import math
import time
from collections.abc import Iterator

import torch
from transformers import PreTrainedConfig, TrainerCallback, TrainingArguments

from roberta_recipe.hardware import forget_peak_memory, matrix_rate
from roberta_recipe.log import counted, logger
from roberta_recipe.training import attention

# families whose layers have the matrix products of BERT's, and whose configs have its names
BERT_LIKE = ("albert", "bert", "camembert", "electra", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@functools.cache  # a process fine-tunes with several seeds
def _probe(device: torch.device, dtype: torch.dtype, again: bool) -> float:
    return matrix_rate(device, dtype)


def encoder_flops(config: PreTrainedConfig, tokens: int, squares: int) -> float | None:
    """FLOPs of forward and backward of an encoder's layers, over sequences with so many tokens in all; `squares` is the
    sum of their squared lengths. None for a family that is not `BERT_LIKE`.

    Body 6 x 12 x L x h^2 a token (with an intermediate size of 4h), attention 12 x L x S x h a token of S.
    Padding is no token. Without the head: a classifier's sees a token of each sequence, and a span head has 2 x h
    weights.
    """
    if config.model_type not in BERT_LIKE:
        return None
    hidden, layers = config.hidden_size, config.num_hidden_layers
    body = 6 * layers * (4 * hidden**2 + 2 * hidden * config.intermediate_size)
    return float(body * tokens + 12 * layers * hidden * squares)


class Throughput(TrainerCallback):
    """Tokens and FLOPs of all processes between two log lines, and the seconds that they took, in each step's entry."""

    def __init__(self, args: TrainingArguments):
        self.args = args
        self.matrix_rate: float | None = None  # FLOP/s of this process's device
        self._since_s: float | None = None
        self._outside_s, self._waited_s, self._tokens, self._flops = 0.0, 0.0, 0, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.measure_machine()

    def on_step_begin(self, args, state, control, **kwargs):
        self.begin()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            figures = self.figures()
            logs |= figures
            state.log_history[-1] |= figures

    def measure_machine(self) -> None:
        """Set `matrix_rate`, and say it."""
        precision, device = attention.precision(self.args), self.args.device
        self.matrix_rate = self._probed(again=False)
        forget_peak_memory()  # of its matrices
        if self.args.process_index == 0:
            on_gpu, threads = device.type == "cuda", torch.get_num_threads()
            where = torch.cuda.get_device_name() if on_gpu else counted(threads, "thread")
            logger.info(f"Machine     {where}: {self.matrix_rate / 1e9:,.0f} GFLOP/s in {precision}")

    def _probed(self, again: bool) -> float:
        return _probe(self.args.device, _DTYPES[attention.precision(self.args)], again)

    def begin(self) -> None:
        """Start the clock, at the first batch: the time before it, which fills a stream, is no training."""
        if self._since_s is None:
            self._since_s, self._outside_s, self._waited_s = time.monotonic(), 0.0, 0.0

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """What is done here takes no time of training."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self._outside_s += time.monotonic() - start_s

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, this process waits for data."""
        start_s = time.monotonic()
        yield
        self._waited_s += time.monotonic() - start_s

    def count(self, tokens: int, flops: float | None) -> None:
        """Add what all processes have computed; `flops` is None where no formula says it."""
        self._tokens += tokens
        self._flops += math.nan if flops is None else flops

    def figures(self) -> dict[str, float]:
        """The figures of a log line: `tokens_per_second`, `data_wait` (share of this process's time) and, where the
        FLOPs are known, `mfu`. The next line begins here."""
        elapsed_s = time.monotonic() - self._since_s - self._outside_s
        found = {
            "tokens_per_second": round(self._tokens / elapsed_s),
            "data_wait": round(self._waited_s / elapsed_s, 4),
        }
        if not math.isnan(self._flops):
            if self.args.device.type == "cpu":  # a GPU may have no memory left for it
                self.matrix_rate = max(self.matrix_rate, self._probed(again=True))
            found["mfu"] = round(self._flops / elapsed_s / self.args.world_size / self.matrix_rate, 4)
        self._since_s, self._outside_s, self._waited_s = time.monotonic(), 0.0, 0.0
        self._tokens, self._flops = 0, 0.0
        return found
