"""The same list of experiments at several sizes: what `scales:` and `at:` of a list mean, and `--set`.

A file of scales (presets/tables/scales.yaml) has, by name, what a list leaves open (`Scale`). A list, and each of its
rows, may have `at: {<scale>: {<flags>}}`, flags of that scale alone; that of a list, `config` and `seeds` too; a row,
`only: [<scale>]`. `--set flag=value` is a flag of all rows, `--set words.max_documents=100` one of a measure.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from roberta_recipe.errors import InputError
from roberta_recipe.settings import check_mapping, did_you_mean, load_yaml, parse_yaml


@dataclass
class Scale:
    """A size of a list. What the list has itself comes before what stands here; flags are taken one by one."""

    config: str = ""
    seeds: list[int] = field(default_factory=list)
    measures: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    note: str = ""  # what the table says of it
    estimate: bool = False  # whether a run begins with what it will cost


@dataclass
class _Scaled:
    """The keys of a list, and of a row, that depend on the scale or are changed here."""

    scales: str = ""
    output_dir: str = ""
    config: str = ""
    at: dict[str, dict[str, Any]] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)


def at_scale(written: dict[str, Any], path: str, scale: str | None, changes: list[str]) -> tuple[dict[str, Any], Scale]:
    """The keys of a list as one without scales, with changed flags, and the scale. Raises `InputError`."""
    listed, found = _known(written, path), Scale()
    rows = [_known(row, f"{path}, row {number}") for number, row in enumerate(listed.rows, 1)]
    if listed.scales:
        scales = load_yaml(listed.scales)
        if scale not in scales:
            near = did_you_mean(scale, scales) if scale else ""
            raise InputError(
                f"{path} is a list for several sizes: name one with --scale {' or '.join(map(str, scales))}{near}"
            )
        if unknown := {name for of in (listed, *rows) for name in (*of.at, *of.only)} - scales.keys():
            raise InputError(f"{path}: {min(unknown)!r} is no scale of {listed.scales}: {', '.join(map(str, scales))}")
        where = f"{listed.scales}, {scale}"
        if not isinstance(scales[scale], dict):
            raise InputError(f"{where} must be `key: value` lines, not {scales[scale]!r}")
        found = Scale(**check_mapping(scales[scale], [Scale], where))
        written = _merged(written, listed, rows, found, scale)
    elif scale:
        raise InputError(f"--scale {scale}: {path} has no scales")
    for change in changes:
        name, equals, value = change.partition("=")
        if not (name and equals):
            raise InputError(f"--set {change!r}: write flag=value")
        written = _with(written, name, parse_yaml(value, f"--set {change}"))
    return written, found


def _known(written: dict[str, Any], where: str) -> _Scaled:
    """The keys of `_Scaled`, checked; the others are checked where they are used."""
    known = {of.name for of in fields(_Scaled)}
    return _Scaled(**check_mapping({key: of for key, of in written.items() if key in known}, [_Scaled], where))


def _merged(written: dict[str, Any], listed: _Scaled, rows: list[_Scaled], found: Scale, scale: str) -> dict[str, Any]:
    """A list with what a scale leaves to it; flags of `at` come before the list's, and those before the scale's."""
    at = dict(listed.at.get(scale, {}))
    left_open = {"seeds": found.seeds, "measures": found.measures}
    merged = {key: of for key, of in written.items() if key not in ("scales", "at")}
    merged["config"] = at.pop("config", listed.config or found.config)
    if "seeds" in at:
        merged["seeds"] = at.pop("seeds")
    merged["rows"] = [
        {key: of for key, of in row.items() if key not in ("at", "only")}
        | {"flags": {**known.flags, **known.at.get(scale, {})}}
        for row, known in zip(listed.rows, rows, strict=True)
        if scale in (known.only or [scale])
    ]
    merged["flags"] = {**found.flags, **listed.flags, **at}
    if listed.output_dir:
        merged["output_dir"] = f"{listed.output_dir}/{scale}"
    return {**left_open, **merged}


def _with(written: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A list with a flag of all rows, and of the measures that have it; with one of a measure, where `name` begins with
    that and a dot. Raises `InputError` where rows differ in it."""
    listed = _known(written, "the list")
    measure, dot, flag = name.partition(".")
    if dot:
        if measure not in listed.measures:
            raise InputError(f"--set {name}={value}: the list measures {', '.join(listed.measures)}, not {measure}")
        changed = {**listed.measures, measure: {**(listed.measures[measure] or {}), flag: value}}
        return {**written, "measures": changed}
    if differing := [row.get("name") for row in listed.rows if name in (row.get("flags") or {})]:
        raise InputError(f"--set {name}={value}: row {differing[0]!r} has a value of its own, which it is there for")
    measures = {
        measure: {**flags, name: value} if isinstance(flags, dict) and name in flags else flags
        for measure, flags in listed.measures.items()
    }
    return {**written, "flags": {**listed.flags, name: value}, "measures": measures}
