"""Markdown tables of READMEs and model cards."""

import re
from collections.abc import Iterable, Sequence
from typing import Any


def plain(value: Any) -> str:
    """`value` as Markdown on one line, without HTML outside of `code`."""
    return re.sub("(`[^`]*`)|<", lambda found: found[1] or r"\<", " ".join(str(value).split()))


def table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A table; a bar in a cell opens no column."""
    rows = [head, ["---" for _ in head], *lines]
    return "\n".join("| " + " | ".join(plain(cell).replace("|", r"\|") for cell in line) + " |" for line in rows)
