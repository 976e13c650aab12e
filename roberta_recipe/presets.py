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
        if inner:
            return {check_type(key, inner[0]): check_type(item, inner[1]) for key, item in value.items()}
        return value
    if isinstance(hint, type) and issubclass(hint, Enum):
        if value in [member.value for member in hint]:
            return value
        raise TypeError(describe_type(hint))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and not is_text(value):
        raise TypeError("text that UTF-8 can hold")
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
    if origin is dict:
        return "`key: value` lines"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(repr(member.value) for member in hint)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


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
            unquoted = "text" in str(error) and isinstance(value, bool | int | float | datetime.date)
            quote = "; put it in quotes, or YAML takes it for something else" if unquoted else ""  # no, on, 20220301
            raise InputError(f"{where}: {key} is {value!r}, and must be {error}{quote}") from None
    return checked
