"""Masks: the paper's rates, a pure function of (seed, epoch, block), optional exact counts."""

import math

import numpy as np
import pytest
import torch
from transformers import DataCollatorForLanguageModeling

from roberta_recipe.data.masking import IGNORED, MlmCollator, fixed_masks, unigram_entropy
from roberta_recipe.data.packing import Block


@pytest.fixture(scope="module")
def blocks(tokenizer):
    rng = np.random.default_rng(0)
    words = rng.integers(261, len(tokenizer) - 1, size=(400, 60)).astype(np.uint16)
    words[:, 0] = tokenizer.bos_token_id
    words[:, [20, 40, 59]] = tokenizer.eos_token_id
    return [Block({"input_ids": ids}, number, document=number // 2) for number, ids in enumerate(words)]


def cut(block, size):
    return Block({"input_ids": block["input_ids"][:size]}, block.id, block.epoch)


def special(tokenizer, ids):
    return torch.isin(ids, torch.tensor(tokenizer.all_special_ids))


def test_rates(tokenizer, blocks):
    batch = MlmCollator(tokenizer, seed=1)(blocks)
    original = torch.from_numpy(np.stack([b["input_ids"] for b in blocks]).astype(np.int64))
    predicted = batch["labels"] != IGNORED
    assert torch.equal(batch["labels"][predicted], original[predicted])
    assert not (predicted & special(tokenizer, original)).any()
    n = int((~special(tokenizer, original)).sum())
    shown = batch["input_ids"][predicted]
    masked = shown == tokenizer.mask_token_id
    kept = shown == original[predicted]
    k = int(predicted.sum())
    # four standard deviations of a binomial
    assert abs(k / n - 0.15) < 4 * math.sqrt(0.15 * 0.85 / n)
    assert abs(masked.float().mean() - 0.8) < 4 * math.sqrt(0.8 * 0.2 / k)
    assert abs(kept.float().mean() - 0.1) < 4 * math.sqrt(0.1 * 0.9 / k) + 1 / len(tokenizer)
    assert torch.equal(batch["input_ids"][~predicted], original[~predicted])


@pytest.mark.parametrize("mask_count", ["bernoulli", "exact"])
def test_no_special_token_and_no_padding_row_is_drawn(tokenizer, blocks, mask_count):
    collator = MlmCollator(
        tokenizer, seed=1, mlm_probability=1.0, mask_replace_prob=0.0, random_replace_prob=1.0, mask_count=mask_count
    )
    drawn = collator(blocks)["input_ids"].flatten()
    original = torch.from_numpy(np.stack([b["input_ids"] for b in blocks]).astype(np.int64)).flatten()
    replaced = drawn[~special(tokenizer, original)]
    assert not special(tokenizer, replaced).any()
    assert replaced.max() < len(tokenizer)
    # some 22,000 draws reach each of the other 395 ids
    assert set(replaced.tolist()) == set(range(len(tokenizer))) - set(tokenizer.all_special_ids)


@pytest.mark.parametrize(
    "settings",
    [{}, {"mask_count": "exact"}, *({"masking_unit": unit} for unit in ("whole_word", "span", "ngram"))],
    ids=str,
)
def test_a_mask_depends_on_seed_epoch_and_block_alone(tokenizer, blocks, settings):
    collator = MlmCollator(tokenizer, seed=1, **settings)
    whole = collator(blocks[:8])
    for rows in ([5, 2], [7], [0, 1, 2, 3]):
        few = MlmCollator(tokenizer, seed=1, **settings)([blocks[row] for row in rows])
        assert torch.equal(few["input_ids"], whole["input_ids"][rows])
        assert torch.equal(few["labels"], whole["labels"][rows])
    longer = cut(blocks[0], 30)  # padded beside a longer block
    alone, beside = collator([longer]), collator([longer, blocks[1]])
    assert torch.equal(beside["labels"][0, :30], alone["labels"][0])

    for other in ({"id": 99}, {"epoch": 1}):
        changed = [Block(block, **{"id": block.id, **other}) for block in blocks[:8]]
        assert not torch.equal(collator(changed)["labels"], whole["labels"])
    assert not torch.equal(MlmCollator(tokenizer, seed=2, **settings)(blocks[:8])["labels"], whole["labels"])


def test_exact_counts_are_fairseqs(tokenizer, blocks):
    predicted = MlmCollator(tokenizer, seed=1, mask_count="exact")(blocks)["labels"] != IGNORED
    counts = predicted.sum(dim=1)
    assert set(counts.tolist()) == {9}  # 0.15 x 60, whatever u is
    short = [cut(block, 50) for block in blocks]
    counts = (MlmCollator(tokenizer, seed=1, mask_count="exact")(short)["labels"] != IGNORED).sum(dim=1)
    assert set(counts.tolist()) == {7, 8}  # 7.5
    assert abs(counts.float().mean() - 7.5) < 4 * 0.5 / math.sqrt(len(blocks))
    assert predicted[:, 0].float().mean() == pytest.approx(0.15, abs=0.07)  # <s> is predicted like other positions


def test_same_law_as_the_stock_collator(tokenizer, blocks):
    """The same rates and eligible positions as in Hugging Face's collator."""
    stock = DataCollatorForLanguageModeling(tokenizer, seed=3)
    theirs = stock([{"input_ids": block["input_ids"].tolist()} for block in blocks])["labels"] != IGNORED
    ours = MlmCollator(tokenizer, seed=3)(blocks)["labels"] != IGNORED
    assert torch.equal(ours.any(dim=0), theirs.any(dim=0))  # the same positions can be predicted
    assert abs(ours.float().mean() - theirs.float().mean()) < 0.01


def test_padding(tokenizer, blocks):
    collator = MlmCollator(tokenizer, seed=1, pad_to_multiple_of=8)
    full = MlmCollator(tokenizer, seed=1)(blocks[:4])
    assert "attention_mask" not in full and full.keys() == {"input_ids", "labels", "predicted"}
    batch = collator([cut(blocks[0], 37), blocks[1]])
    assert batch["input_ids"].shape == (2, 64)
    assert batch["attention_mask"].sum(dim=1).tolist() == [37, 60]
    assert (batch["input_ids"][0, 37:] == tokenizer.pad_token_id).all()
    assert (batch["labels"][0, 37:] == IGNORED).all()


def test_validation_masks_are_the_same_in_every_run(tokenizer, blocks):
    first = fixed_masks(blocks, tokenizer)
    assert [example["document"] for example in first] == [number // 2 for number in range(len(blocks))]
    share = np.mean([(example["labels"] != IGNORED).mean() for example in first])
    assert share == pytest.approx(0.15 * 56 / 60, abs=0.01)
    collator = MlmCollator(tokenizer, seed=5, mlm_probability=0.4, mask_count="exact")  # of a training run
    once, again = collator(first[:4]), collator(first[:4])
    assert torch.equal(once["labels"], again["labels"])
    assert torch.equal(once["labels"][2], torch.from_numpy(first[2]["labels"]))


def test_unigram_entropy(tokenizer):
    four_alike = [{"input_ids": np.array([0, 300, 301, 302, 303, 2], dtype=np.uint16)}] * 3
    assert unigram_entropy(four_alike, tokenizer) == pytest.approx(math.log(4))
    skewed = [{"input_ids": np.array([0, 300, 300, 300, 301, 2], dtype=np.uint16)}]
    assert unigram_entropy(skewed, tokenizer) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
