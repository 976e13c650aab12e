"""Private parts of Hugging Face's `Trainer` that our trainers override or read, compared with the installed version.

If a test fails after an upgrade: read the release notes since `CHECKED_WITH`, compare the named method in both versions
of `transformers/trainer.py`, and update our override and `RELIED_ON` together.
"""

import ast
import inspect

import pytest
from transformers import Trainer

from roberta_recipe.training import durable_trainer, finetune_trainer, mlm_trainer

CHECKED_WITH = "5.23.0"  # of transformers
TRAINERS = [durable_trainer.DurableTrainer, mlm_trainer.MlmTrainer, finetune_trainer.FinetuneTrainer]
RELIED_ON = {
    "get_batch_samples": "once a step; its batches are the micro-batches, its number reaches `compute_loss` as it is",
    "_run_epoch": "once an epoch, by keyword, after the checkpoint is loaded",
    "_save_checkpoint": "writes checkpoint-<step> on all ranks, first by `save_model`; `on_save` is called after it",
    "save_model": "an internal call for a checkpoint",
    "log": "gets the mean loss since the last log line as `loss`",
    "train": "raises what a step raises",
    "create_optimizer": "keeps an optimizer that is there already, and returns it",
    "_load_scaler": "loads a stored loss scale, and fails where `accelerator.scaler` is None",
    "get_train_dataloader": "used as it is returned: not prepared by accelerate",
    "get_eval_dataloader": "its `worker_init_fn` is read when workers start",
    "_load_from_checkpoint": "loads the weights alone; not called under DeepSpeed",
    "training_step": "forward, `compute_loss` and backward of one micro-batch",
    "loss_is_scaled_for_ga": "True: `training_step` does not divide the loss by the accumulation",
    "compute_loss": "as it is documented",
    "create_scheduler": "where it makes a LambdaLR, its `lr_lambdas` map a step to a share of the learning rate",
    "evaluate": "calls `evaluation_loop` and `log`",
    "evaluation_loop": "its metrics are what `evaluate` returns and logs",
    "_prepare_inputs": "moves a batch to the device",
}
SOURCE = inspect.getsource(Trainer)


def overridden(cls):
    return {name for name in vars(cls) if name in vars(Trainer) and not name.startswith("__")}


def private_names(cls, context):
    """Underscored names of `Trainer` that a subclass reads (`ast.Load`) or sets (`ast.Store`)."""
    found = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(cls)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, context)
        if ast.unparse(node.value) in ("self", "super()") and node.attr.startswith("_")
    }
    return {name for name in found if f"self.{name} =" in SOURCE or (hasattr(Trainer, name) and name[:2] != "__")}


def test_the_list_is_complete_and_holds_nothing_else():
    found = set().union(*(overridden(cls) | private_names(cls, ast.Load) for cls in TRAINERS))
    # an attribute of instances is not in `vars(Trainer)`
    assert found | {"loss_is_scaled_for_ga"} == RELIED_ON.keys()


def test_few_private_members_are_overridden_and_none_is_set():
    private = {name for cls in TRAINERS for name in overridden(cls) if name.startswith("_")}
    assert private == {"_load_from_checkpoint", "_load_scaler", "_run_epoch", "_save_checkpoint"}
    assert not set().union(*(private_names(cls, ast.Store) for cls in TRAINERS))


@pytest.mark.parametrize("name", RELIED_ON)
def test_it_is_there_with_the_parameters_of_our_override(name):
    if name == "loss_is_scaled_for_ga":
        assert f"self.{name}" in SOURCE
        return
    wanted = list(inspect.signature(getattr(Trainer, name)).parameters)
    for cls in TRAINERS:
        own = inspect.signature(getattr(cls, name)).parameters
        if not {"args", "kwargs"} & own.keys():
            assert list(own) == wanted, f"{cls.__name__}.{name}: {RELIED_ON[name]}"


def test_the_pin_is_the_version_that_was_checked(root):
    assert f"transformers=={CHECKED_WITH} " in (root / "requirements.txt").read_text()
