"""RACE (paper, section 5.3): passages with four-option questions; each option and the passage form a sequence.

The official layout: train|dev|test / middle|high / *.txt, a JSON object in each file (Lai et al. 2017, arXiv
1704.04683).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from roberta_recipe.arithmetic import round_up
from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import is_text, load_from_hub, read_input_json, taken_apart
from roberta_recipe.log import Bar
from roberta_recipe.record import DatasetCard
from roberta_recipe.training.finetune_trainer import padded_to

# RoBERTa-large in the paper's Table 7: accuracy on the test set, x 100; there is no figure for a base model.
PAPER = {"accuracy": 83.2, "middle": 86.5, "high": 81.3}
HUB_DATASET = "ehovy/race"
LEVELS = ("middle", "high")
FOLDERS = {"train": "train", "validation": "dev", "test": "test"}
LETTERS = "ABCD"
_TOGETHER = 1000  # texts tokenized in one call


@dataclass(frozen=True)
class RaceExample:
    """One question; `answer` is the number of the right option."""

    id: str  # file, and number in the file
    level: str
    article: str
    question: str
    options: tuple[str, ...]
    answer: int

    def with_option(self, option: str) -> str:
        """Question and option as one text: the option fills the blank, or follows a question without a blank (fairseq's
        preprocess_RACE.py, which fills each `_`; here a run of `_` is one blank)."""
        filled, blanks = re.subn("_+", lambda _: option, self.question)
        return fold(filled if blanks else f"{self.question} {option}")


def fold(text: str) -> str:
    """Every run of whitespace as one space."""
    return " ".join(text.split())


def read_folder(
    data_dir: Path, split: str, levels: tuple[str, ...], left_out: list[str] | None = None
) -> list[RaceExample]:
    """The questions of "train", "validation" or "test", by level and number of the file. Passages without questions
    (two of the official train/high) are added to `left_out`. Raises `InputError` that names file and question."""
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
            of_file = _questions_of(path, level)
            questions += of_file
            if left_out is not None and not of_file:
                left_out.append(f"{level}/{path.name}")
    return questions


def _questions_of(path: Path, level: str) -> list[RaceExample]:
    """The questions of a passage; none where its lists are empty. Raises `InputError`."""
    row = read_input_json(path)
    with taken_apart(path, "a passage of RACE (article, questions, options, answers)"):
        article = fold(row["article"])  # here, so that all its questions share one string
        columns = zip(row["questions"], row["options"], row["answers"], strict=True)
        return [
            checked(f"{level}/{path.name}, question {number}", str(path), level, article, *entry)
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
            questions.append(checked(f"{row['example_id']}, row {number}", HUB_DATASET, level, article, *entry))
    return questions


def checked(name: str, where: str, level: str, article: str, text: str, options: list[str], answer: str) -> RaceExample:
    """One question about a folded article. Raises `InputError` unless it has texts, four options and a letter as its
    answer."""
    texts = (article, text, *options) if isinstance(options, list) else ()
    if len(texts) != 2 + len(LETTERS) or not article or not all(map(is_text, texts)) or answer not in tuple(LETTERS):
        raise InputError(
            f"{where}: {name}: an article, a question, {len(LETTERS)} options (all Unicode texts) and one of "
            f"{', '.join(LETTERS)} are needed, not options {options!r} and answer {answer!r}"
        )
    return RaceExample(name, level, article, text, tuple(options), LETTERS.index(answer))


def dataset_card(level: str, without_article: bool) -> DatasetCard:
    """The model card's entry for the data: RACE's where the model sees both levels and the articles."""
    changes = ["without_article"] * without_article + [f"level {level}"] * (level != "all")
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
    """Model inputs by question, and counts of truncated texts."""

    rows: list[dict[str, Any]]  # for `RaceCollator`
    articles_cut: np.ndarray  # (questions,) whether the article is truncated in any of the four sequences
    options_cut: np.ndarray  # (questions,) how many of the four question-with-option texts are truncated


def features(
    questions: list[RaceExample],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    max_option_length: int,
    without_article: bool = False,
) -> Features:
    """`<s> question option </s></s> article </s>` for each option: question and option are truncated to
    `max_option_length` tokens, the article so that the sequence has `max_seq_length`. (fairseq counts `<s>` and `</s>`
    among the 128, and loses the last `</s>` of a long sequence.)

    A row has token ids without special tokens, int32: `options` (four), `article`; `labels`, and `length` of the
    longest sequence. Articles are stored once for all their questions.
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
    for first in Bar(range(0, len(texts), _TOGETHER), f"Tokenizing {what}", leave=False):
        yield from (np.array(ids, dtype=np.int32) for ids in encode(texts[first : first + _TOGETHER]))


class RaceCollator:
    """Rows of `features` as `input_ids`, `attention_mask` (and `token_type_ids` where the model has them), each (batch,
    options, longest sequence of the batch, with `padded_to`), and `labels` (batch,)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_seq_length: int):
        self.max_seq_length, self.pad_id = max_seq_length, tokenizer.pad_token_id
        self.cut_left = tokenizer.truncation_side == "left"
        self.with_types = "token_type_ids" in tokenizer.model_input_names
        self.around, self.types = special_tokens(tokenizer)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = round_up(max(row["length"] for row in rows), padded_to(self.max_seq_length) or 1)
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
    """The special tokens before, between and after the two texts of a pair; and the token types of the first text, of
    the tokens between, and of the second text."""
    pair = tokenizer("a", "b", return_token_type_ids=True)
    texts = pair.sequence_ids(0)  # by token: 0, 1, or None at special tokens
    first, second = texts.index(0), texts.index(1)
    first_end, second_end = len(texts) - texts[::-1].index(0), len(texts) - texts[::-1].index(1)
    ids, types = np.array(pair["input_ids"], dtype=np.int32), pair["token_type_ids"]
    return [ids[:first], ids[first_end:second], ids[second_end:]], [types[first], types[second - 1], types[second]]
