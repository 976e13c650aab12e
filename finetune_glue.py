# /// script
# requires-python = ">=3.11"
# dependencies = ["roberta-recipe"]
# tool.uv.sources.roberta-recipe = { path = ".", editable = true }
# ///
"""Fine-tune an encoder on GLUE as RoBERTa did (paper, section 5.1), or on your own table: median of five seeds, best
epoch on validation.

    accelerate launch finetune_glue.py --task_name rte                                 # or: make glue TASK=rte
    accelerate launch finetune_glue.py --task_name rte --model_name_or_path runs/mine --data_dir glue
    accelerate launch finetune_glue.py --train_file my.csv --text_column review --label_column stars

Takes any AutoModelForSequenceClassification checkpoint. Data come from the Hub (nyu-mll/glue) or from `data_dir`,
the official TSV files. The same command resumes. Presets (presets/glue, by task) name the source of each value; any
flag overrides it. `tools/glue_table.py` prints the row of Table 5.
"""

import dataclasses
import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from roberta_recipe import durable
from roberta_recipe.data import tokenization
from roberta_recipe.data.phrases import load_spacy
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.input_files import resolve_path
from roberta_recipe.log import Bar, counted, listed, logger, set_up_logging
from roberta_recipe.model.task_heads import load_with_head
from roberta_recipe.publishing import hub, plots
from roberta_recipe.record import CURVE_NAME, Summary, picked_setting
from roberta_recipe.settings import Pairs, names_in, setting, value_of
from roberta_recipe.tasks import glue, glue_scores, own_task, protocol, qnli_ranking, summaries, wnli, wsc
from roberta_recipe.training import launching
from roberta_recipe.training.finetune_trainer import compact, padded_to, validation_scores

TASKS = glue.TASKS
WSC_FILES = {"train": "train.jsonl", "validation": "val.jsonl", "test": "test.jsonl"}  # SuperGLUE's
OWN = "presets/glue/own.yaml"
TOKENIZED_AT_ONCE = 1000  # examples tokenized in one call
SWEEP_RATES, SWEEP_BATCHES = (1e-5, 2e-5, 3e-5), (16, 32)  # Table 10
# Table 10: warm-up of 6% of the steps; each run of the grid is a plain run
SWEEP_FLAGS = ("--max_steps", "-1", "--num_train_epochs", "10", "--warmup_steps", "0.06", "--sweep", "false")
SET_BY_SWEEP = ("learning_rate", "global_batch_size", "max_steps", "num_train_epochs", "warmup_steps")


@dataclass
class GlueArguments(own_task.OwnTaskArguments):
    """GLUE's flags."""

    _argument_group_name = "GLUE"
    alternatives: ClassVar[Pairs] = (
        ("train_file", "dataset_name"), ("train_file", "data_dir"), ("dataset_name", "data_dir")
    )  # fmt: skip
    replaces: ClassVar[Pairs] = (("train_file", "task_name"), ("dataset_name", "task_name"))

    task_name: str | None = setting(None, f"One of {', '.join(TASKS)}, or a name for your own task.", "fixed")
    data_dir: str | None = setting(None, "Folder of GLUE's TSV files; default: nyu-mll/glue on the Hub.", "content")
    other_rows: bool = setting(False, "Accept data with row counts other than GLUE's.", "free", shown=True)
    sweep: bool = setting(False, "Run Table 10's grid: 3 learning rates x 2 batches, 10 epochs, all seeds.", "free")
    predict_with: Literal["best", "ensemble"] = setting(
        "best", "With do_predict: the best run on validation, or averaged probabilities of all seeds.", "free"
    )
    qnli_form: Literal["classification", "ranking"] = setting(
        "classification", "QNLI: classify pairs (paper: validation), or rank by question (test).", "fixed", shown="qnli"
    )
    wsc_dir: str | None = setting(None, "WNLI: folder of SuperGLUE's WSC (train.jsonl, ...).", "content")
    wsc_loss: Literal["margin", "cross_entropy"] = setting(
        "cross_entropy", "WNLI: the paper's margin loss, or cross-entropy (better in fairseq).", "fixed", shown="wnli"
    )
    spacy_model: str = setting("en_core_web_lg", "WNLI: spaCy model for noun phrases, a package or a folder.", "fixed")

    def __post_init__(self):
        if self.table and not self.task_name:
            self.task_name = Path(self.train_file).name if self.train_file else self.dataset_name

    @property
    def table(self) -> str | None:
        """The file or dataset of a task that is not GLUE's."""
        return self.train_file or self.dataset_name


def main(argv: list[str] | None = None) -> Summary:
    """Run the command line `argv`; returns the summary of the task. Raises `InputError` and `RunError`."""
    argv = sys.argv[1:] if argv is None else argv
    set_up_logging()
    launching.set_up_process()

    # 1. Arguments: dataclass < preset < command line.
    (args, training_args), resolved = read_arguments(argv)
    with training_args.main_process_first():  # one process downloads
        task = task_of(args, training_args.do_predict)
    check_arguments(args, training_args, task)
    publisher = hub.publisher(training_args)

    # 2. Examples, and validation examples that are in the training set.
    with training_args.main_process_first():
        data = read_data(args, training_args, task)
    overlap = glue.duplicates(data["train"], data[task.splits_of("validation")[0]])

    # 3. Features, head and loss.
    tokenizer = protocol.load_tokenizer(args)
    form = PARTS[parts_name(args, task)](args, task, data, tokenizer)
    found = announce(args, task, data, form, overlap)

    # 4. A run for each seed; finished runs are read from disk.
    job = job_of(args, task, data, form, tokenizer, found)
    folder = Path(training_args.output_dir, glue.SWEEP_FOLDER if args.sweep else "")
    grid = (SWEEP_RATES, SWEEP_BATCHES, args.seeds, folder)
    runs = summaries.runs_of(*grid) if args.sweep else protocol.preset_runs(args, training_args)
    preset, sweep_flags = default_preset(argv), SWEEP_FLAGS if args.sweep else ()
    records = protocol.run_all(argv, runs, job, read_arguments, publisher and publisher.push_run, preset, sweep_flags)

    # 5. Median and spread over seeds, beside the paper's if it has the task.
    summary = protocol.finish((args, training_args), resolved, runs, records, job)
    if training_args.process_index == 0:
        plots.plot_runs(records, job.metric, folder / CURVE_NAME)
        others = task.metrics if len(task.metrics) > 1 else ()
        print(summaries.table(summary, paper_line(args.task_name), others))

    # 6. The test set, in the server's format.
    if training_args.do_predict and training_args.process_index == 0:
        write_submission(args, task, job, form, data, runs, summary, folder)
    launching.leave_process_group()
    if publisher:
        publisher.push(folder, f"Best of {counted(len(runs), 'run')}")
    return summary


def read_arguments(argv: list[str]) -> tuple[tuple[GlueArguments, protocol.FinetuneTrainingArguments], dict]:
    (args, training_args), resolved = protocol.read_arguments(GlueArguments, argv, default_preset(argv), __doc__)
    if args.sweep and (given := sorted(names_in(argv) & set(SET_BY_SWEEP))):
        raise InputError(f"--{given[0]} has no effect with --sweep, which sets it from its grid: leave one of them out")
    return (args, training_args), resolved


def default_preset(argv: list[str]) -> str:
    """The default preset: the task's (RTE's if none is named); `OWN` for a user's table or a task without a preset."""
    is_table = value_of(argv, "train_file") or value_of(argv, "dataset_name")
    preset = OWN if is_table else f"presets/glue/{value_of(argv, 'task_name') or 'rte'}.yaml"
    return preset if resolve_path(preset).is_file() else OWN


def task_of(args: GlueArguments, do_predict: bool) -> glue.Task:
    """The GLUE task, or the task of the user's table (read here). Raises `InputError`."""
    own_task.check_sources(args, do_predict)
    if args.table:
        if args.task_name in TASKS:
            raise InputError(f"task_name={args.task_name} is a GLUE task: leave it out, to train on {args.table}")
        return own_task.read_task(args, do_predict)
    if args.task_name not in TASKS:
        known = f"{', '.join(TASKS)} (ax goes with mnli)"
        raise InputError(f"task_name={args.task_name} is not a GLUE task: {known}; for your own, name a train_file")
    return TASKS[args.task_name]


def check_arguments(args: GlueArguments, training_args: protocol.FinetuneTrainingArguments, task: glue.Task) -> None:
    """Raise `InputError` for values out of range and for flags that exclude each other."""
    if task.multi_label and {*task.labels} <= {"0", "1", "0.0", "1.0"}:
        raise InputError(f'{task.label_column} has lists of 0 and 1: name the labels of a row, ["joy", "fear"]')
    if args.predict_with == "ensemble" and not training_args.do_predict:
        raise InputError("predict_with=ensemble has no effect without --do_predict")
    if args.task_name == "wnli" and not args.wsc_dir:
        raise InputError("wnli is trained on SuperGLUE's WSC: name the folder of its train.jsonl, ... with wsc_dir")
    if args.task_name == "wnli" and args.head_dropout is not None:
        raise InputError(f"head_dropout={args.head_dropout} has no effect on wnli's masked-LM head: leave it out")
    if args.qnli_form == "ranking" and args.task_name != "qnli":
        raise InputError(f"qnli_form=ranking has no effect on task_name={args.task_name}: leave it out")
    protocol.check_arguments(args, training_args, task.metric, parts_name(args, task) == "classification")


def read_data(args: GlueArguments, training_args, task: glue.Task) -> dict[str, glue.Examples]:
    """Training and validation examples; with `do_predict` also the test sets, and for MNLI the diagnostic set."""
    kinds = ("train", "validation", "test") if training_args.do_predict else ("train", "validation")
    data = {}
    for split in (split for kind in kinds for split in task.splits_of(kind)):
        if args.task_name == "wnli":
            data[split] = read_schemas(args, task, split)
        else:
            data[split] = read_split(args, task, args.task_name, split)
    if args.task_name == "mnli" and training_args.do_predict:
        data["ax"] = read_split(args, glue.AX, "ax", "test")
    whole, count = data["train"], args.max_train_samples
    data["train"] = dataclasses.replace(whole, texts=whole.texts[:count], labels=whole.labels[:count])
    return data


def read_split(args: GlueArguments, task: glue.Task, name: str, split: str) -> glue.Examples:
    """One split. Raises `InputError` where its number of rows is not GLUE's, unless `other_rows`."""
    examples = glue.read_split(task, name, split, args.data_dir)
    _, rows = task.splits[split]
    if rows is not None and len(examples) != rows and not args.other_rows:
        raise InputError(
            f"{name}, {split}: {counted(len(examples), 'row')}, but GLUE's has {rows:,}; for other data, "
            "--other_rows true"
        )
    return examples


def read_schemas(args: GlueArguments, task: glue.Task, split: str) -> glue.Examples:
    """WNLI: SuperGLUE's schemas to train and validate on (WNLI's training set has most of them twice); for the test
    set, a schema for each of WNLI's rows."""
    schemas, counts = wsc.read_wsc(Path(args.wsc_dir, WSC_FILES[split])), {}
    if split == "test":
        rows = read_split(args, task, "wnli", split)
        labels = rows.labels
        aligned = wnli.align_rows(rows.texts, schemas, f"WNLI's {task.splits[split][0]}")
        schemas, counts = [row.schema for row in aligned], Counter(f"test rows with {row.origin}" for row in aligned)
    elif unlabelled := [schema.where for schema in schemas if schema.label is None]:
        raise InputError(f"{unlabelled[0]} has no label, and {split} needs labels")
    else:
        labels = [int(schema.label) for schema in schemas]
    texts = [(schema.text, schema.query) for schema in schemas]
    return glue.Examples(texts, labels, schemas=schemas, counts=counts)


@dataclass
class TaskParts:
    """A task's model, features, loss and predictions. `scores` are (rows, ...), as `loss_sum` returns them."""

    build_model: Callable[[], torch.nn.Module]
    features: dict[str, list[dict]]  # by split
    counts: dict[str, int]  # truncated and dropped examples
    collator: Callable[[list[dict]], dict[str, torch.Tensor]]
    loss_sum: Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
    # (split, its scores, the same model's validation scores) -> class numbers, 0 or 1 per class, or scores on its scale
    predictions: Callable[[str, np.ndarray, np.ndarray], np.ndarray]
    to_average: Callable[[np.ndarray], np.ndarray] = lambda scores: scores  # an ensemble averages these


def parts_name(args: GlueArguments, task: glue.Task) -> str:
    """A key of `PARTS`."""
    if args.task_name == "wnli":
        return "candidates"
    if not task.labels:
        return "regression"
    if task.multi_label:
        return "multi_label"
    return args.qnli_form if args.task_name == "qnli" else "classification"


def as_classification(args: GlueArguments, task: glue.Task, data: dict[str, glue.Examples], tokenizer) -> TaskParts:
    """One text or a pair, a head on the first token, cross-entropy (section 5.1)."""
    features, cut = make_features(args, task, data, tokenizer)
    return TaskParts(
        build_model=lambda: build_model(args, list(task.labels)),
        features=features,
        counts=cut,
        collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=padded_to(args.max_seq_length)),
        loss_sum=classification_loss,
        predictions=lambda split, scores, _: scores.argmax(-1),
        to_average=lambda scores: torch.from_numpy(scores).double().softmax(-1).numpy(),
    )


def as_regression(args: GlueArguments, task: glue.Task, data: dict[str, glue.Examples], tokenizer) -> TaskParts:
    """STS-B or own regression: one output, squared error on scores scaled to [0, 1] (fairseq: --regression-target)."""
    lowest, highest = task.scale
    return dataclasses.replace(
        as_classification(args, task, data, tokenizer),
        build_model=lambda: build_model(args, [task.label_column]),
        loss_sum=regression_loss,
        predictions=lambda split, scores, _: lowest + (highest - lowest) * scores.astype(float),
        to_average=lambda scores: scores,
    )


def as_multi_label(args: GlueArguments, task: glue.Task, data: dict[str, glue.Examples], tokenizer) -> TaskParts:
    """One output per class, binary cross-entropy; each class with a probability of at least 0.5 is predicted."""
    warnings.filterwarnings("ignore", message="Label smoothing is not compatible")  # Trainer warns for None too
    return dataclasses.replace(
        as_classification(args, task, data, tokenizer),
        build_model=lambda: build_model(args, list(task.labels), "multi_label_classification"),
        loss_sum=multi_label_loss,
        predictions=lambda split, scores, _: (scores >= 0.5).astype(np.int64),
        to_average=lambda scores: scores,
    )


def as_ranking(args: GlueArguments, task: glue.Task, data: dict[str, glue.Examples], tokenizer) -> TaskParts:
    """QNLI's test setting (section 5.1): the sentences of a question are ranked against each other."""
    features, cut = make_features(args, task, data, tokenizer)
    questions = {split: [texts[0] for texts in examples.texts] for split, examples in data.items()}
    features["train"], left_out = qnli_ranking.group_features(
        features["train"], questions["train"], data["train"].labels
    )

    def predictions(split, scores, of_validation):
        labels = data["validation"].labels
        threshold = qnli_ranking.threshold_for_singles(of_validation, questions["validation"], labels)
        return qnli_ranking.rank(scores, questions[split], threshold)

    alone = sum(count == 1 for count in Counter(questions["validation"]).values())
    tuned = {"validation questions with a single pair, decided by a threshold tuned on these": alone}
    return TaskParts(
        build_model=lambda: build_model(args, ["score"]),
        features=features,
        counts={**cut, **{f"questions {why}": count for why, count in left_out.items()}, **tuned},
        collator=qnli_ranking.RankingCollator(tokenizer, pad_to_multiple_of=padded_to(args.max_seq_length)),
        loss_sum=qnli_ranking.ranking_loss,
        predictions=predictions,
    )


def as_candidates(args: GlueArguments, task: glue.Task, data: dict[str, glue.Examples], tokenizer) -> TaskParts:
    """WNLI (section 5.1): noun phrases in the pronoun's position, scored by the masked-LM head."""
    parse, counts, features = load_spacy(args.spacy_model, "WNLI"), Counter(), {}
    encode = tokenization.text_tokenizer(tokenizer)

    def candidates(schema: wsc.Schema) -> list[str]:
        return wsc.noun_phrases(schema.text, parse(schema.text), schema.query)

    for split, examples in data.items():
        counts.update(examples.counts)
        features[split] = [
            wsc.build_features(schema, candidates(schema), tokenizer, args.max_seq_length, encode)
            for schema in examples.schemas[: len(examples)]
        ]
    features["train"], left_out = wsc.training_features(features["train"])
    counts.update({f"schemas {why}": count for why, count in left_out.items()})
    return TaskParts(
        build_model=lambda: wsc.load_masked_lm(args.model_name_or_path, args.random_weights),
        features=features,
        counts=counts,
        collator=wsc.WscCollator(tokenizer),
        loss_sum=functools.partial(wsc.run_batch, form=args.wsc_loss),
        predictions=lambda split, scores, _: (scores >= 0).astype(np.int64),  # the query's margin over the candidates
    )


PARTS = {
    "classification": as_classification,
    "regression": as_regression,
    "multi_label": as_multi_label,
    "ranking": as_ranking,
    "candidates": as_candidates,
}


def build_model(args: GlueArguments, labels: list[str], problem_type: str | None = None) -> torch.nn.Module:
    """The checkpoint with a head for `labels`."""
    return load_with_head(
        AutoModelForSequenceClassification,
        args.model_name_or_path,
        args.head_dropout,
        args.random_weights,
        labels,
        problem_type=problem_type or ("regression" if len(labels) == 1 else "single_label_classification"),
    )


def make_features(
    args: GlueArguments, task: glue.Task, data: dict[str, glue.Examples], tokenizer
) -> tuple[dict[str, list[dict]], dict[str, int]]:
    """Model inputs of every example, two texts as a pair, and how many were truncated. Scores are scaled to [0, 1]."""
    features, cut, encode = {}, {}, tokenization.text_tokenizer(tokenizer)
    for split, examples in data.items():
        unlabelled = (0,) * len(task.labels) if task.multi_label else 0
        labels, features[split], longer = examples.labels or [unlabelled] * len(examples), [], 0
        for first in Bar(range(0, len(examples), TOKENIZED_AT_ONCE), f"Tokenizing {split}", leave=False):
            some = slice(first, first + TOKENIZED_AT_ONCE)
            texts = [list(column) for column in zip(*examples.texts[some], strict=True)]
            encoded = encode(*texts, truncation=True, max_length=args.max_seq_length)
            features[split] += [
                {**compact(encoded, row), **targets(task, label)} for row, label in enumerate(labels[some])
            ]
            # not `return_overflowing_tokens`: for a long pair, it returns all combinations of the texts' windows
            full = [row for row, ids in enumerate(encoded["input_ids"]) if len(ids) == args.max_seq_length]
            whole = encode(*([column[row] for row in full] for column in texts), verbose=False) if full else {}
            longer += sum(len(ids) > args.max_seq_length for ids in whole.get("input_ids", []))
        cut[f"cut to {args.max_seq_length} in {split}"] = longer
    return features, cut


def targets(task: glue.Task, label) -> dict:
    """The label columns of a feature. `labels` has one entry per example: losses are divided by their number."""
    lowest, highest = task.scale
    if task.multi_label:
        return {"labels": 0, "classes": label}
    return {"labels": label if task.labels else (label - lowest) / (highest - lowest)}


def announce(
    args: GlueArguments, task: glue.Task, data: dict[str, glue.Examples], form: TaskParts, overlap: dict
) -> dict:
    """Log the task and the data in a few lines; return the counts."""
    validation = data[task.splits_of("validation")[0]]
    rows = ", ".join(f"{split} {len(examples):,}" for split, examples in data.items())
    skipped = {f"broken rows in {split}": examples.skipped for split, examples in data.items() if examples.skipped}
    counts = "; ".join(f"{name}: {count:,}" for name, count in {**form.counts, **skipped}.items() if count)
    answers = listed(task.labels, 20) or "regression, scores from {:.12g} to {:.12g}".format(*task.scale)
    if args.table:
        answers = f"{', '.join(task.columns)} -> {task.label_column}, {answers}"
    logger.info(
        f"Task        {args.task_name}: {answers}; best epoch by {task.metric}\n"
        f"Rows        {rows}{f' ({task.note})' if task.note else ''}\n"
        f"Features    {parts_name(args, task)}; {counts or 'none cut'}\n"
        f"Duplicates  {overlap['in_train']:,} of {len(validation):,} validation examples are in the training set, "
        f"{overlap['with_the_same_label']:,} with the same label"
    )
    return {"duplicates": overlap, "features": {**form.counts, **skipped}}


def job_of(args: GlueArguments, task: glue.Task, data, form: TaskParts, tokenizer, found: dict) -> protocol.Job:
    """The task as a `Job` of the protocol."""
    validation = task.splits_of("validation")
    labels = {split: data[split].labels for split in validation}
    names = [split for split in data if split.startswith(("test", "ax"))]
    rows = [[split, examples.texts, examples.labels] for split, examples in data.items() if split not in names]
    tests = [[split, data[split].texts] for split in names]
    if args.task_name == "wnli":  # with the parser's phrases and their positions
        rows, tests = ([[split, *row, form.features[split]] for split, *row in some] for some in (rows, tests))
    return protocol.Job(
        name=args.task_name,
        metric=task.metric,
        dataset=glue.dataset_card(args.task_name, task, args.other_rows),
        tokenizer=tokenizer,
        build_model=form.build_model,
        features=form.features,
        validation=validation,
        tests={name: len(data[name].labels or ()) for name in names},
        collator=form.collator,
        loss_sum=form.loss_sum,
        measure=lambda split, scores, of_validation: measure(task, form, split, scores, of_validation, data),
        degenerate=lambda scores: degenerate(task, form, validation[0], scores),
        answers=lambda scores: answers_of(task, form, validation[0], scores, data),
        scored_examples={split: len(of_split) for split, of_split in labels.items()},
        baseline=summaries.majority_answer(
            labels,
            () if task.multi_label else task.labels,
            lambda split, answers: glue_scores.scores(task.metrics, answers, labels[split]),
        ),
        found=found,
        inputs=protocol.inputs_fingerprint(args, tokenizer, [*rows, task.labels, task.metrics]),
        test_hash=durable.fingerprint(tests),
    )


def degenerate(task: glue.Task, form: TaskParts, split: str, scores: np.ndarray) -> bool:
    """Whether all predictions are the same, to 1/1000 of the scale of a regression."""
    predictions = form.predictions(split, scores, scores) if task.labels else scores.round(3)
    return len(np.unique(predictions, axis=0)) == 1


def paper_line(name: str) -> str:
    """The paper's figures of a task; empty for a task of your own."""
    known = ", ".join(f"{size} {scores[name]}" for size, scores in glue.PAPER.items() if name in scores)
    return f"RoBERTa: {known} (large: Table 5, median of five; base: fairseq's README)" if known else ""


def classification_loss(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of cross-entropies in nats, logits (batch, classes))."""
    labels = batch.pop("labels")
    logits = model(**batch).logits
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum"), logits


def regression_loss(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of squared errors on scores from 0 to 1, predicted scores (batch,))."""
    labels = batch.pop("labels")
    scores = model(**batch).logits.squeeze(-1)
    return torch.nn.functional.mse_loss(scores.float(), labels.float(), reduction="sum"), scores


def multi_label_loss(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over examples and classes of the binary cross-entropies, probabilities (batch, classes)). A step's loss is
    the sum over classes, mean over examples."""
    batch.pop("labels")
    wanted = batch.pop("classes").float()
    logits = model(**batch).logits.float()
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="sum"), logits.sigmoid()


def measure(
    task: glue.Task, form: TaskParts, split: str, scores: np.ndarray, of_validation: np.ndarray, data
) -> dict[str, float]:
    """The task's metrics on a split; `of_validation` are the same model's validation scores."""
    predictions = form.predictions(split, scores, of_validation)
    return glue_scores.scores(task.metrics, predictions, data[split].labels)


def answers_of(task: glue.Task, form: TaskParts, split: str, scores: np.ndarray, data) -> list[dict]:
    """Each example of a split with its prediction, the worst first; with probabilities except for rankings."""
    labels, predictions = data[split].labels, form.predictions(split, scores, scores)
    examples = [dict(zip(task.columns, texts, strict=True)) for texts in data[split].texts]
    if task.labels and not task.multi_label:
        probabilities = form.to_average(scores) if scores.ndim == 2 else None
        return summaries.class_answers(examples, task.labels, labels, predictions, probabilities)
    if task.multi_label:
        columns = [glue.answers(task, rows) for rows in (labels, predictions)]
        name, errors = "wrong", np.not_equal(predictions, labels).sum(-1)
    else:
        columns = [[f"{score:.12g}" for score in rows] for rows in (labels, predictions)]
        name, errors = "error", np.abs(predictions - labels)
    rows = sorted(zip(examples, *columns, errors, strict=True), key=lambda row: -row[3])
    return [{**example, "label": label, "prediction": found, name: f"{off:.6g}"} for example, label, found, off in rows]


def write_submission(
    args: GlueArguments, task: glue.Task, job: protocol.Job, form: TaskParts, data, runs, summary: Summary, folder: Path
) -> None:
    """Write the GLUE server's files, or prediction files of a task of your own, into `<folder>/submission`, from the
    best run or from all seeds of the best setting."""
    picked = picked_setting(summary)
    chosen = summaries.of_setting(runs, picked)
    if args.predict_with == "best":
        chosen = [run for run in chosen if str(run.output_dir) == picked["best_run"]]
    tests = summaries.all_test_scores(chosen, job.test_hash)
    of_validation = np.mean([form.to_average(validation_scores(run.output_dir)) for run in chosen], axis=0)
    if args.predict_with == "ensemble":
        metrics = measure(task, form, job.validation[0], of_validation, of_validation, data)
        print(f"ensemble    validation {task.metric} {100 * metrics[task.metric]:.1f}")
    if not task.submission:
        own = {split: f"{Path(task.splits[split][0]).stem}_predictions.tsv" for split in task.splits_of("test")}
        task = dataclasses.replace(task, submission=own)
    files = {split: (task, file) for split, file in task.submission.items()}
    if args.task_name == "mnli":
        files["ax"] = glue.AX, glue.AX.submission["test"]
    for split, (of_task, file) in files.items():
        scores = np.mean([form.to_average(of_run[split]) for of_run in tests], axis=0)
        predictions = form.predictions(split, scores, of_validation)
        path = folder / "submission" / file
        path.parent.mkdir(exist_ok=True)
        rows = (f"{number}\t{answer}\n" for number, answer in enumerate(glue.answers(of_task, predictions)))
        durable.write_text(path, "index\tprediction\n" + "".join(rows))
        print(f"submission  {path}: {counted(len(predictions), 'row')} from {counted(len(chosen), 'run')}")


if __name__ == "__main__":
    exit_on_error(main)
