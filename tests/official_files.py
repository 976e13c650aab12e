"""Generated files in the official formats: GLUE, SuperGLUE's WSC, RACE, SQuAD, BLiMP.

They have the oddities of the official files: unbalanced quotes, line separators within texts, rows with other numbers
of columns (QQP), files without header (CoLA), rewritten hypotheses (WNLI), unanswerable questions (SQuAD 2.0).
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from roberta_recipe.tasks import blimp

NAMES = ["Abel", "Berta", "Caspar", "Dorothea", "Emil", "Frieda", "Gustav", "Hedwig", "Ignaz", "Johanna"]
THINGS = ["kettle", "lantern", "wagon", "violin", "ladder", "basket", "mirror", "anchor", "blanket", "hammer"]
VERBS = ["carried", "painted", "repaired", "borrowed", "dropped", "noticed", "covered", "measured"]
QUALITIES = ["heavy", "quiet", "broken", "expensive", "narrow", "bright", "wet", "empty"]
ENDS = ["in the morning", "near the harbour", "without a word", "after the storm", "for a neighbour", "by mistake"]
ODD = [
    'He said "no',
    "it's 5' long",
    "caf\u00e9 \u2013 na\u00efve",
    "a\u2028b",
    "tab-less \u00a0 space ",
    "100% #1 @x",
    "\u201ctwo\u201d",
]

PAIR = ("sentence1", "sentence2")
HEADERS = {  # of the training files; test files lack the label
    "CoLA": ["source", "label", "original", "sentence"],
    "SST-2": ["sentence", "label"],
    "MRPC": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "STS-B": ["index", "genre", "filename", "year", "old_index", "source1", "source2", *PAIR, "score"],
    "QQP": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
    "MNLI": ["index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"]
    + ["sentence1_parse", "sentence2_parse", *PAIR, "label1", "gold_label"],
    "QNLI": ["index", "question", "sentence", "label"],
    "RTE": ["index", *PAIR, "label"],
    "WNLI": ["index", *PAIR, "label"],
    "diagnostic": ["index", *PAIR],
}
NLI, RTE = ["entailment", "neutral", "contradiction"], ["entailment", "not_entailment"]
LABELS = {"CoLA": "01", "SST-2": "01", "MRPC": "01", "QQP": "01", "MNLI": NLI, "QNLI": RTE, "RTE": RTE, "WNLI": "01"}
SPLITS = {"MNLI": ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")}
SPLITS |= {"WNLI": ("train", "dev"), "diagnostic": ("diagnostic",)}  # WNLI's test set is made from WSC's
LABEL_COLUMNS = ("label", "gold_label", "label1", "is_duplicate", "Quality", "score")
WSC_ROWS = {"train": 277, "val": 104, "test": 146}


def sentence(draw: random.Random) -> str:
    """A random sentence; every twentieth has an oddity."""
    words = f"{draw.choice(NAMES)} {draw.choice(VERBS)} the {draw.choice(QUALITIES)} {draw.choice(THINGS)}"
    return f"{words} {draw.choice(ODD if draw.random() < 0.05 else ENDS)}."


def write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, ""]), encoding="utf-8", newline="")


def write_glue(folder: Path, rows: dict[str, int], text: Callable[[random.Random], str] = sentence) -> None:
    """Write the folders of all tasks and of the diagnostic set, without WNLI's test set; `rows`: {"train": n, "dev": n,
    ...}."""
    draw = random.Random(0)
    for task in HEADERS:
        for split in SPLITS.get(task, ("train", "dev", "test")):
            count = rows[split.partition("_")[0].replace("diagnostic", "test")]
            write_lines(folder / task / f"{split}.tsv", glue_lines(task, split, count, draw, text))


def glue_lines(
    task: str, split: str, count: int, draw: random.Random, text: Callable[[random.Random], str]
) -> list[str]:
    """The lines of a TSV file; labels alternate by row."""
    hidden = split.startswith("test") or task == "diagnostic"
    columns = [name for name in HEADERS[task] if not (hidden and name in LABEL_COLUMNS)]
    if hidden and task in ("CoLA", "SST-2"):
        columns = ["index", "sentence"]
    if hidden and task == "MRPC":
        columns = ["index", *columns]
    if split.startswith("dev") and task == "MNLI":  # each annotator's label
        columns[-1:-1] = [f"label{number}" for number in (2, 3, 4, 5)]
    lines = [] if task == "CoLA" and not hidden else ["\t".join(columns)]
    labels = LABELS.get(task, "0")
    for number in range(count):
        label = f"{number % 5}.{number % 1000:03}" if task == "STS-B" else labels[number % len(labels)]
        row = [cell(task, split, name, number, label, text(draw)) for name in columns]
        lines.append("\t".join(row))
        if task == "QQP" and not hidden and number == 7:
            lines.append("\t".join(row[:3]))  # a broken row
    if task == "MRPC" and split == "train":
        lines[0] = "\ufeff" + lines[0]
    return lines


def cell(task: str, split: str, column: str, number: int, label: str, text: str) -> str:
    """The value of a column: text, label or number."""
    if (task, column) == ("QNLI", "question"):  # with two sentences each
        return f"Who {VERBS[number // 2 % 8]} thing {number // 2} of {split}?"
    if column in LABEL_COLUMNS or column.startswith("label"):
        return label
    return text if column.startswith(("sentence", "question", "#")) and "ID" not in column else str(number)


def schema(number: int, draw: random.Random) -> tuple[str, str, int, list[str]]:
    """A Winograd schema: text, pronoun, index of the pronoun's word, candidate phrases."""
    first, second = draw.sample(NAMES, 2)
    thing, other = draw.sample(THINGS, 2)
    forms = [
        (f"{first} put the {thing} beside the old {other} number {number} , because", "it",
         [f"the {thing}", f"the old {other}"], f"was too {draw.choice(QUALITIES)} to stay in the garden ."),
        (f"{first} told {second} 's brother on day {number} that", "he", [first, f"{second} 's brother"],
         f"had lost the {draw.choice(QUALITIES)} {thing} near the station ."),
        (f"The {thing}s were stored behind the {other}s for {number} years ; nobody knew where", "they",
         [f"The {thing}s", f"the {other}s"], f"had come from , said {first} ."),
        (f"{first} gave {second} the {thing} on day {number} , so {first} visited", "her", [second, first],
         f"old house near the {other} in the evening ."),
    ]  # fmt: skip
    before, pronoun, phrases, after = draw.choice(forms)
    return f"{before} {pronoun} {after}", pronoun, len(before.split()), phrases


def write_wsc(folder: Path, glue_folder: Path, seed: int = 0) -> list[int]:
    """Write WSC's three files and WNLI's test.tsv, whose rows are WSC's test schemas in another order, a sixth of them
    rewritten. Returns the number of each WNLI row's WSC row."""
    draw = random.Random(seed)
    rows: list[dict] = []
    for split, count in WSC_ROWS.items():
        rows = []
        while len(rows) < count:
            text, pronoun, index, phrases = schema(len(rows), draw)
            for number, phrase in enumerate(phrases):
                target = {"span1_index": 0, "span1_text": phrase, "span2_index": index, "span2_text": pronoun}
                rows.append({"idx": len(rows), "text": text, "target": target, "label": number == 0})
        rows = rows[:count]
        hidden = [{name: value for name, value in row.items() if name != "label"} for row in rows]
        write_lines(folder / f"{split}.jsonl", [json.dumps(row) for row in (hidden if split == "test" else rows)])
    order = draw.sample(range(len(rows)), len(rows))
    lines = ["index\tsentence1\tsentence2"]
    for number, chosen in enumerate(order):
        target, words = rows[chosen]["target"], rows[chosen]["text"].split()
        before, after = words[: target["span2_index"]], words[target["span2_index"] + 1 :]
        hypothesis = rewritten(before, target["span1_text"].split(), after, draw, changes=number % 6 == 0)
        lines.append(f"{number}\t{joined(words)}\t{hypothesis}")
    write_lines(glue_folder / "WNLI" / "test.tsv", lines)
    return order


def joined(words: list[str]) -> str:
    """Words joined to text."""
    text = " ".join(words)
    for mark in (",", ".", ";", "'s"):
        text = text.replace(f" {mark}", mark)
    return text


def rewritten(before: list[str], phrase: list[str], after: list[str], draw: random.Random, changes: bool) -> str:
    """A part of a text with the phrase in place of the pronoun, as in WNLI; with `changes`, in lower case, misspelled,
    or with words outside the phrase removed or added."""
    kept = min(draw.randint(0 if len(after) > 3 else 4, 8), len(before))
    before, after = before[len(before) - kept :], after[: draw.randint(4, 12)]
    for change in draw.sample(("lower", "letter", "leave out", "add", "article"), draw.randint(1, 2) if changes else 0):
        side = draw.choice([words for words in (before, after) if len(words) > 3] or [after])
        if change == "lower":
            before, phrase, after = ([word.lower() for word in words] for words in (before, phrase, after))
        elif change == "article":
            before, phrase, after = (
                [w for w in ws if w.lower() not in ("a", "an", "the")] or ws for ws in (before, phrase, after)
            )
        elif change == "add":
            side.insert(draw.randrange(len(side)), draw.choice(("also", "very", "really")))
        elif change == "leave out" and len(side) > 3:
            del side[draw.randrange(len(side))]
        elif change == "letter":
            number = draw.randrange(len(side))
            at = draw.randrange(max(len(side[number]) - 1, 1))
            side[number] = side[number][:at] + side[number][at + 1 :] if len(side[number]) > 3 else side[number]
    return joined([*before, *phrase, *after])


def write_race(folder: Path) -> None:
    """Write RACE's folders: a JSON object per file, on one line."""
    draw = random.Random(0)
    for split in ("train", "dev", "test"):
        for level in ("middle", "high"):
            for number in range(8):
                row = {
                    "answers": [draw.choice("ABCD") for _ in range(3)],
                    "options": [[sentence(draw) for _ in range(4)] for _ in range(3)],
                    "questions": ["Who came  _  ?", "What is true?", "_ is the best title."],
                    "article": "\n".join(sentence(draw) for _ in range(12)),
                    "id": f"{level}{number}.txt",
                }
                write_lines(folder / split / level / f"{number}.txt", [json.dumps(row)])


def write_squad(folder: Path) -> None:
    """Write the four files of SQuAD 1.1 and 2.0: 8 paragraphs with two questions each."""
    draw = random.Random(0)
    for name in ("train-v1.1", "dev-v1.1", "train-v2.0", "dev-v2.0"):
        paragraphs = []
        for number in range(8):
            context, qas = " ".join(sentence(draw) for _ in range(6)), []
            for asked in range(2):
                answers = [answer_in(context, draw) for _ in range(3 if "dev" in name else 1)]
                qa = {"id": f"{name}-{number}-{asked}", "question": f"What about {draw.choice(THINGS)} {number}?"}
                if "v2.0" in name:
                    qa["is_impossible"] = asked == 1
                    if asked == 1:
                        qa["plausible_answers"], answers = answers, []
                qas.append({**qa, "answers": answers})
            paragraphs.append({"context": context, "qas": qas})
        data = [{"title": "Article", "paragraphs": paragraphs}]
        write_lines(folder / f"{name}.json", [json.dumps({"version": name.partition("-v")[2], "data": data})])


def answer_in(context: str, draw: random.Random) -> dict:
    """One to four words of the context, with their offset."""
    starts = [0, *(at + 1 for at, letter in enumerate(context) if letter == " ")]
    first = draw.randrange(len(starts) - 5)
    text = context[starts[first] : starts[first + draw.randint(1, 4)]].rstrip()
    return {"text": text, "answer_start": starts[first]} if text else answer_in(context, draw)


def blimp_rows(uid: str, pairs: int) -> Iterator[dict[str, Any]]:
    """Distinct pairs of a BLiMP paradigm."""
    for number in range(pairs):
        name, verb, thing = NAMES[number % len(NAMES)], VERBS[(number * 3 + len(uid)) % len(VERBS)], THINGS[number % 7]
        yield {
            "sentence_good": f"{name} {verb} the {thing} {number}.",
            "sentence_bad": f"{name} the {verb} {thing} {number}.",
            "linguistics_term": blimp.PHENOMENON[uid],
            "UID": uid,
            "pairID": str(number),
        }


def write_paradigm(folder: Path, uid: str, pairs: int) -> None:
    write_lines(folder / f"{uid}.jsonl", [json.dumps(row) for row in blimp_rows(uid, pairs)])


def write_blimp(folder: Path, pairs: int) -> None:
    """Write BLiMP's 67 paradigms."""
    for uid in blimp.PHENOMENON:
        write_paradigm(folder, uid, pairs)
