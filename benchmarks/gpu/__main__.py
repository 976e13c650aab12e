"""A small RoBERTa, base's profile and fp16 on one GPU in eight minutes, without a network; or a list of small runs.

    python -m benchmarks.gpu --minutes 8                # or: make gpu; needs a folder that benchmarks.gpu.carry made
    python -m benchmarks.gpu --finetune --minutes 4     # on the same machine, after it
    python -m benchmarks.gpu --list presets/experiments/mini_length.yaml --minutes 9
    python -m benchmarks.gpu --finetune --model list/mimetic_40_bias/seed-2/run --minutes 4  # a run of the list
    python -m benchmarks.gpu --dry_run                  # the parts, and what is to be carried; needs no GPU

Each part has an end of its own. `--output_dir` gets at most eight files below 16 MiB: results.json, written after each
part, records.tar.xz (logs, run records, curve, tokenizer, as results/report.py --add takes them once unpacked), and the
weights in bf16. A part that fails leaves the end of its log there and stops no other. The exit code is 1 where a part
failed, 2 where nothing could be run. results/gpu_h200.json has the figures of one H200.
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
    "multiprocess==0.70.19"
)
CARRY = f"""
To carry beside the repository, for a machine with Python 3.12, torch 2.11, transformers 5.17 and what it needs:
    python -m benchmarks.gpu.carry --data DIR --output {{carried}}
    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --dest {{carried}}/wheels \\
        {WHEELS}"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together")
    parser.add_argument("--list", help="an experiment list to run in place of the parts, its rows side by side (MPS)")
    parser.add_argument("--finetune", action="store_true", help="fine-tune what an earlier command trained")
    parser.add_argument("--model", default=MODEL, help="what to fine-tune: a folder below --work_dir")
    parser.add_argument("--carried", type=Path, default=Path("runs/gpu_carried"), help="folder that was carried")
    parser.add_argument("--work_dir", type=Path, default=Path("runs/gpu_work"), help="runs, logs, packed text")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/gpu"), help="results: a few small files")
    parser.add_argument("--tiny", action="store_true", help="for its test: all of it on a CPU, with tiny models")
    parser.add_argument("--dry_run", action="store_true", help="print parts and what is to be carried, run nothing")
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace) -> dict[str, Callable[[Work], Any]]:
    """The parts after `install`, by name."""
    from benchmarks.gpu import parts  # which needs what `install` installed

    return parts.FINE_TUNING if args.finetune else parts.LIST if args.list else parts.PRETRAINING


def describe(args: argparse.Namespace) -> None:
    """Print the parts with their seconds, and what is to be carried with the commands that fetch it."""
    from benchmarks.gpu import parts

    for name, function in {"install": install, **chosen(args)}.items():
        limit = f"at most {parts.SECONDS[name]:.0f} s" if name in parts.SECONDS else "what is left"
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
    raise SystemExit(any(part["result"] == "FAILED" for part in work.results["parts"].values()))


if __name__ == "__main__":
    main()
