"""The model card of a finished run, made from its records and nothing else (Mitchell et al. 2019, arXiv 1810.03993).

What is evaluated stands in the Hub's `model-index` form as well, so that the Hub shows it.
"""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from roberta_recipe.report import markdown_table, number, percent

ROBERTA_TOKENS = 2.1e12  # Table 9: 500K steps of 8K sequences of 512 tokens

_PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
}
_METRICS = {"pearson": "pearsonr", "spearman": "spearmanr"}  # where the Hub has another name
_NO_SCORE = re.compile("total|thresh")  # among SQuAD's metrics
_PRETRAINING = ("input_format", "max_seq_length", "mlm_probability", "mask_count", "global_batch_size", "max_steps")
_FINE_TUNING = ("max_seq_length", "head_dropout", "layer_decay", "global_batch_size", "max_steps", "num_train_epochs")
_FINE_TUNING += (
    "random_weights",
    "max_train_samples",
    "other_rows",
    "qnli_form",
    "wsc_loss",
    "doc_stride",
    "no_answer",
)
_FINE_TUNING += ("passage_first", "level", "without_article")
_BOTH = ("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "adam_beta1", "adam_beta2", "adam_epsilon")
_BOTH += ("weight_decay", "max_grad_norm", "bf16", "fp16", "seed")
_SHAPE = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden size",
    "num_attention_heads": "attention heads",
    "intermediate_size": "feed-forward size",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "position embeddings",
}


def data_set_of(task: str, args: dict[str, Any]) -> tuple[str, str | None, str]:
    """(id on the Hub, configuration, name to show) of what `summary.json` calls `task`; no id of the Hub where the
    arguments say that the rows are others, or not all."""
    others = [name for name in ("other_rows", "validation_file", "without_article") if args.get(name)]
    others += [f"level {args['level']}"] if args.get("level", "all") != "all" else []
    if others:
        return f"local/{task.replace(' ', '_')}", None, f"{task} ({', '.join(others)})"
    if task.startswith("squad"):
        version = task.split()[-1]
        return f"rajpurkar/squad{'_v2' * (version == '2.0')}", None, f"SQuAD {version}"
    if task == "race":
        return "ehovy/race", "all", "RACE"
    return "nyu-mll/glue", task, f"GLUE {task}"


def pretrained(
    repo: str,
    config: dict[str, Any],
    record: dict[str, Any],
    summaries: list[dict[str, Any]],
    revision: str | None = None,
    **metadata: Any,
) -> ModelCard:
    """Of a pretraining run: `config` is its config.json, `record` its run_record.json, `summaries` what was fine-tuned
    from it; `metadata` goes into the head of the card as it is."""
    args, corpus = record["resolved_args"], _corpus_name(record["resolved_args"])
    metadata |= _base_model(args)
    start = f", continued from `{args['model_name_or_path']}`" if args.get("model_name_or_path") else ""
    part = record["tokens_seen"] / ROBERTA_TOKENS
    results = _of_text(corpus, corpus, record["metrics"])
    for name, one in record.get("metrics_by_source", {}).items():
        results += _of_text(
            f"{corpus}/{name}", f"{corpus}: {name}", {f"eval_{key}": value for key, value in one.items()}
        )
    sections = [
        f"# {repo.split('/')[-1]}",
        f"A masked language model pretrained by [RoBERTa](https://arxiv.org/abs/1907.11692)'s recipe on "
        f"{corpus}{start}: {record['parameters']:,} parameters, {_millions(record['tokens_seen'])} tokens seen.",
        _loading(repo, config, revision),
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
    repo: str,
    config: dict[str, Any],
    record: dict[str, Any],
    summary: dict[str, Any] | None,
    has_classifier: bool,
    revision: str | None = None,
    **metadata: Any,
) -> ModelCard:
    """Of the best run of a protocol: `record` is that run's, `summary` is of all seeds (None for a run by itself);
    `has_classifier`: an answerability classifier lies beside the weights."""
    args, task = record["resolved_args"], record["task"]
    summary = summary or _alone(record)
    data_set, _, name = data_set_of(task, args)
    row = summary["settings"][summary["picked"]]
    from_what = f"`{args['model_name_or_path']}`" + (", from random weights" if args.get("random_weights") else "")
    seeds = ", ".join(f"seed {seed}: {percent(value)}" for seed, value in row["seeds"].items())
    where = "" if data_set.startswith("local/") else f" ([{data_set}](https://huggingface.co/datasets/{data_set}))"
    where += ", trained on the schemas of SuperGLUE's WSC," if task == "wnli" else ""
    metadata |= _base_model(args)
    sections = [
        f"# {repo.split('/')[-1]}",
        f"{from_what} fine-tuned on {name}{where} by the protocol of [RoBERTa](https://arxiv.org/abs/1907.11692): "
        f"{record['examples']['train']:,} training examples as the model sees them.",
        _loading(repo, config, revision) + (_CLASSIFIER if has_classifier else ""),
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


def in_progress(repo: str, config: dict[str, Any], step: int, max_steps: int, revision: str | None = None) -> ModelCard:
    """Of a run that goes on."""
    sections = [
        f"# {repo.split('/')[-1]}",
        f"**In training: step {step:,} of {max_steps:,}.** Nothing is measured yet; preset.yaml says what it is.",
        _loading(repo, config, revision),
    ]
    return _card(repo, config, [], sections, {})


def announced(repo: str) -> ModelCard:
    """Of a run that begins."""
    return ModelCard(f"---\nlibrary_name: transformers\n---\n\n# {repo.split('/')[-1]}\n\n**In training.**\n")


def _base_model(args: dict[str, Any]) -> dict[str, str]:
    """For the head of the card, where what it started from is the Hub's and not a folder."""
    name = args.get("model_name_or_path") or ""
    from_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not Path(name).exists() and not args.get("random_weights")
    return {"base_model": name} if from_hub else {}


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


_CLASSIFIER = (
    "\n\nWhether a question has an answer is said by a classifier of its own, in `answerability.safetensors` (dense, "
    "tanh, one logit, on the first token); the model as loaded here gives spans only, and the scores below need both."
)


def _head(config: dict[str, Any]) -> str:
    """`ForMaskedLM` and the like."""
    return "For" + config["architectures"][0].partition("For")[2]


def _loading(repo: str, config: dict[str, Any], revision: str | None) -> str:
    cls, which = f"AutoModel{_head(config)}", f'"{repo}"' + (f', revision="{revision}"' if revision else "")
    return (
        f"```python\nfrom transformers import {cls}, AutoTokenizer\n"
        f"tokenizer = AutoTokenizer.from_pretrained({which})\n"
        f"model = {cls}.from_pretrained({which})\n```"
    )


def _architecture(config: dict[str, Any], record: dict[str, Any]) -> str:
    rows = [(word, f"{config[key]:,}") for key, word in _SHAPE.items() if key in config]
    rows.append(("parameters", f"{record['parameters']:,}"))
    return f"## Architecture\n\n`{config['architectures'][0]}`\n\n" + markdown_table(("", ""), rows)


def _training(record: dict[str, Any]) -> str:
    args, hardware, versions = record["resolved_args"], record["hardware"], record["versions"]
    own = _FINE_TUNING if "task" in record else _PRETRAINING
    rows = [(name, args[name]) for name in own + _BOTH if args.get(name) not in (None, False, -1)]
    device = ", ".join(hardware["gpus"]) or f"{hardware['cpu_cores']} CPU cores ({hardware['machine']})"
    used = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        "## Training\n\n"
        + markdown_table(("", ""), rows)
        + f"\n\n{record['steps']:,} steps, {record['tokens_seen']:,} tokens, {record['train_seconds'] / 3600:.2f} "
        f"hours on {device}, {record['tokens_per_second']:,} tokens/s. Made with {used}; commit {record['commit']}. "
        "`preset.yaml` repeats the run."
    )


def _corpus_name(args: dict[str, Any]) -> str:
    """What the text is called: the corpus preset's name, or the names of the files."""
    if args.get("train_file"):
        return ", ".join(args["train_file"])
    return Path(args["corpus"]).stem


def _corpus_table(record: dict[str, Any]) -> str:
    train, held_out = record["counts"]["train"], record["counts"]["validation"]
    rows = []
    for name, one in train.items():
        read = (f"{one[key]:,}" for key in ("documents", "tokens", "lost_rows"))
        rows.append((name, *read, record["passes"].get(name, 0), f"{held_out.get(name, {}).get('tokens', 0):,}"))
    head = ("source", "documents read", "tokens read", "rows lost", "whole passes", "tokens held out and read")
    note = "" if record["stopped_by"] == "max_steps" else f"\n\nTraining was ended by {record['stopped_by']}."
    return markdown_table(head, rows) + note


def _text_table(record: dict[str, Any]) -> str:
    metrics, by_source = record["metrics"], record.get("metrics_by_source", {})
    whole = {"loss": metrics["eval_loss"], "perplexity": metrics["eval_perplexity"]}
    rows = [("all held-out text", whole | {"unigram_entropy": record["unigram_entropy"]}), *by_source.items()]
    return markdown_table(
        ("held-out text", "loss (nats)", "perplexity", "unigram entropy"),
        [(name, *(number(one[key]) for key in ("loss", "perplexity", "unigram_entropy"))) for name, one in rows],
    )


def _score_table(summaries: list[dict[str, Any]]) -> str:
    rows = []
    for summary in summaries:
        row = summary["settings"][summary["picked"]]
        spread = f"{percent(row['lowest'])} to {percent(row['highest'])}"
        others = ", ".join(f"{n} {percent(value)}" for n, value in row["medians"].items() if not _NO_SCORE.search(n))
        rows.append(
            (
                data_set_of(summary["task"], summary["resolved_args"])[2],
                summary["metric"],
                percent(row["median"]),
                spread,
                len(row["seeds"]),
                others,
            )
        )
    return markdown_table(("task", "metric", "median", "spread", "seeds", "medians of all metrics"), rows)


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
    row, (data_set, config, name) = (
        summary["settings"][summary["picked"]],
        data_set_of(summary["task"], summary["resolved_args"]),
    )
    kinds = {"squad": "question-answering", "race": "multiple-choice"}
    task_type = kinds.get(summary["task"].split()[0], "text-classification")
    seeds = len(row["seeds"])
    return [
        EvalResult(
            task_type=task_type,
            dataset_type=data_set,
            dataset_name=name,
            dataset_config=config,
            dataset_split="validation_matched" if summary["task"] == "mnli" else "validation",
            metric_type=_METRICS.get(metric, metric),
            metric_name=f"{metric}, median of {seeds} seed{'s' * (seeds > 1)}",
            metric_value=round(value, 4),
        )
        for metric, value in row["medians"].items()
        if value is not None and abs(value) < float("inf") and not _NO_SCORE.search(metric)
    ]


def _alone(record: dict[str, Any]) -> dict[str, Any]:
    """A run by itself in the form of a summary."""
    metric, seed = record["metric"], record["resolved_args"]["seed"]
    value = record["metrics"][metric]
    row = {"median": value, "lowest": value, "highest": value, "seeds": {seed: value}, "medians": record["metrics"]}
    row["degenerate_seeds"] = [seed] if record["degenerate"] else []
    return {
        "task": record["task"],
        "metric": metric,
        "settings": [row],
        "picked": 0,
        "resolved_args": record["resolved_args"],
    }


def _millions(number: int) -> str:
    return f"{number / 1e9:,.1f} B" if number >= 1e10 else f"{number / 1e6:,.1f} M"
