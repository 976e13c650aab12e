"""Report of the results: tables, plots and pages from the run records and proofs.yaml in this folder.

    python results/report.py                                        # or: make report
    python results/report.py --add runs/roberta_mini                # add a pretraining run as results/roberta_mini/
    python results/report.py --add runs/glue/rte --name roberta_mini    # add a model fine-tuned from it
    python results/report.py --add runs/blimp/bert-base        # add BLiMP scores (a run's own are added with it)
    python results/report.py --add runs/squad/v1.1 --name roberta_mini --note "3,468 of the 10,570 questions"

    python results/report.py --readme README.md                # also the five best rows, between the markers of a page

Writes results/curves.png, results/scores.png, results/README.md and results/index.html (a single file with the same
text). proofs.yaml lists claims and the orderings of the papers' tables, each with the command that prints its figure;
the paper's figures come from the library.
"""

import base64
import html
import math
import re
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
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
    decimal,
    percent,
    picked_setting,
    read_record,
    validation_blocks,
)
from roberta_recipe.settings import RecipeParser, check_mapping, load_yaml
from roberta_recipe.standard_error import perplexity_with_error, with_error
from roberta_recipe.tasks import glue, race, squad
from tools import significance

ADVICE = "add it with that version"
PROOFS_NAME = "proofs.yaml"
PROOF_HEAD = ("what was proved", "figure", "command")
ORDERING_HEAD = ("statement of the paper", "at our size", "command")
PAPER = "RoBERTa-large (base)"
SCORE_HEAD = ("task, metric", "model", "pretrained", "random weights", "majority answer", PAPER, "scored on", "p")
KNOWN_HEAD = ("task, metric", "model", "score", "majority answer", PAPER, "scored on")
BEST_HEAD = ("model", "task, metric", "score", "random weights, or majority answer", "published")
HEAD = ("task", PAPER, "ours: median (spread, seeds)", "scored on", "majority answer", "preset", "tokens")
HEAD += ("hardware", "hours")
SOURCE_HEAD = ("model", "held-out text", "perplexity", "loss, nats", "unigram entropy")
SPEED_HEAD = ("model", "parameters", "tokens", "tokens/s", "hardware", "hours", "peak memory")
YARDSTICKS = blimp_table.PUBLISHED[:3]  # human, GPT-2, LSTM
MARKS = ("<!-- results: made by make report -->", "<!-- end of results -->")
MADE_BY = (
    "Made by `make report` from the run records in this folder and from [proofs.yaml](proofs.yaml), the output of each "
    "command of the tables of orderings and proofs. [Log of all runs](experiments.md)."
)
SPEEDRUN_NAME = "speedrun.md"
RANDOM = ", random weights"  # of a model's name
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

    proofs: list[Proof]
    orderings: list[Proof]
    pretrained: dict[str, PretrainingRecord]
    tuned: dict[tuple[str, str], LedgerEntry]
    blimp: dict[str, BlimpRecord]


class Row(NamedTuple):
    """A figure of the paper: the task and metric in `summary.json`, the title, and the figure."""

    task: str
    metric: str
    shown: str
    paper: str

    @property
    def name(self) -> str:
        """The title without the metric."""
        return self.shown.partition(",")[0]


class Pair(NamedTuple):
    """A fine-tuning from a pretrained model and from random weights, by a metric; one may be None."""

    row: Row
    model: str
    pretrained: LedgerEntry | None
    random: LedgerEntry | None

    @property
    def any(self) -> LedgerEntry:
        return self.pretrained or self.random


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


def read_proofs(path: Path, key: str) -> list[Proof]:
    """The entries of a list in proofs.yaml, none without the file. Raises `InputError` for an incomplete entry."""
    proofs = []
    for number, entry in enumerate(load_yaml(path).get(key, ()) if path.is_file() else (), 1):
        where = f"{path}, entry {number} of {key}"
        values = check_mapping(entry, [Proof], where)
        if missing := [name for name in ("claim", "figure", "command") if name not in values]:
            raise InputError(f"{where} has no {missing[0]!r}: each entry has a claim, a figure and a command")
        proofs.append(Proof(**values))
    return proofs


def add(folder: Path, source: Path, name: str | None, note: str = "") -> Path:
    """Copy a run's record, its BLiMP scores or both into the ledger, or a fine-tuning's reduced summary with a `note`
    on its data; returns the written path. Raises `InputError` without a finished run in `source`."""
    if (source / SUMMARY_NAME).is_file():
        if not name:
            raise InputError(f"{source} is a fine-tuning: name its pretrained model with --name")
        entry = reduced_entry(source, note)
        stem = "_".join([entry["task"].replace(" ", "_"), *_variants(entry["resolved_args"])])
        target = folder / _file_name("name", name) / f"{_file_name('task', stem)}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        durable.write_json(target, entry)
        return target
    target = folder / _file_name("name", name or source.name)
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
    target.mkdir(parents=True, exist_ok=True)
    for file, values in records.items():
        durable.write_json(target / file, values)
    if RECORD_NAME in records:
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
    resolved = summary["resolved_args"]
    args = {name: resolved[name] for name in summary["shown_args"] if resolved.get(name) is not None}
    args |= {name: scores[name] for name in ("learning_rate", "global_batch_size")}
    scores |= {"best_run": Path(scores["best_run"]).name}
    names = ("task", "metric", "dataset", "scored_examples", "baseline", "shown_args", "duplicates")
    entry = {name: summary.get(name) for name in names} | {"note": note}
    return {**entry, "settings": [scores], "picked": 0, "resolved_args": args, "runs": runs}


def paper_rows() -> list[Row]:
    """The figures of the paper's tables 5, 6 and 7, in order."""
    large, base, rows = glue.PAPER["large"], glue.PAPER["base"], []
    for name, task in glue.TASKS.items():
        figure = f"{large[name]} (base {base[name]})" if name in base else f"{large[name]}"
        rows.append(Row(name, task.metric, f"GLUE {name}, {task.metric}", figure))
    for version, figures in squad.PAPER.items():
        rows += [Row(f"squad {version}", m, f"SQuAD {version}, {m}", str(score)) for m, score in figures.items()]
    rows += [Row("race", m, f"RACE, {m}", f"{score} (test set)") for m, score in race.PAPER.items()]
    return rows


def all_rows(ledger: Ledger) -> list[tuple[str, ...]]:
    """Rows of the table with the header `HEAD`: each pretrained model's held-out perplexity, then each fine-tuning
    beside the paper's figures."""
    lines = []
    for model, record in ledger.pretrained.items():
        args, blocks, metrics = record["resolved_args"], validation_blocks(record), record["metrics"]
        ours = f"{model}: {perplexity_with_error(metrics['eval_perplexity'], metrics.get('eval_loss_error'))} (1 seed)"
        shown = ("masked perplexity of its own held-out text", "none for this text", ours)
        spent = _spent([record], record["tokens_seen"])
        lines.append((*shown, f"validation, {blocks:,} blocks", "-", _preset(record), *spent))
    for row in paper_rows():
        for model, entry in [(model, entry) for (model, _), entry in ledger.tuned.items() if _has(entry, row)]:
            args, runs = entry["resolved_args"], entry["runs"]
            ours = f"{_tuned_name(model, args)}: {_score(entry, row.metric)}"
            measured = (scored_on(entry, row.metric), baseline_cell(entry, row.metric))
            tokens = sum(record["tokens_seen"] for record in runs)
            lines.append((row.shown, row.paper, ours, *measured, _settings(args), *_spent(runs, tokens)))
    return lines


def pairs(ledger: Ledger) -> list[Pair]:
    """The fine-tunings by their main metric, with and without pretraining."""
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
        sides_by_row.setdefault((rows.index(row), name), {})[bool(args.get("random_weights"))] = entry
    ordered = sorted(sides_by_row.items(), key=lambda item: item[0][0])  # stable
    return [Pair(rows[number], name, sides.get(False), sides.get(True)) for (number, name), sides in ordered]


def score_tables(ledger: Ledger) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Rows of the tables with the headers `SCORE_HEAD` and `KNOWN_HEAD`, one per task and model."""
    ours, known = [], []
    for pair, test in tested(ledger):
        metric = pair.row.metric
        scores = [_score(side, metric) if side else "-" for side in (pair.pretrained, pair.random)]
        majority, size = baseline_cell(pair.any, metric), scored_on(pair.any, metric)
        if pair.random or _base(pair) in ledger.pretrained:
            p = f"{test.p:.3f}{_holm(test)}" if test.least < 1 else "-"
            ours.append((pair.row.shown, pair.model, *scores, majority, pair.row.paper, size, p))
        else:
            known.append((pair.row.shown, pair.model, scores[0], majority, pair.row.paper, size))
    return ours, known


def best_rows(ledger: Ledger) -> list[tuple[str, ...]]:
    """At most five rows with the header `BEST_HEAD`: models of this repository first, then by the lead over random
    weights or the majority answer; none without such a lead."""
    rows = []
    for model, record in ledger.blimp.items():
        score, controls = blimp_scores(record)
        _, _, shown, _, control, _ = blimp_table.rows({model: record})[0]
        if controls and score > max(controls):
            published = ", ".join(f"{figure.name} {figure.score}" for figure in YARDSTICKS)
            lead = score - statistics.fmean(controls)
            rows.append((model in ledger.pretrained, lead, (model, "BLiMP", shown, control, published)))
    for pair, test in tested(ledger):
        metric, ours = pair.row.metric, _base(pair) in ledger.pretrained
        if pair.pretrained and pair.random and judge(pair, test)[0] == BETTER:
            control, shown = median(pair.random, metric), _score(pair.random, metric)
        elif pair.pretrained and not ours and _majority(pair) is not None:
            control, shown = _majority(pair), baseline_cell(pair.pretrained, metric)
        else:
            continue
        line = (pair.model, pair.row.shown, _score(pair.pretrained, metric), shown, f"RoBERTa-large {pair.row.paper}")
        rows.append((ours, median(pair.pretrained, metric) - control, line))
    return [line for *_, line in sorted((row for row in rows if row[1] > 0), reverse=True)[:5]]


def verdict(ledger: Ledger) -> list[str]:
    """A paragraph per pretrained model: perplexity, BLiMP, and its fine-tunings compared with the majority answer and
    with random weights."""
    paragraphs = []
    for model, record in ledger.pretrained.items():
        spent, metrics = _spent([record], record["tokens_seen"]), record["metrics"]
        perplexity = perplexity_with_error(metrics["eval_perplexity"], metrics.get("eval_loss_error"))
        text = f"**{model}** ({record['parameters'] / 1e6:.1f} M parameters, {spent[0]} tokens, {spent[2]} hours on "
        text += f"{spent[1]}): masked perplexity {perplexity} on its own held-out text"
        if model in ledger.blimp:
            score, controls = blimp_scores(ledger.blimp[model])
            text += f"; BLiMP {percent(score)}"
            text += f" (random weights {percent(statistics.fmean(controls))})" * bool(controls)
        tasks_by_verdict: dict[str, list[str]] = {}
        compared = [
            (pair, test) for pair, test in tested(ledger) if pair.model == model and pair.pretrained and pair.random
        ]
        for pair, test in compared:
            kind, figures = judge(pair, test)
            tasks_by_verdict.setdefault(kind, []).append(f"{pair.row.name} {figures}")
        gains = tasks_by_verdict.pop(BETTER, None)
        sentences = [f"{text}.", *[f"**{BETTER} on {'; '.join(gains or ())}.**"] * bool(gains)]
        if compared and not gains:
            sentences.append("Not shown to be better than random weights on any task.")
            if (least := min(test.least for _, test in compared)) > significance.LEVEL:
                sentences.append(
                    f"Too few seeds to show it: the least possible p, corrected for the tasks, is {least:.2f}."
                )
        sentences += [f"{kind}: {'; '.join(tasks)}." for kind, tasks in tasks_by_verdict.items()]
        paragraphs.append(" ".join(sentences))
    return paragraphs


class TestResult(NamedTuple):
    """Significance test of a task: p, p corrected for the model's tested tasks, and the least possible corrected p; 1
    for a single seed and for non-finite scores."""

    p: float = 1.0
    corrected: float = 1.0
    least: float = 1.0
    welch: float | None = None  # Welch's p for unequal noise


def tested(ledger: Ledger) -> list[tuple[Pair, TestResult]]:
    """The pairs, each with its test."""
    shown = pairs(ledger)
    results = [TestResult()] * len(shown)
    for model in {pair.model for pair in shown}:
        ps: dict[int, tuple[float, float, float | None]] = {}
        for number, pair in enumerate(shown):
            if pair.model == model and pair.pretrained and pair.random:
                sides = [_scores(side, pair.row.metric) for side in (pair.pretrained, pair.random)]
                if min(map(len, sides)) > 1 and all(math.isfinite(score) for side in sides for score in side.values()):
                    ps[number] = significance.compare_seeds(*sides)
        corrected = significance.holm([p for p, *_ in ps.values()])
        for (number, (p, least, welch)), corrected_p in zip(ps.items(), corrected, strict=True):
            results[number] = TestResult(p, corrected_p, min(1.0, least * len(ps)), welch)
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
    result = significance.verdict(gain, test.corrected, test.least, welch_p=test.welch)
    if result in ("better", "worse"):
        return BETTER if result == "better" else "Below random weights", figures + _holm(test)
    if min(random) <= medians[0] <= max(random):
        return "Level with random weights", against
    return "Suggestive, no more", figures


def blimp_scores(record: BlimpRecord) -> tuple[float, list[float]]:
    """The mean of paradigms by the first method, and those of random weights."""
    method, scores = next(iter(record["scores"].items()))
    return scores["mean_of_paradigms"], [control[method]["mean_of_paradigms"] for control in record["random_weights"]]


def median(entry: LedgerEntry, metric: str) -> float:
    return statistics.median(_scores(entry, metric).values())


def _holm(test: TestResult) -> str:
    return f" (Holm {test.corrected:.3f})" * (test.corrected != test.p)


def _base(pair: Pair) -> str:
    """The model's name without distinguishing flags."""
    return pair.model.partition(",")[0]


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


def _preset(record: PretrainingRecord) -> str:
    """Batch (sequences x tokens), steps taken, learning rate."""
    args = record["resolved_args"]
    batch = f"{args.get('global_batch_size')} x {args['max_seq_length']}"
    return f"{batch}, {record['steps']:,} steps at {args['learning_rate']:g}"


def _settings(args: dict[str, Any]) -> str:
    """The main hyperparameters of a fine-tuning."""
    steps = f"{args['max_steps']:,} steps" if args.get("max_steps", -1) > 0 else f"{args['num_train_epochs']:g} epochs"
    shown = [f"{args['learning_rate']:g}", f"batch {args['global_batch_size']}", steps]
    shown.append(f"length {args['max_seq_length']}")
    if args.get("max_train_samples"):
        shown.append(f"{args['max_train_samples']:,} examples")
    return ", ".join(shown)


def _spent(records: Sequence[RunRecord], tokens: int) -> tuple[str, str, str]:
    """(tokens, hardware, hours) of runs on the same machine."""
    hours = sum(record["train_seconds"] for record in records) / 3600
    return f"{tokens / 1e6:,.1f} M", device_name(records[0]["hardware"]), f"{hours:.2f}"


def by_source(ledger: Ledger) -> list[tuple[str, ...]]:
    """(model, source, perplexity, loss, unigram entropy) of pretraining runs with several sources."""
    return [
        (
            *(model, name, perplexity_with_error(source["perplexity"], source.get("loss_error"))),
            *(with_error(source["loss"], source.get("loss_error")), decimal(source["unigram_entropy"])),
        )
        for model, record in ledger.pretrained.items()
        for name, source in record["metrics_by_source"].items()
    ]


def speed(ledger: Ledger) -> list[tuple[str, ...]]:
    """(model, parameters, tokens, tokens/s, hardware, hours, peak memory) of pretraining runs."""
    lines = []
    for model, record in ledger.pretrained.items():
        tokens, where, hours = _spent([record], record["tokens_seen"])
        rate, memory = f"{record['tokens_per_second']:,}", f"{record['peak_memory_bytes'] / 1e9:.1f} GB"
        lines.append((model, f"{record['parameters'] / 1e6:.1f} M", tokens, rate, where, hours, memory))
    return lines


def sections(ledger: Ledger, folder: Path) -> list[Section]:
    """The sections of the report, the verdict first."""
    proofs, orderings = (
        [(proof.claim, proof.figure, f"`{proof.command}`") for proof in listed]
        for listed in (ledger.proofs, ledger.orderings)
    )
    explained = (
        "Validation scores x 100: median (range, seeds); the best epoch is picked on the same examples. Majority "
        "answer: the score of predicting the most frequent label for every example. p: two-sided permutation test."
    )
    protocol = "Public encoders, fine-tuned by this repository's scripts and presets: a check of the protocol."
    notes = [f"{pair.row.name}: {pair.any['note']}" for pair in pairs(ledger) if pair.any["note"]]
    run = {line[0] for line in all_rows(ledger)}
    not_run = [row.shown for row in paper_rows() if row.shown not in run]
    below = [f"Data other than the official files: {'. '.join(dict.fromkeys(notes))}."] * bool(notes)
    below += [f"Not run: {'; '.join(not_run)}."] * bool(not_run)
    commands = " ".join(proof.command for proof in ledger.orderings)
    others = [path.stem for path in sorted((ROOT / "presets/tables").glob("*.yaml")) if path.stem != "scales"]
    others = [name for name in others if f"TABLE={name}" not in commands]
    spent = "Hours and tokens are of all seeds. A degenerate seed predicts the same for every example."
    curves = (
        "Left: training and validation loss, unigram entropy (dashed). Right: BLiMP at the end and, where measured, on "
        "the way; random weights (dashed), published scores (dotted)."
    )
    blimp = Section("BLiMP", [blimp_table.EXPLANATION], blimp_table.HEAD, blimp_table.rows(ledger.blimp))
    ours, known = score_tables(ledger)
    tables_of_papers = Section(
        "Orderings of the papers' tables",
        ["Small models, several seeds; bits are per masked word, ± is the standard error over seeds."],
        ORDERING_HEAD,
        orderings,
        [f"Not run: the tables {', '.join(others)}."] * bool(others),
    )
    return [
        Section("Verdict", verdict(ledger)),
        Section("What the models score", [explained], SCORE_HEAD, ours, below),
        Section("Loss and BLiMP over tokens", [curves], picture="curves.png"),
        *[blimp] * bool(ledger.blimp),
        *[Section("Known encoders by the same protocol", [protocol], KNOWN_HEAD, known)] * bool(known),
        *[tables_of_papers] * bool(orderings),
        *[Section("Speedrun", [f"[{SPEEDRUN_NAME}]({SPEEDRUN_NAME})"])] * (folder / SPEEDRUN_NAME).is_file(),
        *[Section("What was proved", (), PROOF_HEAD, proofs)] * bool(proofs),
        Section("Every run, with settings and cost", [spent], HEAD, all_rows(ledger)),
        Section("Held-out perplexity by source", (), SOURCE_HEAD, by_source(ledger)),
        Section("Pretraining: hardware, speed, memory", (), SPEED_HEAD, speed(ledger)),
        Section("Fine-tuning: validation score over steps", (), picture="scores.png", below=[MADE_BY]),
    ]


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
        color, dashed = f"C{number % 10}", {"color": f"C{number % 10}", "linestyle": "--", "linewidth": 0.8}
        style = {"color": color, "marker": "o", "markersize": 3, "label": f"{name}, {record['parameters'] / 1e6:.1f} M"}
        left.plot(*_over_tokens(record, record["loss_at_steps"]["train"]), color=color, alpha=0.4, linewidth=1)
        left.plot(*_over_tokens(record, record["loss_at_steps"]["validation"]), **style)
        left.axhline(record["unigram_entropy"], **dashed)
        points = record.get("blimp_at_steps", [])
        if name in ledger.blimp:
            score, controls = blimp_scores(ledger.blimp[name])
            points = [*points, [record["steps"], score]]
            for control in [statistics.fmean(controls)] * bool(controls):
                right.axhline(100 * control, **dashed)
        tokens, scores = _over_tokens(record, points)
        right.plot(tokens, plots.times_100(scores), **style | {"markersize": 6})
    for figures in YARDSTICKS:
        right.axhline(figures.score, color="grey", linestyle=":", linewidth=0.8)
        right.annotate(figures.name, (0.01, figures.score), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    left.set_ylabel("masked-LM loss (nats); dots: validation")
    right.set_ylabel("BLiMP, mean of paradigms (%)")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="million tokens seen")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    left.set_xlim(left=min(line.get_xdata()[0] for line in left.lines if line.get_marker() == "o") / 2)
    left.legend(fontsize=8, title="model, parameters")
    figure.savefig(path, dpi=110)


def _over_tokens(record: PretrainingRecord, points: list[list[float]]) -> tuple[list[float], list[float]]:
    """A curve over steps as (million tokens seen, values)."""
    logged = plots.columns([[0, 0], *record["tokens_at_steps"], [record["steps"], record["tokens_seen"]]])
    steps, values = plots.columns(points)
    return [tokens / 1e6 for tokens in np.interp(steps, *logged)], values


def plot_scores(entries: list[tuple[str, LedgerEntry]], path: str | Path) -> None:
    """PNG of validation scores x 100 over the share of steps, of (name, fine-tuning): a panel per task, a line per
    run."""
    tasks = list(dict.fromkeys(entry["task"] for _, entry in entries))
    rows = -(-len(tasks) // 3) or 1
    figure, grid = plots.subplots(rows, 3, 11, 3.6 * rows, squeeze=False)
    models = list(dict.fromkeys(name.replace(RANDOM, "") for name, _ in entries))
    for axes in grid.flat[len(tasks) :]:
        axes.axis("off")
    for axes, task in zip(grid.flat, tasks, strict=False):
        of_task = [(name, entry) for name, entry in entries if entry["task"] == task]
        for name, entry in of_task:
            color, line = f"C{models.index(name.replace(RANDOM, '')) % 10}", "--" if RANDOM in name else "-"
            style = {"color": color, "linestyle": line, "marker": "o", "markersize": 3}
            for record in entry["runs"]:
                steps, scores = plots.columns(record["score_at_steps"])
                axes.plot([step / record["steps"] for step in steps], plots.times_100(scores), **style)
            axes.plot([], [], label=name, **style)
        axes.set_title(f"{task}, {of_task[0][1]['metric']}", fontsize=10)
        axes.set_xlabel("share of the run's steps", fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16))  # below the axes, never on the lines
    figure.savefig(path, dpi=110)


def html_text(text: str) -> str:
    """HTML of a paragraph or cell with `code`, **bold** and links."""
    text = re.sub("`([^`]*)`", lambda code: re.sub(r"\S+", r"<code>\g<0></code>", code[1]), html.escape(text))
    text = re.sub(r"\[([^]]*)\]\(([^)]*)\)", r'<a href="\2">\1</a>', text)
    return re.sub(r"\*\*(.*?)\*\*", r"<strong>\1</strong>", text)


def html_table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    """An HTML table; on a narrow screen, its rows become cards without the empty cells."""
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    rows = []
    for line in lines:
        columns = "".join(
            f'<td data-name="{html.escape(name)}"{" class=none" * (cell == "-")}><span>{html_text(cell)}</span></td>'
            for name, cell in zip(head, line, strict=True)
        )
        rows.append(f"<tr>{columns}</tr>")
    body = f"<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="wide"><table>{body}</table></div>'


def page(shown: Sequence[Section], folder: Path) -> str:
    """The HTML page, with the images of `folder` embedded."""
    blocks = []
    for section in shown:
        blocks += [f"<h2>{html.escape(section.title)}</h2>", *(f"<p>{html_text(text)}</p>" for text in section.above)]
        if section.picture:
            data = base64.b64encode((folder / section.picture).read_bytes()).decode()
            image = f'<img alt="{html.escape(section.title)}" src="data:image/png;base64,{data}">'
            blocks.append(f'<div class="wide">{image}</div>')
        blocks += [html_table(section.head, section.lines)] * bool(section.head)
        blocks += [f"<p>{html_text(text)}</p>" for text in section.below]
    template = Template((Path(__file__).parent / "page_template.html").read_text(encoding="utf-8"))
    return template.substitute(sections="\n".join(blocks))


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
    named = [(_tuned_name(model, entry["resolved_args"]), entry) for (model, _), entry in ledger.tuned.items()]
    plot_scores(named, args.results / "scores.png")
    shown = sections(ledger, args.results)
    page_path, text_path = args.results / "index.html", args.results / "README.md"
    page_path.write_text(page(shown, args.results), encoding="utf-8")
    text_path.write_text(as_markdown(shown), encoding="utf-8")
    print(f"written     {page_path}, {text_path}: {len(all_rows(ledger))} rows")
    if args.readme:
        args.readme.write_text(with_rows(read_text(args.readme), best_rows(ledger)), encoding="utf-8")
        print(f"written     {args.readme}: the table between its markers")


if __name__ == "__main__":
    exit_on_error(main)
