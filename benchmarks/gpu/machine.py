"""What a machine has of requirements.txt, and how what it lacks is carried to it. The standard library alone, as this
is asked where the rest is missing."""

import importlib
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
CARRY = """To carry the pinned versions: on a machine with a network, where `make setup` has run with Python {python},
    .venv/bin/pip freeze --exclude torch --exclude triton | grep -v '^nvidia-' > wheels.txt
    .venv/bin/pip wheel --no-deps --wheel-dir wheels -r wheels.txt
and here, with wheels.txt and the folder wheels (what is here already may be left out of both; torch stays):
    {executable} -m pip install --no-index --no-deps --find-links wheels --target carried -r wheels.txt
    PYTHONPATH=carried {executable} -m benchmarks.gpu --output_dir runs/gpu"""


class Package(NamedTuple):
    """A line of requirements.txt, and the version that is installed; None where it is not."""

    name: str
    pinned: str
    installed: str | None


def packages() -> list[Package]:
    """The pinned packages of requirements.txt, without those of tests and lint."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").partition("# Tests and lint")[0]
    found = []
    for name, pinned in re.findall(r"^([\w.-]+)==(\S+)", lines, re.M):
        try:
            found.append(Package(name, pinned, version(name)))
        except PackageNotFoundError:
            found.append(Package(name, pinned, None))
    return found


def differences(found: list[Package]) -> list[str]:
    """What is missing and what is there in another version, a line each; a build such as 2.13.0+cpu is 2.13.0."""
    missing = [f"{name}=={pinned}" for name, pinned, installed in found if installed is None]
    others = [
        f"{name} {installed} (pinned: {pinned})"
        for name, pinned, installed in found
        if installed and installed.partition("+")[0] != pinned
    ]
    lines = [f"missing of requirements.txt: {', '.join(missing)}"] if missing else []
    return lines + ([f"other versions than requirements.txt has: {', '.join(others)}"] if others else [])


def how_to_carry() -> str:
    """The commands that bring the pinned versions to this machine."""
    return CARRY.format(python=f"{sys.version_info.major}.{sys.version_info.minor}", executable=sys.executable)


def cannot_import(module: str) -> str | None:
    """Why a script of the recipe cannot start here: the package that it lacks."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{module}.py cannot start: {error}"
    return None
