"""RACE features (paper, section 5.3): multiple choice over exam passages; each of the four options and the passage form
a sequence.

Official files: (train|dev|test)/(middle|high)/*.txt, a JSON object each (Lai et al. 2017, arXiv 1704.04683).
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import is_text, load_from_hub, parsing, read_input_json
from roberta_recipe.log import Bar, counted
from roberta_recipe.record import DatasetCard
from roberta_recipe.training.finetune_trainer import padded_to

# RoBERTa-large, test accuracy x 100 (Table 7); the paper has no base model here.
PAPER = {"accuracy": 83.2, "middle": 86.5, "high": 81.3}
HUB_DATASET = "ehovy/race"
LEVELS = ("middle", "high")
FOLDERS = {"train": "train", "validation": "dev", "test": "test"}
LETTERS = "ABCD"
_ENCODED_AT_ONCE = 1000  # texts per tokenizer call


@dataclass(frozen=True)
class RaceExample:
    """A question with its article and options; `answer` is the index of the right option."""

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
    with parsing(path, "a passage of RACE (article, questions, options, answers)"):
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

    A row has `options` (four) and `article`, int32 ids without special tokens, `labels`, and `length`, of the longest
    sequence. The questions of an article share its array.
    """
    articles = list(dict.fromkeys(question.article for question in questions))
    ids = dict(zip(articles, _encode(articles, tokenizer, "articles"), strict=True))
    texts = [question.with_option(option) for question in questions for option in question.options]
    with_options = list(_encode(texts, tokenizer, "options"))
    special = tokenizer.num_special_tokens_to_add(pair=True)
    rows, articles_cut = [], np.zeros(len(questions), dtype=bool)
    options_cut = np.zeros(len(questions), dtype=np.int64)
    for number, question in enumerate(questions):
        four = with_options[number * len(LETTERS) : (number + 1) * len(LETTERS)]
        article = ids[question.article][: 0 if without_article else None]
        options_cut[number] = sum(len(option) > max_option_length for option in four)
        four = [option[:max_option_length] for option in four]
        longest = special + len(article) + max(map(len, four))
        articles_cut[number] = longest > max_seq_length
        row = {"options": four, "article": article, "labels": question.answer, "length": min(longest, max_seq_length)}
        rows.append(row)
    return Features(rows, articles_cut, options_cut)


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase, what: str) -> Iterator[np.ndarray]:
    encode = tokenization.corpus_encoder(tokenizer)
    for first in Bar(range(0, len(texts), _ENCODED_AT_ONCE), f"Tokenizing {what}", leave=False):
        yield from (np.array(ids, dtype=np.int32) for ids in encode(texts[first : first + _ENCODED_AT_ONCE]))


class RaceCollator:
    """Collates rows of `features` into `input_ids`, `attention_mask` and, if the model has them, `token_type_ids`
    (batch, options, longest sequence, rounded up by `padded_to`), and `labels` (batch,)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_seq_length: int):
        self.max_seq_length, self.pad_id = max_seq_length, tokenizer.pad_token_id
        self.cut_left = tokenizer.truncation_side == "left"
        self.with_types = "token_type_ids" in tokenizer.model_input_names
        self.around, self.types = special_tokens(tokenizer)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        multiple = padded_to(self.max_seq_length) or 1
        width = math.ceil(max(row["length"] for row in rows) / multiple) * multiple
        shape = len(rows), len(LETTERS), width
        ids, mask = np.full(shape, self.pad_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        types = np.zeros(shape, dtype=np.int64)
        before, between, behind = self.around
        for number, row in enumerate(rows):
            for choice, option in enumerate(row["options"]):
                room = self.max_seq_length - sum(map(len, self.around)) - len(option)
                start = max(len(row["article"]) - room, 0) if self.cut_left else 0
                article = row["article"][start : start + room]
                sequence = np.concatenate([before, option, between, article, behind])
                ids[number, choice, : len(sequence)], mask[number, choice, : len(sequence)] = sequence, 1
                kinds = np.repeat(self.types, [len(before) + len(option), len(between), len(article) + len(behind)])
                types[number, choice, : len(sequence)] = kinds
        batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        if self.with_types:
            batch["token_type_ids"] = torch.from_numpy(types)
        return batch | {"labels": torch.tensor([row["labels"] for row in rows])}


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[np.ndarray], list[int]]:
    """The special tokens before, between and after the texts of a pair; the token types of the first text, of the
    tokens between, and of the second text."""
    pair = tokenizer("a", "b", return_token_type_ids=True)
    texts = pair.sequence_ids(0)  # by token: 0, 1, or None at special tokens
    first, second = texts.index(0), texts.index(1)
    first_end, second_end = len(texts) - texts[::-1].index(0), len(texts) - texts[::-1].index(1)
    ids, types = np.array(pair["input_ids"], dtype=np.int32), pair["token_type_ids"]
    return [ids[:first], ids[first_end:second], ids[second_end:]], [types[first], types[second - 1], types[second]]
