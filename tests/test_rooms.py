"""Imports go one way: importing the data, the trainers or the tasks loads nothing of publishing, and no plotting."""

from conftest import run_python

IMPORT_ALL = """
import importlib, pathlib, sys
rooms = [pathlib.Path("roberta_recipe", room) for room in ("data", "training", "tasks")]
names = [".".join(path.with_suffix("").parts) for room in rooms for path in sorted(room.glob("[!_]*.py"))]
for name in names:
    importlib.import_module(name)
print(len(names), *(name for name in sys.modules if name.startswith(("roberta_recipe.publishing", "matplotlib"))))
"""


def test_trainers_and_tasks_load_no_publishing_and_no_plotting(root):
    done = run_python("-c", IMPORT_ALL, cwd=root)
    assert done.returncode == 0, done.stderr
    count, *loaded = done.stdout.split()
    assert int(count) >= 25 and loaded == []
