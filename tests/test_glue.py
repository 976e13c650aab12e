"""finetune_glue.py through its command line, on a few generated rows of each task in the official layout."""

import csv
import re
import shutil
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
from glue_runs import ROWS, data_dir, flags, record_of, special, wsc_dir  # noqa: F401
from official_files import PAIR
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

import finetune_glue
from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import ROOT
from roberta_recipe.model import task_heads
from roberta_recipe.publishing import card
from roberta_recipe.settings import load_yaml
from roberta_recipe.tasks import glue, protocol, summaries
from roberta_recipe.tasks.glue import TASKS
from roberta_recipe.training import finetune_trainer
from tools import glue_table


def read_answers(path):
    """The rows of the table as read by a spreadsheet, without quoting."""
    return list(csv.DictReader(path.read_text().splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))


def check_answers(name, rows, record):
    """The table has all validation examples, worst first; its accuracy is the record's."""
    assert len(rows) == record["scored_examples"][min(record["scored_examples"])]
    if name == "stsb":
        errors = [float(row["error"]) for row in rows]
        assert errors == sorted(errors, reverse=True)
    else:
        right = [row["label"] == row["prediction"] for row in rows]
        assert right == sorted(right) == [row["verdict"] == "right" for row in rows]
        assert np.mean(right) == pytest.approx(record["metrics"].get("accuracy", np.mean(right)))
        assert {row["label"] for row in rows} <= set(TASKS[name].labels) and rows[0][TASKS[name].columns[0]]


def test_a_text_stays_in_its_cell(tmp_path):
    texts = ["a\tb\r\nc", 'said "so', "one\u2028two\x85three"]
    labels, predictions = [0, 1, 1], np.array([0, 1, 0])
    chances = np.array([[0.6, 0.4], [0.1, 0.9], [0.7, 0.3]])
    rows = summaries.class_answers([{"sentence": text} for text in texts], ["no", "yes"], labels, predictions, chances)
    summaries.write_answers(tmp_path / "table.tsv", rows)
    assert read_answers(tmp_path / "table.tsv") == [
        {"sentence": "one two three", "label": "yes", "prediction": "no", "probability": "0.7000", "verdict": "wrong"},
        {"sentence": "a b c", "label": "no", "prediction": "no", "probability": "0.6000", "verdict": "right"},
        {"sentence": 'said "so', "label": "yes", "prediction": "yes", "probability": "0.9000", "verdict": "right"},
    ]


def test_every_task_and_the_submission(flags, wsc_dir, tmp_path, capsys):
    for name in TASKS:
        summary = finetune_glue.main(flags(name, "--do_predict", *special(name, wsc_dir)))
        record = record_of(tmp_path, name)
        assert record["steps"] == 6 and summary["settings"][0]["seeds"] == {1: record["metrics"][summary["metric"]]}
        assert set(TASKS[name].metrics) <= set(record["metrics"])
        assert set(record["metrics"]) == set(summary["dataset"]["hub_metrics"])
        best = tmp_path / "glue" / name / "lr0.001-batch8-seed1" / "best"
        assert (best / "model.safetensors").is_file() and not list(best.parent.glob("**/*.bin"))
        assert AutoTokenizer.from_pretrained(best).model_max_length == 64
        paths = re.findall(r"^(?:best epoch|answers|summary) +(/.*)$", capsys.readouterr().out, re.M)
        assert len(paths) == 3 and all(Path(path).exists() for path in paths)
        check_answers(name, read_answers(Path(paths[1])), record)
    assert "accuracy_mismatched" in record_of(tmp_path, "mnli")["metrics"]
    assert not list(tmp_path.rglob("*.tmp"))

    folder = ["--folder", str(tmp_path / "glue")]
    assert glue_table.main([*folder, "--submission", "--other_rows"]).keys() == set(TASKS)
    shown = capsys.readouterr().out
    assert "not run" not in shown.partition("ours")[2] and "90.2" in shown
    marked = re.search(r"^ours +(.*)$", shown, re.M)[1].split()
    assert len(marked) == len(TASKS) and all(score.endswith("*") for score in marked)
    with zipfile.ZipFile(tmp_path / "glue" / "submission.zip") as archive:
        files = {name: archive.read(name).decode().splitlines() for name in archive.namelist()}
    official = "CoLA SST-2 MRPC STS-B QQP MNLI-m MNLI-mm QNLI RTE WNLI AX"
    assert set(files) == {f"{name}.tsv" for name in official.split()} and len(files) == 11
    for name, lines in files.items():
        assert lines[0] == "index\tprediction"
        assert [line.split("\t")[0] for line in lines[1:]] == [str(n) for n in range(ROWS["test"])]
        found = {line.split("\t")[1] for line in lines[1:]}
        if name == "STS-B.tsv":
            assert all(0 <= float(value) <= 5 for value in found)
        else:
            words = {"MNLI-m.tsv", "MNLI-mm.tsv", "QNLI.tsv", "RTE.tsv", "AX.tsv"}
            assert found <= (
                {"entailment", "neutral", "contradiction", "not_entailment"} if name in words else {"0", "1"}
            )

    with pytest.raises(InputError, match=r"CoLA.tsv: 7 rows, but the test set has 1063"):
        glue_table.main([*folder, "--submission"])


def test_two_seeds_and_the_same_command_again(flags, tmp_path, capfd):
    """The second time, nothing is run."""
    argv = flags("rte", "--seeds", 1, 2, "--do_predict", "--predict_with", "ensemble")
    finetune_glue.main(argv)
    first = capfd.readouterr()
    assert "rte, validation accuracy x 100" in first.out and "base 78.7, large 86.6" in first.out
    assert "7 rows from 2 runs" in first.out and "ensemble    validation accuracy" in first.out
    assert "Duplicates  0 of 9" in first.err
    said = "presets/glue/rte.yaml: learning rate 0.001, batch 8, 6 steps (2 epochs), warm-up 1 step, seeds 1, 2\n"
    assert said in first.err and first.err.count(", all runs ") == 4  # from the second step of the first seed on
    kept = [path.parent.parent.name for path in (tmp_path / "glue").rglob("best/model.safetensors")]
    assert len(kept) == 1  # only the best run's weights are kept
    finetune_glue.main(argv)
    again = capfd.readouterr()
    assert again.err.count("Done") == 2 and "  loss " not in again.err
    # the run leaves a plain checkpoint
    best = next((tmp_path / "glue").rglob("best"))
    for path in (tmp_path / "glue").rglob("best/model.safetensors"):
        best = path.parent
    assert AutoModelForSequenceClassification.from_pretrained(best).config.id2label[1] == "not_entailment"


def test_predictions_asked_for_later(flags, tmp_path):
    """Predictions use the kept weights; if they were deleted, the error says so."""
    finetune_glue.main(flags("rte", "--seeds", 1, 2))
    records = sorted((tmp_path / "glue").rglob("run_record.json"))
    before = [path.read_bytes() for path in records]
    finetune_glue.main(flags("rte", "--seeds", 1, 2, "--do_predict"))
    assert (tmp_path / "glue" / "rte" / "submission" / "RTE.tsv").is_file()
    assert [path.read_bytes() for path in records] == before and len(before) == 2
    with pytest.raises(InputError, match="has no scores on this test set"):
        finetune_glue.main(flags("rte", "--seeds", 1, 2, "--do_predict", "--predict_with", "ensemble"))


@pytest.mark.parametrize("name", ["mnli", "qnli"])
def test_test_sets_with_labels_are_measured(flags, tmp_path, data_dir, name, capsys):
    """The validation set as the test set gives the same scores. A column with a single value is a placeholder."""
    folder, ranking = tmp_path / "labelled", ["--qnli_form", "ranking"] * (name == "qnli")
    shutil.copytree(data_dir, folder)
    files = {f"test{part}": f"{name}{part}" for part in (["_matched", "_mismatched"] if name == "mnli" else [""])}
    own = folder / TASKS[name].folder
    for split in files:
        shutil.copy(own / f"{split.replace('test', 'dev')}.tsv", own / f"{split}.tsv")
    argv = flags(name, "--data_dir", folder, "--seeds", 1, 2, "--do_predict", "--keep", "all", *ranking)
    summary = finetune_glue.main(argv)
    said, medians = capsys.readouterr().out, summary["settings"][0]["medians"]
    assert set(summary["tests"]) == set(files) and "set (9 examples), medians of seeds 1, 2: " in said
    for split, scores in summary["tests"].items():
        suffix = "_mismatched" if split == "test_mismatched" else ""
        assert scores["medians"] == pytest.approx({metric: medians[metric + suffix] for metric in TASKS[name].metrics})
        assert scores["examples"] == 9 and list(scores["seeds"]) == [1, 2]
    glue_table.main(["--folder", str(tmp_path / "glue")])
    assert f"{name}: test" in capsys.readouterr().out
    best = Path(summary["settings"][0]["best_run"])
    record, config = (durable.read_json(best / file) for file in ("run_record.json", "best/config.json"))
    shown = card.fine_tuned("me/x", config, record, summary)
    scored = {(result.metric_type, result.dataset_split) for result in shown.data.eval_results}
    ends = ["_matched", "_mismatched"] if name == "mnli" else [""]
    assert scored == {("accuracy", f"validation{end}") for end in ends}
    lines = str(shown).splitlines()
    assert "| max_steps | 6 |" in lines and not any("num_train_epochs" in line for line in lines)
    rows = [line for line in lines if "test" in line and ", 9 examples" in line]
    assert [row.split("|")[2].strip() for row in rows] == [f"{split}, 9 examples" for split in files]
    tuned = "validation questions with a single pair, decided by a threshold tuned on these"
    assert (tuned in summary["features"]) == bool(ranking)
    for split in files:
        header, *rows = [line.split("\t") for line in (own / f"{split}.tsv").read_text().splitlines()]
        column = header.index(TASKS[name].label_column)
        for row in rows:
            row[column] = "-1"
        (own / f"{split}.tsv").write_text("".join("\t".join(row) + "\n" for row in [header, *rows]))
    assert "tests" not in finetune_glue.main(argv)


def test_the_papers_grid(flags, tmp_path, capsys):
    argv = flags("rte", "--sweep", "--seeds", 3)
    for name in sorted({"global_batch_size", "learning_rate", "max_steps", "warmup_steps"}):
        with pytest.raises(InputError, match=f"--{name} has no effect with --sweep"):
            finetune_glue.main(argv)
        at = argv.index(f"--{name}")
        del argv[at : at + 2]
    with pytest.raises(InputError, match="global_batch_size=32 is more than the 24 training examples"):
        finetune_glue.main(argv)
    said = capsys.readouterr().err
    grid = "learning rate 1e-05, 2e-05, 3e-05, batch 16, 32, 10 epochs (10 steps), warm-up 6% of the steps, seeds 3\n"
    assert f"presets/glue/rte.yaml: {grid}" in said
    done = {
        path.name for path in (tmp_path / "glue" / "rte" / "sweep").iterdir() if (path / "run_record.json").is_file()
    }
    assert done == {"lr1e-05-batch16-seed3"}
    assert record_of(tmp_path, "rte/sweep", "lr1e-05-batch16-seed3")["steps"] == 10  # 24 // 16 steps, ten epochs
    assert len(summaries.runs_of(finetune_glue.SWEEP_RATES, finetune_glue.SWEEP_BATCHES, [1, 2, 3, 4, 5], "x")) == 30


def test_the_best_median_is_picked_and_degenerate_seeds_are_shown():
    runs = summaries.runs_of([1e-5, 2e-5], [16], [1, 2, 3], "out")
    scores = [0.9, 0.5, 0.6, 0.7, 0.7, 0.1]
    records = [{"metrics": {"accuracy": score}, "degenerate": score == 0.1} for score in scores]
    summary = summaries.summarise(runs, records, "accuracy")
    first, second = summary["settings"]
    assert (first["median"], second["median"]) == (0.6, 0.7) and summary["picked"] == 1
    assert (second["lowest"], second["highest"]) == (0.1, 0.7) and second["degenerate_seeds"] == [3]
    assert first["best_run"].endswith("lr1e-05-batch16-seed1")
    summary |= {"task": "rte", "baseline": {"answer": "entailment", "metrics": {"accuracy": 0.6}}}
    shown = summaries.table(summary, finetune_glue.paper_line("rte"))
    assert (
        "best median" in shown.splitlines()[4] and "degenerate (the same prediction for every example): seed 3" in shown
    )
    assert "\nMajority answer: 60.0 (always entailment)\n" in shown


def test_a_result_that_one_answer_to_everything_would_have_is_said():
    runs = summaries.runs_of([1e-5], [16], [1, 2], "out")
    records = [{"metrics": {"accuracy": score}, "degenerate": score == 0.57} for score in (0.52, 0.57)]
    summary = summaries.summarise(runs, records, "accuracy") | {"task": "mine", "baseline": None}
    kept = "the saved model, seed 2, predicts the same for every example"
    assert f"\nWarning: {kept}\n" in summaries.table(summary, finetune_glue.paper_line("mine"))
    summary["baseline"] = {"answer": "positive", "metrics": {"accuracy": 0.57}}
    wanted = f"\nMajority answer: 57.0 (always positive): no seed is above it; {kept}\n"
    assert wanted in summaries.table(summary, "")


def test_the_same_prediction_is_on_the_scale_of_the_scores():
    task = glue.Task("", (), scale=(0.0, 0.001))
    assert not finetune_glue.degenerate(task, None, "validation", np.array([0.2, 0.8]))
    assert finetune_glue.degenerate(task, None, "validation", np.array([0.5, 0.50001]))


def test_the_last_weights_stay(tmp_path, caplog):
    """More seeds may make a run the best whose weights were deleted when another setting led."""
    first, second, *_ = runs = summaries.runs_of([1e-5, 2e-5], [16], [1], tmp_path)
    weights = second.output_dir / "best" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"")
    (weights.parent / finetune_trainer.SCORES).write_bytes(b"")
    durable.seal(weights.parent)
    records = [{"metrics": {"accuracy": score}, "degenerate": False} for score in (0.9, 0.8)]
    job = types.SimpleNamespace(metric="accuracy", about=lambda *_: {}, tests={})
    args = types.SimpleNamespace(keep="best"), types.SimpleNamespace(do_predict=False, process_index=0)
    protocol.finish(args, {}, runs, records, job)
    assert weights.is_file() and f"none in {first.output_dir}:" in caplog.text


def test_from_the_mnli_model_the_head_is_replaced(flags, tmp_path, capsys):
    """The paper's test setting for RTE, MRPC and STS-B; a head of the same size and label order is kept."""
    finetune_glue.main(flags("mnli"))
    best = tmp_path / "glue" / "mnli" / "lr0.001-batch8-seed1" / "best"
    for name, said in (("rte", "fresh, as the checkpoint's has another size"), ("mnli", "kept")):
        model = task_heads.load_with_head(
            AutoModelForSequenceClassification, str(best), 0.0, id2label=dict(enumerate(TASKS[name].labels))
        )
        log = capsys.readouterr().err
        assert f"Head        {said}" in log and "incompatible" not in log and model.config.classifier_dropout == 0.0
        stored = load_file(best / "model.safetensors")
        same = model.classifier.dense.weight.equal(stored["classifier.dense.weight"])
        assert same == (name == "mnli")
        layer = "roberta.encoder.layer.0.attention.self.query.weight"
        assert model.state_dict()[layer].equal(stored[layer])
    swapped = dict(enumerate(TASKS["mnli"].labels[::-1]))
    task_heads.load_with_head(AutoModelForSequenceClassification, str(best), 0.0, num_labels=3, id2label=swapped)
    assert "fresh, as the checkpoint's has its labels in another order" in capsys.readouterr().err


def test_random_weights_are_the_seeds(flags, tmp_path, model_dir):
    """The baseline without pretraining: the same architecture with random weights."""
    stored = load_file(f"{model_dir}/model.safetensors")["roberta.encoder.layer.0.output.dense.weight"]
    finetune_glue.main(
        flags("rte", "--random_weights", "true", "--learning_rate", 1e-12, "--seeds", 1, 2, "--keep", "all")
    )
    found = [
        load_file(tmp_path / "glue" / "rte" / f"lr1e-12-batch8-seed{seed}" / "best" / "model.safetensors")
        for seed in (1, 2)
    ]
    weights = [tensors["roberta.encoder.layer.0.output.dense.weight"] for tensors in found]
    assert abs(weights[0].std() - 0.02) < 0.002  # the config's initializer_range
    for first, second in ((weights[0], weights[1]), (weights[0], stored)):
        assert (first - second).abs().mean() > 0.01


def test_a_task_of_scores_of_your_own_and_its_predictions(flags, tmp_path, monkeypatch):
    """`pipeline` returns the model's score, without a sigmoid. Epochs on the command line replace the preset's
    steps."""
    own = glue.Task("STS-B", PAIR, label_column="score", metrics=("pearson",))
    monkeypatch.setattr(finetune_glue, "TASKS", {"mine": own})
    argv = flags("stsb", "--task_name", "mine", "--do_predict")
    del argv[argv.index("--max_steps") : argv.index("--max_steps") + 2]
    summary = finetune_glue.main([*argv, "--num_train_epochs", "1"])
    run = Path(summary["settings"][0]["best_run"])
    assert durable.read_json(run / "run_record.json")["steps"] == ROWS["train"] // 8
    predicted = (tmp_path / "glue" / "stsb" / "submission" / "test_predictions.tsv").read_text().splitlines()
    assert len(predicted) == 1 + ROWS["test"] and predicted[0] == "index\tprediction"
    pair = {"text": "a cat", "text_pair": "a dog"}
    model = AutoModelForSequenceClassification.from_pretrained(run / "best")
    tokens = AutoTokenizer.from_pretrained(run / "best")(*pair.values(), return_tensors="pt")
    said = pipeline("text-classification", str(run / "best"))(pair)["score"]
    assert model.config.problem_type == "regression" and said == pytest.approx(model(**tokens).logits.item(), abs=1e-6)


def summary_of(tmp_path, task, **changes):
    """A finished task of the protocol, with `changes` of its resolved arguments and, by `seeds`, of their number."""
    count = changes.pop("seeds", 5)
    values = load_yaml(ROOT / "presets" / "glue" / f"{task}.yaml")
    args = {"layer_decay": 1.0, "random_weights": False, "qnli_form": "classification", "optim": "adamw_torch_fused"}
    args |= {**values, "model_name_or_path": "runs/mine", **changes}
    scores = {str(seed): 0.5 for seed in range(1, count + 1)}
    setting = {"learning_rate": 1e-5, "global_batch_size": 16, "seeds": scores, "median": 0.5}
    values = {"task": task, "settings": [setting], "picked": 0, "dataset": {"hub_id": "nyu-mll/glue"}}
    path = tmp_path / task / "summary.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_sealed(path, {**values, "resolved_args": args})


def test_a_task_outside_of_the_protocol_is_marked_in_the_table(tmp_path, capsys):
    summary_of(tmp_path, "rte", max_steps=-1, num_train_epochs=3.0, max_train_samples=64, seeds=1, layer_decay=0.8)
    summary_of(tmp_path, "mnli")
    assert glue_table.main(["--folder", str(tmp_path)])["rte"] == "50.0"
    shown = capsys.readouterr().out
    assert re.search(r"^ours +(.*)$", shown, re.M)[1].count("*") == 1 and "50.0*" in shown
    words = "the median of 1 seed (paper: 5); trained on the first 64 examples; layer_decay=0.8 instead of "
    words += "layer_decay=1.0; num_train_epochs=3.0 instead of max_steps=1560"
    assert f"* rte, not comparable with Table 5: {words}" in shown
    summary_of(tmp_path, "rte", model_name_or_path="runs/other")
    summary_of(tmp_path, "qnli", model_name_or_path="runs/mine/")
    glue_table.main(["--folder", str(tmp_path)])
    assert re.findall(r"^\* .*$", capsys.readouterr().out, re.M) == [
        "* rte, not comparable with Table 5: fine-tuned from runs/other (most tasks: runs/mine)"
    ]
    others = {"qnli_form": "ranking", "label_smoothing_factor": 0.1, "optim": "lamb", "optim_args": "a=1"}
    for name, value in {**others, "neftune_noise_alpha": 5.0, "tokenizer_name": "roberta-base"}.items():
        summary_of(tmp_path, "rte", **{name: value})
        glue_table.main(["--folder", str(tmp_path)])
        assert f"* rte, not comparable with Table 5: {name}={value} instead of " in capsys.readouterr().out
