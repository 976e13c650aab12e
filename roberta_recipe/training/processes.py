"""A decision of the first rank, broadcast to all ranks of a run."""

from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments

from roberta_recipe.errors import InputError


def from_first_process(args: TrainingArguments, call: Callable[[], Any]) -> Any:
    """The result of `call()` on the first rank, on all ranks; its `InputError` is raised on all of them."""
    result: list[Any] = [None]
    if args.process_index == 0:
        try:
            result = [call()]
        except InputError as error:
            result = [error]
    if args.world_size > 1:
        broadcast_object_list(result)
    if isinstance(result[0], InputError):
        raise result[0]
    return result[0]
