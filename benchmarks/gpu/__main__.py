"""GPU benchmark, offline: trains a small RoBERTa, profiles RoBERTa-base, tests fp16; or runs an experiment list.

    python -m benchmarks.gpu --minutes 8                # or: make gpu; needs the folder of benchmarks.gpu.carry
    python -m benchmarks.gpu --finetune --minutes 4     # afterwards, on the same machine
    python -m benchmarks.gpu --list presets/experiments/mini_length.yaml --minutes 9
    python -m benchmarks.gpu --finetune --model list/mimetic_40_bias/seed-2/run --minutes 4  # a run of the list
    python -m benchmarks.gpu --dry_run                  # lists parts and files to carry; needs no GPU

Each part has a time limit. `--output_dir` gets at most eight files below 16 MiB: results.json, updated after each part,
records.tar.xz (logs, run records, curve, tokenizer; unpacked, for results/report.py --add), and the weights in bf16.
After a failed part, with the tail of its log in results.json, the others still run. The exit code is 1 if a part
failed, 2 if nothing could be run. results/gpu_h200.json has the figures of one H200.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import torch

    from benchmarks.gpu.runs import MODEL, Work, install
except ImportError as error:
    sys.exit(f"not run: {error} in {sys.executable}: make setup, or name another Python (make gpu PYTHON=python3)")

WHEELS = (
    "transformers==5.23.0 tokenizers==0.23.3 datasets==5.2.0 evaluate==0.4.6 sentencex==1.0.32 dill==0.4.1 "
    "multiprocess==0.70.19 pydantic==2.14.4 pydantic_core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5"
)
CARRY = f"""
To carry with the repository (64 MiB in all), for a machine with Python 3.12, torch 2.11, transformers 5.17 and its
dependencies:
    python -m benchmarks.gpu.carry --data DIR --output {{carried}}
    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --dest {{carried}}/wheels \\
        {WHEELS}"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of all parts")
    parser.add_argument("--list", help="an experiment list to run instead, its rows in parallel (MPS)")
    parser.add_argument("--finetune", action="store_true", help="fine-tune the model of an earlier command")
    parser.add_argument("--model", default=MODEL, help="model to fine-tune: a folder in --work_dir")
    parser.add_argument("--carried", type=Path, default=Path("runs/gpu_carried"), help="carried folder")
    parser.add_argument("--work_dir", type=Path, default=Path("runs/gpu_work"), help="runs, logs, packed text")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/gpu"), help="results: a few small files")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU, for tests")
    parser.add_argument("--dry_run", action="store_true", help="only list parts and files to carry")
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace) -> dict[str, Callable[[Work], Any]]:
    """The parts after `install`, by name."""
    from benchmarks.gpu import parts  # needs the packages of `install`

    return parts.FINE_TUNING if args.finetune else parts.LIST if args.list else parts.PRETRAINING


def describe(args: argparse.Namespace) -> None:
    """Print the parts with their time limits, and the commands that fetch the files to carry."""
    from benchmarks.gpu import parts

    for name, function in {"install": install, **chosen(args)}.items():
        limit = f"at most {parts.SECONDS[name]:.0f} s" if name in parts.SECONDS else "the rest"
        print(f"{name:<10} {limit:<14} {function.__doc__}")
    print(CARRY.format(carried=args.carried))


def main(argv: list[str] | None = None) -> None:
    end_s, args = time.monotonic(), parse(argv)
    end_s += 60 * args.minutes
    if args.dry_run:
        describe(args)
        return
    if not (args.tiny or torch.cuda.is_available()):
        print("not run: no CUDA device", file=sys.stderr)
        raise SystemExit(2)
    if not (args.carried / "text").is_dir():
        print(f"not run: {args.carried} holds no text; --dry_run prints the commands that make it", file=sys.stderr)
        raise SystemExit(2)
    folders = [folder.resolve() for folder in (args.carried, args.work_dir, args.output_dir)]
    suffix = "_finetune" if args.finetune else "_list" if args.list else ""
    work = Work(*folders, args.tiny, end_s, suffix=suffix, model=folders[1] / args.model, listed=args.list)
    work.results |= {"minutes": args.minutes, "tiny": args.tiny}
    for folder in folders[1:]:
        folder.mkdir(parents=True, exist_ok=True)
    work.part("install", install)
    for name, function in chosen(args).items():
        work.part(name, function)
    results = [*work.results["parts"].values(), *work.results.get("half", {}).values()]
    raise SystemExit(any(one["result"] == "FAILED" for one in results))


if __name__ == "__main__":
    main()
