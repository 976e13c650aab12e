"""The processes of one run: they begin with a launcher, decide together, and end together."""

import signal
from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments

from roberta_recipe.errors import InputError
from roberta_recipe.hardware import end_with_parent
from roberta_recipe.started import launcher


def end_with_launcher() -> None:
    """Where a launcher started this process, have Linux send it SIGTERM when the launcher ends, however that ends.

    A launcher that is killed (`kill -9`, out of memory) cannot end what it started, which would train on unseen. A
    process that a shell started outlives it, as `nohup` promises.
    """
    if (parent := launcher()) is not None:
        end_with_parent(parent, signal.SIGTERM)


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
