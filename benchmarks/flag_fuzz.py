"""Fuzzer of all commands: odd values for every flag, damaged input files. Each start must finish, or end with one error
line and no traceback.

    python benchmarks/flag_fuzz.py [--draws 4] [--seed 0] [--commands train_mlm pack] [--flags seed] [--damages 40]

Flags come from the parsers of the commands. A tiny run starts in a forked process with one odd value on its command
line (`VALUES`, and all choices of an enumeration), or with one damaged input file. The exit code is 1 if a start had
any other outcome.
"""

import argparse
import contextlib
import gzip
import importlib.util
import json
import lzma
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import flags
import torch
import yaml
from conftest import Forked, make_documents, write_jsonl, write_parquet, write_text
from official_files import write_paradigm, write_race, write_squad

from roberta_recipe.settings import RecipeParser

LIMIT_S = 300  # timeout of a start
MEMORY = 6 << 30  # limit of a start, on top of the imported modules
FILES = ["nofile.json", "/proc/nowhere", "text", "config.json", "preset.yaml", "text/train.parquet", "é.txt", "\udce9"]
TEXTS = ["", " ", "é", "no", "much", "a\nb", "{}", "[]", '{"a": 1}', "[1, null]", "null", "1,2", "a=b", "a=b=c", "../x"]
NUMBERS = ["-1", "0", "1", "3", "0.5", "1.5", "-0.5", "1e-300", "1e300", "nan", "inf", "-inf", "4294967296", "9" * 25]
VALUES = [*FILES, *TEXTS, *NUMBERS, "true", "false"]


class Command(NamedTuple):
    """A command, with the flags of a run of a second."""

    main: Callable[[list[str]], Any]
    argv: list[str]
    inputs: tuple[str, ...]  # input files and folders, relative


def loaded(folder: str, name: str) -> Any:
    """Import a script that is in no package."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / folder / f"{name}.py")
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    if not hasattr(module, "main"):
        spec.loader.exec_module(module)
    return module


def commands() -> dict[str, Command]:
    """All scripts and tools, by name. Paths are relative: each start runs in a copy of the inputs."""
    tools = {path.stem for path in (ROOT / "tools").glob("[a-z]*.py") if "def main(" in path.read_text()}
    tools.remove("launch")  # accelerate's own parser
    mlm = f"--config preset.yaml --use_cpu --disable_tqdm true --output_dir out --max_steps {flags.STEPS // 3}"
    text = " --train_file text/train.parquet --validation_file text/valid.parquet"
    tuned = "--model_name_or_path model --output_dir out --max_seq_length 64 --max_steps 2 --warmup_steps 1 --seeds 1 "
    tuned += "--use_cpu --disable_tqdm true --max_train_samples 16 --config "
    files = {f"corpus_{kind}": (f"--train_file text/train.{kind}",) for kind in ("jsonl", "txt", "jsonl.gz", "txt.xz")}
    lines = {
        "train_mlm": (mlm + text, "text/train.parquet", "preset.yaml", "config.json", "tokenizer"),
        "train_mlm of a corpus": (mlm + " --corpus corpus.yaml", "corpus.yaml"),
        **{f"train_mlm of {name}": (f"{mlm} {argv}", "text/" + argv.split("/")[1]) for name, (argv,) in files.items()},
        "finetune_glue": (f"{tuned} glue.yaml --data_dir glue --other_rows true", "glue/RTE", "model"),
        "finetune_squad": (f"{tuned} squad.yaml --data_dir squad --doc_stride 8 --max_query_length 16", "squad"),
        "finetune_race": (f"{tuned} race.yaml --data_dir race --max_option_length 16", "race"),
        "finetune_ner": (
            f"{tuned} ner.yaml --train_file words.conll --global_batch_size 8 --per_device_train_batch_size 8",
            "words.conll",
        ),
        "train_tokenizer": ("--output_dir out --vocab_size 300 --compare_with tokenizer" + text, "text", "tokenizer"),
        "pack": (f"{mlm}{text} --token_cache cache --num_proc 1", "text/train.parquet"),
        "evaluate": (f"{mlm}{text} --model_name_or_path model", "model"),
        "estimate": (mlm + text, "preset.yaml", "config.json"),
        "words": ("--model_name_or_path model --text_file text/valid.jsonl --output words.json", "text", "model"),
        "blimp": ("--model_name_or_path model --data_dir blimp --output_dir out", "blimp", "model"),
        "experiments": ("experiments.yaml --table", "experiments.yaml", "preset.yaml"),
        "compare": ("run run", "run"),
        "explain": ("--output_dir run --step 1", "run"),
        "contamination": ("--corpus corpus.yaml --glue_dir glue", "corpus.yaml"),
        "fairseq to_hf": ("to_hf --checkpoint fairseq/model.pt --tokenizer_name tokenizer --output_dir out", "fairseq"),
        "fairseq to_fairseq": ("to_fairseq --model_name_or_path model --output_dir out", "model"),
        "fairseq to_hf of files": (
            "to_hf --checkpoint fairseq/model.pt --dict fairseq/dict.txt --encoder fairseq/encoder.json --bpe "
            "fairseq/vocab.bpe --output_dir out",
            "fairseq",
        ),
        "glue_table": ("--folder tuned", "tuned/rte/summary.json"),
        "push": ("--model run --repo me/mine --dry_run", "run"),
        "squad_score": ("--predictions answers.json --validation_file squad/dev-v1.1.json", "answers.json", "squad"),
        "report": ("--add run --results results --readme README.md", "run/run_record.json", "results"),
    }
    missing = {*tools, *(path.stem for path in ROOT.glob("*.py"))} - {name.split()[0] for name in lines}
    assert not missing, f"commands without a command line here: {missing}"
    return {
        name: Command(main_of(name.split()[0]), argv.split(), tuple(inputs)) for name, (argv, *inputs) in lines.items()
    }


def main_of(name: str) -> Callable[[list[str]], Any]:
    """The `main` of a script or a tool."""
    if (ROOT / "tools" / f"{name}.py").is_file():
        module = importlib.import_module(f"tools.{name}")
    elif name == "experiments":
        module = importlib.import_module("experiments.run")
    elif (ROOT / f"{name}.py").is_file():
        module = importlib.import_module(name)
    else:
        module = loaded("results" if name == "report" else "tokenizer", name)
    return module.main


def prepare(folder: Path) -> None:
    """Write the inputs of training commands: those of `flags.prepare`, and a file of each format."""
    flags.prepare(folder)
    documents, names = make_documents(60, seed=3), ("train", "valid")
    (folder / "text").mkdir()
    for name, texts in zip(names, (documents[:45], documents[45:]), strict=True):
        write_parquet(folder / "text" / f"{name}.parquet", texts)
        write_jsonl(folder / "text" / f"{name}.jsonl", texts)
        write_text(folder / "text" / f"{name}.txt", texts)
    for name, opener, ending in (("train.jsonl", gzip.open, "gz"), ("train.txt", lzma.open, "xz")):
        with opener(folder / "text" / f"{name}.{ending}", "wb") as stream:
            stream.write((folder / "text" / name).read_bytes())
    settings = {"max_seq_length": 64, "global_batch_size": 8, "per_device_train_batch_size": 8}
    settings |= {"per_device_eval_batch_size": 2, "tokenizer_name": "tokenizer", "config_name": "config.json"}
    settings |= {"learning_rate": 0.001, "logging_steps": 1, "save_strategy": "no", "max_eval_samples": 4}
    as_yaml(folder / "preset.yaml", settings)
    source = {"name": "stories", "files": "text/train.jsonl", "validation_files": "text/valid.jsonl"}
    as_yaml(folder / "corpus.yaml", {"sources": [source], "language": "en"})
    write_squad(folder / "squad")
    write_race(folder / "race")
    for uid in ("passive_1", "passive_2"):
        write_paradigm(folder / "blimp", uid, pairs=2)
    listed = {"output_dir": "experiments", "config": "preset.yaml", "flags": {"max_steps": 2}, "seeds": [1]}
    as_yaml(
        folder / "experiments.yaml", {**listed, "measures": {"loss": None}, "rows": [{"name": "low"}, {"name": "high"}]}
    )
    (folder / "words.conll").write_text("Ann B-PER\nsees O\nit O\n\n" * 16, encoding="utf-8")
    for task, preset in (("glue", "glue/rte"), ("squad", "squad/v1.1"), ("race", "race/paper"), ("ner", "ner/own")):
        text = (ROOT / f"presets/{preset}.yaml").read_text(encoding="utf-8")
        (folder / f"{task}.yaml").write_text(re.sub(r"(?m)^(output_dir|model_name_or_path): .*\n", "", text))


def as_yaml(path: Path, values: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def prepare_finished(folder: Path) -> None:
    """Write the inputs of other tools: a finished run, a GLUE task, a fairseq model, SQuAD predictions, a ledger."""
    lines = commands()
    (folder / "results").mkdir()
    (folder / "README.md").write_text("\n".join(loaded("results", "report").MARKS), encoding="utf-8")
    for name, output_dir in (("train_mlm", "run"), ("finetune_glue", "tuned/rte"), ("fairseq to_fairseq", "fairseq")):
        command = lines[name]
        code, log = started(command.main, [*command.argv, "--output_dir", output_dir], folder)
        assert code == 0, log
    code, log = started(lines["report"].main, lines["report"].argv, folder)
    assert code == 0, log
    data = json.loads((folder / "squad" / "dev-v1.1.json").read_text(encoding="utf-8"))["data"]
    asked = [qa["id"] for article in data for passage in article["paragraphs"] for qa in passage["qas"]]
    (folder / "answers.json").write_text(json.dumps(dict.fromkeys(asked, "a thing")), encoding="utf-8")


def started(main: Callable[[list[str]], Any], argv: list[str], folder: Path) -> tuple[int | None, str]:
    """Run a command in `folder`: (exit code, None after a timeout; output)."""
    with tempfile.NamedTemporaryFile() as log:
        start = Forked(lambda: alone(main, argv, folder), log.name)
        try:
            code = start.end(LIMIT_S)
        except AssertionError:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(start.pid, signal.SIGKILL)  # and its orphans
        return code, Path(log.name).read_text(encoding="utf-8", errors="replace")


def alone(main: Callable[[list[str]], Any], argv: list[str], folder: Path) -> None:
    """Run a command in `folder`, in its own process group, with a memory limit."""
    os.setpgid(0, 0)
    os.chdir(folder)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    torch.set_num_threads(1)
    main(argv)


def verdict(code: int | None, log: str) -> tuple[str, str]:
    """(outcome: "run", "refused" or a kind of failure; the relevant line of output)."""
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "")
    if code is None:
        return "hang", last
    if "Traceback (most recent call last)" in log:
        return "traceback", last
    if errors := re.findall(r"(?m)^error: .*", log):
        return ("refused" if len(errors) == 1 else "several lines"), errors[-1]
    return ("run" if code in (0, 1) else f"exit code {code} without a line"), last


class _Parser(Exception):
    """Exception that carries the parser of a command."""


def actions(command: Command) -> list[argparse.Action]:
    """The flags of a command, from its parser."""

    def stop(self, *_):
        raise _Parser(self)

    parse_args = RecipeParser.parse_args
    RecipeParser.parse_args = stop
    try:
        command.main(command.argv)
        raise AssertionError("a command without a RecipeParser")
    except _Parser as found:
        parser = found.args[0]
    finally:
        RecipeParser.parse_args = parse_args
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parser = action.choices[command.argv[0]]
    return [action for action in parser._actions if action.option_strings and action.dest != "help"]


def odd_words(action: argparse.Action, rng: random.Random, draws: int) -> list[list[str]]:
    """Command-line words with odd values of a flag: `draws` of `VALUES`, and all its choices."""
    name = action.option_strings[0]
    if action.nargs == 0:
        return [[name]]
    choices = [str(getattr(choice, "value", choice)) for choice in action.choices or ()]
    words = [[f"{name}={value}"] for value in [*choices, *rng.sample(VALUES, draws)]]
    if action.nargs in ("+", "*"):
        words += [[name, *rng.choices([v for v in VALUES if not v.startswith("-")], k=2)] for _ in range(draws)]
    return words


def of_flags(lines: dict[str, Command], names: list[str], rng: random.Random, draws: int) -> Iterator[tuple]:
    """(name of the command, description, command line, None) of starts with an odd flag. A flag that several commands
    share is tried once."""
    seen: set[tuple] = set()
    for name, command in lines.items():
        for action in actions(command):
            home = name.split("_")[0], action.dest, action.help  # train_..., finetune_..., or a tool
            if home in seen or (names and action.dest not in names):
                continue
            seen.add(home)
            for words in odd_words(action, rng, draws):
                yield name, " ".join(words), [*command.argv, *words], None


def of_files(lines: dict[str, Command], rng: random.Random, damages: int) -> Iterator[tuple]:
    """(name of the command, description, command line, seed of the damage) of starts with a damaged file."""
    for name, command in lines.items():
        for _ in range(damages):
            yield name, "damage", command.argv, random.Random(rng.random())


def damage(folder: Path, inputs: tuple[str, ...], rng: random.Random) -> str:
    """Damage one of a command's input files; returns a description."""
    files = [p for name in inputs for p in sorted([folder / name, *(folder / name).rglob("*")]) if p.is_file()]
    path = rng.choice(files)
    content = path.read_bytes()
    kind = rng.choice(["cut", "flip", "empty", "folder", "gone", "bytes", *["other"] * 6])
    if kind == "other" and (changed := other_shape(path, rng)) is not None:
        path.write_bytes(changed[1].encode("utf-8", "surrogatepass"))
        return f"{path.relative_to(folder)}: {changed[0]}"
    if kind == "cut":
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind in ("folder", "gone"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
    else:
        kind, at = "bytes", rng.randrange(len(content) + 1)
        path.write_bytes(content[:at] + rng.randbytes(rng.choice([1, 1, 8])) + content[at + 1 :])
    return f"{path.relative_to(folder)}: {kind}"


def other_shape(path: Path, rng: random.Random) -> tuple[str, str] | None:
    """(description, text) of a JSON, JSON lines or YAML file with one value replaced; None for other files."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        if path.suffix == ".yaml":
            done, tree = other_value(yaml.safe_load(text), rng)
            return done, yaml.safe_dump(tree)
        if path.suffix == ".jsonl":
            lines = text.splitlines()
            at = rng.randrange(len(lines))
            done, tree = other_value(json.loads(lines[at]), rng)
            return done, "\n".join([*lines[:at], json.dumps(tree), *lines[at + 1 :]]) + "\n"
        done, tree = other_value(json.loads(text), rng)
    except (ValueError, IndexError):
        return None
    return done, json.dumps(tree)


def other_value(tree: Any, rng: random.Random) -> tuple[str, Any]:
    """(description, `tree` with one node, at any depth, replaced)."""
    others = [None, True, 0, -1, 1.5, 1e300, 10**30, "", "é", "x" * 300, [], [1], {}, {"a": 1}, [[]], "\ud800"]
    where, node, parent = [], tree, None
    while isinstance(node, dict | list) and node and rng.random() < 0.8:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        where.append(rng.choice(keys))
        parent, node = node, node[where[-1]]
    value, gone = rng.choice(others), rng.random() < 0.2
    if parent is None:
        return f"the whole is {value!r}", value
    if gone:
        del parent[where[-1]]
    else:
        parent[where[-1]] = value
    return f"{where} is {'gone' if gone else repr(value)}", tree


def tried(case: tuple, lines: dict[str, Command], shared: Path) -> tuple[str, str, str]:
    """(outcome, description, relevant line of output) of one start, in a copy of the inputs."""
    name, odd, argv, rng = case
    with tempfile.TemporaryDirectory(dir=shared.parent) as parent:
        folder = Path(parent, "start")
        shutil.copytree(shared, folder)
        if rng is not None:
            odd = damage(folder, lines[name].inputs, rng)
        outcome, said = verdict(*started(lines[name].main, argv, folder))
    return outcome, f"{name}: {odd}", said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4, help="odd values per flag; 0: none")
    parser.add_argument("--damages", type=int, default=40, help="damaged files per command; 0: none")
    parser.add_argument("--commands", nargs="+", help="only these commands")
    parser.add_argument("--flags", nargs="+", default=[], help="only these flags")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, seen = random.Random(args.seed), Counter()
    with tempfile.TemporaryDirectory() as name:
        shared = Path(name) / "inputs"
        shared.mkdir()
        prepare(shared)
        prepare_finished(shared)
        lines = {name: command for name, command in commands().items() if name in (args.commands or commands())}
        cases = [*(of_flags(lines, args.flags, rng, args.draws) if args.draws else ())]
        cases += of_files(lines, rng, args.damages)
        for case in cases:
            outcome, odd, said = tried(case, lines, shared)
            seen[outcome] += 1
            print(f"{outcome:<10} {odd[:120]!r} {said[:300]}", flush=True)
    flags_tried = len({(name, odd.split("=")[0]) for name, odd, _, rng in cases if rng is None})
    print(f"{len(cases):,} starts ({flags_tried} flags): " + ", ".join(f"{n:,} {o}" for o, n in seen.most_common()))
    raise SystemExit(set(seen) - {"run", "refused"} != set())


if __name__ == "__main__":
    main()
