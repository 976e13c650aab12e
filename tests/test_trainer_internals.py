"""Our trainers override and read what the list of `Trainer`'s internals says, and the installed transformers has it."""

import ast
import inspect

import pytest
import transformers
from trainer_internals import CHECKED_WITH, INTERNALS
from transformers import Trainer

from roberta_recipe.training import durable_trainer, finetune_trainer, mlm_trainer

TRAINERS = [durable_trainer.DurableTrainer, mlm_trainer.MlmTrainer, finetune_trainer.FinetuneTrainer]


def relied_on(cls):
    """Names of `Trainer` that a subclass overrides, and underscored names that the subclass reads or sets."""
    tree = ast.parse(inspect.getsource(cls)).body[0]
    overridden = {name for name in vars(cls) if name in vars(Trainer) and not name.startswith("__")}
    source = inspect.getsource(Trainer)
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()", "watch.trainer")
        if node.attr.startswith("_") and not node.attr.startswith("__")
    }
    return overridden | {name for name in read if hasattr(Trainer, name) or f"self.{name} =" in source}


def test_the_list_is_complete_and_holds_nothing_else():
    found = set().union(*map(relied_on, TRAINERS))
    assert found == {internal.name for internal in INTERNALS} and len(found) > 12


def test_few_private_members_are_overridden_and_none_is_set():
    overridden = {name for cls in TRAINERS for name in vars(cls) if name in vars(Trainer) and name[:1] == "_"}
    overridden -= {name for name in overridden if name.startswith("__")}
    assert overridden == {"_load_from_checkpoint", "_load_scaler", "_run_epoch", "_save_checkpoint"}
    source = inspect.getsource(Trainer)
    for cls in TRAINERS:
        stored = [
            node.attr
            for node in ast.walk(ast.parse(inspect.getsource(cls)))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr.startswith("_")
        ]
        assert stored and not [name for name in stored if f"self.{name} =" in source or f"self.{name}:" in source]


@pytest.mark.parametrize("internal", INTERNALS, ids=lambda internal: internal.name)
def test_it_is_there_in_the_installed_transformers(internal):
    advice = (
        f"Trainer.{internal.name} is another than in transformers {CHECKED_WITH}, and {transformers.__version__} is "
        "installed: read the release notes in between and tests/trainer_internals.py"
    )
    if internal.parameters is None:
        assert f"self.{internal.name}" in inspect.getsource(Trainer), advice
    else:
        assert tuple(inspect.signature(getattr(Trainer, internal.name)).parameters) == internal.parameters, advice


def test_the_pin_is_the_version_that_was_checked(root):
    assert f"transformers=={CHECKED_WITH} " in (root / "requirements.txt").read_text()
