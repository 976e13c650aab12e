"""Errors that end a command in one line with an exit code. Any other exception keeps its traceback: it is a bug."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

from roberta_recipe.credentials import redact

START_AGAIN = "Start the same command again"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TORCH_CANNOT_WRITE = ("iostream error", "PytorchStreamWriter", "inline_container")


class InputError(ValueError):
    """Something that the user can fix before anything runs. The message names the value and the fix."""

    exit_code = 2


class RunError(RuntimeError):
    """Something that broke a run. The message says what is safe, and what to do."""

    exit_code = 1


class Preempted(RunError):
    """The run was told to stop (SIGTERM) and has saved its state: the same command resumes it."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def says_no_room(error: BaseException) -> bool:
    """Whether a file could not be written for want of room, as far as `error` tells: torch's writers do not say why."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    # tokenizers, in Rust, raises a plain Exception, and torch a RuntimeError that says the number or not even that
    said = str(error)
    if any(f"(os error {number})" in said or f"{os.strerror(number)} ({number})" in said for number in _NO_ROOM):
        return True
    return isinstance(error, RuntimeError) and any(words in said for words in _TORCH_CANNOT_WRITE)


def lost_message(lost: str, error: BaseException) -> str:
    """What `hardware.lost_process` found in `error`, and where to look."""
    said = re.split(r"\. (?=[A-Z])", re.sub(r"^\[\S+\] ", "", first_line(error)))[0]  # gloo begins with its source file
    return f"{lost} ({said.rstrip('. ')}): its own output or the system's log says why (often memory)."


def exit_on_error(main: Callable[[], Any]) -> None:
    """Run a command's `main`; the errors above, full disks and lost processes become one line on stderr and an
    exit code. Nothing of what is printed holds a password or a token."""
    sys.excepthook, sys.unraisablehook = _print_redacted, _print_ignored
    try:
        main()
        return
    except (InputError, RunError) as error:
        # an error raised in a data worker comes with the worker's traceback around it
        message = re.split(r"\b(?:InputError|BadShard|RunError): ", str(error))[-1].strip()
        code = error.exit_code
    except Exception as error:
        from roberta_recipe.hardware import lost_process  # torch, which has been imported where this is raised

        if says_no_room(error):
            message = f"{first_line(error)}: make room, then start the same command again"
        elif lost := lost_process(error):
            message = f"{lost_message(lost, error)} What was saved is whole. {START_AGAIN}"
        else:
            raise
        code = RunError.exit_code
    # outside of the except clauses nothing holds the frames of `main` any more, so data workers end in order
    print(f"error: {redact(message)}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def _print_redacted(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    print(redact("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)


def _print_ignored(ignored: Any) -> None:
    """What was raised where nothing can catch it, as Python cleans up: of a `DataLoader` whose worker was killed, a
    line; of an object that could not be made (and so lacks what its end needs), nothing, as that was said."""
    name = getattr(ignored.object, "__qualname__", "")
    if name.endswith(".__del__") and isinstance(ignored.exc_value, AttributeError):
        return
    if "_MultiProcessingDataLoaderIter" in name:
        said = redact(first_line(ignored.exc_value))
        print(f"warning: a data worker was gone as its loader ended: {said}", file=sys.stderr, flush=True)
    else:
        sys.__unraisablehook__(ignored)
