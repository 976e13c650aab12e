"""The model card of a finished run, made from its records and nothing else (Mitchell et al. 2019, arXiv 1810.03993).

What is evaluated stands in the Hub's `model-index` form as well, so that the Hub shows it. A task says what its data
are called (`record.DatasetCard`), and each flag whether the card shows it (`args.Flag`).
"""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from roberta_recipe.hardware import Machine
from roberta_recipe.input_files import resolve_path
from roberta_recipe.log import counted
from roberta_recipe.publishing import markdown, minimal_pairs
from roberta_recipe.record import (
    BlimpRecord,
    FinetuneRecord,
    PretrainingRecord,
    RunRecord,
    SettingScores,
    Summary,
    decimal,
    percent,
    picked_setting,
    validation_blocks,
)
from roberta_recipe.significance import perplexity_with_error, with_error

ROBERTA_TOKENS = 2.1e12  # Table 9: 500K steps of 8K sequences of 512 tokens

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
    record: PretrainingRecord,
    summaries: list[Summary],
    revision: str | None = None,
    blimp_record: BlimpRecord | None = None,
    **metadata: Any,
) -> ModelCard:
    """The card of a pretraining run: `config` is its config.json, `summaries` are of what was fine-tuned from it;
    `metadata` goes into the head of the card as it is."""
    args, corpus = record["resolved_args"], _corpus_name(record["resolved_args"])
    metadata = {"language": record["fingerprint"].get("language"), **_base_model(record), **metadata}
    start = f", continued from {markdown.code(_start_name(record))}" if args.get("model_name_or_path") else ""
    share = record["tokens_seen"] / ROBERTA_TOKENS
    results = _of_text(corpus, corpus, record["metrics"])
    for name, source in record["metrics_by_source"].items():
        measured = {f"eval_{key}": value for key, value in source.items()}
        results += _of_text(f"{corpus}/{name}", f"{corpus}: {name}", measured)
    sections = [
        _title(repo),
        f"A masked language model pretrained by [RoBERTa](https://arxiv.org/abs/1907.11692)'s recipe on "
        f"{markdown.name(corpus)}{start}: {record['parameters']:,} parameters, {_millions(record['tokens_seen'])} "
        "tokens seen.",
        _loading(repo, config, revision),
        _architecture(config, record),
        "## Text\n\n" + _corpus_table(record),
        _training(record),
        "## Evaluation\n\n" + _text_table(record) + "\n\n![loss over steps](loss_curve.png)",
    ]
    if blimp_record:
        head, lines = minimal_pairs.HEAD, minimal_pairs.lines({repo.split("/")[-1]: blimp_record})
        sections.append(f"{minimal_pairs.EXPLAINED}\n\n{_table(head, lines)}")
    if summaries:
        sections.append("Fine-tuned from it, on validation:\n\n" + _score_table(summaries))
    sections.append(
        "## Limits\n\n"
        f"- It saw {record['tokens_seen']:,} tokens, {share:.2g} of the {ROBERTA_TOKENS:.2g} of RoBERTa's longest "
        "run.\n"
        f"- It was trained on {args['max_seq_length']} tokens at most; longer input is outside of what it learnt.\n"
        "- It fills in masked tokens and is meant to be fine-tuned; it does not write text.\n"
        "- It repeats the errors and the prejudice of its text, which was not filtered here.\n"
        "- What is not listed under Evaluation was not measured."
    )
    results += [result for summary in summaries for result in _of_task(summary)]
    return _card(repo, config, results, sections, metadata)


def fine_tuned(
    repo: str,
    config: dict[str, Any],
    record: FinetuneRecord,
    summary: Summary | None,
    revision: str | None = None,
    **metadata: Any,
) -> ModelCard:
    """The card of the best run of a protocol: `record` is that run's, `summary` is of all seeds (None for a run by
    itself)."""
    args, dataset = record["resolved_args"], record["dataset"]
    summary = summary or _alone(record)
    scores = picked_setting(summary)
    from_what = markdown.code(_start_name(record)) + (", from random weights" if args.get("random_weights") else "")
    seeds = ", ".join(f"seed {seed}: {percent(value)}" for seed, value in scores["seeds"].items())
    hub_id = dataset["hub_id"]
    linked = hub_id and "/" in hub_id and _HUB_ID.fullmatch(hub_id)
    data = markdown.name(dataset["name"])
    data += f" ([{hub_id}](https://huggingface.co/datasets/{hub_id}))" if linked else ""
    data += f", {markdown.sentence(dataset['note'])}," if dataset["note"] else ""
    loading_note = markdown.sentence(dataset.get("loading_note") or "")
    english = {"language": "en"} if hub_id else {}  # GLUE, SQuAD and RACE
    metadata = {**english, **_base_model(record), **metadata}
    sections = [
        _title(repo),
        f"{from_what} fine-tuned on {data} by the protocol of [RoBERTa](https://arxiv.org/abs/1907.11692): "
        f"{record['examples']['train']:,} training examples as the model sees them.",
        _loading(repo, config, revision) + (f"\n\n{loading_note}" if loading_note else ""),
        _architecture(config, record),
        _training(record),
        "## Evaluation\n\n" + _score_table([summary]) + f"\n\nEach run's {summary['metric']}: {seeds}. The weights are "
        f"those of seed {args['seed']}, at its best epoch."
        + (" Seeds that learnt to give one answer to everything: "
           + ", ".join(map(str, scores["degenerate_seeds"])) + "." if scores["degenerate_seeds"] else ""),
        "## Limits\n\n"
        "- Epoch and seed were picked on the validation set that the scores are of: on new data, expect less.\n"
        f"- Sequences had at most {args['max_seq_length']} tokens.\n"
        "- It knows the labels, the language and the style of its training set; elsewhere it was not measured.",
    ]  # fmt: skip
    return _card(repo, config, _of_task(summary), sections, metadata)


def in_progress(repo: str, config: dict[str, Any], step: int, max_steps: int, revision: str | None = None) -> ModelCard:
    """The card of a run that is still training."""
    sections = [
        _title(repo),
        f"**In training: step {step:,} of {max_steps:,}.** Nothing is measured yet; preset.yaml says what it is.",
        _loading(repo, config, revision),
    ]
    return _card(repo, config, [], sections, {})


def announced(repo: str) -> ModelCard:
    """The card of a run that begins."""
    return ModelCard(f"---\nlibrary_name: transformers\n---\n\n{_title(repo)}\n\n**In training.**\n")


def scored_on(summary: Summary, metric: str = "") -> str:
    """Split and number of examples that the scores are of, or those of a single metric."""
    counts = summary["scored_examples"]
    if metric in counts:
        return f"{next(iter(counts))}, {counted(counts[metric], 'example')}"
    splits = {name: count for name, count in counts.items() if name.startswith("validation")}
    return "; ".join(f"{split}, {counted(count, 'example')}" for split, count in splits.items())


def of_baseline(summary: Summary, metric: str) -> str:
    """What the same answer to every example scores by a metric, and which answer; "-" where there is no such figure."""
    baseline = summary["baseline"]
    value = baseline["metrics"].get(metric) if baseline else None
    return "-" if value is None else f"{percent(value)} (always {baseline['answer']})"


def device_of(hardware: Machine) -> str:
    """What a run ran on: its GPUs, or the cores of its processor, by its name where the record has it."""
    cores = hardware["cpu_cores"]
    on_cpu = f"{counted(cores, 'core')} of {hardware.get('processor') or hardware['machine']}"
    return ", ".join(hardware["gpus"]) or on_cpu


def _base_model(record: RunRecord) -> dict[str, str]:
    """For the head of the card, where the run started from a model of the Hub and not from a folder."""
    args = record["resolved_args"]
    return {"base_model": args["model_name_or_path"]} if _is_of_hub(record) and not args.get("random_weights") else {}


def _is_of_hub(record: RunRecord) -> bool:
    """Whether a run started from a model of the Hub. A fine-tuning has recorded the Hub's commit, or a shorter
    fingerprint of a folder; of pretraining that was continued, only the name tells, and the folder where it is."""
    name, weights = record["resolved_args"].get("model_name_or_path") or "", record["fingerprint"].get("weights")
    if weights not in (None, "None"):
        return bool(_HUB_ID.fullmatch(name) and _HUB_COMMIT.fullmatch(weights))
    is_name = _HUB_ID.fullmatch(name) if "/" in name else _KNOWN_ID.fullmatch(name)
    return bool(is_name) and name.split("/")[0] not in ("runs", ".", "..") and not resolve_path(name).exists()


def _start_name(record: RunRecord) -> str:
    """What the checkpoint is called that a run started from: of a folder its name, without the machine's path."""
    name = record["resolved_args"]["model_name_or_path"]
    return name if _is_of_hub(record) else Path(name).name


def _card(repo: str, config: dict, results: list[EvalResult], sections: list[str], metadata: dict) -> ModelCard:
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=_PIPELINES.get(_head(config)),
        tags=[config["model_type"], "roberta-recipe"],
        model_name=repo.split("/")[-1] if results else None,
        eval_results=results or None,
        **metadata,
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")


def _title(repo: str) -> str:
    return f"# {markdown.name(repo.split('/')[-1])}"


def _table(head: tuple[str, ...], lines: list[tuple[Any, ...]]) -> str:
    """A table of names and figures."""
    return markdown.table(head, [[markdown.name(value) for value in line] for line in lines])


def _head(config: dict[str, Any]) -> str:
    """`ForMaskedLM` and the like."""
    return "For" + config["architectures"][0].partition("For")[2]


def _loading(repo: str, config: dict[str, Any], revision: str | None) -> str:
    which = json.dumps(repo) + (f", revision={json.dumps(revision)}" if revision else "")
    cls = re.sub(r"\W", "", f"AutoModel{_head(config)}")
    return (
        f"```python\nfrom transformers import {cls}, AutoTokenizer\n"
        f"tokenizer = AutoTokenizer.from_pretrained({which})\n"
        f"model = {cls}.from_pretrained({which})\n```"
    )


def _architecture(config: dict[str, Any], record: RunRecord) -> str:
    rows = [(word, f"{config[key]:,}") for key, word in _SHAPE.items() if key in config]
    rows.append(("parameters", f"{record['parameters']:,}"))
    return f"## Architecture\n\n{markdown.code(config['architectures'][0])}\n\n" + _table(("", ""), rows)


def _training(record: RunRecord) -> str:
    args, versions = record["resolved_args"], record["versions"]
    commit = f"; commit {markdown.name(record['commit'])}" if record["commit"] else ""
    device = markdown.name(device_of(record["hardware"]))
    rows = [(name, args[name]) for name in record["shown_args"] if args.get(name) not in (None, False, -1)]
    used = ", ".join(markdown.name(f"{name} {version}") for name, version in versions.items())
    return (
        "## Training\n\n"
        + _table(("", ""), rows)
        + f"\n\n{counted(record['steps'], 'step')}, {record['tokens_seen']:,} tokens, "
        f"{record['train_seconds'] / 3600:.2f} hours on {device}, {record['tokens_per_second']:,} tokens/s. "
        f"Made with {used}{commit}. `preset.yaml` repeats the run."
    )


def _corpus_name(args: dict[str, Any]) -> str:
    """What the text is called: the corpus preset's name, or the names of the files, without the machine's path."""
    if args.get("train_file"):
        return ", ".join(Path(name).name for name in args["train_file"])
    return Path(args["corpus"]).stem


def _corpus_table(record: PretrainingRecord) -> str:
    """Share, tokens and passes of each source."""
    train, held_out = record["counts"]["train"], record["counts"]["validation"]
    rows = [
        (name, f"{share:.1%}", f"{counts['tokens']:,}", _passes(record["passes"].get(name, 0)),
         f"{held_out.get(name, {}).get('tokens', 0):,}")
        for (name, counts), share in zip(train.items(), record["fingerprint"]["shares"], strict=True)
    ]  # fmt: skip
    tokens = "tokens read, up to the end of a chunk"
    head = ("source", "share of the blocks", tokens, "passes over its text", "held-out tokens measured on")
    lost = {name: counts["lost_rows"] for name, counts in train.items() if counts["lost_rows"]}
    notes = [f"Rows of {markdown.name(name)} that could not be read: {count:,}." for name, count in lost.items()]
    if record["stopped_by"] != "max_steps":
        notes.append(f"Training was ended by {markdown.name(record['stopped_by'])}.")
    return "\n\n".join([_table(head, rows), *notes])


def _passes(passes: float) -> str:
    """Passes over a source's text; whole ones as long as it has not been read to its end."""
    if isinstance(passes, float):
        return f"{passes:.2f}"
    return f"{passes} to {passes + 1}" if passes else "less than 1"


def _text_table(record: PretrainingRecord) -> str:
    metrics = record["metrics"]
    whole = {name: metrics.get(f"eval_{name}") for name in ("loss", "perplexity", "loss_error")}
    whole |= {"unigram_entropy": record["unigram_entropy"], "blocks": validation_blocks(record)}
    figures = {"all held-out text": whole, **record["metrics_by_source"]}
    rows = [
        (
            name,
            f"{measured['blocks']:,}",
            with_error(measured["loss"], measured.get("loss_error")),
            perplexity_with_error(measured["perplexity"], measured.get("loss_error")),
            decimal(measured["unigram_entropy"]),
        )
        for name, measured in figures.items()
    ]
    explained = "Perplexity: masked, at 15% of positions. ± is the standard error over documents."
    head = ("held-out text", "blocks", "loss (nats)", "perplexity", "unigram entropy")
    return f"{_table(head, rows)}\n\n{explained}"


def _score_table(summaries: list[Summary]) -> str:
    rows = []
    for summary in summaries:
        dataset, metric, tests = summary["dataset"], summary["metric"], summary.get("tests", {})
        scored = [(scored_on(summary), picked_setting(summary), of_baseline(summary, metric))]
        scored += [(f"{split}, {counted(of['examples'], 'example')}", of, "") for split, of in tests.items()]
        for where, scores, baseline in scored:
            medians = {name: value for name, value in scores["medians"].items() if name in dataset["hub_metrics"]}
            shown = ", ".join(f"{name} {percent(value)}" for name, value in medians.items())
            spread = f"{percent(scores['lowest'])} to {percent(scores['highest'])}"
            median, seeds = percent(scores["median"]), len(scores["seeds"])
            rows.append((dataset["name"], where, metric, median, spread, seeds, baseline, shown))
    head = ("task", "scored on", "metric", "median", "spread", "seeds", "majority answer", "medians of all metrics")
    explained = "Majority answer: what the most frequent right answer scores when it is given to every example."
    return f"{_table(head, rows)}\n\n{explained}"


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


def _of_task(summary: Summary) -> list[EvalResult]:
    """The published medians of the picked setting; rows that are not a dataset's on the Hub are called `local/...`."""
    scores, dataset = picked_setting(summary), summary["dataset"]
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


def _alone(record: FinetuneRecord) -> Summary:
    """A run by itself in the form of a summary."""
    args, value = record["resolved_args"], record["metrics"][record["metric"]]
    scores: SettingScores = {
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
