"""Validation loss of a checkpoint on the held-out text of a pretraining preset, in total and by source.

    python tools/evaluate.py --config presets/mlm/roberta_base.yaml --corpus my_corpus.yaml \
        --model_name_or_path FacebookAI/roberta-base

Uses the checkpoint's tokenizer, not the preset's, or `--tokenizer_name`. On several GPUs: `accelerate launch
tools/evaluate.py ...`. Blocks and masks depend on the text only, so the metrics equal those of `train_mlm.py`. Writes
nothing except missing shards of a token cache.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from transformers import PreTrainedTokenizerBase

from roberta_recipe.data import masking, tokenization
from roberta_recipe.data.corpus import hash_files, resolve
from roberta_recipe.data.documents import check_sources
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.log import logger, set_up_logging
from roberta_recipe.model import masked_lm
from roberta_recipe.record import SourceMetrics
from roberta_recipe.tasks import blimp
from roberta_recipe.training import pretraining, processes
from roberta_recipe.training.mlm_trainer import MlmTrainer


def own_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer. Raises `InputError` if it has none for a masked LM."""
    try:
        return tokenization.load_tokenizer(checkpoint)
    except InputError as error:
        raise InputError(
            f"model_name_or_path={checkpoint!r} has no tokenizer for a masked LM; name the one of its training: "
            f"--tokenizer_name NAME ({error})"
        ) from None


def load_tokenizer(checkpoint: str, named: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer `named`, with a warning if it differs from the checkpoint's, else the checkpoint's. Raises
    `InputError`."""
    if named is None:
        return own_tokenizer(checkpoint)
    tokenizer = tokenization.load_tokenizer(named)
    try:
        own = tokenization.tokenizer_fingerprint(own_tokenizer(checkpoint))
    except InputError:  # nothing to compare with
        return tokenizer
    if tokenization.tokenizer_fingerprint(tokenizer) != own:
        logger.warning(
            f"tokenizer_name={named!r} differs from the tokenizer of model_name_or_path={checkpoint!r}: ids stand for "
            "other words than in its training; leave --tokenizer_name out for comparable figures"
        )
    return tokenizer


def main(argv: list[str] | None = None) -> tuple[dict[str, float], dict[str, SourceMetrics]]:
    """Run the command line `argv`; returns the metrics of the whole and of each source. Raises `InputError`."""
    set_up_logging()
    processes.set_up_process()
    argv = sys.argv[1:] if argv is None else argv
    with tempfile.TemporaryDirectory() as folder:  # Trainer makes its folder
        return evaluate([*argv, "--report_to", "none", "--output_dir", folder])


def evaluate(argv: list[str]) -> tuple[dict[str, float], dict[str, SourceMetrics]]:
    """As `main`, with a temporary output folder."""
    (args, training_args), _ = pretraining.read_arguments(argv, __doc__)
    if not args.model_name_or_path:
        raise InputError("model_name_or_path is not set: name the checkpoint to measure, a folder or a Hub id")
    in_command = any(word.split("=")[0].replace("-", "_") == "__tokenizer_name" for word in argv)
    named = args.tokenizer_name if in_command else None
    args = dataclasses.replace(args, tokenizer_name=named or args.model_name_or_path, global_batch_size=None)
    pretraining.check_data(args)
    pretraining.check_training(training_args)
    pretraining.resolve(args, training_args)
    with training_args.main_process_first():
        corpus = resolve(pretraining.read_corpus(args))
        check_sources(corpus)
        if args.token_cache:
            corpus = hash_files(corpus, cache_folder=args.token_cache)
        tokenizer = load_tokenizer(args.model_name_or_path, named)
    # a finished model has no heads of other objectives
    model = pretraining.build_model(args, training_args, tokenizer, ["mlm"])
    _, reader = pretraining.build_readers(args, training_args, corpus, tokenizer)
    validation = pretraining.validation_blocks(args, training_args, reader)
    collator = pretraining.build_collator(args, training_args, tokenizer)
    trainer = MlmTrainer(
        model=model,
        args=training_args,
        eval_dataset=pretraining.mask_validation(args, validation, tokenizer),
        data_collator=collator,
        processing_class=tokenizer,
        fingerprint={},
        resumed=None,
        extra_metrics=blimp.while_training(args.blimp_dir, model, tokenizer) if args.blimp_dir else None,
        flops_per_token=masked_lm.flops_per_token(model.config, args.max_seq_length, args.mlm_probability),
    )
    metrics, by_source = trainer.evaluate(), trainer.evaluate_sources(corpus, validation)
    if trainer.is_world_process_zero():
        pretraining.print_validation(metrics, masking.unigram_entropy(validation, tokenizer), by_source)
    processes.leave_process_group()
    return metrics, by_source


if __name__ == "__main__":
    exit_on_error(main)
