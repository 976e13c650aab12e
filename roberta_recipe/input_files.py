"""Files and folders that a user names: found, and read whole or refused with a line that says why."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roberta_recipe.errors import InputError, RunError, first_line

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / "installed"  # of a wheel: the presets (pyproject.toml)
ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent  # where paths such as presets/mlm/base.yaml begin


def resolve_path(path: str | Path) -> Path:
    """A path as the user gave it, or the same path below `ROOT` where only that exists. Raises `InputError`
    where the system refuses to look: a folder that is another user's, a name that is too long, a `~user` of nobody."""
    try:
        path = Path(path).expanduser()
        return ROOT / path if not path.exists() and (ROOT / path).exists() else path
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"{path} cannot be looked for: {reason}; name another path") from None


def path_or_hub_id(name: str | Path) -> Path | str:
    """The folder or file of that name where there is one (`resolve_path`), else `name`, which is the Hub's."""
    path = resolve_path(name)
    return path if path.exists() else name


def read_text(path: str | Path, hint: str = "") -> str:
    """The text of a UTF-8 file, without its byte order mark and with its line ends as they are.

    Raises `InputError` that names the file and the fault; `hint` is added where the file cannot be read at all.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as stream:
            return stream.read()
    except FileNotFoundError:
        raise InputError(f"{path} is missing{hint}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}{hint}") from None


def read_input_json(path: str | Path) -> Any:
    """The content of a JSON file. Raises `InputError` that names the file and the fault."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> Any:
    """The content of a JSON text. Raises `InputError` that says `where` it stands and what is wrong."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from None


@contextlib.contextmanager
def taken_apart(path: str | Path, wanted: str) -> Iterator[None]:
    """Around code that takes the content of an input file apart: what it raises on content of another shape becomes an
    `InputError` that says that the file is not `wanted`. Not for a whole command, where it would hide our own bugs."""
    try:
        yield
    except (InputError, RunError):
        raise
    except Exception as error:
        raise InputError(f"{path} is not {wanted} ({type(error).__name__}: {first_line(error)})") from error


def is_text(value: Any) -> bool:
    """Whether `value` is a string that UTF-8 can hold (a JSON string may hold half of a surrogate pair)."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def load_from_hub(name: str, *config: str, split: str, instead: str) -> Any:
    """A split (`datasets.Dataset`) of a dataset on the Hub. Raises `InputError` with its name, and the local files to
    give `instead`."""
    import datasets  # here: local files need no `datasets`

    try:
        return datasets.load_dataset(name, *config, split=split)
    except Exception as error:  # the Hub client raises a dozen kinds
        what = ", ".join([*config, split])
        raise InputError(
            f"cannot load {name} ({what}): {type(error).__name__}: {error}. Without the Hub, give {instead}"
        ) from None
