"""SQuAD's exact match and F1, equal to the official scripts' (evaluate-v1.1.py, evaluate-v2.0.py); `score_1` and
`score_2` are in per cent, as there."""

import re
import string
from collections import Counter
from collections.abc import Callable

_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only
_ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_ANSWER_ABOVE = 1.0  # default threshold of evaluate-v2.0.py (--na-prob-thresh)


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(prediction: str, answer: str) -> float:
    """1.0 if the two are equal after `normalise`, else 0.0."""
    return float(normalise(prediction) == normalise(answer))


def f1(prediction: str, answer: str, empty_matches: bool) -> float:
    """Word-level F1, from 0 to 1; two texts without words match if `empty_matches` (2.0 only)."""
    words, wanted = normalise(prediction).split(), normalise(answer).split()
    if empty_matches and not (words and wanted):
        return float(words == wanted)
    common = sum((Counter(words) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def best_score(score: Callable[[str, str], float], prediction: str, answers: list[str]) -> float:
    """The highest score over several gold answers."""
    return max(score(prediction, answer) for answer in answers)


def non_empty_answers(answers: list[str]) -> list[str]:
    """The answers that are more than punctuation and articles; without any, the empty answer (2.0)."""
    return [answer for answer in answers if normalise(answer)] or [""]


def best_threshold(
    scores: dict[str, float], texts: dict[str, str], no_answer: dict[str, float], has_answer: dict[str, bool]
) -> tuple[float, float]:
    """(highest mean score in per cent, its threshold: questions with a higher probability of no answer are left
    unanswered)."""
    current = best = sum(not has for has in has_answer.values())
    threshold = 0.0
    for name in sorted(no_answer, key=no_answer.get):  # stable, as the official script
        current += scores[name] if has_answer[name] else -1 if texts[name] else 0
        if current > best:
            best, threshold = current, no_answer[name]
    return 100.0 * best / len(scores), threshold


def score_1(texts: dict[str, str], answers: dict[str, list[str]]) -> dict[str, float]:
    """Scores of version 1.1, from predictions and gold answers by question id. A missing prediction is wrong."""
    totals = {"exact_match": 0.0, "f1": 0.0}
    for name, gold in answers.items():
        if name in texts:
            # not `sum`: it rounds differently from Python 3.12 on
            totals["exact_match"] += best_score(exact, texts[name], gold)
            totals["f1"] += best_score(lambda a, b: f1(a, b, False), texts[name], gold)
    return {name: 100.0 * total / len(answers) for name, total in totals.items()}


def score_2(
    texts: dict[str, str], answers: dict[str, list[str]], no_answer: dict[str, float] | None = None
) -> dict[str, float]:
    """Scores of version 2.0 over all questions, HasAns, NoAns. An unanswerable question has no gold answers, and the
    empty prediction is right. With probabilities of `no_answer`, questions above `NO_ANSWER_ABOVE` count as unanswered,
    and the best scores over all thresholds are added."""
    has_answer = {name: bool(gold) for name, gold in answers.items()}
    scores: dict[str, dict[str, float]] = {"exact": {}, "f1": {}}
    for name in answers:
        gold = non_empty_answers(answers[name])
        scores["exact"][name] = best_score(exact, texts[name], gold)
        scores["f1"][name] = best_score(lambda a, b: f1(a, b, True), texts[name], gold)
    unanswered = {name for name, probability in (no_answer or {}).items() if probability > NO_ANSWER_ABOVE}
    result: dict[str, float] = {}
    groups = {"": list(answers)}
    groups["HasAns_"] = [name for name in answers if has_answer[name]]
    groups["NoAns_"] = [name for name in answers if not has_answer[name]]
    for prefix, names in groups.items():
        if names:
            for kind, values in scores.items():
                counted = (float(not has_answer[name]) if name in unanswered else values[name] for name in names)
                result[prefix + kind] = 100.0 * sum(counted) / len(names)
            result[f"{prefix}total"] = len(names)
    if no_answer:
        for kind, values in scores.items():
            result[f"best_{kind}"], result[f"best_{kind}_thresh"] = best_threshold(values, texts, no_answer, has_answer)
    return result
