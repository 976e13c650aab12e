"""Errors that end a command in one line with an exit code. Any other exception keeps its traceback: it is a bug."""

import errno
import functools
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from roberta_recipe.credentials import redact
from roberta_recipe.started import continue_with

_FOR_FIRST_PROCESS_S = 3.0  # in which the launcher ends the others, once the first has failed
_NO_ROOM, _NOT_ALLOWED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), (errno.EACCES, errno.EPERM, errno.EROFS)
# tokenizers (Rust) raises a plain Exception, torch's writers a RuntimeError that may not say why
_NO_ROOM_IN_WORDS = "No space left|quota exceeded|File too large|iostream error|PytorchStreamWriter|inline_container"


class InputError(ValueError):
    """Something that the user can fix before anything runs. The message names the value and the fix."""

    exit_code = 2


class RunError(RuntimeError):
    """Something that broke a run. The message says what is safe, and what to do."""

    exit_code = 1


class Stopped(RunError):
    """A run that ends early; what was saved is whole, and the same command continues."""

    # EX_TEMPFAIL of sysexits.h: try again; as a shell has it; EX_DATAERR
    EXIT_CODES: ClassVar[dict[str, int]] = {"SIGTERM": 75, "Ctrl-C": 130, "a loss spike": 65}

    def __init__(self, message: str, by: str = "Ctrl-C"):
        super().__init__(message)
        self.exit_code = self.EXIT_CODES[by]


class _Terminated(KeyboardInterrupt):
    """SIGTERM, outside of training."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def says_no_room(error: BaseException) -> bool:
    """Whether a file could not be written, most likely on a full disk."""
    return error.errno in _NO_ROOM if isinstance(error, OSError) else bool(re.search(_NO_ROOM_IN_WORDS, str(error)))


def lost_message(lost: str, error: BaseException) -> str:
    """The message of a lost process (`hardware.lost_process`), with the library's reason."""
    said = first_line(error).rstrip(". ")
    return f"{lost} ({said}): its own output or the system's log says why (often memory)."


def exit_on_error(main: Callable[[], Any]) -> None:
    """Run a command's `main`; the errors above, signals, full disks and lost processes become one line on stderr,
    without passwords and tokens, and an exit code; that of SIGPIPE where nobody reads the output (`| head`)."""
    continue_with()  # a launcher's command, while it lives
    sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the terminal lacks, as on stderr
    sys.excepthook = _print_redacted
    signal.signal(signal.SIGTERM, functools.partial(_raise_terminated, os.getpid()))
    try:
        main()
        sys.stdout.flush()
        return
    except (Exception, KeyboardInterrupt) as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher's, as another process has failed too
        if isinstance(error, BrokenPipeError) and _is_output_closed():
            raise SystemExit(128 + signal.SIGPIPE) from None
        if (described := _describe(error)) is None:
            raise
    # outside of the except clause nothing holds the frames of `main` any more, so data workers end in order
    message, code = described
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    if os.environ.get("RANK", "0") != "0":  # what all processes meet is the first one's line: the launcher ends others
        time.sleep(_FOR_FIRST_PROCESS_S)
    sys.stderr.write(redact(message) + "\n")  # at once, as several processes may write
    sys.stderr.flush()
    raise SystemExit(code)


def interruptible(call: Callable[[], Any]) -> Any:
    """The result of a long call of a library that releases the GIL, from another thread, as signals reach Python code
    of the main thread alone: they end the process at once. For work that writes nothing."""
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(call).result()
        except KeyboardInterrupt as ended:
            message, code = _describe(ended)
            print(redact(message), file=sys.stderr, flush=True)
            os._exit(code)  # the thread cannot be ended


def _describe(error: BaseException) -> tuple[str, int] | None:
    """The line and the exit code of an error that is no bug."""
    if isinstance(error, KeyboardInterrupt):
        # a launcher ends the process that has just failed, as another has failed too: its error is what counts
        if isinstance(error.__context__, Exception) and (described := _describe(error.__context__)):
            return described
        by = "SIGTERM" if isinstance(error, _Terminated) else "Ctrl-C"
        return f"ended by {by}; what was saved is whole. {continue_with()}", Stopped.EXIT_CODES[by]
    if isinstance(error, Stopped):
        return str(error), error.exit_code
    if isinstance(error, InputError | RunError):
        # an error raised in a data worker comes with the worker's traceback around it
        return "error: " + re.split(r"\b(?:InputError|BadShard|RunError): ", str(error))[-1].strip(), error.exit_code
    if isinstance(error, OSError) and error.errno in _NOT_ALLOWED and error.filename:
        user = f"user {os.geteuid()} may not use it; change its permissions, or name another file or folder"
        return f"error: {error.filename}: {error.strerror}: {user}", InputError.exit_code
    from roberta_recipe.hardware import lost_process  # torch, which has been imported where this is raised

    if says_no_room(error):
        line = f"{first_line(error)}: make room."
    elif found := re.match(r"Error building extension '(\w+)': ", str(error)):
        lines = str(error)[found.end() :].splitlines()
        reason = next((line for line in lines if re.search(r"not found|error: ", line)), lines[-1])
        line = f"DeepSpeed's extension {found[1]} could not be built ({reason}): it needs a C++ compiler, c++ or CXX."
    elif lost := lost_process(error):
        line = lost_message(lost, error)
    else:
        return None
    return f"error: {line} What was saved is whole. {continue_with()}", RunError.exit_code


def _is_output_closed() -> bool:
    """Whether nobody reads the standard output any more; if so, the rest of it is dropped."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors are reported unasked
    if closed := bool(output.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def _raise_terminated(owner: int, number: int, _: Any) -> None:
    if os.getpid() != owner:  # a forked worker that has not set its own handlers yet
        os._exit(128 + number)
    raise _Terminated


def _print_redacted(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    print(redact("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)
