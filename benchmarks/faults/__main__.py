"""Fault-injection census: random faults in pretraining, packing, tokenizer training and fine-tuning runs.

    make faults OUT=runs/faults.json                       # 1,000 cases, one to two hours on two cores
    python -m benchmarks.faults --output runs/faults.json --cases 1000 --seed 0 --jobs 2
    python -m benchmarks.faults --case 417                 # one case again; its folder is kept

A case is a command (`scenarios.py`), a fault (`kinds.py`), and restarts of the same command until it ends. Nine of ten
cases run in forks of this process, which has everything imported; the tenth uses torchrun or accelerate, with or
without ZeRO 1 to 3. The finished output is compared, bit for bit, with that of a run without a fault. An existing
report is continued. A case is a function of (seed, number), up to timing. The exit code is 1 if a case ended in a
silent difference, a traceback, without an error message, or hung.
"""

import argparse
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
# scripts use all cores if this is 1; torch's setting stays
os.environ.pop("OMP_NUM_THREADS", None)

import deepspeed  # noqa: F401  imported once, for all forks
import matplotlib.figure

from benchmarks.faults.case import BAD, Case, reference_folder, reference_name, undisturbed
from benchmarks.faults.kinds import OTHER_SEED, Plan, draw_plan
from benchmarks.faults.scenarios import SCENARIOS, make_inputs
from roberta_recipe import durable
from roberta_recipe.data import chunks
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.log import set_up_logging
from roberta_recipe.record import git_commit

OUTCOMES = ("same run", "refused", *BAD, "missed")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON report, updated after every case; continued if it exists")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel cases")
    parser.add_argument("--only", nargs="+", default=[], help="kinds of faults whose names contain one of these words")
    parser.add_argument("--scenario", nargs="+", default=[], help=f"some of: {'; '.join(SCENARIOS)}")
    parser.add_argument("--no_launcher", action="store_true", help="forks only, which is faster")
    parser.add_argument("--case", type=int, help="run only this case, and keep its folder")
    args = parser.parse_args(argv)
    if unknown := set(args.scenario) - set(SCENARIOS):
        raise InputError(f"scenario={sorted(unknown)[0]!r} is not one of: {'; '.join(SCENARIOS)}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    set_up_logging()
    drawn = {"seed": args.seed, "only": args.only, "scenario": args.scenario, "no_launcher": args.no_launcher}
    report = {**drawn, "commit": git_commit(), "cases": {}}
    if args.output and args.output.exists():
        report = durable.read_json(args.output)
        if {name: report[name] for name in drawn} != drawn:
            raise InputError(f"{args.output} is a report with other settings; name another file")
    wanted = range(args.cases) if args.case is None else [args.case]
    plans = {number: draw_plan(args.seed, number, args.only, args.scenario, args.no_launcher) for number in wanted}
    plans = {number: plan for number, plan in plans.items() if str(number) not in report["cases"]}
    shared = Path(tempfile.mkdtemp(prefix="faults-"))
    make_forks_cheap()
    chunks.CHUNK_BYTES = 10_000  # several chunks per file; with a launcher, one
    try:
        references = make_references(plans, shared, args.jobs)
        began_s = time.monotonic()

        def run(number: int) -> dict[str, Any]:
            return run_case(plans[number], references, shared / f"case{number}", shared, keep=args.case is not None)

        for number, found in in_children(list(plans), run, args.jobs, shared):
            report["cases"][str(number)] = plans[number] | found
            print(line(number, plans[number], found), flush=True)
            if args.output:
                durable.write_json(args.output, report)
        cases = list(report["cases"].values())
        print(f"\n{table(cases)}\n\n{time.monotonic() - began_s:,.0f} s")
        print(f"not counted: {sum(case['peers'] for case in cases)} tracebacks in ranks that lost a killed peer")
    finally:
        if args.case is None:
            shutil.rmtree(shared, ignore_errors=True)
        else:
            print(f"folder: {shared}")
    if any(case["outcome"] in BAD for case in report["cases"].values()):
        raise SystemExit(1)


def make_forks_cheap() -> None:
    """Skip garbage collection of imported modules and the loss curve, a third of a forked run's 2 to 3 seconds."""
    gc.freeze()
    matplotlib.figure.Figure.savefig = lambda figure, path, **options: Path(path).write_bytes(b"not drawn")


def make_references(plans: dict[int, Plan], shared: Path, jobs: int) -> dict[str, dict]:
    """Results of the runs without a fault, by `reference_name`, for comparison."""
    print("Reference runs ...", flush=True)
    [_] = in_children([0], lambda _: make_inputs(shared), 1, shared)
    needed: dict[str, tuple[str, bool]] = {}
    for plan in plans.values():
        scenario = SCENARIOS[plan["scenario"]]
        for one in filter(None, (scenario.prepared, scenario.name)):
            needed[reference_name(SCENARIOS[one])] = (one, False)
        if list(OTHER_SEED) == plan.get("second", {}).get("flags"):
            needed[reference_name(scenario, other_seed=True)] = (scenario.name, True)
    first = [name for name, (one, _) in needed.items() if any(s.prepared == one for s in SCENARIOS.values())]
    references = {}
    for names in (first, [name for name in needed if name not in first]):

        def run(name: str) -> dict[str, Any]:
            one, other_seed = needed[name]
            return undisturbed(SCENARIOS[one], other_seed, shared / reference_folder(name), shared)

        for name, found in in_children(names, run, jobs, shared):
            references[name] = found
            print(f"    {name:<34} {found['duration_s']:>6.1f} s {found['bytes']:>10,} bytes", flush=True)
    return references


def run_case(plan: Plan, references: dict[str, dict], folder: Path, shared: Path, keep: bool) -> dict[str, Any]:
    case, began_s = Case(plan, references, folder, shared), time.monotonic()
    try:
        found = case.run()
    finally:
        for start in case.starts:
            start.end()
    if not keep:
        shutil.rmtree(folder / "out", ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    return found | {"seconds": round(time.monotonic() - began_s, 1)}


def in_children(items: list, run: Callable[[Any], dict | None], jobs: int, folder: Path):
    """Run `run(item)` in forked processes, `jobs` in parallel; yields (item, result), with results passed as JSON."""
    running: dict[int, Any] = {}
    waiting = list(items)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                item = waiting.pop(0)
                pid = os.fork()
                if pid == 0:
                    _give(lambda item=item: run(item), folder / f"{os.getpid()}.json")
                running[pid] = item
            pid, status = os.wait()
            item, path = running.pop(pid), folder / f"{pid}.json"
            if status or not path.exists():
                raise SystemExit(f"error: {item}: a bug in the census")
            yield item, json.loads(path.read_text())
            path.unlink()
    finally:
        for pid in running:
            os.kill(pid, signal.SIGTERM)


def _give(run: Callable[[], Any], path: Path) -> None:
    """Main function of a forked process: write the result of `run` and exit."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a case kills its processes
        found = run()
        path.write_text(json.dumps(found))
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def line(number: int, plan: Plan, found: dict[str, Any]) -> str:
    done = "; ".join(found["done"])
    shown = found["outcome"].upper() if found["outcome"] in BAD else found["outcome"]
    detail = f" ({found['detail']})" if found["detail"] and found["outcome"] in BAD else ""
    return f"{number:>4} {found['seconds']:>5.1f} s  {plan['scenario']:<18} {plan['kind']:<32} {shown}{detail}: {done}"


def table(cases: list[dict[str, Any]]) -> str:
    """Markdown table of kinds of faults and outcomes."""
    counts = Counter((case["kind"], case["outcome"]) for case in cases)
    head = ["fault", "cases", *OUTCOMES]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for kind in [*sorted({case["kind"] for case in cases}), None]:
        found = [sum(n for (k, o), n in counts.items() if kind in (k, None) and o == outcome) for outcome in OUTCOMES]
        rows.append([f"**{kind or 'all'}**" if kind is None else kind, str(sum(found)), *map(str, found)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    exit_on_error(main)
