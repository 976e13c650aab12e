"""Pretrain RoBERTa from raw text.

    accelerate launch train_mlm.py                       # the demonstration: minutes on two CPU cores
    accelerate launch train_mlm.py --config presets/mlm/roberta_base.yaml                  # the paper's recipe
    accelerate launch train_mlm.py --config presets/mlm/roberta_small.yaml \\
        --train_file 'my_text/*.txt' --tokenizer_name FacebookAI/roberta-base                # your own text

Documents -> blocks -> masks -> model -> Trainer -> checkpoint, run record, loss curve in `output_dir`. Every value is
in the preset, with its source; any flag overrides it. The same presets are read by `tools/estimate.py`
(cost), `pack.py` (token cache) and `evaluate.py` (the loss of a checkpoint); `explain.py` prints what the model saw at
a step.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from roberta_recipe import record as records
from roberta_recipe.data import corpus as corpora
from roberta_recipe.data import masking, order, stream, tokenization
from roberta_recipe.data.documents import check_sources, sample_documents
from roberta_recipe.data.packing import Block
from roberta_recipe.data.stream import TrainBlocks
from roberta_recipe.errors import InputError, RunError, exit_on_error
from roberta_recipe.input_files import resolve_path
from roberta_recipe.launcher import resume_hint
from roberta_recipe.log import counted, duration, logger, set_up_logging
from roberta_recipe.model import weights
from roberta_recipe.model.masked_lm import PredictedPositions, flops_per_token
from roberta_recipe.publishing import hub, plots
from roberta_recipe.settings import config_of, shown_names
from roberta_recipe.training import checkpoint, launch_checks, output_folder, pretraining, processes
from roberta_recipe.training.mlm_trainer import MlmTrainer
from roberta_recipe.training.pretraining import DEMONSTRATION, MlmArguments, MlmTrainingArguments, Reader
from roberta_recipe.training.stopping import Stopping

FULL_RECIPE = "accelerate launch train_mlm.py --config presets/mlm/roberta_base.yaml"


def main(argv: list[str] | None = None) -> records.PretrainingRecord:
    """Run the command line `argv`; returns the run record. Raises `InputError`, `RunError`."""
    argv, started_s = (sys.argv[1:] if argv is None else argv), time.monotonic()
    set_up_logging()
    processes.set_up_process()

    # 1. Arguments: dataclass < preset < command line, checked.
    (args, training_args), resolved = read_arguments(argv)
    check_arguments(args, training_args)
    resolved["attn_implementation"] = training_args.attn_implementation
    publisher = hub.publisher(training_args)

    # 2. Corpus, tokenizer, model; mismatches are reported before training.
    with training_args.main_process_first():  # collects docstrings and hashes files; the other ranks use its caches
        corpus = corpora.resolve(pretraining.read_corpus(args))
        announce_demonstration(argv, args, corpus)
        check_sources(corpus)
        corpus = corpora.hash_files(corpus, cache_folder=args.token_cache or training_args.output_dir)
    tokenizer = tokenization.load_tokenizer(args.tokenizer_name)
    check_examples(args, tokenizer)
    model = pretraining.build_model(args, training_args, tokenizer)

    # 3. Checkpoint to resume from; training blocks from its position on; held-out blocks with fixed masks.
    reader, validation_reader = pretraining.build_readers(args, training_args, corpus, tokenizer)
    fingerprint, data_keys = pretraining.run_fingerprint(args, training_args, model, tokenizer, reader)
    resumed_from, resumed = checkpoint.resume(training_args, fingerprint, args.resume_despite_changes, data_keys)
    collator = pretraining.build_collator(args, training_args, tokenizer)
    validation = pretraining.validation_blocks(args, training_args, validation_reader)
    entropy = masking.unigram_entropy(validation, tokenizer)
    blocks = build_blocks(args, training_args, reader, resumed)

    # 4. Train.
    trainer = MlmTrainer(
        model=model,
        args=training_args,
        train_dataset=blocks,
        eval_dataset=pretraining.mask_validation(args, validation, tokenizer),
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[hub.PublishCheckpoints(publisher, training_args.save_total_limit)] if publisher else [],
        fingerprint=fingerprint,
        resumed=resumed,
        stopping=Stopping(args.max_train_minutes, args.rewind_on_spike, args.cooldown_share),
        skipped=blocks.skipped,
        extra_metrics=blimp_while_training(args, model, tokenizer),
        flops_per_token=flops_per_token(model.config, args.max_seq_length, args.mlm_probability, model.objectives),
    )
    announce_run(argv, args, training_args, corpus, model, validation, entropy)
    announce_position(resumed_from, blocks.skipped)
    records.write_preset(resolved, training_args.output_dir)
    trainer.train(resume_from_checkpoint=resumed_from)
    trainer.stopping.end_if_stopped("; a push to the Hub ends first" if publisher and publisher.is_pushing() else "")

    # 5. Save a plain Hugging Face checkpoint, evaluate it.
    trainer.save_model()
    metrics, by_source = trainer.last_metrics(), trainer.evaluate_sources(corpus, validation)

    # 6. Run record, loss curve, results on the screen.
    counts, passes = stream.consumed(reader, min(trainer.position, args.max_train_samples or trainer.position))
    record: records.PretrainingRecord = records.run_record(
        trainer,
        metrics,
        metrics_by_source=by_source,
        unigram_entropy=entropy,
        passes=passes,
        counts={"train": counts, "validation": stream.count_table(validation_reader, "validation")},
        resolved_args=resolved,
        shown_args=shown_names(args, training_args),
        wall_clock_s=round(time.monotonic() - started_s, 1),
    )
    if trainer.is_world_process_zero():
        write_results(record, args, training_args.output_dir)
    processes.leave_process_group()
    if not math.isfinite(metrics["eval_loss"]):
        raise RunError(f"the validation loss is {metrics['eval_loss']}: lower learning_rate or warm up longer")
    if publisher:
        publisher.push(Path(training_args.output_dir), f"Trained for {counted(record['steps'], 'step')}")
    return record


def read_arguments(argv: list[str]) -> tuple[tuple[MlmArguments, MlmTrainingArguments], dict[str, Any]]:
    """The filled dataclasses, and the resolved values as a preset."""
    filled, resolved = pretraining.read_arguments(argv, __doc__)
    return tuple(filled), resolved


def check_arguments(args: MlmArguments, training_args: MlmTrainingArguments) -> None:
    """Raise `InputError` for invalid values and combinations; resolve batch and attention; lock the output folder."""
    pretraining.check_data(args)
    pretraining.check_model(args)
    pretraining.check_training(training_args)
    pretraining.check_cooldown(args, training_args)
    pretraining.resolve(args, training_args)
    launch_checks.check_deepspeed(training_args)
    output_folder.prepare(training_args, extend=args.resume_despite_changes)


def announce_demonstration(argv: list[str], args: MlmArguments, corpus: corpora.Corpus) -> None:
    """If the command line names neither preset nor text, log that this is the demonstration, and train its tokenizer
    if it does not exist."""
    if config_of(argv) or not all(source.builtin for source in corpus.sources):
        return
    logger.info(f"This is the demonstration ({DEMONSTRATION}): a small model on {corpus.name}.")
    logger.info(f"The full recipe: {FULL_RECIPE}\n")
    if args.config_name and not resolve_path(args.tokenizer_name).exists():
        from roberta_recipe.data.tokenizer_training import save_tokenizer, train_tokenizer

        config = weights.fresh_config(args.config_name, args.config_overrides)
        logger.info(f"Training a tokenizer of {config.vocab_size:,} entries on the corpus: {args.tokenizer_name}")
        texts = (text for _, text in sample_documents(corpus, "train", max_bytes=1_000_000_000, seed=0))
        tokenizer = train_tokenizer(texts, config.vocab_size)
        with weights.model_max_length_for(tokenizer, config):
            save_tokenizer(tokenizer, args.tokenizer_name)


def check_examples(args: MlmArguments, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `InputError` for `fill_mask_examples` without exactly one mask token, or too long."""
    for sentence in args.fill_mask_examples or []:
        ids = tokenizer(sentence).input_ids
        if ids.count(tokenizer.mask_token_id) != 1 or len(ids) > args.max_seq_length:
            raise InputError(f"fill_mask_examples: {sentence!r} is too long, or has not {tokenizer.mask_token} once")


def build_blocks(
    args: MlmArguments, training_args: MlmTrainingArguments, reader: Reader, resumed: dict[str, Any] | None
) -> TrainBlocks:
    """This process's training blocks, beginning at the checkpoint's position."""
    return TrainBlocks(
        reader,
        batch_size=args.global_batch_size // training_args.world_size,
        processes=training_args.world_size,
        process=training_args.process_index,
        start=resumed["position"] if resumed else 0,
        skipped=pretraining.skipped_blocks(args, training_args, resumed),
        limit=args.max_train_samples,
        threads_in_worker=bool(training_args.dataloader_num_workers) and not args.token_cache,
    )


def blimp_while_training(
    args: MlmArguments, model: PredictedPositions, tokenizer: PreTrainedTokenizerBase
) -> Callable[[MlmTrainer], dict[str, float]] | None:
    """BLiMP at each evaluation; None without `blimp_dir`."""
    if not args.blimp_dir:
        return None
    from roberta_recipe.tasks import blimp

    return blimp.while_training(args.blimp_dir, model, tokenizer)


def announce_run(
    argv: list[str],
    args: MlmArguments,
    training_args: MlmTrainingArguments,
    corpus: corpora.Corpus,
    model: PredictedPositions,
    validation: list[Block],
    entropy: float,
) -> None:
    """Log the recipe, the model and the data."""
    steps, length = training_args.max_steps, args.max_seq_length
    seeds = f"seed {training_args.seed}, data seed {pretraining.data_seed(training_args)}"
    shares = ", ".join(f"{s.name} {share:.1%}" for s, share in zip(corpus.sources, corpus.shares, strict=True))
    by_token = "" if args.masking_unit == "token" else f"; masked by token, not by {args.masking_unit} as in training"
    logger.info(
        f"Recipe      {config_of(argv) or DEMONSTRATION}: learning rate {training_args.learning_rate:g}, warm-up "
        f"{training_args.get_warmup_steps(steps):,} steps, {args.mlm_probability:.0%} masked, {seeds}\n"
        f"Batch       {counted(args.global_batch_size, 'sequence')} = {counted(training_args.world_size, 'process')} x "
        f"{training_args.per_device_train_batch_size} x {training_args.gradient_accumulation_steps} accumulated\n"
        f"Steps       {steps:,} of {length} tokens a sequence, at most "
        f"{steps * args.global_batch_size * length / 1e6:,.1f} M tokens\n"
        f"Model       {model.num_parameters():,} parameters, vocabulary {model.config.vocab_size:,}\n"
        f"Corpus      {corpus.name}: {shares}\n"
        f"Validation  {counted(len(validation), 'block')}, {sum(len(block['input_ids']) for block in validation):,} "
        f"tokens, unigram entropy {entropy:.3f} nats (a loss that stays there has learnt frequencies only){by_token}\n"
        f"Output      {training_args.output_dir}"
    )


def announce_position(resumed_from: str | None, skipped: order.Skipped) -> None:
    """Log the checkpoint that training resumes from, and the skipped blocks."""
    if skipped:
        logger.info(f"Left out    blocks {order.in_words(skipped)}")
    if resumed_from:
        logger.info(f"Resuming    from {resumed_from}")


def write_results(record: records.PretrainingRecord, args: MlmArguments, output_dir: str) -> None:
    """Write the loss curve and the run record; print predictions, losses and file names."""
    curve = os.path.join(output_dir, records.CURVE_NAME)
    plots.plot_loss(record, curve)
    records.write_record(record, output_dir)  # the last file: with it the run is finished
    if args.fill_mask_examples:
        show_predictions(args.fill_mask_examples, output_dir)
    pretraining.print_validation(record["metrics"], record["unigram_entropy"], record["metrics_by_source"])
    starts = f" in {record['resumes'] + 1} starts" if record["resumes"] else ""
    print(
        f"{record['tokens_seen'] / 1e6:,.2f} M tokens in {counted(record['steps'], 'step')}, "
        f"{duration(record['train_seconds'])} of training{starts}, median {record['tokens_per_second']:,} tokens/s; "
        f"{duration(record['wall_clock_s'])} for this start\n"
        f"checkpoint  {output_dir}\n"
        f"run record  {os.path.join(output_dir, records.RECORD_NAME)}\n"
        f"loss curve  {curve}"
    )
    if record["stopped_by"] == records.TIME_LIMIT:
        print(f"stopped by {records.TIME_LIMIT}; the checkpoint of the last step is saved. {resume_hint()}")


def show_predictions(sentences: list[str], checkpoint: str) -> None:
    """Print the five most likely words for each `<mask>`, with Hugging Face's `pipeline`."""
    from transformers import pipeline  # a slow import

    fill_mask = pipeline("fill-mask", model=checkpoint, tokenizer=checkpoint, device="cpu")
    print()
    for sentence in sentences:
        words = ", ".join(f"{p['token_str'].strip()!r} {p['score']:.0%}" for p in fill_mask(sentence, top_k=5))
        print(f"{sentence}\n    {words}")


if __name__ == "__main__":
    exit_on_error(main)
