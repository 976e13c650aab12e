"""SQuAD's exact match and F1, as the official scripts define them (evaluate-v1.1.py, evaluate-v2.0.py).

Scores of whole files are percentages, as in those scripts.
"""

import re
import string
from collections import Counter
from collections.abc import Callable

_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII's; other punctuation stays
_ARTICLES = re.compile(r"\b(a|an|the)\b")
WITHHELD_ABOVE = 1.0  # no_answer_probability: the threshold of evaluate-v2.0.py unless its user sets another


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(prediction: str, answer: str) -> float:
    """Whether the two are the same text after `normalise`: 1.0 or 0.0."""
    return float(normalise(prediction) == normalise(answer))


def f1(prediction: str, answer: str, empty_matches: bool) -> float:
    """Harmonic mean of precision and recall over words, from 0 to 1; two texts without words match in 2.0 only."""
    words, wanted = normalise(prediction).split(), normalise(answer).split()
    if empty_matches and not (words and wanted):
        return float(words == wanted)
    common = sum((Counter(words) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def best_of(score: Callable[[str, str], float], prediction: str, answers: list[str]) -> float:
    """The highest score over several gold answers."""
    return max(score(prediction, answer) for answer in answers)


def gold_of_version_2(answers: list[str]) -> list[str]:
    """The answers that are more than punctuation and articles; the empty answer where there are none."""
    return [answer for answer in answers if normalise(answer)] or [""]


def best_threshold(
    scores: dict[str, float], texts: dict[str, str], no_answer: dict[str, float], has_answer: dict[str, bool]
) -> tuple[float, float]:
    """(highest mean score x 100, its threshold: questions up to this probability of no answer are answered)."""
    current = best = sum(not has for has in has_answer.values())
    threshold = 0.0
    for name in sorted(no_answer, key=no_answer.get):  # stable: equal probabilities in the order given
        current += scores[name] if has_answer[name] else -1 if texts[name] else 0
        if current > best:
            best, threshold = current, no_answer[name]
    return 100.0 * best / len(scores), threshold


def score_1(texts: dict[str, str], answers: dict[str, list[str]]) -> dict[str, float]:
    """Version 1.1: id -> predicted text, id -> gold answers. A question without a prediction counts as wrong."""
    totals = {"exact_match": 0.0, "f1": 0.0}
    for name, gold in answers.items():
        if name in texts:
            # one after the other, as the official script adds: `sum` rounds otherwise from Python 3.12 on
            totals["exact_match"] += best_of(exact, texts[name], gold)
            totals["f1"] += best_of(lambda a, b: f1(a, b, False), texts[name], gold)
    return {name: 100.0 * total / len(answers) for name, total in totals.items()}


def score_2(
    texts: dict[str, str], answers: dict[str, list[str]], no_answer: dict[str, float] | None = None
) -> dict[str, float]:
    """Version 2.0: an unanswerable question has no gold answers, and the empty text is right. A question above
    `WITHHELD_ABOVE` counts as unanswered; the best scores are those of the texts as they are where every question above
    some probability of no answer is withheld."""
    has_answer = {name: bool(gold) for name, gold in answers.items()}
    scores: dict[str, dict[str, float]] = {"exact": {}, "f1": {}}
    for name in answers:
        gold = gold_of_version_2(answers[name])
        scores["exact"][name] = best_of(exact, texts[name], gold)
        scores["f1"][name] = best_of(lambda a, b: f1(a, b, True), texts[name], gold)
    withheld = {name for name, odds in (no_answer or {}).items() if odds > WITHHELD_ABOVE}
    result: dict[str, float] = {}
    groups = {"": list(answers)}
    groups["HasAns_"] = [name for name in answers if has_answer[name]]
    groups["NoAns_"] = [name for name in answers if not has_answer[name]]
    for prefix, names in groups.items():
        if names:
            for kind, values in scores.items():
                shown = (float(not has_answer[name]) if name in withheld else values[name] for name in names)
                result[prefix + kind] = 100.0 * sum(shown) / len(names)
            result[f"{prefix}total"] = len(names)
    if no_answer:
        for kind, values in scores.items():
            result[f"best_{kind}"], result[f"best_{kind}_thresh"] = best_threshold(values, texts, no_answer, has_answer)
    return result
