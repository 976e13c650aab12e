"""The model card of a finished run: a Jinja template for each kind of run, filled from its records (Mitchell et al.
2019, arXiv 1810.03993).

Scores are in the Hub's `model-index` form as well. A task describes its dataset (`record.DatasetCard`), and each flag
declares whether the card shows it (`args.Flag`).
"""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from roberta_recipe import record as records
from roberta_recipe.hardware import Machine
from roberta_recipe.input_files import resolve_path
from roberta_recipe.log import counted
from roberta_recipe.publishing import minimal_pairs
from roberta_recipe.publishing.tables import plain, table
from roberta_recipe.significance import perplexity_with_error, with_error

ROBERTA_TOKENS = 2.1e12  # Table 9: 500K steps of 8K sequences of 512 tokens

SCORE_HEAD = ("task", "scored on", "metric", "median", "spread", "seeds", "majority answer", "medians of all metrics")
_PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
}
_HUB_ID, _HUB_COMMIT = re.compile(r"[\w.-]+(/[\w.-]+)?"), re.compile("[0-9a-f]{40}")
_KNOWN_ID = re.compile(r"(xlm-roberta|roberta|camembert|bert|albert)-(base|large|xlarge|xxlarge)[\w-]*")  # no namespace
_SHARED = ("task", "metric", "dataset", "scored_examples", "baseline", "resolved_args", "shown_args")  # with a summary
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
    """The card of a pretraining run: `config` is its config.json, `summaries` are of fine-tunings from it, `metadata`
    of the card's head."""
    corpus = _corpus_name(record["resolved_args"])
    results = _of_text(corpus, corpus, record["metrics"])
    for name, source in record["metrics_by_source"].items():
        measured = {f"eval_{key}": value for key, value in source.items()}
        results += _of_text(f"{corpus}/{name}", f"{corpus}: {name}", measured)
    results += [result for summary in summaries for result in _of_task(summary)]
    return _card(
        "pretrained.md.jinja", repo, config, record, results, revision,
        {"language": record["fingerprint"].get("language"), **metadata},
        corpus=corpus, tokens_seen=_millions(record["tokens_seen"]), roberta_tokens=ROBERTA_TOKENS,
        corpus_rows=_corpus_rows(record), text_rows=_text_rows(record), score_rows=_score_rows(summaries),
        blimp_head=minimal_pairs.HEAD, blimp_explained=minimal_pairs.EXPLAINED,
        blimp_rows=minimal_pairs.lines({repo.split("/")[-1]: blimp_record}) if blimp_record else [],
    )  # fmt: skip


def fine_tuned(
    repo: str,
    config: dict[str, Any],
    record: records.FinetuneRecord,
    summary: records.Summary | None,
    revision: str | None = None,
    **metadata: Any,
) -> ModelCard:
    """The card of the best run of a protocol: `record` is that run's, `summary` is of all seeds (None for a run by
    itself)."""
    dataset, summary = record["dataset"], summary or _alone(record)
    hub_id, scores = dataset["hub_id"], records.picked_setting(summary)
    language = {"language": "en"} if hub_id else {}  # GLUE, SQuAD and RACE
    return _card(
        "fine_tuned.md.jinja", repo, config, record, _of_task(summary), revision, {**language, **metadata},
        dataset=dataset, linked=hub_id and "/" in hub_id and _HUB_ID.fullmatch(hub_id), summary=summary,
        seeds=", ".join(f"seed {seed}: {records.percent(value)}" for seed, value in scores["seeds"].items()),
        degenerate=scores["degenerate_seeds"], score_rows=_score_rows([summary]),
    )  # fmt: skip


def announced(repo: str, **metadata: Any) -> ModelCard:
    """The card of a run that begins."""
    data = ModelCardData(library_name="transformers", **metadata)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {repo.split('/')[-1]}\n\n**In training.**\n")


def scored_on(summary: records.Summary, metric: str = "") -> str:
    """Split and number of examples that the scores are of, or those of a single metric."""
    counts = summary["scored_examples"]
    if metric in counts:
        return f"{next(iter(counts))}, {counted(counts[metric], 'example')}"
    splits = {name: count for name, count in counts.items() if name.startswith("validation")}
    return "; ".join(f"{split}, {counted(count, 'example')}" for split, count in splits.items())


def of_baseline(summary: records.Summary, metric: str) -> str:
    """What the same answer to every example scores by a metric, and which answer; "-" where there is no such figure."""
    baseline = summary["baseline"]
    value = baseline["metrics"].get(metric) if baseline else None
    return "-" if value is None else f"{records.percent(value)} (always {baseline['answer']})"


def device_of(hardware: Machine) -> str:
    """What a run ran on: its GPUs, or the cores of its processor, by its name where the record has it."""
    cores = hardware["cpu_cores"]
    on_cpu = f"{counted(cores, 'core')} of {hardware.get('processor') or hardware['machine']}"
    return ", ".join(hardware["gpus"]) or on_cpu


def _base_model(record: records.RunRecord) -> dict[str, str]:
    """For the head of the card, where the run started from a model of the Hub and not from a folder."""
    args = record["resolved_args"]
    return {"base_model": args["model_name_or_path"]} if _is_of_hub(record) and not args.get("random_weights") else {}


def _is_of_hub(record: records.RunRecord) -> bool:
    """Whether a run started from a model of the Hub. A fine-tuning has recorded the Hub's commit, or a shorter
    fingerprint of a folder; of pretraining that was continued, only the name tells, and the folder where it is."""
    name, weights = record["resolved_args"].get("model_name_or_path") or "", record["fingerprint"].get("weights")
    if weights not in (None, "None"):
        return bool(_HUB_ID.fullmatch(name) and _HUB_COMMIT.fullmatch(weights))
    is_name = _HUB_ID.fullmatch(name) if "/" in name else _KNOWN_ID.fullmatch(name)
    return bool(is_name) and name.split("/")[0] not in ("runs", ".", "..") and not resolve_path(name).exists()


def _start_name(record: records.RunRecord) -> str | None:
    """The checkpoint that a run started from: its id on the Hub, or its folder's name without the machine's path."""
    name = record["resolved_args"].get("model_name_or_path")
    return name if not name or _is_of_hub(record) else Path(name).name


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
    """The card by a template of this folder; `facts` are those of one kind of run."""
    args, name = record["resolved_args"], repo.split("/")[-1]
    head = "For" + config["architectures"][0].partition("For")[2]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=_PIPELINES.get(head),
        tags=[config["model_type"], "roberta-recipe"],
        model_name=name if results else None,
        eval_results=results or None,
        **{**_base_model(record), **metadata},
    )
    shape = [(word, f"{config[key]:,}") for key, word in _SHAPE.items() if key in config]
    return ModelCard.from_template(
        data, template_path=str(Path(__file__).with_name(template)),
        name=name, config=config, record=record, args=args, auto_class=f"AutoModel{head}", start=_start_name(record),
        source=json.dumps(repo) + (f", revision={json.dumps(revision)}" if revision else ""),
        shape=[*shape, ("parameters", f"{record['parameters']:,}")],
        settings=[(name, args[name]) for name in record["shown_args"] if args.get(name) not in (None, False, -1)],
        training=_training(record), score_head=SCORE_HEAD, number="{:,}".format, plain=plain, table=table, **facts,
    )  # fmt: skip


def _training(record: records.RunRecord) -> str:
    """Steps, tokens, hours, hardware and versions in two sentences."""
    used = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    commit = f"; commit {record['commit']}" if record["commit"] else ""
    return plain(
        f"{counted(record['steps'], 'step')}, {record['tokens_seen']:,} tokens, {record['train_seconds'] / 3600:.2f} "
        f"hours on {device_of(record['hardware'])}, {record['tokens_per_second']:,} tokens/s. Made with {used}{commit}."
    )


def _corpus_name(args: dict[str, Any]) -> str:
    """What the text is called: the corpus preset's name, or the names of the files, without the machine's path."""
    if args.get("train_file"):
        return ", ".join(Path(name).name for name in args["train_file"])
    return Path(args["corpus"]).stem


def _corpus_rows(record: records.PretrainingRecord) -> list[tuple[str, ...]]:
    """Share, tokens and passes of each source."""
    train, held_out = record["counts"]["train"], record["counts"]["validation"]
    return [
        (name, f"{share:.1%}", f"{counts['tokens']:,}", _passes(record["passes"].get(name, 0)),
         f"{held_out.get(name, {}).get('tokens', 0):,}")
        for (name, counts), share in zip(train.items(), record["fingerprint"]["shares"], strict=True)
    ]  # fmt: skip


def _passes(passes: float) -> str:
    """Passes over a source's text; whole ones as long as it has not been read to its end."""
    if isinstance(passes, float):
        return f"{passes:.2f}"
    return f"{passes} to {passes + 1}" if passes else "less than 1"


def _text_rows(record: records.PretrainingRecord) -> list[tuple[str, ...]]:
    """Loss and perplexity of all held-out text and of each source."""
    metrics = record["metrics"]
    whole = {name: metrics.get(f"eval_{name}") for name in ("loss", "perplexity", "loss_error")}
    whole |= {"unigram_entropy": record["unigram_entropy"], "blocks": records.validation_blocks(record)}
    return [
        (name, f"{of['blocks']:,}", with_error(of["loss"], of.get("loss_error")),
         perplexity_with_error(of["perplexity"], of.get("loss_error")), records.decimal(of["unigram_entropy"]))
        for name, of in {"all held-out text": whole, **record["metrics_by_source"]}.items()
    ]  # fmt: skip


def _score_rows(summaries: list[records.Summary]) -> list[tuple[Any, ...]]:
    """Lines below `SCORE_HEAD`: each summary's validation splits together, then its tests."""
    rows = []
    for summary in summaries:
        dataset, metric, tests = summary["dataset"], summary["metric"], summary.get("tests", {})
        scored = [(scored_on(summary), records.picked_setting(summary), of_baseline(summary, metric))]
        scored += [(f"{split}, {counted(of['examples'], 'example')}", of, "") for split, of in tests.items()]
        for where, scores, baseline in scored:
            medians = {name: value for name, value in scores["medians"].items() if name in dataset["hub_metrics"]}
            shown = ", ".join(f"{name} {records.percent(value)}" for name, value in medians.items())
            spread = f"{records.percent(scores['lowest'])} to {records.percent(scores['highest'])}"
            median, seeds = records.percent(scores["median"]), len(scores["seeds"])
            rows.append((dataset["name"], where, metric, median, spread, seeds, baseline, shown))
    return rows


def _of_text(name: str, shown: str, metrics: dict[str, Any]) -> list[EvalResult]:
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


def _of_task(summary: records.Summary) -> list[EvalResult]:
    """The published medians of the picked setting; rows that are not a dataset's on the Hub are called `local/...`."""
    scores, dataset = records.picked_setting(summary), summary["dataset"]
    seeds = len(scores["seeds"])
    return [
        EvalResult(
            task_type=dataset["task_type"],
            dataset_type=dataset["hub_id"] or f"local/{summary['task'].replace(' ', '_')}",
            dataset_name=dataset["name"],
            dataset_config=dataset["hub_config"],
            dataset_split=dataset["split"],
            metric_type=dataset["hub_metrics"][metric],
            metric_name=f"{metric}, median of {counted(seeds, 'seed')}",
            metric_value=round(value, 4),
        )
        for metric, value in scores["medians"].items()
        if metric in dataset["hub_metrics"] and value is not None and abs(value) < float("inf")
    ]


def _alone(record: records.FinetuneRecord) -> records.Summary:
    """A run by itself in the form of a summary."""
    args, value = record["resolved_args"], record["metrics"][record["metric"]]
    scores: records.SettingScores = {
        "learning_rate": args["learning_rate"],
        "global_batch_size": args["global_batch_size"],
        **dict.fromkeys(("median", "mean", "lowest", "highest"), value),
        "seeds": {args["seed"]: value},
        "degenerate_seeds": [args["seed"]] if record["degenerate"] else [],
        "best_run": "",
        "medians": record["metrics"],
    }
    shared = {name: record[name] for name in _SHARED}
    return {**shared, "settings": [scores], "picked": 0}


def _millions(count: int) -> str:
    return f"{count / 1e9:,.1f} B" if count >= 1e10 else f"{count / 1e6:,.1f} M"
