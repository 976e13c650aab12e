"""Presets: YAML files whose keys are fields of dataclasses, each value checked against the field that it fills."""

import dataclasses
import datetime
import difflib
import re
import types
import typing
from collections.abc import Hashable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from roberta_recipe.errors import InputError, first_line
from roberta_recipe.input_files import is_text, read_text, resolve_path


class _PresetLoader(yaml.SafeLoader):
    """YAML 1.2 floats (`6e-4` is a number, not a string) and no duplicate keys."""

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)  # as it is written, before `<<` is replaced by what it merges
        seen = set()
        for key_node, _ in node.value:
            merges, mark = key_node.tag == "tag:yaml.org,2002:merge", key_node.start_mark
            key = key_node.value if merges else self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise InputError(f"{mark.name}: {key!r} is no key (line {mark.line + 1}); write text in front of the :")
            if key in seen:
                raise InputError(f"{mark.name}: {key!r} is given twice (line {mark.line + 1}); keep one of them")
            seen.add(key)
        return node


_PresetLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.\d*$|^[-+]?\.\d+$"),
    list("-+.0123456789"),
)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `InputError` for a missing file, bad YAML or no mapping."""
    path = resolve_path(path)
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise InputError(f"no such file: {path}" + (f"; its folder has {', '.join(near)}" if near else ""))
    text = read_text(path)
    try:
        loader = _PresetLoader(text)
        loader.name = str(path)  # for the messages of YAML errors
        values = loader.get_single_data()
    except InputError:
        raise
    except Exception as error:  # a YAMLError, and what Python raises for 2024-02-30, !!int foo, !!bool foo
        raise InputError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold `key: value` lines, not {type(values).__name__}")
    return values


def parse_value(text: str, where: str) -> Any:
    """A value as a preset writes it. Raises `InputError`."""
    try:
        return yaml.load(text, Loader=_PresetLoader)  # a safe loader
    except Exception as error:  # as above
        raise InputError(f"{where}: no value that YAML can read: {first_line(error)}") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or nothing where no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


# what pydantic calls what is wrong with a value, in the words of a preset
_WORDS = {
    **{"int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "text"},
    **{"list_type": "a list", "dict_type": "`key: value` lines", "none_required": "null"},
}


def check_type(value: Any, hint: Any) -> Any:
    """`value` as the annotation `hint` wants it (an int becomes a float there). Raises `TypeError`."""
    if any(isinstance(text, str) and not is_text(text) for text in (value if isinstance(value, list) else [value])):
        raise TypeError("text that UTF-8 can hold")
    try:
        return TypeAdapter(_as_written(hint)).validate_python(value, strict=True)
    except ValidationError as error:
        found = [(each, each["loc"][-1:]) for each in error.errors()]
        wanted = [_WORDS.get(each["type"], each["msg"].removeprefix("Input should be ")) for each, _ in found]
        entries = [f" (entry {at[0] + 1})" if at and isinstance(at[0], int) else "" for _, at in found]
        raise TypeError(" or ".join(dict.fromkeys(map("".join, zip(wanted, entries, strict=True))))) from None


def _as_written(hint: Any) -> Any:
    """The annotation with the values of an Enum in its place, and without the `str` that `TrainingArguments` has beside
    one."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return typing.Literal[tuple(member.value for member in hint)]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [(option, _as_written(option)) for option in typing.get_args(hint)]
        has_enum = any(before is not after for before, after in inner)
        return typing.Union[tuple(after for _, after in inner if not (has_enum and after is str))]  # noqa: UP007
    return hint


def read_preset(path: str | Path, dataclass_types: list[type]) -> dict[str, Any]:
    """The values of a preset, each checked against the field it fills. Raises `InputError`."""
    return check_mapping(load_yaml(path), dataclass_types, str(path))


def check_mapping(
    values: dict[str, Any], dataclass_types: list[type], where: str, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`values` with each checked against the field it fills, leaving out the fields `without`. Raises `InputError`."""
    hints = {}
    for cls in dataclass_types:
        annotations = typing.get_type_hints(cls, include_extras=True)
        fields = [field.name for field in dataclasses.fields(cls) if field.init and field.name not in without]
        hints.update({name: annotations[name] for name in fields})
    checked = {}
    for key, value in values.items():
        if key not in hints:
            raise InputError(f"{where}: unknown key {key!r}{did_you_mean(str(key), hints)}")
        try:
            checked[key] = check_type(value, hints[key])
        except TypeError as error:
            unquoted = "text" in str(error) and isinstance(value, bool | int | float | datetime.date)
            quote = "; put it in quotes, or YAML takes it for something else" if unquoted else ""  # no, on, 20220301
            raise InputError(f"{where}: {key} is {value!r}, and must be {error}{quote}") from None
    return checked
