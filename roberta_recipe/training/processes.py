"""The processes of one run: they begin with a launcher, decide together, and end together."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments

from roberta_recipe.errors import InputError
from roberta_recipe.hardware import end_with_parent

# torchrun sets the first for what it starts, `accelerate launch` the second; nobody sets them by hand
_SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND")
_launcher: int | None = None  # the process that started this one, where it is a launcher


def end_with_launcher() -> None:
    """Where a launcher started this process, have Linux send it SIGTERM when the launcher ends, however that ends.

    A launcher that is killed (`kill -9`, out of memory) cannot end what it started, which would train on unseen. A
    process that a shell started outlives it, as `nohup` promises.
    """
    global _launcher
    if sys.platform != "linux" or not any(name in os.environ for name in _SET_BY_LAUNCHERS):
        return
    _launcher = os.getppid()
    end_with_parent(_launcher, signal.SIGTERM)


def launcher_is_gone() -> bool:
    """Whether the launcher that started this process has ended; False where none did."""
    return _launcher is not None and os.getppid() != _launcher


def from_first_process(args: TrainingArguments, call: Callable[[], Any]) -> Any:
    """What `call()` returns on the first process, in all processes; an `InputError` of it is raised in all."""
    found: list[Any] = [None]
    if args.process_index == 0:
        try:
            found = [call()]
        except InputError as error:
            found = [error]
    if args.world_size > 1:
        broadcast_object_list(found)
    if isinstance(found[0], InputError):
        raise found[0]
    return found[0]
