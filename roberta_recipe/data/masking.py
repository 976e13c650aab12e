"""Dynamic masking (paper, section 4.1): the predicted positions, and the tokens that replace them.

A block's mask is a function of (seed, epoch, block id), drawn from a counter-based generator: the same for any number
of workers, any micro-batch and after a restart, and different in every epoch.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from roberta_recipe.data import IGNORED, MaskingUnit, mask_units, phrases
from roberta_recipe.data.mask_units import Words
from roberta_recipe.data.order import place_of
from roberta_recipe.data.packing import Block

EVAL_SEED, EVAL_PROBABILITY = 0, 0.15  # of validation masks, the same in every run
DOCUMENT = "document"  # column of a validation example: index of its first document, for standard errors


@dataclass
class MlmCollator(DataCollatorForLanguageModeling):
    """`DataCollatorForLanguageModeling` over blocks (`packing.Block`), seeded by pass and block.

    `mask_count="bernoulli"` (Hugging Face): every position except special tokens is predicted with probability
    `mlm_probability`. `"exact"` (fairseq's MaskTokensDataset): floor(mlm_probability x length + u) positions without
    replacement, u uniform in [0, 1), `<s>` and `</s>` included. 80% of them become `<mask>`, 10% a random token (no
    special token, no padding row of the embedding), 10% stay. `masking_unit` masks words together (`mask_units`): whole
    words as above; spans, n-grams and phrases with the same number of positions on average, where all tokens of a span
    or phrase get the same kind of replacement (SpanBERT).

    Returns `input_ids` and `labels` (batch, longest block) int64; `predicted`, the flat positions of the labels, padded
    with -1; `attention_mask` if anything is padded or `predicted_multiple` > 1. Other columns, except `phrases.COLUMN`,
    become int64, padded with -100 if "label" is in the name, else with 0. Examples with `labels` are already masked.
    """

    seed: int = 0
    mask_count: Literal["bernoulli", "exact"] = "bernoulli"
    masking_unit: MaskingUnit = "token"
    static_masks: int = 0  # K: pass e uses the mask of pass e mod K (BERT: 10); 0: a new mask each pass
    labels_of_mask: dict[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)  # further columns
    predicted_multiple: int = 1  # `predicted` is padded to a multiple of this, for a fixed batch shape

    def __post_init__(self):
        super().__post_init__()
        self._is_special = np.zeros(len(self.tokenizer), dtype=bool)
        self._is_special[self.tokenizer.all_special_ids] = True
        self._replacements = np.flatnonzero(~self._is_special)
        self._mask, self._pad = self.tokenizer.mask_token_id, self.tokenizer.pad_token_id  # read once: slow properties
        self._starts = None if self.masking_unit == "token" else mask_units.word_starts(self.tokenizer)
        self._draws = np.random.Generator(np.random.Philox(key=self.seed))
        self._philox = self._draws.bit_generator.state  # setting the state is 5 times as fast as a new generator

    def _masked(self, block: Block, words: Words | None) -> tuple[np.ndarray, np.ndarray]:
        """(masked input ids, labels) of a block; both (length,) int64."""
        ids, epoch = block["input_ids"].astype(np.int64), block.epoch
        epoch = epoch % self.static_masks if self.static_masks else epoch
        # the counter identifies block and epoch; three draws a position
        self._philox["state"]["counter"] = np.array([0, block.id, epoch, 0], dtype=np.uint64)
        self._draws.bit_generator.state = self._philox
        pick, action, token = self._draws.random((3, len(ids)))
        predicted = self._predicted(ids, words, block.get(phrases.COLUMN), pick, action)
        labels = np.where(predicted, ids, IGNORED)
        ids[predicted & (action < self.mask_replace_prob)] = self._mask
        replaced = predicted & (action >= 1.0 - self.random_replace_prob)
        ids[replaced] = self._replacements[(token[replaced] * len(self._replacements)).astype(np.int64)]
        return ids, labels

    def _predicted(
        self, ids: np.ndarray, words: Words | None, marks: np.ndarray | None, pick: np.ndarray, action: np.ndarray
    ) -> np.ndarray:
        """(length,) bool: the predicted positions. Tokens of a span or phrase get the `action` of its first."""
        if words is None and self.mask_count == "bernoulli":
            return (pick < self.mlm_probability) & ~self._is_special[ids]
        if words is None:
            predicted = np.zeros(len(ids), dtype=bool)
            predicted[np.argsort(pick)[: self._count(len(ids))]] = True
            return predicted
        if self.masking_unit == "whole_word":
            count = self._count(int(words.begins.sum())) if self.mask_count == "exact" else None
            return mask_units.choose_words(words, pick, self.mlm_probability, count)
        budget = self._count(len(ids) - np.count_nonzero(words.special))
        if self.masking_unit in phrases.UNITS:
            begins, ends = mask_units.choose_phrases(words, marks, budget, self._draws)
        else:
            begins, ends = mask_units.choose_spans(words, self.masking_unit, budget, self._draws)
        shown = bytearray(len(ids))
        for begin, end in zip(begins, ends, strict=True):
            shown[begin:end] = b"\1" * (end - begin)
            if self.masking_unit != "ngram":
                action[begin:end] = action[begin]
        return np.frombuffer(shown, dtype=bool)

    def _count(self, of: int) -> int:
        return int(self.mlm_probability * of + self._draws.random())

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:  # by transformers' `__call__`
        seen = self.seen_by_model(examples)
        lengths = np.array([len(columns["input_ids"]) for columns in seen])
        multiple = self.pad_to_multiple_of or 1
        width = math.ceil(lengths.max() / multiple) * multiple
        batch = {name: self._stacked(name, [columns[name] for columns in seen], width) for name in seen[0]}
        predicted = np.flatnonzero(batch["labels"].numpy() != IGNORED)
        padding = -len(predicted) % self.predicted_multiple
        batch["predicted"] = torch.from_numpy(np.pad(predicted, (0, padding), constant_values=-1))
        if lengths.min() < width or self.predicted_multiple > 1:
            batch["attention_mask"] = torch.from_numpy((np.arange(width) < lengths[:, None]).astype(np.int64))
        return batch

    def seen_by_model(self, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The columns of each block as the model sees them, with masked `input_ids`, and `labels`."""
        seen = [{name: value for name, value in block.items() if name != phrases.COLUMN} for block in examples]
        words, ids = itertools.repeat(None), [columns["input_ids"] for columns in seen if "labels" not in columns]
        if self._starts and ids:
            words = mask_units.words_of_blocks(ids, self._starts, self._is_special, self._mask)
        for block, columns in zip(examples, seen, strict=True):
            if "labels" not in columns:
                columns["input_ids"], columns["labels"] = self._masked(block, next(words))
                columns |= {name: make(columns["labels"]) for name, make in self.labels_of_mask.items()}
        return seen

    def _stacked(self, name: str, values: list[Any], width: int) -> torch.Tensor:
        """One column of a batch: (batch,), or (batch, width) with padding."""
        if not isinstance(values[0], np.ndarray):
            return torch.tensor(values, dtype=torch.int64)
        padding = self._pad if name == "input_ids" else IGNORED if "label" in name else 0
        rows = np.full((len(values), width), padding, dtype=np.int64)
        for row, value in zip(rows, values, strict=True):
            row[: len(value)] = value
        return torch.from_numpy(rows)


def fixed_masks(blocks: list[Block], tokenizer: PreTrainedTokenizerBase, **settings: Any) -> list[dict[str, Any]]:
    """Validation examples with the same masks in every run (15%, 80/10/10), each with its `DOCUMENT`."""
    collator = MlmCollator(tokenizer, mlm_probability=EVAL_PROBABILITY, seed=EVAL_SEED, **settings)
    examples, documents = collator.seen_by_model(blocks), {}
    for block, example in zip(blocks, examples, strict=True):
        source, file, _ = place_of(block.id)
        example[DOCUMENT] = documents.setdefault((source, file, block.document), len(documents))
    return examples


def has_targets(examples: list[dict[str, Any]]) -> bool:
    """Whether any position of masked examples is predicted."""
    return any((example["labels"] != IGNORED).any() for example in examples)


def unigram_entropy(blocks: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> float:
    """Entropy in nats of the token distribution in validation `blocks`, without special tokens: the cross-entropy of
    the best model that ignores context. Biased low for few tokens of a large vocabulary."""
    counts = sum(np.bincount(block["input_ids"], minlength=len(tokenizer)) for block in blocks)
    counts[tokenizer.all_special_ids] = 0
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
