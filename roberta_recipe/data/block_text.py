"""Blocks as a person reads them: where each comes from, its text with what is masked, and what is predicted."""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from transformers import PreTrainedTokenizerBase

from roberta_recipe.credentials import redact
from roberta_recipe.data.corpus import Corpus
from roberta_recipe.data.masking import IGNORED, MlmCollator
from roberta_recipe.data.order import place_of
from roberta_recipe.data.stream import Block
from roberta_recipe.data.tokenization import boundary_ids

LEGEND = (
    "[target → shown] is a position that is predicted, and the token that the model sees there. `</s>` ends a "
    "sentence; another `</s>`, or any in contiguous blocks, ends a document."
)


def described(
    blocks: Iterable[Block], positions: tuple[range, ...], collator: MlmCollator, corpus: Corpus
) -> Iterator[str]:
    """The training blocks that stand at `positions` of the order, each as some lines of text, and what the marks mean
    above them."""
    yield LEGEND + "\n"
    for position, block in zip(itertools.chain.from_iterable(positions), blocks, strict=False):
        yield f"block {position:,}   {describe(block, collator, corpus)}"


def describe(block: Block, collator: MlmCollator, corpus: Corpus) -> str:
    """A block's source, file, columns of whole numbers, and text as the model sees it."""
    [seen], tokenizer = collator.seen_by_model([block]), collator.tokenizer
    number, file, index = place_of(block["block_id"])
    source = corpus.sources[number]
    labels, shown, ids = seen["labels"], seen["input_ids"], block["input_ids"].astype(np.int64)
    predicted = labels != IGNORED
    masked = int((predicted & (shown == tokenizer.mask_token_id)).sum())
    kept = int((predicted & (shown == ids)).sum())
    counts = f"{len(ids)} tokens, {predicted.sum()} predicted: {masked} as {tokenizer.mask_token}, "
    counts += f"{predicted.sum() - masked - kept} as another token, {kept} as they are"
    others = "".join(f"; {name} {value}" for name, value in seen.items() if isinstance(value, int))
    path = redact(corpus.files(source, "train")[1][file])
    return f"{source.name}, block {index:,} of {path}, pass {block['epoch'] + 1}\n{counts}{others}\n" + _indented(
        _marked(ids, shown, predicted, tokenizer)
    )


def _marked(ids: np.ndarray, shown: np.ndarray, predicted: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a block with its special tokens, a line a sentence, and a mark at each predicted position."""
    is_end = ids == boundary_ids(tokenizer)["eos_id"]
    ends = np.flatnonzero(predicted | is_end).tolist()
    text, start = "", 0
    for end in [*ends, len(ids)]:
        text += _printable(tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False))
        start = end + 1
        if end == len(ids):
            break
        token = _token(ids[end], tokenizer)
        if predicted[end]:
            space = token[: len(token) - len(token.lstrip(" "))]
            token = f"{space}[{token.lstrip(' ')} → {_token(shown[end], tokenizer).lstrip(' ')}]"
        text += token + "\n" * int(is_end[end])
    return text


def _token(number: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a token by itself; of one that is no whole character, its name in the vocabulary."""
    text = tokenizer.decode([int(number)], clean_up_tokenization_spaces=False)
    return tokenizer.convert_ids_to_tokens(int(number)) if "\ufffd" in text or not text.strip() else _printable(text)


def _printable(text: str) -> str:
    """`text` with the characters that a terminal obeys, or does not show, in Python's notation."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
