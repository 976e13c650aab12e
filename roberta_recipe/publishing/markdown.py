"""Names and texts from outside (models, sources, tasks, paths, notes) in Markdown that the Hub and GitHub show: none of
them becomes HTML, a link, a heading or a column. By CommonMark 0.31 and GitHub's tables."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

_HARMLESS = re.compile(r"[\w ,.;:/+()%?!'=-]*")
_LINKED = re.compile(r"(\S*(?:://|www\.|\w@\w)\S*)", re.I)  # words that GitHub makes a link of without brackets
_CODE = re.compile(r"(`+)(?!`)(.*?)(?<!`)\1(?!`)")


def code(value: Any) -> str:
    """`value` as code, on one line: nothing in it is Markdown."""
    text = _one_line(value)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    padding = " " if text.startswith("`") or text.endswith("`") or not text.strip() else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def name(value: Any) -> str:
    """`value` as it is where it is plain words, else as `code`."""
    text = _one_line(value)
    return text if _HARMLESS.fullmatch(text) and not _LINKED.search(text) else code(text)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table as READMEs and model cards have it; a bar in a cell, which is Markdown, opens no column."""
    rows = [head, ["---" for _ in head], *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in rows)


def sentence(text: str) -> str:
    """Text in which `code` and **weight** are marked, with nothing else of Markdown or HTML in it."""
    done, at = [], 0
    for found in _CODE.finditer(text := _one_line(text)):
        done += [_escaped(text[at : found.start()]), found[0]]
        at = found.end()
    return "".join([*done, _escaped(text[at:])])


def _escaped(text: str) -> str:
    pieces = _LINKED.split(text)  # every other piece is such a word
    pieces[::2] = [re.sub(r"([\\<>\[\]`&])", r"\\\1", piece) for piece in pieces[::2]]
    pieces[1::2] = [code(word) for word in pieces[1::2]]
    return "".join(pieces)


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())
