"""GLUE's metrics (`glue_scores.py`) as an `evaluate` module.

Glue("cola").compute(predictions=[...], references=[...])                                # in Python
evaluate.load("roberta_recipe/tasks/glue_metric.py", "cola").compute(...)                 # from its path, offline

`evaluate` copies this file and `glue_scores.py` and nothing else, so they import nothing else of the repository.
"""

import datasets
import evaluate

from .glue_scores import GLUE_METRICS, scores


class Glue(evaluate.Metric):
    """The metrics of one GLUE task (`config_name`), see `scores`."""

    def _info(self):
        if self.config_name not in GLUE_METRICS:
            raise KeyError(f"{self.config_name!r} is not a task of GLUE: {', '.join(GLUE_METRICS)}")
        value = datasets.Value("float64" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Wang et al. 2018, GLUE (arXiv 1804.07461)",
            inputs_description="predictions and references: class numbers, or scores for stsb",
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions, references):
        return scores(GLUE_METRICS[self.config_name], predictions, references)
