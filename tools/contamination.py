r"""Contamination check: n-grams of evaluation sets in the pretraining corpus, by source, with examples.

    python tools/contamination.py --corpus presets/corpus/roberta_160gb.yaml --glue_dir glue \
        --squad_file dev-v1.1.json --race_dir RACE --output contamination.json              # or: make contamination

With `--held_out`, the corpus's held-out documents are checked too: those with most of their n-grams in the training
text are near-duplicates; `--leave_out FILE` lists them, for `leave_out: FILE` in the corpus preset.

As in GPT-3 (arXiv 2005.14165, appendix C): word 13-grams, lower case, no punctuation. Hash matches are verified word by
word. The corpus is streamed once (with `--held_out` twice), at about 7 MB/s per core; memory holds the evaluation sets'
n-grams.
"""

import dataclasses
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import regex

from roberta_recipe import durable
from roberta_recipe.data.corpus import Corpus, read_corpus, resolve
from roberta_recipe.data.documents import documents, text_hash
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.log import Bar, counted, logger, set_up_logging
from roberta_recipe.settings import RecipeParser
from roberta_recipe.tasks import glue, race
from roberta_recipe.tasks.squad_files import read_file

MOSTLY = 0.8  # minimum share of n-grams in a near-duplicate
HELD_OUT = "held out "  # name prefix of sets of held-out documents
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_LETTER = r"\p{L}\p{N}\p{M}_"
_WORD = regex.compile(rf"(?V1)[[{_LETTER}]&&[{_UNSPACED}]]\p{{M}}*|[[{_LETTER}]--[{_UNSPACED}]]+")
_NOT_LATIN = re.compile("[\u0300-\u1fff\u20d0-\u20ff\u2c00-\U0010ffff]")  # with combining marks and unspaced scripts
_FACTOR = np.int64(0x5851F42D4C957F2D)  # odd; an n-gram's hash is a polynomial in its words' hashes
_EXAMPLES = 3  # per set


@dataclass
class Text:
    """A text of an evaluation set, and its n-grams in the corpus."""

    set_name: str
    id: str
    words: list[str]
    found: dict[str, set[int]] = field(default_factory=dict)  # source -> positions of n-grams

    def positions(self) -> set[int]:
        """Positions of the n-grams in any source."""
        return set().union(*self.found.values())

    def share(self, length: int) -> float:
        """Share of its n-grams in the corpus; 0 for a text without n-grams."""
        return len(self.positions()) / max(len(self.words) - length + 1, 1)


def words_of(text: str) -> list[str]:
    """Lower-case words without punctuation; in unspaced scripts, single characters."""
    text = text.lower()
    return _WORD.findall(text) if _NOT_LATIN.search(text) else re.findall(r"\w+", text)  # the latter is faster


def ngram_hashes(words: list[str], length: int) -> np.ndarray:
    """(words - length + 1,) int64 hashes, which differ between processes."""
    hashes = np.fromiter(map(hash, words), dtype=np.int64, count=len(words))
    count = len(words) - length + 1
    total = np.zeros(max(count, 0), dtype=np.int64)
    with np.errstate(over="ignore"):
        for position in range(length if count > 0 else 0):
            total = total * _FACTOR + hashes[position : position + count]
    return total


class Index:
    """Look-up index of the evaluation texts' n-grams."""

    def __init__(self, texts: list[Text], length: int):
        self.texts, self.length = texts, length
        by_text = [ngram_hashes(text.words, length) for text in texts]
        counts = [len(hashes) for hashes in by_text]
        every = np.concatenate([*by_text, np.zeros(0, dtype=np.int64)])
        order = np.argsort(every, kind="stable")
        self.hashes = every[order]
        self.owner = np.repeat(np.arange(len(texts), dtype=np.int32), counts)[order]
        # pre-filter by the low bits: ten times cheaper than the search, and it excludes most n-grams of a corpus
        self.bits = np.int64((1 << max(len(every) * 16, 2).bit_length()) - 1)
        self.seen = np.zeros(int(self.bits) + 1, dtype=bool)
        self.seen[every & self.bits] = True
        self.position = np.concatenate([*map(np.arange, counts), np.zeros(0, dtype=np.int64)]).astype(np.int32)[order]

    def look_up(self, document: str, source: str) -> None:
        """Add a document's matching n-grams to `Text.found`."""
        words = words_of(document)
        hashes = ngram_hashes(words, self.length)
        maybe = np.flatnonzero(self.seen[hashes & self.bits])
        for start, entry in zip(maybe, np.searchsorted(self.hashes, hashes[maybe]), strict=True):
            while entry < len(self.hashes) and self.hashes[entry] == hashes[start]:
                text, position = self.texts[self.owner[entry]], int(self.position[entry])
                if text.words[position : position + self.length] == words[start : start + self.length]:
                    text.found.setdefault(source, set()).add(position)
                entry += 1


def count_by_set(texts: Iterable[Text], length: int, sources: list[str]) -> dict[str, dict[str, Any]]:
    """By set: counts of texts (all, too short for an n-gram, with an n-gram in the corpus, with most of them, by
    source), and the worst examples."""
    sets: dict[str, list[Text]] = {}
    for text in texts:
        sets.setdefault(text.set_name, []).append(text)
    counts = {}
    for name, members in sets.items():
        long_enough = [text for text in members if len(text.words) >= length]
        hits = sorted((text for text in long_enough if text.found), key=lambda text: -text.share(length))
        counts[name] = {
            "texts": len(members),
            "too_short": len(members) - len(long_enough),
            "with_an_ngram": len(hits),
            "mostly": sum(text.share(length) >= MOSTLY for text in hits),
            "by_source": {source: sum(source in text.found for text in hits) for source in sources},
            "examples": [_example(text, length) for text in hits[:_EXAMPLES]],
        }
    return counts


def _example(text: Text, length: int) -> dict[str, Any]:
    """A text's first run of overlapping n-grams in the corpus, at most 40 words."""
    positions = text.positions()
    first = last = min(positions)
    while last + 1 in positions:
        last += 1
    words = text.words[first : last + length][:40]
    return {
        "id": text.id,
        "share": round(text.share(length), 3),
        "sources": sorted(text.found),
        "text": " ".join(words),
    }


def format_counts(summary: dict[str, dict[str, Any]], length: int) -> str:
    """The printed table, a line per set."""
    lines = [f"{'':<44}{'texts':>8}{'checked':>8}{f'{length}-gram':>9}{'mostly':>8}  by source"]
    for name, row in summary.items():
        checked = row["texts"] - row["too_short"]
        sources = ", ".join(f"{source} {count:,}" for source, count in row["by_source"].items() if count)
        name = name if len(name) < 44 else f"...{name[-40:]}"
        lines.append(
            f"{name:<44}{row['texts']:>8,}{checked:>8,}{row['with_an_ngram']:>9,}{row['mostly']:>8,}  {sources}"
        )
    return "\n".join(lines)


def glue_texts(glue_dir: str) -> Iterator[Text]:
    """Sentences of GLUE's validation and test sets, of the tasks in `glue_dir`. Raises `InputError` for a bad file."""
    for name, task in {**glue.TASKS, "ax": glue.AX}.items():
        for split, (file, _) in task.splits.items():
            if Path(glue_dir, task.folder, file).is_file() and split != "train":
                rows = glue.read_split(task, name, split, glue_dir)
                for number, texts in enumerate(rows.texts):
                    for text in texts:
                        yield Text(f"{name} {split}", f"row {number}", words_of(text))


def squad_texts(paths: list[str]) -> Iterator[Text]:
    """Contexts and questions; answers are too short. Raises `InputError` for a bad file."""
    for path in paths:
        questions = read_file(Path(path), version_2=None)
        contexts = {question.context: question.id for question in reversed(questions)}  # the first question's id
        for context, name in contexts.items():
            yield Text(f"{path} contexts", f"context of {name}", words_of(context))
        for question in questions:
            yield Text(f"{path} questions", question.id, words_of(question.question))


def race_texts(race_dir: str) -> Iterator[Text]:
    """Articles and questions of the splits in `race_dir`; options are too short. Raises `InputError` for a bad file."""
    for split in race.FOLDERS:
        for level in race.LEVELS:
            if Path(race_dir, race.FOLDERS[split], level).is_dir():
                questions = race.read_folder(Path(race_dir), split, (level,))
                articles = {question.article: question.id.partition(",")[0] for question in reversed(questions)}
                for article, name in articles.items():
                    yield Text(f"race {split} {level} articles", name, words_of(article))
                for question in questions:
                    yield Text(f"race {split} {level} questions", question.id, words_of(question.question))


def held_out_texts(corpus: Corpus) -> Iterator[Text]:
    """The held-out documents of each source, with the ids of `leave_out`."""
    for source in corpus.sources:
        for document in documents(corpus, source, "validation", seed=0):
            yield Text(f"{HELD_OUT}{source.name}", text_hash(document), words_of(document))


def near_duplicates(texts: list[Text], length: int) -> list[str]:
    """Ids of the held-out documents with most of their n-grams in the training text."""
    return sorted(text.id for text in texts if text.set_name.startswith(HELD_OUT) and text.share(length) >= MOSTLY)


def look_up_corpus(index: Index, corpus: Corpus, max_documents: int | None) -> dict[str, int]:
    """Look up the corpus's documents; returns their number by source."""
    counts = {source.name: 0 for source in corpus.sources}
    for source in corpus.sources:
        found = itertools.islice(documents(corpus, source, "train", seed=0), max_documents)
        for document in Bar(found, desc=source.name, unit=" documents"):
            index.look_up(document, source.name)
            counts[source.name] += 1
    return counts


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the command line `argv`; prints the table and returns counts and examples. Raises `InputError`."""
    set_up_logging()
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("--corpus", required=True, help="corpus preset")
    parser.add_argument("--glue_dir", help="folder of GLUE's official TSV files (validation and test sets)")
    parser.add_argument("--squad_file", nargs="*", default=[], help="files in SQuAD's JSON format")
    parser.add_argument("--race_dir", help="folder of RACE's official files, training set included")
    parser.add_argument("--held_out", action="store_true", help="check the corpus's held-out documents too")
    parser.add_argument("--leave_out", help="JSON file to list the near-duplicates of --held_out in")
    parser.add_argument("--ngram", type=int, default=13, help="words per n-gram; shorter texts are not checked")
    parser.add_argument("--max_documents", type=int, help="documents per source; default: all")
    parser.add_argument("--output", help="JSON file of all counts and examples")
    args = parser.parse_args(argv)
    for name in ("ngram", "max_documents"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise InputError(f"{name}={value} must be at least 1")
    if args.leave_out and not args.held_out:
        raise InputError(f"leave_out={args.leave_out} needs --held_out")
    if args.leave_out and args.max_documents:
        raise InputError(f"leave_out={args.leave_out} needs the whole corpus: leave --max_documents out")
    for name, path in (("leave_out", args.leave_out), ("output", args.output)):
        if path:
            durable.check_output_file(Path(path), name)
    corpus = read_corpus(args.corpus)
    if args.leave_out:
        # the new list replaces the preset's
        corpus = dataclasses.replace(corpus, leave_out=None)
    corpus = resolve(corpus)
    if not (args.glue_dir or args.squad_file or args.race_dir or args.held_out):
        raise InputError("no evaluation set: name glue_dir, squad_file, race_dir or held_out")
    texts = []
    for flag, read in (("glue_dir", glue_texts), ("squad_file", squad_texts), ("race_dir", race_texts)):
        if named := getattr(args, flag):
            texts += (found := list(read(named)))
            if not found:
                raise InputError(f"{flag}={named} has no official files")
    texts += held_out_texts(corpus) if args.held_out else []
    index = Index(texts, args.ngram)
    logger.info(f"{counted(len(texts), 'text')}, {counted(len(index.hashes), f'{args.ngram}-gram')}")
    counts = look_up_corpus(index, corpus, args.max_documents)
    summary = count_by_set(texts, args.ngram, list(counts))
    print(format_counts(summary, args.ngram))
    for name, row in summary.items():
        for example in row["examples"][:1]:
            where = f"{example['id']} ({example['share']:.0%}, {', '.join(example['sources'])})"
            print(f"\n{name}, {where}: {example['text']}")
    result = {"corpus": corpus.name, "ngram": args.ngram, "documents": counts, "sets": summary}
    if args.held_out:
        result["near_duplicates"] = near_duplicates(texts, args.ngram)
        count = sum(text.set_name.startswith(HELD_OUT) for text in texts)
        found = len(result["near_duplicates"])
        print(f"\n{found:,} of {count:,} held-out documents are near-duplicates of training text")
    if args.leave_out:
        durable.write_json(args.leave_out, {"documents": result["near_duplicates"]})
    if args.output:
        durable.write_json(args.output, result)
    return result


if __name__ == "__main__":
    exit_on_error(main)
