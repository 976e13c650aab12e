"""Console progress of training: a line for each log entry, and a progress bar on a terminal."""

import time
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainingArguments

from roberta_recipe.log import LOG_INTERVAL_S, Bar, duration, logger

MIN_DATA_WAIT = 0.01  # share of the time; log lines omit a smaller one
_SPEED_SUFFIXES = ("runtime", "_per_second")


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
