"""Consistency checks of a list's rows, before running and before the table: settings, text, tokenizer, measures."""

from typing import Any

from experiments.lists import AGAIN, MEASURES, SEED, Experiment, ExperimentList
from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.record import RECORD_NAME, read_record

# keys of a measure's file or the run record that identify the measured text; old files lack some
_TEXT_KEYS = {
    "loss": ("eval_blocks", "unigram_entropy"),
    "words": ("words", "documents", "windows_digest"),
    "blimp": ("pairs", "pairs_digest"),
    "score": ("scored_examples",),
}

_MOVE = "Move the {} of one of them away to recreate it"
_NOT_COMPARABLE = {
    "loss": "Losses on different held-out blocks are not comparable: use the measure words instead of loss",
    "score": "Scores on different examples are not comparable: give each task and data set a list of its own",
}


def check_rows(listed: ExperimentList) -> None:
    """Raise `InputError` for a row run with other settings, for rows of one variant with different text, tokenizer or
    model, and for rows measured on different text."""
    changed = [f"{row.title}: {'; '.join(changes)} ({row.folder})" for row in listed.rows if (changes := row.changes())]
    if changed:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise InputError(
            f"{listed.path}, row {changed[0]}{more}: it was run with other settings. Undo the change, move the folder "
            "away to run it again (for a measure: its file), or rename the row"
        )
    for variant in listed.variants:
        run_facts = [(row, _run_facts(row)) for row in listed.rows if row.name == variant.name]
        _check_equal(run_facts, "run with", _MOVE.format("folder"))
    for measure in [name for name in _TEXT_KEYS if name in listed.measures]:
        fix = _NOT_COMPARABLE.get(measure, _MOVE.format(f"{measure}.json"))
        measurements = [(row, _measurement_facts(row, measure)) for row in listed.rows]
        for name in _TEXT_KEYS[measure]:
            known = [(row, {name: facts[name]}) for row, facts in measurements if name in facts]
            _check_equal(known, f"measured ({measure}) on", fix)


def _check_equal(facts_of_rows: list[tuple[Experiment, dict[str, Any]]], how: str, fix: str) -> None:
    """Raise `InputError` for the first row with facts that differ from the first row's; rows without facts pass."""
    known = [(row, facts) for row, facts in facts_of_rows if facts]
    for row, facts in known[1:]:
        first, first_facts = known[0]
        if different := durable.differences(first_facts, facts):
            raise InputError(
                f"{row.title} was {how} different data from {first.title}: {'; '.join(different.values())}. {fix} "
                f"({row.folder})"
            )


def _run_facts(row: Experiment) -> dict[str, Any]:
    """The fingerprint of a row's run without seeds, and its number of held-out blocks; empty for an unfinished row, and
    if each seed starts from its own checkpoint."""
    record = {} if SEED in str(row.settings) else row.record()
    for path in row.run.glob(f"*/{RECORD_NAME}") if "picked" in record else ():  # the only fine-tuning run
        record = read_record(path, ("fingerprint", "metrics"), AGAIN)
    fingerprint = {name: of for name, of in record.get("fingerprint", {}).items() if name not in ("seed", "data_seed")}
    return fingerprint | {"eval_blocks": record["metrics"].get("eval_blocks")} if fingerprint else {}


def _measurement_facts(row: Experiment, measure: str) -> dict[str, Any]:
    record = row.record()
    if not MEASURES[measure].tool:
        values = {**record, **record.get("metrics", {})}
    else:
        values = row.measured(measure) if record and row.output_of(measure).is_file() else {}
    known = {name: values[name] for name in _TEXT_KEYS[measure] if name in values}
    # rounding differs between CPUs
    return {name: round(of, 9) if isinstance(of, float) else of for name, of in known.items()}
