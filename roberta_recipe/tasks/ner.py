"""Token classification: sentences of CoNLL files (Tjong Kim Sang and De Meulder 2003, arXiv cs/0306050) and of tables,
windows with a label on the first token of each word, and precision, recall and F1 of entities equal to seqeval's."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roberta_recipe.data import IGNORED, tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import is_text, read_text
from roberta_recipe.log import Bar
from roberta_recipe.tasks import own_task
from roberta_recipe.training.finetune_trainer import compact

TABLES = (".json", ".jsonl", ".parquet")
# (start, continuation, valid end) of an entity: patterns for the prefixes of two neighbouring tags, then "=" for one
# type or "!" for two. "default" takes any tags (conlleval, seqeval's default); the others are seqeval's strict mode.
SCHEMES = {
    "default": (".[BS]|[ESO][IE]|[BI][IE]!", "[BI][IE]=", ""),
    "IOB1": ("OI|II!|BI|[IB]B=", "[BI]I=", "[IB]I!|[IB]O|IB|BB="),
    "IOB2": (".B", "[BI]I=", ""),
    "IOBES": (".[BS]", "[BI][IE]=", "[SE]"),
}
ENTITY_TAG = re.compile("O$|[BIES]-")


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence with their tags; no tags in a test set without labels."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


def read_file(path: str, text_column: str, label_column: str) -> own_task.Rows:
    """The rows of a table by its extension (.json, .jsonl, .parquet), else of a CoNLL file: columns are separated by
    tabs where all lines have one, else by tabs and blanks. Comments before a sentence are skipped: lines beginning with
    "# " that have another number of columns, or a "=" and no tab."""
    if Path(path).suffix.lower() == ".csv":
        raise InputError(f"{path}: name a file in CoNLL format (a word per line), JSON lines or Parquet")
    if Path(path).suffix.lower() in TABLES:
        return own_task.read_table(path)
    text, comment = re.sub("\r+\n|\r", "\n", read_text(path)), re.compile("#[ \t]")
    text = re.sub("(?m)^-DOCSTART-.*$", "", text)
    lines, sentences = [line.strip(" \t") for line in text.split("\n")], [[]]
    rows = [line for line in lines if line and not comment.match(line)] or [""]
    has_tabs = all("\t" in line for line in rows)
    split = re.compile(" *\t *" if has_tabs else "[ \t]+").split
    width = len(split(rows[0]))
    for number, line in enumerate(lines, 1):
        if not line:
            sentences.append([])
        elif (
            sentences[-1]
            or not comment.match(line)
            or (("=" not in line or (has_tabs and "\t" in line)) and len(split(line)) == width)
        ):
            sentences[-1].append(split(line))
            if len(sentences[-1][-1]) != width:
                raise InputError(f"{path}, line {number}: {line!r} is not {width} columns; blank lines end sentences")
    sentences = [[*zip(*rows, strict=True)] for rows in sentences if rows]
    words = [word for words, *others in sentences if others for word in words]
    if words and all(map(ENTITY_TAG.match, words)):  # MIT's corpora of films and restaurants
        raise InputError(f"{path}: column 1 has the tags: put the word first and its tag last")
    first = [words[words[0] == "#" :] for words, *others in sentences if others]  # GermEval's comments
    if first and all(re.fullmatch(r"\d+([-.]\d+)?", word) for words in first for word in words):  # 2-3, 8.1: CoNLL-U
        command = f"grep -Ev '^(#|[0-9]+[-.])' FILE | cut -f2,{4 if width == 10 else 3}"  # CoNLL-U's parts of speech
        raise InputError(f"{path}: column 1 is a counter: keep words and tags, {command}")
    rows = [(list(words), list(others[-1]) if others else None) for words, *others in sentences]
    return [dict(zip((text_column, label_column), row, strict=True)) for row in rows]


def parse_rows(where: str, rows: own_task.Rows, text_column: str, label_column: str, is_test: bool) -> list[Sentence]:
    """The sentences of rows with a list of words and of tags; a test set may have no tags, or a single placeholder."""
    sentences, has_tags = [], not is_test or any(row.get(label_column) for row in rows)
    for number, row in enumerate(rows, 1):
        words, tags = row.get(text_column), row.get(label_column) if has_tags else []
        at, name = f"{where}, sentence {number}", f"name one of the columns {', '.join(row)} with"
        is_list = isinstance(words, list) and words
        odd = [word for word in words if not is_text(word) or re.search("^ *$|[\t\r\n]", word)] if is_list else [words]
        if odd:
            raise InputError(f"{at}: {text_column} has {odd[0]!r}, not a word: correct it, or {name} --text_column")
        is_list = isinstance(tags, list) and all(map(own_task.is_label, tags))
        if has_tags and not (is_list and len(tags) == len(words)):
            fault = f"not {len(words)} tags" + "; a test set has them in all rows or in none" * is_test
            raise InputError(f"{at}: {label_column} is {tags!r}, {fault}: add them, or {name} --label_column")
        # BILOU's L and U, BMES's M
        tags = [re.sub("^[LUM]-", lambda start: "ESI"["LUM".index(start[0][0])] + "-", str(tag)) for tag in tags]
        sentences.append(Sentence(tuple(words), tuple(tags)))
    # the first sentence of each tag
    first = {tag: number for number, sentence in [*enumerate(sentences, 1)][::-1] for tag in sentence.tags}
    if is_test and len(first) < 2:
        return [Sentence(sentence.words, ()) for sentence in sentences]
    if all(re.fullmatch(r"-?\d+", tag) for tag in first):
        raise InputError(f"{where}: tags are numbers: write their names, or Parquet with a ClassLabel")
    odd = sorted((tag for tag in first if not ENTITY_TAG.match(tag)), key=first.get)
    if odd and {*first} - {*odd, "O"}:
        fault = f"{odd[0]!r} is not an entity tag, the others are: write B-PER, I-PER or O"
        raise InputError(f"{where}, sentence {first[odd[0]]}: {fault}")
    return sentences


@dataclass
class Windows:
    """Features in the order of the sentences; a long sentence has several windows, without overlap."""

    sentences: list[Sentence]
    names: Sequence[str]  # of the tags by class number, "O" first
    features: list[dict[str, Any]]  # `labels`: a number at the first token of a word, -100 elsewhere
    word_index: list[tuple[int, np.ndarray]]  # by window: its sentence, and the words that have a label

    def tags(self, scores: np.ndarray) -> list[list[str]]:
        """Predicted tags of each sentence. `scores` (windows, tokens): class numbers; 0 for words without a token."""
        tags = [[self.names[0]] * len(sentence.words) for sentence in self.sentences]
        for feature, (number, words), row in zip(self.features, self.word_index, scores, strict=True):
            for word, best in zip(words, row[np.flatnonzero(feature["labels"] != IGNORED)], strict=True):
                tags[number][word] = self.names[int(best)]
        return tags


def make_windows(sentences: list[Sentence], names: Sequence[str], tokenizer, max_seq_length: int) -> Windows:
    """Windows of `max_seq_length` tokens over each sentence, its words joined by spaces. Tags that are not in `names`
    have the label 0, as labels enter the training loss only."""
    encode, numbers = tokenization.text_tokenizer(tokenizer), {name: number for number, name in enumerate(names)}
    encode.truncation_side = "right"  # windows in the order of the text
    windows = Windows(sentences, names, [], [])
    for number, sentence in enumerate(Bar(sentences, "Making windows", leave=False)):
        cut = {"truncation": True, "max_length": max_seq_length, "return_overflowing_tokens": True}
        encoded = encode([" ".join(sentence.words)], **cut, return_offsets_mapping=True)
        # the word of each character; -1 for spaces, as for special tokens (0, 0); an added token may take both spaces
        word_of = np.array([n for n, word in enumerate(sentence.words) for n in [*[n] * len(word), -1]])
        wanted = np.array([numbers.get(tag, 0) for tag in sentence.tags or sentence.words])
        last = -1
        for row, offsets in enumerate(encoded["offset_mapping"]):
            words = np.array([word_of[start:end].max(initial=-1) for start, end in offsets])
            is_first = words > np.maximum.accumulate([last, *words])[:-1]
            last, labels = max(last, words.max()), np.full(len(words), IGNORED, dtype=np.int32)
            labels[is_first] = wanted[words[is_first]]
            windows.features.append({**compact(encoded, row), "labels": labels})
            windows.word_index.append((number, words[is_first]))
    return windows


def entities(tags: Sequence[str], scheme: str) -> set[tuple[str, int, int]]:
    """The entities (type, first word, last word + 1) of a sentence."""
    starts, inside, complete = map(re.compile, SCHEMES[scheme])
    pairs = zip(["O", *tags], [*tags, "O"], strict=True)
    pairs = [f"{a[0]}{b[0]}{'=' if a[2:] == b[2:] else '!'}" for a, b in pairs]
    result, first = set(), 0
    while first < len(tags):
        end = first + 1
        if starts.match(pairs[first]):
            while inside.match(pairs[end]):
                end += 1
            if complete.match(pairs[end]):
                result.add((tags[first][2:], first, end))
        first = end
    return result


def names_and_scheme(sentences: list[Sentence]) -> tuple[tuple[str, ...], str | None]:
    """The tags of training, "O" first, and their tagging scheme (key of `SCHEMES`); None for other tags."""
    names = sorted({tag for sentence in sentences for tag in sentence.tags}, key=lambda tag: (tag != "O", tag))
    if not all(map(ENTITY_TAG.match, names)):
        return tuple(names), None
    starts = [sentence.tags[first][0] for sentence in sentences for _, first, _ in entities(sentence.tags, "default")]
    iob = "IOB1" if starts.count("I") > starts.count("B") else "IOB2"
    return tuple(names), "IOBES" if any(tag[0] in "ES" for tag in names) else iob


def scores(references: Sequence[Sequence[str]], predictions: list[list[str]], scheme: str | None) -> dict[str, float]:
    """Shares: `accuracy` of words and, with a scheme, `f1`, `precision` and `recall` of entities, and `strict_f1`."""
    pairs = [pair for tags in zip(references, predictions, strict=True) for pair in zip(*tags, strict=True)]
    accuracy = {"accuracy": sum(wanted == tag for wanted, tag in pairs) / len(pairs)}
    if not scheme:
        return accuracy
    counts = {}
    for mode in ("default", scheme):
        both = [[entities(tags, mode) for tags in side] for side in (references, predictions)]
        hits = sum(len(gold & found) for gold, found in zip(*both, strict=True))
        counts[mode] = hits, *(sum(map(len, side)) for side in both)
    hits, gold, found = counts["default"]
    f1, strict_f1 = (2 * hits / max(gold + found, 1) for hits, gold, found in counts.values())
    shares = {"precision": hits / max(found, 1), "recall": hits / max(gold, 1)}
    return {"f1": f1, **shares, "strict_f1": strict_f1, **accuracy}
