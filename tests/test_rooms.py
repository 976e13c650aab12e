"""Imports: no side effects, one direction, heavy libraries only on first use."""

import json

from conftest import run_python

# What the code of the package itself does as it is imported; a library that it imports is not its own code.
NO_EFFECT = """
import atexit, importlib, os, pkgutil, signal, sys, threading

import datasets, deepspeed, evaluate
from transformers import AttentionInterface, AttentionMaskInterface, Trainer

import roberta_recipe

ENVIRON, FOUND = os.environ, []


def by_the_package():
    # the caller, unless an import stands between it and the package
    frame = sys._getframe(2)
    while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
        if "/roberta_recipe/" in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def watched(name, function):
    def call(*args, **others):
        if where := by_the_package():
            FOUND.append((name, where))
        return function(*args, **others)
    return call


def audit(event, args):
    if event == "open" and str(args[0]).startswith("/proc") and (where := by_the_package()):
        FOUND.append((args[0], where))


def state():
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "threads": threading.enumerate(),
        "attentions": [sorted(AttentionInterface()), sorted(AttentionMaskInterface())],
        "environment": dict(os.environ),
        "hooks": (sys.excepthook, sys.unraisablehook),
    }


before = state()
for name in ("__getitem__", "__iter__"):
    setattr(type(ENVIRON), name, watched("os.environ", getattr(type(ENVIRON), name)))
for module, name in ((os, "register_at_fork"), (atexit, "register"), (os, "getppid"), (signal, "signal")):
    setattr(module, name, watched(name, getattr(module, name)))
sys.addaudithook(audit)
names = [module.name for module in pkgutil.walk_packages(roberta_recipe.__path__, "roberta_recipe.")]
for name in names:
    importlib.import_module(name)
after = state()
assert not FOUND, FOUND
for name in before:
    assert before[name] == after[name], (name, before[name], after[name])
print(len(names))
"""


def test_no_import_has_an_effect(root):
    done = run_python("-c", NO_EFFECT, cwd=root)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 70


LOADED = """
import importlib, json, pathlib, sys
from transformers import Trainer

before = set(sys.modules)
rooms = [pathlib.Path("roberta_recipe", room) for room in ("data", "model", "training")]
names = [".".join(path.with_suffix("").parts) for room in rooms for path in sorted(room.glob("[!_]*.py"))]
for name in names:
    importlib.import_module(name)
of_library = set(sys.modules) - before
import train_mlm, finetune_glue, finetune_squad, finetune_race, finetune_ner
print(json.dumps([len(names), sorted(of_library), sorted(set(sys.modules) - before)]))
"""
HEAVY = ("matplotlib", "spacy", "deepspeed", "evaluate", "setuptools", "transformers.pipelines", "pytorch_optimizer")
HEAVY += ("torch.nn.attention.varlen", "torch.utils.cpp_extension", "roberta_recipe.tasks.blimp")


def test_no_heavy_library_is_loaded_before_its_use(root):
    done = run_python("-c", LOADED, cwd=root)
    assert done.returncode == 0, done.stderr
    count, of_library, of_scripts = json.loads(done.stdout)
    assert count >= 25 and not [name for name in of_library if name.startswith("roberta_recipe.publishing")]
    assert "roberta_recipe.settings" in of_library and not set(HEAVY) & set(of_scripts)
    assert not [name for name in of_scripts if name.startswith("huggingface_hub.")]
