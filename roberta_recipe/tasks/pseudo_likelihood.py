"""Pseudo-log-likelihoods of sentences (Salazar et al. 2020, arXiv 1910.14659, equation 1): the sum, over a sentence's
tokens, of the log-probability of each where it alone is masked; and their within-word form (Kauf and Ivanova 2023,
arXiv 2305.10588), where the later tokens of the same word are masked too, so that a word of several tokens is not told
by its own end.

Exact, and as fast as one forward of each masked copy can be: copies of equal length are a batch without padding, equal
copies are computed once, and the last layer and the head work at the masked position alone.
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
from roberta_recipe.training import predictions

Method = Literal["pll", "within_word"]
METHODS: tuple[Method, ...] = ("pll", "within_word")

_BATCH_TOKENS = {"cpu": 2048, "cuda": 131_072}  # a processor's cache holds the activations of so many
_SAME_LOGITS = 1e-3  # by which, and by which share of them, logits of two ways of computing them may differ

Logits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Sentences(NamedTuple):
    """Sentences of the same number of tokens."""

    numbers: np.ndarray  # (sentences,): which of all sentences
    ids: np.ndarray  # (sentences, length), with special tokens around
    words: np.ndarray  # (sentences, length): the number of each token's word; -1 for special tokens


class Copies(NamedTuple):
    """Masked copies of sentences of the same length, each once, and the predictions (items) that are read off them."""

    ids: np.ndarray  # (copies, length)
    positions: np.ndarray  # (copies,): what is predicted; further masks of a copy stand behind it
    copy: np.ndarray  # (items,): the copy of each item, in rising order
    sentence: np.ndarray  # (items,): which of all sentences
    target: np.ndarray  # (items,): the token that was there
    method: np.ndarray  # (items,): the number of one of METHODS


def encode(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str], max_length: int | None = None
) -> list[Sentences]:
    """`sentences` as the tokenizer writes a text by itself, grouped by length in tokens. Raises `InputError`.

    A word is what the tokenizer's own pre-tokenizer splits off, as in Kauf and Ivanova's code, and never goes across a
    blank: with RoBERTa's, "can't." is the three words can, 't and the full stop; with BERT's, the four words can, the
    apostrophe, t and the full stop; a pre-tokenizer that splits at blanks only leaves it whole.
    """
    predictions.check_tokenizer(tokenizer)
    encoded = tokenizer(list(sentences), return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    by_length: dict[int, list[tuple[int, list[int], list[int]]]] = {}
    for number, (sentence, ids) in enumerate(zip(sentences, encoded["input_ids"], strict=True)):
        special = encoded["special_tokens_mask"][number]
        if tokenizer.mask_token_id in ids or all(special) or len(ids) > (max_length or len(ids)):
            limit = f", and at most {max_length} tokens with this model" if max_length else ""
            raise InputError(
                f"the sentence {sentence!r}, of {len(ids)} tokens, cannot be scored: it must have some text, no "
                f"{tokenizer.mask_token}{limit}; take it out"
            )
        words = _words(sentence, encoded.word_ids(number), encoded["offset_mapping"][number], special)
        by_length.setdefault(len(ids), []).append((number, ids, words))
    return [Sentences(*map(np.array, zip(*rows, strict=True))) for _, rows in sorted(by_length.items())]


def _words(sentence: str, word_ids: list[int | None], offsets: list[tuple[int, int]], special: list[int]) -> list[int]:
    """The number of each token's word, -1 for special tokens."""
    words, before, end = [], None, 0
    for word_id, (start, its_end), is_special in zip(word_ids, offsets, special, strict=True):
        # a blank that is a token of its own (its offsets are empty) begins a word, which the next token continues
        after_blank = sentence[end:start].isspace() or sentence[start:its_end][:1].isspace()
        words.append(words[-1] if words and word_id == before and not after_blank else len(words))
        before, end = word_id, its_end
        if is_special:
            words[-1] = -1
    return words


def masked_copies(group: Sentences, mask_id: int, methods: Sequence[Method]) -> Copies:
    """A copy for each scored token of a group and each method, equal copies once."""
    rows, positions, sentences, targets, of_method = [], [], [], [], []
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
            of_method.append(np.full(len(ids), METHODS.index(method)))
    all_rows = np.ascontiguousarray(np.concatenate(rows))
    as_bytes = all_rows.view(np.dtype((np.void, all_rows.itemsize * all_rows.shape[1])))[:, 0]
    _, first, copy = np.unique(as_bytes, return_index=True, return_inverse=True)
    order = np.argsort(copy, kind="stable")
    items = (np.concatenate(column)[order] for column in (sentences, targets, of_method))
    # a copy's first mask is what it predicts, so equal copies predict the same position
    return Copies(all_rows[first], np.concatenate(positions)[first], copy[order], *items)


@contextlib.contextmanager
def at_one_position(module: torch.nn.Module | None, call: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Logits]:
    """While open: a function of `input_ids` (rows, length) and positions (rows,) that gives logits (rows, vocabulary)
    there. `call` gives a model's logits (rows, length, vocabulary); `module` of it, and so what comes after it, gets
    the hidden states (rows, length, hidden size) of these positions alone."""
    wanted: list[torch.Tensor] = []

    def pick(_: torch.nn.Module, args: tuple) -> tuple:
        rows = torch.arange(len(wanted[-1]), device=wanted[-1].device)
        return tuple(states[rows, wanted[-1]][:, None] for states in args)

    def logits(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        wanted[:] = [positions]
        found = call(input_ids)  # (rows, 1 or length, vocabulary)
        if module is not None:
            return found[:, 0]
        return found[torch.arange(len(found), device=found.device), positions]

    handle = module.register_forward_pre_hook(pick) if module is not None else None
    try:
        yield logits
    finally:
        if handle is not None:
            handle.remove()


def narrowest(
    model: PreTrainedModel, call: Callable[[torch.Tensor], torch.Tensor], probe: Copies
) -> torch.nn.Module | None:
    """From which module on a model can work at the predicted position alone: behind the last layer's attention where
    the layers are as BERT's, else at the output embedding, else (None) nowhere. The first that gives the logits of the
    whole forward for `probe` is taken, so that it is right for any family; all processes try all."""
    ids, positions = _on_device(model, probe.ids, probe.positions)
    with at_one_position(None, call) as logits:
        whole = logits(ids, positions)
    right: list[torch.nn.Module] = []
    for module in (_after_last_attention(model), model.get_output_embeddings()):
        if module is None:
            continue
        with contextlib.suppress(Exception):  # what a family raises that is built otherwise
            with at_one_position(module, call) as logits:
                found = logits(ids, positions)
            if torch.allclose(found, whole, rtol=_SAME_LOGITS, atol=_SAME_LOGITS):
                right.append(module)
    return right[0] if right else None


def _after_last_attention(model: PreTrainedModel) -> torch.nn.Module | None:
    """What takes the output of the last layer's attention and its residual, in layers as BERT's and RoBERTa's."""
    layers = getattr(getattr(model.base_model, "encoder", None), "layer", None)
    return getattr(getattr(layers[-1], "attention", None), "output", None) if layers else None


def _on_device(model: PreTrainedModel, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(model.device) for array in arrays)


@torch.no_grad()
def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    methods: Sequence[Method] = METHODS,
    *,
    call: Callable[[torch.Tensor], torch.Tensor] | None = None,
    process: int = 0,
    processes: int = 1,
    in_step: bool = False,
    bf16: bool = False,
    disable_bar: bool | None = None,
) -> np.ndarray:
    """(len(METHODS), sentences): the scores in nats, float64; zeros for a method that is not in `methods`.

    `model` is in evaluation mode; `call` takes the place of its forward (`input_ids` to logits). With `bf16`, matrix
    products are in it, and scores move by hundredths of a nat; the softmax is in fp32 always. Of several
    `processes`, each computes its share of the batches, and their sum is the result; with `in_step` all make equally
    many forwards, which ZeRO 3 needs. Raises `InputError`.
    """
    groups = encode(tokenizer, sentences, weights.positions(model.config))
    call = call or (lambda input_ids: model(input_ids=input_ids).logits)
    few = Sentences(*(column[:2] for column in groups[-1]))
    module = narrowest(model, call, masked_copies(few, tokenizer.mask_token_id, ("pll",)))
    batch_tokens = _BATCH_TOKENS.get(model.device.type, _BATCH_TOKENS["cuda"])
    totals = np.zeros((len(METHODS), len(sentences)))
    tokens = sum(int((group.words >= 0).sum()) * group.ids.shape[1] for group in groups) * len(methods)
    bar = Bar(total=tokens, desc="Scoring", unit=" tokens", unit_scale=True, leave=False, disable=disable_bar)
    precision = torch.autocast(model.device.type, torch.bfloat16, enabled=bf16)
    with at_one_position(module, call) as logits, precision, bar:
        for turn, batch in enumerate(_batches(groups, tokenizer.mask_token_id, methods, batch_tokens)):
            if turn % processes == process:
                np.add.at(totals, (batch.method, batch.sentence), _log_probs(model, logits, batch))
            bar.update(len(batch.copy) * batch.ids.shape[1])
        if in_step and process > turn % processes:
            _log_probs(model, logits, batch)
    return totals


def _batches(
    groups: Sequence[Sentences], mask_id: int, methods: Sequence[Method], batch_tokens: int
) -> Iterator[Copies]:
    """The masked copies of all groups, about `batch_tokens` tokens at a time."""
    for group in groups:
        copies = masked_copies(group, mask_id, methods)
        rows = max(1, batch_tokens // copies.ids.shape[1])
        for first in range(0, len(copies.ids), rows):
            which, items = slice(first, first + rows), slice(*np.searchsorted(copies.copy, (first, first + rows)))
            of_items = (column[items] for column in (copies.sentence, copies.target, copies.method))
            yield Copies(copies.ids[which], copies.positions[which], copies.copy[items] - first, *of_items)


def _log_probs(model: PreTrainedModel, logits: Logits, batch: Copies) -> np.ndarray:
    """(items,): the log-probability of each item's target, in nats."""
    ids, positions, rows, targets = _on_device(model, batch.ids, batch.positions, batch.copy, batch.target)
    found = logits(ids, positions).float()  # (copies, vocabulary)
    return (found[rows, targets] - torch.logsumexp(found, dim=-1)[rows]).double().cpu().numpy()
