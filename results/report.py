"""The ledger's tables, curves and page, made from the run records in this folder and nothing else.

    python results/report.py                                        # or: make report
    python results/report.py --add runs/roberta_mini                # a pretraining run, as results/roberta_mini/
    python results/report.py --add runs/glue/rte --name roberta_mini    # what was fine-tuned from it

It writes results/curves.png, results/scores.png, results/index.html (a single file, opens from disk) and the section of
README.md between its two marks. Figures of the paper are those that the fine-tuning scripts print.
"""

import base64
import html
import math
import re
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from roberta_recipe import durable
from roberta_recipe.args import RecipeParser
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.input_files import ROOT
from roberta_recipe.publishing import plots
from roberta_recipe.publishing.card import markdown_table
from roberta_recipe.publishing.plots import LedgerEntry
from roberta_recipe.record import (
    CURVE_NAME,
    RECORD_NAME,
    SUMMARY_NAME,
    PretrainingRecord,
    RunRecord,
    decimal,
    percent,
    picked_setting,
    read_record,
)
from roberta_recipe.tasks import glue, race, squad

NOT_RUN = "not run"
ADVICE = "add it with that version"
HEAD = ("task", "paper", "ours: median (spread, n)", "preset", "tokens", "hardware", "hours")
MARKS = ("<!-- results: made by `make report` -->", "<!-- end of results -->")
_KEPT = ("metrics", "steps", "tokens_seen", "tokens_per_second", "train_seconds", "score_at_steps", "degenerate")
_KEPT += ("parameters", "versions", "commit", "hardware")


class Ledger(NamedTuple):
    """What the folder holds: pretraining records by model, and fine-tunings by (model, file's name)."""

    pretrained: dict[str, PretrainingRecord]
    tuned: dict[tuple[str, str], LedgerEntry]


class Row(NamedTuple):
    """What the paper reports: a task of `summary.json`, one of its metrics, and its figures."""

    task: str
    metric: str
    shown: str
    paper: str


def read(folder: Path) -> Ledger:
    """All records of the ledger, by name."""
    pretrained = {path.parent.name: durable.read_json(path) for path in sorted(folder.glob(f"*/{RECORD_NAME}"))}
    others = sorted(path for path in folder.glob("*/*.json") if path.name != RECORD_NAME)
    return Ledger(pretrained, {(path.parent.name, path.stem): durable.read_json(path) for path in others})


def add(folder: Path, source: Path, name: str | None) -> Path:
    """Copy a finished run's record into the ledger, or the summary and the shortened records of a fine-tuning; returns
    the path that was written. Raises `InputError` where `source` is no finished run."""
    if (source / SUMMARY_NAME).is_file():
        if not name:
            raise InputError(f"{source} is a fine-tuning: say with --name of which model")
        kept = shortened(source)
        stem = "_".join([kept["task"].replace(" ", "_"), *_variants(kept["resolved_args"])])
        target = folder / name / f"{stem}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        durable.write_json(target, kept)
        return target
    if not (source / RECORD_NAME).is_file():
        raise InputError(f"{source} has neither {RECORD_NAME} nor {SUMMARY_NAME}: name a finished run's folder")
    if "task" in read_record(source / RECORD_NAME, ("shown_args",), ADVICE):
        raise InputError(
            f"{source} is a single run of a fine-tuning: name the folder of all its seeds, {source.parent}"
        )
    target = folder / (name or source.name)
    target.mkdir(parents=True, exist_ok=True)
    for file in (RECORD_NAME, CURVE_NAME):
        shutil.copyfile(source / file, target / file)
    return target


def shortened(source: Path) -> LedgerEntry:
    """What the ledger keeps of a fine-tuning: the picked setting, its runs and the flags that are shown; no folders of
    the machine."""
    summary = read_record(source / SUMMARY_NAME, ("settings", "shown_args"), ADVICE)
    scores = picked_setting(summary)
    runs = []
    for seed in scores["seeds"]:
        folder = f"lr{scores['learning_rate']:g}-batch{scores['global_batch_size']}-seed{seed}"
        record = read_record(source / folder / RECORD_NAME, ("metrics", "shown_args"), ADVICE)
        runs.append({"seed": int(seed), **{name: record.get(name) for name in _KEPT}})
    resolved = summary["resolved_args"]
    args = {name: resolved[name] for name in summary["shown_args"] if resolved.get(name) is not None}
    args |= {name: scores[name] for name in ("learning_rate", "global_batch_size")}
    scores |= {"best_run": Path(scores["best_run"]).name}
    kept = {name: summary.get(name) for name in ("task", "metric", "dataset", "shown_args", "duplicates")}
    return {**kept, "settings": [scores], "picked": 0, "resolved_args": args, "runs": runs}


def paper_rows() -> list[Row]:
    """Tables 5, 6 and 7, in the paper's order."""
    large, base, rows = glue.PAPER["large"], glue.PAPER["base"], []
    for name, task in glue.TASKS.items():
        figure = f"{large[name]} (base {base[name]})" if name in base else f"{large[name]}"
        rows.append(Row(name, task.metric, f"GLUE {name}, {task.metric}", figure))
    for version, figures in squad.PAPER.items():
        rows += [Row(f"squad {version}", m, f"SQuAD {version}, {m}", str(score)) for m, score in figures.items()]
    rows += [Row("race", m, f"RACE, {m}", f"{score} (test set)") for m, score in race.PAPER.items()]
    return rows


def table(ledger: Ledger) -> list[tuple[str, ...]]:
    """Lines below `HEAD`: held-out perplexity of each pretrained model, then every figure of the paper's tables with
    each fine-tuning of the ledger, or "not run"."""
    lines = []
    for model, record in ledger.pretrained.items():
        args = record["resolved_args"]
        perplexity = f"{model}: {decimal(record['metrics']['eval_perplexity'], 2)} (n 1)"
        spent = _spent([record], record["tokens_seen"])
        lines.append(("held-out perplexity of its own text", "none for this text", perplexity, _preset(args), *spent))
    for row in paper_rows():
        tuned = [(key, entry) for key, entry in ledger.tuned.items() if entry["task"] == row.task]
        tuned = [(key, entry) for key, entry in tuned if _has(entry, row.metric)]
        for (model, _), entry in tuned:
            args, runs = entry["resolved_args"], entry["runs"]
            scores = [record["metrics"][row.metric] for record in runs]
            scores = [-math.inf if score is None else score for score in scores]  # a correlation with a constant
            spread = f"{percent(min(scores))} to {percent(max(scores))}, " * (len(scores) > 1)
            flat = sum(record["degenerate"] for record in runs)  # the same answer to everything
            counts = f"n {len(scores)}" + f", {flat} degenerate" * (flat > 0)
            ours = f"{_tuned_name(model, args)}: {percent(statistics.median(scores))} ({spread}{counts})"
            tokens = sum(record["tokens_seen"] for record in runs)
            lines.append((row.shown, row.paper, ours, _settings(args), *_spent(runs, tokens)))
        if not tuned:
            lines.append((row.shown, row.paper, *[NOT_RUN] * (len(HEAD) - 2)))
    return lines


def _has(entry: LedgerEntry, metric: str) -> bool:
    """Whether the fine-tuning measured the paper's figure: the accuracy on a single level of RACE is not RACE's."""
    single_level = metric == "accuracy" and entry["resolved_args"].get("level", "all") != "all"
    return not single_level and all(metric in record["metrics"] for record in entry["runs"])


def _variants(args: dict[str, Any]) -> list[str]:
    """What tells two rows of the same task and model apart."""
    found = [name for name in ("random_weights", "without_article") if args.get(name)]
    limits = [name for name in ("level", "max_train_samples") if args.get(name) not in (None, "all")]
    return found + [f"{name}_{args[name]}" for name in limits]


def _tuned_name(model: str, args: dict[str, Any]) -> str:
    """The model, and what tells its row apart; numbers of examples stand among the settings."""
    shown = [name.replace("_", " ") for name in _variants(args) if not name.startswith("max_train_samples")]
    return ", ".join([model, *shown])


def _preset(args: dict[str, Any]) -> str:
    batch = f"{args.get('global_batch_size')} x {args['max_seq_length']}"
    return f"{batch}, {args['max_steps']:,} steps at {args['learning_rate']:g}"


def _settings(args: dict[str, Any]) -> str:
    """What a reader needs to repeat the fine-tuning: the values that people change."""
    steps = f"{args['max_steps']:,} steps" if args.get("max_steps", -1) > 0 else f"{args['num_train_epochs']:g} epochs"
    shown = [f"{args['learning_rate']:g}", f"batch {args['global_batch_size']}", steps]
    shown.append(f"length {args['max_seq_length']}")
    if args.get("max_train_samples"):
        shown.append(f"{args['max_train_samples']:,} examples")
    return ", ".join(shown)


def _spent(records: Sequence[RunRecord], tokens: int) -> tuple[str, str, str]:
    hardware = records[0]["hardware"]
    cores = hardware["cpu_cores"]
    where = ", ".join(hardware["gpus"]) or f"{cores} CPU core{'s' * (cores > 1)}"
    return f"{tokens / 1e6:,.1f} M", where, f"{sum(record['train_seconds'] for record in records) / 3600:.2f}"


def by_source(ledger: Ledger) -> list[tuple[str, ...]]:
    """(model, source, perplexity, loss, unigram entropy) of every pretraining run of several sources."""
    return [
        (model, name, decimal(source["perplexity"], 2), decimal(source["loss"]), decimal(source["unigram_entropy"]))
        for model, record in ledger.pretrained.items()
        for name, source in record["metrics_by_source"].items()
    ]


def speed(ledger: Ledger) -> list[tuple[str, ...]]:
    """(model, parameters, tokens, tokens/s, hardware, hours, peak memory) of every pretraining run."""
    lines = []
    for model, record in ledger.pretrained.items():
        tokens, where, hours = _spent([record], record["tokens_seen"])
        rate, memory = f"{record['tokens_per_second']:,}", f"{record['peak_memory_bytes'] / 1e9:.1f} GB"
        lines.append((model, f"{record['parameters'] / 1e6:.1f} M", tokens, rate, where, hours, memory))
    return lines


SOURCE_HEAD = ("model", "held-out text", "perplexity", "loss, nats", "unigram entropy")
SPEED_HEAD = ("model", "parameters", "tokens", "tokens/s", "hardware", "hours", "peak memory")


def readme_section(ledger: Ledger) -> str:
    """What stands in the README between the marks."""
    run_lines = [line for line in table(ledger) if line[2] != NOT_RUN]
    waiting = [line[0] for line in table(ledger) if line[2] == NOT_RUN]
    paragraphs = [markdown_table(HEAD, run_lines)]
    if waiting:
        paragraphs.append("Not run: " + "; ".join(waiting) + ".")
    if lines := by_source(ledger):
        paragraphs.append(markdown_table(SOURCE_HEAD, lines))
    return "\n\n".join(paragraphs)


def with_section(readme: str, section: str) -> str:
    """The README with `section` between the marks. Raises `InputError` where the README has no marks."""
    pattern = re.compile(f"{re.escape(MARKS[0])}.*?{re.escape(MARKS[1])}", re.S)
    if not pattern.search(readme):
        raise InputError(f"README.md has no section between {MARKS[0]} and {MARKS[1]}")
    return pattern.sub(lambda _: f"{MARKS[0]}\n{section}\n{MARKS[1]}", readme)


def html_table(head: tuple[str, ...], lines: list[tuple[str, ...]], kind: str) -> str:
    """A table; on a narrow screen, each line of the kind "ledger" becomes a list."""
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    rows = []
    for line in lines:
        columns = "".join(
            f'<td data-name="{html.escape(name)}"{" class=none" * (cell == NOT_RUN)}>{html.escape(cell)}</td>'
            for name, cell in zip(head, line, strict=True)
        )
        rows.append(f"<tr{' class=none' * (NOT_RUN in line)}>{columns}</tr>")
    body = f"<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="wide"><table class="{kind}">{body}</table></div>'


def page(ledger: Ledger, curves: Path, scores: Path) -> str:
    """The whole page, images inside."""
    template = Template((Path(__file__).parent / "page_template.html").read_text(encoding="utf-8"))
    return template.substitute(
        ledger=html_table(HEAD, table(ledger), "ledger"),
        sources=html_table(SOURCE_HEAD, by_source(ledger), "plain"),
        speed=html_table(SPEED_HEAD, speed(ledger), "plain"),
        curves=base64.b64encode(curves.read_bytes()).decode(),
        scores=base64.b64encode(scores.read_bytes()).decode(),
    )


def main(argv: list[str] | None = None) -> None:
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="folders of finished runs to add first")
    parser.add_argument("--name", help="model that the added fine-tunings are of; or another name for an added model")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the ledger")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="page with the two marks")
    args = parser.parse_args(argv)
    for source in args.add:
        print(f"added       {add(args.results, source, args.name)}")
    ledger = read(args.results)
    if not ledger.pretrained:
        raise InputError(f"{args.results} holds no */{RECORD_NAME}: add a finished run with --add")
    curves, scores = args.results / "curves.png", args.results / "scores.png"
    plots.plot_curves(ledger.pretrained, curves)
    named = [(_tuned_name(model, entry["resolved_args"]), entry) for (model, _), entry in ledger.tuned.items()]
    plots.plot_scores(named, scores)
    page_path = args.results / "index.html"
    page_path.write_text(page(ledger, curves, scores), encoding="utf-8")
    readme = args.readme.read_text(encoding="utf-8")
    args.readme.write_text(with_section(readme, readme_section(ledger)), encoding="utf-8")
    done = len([line for line in table(ledger) if line[2] != NOT_RUN])
    print(f"written     {page_path}, {curves}, {args.readme}: {done} lines of {len(table(ledger))} run")


if __name__ == "__main__":
    exit_on_error(main)
