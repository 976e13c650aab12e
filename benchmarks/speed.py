"""Speed of this recipe, of the stock Hugging Face path, and of another commit of this recipe.

    python benchmarks/speed.py --output runs/bench.json [--of step-mini-fp32 ...] [--before DIR] \\
        [--model_name_or_path MODEL --data_dir glue/RTE --squad_file train-v1.1.json]

Each measurement is a process of its own, and contestants alternate, so that all meet the same load. Prints median,
minimum, maximum, and the ratio to the stock path; the JSON file has all values. `--before` names a checkout of another
commit (from b75b537 on). Rates are per second of wall-clock time or, with `--clock process`, of CPU time, for a shared
machine. `comparisons.py` has the measurements, and defines the stock path.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from benchmarks.comparisons import COMPARISONS, NEEDS, WITHOUT_STOCK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="+", choices=COMPARISONS, help="only these comparisons")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each")
    parser.add_argument("--before", help="a checkout of another commit, measured too")
    parser.add_argument("--model_name_or_path", help="checkpoint to fine-tune")
    parser.add_argument("--data_dir", help="folder of RTE's official files, for rte")
    parser.add_argument("--squad_file", help="SQuAD 1.1's train-v1.1.json, for squad and squad-evaluation")
    parser.add_argument("--clock", choices=["wall", "process"], default="wall")
    parser.add_argument("--output", help="the results as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        task = json.loads(args.child)
        sys.path.insert(0, task["checkout"])
        print(json.dumps(COMPARISONS[task["of"]][0](task)))
        return

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.of or COMPARISONS:
            if reason := impossible(name, args):
                print(f"{name}: not run: {reason}")
                continue
            results[name] = compare(name, args, folder)
            print(table(name, results[name]), flush=True)
            if args.output:
                write(args, results)


def impossible(name: str, args: argparse.Namespace) -> str:
    """The reason why a comparison cannot be run here; empty if it can."""
    from roberta_recipe.hardware import has_bf16

    if name.endswith("bf16") and not has_bf16():
        return "this device has no bf16"
    missing = [f"--{flag}" for flag in NEEDS.get(name, ()) if not getattr(args, flag)]
    return f"it needs {' and '.join(missing)}" if missing else ""


def compare(name: str, args: argparse.Namespace, folder: str) -> dict[str, list[dict[str, float]]]:
    """The measurements of each contestant: "stock", "ours" and, with `--before`, "before"."""
    checkouts = {} if name in WITHOUT_STOCK else {"stock": ROOT}
    checkouts |= {"ours": ROOT} | ({"before": args.before} if args.before else {})
    found: dict[str, list[dict[str, float]]] = {way: [] for way in checkouts}
    for way in itertools.chain.from_iterable([*checkouts] for _ in range(args.repeats)):
        task = {"of": name, "way": way, "checkout": str(Path(checkouts[way]).resolve()), "folder": folder}
        task |= {"clock": args.clock, "model": whole(args.model_name_or_path)}
        task |= {"data_dir": whole(args.data_dir), "squad_file": whole(args.squad_file)}
        command = [sys.executable, __file__, "--child", json.dumps(task)]
        done = subprocess.run(command, cwd=task["checkout"], capture_output=True, text=True, env=environment())
        if done.returncode:
            sys.exit(f"{name}, {way}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        found[way].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def whole(path: str | None) -> str | None:
    """An absolute path, or an unchanged Hub id."""
    return str(Path(path).resolve()) if path and Path(path).exists() else path


def environment() -> dict[str, str]:
    """Environment without network and library warnings."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "true"}


def table(name: str, found: dict[str, list[dict[str, float]]]) -> str:
    """The printed results of a comparison, a line per contestant."""
    rates = {way: [value["rate"] for value in values] for way, values in found.items()}
    stock = statistics.median(rates["stock"]) if "stock" in rates else None
    lines = [f"{name} ({COMPARISONS[name][1]})"]
    for way, values in rates.items():
        median, others = statistics.median(values), ""
        for figure in ("utilisation", "peak_gb", "eval_loss"):
            if figure in found[way][0]:
                others += f"  {figure} {statistics.median(value[figure] for value in found[way]):.3g}"
        of_stock = f"  x {median / stock:.2f} of stock" if stock else ""
        lines.append(f"  {way:<7}{median:>11,.1f}/s  from {min(values):,.1f} to {max(values):,.1f}{of_stock}{others}")
    if "before" in rates:
        before = statistics.median(rates["before"])
        lines.append(f"  ours x {statistics.median(rates['ours']) / before:.2f} of before")
    return "\n".join(lines)


def write(args: argparse.Namespace, results: dict[str, Any]) -> None:
    from roberta_recipe.durable import write_json
    from roberta_recipe.hardware import describe_machine
    from roberta_recipe.record import git_commit, versions

    before = args.before and subprocess.check_output(["git", "-C", args.before, "rev-parse", "HEAD"], text=True).strip()
    about = {"date": datetime.now(UTC).date().isoformat(), "commit": git_commit(), "before": before}
    about |= {"hardware": describe_machine(), "versions": versions(), "clock": args.clock, "repeats": args.repeats}
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(args.output), {**about, "results": results})


if __name__ == "__main__":
    main()
