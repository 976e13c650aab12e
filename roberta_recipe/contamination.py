"""Does the pretraining corpus hold the evaluation sets? Word n-grams of each, looked up in every document (GPT-3, arXiv
2005.14165, appendix C: 13-grams, lower case, no punctuation)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MOSTLY = 0.8  # of a text's n-grams
_FACTOR = np.int64(0x5851F42D4C957F2D)  # odd: the hash of an n-gram is a polynomial of its words' hashes
_EXAMPLES = 3  # of each set


@dataclass
class Text:
    """One text of an evaluation set, and which of its n-grams which source has."""

    of: str  # the set
    id: str
    words: list[str]
    found: dict[str, set[int]] = field(default_factory=dict)  # source -> first words of n-grams


def words_of(text: str) -> list[str]:
    """Lower-case words without punctuation."""
    return re.findall(r"\w+", text.lower())


def ngram_hashes(words: list[str], length: int) -> np.ndarray:
    """(words - length + 1,) int64, good within this process."""
    hashes = np.fromiter(map(hash, words), dtype=np.int64, count=len(words))
    count = len(words) - length + 1
    total = np.zeros(max(count, 0), dtype=np.int64)
    with np.errstate(over="ignore"):
        for place in range(length if count > 0 else 0):
            total = total * _FACTOR + hashes[place : place + count]
    return total


class Index:
    """The n-grams of evaluation texts, to look documents up in."""

    def __init__(self, texts: list[Text], length: int):
        self.texts, self.length = texts, length
        hashes = [ngram_hashes(text.words, length) for text in texts]
        counts = [len(one) for one in hashes]
        every = np.concatenate([*hashes, np.zeros(0, dtype=np.int64)])
        order = np.argsort(every, kind="stable")
        self.hashes = every[order]
        self.owner = np.repeat(np.arange(len(texts), dtype=np.int32), counts)[order]
        # whether some n-gram has these bits: most of a corpus ends there, which costs a tenth of a search
        self.bits = np.int64((1 << max(len(every) * 16, 2).bit_length()) - 1)
        self.seen = np.zeros(int(self.bits) + 1, dtype=bool)
        self.seen[every & self.bits] = True
        self.place = np.concatenate([*map(np.arange, counts), np.zeros(0, dtype=np.int64)]).astype(np.int32)[order]

    def look_up(self, document: str, source: str) -> None:
        """Note in the texts which of their n-grams the document has."""
        words = words_of(document)
        hashes = ngram_hashes(words, self.length)
        maybe = np.flatnonzero(self.seen[hashes & self.bits])
        for start, entry in zip(maybe, np.searchsorted(self.hashes, hashes[maybe]), strict=True):
            while entry < len(self.hashes) and self.hashes[entry] == hashes[start]:
                text, place = self.texts[self.owner[entry]], int(self.place[entry])
                if text.words[place : place + self.length] == words[start : start + self.length]:
                    text.found.setdefault(source, set()).add(place)
                entry += 1


def summarise(texts: Iterable[Text], length: int, sources: list[str]) -> dict[str, dict[str, Any]]:
    """By set: how many texts, how many long enough to ask, how many with an n-gram of the corpus, with most of theirs,
    by source, and the worst examples."""
    sets: dict[str, list[Text]] = {}
    for text in texts:
        sets.setdefault(text.of, []).append(text)
    return {name: _of_set(mine, length, sources) for name, mine in sets.items()}


def _of_set(texts: list[Text], length: int, sources: list[str]) -> dict[str, Any]:
    asked = [text for text in texts if len(text.words) >= length]
    shares = {}
    for number, text in enumerate(asked):
        if text.found:
            shares[number] = len(set.union(*text.found.values())) / (len(text.words) - length + 1)
    worst = sorted(shares, key=lambda number: -shares[number])[:_EXAMPLES]
    return {
        "texts": len(texts),
        "too_short": len(texts) - len(asked),
        "with_an_ngram": len(shares),
        "mostly": sum(share >= MOSTLY for share in shares.values()),
        "by_source": {source: sum(source in text.found for text in asked) for source in sources},
        "examples": [
            {
                "id": asked[number].id,
                "share": round(shares[number], 3),
                "sources": sorted(asked[number].found),
                "text": " ".join(_found_words(asked[number], length)[:40]),
            }
            for number in worst
        ],
    }


def _found_words(text: Text, length: int) -> list[str]:
    """From the first n-gram found on, as far as they follow one another."""
    places = set.union(*text.found.values())
    first = last = min(places)
    while last + 1 in places:
        last += 1
    return text.words[first : last + length]


def table(summary: dict[str, dict[str, Any]], length: int) -> str:
    """A line for each set."""
    lines = [f"{'':<44}{'texts':>8}{'asked':>8}{f'{length}-gram':>9}{'mostly':>8}  by source"]
    for name, row in summary.items():
        asked = row["texts"] - row["too_short"]
        sources = ", ".join(f"{source} {count:,}" for source, count in row["by_source"].items() if count)
        name = name if len(name) < 44 else f"...{name[-40:]}"
        lines.append(f"{name:<44}{row['texts']:>8,}{asked:>8,}{row['with_an_ngram']:>9,}{row['mostly']:>8,}  {sources}")
    return "\n".join(lines)
