"""What only a GPU can show: one command for a machine with one GPU, no network, and 25 minutes.

    make gpu OUT=runs/gpu                               # the same as the next
    python -m benchmarks.gpu --output_dir runs/gpu [--minutes 25] [--steps base curve] [--data_dir glue]
    python -m benchmarks.gpu --dry_run                  # the steps, and what this machine lacks; needs no GPU

Throughput, utilisation and memory of base and large in bf16, a loss curve, fp16 with overflow, bf16 beside fp32, five
seeds of a task, ZeRO 1 to 3, resuming, DDP: each step in processes of its own, with a limit in time, the most valuable
first. `<output_dir>/results.json` is written after every step, and the same command again runs what has not passed
yet. The folders of the runs are what `results/report.py --add` takes. A step that fails leaves the end of its log in
results.json and stops no other; without DeepSpeed, or without a GPU under --tiny, its steps are not run. The exit code
is 1 where a step failed or the time was over, 2 where nothing could be run. It has not been run on a GPU so far.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

from benchmarks.gpu import machine


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/gpu"), help="folder of results, runs and logs")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all steps together")
    parser.add_argument("--steps", nargs="+", help="these steps alone, in the order of the list")
    parser.add_argument("--tokenizer_name", help="a tokenizer's folder; without it, one is trained on docstrings")
    parser.add_argument("--data_dir", help="folder of GLUE's official files, for the step tune")
    parser.add_argument("--model_name_or_path", help="checkpoint that the step tune takes; without it, the curve's")
    parser.add_argument("--tiny", action="store_true", help="for its test: the same steps on a CPU, with a tiny model")
    parser.add_argument("--dry_run", action="store_true", help="list the steps and what is missing, run nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args, lacking = parse(argv), machine.differences(machine.packages())
    print(*lacking, sep="\n", end="\n" if lacking else "", flush=True)
    if why := machine.cannot_import("train_mlm"):
        print(f"error: not run: {why}\n{machine.how_to_carry()}", file=sys.stderr)
        raise SystemExit(2)
    from benchmarks.gpu import results  # which needs what was just found to be there
    from roberta_recipe.errors import exit_on_error

    exit_on_error(lambda: results.main(args, lacking))


if __name__ == "__main__":
    main()
