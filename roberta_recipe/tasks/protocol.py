"""The protocol of the fine-tuning scripts (paper, section 5): argument checks, a run per seed, its best epoch,
the summary over seeds. A script describes its task as a `Job`."""

import contextlib
import math
import shutil
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from transformers import PreTrainedTokenizerBase, set_seed

from roberta_recipe import durable
from roberta_recipe import record as records
from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.log import counted, is_first_process, log_once, logger
from roberta_recipe.model import attention, weights
from roberta_recipe.settings import fixed_values, names_in, parse, shown_names, value_of
from roberta_recipe.tasks import summaries
from roberta_recipe.tasks.summaries import Run
from roberta_recipe.training import arguments, batch, checkpoint, finetune_trainer, launching, optimizers
from roberta_recipe.training.arguments import FinetuneArguments, FinetuneTrainingArguments
from roberta_recipe.training.finetune_trainer import FinetuneTrainer

Arguments = tuple[FinetuneArguments, FinetuneTrainingArguments]


@dataclass
class Job:
    """A task for the protocol. Scores (features of a split, ...): the model outputs that `loss_sum` returns with the
    loss. Metrics: the values of `measure`."""

    name: str  # in the records
    metric: str  # selects the best epoch and setting, by its highest value
    dataset: records.DatasetCard  # for the model card
    tokenizer: PreTrainedTokenizerBase
    build_model: Callable[[], torch.nn.Module]
    features: dict[str, list[dict]]  # by split: "train", those of `validation` and `tests`
    validation: list[str]  # validation splits; the first selects the best epoch
    tests: dict[str, int]  # labelled examples by test split, 0 if hidden; all scores are stored (`TEST_SCORES`)
    collator: Callable[[list[dict]], dict[str, torch.Tensor]]
    loss_sum: Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
    measure: Callable[[str, np.ndarray, np.ndarray], dict[str, float]]  # metrics of (split, scores, validation scores)
    degenerate: Callable[[np.ndarray], bool]  # validation scores -> whether all predictions are the same
    answers: Callable[[np.ndarray], list[dict[str, Any]]]  # validation scores -> rows for `summaries.write_answers`
    scored_examples: dict[str, int]  # as in `FinetuneRecord`
    baseline: records.Baseline | None  # the same answer to every example
    found: dict[str, Any]  # counts for the records
    inputs: dict[str, Any]  # `inputs_fingerprint`
    test_hash: str = ""  # hash of the test set: stored scores of other test sets are ignored

    def about(self, *filled: Any) -> dict[str, Any]:
        """The fields that run records and the summary share; `filled`: argument dataclasses."""
        same = {name: getattr(self, name) for name in ("metric", "dataset", "scored_examples", "baseline")}
        return {"task": self.name, **same, **self.found, "shown_args": shown_names(*filled)}


def read_arguments(cls: type, argv: list[str], default: str, description: str) -> tuple[Arguments, dict[str, Any]]:
    """((script's `cls`, training arguments), resolved preset), with max_seq_length at most the model's."""
    (args, training_args), resolved = parse([cls, FinetuneTrainingArguments], argv, default, description=description)
    if "seed" in names_in(argv) and args.seeds != [training_args.seed]:
        raise InputError(f"seed={training_args.seed} has no effect with seeds; use --seeds {training_args.seed}")
    with contextlib.suppress(InputError):  # of a missing model: `check_arguments` raises it
        longest = weights.max_positions(weights.read_config(args.model_name_or_path))
        if longest and longest < args.max_seq_length and "max_seq_length" not in names_in(argv):
            log_once(f"Length      {longest}, the maximum of {args.model_name_or_path}, not {args.max_seq_length}")
            args = replace(args, max_seq_length=longest)
    return (args, training_args), {**resolved, "max_seq_length": args.max_seq_length, "bf16": training_args.bf16}


def check_arguments(
    args: FinetuneArguments, training_args: FinetuneTrainingArguments, metric: str, classifies: bool
) -> None:
    """Raise `InputError` for out-of-range values and for flags that the protocol would ignore. `metric` selects the
    best epoch; `classifies`: the loss is a cross-entropy over classes."""
    if not args.model_name_or_path:
        raise InputError("model_name_or_path is not set: name the checkpoint to fine-tune, a folder or a Hub id")
    if not args.seeds or len(set(args.seeds)) < len(args.seeds):
        raise InputError(f"seeds={args.seeds} must be different numbers, one for each run")
    if (count := args.max_train_samples) is not None and count < 1:
        raise InputError(f"max_train_samples={count} must be above 0; leave it out for no limit")
    decay = args.layer_decay
    if decay != 1 and (not 0 < decay < 1 or training_args.optim in optimizers.custom_names()):
        raise InputError(
            f"layer_decay={decay} must be above 0 and at most 1; below 1, it works with Trainer's own optimizers, not "
            f"{training_args.optim}"
        )
    micro_batch, size = training_args.per_device_train_batch_size, args.global_batch_size
    if size and micro_batch > size:
        raise InputError(
            f"per_device_train_batch_size={micro_batch} is more than global_batch_size={size}: lower it to at most "
            f"{size}, or train in batches of {micro_batch} with --global_batch_size {micro_batch}"
        )
    best, higher = training_args.metric_for_best_model, training_args.greater_is_better
    if (best or metric).removeprefix("eval_") != metric or higher is False:
        raise InputError(
            f"metric_for_best_model={best} with greater_is_better={str(higher).lower()}: the highest {metric} on "
            "validation picks the best epoch; leave both out"
        )
    if (share := training_args.label_smoothing_factor) and not (classifies and share < 1):
        raise InputError(f"label_smoothing_factor={share} must be below 1, and is for classification only")
    if training_args.publishes and args.keep == "none":
        raise InputError("keep=none leaves no weights to push: with push_to_hub, use --keep best")
    if training_args.deepspeed_plugin:
        raise InputError("fine-tuning runs without DeepSpeed: start it with ds_configs/accelerate/one_gpu.yaml")
    weights.check_length(args.model_name_or_path, args.max_seq_length)
    launching.check_launch(training_args)
    optimizers.check(training_args)


def load_tokenizer(args: FinetuneArguments) -> PreTrainedTokenizerBase:
    """The fast tokenizer, with the columns of the model. Raises `InputError` for a slow tokenizer and for one with
    more tokens than the model."""
    name = args.tokenizer_name or args.model_name_or_path
    tokenizer = tokenization.load_tokenizer(name, needed=("pad_token",))
    config = weights.read_config(args.model_name_or_path)
    rows = getattr(config, "vocab_size", None)
    if rows and len(tokenizer) > rows:
        raise InputError(
            f"the tokenizer {name!r} has {len(tokenizer):,} tokens, the model {args.model_name_or_path!r} {rows:,}: "
            "name the model's own with tokenizer_name"
        )
    weights.set_input_names(tokenizer, config)
    return tokenizer


def preset_runs(args: FinetuneArguments, training_args: FinetuneTrainingArguments) -> list[Run]:
    """A run per seed at the given learning rate and batch size."""
    size = batch.derive_batch(training_args, None)[0] if args.global_batch_size is None else args.global_batch_size
    return summaries.runs_of([training_args.learning_rate], [size], args.seeds, training_args.output_dir)


def run_all(
    argv: list[str],
    runs: list[Run],
    job: Job,
    read: Callable[[list[str]], tuple[Arguments, dict[str, Any]]],
    after_run: Callable[[Path, str], futures.Future | None] | None,
    preset: str,
    extra_flags: tuple[str, ...] = (),
) -> list[records.FinetuneRecord]:
    """Train the runs and return their records; a finished run's is read from disk. `read`: the script's
    `read_arguments`, `preset`: its default.

    By `keep`, the weights of each setting's best run, of all runs, or of none stay on disk. With a single setting,
    `after_run` gets the best run's folder and a message after each newly trained run except the last, and returns a
    background upload of the folder.
    """
    if not job.features["train"]:
        raise InputError(f"{job.name}: no training example is left: {job.found['features']}")
    if (other := runs[0].output_dir.parent / records.RECORD_NAME).is_file():
        raise InputError(f"output_dir={other.parent} is the folder of another run: it has {other.name}")
    if is_first_process():
        durable.make_folder(folder := runs[0].output_dir.parent)
        durable.lock(folder)
        for path in (folder, *(run.output_dir for run in runs)):
            durable.remove_stale(path)
    filled = []  # read now, as the preset may be edited while the first runs train
    for run in runs:
        flags = ["--learning_rate", run.learning_rate, "--global_batch_size", run.batch]
        flags += ["--seed", run.seed, "--seeds", run.seed, "--output_dir", run.output_dir, *extra_flags]
        filled.append(read([*argv, *map(str, flags)]))  # the last of repeated flags wins
    results: list[records.FinetuneRecord] = []
    upload: futures.Future | None = None
    for number, run in enumerate(runs, 1):
        (args, training_args), resolved = filled[number - 1]
        at_most, processes = training_args.per_device_train_batch_size, training_args.world_size
        micro_batch = batch.largest_micro_batch(run.batch, at_most, processes)
        arguments.derive(args, training_args, weights.read_config(args.model_name_or_path), micro_batch)
        if not results:
            announce(argv, preset, runs, training_args, len(job.features["train"]))
        was_finished = is_finished(run)
        ahead = [later for later in runs[number:] if not is_finished(later)]
        results.append(finetune(run, ahead, job, (args, training_args), resolved))
        if upload:
            futures.wait([upload])  # before weights are deleted
        so_far = summaries.summarise(runs[:number], results, job.metric)
        if training_args.process_index == 0:
            for path in checkpoint.all_folders(run.output_dir):  # a finished run needs no checkpoint
                shutil.rmtree(path)
            drop_weights(args.keep, runs[:number], [row["best_run"] for row in so_far["settings"]])
        if after_run and runs[0].setting == runs[-1].setting and number < len(runs) and not was_finished:
            best = Path(records.picked_setting(so_far)["best_run"])
            upload = after_run(best, f"Best of {counted(number, 'run')} of {len(runs)}")
    return results


def announce(
    argv: list[str], preset: str, runs: list[Run], training_args: FinetuneTrainingArguments, examples: int
) -> None:
    """Log the preset and its main hyperparameters."""
    of_runs = [", ".join(map(str, dict.fromkeys(values))) for values in zip(*map(astuple, runs), strict=True)]
    lengths = dict.fromkeys(steps_of(training_args, examples, run.batch) for run in runs)
    steps, epochs, warmup = min(lengths), training_args.num_train_epochs, training_args.warmup_steps
    if training_args.max_steps > 0:
        length = f"{counted(steps, 'step')} ({steps / max(examples // runs[0].batch, 1):.3g} epochs)"
    else:
        length = f"{epochs:g} {'epoch' if epochs == 1 else 'epochs'} ({' or '.join(map('{:,}'.format, lengths))} steps)"
    logger.info(
        f"Protocol    {value_of(argv, 'config') or preset}: learning rate {of_runs[0]}, batch {of_runs[1]}, {length}, "
        f"warm-up {f'{100 * warmup:g}% of the steps' if 0 < warmup < 1 else counted(int(warmup), 'step')}, "
        f"seeds {of_runs[2]}"
    )


def finetune(
    run: Run, ahead: list[Run], job: Job, filled: Arguments, resolved: dict[str, Any]
) -> records.FinetuneRecord:
    """Train and score a run, or read a finished run's record; `ahead`: the following runs, for the ETA."""
    args, training_args = filled
    started_s = time.monotonic()
    resolved |= {"attn_implementation": training_args.attn_implementation}  # the saved preset repeats this run
    fingerprint = {**fixed_values(args), **fixed_values(training_args), **job.inputs}
    record = finished(run, fingerprint)
    scored = not (training_args.do_predict and job.tests) or summaries.read_test_scores(run, job.test_hash) is not None
    has_weights = (run.output_dir / records.BEST_NAME / finetune_trainer.WEIGHTS).is_file()
    if record and (scored or not has_weights):  # without weights, `all_test_scores` names the missing scores
        logger.info(f"Done        {run.output_dir}: {job.metric} {records.percent(record['metrics'][job.metric])}")
        return record
    steps = [steps_of(training_args, len(job.features["train"]), each.batch) for each in (run, *ahead)]
    if not record:
        optimizers.check_length(training_args, steps[0])
    set_seed(run.seed)
    logger.info(f"{'Predict' if record else 'Run':<12}seed {run.seed}: {run.output_dir}")
    resumed_from, resumed = checkpoint.resume(training_args, fingerprint)
    model = job.build_model()
    if weights.content_hash(start := args.model_name_or_path) != job.inputs["weights"]:
        raise InputError(f"model_name_or_path={start} has changed since this command began: name another output_dir")
    model.config.pad_token_id = job.tokenizer.pad_token_id  # `train` sets it; a decoder's head needs it in `score` too
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
        run_name=f"{training_args.run_name or run.output_dir.parent.name}/{run.output_dir.name}",
        steps_after=sum(steps[1:]),
    )
    if not record:
        trainer.train(resume_from_checkpoint=resumed_from)
        trainer.stopping.end_if_stopped()
    metrics, best = score(trainer, job, record["metrics"][job.metric] if record else trainer.best_score)
    if not record:
        record = records.run_record(
            trainer,
            metrics,
            **job.about(args, training_args),
            examples={split: len(features) for split, features in job.features.items()},
            degenerate=job.degenerate(best),
            resolved_args=resolved,
            wall_clock_s=round(time.monotonic() - started_s, 1),
        )
        if trainer.is_world_process_zero():
            records.write_preset(resolved, training_args.output_dir)
            records.write_record(record, Path(training_args.output_dir) / records.RECORD_NAME)
    trainer.stopping.end_if_signaled()  # on all ranks, so that none reads test scores that rank 0 has not yet written
    del trainer, model
    clear_device_cache(garbage_collection=True)  # the trainer has reference cycles
    return record


def steps_of(training_args: FinetuneTrainingArguments, examples: int, batch_size: int) -> int:
    """Optimizer steps of a run on `examples` training examples."""
    if training_args.max_steps > 0:
        return training_args.max_steps
    return math.ceil(training_args.num_train_epochs * max(examples // batch_size, 1))


def score(trainer: FinetuneTrainer, job: Job, picked: float | None) -> tuple[dict[str, float], np.ndarray]:
    """The best epoch's metrics on all validation splits, and its scores on the first; test scores are stored. Raises
    `InputError` if the stored weights do not reproduce the metric `picked`."""
    best, folder = trainer.load_best(), trainer.args.output_dir
    metrics = job.measure(job.validation[0], best, best)
    if (value := summaries.comparable(metrics[job.metric])) != summaries.comparable(picked):
        raise InputError(
            f"{folder}/{records.BEST_NAME} is not this run's best epoch: its {job.metric} is {value}, not {picked}. "
            f"Move {folder} away to run it again"
        )
    for split in job.validation[1:]:
        others = job.measure(split, trainer.scores(job.features[split]), best)
        metrics |= {summaries.name_on_split(name, split): value for name, value in others.items()}
    if trainer.args.do_predict and job.tests:
        tests = {split: trainer.scores(job.features[split]) for split in job.tests}
        if trainer.is_world_process_zero():
            summaries.write_test_scores(Path(folder), job.test_hash, tests)
    return metrics, best


def inputs_fingerprint(args: FinetuneArguments, tokenizer: PreTrainedTokenizerBase, rows: Any) -> dict[str, str]:
    """Hashes of the tokenizer, the checkpoint, and the data `rows` (as JSON)."""
    hashes = [tokenization.tokenizer_fingerprint(tokenizer), tokenization.files_fingerprint(tokenizer)]
    pair = dict(tokenizer("a", "b"))  # with special tokens and token types
    ids_and_sides = [tokenizer.pad_token_id, tokenizer.mask_token_id, tokenizer.truncation_side]
    return {
        "tokenizer": durable.fingerprint([*hashes, pair, *ids_and_sides]),
        "weights": weights.content_hash(args.model_name_or_path),
        "data": durable.fingerprint(rows),
    }


def finish(
    filled: Arguments, resolved: dict[str, Any], runs: list[Run], results: list[records.FinetuneRecord], job: Job
) -> records.Summary:
    """Write the summary of all runs and the best run's validation predictions; delete weights by `keep`. Only rank 0
    reads stored scores, and has `tests` in its summary."""
    args, training_args = filled
    scores = summaries.summarise(runs, results, job.metric)
    summary: records.Summary = {**scores, **job.about(*filled), "resolved_args": resolved}
    picked = records.picked_setting(summary)
    if training_args.process_index == 0:
        labelled = {split: count for split, count in job.tests.items() if count}
        if training_args.do_predict and labelled:
            chosen = summaries.of_setting(runs, picked)
            summary["tests"] = summaries.summarise_tests(chosen, job.test_hash, labelled, job.measure, job.metric)
        best = Path(picked["best_run"])
        if args.keep == "best" and not (best / records.BEST_NAME / finetune_trainer.WEIGHTS).is_file():
            logger.warning(f"Weights     none in {best}: move it away to train again")
        else:
            drop_weights(args.keep, runs, [picked["best_run"]])
        if durable.damage(best / records.BEST_NAME, (finetune_trainer.SCORES,)) is None:
            rows = job.answers(finetune_trainer.validation_scores(best))
            summaries.write_answers(best / summaries.ANSWERS_NAME, rows)
        records.write_record(summary, runs[0].output_dir.parent / records.SUMMARY_NAME)
    return summary


def is_finished(run: Run) -> bool:
    return (run.output_dir / records.RECORD_NAME).is_file()


def finished(run: Run, fingerprint: dict[str, Any]) -> records.FinetuneRecord | None:
    """The record of a finished run; None for one to start or resume. Raises `InputError` if its settings differ."""
    if not is_finished(run):
        return None
    advice = f"move {run.output_dir} away to run it again"
    record = records.read_record(run.output_dir / records.RECORD_NAME, ("metrics", "fingerprint", "shown_args"), advice)
    if changed := durable.differences(record["fingerprint"], fingerprint):
        raise InputError(
            f"{run.output_dir} has a run with other settings: {'; '.join(changed.values())}. Name another output_dir, "
            "or move this folder away"
        )
    return record


def drop_weights(keep: str, runs: list[Run], best: list[str]) -> None:
    """Delete the weights of runs outside the folders `best`, or of all with `keep` "none". Records and scores stay."""
    for run in runs:
        if keep == "none" or (keep == "best" and str(run.output_dir) not in best):
            durable.keep_only(run.output_dir / records.BEST_NAME, finetune_trainer.SCORES)
