"""finetune_ner.py: CoNLL files and tables, windows, entity scores, through the command line."""

import copy
import json
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from conftest import PLACES, SUBJECTS, VERBS, losses, second_of_training
from transformers import AddedToken, AutoConfig, TokenClassificationPipeline, pipeline

import finetune_ner
from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.publishing import card
from roberta_recipe.tasks import ner

RUN = "lr0.001-batch4-seed1"


def sentence(number):
    """Words and IOB2 tags of a person (PER) and a place (LOC)."""
    rng = random.Random(number)
    who, where = rng.choice(SUBJECTS).split(), rng.choice(PLACES).split()
    tags = ["B-PER", *["I-PER"] * (len(who) - 1), "O", "O", "B-LOC", *["I-LOC"] * (len(where) - 1), "O"]
    return [*who, rng.choice(VERBS), "😀", *where, "."], tags


SENTENCES = [sentence(number) for number in range(40)]
NAMES = ["O", "B-LOC", "B-PER", "I-LOC", "I-PER"]


def conll(sentences, between="_ "):
    blocks = ("".join(f"{word} {between}{tag}\n" for word, tag in zip(*pair, strict=True)) for pair in sentences)
    return "-DOCSTART- -X- O\n\n" + "\n".join(blocks)


@pytest.fixture
def argv(root, model_dir, tmp_path):
    """A function: the command line of a second of training on 40 sentences, with further flags."""
    (tmp_path / "train.conll").write_text(conll(SENTENCES), encoding="utf-8")
    own = {"model_name_or_path": model_dir, "output_dir": tmp_path / "out", "train_file": tmp_path / "train.conll"}
    own |= {"global_batch_size": 4, "per_device_train_batch_size": 4}
    return lambda *others, **values: second_of_training(root / "presets/ner/own.yaml", *others, **{**own, **values})


def test_from_the_command_line(argv, tmp_path, capfd):
    """The same command again, an untagged test set, and `pipeline` with entity names."""
    (tmp_path / "new.conll").write_text("the\ncat\n\nsleeps\n")
    words = argv("--do_predict", "--test_file", tmp_path / "new.conll", learning_rate=1e-2, max_steps=60)
    summary = finetune_ner.main(words)
    said = capfd.readouterr()
    assert "Held out    a tenth of " in said.err and "Rows        train 36, test 2, validation 4 sentences" in said.err
    assert "O, B-LOC, B-PER, I-LOC, I-PER; IOB2" in said.err and "Majority answer: 0.0 (always O)" in said.out
    best = tmp_path / "out" / RUN.replace("0.001", "0.01")
    metrics = durable.read_json(best / "run_record.json")["metrics"]
    assert list(metrics) == ["f1", "precision", "recall", "strict_f1", "accuracy"] and metrics["f1"] > 0.5
    assert summary["settings"][0]["medians"] == metrics and summary["dataset"]["task_type"] == "token-classification"
    rows = [line.split(" ") for line in (best / "validation_predictions.conll").read_text().splitlines() if line]
    assert np.mean([row[1] == row[2] for row in rows]) == pytest.approx(metrics["accuracy"])
    lines = (best / "test_predictions.conll").read_text().split("\n")
    assert [line.split(" ")[0] for line in lines] == ["the", "cat", "", "sleeps", ""]
    assert AutoConfig.from_pretrained(best / "best").id2label == dict(enumerate(NAMES))
    tag = pipeline("token-classification", str(best / "best"), aggregation_strategy="first")
    assert {entity["entity_group"] for entity in tag("the cat sees 😀 in the garden .")} == {"PER", "LOC"}
    config, record = (durable.read_json(best / name) for name in ("best/config.json", "run_record.json"))
    shown = str(card.fine_tuned("me/mine", config, record, summary))
    assert (
        "fine-tuned on train.conll, a tenth of it held out" in shown and "pipeline_tag: token-classification" in shown
    )
    finetune_ner.main(words)
    assert "Done        " in capfd.readouterr().err


def test_predictions_have_tabs_where_a_tag_has_a_blank(tmp_path, monkeypatch):
    sentence, tags = ner.Sentence(("Ann", "Ott"), ("O", "B-last name")), [["O", "O"]]
    windows = {"validation": SimpleNamespace(sentences=[sentence], tags=lambda scores: tags)}
    monkeypatch.setattr(finetune_ner, "validation_scores", lambda folder: None)
    finetune_ner.write_predictions(SimpleNamespace(output_dir=tmp_path), SimpleNamespace(tests={}), windows)
    assert (tmp_path / "validation_predictions.conll").read_text() == "Ann\tO\tO\nOtt\tB-last name\tO\n"


def test_any_accumulation_gives_one_curve(argv, tmp_path):
    """The loss is the mean over the words of the effective batch; sentences differ in length."""
    curves = []
    for micro_batch in (4, 1):
        finetune_ner.main(argv(per_device_train_batch_size=micro_batch, output_dir=tmp_path / str(micro_batch)))
        curves.append(losses(durable.read_json(tmp_path / str(micro_batch) / RUN / "run_record.json")))
    assert len(curves[0]) == 6 and curves[0][-1] != curves[0][0] and curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_the_loss_is_a_sum_over_words_and_scores_show_nan():
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[-100, 4, -100], [1, -100, 2]])
    batch, output = {"input_ids": labels, "labels": labels}, type("Output", (), {"logits": logits})
    total, scores = finetune_ner.tag_loss(lambda **_: output, dict(batch))
    expected = -sum(logits.log_softmax(-1)[row, at, labels[row, at]] for row, at in ((0, 1), (1, 0), (1, 2)))
    assert total == pytest.approx(float(expected)) and scores.equal(logits.argmax(-1).float())
    logits[0, 0, 2] = torch.nan
    assert finetune_ner.tag_loss(lambda **_: output, dict(batch))[1].isnan().nonzero().tolist() == [[0, 0]]


@pytest.mark.parametrize("kind", ["tokenizer", "wordpiece"])
@pytest.mark.parametrize("length", [8, 13, 64])
def test_no_word_is_lost_between_windows(request, kind, length):
    tokenizer = request.getfixturevalue(kind)
    sentences = [ner.Sentence(tuple(words), tuple(tags)) for words, tags in SENTENCES]
    long = sentences[0]
    sentences.append(ner.Sentence(("Antidisestablishmentarianism" * 3, *long.words), ("O", *long.tags)))
    sentences.append(ner.Sentence(("a", "\u200b\x00", "b"), ("O", "O", "B-PER")))
    windows, seen = ner.make_windows(sentences, NAMES, tokenizer, length), [[] for _ in sentences]
    scores = np.full((len(windows.features), length), -100.0)
    for row, (feature, (number, words)) in enumerate(zip(windows.features, windows.word_index, strict=True)):
        at = np.flatnonzero(feature["labels"] != -100)
        assert len(feature["input_ids"]) <= length and len(at) == len(words)
        for position, word in zip(at, words, strict=True):
            text = sentences[number].words[word].encode()
            token = tokenizer.decode([feature["input_ids"][position]]).strip().removeprefix("##")
            assert token == "�" or kind == "wordpiece" or text.startswith(token.encode()), (token, text)
        seen[number] += words.tolist()
        scores[row, at] = feature["labels"][at]
    assert seen[:-1] == [[*range(len(each.words))] for each in sentences[:-1]]
    assert seen[-1][0] == 0 and seen[-1][-1] == 2
    assert windows.tags(scores) == [list(each.tags) for each in sentences]
    assert len(windows.features) > len(sentences)


def test_an_added_token_with_the_space_behind_it_is_its_word(wordpiece):
    tokenizer = copy.deepcopy(wordpiece)
    tokenizer.add_tokens([AddedToken("[E1]", lstrip=True, rstrip=True)])
    windows = ner.make_windows([ner.Sentence(("a", "[E1]", "b"), ("O", "B-PER", "O"))], NAMES, tokenizer, 16)
    assert [words.tolist() for _, words in windows.word_index] == [[0, 1, 2]]


@pytest.mark.parametrize("name", ["t.conll", "t.txt", "t.jsonl", "t.parquet", "classes.parquet", "hub"])
def test_formats(argv, tmp_path, monkeypatch, name):
    """The same sentences in each format; files of `datasets` and the Hub have names for class numbers."""
    path, words = tmp_path / name, argv(train_file=tmp_path / name)
    rows = [{"tokens": words, "ner_tags": tags} for words, tags in SENTENCES]
    if name in ("hub", "classes.parquet"):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        column = datasets.List(datasets.ClassLabel(names=NAMES[::-1]))
        features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": column})
        table = datasets.Dataset.from_dict({key: [row[key] for row in rows] for key in features}, features)
        table.to_parquet(path / "train.parquet" if name == "hub" else path)
        words[words.index("--train_file")] = "--dataset_name" if name == "hub" else "--train_file"
    elif name == "t.parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif name == "t.jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(conll(SENTENCES, "").replace("\n", "\r\n" if name == "t.txt" else "\n"), encoding="utf-8")
    (args, training_args), _ = finetune_ner.read_arguments(words)
    finetune_ner.check_arguments(args, training_args)
    data, note = finetune_ner.read_data(args, False)
    assert note == "a tenth of it held out for validation"
    read = sorted([list(each.words), list(each.tags)] for split in data.values() for each in split)
    assert read == sorted(map(list, SENTENCES)) and len(data["validation"]) == 4
    assert ner.names_and_scheme(data["train"]) == (tuple(NAMES), "IOB2")
    if name == "hub":
        with pytest.raises(InputError, match=r"do_predict: .*hub has no test set; save its splits as files"):
            finetune_ner.read_data(args, True)


BAD = {
    "no file": ([], {"train_file": ""}, "no data: name a CoNLL file"),
    "columns": (["a O", "b"], {}, "t.conll, line 2: 'b' is not 2 columns"),
    "columns of a sentence": (["a O", "", "b x O"], {}, "t.conll, line 3: 'b x O' is not 2 columns"),
    "no tag": (["a", "b"], {}, r"t.conll, sentence 1: ner_tags is None, not 2 tags"),
    "odd tag": (["a B-X", "", "b B_X"], {}, "t.conll, sentence 2: 'B_X' is not an entity tag, the others are: write B"),
    "tags first": (["O\twhat", "B-ACTOR\tbruce"], {}, "t.conll: column 1 has the tags: put the word first"),
    "counter": (["1\ta\tO", "2\tb\tO"], {}, r"t.conll: column 1 is a counter: keep words and tags, .* -f2,3$"),
    "CoNLL-U": (["1-2\tzum\t_", "1\tzu\tADP", "2\tdem\tDET"], {}, "t.conll: column 1 is a counter"),
    "GermEval": (["#\t2009\t-", "1\ta\tO", "2\tb\tO"], {}, "t.conll: column 1 is a counter"),
    "column of CoNLL": (["a O"], {"label_column": "tags"}, "label_column=tags has no effect on CoNLL files"),
    "CSV": (["a,O"], {"train_file": "t.csv"}, "t.csv: name a file in CoNLL format"),
    "other tags": (["a B-X", "", "b O"], {"validation_file": "v.conll"}, "v.conll has the tags B-Y, and training has"),
    "no validation rows": (["a B-X"], {"validation_file": "empty.conll"}, "empty.conll has no rows"),
    "tags in some test rows": (
        ["a B-X"], {"test_file": "v.jsonl", "do_predict": True}, "v.jsonl, sentence 2: ner_tags is None, .* or in none"
    ),
    "numbers": ([{"tokens": ["a", "b"], "ner_tags": [0, 3]}], {}, "t.jsonl: tags are numbers: write their names"),
    "bool": ([{"tokens": ["a", "b"], "ner_tags": ["O", True]}], {}, r"sentence 1: ner_tags is \['O', True\], not 2"),
    "line end": ([{"tokens": ["a\nb"], "ner_tags": ["O"]}], {}, r"t.jsonl, sentence 1: tokens has 'a\\nb', not a word"),
    "empty word": ([{"tokens": ["a", ""], "ner_tags": ["O", "O"]}], {}, "sentence 1: tokens has '', not a word"),
    "a text": ([{"tokens": "a b", "ner_tags": ["O", "O"]}], {}, "sentence 1: tokens has 'a b', not a word"),
    "other columns": ([{"words": ["a"], "tags": ["O"]}], {}, "name one of the columns words, tags with --text_column"),
    "no example": (["a O"], {"max_train_samples": 0}, "max_train_samples=0 must be above 0"),
    "few": (["a O", "b B-X"], {}, "t.conll has too few sentences to hold out a tenth: name a validation_file"),
    "one tag": (
        ["a B-X _", "b O _"], {"validation_file": "t.conll"}, "t.conll: all words of the training set have the tag '_'"
    ),
    "no test file": (["a O"], {"do_predict": True}, "do_predict: .* has no test set; name a test_file"),
    "smoothing": (["a O"], {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 must be below 1, and is for"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(argv, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    lines, values, said = BAD[case]
    name = "t.jsonl" if isinstance([*lines, None][0], dict) else "t.conll"
    Path(name).write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    Path("v.conll").write_text("c B-Y\n")
    Path("empty.conll").write_text("-DOCSTART- O\n\n")
    Path("v.jsonl").write_text('{"tokens": ["a", "b"], "ner_tags": ["O", "B-X"]}\n{"tokens": ["c"]}\n')
    with pytest.raises(InputError, match=said):
        finetune_ner.main(argv(**{"train_file": name, **values}))


def test_the_advice_on_a_treebank_keeps_words_and_parts_of_speech(tmp_path):
    """CoNLL-U (universaldependencies.org/format.html): ten columns, with ranges and empty nodes."""
    rows = ["# text = zum Meer", "1-2 zum _ _", "1 zu zu ADP", "2 dem der DET", "2.1 x x X", "3 Meer Meer NOUN", "", ""]
    lines = ["\t".join(row.split() + ["_"] * 6) if row[:1].isdigit() else row for row in rows]
    (tmp_path / "t.conllu").write_text("\n".join(lines * 2))
    with pytest.raises(InputError, match="column 1 is a counter") as refused:
        ner.read_file(str(tmp_path / "t.conllu"), "words", "tags")
    command = str(refused.value).partition("tags, ")[2].replace("FILE", "t.conllu")
    kept = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    (tmp_path / "t.conll").write_text(kept)
    expected = {"words": ["zu", "dem", "Meer"], "tags": ["ADP", "DET", "NOUN"]}
    assert ner.read_file(str(tmp_path / "t.conll"), "words", "tags") == [expected] * 2


CONLL = [  # file, words and tags
    ("# id = 1\na B-X\n\n# newdoc id = 2\n# a b c\nb O\n", "a/B-X b/O"),
    ("# O\na B-X\n", "#/O a/B-X"),
    ("#\tSym=Yes\tO\na\tNum=Sing\tB-X\n", "#/O a/B-X"),
    ("a B-X\n# O\n", "a/B-X #/O"),
    ("New York\tB-X\nb\tO\n", "New York/B-X b/O"),
    ("a\tB-X\nb O\n", "a/B-X b/O"),
    ("# 7 dogs\na\tB-X\n", "a/B-X"),
    ("a B-X\nb I-X\nc L-X\nd U-Y\ne O", "a/B-X b/I-X c/E-X d/S-Y e/O"),
    ("a B-X\nb M-X\nc E-X\nd S-Y\ne O", "a/B-X b/I-X c/E-X d/S-Y e/O"),
    ("# id 7f-1\tdomain=en\na _ _ B-X\nb _ _ O\n", "a/B-X b/O"),  # MultiCoNER
    ("a B-X\rb O\r\rc O\r", "a/B-X b/O c/O"),  # line ends of old Macs
    ("a B-X\r\r\nb I-X\r\r\n", "a/B-X b/I-X"),  # text mode, twice
]


@pytest.mark.parametrize(("text", "expected"), CONLL)
def test_conll_files(tmp_path, text, expected):
    """Comments, tab-separated words with spaces, BILOU, BMES."""
    (tmp_path / "t.conll").write_text(text)
    rows = ner.read_file(str(tmp_path / "t.conll"), "words", "tags")
    found = ner.parse_rows("t.conll", rows, "words", "tags", False)
    assert " ".join("/".join(pair) for each in found for pair in zip(each.words, each.tags, strict=True)) == expected


def test_other_tags_and_words_with_blanks(argv, tmp_path, capfd):
    """The log names tags that are no entity tags, and tags that training lacks; predictions are tab-separated."""
    rows = [{"tokens": ["New York", "is", "here"], "ner_tags": ["LOC", "O", "O"]}] * 9
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "v.jsonl").write_text(
        json.dumps({"tokens": ["New York", "is", "Mary"], "ner_tags": ["LOC", "O", "PER"]})
    )
    files = {f"{split}_file": tmp_path / f"{split[0]}.jsonl" for split in ("train", "validation")}
    files |= {"test_file": files["validation_file"], "max_seq_length": 8}  # several windows
    assert finetune_ner.main(argv("--do_predict", **files))["tests"]["test"]["examples"] == 1
    said = capfd.readouterr().err
    assert "tags are not entity tags (B-, I-, O): scored by accuracy" in said
    assert "words with unseen tags in validation: 1" in said
    lines = (tmp_path / "out" / RUN / "validation_predictions.conll").read_text().splitlines()
    assert [line.split("\t")[:2] for line in lines] == [["New York", "LOC"], ["is", "O"], ["Mary", "PER"]]


SCORED = [  # scheme, gold, predicted, f1 and strict f1 by seqeval 1.2.2
    ("IOB2", "B-A I-A O B-B", "B-A I-A O B-A", 0.5, 0.5),
    ("IOB2", "B-A I-A O B-B", "I-A I-A O B-B", 1, 0.666667),
    ("IOB2", "B-A B-A I-B O", "B-A I-A I-B O", 0.4, 0),
    ("IOB1", "I-A I-A B-A O I-B", "I-A I-A B-A O B-B", 1, 0.8),
    ("IOB1", "I-A B-A B-B I-B", "I-A I-A B-B I-B", 0.4, 0.5),
    ("IOBES", "B-A I-A E-A S-B O", "B-A I-A I-A S-B O", 1, 0.666667),
    ("IOBES", "S-A S-A B-B E-B", "S-A E-A B-B E-B", 1, 0.8),
    ("IOB2", "O O", "O B-A", 0, 0),
]


@pytest.mark.parametrize(("scheme", "gold", "predicted", "f1", "strict_f1"), SCORED)
def test_scores_are_seqevals(scheme, gold, predicted, f1, strict_f1):
    found = ner.scores([gold.split()], [predicted.split()], scheme)
    assert (found["f1"], found["strict_f1"]) == pytest.approx((f1, strict_f1))


def test_random_tags_are_scored_as_by_seqeval():
    """Skipped without `pip install seqeval`."""
    metrics, schemes = pytest.importorskip("seqeval.metrics"), pytest.importorskip("seqeval.scheme")
    rng = random.Random(1)
    for number in range(2000):
        scheme, prefixes = (("IOB1", "IB"), ("IOB2", "IB"), ("IOBES", "IBES"))[number % 3]
        tags = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in ("PER", "LOC"))]
        gold = [rng.choices(tags, k=rng.randint(1, 12)) for _ in range(3)]
        found = [[tag if rng.random() < 0.7 else rng.choice(tags) for tag in row] for row in gold]
        expected = {name: getattr(metrics, f"{name}_score")(gold, found) for name in ("f1", "precision", "recall")}
        expected["strict_f1"] = metrics.f1_score(gold, found, mode="strict", scheme=getattr(schemes, scheme))
        assert ner.scores(gold, found, scheme) == pytest.approx(
            {**expected, "accuracy": metrics.accuracy_score(gold, found)}
        )


def test_pipeline_takes_the_end_of_an_iobes_entity_for_an_entity():
    """As docs/fine_tuning.md says: with aggregation, it names such entities word by word."""
    assert TokenClassificationPipeline.get_tag(None, "E-LOC") == ("I", "E-LOC")


@pytest.mark.parametrize(
    ("tags", "scheme"),
    [
        ("O I-PER I-PER B-PER O I-LOC", "IOB1"),
        ("B-PER I-PER I-LOC", "IOB2"),
        ("B-PER E-PER O S-LOC", "IOBES"),
        ("DET NOUN", None),
    ],
)
def test_the_scheme_of_gold_tags(tags, scheme):
    assert ner.names_and_scheme([ner.Sentence((), tuple(tags.split()))])[1] == scheme
