"""Fine-tune an encoder on SQuAD 1.1 or 2.0 as RoBERTa did (paper, section 5.2): median of five seeds.

    accelerate launch finetune_squad.py --config presets/squad/v2.0.yaml          # or: make squad VERSION=2.0
    accelerate launch finetune_squad.py --config presets/squad/v1.1.yaml --model_name_or_path runs/mine --data_dir squad
    python finetune_squad.py --score predictions.json --validation_file dev-v1.1.json

Any checkpoint that AutoModelForQuestionAnswering loads, with a fast tokenizer. Data come from the Hub (rajpurkar/squad,
rajpurkar/squad_v2), or in the official JSON format. A run that is done is not done again: the same command goes on.
Each value is in the preset, with its source; any flag overrides it.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import AutoModelForQuestionAnswering, DataCollatorWithPadding

from roberta_recipe import answerability, durable, finetuning, hub, modeling, protocol, run, squad, tokenization
from roberta_recipe.args import InputError, exit_on_error, setting
from roberta_recipe.squad_metric import Squad

# RoBERTa-large in the paper's Table 6: validation, x 100; there is no figure for a base model of the full recipe.
PAPER = {"1.1": {"exact_match": 88.9, "f1": 94.6}, "2.0": {"exact": 86.5, "f1": 89.4}}
FILES = {"train": "train-v{}.json", "validation": "dev-v{}.json"}  # the official archive's, below data_dir
SHOWN = {"1.1": ("exact_match", "f1"), "2.0": ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_f1", "best_f1")}
DEFAULT = "presets/squad/v1.1.yaml"
HALF = 0.5  # the classifier's threshold: more probable than not


@dataclass
class SquadArguments(protocol.FinetuneArguments):
    """What is SQuAD's alone."""

    version_2_with_negative: bool = setting(False, "SQuAD 2.0, in which questions may have no answer.")
    data_dir: str | None = setting(None, "Folder of train-v1.1.json, dev-v1.1.json (or v2.0); without it, the Hub.")
    train_file: str | None = setting(None, "A file in SQuAD's JSON format, in place of data_dir.")
    validation_file: str | None = setting(None, "A file in SQuAD's JSON format, in place of data_dir.")
    doc_stride: int = setting(128, "Tokens that neighbouring windows of a long context share.")
    max_query_length: int = setting(64, "Tokens of a question; longer ones are cut, and counted.")
    passage_first: bool = setting(False, "<s> context </s></s> question </s>, in place of question first.")
    no_answer: Literal["classifier", "null_score"] = setting(
        "classifier",
        "2.0: the paper's binary classifier trained beside the spans, or BERT's null span, its threshold tuned on "
        "validation.",
    )
    n_best_size: int = setting(20, "Spans of a question in nbest_predictions.json.")
    max_answer_length: int = setting(30, "Tokens of an answer.")
    score: str | None = setting(None, "A predictions.json to score against validation_file; nothing is trained.")
    null_odds: str | None = setting(
        None, "With score, on 2.0: null_odds.json beside it, for the best score over thresholds."
    )


def main(argv: list[str] | None = None) -> dict | None:
    """Run the command line `argv`; returns the summary. Raises `InputError` and `RunError`."""
    argv = sys.argv[1:] if argv is None else argv
    run.set_up_logging()
    run.use_all_cores()

    # 1. Arguments: dataclass < preset < command line, and what they must not say.
    (args, training_args), resolved = read_arguments(argv)
    if args.score:
        return score_file(args)
    check_arguments(args, training_args)
    publisher = hub.publisher(training_args)

    # 2. Examples, and whether validation can be believed.
    with training_args.main_process_first():  # one process downloads
        data = {split: read_split(args, split) for split in FILES}
    data["train"], misplaced = usable(args, data["train"])
    contexts = {one.context for one in data["train"]}
    overlap = sum(one.context in contexts for one in data["validation"])

    # 3. Features, head and loss.
    tokenizer = tokenization.load_tokenizer(args.tokenizer_name or args.model_name_or_path, needed=("pad_token",))
    tokenizer.padding_side = "right"  # places are counted from the left
    made = {split: make_windows(args, questions, tokenizer) for split, questions in data.items()}
    found = announce(args, data, made, overlap, misplaced)

    # 4. Every run of the protocol that is not done yet.
    job = job_of(args, data, made, tokenizer, found)
    runs = protocol.of_preset(args, training_args)
    records = protocol.run_all(argv, runs, job, read_arguments, publisher)

    # 5. Median and spread over seeds, beside the paper's.
    folder = Path(training_args.output_dir)
    summary = protocol.finish(args, training_args, folder, runs, records, job, resolved)
    if training_args.process_index == 0:
        paper = ", ".join(f"{name} {score}" for name, score in PAPER[version(args)].items())
        print(protocol.table(summary, f"RoBERTa-large: {paper} (Table 6)", SHOWN[version(args)]))

    # 6. Predictions of every run, as the official script reads them.
    if training_args.process_index == 0:
        for one in runs:
            write_predictions(args, one.output_dir, data["validation"], made["validation"])
        print(f"predictions {folder}/*/predictions.json, nbest_predictions.json")
    run.leave_process_group()
    if publisher:
        publisher.push(folder, f"Best of {len(runs)} runs")
    return summary


def read_arguments(argv: list[str]) -> tuple[tuple[SquadArguments, protocol.FinetuneTrainingArguments], dict]:
    """The filled dataclasses, and the resolved values as a preset."""
    return protocol.read_arguments(SquadArguments, argv, DEFAULT, __doc__)


def version(args: SquadArguments) -> str:
    return "2.0" if args.version_2_with_negative else "1.1"


def by_classifier(args: SquadArguments) -> bool:
    """Whether answerability has a classifier of its own."""
    return args.version_2_with_negative and args.no_answer == "classifier"


def check_arguments(args: SquadArguments, training_args: protocol.FinetuneTrainingArguments) -> None:
    """Raise `InputError` for values out of range and for choices that exclude each other."""
    for name in ("max_query_length", "n_best_size", "max_answer_length"):
        if getattr(args, name) < 1:
            raise InputError(f"{name}={getattr(args, name)} must be at least 1")
    for_context = args.max_seq_length - args.max_query_length - 4  # RoBERTa's special tokens around a pair
    if not 0 <= args.doc_stride < for_context:
        raise InputError(
            f"doc_stride={args.doc_stride} must be from 0 to below the {for_context} tokens that max_seq_length="
            f"{args.max_seq_length} leaves a context beside max_query_length={args.max_query_length} and special tokens"
        )
    check_files(args)
    if bool(args.train_file) != bool(args.validation_file):
        raise InputError("train_file and validation_file go together: no split is taken for the other")
    protocol.check_arguments(args, training_args)


def check_files(args: SquadArguments) -> None:
    """Raise `InputError` for files that exclude each other, also where nothing is trained."""
    if args.data_dir and (args.train_file or args.validation_file):
        raise InputError(f"data_dir={args.data_dir} and train_file or validation_file exclude each other")
    if args.null_odds and not (args.score and args.version_2_with_negative):
        raise InputError(f"null_odds={args.null_odds} goes with score, and with version 2.0")


def read_split(args: SquadArguments, split: str) -> list[squad.Question]:
    """The questions of "train" or "validation", of the version asked for."""
    file = {"train": args.train_file, "validation": args.validation_file}[split]
    if args.data_dir:
        file = Path(args.data_dir, FILES[split].format(version(args)))
    if file:
        return squad.read_file(Path(file), args.version_2_with_negative)
    return squad.read_hub(split, args.version_2_with_negative)


def usable(args: SquadArguments, questions: list[squad.Question]) -> tuple[list[squad.Question], list[str]]:
    """Questions to train on, and the ids of those that are left out: an answer's text is not at its answer_start."""
    misplaced = [one.id for one in questions if one.misplaced]
    if len(misplaced) == sum(bool(one.answers) for one in questions):
        raise InputError(f"no answer stands at its answer_start ({squad.listed(misplaced)}): it counts characters")
    left_out = set(misplaced)
    return [one for one in questions if one.id not in left_out][: args.max_train_samples], misplaced


def build_model(args: SquadArguments) -> torch.nn.Module:
    """The checkpoint with a span head; for 2.0, the paper's classifier beside it."""
    model = finetuning.load_with_head(
        AutoModelForQuestionAnswering, args.model_name_or_path, args.head_dropout, args.random_weights, num_labels=2
    )
    if by_classifier(args):
        answerability.attach(model, args.head_dropout, None if args.random_weights else args.model_name_or_path)
    return model


def make_windows(args: SquadArguments, questions: list[squad.Question], tokenizer) -> squad.Windows:
    """Windows of at most `max_seq_length` tokens."""
    lengths = args.max_seq_length, args.doc_stride, args.max_query_length
    return squad.windows(questions, tokenizer, *lengths, args.passage_first)


def announce(args: SquadArguments, data, made: dict[str, squad.Windows], overlap: int, misplaced: list[str]) -> dict:
    """What is about to be done, in a few lines; returns its counts."""
    answers = squad.recovery(data["train"], made["train"])
    others = answers.pop("others")
    unanswerable = {split: sum(not one.answers for one in questions) for split, questions in data.items()}
    rows = ", ".join(
        f"{split} {len(questions):,} questions ({unanswerable[split]:,} unanswerable) in {len(made[split].features):,} "
        "windows"
        for split, questions in data.items()
    )
    example = f"; e.g. {others[0][0]}: {others[0][1]!r} becomes {others[0][2]!r}" if others else ""
    run.logger.info(
        f"Task        SQuAD {version(args)}; best epoch by F1\n"
        f"Rows        {rows}\n"
        f"Answers     {answers['verbatim']:,} of {answers['answers']:,} come back verbatim from their labels; "
        f"{len(others):,} are no whole tokens{example}; {answers['in_no_window']:,} in no window as a whole\n"
        f"Questions   {sum(one.questions_cut for one in made.values()):,} cut to {args.max_query_length} tokens\n"
        f"Duplicates  {overlap:,} of {len(data['validation']):,} validation questions have a context of training"
    )
    if misplaced:
        run.logger.warning(
            f"Left out    {len(misplaced):,} training questions, whose answer's text is not at its answer_start: "
            f"{squad.listed(misplaced)}"
        )
    answers["no_whole_tokens"] = len(others)
    counts = {"left_out_misplaced": len(misplaced), "unanswerable": unanswerable}
    counts["questions_cut"] = {split: one.questions_cut for split, one in made.items()}
    return {"duplicates": {"contexts_in_train": overlap}, "features": {"train_answers": answers, **counts}}


def job_of(args: SquadArguments, data, made: dict[str, squad.Windows], tokenizer, found: dict) -> protocol.Job:
    """The task as the protocol takes it."""
    own = ("version_2_with_negative", "doc_stride", "max_query_length", "passage_first", "no_answer")
    own += ("n_best_size", "max_answer_length")
    return protocol.Job(
        name=f"squad {version(args)}",
        metric="f1",
        tokenizer=tokenizer,
        build_model=lambda: build_model(args),
        features={split: one.features for split, one in made.items()},
        validation=["validation"],
        tests=[],
        collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=finetuning.padded_to(args.max_seq_length)),
        loss_sum=joint_loss if by_classifier(args) else span_loss,
        measure=lambda split, scores, _: measure(args, predict(args, data[split], made[split], scores), data[split]),
        degenerate=lambda scores: (
            bool(np.isnan(scores).any())
            or degenerate(args, predict(args, data["validation"], made["validation"], scores), data["validation"])
        ),
        found=found,
        inputs=protocol.inputs_fingerprint(
            args, own, tokenizer, {split: [vars(one) for one in questions] for split, questions in data.items()}
        ),
    )


def span_loss(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over windows of the mean of two cross-entropies, scores (batch, seq_len, 2)); a window without the answer
    points at its first token (BERT)."""
    wanted = [batch.pop("start_positions"), batch.pop("end_positions")]
    batch.pop("labels")
    output = model(**batch)
    logits = masked_logits(output, batch)
    return sum(
        torch.nn.functional.cross_entropy(logits[..., n], wanted[n], reduction="sum") for n in (0, 1)
    ) / 2, logits


def joint_loss(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over windows of the classifier's loss and, where the window has the answer, of the spans', scores (batch,
    seq_len, 3)); the paper adds the two terms and says no more, so their weights and what counts as a span are ours."""
    wanted = torch.stack([batch.pop("start_positions"), batch.pop("end_positions")])  # (2, batch)
    answered = batch.pop("labels")
    output = model(**batch, output_hidden_states=True)
    logits = masked_logits(output, batch)
    judged = output["answerable"].float()
    spans = torch.nn.functional.cross_entropy(logits.permute(2, 0, 1).flatten(0, 1), wanted.flatten(), reduction="none")
    total = (spans.view_as(wanted).mean(0) * answered).sum()
    total = total + torch.nn.functional.binary_cross_entropy_with_logits(judged, answered.float(), reduction="sum")
    return total, torch.cat([logits, judged[:, None, None].expand(-1, logits.shape[1], 1)], dim=-1)


def masked_logits(output, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """(batch, seq_len, 2) start and end logits; without padding, of which another batch has another number."""
    logits = torch.stack([output.start_logits, output.end_logits], dim=-1).float()
    return logits.masked_fill(batch["attention_mask"][..., None] == 0, modeling.UNSEEN_LOGIT)


def predict(args: SquadArguments, questions, made: squad.Windows, scores: np.ndarray) -> dict[str, squad.Spans]:
    """id -> the question's best spans."""
    lengths = args.n_best_size, args.max_answer_length
    found = squad.best_spans(questions, made, scores, *lengths, args.version_2_with_negative)
    return {one.id: spans for one, spans in zip(questions, found, strict=True)}


def measure(args: SquadArguments, predicted: dict[str, squad.Spans], questions) -> dict[str, float]:
    """The official scores as shares of 1; for 2.0 with the threshold they were taken at, and the best ones."""
    of_spans = official(args, predicted, None, questions)  # every question with its span, as thresholds ask for
    if not args.version_2_with_negative:
        return shares(of_spans)
    threshold = HALF if by_classifier(args) else of_spans["best_f1_thresh"]
    metrics = official(args, predicted, threshold, questions)
    best = {name: value for name, value in of_spans.items() if name.startswith("best_")}
    return shares(metrics | best) | {"threshold": threshold}


def official(args: SquadArguments, predicted, threshold: float | None, questions) -> dict[str, float]:
    """The official scores in per cent, with the empty text where no answer is more probable than `threshold`."""
    predictions = [{"id": name, "prediction_text": spans.answer(threshold)} for name, spans in predicted.items()]
    if args.version_2_with_negative:
        for prediction, spans in zip(predictions, predicted.values(), strict=True):
            prediction["no_answer_probability"] = spans.no_answer
    return Squad(version(args), keep_in_memory=True).compute(predictions=predictions, references=references(questions))


def references(questions: list[squad.Question]) -> list[dict]:
    """Gold answers as the metric takes them."""
    return [{"id": one.id, "answers": [text for text, _ in one.answers]} for one in questions]


def shares(scores: dict[str, float]) -> dict[str, float]:
    """Percentages as shares; counts and thresholds as they are."""
    return {name: value if name.endswith(("total", "thresh")) else value / 100 for name, value in scores.items()}


def degenerate(args: SquadArguments, predicted: dict[str, squad.Spans], questions) -> bool:
    """Whether a run says of every question of 2.0 that it has no answer, or of none."""
    threshold = measure(args, predicted, questions).get("threshold")
    return threshold is not None and len({spans.answer(threshold) == "" for spans in predicted.values()}) == 1


def write_predictions(args: SquadArguments, folder: Path, questions, made: squad.Windows) -> None:
    """`predictions.json`, `nbest_predictions.json`, and for 2.0 `null_odds.json` and every question's best span,
    `span_predictions.json`, of a run's best epoch."""
    predicted = predict(args, questions, made, finetuning.validation_scores(folder))
    threshold = measure(args, predicted, questions).get("threshold")
    texts = {name: spans.answer(threshold) for name, spans in predicted.items()}
    durable.write_json(folder / "predictions.json", texts)
    durable.write_json(folder / "nbest_predictions.json", {name: squad.n_best(one) for name, one in predicted.items()})
    if args.version_2_with_negative:  # the best scores over thresholds are those of these two files
        durable.write_json(
            folder / "span_predictions.json", {name: one.answer(None) for name, one in predicted.items()}
        )
        durable.write_json(folder / "null_odds.json", {name: spans.no_answer for name, spans in predicted.items()})


def score_file(args: SquadArguments) -> dict[str, float]:
    """Print the official scores of a predictions.json, as JSON."""
    check_files(args)
    if not args.validation_file and not args.data_dir:
        raise InputError(f"score={args.score}: name the file with the right answers, --validation_file dev-v1.1.json")
    questions = read_split(args, "validation")
    names = [one.id for one in questions]
    texts, others = squad.read_answers(Path(args.score), names, "prediction", str)
    if others:
        run.logger.warning(f"{args.score}: {len(others):,} ids are not asked for: {squad.listed(others)}")
    predictions = [{"id": name, "prediction_text": text} for name, text in texts.items()]
    if args.version_2_with_negative:
        odds = dict.fromkeys(names)
        if args.null_odds:
            odds, _ = squad.read_answers(Path(args.null_odds), names, "probability", (int, float))
        predictions = [one | {"no_answer_probability": odds[one["id"]]} for one in predictions]
    scores = Squad(version(args), keep_in_memory=True).compute(
        predictions=predictions, references=references(questions)
    )
    print(json.dumps(scores, indent=2))
    return scores


if __name__ == "__main__":
    exit_on_error(main)
