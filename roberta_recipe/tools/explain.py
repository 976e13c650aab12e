"""Show the training blocks of a step: source, text, masks and targets as the model sees them.

    python -m roberta_recipe.tools.explain --output_dir runs/mine --step 400 --show_blocks 2
    python -m roberta_recipe.tools.explain --config presets/mlm/roberta_mini.yaml --corpus my_corpus.yaml

The second is of a run to come, by the flags that it will have, in place of a run's folder.
The settings are those of the run (`preset.yaml` in its folder); a flag on top says where its text, its tokenizer or its
token cache are now. Blocks and masks are those of the run, or a line says why they cannot be known. A token cache gives
any step at once; without it, text is read as far as the run's chunk index does not know it; nothing but that index is
written.
"""

import argparse
import dataclasses
import itertools
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from roberta_recipe import durable
from roberta_recipe import settings as flags
from roberta_recipe.credentials import redact
from roberta_recipe.data import order, tokenization
from roberta_recipe.data.corpus import Corpus, identified, resolve
from roberta_recipe.data.masking import IGNORED, MlmCollator
from roberta_recipe.data.packing import Block
from roberta_recipe.data.stream import TrainBlocks
from roberta_recipe.errors import InputError, RunError, exit_on_error
from roberta_recipe.log import logger, set_up_logging
from roberta_recipe.record import LOG_NAME, PRESET_NAME, RECORD_NAME, read_record
from roberta_recipe.settings import setting
from roberta_recipe.tools.compare import read_log
from roberta_recipe.training import checkpoint, pretraining
from roberta_recipe.training.data_loading import record_of
from roberta_recipe.training.mlm_trainer import DIGEST_MODULUS
from roberta_recipe.training.pretraining import MlmArguments, MlmTrainingArguments, Reader

LEGEND = (
    "[target → shown] is a position that is predicted, and the token that the model sees there. `</s>` ends a "
    "sentence; another `</s>`, or any in contiguous blocks, ends a document."
)


@dataclass
class ExplainArguments:
    """What the tool needs beside the run's preset."""

    _argument_group_name = "explain"

    step: int = setting(1, "Optimizer step of the run, from 1 on.", "start")
    show_blocks: int = setting(5, "Blocks of the step to show.", "start")


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the command line `argv`: print the first blocks of a step; returns their columns as the model sees them.
    Raises `InputError`, and `RunError` where the run's log says that it saw others."""
    set_up_logging()
    folder, (explain, args, training_args) = read_arguments(sys.argv[1:] if argv is None else argv)
    states = [checkpoint.read_state(path) for path in reversed(checkpoint.newest_first(folder))] if folder else []
    known = [*states, *(finished_record(folder) if folder else [])]
    args = dataclasses.replace(args, global_batch_size=global_batch_size(args, known))
    corpus, tokenizer = resolve(pretraining.read_corpus(args)), tokenization.load_tokenizer(args.tokenizer_name)
    corpus = identified(corpus, kept_in=args.token_cache or folder) if folder else corpus
    reader = build_reader(folder, args, training_args, corpus, tokenizer)
    if folder:
        data = pretraining.data_fingerprint(training_args, reader)
        check_settings(folder, known, {**flags.fixed_values(args), **data})
    check_positions(folder, args.global_batch_size, states)
    left_out = {"skipped_blocks": [part for entry in known for part in entry["skipped_blocks"]]}
    blocks = TrainBlocks(
        reader,
        batch_size=args.global_batch_size,
        skipped=pretraining.skipped_blocks(args, training_args, left_out),
        limit=args.max_train_samples,
    )
    collator = pretraining.build_collator(args, training_args, tokenizer)
    return print_step(folder, args, explain, blocks, collator)


def read_arguments(argv: list[str]) -> tuple[Path | None, list[Any]]:
    """The run's folder, None of a run to come, and the filled dataclasses: the flags of its preset, with those of
    `argv` on top."""
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--output_dir", type=Path)
    named.add_argument("--config")
    found, _ = named.parse_known_args(argv)
    folder = None if found.config else found.output_dir
    preset = ["--config", str(folder / PRESET_NAME)] if folder else []
    # a preset's bf16 is for the training machine
    argv = [*preset, *argv, "--use_cpu", "true", "--report_to", "none"]
    filled, _ = pretraining.read_arguments(argv, __doc__, own=(ExplainArguments,))
    explain, args, training_args = filled
    if folder is None and not found.config:
        raise InputError("output_dir is not set: name the folder of the run, or the preset of one to come (config)")
    if explain.show_blocks < 1:
        raise InputError(f"show_blocks={explain.show_blocks} must be at least 1")
    if not 1 <= explain.step <= training_args.max_steps:
        raise InputError(f"step={explain.step} must be from 1 to max_steps={training_args.max_steps} of the run")
    pretraining.check_data(args)
    return folder, filled


def finished_record(folder: Path) -> list[dict[str, Any]]:
    """The record of a finished run; none of a run that is not finished."""
    path = folder / RECORD_NAME
    needed = ("fingerprint", "skipped_blocks", "steps")
    return [read_record(path, needed, "its steps cannot be explained")] if path.is_file() else []


def global_batch_size(args: MlmArguments, known: list[dict[str, Any]]) -> int:
    """Sequences an optimizer step: the run's, where the preset leaves it to the number of processes."""
    size = known[-1]["fingerprint"].get("global_batch_size") if known else args.global_batch_size
    if size is None:
        raise InputError("the preset has no global_batch_size, and the run no checkpoint yet that says it: name it")
    return size


def build_reader(
    folder: Path | None, args: MlmArguments, training_args: MlmTrainingArguments, corpus: Corpus, tokenizer
) -> Reader:
    """The provider of the run's chunks. Raises `InputError` for a token cache that another tokenizer has packed."""
    seed = pretraining.data_seed(training_args)
    if not args.token_cache:
        return pretraining.text_reader(args, corpus, tokenizer, seed, folder)
    reader = pretraining.cache_reader(args, corpus, seed)
    if reader.fingerprint()["tokenizer"] != tokenization.tokenizer_fingerprint(tokenizer):
        raise InputError(f"tokenizer_name={args.tokenizer_name} has not packed token_cache={args.token_cache}")
    return reader


def check_settings(folder: Path, known: list[dict[str, Any]], now: dict[str, Any]) -> None:
    """Raise `InputError` where the settings that blocks and masks depend on are not those of the whole run."""
    for entry in known:
        before = {name: entry["fingerprint"].get(name) for name in now}
        if changed := durable.differences(before, now):
            raise InputError(
                f"{folder}: up to step {entry.get('step', entry.get('steps'))} the run was another than that of these "
                f"settings: {'; '.join(changed.values())}. Name the run's own text, tokenizer or token cache; what a "
                "run saw that was resumed despite changes cannot be told"
            )


def check_positions(folder: Path | None, batch_size: int, states: list[checkpoint.RecipeState]) -> None:
    """Raise `InputError` where the steps of the run did not take its blocks from the first on."""
    for state in states:
        skipped = order.union(range(*part) for part in state["skipped_blocks"])
        if state["position"] != order.position_after(0, state["step"] * batch_size, skipped):
            raise InputError(
                f"{folder}: step {state['step']} ended at block {state['position']:,}, so the run was resumed despite "
                "changes, and what it saw cannot be told"
            )


def print_step(
    folder: Path | None, args: MlmArguments, explain: ExplainArguments, blocks: TrainBlocks, collator: MlmCollator
) -> list[dict[str, Any]]:
    """Print the first blocks of a step, which are returned; where the log has a line for this step alone, compare all
    with its digest."""
    size, step = args.global_batch_size, explain.step
    shown = min(explain.show_blocks, size)
    first = order.position_after(0, (step - 1) * size, blocks.skipped)
    wanted = logged_digest(folder, step) if folder else None
    positions = order.kept(first, shown if wanted is None else size, blocks.skipped)
    if not args.token_cache:
        logger.info(f"Reading text up to block {first:,}, where the run's chunk index does not know it")
    found = list(blocks.blocks([positions]))
    if wanted is not None and record_of(found, collator(found))[-1] % DIGEST_MODULUS != wanted:
        raise RunError(
            f"{folder / LOG_NAME} says that step {step} saw other blocks or masks than these settings give: was the "
            "run resumed despite changes, or by another version of this recipe?"
        )
    checked = "its log says nothing of this step alone" if folder else "nothing is trained"
    if wanted is not None:
        checked = "blocks and masks are those of its log"
    whole = order.in_words(order.kept(first, size, blocks.skipped))
    print(f"step {step:,} of {folder or 'the run to come'}: blocks {whole}, {shown} of {size} shown; {checked}")
    print(LEGEND + "\n")
    for position, block in zip(itertools.chain.from_iterable(positions), found[:shown], strict=False):
        print(f"block {position:,}   {describe(block, collator, blocks.reader.corpus)}")
    return collator.seen_by_model(found[:shown])


def logged_digest(folder: Path, step: int) -> int | None:
    """The digest of what a step saw, where the log has it: the difference of two lines, of this step and of the step
    before it."""
    digests = {entry["step"]: int(entry["digest"], 16) for entry in read_log(folder / LOG_NAME) if "digest" in entry}
    if step not in digests or (step > 1 and step - 1 not in digests):
        return None
    return (digests[step] - digests.get(step - 1, 0)) % DIGEST_MODULUS


def describe(block: Block, collator: MlmCollator, corpus: Corpus) -> str:
    """A block's source, file, columns of whole numbers, and text as the model sees it."""
    [seen], tokenizer = collator.seen_by_model([block]), collator.tokenizer
    number, file, index = order.place_of(block.id)
    source = corpus.sources[number]
    labels, shown, ids = seen["labels"], seen["input_ids"], block["input_ids"].astype(np.int64)
    predicted = labels != IGNORED
    masked = int((predicted & (shown == tokenizer.mask_token_id)).sum())
    kept = int((predicted & (shown == ids)).sum())
    counts = f"{len(ids)} tokens, {predicted.sum()} predicted: {masked} as {tokenizer.mask_token}, "
    counts += f"{predicted.sum() - masked - kept} as another token, {kept} as they are"
    others = "".join(f"; {name} {value}" for name, value in seen.items() if isinstance(value, int))
    path = redact(corpus.files(source, "train")[1][file])
    return f"{source.name}, block {index:,} of {path}, pass {block.epoch + 1}\n{counts}{others}\n" + _indented(
        _marked(ids, shown, predicted, tokenizer)
    )


def _marked(ids: np.ndarray, shown: np.ndarray, predicted: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a block with its special tokens, a line a sentence, and a mark at each predicted position."""
    is_end = ids == tokenization.boundary_ids(tokenizer)["eos_id"]
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


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` closes the pipe when it has enough
    exit_on_error(main)
