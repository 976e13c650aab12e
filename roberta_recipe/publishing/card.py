"""Model cards (Mitchell et al. 2019, arXiv 1810.03993) from Jinja templates and run records, with `model-index` scores.

The dataset entry comes from the task (`record.DatasetCard`), the hyperparameters from the flags (`setting(shown=...)`).
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from roberta_recipe import record as records
from roberta_recipe.hardware import Machine
from roberta_recipe.input_files import HUB_COMMIT, resolve_path
from roberta_recipe.log import counted
from roberta_recipe.publishing import blimp_table
from roberta_recipe.publishing.tables import markdown_table, plain
from roberta_recipe.standard_error import perplexity_with_error, with_error

ROBERTA_TOKENS = 2.1e12  # Table 9: 500K steps of 8K sequences of 512 tokens

SCORE_HEAD = ("task", "scored on", "metric", "median", "spread", "seeds", "majority answer", "medians of all metrics")
_PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SHAPE = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden size",
    "num_attention_heads": "attention heads",
    "intermediate_size": "feed-forward size",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "position embeddings",
}


def pretrained(
    repo: str,
    config: dict[str, Any],
    record: records.PretrainingRecord,
    summaries: list[records.Summary],
    revision: str | None = None,
    blimp_record: records.BlimpRecord | None = None,
    **metadata: Any,
) -> ModelCard:
    """The card of a pretraining run. `config`: its config.json, `summaries`: of models fine-tuned from it, `metadata`:
    for the card's YAML header."""
    args = record["resolved_args"]
    names = args.get("train_file") or []
    corpus = ", ".join(Path(name).name for name in names) or Path(args["corpus"]).stem  # without local paths
    results = _text_results(corpus, corpus, record["metrics"])
    for name, source in record["metrics_by_source"].items():
        metrics = {f"eval_{key}": value for key, value in source.items()}
        results += _text_results(f"{corpus}/{name}", f"{corpus}: {name}", metrics)
    results += [result for summary in summaries for result in _task_results(summary)]
    tokens, blanks = record["tokens_seen"], args.get("fill_mask_examples") or []
    described = {"language": record["fingerprint"].get("language"), "datasets": record.get("datasets") or None}
    return _card(
        "pretrained.md.jinja", repo, config, record, results, revision,
        {**described, "widget": [{"text": text} for text in blanks] or None, **metadata},
        corpus=corpus, tokens_seen=f"{tokens / 1e9:,.1f} B" if tokens >= 1e10 else f"{tokens / 1e6:,.1f} M",
        roberta_tokens=ROBERTA_TOKENS,
        corpus_rows=_corpus_rows(record), text_rows=_text_rows(record), score_rows=_score_rows(summaries),
        blimp_head=blimp_table.HEAD, blimp_explained=blimp_table.EXPLANATION,
        blimp_rows=blimp_table.rows({repo.split("/")[-1]: blimp_record}) if blimp_record else [],
    )  # fmt: skip


def fine_tuned(
    repo: str,
    config: dict[str, Any],
    record: records.FinetuneRecord,
    summary: records.Summary | None,
    revision: str | None = None,
    **metadata: Any,
) -> ModelCard:
    """The card of the best fine-tuning run. `record`: of that run, `summary`: of all seeds, None before they finish."""
    dataset, summary = record["dataset"], summary or _summary_of_one(record)
    hub_id, scores = dataset["hub_id"], records.picked_setting(summary)
    linked, own = bool(hub_id and _HUB_ID.fullmatch(hub_id)), record["resolved_args"].get("dataset_name") or ""
    described = {"language": "en", "datasets": [hub_id]} if linked else {"datasets": [own] if _is_hub_id(own) else None}
    return _card(
        "fine_tuned.md.jinja", repo, config, record, _task_results(summary), revision, {**described, **metadata},
        dataset=dataset, linked=linked, summary=summary,
        seeds=", ".join(f"seed {seed}: {records.percent(value)}" for seed, value in scores["seeds"].items()),
        degenerate=scores["degenerate_seeds"], score_rows=_score_rows([summary]),
    )  # fmt: skip


def scored_on(summary: records.Summary, metric: str = "") -> str:
    """The split and number of examples behind a summary's scores, or behind a single metric."""
    counts = summary["scored_examples"]
    if metric in counts:
        return f"{next(iter(counts))}, {counted(counts[metric], 'example')}"
    splits = {name: count for name, count in counts.items() if name.startswith("validation")}
    return "; ".join(f"{split}, {counted(count, 'example')}" for split, count in splits.items())


def baseline_cell(summary: records.Summary, metric: str) -> str:
    """The majority baseline's score and answer, "-" without one."""
    baseline = summary["baseline"]
    value = baseline["metrics"].get(metric) if baseline else None
    return "-" if value is None else f"{records.percent(value)} (always {baseline['answer']})"


def device_name(hardware: Machine) -> str:
    """The GPUs of a run, or its processor and cores."""
    on_cpu = f"{counted(hardware['cpu_cores'], 'core')} of {hardware.get('processor') or hardware['machine']}"
    gpus = Counter(hardware["gpus"])
    return ", ".join(f"{count} x {gpu}" if count > 1 else gpu for gpu, count in gpus.items()) or on_cpu


def starts_from_hub(record: records.RunRecord) -> bool:
    """Whether a run started from a Hub model. Fine-tuning records the Hub's commit hash, or a shorter one of a local
    folder; continued pretraining records the name of a Hub model, or the absolute path of a folder."""
    weights = record["fingerprint"].get("weights")
    if weights not in (None, "None"):  # the latter in older records of a Hub model
        return bool(re.fullmatch(HUB_COMMIT, weights))
    return _is_hub_id(record["resolved_args"]["model_name_or_path"])


def _is_hub_id(name: str) -> bool:
    is_id = _HUB_ID.fullmatch(name) and name.split("/")[0] not in ("runs", ".", "..")
    return bool(is_id) and not resolve_path(name).exists()


def _card(
    template: str,
    repo: str,
    config: dict[str, Any],
    record: records.RunRecord,
    results: list[EvalResult],
    revision: str | None,
    metadata: dict[str, Any],
    **facts: Any,
) -> ModelCard:
    """The card from a template in this folder; `facts`: variables of this kind of run."""
    args, name, architecture = record["resolved_args"], repo.split("/")[-1], config["architectures"][0]
    is_stock = hasattr(transformers, architecture)  # not a class of the user's own
    head = next((head for head in _PIPELINES if is_stock and head in architecture), None)
    start = args.get("model_name_or_path")
    if start and starts_from_hub(record):
        metadata = {"base_model": None if args.get("random_weights") else start, **metadata}
    elif start:
        start = Path(start).name  # without local paths
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=_PIPELINES.get(head),
        tags=[config["model_type"], "roberta-recipe"],
        model_name=name if results else None,
        eval_results=results or None,
        **metadata,
    )
    used = ", ".join(f"{library} {version}" for library, version in record["versions"].items())
    training = (
        f"{counted(record['steps'], 'step')}, {record['tokens_seen']:,} tokens, {record['train_seconds'] / 3600:.2f} "
        f"hours on {device_name(record['hardware'])}, {record['tokens_per_second']:,} tokens/s. Made with {used}"
        + (f"; commit {record['commit']}." if record["commit"] else ".")
    )
    shape = [(word, f"{config[key]:,}") for key, word in _SHAPE.items() if key in config]
    unused = "num_train_epochs" if args.get("max_steps", -1) > 0 else ""
    shown = ((name, args.get(name, record.get(name))) for name in record["shown_args"] if name != unused)
    settings = [(name, value) for name, value in shown if value not in (None, -1) and value is not False]  # 0 is shown
    return ModelCard.from_template(
        data, template_path=str(Path(__file__).with_name(template)),
        name=name, config=config, record=record, args=args, auto_class=head and f"AutoModel{head}", start=start,
        source=json.dumps(repo) + (f", revision={json.dumps(revision)}" if revision else ""),
        settings=settings, training=plain(training), score_head=SCORE_HEAD, number="{:,}".format, plain=plain,
        shape=[*shape, ("parameters", f"{record['parameters']:,}")], table=markdown_table, **facts,
    )  # fmt: skip


def _corpus_rows(record: records.PretrainingRecord) -> list[tuple[str, ...]]:
    """Name, share, tokens and passes of each source."""
    sources = zip(record["counts"]["train"].items(), record["fingerprint"]["shares"], strict=True)
    return [
        (name, f"{share:.1%}", f"{counts['tokens']:,}", _passes(record["passes"].get(name, 0)))
        for (name, counts), share in sources
    ]


def _passes(passes: float) -> str:
    """Passes over a source: exact once it has been read to its end, before that an integer lower bound."""
    if isinstance(passes, float):
        return f"{passes:.2f}"
    return f"{passes} to {passes + 1}" if passes else "less than 1"


def _text_rows(record: records.PretrainingRecord) -> list[tuple[str, ...]]:
    """Loss and perplexity on all held-out text and on each source."""
    whole = {name: record["metrics"].get(f"eval_{name}") for name in ("loss", "perplexity", "loss_error", "blocks")}
    whole["unigram_entropy"] = record["unigram_entropy"]
    return [
        (name, f"{row['blocks']:,}", with_error(row["loss"], row.get("loss_error")),
         perplexity_with_error(row["perplexity"], row.get("loss_error")), with_error(row["unigram_entropy"], None))
        for name, row in {"all held-out text": whole, **record["metrics_by_source"]}.items()
    ]  # fmt: skip


def _score_rows(summaries: list[records.Summary]) -> list[tuple[Any, ...]]:
    """Rows of the table with the header `SCORE_HEAD`: each summary's validation score, then its test splits."""
    rows = []
    for summary in summaries:
        dataset, metric, tests = summary["dataset"], summary["metric"], summary.get("tests", {})
        scored = [(scored_on(summary), records.picked_setting(summary), baseline_cell(summary, metric))]
        scored += [(f"{split}, {counted(test['examples'], 'example')}", test, "") for split, test in tests.items()]
        for where, scores, baseline in scored:
            medians = {name: value for name, value in scores["medians"].items() if name in dataset["hub_metrics"]}
            shown = ", ".join(f"{name} {records.percent(value)}" for name, value in medians.items())
            spread = f"{records.percent(scores['lowest'])} to {records.percent(scores['highest'])}"
            median, seeds = records.percent(scores["median"]), len(scores["seeds"])
            rows.append((dataset["name"], where, metric, median, spread, seeds, baseline, shown))
    return rows


def _text_results(name: str, shown: str, metrics: dict[str, Any]) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="fill-mask",
            dataset_type=name,
            dataset_name=shown,
            dataset_split="validation",
            metric_type=metric,
            metric_name=f"masked-LM {metric}",
            metric_value=round(metrics[f"eval_{metric}"], 4),
        )
        for metric in ("loss", "perplexity")
        if metrics[f"eval_{metric}"] is not None
    ]


def _task_results(summary: records.Summary) -> list[EvalResult]:
    """The picked setting's medians for the model-index; a dataset that is not on the Hub is named `local/...`."""
    scores, dataset, args = records.picked_setting(summary), summary["dataset"], summary["resolved_args"]
    own = "" if dataset["note"] else args.get("dataset_name") or ""  # a note: scored on held-out training rows
    name = re.sub(r"\W+", "_", dataset["name"].lower()).strip("_")
    others = {split.partition("_")[2]: split for split in summary["scored_examples"]}  # by the end of a metric's name
    return [
        EvalResult(
            task_type=dataset["task_type"],
            dataset_type=dataset["hub_id"] or (own if _is_hub_id(own) else f"local/{name}"),
            dataset_name=dataset["name"],
            dataset_config=dataset["hub_config"] or args.get("dataset_config_name"),
            dataset_split=others.get(metric.rpartition("_")[2], dataset["split"]),
            metric_type=dataset["hub_metrics"][metric],
            metric_name=f"{metric}, median of {counted(len(scores['seeds']), 'seed')}",
            metric_value=round(value, 4),
        )
        for metric, value in scores["medians"].items()
        if metric in dataset["hub_metrics"] and value is not None and abs(value) < float("inf")
    ]


def _summary_of_one(record: records.FinetuneRecord) -> records.Summary:
    """The summary of a single run."""
    args, value = record["resolved_args"], record["metrics"][record["metric"]]
    scores: records.Scores = {
        "learning_rate": args["learning_rate"],
        "global_batch_size": args["global_batch_size"],
        **dict.fromkeys(("median", "mean", "lowest", "highest"), value),
        "seeds": {args["seed"]: value},
        "degenerate_seeds": [args["seed"]] if record["degenerate"] else [],
        "best_run": "",
        "medians": record["metrics"],
    }
    return {**record, "settings": [scores], "picked": 0}
