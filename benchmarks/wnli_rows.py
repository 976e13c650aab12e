"""Check of the alignment of WNLI rows with Winograd schemas (roberta_recipe/tasks/wnli.py) on the official files.

    python benchmarks/wnli_rows.py --wsc_dir WSC --glue_dir GLUE          # half a minute

For WNLI's train.tsv and dev.tsv, it counts the rows by kind of match, and how often WSC's label of the phrase equals
WNLI's. A phrase that WSC lacks, at a pronoun that it marks, is assumed right if no marked phrase is (most pronouns have
two candidates), which checks the pronoun but not the phrase. For test.tsv, without labels, it only counts.

Then it rewrites every schema of WSC at random, as WNLI's authors did by hand (a part of the text with the phrase, lower
case, misspelled, with words removed or added), and counts how many rows are aligned with their own schema.
"""

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # run as a script, from anywhere

from official_files import rewritten

from roberta_recipe.errors import exit_on_error
from roberta_recipe.input_files import read_text
from roberta_recipe.tasks import wnli, wsc

REWRITTEN = 5  # rewritten rows per schema
WSC_FILES, WNLI_FILES = ("train.jsonl", "val.jsonl", "test.jsonl"), ("train.tsv", "dev.tsv", "test.tsv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wsc_dir", type=Path, required=True, help="folder of SuperGLUE's WSC")
    parser.add_argument("--glue_dir", type=Path, required=True, help="folder of GLUE, with WNLI/")
    args = parser.parse_args()
    by_file = {name: wsc.read_wsc(args.wsc_dir / name) for name in WSC_FILES}
    schemas = [schema for found in by_file.values() for schema in found]
    for name in WNLI_FILES:
        path = args.glue_dir / "WNLI" / name
        if path.is_file():
            print(f"{name}: {on_rows(path, by_file['test.jsonl'] if name == 'test.tsv' else schemas)}")
    draw = random.Random(0)
    for name, found in by_file.items():
        sources = [schema for schema in found for _ in range(REWRITTEN)]
        rows = [(schema.text, rewritten_row(schema, draw)) for schema in sources]
        wrong = [
            f"    {source.where}, {source.query!r}: {row!r} has {aligned.schema.query!r}"
            for (_, row), source, aligned in zip(rows, sources, wnli.align_rows(rows, found, name), strict=True)
            if not same_question(aligned.schema, source)
        ]
        print(f"{name}, rewritten: {len(rows) - len(wrong):,} of {len(rows):,} rows aligned right", *wrong, sep="\n")


def rewritten_row(schema: wsc.Schema, draw: random.Random) -> str:
    """A random sentence2 for a schema."""
    before, after = schema.text[: schema.start].split(), schema.text[schema.end :].split()
    return rewritten(before, schema.query.split(), after, draw, changes=True)


def on_rows(path: Path, schemas: list[wsc.Schema]) -> str:
    """Counts of a file: rows by kind of match, and right labels."""
    lines = [line.split("\t") for line in read_text(path).splitlines()]
    labelled = "label" in lines[0]
    aligned = wnli.align_rows([(line[1], line[2]) for line in lines[1:]], schemas, path.name)
    counts: Counter[str] = Counter()
    for row, line in zip(aligned, lines[1:], strict=True):
        counts[row.origin] += 1
        label, kind = row.schema.label, "labels of the phrase"
        if label is None and all(schema.label is not None for schema in row.marked):
            label = not any(schema.label for schema in row.marked) if row.marked else None
            kind = "labels inferred from WSC's other phrases"
        if labelled and label is not None:
            counts[kind] += 1
            counts[f"{kind}, right"] += label == (line[3] == "1")
    return f"{len(aligned)} rows; " + ", ".join(f"{kind} {count}" for kind, count in counts.items())


def same_question(first: wsc.Schema, second: wsc.Schema) -> bool:
    """Whether two schemas ask for the same phrase at the same pronoun of the same text."""
    return all(getattr(first, name) == getattr(second, name) for name in ("text", "start", "end", "query"))


if __name__ == "__main__":
    exit_on_error(main)
