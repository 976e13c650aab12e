"""Logging set-up, progress bars, and formats of counts and durations."""

import functools
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

from roberta_recipe.credentials import redact_record

logger = logging.getLogger("recipe")
LOG_INTERVAL_S = 30.0  # between two log lines of a progress bar without a terminal


def is_first_process() -> bool:
    """Whether this process is rank 0, which writes files and log lines."""
    return os.environ.get("RANK", "0") == "0"


def set_up_logging() -> None:
    """Log to stderr, without secrets; of libraries, warnings only."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
    for name in (None, "transformers", "datasets", "huggingface_hub"):  # these libraries have their own handlers
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(redact_record)  # once, however often it is added
    # imported by accelerate if it is installed, DeepSpeed warns on every machine without a GPU
    logging.getLogger("DeepSpeed").addFilter(lambda record: not record.getMessage().startswith("Setting accelerator"))
    logger.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    for name in {"transformers", "datasets"} & sys.modules.keys():  # not imported here, which takes seconds
        sys.modules[name].utils.logging.set_verbosity_warning()
    if "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.disable_progress_bar()  # of loading and writing weights
    # raised by DeepSpeed's own calls
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator")


class Bar(tqdm):
    """A progress bar on a terminal; elsewhere a log line every `LOG_INTERVAL_S`: `Packing 34%, ETA 12 min`."""

    monitor_interval = 0  # no monitor thread, as data workers are forked

    def __init__(self, *args: Any, disable: bool | None = None, **kwargs: Any) -> None:
        self.is_shown = not disable and is_first_process() and (kwargs.get("file") or sys.stderr).isatty()
        if not self.is_shown:
            kwargs |= {"mininterval": LOG_INTERVAL_S, "delay": LOG_INTERVAL_S, "miniters": 1, "leave": False}
        super().__init__(*args, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.is_shown:
            super().display(msg, pos)
        elif msg is None:  # "" clears a bar
            state = self.format_dict
            done = f"{self.n:,}{self.unit}"
            if self.total:
                left_s = state["elapsed"] / max(self.n, 1) * (self.total - self.n)
                done = f"{self.n / self.total:.0%}, ETA {duration(left_s)}"
            logger.info(f"{self.desc.removesuffix(': ')} {done}")


@functools.cache
def log_once(line: str) -> None:  # fine-tuning parses its command line for each seed
    logger.info(line)


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 process", "2 processes"."""
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural}"


def listed(names: Sequence[str], at_most: int = 5) -> str:
    """The first names, and the number of the others."""
    left_out = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {counted(left_out, 'other')}" if left_out > 0 else "")


def duration(seconds: float) -> str:
    """A duration in words: "40 s", "12 min", "3.5 h", "2.4 days"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
