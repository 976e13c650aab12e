"""Corpus presets, files and rows that cannot be read: each is named, before training where that can be."""

import gzip
import json

import pyarrow as pa
import pytest
from conftest import write_jsonl, write_parquet, write_text
from test_corpus import TEXTS, check, texts_of

from roberta_recipe.data import documents as reading
from roberta_recipe.data.corpus import Source, read_corpus
from roberta_recipe.errors import InputError


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sources: 3", "`sources:` must be a list"),
        ("sources: []", "`sources:` must be a list"),
        ("sources: [{name: a}]", "source 'a' must have exactly one of dataset, files, builtin"),
        ("sources: [{name: a, files: x, builtin: docstrings}]", "exactly one of"),
        ("sources: [{name: a, fils: x}]", "unknown key 'fils'; did you mean 'files'"),
        ("sources: [{files: x}]", "has no name"),
        ("sources: [{name: a, files: x, size_gb: big}]", "size_gb is 'big', and must be a valid number"),
        ("sources: [{name: a, files: x, weight: 0}]", "weight is 0.0, and must be above 0"),
        ("sources: [{name: a, dataset: org/data}]", "pin the dataset 'org/data' with `revision:`"),
        ("sources: [{name: a, files: x, weight: .nan}]", "weight is nan, and must be above 0 and finite"),
        ("sources: [{name: a, files: x, size_gb: .inf}]", "size_gb is inf, and must be above 0 and finite"),
        (
            "sources: [{name: a, files: x, weight: 1.0e-300}, {name: b, files: y, weight: 1}]",
            "source 'a' has a share of 1e-300 of the mixture, and the least is 1e-06",
        ),
        (
            "sources: [{name: a, files: x, size_gb: 1.0e+308}, {name: b, files: y, size_gb: 1.0e+308}]",
            "source 'a' has a share of 0 of the mixture",
        ),
        *[
            (f'sources: [{{name: "{name}", files: x}}]', "a name becomes a folder, and has 1 to 60 letters, digits")
            for name in ("../../escaped", "a/b", ".", "", "a\\0b", "a b", "manifest.json", "a\\n", "x" * 61)
        ],
        ("sources: [{name: a, files: x, weight: 1}, {name: b, files: y}]", "every source needs a share"),
        ("sources: [{name: a, files: x, weight: 1}, {name: b, files: y, size_gb: 1}]", "every source needs a share"),
        ("sources: [{name: a, files: x, weight: 1}, {name: a, files: y, weight: 1}]", "two sources are named 'a'"),
        ("validation_share: 1.5\nsources: [{name: a, files: x}]", "validation_share is 1.5"),
        ("valid_share: 0.5\nsources: [{name: a, files: x}]", "unknown key 'valid_share'"),
    ],
)
def test_bad_corpus_presets(tmp_path, text, named):
    path = tmp_path / "corpus.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_corpus(path)
    assert named in str(error.value)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"'.*absent.parquet' does not exist, or is empty"):
        check(tmp_path / "absent.parquet")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"folder' does not exist, or is empty"):
        check(tmp_path / "folder")
    (tmp_path / "folder" / "a.docx").write_text("x")
    with pytest.raises(
        InputError, match=r"holds no file that can be read \(found .docx\); readable are .parquet, .jsonl"
    ):
        check(tmp_path / "folder")
    write_text(tmp_path / "folder" / "a.txt", TEXTS)
    write_jsonl(tmp_path / "folder" / "b.jsonl", TEXTS)
    with pytest.raises(InputError, match=r"mixes formats \(json, text\)"):
        check(tmp_path / "folder")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_column_that_is_not_there(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    (write_parquet if kind == "parquet" else write_jsonl)(path, TEXTS, column="body")
    with pytest.raises(InputError, match=rf"{path} has no column 'text'; it has \['body'\] \(set text_column\)"):
        check(path)
    check(path, text_column="body")


def lines(*groups):
    """JSON lines: (rows, row), ..."""
    return "".join((json.dumps(row) + "\n") * count for count, row in groups)


NO_VALUE = [  # (lines, what is said of them)
    (lines((1, {"text": "One."}), (1000, {"body": "b"})), "rows 1 to 1000 of"),
    (lines((1, {"text": "One."}), (1000, {"text": None})), "rows 1 to 1000 of"),
    (
        lines((999, {"text": None}), (1, {"text": "One."}), (5, {"text": ""}), (1000, {"body": 0})),
        "rows 1005 to 2004 of",
    ),
    (lines((3, {"text": None, "body": "b"})), "rows 0 to 2 of"),
]


@pytest.mark.parametrize(("content", "said"), NO_VALUE, ids=range(len(NO_VALUE)))
def test_rows_without_a_value_in_the_text_column_are_refused(tmp_path, content, said):
    (tmp_path / "a.jsonl").write_text(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    for attempt in (
        lambda: check(tmp_path / "a.jsonl", text_column="text"),
        lambda: texts_of(files=str(tmp_path / "a.jsonl")),
        lambda: texts_of(files=str(tmp_path / "b.jsonl.gz")),
    ):
        with pytest.raises(InputError, match=rf"{said} .* have no value in column 'text' .*set text_column"):
            attempt()


def test_a_thousand_rows_without_a_value_are_allowed_among_others(tmp_path):
    content = lines((999, {"text": None}), (1, {"text": "One."}), (999, {"text": None}), (2000, {"text": ""}))
    (tmp_path / "a.jsonl").write_text(content)
    (tmp_path / "held_out.jsonl").write_text(lines((1, {"text": "Two."})))
    check(tmp_path / "a.jsonl", validation_files=str(tmp_path / "held_out.jsonl"))
    assert texts_of(files=str(tmp_path / "a.jsonl"), share=1e-9) == ["One."]
    source = Source("s", files=str(tmp_path / "a.jsonl"))
    for start in (1, 999, 1000, 1998, 3999):  # a run that resumes there knows nothing of the rows before
        assert len(list(reading.read_file(source, "json", source.files, start))) == 3999 - start


def test_parquet_whose_text_is_null_is_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS)
    write_parquet(tmp_path / "b.parquet", pa.array([None] * 20, pa.string()))
    with pytest.raises(InputError, match=r"rows 0 to 19 of .*b.parquet have no value in column 'text'"):
        check(tmp_path)
    with pytest.raises(InputError, match=r"rows 0 to 19 of .*b.parquet have no value in column 'text'"):
        texts_of(files=str(tmp_path / "b.parquet"))


def test_a_column_that_a_later_file_lacks_is_said_beforehand(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS)
    write_parquet(tmp_path / "b.parquet", TEXTS, column="body")
    with pytest.raises(InputError, match=r"b.parquet has no column 'text'"):
        check(tmp_path)


def test_a_column_that_holds_no_text(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [1, 2, 3])
    with pytest.raises(InputError, match=rf"column 'text' of {path} holds int, not text"):
        check(path)


def test_an_empty_corpus(tmp_path):
    write_parquet(tmp_path / "blank.parquet", ["", " ", None])
    (tmp_path / "none.txt").write_text("")
    for name in ("blank.parquet", "none.txt"):
        with pytest.raises(InputError, match=r"source 's' is empty"):
            check(tmp_path / name)


def test_text_that_is_not_utf8_is_named_by_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"Fine.\n\nCaf\xe9.\n")
    with pytest.raises(InputError, match=r"a.txt: line 3 is not UTF-8 \(byte 0xe9\); convert it"):
        check(tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "Fine."}\n{"text": "Caf\xe9"}\n')
    with pytest.raises(InputError, match=r"a.jsonl: line 2 is not UTF-8"):
        check(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match=r"a.jsonl: line 2 is not UTF-8"):  # beyond what is checked before training
        texts_of(files=str(tmp_path / "a.jsonl"))


def test_broken_files_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x"}) + "\n{broken\n")
    with pytest.raises(InputError, match=r"a.jsonl: line 2 is not JSON"):
        check(tmp_path / "a.jsonl")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match=r"cannot read .*a.parquet"):
        check(tmp_path / "a.parquet")
    path = write_parquet(tmp_path / "b.parquet", TEXTS)
    with pytest.raises(InputError, match=r"filters work on Parquet only"):
        check(write_text(tmp_path / "c.txt", TEXTS), filters=[["language", "==", "en"]])
    with pytest.raises(InputError, match=r"cannot read .*b.parquet.*language"):
        check(path, filters=[["language", "==", "en"]])
