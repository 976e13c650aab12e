"""Digests of weights, optimizer and scheduler: two runs are the same at a step exactly where these are the same."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from safetensors import safe_open

if TYPE_CHECKING:
    from roberta_recipe.training.durable_trainer import DurableTrainer

_LENGTH = 16  # hexadecimal digits
# keys of a parameter group that are not hyperparameters
_NOT_HYPERPARAMETERS = ("params", "foreach", "fused", "capturable", "differentiable")


def of_training(trainer: "DurableTrainer", folder: Path) -> dict[str, str]:
    """The digests of the weights saved in `folder`, of the optimizer's state (under DeepSpeed, of all processes in
    turn), and of the scheduler with the hyperparameters; complete on the first process, every process must call."""
    first = trainer.args.should_save
    if trainer.is_deepspeed_enabled:
        state = gather_object([of_state(trainer.optimizer.state_dict())])
    else:
        state = trainer.optimizer.state_dict()["state"] if first else None
    groups = [
        {name: value for name, value in group.items() if name not in _NOT_HYPERPARAMETERS}
        for group in trainer.optimizer.param_groups
    ]
    scheduler = {"scheduler": trainer.lr_scheduler.state_dict(), "groups": groups}
    found = {"optimizer": of_state(state), "scheduler": of_state(scheduler)}
    return {"weights": of_weights(folder), **found} if first else found


def of_weights(folder: str | Path) -> str:
    """The digest of all weights in the safetensors files of `folder`, however they are spread over files."""
    hasher, files = hashlib.sha256(), {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as weights:
            files |= {name: path for name in weights.keys()}  # noqa: SIM118  it is no dict
    opened = {path: safe_open(path, "pt") for path in set(files.values())}
    for name in sorted(files):
        _feed(hasher, name)
        _feed(hasher, opened[files[name]].get_tensor(name))
    return hasher.hexdigest()[:_LENGTH]


def of_state(state: Any) -> str:
    """The digest of nested dicts and lists of tensors (by dtype, shape, bytes) and of what JSON can hold; objects, as
    DeepSpeed keeps them beside its tensors, are left out."""
    hasher = hashlib.sha256()
    _feed(hasher, state)
    return hasher.hexdigest()[:_LENGTH]


def _feed(hasher: Any, value: Any) -> None:
    """Each value with its kind and size before it, so that no two states give the same bytes."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        hasher.update(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        hasher.update(f"dict {len(value)}\n".encode())
        for name in sorted(value, key=str):
            _feed(hasher, str(name))
            _feed(hasher, value[name])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"list {len(value)}\n".encode())
        for item in value:
            _feed(hasher, item)
    elif isinstance(value, (bool, int, float, str, type(None))):
        hasher.update(f"{value!r}\n".encode())
