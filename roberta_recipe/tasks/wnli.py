"""Alignment of WNLI's rows with SuperGLUE's Winograd schemas (GLUE: Wang et al. 2018, section 3.3).

WNLI's sentence2 repeats a part of sentence1 with a phrase in place of a pronoun, often with other case, misspelt or
missing words. SuperGLUE's WSC has most of the texts, with pronouns and phrases annotated.

1. Match a row with the schemas of the same words, ignoring case, accents, punctuation and spacing; without a match,
   ignore articles and possessive 's too.
2. Choose the pronoun at which sentence2, with a phrase replacing it, has the lowest alignment cost; WSC's phrases cost
   nothing, a pronoun that WSC does not annotate costs extra.
3. Use the pronoun's schema if the phrase can stand for its query, else a new schema with the phrase as query.
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
_PRONOUNS |= {"himself", "herself", "itself", "themselves"}
_POSSESSIVE = {"her", "his", "hers", "its", "their", "theirs"}
_LINKS = {"and", "or", "of", "in", "on", "at", "with", "from", "for", "by", "who"}  # end of a phrase's head

_AGREEMENT = {"are": "is", "were": "was", "have": "has", "do": "does"}  # "they were" becomes "Yakutsk was"

# Alignment costs, in words: insertion, deletion, substitution; an article, another replaced pronoun; gap extension by
# insertion and by deletion; another spelling than WSC's, the first and each further word of a phrase not in WSC; a
# pronoun that WSC does not annotate.
_ADDED, _LEFT_OUT, _CHANGED, _ARTICLE, _REPLACED = 1.0, 0.75, 1.0, 0.2, 0.5
_ADDED_FURTHER, _LEFT_OUT_FURTHER = 0.5, 0.25
_RESPELT, _FIRST, _FURTHER, _UNMARKED = 0.3, 0.6, 0.4, 0.5
_ALIKE = 0.75  # difflib ratio from which two words are spellings of the same word


class Word(NamedTuple):
    """A normalised word, and its characters [start, end) in the text."""

    key: str
    start: int
    end: int


class Aligned(NamedTuple):
    """A row of WNLI as a schema: WSC's own if `origin` is `SCHEMA_ORIGINS[0]`, else made from the row."""

    schema: Schema
    origin: str  # one of SCHEMA_ORIGINS
    marked: tuple[Schema, ...]  # WSC's schemas of the same pronoun
    cost: float  # alignment cost in words


SCHEMA_ORIGINS = (
    "WSC's phrase",
    "another phrase at WSC's pronoun",
    "another pronoun of WSC's text",
    "a text that WSC lacks",
)


def align_rows(rows: Sequence[tuple[str, str]], schemas: Sequence[Schema], where: str) -> list[Aligned]:
    """A schema for each (sentence1, sentence2) of `rows`. Raises `InputError` for a row (from 1) of the file `where`
    without a pronoun, and if no text is in `schemas`."""
    by_text: list[dict[tuple[str, ...], list[Schema]]] = [{}, {}]
    for schema in schemas:
        for loose, known in enumerate(by_text):
            known.setdefault(_keys(words_of(schema.text, bool(loose))), []).append(schema)
    aligned = []
    for number, pair in enumerate(rows, 1):
        text, hypothesis = (join(sentence.split())[0] for sentence in pair)
        same_text = by_text[0].get(_keys(words_of(text)), [])
        loose = not same_text
        if loose:
            same_text = by_text[1].get(_keys(words_of(text, True)), [])
        row = _align(text, hypothesis, same_text, loose, f"{where}, row {number}")
        if row is None:
            raise InputError(f"{where}, row {number}: {text!r} has no pronoun that {hypothesis!r} could replace")
        aligned.append(row)
    if all(row.origin == SCHEMA_ORIGINS[-1] for row in aligned):
        wsc_file = schemas[0].where.rpartition(":")[0]
        raise InputError(f"{where}: {wsc_file} has none of its texts; name SuperGLUE's WSC file of the same split")
    return aligned


@lru_cache(maxsize=1 << 12)
def words_of(text: str, loose: bool = False) -> list[Word]:
    """The words of a text, normalised to lower case without accents; if `loose`, without articles and possessive 's."""
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
    """The pronoun with the lowest alignment cost and its schema; None for a text without pronouns. `schemas` have the
    words of `text`, perhaps in other spelling."""
    words, wanted = words_of(text, loose), words_of(hypothesis)
    at: dict[int, list[Schema]] = {}  # by word index of the pronoun
    for schema in schemas:
        starts = [word.start for word in words_of(schema.text, loose)]
        at.setdefault(bisect_left(starts, schema.start), []).append(schema)
    best: tuple[float, int, tuple[int, int]] | None = None
    for position, word in enumerate(words):
        if position in at or word.key in _PRONOUNS:
            queries = [schema.query for schema in at.get(position, [])]
            cost, span = _best_phrase(position, _keys(words), _keys(wanted), queries)
            cost += 0 if position in at or not schemas else _UNMARKED
            if best is None or cost < best[0]:
                best = cost, position, span
    if best is None:
        return None
    cost, position, (first, last) = best
    phrase = hypothesis[wanted[first].start : wanted[last - 1].end]
    marked = tuple(at.get(position, ()))
    if same := [schema for schema in marked if extra_words(phrase, schema.query) is not None]:
        nearest = max(same, key=lambda schema: _similarity(phrase.lower(), schema.query.lower()))
        return Aligned(nearest, SCHEMA_ORIGINS[0], marked, cost)
    query, pronoun = re.sub(r"['’`]s$", "", phrase), words[position]
    schema = Schema(-1, text, pronoun.start, pronoun.end, query, None, where)
    return Aligned(schema, SCHEMA_ORIGINS[1 if marked else 2 if schemas else 3], marked, cost)


def _best_phrase(
    position: int, words: Sequence[str], wanted: Sequence[str], queries: Sequence[str]
) -> tuple[float, tuple[int, int]]:
    """The lowest cost of aligning `wanted` with a run of `words` in which a phrase replaces the word at `position`, and
    the phrase, words [first, last) of `wanted`."""
    before = _prefix_costs(wanted, words[:position])
    after = _prefix_costs(wanted[::-1], words[:position:-1])[::-1]
    spans = [(first, last) for first in range(len(wanted)) for last in range(first + 1, len(wanted) + 1)]

    def cost(span: tuple[int, int]) -> float:
        first, last = span
        phrase, pronoun = wanted[first:last], words[position]
        unfit = tuple(phrase) == (pronoun,) or (phrase[-1].endswith("'s") and pronoun not in _POSSESSIVE)
        return before[first] + _phrase_cost(phrase, queries) + _CHANGED * unfit + after[last]

    best = min(spans, key=cost)
    return cost(best), best


def _phrase_cost(phrase: Sequence[str], queries: Iterable[str]) -> float:
    """The cost of a phrase that replaces a pronoun for which WSC has `queries`."""
    keys = tuple(key.removesuffix("'s") for key in phrase if key not in _ARTICLES)
    if not keys:  # a lone article
        return _FIRST + _CHANGED
    text = " ".join(phrase)
    if any(keys == _keys(words_of(query, True)) for query in queries):
        return 0.0
    extra = [count for query in queries if (count := extra_words(text, query)) is not None]
    if extra:
        return _RESPELT + _FURTHER * min(extra)
    return _FIRST + _FURTHER * (len(keys) - 1)


def _prefix_costs(wanted: Sequence[str], words: Sequence[str]) -> list[float]:
    """The cost of aligning each prefix of `wanted`, from none to all, with a suffix of `words` (affine gaps)."""
    row = [0.0] * (len(words) + 1)  # by number of `words` consumed
    added = [math.inf] * len(row)  # the same, ending in an insertion
    costs = [row[-1]]
    for key in wanted:
        first, further = (_ARTICLE, _ARTICLE) if key in _ARTICLES else (_ADDED, _ADDED_FURTHER)
        added = [min(cost + first, gap + further) for cost, gap in zip(row, added, strict=True)]
        previous, row = row, [added[0]]
        left_out = math.inf  # ending in a deletion
        for number, word in enumerate(words):
            first, further = (_ARTICLE, _ARTICLE) if word in _ARTICLES else (_LEFT_OUT, _LEFT_OUT_FURTHER)
            left_out = min(row[number] + first, left_out + further)
            row.append(min(previous[number] + _substitution_cost(key, word), added[number + 1], left_out))
        costs.append(row[-1])
    return costs


def _substitution_cost(key: str, word: str) -> float:
    """The cost of `key` for `word`: lower for spellings of the same word."""
    if _AGREEMENT.get(key, key) == _AGREEMENT.get(word, word):
        return 0.0
    if word in _PRONOUNS:
        return _REPLACED
    likeness = _similarity(key, word)
    return 1 - likeness if likeness >= _ALIKE else _CHANGED


@lru_cache(maxsize=1 << 16)
def _similarity(first: str, second: str) -> float:
    return SequenceMatcher(None, first, second, autojunk=False).ratio()


@lru_cache(maxsize=1 << 16)
def extra_words(phrase: str, query: str) -> int | None:
    """The number of words that `phrase` has and `query` lacks; None if the two do not name the same thing: at most one
    may have extra words, and their heads must agree ("Tatyana's mother" and "mother", but not "the younger students"
    and "the older students"). Names may be shortened ("Nell" for "Nell Raleigh")."""
    (words, head), (others, other_head) = _content_words(phrase), _content_words(query)
    if not words or not others or ("and" in words) != ("and" in others):
        return None
    extra = [word for word in words if not any(_substitution_cost(word, other) < _CHANGED for other in others)]
    lacking = [other for other in others if not any(_substitution_cost(word, other) < _CHANGED for word in words)]
    is_name = not any(word.key in _LINKS or word.key.endswith("'s") for word in words_of(query))
    if (extra and lacking) or not (_substitution_cost(head, other_head) < _CHANGED or (is_name and not extra)):
        return None
    return len(extra)


def _content_words(phrase: str) -> tuple[list[str], str]:
    """A phrase's words without articles, pronouns and possessive 's, and its head, the last of them before a
    preposition or conjunction."""
    keys = [word.key for word in words_of(phrase)]
    end = next((number for number, key in enumerate(keys) if key in _LINKS and number), None)
    content, before = (
        [key.removesuffix("'s") for key in part if key not in _ARTICLES | _PRONOUNS] for part in (keys, keys[:end])
    )
    return content, (before or content or [""])[-1]
