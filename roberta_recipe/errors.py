"""Exceptions that end a command with one line on stderr and an exit code. Other exceptions keep their traceback."""

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
from roberta_recipe.launcher import resume_hint

_HEAD_START_S = 3.0  # head start of rank 0 to print an error, after which the launcher ends the other ranks
# messages of tokenizers (Rust; a plain Exception) and of torch's writers (a RuntimeError, perhaps without a reason)
_DISK_FULL_MESSAGES = "No space left|quota exceeded|File too large|iostream error|PytorchStreamWriter|inline_container"

# library modules that read flags when training starts -> the flags
_FLAGS_OF_MODULE = {
    **dict.fromkeys(("transformers.integrations.integration_utils", "mlflow.", "trackio.", "wandb."), "report_to"),
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
    """A run that a signal or a loss spike ended early; the same command resumes it from its last checkpoint."""

    # EX_TEMPFAIL and EX_DATAERR of sysexits.h, 128 + signal as in a shell
    EXIT_CODES: ClassVar[dict[str, int]] = {"SIGTERM": 75, "Ctrl-C": 130, "SIGHUP": 129, "a loss spike": 65}

    def __init__(self, message: str, by: str = "Ctrl-C"):
        super().__init__(message)
        self.exit_code = self.EXIT_CODES[by]


class _Terminated(KeyboardInterrupt):
    """SIGTERM outside of training, as an exception."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message (two if it ends in a colon), or its type if the message is empty."""
    lines = list(filter(None, str(error).splitlines())) or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed, most likely on a full disk."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return bool(re.search(_DISK_FULL_MESSAGES, str(error)))


@contextlib.contextmanager
def library_errors(is_start: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Context that re-raises a library's exception for a bad flag (raised in a module of `_FLAGS_OF_MODULE` while
    `is_start()`) as `InputError`. Errors of this package, data and models, and likely bugs, keep their traceback."""
    try:
        yield
    except Exception as error:
        from roberta_recipe.hardware import lost_process  # torch, which has been imported where this is raised

        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        raised_in = [name for name in modules if name != "enum"][-1]
        flags = next((flags for prefix, flags in _FLAGS_OF_MODULE.items() if raised_in.startswith(prefix)), None)
        is_bug = isinstance(error, TypeError | LookupError | AttributeError)
        if flags is None or is_bug or not is_start() or lost_process(error):
            raise
        raise InputError(f"{flags}: {type(error).__name__}: {first_line(error)}") from error


def lost_message(lost: str, error: BaseException) -> str:
    """Error message for a lost process (`hardware.lost_process`), with the library's reason."""
    return f"{lost} ({first_line(error).rstrip('. ')}): its output or the system log says why (often memory)."


def exit_on_error(main: Callable[[], Any]) -> None:
    """Run a command's `main`. The errors above, signals, full disks and lost processes end it with a line on stderr,
    without secrets, and an exit code."""
    resume_hint()  # cached now, as the launcher may end first
    if sys.stdout:  # None if closed
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the terminal cannot show, as on stderr
    sys.excepthook = _print_error
    sys.unraisablehook = lambda dropped: _print_error(dropped.exc_type, dropped.exc_value, dropped.exc_traceback)
    signal.signal(signal.SIGTERM, functools.partial(_raise_terminated, os.getpid()))
    try:
        main()
        return
    except (Exception, KeyboardInterrupt) as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent by a launcher when another rank failed too
        if (described := _describe(error)) is None:
            raise
    # after the except clause, which keeps the frames of `main` alive: once they are freed, data workers end
    message, code = described
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    if os.environ.get("RANK", "0") != "0":  # an error on all ranks is printed once
        time.sleep(_HEAD_START_S)
    _print(message)
    raise SystemExit(code)


def interruptible(call: Callable[[], Any]) -> Any:
    """Run a long call that releases the GIL and writes no files, in a thread: signals end the process at once."""
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(call).result()
        except KeyboardInterrupt as error:
            _end_at_once(error)  # a normal exit would wait for the thread


def _describe(error: BaseException) -> tuple[str, int] | None:
    """The message and the exit code of an expected error; None for a bug."""
    if isinstance(error, KeyboardInterrupt):
        # SIGTERM from a launcher while this process handles its own error: report that error
        if isinstance(error.__context__, Exception) and (described := _describe(error.__context__)):
            return described
        by = "SIGTERM" if isinstance(error, _Terminated) else "Ctrl-C"
        return f"ended by {by}; saved files are complete. {resume_hint()}", Stopped.EXIT_CODES[by]
    if isinstance(error, Stopped):
        return str(error), error.exit_code
    if isinstance(error, InputError | RunError):
        # an error of a data worker comes inside the worker's traceback
        return "error: " + re.split(r"\b(?:InputError|BadShard|RunError): ", str(error))[-1].strip(), error.exit_code
    from roberta_recipe.hardware import lost_process  # imports torch, which some commands do not need

    if is_disk_full(error):
        reason = f"{first_line(error)}: free some disk space."
    elif lost := lost_process(error):
        reason = lost_message(lost, error)
    elif isinstance(error, BrokenPipeError):
        reason = "the program that read the output has ended."
    elif isinstance(error, FileNotFoundError) and str(error.filename).endswith(".tmp"):
        reason = f"{first_line(error)}: another program removed this temporary file."
    else:
        return None
    return f"error: {reason} Saved files are complete. {resume_hint()}", RunError.exit_code


def _raise_terminated(owner: int, number: int, _: Any) -> None:
    if os.getpid() != owner:  # a forked worker before it sets its own handlers
        os._exit(128 + number)
    raise _Terminated


def _end_at_once(error: KeyboardInterrupt) -> None:
    message, code = _describe(error)
    _print(message)
    os._exit(code)


def _print(message: str) -> None:
    with contextlib.suppress(OSError):  # a closed pipe
        print(redact(message), file=sys.stderr, flush=True)


def _print_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Exception hook: a traceback without secrets; one line for a signal in a destructor or an exception handler."""
    if isinstance(error, KeyboardInterrupt):
        _end_at_once(error)
    print(redact("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)
