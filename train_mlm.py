"""Pretrain RoBERTa from raw text.

    accelerate launch train_mlm.py                       # the demonstration: minutes on two CPU cores
    accelerate launch train_mlm.py --config presets/mlm/roberta_base.yaml                  # the paper's recipe
    accelerate launch train_mlm.py --config presets/mlm/roberta_small.yaml \\
        --train_file 'my_text/*.txt' --tokenizer_name FacebookAI/roberta-base                # your own text

Documents -> blocks -> masks -> model -> Trainer -> checkpoint, run record, loss curve in `output_dir`. Every value is
in the preset, with its source; any flag overrides it.
"""

import dataclasses
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm.auto import tqdm
from transformers import pipeline, set_seed

from roberta_recipe import (
    checkpoint,
    durable,
    estimate,
    hub,
    masking,
    modeling,
    report,
    run,
    token_cache,
    tokenization,
)
from roberta_recipe import corpus as corpora
from roberta_recipe.args import InputError, Preempted, RunError, exit_on_error, is_set, parse, resolve_path, setting
from roberta_recipe.stream import TextReader, TrainBlocks
from roberta_recipe.trainer import MlmTrainingArguments, RecipeTrainer, StepWatch

DEMONSTRATION = "presets/mlm/roberta_tiny.yaml"
FULL_RECIPE = "accelerate launch train_mlm.py --config presets/mlm/roberta_base.yaml"


@dataclass
class MlmArguments:
    """What `TrainingArguments` has no name for."""

    _argument_group_name = "recipe"

    corpus: str | None = setting(None, "Corpus preset (presets/corpus/*.yaml).")
    train_file: list[str] | None = setting(
        None, "Text, JSONL or Parquet to train on, in place of `corpus`: files, folders or globs."
    )
    validation_file: list[str] | None = setting(
        None, "Held-out text for `train_file`; without it, 1%% of its documents."
    )
    text_column: str = setting("text", "Column of `train_file` and `validation_file` that holds the text.")
    tokenizer_name: str | None = setting(None, "Tokenizer folder or Hub id.")
    config_name: str | None = setting(None, "Model config for fresh weights: a JSON file, a folder or a Hub id.")
    model_name_or_path: str | None = setting(
        None, "Checkpoint whose weights to continue from, in place of `config_name`."
    )
    input_format: Literal["full_sentences", "contiguous"] = setting(
        "full_sentences", "Whole sentences across documents (paper, section 4.2), or chunks of fixed size."
    )
    max_seq_length: int = setting(512, "Tokens in a block, <s> and </s> included.")
    mlm_probability: float = setting(0.15, "Share of positions that are predicted.")
    mask_count: Literal["bernoulli", "exact"] = setting(
        "bernoulli", "Each position by itself (Hugging Face), or an exact number per block (fairseq)."
    )
    global_batch_size: int | None = setting(None, "Sequences an optimizer step; accumulation is derived from it.")
    pad_vocab_to_multiple_of: int | None = setting(
        None, "Pad the embedding (never the tokenizer) to a multiple of this."
    )
    shuffle_window: int = setting(
        4096,
        "Blocks of a source that are shuffled together; 0 keeps its order. With a token cache, more costs nothing.",
    )
    token_cache: str | None = setting(
        None, "Folder for the packed corpus: made where it is not complete, then read in place of the text."
    )
    pack_only: bool = setting(False, "Make (or check and mend) the token cache, and end.")
    pack_part: str = setting("1/1", "With pack_only, this machine's part of the files: 2/4 is the second of four.")
    num_proc: int | None = setting(None, "Processes that pack, on each machine; without it, one for each core.")
    on_bad_shard: Literal["stop", "skip"] = setting(
        "stop", "What to do at a file that cannot be read to its end; what is skipped is in the run record."
    )
    max_train_samples: int | None = setting(None, "Train on the first so many blocks only, again and again.")
    max_eval_samples: int | None = setting(None, "Validate on the first so many held-out blocks only.")
    max_train_minutes: float | None = setting(None, "Stop training, then evaluate and save, after so many minutes.")
    auto_micro_batch: bool = setting(
        False, "Halve per_device_train_batch_size until a step fits into memory; accumulation makes up for it."
    )
    resume_despite_changes: bool = setting(
        False, "Go on from a checkpoint although data, batch, rate or the like are others now."
    )
    eval_only: bool = setting(
        False, "Only measure the loss of model_name_or_path on the held-out text, and of each source of it."
    )
    dry_run: bool = setting(False, "Print parameters, data, memory, days and cost, and end.")
    hardware: str = setting("8xH200", "For dry_run: GPUs, such as 1024xV100-32GB.")
    utilisation: float = setting(estimate.DEFAULT_UTILISATION, "For dry_run: share of the GPUs' peak that is reached.")
    gpu_hour_price: float | None = setting(None, "For dry_run: dollars; without it, a list price of the GPU.")
    fill_mask_examples: list[str] | None = setting(None, "Sentences with <mask> to complete at the end.")


def main(argv: list[str] | None = None) -> dict | None:
    """Run the command line `argv`; returns the run record. Raises `InputError`, and `RunError` for a run that broke."""
    argv = sys.argv[1:] if argv is None else argv
    started_s = time.monotonic()
    run.set_up_logging()
    run.use_all_cores()

    # 1. Arguments: dataclass < preset < command line, and what they must not say.
    (args, training_args), resolved = read_arguments(argv)
    check_arguments(args, training_args)
    if args.dry_run:
        return print(estimate.report(dry_run(args, training_args)))
    args.global_batch_size = run.derive_batch(training_args, args.global_batch_size)
    set_seed(training_args.seed)
    data_seed = training_args.seed if training_args.data_seed is None else training_args.data_seed
    publisher = None if args.pack_only or args.eval_only else hub.publisher(training_args)

    # 2. Corpus, tokenizer, model; whatever does not fit together is said before anything is trained.
    corpus = read_corpus(args)
    with training_args.main_process_first():  # one process makes what is cached
        if is_demonstration(argv, corpus):
            announce_demonstration(args, corpus)
        corpora.check_sources(corpus)
    tokenizer = tokenization.load_tokenizer(args.tokenizer_name)
    check_examples(args, tokenizer)
    if args.pack_only:
        return pack(args, corpus, tokenizer)
    run.build_models_whole()
    model = modeling.build_model(
        tokenizer,
        config_name=args.config_name,
        model_name_or_path=args.model_name_or_path,
        max_seq_length=args.max_seq_length,
        pad_vocab_to_multiple_of=args.pad_vocab_to_multiple_of,
    )
    if args.auto_micro_batch:
        run.fit_micro_batch(training_args, model, args.global_batch_size, args.max_seq_length, args.mlm_probability)

    # 3. Blocks: those to train on from where the last checkpoint left them, the held-out ones with fixed masks.
    reader, validation_reader = build_readers(args, training_args, corpus, tokenizer, data_seed)
    fingerprint = run_fingerprint(args, training_args, model, reader, data_seed)
    resumed_from = None if args.eval_only else checkpoint.find(training_args)
    resumed = resumed_from and checkpoint.load_state(
        resumed_from, fingerprint, checkpoint.layout(training_args), args.resume_despite_changes
    )
    blocks = build_blocks(args, training_args, reader, resumed)
    collator = masking.MlmCollator(
        tokenizer,
        mlm_probability=args.mlm_probability,
        pad_to_multiple_of=8,
        seed=data_seed,
        mask_count=args.mask_count,
    )
    validation = validation_blocks(args, training_args, validation_reader)
    entropy = masking.unigram_entropy(validation, collator)

    # 4. Train.
    watch = StepWatch(args.max_train_minutes)
    trainer = build_trainer(
        args, training_args, model, tokenizer, blocks, validation, collator, fingerprint, resumed, watch, publisher
    )
    announce_run(args, training_args, corpus, model, validation, entropy, resumed_from)
    if args.eval_only:
        metrics, by_source = trainer.evaluate(), trainer.evaluate_sources(corpus, validation)
        if trainer.is_world_process_zero():
            report.print_validation(metrics, entropy, by_source)
        return run.leave_process_group()
    if trainer.is_world_process_zero():
        run.write_preset(resolved, training_args.output_dir)
    trainer.train(resume_from_checkpoint=resumed_from)
    if watch.preempted:
        run.leave_process_group()
        cut_off = "; a push to the Hub was cut off, and the next one makes up for it"
        raise Preempted(
            f"preempted: step {trainer.state.global_step} of {training_args.max_steps} is saved in "
            f"{training_args.output_dir}; the same command goes on from there"
            + (cut_off if publisher and publisher.is_pushing() else "")
        )

    # 5. Save a plain Hugging Face checkpoint, evaluate it.
    trainer.save_model()
    metrics, by_source = trainer.evaluate(), trainer.evaluate_sources(corpus, validation)

    # 6. Run record and loss curve.
    record = run.run_record(
        trainer,
        metrics,
        metrics_by_source=by_source,
        unigram_entropy=entropy,
        global_batch_size=args.global_batch_size,
        stopped_by="max_train_minutes" if watch.time_over else "max_steps",
        passes=reader.passes(trainer.places),
        counts={"train": reader.count_table(), "validation": validation_reader.count_table("validation")},
        resolved_args=resolved,
        wall_clock_s=round(time.monotonic() - started_s, 1),
    )
    if trainer.is_world_process_zero():
        run.write_record(record, training_args.output_dir)
        report.plot_loss(record, os.path.join(training_args.output_dir, run.CURVE_NAME))

        # 7. What came out.
        show_predictions(args.fill_mask_examples, training_args.output_dir)
        report.print_result(record, training_args.output_dir)
    run.leave_process_group()
    if not math.isfinite(metrics["eval_loss"]):
        raise RunError(
            f"the validation loss is {metrics['eval_loss']}: lower learning_rate, warm up longer, or use bf16"
        )
    if publisher:
        publisher.push(Path(training_args.output_dir), f"Trained for {record['steps']} steps")
    return record


def read_arguments(argv: list[str]) -> tuple[tuple[MlmArguments, MlmTrainingArguments], dict]:
    """The filled dataclasses, and the resolved values as a preset."""
    if is_set(argv, "dry_run") or is_set(argv, "pack_only"):  # for another machine: no GPU here, and bf16 is refused
        argv = [*argv, "--use_cpu", "true"]
    filled, resolved = parse(
        [MlmArguments, MlmTrainingArguments],
        argv,
        default_config=DEMONSTRATION,
        description=__doc__,
        alternatives=(("corpus", "train_file"), ("corpus", "validation_file"), ("config_name", "model_name_or_path")),
    )
    return tuple(filled), resolved


def check_arguments(args: MlmArguments, training_args: MlmTrainingArguments) -> None:
    """Raise `InputError` for values out of range and for choices that exclude each other."""
    if not 0 < args.mlm_probability < 1:
        raise InputError(f"mlm_probability={args.mlm_probability} must be between 0 and 1; the paper has 0.15")
    for name in ("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm"):
        if not 0 <= getattr(training_args, name) < float("inf"):
            raise InputError(f"{name}={getattr(training_args, name)} must be a number from 0 on")
    for name in ("seed", "data_seed"):
        if getattr(training_args, name) is not None and not 0 <= getattr(training_args, name) < 2**32:
            raise InputError(f"{name}={getattr(training_args, name)} must be from 0 to 2^32 - 1")
    if training_args.per_device_eval_batch_size < 1:
        raise InputError(f"per_device_eval_batch_size={training_args.per_device_eval_batch_size} must be at least 1")
    if args.shuffle_window < 0:
        raise InputError(f"shuffle_window={args.shuffle_window} must be at least 0; 0 keeps the order of the corpus")
    if args.max_seq_length < 8:
        raise InputError(f"max_seq_length={args.max_seq_length} leaves no room for a sentence; the paper has 512")
    for name in ("max_train_samples", "max_eval_samples", "max_train_minutes", "pad_vocab_to_multiple_of"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise InputError(f"{name}={getattr(args, name)} must be above 0; leave it out for no limit")
    if not args.tokenizer_name:
        raise InputError("tokenizer_name is not set: name a folder made by tokenizer/train_tokenizer.py, or a Hub id")
    if args.validation_file and not args.train_file:
        raise InputError("validation_file goes with train_file; a corpus preset names its own (validation_files)")
    if not args.corpus and not args.train_file:
        raise InputError("nothing to train on: set corpus (a preset in presets/corpus) or train_file")
    if not args.config_name and not args.model_name_or_path:
        raise InputError(
            "no model: set config_name for fresh weights, or model_name_or_path to continue from a checkpoint"
        )
    if not training_args.output_dir:
        raise InputError("output_dir is not set: name a folder for checkpoint, run record and plot")
    if args.eval_only and not args.model_name_or_path:
        raise InputError("eval_only measures a checkpoint: name it with model_name_or_path")
    if args.pack_only and not args.token_cache:
        raise InputError("pack_only packs into a token cache: name its folder with token_cache")
    if args.num_proc is not None and args.num_proc < 1:
        raise InputError(f"num_proc={args.num_proc} must be at least 1")
    pack_part(args)
    run.check_processes(training_args)
    run.check_precision(training_args)
    if not args.dry_run:
        run.check_deepspeed(training_args)
    if not (args.pack_only or args.dry_run or args.eval_only):
        run.check_output_dir(training_args.output_dir)


def dry_run(args: MlmArguments, training_args: MlmTrainingArguments) -> estimate.DryRun:
    """What the recipe costs on `hardware`, under `deepspeed`'s ZeRO stage where one is named; reads no text."""
    config = modeling.load_config(args.config_name or args.model_name_or_path)
    rows = args.pad_vocab_to_multiple_of or 1
    config.vocab_size = -(-config.vocab_size // rows) * rows
    hardware, micro_batch = estimate.parse_hardware(args.hardware), training_args.per_device_train_batch_size
    at_once = micro_batch * hardware.count
    batch = args.global_batch_size or at_once * training_args.gradient_accumulation_steps
    packed = token_cache.tokens_per_pass(args.token_cache) if args.token_cache else None
    sizes = [source.size_gb for source in read_corpus(args).sources]
    return estimate.DryRun(
        config=config,
        hardware=hardware,
        seq_len=args.max_seq_length,
        mlm_probability=args.mlm_probability,
        micro_batch=micro_batch,
        accumulation=run.accumulation_steps(batch, micro_batch, hardware.count),
        max_steps=training_args.max_steps,
        precision="bf16" if training_args.bf16 else "fp16" if training_args.fp16 else "fp32",
        zero=estimate.Zero.from_deepspeed(run.deepspeed_settings(training_args), config.hidden_size),
        activation_checkpointing=bool(training_args.activation_checkpointing),
        utilisation=args.utilisation,
        gpu_hour_price=args.gpu_hour_price,
        tokens_per_pass=packed,
        corpus_bytes=1e9 * sum(sizes) if all(sizes) else None,
    )


def is_demonstration(argv: list[str], corpus: corpora.Corpus) -> bool:
    """Whether the command line names neither preset nor text, so that the embedded demonstration's are used."""
    builtin = all(source.builtin for source in corpus.sources)
    return builtin and not any(flag == "--config" or flag.startswith("--config=") for flag in argv)


def announce_demonstration(args: MlmArguments, corpus: corpora.Corpus) -> None:
    """Say that this is not the recipe, and train the demonstration's tokenizer where it is not there yet."""
    run.logger.info(f"This is the demonstration ({DEMONSTRATION}): a small model on {corpus.name}.")
    run.logger.info(f"The full recipe: {FULL_RECIPE}\n")
    if args.config_name and not resolve_path(args.tokenizer_name).exists():
        vocab_size = modeling.load_config(args.config_name).vocab_size
        run.logger.info(f"Training a tokenizer of {vocab_size:,} entries on the corpus: {args.tokenizer_name}")
        texts = (text for _, text in corpora.sample_documents(corpus, "train", max_bytes=1_000_000_000, seed=0))
        tokenization.train_tokenizer(texts, vocab_size).save_pretrained(args.tokenizer_name)


def check_examples(args: MlmArguments, tokenizer) -> None:
    """Raise `InputError` for a `fill_mask_examples` that could not be completed at the end."""
    for sentence in args.fill_mask_examples or []:
        ids = tokenizer(sentence).input_ids
        if ids.count(tokenizer.mask_token_id) != 1 or len(ids) > args.max_seq_length:
            raise InputError(
                f"fill_mask_examples: {sentence!r} must have {tokenizer.mask_token} once and at most "
                f"{args.max_seq_length} tokens"
            )


def read_corpus(args: MlmArguments) -> corpora.Corpus:
    """The sources: `train_file` where given, else the corpus preset."""
    if args.train_file:
        corpus = corpora.corpus_of_files(args.train_file, args.validation_file, args.text_column)
    else:
        corpus = corpora.read_corpus(args.corpus)
    return dataclasses.replace(corpus, on_bad_shard=args.on_bad_shard)


def pack_part(args: MlmArguments) -> tuple[int, int]:
    """(number from 0 on, of how many) of `pack_part`."""
    part, _, parts = args.pack_part.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise InputError(f"pack_part={args.pack_part!r} must read like 2/4, from 1/4 to 4/4")
    return int(part) - 1, int(parts)


def text_reader(args: MlmArguments, corpus: corpora.Corpus, tokenizer, seed: int) -> TextReader:
    """What makes blocks from the corpus."""
    return TextReader(
        corpus,
        tokenizer,
        input_format=args.input_format,
        max_seq_length=args.max_seq_length,
        seed=seed,
        shuffle_window=args.shuffle_window,
    )


def pack(args: MlmArguments, corpus: corpora.Corpus, tokenizer) -> None:
    """Make this machine's part of the token cache, or mend it."""
    part, parts = pack_part(args)
    reader = text_reader(args, corpus, tokenizer, seed=0)
    num_proc = args.num_proc or run.cpu_cores()
    if token_cache.build(args.token_cache, reader, num_proc=num_proc, part=part, parts=parts):
        run.logger.info(f"The token cache is complete: {args.token_cache}")
    else:
        run.logger.info(f"Part {part + 1} of {parts} is packed; the cache is complete when all are: {args.token_cache}")


def build_readers(
    args: MlmArguments, training_args: MlmTrainingArguments, corpus: corpora.Corpus, tokenizer, seed: int
) -> tuple[TextReader | token_cache.TokenCache, TextReader | token_cache.TokenCache]:
    """What training and validation blocks come from: the token cache, which is made first, or the text."""
    if not args.token_cache:
        if training_args.dataloader_num_workers:  # threads here would leave the forked data worker without any
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return tuple(text_reader(args, corpus, tokenizer, s) for s in (seed, masking.EVAL_SEED))
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    token_cache.ensure(
        args.token_cache,
        text_reader(args, corpus, tokenizer, seed),
        num_proc=args.num_proc or max(1, run.cpu_cores() // on_this_machine),
        process=training_args.process_index,
        processes=training_args.world_size,
    )
    return tuple(
        token_cache.TokenCache(args.token_cache, corpus, seed=s, shuffle_window=args.shuffle_window)
        for s in (seed, masking.EVAL_SEED)
    )


def run_fingerprint(args: MlmArguments, training_args: MlmTrainingArguments, model, reader, data_seed: int) -> dict:
    """What must not change between two starts of a run, for it to be the same run."""
    ours = ("global_batch_size", "mlm_probability", "mask_count", "shuffle_window", "max_train_samples")
    inherited = ("seed", "max_steps", "learning_rate", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2")
    inherited += ("adam_epsilon", "max_grad_norm", "bf16", "fp16")
    return {
        **reader.fingerprint(),
        **{name: getattr(args, name) for name in ours},
        **{name: getattr(training_args, name) for name in inherited},
        "lr_scheduler_type": training_args.lr_scheduler_type.value,
        "data_seed": data_seed,
        "shares": [round(share, 6) for share in reader.corpus.shares],
        "model": durable.fingerprint({**model.config.to_dict(), "transformers_version": None}),
    }


def build_blocks(args: MlmArguments, training_args: MlmTrainingArguments, reader, resumed: dict | None) -> TrainBlocks:
    """This process's training blocks, from the place on to which a checkpoint had come."""
    resumed = resumed or {}
    if resumed.get("places") and not args.token_cache and not resumed["states"] and not args.max_train_samples:
        run.logger.warning(
            "The checkpoint was trained from a token cache: without it, the text is read again from the start"
        )
    return TrainBlocks(
        reader,
        batch_size=training_args.per_device_train_batch_size,
        processes=training_args.world_size,
        process=training_args.process_index,
        start=resumed.get("places", 0),
        states=resumed.get("states"),
        limit=args.max_train_samples,
        threads_in_worker=bool(training_args.dataloader_num_workers) and not args.token_cache,
    )


def validation_blocks(
    args: MlmArguments, training_args: MlmTrainingArguments, reader: TextReader | token_cache.TokenCache
) -> list[dict]:
    """Held-out blocks, the same for every seed, in the proportions of the mixture as far as each source's text goes."""
    stream = reader.validation(args.max_eval_samples)
    bar = tqdm(
        stream, desc="Reading validation", unit=" blocks", total=args.max_eval_samples, mininterval=1, leave=False
    )
    blocks = list(bar)
    if len(blocks) < training_args.per_device_eval_batch_size:
        raise InputError(
            f"validation has {len(blocks)} blocks, less than one batch of per_device_eval_batch_size="
            f"{training_args.per_device_eval_batch_size}; hold out more text (validation_share or validation_files of "
            f"the corpus, validation_file, max_eval_samples={args.max_eval_samples}) or lower the batch size"
        )
    return blocks


def build_trainer(
    args, training_args, model, tokenizer, blocks, validation, collator, fingerprint, resumed, watch, publisher
) -> RecipeTrainer:
    """`Trainer` over the blocks, evaluating on those with fixed masks."""
    examples = masking.fixed_masks(validation, collator)
    if not any((example["labels"] != masking.IGNORED).any() for example in examples):
        raise InputError(
            f"mlm_probability={args.mlm_probability} predicts none of the positions of {len(validation)} validation "
            "blocks; raise it, or validate on more"
        )
    try:
        return RecipeTrainer(
            model=model,
            args=training_args,
            train_dataset=blocks,
            eval_dataset=examples,
            data_collator=collator,
            processing_class=tokenizer,
            fingerprint=fingerprint,
            resumed=resumed,
            watch=watch,
            publisher=publisher,
            flops_per_token=modeling.flops_per_token(model.config, args.max_seq_length, args.mlm_probability),
        )
    except (
        ValueError,
        RuntimeError,
        OSError,
    ) as error:  # a tracker that is not installed, ...
        raise InputError(f"Trainer refuses these arguments: {error}") from error


def announce_run(
    args: MlmArguments,
    training_args: MlmTrainingArguments,
    corpus: corpora.Corpus,
    model,
    validation,
    entropy,
    resumed_from: str | None,
) -> None:
    """What is about to be trained, in a few lines."""
    tokens = training_args.max_steps * args.global_batch_size * args.max_seq_length
    shares = ", ".join(f"{s.name} {share:.1%}" for s, share in zip(corpus.sources, corpus.shares, strict=True))
    held_out = sum(len(block["input_ids"]) for block in validation)
    run.logger.info(
        f"Model       {model.num_parameters():,} parameters, vocabulary {model.config.vocab_size:,}\n"
        f"Corpus      {corpus.name}: {shares}\n"
        f"Batch       {args.global_batch_size} sequences = {training_args.world_size} processes x "
        f"{training_args.per_device_train_batch_size} x {training_args.gradient_accumulation_steps} accumulated\n"
        f"Steps       {training_args.max_steps:,}, at most {tokens / 1e6:,.1f} M tokens\n"
        f"Validation  {len(validation):,} blocks, {held_out:,} tokens, unigram entropy {entropy:.3f} nats "
        "(a loss that stays there has learnt frequencies only)\n"
        f"Output      {training_args.output_dir}\n" + (f"Going on    from {resumed_from}\n" if resumed_from else "")
    )


def show_predictions(sentences: list[str] | None, checkpoint: str) -> None:
    """The five likeliest words for each `<mask>`, by the checkpoint as any Hugging Face user loads it."""
    if not sentences:
        return
    fill_mask = pipeline("fill-mask", model=checkpoint, tokenizer=checkpoint, device="cpu")
    print()
    for sentence in sentences:
        words = ", ".join(f"{p['token_str'].strip()!r} {p['score']:.0%}" for p in fill_mask(sentence, top_k=5))
        print(f"{sentence}\n    {words}")


if __name__ == "__main__":
    exit_on_error(main)
