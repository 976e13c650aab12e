"""SQuAD's files: questions with their answers, and the predictions that are scored against them.

Imports no library of training, so that `tools/squad_score.py` starts at once. A position in a context counts the
characters of a Python string.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roberta_recipe.errors import InputError
from roberta_recipe.input_files import is_text, parse_json, read_input_json, read_text, taken_apart
from roberta_recipe.log import counted


@dataclass(frozen=True)
class Question:
    """`answers` are (text, first character in the context); an unanswerable question has none."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]

    @property
    def misplaced(self) -> bool:
        """Whether the text of an answer is not at its first character."""
        return any(self.context[start : start + len(text)] != text for text, start in self.answers)


def read_file(path: Path, version_2: bool | None) -> list[Question]:
    """The questions of a file, of either version where `version_2` is None: SQuAD's JSON, or one row a question (`id`,
    `context`, `question`, `answers`, as in the tables of the Hub), as a list, below `data`, or one a line. Raises
    `InputError` that names file and question."""
    with taken_apart(path, "in SQuAD's JSON format: data > paragraphs > context, qas > id, question, answers"):
        rows = list(_rows(_content(path)))
    questions = []
    for number, (context, entry) in enumerate(rows, 1):
        name = entry.get("id")
        entry["id"] = str(name) if type(name) is int else name  # as in GermanQuAD; keys of a predictions file are texts
        if not is_text(entry["id"]):
            raise InputError(f"{path}: question number {number} has no id that is a text or a whole number")
        questions.append(question_of(str(path), context, entry))
    return checked(questions, str(path), version_2)


def _content(path: Path) -> Any:
    """The articles, paragraphs or questions of a file: JSON, or JSON lines."""
    text = read_text(path)
    first, _, others = text.strip().partition("\n")
    if others and first.startswith("{") and first.rstrip().endswith("}"):
        return [parse_json(line, f"{path}:{n}") for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    content = parse_json(text, str(path))
    return content["data"] if isinstance(content, dict) else content


def _rows(entries: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(context, question with its answers) of articles, of paragraphs, or of questions with their own context."""
    for entry in entries:
        if "paragraphs" in entry:
            yield from _rows(entry["paragraphs"])
        elif "qas" in entry:
            yield from ((entry.get("context"), dict(question)) for question in entry["qas"])
        else:
            yield entry["context"], dict(entry)


def question_of(where: str, context: Any, entry: dict[str, Any]) -> Question:
    """The question of an entry of `qas`. Raises `InputError` that names it."""
    where = f"{where}: question {entry['id']}"
    if not is_text(context) or not context.strip():
        raise InputError(f"{where} has no context")
    if not is_text(entry.get("question")) or not entry["question"].strip():
        raise InputError(f"{where} has no text")
    answers = entry.get("answers")
    if isinstance(answers, dict):  # a row of a table: a list of texts, a list of positions
        with contextlib.suppress(KeyError, TypeError, ValueError):
            pairs = zip(answers["text"], answers["answer_start"], strict=True)
            answers = [{"text": text, "answer_start": start} for text, start in pairs]
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise InputError(f"{where}: answers must be a list, each with text and answer_start")
    for answer in answers:
        text, start = answer.get("text"), answer.get("answer_start")
        if not is_text(text) or not text.strip():
            raise InputError(f"{where} has an answer without text; an unanswerable question has an empty list")
        if type(start) is not int or start < 0:
            raise InputError(f"{where}: answer_start={start!r} must be the number of a character, from 0 on")
    if entry.get("is_impossible", not answers) == bool(answers):
        what = "answers, and is_impossible is true" if answers else "no answers, and is_impossible is false"
        raise InputError(f"{where} has {what}")
    found = tuple((answer["text"], answer["answer_start"]) for answer in answers)
    return Question(entry["id"], entry["question"].strip(), context, found)


def checked(questions: list[Question], where: str, version_2: bool | None) -> list[Question]:
    """The same questions. Raises `InputError` for a repeated id, no questions at all, or data of the other version."""
    if not questions:
        raise InputError(f"{where} has no questions")
    seen = set()
    for question in questions:
        if question.id in seen:
            raise InputError(f"{where}: question id {question.id} comes twice; predictions are keyed by it")
        seen.add(question.id)
    unanswerable = [question.id for question in questions if not question.answers]
    if unanswerable and version_2 is False:
        raise InputError(
            f"{where}: {len(unanswerable):,} questions have no answer ({listed(unanswerable)}), and this is version "
            "1.1; for 2.0, --version_2_with_negative (to fine-tune: --config presets/squad/v2.0.yaml)"
        )
    if len(unanswerable) == len(questions):
        raise InputError(f"{where}: {counted(len(questions), 'question')}, and none has an answer")
    if version_2 and not unanswerable:
        raise InputError(
            f"{where}: all {len(questions):,} questions have answers, so these are data of version 1.1; leave out "
            "--version_2_with_negative (to fine-tune: --config presets/squad/v1.1.yaml)"
        )
    return questions


def listed(names: list[str], at_most: int = 5) -> str:
    """The first names, and how many more there are."""
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more:,} more" if more > 0 else "")


def read_answers(path: Path, wanted: list[str], what: str, kind: Any) -> tuple[dict[str, Any], list[str], list[str]]:
    """From a JSON file of a value for each question id: the values of `wanted` ids in the order of the file, the wanted
    ids that it lacks, and its ids that are not wanted. Raises `InputError` for another content."""
    values = read_input_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold a JSON object, question id to {what}")
    if wrong := [name for name, value in values.items() if not isinstance(value, kind) or isinstance(value, bool)]:
        raise InputError(f"{path}: the {what} of question {wrong[0]} is {values[wrong[0]]!r}")
    asked = set(wanted)
    found = {name: value for name, value in values.items() if name in asked}
    return found, [name for name in wanted if name not in values], sorted(values.keys() - asked)


def gold_answers(questions: list[Question]) -> dict[str, list[str]]:
    """The texts of the right answers by question id, as `squad_scores` takes them."""
    return {question.id: [text for text, _ in question.answers] for question in questions}
