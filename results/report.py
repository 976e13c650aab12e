"""The ledger's tables, curves and page, made from the run records in this folder and nothing else.

    python results/report.py                                        # or: make report
    python results/report.py --add runs/roberta_mini                # a pretraining run, as results/roberta_mini/
    python results/report.py --add runs/glue/rte --name roberta_mini    # what was fine-tuned from it

It writes results/curves.png, results/index.html (one file, opens from disk) and the part of README.md between its two
marks. Figures of the paper are those that the fine-tuning scripts print.
"""

import base64
import html
import math
import re
import shutil
import statistics
import sys
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

import finetune_glue
import finetune_race
import finetune_squad
from roberta_recipe import durable, report, run
from roberta_recipe.args import ROOT, InputError, RecipeParser, exit_on_error
from roberta_recipe.report import markdown_table, number, percent

NOT_RUN = "not run"
HEAD = ("task", "paper", "ours: median (spread, n)", "preset", "tokens", "hardware", "hours")
MARKS = ("<!-- results: made by `make report` -->", "<!-- end of results -->")
_KEPT = ("metrics", "steps", "tokens_seen", "tokens_per_second", "train_seconds", "score_at_steps", "degenerate")
_KEPT += ("parameters", "versions", "commit", "hardware")
_SETTINGS = ("max_seq_length", "learning_rate", "global_batch_size", "num_train_epochs", "max_steps", "warmup_steps")
_SETTINGS += ("max_query_length", "max_option_length", "head_dropout", "layer_decay", "spacy_model", "eval_steps")
_SETTINGS += ("weight_decay", "max_train_samples", "random_weights", "without_article", "level", "doc_stride", "bf16")


class Ledger(NamedTuple):
    """What the folder holds: pretraining records by model, and fine-tunings by (model, file's name)."""

    pretrained: dict[str, dict[str, Any]]
    tuned: dict[tuple[str, str], dict[str, Any]]


class Row(NamedTuple):
    """What the paper reports: a task of `summary.json`, one of its metrics, and its figures."""

    task: str
    metric: str
    shown: str
    paper: str


def read(folder: Path) -> Ledger:
    """All records of the ledger, by name."""
    pretrained = {path.parent.name: durable.read_json(path) for path in sorted(folder.glob(f"*/{run.RECORD_NAME}"))}
    others = sorted(path for path in folder.glob("*/*.json") if path.name != run.RECORD_NAME)
    return Ledger(pretrained, {(path.parent.name, path.stem): durable.read_json(path) for path in others})


def add(folder: Path, source: Path, name: str | None) -> Path:
    """Copy a finished run's record into the ledger, or the summary and the shortened records of a fine-tuning; returns
    what was written. Raises `InputError` where `source` is no finished run."""
    if (source / run.SUMMARY_NAME).is_file():
        if not name:
            raise InputError(f"{source} is a fine-tuning: say with --name of which model")
        kept = shortened(source)
        target = folder / name / f"{'_'.join([kept['task'].replace(' ', '_'), *_variants(kept['resolved_args'])])}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        durable.write_json(target, kept)
        return target
    if not (source / run.RECORD_NAME).is_file():
        raise InputError(f"{source} has neither {run.RECORD_NAME} nor {run.SUMMARY_NAME}: name a finished run's folder")
    if "task" in durable.read_json(source / run.RECORD_NAME):
        raise InputError(f"{source} is one run of a fine-tuning: name the folder of all its seeds, {source.parent}")
    target = folder / (name or source.name)
    target.mkdir(parents=True, exist_ok=True)
    for file in (run.RECORD_NAME, run.CURVE_NAME):
        shutil.copyfile(source / file, target / file)
    return target


def shortened(source: Path) -> dict[str, Any]:
    """What the ledger keeps of a fine-tuning: the picked setting's runs, and nothing of the machine's folders."""
    summary = durable.read_json(source / run.SUMMARY_NAME)
    row = summary["settings"][summary["picked"]]
    runs = []
    for seed in row["seeds"]:
        folder = f"lr{row['learning_rate']:g}-batch{row['global_batch_size']}-seed{seed}"
        record = durable.read_json(source / folder / run.RECORD_NAME)
        runs.append({"seed": int(seed), **{name: record.get(name) for name in _KEPT}})
    args = {name: value for name, value in summary["resolved_args"].items() if name in _SETTINGS and value is not None}
    args |= {name: row[name] for name in ("learning_rate", "global_batch_size")}
    row |= {"best_run": Path(row["best_run"]).name}
    return {"task": summary["task"], "metric": summary["metric"], "settings": [row], "picked": 0, "resolved_args": args,
            "duplicates": summary.get("duplicates"), "runs": runs}  # fmt: skip


def paper_rows() -> list[Row]:
    """Tables 5, 6 and 7, in the paper's order."""
    large, base = finetune_glue.PAPER["large"], finetune_glue.PAPER["base"]
    rows = [
        Row(
            name,
            task.metric,
            f"GLUE {name}, {task.metric}",
            f"{large[name]} (base {base[name]})" if name in base else f"{large[name]}",
        )
        for name, task in finetune_glue.TASKS.items()
    ]
    for version, figures in finetune_squad.PAPER.items():
        rows += [Row(f"squad {version}", m, f"SQuAD {version}, {m}", str(score)) for m, score in figures.items()]
    rows += [Row("race", m, f"RACE, {m}", f"{score} (test set)") for m, score in finetune_race.PAPER.items()]
    return rows


def table(ledger: Ledger) -> list[tuple[str, ...]]:
    """Lines below `HEAD`: held-out perplexity of each pretrained model, then every figure of the paper's tables with
    each fine-tuning of the ledger, or "not run"."""
    lines = []
    for model, record in ledger.pretrained.items():
        args = record["resolved_args"]
        perplexity = f"{model}: {number(record['metrics']['eval_perplexity'], 2)} (n 1)"
        spent = _spent([record], record["tokens_seen"])
        lines.append(("held-out perplexity of its own text", "none for this text", perplexity, _preset(args), *spent))
    for row in paper_rows():
        tuned = [(key, one) for key, one in ledger.tuned.items() if one["task"] == row.task]
        tuned = [(key, one) for key, one in tuned if _has(one, row.metric)]
        for (model, _), summary in tuned:
            args, scores = summary["resolved_args"], [record["metrics"][row.metric] for record in summary["runs"]]
            scores = [-math.inf if score is None else score for score in scores]  # a correlation with a constant
            spread = f"{percent(min(scores))} to {percent(max(scores))}, " * (len(scores) > 1)
            flat = sum(record["degenerate"] for record in summary["runs"])  # one answer to everything
            counts = f"n {len(scores)}" + f", {flat} degenerate" * (flat > 0)
            ours = f"{_tuned_name(model, args)}: {percent(statistics.median(scores))} ({spread}{counts})"
            tokens = sum(record["tokens_seen"] for record in summary["runs"])
            lines.append((row.shown, row.paper, ours, _settings(args), *_spent(summary["runs"], tokens)))
        if not tuned:
            lines.append((row.shown, row.paper, *[NOT_RUN] * (len(HEAD) - 2)))
    return lines


def _has(tuned: dict[str, Any], metric: str) -> bool:
    """Whether it is a figure of the paper's: the accuracy of one level of RACE is that level's, not RACE's."""
    of_one_level = metric == "accuracy" and tuned["resolved_args"].get("level", "all") != "all"
    return not of_one_level and all(metric in record["metrics"] for record in tuned["runs"])


def _variants(args: dict[str, Any]) -> list[str]:
    """What makes another row of the same task."""
    found = [name for name in ("random_weights", "without_article") if args.get(name)]
    return found + [
        f"{name}_{args[name]}" for name in ("level", "max_train_samples") if args.get(name) not in (None, "all")
    ]


def _tuned_name(model: str, args: dict[str, Any]) -> str:
    """The model, and what its row has of its own; numbers of examples stand among the settings."""
    shown = [name.replace("_", " ") for name in _variants(args) if not name.startswith("max_train_samples")]
    return ", ".join([model, *shown])


def _preset(args: dict[str, Any]) -> str:
    batch = f"{args.get('global_batch_size')} x {args['max_seq_length']}"
    return f"{batch}, {args['max_steps']:,} steps at {args['learning_rate']:g}"


def _settings(args: dict[str, Any]) -> str:
    """What a reader needs to repeat it: the values people change."""
    steps = f"{args['max_steps']:,} steps" if args.get("max_steps", -1) > 0 else f"{args['num_train_epochs']:g} epochs"
    parts = [
        f"{args['learning_rate']:g}",
        f"batch {args['global_batch_size']}",
        steps,
        f"length {args['max_seq_length']}",
    ]
    if args.get("max_train_samples"):
        parts.append(f"{args['max_train_samples']:,} examples")
    return ", ".join(parts)


def _spent(records: list[dict[str, Any]], tokens: int) -> tuple[str, str, str]:
    hardware = records[0]["hardware"]
    cores = hardware["cpu_cores"]
    where = ", ".join(hardware["gpus"]) or f"{cores} CPU core{'s' * (cores > 1)}"
    return f"{tokens / 1e6:,.1f} M", where, f"{sum(record['train_seconds'] for record in records) / 3600:.2f}"


def by_source(ledger: Ledger) -> list[tuple[str, ...]]:
    """(model, source, perplexity, loss, unigram entropy) of every pretraining run of several sources."""
    return [
        (model, source, number(one["perplexity"], 2), number(one["loss"], 3), number(one["unigram_entropy"], 3))
        for model, record in ledger.pretrained.items()
        for source, one in record.get("metrics_by_source", {}).items()
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


def readme_part(ledger: Ledger) -> str:
    """What stands in the README between the marks."""
    run_lines = [line for line in table(ledger) if line[2] != NOT_RUN]
    waiting = [line[0] for line in table(ledger) if line[2] == NOT_RUN]
    parts = [markdown_table(HEAD, run_lines)]
    if waiting:
        parts.append("Not run: " + "; ".join(waiting) + ".")
    if lines := by_source(ledger):
        parts.append(markdown_table(SOURCE_HEAD, lines))
    return "\n\n".join(parts)


def with_part(readme: str, part: str) -> str:
    """The README with `part` between its marks. Raises `InputError` where they are not there."""
    pattern = re.compile(f"{re.escape(MARKS[0])}.*?{re.escape(MARKS[1])}", re.S)
    if not pattern.search(readme):
        raise InputError(f"README.md has no part between {MARKS[0]} and {MARKS[1]}")
    return pattern.sub(lambda _: f"{MARKS[0]}\n{part}\n{MARKS[1]}", readme)


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
        raise InputError(f"{args.results} holds no */{run.RECORD_NAME}: add a finished run with --add")
    curves, scores = args.results / "curves.png", args.results / "scores.png"
    report.plot_curves(ledger.pretrained, curves)
    report.plot_scores([(_tuned_name(m, one["resolved_args"]), one) for (m, _), one in ledger.tuned.items()], scores)
    (args.results / "index.html").write_text(page(ledger, curves, scores), encoding="utf-8")
    readme = args.readme.read_text(encoding="utf-8")
    args.readme.write_text(with_part(readme, readme_part(ledger)), encoding="utf-8")
    done = len([line for line in table(ledger) if line[2] != NOT_RUN])
    print(
        f"written     {args.results / 'index.html'}, {curves}, {args.readme}: {done} lines of {len(table(ledger))} run"
    )


if __name__ == "__main__":
    exit_on_error(main)
