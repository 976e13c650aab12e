"""Process set-up (threads, allocator, exit when the launcher dies), broadcast from rank 0, waiting for all ranks."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from accelerate.utils.memory import clear_device_cache
from transformers import TrainingArguments

from roberta_recipe.errors import InputError
from roberta_recipe.hardware import cpu_cores, end_with_parent, keep_freed_memory, local_processes
from roberta_recipe.launcher import launcher_pid, user_set_omp_threads
from roberta_recipe.record import git_commit


def set_up_process() -> None:
    """Exit when the launcher dies, free the memory of an earlier run in this process, have glibc reuse freed memory,
    and divide the cores among this machine's processes, for training on the CPU and offloaded optimizers.

    Launchers set OMP_NUM_THREADS=1, which leaves cores idle; a user's own setting stays.
    """
    if (parent := launcher_pid()) is not None:  # without a launcher, `nohup` must work
        end_with_parent(parent, signal.SIGTERM)
    clear_device_cache(garbage_collection=True)  # an earlier run's trainer has reference cycles
    keep_freed_memory()
    git_commit()  # cached now: the checkout may change during training
    if parent and not user_set_omp_threads():
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
    """Wait for all ranks at the end of the block, without a time limit."""
    group = _group_without_timeout()
    yield
    _wait(group)


@contextlib.contextmanager
def first_process_first(args: TrainingArguments) -> Iterator[None]:
    """Run the block on rank 0 of each machine, then on its other ranks: `main_process_first` without a time limit."""
    is_first, group = args.local_process_index == 0, _group_without_timeout()
    if not is_first:
        _wait(group)
    try:
        yield
    except Exception:
        if is_first:
            _wait(group)  # the other ranks fail in the same way; a signal ends this process at once
        raise
    if is_first:
        _wait(group)


def _group_without_timeout() -> torch.distributed.ProcessGroup | None:
    """A gloo process group without timeout (30 days): a rank can pack or hash for hours. None for a single process."""
    if torch.distributed.is_initialized():
        return torch.distributed.new_group(backend="gloo", timeout=timedelta(days=30))
    return None


def _wait(group: torch.distributed.ProcessGroup | None) -> None:
    """A barrier that a signal interrupts. Raises the error of a lost rank."""
    if group:
        arrived = torch.distributed.barrier(group, async_op=True)
        while not arrived.is_completed():
            time.sleep(0.1)
        arrived.wait()


def leave_process_group() -> None:
    """Barrier, then end of the process group, so that no rank closes its connections while another still works."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
