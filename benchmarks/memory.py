"""Accuracy of the memory estimate: estimated and measured peak memory at several micro-batches.

    python benchmarks/memory.py [--launch_file one_gpu] [--micro_batch 4 8 16] --config presets/mlm/roberta_base.yaml \\
        --corpus presets/corpus/docstrings.yaml --tokenizer_name tokenizer/docstrings

`tools/estimate.py` gives the estimate, and `train_mlm.py` trains three steps of two micro-batches; unknown flags are
passed to both. On a GPU, the measured figure is the allocator's peak, and the ratio is the accuracy of the estimate. On
a CPU it is resident memory, with Python and its libraries, so only the increase with the micro-batch compares, and only
for a --config_name without dropout: the CPU's fused attention has no dropout, so that a model with dropout keeps the
attention matrix and fp32 masks. Set MALLOC_MMAP_THRESHOLD_=131072, so that glibc returns freed memory.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30


def launch(launch_file: str, processes: int, command: list[str]) -> str:
    """Launch `command` (a script, or `-m` and a module, and its flags); returns its output."""
    done = subprocess.run(
        [
            *[sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"],
            *["--config_file", f"ds_configs/accelerate/{launch_file}.yaml", "--num_processes", str(processes)],
            *command,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{launch_file}, {' '.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch_file", default="one_gpu", help="a file of ds_configs/accelerate, without .yaml")
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--hardware", default="H100", help="a GPU's name for the estimate; does not matter")
    parser.add_argument("--micro_batch", type=int, nargs="+", default=[4, 8, 16])
    args, flags = parser.parse_known_args()

    print(f"{'micro-batch':>11}{'formula GiB':>13}{'measured GiB':>14}{'ratio':>8}{'ratio of increase':>24}")
    before = None
    for micro_batch in args.micro_batch:
        batch = 2 * micro_batch * args.num_processes
        sizes = ["--per_device_train_batch_size", str(micro_batch), "--global_batch_size", str(batch)]
        estimate = ["tools/estimate.py", "--hardware", f"{args.num_processes}x{args.hardware}"]
        table = launch(args.launch_file, args.num_processes, [*estimate, *flags, *sizes])
        formula = float(re.search(r"^ +total +([\d.]+) GiB", table, re.MULTILINE)[1])
        with tempfile.TemporaryDirectory() as folder:
            others = ["--max_steps", "3", "--save_strategy", "no", "--eval_strategy", "no", "--max_eval_samples", "64"]
            others += ["--report_to", "none", "--token_cache", "", "--output_dir", f"{folder}/run"]
            launch(args.launch_file, args.num_processes, ["train_mlm.py", *flags, *sizes, *others])
            record = json.loads((Path(folder) / "run" / "run_record.json").read_text())
        measured = record["peak_memory_bytes"] / GIB
        added = f"{(formula - before[0]) / (measured - before[1]):.3f}" if before else ""
        print(f"{micro_batch:>11}{formula:>13.2f}{measured:>14.2f}{formula / measured:>8.3f}{added:>24}", flush=True)
        before = formula, measured
    print(f"formula / measured, {', '.join(record['hardware']['gpus']) or 'CPU'}, torch {record['versions']['torch']}")


if __name__ == "__main__":
    main()
