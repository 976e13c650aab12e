"""Loss spikes: a run returns to its last whole checkpoint and leaves out the blocks that it met one with.

The rule of PaLM (arXiv 2204.02311, section 5.1): train again from a checkpoint before the spike, without the batches
that were seen before and during it; "the loss did not spike again at the same point". What counts as a spike is the
rule of OLMo-core's optimizers that skip a step: so many standard deviations (there 6) above the mean of the last 128
steps.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roberta_recipe import durable
from roberta_recipe.data.order import Skipped, in_words, union
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.log import logger

SKIPPED_NAME = "skipped_blocks.json"  # in the output folder: every return to a checkpoint
WINDOW = 128  # steps that a loss is compared with
NEEDED = 32  # of them: before, nothing is called a spike
STEPS_LEFT_OUT = 2  # the step of the spike, and the step before it, whose update led there
MOST_RETURNS = 3  # to the same checkpoint


def is_spike(loss: float, before: Sequence[float], deviations: float) -> bool:
    """Whether a step's loss is no number, or more than so many standard deviations above the mean of the losses
    `before` it, the last `WINDOW` of which count."""
    if not math.isfinite(loss):
        return True
    window = list(before)[-WINDOW:]
    return len(window) >= NEEDED and loss > statistics.fmean(window) + deviations * statistics.pstdev(window)


def read_skipped(output_dir: str | Path) -> Skipped:
    """The blocks that earlier returns of the run have left out."""
    return union(range(*part) for entry in read_returns(output_dir) for part in entry["blocks"])


def check_returns(returns: list[dict[str, Any]], step: int, loss: float, returned_to: str) -> None:
    """Raise `RunError` where a run has returned to a checkpoint `MOST_RETURNS` times."""
    if sum(entry["returned_to"] == returned_to for entry in returns) >= MOST_RETURNS:
        raise RunError(
            f"the loss of step {step} is {loss:.3f}, a spike, and the run has returned to {returned_to} {MOST_RETURNS} "
            "times already: lower learning_rate or warm up longer in another output_dir, or move newer checkpoints "
            "away to return further"
        )


def write_return(
    output_dir: str | Path,
    returns: list[dict[str, Any]],
    *,
    step: int,
    loss: float,
    returned_to: str,
    blocks: Sequence[range],
) -> None:
    """Add a return to the `returns` of a run, in its folder."""
    logger.warning(
        f"Spike       the loss of step {step} is {loss:.3f}: returning to {returned_to}, without blocks "
        f"{in_words(blocks)}"
    )
    added = {"step": step, "loss": loss if math.isfinite(loss) else None, "returned_to": returned_to}
    added["blocks"] = [[part.start, part.stop] for part in blocks]
    durable.write_sealed(Path(output_dir, SKIPPED_NAME), {"returns": [*returns, added]})


def read_returns(output_dir: str | Path) -> list[dict[str, Any]]:
    """Every return of a run to a checkpoint, from its folder. Raises `InputError` where the file is damaged."""
    path = Path(output_dir, SKIPPED_NAME)
    if not path.is_file():
        return []
    try:
        return durable.read_sealed(path)["returns"]
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be used ({error}): it says which blocks this run leaves out; move it away, and name them "
            "with --skip_blocks"
        ) from None
