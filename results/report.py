"""Report of the results: tables, plots and pages from the run records and proofs.yaml in this folder.

    python results/report.py                                        # or: make report
    python results/report.py --add runs/roberta_mini                # add a pretraining run as results/roberta_mini/
    python results/report.py --add runs/glue/rte --name roberta_mini    # add a model fine-tuned from it
    python results/report.py --add runs/blimp/bert-base        # add BLiMP scores (a run's own are added with it)
    python results/report.py --add runs/squad/v1.1 --name roberta_mini --note "3,468 of the 10,570 questions"

    python results/report.py --readme README.md                # also the five best rows, between the markers of a page

Writes results/curves.png and results/README.md. proofs.yaml lists claims and orderings of the papers' tables with the
commands of their figures; the paper's figures are the library's.
"""

import math
import re
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from roberta_recipe import durable
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.input_files import ROOT, read_text
from roberta_recipe.log import counted
from roberta_recipe.publishing import blimp_table, plots, tables
from roberta_recipe.publishing.card import baseline_cell, device_name, scored_on
from roberta_recipe.record import (
    BLIMP_NAME,
    CURVE_NAME,
    RECORD_NAME,
    SUMMARY_NAME,
    BlimpRecord,
    FinetuneRecord,
    PretrainingRecord,
    RunRecord,
    Summary,
    percent,
    picked_setting,
    portable,
    read_record,
)
from roberta_recipe.settings import RecipeParser, check_mapping, load_yaml
from roberta_recipe.standard_error import perplexity_with_error
from roberta_recipe.tasks import glue, race, squad
from tools import significance

ADVICE = "add it with that version"
PROOFS_NAME, SPEEDRUN_NAME = "proofs.yaml", "speedrun.md"
PROOF_HEAD = ("what was proved", "figure", "command")
ORDERING_HEAD = ("statement of the paper", "at our size", "command")
PAPER = "RoBERTa-large (base)"
SCORE_HEAD = ("task, metric", "model", "pretrained", "random weights", "majority answer", PAPER, "scored on", "p")
BEST_HEAD = ("model", "task, metric", "score", "random weights, or majority answer", "published")
HEAD = ("task, metric", "model", "median (range, seeds)", "scored on", "preset", "tokens", "hardware", "hours")
PRETRAINING_HEAD = ("model", "parameters", "masked perplexity", "scored on", "preset", "tokens", "hardware", "hours")
PRETRAINING_HEAD += ("tokens/s", "peak memory", "perplexity by source")
YARDSTICKS = blimp_table.PUBLISHED[:3]  # human, GPT-2, LSTM
MARKS = ("<!-- results: made by make report -->", "<!-- end of results -->")
SCORES_EXPLAINED = (
    "Validation scores x 100, the best epoch picked on the same examples. Majority answer: the most frequent label for "
    "every example. A degenerate seed predicts one label. p: two-sided permutation test over seeds, corrected for the "
    "model's tasks (Holm)."
)
CURVES_EXPLAINED = "Dashed: unigram entropy, and BLiMP of random weights. Dotted: published scores of other models."
MADE_BY = "Made by `make report` from the records in this folder and [proofs.yaml](proofs.yaml). [Log](experiments.md)."
BETTER = "Better than random weights"
_RUN_FIELDS = ("metrics", "steps", "tokens_seen", "tokens_per_second", "train_seconds", "score_at_steps", "degenerate")
_RUN_FIELDS += ("parameters", "versions", "commit", "hardware")


@dataclass
class Proof:
    """An entry of `proofs.yaml`: a claim or an ordering, its figure, and the command that prints it."""

    claim: str
    figure: str
    command: str


class LedgerEntry(Summary):
    """A fine-tuning in the ledger (`results/`), reduced to its picked setting and the runs of that setting."""

    note: str  # on data other than an official split; may be empty
    runs: list[FinetuneRecord]  # with `_RUN_FIELDS` only


class Ledger(NamedTuple):
    """The folder's content: proofs, orderings, pretraining records and BLiMP scores by model, fine-tunings by (model,
    file stem)."""

    proofs: list[tuple[str, ...]]  # cells
    orderings: list[tuple[str, ...]]
    pretrained: dict[str, PretrainingRecord]
    tuned: dict[tuple[str, str], LedgerEntry]
    blimp: dict[str, BlimpRecord]


class Row(NamedTuple):
    """A figure of the paper: the task and metric in `summary.json`, the task's title, and the figure."""

    task: str
    metric: str
    name: str
    paper: str

    @property
    def shown(self) -> str:
        return f"{self.name}, {self.metric}"


class Pair(NamedTuple):
    """A fine-tuning from a pretrained model and from random weights, by a metric; one may be None."""

    row: Row
    model: str
    pretrained: LedgerEntry | None
    random: LedgerEntry | None

    @property
    def any(self) -> LedgerEntry:
        return self.pretrained or self.random

    @property
    def limited(self) -> str:
        limit = self.any["resolved_args"].get("max_train_samples")
        return f", {limit:,} training examples" if limit else ""

    @property
    def task(self) -> str:
        return self.row.shown + self.limited


class TestResult(NamedTuple):
    """Significance test of a task: p and the least possible p, both corrected for the model's tested tasks; 1 for a
    single seed and for non-finite scores."""

    p: float = 1.0
    least: float = 1.0
    welch: float | None = None  # Welch's p for unequal noise


class Section(NamedTuple):
    """A section of the report: paragraphs (with `code`, **bold** and links) above and below a table or an image."""

    title: str
    above: Sequence[str] = ()
    head: tuple[str, ...] = ()
    lines: Sequence[tuple[str, ...]] = ()
    below: Sequence[str] = ()
    picture: str = ""  # file name


def read(folder: Path) -> Ledger:
    """Read the ledger."""
    pretrained = {path.parent.name: durable.read_json(path) for path in sorted(folder.glob(f"*/{RECORD_NAME}"))}
    others = sorted(path for path in folder.glob("*/*.json") if path.name not in (RECORD_NAME, BLIMP_NAME))
    tuned = {(path.parent.name, path.stem): durable.read_json(path) for path in others}
    scored = {path.parent.name: durable.read_json(path) for path in sorted(folder.glob(f"*/{BLIMP_NAME}"))}
    proofs, orderings = (read_proofs(folder / PROOFS_NAME, key) for key in ("proofs", "orderings"))
    return Ledger(proofs, orderings, pretrained, tuned, scored)


def read_proofs(path: Path, key: str) -> list[tuple[str, ...]]:
    """Cells of a list in proofs.yaml, none without the file. Raises `InputError` for an incomplete entry."""
    proofs = []
    for number, entry in enumerate(load_yaml(path).get(key, ()) if path.is_file() else (), 1):
        where = f"{path}, entry {number} of {key}"
        values = check_mapping(entry, [Proof], where)
        if missing := [name for name in ("claim", "figure", "command") if name not in values]:
            raise InputError(f"{where} has no {missing[0]!r}: each entry has a claim, a figure and a command")
        proofs.append((values["claim"], values["figure"], f"`{values['command']}`"))
    return proofs


def add(folder: Path, source: Path, name: str | None, note: str = "") -> Path:
    """Copy a run's record, its BLiMP scores or both into the ledger, or a fine-tuning's reduced summary with a `note`
    on its data; returns the written path. Raises `InputError` without a finished run in `source`."""
    if (source / SUMMARY_NAME).is_file():
        if not name:
            raise InputError(f"{source} is a fine-tuning: name its pretrained model with --name")
        entry = reduced_entry(source, note)
        if entry["task"] not in {row.task for row in paper_rows()}:
            raise InputError(f"{source} is fine-tuned on {entry['task']!r}, a task without a table in the paper")
        stem = "_".join([entry["task"].replace(" ", "_"), *_variants(entry["resolved_args"])])
        target = folder / _file_name("name", name) / f"{_file_name('task', stem)}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        durable.write_json(target, entry)
        return target
    target = folder / _file_name("name", name or source.resolve().name)
    needed = {BLIMP_NAME: ("scores", "random_weights"), RECORD_NAME: ("shown_args",)}
    records = {file: read_record(source / file, of, ADVICE) for file, of in needed.items() if (source / file).is_file()}
    if not records:
        raise InputError(
            f"{source} has neither {RECORD_NAME} nor {SUMMARY_NAME}, and no {BLIMP_NAME}: name a finished run's folder"
        )
    if "task" in records.get(RECORD_NAME, ()):
        raise InputError(
            f"{source} is a single run of a fine-tuning: name the folder of all its seeds, {source.parent}"
        )
    if RECORD_NAME in records and not (source / CURVE_NAME).is_file():
        raise InputError(
            f"{source} has no {CURVE_NAME}: copy it too, or move {RECORD_NAME} away and start the run again"
        )
    if BLIMP_NAME in records and blimp_table.is_stale(records[BLIMP_NAME], source):
        raise InputError(f"{source / BLIMP_NAME} scores other weights: run make blimp again, or move it away")
    records = {file: portable(values) for file, values in records.items()}
    former = target / RECORD_NAME
    if RECORD_NAME in records and former.is_file() and durable.read_json(former) != records[RECORD_NAME]:
        raise InputError(
            f"{target} has another run's {RECORD_NAME}: add {source} with another --name, or move that folder away, "
            "with the fine-tunings of its model"
        )
    target.mkdir(parents=True, exist_ok=True)
    for file, values in records.items():
        durable.write_json(target / file, values)
    if RECORD_NAME in records:
        if BLIMP_NAME not in records:
            (target / BLIMP_NAME).unlink(missing_ok=True)  # moved away
        shutil.copyfile(source / CURVE_NAME, target / CURVE_NAME)
    return target


def _file_name(what: str, name: str) -> str:
    """`name`, checked as a file or folder name in the ledger. Raises `InputError`."""
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise InputError(
            f"{what}={name!r} becomes a name in the ledger: letters, digits and _ . + - only, a letter first"
        )
    return name


def reduced_entry(source: Path, note: str) -> LedgerEntry:
    """A fine-tuning's ledger entry: the picked setting, its runs and the shown flags, without local paths."""
    summary = read_record(source / SUMMARY_NAME, ("settings", "shown_args", "scored_examples"), ADVICE)
    scores = picked_setting(summary)
    runs = []
    for seed in scores["seeds"]:
        folder = f"lr{scores['learning_rate']:g}-batch{scores['global_batch_size']}-seed{seed}"
        record = read_record(source / folder / RECORD_NAME, ("metrics", "shown_args"), ADVICE)
        runs.append({"seed": int(seed), **{name: record.get(name) for name in _RUN_FIELDS}})
    resolved = record["resolved_args"]  # of a sweep, the summary has the preset's
    args = {name: resolved[name] for name in summary["shown_args"] if resolved.get(name) is not None and name != "seed"}
    scores |= {"best_run": Path(scores["best_run"]).name}
    names = ("task", "metric", "dataset", "scored_examples", "baseline", "shown_args", "duplicates")
    entry = {name: summary.get(name) for name in names} | {"note": note}
    return {**entry, "settings": [scores], "picked": 0, "resolved_args": args, "runs": runs}


def paper_rows() -> list[Row]:
    """The figures of the paper's tables 5, 6 and 7, in order."""
    large, base, rows = glue.PAPER["large"], glue.PAPER["base"], []
    for name in filter(large.get, glue.TASKS):
        figure = f"{large[name]} (base {base[name]})" if name in base else f"{large[name]}"
        rows.append(Row(name, glue.TASKS[name].metric, f"GLUE {name}", figure))
    for version, figures in squad.PAPER.items():
        rows += [Row(f"squad {version}", m, f"SQuAD {version}", str(score)) for m, score in figures.items()]
    rows += [Row("race", m, "RACE", f"{score} (test set)") for m, score in race.PAPER.items()]
    return rows


def all_rows(ledger: Ledger) -> list[tuple[str, ...]]:
    """Rows of the table with the header `HEAD`: each fine-tuning by each of the paper's metrics."""
    lines = []
    for row in paper_rows():
        for model, entry in [(model, entry) for (model, _), entry in ledger.tuned.items() if _has(entry, row)]:
            args, runs = entry["resolved_args"], entry["runs"]
            spent = _spent(runs, sum(record["tokens_seen"] for record in runs))
            measured = (_score(entry, row.metric), scored_on(entry, row.metric))
            lines.append((row.shown, _tuned_name(model, args), *measured, _settings(args), *spent))
    return lines


def pairs(ledger: Ledger) -> list[Pair]:
    """The fine-tunings by their main metric, with and without pretraining, on the same examples."""
    sides_by_row: dict[tuple, dict[bool, LedgerEntry]] = {}
    rows = paper_rows()
    for (model, _), entry in ledger.tuned.items():
        args = entry["resolved_args"]
        level = args.get("level", "all")
        metric = entry["metric"] if level == "all" else level  # of RACE
        row = next((row for row in rows if (row.task, row.metric) == (entry["task"], metric)), None)
        if row is None:  # not a task of the paper
            continue
        name = _tuned_name(model, args | {"random_weights": False, "level": "all"})  # the level is in the row
        key = (rows.index(row), args.get("max_train_samples") or 0, name, str(entry["scored_examples"]))
        sides_by_row.setdefault(key, {})[bool(args.get("random_weights"))] = entry
    ordered = sorted(sides_by_row.items(), key=lambda item: item[0][:2])  # stable
    return [Pair(rows[number], name, sides.get(False), sides.get(True)) for (number, _, name, _), sides in ordered]


def score_table(compared: list[tuple[Pair, TestResult]]) -> list[tuple[str, ...]]:
    """Rows of the table with the header `SCORE_HEAD`, one per task and model."""
    lines = []
    for pair, test in compared:
        scores = [_score(side, pair.row.metric) if side else "-" for side in (pair.pretrained, pair.random)]
        baseline, counts = baseline_cell(pair.any, pair.row.metric), scored_on(pair.any, pair.row.metric)
        p = f"{test.p:.3f}" if test.least < 1 else "-"
        lines.append((pair.task, pair.model, *scores, baseline, pair.row.paper, counts, p))
    return lines


def best_rows(ledger: Ledger) -> list[tuple[str, ...]]:
    """At most five rows with the header `BEST_HEAD`: pretraining runs of the ledger before other models, then by the
    lead over random weights or the majority answer, which must be significant over random weights."""
    rows = []
    for model, record in ledger.blimp.items():
        score, controls = blimp_scores(record)
        if controls and score > max(controls):
            _, _, shown, _, control, _ = blimp_table.rows({model: record})[0]
            line = (model, "BLiMP", shown, control, ", ".join(f"{figure.name} {figure.score}" for figure in YARDSTICKS))
            rows.append((model in ledger.pretrained, score - statistics.fmean(controls), line))
    for pair, test in tested(ledger):
        entry, metric = pair.pretrained, pair.row.metric
        control = _median(pair.random, metric) if pair.random else _majority(pair)
        if entry and control is not None and (not pair.random or judge(pair, test)[0] == BETTER):
            shown = _score(pair.random, metric) if pair.random else baseline_cell(entry, metric)
            line = (pair.model, pair.task, _score(entry, metric), shown, f"RoBERTa-large {pair.row.paper}")
            rows.append((pair.model.partition(",")[0] in ledger.pretrained, _median(entry, metric) - control, line))
    return [line for _, lead, line in sorted(rows, reverse=True)[:5] if lead > 0]


def verdict(ledger: Ledger) -> list[str]:
    """A paragraph per pretraining run: perplexity, BLiMP, and its fine-tunings compared with the majority answer and
    with random weights."""
    paragraphs = []
    for model, record in ledger.pretrained.items():
        tokens, where, hours = _spent([record], record["tokens_seen"])
        size = f"{record['parameters'] / 1e6:.1f} M parameters, {tokens} tokens, {hours} hours on {where}"
        text = f"**{model}** ({size}): masked perplexity {_perplexity(record)} on its own held-out text"
        if model in ledger.blimp:
            _, _, score, _, control, _ = blimp_table.rows({model: ledger.blimp[model]})[0]
            text += f"; BLiMP {score}, random weights {control}"
        judged = [(judge(*each), each) for each in tested(ledger) if each[0].model == model and all(each[0][2:])]
        tasks_by_verdict: dict[str, list[str]] = {}
        for (kind, figures), (pair, _) in judged:
            tasks_by_verdict.setdefault(kind, []).append(f"{pair.row.name}{pair.limited} {figures}")
        gains = tasks_by_verdict.pop(BETTER, [])
        sentences = [f"{text}.", *[f"**{BETTER} on {'; '.join(gains)}.**"] * bool(gains)]
        if judged and not gains:
            sentences.append("Not shown to be better than random weights on any task.")
            if (least := min(test.least for _, (_, test) in judged)) > significance.LEVEL:
                sentences.append(f"Too few seeds to show it: the least possible corrected p is {least:.2f}.")
        sentences += [f"{kind}: {'; '.join(tasks)}." for kind, tasks in tasks_by_verdict.items()]
        paragraphs.append(" ".join(sentences))
    return paragraphs


def tested(ledger: Ledger) -> list[tuple[Pair, TestResult]]:
    """The pairs, each with its test."""
    shown = pairs(ledger)
    results = [TestResult()] * len(shown)
    for model in {pair.model for pair in shown}:
        compared: dict[int, significance.Comparison] = {}
        for number, pair in enumerate(shown):
            if pair.model == model and pair.pretrained and pair.random:
                sides = [_scores(side, pair.row.metric) for side in (pair.pretrained, pair.random)]
                if min(map(len, sides)) > 1 and all(math.isfinite(score) for side in sides for score in side.values()):
                    compared[number] = significance.compare(*sides)
        corrected = significance.holm([of.p for of in compared.values()])
        for (number, of), p in zip(compared.items(), corrected, strict=True):
            results[number] = TestResult(p, min(1.0, of.least_p * len(compared)), of.welch_p)
    return list(zip(shown, results, strict=True))


def judge(pair: Pair, test: TestResult) -> tuple[str, str]:
    """(verdict on pretrained against random weights, figures) of a task."""
    ours, random = ([*_scores(side, pair.row.metric).values()] for side in (pair.pretrained, pair.random))
    medians, majority = (statistics.median(ours), statistics.median(random)), _majority(pair)
    against = " against ".join(map(percent, medians))
    if min(len(ours), len(random)) == 1:
        return "A single seed, so no statement", against
    if majority is not None and max(medians) <= majority:
        return "Not above the majority answer", f"{against} ({percent(majority)})"
    figures = f"{against}, p {test.p:.3f}"
    gain = statistics.fmean(ours) - statistics.fmean(random)
    result = significance.verdict(gain, test.p, test.least, welch_p=test.welch)
    if result in ("better", "worse"):
        return BETTER if result == "better" else "Below random weights", figures
    if min(random) <= medians[0] <= max(random):
        return "Level with random weights", against
    return "Suggestive, no more", figures


def blimp_scores(record: BlimpRecord) -> tuple[float, list[float]]:
    """The mean of paradigms by the first method, and those of random weights."""
    method, scores = next(iter(record["scores"].items()))
    return scores["mean_of_paradigms"], [control[method]["mean_of_paradigms"] for control in record["random_weights"]]


def _median(entry: LedgerEntry, metric: str) -> float:
    return statistics.median(_scores(entry, metric).values())


def _perplexity(record: PretrainingRecord) -> str:
    return perplexity_with_error(record["metrics"]["eval_perplexity"], record["metrics"].get("eval_loss_error"))


def _majority(pair: Pair) -> float | None:
    """The majority answer's score."""
    return (pair.any["baseline"] or {"metrics": {}})["metrics"].get(pair.row.metric)


def _scores(entry: LedgerEntry, metric: str) -> dict[int, float]:
    """Scores by seed; -inf for an undefined correlation."""
    scores = {run["seed"]: run["metrics"][metric] for run in entry["runs"]}
    return {seed: -math.inf if score is None else score for seed, score in scores.items()}


def _score(entry: LedgerEntry, metric: str) -> str:
    """Median, spread, number of seeds, and of degenerate ones."""
    scores = _scores(entry, metric).values()
    spread = f"{percent(min(scores))} to {percent(max(scores))}, " * (len(scores) > 1)
    flat = sum(record["degenerate"] for record in entry["runs"])
    counts = f"{counted(len(scores), 'seed')}" + f", {flat} degenerate" * (flat > 0)
    return f"{percent(statistics.median(scores))} ({spread}{counts})"


def _has(entry: LedgerEntry, row: Row) -> bool:
    """Whether the fine-tuning measured the paper's figure; RACE's accuracy needs both levels."""
    single_level = row.metric == "accuracy" and entry["resolved_args"].get("level", "all") != "all"
    measured = all(row.metric in record["metrics"] for record in entry["runs"])
    return entry["task"] == row.task and measured and not single_level


def _variants(args: dict[str, Any]) -> list[str]:
    """Flags that distinguish fine-tunings of the same model on the same task."""
    found = [name for name in ("random_weights", "without_article") if args.get(name)]
    limits = [name for name in ("level", "max_train_samples") if args.get(name) not in (None, "all")]
    return found + [f"{name}_{args[name]}" for name in limits]


def _tuned_name(model: str, args: dict[str, Any]) -> str:
    """The model and the distinguishing flags, except for numbers of examples, which are in the settings."""
    shown = [name.replace("_", " ") for name in _variants(args) if not name.startswith("max_train_samples")]
    return ", ".join([model, *shown])


def _settings(args: dict[str, Any]) -> str:
    """The main hyperparameters of a fine-tuning."""
    epochs = f"{args['num_train_epochs']:g} epoch{'s' * (args['num_train_epochs'] != 1)}"
    steps = f"{args['max_steps']:,} steps" if args.get("max_steps", -1) > 0 else epochs
    shown = [f"{args['learning_rate']:g}", f"batch {args['global_batch_size']}", steps]
    shown.append(f"length {args['max_seq_length']}")
    if args.get("max_train_samples"):
        shown.append(f"{args['max_train_samples']:,} examples")
    return ", ".join(shown)


def _spent(records: Sequence[RunRecord], tokens: int) -> tuple[str, str, str]:
    """(tokens, hardware, hours) of runs on the same machine."""
    hours = sum(record["train_seconds"] for record in records) / 3600
    return f"{tokens / 1e6:,.1f} M", device_name(records[0]["hardware"]), f"{hours:.2f}"


def pretraining(ledger: Ledger) -> list[tuple[str, ...]]:
    """Rows of the table with the header `PRETRAINING_HEAD`."""
    lines = []
    for model, record in ledger.pretrained.items():
        args, blocks = record["resolved_args"], record["metrics"]["eval_blocks"]
        batch = f"{record['global_batch_size']} x {args['max_seq_length']}"  # sequences x tokens
        preset = f"{batch}, {record['steps']:,} steps at {args['learning_rate']:g}"
        measured = (f"{record['parameters'] / 1e6:.1f} M", _perplexity(record), f"validation, {blocks:,} blocks")
        speed = (f"{record['tokens_per_second']:,}", f"{record['peak_memory_bytes'] / 1e9:.1f} GB")
        by_source = [
            f"{name} {perplexity_with_error(source['perplexity'], source.get('loss_error'))}"
            for name, source in record["metrics_by_source"].items()
        ]
        spent = _spent([record], record["tokens_seen"])
        lines.append((model, *measured, preset, *spent, *speed, "; ".join(by_source) or "-"))
    return lines


def sections(ledger: Ledger, folder: Path) -> list[Section]:
    """The sections of the report, the verdict first; a table without rows has none."""
    compared, rows = tested(ledger), all_rows(ledger)
    ours = [each for each in compared if each[0].random or each[0].model.partition(",")[0] in ledger.pretrained]
    known = [each for each in compared if each not in ours]
    run = {line[0] for line in rows if line[1].partition(",")[0] in ledger.pretrained}
    not_run = [row.shown for row in paper_rows() if row.shown not in run]
    names = sorted(path.stem for path in (ROOT / "presets" / "tables").glob("*.yaml") if path.stem != "scales")
    waiting = [name for name in names if not any(f"TABLE={name}" in command for *_, command in ledger.orderings)]
    known_head, *known_rows = ((*line[:3], *line[4:7]) for line in (SCORE_HEAD, *score_table(known)))
    encoders = (
        "Public encoders, fine-tuned by this repository's scripts with the settings below: a check of the protocol."
    )
    small = "Small models, several seeds; bits are per masked word, ± is the standard error over seeds."
    blimp = blimp_table.rows(ledger.blimp) if ledger.blimp else ()
    speedrun = [f"[{SPEEDRUN_NAME}]({SPEEDRUN_NAME})"] * (folder / SPEEDRUN_NAME).is_file()
    shown = [
        Section("Verdict", verdict(ledger)),
        Section("What the models score", [SCORES_EXPLAINED], SCORE_HEAD, score_table(ours),
                [*_notes(ours), *[f"Not run from these models: {'; '.join(not_run)}."] * bool(not_run)]),
        Section("Loss and BLiMP over tokens", [CURVES_EXPLAINED], picture="curves.png"),
        Section("BLiMP", [blimp_table.EXPLANATION], blimp_table.HEAD, blimp),
        Section("Known encoders by the same protocol", [encoders], known_head, known_rows, _notes(known)),
        Section("Orderings of the papers' tables", [small], ORDERING_HEAD, ledger.orderings,
                [f"Not run: the tables {', '.join(waiting)}."] * bool(waiting)),
        Section("Speedrun", speedrun),
        Section("What was proved", (), PROOF_HEAD, ledger.proofs),
        Section("Every pretraining run", (), PRETRAINING_HEAD, pretraining(ledger)),
        Section("Every fine-tuning", ["Hours and tokens are of all seeds."], HEAD, rows),
        Section("Sources", [MADE_BY]),
    ]  # fmt: skip
    return [section for section in shown if section.lines or section.picture or (section.above and not section.head)]


def _notes(compared: list[tuple[Pair, TestResult]]) -> list[str]:
    notes = dict.fromkeys(f"- {pair.row.name}: {pair.any['note']}." for pair, _ in compared if pair.any["note"])
    return [*["Notes on the data:"] * bool(notes), *notes]


def as_markdown(shown: Sequence[Section]) -> str:
    """The report as Markdown."""
    blocks = ["# Results"]
    for section in shown:
        picture = [f"![{section.title}]({section.picture})"] * bool(section.picture)
        table = [tables.markdown_table(section.head, section.lines)] * bool(section.head)
        above, below = (map(tables.plain, texts) for texts in (section.above, section.below))
        blocks += [f"## {section.title}", *above, *picture, *table, *below]
    return "\n\n".join(blocks) + "\n"


def with_rows(readme: str, rows: Sequence[tuple[str, ...]]) -> str:
    """The README with a table of `rows` between its markers. Raises `InputError` without markers."""
    pattern = re.compile(f"{re.escape(MARKS[0])}.*?{re.escape(MARKS[1])}", re.S)
    if not pattern.search(readme):
        raise InputError(f"the README has no section between {MARKS[0]} and {MARKS[1]}: add the two lines")
    return pattern.sub(lambda _: f"{MARKS[0]}\n{tables.markdown_table(BEST_HEAD, rows)}\n{MARKS[1]}", readme)


def plot_curves(ledger: Ledger, path: str | Path) -> None:
    """PNG over tokens seen, of pretraining runs: loss with the unigram entropy (dashed); BLiMP with random weights
    (dashed) and published scores (dotted)."""
    figure, (left, right) = plots.subplots(1, 2, 11, 4.5, sharex=True)
    for number, (name, record) in enumerate(ledger.pretrained.items()):
        color = f"C{number % 10}"
        style = {"color": color, "marker": "o", "markersize": 3, "label": f"{name}, {record['parameters'] / 1e6:.1f} M"}
        left.plot(*_over_tokens(record, record["loss_at_steps"]["train"]), color=color, alpha=0.4, linewidth=1)
        left.plot(*_over_tokens(record, record["loss_at_steps"]["validation"]), **style)
        left.axhline(record["unigram_entropy"], color=color, linestyle="--", linewidth=0.8)
        points = record.get("blimp_at_steps", [])
        if name in ledger.blimp:
            score, controls = blimp_scores(ledger.blimp[name])
            points = [*points, [record["steps"], score]]
            if controls:
                right.axhline(100 * statistics.fmean(controls), color=color, linestyle="--", linewidth=0.8)
        tokens, scores = _over_tokens(record, points)
        right.plot(tokens, 100 * scores, **style | {"markersize": 6})
    for figures in YARDSTICKS:
        right.axhline(figures.score, color="grey", linestyle=":", linewidth=0.8)
        right.annotate(figures.name, (0.01, figures.score), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    for axes, label in ((left, "masked-LM loss (nats); dots: validation"), (right, "BLiMP, mean of paradigms (%)")):
        axes.set(xscale="log", xlabel="million tokens seen", ylabel=label)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    left.set_xlim(left=min(line.get_xdata()[0] for line in left.lines if line.get_marker() == "o") / 2)
    left.legend(fontsize=8, title="model, parameters")
    figure.savefig(path, dpi=110)


def _over_tokens(record: PretrainingRecord, points: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """A curve over steps as (million tokens seen, values)."""
    logged = plots.columns([[0, 0], *record["tokens_at_steps"], [record["steps"], record["tokens_seen"]]])
    steps, values = plots.columns(points)
    return np.interp(steps, *logged) / 1e6, values


def main(argv: list[str] | None = None) -> None:
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="folders of finished runs to add first")
    parser.add_argument("--name", help="pretrained model of added fine-tunings, or another name for an added model")
    parser.add_argument("--note", default="", help="note on the added data, such as an unofficial split")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the ledger")
    parser.add_argument("--readme", type=Path, help="page with the two markers, for the table of the five best rows")
    args = parser.parse_args(argv)
    for source in args.add:
        print(f"added       {add(args.results, source, args.name, args.note)}")
    ledger = read(args.results)
    if not ledger.pretrained:
        raise InputError(f"{args.results} holds no */{RECORD_NAME}: add a finished run with --add")
    plot_curves(ledger, args.results / "curves.png")
    shown = sections(ledger, args.results)
    text_path = args.results / "README.md"
    text_path.write_text(as_markdown(shown), encoding="utf-8")
    if args.readme:
        args.readme.write_text(with_rows(read_text(args.readme), best_rows(ledger)), encoding="utf-8")
    print(f"written     {text_path}{f', {args.readme}' * bool(args.readme)}")


if __name__ == "__main__":
    exit_on_error(main)
