"""Viewer of a step's training blocks: source, text, masks and targets as the model sees them.

    python tools/explain.py --output_dir runs/mine --step 400 --show_blocks 2
    python tools/explain.py --config presets/mlm/roberta_mini.yaml --corpus my_corpus.yaml

The first uses a run's `preset.yaml`; flags override it, such as a new path to its text, tokenizer or token cache. The
second is for a run that has not started. Blocks and masks are exactly the run's, or an error explains why they cannot
be reproduced. With a token cache, any step is immediate; without it, text is read from the end of the run's chunk index
up to the step. Writes nothing but that index and hashes of files.
"""

import dataclasses
import itertools
import signal
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from transformers import PreTrainedTokenizerBase

from roberta_recipe import durable
from roberta_recipe import settings as flags
from roberta_recipe.credentials import redact
from roberta_recipe.data import NSP, SOP, order, token_cache, tokenization
from roberta_recipe.data.corpus import Corpus, hash_files, resolve
from roberta_recipe.data.masking import IGNORED, MlmCollator
from roberta_recipe.data.packing import Block
from roberta_recipe.data.stream import TrainBlocks
from roberta_recipe.errors import InputError, RunError, exit_on_error
from roberta_recipe.input_files import resolve_path
from roberta_recipe.log import logger, set_up_logging
from roberta_recipe.record import LOG_NAME, PRESET_NAME, RECORD_NAME, read_record
from roberta_recipe.settings import setting
from roberta_recipe.training import checkpoint, pretraining
from roberta_recipe.training.data_loading import count_consumed
from roberta_recipe.training.mlm_trainer import DIGEST_MODULUS
from roberta_recipe.training.pretraining import MlmArguments
from tools.compare import read_log

LEGEND = (
    "[target → shown]: a predicted position with its target and input token. `</s>` ends a sentence; a second `</s>`, "
    "or any in contiguous blocks, ends a document."
)


@dataclass
class ExplainArguments:
    """Flags of this tool, in addition to the run's preset."""

    _argument_group_name = "explain"

    step: int = setting(1, "Optimizer step, from 1 on.", "start")
    show_blocks: int = setting(5, "Blocks of the step to show.", "start")


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the command line `argv`: print the first blocks of a step and return them as the model sees them. Raises
    `InputError`, and `RunError` if the run's log has another hash."""
    set_up_logging()
    folder, (explain, args, training_args) = read_arguments(sys.argv[1:] if argv is None else argv)
    states = [checkpoint.read_state(path) for path in reversed(checkpoint.newest_first(folder))] if folder else []
    known: list[Any] = list(states)
    if folder and (folder / RECORD_NAME).is_file():
        needed = ("fingerprint", "skipped_blocks", "steps")
        known.append(read_record(folder / RECORD_NAME, needed, "its steps cannot be explained"))
    if known and args.global_batch_size is None:  # derived from the number of processes
        args = dataclasses.replace(args, global_batch_size=known[-1]["fingerprint"].get("global_batch_size"))
    if args.global_batch_size is None:
        raise InputError("the preset and the checkpoints have no global_batch_size: set --global_batch_size")
    corpus, tokenizer = pretraining.read_corpus(args), tokenization.load_tokenizer(args.tokenizer_name)
    corpus = resolve(corpus, args.token_cache)
    if hashes := args.token_cache or folder:
        corpus = hash_files(corpus, cache_folder=hashes)
    seed = pretraining.data_seed(training_args)
    reader = pretraining.text_reader(args, corpus, tokenizer, seed, folder)
    if args.token_cache:
        of_text, reader = reader, pretraining.cache_reader(args, corpus, seed)
        token_cache.create_or_check(args.token_cache, of_text.fingerprint())  # raises for a cache of other settings
    if folder:
        data = pretraining.data_fingerprint(training_args, reader)
        check_settings(folder, known, {**flags.fixed_values(args), **data})
    check_positions(folder, args.global_batch_size, states)
    left_out = {"skipped_blocks": [part for entry in known for part in entry["skipped_blocks"]]}
    blocks = TrainBlocks(
        reader,
        batch_size=args.global_batch_size,
        skipped=pretraining.skipped_blocks(args, training_args, left_out, reader),
        limit=args.max_train_samples,
    )
    collator = pretraining.build_collator(args, training_args, tokenizer)
    return print_step(folder, args, explain, blocks, collator)


def read_arguments(argv: list[str]) -> tuple[Path | None, list[Any]]:
    """The run's folder (None for a run that has not started), and the arguments: its preset, overridden by `argv`."""
    config, output_dir = (flags.value_of(argv, name) for name in ("config", "output_dir"))
    folder = resolve_path(output_dir) if output_dir and not config else None
    preset = ["--config", str(folder / PRESET_NAME)] if folder else []
    found = ["--output_dir", str(folder)] if folder else []  # the last of repeated flags wins
    # accepts bf16 on a machine without a GPU
    argv = [*preset, *argv, *found, "--use_cpu", "true", "--report_to", "none"]
    filled, _ = pretraining.read_arguments(argv, __doc__, extra=(ExplainArguments,))
    explain, args, training_args = filled
    if folder is None and not config:
        raise InputError("output_dir is not set: name the folder of a run, or a preset (config)")
    if not 1 <= explain.step <= training_args.max_steps:
        most = f"max_steps={training_args.max_steps} of the run (with num_train_epochs: set --max_steps)"
        raise InputError(f"step={explain.step} must be from 1 to {most}")
    pretraining.check_data(args)
    return folder, filled


def check_settings(folder: Path, known: list[dict[str, Any]], now: dict[str, Any]) -> None:
    """Raise `InputError` for settings of blocks and masks that differ from the run's."""
    for entry in known:
        before = {name: entry["fingerprint"].get(name) for name in now}
        if changed := durable.differences(before, now):
            raise InputError(
                f"{folder}: up to step {entry.get('step', entry.get('steps'))} the run had other settings: "
                f"{'; '.join(changed.values())}. Name the run's text, tokenizer or token cache; a run that was resumed "
                "despite changes cannot be explained"
            )


def check_positions(folder: Path | None, batch_size: int, states: list[dict[str, Any]]) -> None:
    """Raise `InputError` if the run did not consume its blocks in order."""
    for state in states:
        skipped = order.union(range(*part) for part in state["skipped_blocks"])
        if state["position"] != order.position_after(0, state["step"] * batch_size, skipped):
            raise InputError(
                f"{folder}: step {state['step']} ended at block {state['position']:,}: the run was resumed despite "
                "changes, and cannot be explained"
            )


def print_step(
    folder: Path | None, args: MlmArguments, explain: ExplainArguments, blocks: TrainBlocks, collator: MlmCollator
) -> list[dict[str, Any]]:
    """Print and return the first blocks of a step, verified with the hash in the log if it has one for this step."""
    size, step = args.global_batch_size, explain.step
    shown = min(explain.show_blocks, size)
    first = order.position_after(0, (step - 1) * size, blocks.skipped)
    wanted = logged_digest(folder, step) if folder else None
    positions = order.unskipped(first, shown if wanted is None else size, blocks.skipped)
    if not args.token_cache:
        logger.info(f"Reading text up to block {first:,}, from the end of the run's chunk index")
    examples = list(blocks.blocks([positions]))
    if wanted is not None and count_consumed(examples, collator(examples))[-1] % DIGEST_MODULUS != wanted:
        raise RunError(
            f"{folder / LOG_NAME}: step {step} had different blocks or masks: was the run resumed "
            "despite changes, or by another version of this recipe?"
        )
    checked = "blocks and masks match the hash in its log"
    if wanted is None:
        checked = "its log has no hash of this step alone" if folder else "nothing is trained"
    whole = order.in_words(order.unskipped(first, size, blocks.skipped))
    print(f"step {step:,} of {folder or 'a new run'}: blocks {whole}, {shown} of {size} shown; {checked}")
    print(LEGEND + "\n")
    for position, block in zip(itertools.chain.from_iterable(positions), examples[:shown], strict=False):
        print(f"block {position:,}   {describe(block, collator, blocks.reader.corpus)}")
    return collator.seen_by_model(examples[:shown])


def logged_digest(folder: Path, step: int) -> int | None:
    """Hash of one step's blocks and masks: the hash in its log line minus that of the previous step; None if one is
    missing."""
    digests = {entry["step"]: int(entry["digest"], 16) for entry in read_log(folder / LOG_NAME) if "digest" in entry}
    if step not in digests or (step > 1 and step - 1 not in digests):
        return None
    return (digests[step] - digests.get(step - 1, 0)) % DIGEST_MODULUS


def describe(block: Block, collator: MlmCollator, corpus: Corpus) -> str:
    """A block's source and file, counts, and text as the model sees it."""
    [seen], tokenizer = collator.seen_by_model([block]), collator.tokenizer
    number, file, index = order.place_of(block.id)
    source = corpus.sources[number]
    labels, shown, ids = seen["labels"], seen["input_ids"], block["input_ids"].astype(np.int64)
    predicted = labels != IGNORED
    masked = int((predicted & (shown == tokenizer.mask_token_id)).sum())
    kept = int((predicted & (shown == ids)).sum())
    counts = f"{len(ids)} tokens, {predicted.sum()} predicted: {masked} as {tokenizer.mask_token}, "
    counts += f"{predicted.sum() - masked - kept} as another token, {kept} as they are"
    pairs = {name: seen[name][seen[name] != IGNORED].tolist() for name in (NSP, SOP) if name in seen}
    others = "".join(f"; {name} {', '.join(map(str, classes)) or 'none'}" for name, classes in pairs.items())
    path = redact(corpus.files(source, "train")[1][file])
    text = textwrap.indent(_marked(ids, shown, predicted, tokenizer), "    ", lambda line: True)
    return f"{source.name}, block {index:,} of {path}, pass {block.epoch + 1}\n{counts}{others}\n{text}\n"


def _marked(ids: np.ndarray, shown: np.ndarray, predicted: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """A block's text with special tokens, a sentence per line, predicted positions marked."""
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
    """A token's text; its vocabulary entry if it is part of a character."""
    text = tokenizer.decode([int(number)], clean_up_tokenization_spaces=False)
    return tokenizer.convert_ids_to_tokens(int(number)) if "\ufffd" in text or not text.strip() else _printable(text)


def _printable(text: str) -> str:
    """`text` with control and invisible characters escaped."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` closes the pipe
    exit_on_error(main)
