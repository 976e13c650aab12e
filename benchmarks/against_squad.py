"""Comparison of our SQuAD scores with the official evaluation scripts, to the last digit.

    python benchmarks/against_squad.py --official_1.1 evaluate-v1.1.py --official_2.0 evaluate-v2.0.py [--cases 400] \\
        [--data dev-v1.1.json dev-v2.0.json] [--pair dev-v1.1.json pred.json] [--pair dev-v2.0.json pred.json odds.json]

The scripts come from https://rajpurkar.github.io/SQuAD-explorer. A case is a data file, a prediction file and, in 2.0,
often a file of no-answer probabilities. Files are generated (missing and unknown ids, ties, probabilities above 1,
empty texts, Unicode punctuation, answers of articles only, repeated answers), real data with generated predictions
(`--data`, ten each), or real (`--pair`). Each case runs through the official command line and `tools/squad_score.py`,
which must print the same JSON, or both give no score. The exit code is 1 if a case differs; 400 generated cases take
about 20 s of one core.
"""

import argparse
import contextlib
import io
import json
import logging
import random
import runpy
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from roberta_recipe.errors import InputError
from tools import squad_score

WORDS = (
    *("the", "a", "An", "THE", "Denver", "denver", "Broncos", "in", "of", "1,000", "1000", "1.5", "U.S.", "apple-tree"),
    *("appletree", "“Theatre”", "Theatre", "—", "…", "’", "'s", "¿qué?", "İstanbul", "ß", "SS", "東京", "e\u0301", "é"),
    *("...", "!", "-", "a.", "(the)", "\u00a0", "x\u2028y", "an_d", "$5", "½", "\u200b", "🙂"),
)
PER_DATA_FILE = 10


class Case(NamedTuple):
    """The files of a case; `odds`: no-answer probabilities of 2.0."""

    name: str
    version: str
    data: Path
    predictions: Path
    odds: Path | None


def text(rng: random.Random, most: int = 5) -> str:
    """One to `most` random words, not only white space."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most))).strip() or "the"


def dataset(rng: random.Random, version: str) -> dict[str, Any]:
    """A data file of 2 to 40 questions; in 2.0, at least one is answerable and one is not."""
    entries = []
    for number in range(rng.randint(2, 40)):
        answers = [text(rng) for _ in range(rng.randint(1, 4))]
        answers += rng.choices(answers, k=rng.randint(0, 2))
        if version == "2.0" and (number == 0 or (number > 1 and rng.random() < 0.4)):
            answers = []
        rows = [{"text": answer, "answer_start": 0} for answer in answers]
        entry = {"id": f"{number}-{rng.getrandbits(20):x}", "question": "Who?", "answers": rows}
        entries.append(entry | ({"is_impossible": not rows} if version == "2.0" else {}))
    rng.shuffle(entries)
    cut = rng.randrange(1, len(entries))
    paragraphs = [{"context": "A context.", "qas": qas} for qas in (entries[:cut], entries[cut:])]
    return {"version": version, "data": [{"title": "t", "paragraphs": [paragraph]} for paragraph in paragraphs]}


def prediction(rng: random.Random, gold: list[str]) -> str:
    """A predicted text, often equal or similar to a gold answer."""
    kind = rng.random()
    if kind < 0.2 or (not gold and kind < 0.6):
        return ""
    if kind < 0.3:
        return rng.choice(["the", "A", " ", "...", "an the"])
    answer = rng.choice(gold) if gold and kind < 0.85 else text(rng)
    if rng.random() < 0.5:
        words = [*answer.split(), *text(rng, 2).split()]
        answer = " ".join(rng.sample(words, rng.randint(1, len(words))) if words else [])
    return rng.choice([answer, answer.upper(), f"The {answer}.", answer])


def odds_of(rng: random.Random, names: list[str]) -> dict[str, float]:
    """No-answer values: probabilities, a few levels with ties, or any positive and negative numbers."""
    draw = rng.choice(
        [rng.random, lambda: rng.choice([0.0, 0.25, 0.5, 1.0, 1]), lambda: rng.gauss(0, 5), lambda: rng.randint(-3, 3)]
    )
    names = names[1:] if rng.random() < 0.1 else [*names, "not asked for"]
    return {name: draw() for name in rng.sample(names, len(names))}


def generated(rng: random.Random, name: str, folder: Path, data: dict[str, Any], path: Path | None = None) -> Case:
    """A case with generated predictions for `data`; `path`: its file, if it is a real one."""
    entries = [entry for article in data["data"] for p in article["paragraphs"] for entry in p["qas"]]
    version = "1.1" if all(entry["answers"] for entry in entries) else "2.0"
    gold = {entry["id"]: [answer["text"] for answer in entry["answers"]] for entry in entries}
    missing = rng.choice([0, 0, 0.1, 0.5] if version == "1.1" else [0] * 9 + [0.1])
    names = [name for name in rng.sample([*gold], len(gold)) if rng.random() >= missing]
    files = {"predictions": {name: prediction(rng, gold[name]) for name in names}}
    if rng.random() < 0.3:
        files["predictions"]["not asked for"] = "x"
    if version == "2.0" and rng.random() < 0.8:
        files["odds"] = odds_of(rng, [*gold])
    if path is None:
        path = folder / "data.json"
        files["data"] = data
    for kind, content in files.items():
        (folder / f"{kind}.json").write_text(json.dumps(content), encoding="utf-8")
    return Case(name, version, path, folder / "predictions.json", folder / "odds.json" if "odds" in files else None)


def cases(args: argparse.Namespace, folder: Path) -> Iterator[Case]:
    """All cases in turn; the generated files of a case overwrite those of the one before."""
    for number in range(args.cases):
        rng = random.Random(f"{args.seed} {number}")
        yield generated(rng, f"generated {number}", folder, dataset(rng, ("1.1", "2.0")[number % 2]))
    for path in args.data:
        data = json.loads(path.read_text(encoding="utf-8"))
        for number in range(PER_DATA_FILE):
            yield generated(random.Random(f"{args.seed} {path.name} {number}"), f"{path} {number}", folder, data, path)
    for data, predictions, *odds in args.pair:
        articles = json.loads(data.read_text(encoding="utf-8"))["data"]
        answered = all(entry["answers"] for article in articles for p in article["paragraphs"] for entry in p["qas"])
        yield Case(
            f"{data.name} {predictions.name}",
            "1.1" if answered else "2.0",
            data,
            predictions,
            odds[0] if odds else None,
        )


def official(script: Path, case: Case) -> str | None:
    """The JSON output of the official script, with sorted keys; None if it fails."""
    argv = [str(script), str(case.data), str(case.predictions)] + (["-n", str(case.odds)] if case.odds else [])
    printed = io.StringIO()
    silent = contextlib.redirect_stderr(io.StringIO())  # 1.1 prints a line for each question without a prediction
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(printed), silent:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except (KeyError, ZeroDivisionError):
            return None
    return json.dumps(json.loads(printed.getvalue()), sort_keys=True)


def ours(case: Case) -> str | None:
    """The JSON output of our tool, with sorted keys; None if it refuses the files."""
    argv = ["--predictions", str(case.predictions), "--validation_file", str(case.data)]
    argv += ["--version_2_with_negative"] * (case.version == "2.0") + (
        ["--null_odds", str(case.odds)] if case.odds else []
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            squad_score.main(argv)
        except InputError:
            return None
    return json.dumps(json.loads(printed.getvalue()), sort_keys=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official_1.1", required=True, type=Path)
    parser.add_argument("--official_2.0", required=True, type=Path)
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", nargs="*", type=Path, default=[])
    parser.add_argument("--pair", nargs="+", type=Path, action="append", default=[])
    args = parser.parse_args()
    scripts = {version: vars(args)[f"official_{version}"] for version in ("1.1", "2.0")}
    logging.disable(logging.WARNING)  # about missing predictions, which are intended
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(args, Path(folder)):
            theirs, mine = official(scripts[case.version], case), ours(case)
            kind = "differ" if theirs != mine else "equal" if mine else "scored by neither"
            counts[case.version, kind] += 1
            if theirs != mine:
                print(f"{case.version}, {case.name}:\n    official {theirs}\n    ours     {mine}")
            elif case.predictions.parent != Path(folder):
                print(f"{case.version}, {case.name}: {kind} {mine or ''}")
    for version in scripts:
        shown = ", ".join(f"{kind} {counts[version, kind]:,}" for kind in ("equal", "scored by neither", "differ"))
        print(f"SQuAD {version}: {shown}")
    return int(any(kind == "differ" for _, kind in counts))


if __name__ == "__main__":
    raise SystemExit(main())
