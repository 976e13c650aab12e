"""The flags of pretraining (paper, Table 9), and what is built from them: for `train_mlm.py`, and for the tools that
read its presets."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import SchedulerType

from roberta_recipe import args as flags
from roberta_recipe import durable
from roberta_recipe.args import parse, setting
from roberta_recipe.data import corpus as corpora
from roberta_recipe.data import mask_units, masking, order, phrases, stream, token_cache, tokenization
from roberta_recipe.data.chunks import COUNTS, PACKERS, PAIRS, TextReader
from roberta_recipe.data.packing import Block
from roberta_recipe.data.pairs import VERSIONS
from roberta_recipe.errors import InputError
from roberta_recipe.hardware import cpu_cores, local_processes
from roberta_recipe.log import counted, logger
from roberta_recipe.model import attention, initialization, masked_lm, objectives, weights
from roberta_recipe.record import SourceMetrics
from roberta_recipe.standard_error import decimals_of, perplexity_with_error, with_error
from roberta_recipe.training import arguments, checkpoint, data_loading, environment, optimizers, stopping
from roberta_recipe.training.arguments import MlmTrainingArguments

DEMONSTRATION = "presets/mlm/roberta_tiny.yaml"
# of two alternatives, a flag for one replaces the preset's value for the other
ALTERNATIVES = (
    *(("corpus", "train_file"), ("corpus", "validation_file")),
    *(("config_name", "model_name_or_path"), ("config_overrides", "model_name_or_path")),
)

SHARED_ROWS = ("doc_sentences", "sentence_pair")  # several sequences in a block

Reader = TextReader | token_cache.TokenCache


@dataclass
class TextArguments:
    """Which text, and how it is read."""

    _argument_group_name = "text"

    corpus: str | None = setting(None, "Corpus preset (presets/corpus/*.yaml).", "content")
    train_file: list[str] | None = setting(
        None, "Text, JSONL, Parquet or Arrow to train on, in place of `corpus`: files, folders or globs.", "content"
    )
    validation_file: list[str] | None = setting(
        None, "Held-out text for `train_file`; without it, 1%% of its documents.", "content"
    )
    text_column: str = setting("text", "Column of `train_file` and `validation_file` that holds the text.", "content")
    language: str = setting(
        "en",
        "Language of `train_file`, for the sentence splitter and the model card; a corpus preset has its own.",
        "content",
    )
    token_cache: str | None = setting(
        None,
        "Folder for the packed corpus: made where it is not complete, then read in place of the text. Formats of pairs "
        "are packed in ten versions, for ten passes: ten times the disk and the packing time.",
        "free",
    )
    shuffle_window: int = setting(
        1,
        "Chunks of a source (about 8 MB of text each) whose blocks are permuted together; 0 keeps the order of the "
        "files, more than 1 needs a token cache.",
        "data",
    )
    skip_blocks: list[str] | None = setting(
        None,
        "Blocks to leave out, by their positions in the order of the run (41000-41063: both ends), as a log line or "
        "error names them. A resumed run keeps leaving out what it left out before.",
        "free",
    )
    max_train_samples: int | None = setting(None, "Train on the first so many blocks only, again and again.", "data")
    max_eval_samples: int | None = setting(None, "Validate on so many held-out blocks only, drawn evenly.", "free")


@dataclass
class BlockArguments:
    """How text becomes blocks, and blocks become examples."""

    _argument_group_name = "blocks and masks"

    tokenizer_name: str | None = setting(None, "Tokenizer folder or Hub id.", "content")
    input_format: Literal[
        "full_sentences", "doc_sentences", "segment_pair", "segment_pair_short", "sentence_pair", "contiguous"
    ] = setting(
        "full_sentences",
        "Whole sentences across documents or of one document, pairs of segments (a tenth of them shorter: BERT) or of "
        "sentences (paper, section 4.2); or chunks of fixed size.",
        "data",
        shown=True,
    )
    objective: list[str] = setting(
        ["mlm"],
        "mlm; and beside it "
        + ", ".join(f"{name} ({of.help})" for name, of in objectives.TABLE.items() if name != "mlm"),
        "fixed",
        shown=True,
    )
    max_seq_length: int = setting(512, "Tokens in a block, <s> and </s> included.", "data", shown=True)
    mlm_probability: float = setting(0.15, "Share of positions that are predicted.", "fixed", shown=True)
    mask_count: Literal["bernoulli", "exact"] = setting(
        "bernoulli",
        "Each position by itself (Hugging Face), or an exact number per block (fairseq).",
        "fixed",
        shown=True,
    )
    masking_unit: mask_units.Unit = setting(
        "token",
        "What is masked together: tokens, whole words, SpanBERT's spans or ALBERT's n-grams of whole words; or named "
        "entities or noun phrases, which spaCy finds, and as many words.",
        "fixed",
        shown=True,
    )
    spacy_model: str = setting(
        "en_core_web_lg", "spaCy's model, for named entities and noun phrases, a package or a folder.", "data"
    )
    static_masks: int = setting(
        0, "Masks of a block, which its passes take in turn (BERT: 10); 0: a new one each pass.", "fixed", shown=True
    )
    mask_replace_prob: float = setting(0.8, "Share of the predicted positions that show <mask>.", "fixed", shown=True)
    random_replace_prob: float = setting(
        0.1,
        "Share of them that show a random token; the rest show their own (BabyBERTa: none does).",
        "fixed",
        shown=True,
    )


@dataclass
class ModelArguments:
    """Which model."""

    _argument_group_name = "model"
    replaces: ClassVar[tuple[tuple[str, str], ...]] = (("model_name_or_path", "initialization"),)  # a preset's

    config_name: str | None = setting(
        None, "Model config for fresh weights: a JSON file, a folder or a Hub id.", "content"
    )
    config_overrides: str | None = setting(
        None, "Changes to that config: embedding_size=128,shared_parameters=attention.", "content"
    )
    model_name_or_path: str | None = setting(
        None, "Checkpoint whose weights to continue from, in place of `config_name`.", "content"
    )
    pad_vocab_to_multiple_of: int | None = setting(
        None, "Pad the embedding (never the tokenizer) to a multiple of this.", "content"
    )
    # None and not "normal": checkpoints from before this flag have no value of it
    initialization: str | None = setting(
        None,
        "Fresh weights: normal, which is the default, or mimetic (arXiv 2305.09828), with other factors by "
        "mimetic,positions=2,query_key=0.7,value_output=0.5.",
        "fixed",
        shown=True,
    )


@dataclass
class MlmArguments(ModelArguments, BlockArguments, TextArguments):  # a dataclass has the fields of its last base first
    """What `TrainingArguments` has no name for."""

    _argument_group_name = "run"

    global_batch_size: int | None = setting(
        None, "Sequences an optimizer step; accumulation is derived from it.", "fixed", shown=True
    )
    max_train_minutes: float | None = setting(
        None, "Save, evaluate and end after so many minutes; the same command trains as long again.", "free"
    )
    # fixed, unlike the time limit, which ends a run earlier or later on the same curve: this changes the rates
    cooldown_share: float | None = setting(
        None,
        "Share of max_train_minutes, at its end, over which the learning rate falls linearly to 0, by the clock: such "
        "a run does not resume bit for bit. With lr_scheduler_type=constant_with_warmup.",
        "fixed",
        shown=True,
    )
    rewind_on_spike: float | None = setting(
        None,
        "End with exit code 65 where a step's loss is more than so many standard deviations above the mean of the 128 "
        "steps before, or no number (OLMo-core: 6). The next start, by hand or by --max_restarts, leaves out the "
        "blocks of the last two steps.",
        "free",
    )
    blimp_dir: str | None = setting(
        None,
        "Folder of BLiMP's *.jsonl: each evaluation scores the first 100 pairs of each paradigm too.",
        "free",
    )
    resume_despite_changes: bool = setting(
        False, "Resume from a checkpoint although data, batch, rate or the like have changed.", "start"
    )
    fill_mask_examples: list[str] | None = setting(None, "Sentences with <mask> to complete at the end.", "free")


def read_arguments(
    argv: list[str], description: str, cls: type = MlmArguments, own: tuple[type, ...] = ()
) -> tuple[list[Any], dict[str, Any]]:
    """The filled dataclasses `own` (a tool's), `cls`, `MlmTrainingArguments`, and the resolved values as a preset."""
    filled, resolved = parse([*own, cls, MlmTrainingArguments], argv, DEMONSTRATION, description, ALTERNATIVES)
    return filled, {**resolved, "bf16": filled[-1].bf16}


def check_text(args: MlmArguments) -> None:
    """Raise `InputError` for text and blocks that are not named, out of range, or exclude each other."""
    if args.shuffle_window > 1 and not args.token_cache:
        raise InputError(
            f"shuffle_window={args.shuffle_window}: blocks of several chunks (of about 8 MB of text) are permuted "
            "together from a token cache only; name one with --token_cache, or leave the window at 1. Former versions "
            "counted blocks: a window of up to 16,384 of them is now 1"
        )
    if args.max_seq_length < 8:
        raise InputError(f"max_seq_length={args.max_seq_length} leaves no room for a sentence; the paper has 512")
    if not 1 / args.max_seq_length <= args.mlm_probability < 1:
        raise InputError(
            f"mlm_probability={args.mlm_probability} must be below 1, and predict at least one of the "
            f"{args.max_seq_length} positions of a block; the paper has 0.15"
        )
    if (shares := args.mask_replace_prob + args.random_replace_prob) > 1 + 1e-9:
        raise InputError(
            f"mask_replace_prob={args.mask_replace_prob} and random_replace_prob={args.random_replace_prob} are "
            f"{shares:g} together, more than all predicted positions; the paper has 0.8 and 0.1"
        )
    if args.mask_count == "exact" and args.masking_unit in (*mask_units.LENGTHS, *phrases.UNITS):
        raise InputError(
            f"mask_count=exact goes with masking_unit=token or whole_word: {args.masking_unit} has a budget of "
            "positions"
        )
    check_objective(args)
    if not args.tokenizer_name:
        raise InputError("tokenizer_name is not set: name a folder made by tokenizer/train_tokenizer.py, or a Hub id")
    if args.validation_file and not args.train_file:
        raise InputError("validation_file goes with train_file; a corpus preset names its own (validation_files)")
    if args.language != "en" and not args.train_file:
        raise InputError(f"language={args.language} goes with train_file; a corpus preset names its own (language)")
    if not args.corpus and not args.train_file:
        raise InputError("nothing to train on: set corpus (a preset in presets/corpus) or train_file")
    limits = ("max_train_samples", "max_eval_samples", "max_train_minutes", "pad_vocab_to_multiple_of")
    for name in (*limits, "rewind_on_spike"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise InputError(f"{name}={getattr(args, name)} must be above 0; leave it out for no limit")


def formats_of(objective: str) -> list[str]:
    """The input formats that have a packer of their own for an objective."""
    return [packer.split()[0] for packer in PACKERS if packer.split()[1:] == [objective]]


def check_objective(args: MlmArguments) -> None:
    """Raise `InputError` for objectives that masks or blocks do not give."""
    named, table = args.objective, objectives.TABLE
    if unknown := set(named) - table.keys():
        raise InputError(f"objective {unknown.pop()!r} is none of {', '.join(table)}")
    if "mlm" not in named or len(set(named)) < len(named):
        raise InputError(f"objective={' '.join(named)!r}: name mlm, and what is beside it, once each")
    if len(packed := [name for name in named if formats_of(name)]) > 1:
        raise InputError(f"objectives {' and '.join(packed)} exclude each other: a block is packed for one of them")
    for name in named:
        for flag, able in {"masking_unit": table[name].masking_units, "input_format": formats_of(name)}.items():
            if able and (value := getattr(args, flag)) not in able:
                listed = " or ".join(able)
                raise InputError(f"objective {name} goes with {flag}={listed}, not {value} ({table[name].help})")


def packer_name(args: MlmArguments) -> str:
    """The name of `chunks.PACKERS`: that of the format for an objective; pairs follow each other without one."""
    names = [f"{args.input_format} {name}" for name in (*args.objective, "in_order")]
    return next((name for name in names if name in PACKERS), args.input_format)


def check_model(args: MlmArguments) -> None:
    """Raise `InputError` where no model is named, and for an `initialization` that cannot be read or that is not of
    fresh weights."""
    if not args.config_name and not args.model_name_or_path:
        raise InputError(
            "no model: set config_name for fresh weights, or model_name_or_path to continue from a checkpoint"
        )
    initialization.factors(args.initialization)
    if args.initialization and args.model_name_or_path:
        raise InputError(
            f"initialization={args.initialization} is of fresh weights, and model_name_or_path="
            f"{args.model_name_or_path} names weights: leave --initialization out, or name --config_name in its place"
        )


def check_cooldown(args: MlmArguments, training_args: MlmTrainingArguments) -> None:
    """Raise `InputError` for a cool-down that is no share of a time limit, or that another schedule precedes."""
    if (share := args.cooldown_share) is None:
        return
    schedule, constant = training_args.lr_scheduler_type, SchedulerType.CONSTANT_WITH_WARMUP
    if not (0 < share < 1 and args.max_train_minutes and schedule is constant):
        raise InputError(
            f"cooldown_share={share} with max_train_minutes={args.max_train_minutes} and lr_scheduler_type="
            f"{schedule.value}: it must be above 0 and below 1, with --max_train_minutes MINUTES and "
            f"--lr_scheduler_type {constant.value}"
        )


def check_training(training_args: MlmTrainingArguments) -> None:
    """Raise `InputError` for values out of range, and for a launcher that contradicts the preset."""
    if not training_args.output_dir:
        raise InputError("output_dir is not set: name a folder for checkpoint, run record and plot")
    environment.check_launcher(training_args)
    environment.check_processes(training_args)
    environment.check_precision(training_args)
    optimizers.check(training_args)
    environment.check_machine(training_args)


def resolve(args: MlmArguments, training_args: MlmTrainingArguments) -> None:
    """`arguments.resolve` for the model. Raises `InputError` also where it cannot separate sequences in a row."""
    config = weights.config_of(args.config_name, args.config_overrides, args.model_name_or_path)
    arguments.resolve(args, training_args, config, unpads=True)
    if args.input_format in SHARED_ROWS:
        attention.check_shared_rows(config, training_args.attn_implementation, args.input_format)


def leave_threads_to_worker(args: MlmArguments, training_args: MlmTrainingArguments) -> None:
    """Before anything is tokenized: where a data worker will tokenize, do so here without threads, or the forked worker
    waits for them for ever."""
    if training_args.dataloader_num_workers and not args.token_cache:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


def data_seed(training_args: MlmTrainingArguments) -> int:
    """What order and masks are drawn from."""
    return training_args.seed if training_args.data_seed is None else training_args.data_seed


def read_corpus(args: MlmArguments) -> corpora.Corpus:
    """The corpus as named, not yet resolved: `train_file` where given, else the corpus preset."""
    if args.train_file:
        return corpora.corpus_of_files(args.train_file, args.validation_file, args.text_column, args.language)
    return corpora.read_corpus(args.corpus)


def text_reader(
    args: MlmArguments,
    corpus: corpora.Corpus,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    index_folder: str | None = None,
) -> TextReader:
    """The provider of chunks from text."""
    return TextReader(
        corpus,
        tokenizer,
        input_format=packer_name(args),
        max_seq_length=args.max_seq_length,
        seed=seed,
        shuffle_window=args.shuffle_window,
        phrases=phrases.Phrases(args.masking_unit, args.spacy_model) if args.masking_unit in phrases.UNITS else None,
        index_folder=index_folder,
    )


def cache_reader(args: MlmArguments, corpus: corpora.Corpus, seed: int) -> token_cache.TokenCache:
    """The provider of chunks from the complete token cache."""
    return token_cache.TokenCache(args.token_cache, corpus, seed=seed, shuffle_window=args.shuffle_window)


def build_readers(
    args: MlmArguments, training_args: MlmTrainingArguments, corpus: corpora.Corpus, tokenizer: PreTrainedTokenizerBase
) -> tuple[Reader, Reader]:
    """The providers of training and validation blocks: the token cache, which is completed first, or the text."""
    seeds = data_seed(training_args), masking.EVAL_SEED
    if not args.token_cache:
        index_folders = training_args.output_dir, None  # held-out text is read once
        return tuple(text_reader(args, corpus, tokenizer, *of) for of in zip(seeds, index_folders, strict=True))
    was_packed = token_cache.tokens_per_pass(args.token_cache) is not None
    token_cache.ensure(
        args.token_cache,
        text_reader(args, corpus, tokenizer, seeds[0]),
        num_proc=max(1, cpu_cores() // local_processes()),
        process=training_args.process_index,
        processes=training_args.world_size,
    )
    readers = tuple(cache_reader(args, corpus, seed) for seed in seeds)
    if not was_packed:
        announce_cache(args, training_args, readers[0])
    return readers


def announce_cache(args: MlmArguments, training_args: MlmTrainingArguments, cache: token_cache.TokenCache) -> None:
    """What a complete cache holds, what was split or left out on the way, and how often the run will read it."""
    of_split = {split: stream.count_table(cache, split).values() for split in ("train", "validation")}
    total = {split: {name: sum(row[name] for row in rows) for name in COUNTS} for split, rows in of_split.items()}
    held = "; ".join(
        f"{split} {counted(row['blocks'], 'block')}, {row['tokens']:,} tokens of "
        f"{counted(row['documents'], 'document')}"
        for split, row in total.items()
    )
    lines = [f"Cache       {args.token_cache}: {held}"]
    if args.input_format in PAIRS:
        lines.append(f"Versions    {VERSIONS} of the training pairs, one a pass in turn; the counts are of the first")
    named = {
        "split_sentences": "sentences split, as they are longer than a block",
        "empty_documents": "documents without text",
        "bad_files": "files that broke off",
        "lost_rows": "rows that could not be read",
    }
    found = {words: total["train"][name] + total["validation"][name] for name, words in named.items()}
    told = "; ".join(f"{count:,} {words}" for words, count in found.items() if count)
    lines.append(f"Not whole   {told or 'nothing: no sentence was split, no row was lost'}")
    if args.global_batch_size:
        positions = training_args.max_steps * args.global_batch_size
        passes = ", ".join(f"{name} {count:,.2f}" for name, count in stream.consumed(cache, positions)[1].items())
        lines.append(
            f"Passes      in {counted(training_args.max_steps, 'step')} of {args.global_batch_size:,} blocks: {passes}"
        )
    logger.info("\n".join(lines))


def build_model(
    args: MlmArguments,
    training_args: MlmTrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    trained_for: Sequence[str] | None = None,
) -> masked_lm.PredictedPositions:
    """The model of `objective`, or of those it is `trained_for`, with fresh weights, or with those of a checkpoint;
    whole on every process, with the attention of `training_args` (`resolve`)."""
    environment.build_models_whole()
    set_seed(training_args.seed)
    model = masked_lm.build_model(
        tokenizer,
        config_name=args.config_name,
        config_overrides=args.config_overrides,
        model_name_or_path=args.model_name_or_path,
        max_seq_length=args.max_seq_length,
        pad_vocab_to_multiple_of=args.pad_vocab_to_multiple_of,
        objectives=objectives.named(trained_for or args.objective),
    )
    initialization.initialize(model, args.initialization)
    attention.set_up(model, training_args)
    return model


def build_collator(
    args: MlmArguments, training_args: MlmTrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> masking.MlmCollator:
    """Dynamic masks: another mask for each block and epoch."""
    return masking.MlmCollator(
        tokenizer,
        mlm_probability=args.mlm_probability,
        # one shape for a compiled encoder; its head gets a multiple of 512 positions
        pad_to_multiple_of=args.max_seq_length if training_args.torch_compile else 8,
        predicted_multiple=512 if training_args.torch_compile else 1,
        seed=data_seed(training_args),
        mask_count=args.mask_count,
        masking_unit=args.masking_unit,
        static_masks=args.static_masks,
        labels_of_mask=objectives.labels_of_mask(args.objective),
        mask_replace_prob=args.mask_replace_prob,
        random_replace_prob=args.random_replace_prob,
    )


def validation_blocks(args: MlmArguments, training_args: MlmTrainingArguments, reader: Reader) -> list[Block]:
    """Held-out blocks, drawn evenly and the same for every seed, in the proportions of the mixture as far as each
    source's text goes."""
    blocks = list(stream.validation_blocks(reader, args.max_eval_samples))
    if len(blocks) < training_args.per_device_eval_batch_size:
        raise InputError(
            f"validation has {counted(len(blocks), 'block')}, less than one batch of per_device_eval_batch_size="
            f"{training_args.per_device_eval_batch_size}; hold out more text (validation_share or validation_files of "
            f"the corpus, validation_file, max_eval_samples={args.max_eval_samples}) or lower the batch size"
        )
    for name in filter(formats_of, args.objective):
        objective = objectives.TABLE[name]
        if not any(np.any(block[objective.column] != masking.IGNORED) for block in blocks):
            raise InputError(
                f"objective {name}: none of the {len(blocks)} validation blocks has a label for it; it needs "
                f"{objective.needs}. Hold out more (validation_share of the corpus), name files for it "
                "(validation_file, or validation_files of the corpus), or join small files"
            )
    return blocks


def skipped_blocks(
    args: MlmArguments, training_args: MlmTrainingArguments, resumed: dict[str, Any] | None
) -> order.Skipped:
    """The positions that this run leaves out: of its checkpoint, of its loss spikes, of `skip_blocks`. Raises
    `InputError` where some of the last were trained on before the checkpoint."""
    before = order.union(range(*part) for part in (resumed or {}).get("skipped_blocks", []))
    position, named = (resumed or {}).get("position", 0), order.read_ranges(args.skip_blocks or [])
    if consumed := [part for part in named if part.start < position and order.union([*before, part]) != before]:
        raise InputError(
            f"skip_blocks: blocks {order.in_words(consumed)} are before block {position:,}, where the run is resumed: "
            "move the checkpoints away that were written after them"
        )
    # where the data have changed, positions of spikes are those of other blocks
    since_spikes = [] if (resumed or {}).get("data_changed") else stopping.read_skipped(training_args.output_dir)
    return order.union([*before, *named, *since_spikes])


def full_batch(args: MlmArguments, block: Block, collator: masking.MlmCollator, count: int) -> dict[str, torch.Tensor]:
    """What the model gets of `count` blocks like `block`, each repeated up to `max_seq_length` tokens, the last up to
    one less: a batch of whole sentences has an attention mask, and on a GPU attention takes more memory with one. Each
    has a mask of its own."""
    copies = []
    for number in range(count):
        size = args.max_seq_length - (number == count - 1)
        copy = {name: np.resize(v, size) if isinstance(v, np.ndarray) else v for name, v in block.items()}
        copies.append(Block(copy, block.id + number))  # from which the mask is drawn
    return collator(copies)


def check_shared_memory(
    args: MlmArguments, training_args: MlmTrainingArguments, block: Block, collator: masking.MlmCollator
) -> None:
    """Raise `InputError` where /dev/shm (64 MB in a Docker container) has no room for the steps, of full blocks like
    `block`, that data workers prefetch."""
    workers, prefetch = training_args.dataloader_num_workers, training_args.dataloader_prefetch_factor or 2  # torch's
    if not workers or not os.path.isdir(folder := "/dev/shm"):
        return
    columns, _ = data_loading.packed([full_batch(args, block, collator, 16)])
    steps = workers * prefetch + 1  # and the one that the trainer unpacks
    blocks = args.global_batch_size // training_args.world_size * local_processes() * steps
    needed = sum(column.nbytes for column in columns.values()) * blocks // 16
    if needed > (free := shutil.disk_usage(folder).free):
        raise InputError(
            f"data workers prefetch {needed / 1e6:,.0f} MB of batches into {folder}, where only {free / 1e6:,.0f} MB "
            f"are free: enlarge it (docker run --shm-size={needed // 10**9 + 1}g), or lower "
            f"dataloader_num_workers={workers} or dataloader_prefetch_factor={prefetch}"
        )


def mask_validation(
    args: MlmArguments,
    corpus: corpora.Corpus,
    blocks: list[Block],
    tokenizer: PreTrainedTokenizerBase,
) -> list[dict[str, Any]]:
    """`blocks` with masks drawn once. Raises `InputError` where nothing of them is predicted, and warns of a source of
    which nothing is."""
    examples = masking.fixed_masks(blocks, tokenizer, labels_of_mask=objectives.labels_of_mask(args.objective))
    if not masking.predicts(examples):
        raise InputError(
            f"none of the positions of {len(blocks)} validation blocks is among the {masking.EVAL_PROBABILITY:.0%} "
            "that are predicted: hold out more text, or raise max_eval_samples"
        )
    of_source = [order.place_of(block.id)[0] for block in blocks]
    for number, source in enumerate(corpus.sources):
        own = [example for example, its in zip(examples, of_source, strict=True) if its == number]
        cut = len(blocks) == args.max_eval_samples
        if (own or cut) and not masking.predicts(own):  # a source without held-out text was said before
            logger.warning(
                f"source {source.name!r}: nothing is predicted in its {len(own)} validation blocks, so it is not "
                f"measured; hold out more of it, or raise max_eval_samples={args.max_eval_samples}"
            )
    return examples


def saving_in_words(training_args: MlmTrainingArguments) -> str:
    """When a run that nobody ends saves what it can be resumed from."""
    if training_args.save_strategy == "no":
        return "none before the end, unless it is told to stop (--save_strategy steps --save_steps N)"
    every, limit = training_args.save_steps, training_args.save_total_limit
    return f"every {counted(every, 'step') if every >= 1 else f'{every:.1%} of the run'}" + (
        f", the last {limit} are kept" if limit else ""
    )


def print_validation(metrics: dict[str, float], entropy: float, by_source: dict[str, SourceMetrics]) -> None:
    """The loss on the held-out text, with its standard error over documents, beside its unigram entropy (nats); and the
    loss of each source."""
    loss, error = metrics["eval_loss"], metrics.get("eval_loss_error")
    shown = f"masked perplexity at {masking.EVAL_PROBABILITY:.0%} "
    decimals, side = decimals_of(error), "below" if loss < entropy else "ABOVE"
    print(
        f"\nvalidation loss {with_error(loss, error)} nats "
        f"({shown}{perplexity_with_error(metrics['eval_perplexity'], error)}, "
        f"{metrics['eval_bits']:.{decimals}f} bits; {counted(metrics['eval_documents'], 'document')}), "
        f"{abs(entropy - loss):.{decimals}f} {side} the unigram entropy of {entropy:.3f}"
    )
    if "eval_blimp" in metrics:
        print(f"BLiMP {metrics['eval_blimp']:.1%}, mean over paradigms (chance is near 50%; make blimp has a control)")
    for name, source in by_source.items():
        error = source["loss_error"]
        print(
            f"    {name:<16} {with_error(source['loss'], error)} nats, "
            f"{shown}{perplexity_with_error(source['perplexity'], error)}; unigram entropy of its own text "
            f"{source['unigram_entropy']:.3f}; {counted(source['blocks'], 'block')} in "
            f"{counted(source['documents'], 'document')}, {source['tokens']:,} tokens"
        )


def data_fingerprint(training_args: MlmTrainingArguments, reader: Reader) -> dict[str, Any]:
    """What the blocks and their order depend on, beside flags."""
    return {
        **reader.fingerprint(),
        "shares": [round(share, 6) for share in reader.corpus.shares],
        "data_seed": data_seed(training_args),
    }


def run_fingerprint(
    args: MlmArguments,
    training_args: MlmTrainingArguments,
    model: masked_lm.PredictedPositions,
    tokenizer: PreTrainedTokenizerBase,
    reader: Reader,
) -> tuple[dict[str, Any], set[str]]:
    """What must not change between two starts of a run, for it to be the same run; and the names in it that the
    positions of the blocks depend on."""
    data = data_fingerprint(training_args, reader)
    # what counts is the content of the config and of the weights, not where the files are
    config = {**model.config.to_dict(), "transformers_version": None, "_name_or_path": None}
    fixed = {
        **flags.fixed_values(args),
        **flags.fixed_values(training_args),
        "objectives": list(model.objectives),
        **({"mask_revision": mask_units.REVISION} if args.masking_unit in mask_units.LENGTHS else {}),
        "tokenizer_files": tokenization.files_fingerprint(tokenizer),
        "model": durable.fingerprint(config),
        "start_weights": checkpoint.hash_of(dict(model.named_parameters())) if args.model_name_or_path else "fresh",
    }
    own = {name for name, flag in flags.flags_of(type(args)).items() if flag.resume == "data"}
    return {**fixed, **data}, own | set(data)
