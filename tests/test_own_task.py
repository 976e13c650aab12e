"""finetune_glue.py on own tables: formats, columns, labels, held-out rows, predictions, bad input."""

import decimal
import json
import math

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SUBJECTS, losses, second_of_training
from sklearn.metrics import f1_score
from transformers import AutoConfig, AutoModelForCausalLM, pipeline

import finetune_glue
import finetune_squad
from roberta_recipe import durable, log
from roberta_recipe.errors import InputError
from roberta_recipe.publishing import card
from roberta_recipe.tasks import glue_scores, own_task
from roberta_recipe.training import batch

STARS = ["1", "2", "10"]
CSV = "review,stars\n" + "".join(f'"{word}, ""so""\nit {n}",{STARS[n % 3]}\n' for n, word in enumerate(SUBJECTS * 5))
PAIRS = [{"a": f"cat {n}", "b": f"dog {n}", "same": n % 2 == 0} for n in range(20)]
BATCH = ("--global_batch_size", 4, "--per_device_train_batch_size", 4)


@pytest.fixture
def argv(root, model_dir, tmp_path):
    """A function: the command line of a second of training on a table with this text, or on a file."""

    def of(name, content, *others, preset="presets/glue/own.yaml"):
        if content is not None:
            (tmp_path / name).write_text(content, encoding="utf-8")
        own = {"model_name_or_path": model_dir, "output_dir": tmp_path / "out", "train_file": tmp_path / name}
        return second_of_training(root / preset, *BATCH, *others, **own)

    return of


def test_predictions_of_a_decoder_asked_for_later(argv, tokenizer, tmp_path):
    """Its head reads the last token before the padding; `Trainer.train` gives its config the tokenizer's padding id."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("qwen2", vocab_size=len(tokenizer), num_key_value_heads=2, **sizes)
    assert config.pad_token_id is None
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "decoder")
    tokenizer.save_pretrained(tmp_path / "decoder")
    (tmp_path / "new.csv").write_text("review\ncat\na dog near the sea\n")
    columns = ["--text_column", "review", "--label_column", "stars"]
    for later in ([], ["--test_file", tmp_path / "new.csv", "--do_predict"]):
        words = argv("my.csv", CSV, *columns, *later)
        words[words.index("--model_name_or_path") + 1] = str(tmp_path / "decoder")
        finetune_glue.main(words)
    assert len((tmp_path / "out" / "submission" / "new_predictions.tsv").read_text().splitlines()) == 3


def test_csv_with_quotes_and_line_ends_and_its_predictions(argv, tmp_path, capfd):
    """A tenth of the rows is held out, stratified; class names are sorted as numbers."""
    (tmp_path / "new.csv").write_text('review\n"a, b\nc"\nd\n')
    columns = ["--text_column", "review", "--label_column", "stars"]
    summary = finetune_glue.main(argv("my.csv", CSV, *columns, "--test_file", tmp_path / "new.csv", "--do_predict"))
    said = capfd.readouterr()
    assert "my.csv: review -> stars, 1, 2, 10; best epoch by accuracy" in said.err
    assert "train 36, validation 4, test 2 (a tenth of its rows held out for validation)" in said.err
    assert "own.yaml: learning rate 0.001, batch 4, 6 steps (0.667 epochs), warm-up 1 step, seeds 1" in said.err
    assert "my.csv, validation accuracy x 100" in said.out and "macro_f1" in said.out
    run = tmp_path / "out" / "lr0.001-batch4-seed1"
    assert AutoConfig.from_pretrained(run / "best").id2label == dict(enumerate(STARS))
    lines = (tmp_path / "out" / "submission" / "new_predictions.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and {line.split("\t")[1] for line in lines[1:]} <= set(STARS)
    assert len(lines) == 3
    record, config = durable.read_json(run / "run_record.json"), durable.read_json(run / "best" / "config.json")
    shown = str(card.fine_tuned("me/mine", config, record, summary))
    assert "fine-tuned on my.csv, a tenth of its rows held out for validation, by the protocol" in shown
    assert str(tmp_path / "my.csv") not in shown and "glue" not in shown.lower()
    assert "layer_decay" in shown and "qnli_form" not in shown and "wsc_loss" not in shown


@pytest.mark.parametrize("name", ["p.parquet", "p.jsonl", "p.json", "p.tsv", "hub"])
def test_formats_of_a_pair_task(argv, tmp_path, name, monkeypatch, caplog):
    """The same rows give the same task from a file and from a folder that `datasets` loads."""
    path = tmp_path / name
    if name == "hub":
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        path.mkdir()
        splits = "".join(
            f"  - {{split: {each}, path: {each}.parquet}}\n" for each in ("train", "test", "validation_matched")
        )
        (path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n")
    if name in ("p.parquet", "hub"):
        other = [{**PAIRS[0], "same": None}, *PAIRS[1:]]  # no test set to predict: a label is missing
        for file in ("train.parquet", "test.parquet", "validation_matched.parquet") if name == "hub" else ("",):
            pq.write_table(pa.Table.from_pylist(other if file == "test.parquet" else PAIRS), path / file)
    elif name == "p.tsv":
        path.write_text("a\tb\tsame\n" + "".join("\t".join(map(str, row.values())) + "\n" for row in PAIRS))
    else:
        lines = json.dumps(PAIRS) if name == "p.json" else "\n".join(map(json.dumps, PAIRS))
        path.write_text(lines)
    words = argv(name, None, "--text_column", "a", "--text_pair_column", "b", "--label_column", "same")
    if name == "hub":
        words[words.index("--train_file")] = "--dataset_name"
    (args, training_args), _ = finetune_glue.read_arguments(words)
    task = finetune_glue.task_of(args, training_args.do_predict)
    finetune_glue.check_arguments(args, training_args, task)  # a test set on the Hub need not be predicted
    assert task.labels == ("False", "True") and task.metrics == ("accuracy", "f1") and task.columns == ("a", "b")
    assert [len(task.examples[split]) for split in ("train", "validation")] == [18, 2]
    assert sorted(task.examples["validation"].labels) == [0, 1]
    if name == "hub":
        assert "hub has no split 'validation': a tenth of train is held out, validation_matched is not" in caplog.text
        with pytest.raises(InputError, match=r"hub, test, row 1: same is None, none of the training labels"):
            finetune_glue.task_of(args, do_predict=True)
    texts = [task.examples[split].texts for split in ("train", "validation")]
    rows = [(row["a"], row["b"]) for row in PAIRS]
    assert sorted([*texts[0], *texts[1]]) == sorted(rows) and texts[0] == [row for row in rows if row in texts[0]]


def test_test_labels_of_one_value_are_a_placeholder(argv, tmp_path, caplog):
    caplog.set_level("INFO", logger="recipe")
    row = {**PAIRS[0], "label": "yes"}
    made = own_task._encode_labels("test", "t.csv", "label", [row, row], ("no", "yes"), multi_label=False)
    assert made is None
    assert own_task._encode_labels("test", "t.csv", "label", [{}, {}], ("no", "yes"), multi_label=False) is None
    said = "Test set    label is missing, or {} in all rows: not scored"
    assert caplog.messages == [said.format("'yes'"), said.format(None)]


def test_scores_are_a_regression_on_their_range(argv, tmp_path, capfd):
    table = "sentence,label\n" + "".join(f"{word} {n},{20 + n}.5\n" for n, word in enumerate(SUBJECTS * 2))
    summary = finetune_glue.main(argv("s.csv", table, "--validation_file", tmp_path / "s.csv"))
    assert "regression, scores from 20.5 to 35.5; best epoch by pearson" in capfd.readouterr().err
    best = tmp_path / "out" / "lr0.001-batch4-seed1"
    predicted = [line.split("\t") for line in (best / "validation_answers.tsv").read_text().splitlines()]
    assert predicted[0] == ["sentence", "label", "prediction", "error"]
    assert all(10 < float(row[2]) < 46 for row in predicted[1:]) and set(summary["settings"][0]["medians"]) == {
        "pearson",
        "spearman",
    }


def test_a_model_of_few_positions_lowers_the_length_of_the_preset_alone(argv, tmp_path, capfd):
    """`test_glue_data.py` tests the error for a length on the command line."""
    log.log_once.cache_clear()
    words = argv("my.csv", CSV, "--text_column", "review", "--label_column", "stars")
    del words[(at := words.index("--max_seq_length")) : at + 2]
    finetune_glue.main(words)
    assert capfd.readouterr().err.count("Length      64, the maximum of ") == 1
    assert "max_seq_length: 64\n" in (tmp_path / "out" / "lr0.001-batch4-seed1" / "preset.yaml").read_text()


@pytest.mark.parametrize(("name", "comma"), [("t.csv", ","), ("t.tsv", "\t")])
def test_blank_lines_between_rows_of_several_columns_are_no_rows(tmp_path, name, comma):
    (tmp_path / name).write_text("text,label\n\na,x\n\n\nb,y\n\n".replace(",", comma))
    assert own_task.read_table(str(tmp_path / name)) == [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]


def test_scores_far_from_zero(argv, tmp_path):
    """Seconds since 1970, where float32 would round all predictions to the same number."""
    table = "sentence,label\n" + "".join(f"{word} {n},{10**9 + n}.5\n" for n, word in enumerate(SUBJECTS * 2))
    summary = finetune_glue.main(argv("s.csv", table, "--validation_file", tmp_path / "s.csv"))
    assert math.isfinite(summary["settings"][0]["medians"]["pearson"])
    answers = (tmp_path / "out" / "lr0.001-batch4-seed1" / "validation_answers.tsv").read_text().splitlines()[1:]
    assert {float(line.split("\t")[1]) for line in answers} == {10**9 + n + 0.5 for n in range(16)}


def test_predictions_of_scores_are_on_the_users_scale(argv, tmp_path):
    """Also for a scale of a millionth; the card names the factor of the saved model's output."""
    table = "sentence,label\n" + "".join(f"{word} {n},{20 + n}.5e-6\n" for n, word in enumerate(SUBJECTS * 2))
    words = argv(
        "s.csv", table, "--validation_file", tmp_path / "s.csv", "--do_predict", "--test_file", tmp_path / "s.csv"
    )
    summary = finetune_glue.main(words)
    tsv = (tmp_path / "out" / "submission" / "s_predictions.tsv").read_text().splitlines()[1:]
    run = tmp_path / "out" / "lr0.001-batch4-seed1"
    answers = [line.split("\t") for line in (run / "validation_answers.tsv").read_text().splitlines()[1:]]
    assert sorted(float(row[1]) for row in answers) == pytest.approx([(20.5 + n) * 1e-6 for n in range(16)])
    score = pipeline("text-classification", str(run / "best"))
    for number, word in enumerate(SUBJECTS * 2):
        expected = (20.5 + 15 * score(f"{word} {number}")[0]["score"]) * 1e-6
        assert float(tsv[number].split("\t")[1]) == pytest.approx(expected, rel=1e-4)
        (predicted,) = [float(row[2]) for row in answers if row[0] == f"{word} {number}"]
        assert predicted == pytest.approx(expected, rel=1e-4)
    config, record = (durable.read_json(run / name) for name in ("best/config.json", "run_record.json"))
    assert "0 stands for 2.05e-05, 1 for 3.55e-05" in str(card.fine_tuned("me/mine", config, record, summary))


TOPICS = ["animals", "places", "weather"]
TOPIC_ROWS = [
    {"text": f"{word} {n}", "label": [TOPICS[at] for at in range(3) if n >> at & 1]}
    for n, word in enumerate(SUBJECTS * 5)
]


def test_lists_of_labels_are_a_multi_label_task(argv, tmp_path, capfd):
    """Any micro-batch gives the same curve, with the loss by definition; `pipeline` gives a probability per label."""
    lines, curves = "".join(json.dumps(row) + "\n" for row in TOPIC_ROWS), []
    (tmp_path / "new.jsonl").write_text('{"text": "the cat"}\n')
    for micro_batch in (4, 2):
        others = ["--per_device_train_batch_size", micro_batch, "--output_dir", tmp_path / str(micro_batch)]
        others += ["--do_predict", "--test_file", tmp_path / "new.jsonl"]
        summary = finetune_glue.main(argv("t.jsonl", lines, *others))
        run = tmp_path / str(micro_batch) / "lr0.001-batch4-seed1"
        curves.append(losses(durable.read_json(run / "run_record.json")))
    assert curves[0] == pytest.approx(curves[1], rel=1e-4) and curves[0][0] == pytest.approx(3 * math.log(2), rel=0.1)
    assert "animals, places, weather; best epoch by micro_f1" in capfd.readouterr().err
    assert set(summary["settings"][0]["medians"]) == {"micro_f1", "macro_f1"}
    score = pipeline("text-classification", str(run / "best"), top_k=None)
    found = {each["label"]: each["score"] for each in score(["the cat"])[0]}
    assert set(found) == set(TOPICS)
    rows = [line.split("\t") for line in (run / "validation_answers.tsv").read_text().splitlines()]
    assert rows[0] == ["text", "label", "prediction", "wrong"] and len(rows) == 5
    lines = (tmp_path / "2" / "submission" / "new_predictions.tsv").read_text().splitlines()
    assert json.loads(lines[1].split("\t")[1]) == [name for name in TOPICS if found[name] >= 0.5]


OK = "text,label\na,x\nb,y\n"
BAD = {
    "columns": ("t.csv", "review,stars\na,1\n", [], r"t.csv has no column 'text', but 'review', 'stars': name its"),
    "no text": ("t.csv", "text,label\na,x\n ,y\n", [], "t.csv, row 2: text is ' ', not text; correct or remove"),
    "empty line": (
        *("t.csv", OK, ["--validation_file", "t.csv", "--test_file", "gap.csv", "--do_predict"]),
        "gap.csv, row 2: text is '', not text",
    ),
    "decimal": (
        *("t.csv", "text,label\na,0.5\nb,1.5\n", ["--validation_file", "decimal.parquet"]),
        r"decimal.parquet, row 1: label is Decimal\('0.5'\), no number",
    ),
    "no label": ("t.csv", "text,label\na,x\nb,\n", [], "row 2: label is '', which means a missing label: remove"),
    "NaN": ("t.jsonl", '{"text": "a", "label": 0.5}\n{"text": "b", "label": NaN}\n', [], "row 2: label is nan"),
    "word among scores": ("t.csv", "text,label\na,0.5\nb,x\n", [], "row 2: label is 'x', not a number like '0.5'"),
    "NA": ("t.csv", "text,label\na,x\nb,y\nc,N/A\n", [], "row 3: label is 'N/A', which means a missing label"),
    "NULL": ("t.csv", "text,label\na,x\nb,y\nc,NULL\n", [], "row 3: label is 'NULL', which means a missing label"),
    "MySQL": ("t.csv", "text,label\na,x\nb,y\nc,\\N\n", [], "row 3: label is .*, which means a missing label"),
    "blank": ("t.csv", "text,label\na,x\nb,x \n", [], "t.csv, row 2: label is 'x ', with blanks around it, a tab"),
    "line end": ("t.csv", 'text,label\na,x\nb,"y\nz"\n', [], r"label is 'y\\nz', with .* a line end or invalid"),
    "tab": ("t.csv", "text,label\na,x\tz\nb,y\n", [], r"row 1: label is 'x\\tz', with blanks around it, a tab, a"),
    "half a character": ("t.jsonl", '{"text": "a", "label": "\\ud83d"}', [], "row 1: label is .* invalid Unicode"),
    "list as text": ("t.csv", "text,label\na,x\nb,['x']\n", [], "row 2: label is .*, and lists of labels need JSON"),
    "decimal comma": ("t.tsv", "text\tlabel\na\t1\nb\t1,5\n", [], "label is '1,5': write 1,5 as 1.5"),
    "thousands": ("t.tsv", "text\tlabel\na\t1,000\nb\t2,100\n", [], "label is '1,000': write .* 1,000 as 1000"),
    "columns of the test file": (
        "t.csv", OK, ["--validation_file", "t.csv", "--test_file", "other.csv", "--do_predict"],
        "other.csv has no column 'text', but 'body': name its columns .*the same in all files",
    ),
    "one score held out": ("t.csv", "text,label\n" + "a,0.5\nb,0.7\n" * 7, [], "14 rows, too few per label to hold"),
    "one score in validation": (
        "t.csv", "text,label\na,0.5\nb,0.7\n", ["--validation_file", "one.csv"],
        "one.csv: label is 0.5 in all rows; a correlation needs two scores",
    ),
    "one number": ("t.csv", "text,label\na,1\nb,1.0\n", [], "label is '1' in all 2 rows"),
    "one label": ("t.csv", "text,label\na,x\nb,x\n", [], "label is 'x' in all 2 rows"),
    "list and word": (
        "t.jsonl", '{"text": "a", "label": ["x"]}\n{"text": "b", "label": "x"}', [],
        "t.jsonl, row 2: label is 'x', not a list of words",
    ),
    "empty lists": ("t.jsonl", '{"text": "a", "label": []}\n' * 9, [], r"label is \[\] in all 9 rows; name another"),
    **{
        f"{value} in a list": (
            "t.jsonl", f'{{"text": "a", "label": ["x"]}}\n{{"text": "b", "label": [{value}]}}\n', [],
            r"t.jsonl, row 2: label is \[.*\], not a list of words or whole numbers",
        ) for value in ("null", "true", "0.5", '""', '"x "', '["x"]')
    },
    "lists of 0 and 1": ("t.jsonl", '{"text": "a", "label": [0, 1]}\n' * 9, [], "label has lists of 0 and 1: name the"),
    "new label in a list": (
        "t.jsonl", '{"text": "a", "label": ["x"]}\n', ["--validation_file", "v.csv"], "v.csv, row 1: label is 'z', none"
    ),
    "columns of pandas": ("t.json", '{"text":{"0":"a","1":"b"},"label":{"0":0,"1":1}}', [], "columns, not rows: in pa"),
    "object": ("t.jsonl", '{"text": "a", "label": {"x": 1}}', [], "row 1: label is .* a label must be a str"),
    "same name": ("t.csv", "text,label,label\na,x,y\n", [], "t.csv has several columns 'label': rename or remove"),
    "semicolons": ("t.csv", "text;label\na, b;x\n", [], "t.csv: the header has ';': save it with commas"),
    "quotes and semicolons": ("t.csv", '"text";"label"\n"a, b";"x"\n', [], "t.csv: the header has ';': save it with"),
    "not UTF-8": ("t.csv", OK, ["--validation_file", "latin.csv"], r"latin.csv is not UTF-8 text \(in Excel: CSV"),
    "no validation row": ("t.csv", OK, ["--validation_file", "empty.csv"], "empty.csv has no rows"),
    "labels in some test rows": (
        "t.csv", OK, ["--validation_file", "t.csv", "--test_file", "some.csv", "--do_predict"],
        "some.csv, row 2: label is '', none of .*; a test set has labels in all rows or in none",
    ),
    "ragged": ("t.csv", "text,label\na,x\nb, c,y\n", [], "t.csv, line 3: another number of columns"),
    "quote": ("t.csv", 'text,label\n"a,x\n', [], "t.csv, row 1: unexpected end of data .*twice"),
    "extension": ("t.xlsx", "", [], "t.xlsx: name a file that ends in .csv"),
    "no row": ("t.csv", "text,label\n", [], "t.csv has no rows"),
    "scores without a point": ("t.csv", "text,label\n" + "a,1\nb,2\nc,3\n", [], r"scores with a decimal point \(7.0\)"),
    "few": ("t.csv", OK, [], "t.csv has 2 rows, too few per label to hold out a tenth"),
    "new label": ("t.csv", OK, ["--validation_file", "v.csv"], "v.csv, row 1: label is 'z', none of .* x, y"),
    "test file": ("t.csv", OK, ["--validation_file", "t.csv", "--test_file", "t.csv"], "without --do_predict"),
    "no test file": ("t.csv", OK, ["--validation_file", "t.csv", "--do_predict"], "name a test_file"),
    "GLUE's name": ("t.csv", OK, ["--task_name", "mrpc"], "task_name=mrpc is a GLUE task: leave it out"),
    "files beside the Hub": (
        "t.csv",
        OK,
        ["--train_file", "", "--dataset_name", "imdb", "--validation_file", "t.csv"],
        "validation_file=t.csv has no effect without train_file",
    ),
    "two sources": ("t.csv", OK, ["--dataset_name", "imdb"], "exclude each other"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(argv, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v.csv").write_text("text,label\nc,z\n")
    (tmp_path / "latin.csv").write_bytes(b"text,label\ncaf\xe9,x\n")
    (tmp_path / "empty.csv").write_text("text,label\n")
    (tmp_path / "one.csv").write_text("text,label\nd,0.5\ne,0.50\n")
    (tmp_path / "some.csv").write_text("text,label\na,x\nb,\n")
    (tmp_path / "other.csv").write_text("body\na\n")
    (tmp_path / "gap.csv").write_text("text\na\n\nb\n")
    pq.write_table(pa.table({"text": ["a"], "label": [decimal.Decimal("0.5")]}), tmp_path / "decimal.parquet")
    name, content, others, said = BAD[case]
    with pytest.raises(InputError, match=said):
        finetune_glue.main(argv(name, content, *others))


@pytest.mark.parametrize("values", [[0, 1, 1], [[0], [1, 0], []]])
def test_class_names_of_a_parquet_file(tmp_path, values):
    """`datasets` stores them in the schema."""
    kind = datasets.ClassLabel(names=["neg", "pos"])
    kind = datasets.List(kind) if isinstance(values[0], list) else kind
    table = datasets.Dataset.from_dict({"label": values}, datasets.Features({"label": kind}))
    table.to_parquet(tmp_path / "t.parquet")
    names = json.loads(json.dumps(values).replace("0", '"neg"').replace("1", '"pos"'))
    assert [row["label"] for row in own_task.read_table(str(tmp_path / "t.parquet"))] == names


@pytest.mark.parametrize("names", [(0, 1, 2), ((0, 0, 1), (0, 1, 0), (1, 0, 1)), (0.5, 1.5, 2.5)])
def test_the_only_row_of_a_class_is_a_training_row(names):
    """Regression tasks have no classes."""
    labels = [names[0]] * 4 + [names[1]] + [names[2]] * 55
    train, held_out = own_task.hold_out(labels)
    assert sorted([*train, *held_out]) == [*range(60)] and (4 in train) == (names[0] != 0.5)
    assert len(held_out) == 6 - (4 in train)


def test_each_of_many_rare_labels_keeps_a_training_row():
    rng = np.random.default_rng(0)
    for _ in range(100):
        labels = rng.random((80, 40)) < 0.03
        train, held_out = own_task.hold_out(labels[:, labels.any(0)].astype(int).tolist())
        assert labels[train].any(0).tolist() == labels.any(0).tolist() and len(held_out) > 2


def test_flags_of_a_table_need_one():
    with pytest.raises(InputError, match="text_column=review has no effect without train_file or dataset_name"):
        finetune_glue.main(["--text_column", "review", "--use_cpu"])


@pytest.mark.parametrize(
    ("script", "words", "preset"),
    [
        (finetune_glue, "--train_file my.csv", "glue/own"),
        (finetune_glue, "--dataset_name=imdb --task_name mine", "glue/own"),
        (finetune_glue, "--task_name mrpc", "glue/mrpc"),
        (finetune_squad, "--version_2_with_negative", "squad/v2.0"),
        (finetune_squad, "--version_2_with_negative false", "squad/v1.1"),
    ],
)
def test_the_preset_follows_the_task(script, words, preset):
    assert script.default_preset(words.split()) == f"presets/{preset}.yaml"
    (args, _), _ = script.read_arguments([*words.split(), "--use_cpu", "--bf16", "false"])
    assert args.seeds == [1, 2, 3, 4, 5]


def test_a_preset_of_glue_lends_its_settings_to_a_table(argv):
    (args, training_args), _ = finetune_glue.read_arguments(argv("t.csv", OK, preset="presets/glue/mrpc.yaml"))
    assert args.task_name == "t.csv" and training_args.weight_decay == 0.1


def test_a_micro_batch_above_the_presets_batch_names_both_and_the_fix():
    words = ["--task_name", "mrpc", "--per_device_train_batch_size", "32", "--use_cpu"]
    with pytest.raises(InputError, match=r"=32 is more than global_batch_size=16: .* --global_batch_size 32"):
        finetune_glue.main(words)
    with pytest.raises(InputError, match="per_device_train_batch_size=0 must be at least 1"):
        batch.largest_micro_batch(16, 0, 1)


def test_multi_label_f1_is_scikit_learns():
    predicted, labels = [[0, 1, 1], [1, 0, 0], [0, 1, 0]], [[0, 1, 0], [1, 1, 0], [0, 0, 0]]
    found = glue_scores.scores(("micro_f1", "macro_f1"), predicted, labels)
    for name, value in found.items():
        expected = f1_score(labels, predicted, average=name.removesuffix("_f1"), zero_division=0)
        assert value == pytest.approx(expected) and 0 < value < 1


def test_macro_f1_is_scikit_learns():
    predicted, labels = [0, 0, 1, 2, 2, 3], [0, 1, 1, 2, 0, 0]
    expected = f1_score(labels, predicted, average="macro", zero_division=0)
    assert glue_scores.scores(("macro_f1",), predicted, labels)["macro_f1"] == pytest.approx(expected)
