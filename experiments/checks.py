"""Checks of the rows of a list before they are run and before its table: equal settings, equal text, equal measures."""

from typing import Any

from experiments.lists import MEASURES, SEED, Experiment, ExperimentList
from roberta_recipe import durable
from roberta_recipe.errors import InputError

# keys of a measure's file, or of the run's record, that identify the measured text; older files may lack some
_MEASURED_ON = {
    "loss": ("eval_blocks", "unigram_entropy"),
    "words": ("words", "documents", "windows_digest"),
    "blimp": ("pairs", "pairs_digest"),
}

_MOVE = "Move the {} of one of them away, to have it made again"
_OTHER_BLOCKS = "Losses of other held-out blocks do not compare: take the measure words in place of loss"


def check_rows(listed: ExperimentList) -> None:
    """Raise `InputError` for a row that was run with other settings, for rows of a name that were run with different
    text, tokenizer or model, and for rows that were measured on different text."""
    changed = [f"{row.title}: {'; '.join(changes)} ({row.folder})" for row in listed.rows if (changes := row.changes())]
    if changed:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise InputError(
            f"{listed.path}, row {changed[0]}{more}: it was run with other settings. Undo the change, move the folder "
            "away to run it again (of a measure: its file), or rename the changed row"
        )
    for variant in listed.variants:
        run_with = [(row, _run_with(row)) for row in listed.rows if row.name == variant.name]
        _check_alike(run_with, "run with", _MOVE.format("folder"))
    for measure in [name for name in _MEASURED_ON if name in listed.measures]:
        fix = _OTHER_BLOCKS if measure == "loss" else _MOVE.format(f"{measure}.json")
        measured_on = [(row, _measured_on(row, measure)) for row in listed.rows]
        for name in _MEASURED_ON[measure]:
            known = [(row, {name: facts[name]}) for row, facts in measured_on if name in facts]
            _check_alike(known, f"measured ({measure}) on", fix)


def _check_alike(facts_of_rows: list[tuple[Experiment, dict[str, Any]]], how: str, fix: str) -> None:
    """Raise `InputError` for the first row with other facts than the first row that has any."""
    known = [(row, facts) for row, facts in facts_of_rows if facts]
    for row, facts in known[1:]:
        first, of_first = known[0]
        if different := durable.differences(of_first, facts):
            raise InputError(
                f"{row.title} was {how} something else than {first.title}: {'; '.join(different.values())}. {fix} "
                f"({row.folder})"
            )


def _run_with(row: Experiment) -> dict[str, Any]:
    """The fingerprint of a finished pretraining run without its seed, and its number of held-out blocks; empty where
    each seed starts from its own checkpoint."""
    record = {} if SEED in str(row.settings) else row.record()
    fingerprint = {name: of for name, of in record.get("fingerprint", {}).items() if name not in ("seed", "data_seed")}
    return fingerprint | {"eval_blocks": record["metrics"].get("eval_blocks")} if fingerprint else {}


def _measured_on(row: Experiment, measure: str) -> dict[str, Any]:
    record = row.record()
    if not MEASURES[measure].tool:
        found = {**record, **record.get("metrics", {})}
    else:
        found = row.measured(measure) if record and row.output_of(measure).is_file() else {}
    known = {name: found[name] for name in _MEASURED_ON[measure] if name in found}
    return {name: round(of, 9) if isinstance(of, float) else of for name, of in known.items()}  # CPUs round otherwise
