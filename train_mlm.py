"""Pretrain RoBERTa from raw text.

    accelerate launch train_mlm.py                       # the demonstration: five minutes on two CPU cores
    accelerate launch train_mlm.py --config presets/mlm/roberta_base.yaml                  # the paper's recipe
    accelerate launch train_mlm.py --config presets/mlm/roberta_small.yaml \\
        --train_file 'my_text/*.txt' --tokenizer_name FacebookAI/roberta-base                # your own text

Documents -> blocks -> masks -> model -> Trainer -> checkpoint, run record, loss curve in `output_dir`. Every value is
in the preset, with its source; any flag overrides it.
"""

import math
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Literal

from tqdm.auto import tqdm
from transformers import TrainingArguments, pipeline, set_seed

from roberta_recipe import corpus as corpora
from roberta_recipe import masking, modeling, report, run, tokenization
from roberta_recipe.args import InputError, exit_on_input_error, parse, resolve_path

DEMONSTRATION = "presets/mlm/roberta_tiny.yaml"
FULL_RECIPE = "accelerate launch train_mlm.py --config presets/mlm/roberta_base.yaml"


def setting(default, help, **kwargs):
    return field(default=default, metadata={"help": help}, **kwargs)


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
    shuffle_window: int = setting(16384, "Blocks that are shuffled together; 0 keeps the order of the corpus.")
    max_train_samples: int | None = setting(None, "Train on the first so many blocks only, again and again.")
    max_eval_samples: int | None = setting(None, "Validate on the first so many held-out blocks only.")
    max_train_minutes: float | None = setting(None, "Stop training, then evaluate and save, after so many minutes.")
    fill_mask_examples: list[str] | None = setting(None, "Sentences with <mask> to complete at the end.")


@dataclass
class MlmTrainingArguments(TrainingArguments):
    """`TrainingArguments` with RoBERTa's values where Trainer's own would be wrong for it (paper, Table 9)."""

    _argument_group_name = "Hugging Face TrainingArguments"

    adam_beta2: float = setting(0.98, "Table 9; Trainer has 0.999.")
    adam_epsilon: float = setting(1e-6, "Table 9; Trainer has 1e-8.")
    weight_decay: float = setting(
        0.01, "Table 9; Trainer has 0. Biases and LayerNorm are not decayed (in fairseq they are)."
    )
    max_grad_norm: float = setting(0.0, "Table 9: no clipping; Trainer has 1.0.")
    logging_nan_inf_filter: bool = setting(False, "Trainer would log a loss of 0.0 after a NaN.")
    remove_unused_columns: bool = setting(
        False, "The collator needs the block's number, which the model does not take."
    )
    prediction_loss_only: bool = setting(True, "Evaluation keeps no logits.")
    accelerator_config: dict | str | None = field(
        default_factory=lambda: {"dispatch_batches": False, "even_batches": False},
        metadata={"help": "Each process reads for itself, and no validation block is counted twice."},
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_steps <= 0:
            raise InputError(
                f"max_steps={self.max_steps}: the stream of blocks has no end, so set the number of optimizer steps"
            )
        for name in ("eval_strategy", "save_strategy"):
            if getattr(self, name) == "epoch":
                raise InputError(f"{name}=epoch: the stream of blocks has no end, so no epoch ends; use steps or no")
        if self.num_train_epochs != 3.0:
            raise InputError(
                f"num_train_epochs={self.num_train_epochs}: the stream of blocks has no end; set max_steps"
            )
        if self.label_smoothing_factor:
            raise InputError(
                f"label_smoothing_factor={self.label_smoothing_factor}: the loss here is plain cross-entropy"
            )
        if self.include_num_input_tokens_seen != "no":
            raise InputError("include_num_input_tokens_seen must stay no: tokens are counted already (tokens_seen)")
        if self.remove_unused_columns:
            raise InputError("remove_unused_columns must stay false: the collator needs the block's number")
        if self.dataloader_num_workers > 1:
            raise InputError(
                f"dataloader_num_workers={self.dataloader_num_workers}: a stream of text has one order; use 0 or 1"
            )


def main(argv: list[str] | None = None) -> dict:
    """Run the command line `argv`; returns the run record. Raises `InputError`."""
    argv = sys.argv[1:] if argv is None else argv
    started_s = time.monotonic()
    run.set_up_logging()
    run.use_all_cores()

    # 1. Arguments: dataclass < preset < command line, and what they must not say.
    (args, training_args), resolved = read_arguments(argv)
    check_arguments(args, training_args)
    args.global_batch_size = run.derive_batch(training_args, args.global_batch_size)
    if training_args.dataloader_num_workers:  # threads here would leave the forked data worker without any
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    set_seed(training_args.seed)
    data_seed = training_args.seed if training_args.data_seed is None else training_args.data_seed

    # 2. Corpus, tokenizer, model; whatever does not fit together is said before anything is trained.
    corpus = read_corpus(args)
    with training_args.main_process_first():  # one process makes what is cached
        if is_demonstration(argv, corpus):
            announce_demonstration(args, corpus)
        corpora.check_sources(corpus)
    tokenizer = tokenization.load_tokenizer(args.tokenizer_name)
    check_examples(args, tokenizer)
    model = modeling.build_model(
        tokenizer,
        config_name=args.config_name,
        model_name_or_path=args.model_name_or_path,
        max_seq_length=args.max_seq_length,
        pad_vocab_to_multiple_of=args.pad_vocab_to_multiple_of,
    )

    # 3. Blocks: the stream to train on, the held-out ones with fixed masks.
    stream = build_stream(
        args, corpus, tokenizer, data_seed, threads_in_worker=bool(training_args.dataloader_num_workers)
    )
    collator = masking.MlmCollator(
        tokenizer,
        mlm_probability=args.mlm_probability,
        pad_to_multiple_of=8,
        seed=data_seed,
        mask_count=args.mask_count,
    )
    validation, validation_counts = validation_blocks(args, training_args, corpus, tokenizer)
    entropy = masking.unigram_entropy(validation, collator)

    # 4. Train.
    trainer = build_trainer(args, training_args, model, tokenizer, stream, validation, collator)
    time_limit = run.TimeLimit(args.max_train_minutes) if args.max_train_minutes else None
    if time_limit:
        trainer.add_callback(time_limit)
    announce_run(args, training_args, corpus, model, validation, entropy)
    if trainer.is_world_process_zero():
        run.write_preset(resolved, training_args.output_dir)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    # 5. Save a plain Hugging Face checkpoint, evaluate it.
    trainer.save_model()
    metrics = trainer.evaluate()

    # 6. Run record and loss curve.
    record = run.run_record(
        trainer,
        metrics,
        unigram_entropy=entropy,
        global_batch_size=args.global_batch_size,
        stopped_by="max_train_minutes" if time_limit and time_limit.reached else "max_steps",
        counts={"train": stream.count_table(), "validation": validation_counts},
        resolved_args=resolved,
        wall_clock_s=round(time.monotonic() - started_s, 1),
    )
    if trainer.is_world_process_zero():
        os.remove(os.path.join(training_args.output_dir, "training_args.bin"))  # a pickle; preset.yaml says it all
        curve = os.path.join(training_args.output_dir, run.CURVE_NAME)
        run.write_record(record, training_args.output_dir)
        report.plot_loss(record, curve)

        # 7. What came out.
        show_predictions(args.fill_mask_examples, training_args.output_dir)
        announce_result(record, training_args.output_dir, curve)
    if not math.isfinite(metrics["eval_loss"]):
        raise InputError(
            f"the validation loss is {metrics['eval_loss']}: training diverged; lower learning_rate="
            f"{training_args.learning_rate}, warm up longer, or train in bf16 instead of fp16"
        )
    return record


def read_arguments(argv: list[str]) -> tuple[tuple[MlmArguments, MlmTrainingArguments], dict]:
    """The filled dataclasses, and the resolved values as a preset."""
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
    resume = training_args.resume_from_checkpoint
    if resume is not None:
        run.check_resume(resume, training_args.max_steps, training_args.output_dir)
    run.check_output_dir(training_args.output_dir, resuming=training_args.resume_from_checkpoint is not None)


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
        return corpora.corpus_of_files(args.train_file, args.validation_file, args.text_column)
    return corpora.read_corpus(args.corpus)


def build_stream(
    args: MlmArguments, corpus: corpora.Corpus, tokenizer, seed: int, threads_in_worker: bool
) -> corpora.BlockStream:
    """The endless stream of training blocks."""
    return corpora.BlockStream(
        corpus,
        tokenizer,
        part="train",
        input_format=args.input_format,
        max_seq_length=args.max_seq_length,
        seed=seed,
        shuffle_window=args.shuffle_window,
        limit=args.max_train_samples,
        threads_in_worker=threads_in_worker,
    )


def validation_blocks(
    args: MlmArguments, training_args: MlmTrainingArguments, corpus: corpora.Corpus, tokenizer
) -> tuple[list[dict], dict[str, dict[str, int]]]:
    """Held-out blocks, the same for every seed, and what was counted making them.

    They are in the proportions of the mixture as far as each source's held-out text goes.
    """
    stream = corpora.BlockStream(
        corpus,
        tokenizer,
        part="validation",
        input_format=args.input_format,
        max_seq_length=args.max_seq_length,
        seed=masking.EVAL_SEED,
        limit=args.max_eval_samples,
    )
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
    return blocks, stream.count_table()


def build_trainer(args, training_args, model, tokenizer, stream, validation, collator) -> run.RecipeTrainer:
    """`Trainer` over the stream, evaluating on blocks with fixed masks."""
    examples = masking.fixed_masks(validation, collator)
    if not any((example["labels"] != masking.IGNORED).any() for example in examples):
        raise InputError(
            f"mlm_probability={args.mlm_probability} predicts none of the positions of {len(validation)} validation "
            "blocks; raise it, or validate on more"
        )
    try:
        return run.RecipeTrainer(
            model=model,
            args=training_args,
            train_dataset=stream,
            eval_dataset=examples,
            data_collator=collator,
            processing_class=tokenizer,
            flops_per_token=modeling.flops_per_token(model.config, args.max_seq_length, args.mlm_probability),
        )
    except (
        ValueError,
        RuntimeError,
        OSError,
    ) as error:  # a tracker that is not installed, a Hub that is not there, ...
        raise InputError(f"Trainer refuses these arguments: {error}") from error


def announce_run(
    args: MlmArguments, training_args: MlmTrainingArguments, corpus: corpora.Corpus, model, validation, entropy
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
        f"Output      {training_args.output_dir}\n"
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


def announce_result(record: dict, output_dir: str, curve: str) -> None:
    """The figures and where the files are."""
    metrics = record["metrics"]
    below = record["unigram_entropy"] - metrics["eval_loss"]
    print(
        f"\nvalidation loss {metrics['eval_loss']:.3f} nats (perplexity {metrics['eval_perplexity']:.2f}, "
        f"{metrics['eval_bits']:.3f} bits), {abs(below):.3f} {'below' if below > 0 else 'ABOVE'} the unigram entropy "
        f"of {record['unigram_entropy']:.3f}\n"
        f"{record['tokens_seen'] / 1e6:,.2f} M tokens in {record['steps']:,} steps, "
        f"{record['tokens_per_second']:,} tokens/s, {record['wall_clock_s']:,.0f} s in all\n"
        f"checkpoint  {output_dir}\nrun record  {os.path.join(output_dir, run.RECORD_NAME)}\nloss curve  {curve}"
    )


if __name__ == "__main__":
    exit_on_input_error(main)
