"""Markdown tables for READMEs and model cards."""

import re
from collections.abc import Iterable, Sequence
from typing import Any


def plain(value: Any) -> str:
    """`value` as a line of Markdown, with HTML escaped outside of `code`."""
    return re.sub("(`[^`]*`)|<", lambda match: match[1] or r"\<", " ".join(str(value).split()))


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    rows = [head, ["---" for _ in head], *lines]
    return "\n".join("| " + " | ".join(plain(cell).replace("|", r"\|") for cell in line) + " |" for line in rows)
