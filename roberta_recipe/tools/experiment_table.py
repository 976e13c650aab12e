"""The table of a list of experiments: for each name and figure the mean over seeds with its standard error, the
difference from the first name, p by exact permutation with Holm's correction, and the verdict (docs/statistics.md)."""

import math
import statistics
from typing import Any, NamedTuple

from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.log import counted, duration, logger
from roberta_recipe.publishing.card import device_of
from roberta_recipe.publishing.tables import table
from roberta_recipe.record import RECORD_NAME, finite, read_record
from roberta_recipe.standard_error import with_error
from roberta_recipe.tools import significance
from roberta_recipe.tools.experiment_checks import check_rows
from roberta_recipe.tools.experiment_list import AGAIN, MEASURES, TABLE_FILES, Experiments, Row
from roberta_recipe.tools.significance import PAIRS, Comparison

NOT_RUN, UNFINISHED, NO_NUMBER, OTHER_WORDS = "not run", "unfinished", "no number", "other words"
Records = list[tuple[Row, list[dict[str, Any]]]]  # the finished rows with their run records; fine-tuning has several


class Cell(NamedTuple):
    """A figure of a name. What is missing, as rows are, is None."""

    by_seed: dict[int, float]
    mean: float | None
    error: float | None
    against_first: Comparison | None  # only where all rows of both names are finished, and all figures numbers
    corrected_p: float | None
    verdict: str


def cells(listed: Experiments) -> dict[str, dict[str, Cell]]:
    """By measure and name. Each measure is a family of comparisons by itself."""
    names = [setting.name for setting in listed.settings]
    found = {}
    for measure in listed.measures:
        of, scores = MEASURES[measure], {name: {} for name in names}
        counts: dict[str, set[int]] = {name: set() for name in names}
        for row in listed.rows:
            if (figure := row.figure(measure)) is not None:
                scores[row.name][row.seed] = figure
                counts[row.name] |= {row.measured(of.beside)[of.count]} if of.count else set()
        apart = {name for name in names if len(counts[name] | counts[names[0]]) > 1}
        found[measure] = _compared(scores, apart, listed, measure)
    return found


def _compared(
    scores: dict[str, dict[int, float]], apart: set[str], listed: Experiments, measure: str
) -> dict[str, Cell]:
    """The figures of each name; those of the names `apart` are of other words than the first's."""
    first, *others = scores
    whole = {name: len(of) == len(listed.seeds) and all(map(math.isfinite, of.values())) for name, of in scores.items()}
    in_order = {name: [of[seed] for seed in listed.seeds] for name, of in scores.items() if whole[name]}
    compared = {
        name: significance.compare(in_order[name], in_order[first])
        for name in others
        if whole[name] and whole[first] and name not in apart and not listed.search
    }
    # those that are not finished, or not compared, count too: a corrected p can only become smaller
    ps = [compared[name].p if name in compared else 1.0 for name in others]
    corrected = dict(zip(others, significance.holm(ps), strict=True))
    better = -1 if MEASURES[measure].better == "lower" else 1
    claims = {setting.name: setting.claim for setting in listed.settings}
    found = {}
    for name, of in scores.items():
        verdict = ""
        if name in compared:
            one = compared[name]
            verdict = significance.verdict(
                better * one.difference, corrected[name], one.least_p * len(others), claims[name], one.welch_p
            )
        elif name != first and not listed.search:
            verdict = OTHER_WORDS if name in apart else _why_none(of, scores[first])
        mean, error = significance.mean_and_error([*of.values()]) if of else (None, None)
        found[name] = Cell(of, mean, error, compared.get(name), corrected[name] if name in compared else None, verdict)
    return found


def _why_none(*sides: dict[int, float]) -> str:
    """Why two names are not compared."""
    if not all(sides):
        return NOT_RUN
    return UNFINISHED if all(math.isfinite(value) for side in sides for value in side.values()) else NO_NUMBER


def lines(
    listed: Experiments, found: dict[str, dict[str, Cell]], records: Records
) -> tuple[list[str], list[list[str]]]:
    """The head, and a line for each name."""
    first, count = listed.settings[0].name, len(listed.seeds)
    head, beside = ["name", "seeds"], _beside(records)
    head += beside
    for measure in listed.measures:
        head.append(MEASURES[measure].title)
        head += [] if listed.search else [f"{measure}: against {first}", "p (Holm)", "verdict"]
    published = list(dict.fromkeys(name for setting in listed.settings for name in setting.published))
    head += [f"published: {name}" for name in published]
    table = []
    for setting in listed.settings:
        of = [found[measure][setting.name] for measure in listed.measures]
        done = min(len(cell.by_seed) for cell in of)
        line = [setting.name, str(count) if done == count else f"{done} of {count}"]
        line += [beside[name].get(setting.name, "-") for name in beside]
        for cell in of:
            line.append(NOT_RUN if cell.mean is None else with_error(cell.mean, cell.error))
            if not listed.search:
                line += ["-"] * 3 if setting.name == first else _against(cell)
        table.append(line + [" ".join(str(setting.published.get(name, "-")).split()) for name in published])
    return head, table


def _beside(records: Records) -> dict[str, dict[str, str]]:
    """What else the run records say of each name, by the column's title: the mean of the tokens seen, and the
    parameters where names differ in them."""
    seen, parameters = {}, {}
    for row, of_row in records:
        for record in of_row:
            seen.setdefault(row.name, []).append(record["tokens_seen"])
            parameters[row.name] = f"{record['parameters'] / 1e6:.3g}"
    tokens = {name: f"{statistics.mean(of) / 1e6:,.2f}" for name, of in seen.items()}
    several = len(set(parameters.values())) > 1
    columns = {"tokens seen, M": tokens, **({"parameters, M": parameters} if several else {})}
    return {title: column for title, column in columns.items() if column}


def _against(cell: Cell) -> list[str]:
    """Difference, corrected p, verdict."""
    if cell.against_first is None:
        return ["-", "-", cell.verdict]
    difference, error, *_ = cell.against_first
    return ["+" * (difference > 0) + with_error(difference, error), f"{cell.corrected_p:.2g}", cell.verdict]


def notes(listed: Experiments, found: dict[str, dict[str, Cell]], records: Records) -> list[str]:
    """What a reader of the table needs beside it."""
    said = [listed.note] if listed.note else []
    said.append("± is the standard error over seeds.")
    if listed.search:
        measure = listed.measures[0]
        whole = {name: cell.mean for name, cell in found[measure].items() if len(cell.by_seed) == len(listed.seeds)}
        numbers = {name: mean for name, mean in whole.items() if math.isfinite(mean)}
        if numbers:
            pick = min if MEASURES[measure].better == "lower" else max
            said.append(
                f"A search, so no verdicts: {pick(numbers, key=numbers.get)} has the best mean {measure}, which "
                "flatters it; what is picked here is reported from other seeds, and other data."
            )
    elif len(listed.settings) > 1:
        seeds = len(listed.seeds)
        test = f"of the {seeds} pairs of a seed" if seeds >= PAIRS else f"of {seeds} and {seeds} seeds"
        count = len(listed.settings) - 1
        said.append(
            f"p: exact permutation {test}, two-sided, with Holm's correction over "
            f"{counted(count, 'comparison')} of a figure; a difference is called one up to 0.05, where Welch's t-test "
            "agrees or standard deviations are within four times of each other (docs/statistics.md)."
        )
    said += _readings(listed)
    said += _runs(records)
    if changes := [change for change in listed.changes if _is_of_rows(change.partition("=")[0], listed)]:
        said.append(f"Changed in all rows: {', '.join(changes)}.")
    if listed.source:
        said.append(f"Source of claims and published figures: {listed.source}.")
    return said


def _is_of_rows(changed: str, listed: Experiments) -> bool:
    """Whether finished rows have this change: they need not where its flag changes no bit (how often is logged)."""
    return "." in changed or any(changed in row.settings for row in listed.rows)


def _readings(listed: Experiments) -> list[str]:
    """How windows were put to the models of each name, where that differs (`words.measure`)."""
    names: dict[str, dict[str, None]] = {}
    for row in listed.rows if "words" in listed.measures else ():
        if row.figure("words") is not None and (reading := row.measured("words").get("reading")):
            names.setdefault(reading, {})[row.name] = None
    if len(names) < 2:
        return []
    said = "; ".join(f"{reading} in {', '.join(of)}" for reading, of in names.items())
    others = "; the words of one piece are not the same ones" * ("short_words" in listed.measures)
    return [f"Words were read: {said}{others}."]


def _records(listed: Experiments) -> Records:
    trained = [row for row in listed.rows if row.is_trained()]
    needed = ("commit", "hardware", "tokens_seen", "parameters")
    return [(row, [read_record(path, needed, AGAIN) for path in row.run.glob(f"**/{RECORD_NAME}")]) for row in trained]


def _runs(records: Records) -> list[str]:
    """Which code made the finished rows, on what, in what time; nothing where there are none."""
    runs = [record for _, of_row in records for record in of_row]
    if not runs:
        return []
    commits = {of["commit"] or "unknown" for of in runs}
    shown = sorted(commit[:7] + "-dirty" * commit.endswith("-dirty") for commit in commits)
    devices = sorted({device_of(of["hardware"]) for of in runs})
    spent = duration(statistics.median(row.stored()["seconds"] for row, _ in records))
    return [f"Runs: commit {', '.join(shown)}; {', '.join(devices)}; median time of a row {spent}."]


def write(listed: Experiments) -> str:
    """Write `table.md` and `table.json` into the list's folder, where that can be; returns the former's text.
    Raises `InputError` for rows that do not belong together: another runner, with another list, may have run some."""
    check_rows(listed)
    found, records = cells(listed), _records(listed)
    text = f"{table(*lines(listed, found, records))}\n\n{' '.join(notes(listed, found, records))}\n"
    values = {
        measure: {
            name: {**cell._asdict(), "against_first": cell.against_first and cell.against_first._asdict()}
            for name, cell in of_measure.items()
        }
        for measure, of_measure in found.items()
    }
    as_text, as_values = (listed.folder / name for name in TABLE_FILES)
    try:
        durable.make_folder(listed.folder, f"{listed.path}: output_dir")
        durable.write_text(as_text, text)
        durable.write_json(as_values, finite(values))  # a figure that is no number is null
    except (InputError, OSError) as error:  # what it took days to run is still printed
        logger.warning(f"{as_text} and {as_values.name} cannot be written: {getattr(error, 'strerror', error)}")
    return text
