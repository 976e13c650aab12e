"""Fine-tune an encoder on GLUE as RoBERTa did (paper, section 5.1): median of five seeds, best epoch on validation.

    accelerate launch finetune_glue.py --config presets/glue/rte.yaml          # or: make glue TASK=rte
    accelerate launch finetune_glue.py --config presets/glue/rte.yaml --model_name_or_path runs/mine --data_dir glue

Any checkpoint that AutoModelForSequenceClassification loads. Data come from the Hub (nyu-mll/glue) or from `data_dir`,
the official TSV files. A run that is done is not done again: the same command goes on. Each value is in the preset,
with its source; any flag overrides it.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from roberta_recipe import durable, finetuning, glue, hub, protocol, ranking, run, tokenization, wsc
from roberta_recipe.args import InputError, exit_on_error, setting
from roberta_recipe.metrics import Glue

# Rows are those of the official archive and of the Hub. `metric` is the paper's of Table 5; accuracy where not given.
PAIR, RTE_LABELS = ("sentence1", "sentence2"), ("entailment", "not_entailment")
MNLI_LABELS = ("entailment", "neutral", "contradiction")


def splits(train: int, validation: int, test: int) -> dict[str, tuple[str, int]]:
    return {"train": ("train.tsv", train), "validation": ("dev.tsv", validation), "test": ("test.tsv", test)}


TASKS = {
    "cola": glue.Task(
        "CoLA", ("sentence",), ("sentence",), splits(8551, 1043, 1063), labels=("0", "1"),
        metric="matthews_correlation",
        headers=dict.fromkeys(("train", "validation"), ("source", "label", "original", "sentence")),
        submission={"test": "CoLA.tsv"},
    ),
    "sst2": glue.Task(
        "SST-2", ("sentence",), ("sentence",), splits(67349, 872, 1821), labels=("0", "1"),
        submission={"test": "SST-2.tsv"},
    ),
    "mrpc": glue.Task(
        "MRPC", ("#1 String", "#2 String"), PAIR, splits(3668, 408, 1725), "Quality", ("0", "1"),
        submission={"test": "MRPC.tsv"},
    ),
    "stsb": glue.Task(
        "STS-B", PAIR, PAIR, splits(5749, 1500, 1379), "score", metric="pearson", submission={"test": "STS-B.tsv"}
    ),
    "qqp": glue.Task(
        "QQP", ("question1", "question2"), ("question1", "question2"), splits(363846, 40430, 390965), "is_duplicate",
        ("0", "1"), submission={"test": "QQP.tsv"}, skip_broken=True,
    ),
    "mnli": glue.Task(
        "MNLI", PAIR, ("premise", "hypothesis"),
        {
            "train": ("train.tsv", 392702),
            "validation_matched": ("dev_matched.tsv", 9815),
            "validation_mismatched": ("dev_mismatched.tsv", 9832),
            "test_matched": ("test_matched.tsv", 9796),
            "test_mismatched": ("test_mismatched.tsv", 9847),
        },
        "gold_label", MNLI_LABELS, words=True,
        submission={"test_matched": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"},
    ),
    "qnli": glue.Task(
        "QNLI", ("question", "sentence"), ("question", "sentence"), splits(104743, 5463, 5463), labels=RTE_LABELS,
        words=True, submission={"test": "QNLI.tsv"},
    ),
    "rte": glue.Task(
        "RTE", PAIR, PAIR, splits(2490, 277, 3000), labels=RTE_LABELS, words=True, submission={"test": "RTE.tsv"}
    ),
    "wnli": glue.Task(
        "WNLI", PAIR, PAIR, splits(635, 71, 146), labels=("0", "1"), submission={"test": "WNLI.tsv"}
    ),
}  # fmt: skip
# The diagnostic set: no training data, predicted by the MNLI model.
AX = glue.Task(
    "diagnostic", PAIR, ("premise", "hypothesis"), {"test": ("diagnostic.tsv", 1104)}, labels=MNLI_LABELS, words=True,
    submission={"test": "AX.tsv"},
)  # fmt: skip

# Validation scores of one model a task, times 100: large in the paper's Table 5 (medians of five runs), base in
# fairseq's examples/roberta/README.md. MNLI on the matched genres; WNLI is the paper's alone.
PAPER = {
    "base": {
        "mnli": 87.6, "qnli": 92.8, "qqp": 91.9, "rte": 78.7, "sst2": 94.8, "mrpc": 90.2, "cola": 63.6, "stsb": 91.2,
    },
    "large": {
        "mnli": 90.2, "qnli": 94.7, "qqp": 92.2, "rte": 86.6, "sst2": 96.4, "mrpc": 90.9, "cola": 68.0, "stsb": 92.4,
        "wnli": 91.3,
    },
}  # fmt: skip
WSC_FILES = {"train": "train.jsonl", "validation": "val.jsonl", "test": "test.jsonl"}  # SuperGLUE's
DEFAULT = "presets/glue/rte.yaml"
SWEEP_RATES, SWEEP_BATCHES = (1e-5, 2e-5, 3e-5), (16, 32)  # Table 10
SWEEP_FOLDER = "sweep"  # below output_dir
# Table 10: 6% of the steps; each run by itself is no sweep
SWEEP_FLAGS = ("--max_steps", "-1", "--num_train_epochs", "10", "--warmup_steps", "0.06", "--sweep", "false")


@dataclass
class GlueArguments(protocol.FinetuneArguments):
    """What is GLUE's alone."""

    task_name: str | None = setting(None, "One of " + ", ".join(TASKS) + ".")
    data_dir: str | None = setting(None, "Folder of GLUE's official TSV files; without it, nyu-mll/glue on the Hub.")
    sweep: bool = setting(False, "The paper's grid (Table 10): 3 rates x 2 batches, each with all seeds, 10 epochs.")
    qnli_form: Literal["classification", "ranking"] = setting(
        "classification", "QNLI: each pair by itself (the paper's validation scores), or ranked (its test scores)."
    )
    wsc_dir: str | None = setting(None, "WNLI: folder of SuperGLUE's WSC (train.jsonl, val.jsonl, test.jsonl).")
    wsc_loss: Literal["margin", "cross_entropy"] = setting(
        "cross_entropy", "WNLI: the paper's margin ranking loss, or what fairseq found better."
    )
    spacy_model: str = setting("en_core_web_lg", "WNLI: spaCy's model that finds noun phrases.")
    predict_with: Literal["best", "ensemble"] = setting(
        "best", "With do_predict: the best run on validation, or averaged probabilities of all seeds."
    )
    collect: str | None = setting(
        None,
        "Folder of finished tasks (runs/glue): print them beside Table 5 and end; with do_predict, zip the submission.",
    )
    other_rows: bool = setting(False, "Take data whose number of rows is not GLUE's.")


def main(argv: list[str] | None = None) -> dict | None:
    """Run the command line `argv`; returns the summary of the task. Raises `InputError` and `RunError`."""
    argv = sys.argv[1:] if argv is None else argv
    run.set_up_logging()
    run.use_all_cores()

    # 1. Arguments: dataclass < preset < command line, and what they must not say.
    (args, training_args), resolved = read_arguments(argv)
    if args.collect:
        tasks = {**TASKS, "ax": AX}
        below = SWEEP_FOLDER if args.sweep else ""
        return glue.collect(args.collect, below, tasks, PAPER, training_args.do_predict, not args.other_rows)
    check_arguments(args, training_args)
    publisher = hub.publisher(training_args)
    task = TASKS[args.task_name]

    # 2. Examples, and whether validation can be believed.
    with training_args.main_process_first():  # one process downloads
        data = read_data(args, training_args, task)
    validation = task.split("validation")[0]
    overlap = glue.duplicates(data["train"], data[validation])

    # 3. Features, head and loss.
    tokenizer = tokenization.load_tokenizer(args.tokenizer_name or args.model_name_or_path, needed=("pad_token",))
    form = FORMS[form_name(args)](args, task, data, tokenizer)
    found = {"duplicates": overlap, "features": form.counts}
    announce(args, task, data, found)

    # 4. Every run of the protocol that is not done yet.
    job = job_of(args, training_args, task, data, form, tokenizer, found)
    runs = of_grid(args, training_args) if args.sweep else protocol.of_preset(args, training_args)
    records = protocol.run_all(argv, runs, job, read_arguments, publisher, SWEEP_FLAGS if args.sweep else ())

    # 5. Median and spread over seeds, beside the paper's.
    folder = Path(training_args.output_dir, SWEEP_FOLDER if args.sweep else "")
    summary = protocol.finish(args, training_args, folder, runs, records, job, resolved)
    if training_args.process_index == 0:
        print(protocol.table(summary, paper_line(args.task_name)))

    # 6. The submission's files.
    if training_args.do_predict and training_args.process_index == 0:
        write_submission(args, job, form, data, runs, summary, folder)
    run.leave_process_group()
    if publisher:
        publisher.push(folder, f"Best of {len(runs)} runs")
    return summary


def read_arguments(argv: list[str]) -> tuple[tuple[GlueArguments, protocol.FinetuneTrainingArguments], dict]:
    """The filled dataclasses, and the resolved values as a preset."""
    return protocol.read_arguments(GlueArguments, argv, DEFAULT, __doc__)


def check_arguments(args: GlueArguments, training_args: protocol.FinetuneTrainingArguments) -> None:
    """Raise `InputError` for values out of range and for choices that exclude each other."""
    if args.task_name not in TASKS:
        raise InputError(f"task_name={args.task_name} is none of GLUE's: {', '.join(TASKS)} (ax goes with mnli)")
    if args.task_name == "wnli" and not args.wsc_dir:
        raise InputError("wnli is trained on SuperGLUE's WSC: name the folder of its train.jsonl, ... with wsc_dir")
    if args.qnli_form == "ranking" and args.task_name != "qnli":
        raise InputError(f"qnli_form=ranking is QNLI's, and task_name is {args.task_name}")
    protocol.check_arguments(args, training_args)


def read_data(args: GlueArguments, training_args, task: glue.Task) -> dict[str, glue.Examples]:
    """Training and validation examples, with `do_predict` the test sets too; MNLI's has the diagnostic set."""
    parts = ("train", "validation", "test") if training_args.do_predict else ("train", "validation")
    data = {}
    for split in (split for part in parts for split in task.split(part)):
        if args.task_name == "wnli" and split != "test":  # WNLI's own training set has each schema as two rows
            schemas = wsc.read_wsc(Path(args.wsc_dir, WSC_FILES[split]))
            if unlabelled := [schema.where for schema in schemas if schema.label is None]:
                raise InputError(f"{unlabelled[0]} has no label, and {split} needs one")
            texts = [(schema.text, schema.query) for schema in schemas]
            data[split] = glue.Examples(texts, [int(schema.label) for schema in schemas])
        else:
            data[split] = read_split(args, task, args.task_name, split)
    if args.task_name == "mnli" and training_args.do_predict:
        data["ax"] = read_split(args, AX, "ax", "test")
    if args.max_train_samples:
        whole, count = data["train"], args.max_train_samples
        data["train"] = dataclasses.replace(whole, texts=whole.texts[:count], labels=whole.labels[:count])
    return data


def read_split(args: GlueArguments, task: glue.Task, name: str, split: str) -> glue.Examples:
    """One split; one that has not GLUE's number of rows is refused, unless `other_rows`."""
    examples = glue.read_split(task, name, split, args.data_dir)
    _, rows = task.splits[split]
    if len(examples) != rows and not args.other_rows:
        raise InputError(
            f"{name}, {split}: {len(examples):,} rows, and GLUE's has {rows:,}; if the data are meant to be others, "
            "--other_rows true"
        )
    return examples


@dataclass
class Form:
    """How a task is put to the model. `scores` are (rows, ...) as `loss_sum` gives them beside the loss."""

    build_model: Callable[[], torch.nn.Module]
    features: dict[str, list[dict]]  # by split
    counts: dict[str, int]  # of what was cut or left out
    collator: Callable[[list[dict]], dict[str, torch.Tensor]]
    loss_sum: Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
    # (split, scores, the same model's validation scores) -> class numbers, or scores from 0 to 5
    predictions: Callable[[str, np.ndarray, np.ndarray], np.ndarray]
    averaged: Callable[[np.ndarray], np.ndarray] = lambda scores: scores  # what an ensemble takes the mean of


def form_name(args: GlueArguments) -> str:
    """A key of `FORMS`."""
    others = {"wnli": "candidates", "stsb": "regression", "qnli": args.qnli_form}
    return others.get(args.task_name, "classification")


def as_classification(args: GlueArguments, task: glue.Task, data: dict[str, glue.Examples], tokenizer) -> Form:
    """One text or a pair, a head on the first token, cross-entropy (section 5.1)."""
    features, cut = make_features(args, task, data, tokenizer)
    return Form(
        build_model=lambda: build_model(args, list(task.labels)),
        features=features,
        counts=cut,
        collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=finetuning.padded_to(args.max_seq_length)),
        loss_sum=classification_loss,
        predictions=lambda split, scores, _: scores.argmax(-1),
        averaged=lambda scores: torch.from_numpy(scores).double().softmax(-1).numpy(),
    )


def as_regression(args: GlueArguments, task: glue.Task, data: dict[str, glue.Examples], tokenizer) -> Form:
    """STS-B: a number, trained on scores scaled to [0, 1] by squared error (fairseq: --regression-target)."""
    features, cut = make_features(args, task, data, tokenizer)
    return Form(
        build_model=lambda: build_model(args, ["score"]),
        features=features,
        counts=cut,
        collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=finetuning.padded_to(args.max_seq_length)),
        loss_sum=regression_loss,
        predictions=lambda split, scores, _: 5 * scores,
    )


def as_ranking(args: GlueArguments, task: glue.Task, data: dict[str, glue.Examples], tokenizer) -> Form:
    """QNLI of the test setting (section 5.1): the sentences of a question are compared with one another."""
    features, cut = make_features(args, task, data, tokenizer)
    questions = {split: [texts[0] for texts in examples.texts] for split, examples in data.items()}
    features["train"], alone = ranking.group_features(features["train"], questions["train"], data["train"].labels)

    def predictions(split, scores, of_validation):
        labels = data["validation"].labels
        threshold = ranking.threshold_for_singles(of_validation, questions["validation"], labels)
        return ranking.rank(scores, questions[split], threshold)

    return Form(
        build_model=lambda: build_model(args, ["score"]),
        features=features,
        counts={**cut, **{f"questions {why}": count for why, count in alone.items()}},
        collator=ranking.RankingCollator(tokenizer, pad_to_multiple_of=finetuning.padded_to(args.max_seq_length)),
        loss_sum=ranking.ranking_loss,
        predictions=predictions,
    )


def as_candidates(args: GlueArguments, task: glue.Task, data: dict[str, glue.Examples], tokenizer) -> Form:
    """WNLI (section 5.1): noun phrases in the pronoun's place, scored by the masked-LM head."""
    parse, counts, features, schemas = wsc.load_spacy(args.spacy_model), {}, {}, {}
    for split in data:
        schemas[split] = wsc.read_wsc(Path(args.wsc_dir, WSC_FILES[split]))
        features[split] = [
            wsc.build_features(
                schema,
                wsc.noun_phrases(schema.text, parse(schema.text), schema.query),
                tokenizer,
                max_length=args.max_seq_length,
            )
            for schema in (schemas[split] if split == "test" else schemas[split][: len(data[split])])
        ]
    features["train"], left_out = wsc.training_features(features["train"])
    counts = {f"schemas {why}": count for why, count in left_out.items()}

    def predictions(split, scores, _):
        answers = scores >= 0  # how far the query is above the others
        if split == "test":
            answers = wsc.to_wnli_rows(answers.tolist(), schemas[split], data[split].texts)
        return np.asarray(answers, dtype=np.int64)

    return Form(
        build_model=lambda: wsc.load_masked_lm(args.model_name_or_path, args.random_weights),
        features=features,
        counts=counts,
        collator=wsc.WscCollator(tokenizer),
        loss_sum=functools.partial(wsc.run_batch, form=args.wsc_loss),
        predictions=predictions,
    )


FORMS = {
    "classification": as_classification,
    "regression": as_regression,
    "ranking": as_ranking,
    "candidates": as_candidates,
}


def build_model(args: GlueArguments, labels: list[str]) -> torch.nn.Module:
    """The checkpoint with a head for `labels`."""
    return finetuning.load_with_head(
        AutoModelForSequenceClassification,
        args.model_name_or_path,
        args.head_dropout,
        args.random_weights,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
    )


def make_features(
    args: GlueArguments, task: glue.Task, data: dict[str, glue.Examples], tokenizer
) -> tuple[dict[str, list[dict]], dict[str, int]]:
    """Model inputs of every example, two texts as a pair, and how many were cut. Scores are scaled to [0, 1]."""
    features, cut = {}, {}
    for split, examples in data.items():
        texts = [list(column) for column in zip(*examples.texts, strict=True)]
        encoded = tokenizer(
            *texts,
            truncation=True,
            max_length=args.max_seq_length,
            return_overflowing_tokens=True,
            split_special_tokens=True,  # text that reads </s> is text
        )
        # what does not fit follows as further rows of the same example
        _, rows, pieces = np.unique(encoded["overflow_to_sample_mapping"], return_index=True, return_counts=True)
        features[split] = [
            {**finetuning.compact(encoded, row), "labels": label if task.labels else label / 5}
            for row, label in zip(rows, examples.labels or [0] * len(rows), strict=True)
        ]
        cut[f"cut to {args.max_seq_length} in {split}"] = int((pieces > 1).sum())
    return features, cut


def announce(args: GlueArguments, task: glue.Task, data: dict[str, glue.Examples], found: dict) -> None:
    """What is about to be done, in a few lines."""
    validation, overlap = task.split("validation")[0], found["duplicates"]
    rows = ", ".join(f"{split} {len(examples):,}" for split, examples in data.items())
    skipped = sum(examples.skipped for examples in data.values())
    counts = "; ".join(f"{name}: {count:,}" for name, count in found["features"].items() if count) or "none cut"
    grid = (
        f"Grid        rates {', '.join(map(str, SWEEP_RATES))} x batches {', '.join(map(str, SWEEP_BATCHES))}, 10 "
        "epochs each: learning_rate, global_batch_size, max_steps, num_train_epochs, warmup_steps given do not count\n"
    )
    run.logger.info(
        f"Task        {args.task_name}: {', '.join(task.labels) or 'scores from 0 to 5'}; best epoch by {task.metric}\n"
        f"Rows        {rows}" + (f"; {skipped:,} broken ones skipped" if skipped else "") + "\n"
        f"Features    {form_name(args)}; {counts}\n"
        f"Duplicates  {overlap['in_train']:,} of {len(data[validation]):,} validation examples stand in the training "
        f"set, {overlap['with_the_same_label']:,} with the same label\n" + (grid if args.sweep else "")
    )


def job_of(args, training_args, task: glue.Task, data, form: Form, tokenizer, found: dict) -> protocol.Job:
    """The task as the protocol takes it."""
    validation = task.split("validation")
    rows = [[split, examples.texts, examples.labels] for split, examples in data.items() if examples.labels]
    own = ("task_name", "qnli_form", "wsc_loss", "spacy_model")
    return protocol.Job(
        name=args.task_name,
        metric=task.metric,
        tokenizer=tokenizer,
        build_model=form.build_model,
        features=form.features,
        validation=validation,
        tests=[split for split in data if split.startswith(("test", "ax"))],
        collator=form.collator,
        loss_sum=form.loss_sum,
        measure=lambda split, scores, of_validation: measure(args.task_name, form, split, scores, of_validation, data),
        degenerate=lambda scores: degenerate(form, validation[0], scores),
        found=found,
        inputs=protocol.inputs_fingerprint(args, own, tokenizer, rows),
        test_rows=durable.fingerprint([[split, of.texts] for split, of in data.items() if not of.labels]),
    )


def of_grid(args: GlueArguments, training_args: protocol.FinetuneTrainingArguments) -> list[protocol.Run]:
    """The paper's grid, each setting with every seed."""
    folder = os.path.join(training_args.output_dir, SWEEP_FOLDER)
    return protocol.runs_of(SWEEP_RATES, SWEEP_BATCHES, args.seeds, folder)


def paper_line(name: str) -> str:
    """The paper's figures of a task."""
    known = ", ".join(f"{size} {scores[name]}" for size, scores in PAPER.items() if name in scores)
    if not known:
        return "RoBERTa: no figure for this task"
    return f"RoBERTa: {known} (large: Table 5, median of five; base: fairseq's README)"


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


def measure(name: str, form: Form, split: str, scores: np.ndarray, of_validation: np.ndarray, data) -> dict[str, float]:
    """The task's metrics on a split; `of_validation` are the same model's validation scores."""
    predictions = form.predictions(split, scores, of_validation)
    metric = Glue(name, keep_in_memory=True)
    return metric.compute(predictions=predictions, references=data[split].labels)


def degenerate(form: Form, split: str, scores: np.ndarray) -> bool:
    """Whether a run has learnt to give one answer to everything."""
    answers = form.predictions(split, scores, scores)
    return bool(np.isnan(scores).any()) or len(np.unique(np.round(answers, 3))) == 1


def write_submission(args, job: protocol.Job, form: Form, data, runs, summary: dict, folder: Path) -> None:
    """The server's files in `<folder>/submission`, from the best run or from all seeds of the best setting."""
    task, row = TASKS[args.task_name], summary["settings"][summary["picked"]]
    chosen = [one for one in runs if one.setting == (row["learning_rate"], row["global_batch_size"])]
    if args.predict_with == "best":
        chosen = [one for one in chosen if str(one.output_dir) == row["best_run"]]
    tests = protocol.scores_of_tests(chosen, job)
    of_validation = mean_over_runs(form, [finetuning.validation_scores(one.output_dir) for one in chosen])
    if args.predict_with == "ensemble":
        metrics = measure(args.task_name, form, task.split("validation")[0], of_validation, of_validation, data)
        print(f"ensemble    validation {task.metric} {100 * metrics[task.metric]:.1f}")
    files = {split: (task, file) for split, file in task.submission.items()}
    if args.task_name == "mnli":
        files["ax"] = AX, AX.submission["test"]
    for split, (of, file) in files.items():
        scores = mean_over_runs(form, [arrays[split] for arrays in tests])
        predictions = form.predictions(split, scores, of_validation)
        path = folder / "submission" / file
        glue.write_predictions(path, glue.answers(of, predictions))
        print(f"submission  {path}: {len(predictions):,} rows from {len(chosen)} run{'s' * (len(chosen) > 1)}")


def mean_over_runs(form: Form, scores: list[np.ndarray]) -> np.ndarray:
    """What an ensemble predicts from; of one run, the order of classes is that of its scores."""
    return np.mean([form.averaged(array) for array in scores], axis=0)


if __name__ == "__main__":
    exit_on_error(main)
