"""QNLI as pairwise ranking (paper, section 5.1, task-specific modifications: QNLI): a score for each (question,
sentence) pair, and the cross-entropy of the positive pair among the pairs of its question (MT-DNN, Liu et al. 2019b,
arXiv 1901.11504, section 3).

Unlike the paper's, whose candidates "are mined from the training set" in a way that neither it nor fairseq's code
describes, a question's candidates are its pairs in its own split. A question with a single pair is classified by a
threshold tuned on validation.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorWithPadding

POSITIVE = 0  # QNLI's class of "entailment"
NEGATIVE = 1


def group_features(
    features: list[dict[str, Any]], questions: list[str], labels: list[int]
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Training groups, each a positive pair with all negative pairs of its question; and counts of the questions
    without a positive or without a negative pair.

    A group is `{"pairs": features, the positive pair first, "input_ids": of the longest pair, "labels": 0}`.
    """
    by_question: dict[str, tuple[list[dict], list[dict]]] = {}
    for feature, question, label in zip(features, questions, labels, strict=True):
        by_question.setdefault(question, ([], []))[label].append(feature)
    groups, left_out = [], Counter()
    for positives, negatives in by_question.values():
        if not positives or not negatives:
            left_out["without a positive" if negatives else "without a negative"] += 1
            continue
        for positive in positives:
            pairs = [positive, *negatives]
            longest = max((pair["input_ids"] for pair in pairs), key=len)
            groups.append({"pairs": pairs, "input_ids": longest, "labels": 0})
    return groups, left_out


class RankingCollator(DataCollatorWithPadding):
    """Groups as the rows of their pairs, `labels` and `group_sizes` (groups,); single pairs as they are."""

    def __call__(self, features):
        if "pairs" not in features[0]:
            return super().__call__(features)
        keys = [key for key in features[0]["pairs"][0] if key != "labels"]
        batch = super().__call__([{key: pair[key] for key in keys} for group in features for pair in group["pairs"]])
        batch["labels"] = torch.tensor([group["labels"] for group in features])
        batch["group_sizes"] = torch.tensor([len(group["pairs"]) for group in features])
        return batch


def ranking_loss(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over groups of the cross-entropy of their positive pair in nats, scores (pairs,)); 0 for single pairs."""
    labels, sizes = batch.pop("labels"), batch.pop("group_sizes", None)
    scores = model(**batch).logits.squeeze(-1)
    if sizes is None:
        return 0.0 * scores.sum(), scores
    groups = torch.nn.utils.rnn.pad_sequence(scores.float().split(sizes.tolist()), True, -torch.inf)
    return torch.nn.functional.cross_entropy(groups, labels, reduction="sum"), scores


def rank(scores: np.ndarray, questions: list[str], threshold: float) -> np.ndarray:
    """(pairs,) classes: the pair with the highest score of each question is positive; a question's only pair, where its
    score is above `threshold`."""
    best: dict[str, int] = {}
    counts = Counter(questions)
    for number, question in enumerate(questions):
        if question not in best or scores[number] > scores[best[question]]:
            best[question] = number
    classes = np.full(len(scores), NEGATIVE)
    for question, number in best.items():
        if counts[question] > 1 or scores[number] > threshold:
            classes[number] = POSITIVE
    return classes


def threshold_for_singles(scores: np.ndarray, questions: list[str], labels: list[int]) -> float:
    """The threshold with the highest accuracy on pairs that are their question's only pair; the lowest of equals."""
    counts = Counter(questions)
    single = np.array([counts[question] == 1 for question in questions])
    values, positive = scores[single], np.array(labels)[single] == POSITIVE
    thresholds = np.concatenate([[-np.inf], np.sort(values)])
    right = [((values > threshold) == positive).mean() if len(values) else 1.0 for threshold in thresholds]
    return float(thresholds[int(np.argmax(right))])
