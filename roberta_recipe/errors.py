"""Errors that end a command in one line with an exit code. Any other exception keeps its traceback."""

import contextlib
import errno
import functools
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from roberta_recipe.credentials import redact
from roberta_recipe.started import continue_with

_FIRST_PROCESS_S = 3.0  # in which the launcher ends the other processes, once the first has failed
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# tokenizers (Rust) raises a plain Exception, torch's writers a RuntimeError that may not say why
_NO_ROOM_MESSAGES = "No space left|quota exceeded|File too large|iostream error|PytorchStreamWriter|inline_container"


# modules of libraries that read flags when training starts, and the flags
_READ_FLAGS = {
    "transformers.integrations.integration_utils": "report_to",
    "transformers.trainer": "flags of TrainingArguments",
    "accelerate.": "torch_compile_backend or another flag of accelerate",
    "torch.utils.data.": "flags of data loading (dataloader_prefetch_factor, ...)",
    "multiprocessing.": "too many data workers, lower dataloader_num_workers",
}


class InputError(ValueError):
    """An error that the user can fix before anything runs. The message names the value and the fix."""

    exit_code = 2


class RunError(RuntimeError):
    """A run that failed. The message says what is saved, and what to do."""

    exit_code = 1


class Stopped(RunError):
    """A run that ended early and was saved; the same command continues."""

    # EX_TEMPFAIL of sysexits.h: try again; 128 + SIGINT, as of a shell; EX_DATAERR
    EXIT_CODES: ClassVar[dict[str, int]] = {"SIGTERM": 75, "Ctrl-C": 130, "a loss spike": 65}

    def __init__(self, message: str, by: str = "Ctrl-C"):
        super().__init__(message)
        self.exit_code = self.EXIT_CODES[by]


class _Terminated(KeyboardInterrupt):
    """SIGTERM outside of training."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def says_no_room(error: BaseException) -> bool:
    """Whether a file could not be written, most likely on a full disk."""
    return error.errno in _NO_ROOM if isinstance(error, OSError) else bool(re.search(_NO_ROOM_MESSAGES, str(error)))


@contextlib.contextmanager
def library_errors(is_start: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Re-raise as `InputError`, while `is_start()`, an error that a library raises for a flag: in a module of
    `_READ_FLAGS`. Errors of this package, of data and of models keep their traceback."""
    try:
        yield
    except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
        from roberta_recipe.hardware import lost_process  # torch, which has been imported where this is raised

        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        raised_in = [name for name in modules if name != "enum"][-1]
        flags = next((flags for prefix, flags in _READ_FLAGS.items() if raised_in.startswith(prefix)), None)
        if flags is None or not is_start() or lost_process(error):
            raise
        raise InputError(f"{flags}: {type(error).__name__}: {first_line(error)}") from error


def lost_message(lost: str, error: BaseException) -> str:
    """The message of a lost process (`hardware.lost_process`), with the library's reason."""
    return f"{lost} ({first_line(error).rstrip('. ')}): its output or the system's log says why (often memory)."


def exit_on_error(main: Callable[[], Any]) -> None:
    """Run a command's `main`. The errors above, signals, full disks and lost processes become a line on stderr, without
    secrets, and an exit code."""
    continue_with()  # reads the launcher's command, while it lives
    sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the terminal lacks, as on stderr
    sys.excepthook = _print_redacted
    signal.signal(signal.SIGTERM, functools.partial(_raise_terminated, os.getpid()))
    try:
        main()
        return
    except (Exception, KeyboardInterrupt) as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher's, as another process has failed too
        if (described := _describe(error)) is None:
            raise
    # outside of the except clause nothing holds the frames of `main`, so data workers end in order
    message, code = described
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    if os.environ.get("RANK", "0") != "0":  # the first prints an error of all, and the launcher ends the others
        time.sleep(_FIRST_PROCESS_S)
    print(redact(message), file=sys.stderr, flush=True)
    raise SystemExit(code)


def interruptible(call: Callable[[], Any]) -> Any:
    """The result of a long library call that releases the GIL, from a thread, so that signals end the process at once.
    For a call that writes nothing."""
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(call).result()
        except KeyboardInterrupt as error:
            message, code = _describe(error)
            print(message, file=sys.stderr, flush=True)
            os._exit(code)  # Python would wait for the thread


def _describe(error: BaseException) -> tuple[str, int] | None:
    """The line and the exit code of an expected error."""
    if isinstance(error, KeyboardInterrupt):
        # a launcher ends the process that has just failed, as another has failed too: its error is the reason
        if isinstance(error.__context__, Exception) and (described := _describe(error.__context__)):
            return described
        by = "SIGTERM" if isinstance(error, _Terminated) else "Ctrl-C"
        return f"ended by {by}; saved files are complete. {continue_with()}", Stopped.EXIT_CODES[by]
    if isinstance(error, Stopped):
        return str(error), error.exit_code
    if isinstance(error, InputError | RunError):
        # an error raised in a data worker comes with the worker's traceback around it
        return "error: " + re.split(r"\b(?:InputError|BadShard|RunError): ", str(error))[-1].strip(), error.exit_code
    from roberta_recipe.hardware import lost_process  # torch, which has been imported where this is raised

    if says_no_room(error):
        reason = f"{first_line(error)}: free some disk space."
    elif lost := lost_process(error):
        reason = lost_message(lost, error)
    else:
        return None
    return f"error: {reason} Saved files are complete. {continue_with()}", RunError.exit_code


def _raise_terminated(owner: int, number: int, _: Any) -> None:
    if os.getpid() != owner:  # a forked worker that has not set its handlers yet
        os._exit(128 + number)
    raise _Terminated


def _print_redacted(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    print(redact("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)
