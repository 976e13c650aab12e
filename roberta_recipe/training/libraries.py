"""The boundary to the libraries: what Trainer, accelerate and torch make of the flags is tried before the long part.

Flags of `TrainingArguments` are handed through to optimizers, schedules, data loaders and trackers, which look at them
when they are made: after text was read and packed, or behind the first step. Here all of them are made once, for a
model of a single weight.
"""

import dataclasses
import functools
import tempfile
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from roberta_recipe.args import flags_of, hand_over
from roberta_recipe.errors import InputError
from roberta_recipe.hardware import cpu_cores
from roberta_recipe.log import counted
from roberta_recipe.training import optimizers

_MOST_WORKERS = 16  # data workers a core; they are processes


def check(args: TrainingArguments) -> None:
    """Raise `InputError`, with the flag and the library's own words, for values that a library does not take."""
    if args.dataloader_num_workers > _MOST_WORKERS * cpu_cores():
        raise InputError(
            f"dataloader_num_workers={args.dataloader_num_workers}: each is a process, and this machine has "
            f"{counted(cpu_cores(), 'core')}; one or two feed a device"
        )
    if args.dataloader_prefetch_factor == 0:  # which torch looks at when the workers have started
        raise InputError("dataloader_prefetch_factor=0 must be at least 1; leave it out for torch's 2")
    cls = type(args)
    values = {name: getattr(args, name) for name in flags_of(cls)}
    if args.optim in optimizers.OWN:  # which Trainer does not know; `optimization.check` has made it
        values |= {"optim": "adamw_torch", "optim_args": None}
    defaults = {field.name: _default(field) for field in dataclasses.fields(cls) if field.init}
    hand_over(functools.partial(_make_all, cls), values, defaults)


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _make_all(cls: type[TrainingArguments], values: dict[str, Any]) -> None:
    """What `Trainer` makes of the flags. Without DeepSpeed's engine, which takes the batch from the first trainer."""
    with tempfile.TemporaryDirectory() as folder:
        args = cls(**{**values, "output_dir": folder, "push_to_hub": False})
        workers = args.dataloader_num_workers
        DataLoader([0], num_workers=workers, prefetch_factor=args.dataloader_prefetch_factor if workers else None)
        if args.deepspeed_plugin:
            return
        trainer = Trainer(_OneWeight(), args, train_dataset=[{"x": 0.0}], eval_dataset=[{"x": 0.0}])
        trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)  # torch.compile looks at its mode here
        trainer.create_optimizer_and_scheduler(num_training_steps=max(args.max_steps, 1))


class _OneWeight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
