"""Restart after every kind of ending: exit code, last line, saved state, and the outcome of the next start.

    python -m benchmarks.endings       # a table in Markdown; about fifteen minutes on two cores; Linux
    python -m benchmarks.endings --of packing tokenizer

Small runs of pretraining, fine-tuning, packing and tokenizer training are ended by Ctrl-C, SIGTERM, SIGKILL, a full
disk or a time limit, and started again with the same command. The output is compared, bit for bit, with that of an
uninterrupted run. Training runs under `tools/launch.py`, and once under `accelerate launch`.
"""

import argparse
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import psutil
from conftest import make_documents, write_parquet

from benchmarks.faults.scenarios import SCENARIOS, Scenario, differences, make_inputs
from benchmarks.faults.starts import POLL_S, Start
from roberta_recipe.training import checkpoint

LAUNCHERS = {"ours": (str(ROOT / "tools" / "launch.py"),), "accelerate": ("-m", "accelerate.commands.launch")}
PACK = "tools/pack.py"
OUTPUTS = {
    **{"train_mlm.py": "out/run", "finetune_glue.py": "out/glue", PACK: "out/cache"},
    **{"tokenizer/train_tokenizer.py": "out/tokenizer"},
}
LIMIT_S = 300


@dataclass(frozen=True)
class Ending:
    """A way to end the first start: `act(start)`, once its work has begun, further `flags`, or `file_bytes`, a limit of
    file sizes that acts like a full disk."""

    name: str
    act: Callable[[Start], None] | None = None
    flags: tuple[str, ...] = ()
    file_bytes: int | None = None
    launcher: str = "ours"


def send(number: int) -> Callable[[Start], None]:
    """A signal to the first process of a start."""
    return lambda start: start.processes[0].send(number)


def interrupt(start: Start) -> None:
    """Ctrl-C: SIGINT to the process group, as from a terminal."""
    os.killpg(start.processes[0].pid, signal.SIGINT)


def reads(start: Start, name: str) -> bool:
    """Whether the process has an open file with `name` in its path."""
    with contextlib.suppress(psutil.Error):
        return any(name in file.path for file in psutil.Process(start.processes[0].pid).open_files())
    return False


def started(scenario: Scenario, folder: Path, ending: Ending, works: Callable[[Start], bool]) -> tuple[int, str]:
    """Start a scenario and end it as in `ending`; returns exit code and output, also of orphan processes."""
    launcher = LAUNCHERS[ending.launcher] if scenario.pretrains or scenario.program == "finetune_glue.py" else ()
    launched = replace(scenario, launcher=(*launcher, str(ROOT / scenario.program)))
    start, act = Start(launched, folder, ending.name, ending.flags, ending.file_bytes), ending.act
    while start.running() or start.tree():
        if act and works(start):
            start.tree()  # remembers the descendants
            act(start)
            act = None
        if time.monotonic() - start.begun > LIMIT_S:
            start.end()
            raise SystemExit(f"error: {scenario.name} did not end:\n{start.text[-2000:]}")
        time.sleep(POLL_S)
    start.end()  # reads the rest of the output
    return start.processes[0].code, start.text


def last_line(text: str, folder: Path) -> str:
    """The last line of output from the script itself, with relative paths."""
    lines = [line for line in re.split(r"[\r\n]+", text) if re.match(r"error: |stopped by |ended ", line)]
    shown = lines[-1].replace(str(folder) + "/", "").replace(str(ROOT) + "/", "") if lines else "(nothing)"
    return re.sub(r"Continue with: .*", "Continue with: ...", shown)  # the whole command


def kept(folder: Path, scenario: Scenario) -> str:
    """Description of the state that the first start saved."""
    out = folder / OUTPUTS[scenario.program]
    if scenario.program == "train_mlm.py":
        found = [path.name for path in checkpoint.newest_first(out)]
        return found[0] if found else "nothing"
    if scenario.program == "finetune_glue.py":
        saved = ", ".join(path.name for path in out.glob("*/checkpoint-*"))
        return f"{len(list(out.glob('*/run_record.json')))} of 2 runs finished, {saved or 'no checkpoint'}"
    if scenario.program == PACK:
        return f"{len(list(out.glob('*/*.json')))} of 5 shards"
    return "the tokenizer" if out.exists() else "nothing"


def next_start(code: int, text: str, found: list[str]) -> str:
    """Description of the outcome of the next start."""
    resumed = re.search(r"Resuming +from \S*(checkpoint-\d+)", text)
    what = f"resumed from {resumed[1]}" if resumed else "ran"
    same = "the same output, bit for bit" if not found else f"ANOTHER OUTPUT ({', '.join(found)})"
    return f"{what}; {same}" if code == 0 else f"EXIT CODE {code}: {text[-300:]}"


def cases() -> list[tuple[str, Scenario, Callable[[Start], bool], list[Ending]]]:
    """(name, scenario, whether its work has begun, endings)."""
    ctrl_c, terminate = Ending("Ctrl-C", interrupt), Ending("SIGTERM", send(signal.SIGTERM))
    kill = Ending("kill -9 of all", lambda start: start.kill(start.tree(), signal.SIGKILL))
    pretraining, tuning = SCENARIOS["2 workers"], SCENARIOS["GLUE, 2 seeds"]
    steps = ("--max_steps", "60", "--save_steps", "10", "--eval_steps", "30")
    pretraining = replace(pretraining, argv=(*pretraining.argv, *steps))
    epochs = ("--max_steps", "-1", "--num_train_epochs", "12", "--eval_strategy", "epoch")
    tuning = replace(tuning, argv=(*tuning.argv, *epochs))
    of_pretraining = [
        Ending("time limit", flags=("--max_train_minutes", "0.02")),
        ctrl_c,
        replace(ctrl_c, name="Ctrl-C, accelerate launch", launcher="accelerate"),
        *(terminate, kill),
        Ending("kill -9 of the launcher", send(signal.SIGKILL)),
        Ending("kill -9 of a data worker", lambda start: os.kill(start.helpers()[-1], signal.SIGKILL)),
        Ending("full disk", file_bytes=150_000),
    ]
    large = [_of_large(SCENARIOS[name]) for name in ("pack, 2 processes", "tokenizer")]
    return [
        ("pretraining", pretraining, lambda start: "step 25/" in start.text, of_pretraining),
        (
            *("fine-tuning", tuning, lambda start: "step 21/" in start.text),
            [ctrl_c, terminate, kill, Ending("full disk", file_bytes=60_000)],
        ),
        (
            *("packing", large[0], lambda start: any((start.folder / OUTPUTS[PACK]).glob("*/*.json"))),
            [ctrl_c, terminate, kill, Ending("full disk", file_bytes=50_000)],
        ),
        (
            *("tokenizer", large[1], lambda start: reads(start, "large/train")),
            [ctrl_c, terminate, kill, Ending("full disk", file_bytes=9_000)],
        ),
    ]


def _of_large(scenario: Scenario) -> Scenario:
    return replace(scenario, argv=tuple(word.replace("text/train", "large/train") for word in scenario.argv))


def write_inputs(folder: Path) -> None:
    """Write the census's inputs, and text that takes seconds to read."""
    make_inputs(folder)
    (folder / "inputs" / "large").mkdir()
    for number in range(4):
        texts = make_documents(15_000, seed=50 + number)
        write_parquet(folder / "inputs" / "large" / f"train{number}.parquet", texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="+", default=[], help="some of: " + ", ".join(what for what, *_ in cases()))
    args = parser.parse_args()
    print("| command | ending | exit code | last line | saved | next start |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as shared:
        write_inputs(Path(shared))
        for what, scenario, works, endings in (case for case in cases() if not args.of or case[0] in args.of):
            results = []
            for number, ending in enumerate([Ending("uninterrupted"), *endings]):
                folder = Path(shared, f"{what}{number}")
                folder.mkdir()
                (folder / "inputs").symlink_to(Path(shared, "inputs"))
                (folder / "out").mkdir()
                code, text = started(scenario, folder, ending, works)
                if number:
                    row = [what, ending.name, str(code), last_line(text, folder), kept(folder, scenario)]
                    code, text = started(scenario, folder, Ending("again", launcher=ending.launcher), works)
                if code and not number:
                    raise SystemExit(f"error: {what} fails without interruption:\n{text[-2000:]}")
                results.append(scenario.result(folder) if not code else {})
                if number:
                    found = differences(results[0], results[-1])
                    print("| " + " | ".join([*row, next_start(code, text, found)]) + " |", flush=True)


if __name__ == "__main__":
    main()
