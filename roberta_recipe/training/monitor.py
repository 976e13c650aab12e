"""Monitoring of training: console progress (a line for each log entry, a bar on a terminal), tokens per second, and
model-FLOPs utilisation (MFU).

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
from typing import Any, Literal

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedConfig, TrainerCallback, TrainingArguments

from roberta_recipe.hardware import matrix_rate
from roberta_recipe.log import LOG_INTERVAL_S, Bar, counted, duration, logger
from roberta_recipe.model import attention

MIN_DATA_WAIT = 0.01  # share of the time; log lines omit a smaller one
_SPEED_SUFFIXES = ("runtime", "_per_second")
# architectures with BERT's matrix products in each layer, and BERT's config keys
BERT_LIKE = ("albert", "bert", "camembert", "electra", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Progress(TrainerCallback):
    """Prints `step 50/4,000  loss 7.63  lr 5.0e-04  2,350 tokens/s  ETA 12 min` for each log entry, on rank 0, above a
    progress bar on a terminal; without a terminal, a line with the ETA every `LOG_INTERVAL_S` too. `log.jsonl` has all
    figures. `steps_after`: steps of later runs, for the ETA of all runs."""

    def __init__(self, steps_after: int = 0):
        self._steps_after = steps_after
        self._training = self._evaluation = None  # bars
        self._begun_s, self._first_step = 0.0, 0  # end of this start's first step, which includes the first data wait
        self._last_line_s = 0.0  # the time of the last line

    def on_train_begin(self, args, state, control, **kwargs):
        self._first_step, self._last_line_s = state.global_step + 1, time.monotonic()
        if state.is_world_process_zero:
            self._training = _bar(tqdm, args, "Training", " steps", state.max_steps)
            self._training.n = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self._first_step:
            self._begun_s = time.monotonic()
        if self._training is None:
            return
        self._training.update()
        if self._training.disable and time.monotonic() - self._last_line_s > LOG_INTERVAL_S and not control.should_log:
            self._say("  ".join([f"step {state.global_step:,}/{state.max_steps:,}", *self._remaining(state)]))

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.on_evaluate(args, state, control)  # `external_write_mode` would print its bar again
        if self._training is not None and (line := self._line(state, logs)):
            self._say(line)

    def _say(self, line: str) -> None:
        self._last_line_s = time.monotonic()
        with tqdm.external_write_mode():  # above the bar
            logger.info(line)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if state.is_world_process_zero:
            if self._evaluation is None:
                self._evaluation = _bar(Bar, args, "Evaluating", " batches", len(eval_dataloader))
            self._evaluation.update()

    def on_evaluate(self, args, state, control, **kwargs):
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    on_predict = on_evaluate

    def on_train_end(self, args, state, control, **kwargs):
        if self._training is not None:
            self._training.close()
            self._training = None

    def _line(self, state, logs: dict[str, Any]) -> str:
        """The console line of a log entry; empty for `Trainer`'s entry at the end of training."""
        items = [f"step {state.global_step:,}/{state.max_steps:,}"]
        if "loss" in logs:
            items += [f"loss {logs['loss']:#.3g}"]
            items += [f"{name.removesuffix('_loss')} {value:#.3g}" for name, value in logs.items() if "_loss" in name]
            items += [f"lr {logs['learning_rate']:.1e}"]
            items += [f"{logs['tokens_per_second']:,} tokens/s"] if "tokens_per_second" in logs else []
            items += [f"{logs['mfu']:.0%} of the matrix rate"] if "mfu" in logs else []
            items += [f"data wait {logs['data_wait']:.0%}"] if logs.get("data_wait", 0) >= MIN_DATA_WAIT else []
            items += [f"{logs['skipped_steps']} skipped"] if logs.get("skipped_steps") else []
            return "  ".join([*items, *self._remaining(state)])
        shown = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
        values = [
            f"{name} {value:{'.1%' if name == 'blimp' else ',' if isinstance(value, int) else '.4g'}}"
            for name, value in shown.items()
            if not name.endswith(_SPEED_SUFFIXES)
        ]
        return "  ".join([*items, "validation", *values]) if values else ""

    def _remaining(self, state) -> list[str]:
        done, left = state.global_step - self._first_step, state.max_steps - state.global_step
        if done <= 0 or not left:
            return []
        step_s = (time.monotonic() - self._begun_s) / done
        of_all = f", all runs {duration(step_s * (left + self._steps_after))}" if self._steps_after else ""
        return [f"ETA {duration(step_s * left)}{of_all}"]


def _bar(kind: type[tqdm], args: TrainingArguments, desc: str, unit: str, total: int) -> tqdm:
    disable = args.disable_tqdm or None  # None: if stderr is not a terminal
    return kind(total=total, desc=desc, unit=unit, disable=disable, dynamic_ncols=True, leave=False)


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
