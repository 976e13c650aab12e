"""What our trainers take for granted of Hugging Face's `Trainer`, in one list.

Everything of `Trainer` that is overridden, and every attribute of it with a leading underscore that is read or set,
stands here with the parameters that it has in `CHECKED_WITH`. `tests/test_trainer_internals.py` compares the list with
the installed transformers and with our code. Where it fails after an upgrade: read the release notes between
`CHECKED_WITH` and the installed version, compare `transformers/trainer.py` of the two at the method that is named, and
change our override and this list together.
"""

from typing import NamedTuple

CHECKED_WITH = "5.23.0"  # of transformers


class Internal(NamedTuple):
    """A method of `Trainer` with its parameters, or an attribute of its instances (no parameters)."""

    name: str
    parameters: tuple[str, ...] | None
    relied_on: str  # what we take for granted


_STEP = ("self", "model", "inputs", "num_items_in_batch")
_EVALUATE = ("self", "eval_dataset", "ignore_keys", "metric_key_prefix")
_SHARED = (
    Internal(
        "get_batch_samples",
        ("self", "epoch_iterator", "num_batches", "device"),
        "called once a step; its batches are a step's micro-batches, and its number reaches `compute_loss` as it is",
    ),
    Internal(
        "_run_epoch",
        (
            *("self", "model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial"),
            *("ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained"),
            "steps_trained_in_current_epoch",
        ),
        "called once an epoch, by keyword, after the checkpoint is loaded; loads the random state first where "
        "`ignore_data_skip` is set",
    ),
    Internal(
        "_save_checkpoint",
        ("self", "model", "trial"),
        "writes checkpoint-<step> on all ranks, first by `save_model`; `on_save` is called after it",
    ),
    Internal("save_model", ("self", "output_dir", "_internal_call"), "an internal call for a checkpoint"),
    Internal("log", ("self", "logs", "start_time"), "gets the mean loss since the last log line as `loss`"),
    Internal("train", ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"), "raises what a step raises"),
    Internal("create_optimizer", ("self", "model"), "keeps an optimizer that is there already, and returns it"),
    Internal(
        "_load_scaler",
        ("self", "checkpoint"),
        "loads a stored loss scale, and fails where `accelerator.scaler` is None",
    ),
    Internal("get_train_dataloader", ("self",), "used as it is returned: not prepared by accelerate"),
    Internal("get_eval_dataloader", ("self", "eval_dataset"), "its `worker_init_fn` is read when workers start"),
    Internal(
        "_load_from_checkpoint",
        ("self", "resume_from_checkpoint", "model"),
        "loads the weights alone; not called under DeepSpeed",
    ),
    Internal("training_step", _STEP, "forward, `compute_loss` and backward of one micro-batch"),
    Internal("loss_is_scaled_for_ga", None, "True: `training_step` does not divide the loss by the accumulation"),
)
_PRETRAINING = (
    Internal(
        "compute_loss", ("self", "model", "inputs", "return_outputs", "num_items_in_batch"), "as it is documented"
    ),
    Internal(
        "create_scheduler",
        ("self", "num_training_steps", "optimizer"),
        "makes a schedule once; where it is a LambdaLR, its `lr_lambdas` map a step to a share of the rate",
    ),
    Internal("evaluate", _EVALUATE, "calls `evaluation_loop` and `log`"),
    Internal(
        "evaluation_loop",
        ("self", "dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"),
        "its metrics are what `evaluate` returns and logs",
    ),
    Internal("_prepare_inputs", ("self", "inputs"), "moves a batch to the device"),
)
INTERNALS = _SHARED + _PRETRAINING
