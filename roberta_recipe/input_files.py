"""Input files and folders that a user names: paths, text, JSON, datasets on the Hub."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roberta_recipe.errors import InputError, RunError, first_line

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / "installed"  # presets in a wheel (pyproject.toml)
HUB_COMMIT = "[0-9a-f]{40}"  # pattern of a repository's commit
ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent  # base of paths such as presets/mlm/base.yaml


def resolve_path(path: str | Path) -> Path:
    """The path, or the same path relative to the repository if only that exists."""
    try:
        path = Path(path).expanduser()
        return ROOT / path if not path.exists() and (ROOT / path).exists() else path
    except (OSError, RuntimeError) as error:  # no permission, a name that is too long, `~nobody`
        raise InputError(f"cannot look up {path}: {first_line(error)}") from None


def path_or_hub_id(name: str | Path) -> Path | str:
    """The local folder or file of that name if it exists, else the name as a Hub id."""
    path = resolve_path(name)
    return path if path.exists() else name


def read_text(path: str | Path, hint: str = "") -> str:
    """The text of a UTF-8 file, without a byte order mark, with unchanged line ends. `hint` is appended to the error
    message for a missing or unreadable file."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as stream:
            return stream.read()
    except FileNotFoundError:
        raise InputError(f"{path} is missing{hint}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (in Excel: CSV UTF-8): {error.reason} at {error.start}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}{hint}") from None


def read_input_json(path: str | Path) -> Any:
    """The content of a JSON file. Raises `InputError`."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> Any:
    """The content of a JSON text. Raises `InputError` with its location `where`."""
    with explained(f"{where} is not JSON"):
        return json.loads(text)


@contextlib.contextmanager
def explained(what: str, fix: str = "") -> Iterator[None]:
    """Context that re-raises exceptions of libraries, which for bad input may have any type, as `InputError` "`what`
    (type: message)`fix`". Keep its code short, as it hides bugs too."""
    try:
        yield
    except (InputError, RunError):
        raise
    except Exception as error:
        raise InputError(f"{what} ({type(error).__name__}: {first_line(error)}){fix}") from error


def is_text(value: Any) -> bool:
    """Whether `value` is a string of valid Unicode (a JSON string may hold half of a surrogate pair)."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def load_from_hub(name: str, *config: str, split: str | None, instead: str) -> Any:
    """A split (`datasets.Dataset`) of a dataset on the Hub, or all splits (`DatasetDict`). Raises `InputError` that
    names a local alternative (`instead`)."""
    import datasets  # slow, and not needed for local files

    what = ", ".join([name, *config, split or "all splits"])
    with explained(f"cannot load {what} from the Hub", f"; give {instead}"):
        return datasets.load_dataset(name, *config, split=split)
