"""Probe: logistic regression on frozen encoder states, random weights, or word counts (GLUE, single sentences).

    python benchmarks/frozen_probe.py --model_name_or_path runs/roberta_h100 --data_dir glue --task_name sst2

Features are the means of the last layer's states over a text's tokens, standardized. Sample k has its own training
examples and its own random weights (seed k); C is picked by cross-validation within the sample. p: two-sided exact
permutation of the samples' scores against the pretrained encoder's.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import make_scorer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, StandardScaler
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from roberta_recipe.standard_error import with_error
from roberta_recipe.tasks import glue_scores
from roberta_recipe.tasks.glue import TASKS, read_split
from tools.significance import mean_and_error, permutation_p


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--data_dir", required=True, help="folder of GLUE's official files")
    parser.add_argument("--task_name", choices=["sst2", "cola"], default="sst2")
    parser.add_argument("--examples", type=int, nargs="+", default=[500, 1000, 2000], help="size of a training sample")
    parser.add_argument("--samples", type=int, default=5)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="sklearn")  # defaults of its next versions
    task, tokenizer = TASKS[args.task_name], AutoTokenizer.from_pretrained(args.model_name_or_path)
    train, test = (read_split(task, args.task_name, split, args.data_dir) for split in ("train", "validation"))
    if (wanted := args.samples * max(args.examples)) > len(train):
        parser.error(f"{args.samples} disjoint samples of {max(args.examples)} are {wanted} of {len(train)} examples")
    order = np.random.default_rng(0).permutation(len(train))
    metric, labels = getattr(glue_scores, task.metric), (np.array(train.labels), np.array(test.labels))
    texts = [[text for (text,) in split.texts] for split in (train, test)]
    pretrained = AutoModel.from_pretrained(args.model_name_or_path)
    test_states = mean_states(pretrained, tokenizer, texts[1])
    for size in args.examples:
        scores: dict[str, list[float]] = {"pretrained": [], "random weights": [], "counts of words": []}
        for sample in range(args.samples):
            rows = order[sample * size : (sample + 1) * size]
            chosen = [texts[0][row] for row in rows]
            set_seed(sample)
            random = AutoModel.from_config(AutoConfig.from_pretrained(args.model_name_or_path))
            counts = CountVectorizer(token_pattern=r"\S+").fit(chosen)
            states = mean_states(pretrained, tokenizer, chosen), test_states
            random_states = [mean_states(random, tokenizer, part) for part in (chosen, texts[1])]
            numbers = [counts.transform(part) for part in (chosen, texts[1])]
            scaled = ((states, StandardScaler()), (random_states, StandardScaler()), (numbers, MaxAbsScaler()))
            for values, (features, scaler) in zip(scores.values(), scaled, strict=True):
                values.append(score(features, labels[0][rows], labels[1], metric, scaler))
        for name, values in scores.items():
            p = "" if name == "pretrained" else f", p {permutation_p(scores['pretrained'], values):.4f}"
            print(f"{size} examples, {name}: {with_error(*mean_and_error(values))}{p}  {np.round(values, 1)}")


@torch.no_grad()
def mean_states(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> np.ndarray:
    """(texts, hidden size): last hidden states, averaged over each text's tokens."""
    model.eval()
    means = []
    for start in range(0, len(texts), 64):
        batch = tokenizer(texts[start : start + 64], padding=True, truncation=True, return_tensors="pt")
        states, mask = model(**batch).last_hidden_state, batch["attention_mask"][:, :, None]
        means.append((states * mask).sum(1) / mask.sum(1))
    return torch.cat(means).numpy()


def score(features: Sequence, labels: np.ndarray, test_labels: np.ndarray, metric, scaler) -> float:
    """Test score x 100 of a logistic regression on standardized features."""
    regression = LogisticRegressionCV(Cs=8, cv=5, max_iter=2000, scoring=make_scorer(metric))
    classifier = make_pipeline(scaler, regression).fit(features[0], labels)
    return 100 * float(metric(test_labels, classifier.predict(features[1])))


if __name__ == "__main__":
    main()
