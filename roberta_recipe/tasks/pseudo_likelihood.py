"""Pseudo-log-likelihood of sentences under a masked LM (Salazar et al. 2020, arXiv 1910.14659, equation 1): the sum
over tokens of the log-probability of each token, masked alone. The within-word form (Kauf & Ivanova 2023, arXiv
2305.10588) also masks the later tokens of the same word, so that no word is predicted from its own end.

Batches are copies of equal length without padding; duplicates run once, the decoder at predicted positions only.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from roberta_recipe.errors import InputError
from roberta_recipe.log import Bar
from roberta_recipe.model import weights

Method = Literal["pll", "within_word"]
METHODS: tuple[Method, ...] = ("pll", "within_word")

_BATCH_TOKENS = {"cpu": 2048, "cuda": 131_072}  # a CPU's activations should fit in its cache
_TOLERANCE = 1e-3  # absolute and relative, between the logits of one position and of the whole forward

Forward = Callable[[torch.Tensor], torch.Tensor]  # input_ids (rows, length) -> logits (rows, length, vocabulary)
Logits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # ..., positions (rows,) -> logits (rows, vocabulary)


class Sentences(NamedTuple):
    """Sentences of equal length in tokens."""

    numbers: np.ndarray  # (sentences,): index among all sentences
    ids: np.ndarray  # (sentences, length), with special tokens
    words: np.ndarray  # (sentences, length): word index of each token; -1 for special tokens


class Copies(NamedTuple):
    """Distinct masked copies of sentences of equal length, and the predictions (items) at their masks."""

    ids: np.ndarray  # (copies, length)
    positions: np.ndarray  # (copies,): the predicted position, the first mask
    copy: np.ndarray  # (items,): the copy of each item, ascending
    sentence: np.ndarray  # (items,): index of the sentence
    target: np.ndarray  # (items,): the original token
    method: np.ndarray  # (items,): index in METHODS


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
    """A masked copy per scored token and method, without duplicates."""
    rows, positions, sentences, targets, method_numbers = [], [], [], [], []
    for position in range(group.ids.shape[1]):
        scored = group.words[:, position] >= 0
        ids, words = group.ids[scored], group.words[scored]
        for method in methods:
            masked = np.zeros(ids.shape, dtype=bool)
            if method == "within_word":
                masked[:, position:] = words[:, position:] == words[:, [position]]
            masked[:, position] = True
            rows.append(np.where(masked, mask_id, ids).astype(np.int32))
            sentences.append(group.numbers[scored])
            targets.append(ids[:, position])
            positions.append(np.full(len(ids), position))
            method_numbers.append(np.full(len(ids), METHODS.index(method)))
    all_rows = np.ascontiguousarray(np.concatenate(rows))
    as_bytes = all_rows.view(np.dtype((np.void, all_rows.itemsize * all_rows.shape[1])))[:, 0]
    _, first, copy = np.unique(as_bytes, return_index=True, return_inverse=True)
    order = np.argsort(copy, kind="stable")
    items = (np.concatenate(column)[order] for column in (sentences, targets, method_numbers))
    return Copies(all_rows[first], np.concatenate(positions)[first], copy[order], *items)


@contextlib.contextmanager
def at_one_position(decoder: torch.nn.Module | None, forward: Forward) -> Iterator[Logits]:
    """Context with a function for the logits at one position per row. Inside it, a hook makes `decoder` run on hidden
    states of these positions only; None: on all."""
    wanted: list[torch.Tensor] = []

    def pick(_: torch.nn.Module, args: tuple) -> tuple:
        rows = torch.arange(len(wanted[-1]), device=wanted[-1].device)
        return (args[0][rows, wanted[-1]][:, None],)

    def logits(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        wanted[:] = [positions]
        output = forward(input_ids)  # (rows, 1 or length, vocabulary)
        return (
            output[:, 0] if decoder is not None else output[torch.arange(len(output), device=output.device), positions]
        )

    handle = decoder.register_forward_pre_hook(pick) if decoder is not None else None
    try:
        yield logits
    finally:
        if handle is not None:
            handle.remove()


def sparse_decoder(model: PreTrainedModel, forward: Forward, probe: Copies) -> torch.nn.Module | None:
    """The output embedding if, run on one position only, it gives the logits of the whole forward for `probe`; None if
    not, as in some model families."""
    ids, positions = _on_device(model, probe.ids, probe.positions)
    with at_one_position(None, forward) as logits:
        whole = logits(ids, positions)
    decoder = model.get_output_embeddings()
    with contextlib.suppress(Exception), at_one_position(decoder, forward) as logits:
        if torch.allclose(logits(ids, positions), whole, rtol=_TOLERANCE, atol=_TOLERANCE):
            return decoder
    return None


def _on_device(model: PreTrainedModel, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(model.device) for array in arrays)


@torch.no_grad()
def log_likelihoods(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    methods: Sequence[Method] = METHODS,
    *,
    call: Forward | None = None,
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
    call = call or (lambda input_ids: model(input_ids=input_ids).logits)
    few = Sentences(*(column[:2] for column in groups[-1]))
    decoder = sparse_decoder(model, call, masked_copies(few, tokenizer.mask_token_id, ("pll",)))
    batch_tokens = _BATCH_TOKENS.get(model.device.type, _BATCH_TOKENS["cuda"])
    totals = np.zeros((len(METHODS), len(sentences)))
    tokens = sum(int((group.words >= 0).sum()) * group.ids.shape[1] for group in groups) * len(methods)
    bar = Bar(total=tokens, desc="Scoring", unit=" tokens", unit_scale=True, leave=False, disable=disable_bar)
    precision = torch.autocast(model.device.type, torch.bfloat16, enabled=bf16)
    with at_one_position(decoder, call) as logits, precision, bar:
        for turn, batch in enumerate(_batches(groups, tokenizer.mask_token_id, methods, batch_tokens)):
            if turn % processes == process:
                np.add.at(totals, (batch.method, batch.sentence), _log_probs(model, logits, batch))
            bar.update(len(batch.copy) * batch.ids.shape[1])
        if process > turn % processes:
            _log_probs(model, logits, batch)
    return totals


def _batches(
    groups: Sequence[Sentences], mask_id: int, methods: Sequence[Method], batch_tokens: int
) -> Iterator[Copies]:
    """The masked copies of all groups in batches of about `batch_tokens` tokens."""
    for group in groups:
        copies = masked_copies(group, mask_id, methods)
        rows = max(1, batch_tokens // copies.ids.shape[1])
        for first in range(0, len(copies.ids), rows):
            which, items = slice(first, first + rows), slice(*np.searchsorted(copies.copy, (first, first + rows)))
            columns = (column[items] for column in (copies.sentence, copies.target, copies.method))
            yield Copies(copies.ids[which], copies.positions[which], copies.copy[items] - first, *columns)


def _log_probs(model: PreTrainedModel, logits: Logits, batch: Copies) -> np.ndarray:
    """(items,) log-probability of each target, in nats."""
    ids, positions, rows, targets = _on_device(model, batch.ids, batch.positions, batch.copy, batch.target)
    predicted = logits(ids, positions).float()  # (copies, vocabulary)
    return (predicted[rows, targets] - torch.logsumexp(predicted, dim=-1)[rows]).double().cpu().numpy()
