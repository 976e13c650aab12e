"""`TrainingArguments` with RoBERTa's values (paper, Tables 9 and 10), and what each flag of it means for a run that is
started again."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from transformers import PreTrainedConfig, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType

from roberta_recipe import hardware
from roberta_recipe.args import Flag, setting
from roberta_recipe.errors import InputError
from roberta_recipe.model import architectures, attention
from roberta_recipe.training import batch, optimizers

# Every flag of transformers 5.23's `TrainingArguments`, by what it means for a run that is started again (`Flag`).
# "fixed": they change what is computed
_OPTIMIZATION = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs", "optim", "adam_beta1"),
    *("adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "optim_args", "bf16", "fp16", "seed"),
)
_ALSO_FIXED = (
    *("lr_scheduler_kwargs", "optim_target_modules", "data_seed", "tf32", "neftune_noise_alpha"),
    *("label_names", "label_smoothing_factor"),
)
# "layout": how the same step is spread out and which kernels compute it
_LAYOUT = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size", "use_cpu"),
    *("activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing"),
    *("gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
    *("full_determinism", "deepspeed", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
    *("ddp_static_graph", "ddp_backend"),
)
# "free": reading, logging, saving, evaluation; not a bit of the weights depends on them
_FREE = (
    *("output_dir", "auto_find_batch_size", "torch_empty_cache_steps", "ddp_timeout", "dataloader_num_workers"),
    *("dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers", "length_column_name"),
    *("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "log_level"),
    *("log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id"),
    *("trackio_bucket_id", "trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay"),
    *("prediction_loss_only", "eval_on_start", "eval_use_gather_object", "eval_accumulation_steps"),
    *("include_for_metrics", "batch_eval_metrics", "save_strategy", "save_steps", "save_total_limit"),
    *("skip_memory_metrics", "do_train", "do_eval", "do_predict"),
    # what is so in any case (`_ALREADY`)
    *("include_num_input_tokens_seen", "enable_jit_checkpoint", "dataloader_drop_last"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),  # of fine-tuning
)
_START = (
    *("resume_from_checkpoint", "local_rank", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id"),
    *("hub_strategy", "hub_always_push", "hub_revision"),
)
# "kept": Trainer would do in silence what is done here already, or leave a checkpoint that cannot be resumed
_SHARDED = "a model is whole on every process here, or sharded by DeepSpeed (ds_configs/accelerate)"
_ONE_PRECISION = "evaluation has the precision of training"
_OWN_ORDER = "the order of the examples is a function of the seed here"
_NO_BEST = "pretraining keeps its last step, behind the decay of the rate; the checkpoints before it stay"
_NO_LIGER = "Liger's kernels are of decoders, and of an encoder it would change nothing without a word"
_KEPT = {
    "average_tokens_across_devices": "the batch is that of all processes",
    "bf16_full_eval": _ONE_PRECISION,
    "fp16_full_eval": _ONE_PRECISION,
    "use_liger_kernel": _NO_LIGER,
    "liger_kernel_config": _NO_LIGER,
    "debug": "what is not finite ends a run already, and Trainer's search for it fails on masks",
    "use_cache": "an encoder has no cache, and the value would be published in config.json",
    "logging_nan_inf_filter": "a loss that is not finite is never logged as 0",
    "save_only_model": "a checkpoint without optimizer, schedule and random state would resume as another run; the "
    "model alone is in the output folder at the end",
    "save_on_each_node": "a checkpoint is written once, by the first process",
    "restore_callback_states_from_checkpoint": "a checkpoint that SIGTERM asked for would stop the run again",
    "accelerator_config": "it can change the batch and count validation examples twice",
    "parallelism_config": _SHARDED,
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "dataloader_in_order": _OWN_ORDER,
    "dataloader_multiprocessing_context": "data workers are forked",
    "remove_unused_columns": "collators need columns that the model does not take",
    "train_sampling_strategy": _OWN_ORDER,
    "eval_do_concat_batches": "scores are taken in the order of the examples",
    "ignore_data_skip": "a resumed run takes the examples after the checkpoint's",
}
TRAINER_FLAGS: dict[str, Flag] = {
    **{name: Flag("fixed", shown=True) for name in _OPTIMIZATION},
    **{name: Flag("fixed") for name in _ALSO_FIXED},
    **{name: Flag("layout") for name in _LAYOUT},
    **{name: Flag("free") for name in _FREE},
    **{name: Flag("start") for name in _START},
    **{name: Flag("kept", because=reason) for name, reason in _KEPT.items()},
}


# what is done already, and Trainer would do again: SIGTERM saves the step, tokens are counted without padding
# (tokens_seen), a training batch is always whole (and this would cut evaluation too)
_ALREADY = {"enable_jit_checkpoint": False, "include_num_input_tokens_seen": "no", "dataloader_drop_last": False}
_OF_BEST = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")


@dataclass
class RecipeTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the values of the paper and of fairseq where Trainer's own would be wrong."""

    _argument_group_name = "Hugging Face TrainingArguments, with defaults of our own"
    inherited_flags: ClassVar[dict[str, Flag]] = TRAINER_FLAGS
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("bf16", "fp16"),)

    attn_implementation: str | None = setting(
        None,
        "How attention is computed: sdpa, eager, blockwise (for CPUs), varlen (unpadded, for pretraining on CUDA); "
        "without it, what is fastest for device, precision and dropout (benchmarks/attention.py).",
        "fixed",
    )
    bf16: bool | None = setting(
        None, "Train in bf16; without it, where the GPU or the processor has bf16 and fp16 is not set."
    )
    optim: Literal[tuple(optimizers.TABLE)] = setting(
        "adamw_torch_fused",
        " ".join(f"{name}: {optimizers.TABLE[name].help}." for name in optimizers.own()),
    )
    optim_args: str | None = setting(None, "name=value,name=value: further arguments of the optimizer.")
    lr_scheduler_type: SchedulerType | str = setting(
        "linear", "Any but reduce_lr_on_plateau and greedy, which follow evaluations."
    )
    adam_beta2: float = setting(0.98, "Table 9, and fairseq's fine-tuning configuration; Trainer has 0.999.")
    adam_epsilon: float = setting(1e-6, "Table 9, and fairseq's fine-tuning configuration; Trainer has 1e-8.")
    max_grad_norm: float = setting(
        0.0, "Table 9, and fairseq's fine-tuning configuration: no clipping; Trainer has 1.0."
    )
    logging_first_step: bool = setting(True, "The first log line comes at once.")
    logging_nan_inf_filter: bool = setting(False, "Trainer would log a loss of 0.0 after a NaN.")
    remove_unused_columns: bool = setting(False, "Collators need columns that the model does not take.")

    def __post_init__(self):
        if self.hub_token:
            raise InputError(
                "hub_token would stand in process lists and in launchers' messages: leave it out, and run hf auth "
                "login or set HF_TOKEN"
            )
        if self.bf16 is None:  # in all processes and after every restart on this kind of machine alike
            self.bf16 = not self.fp16 and hardware.has_bf16(self.use_cpu)
        if self.bf16 and not torch.cuda.is_available():
            self.use_cpu = True  # which Trainer wants to be told
        named = self.optim
        if named in optimizers.own():  # which Trainer does not know
            self.optim = "adamw_torch"
        try:
            super().__post_init__()
        except ValueError:  # accelerate's, where a DeepSpeed file has another precision: `check_deepspeed` names all
            if not getattr(self, "deepspeed_plugin", None):
                raise
        if named in optimizers.own():
            self.optim = named
        # Trainer's own push comes before the checkpoint is whole, and holds a pickle of its arguments, token and all
        self.publishes, self.push_to_hub = self.push_to_hub, False
        vars(self).update(_ALREADY)
        if self.logging_strategy == "no":
            self.logging_first_step = False
        if self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
            raise InputError(
                f"lr_scheduler_type={self.lr_scheduler_type.value} follows evaluations; the rate here is a function of "
                "the step (linear, cosine, ...)"
            )
        if self.save_strategy == "best":
            raise InputError("save_strategy=best: which weights are kept is decided here; use steps, epoch or no")
        if self.per_device_eval_batch_size < 1:
            raise InputError(f"per_device_eval_batch_size={self.per_device_eval_batch_size} must be at least 1")
        if not (self.activation_checkpointing_kwargs or {}).get("preserve_rng_state", True):
            raise InputError(
                "activation_checkpointing_kwargs: preserve_rng_state must stay true; the second forward would draw "
                "another dropout than the first, and the gradient would be wrong"
            )


def resolve(
    args: Any,
    training_args: RecipeTrainingArguments,
    config: PreTrainedConfig,
    micro_batch: int | None = None,
    unpads: bool = False,
) -> None:
    """Fix what the flags leave open: the global batch, its split into micro-batches (of `micro_batch`, or as the flag
    says), and the attention of a model of `config`, for a class that `unpads` or not. Called right after the parse;
    nothing else assigns to argument objects. Raises `InputError`."""
    training_args.per_device_train_batch_size = micro_batch or training_args.per_device_train_batch_size
    args.global_batch_size, accumulation = batch.derive_batch(training_args, args.global_batch_size)
    training_args.gradient_accumulation_steps = accumulation
    architectures.check_checkpointing(config, training_args)
    training_args.attn_implementation = attention.choose(config, training_args, unpads)


@dataclass
class MlmTrainingArguments(RecipeTrainingArguments):
    """For pretraining (paper, Table 9): an endless stream of blocks, so that a run is as long as `max_steps`."""

    inherited_flags: ClassVar[dict[str, Flag]] = {
        **TRAINER_FLAGS,
        "num_train_epochs": Flag("kept", because="the stream of blocks has no end; set max_steps"),
        "label_smoothing_factor": Flag("kept", because="perplexity is of the plain loss; fine-tuning has it"),
        **{name: Flag("kept", because=_NO_BEST) for name in _OF_BEST},
    }

    weight_decay: float = setting(
        0.01, "Table 9; Trainer has 0. Biases and LayerNorm are not decayed (in fairseq they are)."
    )
    eval_strategy: IntervalStrategy | str = setting("no", "no or steps: the stream of blocks has no epochs.")
    save_strategy: SaveStrategy | str = setting("steps", "no or steps: the stream of blocks has no epochs.")
    prediction_loss_only: bool = setting(True, "Evaluation keeps no logits.")
    ddp_find_unused_parameters: bool | None = setting(
        False, "Every step uses every weight; Trainer would have DDP search for unused ones in each."
    )
    auto_find_batch_size: bool = setting(
        False, "Halve per_device_train_batch_size until a step fits into memory; accumulation makes up for it."
    )
    ignore_data_skip: bool = setting(True, "The data begin where the checkpoint left them; nothing is replayed.")
    accelerator_config: dict | str | None = setting(
        {"dispatch_batches": False, "even_batches": False},
        "Each process reads for itself, and no validation block is counted twice.",
    )

    def __post_init__(self):
        self.dataloader_persistent_workers = False  # of the one pass they stay; an evaluation has its own
        super().__post_init__()
        if self.max_steps <= 0:
            raise InputError(
                f"max_steps={self.max_steps}: the stream of blocks has no end, so set the number of optimizer steps"
            )
        for name in ("eval_strategy", "save_strategy"):
            if getattr(self, name) == "epoch":
                raise InputError(f"{name}=epoch: the stream of blocks has no end, so no epoch ends; use steps or no")


@dataclass
class FinetuneTrainingArguments(RecipeTrainingArguments):
    """For fine-tuning (paper, Table 10): evaluation picks the epoch that is kept, so it belongs to the run."""

    inherited_flags: ClassVar[dict[str, Flag]] = {
        **TRAINER_FLAGS,
        "eval_strategy": Flag("fixed"),
        "eval_steps": Flag("fixed", shown=True),
        "eval_on_start": Flag("kept", because="the step that a run is resumed at would be measured too"),
        "eval_delay": Flag("kept", because="the best epoch is picked among all"),
        "auto_find_batch_size": Flag("kept", because="lower per_device_train_batch_size; the global batch stays"),
        "label_smoothing_factor": Flag("fixed", shown=True),
    }
    replaces: ClassVar[tuple[tuple[str, str], ...]] = (("num_train_epochs", "max_steps"),)  # a preset's

    weight_decay: float = setting(0.1, "Table 10; Trainer has 0.")
    eval_strategy: str = setting("epoch", "The best epoch is kept.")
    save_strategy: str = setting("no", "Checkpoints to resume from, for long tasks; the best epoch is kept anyway.")
    # None and not 0: runs from before this flag have no value of it
    label_smoothing_factor: float | None = setting(
        None, "Classification: share of a target that is spread over all classes."
    )
    data_seed: int | None = setting(None, "What the order of the examples is drawn from; without it, each run's seed.")

    def __post_init__(self):
        self.load_best_model_at_end = False  # it is kept in any case; Trainer would look for a checkpoint of it
        self.dataloader_persistent_workers &= self.dataloader_num_workers > 0
        super().__post_init__()


@dataclass
class FinetuneArguments:
    """The flags of all three scripts beside those of `TrainingArguments`."""

    _argument_group_name = "recipe"

    model_name_or_path: str | None = setting(None, "Checkpoint to start from, a folder or a Hub id.", "fixed")
    tokenizer_name: str | None = setting(None, "Tokenizer folder or Hub id; without it, the checkpoint's.", "content")
    max_seq_length: int = setting(512, "Tokens the model sees at once.", "fixed", shown=True)
    head_dropout: float | None = setting(None, "Dropout of the head; default: the checkpoint's.", "fixed", shown=True)
    layer_decay: float = setting(
        1.0, "Learning rate of a layer / that of the layer above it (ELECTRA, appendix B).", "fixed", shown=True
    )
    global_batch_size: int | None = setting(
        None, "Examples (SQuAD: windows) an optimizer step; accumulation is derived.", "fixed", shown=True
    )
    seeds: list[int] = setting([1, 2, 3, 4, 5], "One run for each.", "free")
    random_weights: bool = setting(
        False, "Fine-tune the checkpoint's architecture from fresh weights.", "fixed", shown=True
    )
    max_train_samples: int | None = setting(None, "Train on the first so many examples only.", "fixed", shown=True)
    keep: Literal["best", "all", "none"] = setting("best", "Runs with weights on disk.", "free")
