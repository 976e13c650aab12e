"""The model card of a finished run, made from its records and nothing else (Mitchell et al. 2019, arXiv 1810.03993).

What is evaluated stands in the Hub's `model-index` form as well, so that the Hub shows it.
"""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from roberta_recipe.report import percent

ROBERTA_TOKENS = 2.1e12  # Table 9: 500K steps of 8K sequences of 512 tokens

_PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
}
_METRICS = {"spearman": "spearmanr"}  # where the Hub has another name
_SHOWN_ARGS = (
    "input_format", "max_seq_length", "mlm_probability", "mask_count", "global_batch_size", "max_steps",
    "num_train_epochs", "learning_rate", "lr_scheduler_type", "warmup_steps", "layer_decay", "head_dropout", "optim",
    "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "bf16", "fp16", "seed",
)  # fmt: skip
_SHAPE = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden size",
    "num_attention_heads": "attention heads",
    "intermediate_size": "feed-forward size",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "position embeddings",
}


def data_set_of(task: str) -> tuple[str, str | None, str]:
    """(id on the Hub, configuration, name to show) of what `summary.json` calls `task`."""
    if task.startswith("squad"):
        version = task.split()[-1]
        return f"rajpurkar/squad{'_v2' * (version == '2.0')}", None, f"SQuAD {version}"
    if task == "race":
        return "ehovy/race", "all", "RACE"
    return "nyu-mll/glue", task, f"GLUE {task}"


def pretrained(
    repo: str, config: dict[str, Any], record: dict[str, Any], summaries: list[dict[str, Any]], **metadata: Any
) -> ModelCard:
    """Of a pretraining run: `config` is its config.json, `record` its run_record.json, `summaries` what was fine-tuned
    from it; `metadata` goes into the head of the card as it is."""
    args, corpus = record["resolved_args"], _corpus_name(record["resolved_args"])
    start = f", continued from `{args['model_name_or_path']}`" if args.get("model_name_or_path") else ""
    part = record["tokens_seen"] / ROBERTA_TOKENS
    results = _of_text(corpus, corpus, record["metrics"])
    for name, one in record.get("metrics_by_source", {}).items():
        results += _of_text(name, f"{corpus}: {name}", {f"eval_{key}": value for key, value in one.items()})
    sections = [
        f"# {repo.split('/')[-1]}",
        f"A masked language model pretrained by [RoBERTa](https://arxiv.org/abs/1907.11692)'s recipe on "
        f"{corpus}{start}: {record['parameters']:,} parameters, {_millions(record['tokens_seen'])} tokens seen.",
        _loading(repo, config),
        _architecture(config, record),
        "## Text\n\n" + _corpus_table(record),
        _training(record),
        "## Evaluation\n\n" + _text_table(record) + "\n\n![loss over steps](loss_curve.png)",
    ]
    if summaries:
        sections.append("Fine-tuned from it, on validation:\n\n" + _score_table(summaries))
    sections.append(
        "## Limits\n\n"
        f"- It saw {record['tokens_seen']:,} tokens, {part:.2g} of the {ROBERTA_TOKENS:.2g} of RoBERTa's longest run.\n"
        f"- It was trained on {args['max_seq_length']} tokens at most; longer input is outside of what it learnt.\n"
        "- It fills in masked tokens and is meant to be fine-tuned; it does not write text.\n"
        "- It repeats the errors and the prejudice of its text, which was not filtered here.\n"
        "- What is not listed under Evaluation was not measured."
    )
    results += [result for summary in summaries for result in _of_task(summary)]
    return _card(repo, config, results, sections, metadata)


def fine_tuned(
    repo: str, config: dict[str, Any], record: dict[str, Any], summary: dict[str, Any] | None, **metadata: Any
) -> ModelCard:
    """Of the best run of a protocol: `record` is that run's, `summary` is of all seeds (None for a run by itself)."""
    args, task = record["resolved_args"], record["task"]
    data_set, _, name = data_set_of(task)
    summary = summary or _alone(record)
    row = summary["settings"][summary["picked"]]
    from_what = f"`{args['model_name_or_path']}`" + (", from random weights" if args.get("random_weights") else "")
    seeds = ", ".join(f"seed {seed}: {percent(value)}" for seed, value in row["seeds"].items())
    sections = [
        f"# {repo.split('/')[-1]}",
        f"{from_what} fine-tuned on {name} ([{data_set}](https://huggingface.co/datasets/{data_set})) by the protocol "
        "of [RoBERTa](https://arxiv.org/abs/1907.11692).",
        _loading(repo, config),
        _architecture(config, record),
        _training(record),
        "## Evaluation\n\n" + _score_table([summary]) + f"\n\nEach run's {summary['metric']}: {seeds}. The weights are "
        f"those of seed {args['seed']}, at its best epoch."
        + (" Seeds that learnt to give one answer to everything: " + ", ".join(map(str, row["degenerate_seeds"])) + "."
           if row["degenerate_seeds"] else ""),
        "## Limits\n\n"
        "- Epoch and seed were picked on the validation set that the scores are of: on new data, expect less.\n"
        f"- Sequences had at most {args['max_seq_length']} tokens.\n"
        "- It knows the labels, the language and the style of its training set; elsewhere it was not measured.",
    ]  # fmt: skip
    return _card(repo, config, _of_task(summary), sections, metadata)


def in_progress(repo: str, config: dict[str, Any], step: int, max_steps: int, **metadata: Any) -> ModelCard:
    """Of a run that goes on."""
    sections = [
        f"# {repo.split('/')[-1]}",
        f"**In training: step {step:,} of {max_steps:,}.** Nothing is measured yet; preset.yaml says what it is.",
        _loading(repo, config),
    ]
    return _card(repo, config, [], sections, metadata)


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


def _head(config: dict[str, Any]) -> str:
    """`ForMaskedLM` and the like."""
    return "For" + config["architectures"][0].partition("For")[2]


def _loading(repo: str, config: dict[str, Any]) -> str:
    cls = f"AutoModel{_head(config)}"
    return (
        f"```python\nfrom transformers import {cls}, AutoTokenizer\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{repo}")\n'
        f'model = {cls}.from_pretrained("{repo}")\n```'
    )


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _architecture(config: dict[str, Any], record: dict[str, Any]) -> str:
    rows = [(word, f"{config[key]:,}") for key, word in _SHAPE.items() if key in config]
    rows.append(("parameters", f"{record['parameters']:,}"))
    return f"## Architecture\n\n`{config['architectures'][0]}`\n\n" + _table(("", ""), rows)


def _training(record: dict[str, Any]) -> str:
    args, hardware, versions = record["resolved_args"], record["hardware"], record["versions"]
    rows = [(name, args[name]) for name in _SHOWN_ARGS if args.get(name) is not None]
    device = ", ".join(hardware["gpus"]) or f"{hardware['cpu_cores']} CPU cores ({hardware['machine']})"
    used = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        "## Training\n\n"
        + _table(("", ""), rows)
        + f"\n\n{record['steps']:,} steps, {record['tokens_seen']:,} tokens, {record['train_seconds'] / 3600:.2f} "
        f"hours on {device}, {record['tokens_per_second']:,} tokens/s. Made with {used}; commit {record['commit']}. "
        "`preset.yaml` repeats the run."
    )


def _corpus_name(args: dict[str, Any]) -> str:
    """What the text is called: the corpus preset's name, or the names of the files."""
    if args.get("train_file"):
        return ", ".join(Path(name).name for name in args["train_file"])
    return Path(args["corpus"]).stem


def _corpus_table(record: dict[str, Any]) -> str:
    counts = record["counts"]["train"]
    rows = [
        (name, f"{one['documents']:,}", f"{one['tokens']:,}", one["passes"], f"{one['lost_rows']:,}")
        for name, one in counts.items()
    ]
    return _table(("source", "documents read", "tokens read", "whole passes", "rows lost"), rows)


def _text_table(record: dict[str, Any]) -> str:
    metrics, by_source = record["metrics"], record.get("metrics_by_source", {})
    whole = {"loss": metrics["eval_loss"], "perplexity": metrics["eval_perplexity"]}
    rows = [("all held-out text", whole | {"unigram_entropy": record["unigram_entropy"]}), *by_source.items()]
    return _table(
        ("held-out text", "loss (nats)", "perplexity", "unigram entropy"),
        [(name, *(f"{one[key]:.3f}" for key in ("loss", "perplexity", "unigram_entropy"))) for name, one in rows],
    )


def _score_table(summaries: list[dict[str, Any]]) -> str:
    rows = []
    for summary in summaries:
        row = summary["settings"][summary["picked"]]
        spread = f"{percent(row['lowest'])} to {percent(row['highest'])}"
        others = ", ".join(f"{name} {percent(value)}" for name, value in row["medians"].items())
        rows.append(
            (
                data_set_of(summary["task"])[2],
                summary["metric"],
                percent(row["median"]),
                spread,
                len(row["seeds"]),
                others,
            )
        )
    return _table(("task", "metric", "median", "spread", "seeds", "medians of all metrics"), rows)


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


def _of_task(summary: dict[str, Any]) -> list[EvalResult]:
    row, (data_set, config, name) = summary["settings"][summary["picked"]], data_set_of(summary["task"])
    task_type = {"rajpurkar/squad": "question-answering", "rajpurkar/squad_v2": "question-answering"}
    seeds = len(row["seeds"])
    return [
        EvalResult(
            task_type=task_type.get(data_set, "multiple-choice" if data_set == "ehovy/race" else "text-classification"),
            dataset_type=data_set,
            dataset_name=name,
            dataset_config=config,
            dataset_split="validation",
            metric_type=_METRICS.get(metric, metric),
            metric_name=f"{metric}, median of {seeds} seed{'s' * (seeds > 1)}",
            metric_value=round(value, 4),
        )
        for metric, value in row["medians"].items()
        if value is not None and abs(value) < float("inf")
    ]


def _alone(record: dict[str, Any]) -> dict[str, Any]:
    """A run by itself in the form of a summary."""
    metric, seed = next(iter(record["metrics"])), record["resolved_args"]["seed"]
    value = record["metrics"][metric]
    row = {"median": value, "lowest": value, "highest": value, "seeds": {seed: value}, "medians": record["metrics"]}
    row["degenerate_seeds"] = [seed] if record["degenerate"] else []
    return {"task": record["task"], "metric": metric, "settings": [row], "picked": 0}


def _millions(number: int) -> str:
    return f"{number / 1e9:,.1f} B" if number >= 1e10 else f"{number / 1e6:,.1f} M"
