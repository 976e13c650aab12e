"""A script in an empty folder runs with only the installed wheel, without optional packages; the wheel has code, cards,
presets and requirements."""

import json
import re
import shutil
import zipfile

import pytest
from conftest import run_python

SCRIPTS = ("train_mlm.py", "finetune_glue.py", "finetune_squad.py", "finetune_race.py", "finetune_ner.py")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
RUN = """
import runpy, sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
hidden = ("deepspeed", "pytorch_optimizer")
PathFinder.find_spec = staticmethod(lambda name, *rest: None if name in hidden else find(name, *rest))
argv = sys.argv[1:]
for script in ("finetune_glue.py", "finetune_squad.py", "finetune_race.py", "finetune_ner.py"):
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code
from roberta_recipe.data import docstrings
print("required:", *(one.metadata["Name"] for one in docstrings._requirements()))
print("library:", docstrings.__file__)
import train_mlm
train_mlm.main(argv)
"""


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory):
    """(folder of the unpacked wheel, list of its files)."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    for name in ("roberta_recipe", "presets", "tools", "experiments"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = run_python("-c", BUILD, site, cwd=source)
    assert built.returncode == 0, built.stderr
    (path,) = site.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(site)
        return site, set(archive.namelist())


def test_the_wheel_holds_the_library_and_the_presets_alone(wheel, root):
    _, names = wheel
    files = [path.relative_to(root) for path in (root / "roberta_recipe").rglob("*") if path.is_file()]
    library = {path.as_posix() for path in files if "__pycache__" not in path.parts}
    presets = {f"roberta_recipe/installed/{path.relative_to(root)}" for path in (root / "presets").glob("*/*.*")}
    assert {name for name in names if ".dist-info/" not in name} == library | presets
    assert len(library) > 60 and len(presets) > 35


def test_copied_scripts_run_with_the_wheel(wheel, root, tmp_path, tokenizer_dir, train_file, validation_file):
    site, _ = wheel
    project = tmp_path / "project"
    project.mkdir()
    for name in SCRIPTS:
        shutil.copy(root / name, project)
    argv = ["--config", "presets/mlm/roberta_tiny.yaml", "--train_file", train_file, "--validation_file"]
    argv += [validation_file, "--tokenizer_name", tokenizer_dir, "--max_steps", "1", "--warmup_steps", "0"]
    argv += ["--output_dir", "run", "--global_batch_size", "8", "--per_device_train_batch_size", "8"]
    argv += ["--per_device_eval_batch_size", "8"]
    argv += ["--config_overrides", "vocab_size=400", "--use_cpu", "true", "--bf16", "false"]
    done = run_python("-c", RUN, *argv, cwd=project, env={"PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") == 4 and f"library: {site}/roberta_recipe/" in done.stdout
    required = re.search("required: (.*)", done.stdout)[1].split()
    assert required[:3] == ["torch", "transformers", "datasets"] and "pytest" not in required
    assert json.loads((project / "run" / "run_record.json").read_text())["steps"] == 1
