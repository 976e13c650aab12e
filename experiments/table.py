"""Table of an experiment list: mean over seeds with standard error, difference from the first variant, p-value by exact
permutation with Holm's correction, and verdict (docs/statistics.md)."""

import math
import statistics
from typing import Any, NamedTuple

from experiments.checks import check_rows
from experiments.lists import AGAIN, MEASURES, Experiment, ExperimentList
from roberta_recipe import durable
from roberta_recipe.log import counted, duration
from roberta_recipe.publishing.card import device_name
from roberta_recipe.publishing.tables import markdown_table
from roberta_recipe.record import RECORD_NAME, finite, read_record
from roberta_recipe.standard_error import with_error
from tools import significance
from tools.significance import PAIRS, Comparison

NOT_RUN, UNFINISHED, NO_NUMBER, OTHER_WORDS = "not run", "unfinished", "not finite", "different words"
Records = list[tuple[Experiment, list[dict[str, Any]]]]  # finished rows and their run records


class Cell(NamedTuple):
    """A measure of a variant; None where rows are missing."""

    by_seed: dict[int, float]
    mean: float | None
    error: float | None
    against_first: Comparison | None  # if all rows of both variants are finished, with finite values
    corrected_p: float | None
    verdict: str


def cells(listed: ExperimentList) -> dict[str, dict[str, Cell]]:
    """Cells by measure and variant. Each measure is a family of comparisons."""
    names = [variant.name for variant in listed.variants]
    found = {}
    for measure in listed.measures:
        of, scores = MEASURES[measure], {name: {} for name in names}
        counts: dict[str, set[int]] = {name: set() for name in names}
        for row in listed.rows:
            if (figure := row.figure(measure)) is not None:
                scores[row.name][row.seed] = figure
                counts[row.name] |= {row.measured(of.tool)[of.count]} if of.count else set()
        apart = {name for name in names if len(counts[name] | counts[names[0]]) > 1}
        found[measure] = _compared(scores, apart, listed, measure)
    return found


def _compared(
    scores: dict[str, dict[int, float]], apart: set[str], listed: ExperimentList, measure: str
) -> dict[str, Cell]:
    """A measure's cells by variant; `apart`: variants measured on other words than the first."""
    (first, *others), count = scores, len(listed.seeds)
    whole = {name for name, of in scores.items() if len(of) == count and all(map(math.isfinite, of.values()))}
    compared = {
        name: significance.compare(scores[name], scores[first])
        for name in others
        if {name, first} <= whole and name not in apart and not listed.search
    }
    # unfinished comparisons count too, with p = 1: a corrected p can only become smaller
    ps = [compared[name].p if name in compared else 1.0 for name in others]
    corrected = dict(zip(others, significance.holm(ps), strict=True))
    better = -1 if MEASURES[measure].better == "lower" else 1
    claims = {variant.name: variant.claim for variant in listed.variants}
    found = {}
    for name, of in scores.items():
        verdict = ""
        if name in compared:
            one = compared[name]
            verdict = significance.verdict(
                better * one.difference, corrected[name], one.least_p * len(others), claims[name], one.welch_p
            )
        elif name != first and not listed.search:
            verdict = OTHER_WORDS if name in apart else _missing_verdict(of, scores[first])
        mean, error = significance.mean_and_error([*of.values()]) if of else (None, None)
        found[name] = Cell(of, mean, error, compared.get(name), corrected[name] if name in compared else None, verdict)
    return found


def _missing_verdict(*sides: dict[int, float]) -> str:
    """The verdict on two variants that cannot be compared."""
    if not all(sides):
        return NOT_RUN
    return UNFINISHED if all(math.isfinite(value) for side in sides for value in side.values()) else NO_NUMBER


def lines(
    listed: ExperimentList, found: dict[str, dict[str, Cell]], records: Records
) -> tuple[list[str], list[list[str]]]:
    """The header, and a row per variant."""
    first, count = listed.variants[0].name, len(listed.seeds)
    head, beside = ["name", "seeds"], _record_columns(records)
    head += beside
    for measure in listed.measures:
        head.append(MEASURES[measure].title)
        head += [] if listed.search else [f"{measure}: against {first}", "p (Holm)", "verdict"]
    published = list(dict.fromkeys(name for variant in listed.variants for name in variant.published))
    head += [f"published: {name}" for name in published]
    table = []
    for variant in listed.variants:
        of = [found[measure][variant.name] for measure in listed.measures]
        done = min(len(cell.by_seed) for cell in of)
        line = [variant.name, str(count) if done == count else f"{done} of {count}"]
        line += [beside[name].get(variant.name, "-") for name in beside]
        for cell in of:
            line.append(NOT_RUN if cell.mean is None else with_error(cell.mean, cell.error))
            if not listed.search:
                line += ["-"] * 3 if variant.name == first else _comparison_cells(cell)
        table.append(line + [" ".join(str(variant.published.get(name, "-")).split()) for name in published])
    return head, table


def _record_columns(records: Records) -> dict[str, dict[str, str]]:
    """Columns from the run records, by title: mean tokens seen, and the parameters if variants differ."""
    seen, parameters = {}, {}
    for row, row_records in records:
        for record in row_records:
            seen.setdefault(row.name, []).append(record["tokens_seen"])
            parameters[row.name] = f"{record['parameters'] / 1e6:.3g}"
    tokens = {name: f"{statistics.mean(of) / 1e6:,.2f}" for name, of in seen.items()}
    several = len(set(parameters.values())) > 1
    columns = {"tokens seen, M": tokens, **({"parameters, M": parameters} if several else {})}
    return {title: column for title, column in columns.items() if column}


def _comparison_cells(cell: Cell) -> list[str]:
    """The cells difference, corrected p, verdict."""
    if cell.against_first is None:
        return ["-", "-", cell.verdict]
    difference, error, *_ = cell.against_first
    return ["+" * (difference > 0) + with_error(difference, error), f"{cell.corrected_p:.2g}", cell.verdict]


def notes(listed: ExperimentList, found: dict[str, dict[str, Cell]], records: Records) -> list[str]:
    """The sentences below the table."""
    said = [listed.note] if listed.note else []
    said.append("± is the standard error over seeds.")
    if listed.search:
        measure = listed.measures[0]
        whole = {name: cell.mean for name, cell in found[measure].items() if len(cell.by_seed) == len(listed.seeds)}
        numbers = {name: mean for name, mean in whole.items() if math.isfinite(mean)}
        if numbers:
            pick = min if MEASURES[measure].better == "lower" else max
            said.append(
                f"A search, so no verdicts: {pick(numbers, key=numbers.get)} has the best mean {measure}, biased by "
                "the selection; report it from other seeds and other data."
            )
    elif len(listed.variants) > 1:
        seeds = len(listed.seeds)
        test, unless = f"of {seeds} pairs with equal seeds", ""
        if seeds < PAIRS:
            test = f"of {seeds} and {seeds} seeds"
            unless = " if Welch's t-test agrees or the standard deviations differ at most fourfold"
        count = len(listed.variants) - 1
        said.append(
            f"p: exact permutation {test}, two-sided, with Holm's correction over "
            f"{counted(count, 'comparison')} per measure; significant up to 0.05{unless} (docs/statistics.md)."
        )
    said += _reading_note(listed)
    said += _run_note(records)
    if listed.changes:
        said.append(f"Changed in all rows: {', '.join(listed.changes)}.")
    if listed.source:
        said.append(f"Source of claims and published results: {listed.source}.")
    return said


def _reading_note(listed: ExperimentList) -> list[str]:
    """The reading (`tools/words.py`) of each variant's models, if it differs."""
    names: dict[str, dict[str, None]] = {}
    for row in listed.rows if "words" in listed.measures else ():
        if row.figure("words") is not None and (reading := row.measured("words").get("reading")):
            names.setdefault(reading, {})[row.name] = None
    if len(names) < 2:
        return []
    said = "; ".join(f"{reading} in {', '.join(of)}" for reading, of in names.items())
    others = "; the one-piece words differ too" * ("short_words" in listed.measures)
    return [f"Input format of words: {said}{others}."]


def _finished_records(listed: ExperimentList) -> Records:
    trained = [row for row in listed.rows if row.record()]
    needed = ("commit", "hardware", "tokens_seen", "parameters")
    return [(row, [read_record(path, needed, AGAIN) for path in row.run.glob(f"**/{RECORD_NAME}")]) for row in trained]


def _run_note(records: Records) -> list[str]:
    """Commits, devices and median time of finished rows."""
    runs = [record for _, row_records in records for record in row_records]
    if not runs:
        return []
    commits = {of["commit"] or "unknown" for of in runs}
    shown = sorted(commit[:7] + "-dirty" * commit.endswith("-dirty") for commit in commits)
    devices = sorted({device_name(of["hardware"]) for of in runs})
    spent = [seconds for row, _ in records if (seconds := row.stored()["seconds"])]  # 0: run by hand
    time = f"; median time of a row {duration(statistics.median(spent))}" if spent else ""
    return [f"Runs: commit {', '.join(shown)}; {', '.join(devices)}{time}."]


def write(listed: ExperimentList) -> str:
    """Write `table.md` and `table.json` in the list's folder; returns the text of `table.md`. Raises `InputError` for
    inconsistent rows, such as rows of another version of the list."""
    check_rows(listed)
    found, records = cells(listed), _finished_records(listed)
    text = f"{markdown_table(*lines(listed, found, records))}\n\n{' '.join(notes(listed, found, records))}\n"
    values = {
        measure: {
            name: {**cell._asdict(), "against_first": cell.against_first and cell.against_first._asdict()}
            for name, cell in by_name.items()
        }
        for measure, by_name in found.items()
    }
    durable.make_folder(listed.folder, f"{listed.path}: output_dir")
    durable.write_text(listed.folder / "table.md", text)
    durable.write_json(listed.folder / "table.json", finite(values))  # nan becomes null
    return text
