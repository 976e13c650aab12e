"""SQuAD's exact match and F1 (`squad_scores.py`) as an `evaluate` module.

Squad("2.0").compute(predictions=[{"id": ..., "prediction_text": ..., "no_answer_probability": ...}], references=[...])
evaluate.load("roberta_recipe/tasks/squad_metric.py", "1.1").compute(...)        # from its path

Scores are in per cent. References: {"id": ..., "answers": [text, ...]}, without answers for an unanswerable question.
`evaluate` copies this file and `squad_scores.py` and nothing else, so they import nothing else of the repository.
"""

import datasets
import evaluate

from .squad_scores import score_1, score_2

VERSIONS = ("1.1", "2.0")


class Squad(evaluate.Metric):
    """`config_name` is the version. 1.1 returns exact_match and f1; 2.0 returns exact, f1 and total over all questions,
    HasAns and NoAns and, if every prediction has a no_answer_probability, the best scores over all thresholds."""

    def _info(self):
        if self.config_name not in VERSIONS:
            raise KeyError(f"{self.config_name!r} is not a version of SQuAD: {', '.join(VERSIONS)}")
        prediction = {"id": datasets.Value("string"), "prediction_text": datasets.Value("string")}
        if self.config_name == "2.0":
            prediction["no_answer_probability"] = datasets.Value("float64")
        reference = {"id": datasets.Value("string"), "answers": datasets.List(datasets.Value("string"))}
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Rajpurkar et al. 2016 (arXiv 1606.05250), 2018 (arXiv 1806.03822)",
            inputs_description="a prediction and a reference for each question, paired by id",
            features=datasets.Features({"predictions": prediction, "references": reference}),
        )

    def _compute(self, predictions, references):
        texts = {row["id"]: row["prediction_text"] for row in predictions}
        answers = {row["id"]: row["answers"] for row in references}
        if texts.keys() != answers.keys() or len(texts) != len(predictions):
            raise ValueError("predictions and references must have the same ids, each once")
        if self.config_name == "1.1":
            return score_1(texts, answers)
        no_answer = {row["id"]: row["no_answer_probability"] for row in predictions}
        return score_2(texts, answers, None if None in no_answer.values() else no_answer)
