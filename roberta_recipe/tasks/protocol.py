"""How the three fine-tuning scripts run (paper, section 5): a run for each seed, its best epoch, median and spread.

A script says what it fine-tunes on (`Job`). The arguments that all three share, the runs, and what is kept of them are
here.
"""

import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed

from roberta_recipe import durable, lock
from roberta_recipe.args import fixed_values, parse, setting, shown_names
from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError, first_line
from roberta_recipe.hardware import free_memory
from roberta_recipe.log import counted, is_first_process, logger
from roberta_recipe.record import (
    BEST_NAME,
    RECORD_NAME,
    Baseline,
    DatasetCard,
    FinetuneRecord,
    Scores,
    SettingScores,
    Summary,
    TestScores,
    percent,
    picked_setting,
    read_record,
    run_record,
    write_preset,
    write_record,
    write_summary,
)
from roberta_recipe.tasks import answers
from roberta_recipe.training import (
    attention,
    batch,
    checkpoint,
    environment,
    families,
    finetune_trainer,
    heads,
    libraries,
    optimization,
    optimizers,
    weights,
)
from roberta_recipe.training.arguments import FinetuneTrainingArguments
from roberta_recipe.training.finetune_trainer import FinetuneTrainer

TEST_SCORES = "test_scores.npz"


@dataclass
class FinetuneArguments:
    """What `TrainingArguments` has no name for, and all three scripts need."""

    _argument_group_name = "recipe"

    model_name_or_path: str | None = setting(None, "Checkpoint to start from, a folder or a Hub id.", "fixed")
    tokenizer_name: str | None = setting(None, "Tokenizer folder or Hub id; without it, the checkpoint's.", "content")
    max_seq_length: int = setting(512, "Tokens the model sees at once.", "fixed", shown=True)
    head_dropout: float | None = setting(
        None,
        "Dropout of the head; without it, the checkpoint's (Hugging Face: as the body's).",
        "fixed",
        shown=True,
    )
    layer_decay: float = setting(
        1.0,
        "Rate of each layer / rate of the layer above it (ELECTRA, appendix B); 1: one rate for all, as the paper.",
        "fixed",
        shown=True,
    )
    global_batch_size: int | None = setting(
        None,
        "Examples an optimizer step (SQuAD: windows; ranking and RACE: questions); accumulation is derived.",
        "fixed",
        shown=True,
    )
    seeds: list[int] = setting([1, 2, 3, 4, 5], "One run for each.", "free")
    random_weights: bool = setting(
        False,
        "Fine-tune the checkpoint's architecture from fresh weights: what pretraining is worth.",
        "fixed",
        shown=True,
    )
    max_train_samples: int | None = setting(None, "Train on the first so many examples only.", "fixed", shown=True)
    keep: Literal["best", "all", "none"] = setting(
        "best", "Whose weights stay on disk: the best run's, all runs', none.", "free"
    )


Arguments = tuple[FinetuneArguments, FinetuneTrainingArguments]


@dataclass
class Job:
    """What a script fine-tunes on. Scores are (features of a split, ...), as `loss_sum` gives them beside the loss."""

    name: str  # of the task, in the records
    metric: str  # its highest value picks the epoch and the setting
    dataset: DatasetCard  # what the model card says of the data
    tokenizer: PreTrainedTokenizerBase
    build_model: Callable[[], torch.nn.Module]
    features: dict[str, list[dict]]  # by split: "train", the splits of `validation`, the splits of `tests`
    validation: list[str]  # splits that are measured; the first picks the epoch
    tests: list[str]  # splits that are scored only, into `TEST_SCORES`
    labelled_tests: list[str]  # those of them with known answers: `measure` gives their metrics, for the summary
    collator: Callable[[list[dict]], dict[str, torch.Tensor]]
    loss_sum: Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
    measure: Callable[[str, np.ndarray, np.ndarray], dict[str, float]]  # (split, its scores, the validation scores)
    degenerate: Callable[[np.ndarray], bool]  # whether such validation scores give one answer to everything
    answers: Callable[[np.ndarray], list[answers.Answer]]  # of such validation scores, an answer for each example
    scored_examples: dict[str, int]  # as in `FinetuneRecord`
    baseline: Baseline | None  # see `constant_answer`
    found: dict[str, Any]  # counts, for the records
    inputs: dict[str, Any]  # fingerprints of what the script read (`inputs_fingerprint`)
    test_rows: str = ""  # fingerprint of the tests' rows, so that stored scores of other rows are not used


@dataclass(frozen=True)
class Run:
    """One run of a protocol."""

    learning_rate: float
    batch: int
    seed: int
    output_dir: Path

    @property
    def rate_and_batch(self) -> tuple[float, int]:
        return self.learning_rate, self.batch


def read_arguments(cls: type, argv: list[str], default: str, description: str) -> tuple[Arguments, dict[str, Any]]:
    """The filled dataclasses, where `cls` is the script's, and the resolved values as a preset."""
    filled, resolved = parse([cls, FinetuneTrainingArguments], argv, default, description=description)
    return tuple(filled), {**resolved, "bf16": filled[-1].bf16}


def check_arguments(args: FinetuneArguments, training_args: FinetuneTrainingArguments) -> None:
    """Raise `InputError` for values out of range and for what the protocol does not do."""
    if not args.model_name_or_path:
        raise InputError("model_name_or_path is not set: name the checkpoint to fine-tune, a folder or a Hub id")
    if not args.seeds or len(set(args.seeds)) != len(args.seeds) or min(args.seeds) < 0:
        raise InputError(f"seeds={args.seeds} must be different numbers from 0 on, one for each run")
    if training_args.seed != TrainingArguments.seed and args.seeds != [training_args.seed]:
        raise InputError(f"seed={training_args.seed}: each run has one of seeds; --seeds {training_args.seed}")
    if args.max_seq_length < 8:
        raise InputError(f"max_seq_length={args.max_seq_length} leaves no room for a sentence; the paper has 512")
    if args.max_train_samples is not None and args.max_train_samples < 1:
        raise InputError(f"max_train_samples={args.max_train_samples} must be at least 1")
    if args.head_dropout is not None and not 0 <= args.head_dropout < 1:
        raise InputError(f"head_dropout={args.head_dropout} must be from 0 to below 1")
    if not 0 < args.layer_decay <= 1:
        raise InputError(
            f"layer_decay={args.layer_decay} must be above 0 and at most 1, which is the same rate for all layers"
        )
    if args.layer_decay < 1 and training_args.optim in optimizers.OWN:
        raise InputError(
            f"layer_decay={args.layer_decay} goes with adamw_torch and its like, not {training_args.optim}"
        )
    if training_args.max_steps == 0 or (training_args.max_steps < 0 and training_args.num_train_epochs <= 0):
        raise InputError(
            f"max_steps={training_args.max_steps} and num_train_epochs={training_args.num_train_epochs:g} train "
            "nothing: name a number of one of the two"
        )
    if training_args.eval_strategy == "no":
        raise InputError("eval_strategy=no: the best epoch is picked on validation; use epoch or steps")
    if not training_args.output_dir or Path(training_args.output_dir).is_file():
        raise InputError(f"output_dir={training_args.output_dir}: name a folder for the runs and their summary")
    if training_args.push_to_hub and args.keep == "none":
        raise InputError("keep=none leaves no weights to push: with push_to_hub, keep=best")
    if training_args.push_to_hub and "checkpoint" in training_args.hub_strategy.value:
        raise InputError(
            f"hub_strategy={training_args.hub_strategy.value}: fine-tuning pushes the best run so far (every_save) or "
            "the best of all (end)"
        )
    heads.check_length(args.model_name_or_path, args.max_seq_length)
    environment.check_launcher(training_args)
    environment.check_processes(training_args)
    environment.check_precision(training_args)
    optimization.check(training_args)
    libraries.check(training_args)
    if training_args.deepspeed_plugin:
        raise InputError(
            "fine-tuning runs without DeepSpeed: start it with ds_configs/accelerate/one_gpu.yaml or eight_gpus"
        )


def load_tokenizer(args: FinetuneArguments) -> PreTrainedTokenizerBase:
    """The tokenizer to fine-tune with, which gives the model no token types that it does not have. Raises `InputError`
    for one that has no offsets, or more tokens than the model."""
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
        names.remove("token_type_ids")  # the model has no such types: RoBERTa with BERT's tokenizer
    if set(names) != set(tokenizer.model_input_names):
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names  # the latter is what is saved
    return tokenizer


def check_validation_files(train: Iterable[Path], validation: Iterable[Path]) -> None:
    """Raise `InputError` where every validation file is a training file, byte for byte, under whatever name. Files that
    are missing are left to their reader."""
    trained_on = {durable.sha256(path): path for path in train if path.is_file()}
    held_out = {path: durable.sha256(path) for path in validation if path.is_file()}
    if held_out and set(held_out.values()) <= set(trained_on):
        path, digest = next(iter(held_out.items()))
        raise InputError(
            f"{path} holds the same as {trained_on[digest]}: a score on the training data says nothing; validate on "
            "other rows"
        )


def of_preset(args: FinetuneArguments, training_args: FinetuneTrainingArguments) -> list[Run]:
    """The preset's rate and batch with every seed."""
    size = args.global_batch_size
    if size is None:
        size = batch.derive_batch(training_args, None)
    return runs_of([training_args.learning_rate], [size], args.seeds, training_args.output_dir)


def run_all(
    argv: list[str],
    runs: list[Run],
    job: Job,
    read: Callable[[list[str]], tuple[Arguments, dict[str, Any]]],
    after_run: Callable[[Path, str], None] | None,
    extra_flags: tuple[str, ...] = (),
) -> list[FinetuneRecord]:
    """The record of each run, from the disk where the run is finished; `read` is the script's reader of arguments.

    Of each setting, the weights of the best run so far stay, all or none, as `keep` says. With a single setting,
    `after_run` is called with the best run's folder and a message after each newly trained run except the last.
    """
    if not job.features["train"]:
        raise InputError(f"{job.name}: no training example is left, of which {job.found['features']}")
    if runs and is_first_process():
        take_folder(runs[0].output_dir.parent)
        for run in runs:
            durable.remove_left(run.output_dir)
    records = []
    for run in runs:
        flags = ["--learning_rate", run.learning_rate, "--global_batch_size", run.batch, "--seed", run.seed]
        flags += ["--output_dir", run.output_dir, *extra_flags]
        (args, training_args), resolved = read([*argv, *map(str, flags)])
        was_finished = (run.output_dir / RECORD_NAME).is_file()
        records.append(finetune(run, job, args, training_args, resolved))
        if args.keep != "all" and training_args.process_index == 0:
            same = [number for number in range(len(records)) if runs[number].rate_and_batch == run.rate_and_batch]
            runs_so_far, records_so_far = [runs[number] for number in same], [records[number] for number in same]
            drop_weights(args.keep, runs_so_far, summarise(runs_so_far, records_so_far, job.metric))
        one_setting = len({run.rate_and_batch for run in runs}) == 1
        if after_run and one_setting and len(records) < len(runs) and not was_finished:
            best = picked_setting(summarise(runs[: len(records)], records, job.metric))["best_run"]
            after_run(Path(best), f"Best of {counted(len(records), 'run')} of {len(runs)}")
    return records


def take_folder(folder: Path) -> None:
    """Hold the folder of a protocol's runs until this process ends (`lock.take`)."""
    durable.make_folder(folder)
    lock.take(folder)
    durable.remove_left(folder)


def finetune(
    run: Run, job: Job, args: FinetuneArguments, training_args: FinetuneTrainingArguments, resolved: dict[str, Any]
) -> FinetuneRecord:
    """Train and score a run, or read its record where it is finished; returns the record."""
    started_s = time.monotonic()
    at_most = training_args.per_device_train_batch_size
    training_args.per_device_train_batch_size = batch.largest_micro_batch(run.batch, at_most, training_args.world_size)
    batch.derive_batch(training_args, run.batch)
    config = weights.read_config(args.model_name_or_path)
    families.check_checkpointing(config, training_args)
    training_args.attn_implementation = attention.choose(config, training_args)
    # so that the preset repeats this run
    resolved |= {"seeds": [run.seed], "attn_implementation": training_args.attn_implementation}
    fingerprint = run_fingerprint(args, training_args, job)
    record = finished(run, fingerprint)
    unscored = training_args.do_predict and bool(job.tests) and test_scores(run, job) is None
    if record and not (unscored and has_weights(run)):
        logger.info(f"Done        {run.output_dir}: {job.metric} {percent(record['metrics'][job.metric])}")
        return record
    if not record:
        optimization.check_length(training_args, steps_of(training_args, len(job.features["train"]), run.batch))
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
        callbacks=environment.take_trackers(training_args),
        loss_sum=job.loss_sum,
        measure=lambda scores: job.measure(job.validation[0], scores, scores),
        best_metric=job.metric,
        layer_decay=args.layer_decay,
        fingerprint=fingerprint,
        resumed=resumed,
    )
    if not record:
        trainer.train(resume_from_checkpoint=resumed_from)
        trainer.end_if_stopped()
    metrics, best = score(trainer, job, record["metrics"][job.metric] if record else trainer.state.best_metric)
    if not record:
        record = run_record(
            trainer,
            metrics,
            task=job.name,
            metric=job.metric,
            dataset=job.dataset,
            examples={split: len(features) for split, features in job.features.items()},
            scored_examples=job.scored_examples,
            baseline=job.baseline,
            degenerate=job.degenerate(best),
            **job.found,
            resolved_args=resolved,
            shown_args=shown_names(args, training_args),
            wall_clock_s=round(time.monotonic() - started_s, 1),
        )
        if trainer.is_world_process_zero():
            write_preset(resolved, training_args.output_dir)
            write_record(record, training_args.output_dir)
            for path in checkpoint.newest_first(training_args.output_dir):  # a finished run needs no checkpoint
                shutil.rmtree(path)
            finetune_trainer.drop_earlier_best(training_args.output_dir)
        trainer.end_if_told()
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
    best = trainer.load_best()
    metrics = job.measure(job.validation[0], best, best)
    if (found := _at_least(metrics[job.metric])) != _at_least(picked):
        folder = trainer.args.output_dir
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
            aside = Path(trainer.args.output_dir, f"unfinished_{TEST_SCORES}")
            np.savez(aside, rows=job.test_rows, **tests)
            aside.replace(aside.with_name(TEST_SCORES))
    return metrics, best


def name_on_split(metric: str, split: str) -> str:
    """The name of a metric on a validation split other than the first: `accuracy_mismatched`."""
    return f"{metric}_{split.partition('_')[2]}"


def constant_answer(
    wanted: dict[str, list[Any]], names: Sequence[str], measure: Callable[[str, np.ndarray], dict[str, float]]
) -> Baseline | None:
    """What the most frequent of the right answers `wanted`, by validation split, scores when it is given to every
    example: the first split says which it is (of equals, the first), `names` what it is called, and `measure` scores
    (split, answers (examples,)). None without names: no correlation with a constant score has a value."""
    if not names:
        return None
    splits = list(wanted)
    answer = int(np.bincount(wanted[splits[0]]).argmax())
    metrics: dict[str, float | None] = {}
    for split in splits:
        scores = measure(split, np.full(len(wanted[split]), answer))
        metrics |= {name if split == splits[0] else name_on_split(name, split): scores[name] for name in scores}
    return {"answer": names[answer], "metrics": metrics}


def test_scores(run: Run, job: Job) -> dict[str, np.ndarray] | None:
    """A run's scores of the tests, by split; None where none are stored, or the stored scores are of other rows. Raises
    `InputError` where the file is damaged."""
    path = run.output_dir / TEST_SCORES
    if not path.is_file():
        return None
    try:
        with np.load(path) as archive:
            stored = dict(archive)  # its checksums are compared here
        rows = str(stored.pop("rows"))
    except Exception as error:  # zipfile, zlib and numpy have their own
        raise InputError(
            f"{path} is damaged ({first_line(error)}): move it away to have the tests scored again"
        ) from None
    return stored if rows == job.test_rows else None


def scores_of_tests(runs: list[Run], job: Job) -> list[dict[str, np.ndarray]]:
    """The `test_scores` of every run. Raises `InputError` where a run has none."""
    stored = [test_scores(run, job) for run in runs]
    if absent := [run.output_dir for run, scores in zip(runs, stored, strict=True) if scores is None]:
        raise InputError(
            f"{absent[0]} was run without do_predict, or on other test rows, and its weights are gone: move it away to "
            "have it run again"
        )
    return stored


def run_fingerprint(args: FinetuneArguments, training_args: FinetuneTrainingArguments, job: Job) -> dict[str, Any]:
    """What must not change between two starts of a run: flags that are declared so, and the content that was read."""
    return {**fixed_values(args), **fixed_values(training_args), **job.inputs}


def inputs_fingerprint(args: FinetuneArguments, tokenizer: PreTrainedTokenizerBase, rows: Any) -> dict[str, str]:
    """Fingerprints of what a script read: the tokenizer, the checkpoint, and the data `rows`, as JSON."""
    around = dict(tokenizer("a", "b"))  # the tokens around and between two texts, and their types
    of_tokenizer = [tokenization.tokenizer_fingerprint(tokenizer), tokenization.files_fingerprint(tokenizer), around]
    ids_and_sides = [tokenizer.pad_token_id, tokenizer.mask_token_id, tokenizer.truncation_side]
    return {
        "tokenizer": durable.fingerprint([*of_tokenizer, *ids_and_sides]),
        "weights": weights.identity(args.model_name_or_path),
        "data": durable.fingerprint(rows),
    }


def finish(
    args: FinetuneArguments,
    training_args: FinetuneTrainingArguments,
    folder: Path,
    runs: list[Run],
    records: list[FinetuneRecord],
    job: Job,
    resolved_args: dict[str, Any],
) -> Summary:
    """The summary of all runs, also as `<folder>/summary.json`; weights that `keep` does not want are dropped. The best
    run's folder gets its answers to the validation examples."""
    summary: Summary = {
        **summarise(runs, records, job.metric),
        "task": job.name,
        "dataset": job.dataset,
        "scored_examples": job.scored_examples,
        "baseline": job.baseline,
        **job.found,
        "resolved_args": resolved_args,
        "shown_args": shown_names(args, training_args),
    }
    if training_args.do_predict and job.labelled_tests:
        summary["tests"] = measure_tests(runs, job, picked_setting(summary))
    if training_args.process_index == 0:
        drop_weights(args.keep, runs, summary)
        best = Path(picked_setting(summary)["best_run"])
        if durable.fault(best / BEST_NAME, (finetune_trainer.SCORES,)) is None:
            answers.write(best / answers.ANSWERS_NAME, job.answers(finetune_trainer.validation_scores(best)))
        write_summary(summary, folder)
    return summary


def measure_tests(runs: list[Run], job: Job, picked: SettingScores) -> dict[str, TestScores]:
    """The metrics of the picked setting on each test split with known answers, over its runs with stored scores.
    Raises `InputError` where no run has any."""
    chosen = [run for run in runs if run.rate_and_batch == (picked["learning_rate"], picked["global_batch_size"])]
    scored = [run for run in chosen if test_scores(run, job)] or chosen
    by_seed = zip(scored, scores_of_tests(scored, job), strict=True)
    both = [(run.seed, tests, finetune_trainer.validation_scores(run.output_dir)) for run, tests in by_seed]
    found: dict[str, TestScores] = {}
    for split in job.labelled_tests:
        metrics = {seed: job.measure(split, tests[split], of_validation) for seed, tests, of_validation in both}
        found[split] = {**over_seeds(metrics, job.metric), "examples": len(job.features[split])}
    return found


def runs_of(rates: list[float], batches: list[int], seeds: list[int], output_dir: str) -> list[Run]:
    """Every rate with every batch and seed, each in a folder of its own below `output_dir`."""
    return [
        Run(rate, size, seed, Path(output_dir, f"lr{rate:g}-batch{size}-seed{seed}"))
        for rate in rates
        for size in batches
        for seed in seeds
    ]


def finished(run: Run, fingerprint: dict[str, Any]) -> FinetuneRecord | None:
    """The record of a finished run, so that it is not run again; None for a run that is to be started or resumed.

    Raises `InputError` where the folder holds a run of other settings.
    """
    path = run.output_dir / RECORD_NAME
    if not path.is_file():
        return None
    advice = f"move {run.output_dir} away to have it run again"
    record: FinetuneRecord = read_record(path, ("metrics", "fingerprint", "shown_args"), advice)
    if changed := durable.differences(record["fingerprint"], fingerprint):
        raise InputError(
            f"{run.output_dir} holds a run of other settings: {'; '.join(changed.values())}. Name another output_dir, "
            "or move this folder away"
        )
    return record


def has_weights(run: Run) -> bool:
    """Whether the weights of a run's best epoch are on disk."""
    return (run.output_dir / BEST_NAME / finetune_trainer.WEIGHTS).is_file()


def drop_weights(keep: str, runs: list[Run], summary: Summary) -> None:
    """Leave on disk the weights of the best run of a `summarise`d protocol ("best"), of "all" or of "none"; records and
    scores of all stay."""
    best = picked_setting(summary)["best_run"]
    for run in runs:
        if keep == "all" or (keep == "best" and str(run.output_dir) == best):
            continue
        durable.keep_only(run.output_dir / BEST_NAME, finetune_trainer.SCORES)


def summarise(runs: list[Run], records: list[FinetuneRecord], metric: str) -> dict[str, Any]:
    """The fields of a `Summary` that come from scores: median and spread over seeds of each setting, by `metric`; the
    setting with the best median, and its best run."""
    by_setting: dict[tuple[float, int], dict[Run, FinetuneRecord]] = {}
    for run, record in zip(runs, records, strict=True):
        by_setting.setdefault(run.rate_and_batch, {})[run] = record
    rows: list[SettingScores] = []
    for (rate, size), scored in by_setting.items():
        scores = over_seeds({run.seed: record["metrics"] for run, record in scored.items()}, metric)
        rows.append(
            {
                "learning_rate": rate,
                "global_batch_size": size,
                **scores,
                "degenerate_seeds": [run.seed for run, record in scored.items() if record["degenerate"]],
                "best_run": str(max(scored, key=lambda run, seeds=scores["seeds"]: seeds[run.seed]).output_dir),
            }
        )
    return {"metric": metric, "settings": rows, "picked": max(range(len(rows)), key=lambda n: rows[n]["median"])}


def over_seeds(metrics: dict[int, dict[str, float | None]], metric: str) -> Scores:
    """Median and spread over seeds of `metric`, and the medians of all metrics, from seed -> metrics."""
    seeds = {seed: _at_least(of_seed[metric]) for seed, of_seed in metrics.items()}
    names = next(iter(metrics.values()))
    return {
        "median": statistics.median(seeds.values()),
        "mean": statistics.fmean(seeds.values()),
        "lowest": min(seeds.values()),
        "highest": max(seeds.values()),
        "seeds": seeds,
        "medians": {name: statistics.median(_at_least(m[name]) for m in metrics.values()) for name in names},
    }


def _at_least(value: float | None) -> float:
    """A score that can be compared: what is no number (a correlation with a constant) is below all others."""
    return -math.inf if value is None or math.isnan(value) else value


def load_from_hub(name: str, *config: str, split: str, instead: str) -> datasets.Dataset:
    """A split of a dataset on the Hub. Raises `InputError` that names it and what to give `instead`."""
    try:
        return datasets.load_dataset(name, *config, split=split)
    except Exception as error:  # the Hub client raises a dozen kinds
        what = ", ".join([*config, split])
        raise InputError(
            f"cannot load {name} ({what}): {type(error).__name__}: {error}. Without the Hub, give {instead}"
        ) from None
