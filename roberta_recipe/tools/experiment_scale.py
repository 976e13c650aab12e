"""The same list of experiments at several sizes: what `scales:` and `at:` of a list mean, and `--set`.

A file of scales (presets/tables/scales.yaml) has, by name, what a list leaves open: `config`, `seeds`, `measures` and
`flags`. A list, and each of its rows, may have `at: {<scale>: {<flags>}}`, flags of that scale alone; that of a list, a
`config` too; a row, `only: [<scale>]`.
"""

from typing import Any

from roberta_recipe.errors import InputError
from roberta_recipe.presets import did_you_mean, load_yaml, parse_value

_OF_LISTS = ("config", "seeds", "measures", "flags")
_OWN = ("note", "estimate")  # what the table says of the scale; whether a run begins with what it will cost


def at_scale(
    written: dict[str, Any], path: str, scale: str | None, changes: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of a list as one that has no scales, and the scale's own. Raises `InputError`."""
    written, own = dict(written), {}
    if file := written.pop("scales", None):
        scales = load_yaml(file)
        if scale not in scales:
            near = did_you_mean(scale, scales) if scale else ""
            raise InputError(f"{path} is a list for several sizes: name one with --scale {' or '.join(scales)}{near}")
        written, own = _merged(written, scales[scale], scale, f"{file}, {scale}")
    elif scale:
        raise InputError(f"--scale {scale}: {path} has no scales")
    for change in changes:
        name, equals, value = change.partition("=")
        if not (name and equals):
            raise InputError(f"--set {change!r}: write flag=value")
        _set(written, name, parse_value(value, f"--set {change}"))
    return written, own


def _merged(written: dict[str, Any], of_scale: Any, scale: str, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A list with what a scale leaves to it; flags of `at` come before the list's, and those before the scale's."""
    if not isinstance(of_scale, dict) or not of_scale.keys() <= {*_OF_LISTS, *_OWN}:
        raise InputError(f"{where} must have keys of {', '.join((*_OF_LISTS, *_OWN))} alone, not {of_scale!r}")
    own = {name: of_scale[name] for name in _OWN if name in of_scale}
    open_ones = {name: of_scale[name] for name in _OF_LISTS if name in of_scale}
    at = dict(written.pop("at", {}).get(scale, {}))
    open_ones |= {"config": at.pop("config")} if "config" in at else {}
    flags = {**of_scale.get("flags", {}), **written.get("flags", {}), **at}
    rows = [dict(row) for row in written.get("rows") or [] if scale in row.get("only", [scale])]
    for row in rows:
        row.pop("only", None)
        row["flags"] = {**row.get("flags", {}), **row.pop("at", {}).get(scale, {})}
    folder = f"{written.get('output_dir')}/{scale}"
    return {**open_ones, **written, "flags": flags, "rows": rows, "output_dir": folder}, own


def _set(written: dict[str, Any], name: str, value: Any) -> None:
    """Give a flag to all rows, and to the measures that have it. Raises `InputError` where rows differ in it."""
    if differing := [row["name"] for row in written.get("rows") or [] if name in row.get("flags", {})]:
        raise InputError(f"--set {name}={value}: row {differing[0]!r} has a value of its own, which it is there for")
    written["flags"] = {**written.get("flags", {}), name: value}
    written["measures"] = {
        measure: {**flags, name: value} if flags and name in flags else flags
        for measure, flags in (written.get("measures") or {}).items()
    }
