"""Preset and command line become dataclasses: one parse, one type check.

Order of precedence: dataclass default < preset (YAML) < command line. The paper keeps its settings
in tables (Tables 9 and 10 of the appendix); a preset is one column of such a table.
"""

import argparse
import dataclasses
import difflib
import errno
import re
import sys
import types
import typing
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

# What belongs to one start of a run, or to nobody else.
_NOT_SAVED = {"resume_from_checkpoint", "local_rank", "hub_token", "resume_despite_changes", "pack_only", "pack_part"}
_NOT_SAVED |= {"push_to_hub", "hub_model_id", "hub_strategy", "hub_always_push", "hub_private_repo", "hub_revision"}
_NOT_SAVED |= {"eval_only", "dry_run", "hardware", "utilisation", "gpu_hour_price"}

ROOT = Path(__file__).resolve().parent.parent


class InputError(ValueError):
    """Something the user can mend before anything runs. The message names the value and the fix."""

    exit_code = 2


class RunError(RuntimeError):
    """Something that broke a run. The message says what is safe, and what to do."""

    exit_code = 1


class Preempted(RunError):
    """The run was told to stop (SIGTERM) and has saved its state: the same command goes on."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again


def exit_on_error(main: Callable[[], Any]) -> None:
    """Run a script's `main`; errors of the kinds above and full disks become one line on stderr and an exit code."""
    try:
        main()
        return
    except (InputError, RunError) as error:
        # one raised in a data worker comes with the worker's traceback around it
        message = re.split(r"\b(?:InputError|BadShard): ", str(error))[-1].strip()
        code = error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        message, code = f"{error}: make room, then start the same command again", RunError.exit_code
    # out here, nothing holds the frames of `main` any more: data workers end in order
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


class _PresetLoader(yaml.SafeLoader):
    """YAML 1.2 floats (`6e-4` is a number, not a string) and no duplicate keys."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                mark = key_node.start_mark
                raise InputError(f"{mark.name}: {key!r} is given twice (line {mark.line + 1}); keep one")
            seen.add(key)
        return super().construct_mapping(node, deep)


_PresetLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.\d*$|^[-+]?\.\d+$"),
    list("-+.0123456789"),
)


def resolve_path(path: str | Path) -> Path:
    """A path as the user gave it, or the same path below the repository where only that exists."""
    path = Path(path).expanduser()
    return ROOT / path if not path.exists() and (ROOT / path).exists() else path


def path_or_hub_id(name: str | Path) -> Path | str:
    """The folder or file of that name where there is one (`resolve_path`), else `name`, which is the Hub's."""
    path = resolve_path(name)
    return path if path.exists() else name


def setting(default: Any, help: str, **kwargs: Any) -> Any:
    """A dataclass field that is a flag with this help."""
    return dataclasses.field(default=default, metadata={"help": help}, **kwargs)


def is_set(argv: list[str], flag: str) -> bool:
    """Whether `argv` turns the boolean `flag` on, asked before the whole is parsed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{flag}", nargs="?", const="true", default="false", dest="value")
    return parser.parse_known_args(argv)[0].value.lower() in ("true", "yes", "t", "y", "1")


def is_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 can hold (JSON may have half of a surrogate pair)."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `InputError` for a missing file, bad YAML or no mapping."""
    path = resolve_path(path)
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise InputError(f"no such file: {path}" + (f"; its folder has {', '.join(near)}" if near else ""))
    try:
        with path.open(encoding="utf-8") as stream:
            values = yaml.load(stream, _PresetLoader)
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML: {error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold `key: value` lines, not {type(values).__name__}")
    return values


def did_you_mean(word: str, known: typing.Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or nothing where no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_type(value: Any, hint: Any) -> Any:
    """`value` as the annotation `hint` wants it (an int becomes a float there). Raises `TypeError`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        # An Enum member's value is a plain string in a preset, so the Enum is asked before `str`.
        for option in sorted(inner, key=lambda o: not (isinstance(o, type) and issubclass(o, Enum))):
            try:
                return check_type(value, option)
            except TypeError:
                if isinstance(option, type) and issubclass(option, Enum) and isinstance(value, str):
                    raise
        raise TypeError(describe_type(hint))
    if origin is typing.Literal:
        if any(value == option and type(value) is type(option) for option in inner):
            return value
        raise TypeError(describe_type(hint))
    if origin in (list, dict):
        if not isinstance(value, origin):
            raise TypeError(describe_type(hint))
        if origin is list and inner:
            return [check_type(item, inner[0]) for item in value]
        return value
    if isinstance(hint, type) and issubclass(hint, Enum):
        if value in [member.value for member in hint]:
            return value
        raise TypeError(describe_type(hint))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise TypeError(describe_type(hint))


def describe_type(hint: Any) -> str:
    """The annotation in words, for an error message."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(option) for option in inner)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(option) for option in inner)
    if origin is list and inner:
        return f"a list of {describe_type(inner[0])}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(repr(member.value) for member in hint)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults behind every flag, the description's lines as they are written, one spelling of each flag."""

    def _format_action_invocation(self, action):
        spellings = action.option_strings
        action.option_strings = [option for option in spellings if "-" not in option.lstrip("-")]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = spellings


class RecipeParser(HfArgumentParser):
    """`HfArgumentParser` that refuses abbreviations and says what was probably meant."""

    def __init__(self, dataclass_types, **kwargs):
        super().__init__(dataclass_types, allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)

    def parse_args(self, args=None, namespace=None):
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [option for action in self._actions for option in action.option_strings if "-" not in option[2:]]
            name = unknown[0].split("=")[0]  # without its value, which may be a secret
            hint = did_you_mean(name, flags)
            self.error(f"unknown argument {name!r}{hint} (--help lists all)")
        return namespace

    def error(self, message):
        raise InputError(message)


def parse(
    dataclass_types: list[type],
    argv: list[str],
    default_config: str,
    description: str,
    alternatives: tuple[tuple[str, str], ...] = (),
) -> tuple[list[Any], dict[str, Any]]:
    """Read `--config` and the flags on top of it.

    Of two `alternatives`, a flag for the one takes the place of the preset's value for the other; both at once are an
    error. Returns the filled dataclasses, and all resolved values but those of `_NOT_SAVED`, which are a valid preset
    themselves. Raises `InputError`.
    """
    usage = "%(prog)s [--config PRESET] [--flag value ...]"
    parser = RecipeParser(dataclass_types, description=description, usage=usage)
    parser.add_argument("--config", default=default_config, help="preset to start from; flags override it")
    config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config.add_argument("--config", default=default_config)
    untouched = vars(parser.parse_args([]))
    values = read_preset(config.parse_known_args(argv)[0].config, dataclass_types)
    flags = {argument.split("=")[0].lstrip("-").replace("-", "_") for argument in argv if argument.startswith("--")}
    for pair in alternatives:
        for one, other in (pair, pair[::-1]):
            if one in flags and other not in flags:
                values.pop(other, None)
    parser.set_defaults(**values)
    namespace = vars(parser.parse_args(argv))
    for one, other in alternatives:
        if namespace[one] and namespace[other]:
            raise InputError(f"{one}={namespace[one]} and {other}={namespace[other]} exclude each other; give one")

    filled, resolved = [], {}
    for cls in dataclass_types:
        fields = [field for field in dataclasses.fields(cls) if field.init]
        for field in fields:
            value = namespace[field.name]
            if field.name not in _NOT_SAVED and not (value is None and untouched[field.name] is None):
                resolved[field.name] = value.value if isinstance(value, Enum) else value
        try:
            filled.append(cls(**{field.name: namespace[field.name] for field in fields}))
        except (ValueError, TypeError) as error:
            raise InputError(str(error)) from None
    return filled, resolved


def read_preset(path: str | Path, dataclass_types: list[type]) -> dict[str, Any]:
    """The values of a preset, each checked against the field it fills. Raises `InputError`."""
    return check_mapping(load_yaml(path), dataclass_types, str(path))


def check_mapping(
    values: dict[str, Any], dataclass_types: list[type], where: str, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`values` with each checked against the field it fills, leaving out the fields `without`. Raises `InputError`."""
    hints = {}
    for cls in dataclass_types:
        annotations = typing.get_type_hints(cls)
        fields = [field.name for field in dataclasses.fields(cls) if field.init and field.name not in without]
        hints.update({name: annotations[name] for name in fields})
    checked = {}
    for key, value in values.items():
        if key not in hints:
            raise InputError(f"{where}: unknown key {key!r}{did_you_mean(str(key), hints)}")
        try:
            checked[key] = check_type(value, hints[key])
        except TypeError as error:
            raise InputError(f"{where}: {key} is {value!r}, and must be {error}") from None
    return checked
