# /// script
# requires-python = ">=3.11"
# dependencies = ["roberta-recipe"]
# tool.uv.sources.roberta-recipe = { path = ".", editable = true }
# ///
"""Fine-tune an encoder to tag words (named entities, parts of speech) by the paper's protocol: median of five seeds.

    accelerate launch finetune_ner.py --train_file train.conll --validation_file dev.conll     # or: make ner DATA=...
    accelerate launch finetune_ner.py --dataset_name unimelb-nlp/wikiann --dataset_config_name en

Takes any AutoModelForTokenClassification checkpoint with a fast tokenizer. A CoNLL file has a word per line, its
tag in the last column, and a blank line between sentences; JSON and Parquet rows have lists of words and of tags. The
same command resumes. The preset names the source of each value; any flag overrides it.
"""

import functools
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification

from roberta_recipe import durable
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.log import counted, listed, logger, set_up_logging
from roberta_recipe.model.task_heads import load_with_head
from roberta_recipe.publishing import hub, plots
from roberta_recipe.record import CURVE_NAME, Summary, picked_setting
from roberta_recipe.settings import Pairs, setting
from roberta_recipe.tasks import ner, own_task, protocol, summaries
from roberta_recipe.training import launching
from roberta_recipe.training.finetune_trainer import padded_to, validation_scores

DEFAULT = "presets/ner/own.yaml"


@dataclass
class NerArguments(own_task.OwnFileArguments):
    """The flags of token classification."""

    _argument_group_name = "token classification"
    alternatives: ClassVar[Pairs] = (("train_file", "dataset_name"),)

    train_file: str | None = setting(None, "Training file: CoNLL, JSON lines or Parquet.", "content")
    text_column: str = setting("tokens", "Column with a list of words, in tables and on the Hub.", "content")
    label_column: str = setting("ner_tags", "Column with a list of their tags: names, or a ClassLabel.", "content")


def main(argv: list[str] | None = None) -> Summary:
    """Run the command line `argv`; returns the summary of the task. Raises `InputError` and `RunError`."""
    argv = sys.argv[1:] if argv is None else argv
    set_up_logging()
    launching.set_up_process()

    # 1. Arguments: dataclass < preset < command line.
    (args, training_args), resolved = read_arguments(argv)
    check_arguments(args, training_args)
    publisher = hub.publisher(training_args)

    # 2. Examples, and validation examples that are in the training set.
    with training_args.main_process_first():  # one process downloads
        data, note = read_data(args, training_args.do_predict)
    names, scheme = ner.names_and_scheme(data["train"])
    sentences = {sentence.words for sentence in data["train"]}
    overlap = sum(sentence.words in sentences for sentence in data["validation"])

    # 3. Features, head and loss.
    tokenizer = protocol.load_tokenizer(args)
    windows = {split: ner.make_windows(rows, names, tokenizer, args.max_seq_length) for split, rows in data.items()}
    found = announce(args, windows, names, scheme, overlap)

    # 4. A run for each seed; finished runs are read from disk.
    job = job_of(args, windows, names, scheme, tokenizer, found, note)
    runs = protocol.preset_runs(args, training_args)
    records = protocol.run_all(argv, runs, job, read_arguments, publisher and publisher.push_run, DEFAULT)

    # 5. Median and spread over seeds, beside the paper's if it has the task.
    folder = Path(training_args.output_dir)
    summary = protocol.finish((args, training_args), resolved, runs, records, job)
    if training_args.process_index == 0:
        plots.plot_runs(records, job.metric, folder / CURVE_NAME)
        print(summaries.table(summary, "", tuple(records[0]["metrics"]) if scheme else ()))

    # 6. Predictions of the best run, in CoNLL format.
    if training_args.process_index == 0:
        (best,) = [run for run in runs if str(run.output_dir) == picked_setting(summary)["best_run"]]
        write_predictions(best, job, windows)
    launching.leave_process_group()
    if publisher:
        publisher.push(folder, f"Best of {counted(len(runs), 'run')}")
    return summary


def read_arguments(argv: list[str]) -> tuple[tuple[NerArguments, protocol.FinetuneTrainingArguments], dict]:
    return protocol.read_arguments(NerArguments, argv, DEFAULT, __doc__)


def check_arguments(args: NerArguments, training_args: protocol.FinetuneTrainingArguments) -> None:
    """Raise `InputError` for missing data, and for flags without effect."""
    if not (args.train_file or args.dataset_name):
        raise InputError("no data: name a CoNLL file, JSON lines or Parquet with --train_file, or a --dataset_name")
    own_task.check_sources(args, training_args.do_predict)
    files = [file for file in (args.train_file, args.validation_file, args.test_file) if file]
    for name in ("text_column", "label_column"):
        is_set = getattr(args, name) != getattr(NerArguments, name)
        if is_set and files and not any(Path(file).suffix.lower() in ner.TABLES for file in files):
            raise InputError(f"{name}={getattr(args, name)} has no effect on CoNLL files: tags are in the last column")
    protocol.check_arguments(args, training_args, "f1", classifies=False)


def read_data(args: NerArguments, do_predict: bool) -> tuple[dict[str, list[ner.Sentence]], str]:
    """(sentences by split, note for the model card); without a validation set, a tenth of training is held out."""
    read_file = functools.partial(ner.read_file, text_column=args.text_column, label_column=args.label_column)
    tables, note = own_task.read_tables(args, read_file, do_predict), ""
    data = {split: read_split(args, split, *table) for split, table in tables.items()}
    if "validation" not in data:
        note = "a tenth of it held out for validation"
        parts = own_task.hold_out([0] * len(data["train"]))
        data["train"], data["validation"] = ([data["train"][row] for row in part] for part in parts)
        logger.info(f"Held out    a tenth of {tables['train'][0]}, as there is no validation set")
    if not data["validation"]:
        raise InputError(f"{tables['train'][0]} has too few sentences to hold out a tenth: name a validation_file")
    if len(tags := {tag for sentence in data["train"] for tag in sentence.tags}) < 2:
        hint = "tags are in the last column of CoNLL files, in tables in --label_column"
        raise InputError(f"{tables['train'][0]}: all words of the training set have the tag {min(tags)!r}; {hint}")
    return data | {"train": data["train"][: args.max_train_samples]}, note


def read_split(args: NerArguments, split: str, where: str, rows: own_task.Rows) -> list[ner.Sentence]:
    """The sentences of "train", "validation" or "test"."""
    return ner.parse_rows(where, rows, args.text_column, args.label_column, is_test=split == "test")


def build_model(args: NerArguments, names: tuple[str, ...]) -> torch.nn.Module:
    """The checkpoint with a head that scores the tags of each token."""
    cls = AutoModelForTokenClassification
    return load_with_head(cls, args.model_name_or_path, args.head_dropout, args.random_weights, names)


def announce(args: NerArguments, windows: dict[str, ner.Windows], names, scheme: str | None, overlap: int) -> dict:
    """Log the task and the data in a few lines; return the counts."""
    counts = {}
    for split, made in windows.items():
        counts[f"further windows of long sentences in {split}"] = len(made.features) - len(made.sentences)
        words = sum(len(sentence.words) for sentence in made.sentences)
        counts[f"words without a token in {split}"] = words - sum(len(index) for _, index in made.word_index)
        where = getattr(args, f"{split}_file") or f"{args.train_file or args.dataset_name}, {split}"
        counts[f"words with unseen tags in {split}"] = unknown_tags(where, made.sentences, names)
    rows = ", ".join(f"{split} {len(made.sentences):,}" for split, made in windows.items())
    logger.info(
        f"Task        {args.train_file or args.dataset_name}: {listed(names, 20)}; {scheme or 'no entities'}\n"
        f"Rows        {rows} sentences\n"
        f"Features    {'; '.join(f'{name}: {count:,}' for name, count in counts.items() if count) or 'none cut'}\n"
        f"Duplicates  {overlap:,} of {len(windows['validation'].sentences):,} validation sentences are in training"
    )
    if not scheme and "O" in map(str.upper, names):
        logger.warning("tags are not entity tags (B-, I-, O): scored by accuracy")
    return {"duplicates": {"in_train": overlap}, "features": counts}


def unknown_tags(where: str, sentences: list[ner.Sentence], names: tuple[str, ...]) -> int:
    """The number of words with tags that training lacks. Raises `InputError` if all tags but O are unknown."""
    tags = [tag for sentence in sentences for tag in sentence.tags]
    unknown = [tag for tag in tags if tag not in names]
    if unknown and {*tags} <= {"O", *unknown}:
        lacking = listed(sorted({*unknown}), 20)
        raise InputError(f"{where} has the tags {lacking}, and training has {listed(names, 20)}: use the same names")
    return len(unknown)


def job_of(
    args: NerArguments, windows: dict[str, ner.Windows], names, scheme, tokenizer, found: dict, note: str
) -> protocol.Job:
    """The task as a `Job` of the protocol."""
    rows = {split: [[sentence.words, sentence.tags] for sentence in made.sentences] for split, made in windows.items()}
    test_hash, gold = durable.fingerprint(rows.pop("test", None)), [tags for _, tags in rows["validation"]]
    ((majority, _),) = Counter(chain(*gold)).most_common(1)
    tests = {split: made.sentences for split, made in windows.items() if split == "test"}
    name = Path(args.train_file).name if args.train_file else args.dataset_name
    metrics = ("f1", "precision", "recall", "accuracy") if scheme else ("accuracy",)
    return protocol.Job(
        name=name,
        metric=metrics[0],
        dataset={
            **{"name": name, "hub_id": None, "hub_config": None, "split": "validation"},
            "task_type": "token-classification",
            "note": note,
            "hub_metrics": {metric: metric for metric in metrics},
        },
        tokenizer=tokenizer,
        build_model=lambda: build_model(args, names),
        features={split: made.features for split, made in windows.items()},
        validation=["validation"],
        tests={split: len(sentences) if sentences[0].tags else 0 for split, sentences in tests.items()},
        collator=DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=padded_to(args.max_seq_length)),
        loss_sum=tag_loss,
        measure=lambda split, scores, _: measure(windows[split], scores, scheme),
        degenerate=lambda scores: len(set().union(*windows["validation"].tags(scores))) == 1,
        answers=lambda scores: answers_of(windows["validation"], scores),
        scored_examples={"validation": len(windows["validation"].sentences)},
        baseline={"answer": majority, "metrics": ner.scores(gold, [[majority] * len(tags) for tags in gold], scheme)},
        found=found,
        inputs=protocol.inputs_fingerprint(args, tokenizer, [rows, names]),
        test_hash=test_hash,
    )


def tag_loss(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of cross-entropies at the words' first tokens, best class (batch, tokens) or its logit if not finite)."""
    labels = batch.pop("labels")
    logits = model(**batch).logits.float()
    best, classes = logits.detach().max(-1)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, torch.where(best.isfinite(), classes, best)


def measure(made: ner.Windows, scores: np.ndarray, scheme: str | None) -> dict[str, float]:
    """Precision, recall and F1 of entities, accuracy of words."""
    return ner.scores([sentence.tags for sentence in made.sentences], made.tags(scores), scheme)


def answers_of(made: ner.Windows, scores: np.ndarray) -> list[dict]:
    """Each sentence with its tags, those with most wrong tags first."""
    rows = [(each.words, each.tags, tags) for each, tags in zip(made.sentences, made.tags(scores), strict=True)]
    rows.sort(key=lambda row: -sum(map(str.__ne__, row[1], row[2])))
    return [dict(zip(("words", "tags", "predictions"), map(" ".join, row), strict=True)) for row in rows]


def write_predictions(run: summaries.Run, job: protocol.Job, windows: dict[str, ner.Windows]) -> None:
    """Write a line per word of validation and test set: word, tag if there is one, prediction (conlleval's order)."""
    scores = {"validation": validation_scores(run.output_dir)}
    if job.tests:
        scores |= summaries.all_test_scores([run], job.test_hash)[0]
    for split, of_split in scores.items():
        sentences, path = windows[split].sentences, run.output_dir / f"{split}_predictions.conll"
        rows = zip(sentences, windows[split].tags(of_split), strict=True)
        columns = [[*filter(None, (sentence.words, sentence.tags, tags))] for sentence, tags in rows]
        between = "\t" if any(" " in text for each in columns for column in each for text in column) else " "
        blocks = ("".join(between.join(row) + "\n" for row in zip(*each, strict=True)) for each in columns)
        durable.write_text(path, "\n".join(blocks))
        print(f"predictions {path}")


if __name__ == "__main__":
    exit_on_error(main)
