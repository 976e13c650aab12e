"""What a command says while it runs: our log lines and progress bars on stderr, the libraries' warnings only."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm.auto import tqdm

from roberta_recipe.credentials import Redact

logger = logging.getLogger("recipe")
SILENT_S = 30.0  # without a log entry or a bar, until a line says how far it is
# what libraries say of every run, and there is nothing to do about
_OF_EVERY_RUN = (
    "Setting accelerator to CPU.",  # DeepSpeed, which accelerate imports wherever it is installed
    "Warning: The following arguments do not match the ones in the `trainer_state.json`",  # those of this start count
)


def is_first_process() -> bool:
    """Whether this is the process, of those that a launcher started, that writes files and log lines."""
    return os.environ.get("RANK", "0") == "0"


def set_up_logging() -> None:
    """Our log lines and progress bars on stderr; the libraries' only where something is wrong."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
    for name in (None, "transformers", "datasets", "huggingface_hub"):  # these libraries have handlers of their own
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(known, Redact) for known in handler.filters):
                handler.addFilter(Redact())
    for name in ("DeepSpeed", "transformers.trainer_utils"):
        logging.getLogger(name).addFilter(_is_of_this_run)
    logger.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    for name in {"transformers", "datasets"} & sys.modules.keys():  # a command that needs neither starts at once
        sys.modules[name].utils.logging.set_verbosity_warning()
    if "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.disable_progress_bar()  # of loading and writing weights
    # DeepSpeed's own calls raise this warning at every use
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator")


class Bar(tqdm):
    """A progress bar where stderr is a terminal; elsewhere a log line every `SILENT_S`: `Packing 34%, ETA 12 min`."""

    def __init__(
        self, iterable: Iterable[Any] | None = None, desc: str = "", disable: bool | None = None, **look: Any
    ) -> None:
        super().__init__(iterable, desc, disable=disable, **look)
        self._what, self._unit, self._begun_s = desc, look.get("unit", ""), time.monotonic()
        self._said_s = self._begun_s

    def __iter__(self) -> Iterator[Any]:
        if not self.disable:
            yield from super().__iter__()
            return
        for item in self.iterable:
            yield item
            self.update()

    def update(self, n: float = 1) -> bool | None:
        if not self.disable:
            return super().update(n)
        self.n += n
        if (now_s := time.monotonic()) - self._said_s > SILENT_S:
            self._said_s = now_s
            left_s = (now_s - self._begun_s) / max(self.n, 1) * ((self.total or 0) - self.n)
            done = f"{self.n / self.total:.0%}, ETA {duration(left_s)}" if self.total else f"{self.n:,}{self._unit}"
            logger.info(f"{self._what} {done}")
        return None


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 process", "2 processes"."""
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural}"


def duration(seconds: float) -> str:
    """A span of time in words: "40 s", "12 min", "3.5 h", "2.4 days"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def _is_of_this_run(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_OF_EVERY_RUN)
