"""n-grams of evaluation sets in a corpus, compared with an exhaustive search."""

import json
import random
import re

import numpy as np
import pytest
from conftest import make_documents, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from roberta_recipe import durable
from roberta_recipe.data.corpus import read_corpus, resolve
from roberta_recipe.data.documents import documents, file_rows, text_hash
from roberta_recipe.errors import InputError
from tools import contamination
from tools.contamination import Index, Text, count_by_set, format_counts, ngram_hashes, words_of


def slow(texts, documents, length):
    """Reference: (text number, first word) of every n-gram of a document."""
    there = set()
    for document in documents:
        words = words_of(document)
        there |= {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}
    return {
        (number, start)
        for number, text in enumerate(texts)
        for start in range(len(text.words) - length + 1)
        if tuple(text.words[start : start + length]) in there
    }


def test_it_finds_what_a_search_finds():
    documents = make_documents(40, seed=1)
    rng = random.Random(0)
    pieces = [" ".join(words_of(document)[3:40]) for document in documents[:10]]
    fresh = [
        " ".join(rng.choice(["this", "house", "sees", "at", "night", "the"]) for _ in range(12)) for _ in range(50)
    ]
    texts = [Text("set", str(n), words_of(text)) for n, text in enumerate([*pieces, *fresh, *pieces[:2], "too short"])]
    index = Index(texts, 4)
    for number, document in enumerate(documents):
        index.look_up(document, ("even", "odd")[number % 2])
    found = {(number, start) for number, text in enumerate(texts) for where in text.found.values() for start in where}
    assert found == slow(texts, documents, 4) and len(found) > 300
    assert {number for number, _ in found} > set(range(10)) | {60, 61}  # texts 60 and 61 are copies of 0 and 1
    assert texts[0].found["even"] == set(range(34)) and not texts[62].found


def test_hashes_that_meet_are_no_hit(monkeypatch):
    monkeypatch.setattr(contamination, "hash", lambda word: 1, raising=False)
    index = Index([Text("set", "0", ["a", "b", "c"])], 2)
    index.look_up("x y z a b", "source")
    assert index.texts[0].found == {"source": {0}}
    assert len(set(ngram_hashes(list("abcdef"), 2).tolist())) == 1


def test_counts_by_source_and_examples():
    texts = [Text("set", str(n), list("abcdefgh")[: 8 - n]) for n in range(7)]
    texts[0].found = {"books": {0, 1, 2}, "news": {3}}
    texts[1].found = {"news": {0, 1, 2, 3, 4}}
    row = count_by_set(texts, 3, ["books", "news", "web"])["set"]
    assert (row["texts"], row["too_short"], row["with_an_ngram"], row["mostly"]) == (7, 1, 2, 1)
    assert row["by_source"] == {"books": 1, "news": 2, "web": 0}
    assert row["examples"][0] == {"id": "1", "share": 1.0, "sources": ["news"], "text": "a b c d e f g"}
    assert row["examples"][1]["text"] == "a b c d e f"
    assert "news 2" in format_counts({"set": row}, 3) and "web" not in format_counts({"set": row}, 3)


def test_the_command_line(tmp_path, capsys):
    """All three kinds of evaluation sets; the corpus has a passage of RACE and a question of SQuAD."""
    documents = make_documents(30, seed=2)
    article, question = (
        "Once upon a time " + documents[3],
        "What did the very small old grey cat of my friend see at night in May?",
    )
    write_parquet(tmp_path / "a.parquet", [*documents[:20], f"Yes! {article} No."])
    write_parquet(tmp_path / "b.parquet", [f"He asked: {question.upper()}", *documents[20:]])
    sources = "".join(f"  - {{name: {name}, files: {tmp_path / name}.parquet, weight: 1}}\n" for name in "ab")
    (tmp_path / "corpus.yaml").write_text(f"sources:\n{sources}")
    row = {"article": article, "questions": ["_ is?"], "options": [["a", "b", "c", "d"]], "answers": ["A"], "id": "x"}
    other = {**row, "article": make_documents(1, seed=99)[0]}
    for number, content in enumerate((row, other)):
        path = tmp_path / "race" / "dev" / "high" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    paragraph = {
        "context": "Nothing.",
        "qas": [{"id": "q1", "question": question, "answers": [], "is_impossible": True}],
    }
    paragraph["qas"].append({"id": "q2", "question": "Why?", "answers": [{"text": "Nothing", "answer_start": 0}]})
    (tmp_path / "dev.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    (tmp_path / "glue" / "RTE").mkdir(parents=True)
    (tmp_path / "glue" / "RTE" / "dev.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\ta b\tc\tentailment\n")
    few = ["--corpus", str(tmp_path / "corpus.yaml")]
    others = ["--race_dir", tmp_path / "race", "--squad_file", tmp_path / "dev.json", "--glue_dir", tmp_path / "glue"]
    result = contamination.main([*few, *map(str, others), "--output", str(tmp_path / "o.json")])
    assert durable.read_json(tmp_path / "o.json") == result
    sets = result["sets"]
    articles = sets["race validation high articles"]
    assert (articles["texts"], articles["mostly"], articles["by_source"]) == (2, 1, {"a": 1, "b": 0})
    assert articles["examples"][0]["id"] == "high/0.txt" and articles["examples"][0]["share"] == 1.0
    questions = sets[f"{tmp_path / 'dev.json'} questions"]
    assert (questions["too_short"], questions["by_source"]) == (1, {"a": 0, "b": 1})
    assert sets["rte validation"]["too_short"] == 2 and sum(result["documents"].values()) >= 30
    assert "race validation high, high/0.txt (100%, a): once upon a time" in capsys.readouterr().out.replace(
        " articles", ""
    )

    with pytest.raises(InputError, match="no evaluation set: name glue_dir"):
        contamination.main(few)
    with pytest.raises(InputError, match="ngram=0 must be at least 1"):
        contamination.main([*few, "--race_dir", str(tmp_path / "race"), "--ngram", "0"])
    with pytest.raises(InputError, match="max_documents=0 must be at least 1"):
        contamination.main([*few, "--race_dir", str(tmp_path / "race"), "--max_documents", "0"])
    named = ["--race_dir", str(tmp_path / "race"), "--glue_dir", str(tmp_path / "glu")]  # a typo
    with pytest.raises(InputError, match=r"glue_dir=.*/glu has no official files"):
        contamination.main([*few, *named])


def test_words():
    assert words_of("The  cat's 1,000 Ärger!") == ["the", "cat", "s", "1", "000", "ärger"] and words_of("...") == []
    assert words_of("हिन्दी में Cafe\u0301") == ["हिन्दी", "में", "cafe\u0301"]  # accents belong to their letters
    # no blanks, so characters
    assert words_of("東京へ Go行く。ภาษา") == ["東", "京", "へ", "go", "行", "く", "ภ", "า", "ษ", "า"]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cn", "Mn", "Mc", "Me"], max_codepoint=0x5FF)))
def test_words_of_scripts_with_blanks_are_those_of_re(text):
    assert words_of(text) == re.findall(r"\w+", text.lower()) or "\u0307" in text.lower()  # of a dotted capital I


def test_near_duplicates_of_training_text_are_counted_and_left_out(tmp_path, capsys):
    """A held-out document equals a training document except for its last words; the corpus preset leaves it out."""
    rng = np.random.default_rng(0)
    vocabulary = [f"w{number}" for number in range(400)]
    texts = [" ".join(rng.choice(vocabulary, size=60)) for _ in range(30)]
    held_out = [texts[3] + " and an end", *(" ".join(rng.choice(vocabulary, size=60)) for _ in range(5)), "too short"]
    for name, rows in (("train", texts), ("held_out", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    preset = tmp_path / "corpus.yaml"
    source = {"name": "a", "files": f"{tmp_path}/train.jsonl", "validation_files": f"{tmp_path}/held_out.jsonl"}
    preset.write_text(json.dumps({"sources": [source]}))
    listed = tmp_path / "near_duplicates.json"
    result = contamination.main(["--corpus", str(preset), "--held_out", "--leave_out", str(listed)])
    assert result["near_duplicates"] == [text_hash(held_out[0])]
    assert "1 of 7 held-out documents are near-duplicates" in capsys.readouterr().out

    preset.write_text(json.dumps({"sources": [source], "leave_out": str(listed)}))
    without = resolve(read_corpus(preset))
    rows = list(file_rows(without, without.sources[0], "validation", f"{tmp_path}/held_out.jsonl"))
    assert [row.text for row in rows] == [*held_out[1:], None] and rows[0].held_out == 1
    assert len(list(documents(without, without.sources[0], "train", seed=0))) == 30
    again = contamination.main(["--corpus", str(preset), "--held_out", "--leave_out", str(listed)])
    assert again["near_duplicates"] == result["near_duplicates"] == json.loads(listed.read_text())["documents"]
    listed.write_text("[]")
    with pytest.raises(InputError, match=r"contamination\.py --held_out"):
        resolve(read_corpus(preset))
    with pytest.raises(InputError, match=r"leave_out=.* needs --held_out"):
        contamination.main(["--corpus", str(preset), "--leave_out", str(listed)])
    with pytest.raises(InputError, match=r"leave_out=.* needs the whole corpus: leave --max_documents out"):
        contamination.main(["--corpus", str(preset), "--held_out", "--leave_out", str(listed), "--max_documents", "9"])
