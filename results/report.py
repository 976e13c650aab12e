"""Report of the results: tables, plots and pages from the run records and proofs.yaml in this folder.

    python results/report.py                                        # or: make report
    python results/report.py --add runs/roberta_mini                # add a pretraining run as results/roberta_mini/
    python results/report.py --add runs/glue/rte --name roberta_mini    # add a model fine-tuned from it
    python results/report.py --add runs/blimp/bert-base        # add BLiMP scores (a run's own are added with it)
    python results/report.py --add runs/squad/v1.1 --name roberta_mini --note "3,468 of the 10,570 questions"

Writes results/curves.png, results/scores.png, results/README.md, results/index.html (a single file) and the section of
README.md between its two markers, all with the same text. proofs.yaml lists claims, each with the command that prints
its figure; the paper's figures come from the library.
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

NOT_RUN = "not run"
ADVICE = "add it with that version"
PROOFS_NAME = "proofs.yaml"
PROOF_HEAD = ("what was proved", "figure", "command")
SCORE_HEAD = ("task, metric", "model", "scored on", "pretrained", "random weights", "majority answer", "paper: large")
HEAD = ("task", "paper", "ours: median (spread, seeds)", "scored on", "majority answer", "preset", "tokens")
HEAD += ("hardware", "hours")
SOURCE_HEAD = ("model", "held-out text", "perplexity", "loss, nats", "unigram entropy")
SPEED_HEAD = ("model", "parameters", "tokens", "tokens/s", "hardware", "hours", "peak memory")
MARKS = ("<!-- results: made by `make report` -->", "<!-- end of results -->")
TITLE = (
    "# Results\n\nMade by `make report` from the run records in this folder and from\n"
    "[proofs.yaml](proofs.yaml), which says what each command of the first table printed;\n"
    "[index.html](index.html) is the same page."
)
_RUN_FIELDS = ("metrics", "steps", "tokens_seen", "tokens_per_second", "train_seconds", "score_at_steps", "degenerate")
_RUN_FIELDS += ("parameters", "versions", "commit", "hardware")


@dataclass
class Proof:
    """An entry of `proofs.yaml`: a claim, its figure, and the command that prints it."""

    claim: str
    figure: str
    command: str


class LedgerEntry(Summary):
    """A fine-tuning in the ledger (`results/`), reduced to its picked setting and the runs of that setting."""

    note: str  # on data other than an official split; may be empty
    runs: list[FinetuneRecord]  # with `_RUN_FIELDS` only


class Ledger(NamedTuple):
    """The folder's content: proofs, pretraining records and BLiMP scores by model, fine-tunings by (model, file
    stem)."""

    proofs: list[Proof]
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
    """A section of the report: paragraphs (with `code` and **bold**) above and below a table or an image."""

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
    return Ledger(read_proofs(folder / PROOFS_NAME), pretrained, tuned, scored)


def read_proofs(path: Path) -> list[Proof]:
    """The entries of proofs.yaml, none without the file. Raises `InputError` for an incomplete entry."""
    proofs = []
    for number, entry in enumerate(load_yaml(path)["proofs"] if path.is_file() else [], 1):
        where = f"{path}, entry {number}"
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
    """Rows of the table with the header `HEAD`: each pretrained model's held-out perplexity, then the paper's figures
    beside each fine-tuning, or "not run"."""
    lines = []
    for model, record in ledger.pretrained.items():
        args, blocks, metrics = record["resolved_args"], validation_blocks(record), record["metrics"]
        ours = f"{model}: {perplexity_with_error(metrics['eval_perplexity'], metrics.get('eval_loss_error'))} (1 seed)"
        shown = ("masked perplexity of its own held-out text", "none for this text", ours)
        spent = _spent([record], record["tokens_seen"])
        lines.append((*shown, f"validation, {blocks:,} blocks", "-", _preset(record), *spent))
    for row in paper_rows():
        tuned = [(model, entry) for (model, _), entry in ledger.tuned.items() if _has(entry, row)]
        for model, entry in tuned:
            args, runs = entry["resolved_args"], entry["runs"]
            ours = f"{_tuned_name(model, args)}: {_score(entry, row.metric)}"
            measured = (scored_on(entry, row.metric), baseline_cell(entry, row.metric))
            tokens = sum(record["tokens_seen"] for record in runs)
            lines.append((row.shown, row.paper, ours, *measured, _settings(args), *_spent(runs, tokens)))
        if not tuned:
            lines.append((row.shown, row.paper, *[NOT_RUN] * (len(HEAD) - 2)))
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


def score_table(ledger: Ledger) -> list[tuple[str, ...]]:
    """Rows of the table with the header `SCORE_HEAD`, one per task and model."""
    return [
        (
            pair.row.shown,
            pair.model,
            scored_on(pair.any, pair.row.metric),
            *(_score(side, pair.row.metric) if side else NOT_RUN for side in (pair.pretrained, pair.random)),
            baseline_cell(pair.any, pair.row.metric),
            pair.row.paper,
        )
        for pair in pairs(ledger)
    ]


def verdict(ledger: Ledger) -> list[str]:
    """A paragraph per pretrained model: its fine-tunings compared with the majority baseline and with random
    weights."""
    paragraphs = []
    for model, record in ledger.pretrained.items():
        tasks_by_verdict: dict[str, list[str]] = {}
        compared = [pair for pair in pairs(ledger) if pair.model == model and pair.pretrained and pair.random]
        tests = significance_tests(compared)
        for pair, test in zip(compared, tests, strict=True):
            kind, figures = judge(pair, test)
            tasks_by_verdict.setdefault(kind, []).append(f"{pair.row.name} {figures}")
        if not tasks_by_verdict:
            continue
        spent = _spent([record], record["tokens_seen"])
        size = f"{record['parameters'] / 1e6:.1f} M parameters, {spent[0]} tokens, {spent[2]} hours on {spent[1]}"
        gains = tasks_by_verdict.pop("Better than random weights", None)
        sentences = [f"**{model} ({size}) is better than random weights on {'; '.join(gains)}.**" if gains else
                     f"**{model} ({size}) is not shown to be better than random weights on any task.**"]  # fmt: skip
        if not gains and (least := min(test.least for test in tests)) > significance.LEVEL:
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


def significance_tests(compared: list[Pair]) -> list[TestResult]:
    """The test of each task of a model."""
    ps: dict[int, tuple[float, float, float | None]] = {}
    for number, pair in enumerate(compared):
        sides = scores_of(pair)
        if min(map(len, sides)) > 1 and all(math.isfinite(score) for side in sides for score in side.values()):
            ps[number] = significance.compare_seeds(*sides)
    corrected = significance.holm([p for p, *_ in ps.values()])
    results = {
        number: TestResult(p, corrected_p, min(1.0, least * len(ps)), welch)
        for (number, (p, least, welch)), corrected_p in zip(ps.items(), corrected, strict=True)
    }
    return [results.get(number, TestResult()) for number in range(len(compared))]


def scores_of(pair: Pair) -> tuple[dict[int, float], dict[int, float]]:
    """Scores by seed, with pretraining and with random weights."""
    pretrained, random = (
        {run["seed"]: _number(run["metrics"][pair.row.metric]) for run in side["runs"]} for side in pair[2:]
    )
    return pretrained, random


def judge(pair: Pair, test: TestResult) -> tuple[str, str]:
    """(verdict on pretrained against random weights, figures) of a task."""
    metric, (ours, random) = pair.row.metric, ([*scores.values()] for scores in scores_of(pair))
    baseline = (pair.any["baseline"] or {"metrics": {}})["metrics"].get(metric)
    medians = statistics.median(ours), statistics.median(random)
    against = " against ".join(percent(median) for median in medians)
    if min(len(ours), len(random)) == 1:
        return "A single seed, so no statement", against
    if baseline is not None and max(medians) <= baseline:
        return "Not above the majority answer", f"{against} ({percent(baseline)})"
    seeds = f"{len(ours)} seeds each" if len(ours) == len(random) else f"{len(ours)} and {len(random)} seeds"
    figures = f"{against}, {seeds}, two-sided permutation p {test.p:.2f}"
    gain = statistics.fmean(ours) - statistics.fmean(random)
    result = significance.verdict(gain, test.corrected, test.least, welch_p=test.welch)
    if result in ("better", "worse"):
        figures += f" ({test.corrected:.2f} with Holm's correction)" * (test.corrected != test.p)
        return "Better than random weights" if result == "better" else "Below random weights", figures
    if min(random) <= medians[0] <= max(random):
        return "Level with random weights", against
    return "Suggestive, no more", figures


def _number(score: float | None) -> float:
    """The score, or -inf for an undefined correlation."""
    return -math.inf if score is None else score


def _score(entry: LedgerEntry, metric: str) -> str:
    """Median, spread, number of seeds, and of degenerate ones."""
    scores = [_number(record["metrics"][metric]) for record in entry["runs"]]
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


def sections(ledger: Ledger) -> list[Section]:
    """The sections of the report; README.md has the first two."""
    proofs = [(proof.claim, proof.figure, f"`{proof.command}`") for proof in ledger.proofs]
    explained = (
        "Validation scores x 100, median over seeds; the best epoch is picked on the same examples. Majority answer: "
        "the score of predicting the most frequent label for every example."
    )
    notes = [f"{pair.row.name}: {pair.any['note']}" for pair in pairs(ledger) if pair.any["note"]]
    not_run = [line[0] for line in all_rows(ledger) if line[2] == NOT_RUN]
    below = [f"Data other than the official files: {'. '.join(dict.fromkeys(notes))}."] * bool(notes)
    below += [f"Not run: {'; '.join(not_run)}."] * bool(not_run)
    spent = "Hours and tokens are of all seeds. A degenerate seed predicts the same for every example."
    blimp = Section("BLiMP", [blimp_table.EXPLANATION], blimp_table.HEAD, blimp_table.rows(ledger.blimp))
    return [
        Section("What was proved", (), PROOF_HEAD, proofs),
        Section("What the models score", [*verdict(ledger), explained], SCORE_HEAD, score_table(ledger), below),
        *[blimp] * bool(ledger.blimp),
        Section("Every run beside the paper's tables", [spent], HEAD, all_rows(ledger)),
        Section("Pretraining: loss and perplexity over tokens", picture="curves.png"),
        Section("Held-out perplexity by source", (), SOURCE_HEAD, by_source(ledger)),
        Section("Pretraining: hardware, speed, memory", (), SPEED_HEAD, speed(ledger)),
        Section("Fine-tuning: validation score over steps", picture="scores.png"),
    ]


def as_markdown(shown: Sequence[Section], level: int) -> str:
    """Sections as Markdown, with headings of `level`."""
    blocks = []
    for section in shown:
        picture = f"![{section.title}]({section.picture})"
        what = picture if section.picture else tables.markdown_table(section.head, section.lines)
        above, below = (map(tables.plain, texts) for texts in (section.above, section.below))
        blocks += [f"{'#' * level} {section.title}", *above, what, *below]
    return "\n\n".join(blocks)


def with_section(readme: str, section: str) -> str:
    """The README with `section` between its markers. Raises `InputError` without markers."""
    pattern = re.compile(f"{re.escape(MARKS[0])}.*?{re.escape(MARKS[1])}", re.S)
    if not pattern.search(readme):
        raise InputError(f"README.md has no section between {MARKS[0]} and {MARKS[1]}")
    return pattern.sub(lambda _: f"{MARKS[0]}\n{section}\n{MARKS[1]}", readme)


def plot_curves(records: dict[str, PretrainingRecord], path: str | Path) -> None:
    """PNG of loss and perplexity over tokens seen, of pretraining runs by name, with the unigram entropy (dashed) and,
    if measured, BLiMP."""
    from matplotlib.ticker import ScalarFormatter

    panels = 2 + any(record.get("blimp_at_steps") for record in records.values())
    figure, (left, right, *others) = plots.subplots(1, panels, 5.5 * panels, 4.5)
    for number, (name, record) in enumerate(records.items()):
        color = f"C{number % 10}"
        logged = plots.columns([[0, 0], *record["tokens_at_steps"], [record["steps"], record["tokens_seen"]]])
        steps, losses = plots.columns(record["loss_at_steps"]["train"])
        left.plot(np.interp(steps, *logged) / 1e6, losses, color=color, alpha=0.4, linewidth=1)
        steps, losses = plots.columns(record["loss_at_steps"]["validation"])
        tokens = np.interp(steps, *logged) / 1e6
        label = f"{name}, {record['parameters'] / 1e6:.1f} M parameters"
        left.plot(tokens, losses, color=color, marker="o", markersize=3, label=label)
        left.axhline(record["unigram_entropy"], color=color, linestyle="--", linewidth=0.8)
        perplexities = [math.nan if loss is None else math.exp(loss) for loss in losses]
        right.plot(tokens, perplexities, color=color, marker="o", markersize=3, label=label)
        if points := record.get("blimp_at_steps"):
            steps, scores = plots.columns(points)
            tokens = np.interp(steps, *logged) / 1e6
            others[0].plot(tokens, plots.times_100(scores), color=color, marker="o", markersize=3, label=label)
            others[0].set_ylabel("BLiMP, mean over paradigms (%)")
    left.set_ylabel("masked-LM loss (nats); dots: validation")
    right.set_ylabel("validation perplexity")
    right.set_yscale("log")
    right.yaxis.set(major_formatter=ScalarFormatter(), minor_formatter=ScalarFormatter())
    for axes in (left, right, *others):
        axes.set_xlabel("million tokens seen")
        axes.grid(alpha=0.3, which="both")
    left.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def plot_scores(entries: list[tuple[str, LedgerEntry]], path: str | Path) -> None:
    """PNG of validation scores x 100 over the share of steps, of (name, fine-tuning): a panel per task, a line per
    run."""
    tasks = list(dict.fromkeys(entry["task"] for _, entry in entries))
    rows = -(-len(tasks) // 3) or 1
    figure, grid = plots.subplots(rows, 3, 11, 3.6 * rows, squeeze=False)
    for axes in grid.flat[len(tasks) :]:
        axes.axis("off")
    for axes, task in zip(grid.flat, tasks, strict=False):
        of_task = [(name, entry) for name, entry in entries if entry["task"] == task]
        for number, (name, entry) in enumerate(of_task):
            style = {"color": f"C{number}", "linestyle": ("-", "--")[number % 2], "marker": "o", "markersize": 3}
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
    """HTML of a paragraph or cell with `code` and **bold**."""
    text = re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"\*\*(.*?)\*\*", r"<strong>\1</strong>", text)


def html_table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    """An HTML table; on a narrow screen, its rows become lists."""
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    rows = []
    for line in lines:
        columns = "".join(
            f'<td data-name="{html.escape(name)}"{" class=none" * (cell == NOT_RUN)}>{html_text(cell)}</td>'
            for name, cell in zip(head, line, strict=True)
        )
        rows.append(f"<tr{' class=none' * (NOT_RUN in line[2:3])}>{columns}</tr>")
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
        else:
            blocks.append(html_table(section.head, section.lines))
        blocks += [f"<p>{html_text(text)}</p>" for text in section.below]
    template = Template((Path(__file__).parent / "page_template.html").read_text(encoding="utf-8"))
    return template.substitute(sections="\n".join(blocks))


def main(argv: list[str] | None = None) -> None:
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="folders of finished runs to add first")
    parser.add_argument("--name", help="pretrained model of added fine-tunings, or another name for an added model")
    parser.add_argument("--note", default="", help="note on the added data, such as an unofficial split")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the ledger")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="page with the two markers")
    args = parser.parse_args(argv)
    readme = read_text(args.readme)
    for source in args.add:
        print(f"added       {add(args.results, source, args.name, args.note)}")
    ledger = read(args.results)
    if not ledger.pretrained:
        raise InputError(f"{args.results} holds no */{RECORD_NAME}: add a finished run with --add")
    plot_curves(ledger.pretrained, args.results / "curves.png")
    named = [(_tuned_name(model, entry["resolved_args"]), entry) for (model, _), entry in ledger.tuned.items()]
    plot_scores(named, args.results / "scores.png")
    shown = sections(ledger)
    page_path, text_path = args.results / "index.html", args.results / "README.md"
    page_path.write_text(page(shown, args.results), encoding="utf-8")
    text_path.write_text(f"{TITLE}\n\n{as_markdown(shown, 2)}\n", encoding="utf-8")
    args.readme.write_text(with_section(readme, as_markdown(shown[:2], 3)), encoding="utf-8")
    lines = all_rows(ledger)
    done = sum(line[2] != NOT_RUN for line in lines)
    print(f"written     {page_path}, {text_path}, {args.readme}: {done} of {len(lines)} rows run")


if __name__ == "__main__":
    exit_on_error(main)
