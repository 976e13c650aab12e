# /// script
# requires-python = ">=3.11"
# dependencies = ["roberta-recipe"]
# tool.uv.sources.roberta-recipe = { path = ".", editable = true }
# ///
"""Fine-tune an encoder on RACE as RoBERTa did (paper, section 5.3): median of five seeds.

    accelerate launch finetune_race.py --config presets/race/paper.yaml            # or: make race
    accelerate launch finetune_race.py --config presets/race/paper.yaml --model_name_or_path runs/mine --data_dir RACE

Takes any AutoModelForMultipleChoice checkpoint with a fast tokenizer. Data come from the Hub (ehovy/race) or from
`data_dir`, the official files. The same command resumes. Presets name the source of each value; any flag overrides it.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import AutoModelForMultipleChoice

from roberta_recipe import durable
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.log import counted, logger, set_up_logging
from roberta_recipe.model.task_heads import load_with_head
from roberta_recipe.publishing import hub, plots
from roberta_recipe.record import CURVE_NAME, Summary
from roberta_recipe.settings import setting
from roberta_recipe.tasks import protocol, race, summaries
from roberta_recipe.training import launching
from roberta_recipe.training.finetune_trainer import padded_to

DEFAULT = "presets/race/paper.yaml"


@dataclass
class RaceArguments(protocol.FinetuneArguments):
    """RACE's flags."""

    _argument_group_name = "RACE"

    data_dir: str | None = setting(
        None, "Folder of RACE's files: train|dev|test/middle|high/*.txt; default: the Hub.", "content"
    )
    level: Literal["all", "middle", "high"] = setting(
        "all", "Train and validate on both levels, or on a single level.", "fixed", shown=True
    )
    max_option_length: int = setting(
        128, "Tokens of a question with an option; longer ones are truncated.", "fixed", shown=True
    )
    without_article: bool = setting(False, "Ablation: leave the article out.", "fixed", shown=True)
    max_train_samples: int | None = setting(None, "Number of training questions, evenly spaced.", "fixed", shown=True)


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
    splits = ("train", "validation", "test") if training_args.do_predict else ("train", "validation")
    left_out: dict[str, list[str]] = {split: [] for split in splits}  # passages without questions
    with training_args.main_process_first():  # one process downloads
        data = {split: read_split(args, split, left_out[split]) for split in splits}
    articles = {question.article for question in data["train"]}
    overlap = sum(question.article in articles for question in data["validation"])

    # 3. Features, head and loss.
    tokenizer = protocol.load_tokenizer(args)
    cut = args.max_seq_length, args.max_option_length, args.without_article
    features = {split: race.features(questions, tokenizer, *cut) for split, questions in data.items()}
    found = announce(args, data, left_out, features, overlap)

    # 4. A run for each seed; finished runs are read from disk.
    job = job_of(args, data, features, tokenizer, found)
    runs = protocol.preset_runs(args, training_args)
    records = protocol.run_all(argv, runs, job, read_arguments, publisher and publisher.push_run, DEFAULT)

    # 5. Median and spread over seeds, beside the paper's if it has the task.
    folder = Path(training_args.output_dir)
    summary = protocol.finish((args, training_args), resolved, runs, records, job)
    if training_args.process_index == 0:
        plots.plot_runs(records, job.metric, folder / CURVE_NAME)
        paper = ", ".join(f"{name} {score}" for name, score in race.PAPER.items())
        print(summaries.table(summary, f"RoBERTa-large, test set: {paper} (Table 7)", tuple(records[0]["metrics"])))
    launching.leave_process_group()
    if publisher:
        publisher.push(folder, f"Best of {counted(len(runs), 'run')}")
    return summary


def read_arguments(argv: list[str]) -> tuple[tuple[RaceArguments, protocol.FinetuneTrainingArguments], dict]:
    return protocol.read_arguments(RaceArguments, argv, DEFAULT, __doc__)


def check_arguments(args: RaceArguments, training_args: protocol.FinetuneTrainingArguments) -> None:
    """Raise `InputError` for values out of range."""
    for_article = args.max_seq_length - 4 - args.max_option_length  # RoBERTa's special tokens around a pair
    if args.max_option_length < 1 or for_article < 1:
        raise InputError(
            f"max_option_length={args.max_option_length} must be from 1 to {args.max_seq_length - 5}, so that "
            f"max_seq_length={args.max_seq_length} leaves room for the article; with the paper's proportion: "
            f"--max_option_length {args.max_seq_length // 4}"
        )
    protocol.check_arguments(args, training_args, "accuracy", classifies=True)


def read_split(args: RaceArguments, split: str, left_out: list[str] | None = None) -> list[race.RaceExample]:
    """The questions of "train", "validation" or "test"; passages without questions are added to `left_out`."""
    levels = race.LEVELS if args.level == "all" else (args.level,)
    if args.data_dir:
        questions = race.read_folder(Path(args.data_dir), split, levels, left_out)
    else:
        questions = race.read_hub(split, levels)
    count = args.max_train_samples
    if split == "train" and count is not None and count < len(questions):
        questions = [questions[number * len(questions) // count] for number in range(count)]
    return questions


def build_model(args: RaceArguments) -> torch.nn.Module:
    """The checkpoint with a head that gives each option a score."""
    return load_with_head(AutoModelForMultipleChoice, args.model_name_or_path, args.head_dropout, args.random_weights)


def announce(args: RaceArguments, data, left_out, features: dict[str, race.Features], overlap: int) -> dict:
    """Log the task and the data in a few lines; return the counts."""
    rows = ", ".join(f"{split} {len(questions):,}" for split, questions in data.items())
    lines = [f"Task        RACE, {args.level}; best epoch by accuracy", f"Rows        {rows} questions"]
    counts: dict[str, dict] = {}
    for split, questions in data.items():
        for level in dict.fromkeys(question.level for question in questions):
            of_level = np.array([question.level == level for question in questions])
            counts[f"{split}_{level}"] = row = {
                "passages_without_questions": sum(name.startswith(f"{level}/") for name in left_out[split]),
                "questions": int(of_level.sum()),
                "questions_with_article_cut": int(features[split].articles_cut[of_level].sum()),
                "options_cut": int(features[split].options_cut[of_level].sum()),
            }
            lines.append(
                f"Features    {split}, {level}: {row['passages_without_questions']} passages have no questions; "
                f"article cut to fit {args.max_seq_length} in {row['questions_with_article_cut']:,} of "
                f"{row['questions']:,} questions, {row['options_cut']:,} options cut to {args.max_option_length}"
            )
    lines.append(
        f"Duplicates  {overlap:,} of {len(data['validation']):,} validation questions share an article with training"
    )
    logger.info("\n".join(lines))
    return {"duplicates": {"articles_in_train": overlap}, "features": counts}


def job_of(args: RaceArguments, data, features: dict[str, race.Features], tokenizer, found: dict) -> protocol.Job:
    """The task as a `Job` of the protocol."""
    rows = {split: [vars(question) for question in questions] for split, questions in data.items()}
    test_hash = durable.fingerprint(rows.pop("test", None))
    right = [question.answer for question in data["validation"]]
    levels = Counter(question.level for question in data["validation"])
    return protocol.Job(
        name="race",
        metric="accuracy",
        dataset=race.dataset_card(args.level, args.without_article, len(right)),
        tokenizer=tokenizer,
        build_model=lambda: build_model(args),
        features={split: of_split.rows for split, of_split in features.items()},
        validation=["validation"],
        tests={split: len(of_split) for split, of_split in data.items() if split == "test"},
        collator=race.RaceCollator(tokenizer, pad_to_multiple_of=padded_to(args.max_seq_length)),
        loss_sum=choice_loss,
        measure=lambda split, scores, _: measure(data[split], scores),
        degenerate=lambda scores: len(np.unique(scores.argmax(-1))) == 1,
        answers=lambda scores: answers_of(data["validation"], scores),
        scored_examples={"validation": len(right)} | (levels if args.level == "all" else {}),
        baseline=summaries.majority_answer(
            {"validation": right},
            race.LETTERS,
            lambda split, letters: measure(data[split], np.eye(len(race.LETTERS))[letters]),
        ),
        found=found,
        inputs=protocol.inputs_fingerprint(args, tokenizer, rows),
        test_hash=test_hash,
    )


def choice_loss(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over questions of the cross-entropy over their options, scores (batch, options))."""
    labels = batch.pop("labels")
    scores = model(**batch).logits
    return torch.nn.functional.cross_entropy(scores.float(), labels, reduction="sum"), scores


def measure(questions: list[race.RaceExample], scores: np.ndarray) -> dict[str, float]:
    """Accuracy of all questions, and of each level among them."""
    right = scores.argmax(-1) == np.array([question.answer for question in questions])
    levels = np.array([question.level for question in questions])
    of_levels = {level: float(right[levels == level].mean()) for level in race.LEVELS if (levels == level).any()}
    return {"accuracy": float(right.mean()), **of_levels}


def answers_of(questions: list[race.RaceExample], scores: np.ndarray) -> list[dict]:
    """Each question with its prediction, the worst first; its id names the article's file."""
    examples = [
        {"id": question.id, "question": question.question, **dict(zip(race.LETTERS, question.options, strict=True))}
        for question in questions
    ]
    probabilities = torch.from_numpy(scores).double().softmax(-1).numpy()
    labels = [question.answer for question in questions]
    return summaries.class_answers(examples, race.LETTERS, labels, scores.argmax(-1), probabilities)


if __name__ == "__main__":
    exit_on_error(main)
