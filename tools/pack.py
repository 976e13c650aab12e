"""Builder of the token cache: tokenizes and packs a pretraining preset's corpus.

    python tools/pack.py --config presets/mlm/roberta_base.yaml --token_cache tokens --num_proc 16
    python tools/pack.py ... --machine 2/4       # the second of four machines, on one file system

Needs no GPU. Pair formats are packed ten times, for ten different passes, as BERT's data were: ten times the disk space
and time. Only files with a missing or damaged shard are packed.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from roberta_recipe.data import token_cache, tokenization
from roberta_recipe.data.corpus import hash_files
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.hardware import cpu_cores
from roberta_recipe.log import logger, set_up_logging
from roberta_recipe.settings import setting
from roberta_recipe.training import pretraining


@dataclass
class PackArguments:
    """Flags of this tool, in addition to the preset's."""

    _argument_group_name = "packing"

    num_proc: int | None = setting(None, "Worker processes; default: one per core.", "start")
    machine: str = setting("1/1", "This machine's share of the files: 2/4 is the second of four.", "start")


def main(argv: list[str] | None = None) -> bool:
    """Run the command line `argv`; returns whether the cache is complete. Raises `InputError` and `RunError`."""
    set_up_logging()
    # accepts bf16 on a machine without a GPU
    argv = [*(sys.argv[1:] if argv is None else argv), "--use_cpu", "true"]
    (packing, args, training_args), _ = pretraining.read_arguments(argv, __doc__, extra=(PackArguments,))
    pretraining.check_data(args)
    if not args.token_cache:
        raise InputError("token_cache is not set: name the folder to pack into")
    if packing.num_proc is not None and packing.num_proc < 1:
        raise InputError(f"num_proc={packing.num_proc} must be at least 1")
    machine, machines = share_of_machine(packing.machine)
    corpus = hash_files(pretraining.resolve_corpus(args), cache_folder=args.token_cache)
    reader = pretraining.text_reader(args, corpus, tokenization.load_tokenizer(args.tokenizer_name), seed=0)
    share = {"num_proc": packing.num_proc or cpu_cores(), "machine": machine, "machines": machines}
    if complete := token_cache.build(args.token_cache, reader, **share):
        cache = pretraining.cache_reader(args, corpus, pretraining.data_seed(training_args))
        pretraining.announce_cache(args.token_cache, cache)
    else:
        logger.info(f"Machine {packing.machine} has packed its share; others are missing: {args.token_cache}")
    return complete


def share_of_machine(text: str) -> tuple[int, int]:
    """Parse "2/4" into (machine from 0, number of machines). Raises `InputError`."""
    machine, _, machines = text.partition("/")
    if not (machine.isdecimal() and machines.isdecimal() and 1 <= int(machine) <= int(machines)):
        raise InputError(f"machine={text!r} must look like 2/4, from 1/4 to 4/4")
    return int(machine) - 1, int(machines)


if __name__ == "__main__":
    exit_on_error(main)
