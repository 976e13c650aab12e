"""Dynamic masking (paper, section 4.1): which positions are predicted, and what stands there instead.

A block's mask is a function of (seed, epoch, block id) alone, drawn from a counter-based generator: it is the same
for any number of workers, micro-batch and restart, and another one in every epoch.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling

IGNORED = -100  # the label of a position that is not predicted
EVAL_SEED = 0  # validation masks: the same for every run, whatever its seed


@dataclass
class MlmCollator(DataCollatorForLanguageModeling):
    """`DataCollatorForLanguageModeling` over blocks `{"input_ids", "epoch", "block_id"}`, seeded by block.

    `mask_count="bernoulli"` (Hugging Face): every position that is no special token is predicted with probability
    `mlm_probability`. `"exact"` (fairseq's MaskTokensDataset): floor(mlm_probability x length + u), u uniform in
    [0, 1), positions without replacement, `<s>` and `</s>` among them. Of the predicted positions 80% show `<mask>`,
    10% a random token (no special token, no padding row of the embedding), 10% themselves.

    Returns `input_ids` and `labels` (batch, longest block) int64, `attention_mask` only where something is padded,
    `num_tokens`, the number of positions that are no padding, `digest`, a sum over blocks of a checksum of what the
    model sees of each, and the last example's `states` where it has some. Examples that carry `labels` are padded as
    they are.
    """

    seed: int = 0
    mask_count: Literal["bernoulli", "exact"] = "bernoulli"

    def __post_init__(self):
        super().__post_init__()
        special = np.unique(np.asarray(self.tokenizer.all_special_ids))
        self._is_special = np.zeros(len(self.tokenizer), dtype=bool)
        self._is_special[special] = True
        self._replacements = np.flatnonzero(~self._is_special)

    def mask_block(self, input_ids: np.ndarray, epoch: int, block_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The block as the model sees it, and its labels; both (length,) int64."""
        ids = input_ids.astype(np.int64)
        # key and counter are the place in the run: three draws a position
        rng = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, block_id, epoch, 0]))
        pick, action, token = rng.random((3, len(ids)))
        if self.mask_count == "exact":
            count = int(self.mlm_probability * len(ids) + rng.random())
            predicted = np.zeros(len(ids), dtype=bool)
            predicted[np.argsort(pick)[:count]] = True
        else:
            predicted = (pick < self.mlm_probability) & ~self._is_special[ids]
        labels = np.where(predicted, ids, IGNORED)
        random_from = 1.0 - self.random_replace_prob
        ids[predicted & (action < self.mask_replace_prob)] = self.tokenizer.mask_token_id
        replaced = predicted & (action >= random_from)
        ids[replaced] = self._replacements[(token[replaced] * len(self._replacements)).astype(np.int64)]
        return ids, labels

    def maskable(self, input_ids: np.ndarray) -> np.ndarray:
        """The ids at the positions that may be predicted: all, or those that are no special token."""
        return input_ids if self.mask_count == "exact" else input_ids[~self._is_special[input_ids]]

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        masked = [
            (e["input_ids"], e["labels"])
            if "labels" in e
            else self.mask_block(e["input_ids"], e["epoch"], e["block_id"])
            for e in examples
        ]
        lengths = np.array([len(ids) for ids, _ in masked])
        width = lengths.max()
        if self.pad_to_multiple_of:
            width = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        input_ids = np.full((len(masked), width), self.tokenizer.pad_token_id, dtype=np.int64)
        labels = np.full((len(masked), width), IGNORED, dtype=np.int64)
        for row, (ids, targets) in enumerate(masked):
            input_ids[row, : len(ids)] = ids
            labels[row, : len(ids)] = targets
        digest = sum(
            zlib.crc32(ids.tobytes(), zlib.crc32(targets.tobytes(), e.get("block_id", 0) & 0xFFFFFFFF))
            for e, (ids, targets) in zip(examples, masked, strict=True)
        )
        batch = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
        if lengths.min() < width:
            batch["attention_mask"] = torch.from_numpy((np.arange(width) < lengths[:, None]).astype(np.int64))
        states = {"states": examples[-1]["states"]} if "states" in examples[-1] else {}
        return {**batch, **states, "num_tokens": int(lengths.sum()), "digest": digest}


def fixed_masks(blocks: list[dict[str, Any]], collator: MlmCollator) -> list[dict[str, np.ndarray]]:
    """Validation examples with masks drawn once, so that every evaluation of every run asks the same questions."""
    fixed = MlmCollator(
        collator.tokenizer, mlm_probability=collator.mlm_probability, seed=EVAL_SEED, mask_count=collator.mask_count
    )
    masked = [fixed.mask_block(block["input_ids"], block["epoch"], block["block_id"]) for block in blocks]
    return [{"input_ids": ids, "labels": labels} for ids, labels in masked]


def unigram_entropy(blocks: list[dict[str, Any]], collator: MlmCollator) -> float:
    """Entropy in nats of the distribution of the tokens that may be predicted in `blocks`.

    It is the cross-entropy of the best model that ignores context: one that knows these frequencies exactly. From few
    tokens of a large vocabulary that is more than a model can know, and the entropy is too low a bar.
    """
    counts = np.zeros(len(collator.tokenizer), dtype=np.int64)
    for block in blocks:
        counts += np.bincount(collator.maskable(block["input_ids"]), minlength=len(counts))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
