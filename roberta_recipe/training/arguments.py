"""`TrainingArguments` with RoBERTa's values (paper, Tables 9 and 10), and what each flag of it means for a run that is
started again."""

from dataclasses import dataclass
from typing import ClassVar

from transformers import TrainingArguments

from roberta_recipe.args import Flag, setting
from roberta_recipe.errors import InputError

# Every flag of transformers 5.23's `TrainingArguments`, by what it means for a run that is started again (`Flag`).
# "fixed": they change what is computed
_OPTIMIZATION = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs", "optim", "adam_beta1"),
    *("adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "bf16", "fp16", "seed"),
)
_ALSO_FIXED = (
    *("lr_scheduler_kwargs", "optim_args", "optim_target_modules", "average_tokens_across_devices", "data_seed"),
    *("label_smoothing_factor", "bf16_full_eval", "fp16_full_eval", "tf32", "use_liger_kernel", "liger_kernel_config"),
    *("neftune_noise_alpha", "accelerator_config", "dataloader_in_order", "label_names"),
)
# "free": layout, hardware, logging, saving, evaluation; the gradient of a step does not depend on them
_FREE = (
    *("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "auto_find_batch_size", "use_cpu"),
    *("activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing", "use_cache"),
    *("gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
    *("torch_empty_cache_steps", "full_determinism", "parallelism_config", "fsdp", "fsdp_config", "deepspeed"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend"),
    *("ddp_timeout", "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
    *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
    *("remove_unused_columns", "train_sampling_strategy", "length_column_name", "ignore_data_skip"),
    *("restore_callback_states_from_checkpoint", "logging_strategy", "logging_steps", "logging_first_step"),
    *("log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level"),
    *("log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id"),
    *("trackio_bucket_id", "trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay"),
    *("per_device_eval_batch_size", "prediction_loss_only", "eval_on_start", "eval_do_concat_batches"),
    *("eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"),
    *("save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit"),
    *("enable_jit_checkpoint", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "debug"),
    *("skip_memory_metrics", "do_train", "do_eval", "do_predict"),
)
_START = (
    *("resume_from_checkpoint", "local_rank", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id"),
    *("hub_strategy", "hub_always_push", "hub_revision"),
)
TRAINER_FLAGS: dict[str, Flag] = {
    **{name: Flag("fixed", shown=True) for name in _OPTIMIZATION},
    **{name: Flag("fixed") for name in _ALSO_FIXED},
    **{name: Flag("free") for name in _FREE},
    **{name: Flag("start") for name in _START},
}


@dataclass
class RecipeTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the values of the paper and of fairseq where Trainer's own would be wrong."""

    _argument_group_name = "Hugging Face TrainingArguments"
    inherited_flags: ClassVar[dict[str, Flag]] = TRAINER_FLAGS
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("bf16", "fp16"),)

    adam_beta2: float = setting(0.98, "Table 9, and fairseq's fine-tuning configuration; Trainer has 0.999.")
    adam_epsilon: float = setting(1e-6, "Table 9, and fairseq's fine-tuning configuration; Trainer has 1e-8.")
    max_grad_norm: float = setting(
        0.0, "Table 9, and fairseq's fine-tuning configuration: no clipping; Trainer has 1.0."
    )
    logging_nan_inf_filter: bool = setting(False, "Trainer would log a loss of 0.0 after a NaN.")
    remove_unused_columns: bool = setting(False, "Collators need columns that the model does not take.")


@dataclass
class MlmTrainingArguments(RecipeTrainingArguments):
    """For pretraining (paper, Table 9): an endless stream of blocks, so that a run is as long as `max_steps`."""

    inherited_flags: ClassVar[dict[str, Flag]] = {**TRAINER_FLAGS, "num_train_epochs": Flag("fixed")}  # not shown

    weight_decay: float = setting(
        0.01, "Table 9; Trainer has 0. Biases and LayerNorm are not decayed (in fairseq they are)."
    )
    prediction_loss_only: bool = setting(True, "Evaluation keeps no logits.")
    auto_find_batch_size: bool = setting(
        False, "Halve per_device_train_batch_size until a step fits into memory; accumulation makes up for it."
    )
    ignore_data_skip: bool = setting(True, "The data begin where the checkpoint left them; nothing is replayed.")
    accelerator_config: dict | str | None = setting(
        {"dispatch_batches": False, "even_batches": False},
        "Each process reads for itself, and no validation block is counted twice.",
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
        if not self.average_tokens_across_devices:
            raise InputError("average_tokens_across_devices must stay true: the batch is that of all processes")
        if self.remove_unused_columns:
            raise InputError("remove_unused_columns must stay false: the collator needs the block's number")
        for name in ("load_best_model_at_end", "metric_for_best_model"):
            if getattr(self, name):
                raise InputError(f"{name}={getattr(self, name)}: pretraining ends with its last step; leave it out")
        if not self.ignore_data_skip:
            raise InputError("ignore_data_skip must stay true: the data begin where the checkpoint left them")
        if self.logging_nan_inf_filter:
            raise InputError("logging_nan_inf_filter must stay false: a loss that is not finite is never logged as 0")


@dataclass
class FinetuneTrainingArguments(RecipeTrainingArguments):
    """For fine-tuning (paper, Table 10): evaluation picks the epoch that is kept, so it belongs to the run."""

    inherited_flags: ClassVar[dict[str, Flag]] = {
        **TRAINER_FLAGS,
        "eval_strategy": Flag("fixed"),
        "eval_steps": Flag("fixed", shown=True),
        "eval_on_start": Flag("fixed"),
    }

    weight_decay: float = setting(0.1, "Table 10; Trainer has 0.")
    eval_strategy: str = setting("epoch", "The best epoch is kept.")
    save_strategy: str = setting("no", "Checkpoints to resume from, for long tasks; the best epoch is kept anyway.")
