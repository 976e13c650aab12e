"""Whether two runs are the same run; if not, from which step on they differ, and in what.

    python -m roberta_recipe.tools.compare runs/a runs/b        # or: make compare A=runs/a B=runs/b

A run is its `output_dir`, finished or not, of pretraining or of one seed of a fine-tuning. What is compared is what the
folders hold of both: settings, log lines, digests of checkpoints and of the finished model. The exit code is 0 where
nothing differs up to the last step of the shorter run, 1 where something does, 2 where there is nothing to compare.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roberta_recipe import durable
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.input_files import resolve_path
from roberta_recipe.log import counted
from roberta_recipe.record import LOG_NAME, PRESET_NAME, RECORD_NAME, read_record
from roberta_recipe.settings import RecipeParser, flags_of, load_yaml
from roberta_recipe.training.arguments import FinetuneArguments, FinetuneTrainingArguments, MlmTrainingArguments
from roberta_recipe.training.checkpoint import STATE_NAME, newest_first
from roberta_recipe.training.pretraining import MlmArguments

# What two runs can differ in at a step, the first cause first: its name, and the keys of a log line or the digests of a
# checkpoint that show it. Where the causes before it are equal, it is the cause.
CAUSES: dict[str, tuple[str, ...]] = {
    "blocks (what was read)": ("blocks_digest", "tokens_seen"),
    "masks": ("digest",),
    "rate": ("learning_rate",),
    "loss (the weights before this step, or arithmetic)": ("loss",),  # and that of each objective
    "gradient (arithmetic)": ("grad_norm", "skipped_steps", "loss_scale"),
    "weights": ("weights",),
    "optimizer": ("optimizer",),
    "scheduler": ("scheduler",),
}
_OF_SPEED = ("runtime", "per_second")


@dataclass
class Run:
    """What the folder of a run holds of it."""

    folder: Path
    settings: dict[str, Any]  # that belong to the run: its fingerprint, or its preset where it has none yet
    has_fingerprint: bool
    preset: dict[str, Any]
    layout: dict[str, Any]  # of its newest checkpoint
    steps: dict[int, dict[str, Any]]  # by step: what was logged, and digests
    finished: bool

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)


def read_run(folder: Path) -> Run:
    """The run in `folder`. Raises `InputError` where there is none, or a file of it cannot be read."""
    if not folder.is_dir() or not any((folder / name).is_file() for name in (LOG_NAME, RECORD_NAME)):
        below = sorted(str(path.parent) for path in folder.glob(f"*/{RECORD_NAME}")) if folder.is_dir() else []
        raise InputError(
            f"{folder} holds no run ({LOG_NAME} or {RECORD_NAME})" + (f"; it has {', '.join(below)}" if below else "")
        )
    steps: dict[int, dict[str, Any]] = {}
    for entry in read_log(folder / LOG_NAME):
        steps.setdefault(entry["step"], {}).update(entry)
    fingerprint, layout = None, {}
    for checkpoint in reversed(newest_first(folder)):
        try:
            state = durable.read_json(checkpoint / STATE_NAME)
            steps.setdefault(state["step"], {}).update(state.get("digests", {}))
            fingerprint, layout = dict(state["fingerprint"]), dict(state["layout"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{checkpoint / STATE_NAME} cannot be read ({error}); move {checkpoint} away") from None
    finished = (folder / RECORD_NAME).is_file()
    if finished:
        record = read_record(folder / RECORD_NAME, ("steps", "resolved_args"), "it cannot be compared")
        steps.setdefault(record["steps"], {}).update(record.get("state_digests", {}))
        fingerprint = record.get("fingerprint", fingerprint)
    preset = load_yaml((folder / PRESET_NAME).resolve()) if (folder / PRESET_NAME).is_file() else {}
    scopes = scopes_of_flags()
    own = {name: value for name, value in preset.items() if scopes.get(name, "fixed") in ("content", "fixed", "data")}
    settings = own if fingerprint is None else fingerprint
    return Run(folder, settings, fingerprint is not None, preset, layout, steps, finished)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a `log.jsonl`, empty where there is none; what a killed run left of its last line is no entry.
    Raises `InputError`."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
            entries[-1]["step"] += 0
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}, line {number} is damaged ({error}); compare without the file") from None
    return entries


def scopes_of_flags() -> dict[str, str]:
    """What each flag of the scripts means for a run (`Flag.resume`), as far as the library declares it."""
    declared = (FinetuneTrainingArguments, FinetuneArguments, MlmTrainingArguments, MlmArguments)
    return {name: flag.resume for cls in declared for name, flag in flags_of(cls).items()}


def different_settings(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    """The settings that make another run, with their values in both."""
    if a.has_fingerprint != b.has_fingerprint:  # one has no checkpoint yet: what its preset says is all there is
        common = a.preset.keys() & b.preset.keys() & (a.settings.keys() | b.settings.keys())
        return _different({name: a.preset[name] for name in common}, {name: b.preset[name] for name in common})
    return _different(a.settings, b.settings)


def _different(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in sorted({**a, **b}) if a.get(name) != b.get(name)}


def first_difference(a: Run, b: Run) -> tuple[int, list[tuple[str, str, Any, Any]]] | None:
    """The first step that both runs have in which they differ, and (cause, key, in a, in b) of all that differs there,
    the first cause first; None where nothing differs."""
    logged = [sorted(step for step, entry in run.steps.items() if "loss" in entry) for run in (a, b)]
    for step in sorted(a.steps.keys() & b.steps.keys()):
        same_window = len({max((s for s in steps if s < step), default=0) for steps in logged}) == 1
        of_a, of_b = a.steps[step], b.steps[step]
        found = []
        for key in of_a.keys() & of_b.keys():
            cause = cause_of(key)
            is_mean = cause == cause_of("loss")  # of the steps since the line before
            if cause and of_a[key] != of_b[key] and (same_window or not is_mean):
                found.append((cause, key, of_a[key], of_b[key]))
        if found:
            order = [*CAUSES, "validation"]
            return step, sorted(found, key=lambda difference: (order.index(difference[0]), difference[1]))
    return None


def cause_of(key: str) -> str | None:
    """What a key of a log line shows; None for what says nothing of a run, as its speed."""
    if key.startswith("eval_"):
        return None if key.endswith(_OF_SPEED) else "validation"
    if key.endswith("_loss") and key != "train_loss":
        key = "loss"
    return next((cause for cause, keys in CAUSES.items() if key in keys), None)


def compare(a: Run, b: Run) -> tuple[bool, list[str]]:
    """(whether nothing differs, the lines that say so). Raises `InputError` where the runs have no step in common."""
    common = a.steps.keys() & b.steps.keys()
    compared = {key for step in common for key in a.steps[step].keys() & b.steps[step].keys() if cause_of(key)}
    settings, difference = different_settings(a, b), first_difference(a, b)
    if not compared and not settings:
        raise InputError(f"{a.folder} and {b.folder} have no logged step and no checkpoint in common")
    lines = [_described("A", a), _described("B", b)]
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
        return False, [*lines, f"different: in settings; nothing else that both have differs up to step {last:,}"]
    what = "weights and log" if "weights" in compared else "log (no digests of weights in common)"
    shorter = min((a, b), key=lambda run: run.last_step)
    until = "" if a.last_step == b.last_step else f", where {shorter.folder} ends"
    return True, [*lines, f"same: {what} up to step {last:,}{until}"]


def _described(letter: str, run: Run) -> str:
    state = "finished" if run.finished else "not finished"
    return (
        f"{letter}           {run.folder}: {counted(run.last_step, 'step')}, {state}, {run_digests(run)} with "
        "digests of weights"
    )


def run_digests(run: Run) -> int:
    """At how many steps the folder has digests of the weights."""
    return sum("weights" in entry for entry in run.steps.values())


def _values(a: Any, b: Any) -> str:
    return f"{json.dumps(a)} | {json.dumps(b)}"


def main(argv: list[str] | None = None) -> bool:
    """Run the command line `argv`; prints what differs and returns whether nothing does. Raises `InputError`."""
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("runs", nargs=2, metavar="RUN", help="output_dir of a run")
    same, lines = compare(*map(read_run, map(resolve_path, parser.parse_args(argv).runs)))
    print("\n".join(lines))
    return same


def command(argv: list[str] | None = None) -> None:
    """End with the verdict as exit code."""
    raise SystemExit(0 if main(argv) else 1)


if __name__ == "__main__":
    exit_on_error(command)
