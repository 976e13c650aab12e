"""Display of the training blocks of a step: source, text, masks and targets as the model sees them.

    python tools/explain.py --output_dir runs/mine --step 400 --show_blocks 2
    python tools/explain.py --config presets/mlm/roberta_mini.yaml --corpus my_corpus.yaml

The first reads the settings of a run (`preset.yaml` in its folder); a flag on top gives the present place of its text,
tokenizer or token cache. The second is for a run that has not started. The printed blocks and masks are the run's, or
an error says why they cannot be reproduced. With a token cache, any step is immediate; without it, text is read up to
the step from where the run's chunk index ends. Only that index is written.
"""

import argparse
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
from roberta_recipe.data import order, tokenization
from roberta_recipe.data.corpus import Corpus, hash_files, resolve
from roberta_recipe.data.masking import IGNORED, MlmCollator
from roberta_recipe.data.packing import Block
from roberta_recipe.data.stream import TrainBlocks
from roberta_recipe.errors import InputError, RunError, exit_on_error
from roberta_recipe.log import logger, set_up_logging
from roberta_recipe.record import LOG_NAME, PRESET_NAME, RECORD_NAME, read_record
from roberta_recipe.settings import setting
from roberta_recipe.training import checkpoint, pretraining
from roberta_recipe.training.data_loading import step_record
from roberta_recipe.training.mlm_trainer import DIGEST_MODULUS
from roberta_recipe.training.pretraining import MlmArguments, MlmTrainingArguments, Reader
from tools.compare import read_log

LEGEND = (
    "[target → shown]: a predicted position, and the token that the model sees there. `</s>` ends a sentence; a second "
    "`</s>`, or any in contiguous blocks, ends a document."
)


@dataclass
class ExplainArguments:
    """Flags beside the run's preset."""

    _argument_group_name = "explain"

    step: int = setting(1, "Optimizer step of the run, from 1 on.", "start")
    show_blocks: int = setting(5, "Blocks of the step to show.", "start")


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the command line `argv`: print the first blocks of a step; returns their columns as the model sees them.
    Raises `InputError`, and `RunError` where the run's log has the hash of other blocks."""
    set_up_logging()
    folder, (explain, args, training_args) = read_arguments(sys.argv[1:] if argv is None else argv)
    states = [checkpoint.read_state(path) for path in reversed(checkpoint.newest_first(folder))] if folder else []
    known: list[Any] = list(states)
    if folder and (folder / RECORD_NAME).is_file():
        needed = ("fingerprint", "skipped_blocks", "steps")
        known.append(read_record(folder / RECORD_NAME, needed, "its steps cannot be explained"))
    if known:  # a preset may leave it to the number of processes
        args = dataclasses.replace(args, global_batch_size=known[-1]["fingerprint"].get("global_batch_size"))
    if args.global_batch_size is None:
        raise InputError("neither the preset nor a checkpoint has the global_batch_size: name it")
    corpus, tokenizer = resolve(pretraining.read_corpus(args)), tokenization.load_tokenizer(args.tokenizer_name)
    corpus = hash_files(corpus, cache_folder=args.token_cache or folder) if folder else corpus
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
    """The run's folder (None for one that has not started), and the filled dataclasses: the flags of its preset, with
    those of `argv` on top."""
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
        raise InputError("output_dir is not set: name the folder of a run, or a preset (config)")
    if not 1 <= explain.step <= training_args.max_steps:
        raise InputError(f"step={explain.step} must be from 1 to max_steps={training_args.max_steps} of the run")
    pretraining.check_data(args)
    return folder, filled


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
    """Raise `InputError` where settings that blocks and masks depend on differ from those of the run."""
    for entry in known:
        before = {name: entry["fingerprint"].get(name) for name in now}
        if changed := durable.differences(before, now):
            raise InputError(
                f"{folder}: up to step {entry.get('step', entry.get('steps'))} the run had other settings: "
                f"{'; '.join(changed.values())}. Name the run's text, tokenizer or token cache; a run that was resumed "
                "despite changes cannot be explained"
            )


def check_positions(folder: Path | None, batch_size: int, states: list[dict[str, Any]]) -> None:
    """Raise `InputError` where the run did not consume its blocks in order from the first on."""
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
    """Print the first blocks of a step and return them; where the log has the hash of this step alone, compare it."""
    size, step = args.global_batch_size, explain.step
    shown = min(explain.show_blocks, size)
    first = order.position_after(0, (step - 1) * size, blocks.skipped)
    wanted = logged_digest(folder, step) if folder else None
    positions = order.unskipped(first, shown if wanted is None else size, blocks.skipped)
    if not args.token_cache:
        logger.info(f"Reading text up to block {first:,}, from where the run's chunk index ends")
    found = list(blocks.blocks([positions]))
    if wanted is not None and step_record(found, collator(found))[-1] % DIGEST_MODULUS != wanted:
        raise RunError(
            f"{folder / LOG_NAME}: step {step} saw other blocks or masks than these settings give: was the run resumed "
            "despite changes, or by another version of this recipe?"
        )
    checked = "blocks and masks equal the hash in its log"
    if wanted is None:
        checked = "its log has no hash of this step alone" if folder else "nothing is trained"
    whole = order.in_words(order.unskipped(first, size, blocks.skipped))
    print(f"step {step:,} of {folder or 'a new run'}: blocks {whole}, {shown} of {size} shown; {checked}")
    print(LEGEND + "\n")
    for position, block in zip(itertools.chain.from_iterable(positions), found[:shown], strict=False):
        print(f"block {position:,}   {describe(block, collator, blocks.reader.corpus)}")
    return collator.seen_by_model(found[:shown])


def logged_digest(folder: Path, step: int) -> int | None:
    """The hash of a step's blocks and masks: the difference of two log lines, of this step and the one before; None
    where the log lacks one."""
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
    text = textwrap.indent(_marked(ids, shown, predicted, tokenizer), "    ", lambda line: True)
    return f"{source.name}, block {index:,} of {path}, pass {block.epoch + 1}\n{counts}{others}\n{text}\n"


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
    """The text of a token; for a part of a character, its name in the vocabulary."""
    text = tokenizer.decode([int(number)], clean_up_tokenization_spaces=False)
    return tokenizer.convert_ids_to_tokens(int(number)) if "\ufffd" in text or not text.strip() else _printable(text)


def _printable(text: str) -> str:
    """`text` with control and invisible characters escaped."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` closes the pipe when it has enough
    exit_on_error(main)
