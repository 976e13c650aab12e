"""Readers of SQuAD's JSON files: questions with their answers, and predictions.

No torch or transformers, so that `tools/squad_score.py` starts at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roberta_recipe.errors import InputError
from roberta_recipe.input_files import explained, is_text, parse_json, read_input_json, read_text
from roberta_recipe.log import listed


@dataclass(frozen=True)
class SquadExample:
    """A question with its context; `answers` are (text, answer_start), empty for an unanswerable question."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]

    @property
    def misplaced(self) -> bool:
        """Whether the context differs from the text of the first answer, which is trained on, at its answer_start."""
        return any(self.context[start : start + len(text)] != text for text, start in self.answers[:1])


def read_file(path: Path, version_2: bool | None) -> list[SquadExample]:
    """The questions of a file, of any version if `version_2` is None: SQuAD's JSON, or rows with `id`, `context`,
    `question` and `answers` (the Hub's columns) as a JSON list, below `data`, or as JSON lines. Raises `InputError`
    with the file and the question."""
    with explained(f"{path} is not in SQuAD's JSON format: data > paragraphs > context, qas > id, question, answers"):
        rows = list(_rows(_content(path)))
    questions = []
    for number, (context, entry) in enumerate(rows, 1):
        if type(entry.get("id")) is int:  # GermanQuAD; predictions files have string keys
            entry["id"] = str(entry["id"])
        if not is_text(entry.get("id")):
            raise InputError(f"{path}: question number {number} needs an id, a string or an integer")
        questions.append(parse_question(str(path), context, entry))
    return check_questions(questions, str(path), version_2)


def _content(path: Path) -> Any:
    """The articles, paragraphs or questions of a file: JSON, or JSON lines."""
    text = read_text(path)
    first, _, others = text.strip().partition("\n")
    if others and first.startswith("{") and first.rstrip().endswith("}"):
        return [parse_json(line, f"{path}:{n}") for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    content = parse_json(text, str(path))
    return content.get("data", [content]) if isinstance(content, dict) else content  # a single line


def _rows(entries: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(context, entry of `qas`) of articles, paragraphs, or rows with a context each."""
    for entry in entries:
        if "paragraphs" in entry:
            yield from _rows(entry["paragraphs"])
        elif "qas" in entry:
            yield from ((entry.get("context"), dict(question)) for question in entry["qas"])
        else:
            yield entry["context"], dict(entry)


def parse_question(where: str, context: Any, entry: dict[str, Any]) -> SquadExample:
    """The question of an entry of `qas` or a row. Raises `InputError` with its id."""
    where = f"{where}: question {entry['id']}"
    with explained(f"{where} is not as in SQuAD: question, answers (a list, each with text and answer_start)"):
        question, answers = entry["question"], entry["answers"]
        if isinstance(answers, dict):  # the Hub's columns: a list of texts, a list of positions
            pairs = tuple(zip(answers["text"], answers["answer_start"], strict=True))
        else:
            pairs = tuple((answer["text"], answer["answer_start"]) for answer in answers)
    if not all(is_text(text) and text.strip() for text in (context, question, *(text for text, _ in pairs))):
        raise InputError(
            f"{where}: context, question and answers must be non-empty Unicode strings; an unanswerable question has "
            "an empty list of answers"
        )
    if wrong := [start for _, start in pairs if type(start) is not int or start < 0]:
        raise InputError(f"{where}: answer_start={wrong[0]!r} must be a character position, from 0 on")
    if entry.get("is_impossible", not pairs) == bool(pairs):
        raise InputError(f"{where} has {len(pairs)} answers, which contradicts is_impossible={entry['is_impossible']}")
    return SquadExample(entry["id"], question.strip(), context, pairs)


def check_questions(questions: list[SquadExample], where: str, version_2: bool | None) -> list[SquadExample]:
    """The same questions. Raises `InputError` for a duplicate id, no answers at all, or data of the other version."""
    seen = set()
    for question in questions:
        if question.id in seen:
            raise InputError(f"{where}: duplicate question id {question.id}; predictions are keyed by id")
        seen.add(question.id)
    unanswerable = [question.id for question in questions if not question.answers]
    if len(unanswerable) == len(questions):
        raise InputError(f"{where}: none of {len(questions)} questions has an answer")
    if unanswerable and version_2 is False:
        raise InputError(
            f"{where}: {len(unanswerable):,} questions have no answer ({listed(unanswerable)}), and this is version "
            "1.1; for 2.0, --version_2_with_negative (to fine-tune: --config presets/squad/v2.0.yaml)"
        )
    if version_2 and not unanswerable:
        raise InputError(
            f"{where}: all {len(questions):,} questions have answers, and version 2.0 has some without: add them, or "
            "leave out --version_2_with_negative (to fine-tune: --config presets/squad/v1.1.yaml)"
        )
    return questions


def read_answers(path: Path, wanted: list[str], what: str, kind: Any) -> tuple[dict[str, Any], list[str], list[str]]:
    """(values of the `wanted` question ids in file order, missing ids, other ids) of a JSON object. Raises `InputError`
    for values of another type than `kind`; `what` is their name in the message."""
    values = read_input_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} must be a JSON object, question id to {what}")
    if wrong := [name for name, value in values.items() if not isinstance(value, kind) or isinstance(value, bool)]:
        raise InputError(f"{path}: the {what} of question {wrong[0]} is {values[wrong[0]]!r}")
    asked = set(wanted)
    present = {name: value for name, value in values.items() if name in asked}
    return present, [name for name in wanted if name not in values], sorted(values.keys() - asked)


def gold_answers(questions: list[SquadExample]) -> dict[str, list[str]]:
    """Gold answers by question id, for `squad_scores`."""
    return {question.id: [text for text, _ in question.answers] for question in questions}
