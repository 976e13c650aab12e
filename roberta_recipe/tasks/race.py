"""RACE features (paper, section 5.3): multiple choice over exam passages; each of the four options and the passage form
a sequence.

Official files: (train|dev|test)/(middle|high)/*.txt, a JSON object each (Lai et al. 2017, arXiv 1704.04683).
"""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import DataCollatorForMultipleChoice, PreTrainedTokenizerBase

from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import explained, is_text, load_from_hub, read_input_json
from roberta_recipe.log import Bar, counted
from roberta_recipe.record import DatasetCard

# RoBERTa-large, test accuracy x 100 (Table 7); the paper has no base model here.
PAPER = {"accuracy": 83.2, "middle": 86.5, "high": 81.3}
HUB_DATASET = "ehovy/race"
LEVELS = ("middle", "high")
FOLDERS = {"train": "train", "validation": "dev", "test": "test"}
LETTERS = "ABCD"


@dataclass(frozen=True)
class RaceExample:
    """A question with its article and options; `answer` is the index of the correct option."""

    id: str  # file and question number
    level: str
    article: str
    question: str
    options: tuple[str, ...]
    answer: int

    def with_option(self, option: str) -> str:
        """Question and option as one text: the option fills the blank or, without a blank, follows the question.
        fairseq's preprocess_RACE.py fills each `_`; here a run of `_` is one blank."""
        filled, blanks = re.subn("_+", lambda _: option, self.question)
        return fold(filled if blanks else f"{self.question} {option}")


def fold(text: str) -> str:
    """`text` with each run of whitespace as one space."""
    return " ".join(text.split())


def read_folder(
    data_dir: Path, split: str, levels: tuple[str, ...], left_out: list[str] | None = None
) -> list[RaceExample]:
    """The questions of "train", "validation" or "test", by level and file number. Passages without questions (two in
    the official train/high) are added to `left_out`. Raises `InputError` with the file and the question."""
    questions: list[RaceExample] = []
    for level in levels:
        folder = data_dir / FOLDERS[split] / level
        paths = [path for path in folder.glob("*.txt") if not path.name.startswith(".")]
        if not paths:
            raise InputError(
                f"{folder} has no *.txt: data_dir={data_dir} must hold RACE's folders (train|dev|test/middle|high); "
                "for a single level, --level middle or high"
            )
        for path in sorted(paths, key=lambda path: (len(path.stem), path.stem)):
            passage = _read_passage(path, level)
            questions += passage
            if left_out is not None and not passage:
                left_out.append(f"{level}/{path.name}")
    return questions


def _read_passage(path: Path, level: str) -> list[RaceExample]:
    """The questions of a passage; some have none. Raises `InputError`."""
    row = read_input_json(path)
    with explained(f"{path} is not a passage of RACE (article, questions, options, answers)"):
        article = fold(row["article"])  # one string for all questions
        columns = zip(row["questions"], row["options"], row["answers"], strict=True)
        return [
            checked_example(f"{level}/{path.name}, question {number}", str(path), level, article, *entry)
            for number, entry in enumerate(columns, 1)
        ]


def read_hub(split: str, levels: tuple[str, ...]) -> list[RaceExample]:
    """The questions of "train", "validation" or "test" from the Hub."""
    questions, folded = [], {}
    for level in levels:
        instead = "the folder of the official files with --data_dir"
        for number, row in enumerate(load_from_hub(HUB_DATASET, level, split=split, instead=instead)):
            article = folded.setdefault(row["article"], fold(row["article"]))
            entry = row["question"], row["options"], row["answer"]
            questions.append(checked_example(f"{row['example_id']}, row {number}", HUB_DATASET, level, article, *entry))
    return questions


def checked_example(
    name: str, where: str, level: str, article: str, text: str, options: list[str], answer: str
) -> RaceExample:
    """A question about a folded article. Raises `InputError` unless it has texts, four options and an answer letter."""
    texts = (article, text, *options) if isinstance(options, list) else ()
    if len(texts) != 2 + len(LETTERS) or not article or not all(map(is_text, texts)) or answer not in tuple(LETTERS):
        raise InputError(
            f"{where}: {name}: needs an article, a question, {len(LETTERS)} options (Unicode texts) and an answer, one "
            f"of {', '.join(LETTERS)}; has options {options!r} and answer {answer!r}"
        )
    return RaceExample(name, level, article, text, tuple(options), LETTERS.index(answer))


_QUESTIONS = 4887  # of the validation set


def dataset_card(level: str, without_article: bool, questions: int) -> DatasetCard:
    """The model card's dataset entry for this number of validation `questions`; it is named RACE only with both levels,
    the articles and RACE's number of questions."""
    changes = ["without_article"] * without_article + [f"level {level}"] * (level != "all")
    changes += [counted(questions, "question")] * (level == "all" and questions != _QUESTIONS)
    metrics = ("accuracy", *(LEVELS if level == "all" else (level,)))
    return {
        "name": f"race ({', '.join(changes)})" if changes else "RACE",
        "hub_id": None if changes else HUB_DATASET,
        "hub_config": None if changes else "all",
        "split": "validation",
        "task_type": "multiple-choice",
        "hub_metrics": {metric: metric for metric in metrics},
        "note": "",
    }


@dataclass
class Features:
    """Features by question, and counts of truncated texts."""

    rows: list[dict[str, Any]]  # for `RaceCollator`
    articles_cut: np.ndarray  # (questions,) whether the article is truncated in one of the four sequences
    options_cut: np.ndarray  # (questions,) number of truncated question-with-option texts


def features(
    questions: list[RaceExample],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    max_option_length: int,
    without_article: bool = False,
) -> Features:
    """`<s> question option </s></s> article </s>` per option: question and option are truncated to `max_option_length`
    tokens, the article to the rest of `max_seq_length`. (fairseq counts `<s>` and `</s>` in the 128, and drops the
    last `</s>` of a long sequence.)

    A row has the `input_ids` and, if the model has them, `token_type_ids` of its four sequences (int32), `labels`, and
    `length`, of the longest sequence.
    """
    backend, joined = tokenization.corpus_backend(tokenizer), tokenization.corpus_backend(tokenizer)
    joined.enable_truncation(max_seq_length, strategy="only_second", direction=tokenizer.truncation_side)
    columns = {"input_ids": "ids", "token_type_ids": "type_ids"}
    columns = {name: key for name, key in columns.items() if name in tokenizer.model_input_names}
    rows, articles_cut, options_cut = [], [], []
    for text, of_article in itertools.groupby(Bar(questions, "Tokenizing", leave=False), lambda one: one.article):
        article = backend.encode("" if without_article else text, add_special_tokens=False)
        for question in of_article:
            texts = [question.with_option(option) for option in question.options]
            options = backend.encode_batch(texts, add_special_tokens=False)
            options_cut.append(sum(len(option) > max_option_length for option in options))
            for option in options:
                option.truncate(max_option_length)
            longest = max(map(len, options)) + len(article) + tokenizer.num_special_tokens_to_add(pair=True)
            articles_cut.append(longest > max_seq_length)
            pairs = [joined.post_process(option, article) for option in options]
            arrays = {name: [np.array(getattr(pair, key), np.int32) for pair in pairs] for name, key in columns.items()}
            rows.append({**arrays, "labels": question.answer, "length": min(longest, max_seq_length)})
    return Features(rows, np.array(articles_cut, dtype=bool), np.array(options_cut, dtype=np.int64))


class RaceCollator(DataCollatorForMultipleChoice):
    """Collates rows of `features` into tensors (batch, options, longest sequence) and `labels` (batch,)."""

    def torch_call(self, rows):
        return super().torch_call([{name: row[name] for name in row if name != "length"} for row in rows])
