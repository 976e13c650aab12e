"""Steps of pretraining (paper, section 4), for `train_mlm.py` and the tools that read its presets: argument checks,
readers, model, collator, validation set, fingerprint."""

import contextlib
import dataclasses
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_utils import SchedulerType

from roberta_recipe import durable
from roberta_recipe.data import corpus as corpora
from roberta_recipe.data import mask_units, masking, order, phrases, stream, token_cache, tokenization
from roberta_recipe.data.chunks import PACKERS, TextReader
from roberta_recipe.data.documents import check_sources, sample_documents, split_sentences
from roberta_recipe.data.packing import Block
from roberta_recipe.data.stream import Reader
from roberta_recipe.errors import InputError
from roberta_recipe.hardware import cpu_cores, local_processes
from roberta_recipe.input_files import resolve_path
from roberta_recipe.log import counted, logger
from roberta_recipe.model import attention, initialization, masked_lm, objectives, weights
from roberta_recipe.record import SourceMetrics
from roberta_recipe.settings import fixed_values, flags_of, names_in, parse, value_of, values_of
from roberta_recipe.standard_error import decimals_of, perplexity_with_error, with_error
from roberta_recipe.training import arguments, checkpoint, launching, optimizers, stopping
from roberta_recipe.training.arguments import MlmArguments, MlmTrainingArguments
from roberta_recipe.training.launching import end_together, first_process_first, on_first_process

DEMONSTRATION = "presets/mlm/demonstration.yaml"
CONTINUE = "presets/mlm/continue.yaml"
BIAS_CHARACTERS = 4_000_000  # of text, about 1 M tokens, for the frequencies of `initialization`'s unigram_bias
TEXT_FLAGS = {"train_file", "validation_file", "corpus", "token_cache"}
_NOT_DEMONSTRATION = {*TEXT_FLAGS, "model_size", "model_name_or_path", "config_name", "tokenizer_name"}
_OF_PRESET = {*TEXT_FLAGS, "tokenizer_name", "output_dir", "fill_mask_examples"}  # ignored in presets of --model_size


def preset_of(argv: list[str]) -> tuple[str, set[str]]:
    """(preset of a command line, its keys that are ignored). Without `--config`: the demonstration if no text, model or
    tokenizer is named; else continued pretraining for a checkpoint, or the preset of `model_size`."""
    if is_demonstration(argv):
        return DEMONSTRATION, set()
    if config := value_of(argv, "config"):
        return config, set()
    if "model_name_or_path" in names_in(argv):
        return CONTINUE, set()
    return f"presets/mlm/roberta_{value_of(argv, 'model_size') or 'mini'}.yaml", _OF_PRESET


def is_demonstration(argv: list[str]) -> bool:
    """Whether a command line names neither preset, text, model nor tokenizer."""
    return not value_of(argv, "config") and not names_in(argv) & _NOT_DEMONSTRATION


def read_arguments(
    argv: list[str], description: str, extra: tuple[type, ...] = (), preset: tuple[str, set[str]] | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """Parse `argv` on top of `preset` (default: `preset_of`) into the dataclasses `extra` (a tool's), `MlmArguments`,
    `MlmTrainingArguments`, and the resolved values as a preset. The default tokenizer is the checkpoint's."""
    path, without = preset or preset_of(argv)
    filled, resolved = parse([*extra, MlmArguments, MlmTrainingArguments], argv, path, description, without)
    *_, args, training_args = filled
    if args.model_size and (other := value_of(argv, "config") or args.model_name_or_path):
        raise InputError(f"model_size={args.model_size} is for fresh weights without --config; remove it or {other}")
    if not args.tokenizer_name and args.model_name_or_path:
        filled[-2] = dataclasses.replace(args, tokenizer_name=args.model_name_or_path)
        resolved["tokenizer_name"] = args.model_name_or_path
    if (start := args.model_name_or_path) and (folder := resolve_path(start)).is_dir():
        same = [name for name in ("model_name_or_path", "tokenizer_name") if resolved.get(name) == start]
        resolved |= dict.fromkeys(same, str(folder.resolve()))  # so that it is not taken for a Hub model elsewhere
    return filled, {**resolved, "bf16": training_args.bf16}


def check_data(args: MlmArguments) -> None:
    """Raise `InputError` for text, blocks, masks or objectives that are missing, out of range, or incompatible."""
    if not args.corpus and not args.train_file:
        raise InputError("no text: set train_file, or corpus (a preset in presets/corpus)")
    if not args.train_file and (args.text_column != "text" or args.language != "en"):
        raise InputError("text_column and language need train_file; a corpus preset has its own")
    if args.shuffle_window > 1 and not args.token_cache:
        raise InputError(f"shuffle_window={args.shuffle_window} (chunks) needs a --token_cache; without one, 0 or 1")
    if args.max_seq_length < 8:
        raise InputError(f"max_seq_length={args.max_seq_length} leaves no room for a sentence; the paper has 512")
    if not 0 < args.mlm_probability < 1:
        raise InputError(f"mlm_probability={args.mlm_probability} must be between 0 and 1; the paper has 0.15")
    if args.mask_replace_prob + args.random_replace_prob > 1 + 1e-9:
        raise InputError(
            f"mask_replace_prob={args.mask_replace_prob} and random_replace_prob={args.random_replace_prob} are more "
            "than 1 together; the paper has 0.8 and 0.1"
        )
    if args.mask_count == "exact" and args.masking_unit in (*mask_units.LENGTHS, *phrases.UNITS):
        raise InputError(f"mask_count=exact needs masking_unit=token or whole_word, not {args.masking_unit}")
    limits = ("max_train_samples", "max_eval_samples", "max_train_minutes", "pad_vocab_to_multiple_of")
    for name in (*limits, "rewind_on_spike"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise InputError(f"{name}={getattr(args, name)} must be above 0; leave it out for no limit")
    names, table = args.objective, objectives.TABLE
    if "mlm" not in names or len(set(names)) < len(names) or not set(names) <= table.keys():
        raise InputError(
            f"objective={' '.join(names)!r}: name mlm and any of the others, once each: {', '.join(table)}"
        )
    if len(packed := [name for name in names if packed_formats(name)]) > 1:
        raise InputError(f"objectives {' and '.join(packed)} exclude each other: each needs its own blocks")
    for name in names:
        if name != "mlm" and not table[name].labels_of_mask and not packed_formats(name):
            raise InputError(f"objective {name} has no labels: declare labels_of_mask, or 'FORMAT {name}' in PACKERS")
        for flag, valid in {"masking_unit": table[name].masking_units, "input_format": packed_formats(name)}.items():
            if valid and getattr(args, flag) not in valid:
                raise InputError(f"objective {name} needs {flag}={' or '.join(valid)}, not {getattr(args, flag)}")


def packed_formats(objective: str) -> list[str]:
    """The input formats with a packer for this objective."""
    return [packer.split()[0] for packer in PACKERS if packer.split()[1:] == [objective]]


def check_model(args: MlmArguments) -> None:
    """Raise `InputError` for a missing model or an `initialization` that is unknown or not for its family."""
    if not args.config_name and not args.model_name_or_path:
        raise InputError("no model: set config_name for fresh weights, or model_name_or_path for a checkpoint")
    if args.config_name and "query_key" in initialization.factors(args.initialization):
        config = weights.read_config(args.config_name, "config_name")
        initialization.check_family(args.initialization, config.model_type)


def check_cooldown(args: MlmArguments, training_args: MlmTrainingArguments) -> None:
    """Raise `InputError` for a cool-down without a time limit or without a constant schedule."""
    if (share := args.cooldown_share) is None:
        return
    is_constant = training_args.lr_scheduler_type is SchedulerType.CONSTANT_WITH_WARMUP
    if not (0 < share < 1 and args.max_train_minutes and is_constant):
        raise InputError(
            f"cooldown_share={share} must be between 0 and 1, with --max_train_minutes MINUTES and "
            "--lr_scheduler_type constant_with_warmup"
        )


def check_training(training_args: MlmTrainingArguments) -> None:
    """Raise `InputError` for a missing output folder, a launcher that contradicts the flags, or an optimizer or
    schedule that cannot be built."""
    if training_args.output_dir == "trainer_output":  # Trainer's default
        raise InputError("output_dir is not set: name a folder for checkpoint, run record and plot")
    launching.check_launch(training_args)
    optimizers.check(training_args)


def derive(args: MlmArguments, training_args: MlmTrainingArguments) -> None:
    """`arguments.derive` for the model of `args`. Raises `InputError` also where its attention or its architecture
    cannot separate the sequences of a block."""
    config = weights.config_of(args.config_name, args.config_overrides, args.model_name_or_path)
    arguments.derive(args, training_args, config, can_unpad=True)
    if args.input_format in ("doc_sentences", "sentence_pair"):  # several sequences in one block
        attention.check_shared_rows(config, training_args.attn_implementation, args.input_format)
    if training_args.dataloader_num_workers and not args.token_cache:
        # else a forked worker would tokenize with one thread, or hang if its parent has started threads
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


def data_seed(training_args: MlmTrainingArguments) -> int:
    """The seed of order and masks."""
    return training_args.seed if training_args.data_seed is None else training_args.data_seed


def read_corpus(args: MlmArguments) -> corpora.Corpus:
    """The unresolved corpus: of `train_file` if given, else the corpus preset."""
    if args.train_file:
        return corpora.corpus_of_files(args.train_file, args.validation_file, args.text_column, args.language)
    return corpora.read_corpus(args.corpus)


def resolve_corpus(args: MlmArguments) -> corpora.Corpus:
    """The corpus with its files. Its text is checked, unless a token cache was already started from it. Raises
    `InputError`."""
    corpus = corpora.resolve(read_corpus(args), args.token_cache)
    if not (args.token_cache and token_cache.is_started(args.token_cache)):
        check_sources(corpus)
    return corpus


def load_tokenizer(args: MlmArguments) -> PreTrainedTokenizerBase:
    """The tokenizer `tokenizer_name`; warns if it differs from that of a checkpoint. Raises `InputError`."""
    name, checkpoint = args.tokenizer_name, args.model_name_or_path
    if name == checkpoint:
        return checkpoint_tokenizer(checkpoint)
    tokenizer = tokenization.load_tokenizer(name)
    with contextlib.suppress(InputError):  # nothing to compare with
        fingerprint = tokenization.tokenizer_fingerprint
        if checkpoint and fingerprint(tokenizer) != fingerprint(checkpoint_tokenizer(checkpoint)):
            logger.warning(
                f"tokenizer_name={name!r} differs from the tokenizer of model_name_or_path={checkpoint!r}: ids would "
                "mean other tokens than in training; leave --tokenizer_name out"
            )
    return tokenizer


def checkpoint_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    """The tokenizer that is saved with a checkpoint. Raises `InputError` where there is none for a masked LM."""
    try:
        return tokenization.load_tokenizer(checkpoint)
    except InputError as error:
        raise InputError(
            f"model_name_or_path={checkpoint!r} has no tokenizer for a masked LM; name the one that it was "
            f"trained with: --tokenizer_name NAME ({error})"
        ) from None


def text_reader(
    args: MlmArguments,
    corpus: corpora.Corpus,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    index_folder: str | None = None,
) -> TextReader:
    """The reader of chunks from text. The packer depends on format and objective; formats of pairs without a pair
    objective have pairs in text order."""
    packers = [f"{args.input_format} {name}" for name in (*args.objective, "in_order")]
    return TextReader(
        corpus,
        tokenizer,
        packer=next((name for name in packers if name in PACKERS), args.input_format),
        max_seq_length=args.max_seq_length,
        seed=seed,
        shuffle_window=args.shuffle_window,
        phrases=phrases.Phrases(args.masking_unit, args.spacy_model) if args.masking_unit in phrases.UNITS else None,
        index_folder=index_folder,
    )


def cache_reader(args: MlmArguments, corpus: corpora.Corpus, seed: int) -> token_cache.TokenCache:
    """The reader of chunks from a complete token cache."""
    return token_cache.TokenCache(args.token_cache, corpus, seed=seed, shuffle_window=args.shuffle_window)


def build_readers(
    args: MlmArguments, training_args: MlmTrainingArguments, corpus: corpora.Corpus, tokenizer: PreTrainedTokenizerBase
) -> tuple[Reader, Reader]:
    """The readers of training and validation blocks: the text, or a token cache, which is built first if needed."""
    seed = data_seed(training_args)
    # only the training reader has a chunk index, as held-out text is read once
    reader = text_reader(args, corpus, tokenizer, seed, None if args.token_cache else training_args.output_dir)
    if not args.token_cache:
        return reader, text_reader(args, corpus, tokenizer, masking.EVAL_SEED)
    num_proc = max(1, cpu_cores() // local_processes())
    ranks = {"machine": training_args.process_index, "machines": training_args.world_size}
    with end_together():
        token_cache.build(args.token_cache, reader, num_proc=num_proc, **ranks)
    cache = cache_reader(args, corpus, seed)
    announce_cache(args.token_cache, cache)
    return cache, cache_reader(args, corpus, masking.EVAL_SEED)


def derive_steps(args: MlmArguments, training_args: MlmTrainingArguments, reader: Reader) -> int:
    """The number of optimizer steps. With `num_train_epochs` and no token cache, one process per machine packs the text
    once to count its blocks, and the chunk index keeps the count."""
    if training_args.num_train_epochs:
        with first_process_first(training_args):  # the other ranks read the chunk index
            blocks = stream.blocks_of_pass(reader, pack=True)
        arguments.derive_steps(training_args, min(blocks, args.max_train_samples or blocks), args.global_batch_size)
        folder, steps = Path(training_args.output_dir), training_args.max_steps
        on_first_process(training_args, lambda: checkpoint.check_unfinished(folder, steps))
    return training_args.max_steps


def announce_cache(folder: str, cache: token_cache.TokenCache) -> None:
    """Log a cache's size, and counts of split and skipped input."""
    total = Counter()
    for split in ("train", "validation"):
        sums = sum(map(Counter, stream.count_table(cache, split).values()), Counter())
        total += sums
        docs = counted(sums["documents"], "document")
        logger.info(f"Cache       {folder}: {split} {sums['blocks']:,} blocks, {sums['tokens']:,} tokens of {docs}")
    logger.info(
        f"            {total['split_sentences']:,} sentences longer than a block were split; left out: "
        f"{total['empty_documents']:,} empty documents, {total['bad_files']:,} bad files, {total['lost_rows']:,} rows"
    )


def build_model(
    args: MlmArguments,
    training_args: MlmTrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    corpus: corpora.Corpus | None = None,
) -> masked_lm.MaskedLmMixin:
    """The model of `args`, with the resolved attention of `training_args` and fresh weights (an output bias from
    `corpus`, if `initialization` names it) or a checkpoint's; not sharded."""
    # with ZeRO 3's config, `from_pretrained` would build a shard, and vocabulary padding would have no effect;
    # `Trainer` sets the config again
    unset_hf_deepspeed_config()
    set_seed(training_args.seed)
    model = masked_lm.build_model(
        tokenizer,
        config_name=args.config_name,
        config_overrides=args.config_overrides,
        model_name_or_path=args.model_name_or_path,
        max_seq_length=args.max_seq_length,
        pad_vocab_to_multiple_of=args.pad_vocab_to_multiple_of,
        objectives=objectives.named(args.objective),
    )
    initialization.initialize(model, args.initialization)
    if corpus and initialization.factors(args.initialization)["unigram_bias"]:
        initialization.set_output_bias(model, args.initialization, token_counts(corpus, tokenizer))
    attention.set_up(model, training_args)
    return model


def token_counts(corpus: corpora.Corpus, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """(vocab_size,): how often each token occurs in a sample of the training text."""
    backend, counts = tokenization.corpus_backend(tokenizer), np.zeros(len(tokenizer), dtype=np.int64)
    for _, text in sample_documents(corpus, "train", max_bytes=BIAS_CHARACTERS, seed=0):
        for sentence in split_sentences(text[:BIAS_CHARACTERS], corpus.language):
            # not `encode_batch`, whose threads would hang a forked data worker
            np.add.at(counts, backend.encode(sentence, add_special_tokens=False).ids, 1)
    return counts


def warn_of_small_files(corpus: corpora.Corpus, size: int | None, max_seq_length: int) -> None:
    """Warn if the average training file has fewer than eight blocks: a block never spans two files. `size`: bytes of
    the training files, if known."""
    files = sum(len(corpus.files(source, "train")[1]) for source in corpus.sources)
    average = (size or math.inf) / files
    if files > 10 and average < 8 * corpora.BYTES_PER_TOKEN * max_seq_length:
        logger.warning(
            f"{files:,} files of {average / 1e3:.1f} kB on average: no block spans two files, so many blocks are "
            "short; join the files, with an empty line between documents of text"
        )


def build_collator(
    args: MlmArguments, training_args: MlmTrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> masking.MlmCollator:
    """The training collator: by default dynamic masks, a new one for each block and epoch."""
    return masking.MlmCollator(
        tokenizer,
        mlm_probability=args.mlm_probability,
        # a fixed shape for a compiled encoder, whose head gets a multiple of 512 positions; else a multiple of 8, for a
        # GPU's kernels, or of a divisor of the length: padding never exceeds the model's positions
        pad_to_multiple_of=args.max_seq_length if training_args.torch_compile else math.gcd(8, args.max_seq_length),
        predicted_multiple=512 if training_args.torch_compile else 1,
        seed=data_seed(training_args),
        mask_count=args.mask_count,
        masking_unit=args.masking_unit,
        static_masks=args.static_masks,
        labels_of_mask=objectives.labels_of_mask(args.objective),
        mask_replace_prob=args.mask_replace_prob,
        random_replace_prob=args.random_replace_prob,
    )


def validation_set(
    args: MlmArguments, reader: Reader, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Block], list[dict[str, Any]]]:
    """(held-out blocks, at most `max_eval_samples`, the same for every seed; these with fixed masks). Raises
    `InputError` for too few blocks, and if they have no label of an objective."""
    blocks = list(stream.validation_blocks(reader, args.max_eval_samples))
    more = "hold out more text (validation_file, or validation_share of the corpus) or raise max_eval_samples"
    if not blocks:
        raise InputError(f"validation has no block: {more}")
    for name in filter(packed_formats, args.objective):
        column, needs = objectives.TABLE[name].column, objectives.TABLE[name].needs
        if not any(np.any(block[column] != masking.IGNORED) for block in blocks):
            raise InputError(f"objective {name}: no validation block has a label (needs: {needs}): {more}")
    examples = masking.fixed_masks(blocks, tokenizer, labels_of_mask=objectives.labels_of_mask(args.objective))
    if not masking.has_targets(examples):
        raise InputError(f"no position of {len(blocks)} validation blocks is predicted: hold out more text")
    return blocks, examples


def skipped_blocks(
    args: MlmArguments, training_args: MlmTrainingArguments, resumed: dict[str, Any] | None, reader: Reader
) -> order.Skipped:
    """The positions that this run skips: those of the checkpoint, of loss spikes on the same data, and of
    `skip_blocks`. Raises `InputError` if the checkpoint was trained on some of `skip_blocks`."""
    resumed = resumed or {}
    before = order.union(range(*part) for part in resumed.get("skipped_blocks", []))
    position, named = resumed.get("position", 0), order.read_ranges(args.skip_blocks or [])
    if consumed := [part for part in named if part.start < position and order.union([*before, part]) != before]:
        raise InputError(
            f"skip_blocks: the checkpoint, at block {position:,}, was trained on {order.in_words(consumed)}: move "
            "away the checkpoints that were written after these blocks"
        )
    spikes = stopping.read_spikes(training_args.output_dir)
    data = {**values_of(args, "data"), **data_fingerprint(training_args, reader)} if spikes else {}
    spikes = [spike for spike in spikes if data.items() <= spike.get("fingerprint", data).items()]
    return order.union([*before, *named, *(range(*part) for spike in spikes for part in spike["blocks"])])


def print_validation(metrics: dict[str, float], entropy: float, by_source: dict[str, SourceMetrics]) -> None:
    """Print the validation loss with its standard error, the unigram entropy (nats), and the loss of each source."""
    loss, error = metrics["eval_loss"], metrics.get("eval_loss_error")
    shown = f"masked perplexity at {masking.EVAL_PROBABILITY:.0%}"
    decimals, side = decimals_of(error), "below" if loss < entropy else "ABOVE"
    print(
        f"\nvalidation loss {with_error(loss, error)} nats "
        f"({shown} {perplexity_with_error(metrics['eval_perplexity'], error)}, "
        f"{metrics['eval_bits']:.{decimals}f} bits; {counted(metrics['eval_documents'], 'document')}), "
        f"{abs(entropy - loss):.{decimals}f} {side} the unigram entropy of {entropy:.3f}"
    )
    if "eval_blimp" in metrics:
        print(f"BLiMP {metrics['eval_blimp']:.1%}, mean over paradigms (chance is near 50%; make blimp has a control)")
    for name, source in by_source.items():
        error = source["loss_error"]
        print(
            f"    {name:<16} {with_error(source['loss'], error)} nats, "
            f"{shown} {perplexity_with_error(source['perplexity'], error)}; unigram entropy of this text "
            f"{source['unigram_entropy']:.3f}; {counted(source['blocks'], 'block')} in "
            f"{counted(source['documents'], 'document')}, {source['tokens']:,} tokens"
        )


def data_fingerprint(training_args: MlmTrainingArguments, reader: Reader) -> dict[str, Any]:
    """The part of the fingerprint that determines blocks and their order, without flags."""
    return {
        **reader.fingerprint(),
        "shares": [round(share, 6) for share in reader.corpus.shares],
        "data_seed": data_seed(training_args),
    }


def run_fingerprint(
    args: MlmArguments,
    training_args: MlmTrainingArguments,
    model: masked_lm.MaskedLmMixin,
    tokenizer: PreTrainedTokenizerBase,
    reader: Reader,
) -> tuple[dict[str, Any], set[str]]:
    """(settings that must not change between two starts of a run, names of those that determine the order of blocks).
    Config and weights are compared by content, not by path."""
    data = data_fingerprint(training_args, reader)
    config = {**model.config.to_dict(), "transformers_version": None, "_name_or_path": None}
    fixed = {
        **fixed_values(args),
        **fixed_values(training_args),
        "objectives": list(model.objectives),
        **({"mask_revision": mask_units.REVISION} if args.masking_unit != "token" else {}),
        "tokenizer_files": tokenization.files_fingerprint(tokenizer),
        "model": durable.fingerprint(config),
        "start_weights": checkpoint.hash_of(dict(model.named_parameters())) if args.model_name_or_path else "fresh",
    }
    data_flags = {name for name, flag in flags_of(type(args)).items() if flag.scope == "data"}
    return {**fixed, **data}, data_flags | set(data)
