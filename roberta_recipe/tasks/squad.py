"""SQuAD features and predictions (paper, section 5.2): overlapping windows of a context with start and end labels, and
the n best answer spans from start and end logits. Positions in a context are characters of a Python string.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import load_from_hub
from roberta_recipe.log import Bar, counted
from roberta_recipe.record import DatasetCard
from roberta_recipe.tasks.squad_files import SquadExample, check_questions, parse_question
from roberta_recipe.training.finetune_trainer import compact

# RoBERTa-large in the paper's Table 6: validation, x 100; there is no figure for a base model of the full recipe.
PAPER = {"1.1": {"exact_match": 88.9, "f1": 94.6}, "2.0": {"exact": 86.5, "f1": 89.4}}
# Metrics that the model card publishes: scores, no totals and no thresholds.
_PUBLISHED = {
    "1.1": ("exact_match", "f1"),
    "2.0": ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1", "best_exact", "best_f1"),
}
_OFFICIAL = {  # validation set: number of questions and, as translations have as many, the first one
    "1.1": (10_570, "Which NFL team represented the AFC at Super Bowl 50?"),
    "2.0": (11_873, "In what country is Normandy located?"),
}
HUB_DATASETS = {False: "rajpurkar/squad", True: "rajpurkar/squad_v2"}  # by version_2_with_negative
_ENCODED_AT_ONCE = 1000  # questions tokenized in one call


@dataclass
class Windows:
    """Features in the order of the questions; a long context has several windows."""

    features: list[dict[str, Any]]  # labels: 1 if the window contains the answer, from start_positions to end_positions
    question_index: np.ndarray  # (windows,)
    offsets: list[np.ndarray]  # per window (tokens, 2): first character, last character + 1; -1 outside of the context
    questions_cut: int  # questions longer than `max_query_length`


_LOADING_NOTE = (  # model card, with the answerability classifier
    "The file also has a classifier that says whether a question has an answer, `answerability` (dense, tanh, one "
    "logit, on the first token); the model as loaded here gives spans only, and the scores below need both."
)


def dataset_card(version: str, questions: list[SquadExample], with_classifier: bool = False) -> DatasetCard:
    """The model card's dataset entry of version "1.1" or "2.0", for these validation `questions`; only SQuAD's own give
    the name SQuAD."""
    is_own = (len(questions), questions[0].question) != _OFFICIAL[version]
    return {
        "name": f"squad {version} ({counted(len(questions), 'question')})" if is_own else f"SQuAD {version}",
        "hub_id": None if is_own else HUB_DATASETS[version == "2.0"],
        "hub_config": None,
        "split": "validation",
        "task_type": "question-answering",
        "hub_metrics": {metric: metric for metric in _PUBLISHED[version]},
        "note": "",
        **({"loading_note": _LOADING_NOTE} if with_classifier else {}),
    }


def read_hub(split: str, version_2: bool) -> list[SquadExample]:
    """The questions of "train" or "validation" from the Hub."""
    name = HUB_DATASETS[version_2]
    instead = "the folder of the official JSON files with --data_dir, or --train_file and --validation_file"
    rows = load_from_hub(name, split=split, instead=instead)
    questions = [parse_question(name, row["context"], row) for row in rows]
    return check_questions(questions, f"{name} ({split})", version_2)


def make_windows(
    questions: list[SquadExample],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    doc_stride: int,
    max_query_length: int,
    passage_first: bool = False,
) -> Windows:
    """Each question with its context, in windows of `max_seq_length` tokens. Neighbouring windows share `doc_stride`
    tokens (as in run_qa.py; in BERT's run_squad.py, doc_stride is the step to the next window).

    A window that contains the whole first answer is labelled with the tokens that cover it, other windows with 0, the
    first token. Questions are truncated to `max_query_length` tokens.
    """
    encode = tokenization.text_tokenizer(tokenizer)
    # untrimmed offsets (`_trim_offsets` trims them): byte-level trimming mistakes a first character for the space
    # of `add_prefix_space`
    backend = encode.backend_tokenizer.to_str().replace('"trim_offsets":true', '"trim_offsets":false')
    encode._tokenizer = Tokenizer.from_str(backend)
    features, numbers, all_offsets, cut = [], [], [], 0
    for first in Bar(range(0, len(questions), _ENCODED_AT_ONCE), "Making windows", leave=False):
        some = questions[first : first + _ENCODED_AT_ONCE]
        asked, shortened = _truncate_questions([question.question for question in some], encode, max_query_length)
        cut += shortened
        texts = [asked, [question.context for question in some]]
        encoded = encode(
            *(texts[::-1] if passage_first else texts),
            truncation="only_first" if passage_first else "only_second",
            max_length=max_seq_length,
            stride=doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        if passage_first and encoded.sequence_ids(0)[0] is not None:
            raise InputError(
                f"passage_first=true needs a special token before the pair, to label windows without an answer; the "
                f"tokenizer {tokenizer.name_or_path!r} adds none: use --passage_first false"
            )
        contexts = list(dict.fromkeys(texts[1]))
        whole = encode(contexts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        edges = {context: _text_edges(context, offsets) for context, offsets in zip(contexts, whole, strict=True)}
        for row, number in enumerate(encoded["overflow_to_sample_mapping"]):
            question = some[number]
            inside = np.array([text == (0 if passage_first else 1) for text in encoded.sequence_ids(row)])
            offsets = np.array(encoded["offset_mapping"][row], dtype=np.int32)
            offsets = _trim_offsets(offsets, inside, *edges[question.context])
            span = locate(offsets, *question.answers[0], *edges[question.context]) if question.answers else None
            labels = {"labels": int(span is not None)}
            labels |= dict(zip(("start_positions", "end_positions"), span or (0, 0), strict=True))
            features.append({**compact(encoded, row), **labels})
            all_offsets.append(offsets)
            numbers.append(first + number)
    return Windows(features, np.array(numbers, dtype=np.int32), all_offsets, cut)


def _truncate_questions(texts: list[str], tokenizer, at_most: int) -> tuple[list[str], int]:
    """(texts of at most `at_most` tokens, number of truncated texts)."""
    plain = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    short, cut = list(texts), 0
    for number, offsets in enumerate(tokenizer(texts, **plain)["offset_mapping"]):
        cut += len(offsets) > at_most
        room = at_most
        while len(offsets) > at_most:  # a character of several tokens is dropped whole, and a prefix may encode longer
            short[number] = texts[number][: min(offsets[room - 1][1], offsets[room][0])]
            room, offsets = room - 1, tokenizer(short[number], **plain)["offset_mapping"]
    return short, cut


def _text_edges(context: str, offsets: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays (characters + 1,) by position: the next non-space character inside a token, and the end of the
    previous one. `offsets` are those of all tokens; BERT's normalizer drops combining marks and zero-width spaces."""
    solid = np.zeros(len(context), dtype=bool)
    for start, end in offsets:
        solid[start:end] = True
    solid &= [not character.isspace() for character in context]
    positions = np.arange(len(context) + 1)
    forward = np.where(np.append(solid, True), positions, len(context))
    backward = np.where(np.insert(solid, 0, True), positions, 0)
    return np.minimum.accumulate(forward[::-1])[::-1], np.maximum.accumulate(backward)


def _trim_offsets(offsets: np.ndarray, inside: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Offsets without leading and trailing spaces; -1 for tokens without text of the context."""
    offsets = np.stack([forward[offsets[:, 0] * inside], backward[offsets[:, 1] * inside]], axis=1).astype(np.int32)
    offsets[~inside | (offsets[:, 0] >= offsets[:, 1])] = -1
    return offsets


def locate(
    offsets: np.ndarray, text: str, start: int, forward: np.ndarray, backward: np.ndarray
) -> tuple[int, int] | None:
    """First and last token of the shortest run that covers an answer; None if the window does not contain all of it."""
    start, end = (min(at, len(forward) - 1) for at in (start, start + len(text)))  # misplaced ones may lie beyond
    start, end = forward[start], backward[end]
    tokens = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(tokens):  # only spaces
        return None
    starts, ends = offsets[tokens, 0], offsets[tokens, 1]
    first, last = np.searchsorted(ends, start, "right"), np.searchsorted(starts, end, "left") - 1
    cut_before, cut_behind = first == 0 and starts[0] > start, last == len(tokens) - 1 and ends[-1] < end
    if first > last or cut_before or cut_behind:
        return None
    return int(tokens[first]), int(tokens[last])


def decode_labels(questions: list[SquadExample], windows: Windows) -> dict[str, Any]:
    """Round-trip check of the labels: counts of first answers, of those decoded verbatim, and of those that no window
    contains; `others`: (id, answer, decoded text) of those that differ."""
    decoded: dict[int, str] = {}
    for number, feature, offsets in zip(windows.question_index, windows.features, windows.offsets, strict=True):
        if feature["labels"]:
            start, end = offsets[feature["start_positions"], 0], offsets[feature["end_positions"], 1]
            decoded[number] = questions[number].context[start:end]
    first = {number: question.answers[0][0] for number, question in enumerate(questions) if question.answers}
    others = [(questions[number].id, first[number], text) for number, text in decoded.items() if text != first[number]]
    counts = {"answers": len(first), "verbatim": len(decoded) - len(others), "in_no_window": len(first) - len(decoded)}
    return counts | {"others": others}


@dataclass
class Spans:
    """The n best spans of a question, best first; arrays are (spans,)."""

    score: np.ndarray  # start logit + end logit
    start_logit: np.ndarray
    end_logit: np.ndarray
    texts: list[str]
    no_answer: float | None = None  # 2.0: probability that the question is unanswerable

    def answer(self, threshold: float | None) -> str:
        """The best span's text; empty if `no_answer` is above `threshold`."""
        unanswerable = threshold is not None and self.no_answer > threshold
        return self.texts[0] if self.texts and not unanswerable else ""


def best_spans(
    questions: list[SquadExample],
    windows: Windows,
    scores: np.ndarray,
    n_best_size: int,
    max_answer_length: int,
    version_2: bool = False,
) -> list[Spans]:
    """The n best spans of each question over its windows, of at most `max_answer_length` tokens, without overlaps.
    `scores`: (windows, tokens, 2 or 3), start logit, end logit, the classifier's logit.

    `no_answer` (2.0) comes from the classifier's highest logit over windows. Without a classifier it is the null span's
    score (both logits of the first token, lowest over windows) minus the best span's (BERT, arXiv 1810.04805, section
    4.3, and its run_squad.py).
    """
    window_numbers: list[list[int]] = [[] for _ in questions]
    for window, number in enumerate(windows.question_index):
        window_numbers[number].append(window)
    best = [
        _question_spans(windows, scores, numbers, question.context, n_best_size, max_answer_length)
        for question, numbers in zip(questions, window_numbers, strict=True)
    ]
    if version_2:
        for spans, logit in zip(best, _no_answer_logits(windows, scores, best), strict=True):
            spans.no_answer = float(1 / (1 + np.exp(-np.clip(logit, -700, 700))))
    return best


def _no_answer_logits(windows: Windows, scores: np.ndarray, best: list[Spans]) -> np.ndarray:
    """(questions,) log odds that a question is unanswerable."""
    if scores.shape[-1] == 3:
        answerable = np.full(len(best), -np.inf)
        np.maximum.at(answerable, windows.question_index, scores[:, 0, 2].astype(float))
        return -answerable
    null = np.full(len(best), np.inf)
    np.minimum.at(null, windows.question_index, scores[:, 0, 0].astype(float) + scores[:, 0, 1])
    best_scores = np.array([spans.score[0] if spans.texts else -np.inf for spans in best])
    return null - best_scores


def _question_spans(
    windows: Windows, scores: np.ndarray, numbers: list[int], context: str, n_best_size: int, max_answer_length: int
) -> Spans:
    """The n best spans over the windows `numbers` of a question, picked greedily; each excludes those it overlaps."""
    inside = [np.flatnonzero(windows.offsets[number][:, 0] >= 0) for number in numbers]
    if not any(map(len, inside)):  # the tokenizer drops all characters of the context
        return Spans(*np.zeros((3, 0)), [])
    starts, ends = np.concatenate([windows.offsets[n][tokens] for n, tokens in zip(numbers, inside, strict=True)]).T
    logits = np.concatenate([scores[n][tokens, :2] for n, tokens in zip(numbers, inside, strict=True)])
    window = np.repeat(np.arange(len(numbers)), [len(tokens) for tokens in inside])
    longer = max_answer_length - 1

    def following(values: np.ndarray, padding: float) -> np.ndarray:
        """(tokens, max_answer_length): the values from each token on."""
        return sliding_window_view(np.append(values, np.full(longer, padding, values.dtype)), max_answer_length)

    last, same_window = following(ends, 0), following(window, -1) == window[:, None]
    total = np.where(same_window, logits[:, :1] + following(logits[:, 1], -np.inf), -np.inf)
    picked = []
    while len(picked) < n_best_size and total.size:
        first, more = divmod(int(total.argmax()), max_answer_length)
        if total[first, more] == -np.inf:
            break
        picked.append((total[first, more], logits[first, 0], logits[first + more, 1], starts[first], last[first, more]))
        total[(starts < picked[-1][4])[:, None] & (last > picked[-1][3])] = -np.inf
    score, start_logit, end_logit, start, end = np.array(picked, dtype=float).reshape(-1, 5).T
    texts = [context[int(a) : int(b)] for a, b in zip(start, end, strict=True)]
    return Spans(score, start_logit, end_logit, texts)


def n_best(spans: Spans) -> list[dict[str, Any]]:
    """A question's entry in nbest_predictions.json: the spans and, for 2.0, the empty text, by probability."""
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
