"""Data loading of pretraining: data workers send the micro-batches of an optimizer step as one tensor per column, as
each tensor takes a file descriptor (in /dev/shm), and one per micro-batch would exhaust them."""

import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from roberta_recipe.data.packing import Block

CONSUMED = ("tokens", "blocks_digest", "digest")  # fields of `count_consumed`
_BATCH_COLUMNS = ("predicted", "attention_mask")  # these depend on the other blocks of a batch
Collator = Callable[[list[Block]], dict[str, torch.Tensor]]  # `masking.MlmCollator`, or transformers' own
PackedStep = tuple[dict[str, torch.Tensor], list[dict[str, Any]], np.ndarray]  # `flatten_batches`, `count_consumed`


def micro_batches(collate: Collator, size: int, blocks: list[Block]) -> PackedStep:
    """A process's blocks of an optimizer step as micro-batches of `size` blocks, sorted by length for less padding. The
    gradient of the step does not depend on this order."""
    blocks = sorted(blocks, key=lambda block: -len(block["input_ids"]))
    parts = [blocks[start : start + size] for start in range(0, len(blocks), size)]
    batches = [collate(part) for part in parts]
    return *flatten_batches(batches), sum(map(count_consumed, parts, batches))


def count_consumed(blocks: list[Block], batch: dict[str, torch.Tensor]) -> np.ndarray:
    """(3,) int64, as in `CONSUMED`: tokens without padding, and two sums of the blocks' checksums: as read, and as the
    model sees them in `batch`."""
    columns = {name: value.numpy() for name, value in batch.items() if name not in _BATCH_COLUMNS}
    consumed = np.zeros(3, dtype=np.int64)
    for row, block in enumerate(blocks):
        size = len(block["input_ids"])
        seen = {name: values[row][:size] if values.ndim > 1 else values[row] for name, values in columns.items()}
        consumed += size, _checksum(block.id, block), _checksum(block.id, seen)
    return consumed


def _checksum(number: int, columns: dict[str, Any]) -> int:
    checksum = number & 0xFFFFFFFF
    for name in sorted(columns):
        checksum = zlib.crc32(np.asarray(columns[name], dtype=np.int64).tobytes(), checksum)
    return checksum


def flatten_batches(batches: list[dict[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """(columns, shapes): a 1-D tensor per column in the narrowest integer type, and its shape in each batch."""
    columns: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        for name, value in batch.items():
            columns.setdefault(name, []).append(value.numpy().ravel())
    shapes = [{name: value.shape for name, value in batch.items()} for batch in batches]
    return {name: _narrowed(np.concatenate(parts)) for name, parts in columns.items()}, shapes


def _narrowed(values: np.ndarray) -> torch.Tensor:
    low, high = values.min(initial=0), values.max(initial=0)
    unsigned = low == 0 and high < 1 << 16  # torch supports few operations on uint32
    return torch.from_numpy(values.astype(np.min_scalar_type(high if unsigned else min(low, -high - 1))))


def unflatten_batches(
    columns: dict[str, torch.Tensor], shapes: list[dict[str, Any]], device: Any
) -> list[dict[str, torch.Tensor]]:
    """The inverse of `flatten_batches`: int64 tensors on `device`, views of one tensor per column."""
    parts = {}
    for name, column in columns.items():
        sizes = [math.prod(batch[name]) for batch in shapes if name in batch]
        parts[name] = iter(column.to(device, non_blocking=True).long().split(sizes))
    return [{name: next(parts[name]).view(shape) for name, shape in batch.items()} for batch in shapes]


class MicroBatchLoader(torch.utils.data.DataLoader):
    """A `DataLoader` over `TrainBlocks`, with `micro_batches` as `collate_fn`. Yields micro-batches on `device`; calls
    `count` with each step's `count_consumed`. Waits for data within the context `waiting()`."""

    def __init__(self, *args, device: torch.device, waiting: Callable, count: Callable, **kwargs):
        super().__init__(*args, **kwargs)
        self.device, self.waiting, self.count = device, waiting, count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        steps = super().__iter__()
        while True:
            with self.waiting():
                columns, shapes, consumed = next(steps)
            self.count(consumed)
            yield from unflatten_batches(columns, shapes, self.device)
