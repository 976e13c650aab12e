"""Measure a checkpoint on the held-out text of a pretraining preset, and on each source of it. Nothing is written but a
token cache, where one is named that is not complete.

    python -m roberta_recipe.tools.evaluate --config presets/mlm/roberta_base.yaml --corpus my_corpus.yaml \
        --model_name_or_path FacebookAI/roberta-base --tokenizer_name FacebookAI/roberta-base

With several GPUs, `accelerate launch -m roberta_recipe.tools.evaluate ...`. The blocks and masks equal those of
every run on this text, so the figures equal what `train_mlm.py` prints at its end.
"""

import shutil
import sys
import tempfile

from roberta_recipe.data import masking, tokenization
from roberta_recipe.data.documents import check_sources
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.log import set_up_logging
from roberta_recipe.record import SourceMetrics
from roberta_recipe.training import environment, modeling, pretraining
from roberta_recipe.training.mlm_trainer import MlmTrainer, StepWatch


def main(argv: list[str] | None = None) -> tuple[dict[str, float], dict[str, SourceMetrics]]:
    """Run the command line `argv`; returns the metrics of the whole and of each source. Raises `InputError`."""
    set_up_logging()
    environment.use_all_cores()
    argv = [*(sys.argv[1:] if argv is None else argv), "--report_to", "none"]
    (args, training_args), _ = pretraining.read_arguments(argv, __doc__)
    pretraining.check_text(args)
    pretraining.check_training(training_args)
    if not args.model_name_or_path:
        raise InputError("model_name_or_path is not set: name the checkpoint to measure, a folder or a Hub id")
    corpus = pretraining.read_corpus(args)
    with training_args.main_process_first():
        check_sources(corpus)
    tokenizer = tokenization.load_tokenizer(args.tokenizer_name)
    model = pretraining.build_model(args, tokenizer)
    _, reader = pretraining.build_readers(args, training_args, corpus, tokenizer)
    validation = pretraining.validation_blocks(args, training_args, reader)
    collator = pretraining.build_collator(args, training_args, tokenizer)
    training_args.output_dir = tempfile.mkdtemp()  # Trainer makes its folder
    trainer = MlmTrainer(
        model=model,
        args=training_args,
        eval_dataset=pretraining.mask_validation(args, validation, collator),
        data_collator=collator,
        processing_class=tokenizer,
        fingerprint={},
        resumed=None,
        watch=StepWatch(),
        flops_per_token=modeling.flops_per_token(model.config, args.max_seq_length, args.mlm_probability),
    )
    metrics, by_source = trainer.evaluate(), trainer.evaluate_sources(corpus, validation)
    shutil.rmtree(training_args.output_dir)
    if trainer.is_world_process_zero():
        pretraining.print_validation(metrics, masking.unigram_entropy(validation, collator), by_source)
    environment.leave_process_group()
    return metrics, by_source


if __name__ == "__main__":
    exit_on_error(main)
