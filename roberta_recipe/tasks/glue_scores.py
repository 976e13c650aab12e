"""Metrics of classification and regression tasks (Wang et al. 2018, table 1)."""

import numpy as np

# by task; the first selects the best epoch and is the metric of the paper's Table 5
GLUE_METRICS = {
    "cola": ("matthews_correlation",),
    "sst2": ("accuracy",),
    "mrpc": ("accuracy", "f1"),
    "stsb": ("pearson", "spearman"),
    "qqp": ("accuracy", "f1"),
    "mnli": ("accuracy",),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
}


def accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    """Share of correct predictions (examples,)."""
    return float((predictions == references).mean())


def f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """Harmonic mean of precision and recall of class 1; 0 if neither side has class 1 (as scikit-learn)."""
    hits = int(((predictions == 1) & (references == 1)).sum())
    total = int((predictions == 1).sum() + (references == 1).sum())
    return 2 * hits / total if total else 0.0


def macro_f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """Mean F1 over the classes in either side, or over the columns of (examples, classes) (as scikit-learn)."""
    if predictions.ndim == 2:
        return float(np.mean([f1(*columns) for columns in zip(predictions.T, references.T, strict=True)]))
    classes = np.union1d(predictions, references)
    return float(np.mean([f1(predictions == number, references == number) for number in classes]))


def matthews_correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    """Correlation of two binary variables, from -1 to 1; 0 where one of them is constant (as scikit-learn)."""
    return float(np.nan_to_num(pearson(predictions, references)))


def pearson(predictions: np.ndarray, references: np.ndarray) -> float:
    """Linear correlation; nan where one side is constant (as scipy)."""
    a, b = predictions - predictions.mean(), references - references.mean()
    scale = float(np.sqrt((a**2).sum() * (b**2).sum()))
    varies = scale > 0 and np.ptp(predictions) > 0 and np.ptp(references) > 0  # the mean of equal numbers is rounded
    return float((a * b).sum()) / scale if varies else float("nan")


def spearman(predictions: np.ndarray, references: np.ndarray) -> float:
    """Pearson's correlation of the ranks; ties have their mean rank."""
    return pearson(_ranks(predictions), _ranks(references))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return ((last - counts + 1 + last) / 2)[inverse]


_ALL = (accuracy, f1, macro_f1, matthews_correlation, pearson, spearman)
FUNCTIONS = {function.__name__: function for function in _ALL} | {"micro_f1": f1}  # of (examples, classes)


def scores(metrics: tuple[str, ...], predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """The `metrics` of class numbers or scores (examples,), not in per cent."""
    predictions, references = np.asarray(predictions, dtype=float), np.asarray(references, dtype=float)
    return {name: FUNCTIONS[name](predictions, references) for name in metrics}
