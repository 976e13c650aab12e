"""Validation loss of a checkpoint on the held-out text of a pretraining preset, in total and by source.

    python tools/evaluate.py --model_name_or_path runs/mine
    python tools/evaluate.py --model_name_or_path FacebookAI/roberta-base --train_file 'my_text/*.txt'

Without `--config`, the preset is that in the checkpoint's folder: a run is measured on its held-out text, unless
another is named. The tokenizer is `--tokenizer_name` or the checkpoint's, not the preset's. On several GPUs:
`accelerate launch tools/evaluate.py ...`. Blocks and masks depend on the text only, so the metrics equal those of
`train_mlm.py`. Without the run's token cache, they come from its text. Writes nothing except missing shards of a cache.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])


from roberta_recipe.data import masking, token_cache
from roberta_recipe.data.corpus import hash_files, in_words
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.input_files import resolve_path
from roberta_recipe.log import counted, logger, set_up_logging
from roberta_recipe.model import masked_lm
from roberta_recipe.record import PRESET_NAME, SourceMetrics
from roberta_recipe.settings import names_in, value_of
from roberta_recipe.tasks import blimp
from roberta_recipe.training import launching, pretraining
from roberta_recipe.training.mlm_trainer import MlmTrainer


def preset_of(argv: list[str]) -> tuple[str, set[str]]:
    """As `pretraining.preset_of`, but without `--config` the preset in the checkpoint's folder, if any. Ignored are its
    attention and order of blocks, as another device or text may not support them, and its text if the command line
    names text."""
    own = resolve_path(value_of(argv, "model_name_or_path") or "") / PRESET_NAME
    if value_of(argv, "config") or not own.is_file():
        return pretraining.preset_of(argv)
    names_text = names_in(argv) & (pretraining.TEXT_FLAGS - {"token_cache"})
    return str(own), {"attn_implementation", "shuffle_window"} | (pretraining.TEXT_FLAGS if names_text else set())


def main(argv: list[str] | None = None) -> tuple[dict[str, float], dict[str, SourceMetrics]]:
    """Run the command line `argv`; returns the overall metrics and those of each source. Raises `InputError`."""
    set_up_logging()
    launching.set_up_process()
    argv = sys.argv[1:] if argv is None else argv
    with tempfile.TemporaryDirectory() as folder:  # Trainer makes its folder
        return evaluate([*argv, "--report_to", "none", "--output_dir", folder])


def evaluate(argv: list[str]) -> tuple[dict[str, float], dict[str, SourceMetrics]]:
    """As `main`, with a temporary output folder."""
    preset = preset_of(argv)
    (args, training_args), _ = pretraining.read_arguments(argv, __doc__, preset=preset)
    if not args.model_name_or_path:
        raise InputError("model_name_or_path is not set: name the checkpoint to measure, a folder or a Hub id")
    if not args.corpus and not args.train_file:
        why = f"model_name_or_path={args.model_name_or_path} is not a folder with {PRESET_NAME}"
        why = "validation_file is read with a train_file only" if args.validation_file else why
        raise InputError(f"{why}: name a run's folder, --corpus, or text as both --train_file and --validation_file")
    tokenizer_name = value_of(argv, "tokenizer_name") or args.model_name_or_path
    args = dataclasses.replace(args, tokenizer_name=tokenizer_name, global_batch_size=None)
    if args.token_cache and not token_cache.is_started(args.token_cache):
        args = dataclasses.replace(args, token_cache=None, shuffle_window=1)
    pretraining.check_data(args)
    pretraining.check_training(training_args)
    pretraining.derive(args, training_args)
    with launching.first_process_first(training_args):
        corpus = pretraining.resolve_corpus(args)
        if args.token_cache:
            corpus = hash_files(corpus, cache_folder=args.token_cache)
        tokenizer = pretraining.load_tokenizer(args)
    # a finished model has no heads of other objectives
    model = pretraining.build_model(dataclasses.replace(args, objective=["mlm"]), training_args, tokenizer)
    _, reader = pretraining.build_readers(args, training_args, corpus, tokenizer)
    validation, masked = pretraining.validation_set(args, reader, tokenizer)
    logger.info(f"Preset      {preset[0]}")
    logger.info(f"Text        {counted(len(validation), 'block')} held out of {in_words(corpus)}")
    collator = pretraining.build_collator(args, training_args, tokenizer)
    trainer = MlmTrainer(
        model=model,
        args=training_args,
        eval_dataset=masked,
        data_collator=collator,
        processing_class=tokenizer,
        fingerprint={},
        extra_metrics=blimp.while_training(args.blimp_dir, model, tokenizer) if args.blimp_dir else None,
        flops_per_token=masked_lm.flops_per_token(model.config, args.max_seq_length, args.mlm_probability),
    )
    metrics, by_source = trainer.evaluate(), trainer.evaluate_sources(corpus, validation)
    if trainer.is_world_process_zero():
        pretraining.print_validation(metrics, masking.unigram_entropy(validation, tokenizer), by_source)
    launching.leave_process_group()
    return metrics, by_source


if __name__ == "__main__":
    exit_on_error(main)
