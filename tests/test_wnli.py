"""Alignment of WNLI rows with Winograd schemas: literal, rewritten, of other phrases, of texts that WSC lacks."""

import json
import random

import pytest
from official_files import rewritten, write_wsc

from roberta_recipe.errors import InputError
from roberta_recipe.input_files import read_text
from roberta_recipe.tasks import wnli, wsc

CELLAR = "Alma gave Brenda's sister the heavy keys on Sunday, because she wanted to open the cellar before it rained."
TRAINS = "Maude and Dora had seen the trains, with puffs of smoke. Horses ran away when they came in sight."


def schemas_of(path, *rows):
    """WSC schemas for (text, query, pronoun, index of the pronoun among the words)."""
    lines = []
    for number, (text, query, pronoun, index) in enumerate(rows):
        target = {"span1_text": query, "span2_text": pronoun, "span2_index": index}
        lines.append(json.dumps({"idx": number, "text": text, "target": target, "label": True}))
    path.write_text("\n".join(lines))
    return wsc.read_wsc(path)


@pytest.fixture
def cellar(tmp_path):
    rows = [(CELLAR, "Alma", "she", 10), (CELLAR, "Brenda 's sister", "she", 10)]
    return schemas_of(tmp_path / "wsc.jsonl", *rows)


def aligned(schemas, text, hypothesis):
    (row,) = wnli.align_rows([(text, hypothesis)], schemas, "test.tsv")
    return row


def test_rows_of_a_made_up_test_set_find_their_schemas(tmp_path):
    """At WNLI's official size, in another order than WSC's, a sixth of the rows rewritten."""
    order = write_wsc(tmp_path, tmp_path / "glue")
    schemas = wsc.read_wsc(tmp_path / "test.jsonl")
    lines = read_text(tmp_path / "glue" / "WNLI" / "test.tsv").splitlines()[1:]
    rows = wnli.align_rows([tuple(line.split("\t")[1:]) for line in lines], schemas, "test.tsv")
    assert [row.schema.idx for row in rows] == order and len(order) == 146
    assert {row.origin for row in rows} == {wnli.SCHEMA_ORIGINS[0]}
    assert sum(row.cost > 0 for row in rows) >= 12  # rows that no literal comparison would find


@pytest.mark.parametrize("seed", range(2))
def test_rewritten_rows_find_their_schemas(tmp_path, seed):
    """200 generated rewritten hypotheses, of which at most two are aligned with another schema."""
    write_wsc(tmp_path, tmp_path / "glue", seed=seed)
    schemas, draw = wsc.read_wsc(tmp_path / "train.jsonl")[:200], random.Random(seed)
    rows = [
        (s.text, rewritten(s.text[: s.start].split(), s.query.split(), s.text[s.end :].split(), draw, changes=True))
        for s in schemas
    ]
    found = [row.schema.idx for row in wnli.align_rows(rows, schemas, "rows")]
    wrong = [row for row, schema, idx in zip(rows, schemas, found, strict=True) if schema.idx != idx]
    assert len(rows) == 200 and len(wrong) <= 2, wrong


@pytest.mark.parametrize(
    ("hypothesis", "query"),
    [
        ("Alma wanted to open the cellar before it rained.", "Alma"),
        ("alma wants to open the cellar", "Alma"),
        ("Brenda's sister wanted to open the cellar.", "Brenda's sister"),
        ("Because the sister wanted to open cellar", "Brenda's sister"),
        ("Brendas sistr wanted to open the celler", "Brenda's sister"),
        ("On Sunday Brenda’s sister wanted to  open the cellar , before it rained", "Brenda's sister"),
    ],
)
def test_a_rewritten_phrase_is_wscs(cellar, hypothesis, query):
    row = aligned(cellar, CELLAR, hypothesis)
    assert (row.schema.query, row.origin) == (query, "WSC's phrase") and row.schema in cellar


@pytest.mark.parametrize(
    ("hypothesis", "query", "pronoun", "found"),
    [
        ("Brenda wanted to open the cellar.", "Brenda", "she", 1),  # not her sister
        ("The keys wanted to open the cellar.", "The keys", "she", 1),
        ("She wanted to open the cellar before the sky rained.", "the sky", "it", 2),
    ],
)
def test_another_phrase_or_pronoun_becomes_a_schema_of_its_own(cellar, hypothesis, query, pronoun, found):
    row = aligned(cellar, CELLAR, hypothesis)
    schema = row.schema
    assert (schema.query, schema.text[schema.start : schema.end]) == (query, pronoun)
    assert row.origin == wnli.SCHEMA_ORIGINS[found] and schema.label is None and schema.where == "test.tsv, row 1"
    assert len(row.marked) == (2 if found == 1 else 0)


def test_texts_that_differ_in_spacing_keep_their_own_positions(tmp_path):
    """The same words with one more comma have their pronoun at another character."""
    other = TRAINS.replace("trains, with", "trains with")
    schemas = schemas_of(
        tmp_path / "wsc.jsonl", (TRAINS, "the trains", "they", 15), (other, "puffs of smoke", "they", 15)
    )
    for text in (TRAINS, other, TRAINS.upper(), TRAINS.replace(",", " ,")):
        assert aligned(schemas, text, "Horses ran away when puffs of smoke came in sight").schema == schemas[1]
        assert aligned(schemas, text, "Horses ran away when the trains came in sight").schema == schemas[0]
    without_articles = "Maude and Dora had seen trains, with puffs of smoke. Horses ran away when they came in sight."
    assert aligned(schemas, without_articles, "horses ran away when the trains came").schema == schemas[0]


def test_accents_quotes_and_a_marked_word_that_is_no_pronoun(tmp_path):
    key = "Ann took Chester 's \u00e9clair tin from her son Bo , but he wanted it for himself ."
    schemas = schemas_of(
        tmp_path / "wsc.jsonl",
        (key, "Ann", "her", 7),
        (key, "Chester", "her", 7),
        (key, "Chester", "he", 12),
        (key, "Chester 's \u00e9clair tin", "it", 14),
        ('Ann said "no" .', "Ann", "no", 2),
        ("A dog met the cat, and it ran.", "a dog", "it", 6),
        ("A dog met the cat, and it ran.", "dog", "it", 6),
    )
    as_key = "Ann took Chester’s eclair tin from her son Bo, but he wanted it for himself."
    for number, hypothesis in [
        (1, "Ann took Chester's eclair tin from Chester's son Bo."),
        (0, "Ann took Chester ’s eclair tin from Ann's son Bo."),
        (2, "Chester wanted it for himself."),
        (3, "He wanted Chester's \u00e9clair tin for himself."),
    ]:
        assert aligned(schemas, as_key, hypothesis).schema == schemas[number]
    assert aligned(schemas, "Ann said ``no''.", "Ann said Ann.").schema == schemas[4]
    for number, hypothesis in [(5, "A dog ran."), (6, "Dog ran.")]:
        assert aligned(schemas, "A dog met the cat, and it ran.", hypothesis).schema == schemas[number]


@pytest.mark.parametrize(
    ("phrase", "query", "extra"),
    [
        ("Tatyana's mother", "mother", 1),
        ("her mother", "mother", 0),
        ("Kamchatka", "Kamtchatka", 0),
        ("the guy in uniform", "some guy in a uniform with a beard", 0),
        ("tucker", "Mr. Tucker", 0),
        ("Nell", "Nell Raleigh", 0),
        ("Nell tucked", "Nell", None),
        ("Alma's daughter", "Alma", None),
        ("Alma", "Alma's daughter", None),
        ("the younger students", "The older students", None),
        ("Pam and Paul", "Pam", None),
        ("Paul", "Pam and Paul", None),
        ("the", "Pam", None),
    ],
)
def test_phrases_that_can_name_a_query(phrase, query, extra):
    assert wnli.extra_words(phrase, query) == extra


def test_what_cannot_be_a_row(cellar):
    with pytest.raises(InputError, match=r"test.tsv, row 2: 'No word here.' has no pronoun"):
        wnli.align_rows([(CELLAR, "Alma wanted it."), ("No word here.", "x")], cellar, "test.tsv")
    with pytest.raises(InputError, match=r"wsc.jsonl has none of its texts; name SuperGLUE's WSC file of the same"):
        wnli.align_rows([("It rains.", "The sky rains.")], cellar, "test.tsv")
