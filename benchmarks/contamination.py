"""How much of the evaluation sets stands in the pretraining corpus, by source, with examples.

    python benchmarks/contamination.py --corpus presets/corpus/roberta_160gb.yaml --glue_dir glue \
        --squad_file dev-v1.1.json --race_dir RACE --output contamination.json              # or: make contamination

The corpus is streamed once; memory is that of the evaluation sets' n-grams. A hit is compared word by word, so that no
hash collision counts. One core reads about 7 MB of text a second.
"""

import argparse
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from tqdm import tqdm

import finetune_glue
from roberta_recipe import corpus as corpora
from roberta_recipe import durable, glue, race, run, squad
from roberta_recipe.args import InputError, exit_on_error
from roberta_recipe.contamination import Index, Text, summarise, table, words_of

logger = logging.getLogger("recipe")


def evaluation_texts(glue_dir: str | None, squad_files: list[str], race_dir: str | None) -> Iterator[Text]:
    """Every sentence, context, question and passage of the sets that are there; answers and options are left out, being
    short. Raises `InputError` where a set cannot be read."""
    if glue_dir:
        for name, task in {**finetune_glue.TASKS, "ax": finetune_glue.AX}.items():
            for split, (file, _) in task.splits.items():
                if Path(glue_dir, task.folder, file).is_file() and split != "train":
                    rows = glue.read_split(task, name, split, glue_dir)
                    for number, texts in enumerate(rows.texts):
                        for text in texts:
                            yield Text(f"{name} {split}", f"row {number}", words_of(text))
    for path in squad_files:
        questions = squad.read_file(Path(path), version_2=None)
        contexts = {one.context: one.id for one in reversed(questions)}  # each with its first question
        for context, name in contexts.items():
            yield Text(f"{path} contexts", f"context of {name}", words_of(context))
        for one in questions:
            yield Text(f"{path} questions", one.id, words_of(one.question))
    for split in race.FOLDERS if race_dir else ():
        for level in race.LEVELS:
            if Path(race_dir, race.FOLDERS[split], level).is_dir():
                questions = race.read_folder(Path(race_dir), split, (level,))
                articles = {one.article: one.id.partition(",")[0] for one in reversed(questions)}
                for article, name in articles.items():
                    yield Text(f"race {split} {level} articles", name, words_of(article))
                for one in questions:
                    yield Text(f"race {split} {level} questions", one.id, words_of(one.question))


def read_corpus_into(index: Index, corpus: corpora.Corpus, max_documents: int | None) -> dict[str, int]:
    """Look every document of the corpus up; returns how many each source had."""
    counts = {}
    for source in corpus.sources:
        number = 0
        for document in tqdm(corpora.documents(corpus, source, "train", seed=0), desc=source.name, unit=" documents"):
            if max_documents and number >= max_documents:
                break
            index.look_up(document, source.name)
            number += 1
        counts[source.name] = number
    return counts


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="corpus preset")
    parser.add_argument("--glue_dir", help="folder of GLUE's official TSV files: the validation and test sets there")
    parser.add_argument("--squad_file", nargs="*", default=[], help="files in SQuAD's JSON format")
    parser.add_argument("--race_dir", help="folder of RACE's official files, training set included")
    parser.add_argument("--ngram", type=int, default=13, help="words; shorter texts are not asked about")
    parser.add_argument("--max_documents", type=int, help="of each source; without it, all")
    parser.add_argument("--output", help="JSON file of all counts and examples")
    args = parser.parse_args(argv)
    run.set_up_logging()
    if args.ngram < 1:
        raise InputError(f"ngram={args.ngram} must be at least 1")
    texts = list(evaluation_texts(args.glue_dir, args.squad_file, args.race_dir))
    if not texts:
        raise InputError("no evaluation set: name glue_dir, squad_file or race_dir")
    corpus = corpora.read_corpus(args.corpus)
    index = Index(texts, args.ngram)
    logger.info(f"{len(texts):,} texts, {len(index.hashes):,} {args.ngram}-grams")
    documents = read_corpus_into(index, corpus, args.max_documents)
    summary = summarise(texts, args.ngram, list(documents))
    print(table(summary, args.ngram))
    for name, row in summary.items():
        for example in row["examples"][:1]:
            where = f"{example['id']} ({example['share']:.0%}, {', '.join(example['sources'])})"
            print(f"\n{name}, {where}: {example['text']}")
    result = {"corpus": corpus.name, "ngram": args.ngram, "documents": documents, "sets": summary}
    if args.output:
        durable.write_json(args.output, result)
    return result


if __name__ == "__main__":
    exit_on_error(main)
