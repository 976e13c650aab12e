"""Preset and command line become dataclasses: one parse, one type check.

Order of precedence: dataclass default < preset (YAML) < command line. The paper keeps its settings
in tables (Tables 9 and 10 of the appendix); a preset is one column of such a table.
"""

import argparse
import copy
import dataclasses
import math
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from transformers import HfArgumentParser

from roberta_recipe.credentials import holds_secret, redact
from roberta_recipe.errors import InputError, first_line
from roberta_recipe.input_files import resolve_path
from roberta_recipe.presets import did_you_mean, read_preset

INHERITED_GROUP = "Hugging Face TrainingArguments"
_NOT_GIVEN = object()  # in place of a flag's value
NUMBERS_END = 2**32  # of whole numbers: seeds of NumPy, sizes and counts of torch are below it
Scope = Literal["start", "free", "layout", "content", "fixed", "data", "kept"]


@dataclass(frozen=True)
class Flag:
    """What a flag means for a run that is started again, and whether the model card and the ledger show it.

    `resume` is one of:
    "start":   the flag belongs to one start of a run, and is not saved in the run's preset;
    "free":    its value may differ at each start: the run is the same, bit for bit (`benchmarks/flags.py`);
    "layout":  its value may differ, and with it the rounding and the draws of dropout; a checkpoint keeps it, and a
               start under another value says so;
    "content": it names a file or folder whose content is in the run's fingerprint;
    "fixed":   it is in the fingerprint: another value makes another run;
    "data":    as "fixed", and the positions of the blocks depend on it;
    "kept":    another value than the class's default is refused, `because`.
    """

    resume: Scope
    shown: bool = False
    because: str = ""

    def __post_init__(self):
        if self.resume not in typing.get_args(Scope):
            raise TypeError(f"resume={self.resume!r} is not a scope of a flag")
        if bool(self.because) != (self.resume == "kept"):
            raise TypeError("a flag that is kept at its value says why, and no other flag does")


def setting(default: Any, help: str, resume: str | None = None, shown: bool = False) -> Any:
    """A dataclass field that is a flag; `resume` and `shown` as in `Flag`. Without `resume`, the field gives another
    default to an inherited flag, whose `Flag` stays (`flag_of`)."""
    metadata = {"help": help} | ({"flag": Flag(resume, shown)} if resume else {})
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(cls: type, field: dataclasses.Field) -> Flag:
    """The `Flag` of a field: as declared with `setting`, or in the table `inherited_flags` of the class. An
    undeclared flag counts as "fixed", so that a change of it is never silent."""
    return field.metadata.get("flag") or getattr(cls, "inherited_flags", {}).get(field.name, Flag("fixed"))


def flags_of(cls: type) -> dict[str, Flag]:
    """The `Flag` of every field of an argument dataclass, by name, in the order of declaration."""
    return {field.name: flag_of(cls, field) for field in dataclasses.fields(cls) if field.init}


def fixed_values(args: Any) -> dict[str, Any]:
    """The values of an argument dataclass that must not change between two starts of a run, as JSON can hold them."""
    return _values(args, ("fixed", "data"))


def layout_values(args: Any) -> dict[str, Any]:
    """The values of an argument dataclass that change the rounding of a run and nothing else, as JSON can hold them."""
    return _values(args, ("layout",))


def _values(args: Any, scopes: tuple[str, ...]) -> dict[str, Any]:
    names = [name for name, flag in flags_of(type(args)).items() if flag.resume in scopes]
    return {name: plain(getattr(args, name)) for name in names}


def shown_names(*filled: Any) -> list[str]:
    """The names of the flags of filled argument dataclasses that the model card and the ledger show."""
    return [name for args in filled for name, flag in flags_of(type(args)).items() if flag.shown]


def check_kept(cls: type, values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise `InputError` for a flag that must stay at its default and does not."""
    for name, flag in flags_of(cls).items():
        if flag.resume == "kept" and plain(values[name]) != plain(defaults[name]):
            must = "unset" if defaults[name] is None else _written(defaults[name])
            raise InputError(f"{name}={_written(values[name])}: {name} must stay {must}; {flag.because}")


def _check_no_secret(flags: dict[str, Flag], values: dict[str, Any]) -> None:
    """Raise `InputError` for a value that is saved and published with the run, and has a password or a token in it."""
    for name, flag in flags.items():
        if flag.resume != "start" and holds_secret(values[name]):
            raise InputError(
                f"{name}={redact(str(values[name]))} holds a password or a token, which would be saved in preset.yaml "
                "and published: write it as ${NAME}, a variable of the environment, in a corpus preset (--corpus), or "
                "give it to fsspec (its configuration files, or the variables of the file system)"
            )


def _check_numbers(values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise `InputError` for a number that no flag means: not finite, negative (but for a default, which means that
    nothing was chosen), or a whole number that the libraries cannot hold."""
    for name, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float) or number == defaults.get(name):
                continue
            if not math.isfinite(number) or number < 0:
                raise InputError(f"{name}={number} must be a number from 0 on")
            if isinstance(number, int) and number >= NUMBERS_END:
                raise InputError(f"{name}={number} must be below 2^32")


def _fill(cls: type, values: dict[str, Any], defaults: dict[str, Any]) -> Any:
    """`cls(**values)`. What a library raises becomes an `InputError` with its words, and with each flag that it would
    not have been raised without (under its default), or else with all that were set."""
    try:
        return cls(**values)
    except InputError:
        raise
    except Exception as error:  # each library has exceptions of its own
        chosen = [name for name in values if plain(values[name]) != plain(defaults[name])]
        guilty = [name for name in chosen if _is_taken(cls, {**values, name: defaults[name]})] or chosen
        said = ", ".join(f"{name}={_written(values[name])}" for name in guilty)
        raise InputError(f"{said}: {type(error).__name__}: {first_line(error)}") from None


def _is_taken(cls: type, values: dict[str, Any]) -> bool:
    try:
        cls(**values)
    except Exception:
        return False
    return True


def _written(value: Any) -> str:
    """A value as the command line and a preset have it."""
    return str(value).lower() if isinstance(value, bool) else str(plain(value))


def plain(value: Any) -> Any:
    """A flag's value as JSON can hold it: an Enum's value, a dataclass (`AcceleratorConfig`) as a mapping."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list):
        return [plain(item) for item in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The default after a flag that has one, the description's lines as they are written, one spelling of a flag."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)

    def _format_action_invocation(self, action):
        spellings = action.option_strings
        action.option_strings = [option for option in spellings if "-" not in option.lstrip("-")]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = spellings


def _groups(dataclass_types: Sequence[type]) -> list[type]:
    """The flags of argument dataclasses as `HfArgumentParser` takes them: a dataclass for each group of `--help`, named
    by the class that declares the flags."""
    groups: dict[str, list[tuple]] = {}
    for cls in dataclass_types:
        hints = typing.get_type_hints(cls)
        for field in (field for field in dataclasses.fields(cls) if field.init):
            owner = next(base for base in cls.__mro__ if field.name in vars(base).get("__annotations__", {}))
            metadata = {key: value for key, value in field.metadata.items() if key != "flag"}
            if hints[field.name] == bool | None and field.default is None:  # `--bf16` alone is true
                metadata |= {"nargs": "?", "const": True}
            bare = dataclasses.field(
                default=field.default, default_factory=field.default_factory, metadata=metadata, kw_only=True
            )
            title = getattr(owner, "_argument_group_name", INHERITED_GROUP)
            groups.setdefault(title, []).append((field.name, hints[field.name], bare))
    return [
        dataclasses.make_dataclass("Group", fields, namespace={"_argument_group_name": title})
        for title, fields in sorted(groups.items(), key=lambda group: group[0] == INHERITED_GROUP)
    ]


class RecipeParser(HfArgumentParser):
    """`HfArgumentParser` that refuses abbreviations and says what was probably meant."""

    def __init__(self, dataclass_types: Sequence[type], **kwargs):
        super().__init__(_groups(dataclass_types), allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)

    def parse_args(self, args=None, namespace=None):
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=")[0]  # without its value, which may be a secret
            hint = did_you_mean(name, re.findall(r"--\w+", self.format_help()))
            self.error(f"unknown argument {name!r}{hint} (--help lists all)")
        _check_numbers(vars(namespace), {name: self.get_default(name) for name in vars(namespace)})
        return namespace

    def error(self, message):
        raise InputError(message)


def config_of(argv: list[str]) -> str | None:
    """The `--config` of a command line; None without one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    return parser.parse_known_args(argv)[0].config


def parse(
    dataclass_types: list[type],
    argv: list[str],
    default_config: str,
    description: str,
    alternatives: tuple[tuple[str, str], ...] = (),
) -> tuple[list[Any], dict[str, Any]]:
    """Read `--config` and the flags on top of it.

    Of two `alternatives` (and of those that a dataclass names), a flag that sets the first replaces the preset's value
    for the second, and vice versa; both at once are an error. Of two that a dataclass `replaces`, the first does
    that to the second, and both may be given. Returns the filled dataclasses, and all resolved values as a preset,
    without flags of a single start (`Flag`). Raises `InputError`.
    """
    usage = "%(prog)s [--config PRESET] [--flag value ...]"
    parser = RecipeParser(dataclass_types, description=description, usage=usage, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="this list")
    parser.add_argument(
        "--config", default=default_config, help="preset; its values are the defaults here, and flags override them"
    )
    defaults = {name: parser.get_default(name) for cls in dataclass_types for name in flags_of(cls)}
    given = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(defaults, _NOT_GIVEN))))
    path, is_help = given.pop("config"), given.pop("help")
    given = {name: value for name, value in given.items() if value is not _NOT_GIVEN}
    if is_help:
        if path != default_config or resolve_path(path).is_file():  # a copied script may lack it
            parser.set_defaults(**read_preset(path, dataclass_types))
        parser.print_help()
        parser.exit()
    preset = read_preset(path, dataclass_types)
    _check_numbers(preset, defaults)
    alternatives += tuple(pair for cls in dataclass_types for pair in getattr(cls, "alternatives", ()))
    replaced = [pair for name, other in alternatives for pair in ((name, other), (other, name)) if given.get(pair[0])]
    replaced += [pair for cls in dataclass_types for pair in getattr(cls, "replaces", ()) if pair[0] in given]
    for _, other in replaced:
        preset.pop(other, None)
    values = {**defaults, **preset, **given}
    for name, other in alternatives:
        if values[name] and values[other]:
            raise InputError(
                f"{name}={values[name]} and {other}={values[other]} exclude each other; leave one of them out"
            )

    filled, resolved = [], {}
    for cls in dataclass_types:
        flags = flags_of(cls)
        check_kept(cls, values, defaults)
        _check_no_secret(flags, values)
        filled.append(_fill(cls, {name: values[name] for name in flags}, defaults))
        resolved |= {
            name: plain(values[name])
            for name, flag in flags.items()
            if flag.resume != "start" and not (values[name] is None and defaults[name] is None)
        }
    return filled, resolved
