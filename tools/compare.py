"""Comparison of two runs: the first step with a difference, and its cause.

    python tools/compare.py runs/a runs/b        # or: make compare A=runs/a B=runs/b

A run is the `output_dir`, finished or not, of pretraining or of one fine-tuning seed. It compares settings, log
lines, and the hashes of checkpoints and finished models. Exit code: 0 without differences up to the last step of the
shorter run, 1 with differences, 2 if there is nothing to compare.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.input_files import explained, resolve_path
from roberta_recipe.log import counted
from roberta_recipe.record import LOG_NAME, PRESET_NAME, RECORD_NAME, read_record
from roberta_recipe.settings import RecipeParser, flags_of, load_yaml
from roberta_recipe.training.arguments import FinetuneArguments, FinetuneTrainingArguments, MlmTrainingArguments
from roberta_recipe.training.checkpoint import newest_first, read_state
from roberta_recipe.training.pretraining import MlmArguments

# Causes of a difference at a step, in causal order, with their keys in log lines and checkpoints
CAUSES: dict[str, tuple[str, ...]] = {
    "blocks": ("blocks_digest", "tokens_seen"),
    "masks": ("digest",),
    "learning rate": ("learning_rate",),
    "loss (the weights before this step, or arithmetic)": ("loss",),  # and each objective's
    "gradient (arithmetic)": ("grad_norm", "skipped_steps", "loss_scale"),
    "weights": ("weights", "model"),  # a checkpoint's; the finished model's
    "optimizer": ("optimizer",),
    "scheduler": ("scheduler",),
}
_OF_SPEED = ("runtime", "per_second")


@dataclass
class RunFolder:
    """The content of a run's folder."""

    folder: Path
    fingerprint: dict[str, Any]  # empty before the first checkpoint
    preset: dict[str, Any]
    layout: dict[str, Any]  # processes and micro-batches, from the newest checkpoint
    steps: dict[int, dict[str, Any]]  # log entries and hashes by step
    finished: bool

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)


def read_run(folder: Path) -> RunFolder:
    """The run in `folder`. Raises `InputError` without a run, or for an unreadable file."""
    finished = (folder / RECORD_NAME).is_file()
    if not finished and not (folder / LOG_NAME).is_file():
        below = ", ".join(sorted(str(path.parent) for path in folder.glob(f"*/{RECORD_NAME}")))
        raise InputError(
            f"{folder} holds no run ({LOG_NAME} or {RECORD_NAME})" + (f"; it has {below}" if below else "")
        )
    steps: dict[int, dict[str, Any]] = {}
    for entry in read_log(folder / LOG_NAME):
        steps.setdefault(entry["step"], {}).update(entry)
    fingerprint, layout = {}, {}
    for checkpoint in reversed(newest_first(folder)):
        state = read_state(checkpoint)
        steps.setdefault(state["step"], {}).update(state.get("digests", {}))
        fingerprint, layout = state["fingerprint"], state["layout"]
    if finished:
        record = read_record(folder / RECORD_NAME, ("steps", "resolved_args"), "it cannot be compared")
        renamed = {"weights": "model"}  # without heads of objectives, or of the best epoch
        hashes = {renamed.get(name, name): value for name, value in record.get("state_digests", {}).items()}
        steps.setdefault(record["steps"], {}).update(hashes)
        fingerprint = record.get("fingerprint", fingerprint)
    preset = load_yaml((folder / PRESET_NAME).resolve()) if (folder / PRESET_NAME).is_file() else {}
    return RunFolder(folder, fingerprint, preset, layout, steps, finished)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a `log.jsonl`, except for a killed run's incomplete last line; empty without the file. Raises
    `InputError`."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    with explained(f"{path} is not the log of a run"):
        return [{**entry, "step": int(entry["step"])} for entry in map(json.loads, lines)]


def scopes_of_flags() -> dict[str, str]:
    """`Flag.scope` by name, of the library's flags."""
    declared = (FinetuneTrainingArguments, FinetuneArguments, MlmTrainingArguments, MlmArguments)
    return {name: flag.scope for cls in declared for name, flag in flags_of(cls).items()}


def different_settings(a: RunFolder, b: RunFolder) -> dict[str, tuple[Any, Any]]:
    """Differing settings of the fingerprint, with both values; from presets if a run has no checkpoint or record."""
    if a.fingerprint and b.fingerprint:
        return _different(a.fingerprint, b.fingerprint)
    scopes = scopes_of_flags()
    differing = _different(a.preset, b.preset)
    return {name: both for name, both in differing.items() if scopes.get(name, "fixed") in ("content", "fixed", "data")}


def _different(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in sorted({**a, **b}) if a.get(name) != b.get(name)}


def first_difference(a: RunFolder, b: RunFolder) -> tuple[int, list[tuple[str, str, Any, Any]]] | None:
    """The first common step with a difference, and its differences (cause, key, value in a, in b) in causal order; None
    without a difference."""
    order, mean = [*CAUSES, "validation"], cause_of("loss")  # a mean over the steps since the previous line
    for step in sorted(a.steps.keys() & b.steps.keys()):
        common = a.steps[step].keys() & b.steps[step].keys()
        different = _different(*({key: run.steps[step][key] for key in common} for run in (a, b)))
        found = [(cause, key, *both) for key, both in different.items() if (cause := cause_of(key))]
        if any(cause == mean for cause, *_ in found):
            before = [[at for at, entry in run.steps.items() if at < step and "loss" in entry] for run in (a, b)]
            same_window = len({max(steps, default=0) for steps in before}) == 1
            found = [entry for entry in found if same_window or entry[0] != mean]
        if found:
            return step, sorted(found, key=lambda entry: order.index(entry[0]))
    return None


def cause_of(key: str) -> str | None:
    """The cause of a difference in a log line's key; None for keys such as speed."""
    if key.startswith("eval_"):
        return None if key.endswith(_OF_SPEED) else "validation"
    if key.endswith("_loss") and key != "train_loss":
        key = "loss"
    return next((cause for cause, keys in CAUSES.items() if key in keys), None)


def compare(a: RunFolder, b: RunFolder) -> tuple[bool, list[str]]:
    """(whether the runs are the same, the lines to print). Raises `InputError` for runs without a common step."""
    common = a.steps.keys() & b.steps.keys()
    compared = {key for step in common for key in a.steps[step].keys() & b.steps[step].keys() if cause_of(key)}
    settings, difference = different_settings(a, b), first_difference(a, b)
    if not compared and not settings:
        raise InputError(f"{a.folder} and {b.folder} have no logged step and no checkpoint in common")
    lines = []
    for letter, run in (("A", a), ("B", b)):
        hashes = sum(not entry.keys().isdisjoint(CAUSES["weights"]) for entry in run.steps.values())
        state = f"{counted(run.last_step, 'step')}, {'finished' if run.finished else 'not finished'}"
        lines.append(f"{letter}           {run.folder}: {state}, {hashes} with hashes of weights")
    lines += [f"setting     {name}: {_values(*values)}" for name, values in settings.items()]
    scopes = scopes_of_flags()
    free = {name: values for name, values in _different(a.preset, b.preset).items() if name not in settings}
    free = {name: values for name, values in free.items() if scopes.get(name) not in (None, "fixed", "data")}
    free |= _different(a.layout, b.layout) if a.layout and b.layout else {}
    free.pop("output_dir", None)
    lines += [f"may differ  {name}: {_values(*values)}" for name, values in free.items()]
    if difference:
        step, found = difference
        lines += [f"step {step:<7,}{cause}: {key} {_values(*values)}" for cause, key, *values in found]
        return False, [*lines, f"different: from step {step:,} on, first in the {found[0][0]}"]
    last = max(common, default=0)
    if settings:
        return False, [*lines, f"different: settings only, up to step {last:,}"]
    what = "log (no hashes of weights in common)" if compared.isdisjoint(CAUSES["weights"]) else "weights and log"
    shorter = min((a, b), key=lambda run: run.last_step)
    until = "" if a.last_step == b.last_step else f", where {shorter.folder} ends"
    return True, [*lines, f"same: {what} up to step {last:,}{until}"]


def _values(a: Any, b: Any) -> str:
    return f"{json.dumps(a)} | {json.dumps(b)}"


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv`: print the differences, and exit with 0 without one, else 1. Raises `InputError`."""
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("runs", nargs=2, metavar="RUN", help="output_dir of a run")
    same, lines = compare(*map(read_run, map(resolve_path, parser.parse_args(argv).runs)))
    print("\n".join(lines))
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    exit_on_error(main)
