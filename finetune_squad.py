# /// script
# requires-python = ">=3.11"
# dependencies = ["roberta-recipe"]
# tool.uv.sources.roberta-recipe = { path = ".", editable = true }
# ///
"""Fine-tune an encoder on SQuAD 1.1 or 2.0 as RoBERTa did (paper, section 5.2): median of five seeds.

    accelerate launch finetune_squad.py --config presets/squad/v2.0.yaml          # or: make squad VERSION=2.0
    accelerate launch finetune_squad.py --config presets/squad/v1.1.yaml --model_name_or_path runs/mine --data_dir squad
    python tools/squad_score.py --predictions predictions.json --validation_file dev-v1.1.json

Takes any AutoModelForQuestionAnswering checkpoint with a fast tokenizer. Data come from the Hub (rajpurkar/squad,
rajpurkar/squad_v2), or in the official JSON format. The same command resumes. Presets name the source of each value;
any flag overrides it.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForQuestionAnswering, DataCollatorWithPadding, PreTrainedTokenizerBase

from roberta_recipe import durable
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.log import counted, listed, logger, set_up_logging
from roberta_recipe.model import masked_lm, weights
from roberta_recipe.model.task_heads import load_with_head
from roberta_recipe.publishing import hub, plots
from roberta_recipe.record import CURVE_NAME, Baseline, Summary
from roberta_recipe.settings import setting, value_of
from roberta_recipe.tasks import protocol, squad, squad_files, squad_scores, summaries
from roberta_recipe.tasks.answerability import joint_class
from roberta_recipe.training import launching
from roberta_recipe.training.finetune_trainer import padded_to, validation_scores

FILES = {"train": "train-v{}.json", "validation": "dev-v{}.json"}  # official names, in data_dir
SHOWN = {"1.1": ("exact_match", "f1"), "2.0": ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_f1", "best_f1")}
DEFAULT, VERSION_2 = "presets/squad/v1.1.yaml", "presets/squad/v2.0.yaml"
SPECIAL_TOKENS = 4  # of a pair, in RoBERTa


@dataclass
class SquadArguments(protocol.FinetuneArguments):
    """SQuAD's flags."""

    _argument_group_name = "SQuAD"

    version_2_with_negative: bool = setting(False, "SQuAD 2.0: questions may have no answer.", "fixed")
    dataset_name: str | None = setting(None, "Hub dataset: squad, or squad_v2 for 2.0; default: by version.", "start")
    data_dir: str | None = setting(None, "Folder of train-v1.1.json, ... (or v2.0); default: the Hub.", "content")
    train_file: str | None = setting(None, "A file in SQuAD's JSON format, in place of data_dir.", "content")
    validation_file: str | None = setting(None, "A file in SQuAD's JSON format, in place of data_dir.", "content")
    doc_stride: int = setting(128, "Overlap of neighbouring windows of a long context, in tokens.", "fixed", shown=True)
    max_query_length: int = setting(64, "Tokens of a question; longer ones are truncated.", "fixed", shown=True)
    passage_first: bool = setting(False, "Context first: <s> context </s></s> question </s>.", "fixed", shown=True)
    no_answer: Literal["classifier", "null_score"] = setting(
        "classifier",
        "2.0: the paper's binary classifier, trained jointly, or BERT's null span, its threshold tuned on validation.",
        "fixed",
        shown=True,
    )
    n_best_size: int = setting(20, "Spans per question in nbest_predictions.json.", "fixed")
    max_answer_length: int = setting(30, "Maximum tokens of a predicted answer.", "fixed")


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
        data = {split: read_split(args, split) for split in FILES}
    data["train"], misplaced = drop_misplaced(args, data["train"])
    contexts = {question.context for question in data["train"]}
    overlap = sum(question.context in contexts for question in data["validation"])

    # 3. Features, head and loss.
    tokenizer = protocol.load_tokenizer(args)
    lengths = args.max_seq_length, args.doc_stride, args.max_query_length, args.passage_first
    windows = {split: squad.make_windows(questions, tokenizer, *lengths) for split, questions in data.items()}
    found = announce(args, data, windows, overlap, misplaced)

    # 4. A run for each seed; finished runs are read from disk.
    job = job_of(args, data, windows, tokenizer, found)
    runs = protocol.preset_runs(args, training_args)
    records = protocol.run_all(argv, runs, job, read_arguments, publisher and publisher.push_run, default_preset(argv))

    # 5. Median and spread over seeds, beside the paper's if it has the task.
    folder = Path(training_args.output_dir)
    summary = protocol.finish((args, training_args), resolved, runs, records, job)
    if training_args.process_index == 0:
        plots.plot_runs(records, job.metric, folder / CURVE_NAME)
        paper = ", ".join(f"{name} {score}" for name, score in squad.PAPER[version(args)].items())
        is_official = summary["dataset"]["hub_id"] is not None
        paper = f"RoBERTa-large: {paper} (Table 6)" if is_official else "not SQuAD's own validation questions"
        print(summaries.table(summary, paper, SHOWN[version(args)]))

    # 6. Predictions of every run, in the official script's format.
    if training_args.process_index == 0:
        for run in runs:
            write_predictions(args, run.output_dir, data["validation"], windows["validation"])
        print(f"predictions {folder}/*/predictions.json, nbest_predictions.json")
    launching.leave_process_group()
    if publisher:
        publisher.push(folder, f"Best of {counted(len(runs), 'run')}")
    return summary


def read_arguments(argv: list[str]) -> tuple[tuple[SquadArguments, protocol.FinetuneTrainingArguments], dict]:
    return protocol.read_arguments(SquadArguments, argv, default_preset(argv), __doc__)


def default_preset(argv: list[str]) -> str:
    """The preset of a command line without `--config`: by the version."""
    given = str(value_of(argv, "version_2_with_negative")).lower()
    return VERSION_2 if given in ("true", "t", "yes", "y", "1") else DEFAULT  # as transformers' `string_to_bool`


def version(args: SquadArguments) -> str:
    return "2.0" if args.version_2_with_negative else "1.1"


def uses_classifier(args: SquadArguments) -> bool:
    """Whether the answerability classifier is used."""
    return args.version_2_with_negative and args.no_answer == "classifier"


def check_arguments(args: SquadArguments, training_args: protocol.FinetuneTrainingArguments) -> None:
    """Raise `InputError` for out-of-range values and for flags that exclude each other."""
    for name in ("max_query_length", "n_best_size", "max_answer_length"):
        if getattr(args, name) < 1:
            raise InputError(f"{name}={getattr(args, name)} must be at least 1")
    length = args.max_seq_length
    for_context = length - args.max_query_length - SPECIAL_TOKENS
    if args.doc_stride >= for_context:  # suggested: BERT's 1/4 and 1/8 at most
        stride, query = min(args.doc_stride, length // 4), min(args.max_query_length, length // 8)
        raise InputError(
            f"max_seq_length={length} leaves {max(for_context, 0)} tokens for a context with "
            f"max_query_length={args.max_query_length} and special tokens; doc_stride={args.doc_stride} must be less: "
            f"--doc_stride {stride} --max_query_length {query} fits"
        )
    on_hub = "squad_v2" if args.version_2_with_negative else "squad"
    has_files = args.data_dir or args.train_file or args.validation_file
    if args.dataset_name and (has_files or args.dataset_name.removeprefix("rajpurkar/") != on_hub):
        raise InputError(
            f"dataset_name={args.dataset_name} must be {on_hub} here (version_2_with_negative: squad_v2), without "
            "data_dir, train_file and validation_file; other data: name the two files, in SQuAD's JSON format"
        )
    if args.data_dir and (args.train_file or args.validation_file):
        raise InputError(f"data_dir={args.data_dir} and train_file or validation_file exclude each other")
    if training_args.do_predict:
        raise InputError("do_predict has no effect: predictions.json has the validation set's answers in every run")
    if bool(args.train_file) != bool(args.validation_file):
        raise InputError("train_file needs validation_file and vice versa: name both")
    protocol.check_arguments(args, training_args, "f1", classifies=False)


def read_split(args: SquadArguments, split: str) -> list[squad_files.SquadExample]:
    """The questions of "train" or "validation"."""
    file = {"train": args.train_file, "validation": args.validation_file}[split]
    if args.data_dir:
        file = Path(args.data_dir, FILES[split].format(version(args)))
    if file:
        return squad_files.read_file(Path(file), args.version_2_with_negative)
    return squad.read_hub(split, args.version_2_with_negative)


def drop_misplaced(
    args: SquadArguments, questions: list[squad_files.SquadExample]
) -> tuple[list[squad_files.SquadExample], list[str]]:
    """(first `max_train_samples` questions, ids of dropped ones with a misplaced answer). Raises `InputError`."""
    misplaced = [question.id for question in questions if question.misplaced]
    if len(misplaced) == sum(bool(question.answers) for question in questions):
        raise InputError(f"no answer is at its answer_start ({listed(misplaced)}), which must count characters")
    return [question for question in questions if not question.misplaced][: args.max_train_samples], misplaced


def build_model(args: SquadArguments) -> torch.nn.Module:
    """The checkpoint with a span head and, for 2.0, the paper's classifier."""
    cls = AutoModelForQuestionAnswering
    if uses_classifier(args):
        cls = joint_class(weights.read_config(args.model_name_or_path))
    labels = ("LABEL_0", "LABEL_1")  # transformers' names of the begin and the end
    return load_with_head(cls, args.model_name_or_path, args.head_dropout, args.random_weights, labels)


def announce(args: SquadArguments, data, windows: dict[str, squad.Windows], overlap: int, misplaced: list[str]) -> dict:
    """Log the task and the data in a few lines; return the counts."""
    answers = squad.decode_labels(data["train"], windows["train"])
    others = answers.pop("others")
    questions_cut = {split: made.questions_cut for split, made in windows.items()}
    unanswerable = {split: sum(not question.answers for question in questions) for split, questions in data.items()}
    rows = ", ".join(
        f"{split} {counted(len(questions), 'question')} ({unanswerable[split]:,} unanswerable) "
        f"in {len(windows[split].features):,} windows"
        for split, questions in data.items()
    )
    example = f"; e.g. {others[0][0]}: {others[0][1]!r} becomes {others[0][2]!r}" if others else ""
    logger.info(
        f"Task        SQuAD {version(args)}; best epoch by F1\n"
        f"Rows        {rows}\n"
        f"Answers     {answers['verbatim']:,} of {answers['answers']:,} are recovered verbatim from their labels; "
        f"{len(others):,} begin or end inside a token{example}; {answers['in_no_window']:,} fit into no window\n"
        f"Questions   {sum(questions_cut.values()):,} truncated to {args.max_query_length} tokens\n"
        f"Duplicates  {overlap:,} of {len(data['validation']):,} validation questions share a context with training"
    )
    if misplaced:
        logger.warning(
            f"Dropped     {len(misplaced):,} training questions with an answer that is not at its answer_start: "
            f"{listed(misplaced)}"
        )
    made = windows["validation"]
    spans = zip(made.question_index.tolist(), made.features, strict=True)
    if longer := {n for n, row in spans if row["end_positions"] - row["start_positions"] >= args.max_answer_length}:
        logger.warning(
            f"Answers     {counted(len(longer), 'validation question')} with a first answer longer than "
            f"max_answer_length={args.max_answer_length} tokens, which cannot be predicted: raise it"
        )
    answers["no_whole_tokens"] = len(others)
    counts = {"left_out_misplaced": len(misplaced), "unanswerable": unanswerable, "questions_cut": questions_cut}
    return {"duplicates": {"contexts_in_train": overlap}, "features": {"train_answers": answers, **counts}}


def job_of(
    args: SquadArguments, data, windows: dict[str, squad.Windows], tokenizer: PreTrainedTokenizerBase, found: dict
) -> protocol.Job:
    """The task as a `Job` of the protocol."""
    rows = {split: [vars(question) for question in questions] for split, questions in data.items()}
    questions = data["validation"]
    predicted = cache_last(lambda scores: predict_spans(args, questions, windows["validation"], scores))
    return protocol.Job(
        name=f"squad {version(args)}",
        metric="f1",
        dataset=squad.dataset_card(version(args), questions, uses_classifier(args)),
        tokenizer=tokenizer,
        build_model=lambda: build_model(args),
        features={split: made.features for split, made in windows.items()},
        validation=["validation"],
        tests={},
        collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=padded_to(args.max_seq_length)),
        loss_sum=joint_loss if uses_classifier(args) else span_loss,
        measure=lambda _split, scores, _: measure(args, predicted(scores), questions),
        degenerate=lambda scores: degenerate(args, predicted(scores), questions),
        answers=lambda scores: answers_of(args, predicted(scores), questions),
        scored_examples={"validation": len(questions)},
        baseline=always_no_answer(questions) if args.version_2_with_negative else None,
        found=found,
        inputs=protocol.inputs_fingerprint(args, tokenizer, rows),
    )


def span_loss(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over windows of the mean of start and end cross-entropy, scores (batch, seq_len, 2)); a window without the
    answer has its first token as label (BERT)."""
    wanted = [batch.pop("start_positions"), batch.pop("end_positions")]
    batch.pop("labels")
    logits = masked_logits(model(**batch), batch)
    losses = [torch.nn.functional.cross_entropy(logits[..., n], wanted[n], reduction="sum") for n in (0, 1)]
    return sum(losses) / 2, logits


def joint_loss(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over windows of the classifier's loss and, for windows with the answer, the span loss, scores (batch,
    seq_len, 3)). The paper adds the two terms without details: equal weights and the choice of windows are ours."""
    wanted = torch.stack([batch.pop("start_positions"), batch.pop("end_positions")])  # (2, batch)
    answered = batch.pop("labels")
    output = model(**batch)
    logits = masked_logits(output, batch)
    answerable = output["answerable"].float()
    spans = torch.nn.functional.cross_entropy(logits.permute(2, 0, 1).flatten(0, 1), wanted.flatten(), reduction="none")
    total = (spans.view_as(wanted).mean(0) * answered).sum()
    total = total + torch.nn.functional.binary_cross_entropy_with_logits(answerable, answered.float(), reduction="sum")
    return total, torch.cat([logits, answerable[:, None, None].expand(-1, logits.shape[1], 1)], dim=-1)


def masked_logits(output, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """(batch, seq_len, 2) start and end logits with padding masked: its length differs between micro-batches."""
    logits = torch.stack([output.start_logits, output.end_logits], dim=-1).float()
    return logits.masked_fill(batch["attention_mask"][..., None] == 0, masked_lm.EXCLUDED_LOGIT)


def cache_last(function: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], Any]:
    """`function` with a cache of its last result: the best epoch's spans are used four times."""
    last: list[Any] = [None, None]  # scores, result

    def cached(scores: np.ndarray) -> Any:
        if not np.array_equal(last[0], scores):
            last[:] = scores, function(scores)
        return last[1]

    return cached


def predict_spans(
    args: SquadArguments, questions, windows: squad.Windows, scores: np.ndarray
) -> dict[str, squad.Spans]:
    """The n best spans by question id."""
    limits = args.n_best_size, args.max_answer_length
    best = squad.best_spans(questions, windows, scores, *limits, args.version_2_with_negative)
    return {question.id: spans for question, spans in zip(questions, best, strict=True)}


def measure(args: SquadArguments, predicted: dict[str, squad.Spans], questions) -> dict[str, float]:
    """The official scores from 0 to 1; for 2.0 with the threshold, and the best scores over all thresholds."""
    every_answer = official_scores(args, predicted, None, questions)  # the best span of each question
    if not args.version_2_with_negative:
        return as_shares(every_answer)
    threshold = 0.5 if uses_classifier(args) else every_answer["best_f1_thresh"]
    metrics = official_scores(args, predicted, threshold, questions)
    best = {name: value for name, value in every_answer.items() if name.startswith("best_")}
    return as_shares(metrics | best) | {"threshold": threshold}


def official_scores(args: SquadArguments, predicted, threshold: float | None, questions) -> dict[str, float]:
    """The official scores in per cent; an answer is empty if its `no_answer` is above `threshold`."""
    texts = {name: spans.answer(threshold) for name, spans in predicted.items()}
    gold = squad_files.gold_answers(questions)
    if not args.version_2_with_negative:
        return squad_scores.score_1(texts, gold)
    return squad_scores.score_2(texts, gold, {name: spans.no_answer for name, spans in predicted.items()})


def as_shares(scores: dict[str, float]) -> dict[str, float]:
    """Percentages as shares from 0 to 1; counts and thresholds unchanged."""
    return {name: value if name.endswith(("total", "thresh")) else value / 100 for name, value in scores.items()}


def degenerate(args: SquadArguments, predicted: dict[str, squad.Spans], questions) -> bool:
    """Whether the model answers all questions of 2.0, or none."""
    threshold = measure(args, predicted, questions).get("threshold")
    return threshold is not None and len({spans.answer(threshold) == "" for spans in predicted.values()}) == 1


def answers_of(args: SquadArguments, predicted: dict[str, squad.Spans], questions) -> list[dict]:
    """Each question with its prediction and scores; the worst first, the most confident of these first."""
    threshold, rows = measure(args, predicted, questions).get("threshold"), []
    for question in questions:
        spans, gold = predicted[question.id], [text for text, _ in question.answers]
        text = spans.answer(threshold)
        row = {"id": question.id, "question": question.question, "answers": " | ".join(dict.fromkeys(gold))}
        gold = squad_scores.non_empty_answers(gold) if args.version_2_with_negative else gold
        exact = squad_scores.best_score(squad_scores.exact, text, gold)
        f1 = squad_scores.best_score(lambda a, b: squad_scores.f1(a, b, args.version_2_with_negative), text, gold)
        probability = next((entry["probability"] for entry in squad.n_best(spans) if entry["text"] == text), 0.0)
        rows.append(row | {"prediction": text, "probability": probability, "f1": f1, "exact_match": exact})
    return sorted(rows, key=lambda row: (row["f1"], row["exact_match"], -row["probability"]))


def always_no_answer(questions: list[squad_files.SquadExample]) -> Baseline:
    """The scores of an empty answer to every question of 2.0."""
    answers = squad_files.gold_answers(questions)
    scores = squad_scores.score_2(dict.fromkeys(answers, ""), answers)
    return {"answer": "no answer", "metrics": {k: v for k, v in as_shares(scores).items() if not k.endswith("total")}}


def write_predictions(args: SquadArguments, folder: Path, questions, windows: squad.Windows) -> None:
    """Write a run's `predictions.json` and `nbest_predictions.json`; for 2.0 also `null_odds.json`, and
    `span_predictions.json` with the best span of every question."""
    predicted = predict_spans(args, questions, windows, validation_scores(folder))
    threshold = measure(args, predicted, questions).get("threshold")
    texts = {name: spans.answer(threshold) for name, spans in predicted.items()}
    durable.write_json(folder / "predictions.json", texts)
    n_best = {name: squad.n_best(spans) for name, spans in predicted.items()}
    durable.write_json(folder / "nbest_predictions.json", n_best)
    if args.version_2_with_negative:  # the official script's input for the best scores over all thresholds
        spans_only = {name: spans.answer(None) for name, spans in predicted.items()}
        durable.write_json(folder / "span_predictions.json", spans_only)
        durable.write_json(folder / "null_odds.json", {name: spans.no_answer for name, spans in predicted.items()})


if __name__ == "__main__":
    exit_on_error(main)
