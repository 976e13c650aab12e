"""SQuAD (paper, section 5.2): questions from the official JSON, windows with exact labels, spans from scores.

Characters are those of Python strings: a place in a context is an index into it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from roberta_recipe.args import InputError

HUB_DATASETS = {False: "rajpurkar/squad", True: "rajpurkar/squad_v2"}  # by version_2_with_negative
_TOGETHER = 1000  # questions tokenized in one call
_WINDOWS_AT_ONCE = 64
_SPANS_OF_A_WINDOW = 20  # times n_best_size: candidates, most of which overlap a better one


@dataclass(frozen=True)
class Question:
    """One question; `answers` are (text, first character in the context), none where it is unanswerable."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]

    @property
    def misplaced(self) -> bool:
        """Whether an answer's text is not where it should be."""
        return any(self.context[start : start + len(text)] != text for text, start in self.answers)


@dataclass
class Windows:
    """What the model sees of the questions, in their order; a long context takes several windows."""

    features: list[dict[str, Any]]  # labels: 1 where the window has the answer, then start_positions, end_positions
    question: np.ndarray  # (windows,) number of the question
    offsets: list[
        np.ndarray
    ]  # a window: (tokens, 2) first character and the one behind the last; -1 outside of context
    questions_cut: int


def read_file(path: Path, version_2: bool) -> list[Question]:
    """The questions of a file in the official JSON format. Raises `InputError` that names file and question."""
    try:
        with open(path, encoding="utf-8") as stream:
            articles = json.load(stream)["data"]
        rows = list(_rows(path, articles))
    except FileNotFoundError:
        raise InputError(f"{path} is missing: SQuAD's own file, or one in its JSON format") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is not in SQuAD's JSON format (data > paragraphs > context, qas > id, question, answers > text, "
            f"answer_start): {type(error).__name__}: {error}"
        ) from None
    return checked(rows, str(path), version_2)


def _rows(path: Path, articles: list[dict]) -> Iterator[Question]:
    for article in articles:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                answers = tuple((one["text"], int(one["answer_start"])) for one in entry["answers"])
                question = Question(entry["id"], entry["question"].strip(), paragraph.get("context", ""), answers)
                if entry.get("is_impossible", not answers) == bool(answers):
                    what = "answers, and is_impossible is true" if answers else "no answers, and is_impossible is false"
                    raise InputError(f"{path}: question {question.id} has {what}")
                yield question


def read_hub(split: str, version_2: bool) -> list[Question]:
    """The questions of a split ("train", "validation") from the Hub."""
    name = HUB_DATASETS[version_2]
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # the Hub client raises a dozen kinds
        raise InputError(
            f"cannot load {name} ({split}): {type(error).__name__}: {error}. Without the Hub, give the folder of the "
            "official JSON files with --data_dir, or --train_file and --validation_file"
        ) from None
    questions = []
    for row in rows:
        answers = tuple(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True))
        questions.append(Question(row["id"], row["question"].strip(), row["context"], answers))
    return checked(questions, f"{name} ({split})", version_2)


def checked(questions: list[Question], where: str, version_2: bool) -> list[Question]:
    """The same questions. Raises `InputError` for two of one id, none at all, one without text or context, or data of
    the other version."""
    if not questions:
        raise InputError(f"{where} has no questions")
    seen = set()
    for one in questions:
        if one.id in seen:
            raise InputError(f"{where}: question id {one.id} comes twice; predictions are told apart by it")
        seen.add(one.id)
        if not one.context.strip():
            raise InputError(f"{where}: question {one.id} has no context")
        if not one.question:
            raise InputError(f"{where}: question {one.id} has no text")
    unanswerable = [one.id for one in questions if not one.answers]
    if unanswerable and not version_2:
        raise InputError(
            f"{where}: {len(unanswerable):,} questions have no answer ({listed(unanswerable)}), and this is version "
            "1.1; for 2.0, --config presets/squad/v2.0.yaml (--version_2_with_negative true)"
        )
    if version_2 and not unanswerable:
        raise InputError(
            f"{where}: all {len(questions):,} questions have answers, so these are data of version 1.1; --config "
            "presets/squad/v1.1.yaml (--version_2_with_negative false)"
        )
    return questions


def listed(names: list[str], at_most: int = 5) -> str:
    """The first of them, and how many more."""
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more:,} more" if more > 0 else "")


def windows(
    questions: list[Question],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    doc_stride: int,
    max_query_length: int,
    passage_first: bool = False,
) -> Windows:
    """Every question with its context, in as many windows of `max_seq_length` tokens as the context needs, neighbours
    sharing `doc_stride` tokens (as in run_qa.py; in BERT's run_squad.py, doc_stride is the step from one to the next).

    Labels are those of the first answer: the tokens that cover it in a window that has all of it, else 0, the first
    token. `max_query_length`: tokens of a question; longer ones are cut at the end, and counted.
    """
    made, cut = Windows([], np.zeros(0, dtype=np.int32), [], 0), 0
    numbers: list[int] = []
    for first in range(0, len(questions), _TOGETHER):
        some = questions[first : first + _TOGETHER]
        asked, shortened = _shorten([one.question for one in some], tokenizer, max_query_length)
        cut += shortened
        texts = [asked, [one.context for one in some]]
        encoded = tokenizer(
            *(texts[::-1] if passage_first else texts),
            truncation="only_first" if passage_first else "only_second",
            max_length=max_seq_length,
            stride=doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        names = [name for name in ("input_ids", "token_type_ids", "attention_mask") if name in encoded]
        context, ends = None, None
        for row, number in enumerate(encoded["overflow_to_sample_mapping"]):
            one = some[number]
            if one.context is not context:  # questions of one paragraph follow one another
                context, ends = one.context, _words_of(one.context)
            inside = [part == (0 if passage_first else 1) for part in encoded.sequence_ids(row)]
            offsets = _trimmed(np.array(encoded["offset_mapping"][row], dtype=np.int32), np.array(inside), *ends)
            span = locate(offsets, *one.answers[0]) if one.answers else None
            labels = {"labels": int(span is not None)}
            labels |= dict(zip(("start_positions", "end_positions"), span or (0, 0), strict=True))
            made.features.append({**{name: encoded[name][row] for name in names}, **labels})
            made.offsets.append(offsets)
            numbers.append(first + number)
    made.question, made.questions_cut = np.array(numbers, dtype=np.int32), cut
    return made


def _shorten(texts: list[str], tokenizer, at_most: int) -> tuple[list[str], int]:
    """Texts of at most so many tokens, and how many were longer."""
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    cut = [
        text[: offsets[at_most - 1][1]] if len(offsets) > at_most else text
        for text, offsets in zip(texts, encoded, strict=True)
    ]
    return cut, sum(len(offsets) > at_most for offsets in encoded)


def _words_of(context: str) -> tuple[np.ndarray, np.ndarray]:
    """(characters + 1,) each: the first character from here on that is no space, and where the last one before here
    ends."""
    solid = np.array([not character.isspace() for character in context])
    places = np.arange(len(context) + 1)
    forward = np.where(np.append(solid, True), places, len(context))
    backward = np.where(np.insert(solid, 0, True), places, 0)
    return np.minimum.accumulate(forward[::-1])[::-1], np.maximum.accumulate(backward)


def _trimmed(offsets: np.ndarray, inside: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Offsets without the spaces of a token (a byte-level one begins with its space); -1 where nothing of the context
    is left."""
    offsets = np.stack([forward[offsets[:, 0] * inside], backward[offsets[:, 1] * inside]], axis=1).astype(np.int32)
    offsets[~inside | (offsets[:, 0] >= offsets[:, 1])] = -1
    return offsets


def locate(offsets: np.ndarray, text: str, start: int) -> tuple[int, int] | None:
    """First and last token of the fewest that cover an answer; None where the window has not all of it."""
    start, end = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
    tokens = np.flatnonzero(offsets[:, 0] >= 0)
    starts, ends = offsets[tokens, 0], offsets[tokens, 1]
    first, last = np.searchsorted(ends, start, "right"), np.searchsorted(starts, end, "left") - 1
    cut_before, cut_behind = first == 0 and starts[0] > start, last == len(tokens) - 1 and ends[-1] < end
    if first > last or cut_before or cut_behind:
        return None
    return int(tokens[first]), int(tokens[last])


def recovery(questions: list[Question], made: Windows) -> dict[str, Any]:
    """What the labels give back of the first answers: how many verbatim, the others with what they became, and how many
    stand in no window as a whole."""
    back: dict[int, str] = {}
    for number, feature, offsets in zip(made.question, made.features, made.offsets, strict=True):
        if feature["labels"]:
            start, end = offsets[feature["start_positions"], 0], offsets[feature["end_positions"], 1]
            back[number] = questions[number].context[start:end]
    first = {number: one.answers[0][0] for number, one in enumerate(questions) if one.answers}
    others = [(questions[number].id, first[number], text) for number, text in back.items() if text != first[number]]
    return {
        "answers": len(first),
        "verbatim": len(back) - len(others),
        "in_no_window": len(first) - len(back),
        "others": others,
    }


@dataclass
class Spans:
    """The best spans of a question, best first: (spans,) each."""

    score: np.ndarray  # start logit + end logit
    start_logit: np.ndarray
    end_logit: np.ndarray
    texts: list[str]
    no_answer: float | None = None  # 2.0: the probability that there is none

    def answer(self, threshold: float | None) -> str:
        """The best span's text; the empty one where no answer is more probable than `threshold`."""
        withheld = threshold is not None and self.no_answer > threshold
        return self.texts[0] if self.texts and not withheld else ""


def best_spans(
    questions: list[Question],
    made: Windows,
    scores: np.ndarray,
    n_best_size: int,
    max_answer_length: int,
    version_2: bool = False,
) -> list[Spans]:
    """For each question, its best spans over all windows, none overlapping a better one, of at most
    `max_answer_length` tokens. `scores`: (windows, tokens, 2 or 3), start logit, end logit, the classifier's.

    The probability of no answer (2.0): the classifier's, a question being as answerable as its most answerable window;
    without one, that of the null span, both logits of the first token, against the best other one, the lowest over
    windows (BERT, arXiv 1810.04805, section 4.3).
    """
    found: list[list[np.ndarray]] = [[] for _ in questions]
    by_length = sorted(range(len(made.offsets)), key=lambda window: len(made.offsets[window]))
    for first in range(0, len(by_length), _WINDOWS_AT_ONCE):
        some = by_length[first : first + _WINDOWS_AT_ONCE]
        spans = _candidates(made, scores, some, n_best_size, max_answer_length)
        for window, candidates in zip(some, spans, strict=True):
            found[made.question[window]].append(candidates)
    best = [
        _disjoint(np.concatenate(candidates), one.context, n_best_size)
        for one, candidates in zip(questions, found, strict=True)
    ]
    if version_2:
        for spans, logit in zip(best, _no_answer_logits(made, scores, best), strict=True):
            spans.no_answer = float(1 / (1 + np.exp(-np.clip(logit, -700, 700))))
    return best


def _no_answer_logits(made: Windows, scores: np.ndarray, best: list[Spans]) -> np.ndarray:
    """(questions,) log odds that there is no answer."""
    if scores.shape[-1] == 3:
        answerable = np.full(len(best), -np.inf)
        np.maximum.at(answerable, made.question, scores[:, 0, 2].astype(float))
        return -answerable
    null = np.full(len(best), np.inf)
    np.minimum.at(null, made.question, scores[:, 0, 0].astype(float) + scores[:, 0, 1])
    return null - np.array([spans.score[0] if spans.texts else -np.inf for spans in best])


def _candidates(made: Windows, scores: np.ndarray, some: list[int], n_best_size: int, max_answer_length: int):
    """(spans, 5) of each window: score, start logit, end logit, first character and the one behind the last."""
    width = max(len(made.offsets[window]) for window in some)
    offsets = np.full((len(some), width, 2), -1, dtype=np.int32)
    for row, window in enumerate(some):
        offsets[row, : len(made.offsets[window])] = made.offsets[window]
    logits = np.where(offsets[..., :1] >= 0, scores[some, :width, :2], -np.inf)
    lengths = min(max_answer_length, width)
    totals = np.full((len(some), lengths, width), -np.inf, dtype=np.float32)  # of a span by (tokens - 1, first token)
    for more in range(lengths):
        totals[:, more, : width - more] = logits[:, : width - more, 0] + logits[:, more:, 1]
    totals = totals.reshape(len(some), -1)
    count = min(_SPANS_OF_A_WINDOW * n_best_size, totals.shape[1])
    places = np.argpartition(totals, -count, axis=1)[:, -count:]
    more, start = np.divmod(places, width)
    rows = np.arange(len(some))[:, None]
    end = np.minimum(start + more, width - 1)  # beyond it, the total is -inf
    columns = np.stack(
        [
            np.take_along_axis(totals, places, 1),
            logits[rows, start, 0],
            logits[rows, end, 1],
            offsets[rows, start, 0],
            offsets[rows, end, 1],
        ],
        axis=-1,
    )
    return [spans[np.isfinite(spans[:, 0])] for spans in columns]


def _disjoint(spans: np.ndarray, context: str, at_most: int) -> Spans:
    """The best spans, each leaving out those that overlap it."""
    spans = spans[np.argsort(-spans[:, 0], kind="stable")]
    kept = []
    while len(spans) and len(kept) < at_most:
        best = spans[0]
        kept.append(best)
        spans = spans[(spans[:, 4] <= best[3]) | (spans[:, 3] >= best[4])]
    score, start_logit, end_logit, start, end = np.array(kept).reshape(-1, 5).T
    texts = [context[int(a) : int(b)] for a, b in zip(start, end, strict=True)]
    return Spans(score, start_logit, end_logit, texts)


def n_best(spans: Spans) -> list[dict[str, Any]]:
    """A question's entry of nbest_predictions.json: probabilities over the spans, and of the empty text (2.0)."""
    shares = np.exp(spans.score - spans.score.max(initial=-np.inf))
    shares = shares / shares.sum() * (1 - (spans.no_answer or 0))
    entries = [
        {"text": text, "probability": float(share), "start_logit": float(start), "end_logit": float(end)}
        for text, share, start, end in zip(spans.texts, shares, spans.start_logit, spans.end_logit, strict=True)
    ]
    if spans.no_answer is not None:
        entries.append({"text": "", "probability": spans.no_answer})
        entries.sort(key=lambda entry: -entry["probability"])
    return entries


def read_answers(path: Path, wanted: list[str], what: str, kind: type) -> tuple[dict[str, Any], list[str]]:
    """A JSON file of one value for each question id: those wanted, and the ids of others. Raises `InputError` where it
    is none, or an id is missing."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {what} from {path}: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(value, kind) for value in values.values()):
        raise InputError(f"{path} must hold one JSON object, question id to {what}")
    if missing := [name for name in wanted if name not in values]:
        raise InputError(
            f"{path} has no {what} for {len(missing):,} of {len(wanted):,} questions ({listed(missing)}); a score of "
            "the others alone would flatter"
        )
    return {name: values[name] for name in wanted}, sorted(values.keys() - set(wanted))
