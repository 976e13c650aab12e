"""The processes of a run: thread count and memory at the start, end with the launcher, results of the first rank, end
of the process group."""

import signal
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments

from roberta_recipe.errors import InputError
from roberta_recipe.hardware import cpu_cores, end_with_parent, free_memory, keep_freed_memory, local_processes
from roberta_recipe.launcher import launcher_pid, user_set_omp_threads


def set_up_process() -> None:
    """End with the launcher, free the memory of an earlier run in this process, keep memory that is freed, and divide
    the cores among this machine's processes if they train on the CPU.

    Launchers give a CPU process OMP_NUM_THREADS=1, and the other cores would be idle; a user's setting stays.
    """
    if (parent := launcher_pid()) is not None:  # a process that a shell started outlives it, as `nohup` promises
        end_with_parent(parent, signal.SIGTERM)
    free_memory()
    keep_freed_memory()
    if not torch.cuda.is_available() and launcher_pid() and not user_set_omp_threads():
        torch.set_num_threads(max(1, cpu_cores() // local_processes()))


def from_first_process(args: TrainingArguments, call: Callable[[], Any]) -> Any:
    """What `call()` returns on the first process, in all processes; an `InputError` of it is raised in all."""
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


def leave_process_group() -> None:
    """End together: no process closes its connections while another still works."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
