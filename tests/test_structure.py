"""Structure of the repository: direction of imports, declarations of flags, length of scripts."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from conftest import run_python
from transformers import TrainingArguments

import finetune_glue
import finetune_ner
import finetune_race
import finetune_squad
import train_mlm
from roberta_recipe.input_files import ROOT
from roberta_recipe.settings import Flag, fixed_values, flags_of, setting, shown_names
from roberta_recipe.training.arguments import (
    TRAINER_FLAGS,
    FinetuneTrainingArguments,
    MlmTrainingArguments,
)

ROOMS = ["", "data", "model", "training", "tasks", "publishing"]  # a package imports only from those before it
MODULES = sorted((ROOT / "roberta_recipe").rglob("*.py"))
SCRIPTS = ["train_mlm.py", "finetune_glue.py", "finetune_squad.py", "finetune_race.py", "finetune_ner.py"]
OWN = [
    train_mlm.MlmArguments,
    finetune_glue.GlueArguments,
    finetune_squad.SquadArguments,
    finetune_race.RaceArguments,
    finetune_ner.NerArguments,
]


def room(module: str) -> str:
    """The package of a dotted name in roberta_recipe; "" for a top-level module."""
    first = module.split(".")[1] if "." in module else ""
    return first if first in ROOMS else ""


def imported(path: Path) -> set[str]:
    """Dotted names of this repository's modules, scripts and tools that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    scripts = {Path(script).stem for script in SCRIPTS}
    return {name for name in names if name.split(".")[0] in {"roberta_recipe", "tools", "experiments", *scripts}}


def closure(script: str) -> set[Path]:
    """Files of the repository that a script imports, directly or lazily, itself included."""
    found, pending = set(), [ROOT / script]
    while pending:
        path = pending.pop()
        if path.is_file() and path not in found:
            found.add(path)
            for name in imported(path):
                parts = name.split(".")
                for end in range(1, len(parts) + 1):
                    pending.append(ROOT.joinpath(*parts[:end]).with_suffix(".py"))
    return found


@pytest.mark.parametrize(
    ("script", "files", "lines"),
    [
        ("train_mlm.py", 53, 9_735),
        ("finetune_glue.py", 45, 8_440),
        ("finetune_squad.py", 42, 7_595),
        ("finetune_race.py", 39, 7_040),
        ("finetune_ner.py", 42, 7_710),
    ],
)
def test_a_script_imports_at_most_so_many_files_and_lines(script, files, lines):
    """Upper bounds, to be lowered: a reader may have to open all of these files."""
    reached = closure(script)
    assert 30 < len(reached) <= files
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in reached) <= lines
    of_tasks = {path.stem for path in reached if path.parent.name == "tasks"}
    assert script != "train_mlm.py" or of_tasks <= {"__init__", "blimp", "pseudo_likelihood"}
    assert not reached & {*ROOT.glob("tools/*.py"), *ROOT.glob("experiments/*.py")}


def test_imports_go_one_way():
    checked = 0
    for path in MODULES:
        dotted = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for name in imported(path):
            assert name.startswith("roberta_recipe"), f"{dotted} imports {name}"
            assert ROOMS.index(room(name)) <= ROOMS.index(room(dotted)), f"{dotted} imports {name}"
            checked += 1
    assert len(MODULES) > 35 and checked > 150


def test_a_tool_runs_from_any_folder_and_its_neighbours_shadow_no_library(tmp_path):
    """`tools/evaluate.py` does not shadow the library `evaluate`."""
    paths = [path for path in (ROOT / "tools").glob("[a-z]*.py") if path.stem not in ("significance", "devices")]
    paths.append(ROOT / "experiments" / "run.py")
    assert len(paths) == 14 and all("if not __package__:" in path.read_text(encoding="utf-8") for path in paths)
    done = run_python(ROOT / "tools" / "squad_score.py", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_every_module_says_what_it_is_and_none_is_called_by_an_empty_word():
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
        assert path.stem not in ("run", "utils", "common", "helpers", "misc", "core", "base", "report"), path


@pytest.mark.parametrize("script", SCRIPTS)
def test_main_is_a_table_of_contents(script):
    tree = ast.parse((ROOT / script).read_text(encoding="utf-8"))
    (main,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert main.end_lineno - main.lineno + 1 <= 80
    assert not [node for node in ast.walk(main) if isinstance(node, ast.FunctionDef) and node is not main]


def test_flags_of_ours_are_few_and_in_named_groups():
    for cls in OWN:
        assert len(dataclasses.fields(cls)) <= 34
        owners = {
            next(c for c in cls.__mro__ if field.name in vars(c).get("__annotations__", {}))
            for field in dataclasses.fields(cls)
        }
        titles = {owner._argument_group_name for owner in owners}
        assert len(titles) == len(owners) >= 2


@pytest.mark.parametrize("cls", [*OWN, MlmTrainingArguments, FinetuneTrainingArguments], ids=lambda cls: cls.__name__)
def test_every_flag_has_a_resume_scope(cls):
    inherited = getattr(cls, "inherited_flags", {})
    fields = [field for field in dataclasses.fields(cls) if field.init]
    missing = [field.name for field in fields if "flag" not in field.metadata and field.name not in inherited]
    assert fields and not missing, f"{cls.__name__}: state `resume` of {missing}, or list them in training/arguments.py"


def test_the_table_of_inherited_flags_fits_the_installed_transformers():
    inherited = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    since_5_23 = {"activation_checkpointing", "activation_checkpointing_kwargs"}
    assert set(TRAINER_FLAGS) - since_5_23 == inherited - since_5_23 and len(inherited) > 100
    assert "learning_rate" in TRAINER_FLAGS and TRAINER_FLAGS["hub_token"].scope == "start"


def test_a_new_flag_is_in_fingerprint_and_card_by_its_declaration_alone():
    @dataclasses.dataclass
    class Arguments(train_mlm.MlmArguments):
        changes_the_data: int = setting(1, "A flag that somebody adds.", "data", shown=True)
        named_by_content: str = setting("a", "Another.", "content")
        undeclared: int = 3  # counts as fixed, so that no change is silent

    args = Arguments(changes_the_data=2)
    values = fixed_values(args)
    assert values["changes_the_data"] == 2 and values["undeclared"] == 3 and "named_by_content" not in values
    assert values["mlm_probability"] == 0.15 and "corpus" not in values
    assert shown_names(args)[-1] == "changes_the_data" and flags_of(Arguments)["undeclared"] == Flag("fixed")


def arguments_assigned(source: str) -> list[str]:
    """Assignments to attributes of `args`, `training_args` or `trainer.args` in a source file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.append((ast.unparse(node.value), ast.unparse(node)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            found.append((ast.unparse(node.args[0]), ast.unparse(node)))
    return [written for owner, written in found if re.search(r"(^|\W|_)args$", owner)]


def test_argument_objects_are_final_after_the_parse():
    """Except in `training/arguments.py`, whose `derive` is called right after parsing."""
    ways = "args.a = 1\nt.args.b += 1\nwith f() as training_args.c: pass\nsetattr(args, 'd', 1)\nargs.e, x = y\ns.f = 2"
    assert len(arguments_assigned(ways)) == 5
    paths = [*MODULES, *(ROOT / script for script in SCRIPTS)]
    found = {path.name: arguments_assigned(path.read_text(encoding="utf-8")) for path in paths}
    found = {name: assigned for name, assigned in found.items() if assigned}
    assert list(found) == ["arguments.py"] and len(found["arguments.py"]) == 5, found
    for script in ("train_mlm.py", "roberta_recipe/tasks/protocol.py"):
        lines = (ROOT / script).read_text(encoding="utf-8").splitlines()
        assert sum(".derive(args, training_args" in line for line in lines) == 1, script


def test_the_map_of_the_readme_is_short_and_true():
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Where things are")[1]
    rows = re.findall(r"^\| `", section, re.M)
    assert 5 < len(rows) <= 12
    for name in re.findall(r"^\| `([^`]+)`", section, re.M):
        assert (ROOT / name).exists(), name
