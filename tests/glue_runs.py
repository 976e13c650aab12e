"""Fixtures for tests of finetune_glue.py: generated rows of each task in the official layout, and command lines."""

import json
import types

import pytest
from conftest import PLACES, SUBJECTS, VERBS, second_of_training
from official_files import write_glue, write_lines

import finetune_glue
from roberta_recipe import durable

ROWS = {"train": 24, "dev": 9, "test": 7}


def sentence(rng):
    return f"{rng.choice(SUBJECTS).capitalize()} {rng.choice(VERBS)} {rng.choice(SUBJECTS)} {rng.choice(PLACES)}."


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """The folders of all ten tasks; labels alternate by row."""
    folder = tmp_path_factory.mktemp("glue")
    write_glue(folder, rows=ROWS, text=sentence)
    return folder


@pytest.fixture
def flags(root, data_dir, model_dir, tmp_path):
    """A function: the command line of a second of training on a task, with further flags."""

    def of(name, *others):
        own = {"data_dir": data_dir, "model_name_or_path": model_dir, "output_dir": tmp_path / "glue" / name}
        own |= {"global_batch_size": 8, "per_device_train_batch_size": 8, "other_rows": True}
        return second_of_training(root / "presets" / "glue" / f"{name}.yaml", *others, **own)

    return of


def parse_by_articles(text):
    """A stand-in for a spaCy `Doc`: words are tokens, "the" and the next word are a noun chunk."""
    words, at, tokens = text.split(" "), 0, []
    for word in words:
        tokens.append(types.SimpleNamespace(idx=at, text=word.rstrip("."), pos_="X"))
        at += len(word) + 1
    chunks = [types.SimpleNamespace(start=n, end=n + 2) for n, word in enumerate(words[:-1]) if word.lower() == "the"]

    class Parse(list):
        noun_chunks = chunks

    return Parse(tokens)


@pytest.fixture
def wsc_dir(tmp_path, data_dir, monkeypatch):
    """SuperGLUE's WSC files for the WNLI rows of `data_dir`, and a parser without spaCy."""
    monkeypatch.setattr(finetune_glue, "load_spacy", lambda model, purpose: parse_by_articles)
    folder = tmp_path / "wsc"
    folder.mkdir()
    wnli = []
    for split, file in finetune_glue.WSC_FILES.items():
        rows = []
        for number in range(ROWS[split.replace("validation", "dev")]):
            name = ("cat", "boat")[number % 2]
            text = f"The cat sees the boat and the dog number {number} {split} but it sleeps."
            pronoun = text.split(" ").index("it")
            target = {"span1_index": 0, "span1_text": f"the {name}", "span2_index": pronoun, "span2_text": "it"}
            row = {"idx": number, "text": text, "target": target}
            rows.append(row if split == "test" else {**row, "label": number % 2 == 0})
            if split == "test":
                wnli.append([str(number), text, f"The {name} sleeps."])
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["\t".join(row) for row in (["index", "sentence1", "sentence2"], *wnli)]
    write_lines(data_dir / "WNLI" / "test.tsv", lines)
    return folder


def special(name, wsc_dir):
    return {"wnli": ["--wsc_dir", wsc_dir, "--eval_steps", 3]}.get(name, [])


def record_of(tmp_path, name="rte", run="lr0.001-batch8-seed1"):
    return durable.read_json(tmp_path / "glue" / name / run / "run_record.json")
