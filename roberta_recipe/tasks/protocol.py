"""The protocol of the three fine-tuning scripts (paper, section 5): shared arguments, a run for each seed, its best
epoch, the summary. A script describes its task as a `Job`."""

import math
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed

from roberta_recipe import durable, lock
from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.hardware import free_memory
from roberta_recipe.log import counted, is_first_process, logger
from roberta_recipe.record import (
    BEST_NAME,
    RECORD_NAME,
    Baseline,
    DatasetCard,
    FinetuneRecord,
    Summary,
    percent,
    picked_setting,
    read_record,
    run_record,
    write_preset,
    write_record,
    write_summary,
)
from roberta_recipe.settings import config_of, fixed_values, parse, shown_names
from roberta_recipe.tasks import answers, stored_scores
from roberta_recipe.tasks.seeds import Run, comparable, name_on_split, of_setting, runs_of, summarise
from roberta_recipe.training import (
    arguments,
    attention,
    batch,
    checkpoint,
    finetune_trainer,
    heads,
    launching,
    optimization,
    optimizers,
    weights,
)
from roberta_recipe.training.arguments import FinetuneArguments, FinetuneTrainingArguments
from roberta_recipe.training.finetune_trainer import FinetuneTrainer
from roberta_recipe.training.progress import Progress

Arguments = tuple[FinetuneArguments, FinetuneTrainingArguments]


@dataclass
class Job:
    """A task. Scores are (features of a split, ...), as `loss_sum` gives them beside the loss."""

    name: str  # of the task, in the records
    metric: str  # its highest value picks the epoch and the setting
    dataset: DatasetCard  # of the model card
    tokenizer: PreTrainedTokenizerBase
    build_model: Callable[[], torch.nn.Module]
    features: dict[str, list[dict]]  # by split: "train", the splits of `validation`, the splits of `tests`
    validation: list[str]  # splits that are measured; the first picks the epoch
    tests: list[str]  # splits that are scored only (`stored_scores`)
    labelled_tests: list[str]  # those of them with known answers: `measure` gives their metrics, for the summary
    collator: Callable[[list[dict]], dict[str, torch.Tensor]]
    loss_sum: Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
    measure: Callable[[str, np.ndarray, np.ndarray], dict[str, float]]  # (split, its scores, the validation scores)
    degenerate: Callable[[np.ndarray], bool]  # whether validation scores give one answer to everything
    answers: Callable[[np.ndarray], list[answers.Answer]]  # of validation scores, an answer for each example
    scored_examples: dict[str, int]  # as in `FinetuneRecord`
    baseline: Baseline | None  # see `seeds.constant_answer`
    found: dict[str, Any]  # counts, for the records
    inputs: dict[str, Any]  # `inputs_fingerprint`
    test_rows: str = ""  # fingerprint of the tests' rows: stored scores of other rows are not used

    def about(self, *filled: Any) -> dict[str, Any]:
        """Fields that the run records and the summary share; `filled`: argument dataclasses."""
        return {
            "task": self.name,
            "metric": self.metric,
            "dataset": self.dataset,
            "scored_examples": self.scored_examples,
            "baseline": self.baseline,
            **self.found,
            "shown_args": shown_names(*filled),
        }


def read_arguments(cls: type, argv: list[str], default: str, description: str) -> tuple[Arguments, dict[str, Any]]:
    """The filled dataclasses, where `cls` is the script's, and the resolved values as a preset."""
    filled, resolved = parse([cls, FinetuneTrainingArguments], argv, default, description=description)
    return tuple(filled), {**resolved, "bf16": filled[-1].bf16}


def check_arguments(
    args: FinetuneArguments, training_args: FinetuneTrainingArguments, metric: str, classifies: bool
) -> None:
    """Raise `InputError` for values out of range and for what the protocol does not do. `metric` picks the best epoch;
    `classifies`: the scores are logits of classes."""
    if not args.model_name_or_path:
        raise InputError("model_name_or_path is not set: name the checkpoint to fine-tune, a folder or a Hub id")
    if not args.seeds or len(set(args.seeds)) < len(args.seeds):
        raise InputError(f"seeds={args.seeds} must be different numbers, one for each run")
    if training_args.seed != TrainingArguments.seed and args.seeds != [training_args.seed]:
        raise InputError(f"seed={training_args.seed}: each run has one of seeds; --seeds {training_args.seed}")
    if args.max_seq_length < 8:
        raise InputError(f"max_seq_length={args.max_seq_length} leaves no room for a sentence; the paper has 512")
    if args.max_train_samples == 0:
        raise InputError("max_train_samples=0 must be at least 1")
    if args.head_dropout is not None and args.head_dropout >= 1:
        raise InputError(f"head_dropout={args.head_dropout} must be below 1")
    if not 0 < args.layer_decay <= 1:
        raise InputError(f"layer_decay={args.layer_decay} must be above 0 and at most 1 (one rate for all layers)")
    if args.layer_decay < 1 and training_args.optim in optimizers.own():
        raise InputError(
            f"layer_decay={args.layer_decay} goes with adamw_torch and its like, not {training_args.optim}"
        )
    at_once, size = training_args.per_device_train_batch_size, args.global_batch_size
    if size and at_once > size:
        raise InputError(
            f"per_device_train_batch_size={at_once} is more than global_batch_size={size}: lower it to at most {size}, "
            f"or train in batches of {at_once} with --global_batch_size {at_once}"
        )
    steps, epochs = training_args.max_steps, training_args.num_train_epochs
    if steps == 0 or (steps < 0 and epochs <= 0):
        raise InputError(f"max_steps={steps} and num_train_epochs={epochs:g} train nothing: give one of the two")
    best, higher = training_args.metric_for_best_model, training_args.greater_is_better
    if (best or metric).removeprefix("eval_") != metric or higher is False:
        raise InputError(
            f"metric_for_best_model={best} with greater_is_better={str(higher).lower()}: the highest {metric} on "
            "validation picks the best epoch; leave both out"
        )
    if (share := training_args.label_smoothing_factor) and not (classifies and share < 1):
        raise InputError(f"label_smoothing_factor={share} must be below 1, and is for losses of classification")
    if training_args.eval_strategy == "no":
        raise InputError("eval_strategy=no: the best epoch is picked on validation; use epoch or steps")
    if training_args.publishes and args.keep == "none":
        raise InputError("keep=none leaves no weights to push: with push_to_hub, keep=best")
    if training_args.publishes and "checkpoint" in training_args.hub_strategy.value:
        raise InputError(
            f"hub_strategy={training_args.hub_strategy.value}: fine-tuning pushes the best run so far (every_save) or "
            "the best of all (end)"
        )
    heads.check_length(args.model_name_or_path, args.max_seq_length)
    launching.check(training_args)
    optimization.check(training_args)
    if training_args.deepspeed_plugin:
        raise InputError("fine-tuning runs without DeepSpeed: start it with ds_configs/accelerate/one_gpu.yaml")


def load_tokenizer(args: FinetuneArguments) -> PreTrainedTokenizerBase:
    """The tokenizer, without token types that the model lacks. Raises `InputError` for one without offsets, or with
    more tokens than the model."""
    name = args.tokenizer_name or args.model_name_or_path
    tokenizer = tokenization.load_tokenizer(name, needed=("pad_token",))
    config = weights.read_config(args.model_name_or_path)
    rows = getattr(config, "vocab_size", None)
    if rows and len(tokenizer) > rows:
        raise InputError(
            f"the tokenizer {name!r} has {len(tokenizer):,} tokens and {args.model_name_or_path!r} {rows:,}: they do "
            "not belong together; name the model's own with tokenizer_name"
        )
    types = tokenizer("a", "b", return_token_type_ids=True)["token_type_ids"]
    names = ["input_ids", "token_type_ids", "attention_mask"]  # without a mask, a row would depend on the others
    if "token_type_ids" not in tokenizer.model_input_names or getattr(config, "type_vocab_size", 2) <= max(1, *types):
        names.remove("token_type_ids")  # RoBERTa with BERT's tokenizer
    if set(names) != set(tokenizer.model_input_names):
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names  # the latter is saved
    return tokenizer


def check_validation_files(train: Iterable[Path], validation: Iterable[Path]) -> None:
    """Raise `InputError` where every validation file is a training file, byte for byte, under whatever name. Files that
    are missing are left to their reader."""
    trained_on, held_out = (
        {durable.sha256(path): path for path in files if path.is_file()} for files in (train, validation)
    )
    if held_out and held_out.keys() <= trained_on.keys():
        digest, path = next(iter(held_out.items()))
        raise InputError(
            f"{path} holds the same as {trained_on[digest]}: a score on the training data says nothing; validate on "
            "other rows"
        )


def of_preset(args: FinetuneArguments, training_args: FinetuneTrainingArguments) -> list[Run]:
    """The preset's learning rate and batch with every seed."""
    size = args.global_batch_size
    if size is None:
        size, _ = batch.derive_batch(training_args, None)
    return runs_of([training_args.learning_rate], [size], args.seeds, training_args.output_dir)


def run_all(
    argv: list[str],
    runs: list[Run],
    job: Job,
    read: Callable[[list[str]], tuple[Arguments, dict[str, Any]]],
    after_run: Callable[[Path, str], futures.Future | None] | None,
    preset: str,
    extra_flags: tuple[str, ...] = (),
) -> list[FinetuneRecord]:
    """The record of each run, from the disk where the run is finished; `read` is the script's reader of arguments,
    `preset` its default.

    Of each setting, the weights of the best run so far stay, all or none, as `keep` says. With a single setting,
    `after_run` is called with the best run's folder and a message after each newly trained run except the last; it
    returns a background job that reads the folder.
    """
    if not job.features["train"]:
        raise InputError(f"{job.name}: no training example is left, of which {job.found['features']}")
    if is_first_process():
        durable.make_folder(folder := runs[0].output_dir.parent)
        lock.take(folder)
        for path in (folder, *(run.output_dir for run in runs)):
            durable.remove_left(path)
    records: list[FinetuneRecord] = []
    reading: futures.Future | None = None
    for number, run in enumerate(runs, 1):
        flags = ["--learning_rate", run.learning_rate, "--global_batch_size", run.batch, "--seed", run.seed]
        flags += ["--output_dir", run.output_dir, *extra_flags]
        (args, training_args), resolved = read([*argv, *map(str, flags)])
        at_most, processes = training_args.per_device_train_batch_size, training_args.world_size
        micro_batch = batch.largest_micro_batch(run.batch, at_most, processes)
        arguments.resolve(args, training_args, weights.read_config(args.model_name_or_path), micro_batch)
        if not records:
            announce(argv, preset, runs, training_args)
        was_finished = is_finished(run)
        ahead = [later for later in runs[number:] if not is_finished(later)]
        records.append(finetune(run, ahead, job, (args, training_args), resolved))
        if reading:
            futures.wait([reading])  # the weights may be dropped now
        so_far = summarise(runs[:number], records, job.metric)
        if training_args.process_index == 0:
            drop_weights(args.keep, runs[:number], [row["best_run"] for row in so_far["settings"]])
        if after_run and runs[0].setting == runs[-1].setting and number < len(runs) and not was_finished:
            best = Path(picked_setting(so_far)["best_run"])
            reading = after_run(best, f"Best of {counted(number, 'run')} of {len(runs)}")
    return records


def announce(argv: list[str], preset: str, runs: list[Run], training_args: FinetuneTrainingArguments) -> None:
    """Log the preset and the values of it that results depend on most."""
    of_runs = [", ".join(map(str, dict.fromkeys(values))) for values in zip(*map(astuple, runs), strict=True)]
    steps, epochs, warmup = training_args.max_steps, training_args.num_train_epochs, training_args.warmup_steps
    logger.info(
        f"Protocol    {config_of(argv) or preset}: learning rate {of_runs[0]}, batch {of_runs[1]}, "
        + (counted(steps, "step") if steps > 0 else f"{epochs:g} epochs")
        + f", warm-up {f'{100 * warmup:g}% of the steps' if 0 < warmup < 1 else counted(int(warmup), 'step')}, "
        f"seeds {of_runs[2]}"
    )


def finetune(run: Run, ahead: list[Run], job: Job, filled: Arguments, resolved: dict[str, Any]) -> FinetuneRecord:
    """Train and score a run, or read its record where it is finished; `ahead`: the runs that follow, for the ETA."""
    args, training_args = filled
    started_s = time.monotonic()
    # so that the preset repeats this run
    resolved |= {"seeds": [run.seed], "attn_implementation": training_args.attn_implementation}
    fingerprint = {**fixed_values(args), **fixed_values(training_args), **job.inputs}
    record = finished(run, fingerprint)
    scored = not (training_args.do_predict and job.tests) or stored_scores.read(run, job.test_rows) is not None
    has_weights = (run.output_dir / BEST_NAME / finetune_trainer.WEIGHTS).is_file()
    if record and (scored or not has_weights):
        logger.info(f"Done        {run.output_dir}: {job.metric} {percent(record['metrics'][job.metric])}")
        return record
    steps = [steps_of(training_args, len(job.features["train"]), each.batch) for each in (run, *ahead)]
    if not record:
        optimization.check_length(training_args, steps[0])
    set_seed(run.seed)
    resumed_from, resumed = checkpoint.resume(training_args, fingerprint)
    model = job.build_model()
    attention.set_up(model, training_args)
    trainer = FinetuneTrainer(
        model=model,
        args=training_args,
        train_dataset=job.features["train"],
        eval_dataset=job.features[job.validation[0]],
        data_collator=job.collator,
        processing_class=job.tokenizer,
        loss_sum=job.loss_sum,
        measure=lambda scores: job.measure(job.validation[0], scores, scores),
        best_metric=job.metric,
        layer_decay=args.layer_decay,
        fingerprint=fingerprint,
        resumed=resumed,
    )
    trainer.remove_callback(Progress)
    trainer.add_callback(Progress(sum(steps[1:])))
    if not record:
        trainer.train(resume_from_checkpoint=resumed_from)
        trainer.stopping.end_if_stopped()
    metrics, best = score(trainer, job, record["metrics"][job.metric] if record else trainer.best_score)
    if not record:
        record = run_record(
            trainer,
            metrics,
            **job.about(args, training_args),
            examples={split: len(features) for split, features in job.features.items()},
            degenerate=job.degenerate(best),
            resolved_args=resolved,
            wall_clock_s=round(time.monotonic() - started_s, 1),
        )
        if trainer.is_world_process_zero():
            write_preset(resolved, training_args.output_dir)
            write_record(record, training_args.output_dir)
            for path in checkpoint.all_folders(training_args.output_dir):  # a finished run needs no checkpoint
                shutil.rmtree(path)
            finetune_trainer.drop_earlier_best(training_args.output_dir)
        trainer.stopping.end_if_signaled()
    del trainer, model
    free_memory()
    return record


def steps_of(training_args: FinetuneTrainingArguments, examples: int, batch_size: int) -> int:
    """Optimizer steps of a run over so many training examples."""
    if training_args.max_steps > 0:
        return training_args.max_steps
    return math.ceil(training_args.num_train_epochs * max(examples // batch_size, 1))


def score(trainer: FinetuneTrainer, job: Job, picked: float | None) -> tuple[dict[str, float], np.ndarray]:
    """The best epoch's metrics on all validation splits, and its scores of the first; the tests' scores are stored.
    Raises `InputError` where the stored epoch is not the epoch that was `picked` by its metric."""
    best, folder = trainer.load_best(), trainer.args.output_dir
    metrics = job.measure(job.validation[0], best, best)
    if (found := comparable(metrics[job.metric])) != comparable(picked):
        raise InputError(
            f"{folder}/{BEST_NAME} is not the epoch that this run picked: its {job.metric} is {found}, and that of the "
            f"best epoch was {picked}. Move {folder} away to have it run again"
        )
    for split in job.validation[1:]:
        others = job.measure(split, trainer.scores(job.features[split]), best)
        metrics |= {name_on_split(name, split): value for name, value in others.items()}
    if trainer.args.do_predict and job.tests:
        tests = {split: trainer.scores(job.features[split]) for split in job.tests}
        if trainer.is_world_process_zero():
            stored_scores.write(Path(folder), job.test_rows, tests)
    return metrics, best


def inputs_fingerprint(args: FinetuneArguments, tokenizer: PreTrainedTokenizerBase, rows: Any) -> dict[str, str]:
    """Fingerprints of the tokenizer, the checkpoint, and the data `rows` (as JSON)."""
    around = dict(tokenizer("a", "b"))  # the tokens around and between two texts, and their types
    of_tokenizer = [tokenization.tokenizer_fingerprint(tokenizer), tokenization.files_fingerprint(tokenizer), around]
    ids_and_sides = [tokenizer.pad_token_id, tokenizer.mask_token_id, tokenizer.truncation_side]
    return {
        "tokenizer": durable.fingerprint([*of_tokenizer, *ids_and_sides]),
        "weights": weights.identity(args.model_name_or_path),
        "data": durable.fingerprint(rows),
    }


def finish(
    filled: Arguments, resolved: dict[str, Any], runs: list[Run], records: list[FinetuneRecord], job: Job
) -> Summary:
    """The summary of all runs, also as `summary.json`; weights that `keep` does not want are dropped. The best run's
    folder gets its answers to the validation examples."""
    args, training_args = filled
    summary: Summary = {
        **summarise(runs, records, job.metric),
        **job.about(*filled),
        "resolved_args": resolved,
    }
    picked = picked_setting(summary)
    if training_args.do_predict and job.labelled_tests:
        splits, chosen = {split: len(job.features[split]) for split in job.labelled_tests}, of_setting(runs, picked)
        summary["tests"] = stored_scores.measure(chosen, job.test_rows, splits, job.measure, job.metric)
    if training_args.process_index == 0:
        drop_weights(args.keep, runs, [picked["best_run"]])
        best = Path(picked["best_run"])
        if durable.fault(best / BEST_NAME, (finetune_trainer.SCORES,)) is None:
            answers.write(best / answers.ANSWERS_NAME, job.answers(finetune_trainer.validation_scores(best)))
        write_summary(summary, runs[0].output_dir.parent)
    return summary


def is_finished(run: Run) -> bool:
    return (run.output_dir / RECORD_NAME).is_file()


def finished(run: Run, fingerprint: dict[str, Any]) -> FinetuneRecord | None:
    """The record of a finished run; None for a run to start or to resume. Raises `InputError` where the folder holds a
    run of other settings."""
    if not is_finished(run):
        return None
    advice = f"move {run.output_dir} away to have it run again"
    record = read_record(run.output_dir / RECORD_NAME, ("metrics", "fingerprint", "shown_args"), advice)
    if changed := durable.differences(record["fingerprint"], fingerprint):
        raise InputError(
            f"{run.output_dir} holds a run of other settings: {'; '.join(changed.values())}. Name another output_dir, "
            "or move this folder away"
        )
    return record


def drop_weights(keep: str, runs: list[Run], best: list[str]) -> None:
    """Delete the weights of runs, except those in the folders `best` or, with `keep` "none", of all. Records and scores
    stay."""
    for run in runs:
        if keep == "none" or (keep == "best" and str(run.output_dir) not in best):
            durable.keep_only(run.output_dir / BEST_NAME, finetune_trainer.SCORES)
