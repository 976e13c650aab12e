"""Pseudo-log-likelihood of sentences under a masked LM (Salazar et al. 2020, arXiv 1910.14659, equation 1): the sum
over tokens of the log-probability of each token, masked alone. The within-word form (Kauf & Ivanova 2023, arXiv
2305.10588) also masks the later tokens of the same word, so that no word is predicted from its own end.

Batches are masked copies of sentences of equal length, without padding.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.log import Bar
from roberta_recipe.model import weights

Method = Literal["pll", "within_word"]
METHODS: tuple[Method, ...] = ("pll", "within_word")

_BATCH_TOKENS = {"cpu": 2048, "cuda": 131_072}  # a CPU's activations should fit in its cache
_LOGITS_AT_ONCE = 1 << 29  # 2 GB in fp32


class Sentences(NamedTuple):
    """Sentences of equal length in tokens."""

    numbers: np.ndarray  # (sentences,): index among all sentences
    ids: np.ndarray  # (sentences, length), with special tokens
    words: np.ndarray  # (sentences, length): word index of each token; -1 for special tokens


class Copies(NamedTuple):
    """Masked copies of sentences of equal length, each with one predicted token."""

    ids: np.ndarray  # (copies, length)
    position: np.ndarray  # (copies,): the predicted position, the first mask
    target: np.ndarray  # (copies,): the original token
    sentence: np.ndarray  # (copies,): index among all sentences
    counts: np.ndarray  # (copies, len(METHODS)): whether the copy is one of each method


def encode(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str], max_length: int | None = None
) -> list[Sentences]:
    """`sentences` as single texts, grouped by length in tokens. Raises `InputError`.

    A word is a piece of the pre-tokenizer without whitespace, as in Kauf and Ivanova's code: "can't." is can, 't and .
    for RoBERTa, can, ', t and . for BERT.
    """
    encoded = tokenizer(list(sentences), return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    by_length: dict[int, list[tuple[int, list[int], list[int]]]] = {}
    for number, (sentence, ids) in enumerate(zip(sentences, encoded["input_ids"], strict=True)):
        special = encoded["special_tokens_mask"][number]
        if tokenizer.mask_token_id in ids or all(special) or len(ids) > (max_length or len(ids)):
            raise InputError(
                f"cannot score the sentence {sentence!r} of {len(ids)} tokens: it must have text, no "
                f"{tokenizer.mask_token}, and fit the model's length ({max_length or 'any'}); remove it"
            )
        words = _words(sentence, encoded.word_ids(number), encoded["offset_mapping"][number], special)
        by_length.setdefault(len(ids), []).append((number, ids, words))
    return [Sentences(*map(np.array, zip(*rows, strict=True))) for _, rows in sorted(by_length.items())]


def _words(sentence: str, word_ids: list[int | None], offsets: list[tuple[int, int]], special: list[int]) -> list[int]:
    """The word index of each token, -1 for special tokens."""
    words, previous_id, previous_end = [], None, 0
    for word_id, (start, end), is_special in zip(word_ids, offsets, special, strict=True):
        # a whitespace token, with empty offsets, begins a word that the next token continues
        after_space = sentence[previous_end:start].isspace() or sentence[start:end][:1].isspace()
        words.append(words[-1] if words and word_id == previous_id and not after_space else len(words))
        previous_id, previous_end = word_id, end
        if is_special:
            words[-1] = -1
    return words


def masked_copies(group: Sentences, mask_id: int, methods: Sequence[Method]) -> Copies:
    """A masked copy per scored token and method; methods share it where the token is the last of its word."""
    copies = []
    for position in range(group.ids.shape[1]):
        scored = group.words[:, position] >= 0
        ids, words, sentence = group.ids[scored], group.words[scored], group.numbers[scored]
        alone = np.broadcast_to(np.arange(ids.shape[1]) == position, ids.shape)
        later = (np.arange(ids.shape[1]) >= position) & (words == words[:, [position]])
        same = (alone == later).all(axis=1)
        of_pll, of_word = (np.full(len(ids), method in methods) for method in METHODS)
        for masked, counts in (
            (alone, np.stack([of_pll, of_word & same], axis=1)),
            (later, np.stack([np.zeros_like(same), of_word & ~same], axis=1)),
        ):
            own = counts.any(axis=1)
            rows = np.where(masked, mask_id, ids)
            columns = (rows, np.full(len(ids), position), ids[:, position], sentence, counts)
            copies.append([column[own] for column in columns])
    return Copies(*map(np.concatenate, zip(*copies, strict=True)))


@torch.no_grad()
def log_likelihoods(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    methods: Sequence[Method] = METHODS,
    *,
    call: Callable[..., Any] | None = None,
    process: int = 0,
    processes: int = 1,
    bf16: bool = False,
    disable_bar: bool | None = None,
) -> np.ndarray:
    """(len(METHODS), sentences) pseudo-log-likelihoods in nats, float64; zeros for methods not in `methods`.

    `model` is in evaluation mode; `call` replaces its forward. `bf16` matrix products move scores by hundredths of a
    nat; the softmax is in fp32. Each of several `processes` computes a share of the batches, and their results are to
    be summed; all run equally many forwards, in each of which ZeRO 3 gathers the weights. Raises `InputError`.
    """
    groups = encode(tokenizer, sentences, weights.max_positions(model.config))
    batch_tokens = _BATCH_TOKENS.get(model.device.type, _BATCH_TOKENS["cuda"])
    totals = np.zeros((len(METHODS), len(sentences)))
    tokens = sum(int((group.words >= 0).sum()) * group.ids.shape[1] for group in groups) * len(methods)
    bar = Bar(total=tokens, desc="Scoring", unit=" tokens", unit_scale=True, leave=False, disable=disable_bar)
    precision = torch.autocast(model.device.type, torch.bfloat16, enabled=bf16)
    with precision, bar:
        for turn, batch in enumerate(
            _batches(groups, tokenizer.mask_token_id, methods, batch_tokens, model.config.vocab_size)
        ):
            if turn % processes == process:
                found = _log_probs(model, batch, call)
                np.add.at(totals.T, batch.sentence, found[:, None] * batch.counts)
            bar.update(int(batch.counts.sum()) * batch.ids.shape[1])
        if process > turn % processes:
            _log_probs(model, batch, call)
    return totals


def _batches(
    groups: Sequence[Sentences], mask_id: int, methods: Sequence[Method], batch_tokens: int, vocab_size: int
) -> Iterator[Copies]:
    """The masked copies of all groups in batches of at most `batch_tokens` tokens, and `_LOGITS_AT_ONCE` logits."""
    for group in groups:
        copies = masked_copies(group, mask_id, methods)
        rows = max(1, min(batch_tokens // copies.ids.shape[1], _LOGITS_AT_ONCE // vocab_size))
        for first in range(0, len(copies.ids), rows):
            yield Copies(*(column[first : first + rows] for column in copies))


def _log_probs(model: PreTrainedModel, batch: Copies, call: Callable[..., Any] | None) -> np.ndarray:
    """(copies,) log-probability of each target, in nats."""
    ids, position, target = (torch.from_numpy(column.astype(np.int64)).to(model.device) for column in batch[:3])
    positions = torch.arange(ids.shape[1], device=ids.device) == position[:, None]
    return at_positions(model, {"input_ids": ids}, positions, target, call).double().cpu().numpy()


def load_masked_lm(name: str, tokenizer_name: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A masked LM of any family, on the device, in evaluation mode, and its tokenizer. Raises `InputError` for a
    mismatch of the two."""
    tokenizer = tokenization.load_tokenizer(tokenizer_name or name, needed=("pad_token", "mask_token"))
    model, _ = weights.load(AutoModelForMaskedLM, name, config=weights.read_config(name))
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise InputError(
            f"the tokenizer {tokenizer.name_or_path!r} has {len(tokenizer):,} entries, more than the embedding of "
            f"{name!r}; name the model's own tokenizer"
        )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


@torch.no_grad()
def at_positions(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    positions: torch.Tensor,
    ids: torch.Tensor,
    call: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """(n,) fp32: log-probabilities in nats of the tokens `ids` (n,) at the n True `positions` (batch, seq_len) bool, in
    row-major order. The decoder runs at these alone. `call` replaces the model's forward."""
    decoder = model.get_output_embeddings()
    hook = decoder.register_forward_pre_hook(lambda _, inputs: (inputs[0][positions],))
    try:
        logits = (call or model)(**inputs).logits.float()  # (n, vocab_size)
    finally:
        hook.remove()
    logits = logits[positions] if logits.dim() == 3 else logits  # MobileBERT's head does not call its decoder
    return torch.gather(logits, 1, ids[:, None])[:, 0] - torch.logsumexp(logits, -1)
