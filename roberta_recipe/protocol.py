"""How the three fine-tuning scripts run (paper, section 5): one run a seed, the best epoch, median and spread.

A script says what it fine-tunes on (`Job`); arguments that all three have, the runs and what is kept of them are here.
"""

import math
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed

from roberta_recipe import checkpoint, durable, finetuning, hub, report, run, tokenization
from roberta_recipe.args import InputError, parse, setting
from roberta_recipe.report import percent

TEST_SCORES = "test_scores.npz"

_TAKEN_FROM_TRAINER = {
    "average_tokens_across_devices": True,
    "load_best_model_at_end": False,
    "train_sampling_strategy": "random",
    "dataloader_drop_last": False,
    "eval_do_concat_batches": True,
    "eval_delay": 0,
}


@dataclass
class FinetuneArguments:
    """What `TrainingArguments` has no name for, and all three scripts need."""

    _argument_group_name = "recipe"

    model_name_or_path: str | None = setting(None, "Checkpoint to start from, a folder or a Hub id.")
    tokenizer_name: str | None = setting(None, "Tokenizer folder or Hub id; without it, the checkpoint's.")
    max_seq_length: int = setting(512, "Tokens the model sees at once.")
    head_dropout: float | None = setting(
        None, "Dropout of the head; without it, the checkpoint's (Hugging Face: as the body's)."
    )
    layer_decay: float = setting(
        1.0, "Rate of each layer / rate of the one above it (ELECTRA, appendix B); 1: one rate for all, as the paper."
    )
    global_batch_size: int | None = setting(
        None, "Examples an optimizer step (SQuAD: windows; ranking and RACE: questions); accumulation is derived."
    )
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5], metadata={"help": "One run for each."})
    random_weights: bool = setting(
        False, "Fine-tune the checkpoint's architecture from fresh weights: what pretraining is worth."
    )
    max_train_samples: int | None = setting(None, "Train on the first so many examples only.")
    keep: Literal["best", "all", "none"] = setting(
        "best", "Whose weights stay on disk: the best run's, all runs', none."
    )


@dataclass
class FinetuneTrainingArguments(TrainingArguments):
    """`TrainingArguments` with RoBERTa's values where Trainer's own would be wrong for it (paper, Table 10)."""

    _argument_group_name = "Hugging Face TrainingArguments"

    weight_decay: float = setting(0.1, "Table 10; Trainer has 0.")
    adam_beta2: float = setting(0.98, "fairseq's configuration; Trainer has 0.999.")
    adam_epsilon: float = setting(1e-6, "fairseq's configuration; Trainer has 1e-8.")
    max_grad_norm: float = setting(0.0, "fairseq's configuration: no clipping; Trainer has 1.0.")
    eval_strategy: str = setting("epoch", "The best epoch is kept.")
    save_strategy: str = setting("no", "Checkpoints to go on from, for long tasks; the best epoch is kept anyway.")
    logging_nan_inf_filter: bool = setting(False, "Trainer would log a loss of 0.0 after a NaN.")
    remove_unused_columns: bool = setting(False, "Features have what the model takes, and nothing else.")


Arguments = tuple[FinetuneArguments, FinetuneTrainingArguments]


@dataclass
class Job:
    """What a script fine-tunes on. Scores are (features of a split, ...), as `loss_sum` gives them beside the loss."""

    name: str  # of the task, in the records
    metric: str  # the highest picks the epoch and the setting
    tokenizer: PreTrainedTokenizerBase
    build_model: Callable[[], torch.nn.Module]
    features: dict[str, list[dict]]  # by split: "train", those of `validation` and of `tests`
    validation: list[str]  # measured; the first picks the epoch
    tests: list[str]  # scored only, into `TEST_SCORES`
    collator: Callable[[list[dict]], dict[str, torch.Tensor]]
    loss_sum: Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
    measure: Callable[[str, np.ndarray, np.ndarray], dict[str, float]]  # (split, scores, the validation set's)
    degenerate: Callable[[np.ndarray], bool]  # whether such validation scores give one answer to everything
    found: dict[str, Any]  # counts, for the records
    inputs: dict[str, Any]  # the script's part of a run's fingerprint
    test_rows: str = ""  # their fingerprint: scores of other rows are not taken for theirs


@dataclass(frozen=True)
class Run:
    """One run of a protocol."""

    learning_rate: float
    batch: int
    seed: int
    output_dir: Path

    @property
    def setting(self) -> tuple[float, int]:
        return self.learning_rate, self.batch


def read_arguments(cls: type, argv: list[str], default: str, description: str) -> tuple[Arguments, dict[str, Any]]:
    """The filled dataclasses, `cls` being the script's, and the resolved values as a preset."""
    filled, resolved = parse([cls, FinetuneTrainingArguments], argv, default, description=description)
    return tuple(filled), resolved


def check_arguments(args: FinetuneArguments, training_args: FinetuneTrainingArguments) -> None:
    """Raise `InputError` for values out of range and for what the protocol takes from `Trainer`."""
    if not args.model_name_or_path:
        raise InputError("model_name_or_path is not set: name the checkpoint to fine-tune, a folder or a Hub id")
    if not args.seeds or len(set(args.seeds)) != len(args.seeds) or min(args.seeds) < 0:
        raise InputError(f"seeds={args.seeds} must be different numbers from 0 on, one for each run")
    if args.max_seq_length < 8:
        raise InputError(f"max_seq_length={args.max_seq_length} leaves no room for a sentence; the paper has 512")
    if args.max_train_samples is not None and args.max_train_samples < 1:
        raise InputError(f"max_train_samples={args.max_train_samples} must be at least 1")
    if args.head_dropout is not None and not 0 <= args.head_dropout < 1:
        raise InputError(f"head_dropout={args.head_dropout} must be from 0 to below 1")
    if not 0 < args.layer_decay <= 1:
        raise InputError(f"layer_decay={args.layer_decay} must be above 0 and at most 1, which is one rate for all")
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
    if training_args.label_smoothing_factor:
        raise InputError(f"label_smoothing_factor={training_args.label_smoothing_factor}: the losses here are plain")
    for name, wanted in _TAKEN_FROM_TRAINER.items():
        if getattr(training_args, name) != wanted:
            raise InputError(f"{name} must stay {str(wanted).lower()}: the script does its part itself")
    finetuning.check_length(args.model_name_or_path, args.max_seq_length)
    run.check_processes(training_args)
    run.check_precision(training_args)
    if training_args.deepspeed_plugin:
        raise InputError(
            "fine-tuning runs without DeepSpeed: start it with ds_configs/accelerate/one_gpu.yaml or eight_gpus"
        )


def of_preset(args: FinetuneArguments, training_args: FinetuneTrainingArguments) -> list[Run]:
    """The preset's rate and batch with every seed."""
    batch = args.global_batch_size
    if batch is None:
        batch = run.derive_batch(training_args, None)
    return runs_of([training_args.learning_rate], [batch], args.seeds, training_args.output_dir)


def run_all(
    argv: list[str],
    runs: list[Run],
    job: Job,
    read: Callable[[list[str]], tuple[Arguments, dict[str, Any]]],
    publisher: hub.Publisher | None,
    extra_flags: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """The record of each run, from the disk where it is done already; `read` is the script's reader of arguments.

    Of each setting, the weights of the best run so far stay, or as `keep` says. They are pushed after a run that was
    trained now, unless `hub_strategy` is "end" or there are several settings to choose from.
    """
    records = []
    for one in runs:
        flags = ["--learning_rate", one.learning_rate, "--global_batch_size", one.batch, "--seed", one.seed]
        flags += ["--output_dir", one.output_dir, *extra_flags]
        (args, training_args), resolved = read([*argv, *map(str, flags)])
        was_done = (one.output_dir / run.RECORD_NAME).is_file()
        records.append(finetune(one, job, args, training_args, resolved))
        if args.keep == "best" and training_args.process_index == 0:
            mine = [number for number in range(len(records)) if runs[number].setting == one.setting]
            of_setting, theirs = [runs[number] for number in mine], [records[number] for number in mine]
            drop_weights("best", of_setting, summarise(of_setting, theirs, job.metric))
        if publisher and len(records) < len(runs) and len({one.setting for one in runs}) == 1 and not was_done:
            best = summarise(runs[: len(records)], records, job.metric)["settings"][0]["best_run"]
            publisher.push_run(Path(best), f"Best of {len(records)} runs of {len(runs)}")
    return records


def finetune(
    one: Run, job: Job, args: FinetuneArguments, training_args: FinetuneTrainingArguments, resolved: dict[str, Any]
) -> dict[str, Any]:
    """One run: its record, from the disk where it is done already."""
    started_s = time.monotonic()
    at_most = training_args.per_device_train_batch_size
    training_args.per_device_train_batch_size = finetuning.fit_micro_batch(one.batch, at_most, training_args.world_size)
    run.derive_batch(training_args, one.batch)
    resolved |= {"seeds": [one.seed]}  # so that the preset repeats this run
    fingerprint = run_fingerprint(args, training_args, job)
    record = finished(one, fingerprint)
    unscored = training_args.do_predict and bool(job.tests) and test_scores(one, job) is None
    if record and not (unscored and has_weights(one)):
        run.logger.info(f"Done        {one.output_dir}: {job.metric} {percent(record['metrics'][job.metric])}")
        return record
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    set_seed(one.seed)
    resumed_from = checkpoint.find(training_args)
    resumed = resumed_from and checkpoint.load_state(resumed_from, fingerprint, checkpoint.layout(training_args))
    trainer = finetuning.FinetuneTrainer(
        model=job.build_model(),
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
    if not record:
        trainer.train(resume_from_checkpoint=resumed_from)
    metrics, best = score(trainer, job)
    if not record:
        record = run.run_record(
            trainer,
            metrics,
            task=job.name,
            metric=job.metric,
            examples={split: len(features) for split, features in job.features.items()},
            degenerate=job.degenerate(best),
            **job.found,
            fingerprint=fingerprint,
            resolved_args=resolved,
            wall_clock_s=round(time.monotonic() - started_s, 1),
        )
        if trainer.is_world_process_zero():
            run.write_preset(resolved, training_args.output_dir)
            run.write_record(record, training_args.output_dir)
            for path in checkpoint.newest_first(training_args.output_dir):  # nothing goes on from there any more
                shutil.rmtree(path)
    del trainer
    finetuning.free_memory()
    return record


def score(trainer: finetuning.FinetuneTrainer, job: Job) -> tuple[dict[str, float], np.ndarray]:
    """Metrics of the best epoch on all of validation, and its scores of the first part; those of tests are stored."""
    best = trainer.load_best()
    metrics = job.measure(job.validation[0], best, best)
    for split in job.validation[1:]:
        others = job.measure(split, trainer.scores(job.features[split]), best)
        metrics |= {f"{name}_{split.partition('_')[2]}": value for name, value in others.items()}
    if trainer.args.do_predict and job.tests:
        tests = {split: trainer.scores(job.features[split]) for split in job.tests}
        if trainer.is_world_process_zero():
            aside = Path(trainer.args.output_dir, f"unfinished_{TEST_SCORES}")
            np.savez(aside, rows=job.test_rows, **tests)
            aside.replace(aside.with_name(TEST_SCORES))
    return metrics, best


def test_scores(one: Run, job: Job) -> dict[str, np.ndarray] | None:
    """A run's scores of the tests, by split; None where there are none of these rows."""
    path = one.output_dir / TEST_SCORES
    stored = dict(np.load(path)) if path.is_file() else {}
    return stored if stored and str(stored.pop("rows", "")) == job.test_rows else None


def scores_of_tests(runs: list[Run], job: Job) -> list[dict[str, np.ndarray]]:
    """The same of all. Raises `InputError` where a run has none."""
    stored = [test_scores(one, job) for one in runs]
    if absent := [one.output_dir for one, scores in zip(runs, stored, strict=True) if scores is None]:
        raise InputError(
            f"{absent[0]} was run without do_predict, or on other test rows, and its weights are gone: move it away to "
            "have it run again"
        )
    return stored


def run_fingerprint(args: FinetuneArguments, training_args: FinetuneTrainingArguments, job: Job) -> dict[str, Any]:
    """What must not change between two starts of a run, for it to be the same run."""
    ours = ("model_name_or_path", "random_weights", "max_seq_length", "head_dropout", "layer_decay")
    ours += ("global_batch_size", "max_train_samples")
    inherited = ("seed", "max_steps", "num_train_epochs", "learning_rate", "warmup_steps", "weight_decay", "adam_beta1")
    inherited += ("adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "fp16", "eval_steps", "optim_args")
    inherited += ("lr_scheduler_kwargs", "neftune_noise_alpha")
    return {
        **{name: getattr(args, name) for name in ours},
        **{name: getattr(training_args, name) for name in inherited},
        "lr_scheduler_type": training_args.lr_scheduler_type.value,
        "optim": str(getattr(training_args.optim, "value", training_args.optim)),
        "eval_strategy": training_args.eval_strategy.value,
        **job.inputs,
    }


def inputs_fingerprint(args: Any, names: tuple[str, ...], tokenizer, rows: Any) -> dict[str, Any]:
    """The script's part of it: its own arguments `names`, what turns text into ids, weights, and the data, as JSON."""
    return {
        **{name: getattr(args, name) for name in names},
        "tokenizer": tokenization.tokenizer_fingerprint(tokenizer),
        "weights": finetuning.weights_identity(args.model_name_or_path),
        "data": durable.fingerprint(rows),
    }


def finish(
    args: FinetuneArguments,
    training_args: FinetuneTrainingArguments,
    folder: Path,
    runs: list[Run],
    records: list[dict[str, Any]],
    job: Job,
    resolved_args: dict[str, Any],
) -> dict[str, Any]:
    """The summary of all runs, also as `<folder>/summary.json`, and their curves; weights that `keep` does not want are
    dropped."""
    summary = summarise(runs, records, job.metric) | {"task": job.name, **job.found, "resolved_args": resolved_args}
    if training_args.process_index == 0:
        drop_weights(args.keep, runs, summary)
        durable.write_json(folder / run.SUMMARY_NAME, run.finite(summary))
        report.plot_runs(records, job.metric, folder / run.CURVE_NAME)
    return summary


def runs_of(rates: list[float], batches: list[int], seeds: list[int], output_dir: str) -> list[Run]:
    """Every rate with every batch and seed, each in a folder of its own below `output_dir`."""
    return [
        Run(rate, batch, seed, Path(output_dir, f"lr{rate:g}-batch{batch}-seed{seed}"))
        for rate in rates
        for batch in batches
        for seed in seeds
    ]


def finished(one: Run, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a run that is done, so that it is not done again; None for one that is to be started or goes on.

    Raises `InputError` where the folder holds a run of other settings.
    """
    path = one.output_dir / run.RECORD_NAME
    if not path.is_file():
        return None
    try:
        record = durable.read_json(path)
    except ValueError as error:
        raise InputError(f"{path} is no JSON ({error}): move {one.output_dir} away to have it run again") from None
    if changed := durable.differences(record["fingerprint"], fingerprint):
        raise InputError(
            f"{one.output_dir} holds a run of other settings: {'; '.join(changed.values())}. Name another output_dir, "
            "or move this one away"
        )
    return record


def has_weights(one: Run) -> bool:
    """Whether the weights of a run's best epoch are on disk."""
    return (one.output_dir / run.BEST_NAME / "model.safetensors").is_file()


def drop_weights(keep: str, runs: list[Run], summary: dict[str, Any]) -> None:
    """Leave on disk the weights of the best run of a `summarise`d protocol ("best"), of "all" or of "none"; records and
    scores of all stay."""
    best = summary["settings"][summary["picked"]]["best_run"]
    for one in runs:
        if keep == "all" or (keep == "best" and str(one.output_dir) == best):
            continue
        for path in (one.output_dir / run.BEST_NAME).glob("*"):
            if path.name != finetuning.SCORES:
                path.unlink()


def summarise(runs: list[Run], records: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Median and spread over seeds of each setting, by `metric`; the setting with the best median, and its best run."""
    settings: dict[tuple[float, int], list[tuple[float, Run, dict]]] = {}
    for one, record in zip(runs, records, strict=True):
        settings.setdefault(one.setting, []).append((_at_least(record["metrics"][metric]), one, record))
    rows = []
    for (rate, batch), scored in settings.items():
        values = [value for value, _, _ in scored]
        metrics = [record["metrics"] for _, _, record in scored]
        best = max(scored, key=lambda entry: entry[0])
        rows.append(
            {
                "learning_rate": rate,
                "global_batch_size": batch,
                "median": statistics.median(values),
                "mean": statistics.fmean(values),
                "lowest": min(values),
                "highest": max(values),
                "seeds": {one.seed: value for value, one, _ in scored},
                "degenerate_seeds": [one.seed for _, one, record in scored if record["degenerate"]],
                "best_run": str(best[1].output_dir),
                "medians": {name: statistics.median(_at_least(m[name]) for m in metrics) for name in metrics[0]},
            }
        )
    return {"metric": metric, "settings": rows, "picked": max(range(len(rows)), key=lambda n: rows[n]["median"])}


def _at_least(value: float | None) -> float:
    """A score to compare: that of a correlation with a constant, which is no number, is below all."""
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


def table(summary: dict[str, Any], paper: str, others: tuple[str, ...] = ()) -> str:
    """Each setting with its median, spread and seeds, the best one marked, and medians of the metrics `others`; the
    line `paper` below."""
    metric, settings = summary["metric"], summary["settings"]
    lines = [f"\n{summary['task']}, validation {metric} x 100"]
    lines += [f"{'rate':>10}{'batch':>7}{'median':>8}{'lowest':>8}{'highest':>9}  seeds"]
    for number, row in enumerate(settings):
        seeds = ", ".join(f"{seed}: {percent(value)}" for seed, value in row["seeds"].items())
        picked = number == summary["picked"] and len(settings) > 1
        lines.append(
            f"{row['learning_rate']:>10g}{row['global_batch_size']:>7}{percent(row['median']):>8}"
            f"{percent(row['lowest']):>8}{percent(row['highest']):>9}  {seeds}"
            f"{'  <- best median, picked on validation' * picked}"
        )
        if others:
            medians = ", ".join(f"{name} {percent(row['medians'][name])}" for name in others)
            lines.append(f"{'':>10}medians: {medians}")
        if row["degenerate_seeds"]:
            listed = ", ".join(map(str, row["degenerate_seeds"]))
            lines.append(f"{'':>10}degenerate (one answer to everything): seed {listed}")
    return "\n".join([*lines, paper])
