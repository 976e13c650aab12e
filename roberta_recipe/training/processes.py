"""Process set-up (threads, allocator, exit when the launcher dies), broadcast from rank 0, waiting for all ranks."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments

from roberta_recipe.errors import InputError
from roberta_recipe.hardware import cpu_cores, end_with_parent, free_memory, keep_freed_memory, local_processes
from roberta_recipe.launcher import launcher_pid, user_set_omp_threads


def set_up_process() -> None:
    """Exit when the launcher dies, free the memory of an earlier run in this process, have glibc reuse freed memory,
    and divide the cores among this machine's processes if they train on the CPU.

    Launchers set OMP_NUM_THREADS=1 for CPU processes, which leaves cores idle; a user's own setting stays.
    """
    if (parent := launcher_pid()) is not None:  # without a launcher, `nohup` must work
        end_with_parent(parent, signal.SIGTERM)
    free_memory()
    keep_freed_memory()
    if not torch.cuda.is_available() and launcher_pid() and not user_set_omp_threads():
        torch.set_num_threads(max(1, cpu_cores() // local_processes()))


def on_first_process(args: TrainingArguments, call: Callable[[], Any]) -> Any:
    """The result of `call()` on rank 0, broadcast to all ranks; its `InputError` is raised on all ranks."""
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


@contextlib.contextmanager
def end_together() -> Iterator[None]:
    """Wait for all ranks at the end of the block. Without a time limit, unlike a collective operation of the default
    group, as packing takes minutes on one rank and hours on another; a signal interrupts it."""
    if not torch.distributed.is_initialized():
        yield
        return
    group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=30))
    yield
    arrived = torch.distributed.barrier(group, async_op=True)
    while not arrived.is_completed():
        time.sleep(0.1)
    arrived.wait()  # raises the error of a lost rank


def leave_process_group() -> None:
    """Barrier, then end of the process group, so that no rank closes its connections while another still works."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
