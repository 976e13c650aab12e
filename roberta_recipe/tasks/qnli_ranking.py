"""QNLI as pairwise ranking (paper, section 5.1, task-specific modifications: QNLI): one score per (question, sentence)
pair, and cross-entropy of the positive pair among its question's pairs (MT-DNN, arXiv 1901.11504, section 3).

The paper's candidates "are mined from the training set", without details in the paper or in fairseq's code; here they
are the question's pairs in its own split. A question's only pair is classified by a threshold tuned on validation.
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
    """Training groups, a positive pair with all negative pairs of its question, and counts of questions that lack
    either. A group has `pairs` (the positive one first), `input_ids` (of the longest pair) and `labels` (0)."""
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
    """Collates groups into the rows of their pairs, `labels` and `group_sizes` (groups,); single pairs unchanged."""

    def __call__(self, features):
        if "pairs" not in features[0]:
            return super().__call__(features)
        keys = [key for key in features[0]["pairs"][0] if key != "labels"]
        batch = super().__call__([{key: pair[key] for key in keys} for group in features for pair in group["pairs"]])
        batch["labels"] = torch.tensor([group["labels"] for group in features])
        batch["group_sizes"] = torch.tensor([len(group["pairs"]) for group in features])
        return batch


def ranking_loss(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over groups of the positive pair's cross-entropy in nats, 0 for single pairs; scores (pairs,))."""
    labels, sizes = batch.pop("labels"), batch.pop("group_sizes", None)
    scores = model(**batch).logits.squeeze(-1)
    if sizes is None:
        return 0.0 * scores.sum(), scores
    groups = torch.nn.utils.rnn.pad_sequence(scores.float().split(sizes.tolist()), True, -torch.inf)
    return torch.nn.functional.cross_entropy(groups, labels, reduction="sum"), scores


def rank(scores: np.ndarray, questions: list[str], threshold: float) -> np.ndarray:
    """(pairs,) classes: each question's best pair is positive; a single pair, if its score is above `threshold`."""
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
    """The lowest threshold with the highest accuracy on the pairs of questions with a single pair."""
    counts = Counter(questions)
    single = np.array([counts[question] == 1 for question in questions])
    values, positive = scores[single], np.array(labels)[single] == POSITIVE
    thresholds = np.concatenate([[-np.inf], np.sort(values)])
    right = [((values > threshold) == positive).mean() if len(values) else 1.0 for threshold in thresholds]
    return float(thresholds[int(np.argmax(right))])
