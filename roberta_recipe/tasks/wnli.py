"""WNLI's rows as Winograd schemas (GLUE: Wang et al. 2018, section 3.3): which pronoun is replaced, by which phrase.

WNLI's sentence2 repeats a piece of sentence1 in which a phrase stands for a pronoun. Many rows rewrite the piece: other
case, misspelt or missing words. SuperGLUE's WSC has most of the texts, with pronouns and phrases marked.

The rule, for a row:
1. Its text is that of the schemas that have the same words; case, accents, punctuation and spacing do not count, and
   articles and possessive 's only where no schema has the same words with them.
2. Its pronoun is the pronoun of the text at which sentence2 is aligned with the fewest differences, once any phrase may
   stand for the pronoun. Of equals, pronouns that a schema marks come first.
3. Its schema is the schema of that pronoun whose query is the phrase. Where none is, the row becomes a schema of its
   own, with the phrase as its query.
"""

import math
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import NamedTuple

from roberta_recipe.errors import InputError
from roberta_recipe.tasks.wsc import Schema, join

_WORD = re.compile(r"\w+(?:['’`]\w+)*")
_ARTICLES = {"a", "an", "the"}
_PRONOUNS = {"he", "she", "it", "they", "him", "her", "them", "his", "hers", "its", "their", "theirs"}
_LINKS = {"and", "or", "of", "in", "on", "at", "with", "from", "for", "by", "who"}  # a phrase's head is before them

_AGREEMENT = {"are": "is", "were": "was", "have": "has", "do": "does"}  # "they were" becomes "Yakutsk was"

# What an alignment costs, in words: a word that sentence2 adds, leaves out (and each further word of that gap) or
# changes; an article, added or left out; the first word of a phrase that WSC does not have, and each further word; a
# pronoun that WSC does not mark in a text that it has. `benchmarks/wnli_rows.py` measures what they are worth.
_ADDED, _LEFT_OUT, _LEFT_OUT_FURTHER, _CHANGED, _ARTICLE = 1.0, 0.75, 0.25, 1.0, 0.2
_FIRST, _FURTHER, _UNMARKED = 0.2, 0.4, 0.5
_ALIKE = 0.75  # difflib's ratio, from which two words count as spellings of the same word


class Word(NamedTuple):
    """A word of a text: as it is compared, and its characters [start, end)."""

    key: str
    start: int
    end: int


class Aligned(NamedTuple):
    """A row of WNLI as a schema: WSC's where `found` is `FOUND[0]`, else made from the row."""

    schema: Schema
    found: str  # one of FOUND
    marked: tuple[Schema, ...]  # WSC's schemas of the same pronoun
    cost: float  # of the alignment, in words


FOUND = ("WSC's phrase", "another phrase at WSC's pronoun", "another pronoun of WSC's text", "a text that WSC lacks")


def align_rows(rows: Sequence[tuple[str, str]], schemas: Sequence[Schema], where: str) -> list[Aligned]:
    """Each (sentence1, sentence2) of `rows` as a schema, by the rule above. Raises `InputError` that names the row of
    the file `where` (from 1) whose sentence1 has no pronoun."""
    by_text: list[dict[tuple[str, ...], list[Schema]]] = [{}, {}]
    for schema in schemas:
        for loose, known in enumerate(by_text):
            known.setdefault(_keys(words_of(schema.text, bool(loose))), []).append(schema)
    aligned = []
    for number, pair in enumerate(rows, 1):
        text, hypothesis = (join(sentence.split())[0] for sentence in pair)
        for loose, known in enumerate(by_text):
            if of_text := known.get(_keys(words_of(text, bool(loose))), []):
                break
        found = _align(text, hypothesis, of_text, bool(loose), f"{where}, row {number}")
        if found is None:
            raise InputError(
                f"{where}, row {number}: sentence1 {text!r} has no pronoun for which a phrase of sentence2 "
                f"{hypothesis!r} could stand"
            )
        aligned.append(found)
    if aligned and all(row.found == FOUND[-1] for row in aligned):
        given = schemas[0].where.rpartition(":")[0]
        raise InputError(f"{where}: {given} has none of its texts; give SuperGLUE's WSC file of the same split")
    return aligned


@lru_cache(maxsize=1 << 12)
def words_of(text: str, loose: bool = False) -> list[Word]:
    """The words of a text, which are compared without case, accents and punctuation; if `loose`, also without articles
    and possessive 's."""
    words = []
    for found in _WORD.finditer(text):
        plain = unicodedata.normalize("NFKD", found[0].replace("’", "'").replace("`", "'").lower())
        key = "".join(letter for letter in plain if not unicodedata.combining(letter))
        if not (loose and key in _ARTICLES):
            words.append(Word(key.removesuffix("'s") if loose else key, *found.span()))
    return words


def _keys(words: Iterable[Word]) -> tuple[str, ...]:
    return tuple(word.key for word in words)


def _align(text: str, hypothesis: str, schemas: Sequence[Schema], loose: bool, where: str) -> Aligned | None:
    """The best pronoun of a text for a hypothesis, with the schema of the phrase that stands there; None where there is
    no pronoun, or no word in the hypothesis. `schemas` have the words of `text`, but other characters."""
    words, wanted = words_of(text, loose), words_of(hypothesis)
    at: dict[int, list[Schema]] = {}  # by number of the pronoun's word
    for schema in schemas:
        starts = [word.start for word in words_of(schema.text, loose)]
        at.setdefault(bisect_left(starts, schema.start), []).append(schema)
    best: tuple[float, int, tuple[int, int]] | None = None
    for position, word in enumerate(words if wanted else []):
        if position in at or word.key in _PRONOUNS:
            queries = {_keys(words_of(schema.query, True)) for schema in at.get(position, [])}
            cost, span = _phrase_at(position, _keys(words), _keys(wanted), queries)
            cost += 0 if position in at or not schemas else _UNMARKED
            if best is None or cost < best[0]:
                best = cost, position, span
    if best is None:
        return None
    cost, position, (first, last) = best
    phrase = hypothesis[wanted[first].start : wanted[last - 1].end]
    marked = tuple(at.get(position, ()))
    if same := [schema for schema in marked if same_phrase(phrase, schema.query)]:
        nearest = max(same, key=lambda schema: _likeness(phrase.lower(), schema.query.lower()))
        return Aligned(nearest, FOUND[0], marked, cost)
    query, pronoun = re.sub(r"['’`]s$", "", phrase), words[position]
    schema = Schema(-1, text, pronoun.start, pronoun.end, query, None, where)
    return Aligned(schema, FOUND[1 if marked else 2 if schemas else 3], marked, cost)


def _phrase_at(
    position: int, words: Sequence[str], wanted: Sequence[str], queries: set[tuple[str, ...]]
) -> tuple[float, tuple[int, int]]:
    """The lowest cost of `wanted` as a run of `words` in which a phrase stands for the word at `position`, and the
    phrase as words [first, last) of `wanted`."""
    before = _costs_up_to(wanted, words[:position])
    after = _costs_up_to(wanted[::-1], words[:position:-1])[::-1]
    spans = [(first, last) for first in range(len(wanted)) for last in range(first + 1, len(wanted) + 1)]

    def cost(span: tuple[int, int]) -> float:
        first, last = span
        phrase = tuple(key.removesuffix("'s") for key in wanted[first:last] if key not in _ARTICLES)
        if phrase in queries:
            return before[first] + after[last]
        unchanged = _ADDED * (wanted[first:last] == words[position : position + 1])  # the pronoun itself is no phrase
        own = _FIRST + _FURTHER * (len(phrase) - 1) if phrase else _CHANGED  # an article alone is no phrase
        return before[first] + own + unchanged + after[last]

    best = min(spans, key=cost)
    return cost(best), best


def _costs_up_to(wanted: Sequence[str], words: Sequence[str]) -> list[float]:
    """For each n from 0 to all of `wanted`: the cost of its first n words as an end of `words` (edit distance with
    affine gaps, in which the words before that end cost nothing)."""
    row = [0.0] * (len(words) + 1)  # by number of `words` that are used up
    costs = [row[-1]]
    for key in wanted:
        added = _ARTICLE if key in _ARTICLES else _ADDED
        previous, row = row, [row[0] + added]
        gap = math.inf  # the cost where the last of `words` is left out
        for number, word in enumerate(words):
            first, further = (_ARTICLE, _ARTICLE) if word in _ARTICLES else (_LEFT_OUT, _LEFT_OUT_FURTHER)
            gap = min(row[number] + first, gap + further)
            changed = previous[number] + _changed(key, word)
            row.append(min(changed, previous[number + 1] + added, gap))
        costs.append(row[-1])
    return costs


def _changed(key: str, word: str) -> float:
    """What it costs that `key` stands where `word` did: less where they are spellings of the same word."""
    if _AGREEMENT.get(key, key) == _AGREEMENT.get(word, word):
        return 0.0
    likeness = _likeness(key, word)
    return 1 - likeness if likeness >= _ALIKE else _CHANGED


@lru_cache(maxsize=1 << 16)
def _likeness(first: str, second: str) -> float:
    return SequenceMatcher(None, first, second, autojunk=False).ratio()


def same_phrase(first: str, second: str) -> bool:
    """Whether two phrases can name the same thing: their heads are alike, and at most one of them has further words
    ("Tatyana's mother" and "mother", but not "the younger students" and "the older students")."""
    (words, head), (others, other_head) = _content(first), _content(second)
    if not words or not others or ("and" in words) != ("and" in others):
        return False
    left = [word for word in words if not any(_changed(word, other) < _CHANGED for other in others)]
    right = [other for other in others if not any(_changed(word, other) < _CHANGED for word in words)]
    flat = not any(
        word in _LINKS or word.endswith("'s") for phrase in (first, second) for word in phrase.lower().split()
    )
    return not (left and right) and (flat or _changed(head, other_head) < _CHANGED)


def _content(phrase: str) -> tuple[list[str], str]:
    """The words of a phrase without articles, pronouns and possessive 's; its head: the last such word before a
    preposition or "and"."""
    keys = [word.key for word in words_of(phrase)]
    ends = [number for number, key in enumerate(keys) if key in _LINKS and number]
    kept = [key.removesuffix("'s") for key in keys if key not in _ARTICLES | _PRONOUNS]
    before = [key.removesuffix("'s") for key in keys[: ends[0] if ends else None] if key not in _ARTICLES | _PRONOUNS]
    return kept, (before or kept or [""])[-1]
