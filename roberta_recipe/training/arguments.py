"""Command-line arguments: `TrainingArguments` with RoBERTa's values (paper, Tables 9 and 10) and resume scopes, and the
further flags of pretraining and fine-tuning."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from transformers import PreTrainedConfig, TrainingArguments
from transformers.trainer_utils import SchedulerType

from roberta_recipe import hardware
from roberta_recipe.data import MaskingUnit
from roberta_recipe.errors import InputError
from roberta_recipe.log import counted
from roberta_recipe.model import architectures, attention, objectives
from roberta_recipe.settings import Flag, Pairs, setting
from roberta_recipe.training import batch, optimizers

# Every flag of transformers 5.23's `TrainingArguments`, by the arguments of its `Flag`
_FLAGS: dict[tuple, str] = {
    # flags that change the weights
    ("fixed", True): """learning_rate lr_scheduler_type warmup_steps max_steps num_train_epochs optim adam_beta1
        adam_beta2 adam_epsilon weight_decay max_grad_norm optim_args bf16 fp16 seed""",
    ("fixed",): "lr_scheduler_kwargs data_seed tf32 neftune_noise_alpha label_smoothing_factor",
    # the split of a step over devices and micro-batches, and the kernels that compute it
    ("layout",): """per_device_train_batch_size gradient_accumulation_steps per_device_eval_batch_size use_cpu
        activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
        torch_compile torch_compile_backend torch_compile_mode full_determinism deepspeed ddp_find_unused_parameters
        ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend""",
    # data loading, logging, saving, evaluation; at the end the flags of `_DONE_HERE`, then those of fine-tuning alone
    ("free",): """output_dir torch_empty_cache_steps ddp_timeout dataloader_num_workers dataloader_pin_memory
        dataloader_prefetch_factor dataloader_persistent_workers length_column_name logging_strategy logging_steps
        logging_first_step log_on_each_node log_level log_level_replica disable_tqdm report_to run_name project
        trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay
        prediction_loss_only eval_on_start eval_use_gather_object eval_accumulation_steps include_for_metrics
        batch_eval_metrics save_strategy save_steps save_total_limit skip_memory_metrics do_train do_eval do_predict
        include_num_input_tokens_seen enable_jit_checkpoint dataloader_drop_last
        load_best_model_at_end metric_for_best_model greater_is_better""",
    ("start",): """resume_from_checkpoint local_rank push_to_hub hub_token hub_private_repo hub_model_id hub_strategy
        hub_always_push hub_revision""",
}
# "locked": other values would repeat work of this recipe, or write checkpoints that cannot be resumed
_LOCKED = {
    "the loss is normalised over all processes": ("average_tokens_across_devices",),
    "Trainer would shrink the global batch; lower per_device_train_batch_size instead": ("auto_find_batch_size",),
    "evaluation has the precision of training": ("bf16_full_eval", "fp16_full_eval"),
    "Liger has kernels for decoders, and silently none for an encoder": ("use_liger_kernel", "liger_kernel_config"),
    "a loss that is not finite ends the run anyway, and Trainer's detection of it fails on masks": ("debug",),
    "an encoder has no key-value cache, and config.json would publish the value": ("use_cache",),
    "no optimizer or loss of this recipe reads it": ("optim_target_modules", "label_names"),
    "a loss that is not finite must not be logged as 0": ("logging_nan_inf_filter",),
    "a checkpoint without optimizer, schedule and random state would resume as another run; the output folder has the "
    "model alone": ("save_only_model",),
    "only rank 0 writes the checkpoint": ("save_on_each_node",),
    "no callback of this recipe has a state that Trainer restores": ("restore_callback_states_from_checkpoint",),
    "it can change the batch, and count validation examples twice": ("accelerator_config",),
    "each process has the whole model, unless DeepSpeed shards it": ("parallelism_config", "fsdp", "fsdp_config"),
    "the order of the examples is a function of the seed": ("dataloader_in_order", "train_sampling_strategy"),
    "it fails where gradients are accumulated": ("ddp_static_graph",),
    "data workers are forked": ("dataloader_multiprocessing_context",),
    "collators need columns that the model does not take": ("remove_unused_columns",),
    "no evaluation of this recipe reads it": ("eval_do_concat_batches",),
    "a resumed run takes the examples after the checkpoint's": ("ignore_data_skip",),
}
_LAST_STEP = "pretraining keeps its last step, after the learning rate's decay; earlier checkpoints stay"
TRAINER_FLAGS: dict[str, Flag] = {
    **{name: Flag(*declared) for declared, names in _FLAGS.items() for name in names.split()},
    **{name: Flag("locked", because=reason) for reason, names in _LOCKED.items() for name in names},
}
# done by this recipe: SIGTERM saves the step; tokens are counted without a synchronization per micro-batch; training
# batches are always full (dataloader_drop_last would shorten evaluation)
_DONE_HERE = {"enable_jit_checkpoint": False, "include_num_input_tokens_seen": "no", "dataloader_drop_last": False}


@dataclass
class RecipeTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the defaults of the paper and of fairseq where Trainer's would be wrong."""

    _argument_group_name = "TrainingArguments with defaults of this recipe"
    inherited_flags: ClassVar[dict[str, Flag]] = TRAINER_FLAGS
    alternatives: ClassVar[Pairs] = (("bf16", "fp16"),)

    attn_implementation: str | None = setting(
        None,
        "sdpa, eager, blockwise (for CPUs) or varlen (unpadded, pretraining on CUDA); default: the fastest for device, "
        "precision and dropout (benchmarks/attention.py).",
        "fixed",
    )
    bf16: bool | None = setting(None, "Train in bf16; default: if the device supports it and fp16 is not set.")
    optim: Literal[tuple(optimizers.TABLE)] = setting(
        "adamw_torch_fused", " ".join(f"{name}: {optimizers.TABLE[name].help}." for name in optimizers.custom_names())
    )
    optim_args: str | None = setting(None, "name=value,name=value: further arguments of the optimizer.")
    lr_scheduler_type: SchedulerType | str = setting("linear", "Any schedule but reduce_lr_on_plateau and greedy.")
    adam_beta2: float = setting(0.98, "Table 9, and fairseq's fine-tuning; Trainer has 0.999.")
    adam_epsilon: float = setting(1e-6, "Table 9, and fairseq's fine-tuning; Trainer has 1e-8.")
    max_grad_norm: float = setting(0.0, "Table 9, and fairseq's fine-tuning: no clipping; Trainer has 1.0.")
    logging_first_step: bool = setting(True, "Log the first step.")
    logging_nan_inf_filter: bool = setting(False, "Trainer would log a loss of 0.0 after a NaN.")
    remove_unused_columns: bool = setting(False, "Collators need columns that the model does not take.")

    def __post_init__(self):
        if self.hub_token:
            raise InputError("hub_token would be visible in process lists: run hf auth login, or set HF_TOKEN")
        if self.do_eval and not self.do_train:
            raise InputError("do_eval without do_train: this script trains; tools/evaluate.py evaluates a checkpoint")
        self.picks_bf16 = self.bf16 is None and not self.fp16
        if self.bf16 is None:
            self.bf16 = not self.fp16 and hardware.has_bf16(self.use_cpu)
        if (self.bf16 and not torch.cuda.is_available()) or torch.backends.mps.is_available():
            self.use_cpu = True  # TrainingArguments refuses bf16 on a CPU without it; Apple's GPU has no float64
        optim = self.optim
        if optim in optimizers.custom_names():  # Trainer does not know them
            self.optim = "adamw_torch"
        super().__post_init__()
        self.optim = optim if optim in optimizers.custom_names() else self.optim
        # Trainer would push before the checkpoint is complete, with a pickle of the arguments, token and all
        self.publishes, self.push_to_hub = self.push_to_hub, False
        vars(self).update(_DONE_HERE)
        self.logging_first_step &= self.logging_strategy != "no"
        if self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
            raise InputError(f"lr_scheduler_type={self.lr_scheduler_type.value} needs evaluations; use linear, ...")
        if self.per_device_eval_batch_size < 1:
            raise InputError(f"per_device_eval_batch_size={self.per_device_eval_batch_size} must be at least 1")
        if not (self.gradient_checkpointing_kwargs or {}).get("preserve_rng_state", True):
            raise InputError(
                "activation_checkpointing_kwargs: preserve_rng_state must stay true, or the second forward pass draws "
                "another dropout and the gradient is wrong"
            )


def derive(
    args: Any,
    training_args: RecipeTrainingArguments,
    config: PreTrainedConfig,
    micro_batch: int | None = None,
    can_unpad: bool = False,
) -> None:
    """Set the derived arguments: global batch, micro-batch (`micro_batch`, default: the flag, or less with many
    processes), accumulation, attention of a model of `config` (`can_unpad`: its class supports unpadded batches).
    Called right after parsing; later only `derive_steps` assigns to argument objects. Raises `InputError`."""
    layout = training_args.per_device_train_batch_size, training_args.world_size
    training_args.per_device_train_batch_size = micro_batch or batch.shared_micro_batch(args.global_batch_size, *layout)
    args.global_batch_size, accumulation = batch.derive_batch(training_args, args.global_batch_size)
    training_args.gradient_accumulation_steps = accumulation
    architectures.check_checkpointing(config, training_args)
    training_args.attn_implementation = attention.choose(config, training_args, can_unpad)


def derive_steps(training_args: RecipeTrainingArguments, blocks: int, global_batch_size: int) -> None:
    """Set `max_steps` from `num_train_epochs` passes over `blocks` blocks. Raises `InputError` for less than two steps:
    with warm-up, the learning rate of the first is 0."""
    epochs = training_args.num_train_epochs
    training_args.max_steps = math.ceil(epochs * blocks / global_batch_size)
    if training_args.max_steps < 2:
        raise InputError(
            f"num_train_epochs={epochs:g} over {counted(blocks, 'block')} is one step of global_batch_size="
            f"{global_batch_size}: lower the batch, or --num_train_epochs {global_batch_size // blocks + 1}"
        )
    optimizers.check_length(training_args, training_args.max_steps)


@dataclass
class MlmTrainingArguments(RecipeTrainingArguments):
    """Training arguments of pretraining (paper, Table 9): `max_steps` steps over an endless stream of blocks."""

    inherited_flags: ClassVar[dict[str, Flag]] = {
        **TRAINER_FLAGS,
        "label_smoothing_factor": Flag("locked", because="perplexity is exp of the plain loss; for fine-tuning only"),
        "load_best_model_at_end": Flag("locked", because=_LAST_STEP),
        "metric_for_best_model": Flag("locked", because=_LAST_STEP),
        "greater_is_better": Flag("locked", because=_LAST_STEP),
    }

    replaces: ClassVar[Pairs] = (("num_train_epochs", "max_steps"), ("max_steps", "num_train_epochs"))

    # "start": it becomes `max_steps` (`derive_steps`), which is in fingerprint and preset
    num_train_epochs: float = setting(
        0.0,
        "Passes over the text, in place of max_steps. Without a token cache, the text is packed once more, to count.",
        "start",
    )
    weight_decay: float = setting(0.01, "Table 9; Trainer has 0. None for biases and LayerNorm (fairseq: all).")
    eval_strategy: Literal["no", "steps"] = setting("no", "The stream of blocks has no epochs.")
    save_strategy: Literal["no", "steps"] = setting("steps", "The stream of blocks has no epochs.")
    ddp_find_unused_parameters: bool | None = setting(False, "True if no step uses some weights (Longformer).")
    ignore_data_skip: bool = setting(True, "A resumed run starts reading at the checkpoint's position.")
    accelerator_config: dict | str | None = setting(
        {"dispatch_batches": False, "even_batches": False},
        "Each process reads its own share, and no validation block is counted twice.",
    )

    def __post_init__(self):
        self.dataloader_persistent_workers = False  # training makes one pass, and evaluation has its own workers
        super().__post_init__()
        if (self.max_steps > 0) == (self.num_train_epochs > 0):
            raise InputError(
                f"max_steps={self.max_steps}, num_train_epochs={self.num_train_epochs:g}: set one of them, above 0"
            )


@dataclass
class TextArguments:
    """Flags for training and validation text."""

    _argument_group_name = "text"

    corpus: str | None = setting(None, "Corpus preset (presets/corpus/*.yaml).", "content")
    train_file: list[str] | None = setting(
        None, "Text, JSONL, Parquet or Arrow to train on, in place of `corpus`: files, folders or globs.", "content"
    )
    validation_file: list[str] | None = setting(
        None, "Held-out text for `train_file`; default: 1%% of its documents.", "content"
    )
    text_column: str = setting("text", "Text column of `train_file` and `validation_file`.", "content")
    language: str = setting("en", "Language of `train_file`, for the sentence splitter and the model card.", "content")
    token_cache: str | None = setting(
        None,
        "Folder of the packed corpus: built if incomplete, then read in place of the text. Formats of pairs are packed "
        "in ten versions, for ten passes: ten times the disk and the packing time.",
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
        "Blocks to leave out, by the positions that log lines and errors print (41000-41063, "
        "inclusive). A resumed run keeps leaving them out.",
        "free",
    )
    max_train_samples: int | None = setting(None, "Train on this many blocks only, repeatedly.", "data")
    max_eval_samples: int | None = setting(None, "Validate on at most this many blocks, evenly spaced.", "free")


@dataclass
class BlockArguments:
    """Flags for packing text into blocks, and masking."""

    _argument_group_name = "blocks and masks"

    tokenizer_name: str | None = setting(
        None, "Tokenizer folder or Hub id; default: the checkpoint's, else one is trained on the text.", "content"
    )
    input_format: Literal[
        "full_sentences", "doc_sentences", "segment_pair", "segment_pair_short", "sentence_pair", "contiguous"
    ] = setting(
        "full_sentences",
        "Whole sentences across documents or of one document, pairs of segments (short: a tenth of them shorter, as in "
        "BERT) or of sentences (paper, section 4.2); or chunks of fixed size.",
        "data",
        shown=True,
    )
    objective: list[str] = setting(
        ["mlm"],
        "mlm, and optionally: "
        + ", ".join(f"{name} ({objectives.TABLE[name].help})" for name in objectives.TABLE if name != "mlm"),
        "fixed",
        shown=True,
    )
    max_seq_length: int = setting(512, "Tokens in a block, <s> and </s> included.", "data", shown=True)
    mlm_probability: float = setting(0.15, "Share of positions that are predicted.", "fixed", shown=True)
    mask_count: Literal["bernoulli", "exact"] = setting(
        "bernoulli",
        "Each position independently (Hugging Face), or an exact number per block (fairseq).",
        "fixed",
        True,
    )
    masking_unit: MaskingUnit = setting(
        "token",
        "Unit of masking: tokens, whole words, SpanBERT's spans or ALBERT's n-grams of whole words; entity and "
        "noun_phrase: half are phrases found by spaCy, half are words.",
        "fixed",
        shown=True,
    )
    spacy_model: str = setting(
        "en_core_web_lg", "spaCy model for named entities and noun phrases, a package or a folder.", "data"
    )
    static_masks: int = setting(
        0, "Masks per block, reused in turn over the passes (BERT: 10); 0: a new mask each pass.", "fixed", True
    )
    mask_replace_prob: float = setting(0.8, "Share of predicted positions that show <mask>.", "fixed", shown=True)
    random_replace_prob: float = setting(
        0.1, "Share of predicted positions with a random token; rest unchanged (BabyBERTa: none).", "fixed", shown=True
    )


@dataclass
class ModelArguments:
    """Flags for the model."""

    _argument_group_name = "model"

    model_size: Literal["tiny", "mini", "small", "base", "large"] | None = setting(
        None,
        "Fresh weights without --config: the preset roberta_SIZE.yaml, except its text, tokenizer and output folder; "
        "default: mini.",
        "start",
    )
    config_name: str | None = setting(None, "Config for fresh weights: a JSON file, folder or Hub id.", "content")
    config_overrides: str | None = setting(
        None, "Changes to config_name: embedding_size=128,shared_parameters=attention.", "content"
    )
    model_name_or_path: str | None = setting(None, "Checkpoint to start from, in place of `config_name`.", "content")
    pad_vocab_to_multiple_of: int | None = setting(
        None, "Pad the embedding (never the tokenizer) to a multiple of this.", "content"
    )
    # None, not "normal": fingerprints of older checkpoints lack this flag
    initialization: str | None = setting(
        None,
        "Fresh weights: normal (default) or mimetic (arXiv 2305.09828), with other factors by "
        "mimetic,positions=2,query_key=0.7,value_output=0.5; unigram_bias=1 starts either from token frequencies.",
        "fixed",
        shown=True,
    )


@dataclass
class MlmArguments(ModelArguments, BlockArguments, TextArguments):  # a dataclass has the fields of its last base first
    """The flags of pretraining in addition to `TrainingArguments`."""

    _argument_group_name = "run"
    alternatives: ClassVar[Pairs] = (
        ("corpus", "train_file"),
        ("corpus", "validation_file"),
        ("config_name", "model_name_or_path"),
        ("config_overrides", "model_name_or_path"),
        ("initialization", "model_name_or_path"),
    )
    replaces: ClassVar[Pairs] = (
        ("model_name_or_path", "tokenizer_name"),
        ("corpus", "text_column"),
        ("corpus", "language"),
    )

    global_batch_size: int | None = setting(
        None, "Sequences per optimizer step; gradient accumulation is derived from it.", "fixed", shown=True
    )
    max_train_minutes: float | None = setting(
        None, "Time limit: save, evaluate and end; the same command continues for the same time.", "free"
    )
    # "fixed", unlike the time limit: it changes the learning rate
    cooldown_share: float | None = setting(
        None,
        "Last share of max_train_minutes, in which the learning rate falls linearly to 0, by wall-clock time: such "
        "a run does not resume bit for bit. With lr_scheduler_type=constant_with_warmup.",
        "fixed",
        shown=True,
    )
    rewind_on_spike: float | None = setting(
        None,
        "End with exit code 65 if a step's loss is not finite, or more than this many standard deviations above the "
        "mean of the last 128 steps (OLMo-core: 6). The next start, by hand or by --max_restarts, leaves out the "
        "blocks of the last two steps.",
        "free",
    )
    blimp_dir: str | None = setting(
        None, "Folder of BLiMP's *.jsonl: each evaluation scores the first 100 pairs of each paradigm too.", "free"
    )
    resume_despite_changes: bool = setting(False, "Resume although data, batch or learning rate changed.", "start")
    fill_mask_examples: list[str] | None = setting(None, "Sentences with <mask> to complete at the end.", "free")


@dataclass
class FinetuneTrainingArguments(RecipeTrainingArguments):
    """Training arguments of fine-tuning (paper, Table 10); evaluation is part of the run: it picks the best epoch."""

    inherited_flags: ClassVar[dict[str, Flag]] = {
        **TRAINER_FLAGS,
        "eval_strategy": Flag("fixed"),
        "eval_steps": Flag("fixed", shown=True),
        "eval_on_start": Flag("locked", because="the step from which a run resumes would be evaluated too"),
        "eval_delay": Flag("locked", because="the best epoch is picked among all epochs"),
        "label_smoothing_factor": Flag("fixed", shown=True),
        "resume_from_checkpoint": Flag("locked", because="it belongs to one seed; the same command resumes every seed"),
    }
    replaces: ClassVar[Pairs] = (("num_train_epochs", "max_steps"),)

    weight_decay: float = setting(0.1, "Table 10; Trainer has 0.")
    eval_strategy: Literal["epoch", "steps"] = setting("epoch", "The best epoch is kept.")
    save_strategy: Literal["no", "epoch", "steps"] = setting(
        "no", "Checkpoints to resume from, for long tasks; the best epoch is kept anyway."
    )
    # None, not 0: fingerprints of older runs lack this flag
    label_smoothing_factor: float | None = setting(None, "Classification: target mass spread over all classes.")
    data_seed: int | None = setting(None, "Seed of the order of the examples; default: each run's seed.")

    def __post_init__(self):
        self.load_best_model_at_end = False  # the trainer keeps it; Trainer would look for a checkpoint of it
        self.dataloader_persistent_workers &= self.dataloader_num_workers > 0
        super().__post_init__()


@dataclass
class FinetuneArguments:
    """The common flags of the fine-tuning scripts in addition to `TrainingArguments`."""

    _argument_group_name = "recipe"

    model_name_or_path: str | None = setting(None, "Checkpoint to start from, a folder or a Hub id.", "fixed")
    tokenizer_name: str | None = setting(None, "Tokenizer folder or Hub id; default: the checkpoint's.", "content")
    max_seq_length: int = setting(512, "Maximum input length in tokens.", "fixed", shown=True)
    head_dropout: float | None = setting(None, "Dropout of the head; default: the checkpoint's.", "fixed", shown=True)
    layer_decay: float = setting(
        1.0, "Learning rate of a layer / that of the layer above it (ELECTRA, appendix B).", "fixed", shown=True
    )
    global_batch_size: int | None = setting(
        None, "Examples (SQuAD: windows) per optimizer step; gradient accumulation is derived.", "fixed", shown=True
    )
    seeds: list[int] = setting([1, 2, 3, 4, 5], "Seeds, one run each.", "free")
    random_weights: bool = setting(False, "Fine-tune the architecture from fresh weights.", "fixed", shown=True)
    max_train_samples: int | None = setting(None, "Train on the first N examples only.", "fixed", shown=True)
    keep: Literal["best", "all", "none"] = setting("best", "Which runs keep weights on disk.", "free")
