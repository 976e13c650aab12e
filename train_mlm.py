# /// script
# requires-python = ">=3.11"
# dependencies = ["roberta-recipe"]
# tool.uv.sources.roberta-recipe = { path = ".", editable = true }
# ///
"""Pretrain RoBERTa from raw text.

    accelerate launch train_mlm.py                       # the demonstration: minutes on two CPU cores
    accelerate launch train_mlm.py --config presets/mlm/roberta_base.yaml                  # the paper's recipe
    accelerate launch train_mlm.py --train_file 'my_text/*.txt' --output_dir runs/mine     # your own text
    accelerate launch train_mlm.py --train_file 'my_text/*.txt' --output_dir runs/mine \\
        --model_name_or_path FacebookAI/roberta-base                                         # continued pretraining

Documents -> blocks -> masks -> model -> Trainer -> checkpoint, run record, loss curve in `output_dir`. Every value is
in the preset, with its source; any flag overrides it. The same presets are read by `tools/estimate.py`
(cost), `pack.py` (token cache) and `evaluate.py` (the loss of a checkpoint); `explain.py` prints the model's input at
a step.
"""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from roberta_recipe import durable
from roberta_recipe import record as records
from roberta_recipe.data import corpus as corpora
from roberta_recipe.data import masking, order, stream
from roberta_recipe.data.documents import sample_documents
from roberta_recipe.data.packing import Block
from roberta_recipe.data.stream import Reader, TrainBlocks
from roberta_recipe.errors import InputError, RunError, exit_on_error
from roberta_recipe.hardware import local_processes
from roberta_recipe.input_files import read_input_json, resolve_path
from roberta_recipe.launcher import resume_hint
from roberta_recipe.log import counted, duration, logger, set_up_logging
from roberta_recipe.model import weights
from roberta_recipe.model.masked_lm import MaskedLmMixin, flops_per_token
from roberta_recipe.publishing import hub, plots
from roberta_recipe.settings import shown_names, value_of
from roberta_recipe.training import checkpoint, launching, pretraining
from roberta_recipe.training.mlm_trainer import MlmTrainer
from roberta_recipe.training.pretraining import DEMONSTRATION, MlmArguments, MlmTrainingArguments
from roberta_recipe.training.stopping import Stopping

TEXT_NAME = "text.json"  # in the folder of a run's own tokenizer: fingerprint of its training text
# free flags that must be the same on all ranks
_ALIKE = ("max_train_minutes", "rewind_on_spike", "skip_blocks", "max_eval_samples", "blimp_dir")
FULL_RECIPE = "accelerate launch train_mlm.py --config presets/mlm/roberta_base.yaml"


def main(argv: list[str] | None = None) -> records.PretrainingRecord:
    """Run the command line `argv`; returns the run record. Raises `InputError`, `RunError`."""
    argv, started_s = (sys.argv[1:] if argv is None else argv), time.monotonic()
    set_up_logging()
    launching.set_up_process()

    # 1. Arguments: dataclass < preset < command line, checked.
    (args, training_args), resolved = read_arguments(argv)
    check_arguments(args, training_args)
    resolved["attn_implementation"] = training_args.attn_implementation
    publisher = hub.publisher(training_args)

    # 2. Corpus, tokenizer, model; mismatches are reported before training.
    with launching.first_process_first(training_args):  # other ranks reuse its corpus and hashes
        corpus = pretraining.resolve_corpus(args)
        announce_preset(argv, corpus)
        corpus = corpora.hash_files(corpus, cache_folder=args.token_cache or training_args.output_dir)
        train_missing_tokenizer(argv, args, training_args, corpus)
    tokenizer = pretraining.load_tokenizer(args)
    check_examples(args, tokenizer)
    model = pretraining.build_model(args, training_args, tokenizer, corpus=corpus)

    # 3. Checkpoint to resume from; training blocks from its position on; held-out blocks with fixed masks.
    reader, validation_reader = pretraining.build_readers(args, training_args, corpus, tokenizer)
    resolved["max_steps"] = pretraining.derive_steps(args, training_args, reader)
    fingerprint, data_keys = pretraining.run_fingerprint(args, training_args, model, tokenizer, reader)
    alike = {name: getattr(args, name) for name in _ALIKE}
    resumed_from, resumed = checkpoint.resume(training_args, fingerprint, args.resume_despite_changes, data_keys, alike)
    collator = pretraining.build_collator(args, training_args, tokenizer)
    validation, masked_validation = pretraining.validation_set(args, validation_reader, tokenizer)
    entropy = masking.unigram_entropy(validation, tokenizer)
    blocks = build_blocks(args, training_args, reader, resumed)

    # 4. Train.
    trainer = MlmTrainer(
        model=model,
        args=training_args,
        train_dataset=blocks,
        eval_dataset=masked_validation,
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
    announce_run(argv, args, training_args, reader, model, validation, entropy)
    announce_position(resumed_from, blocks.skipped)
    records.write_preset(resolved, training_args.output_dir)
    trainer.train(resume_from_checkpoint=resumed_from)
    trainer.stopping.end_if_stopped(publisher and publisher.wait)

    # 5. Save a plain Hugging Face checkpoint, evaluate it.
    trainer.save_model()
    metrics, by_source = trainer.last_metrics(), trainer.evaluate_sources(corpus, validation)

    # 6. Run record, loss curve, results on the screen.
    counts, passes = stream.consumed(reader, trainer.position, args.max_train_samples)
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
    launching.leave_process_group()
    if not math.isfinite(metrics["eval_loss"]):
        raise RunError(f"the validation loss is {metrics['eval_loss']}: lower learning_rate or use a longer warm-up")
    if publisher:
        publisher.push(Path(training_args.output_dir), f"Trained for {counted(record['steps'], 'step')}")
    return record


def read_arguments(argv: list[str]) -> tuple[tuple[MlmArguments, MlmTrainingArguments], dict[str, Any]]:
    """The filled dataclasses, and the resolved values as a preset. Without a named tokenizer or checkpoint,
    the run trains its own tokenizer."""
    (args, training_args), resolved = pretraining.read_arguments(argv, __doc__)
    if not args.tokenizer_name:
        resolved["tokenizer_name"] = run_tokenizer_folder(training_args)
        args = dataclasses.replace(args, tokenizer_name=run_tokenizer_folder(training_args))
    return (args, training_args), resolved


def run_tokenizer_folder(training_args: MlmTrainingArguments) -> str:
    """The folder of the tokenizer that a run trains."""
    return os.path.join(training_args.output_dir, records.TOKENIZER_NAME)


def check_arguments(args: MlmArguments, training_args: MlmTrainingArguments) -> None:
    """Raise `InputError` for invalid values and combinations; resolve batch and attention; lock the output folder."""
    pretraining.check_data(args)
    pretraining.check_model(args)
    pretraining.check_training(training_args)
    pretraining.check_cooldown(args, training_args)
    pretraining.derive(args, training_args)
    launching.check_deepspeed(training_args)
    checkpoint.prepare_folder(training_args, args.resume_despite_changes, args.token_cache)


def announce_preset(argv: list[str], corpus: corpora.Corpus) -> None:
    """Log the default preset of a command line without `--config`."""
    preset, _ = pretraining.preset_of(argv)
    if pretraining.is_demonstration(argv):
        logger.info(f"This is the demonstration ({DEMONSTRATION}): a small model on {corpus.name}.")
        logger.info(f"The full recipe: {FULL_RECIPE}\n")
    elif not value_of(argv, "config"):
        other = "" if preset == pretraining.CONTINUE else "; another: --model_size"
        logger.info(f"Preset      {preset} (no --config given){other}")


def train_missing_tokenizer(
    argv: list[str], args: MlmArguments, training_args: MlmTrainingArguments, corpus: corpora.Corpus
) -> None:
    """Train the tokenizer of the demonstration, or of a run without `--tokenizer_name`, unless it exists. Raises
    `InputError` if it exists, from other text, and there is no checkpoint yet."""
    folder, own = Path(args.tokenizer_name), args.tokenizer_name == run_tokenizer_folder(training_args)
    if not own:  # a run's own tokenizer is not looked up in the repository, which may hold another run of that name
        folder = resolve_path(folder)
    text, stored = corpora.corpus_fingerprint(corpus), folder / TEXT_NAME
    # once there is a checkpoint, `checkpoint.load_state` decides on changed text
    is_unused = own and stored.is_file() and not checkpoint.all_folders(training_args.output_dir)
    if is_unused and (changed := durable.differences(read_input_json(stored), text)):
        changes = "; ".join(changed.values())
        raise InputError(f"{folder} was trained on other text ({changes}): move it away, or name another output_dir")
    if folder.exists() or not (own or pretraining.is_demonstration(argv)):
        return
    durable.make_folder(folder.parent, "tokenizer_name")
    durable.check_output_file(folder, "tokenizer_name", "name an existing tokenizer, or start in a folder of your own")
    from roberta_recipe.data import tokenizer_training

    config = weights.fresh_config(args.config_name, args.config_overrides)
    sample = partial(sample_documents, corpus, "train", max_bytes=tokenizer_training.SAMPLE_BYTES, seed=0)
    size = sum(len(text.encode()) for _, text in sample())
    is_size_given = "vocab_size" in weights.overridden(args.config_overrides)
    entries = config.vocab_size if is_size_given else tokenizer_training.size_for(size)
    logger.info(
        f"Tokenizer   at most {entries:,} entries, trained on {size / 1e6:,.1f} MB of the text: "
        f"{args.tokenizer_name} (another size: --config_overrides vocab_size=N; another one: --tokenizer_name NAME)"
    )
    tokenizer = tokenizer_training.train_tokenizer((text for _, text in sample()), entries, at_most=not is_size_given)
    try:
        tokenizer_training.save_tokenizer(weights.for_saving(tokenizer, config), args.tokenizer_name)
        durable.write_json(stored, text)
    except InputError:
        if training_args.world_size == local_processes():  # else another machine saved it in a shared folder
            raise


def check_examples(args: MlmArguments, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `InputError` for `fill_mask_examples` without exactly one mask token, or too long."""
    for sentence in args.fill_mask_examples or []:
        ids = tokenizer(sentence).input_ids
        if ids.count(tokenizer.mask_token_id) != 1 or len(ids) > args.max_seq_length:
            raise InputError(
                f"fill_mask_examples: {sentence!r} must have one {tokenizer.mask_token} and fit max_seq_length"
            )


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
        # rank 0's: on a shared file system, other ranks may read a stale list
        skipped=launching.on_first_process(
            training_args, lambda: pretraining.skipped_blocks(args, training_args, resumed, reader)
        ),
        limit=args.max_train_samples,
        threads_in_worker=bool(training_args.dataloader_num_workers) and not args.token_cache,
    )


def blimp_while_training(
    args: MlmArguments, model: MaskedLmMixin, tokenizer: PreTrainedTokenizerBase
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
    reader: Reader,
    model: MaskedLmMixin,
    validation: list[Block],
    entropy: float,
) -> None:
    """Log the recipe, the model and the data."""
    steps, length = training_args.max_steps, args.max_seq_length
    most = steps * args.global_batch_size * length
    tokens = f"{most / 1e6:,.1f} M tokens" if most >= 1e6 else f"{most:,} tokens"
    size = corpora.text_bytes(reader.corpus)
    of_text = passes(args, steps, reader, size, validation)
    pretraining.warn_of_small_files(reader.corpus, size, length)
    seeds = f"seed {training_args.seed}, data seed {pretraining.data_seed(training_args)}"
    by_token = "" if args.masking_unit == "token" else f"; masked by token (training: by {args.masking_unit})"
    logger.info(
        f"Recipe      {pretraining.preset_of(argv)[0]}: learning rate {training_args.learning_rate:g}, warm-up "
        f"{training_args.get_warmup_steps(steps):,} steps, {args.mlm_probability:.0%} masked, {seeds}\n"
        f"Batch       {counted(args.global_batch_size, 'sequence')} = {counted(training_args.world_size, 'process')} x "
        f"{training_args.per_device_train_batch_size} x {training_args.gradient_accumulation_steps} accumulated\n"
        f"Steps       {steps:,} with sequences of {length} tokens, at most {tokens}{of_text}\n"
        f"Model       {model.num_parameters():,} parameters, vocabulary {model.config.vocab_size:,}\n"
        f"Corpus      {corpora.in_words(reader.corpus)}\n"
        f"Validation  {counted(len(validation), 'block')}, {sum(len(block['input_ids']) for block in validation):,} "
        f"tokens, unigram entropy {entropy:.3f} nats (a model that stays there has learnt frequencies only){by_token}\n"
        f"Output      {training_args.output_dir}"
    )


def passes(args: MlmArguments, steps: int, reader: Reader, size: int | None, validation: list[Block]) -> str:
    """Log text for the passes over the corpus in `steps` steps: exact if its blocks are counted, else estimated from
    the `size` of its files in bytes and the text in `validation` blocks; empty if the size is unknown."""
    blocks = stream.blocks_of_pass(reader)
    about = "" if blocks else "about "
    if not blocks and size:
        texts = (reader.tokenizer.decode(block["input_ids"], skip_special_tokens=True) for block in validation)
        blocks = size * len(validation) / sum(len(text.encode()) for text in texts)
    if not blocks:
        return ""
    times = steps * args.global_batch_size / min(blocks, args.max_train_samples or blocks)
    return f", {about}{times:{',.1f' if times >= 1 else '.2g'}} passes over the text"


def announce_position(resumed_from: str | None, skipped: order.Skipped) -> None:
    """Log the checkpoint that training resumes from, and the skipped blocks."""
    if skipped:
        logger.info(f"Skipping    blocks {order.in_words(skipped)}")
    if resumed_from:
        logger.info(f"Resuming    from {resumed_from}")


def write_results(record: records.PretrainingRecord, args: MlmArguments, output_dir: str) -> None:
    """Write the loss curve and the run record; print predictions, losses and file names."""
    curve = os.path.join(output_dir, records.CURVE_NAME)
    plots.plot_loss(record, curve)
    records.write_record(record, Path(output_dir) / records.RECORD_NAME)  # the last file: with it the run is finished
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

    unset_hf_deepspeed_config()  # ZeRO 3 would shard the model, and wait for the other ranks
    fill_mask = pipeline("fill-mask", model=checkpoint, tokenizer=checkpoint, device="cpu")
    print()
    for sentence in sentences:
        words = ", ".join(f"{p['token_str'].strip()!r} {p['score']:.0%}" for p in fill_mask(sentence, top_k=5))
        print(f"{sentence}\n    {words}")


if __name__ == "__main__":
    exit_on_error(main)
