"""Errors that end a command in one line with an exit code. Any other exception keeps its traceback: it is a bug."""

import errno
import functools
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from roberta_recipe.credentials import redact
from roberta_recipe.started import continue_with

_FOR_FIRST_PROCESS_S = 3.0  # in which the launcher ends the others, once the first has failed
_COMES_AGAIN_S = 0.02
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_TORCH_CANNOT_WRITE = ("iostream error", "PytorchStreamWriter", "inline_container")


class InputError(ValueError):
    """Something that the user can fix before anything runs. The message names the value and the fix."""

    exit_code = 2


class RunError(RuntimeError):
    """Something that broke a run. The message says what is safe, and what to do."""

    exit_code = 1


class Stopped(RunError):
    """The run was told to stop; what was saved is whole, and the same command continues."""

    # EX_TEMPFAIL of sysexits.h: try again; as a shell has it
    EXIT_CODES: ClassVar[dict[str, int]] = {"SIGTERM": 75, "Ctrl-C": 130}

    def __init__(self, message: str, by: str = "Ctrl-C"):
        super().__init__(message)
        self.exit_code = self.EXIT_CODES[by]


class _Terminated(BaseException):
    """SIGTERM, outside of training; like `KeyboardInterrupt` no `Exception`, which would be taken for a fault."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type where it has none; of torch's writers, what it means."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    if _torch_could_not_write(error, line):
        return f"a file is not whole, most often for want of room (torch: {line})"
    return line


def says_no_room(error: BaseException) -> bool:
    """Whether a file could not be written for want of room, as far as `error` tells: torch's writers do not say why."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    # tokenizers, in Rust, raises a plain Exception, and torch a RuntimeError that says the number or not even that
    said = str(error)
    if any(f"(os error {number})" in said or f"{os.strerror(number)} ({number})" in said for number in _NO_ROOM):
        return True
    return _torch_could_not_write(error, said)


def _torch_could_not_write(error: BaseException, said: str) -> bool:
    return isinstance(error, RuntimeError) and any(words in said for words in _TORCH_CANNOT_WRITE)


def build_message(error: BaseException) -> str | None:
    """What to do where an extension in C++, which DeepSpeed builds as it starts, could not be built; else None."""
    if not (found := re.match(r"Error building extension '(\w+)'", str(error))):
        return None
    lines = str(error).splitlines()
    reason = next((line for line in lines if re.search(r"not found|error: |No space left", line)), lines[-1])
    reason = reason.removeprefix(found[0] + ":").strip()
    return (
        f"DeepSpeed's extension {found[1]} could not be built ({reason}): it needs a C++ compiler, c++ or what CXX "
        "names, and time to finish."
    )


def lost_message(lost: str, error: BaseException) -> str:
    """What `hardware.lost_process` found in `error`, and where to look."""
    said = re.split(r"\. (?=[A-Z])", re.sub(r"^\[\S+\] ", "", first_line(error)))[0]  # gloo begins with its source file
    return f"{lost} ({said.rstrip('. ')}): its own output or the system's log says why (often memory)."


def exit_on_error(main: Callable[[], Any]) -> None:
    """Run a command's `main`; the errors above, signals, full disks and lost processes become one line on stderr and
    an exit code. Nothing of what is printed holds a password or a token. Where what read the output has gone, as `head`
    does, the exit code is a shell's for SIGPIPE."""
    _set_up_output()
    sys.excepthook, sys.unraisablehook = _print_redacted, _print_ignored
    signal.signal(signal.SIGTERM, functools.partial(_raise_terminated, os.getpid()))
    try:
        try:
            main()
            sys.stdout.flush()
            return
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _output_is_closed():
                raise SystemExit(128 + signal.SIGPIPE) from None
            if (said := _said_of(error)) is None:
                raise
    except (KeyboardInterrupt, _Terminated) as ended:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # a launcher ends the process that has just failed, as another has failed too: its error is what counts
        failed = ended.__context__
        said = (_said_of(failed) if isinstance(failed, Exception) else None) or _said_of_signal(ended)
    message, code = said
    # outside of the except clauses nothing holds the frames of `main` any more, so data workers end in order
    _print_once(redact(message), code)
    raise SystemExit(code)


def _set_up_output() -> None:
    """Drop output that was closed (`>&-`); print a character that the terminal does not have as an escape."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    sys.stdout.reconfigure(errors="backslashreplace")  # as Python's own stderr


def _output_is_closed() -> bool:
    """Whether nobody reads the standard output any more; if so, what is left for it is dropped."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors are told without being asked for
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _said_of(error: Exception) -> tuple[str, int] | None:
    """The line and the exit code of an error that is no bug."""
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
    elif not (line := build_message(error)):
        lost = lost_process(error)
        line = lost and lost_message(lost, error)
    return (f"error: {line} What was saved is whole. {continue_with()}", RunError.exit_code) if line else None


def _said_of_signal(ended: BaseException) -> tuple[str, int]:
    by = "SIGTERM" if isinstance(ended, _Terminated) else "Ctrl-C"
    return f"ended by {by}; what was saved is whole. {continue_with()}", Stopped.EXIT_CODES[by]


def interruptible(call: Callable[[], Any]) -> Any:
    """The result of a long call of a library that releases the GIL, from another thread: SIGTERM and Ctrl-C, which
    reach Python code of the main thread alone, end the process at once. For work that writes nothing."""
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(call).result()
        except (KeyboardInterrupt, _Terminated) as ended:
            message, code = _said_of_signal(ended)
            print(redact(message), file=sys.stderr, flush=True)
            os._exit(code)  # the thread cannot be ended


def _print_once(line: str, code: int) -> None:
    """Print how a command ended on stderr: what all processes of a run find is said by the first, and by another only
    where the launcher does not end it, as the first has failed too."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_FOR_FIRST_PROCESS_S)
    sys.stderr.write(line + "\n")  # at once, as several processes may write
    sys.stderr.flush()


def _raise_terminated(owner: int, number: int, _: Any) -> None:
    if os.getpid() != owner:  # a forked worker that has not set its own handlers yet
        os._exit(128 + number)
    raise _Terminated


def _print_redacted(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    print(redact("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)


def _print_ignored(ignored: Any) -> None:
    """What was raised where nothing can catch it, as Python cleans up: of a data worker that was killed, a line; of an
    object that could not be made (and so lacks what its end needs), nothing, as that was said; a signal comes again."""
    from roberta_recipe.hardware import lost_process

    if isinstance(ignored.exc_value, KeyboardInterrupt | _Terminated):
        number = signal.SIGTERM if isinstance(ignored.exc_value, _Terminated) else signal.SIGINT
        threading.Timer(_COMES_AGAIN_S, os.kill, (os.getpid(), number)).start()
        return
    name = getattr(ignored.object, "__qualname__", "")
    if name.endswith(".__del__") and isinstance(ignored.exc_value, AttributeError):
        return
    if "_MultiProcessingDataLoaderIter" in name or lost_process(ignored.exc_value):
        said = redact(first_line(ignored.exc_value))
        print(f"warning: a data worker is gone: {said}", file=sys.stderr, flush=True)
    else:
        sys.__unraisablehook__(ignored)
