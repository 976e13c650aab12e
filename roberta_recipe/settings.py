"""Command-line flags and YAML presets: parsing into dataclasses, type checks, a resume scope per flag.

Precedence: dataclass default < preset < command line. The paper keeps its settings in tables (Tables 9 and 10 of the
appendix); a preset is one column of such a table.
"""

import argparse
import copy
import dataclasses
import difflib
import math
import re
import textwrap
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError
from transformers import HfArgumentParser

from roberta_recipe import stock_flags
from roberta_recipe.credentials import holds_secret, redact
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import explained, read_text, resolve_path

NUMBERS_END = 2**32  # integers must be below: the limit of NumPy's seeds and torch's sizes
_TRAINER_FLAGS = "Flags of transformers.TrainingArguments (huggingface.co/docs/transformers/main_classes/trainer):"
_NOT_GIVEN = object()  # value of a flag that is not on the command line
Pairs = tuple[tuple[str, str], ...]  # of flags
Scope = Literal["start", "free", "layout", "content", "fixed", "data", "locked"]


@dataclass(frozen=True)
class Flag:
    """Resume scope of a flag, and whether model card and results show it (`shown`: always, or for one task).

    `scope` is one of:
    "start":   applies to one start of a run, and is not saved in the run's preset;
    "free":    may change at a restart: the run stays bit-identical (`benchmarks/flags.py`);
    "layout":  may change, which changes rounding and dropout draws; recorded in checkpoints, a change is logged;
    "content": a file or folder; its content is in the fingerprint of the run;
    "fixed":   in the fingerprint: must not change;
    "data":    as "fixed", and the order of blocks depends on it;
    "locked":  only the default is allowed, for the reason `because`.
    """

    scope: Scope
    shown: bool | str = False
    because: str = ""

    def __post_init__(self):
        if self.scope not in typing.get_args(Scope) or bool(self.because) != (self.scope == "locked"):
            raise TypeError(f"{self}: unknown scope, or a missing or superfluous reason")


def setting(default: Any, help: str, resume: str | None = None, shown: bool | str = False) -> Any:
    """A dataclass field for a flag; `resume` and `shown` as in `Flag`. Without `resume`, it overrides the default
    of an inherited flag and keeps its `Flag`."""
    metadata = {"help": help} | ({"flag": Flag(resume, shown)} if resume else {})
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(cls: type) -> dict[str, Flag]:
    """The `Flag` of every field of an argument dataclass, declared with `setting` or in its `inherited_flags`; "fixed"
    if undeclared, so that a change is never silent."""
    inherited = getattr(cls, "inherited_flags", {})
    fields = [field for field in dataclasses.fields(cls) if field.init]
    return {field.name: field.metadata.get("flag") or inherited.get(field.name, Flag("fixed")) for field in fields}


def values_of(args: Any, *scopes: Scope) -> dict[str, Any]:
    """The values of the flags of these scopes in a filled dataclass, as JSON types."""
    flags = flags_of(type(args)).items()
    return {name: plain(getattr(args, name)) for name, flag in flags if flag.scope in scopes}


def fixed_values(args: Any) -> dict[str, Any]:
    """The values that must not change between two starts of a run."""
    return values_of(args, "fixed", "data")


def shown_names(*filled: Any) -> list[str]:
    """Names of the flags that model card and results show: `shown` always, or for the task of the first dataclass."""
    wanted = (True, getattr(filled[0], "task_name", None))
    return [name for args in filled for name, flag in flags_of(type(args)).items() if flag.shown in wanted]


def plain(value: Any) -> Any:
    """Convert a flag's value to JSON types."""
    if isinstance(value, Enum):
        return value.value
    return [plain(item) for item in value] if isinstance(value, list) else value


def names_in(argv: list[str]) -> set[str]:
    """The names of the flags on a command line."""
    return {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}


def value_of(argv: list[str], name: str) -> str | None:
    """The value of a flag on a command line; None without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, nargs="?", const="true")
    return getattr(parser.parse_known_args(argv)[0], name)


def parse(
    dataclass_types: list[type], argv: list[str], default_config: str, description: str, without: Iterable[str] = ()
) -> tuple[list[Any], dict[str, Any]]:
    """Read `--config` (except the keys `without`) and the flags on top of it. Returns the filled dataclasses, and all
    resolved values as a preset, without flags of scope "start". Raises `InputError`.

    A dataclass's `alternatives` exclude each other: a flag for one replaces the preset's value for the other.
    `replaces`: a flag for the first drops the preset's value for the second. Callers add derived values (bf16,
    max_steps, tokenizer_name, attn_implementation) to the preset before it is written.
    """
    usage = "%(prog)s [--config PRESET] [--flag value ...]"
    parser = RecipeParser(dataclass_types, description=description, usage=usage, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="this list")
    parser.add_argument("--config", default=default_config, help="preset; its values are the defaults shown here")
    defaults = {name: parser.get_default(name) for cls in dataclass_types for name in flags_of(cls)}
    argv = stock_flags.without_accepted(argv, defaults)
    given = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(defaults, _NOT_GIVEN))))
    path, is_help = given.pop("config"), given.pop("help")
    is_missing = is_help and not resolve_path(path).is_file()  # --help works without the preset
    preset = {} if is_missing else check_mapping(load_yaml(path), dataclass_types, path)
    preset = {name: value for name, value in preset.items() if name not in without}
    if is_help:
        parser.set_defaults(**preset)
        parser.epilog = _trainer_flags(dataclass_types, {**defaults, **preset})
        parser.print_help()
        parser.exit()
    given = {name: value for name, value in given.items() if value is not _NOT_GIVEN}
    _check_numbers(preset, defaults)
    values = _merged(dataclass_types, defaults, preset, given)
    filled, resolved = [], {}
    for cls in dataclass_types:
        own = {name: values[name] for name in flags_of(cls)}
        _check_values(cls, own, defaults)
        with explained("invalid flags"):
            filled.append(cls(**own))
        for name, flag in flags_of(cls).items():
            if flag.scope != "start" and not (own[name] is None and defaults[name] is None):
                resolved[name] = plain(own[name])
    return filled, resolved


def _merged(
    dataclass_types: Sequence[type], defaults: dict[str, Any], preset: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Merge defaults < preset < given flags; a given flag drops the preset's values that it replaces or excludes."""
    alternatives = [pair for cls in dataclass_types for pair in getattr(cls, "alternatives", ())]
    replaces = [pair for cls in dataclass_types for pair in getattr(cls, "replaces", ())]
    replaced = {second for first, second in replaces if first in given}
    replaced |= {second for first, second in alternatives if given.get(first)}
    replaced |= {first for first, second in alternatives if given.get(second)}
    from_preset = {name: value for name, value in preset.items() if name not in replaced}
    values = {**defaults, **from_preset, **given}
    for first, second in alternatives:
        if values[first] and values[second]:
            raise InputError(f"{first}={values[first]} and {second}={values[second]} exclude each other; leave one out")
    return values


def _check_values(cls: type, values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise `InputError` for a locked flag with another value, and for a secret in a value that would be published."""
    for name, flag in flags_of(cls).items():
        value, default = plain(values[name]), plain(defaults[name])
        if flag.scope == "locked" and value != default:
            raise InputError(f"{name} must stay {default}, not {value}: {flag.because}")
        if flag.scope != "start" and holds_secret(value):
            raise InputError(
                f"{name}={redact(str(value))} holds a password or a token, which preset.yaml and the model card would "
                "publish: write ${NAME}, an environment variable, in a corpus preset, or configure fsspec"
            )


def _check_numbers(values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise `InputError` for a number that is negative or not finite, or an integer from 2^32; defaults pass."""
    for name, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            is_number = isinstance(number, int | float) and number != defaults.get(name)
            if is_number and not 0 <= number < (NUMBERS_END if isinstance(number, int) else math.inf):
                raise InputError(f"{name}={number} must be at least 0 and finite (integers: below 2^32)")


def _title(cls: type, name: str) -> str:
    """The `--help` group of a field: that of the class that declares it."""
    owner = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
    return getattr(owner, "_argument_group_name", _TRAINER_FLAGS)


def _groups(dataclass_types: Sequence[type]) -> list[type]:
    """The flags of argument dataclasses for `HfArgumentParser`: a dataclass per group of `--help`. Those of
    `TrainingArguments` are hidden, as `_trainer_flags` lists them."""
    groups: dict[str, list[tuple]] = {}
    for cls in dataclass_types:
        hints = typing.get_type_hints(cls)
        for field in (field for field in dataclasses.fields(cls) if field.init):
            metadata, title = {"help": field.metadata.get("help")}, _title(cls, field.name)
            if title == _TRAINER_FLAGS:
                metadata["help"] = argparse.SUPPRESS
            if hints[field.name] == bool | None and field.default is None:  # `--bf16` alone is true
                metadata |= {"nargs": "?", "const": True}
            bare = dataclasses.field(default=field.default, default_factory=field.default_factory, metadata=metadata)
            groups.setdefault(title, []).append((field.name, hints[field.name], bare))
    return [
        dataclasses.make_dataclass("Group", fields, namespace={"_argument_group_name": title}, kw_only=True)
        for title, fields in groups.items()
    ]


def _trainer_flags(dataclass_types: Sequence[type], values: dict[str, Any]) -> str:
    """Epilog of `--help`: Trainer's own flags as name=value (the name alone for None), without locked flags."""
    flags = [(cls, name) for cls in dataclass_types for name, flag in flags_of(cls).items() if flag.scope != "locked"]
    names = [name for cls, name in flags if _title(cls, name) == _TRAINER_FLAGS]
    words = " ".join(name if values[name] is None else f"{name}={plain(values[name])}" for name in sorted(names))
    wrapped = textwrap.fill(words, 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return f"{_TRAINER_FLAGS}\n{wrapped}"


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults other than None, the description unwrapped, and one spelling per flag."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)

    def _format_action_invocation(self, action):
        shown = copy.copy(action)
        shown.option_strings = [option for option in action.option_strings if "-" not in option.lstrip("-")]
        return super()._format_action_invocation(shown)


class RecipeParser(HfArgumentParser):
    """`HfArgumentParser` that refuses abbreviations and suggests the nearest flag."""

    def __init__(self, dataclass_types: Sequence[type], **kwargs):
        super().__init__(_groups(dataclass_types), allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)
        for action in self._actions:
            if isinstance(action, argparse._StoreFalseAction):  # `--no_flag`, with the help of `--flag`
                action.help = argparse.SUPPRESS

    def parse_args(self, args=None, namespace=None):
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=")[0]  # without its value, which may be a secret
            if here := stock_flags.hint(name.removeprefix("--"), vars(namespace)):
                self.error(f"unknown argument {name!r}; here: {here}")
            hint = did_you_mean(name, [f"--{flag}" for flag in vars(namespace)])
            self.error(f"unknown argument {name!r}{hint} (--help lists all)")
        _check_numbers(vars(namespace), {name: self.get_default(name) for name in vars(namespace)})
        return namespace

    def error(self, message):
        raise InputError(message)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or an empty string without a close match."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class _PresetLoader(yaml.SafeLoader):
    """YAML 1.2 floats (`6e-4` is a number, not a string) and no duplicate keys."""

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)  # before the constructor expands merge keys (`<<`)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise InputError(f"{node.start_mark.name}: {twice[0]!r} is given twice; keep one of them")
        return node


class _PresetDumper(yaml.SafeDumper):
    """Quotes the strings that `_PresetLoader` would read as numbers."""


for _class in (_PresetLoader, _PresetDumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.\d*$|^[-+]?\.\d+$"),
        list("-+.0123456789"),
    )


def dump_yaml(values: dict[str, Any]) -> str:
    """The text of a YAML file for `load_yaml`."""
    return yaml.dump(values, Dumper=_PresetDumper, sort_keys=False, allow_unicode=True)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, e.g. a number. Raises `InputError`."""
    try:
        loader = _PresetLoader(text)
        loader.name = where  # for the messages of YAML errors
        return loader.get_single_data()
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, KeyError) as error:  # the latter two for 2024-02-30, !!bool foo
        raise InputError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `InputError` for a missing file, bad YAML or no mapping."""
    path = resolve_path(path)
    if not path.is_file():
        near = ", ".join(sorted(map(str, path.parent.glob("*.yaml"))))
        raise InputError(f"no such file: {path}" + (f"; its folder has {near}" if near else ""))
    values = parse_yaml(read_text(path), str(path))
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold `key: value` lines, not {type(values).__name__}")
    return values


def check_mapping(
    values: dict[str, Any], dataclass_types: list[type], where: str, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Check `values` against the types of their fields; the fields `without` are unknown keys. Raises `InputError`."""
    hints = {}
    for cls in dataclass_types:
        annotations = typing.get_type_hints(cls, include_extras=True)
        names = (field.name for field in dataclasses.fields(cls) if field.init and field.name not in without)
        hints |= {name: annotations[name] for name in names}
    checked = {}
    for key, value in values.items():
        if key not in hints:
            raise InputError(f"{where}: unknown key {key!r}{did_you_mean(str(key), hints)}")
        try:
            checked[key] = TypeAdapter(hints[key]).validate_python(value, strict=True)
        except ValidationError as error:
            wanted = " or ".join(each["msg"].removeprefix("Input should be ") for each in error.errors())
            is_unquoted = ("string" in wanted and value is not None) or ("'" in wanted and isinstance(value, bool))
            quote = "; put it in quotes, or YAML takes it for something else" if is_unquoted else ""
            raise InputError(f"{where}: {key} is {value!r}, and must be {wanted}{quote}") from None
    return checked
