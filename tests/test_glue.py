"""GLUE through the command line, on a few generated rows of each task in the official layout."""

import csv
import json
import os
import re
import shutil
import signal
import time
import types
import zipfile
from pathlib import Path

import datasets
import numpy as np
import psutil
import pytest
import torch
from conftest import PLACES, SUBJECTS, VERBS, end_well, forked_ranks, run_python
from official_files import PAIR, write_glue, write_lines, write_wsc
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DebertaV2Config,
    RobertaForMaskedLM,
    pipeline,
)

import finetune_glue
from roberta_recipe import durable
from roberta_recipe.errors import InputError, RunError, Stopped
from roberta_recipe.tasks import answers, glue, protocol, qnli_ranking, summary_text, wsc
from roberta_recipe.tasks.glue import AX, TASKS
from roberta_recipe.tools import glue_table
from roberta_recipe.training import batch, finetune_trainer, heads

ROWS = {"train": 24, "dev": 9, "test": 7}


def sentence(rng):
    return f"{rng.choice(SUBJECTS).capitalize()} {rng.choice(VERBS)} {rng.choice(SUBJECTS)} {rng.choice(PLACES)}."


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """The folders of all ten tasks; labels cycle with the row number."""
    folder = tmp_path_factory.mktemp("glue")
    write_glue(folder, rows=ROWS, text=sentence)
    return folder


@pytest.fixture
def flags(root, data_dir, model_dir, tmp_path):
    """A function that makes a command line of a second's training from a task and further flags."""

    def of(name, *others):
        values = {
            **{"data_dir": data_dir, "model_name_or_path": model_dir, "output_dir": tmp_path / "glue" / name},
            **{"max_seq_length": 64, "global_batch_size": 8, "per_device_train_batch_size": 8, "max_steps": 6},
            **{
                "warmup_steps": 1,
                "logging_steps": 1,
                "learning_rate": 1e-3,
                "other_rows": True,
                "use_cpu": True,
                "bf16": False,
            },
            **{"disable_tqdm": True, "seeds": 1, "save_strategy": "no"},
        }
        argv = [str(word) for key, value in values.items() for word in (f"--{key}", value)]
        return ["--config", str(root / "presets" / "glue" / f"{name}.yaml"), *argv, *map(str, others)]

    return of


def parse_by_articles(text):
    """A stand-in for a spaCy `Doc`: every word is a token, "the" with the next word is a noun chunk."""
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
    """SuperGLUE's files for the WNLI rows of `data_dir`, and a parser without spaCy."""
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


def test_the_pronoun_and_the_parser_are_in_the_fingerprint(flags, wsc_dir, monkeypatch):
    """Neither is in the texts: where the pronoun stands, and which phrases the parser finds."""
    seen = []
    monkeypatch.setattr(protocol, "run_all", lambda argv, runs, job, *_: seen.append((job.inputs, job.test_rows)) or [])
    monkeypatch.setattr(protocol, "finish", lambda *_: None)
    monkeypatch.setattr(summary_text, "table", lambda *_: "")
    monkeypatch.setattr(finetune_glue.plots, "plot_runs", lambda *_: None)
    monkeypatch.setattr(finetune_glue, "write_submission", lambda *_: None)
    argv = flags("wnli", "--do_predict", *special("wnli", wsc_dir))
    finetune_glue.main(argv)
    for file in ("val.jsonl", "test.jsonl"):
        text = (wsc_dir / file).read_text()
        moved = [json.loads(line) for line in text.splitlines()]
        moved[2]["target"] |= {"span2_text": "sees", "span2_index": 2}
        (wsc_dir / file).write_text("".join(json.dumps(row) + "\n" for row in moved))
        finetune_glue.main(argv)
        (wsc_dir / file).write_text(text)
    finetune_glue.main(argv)
    monkeypatch.setattr(wsc, "noun_phrases", lambda *_: ["the dog"])
    finetune_glue.main(argv)
    inputs, tests = zip(*seen, strict=True)
    found = [(of["data"] != inputs[0]["data"], rows != tests[0]) for of, rows in seen]
    assert found == [(False, False), (True, False), (False, True), (False, False), (True, True)]
    assert all(of["weights"] == inputs[0]["weights"] for of in inputs)


def special(name, wsc_dir):
    return {"wnli": ["--wsc_dir", wsc_dir, "--eval_steps", 3]}.get(name, [])


def record_of(tmp_path, name="rte", run="lr0.001-batch8-seed1"):
    return durable.read_json(tmp_path / "glue" / name / run / "run_record.json")


def losses(record):
    return [loss for _, loss in record["loss_at_steps"]["train"]]


def read_answers(path):
    """The rows of the table as a spreadsheet reads it, without quotes."""
    return list(csv.DictReader(path.read_text().splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))


def check_answers(name, rows, record):
    """All validation examples, the worst first; what is right among them is the record's score."""
    assert len(rows) == record["scored_examples"][min(record["scored_examples"])]
    if name == "stsb":
        errors = [float(row["error"]) for row in rows]
        assert errors == sorted(errors, reverse=True)
        assert [abs(float(row["prediction"]) - float(row["label"])) for row in rows] == pytest.approx(errors, abs=2e-4)
        return
    right = [row["verdict"] == "right" for row in rows]
    assert right == sorted(right) == sorted(row["label"] == row["prediction"] for row in rows)
    assert {row["label"] for row in rows} <= set(TASKS[name].labels) and rows[0][TASKS[name].columns[0]]
    if "accuracy" in record["metrics"]:
        assert np.mean(right) == pytest.approx(record["metrics"]["accuracy"])
    if name == "wnli":
        assert "probability" not in rows[0]
    elif len(TASKS[name].labels) == 2:
        of_label = [
            float(r["probability"]) if ok else 1 - float(r["probability"]) for r, ok in zip(rows, right, strict=True)
        ]
        assert of_label == pytest.approx(sorted(of_label), abs=2e-4) and max(of_label) <= 1


def test_a_text_stays_in_its_cell(tmp_path):
    texts = ["a\tb\r\nc", 'said "so', "one\u2028two\x85three"]
    labels, predictions = [0, 1, 1], np.array([0, 1, 0])
    chances = np.array([[0.6, 0.4], [0.1, 0.9], [0.7, 0.3]])
    rows = answers.of_classes([{"sentence": text} for text in texts], ["no", "yes"], labels, predictions, chances)
    answers.write(tmp_path / "table.tsv", rows)
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
        assert record["dataset"] == summary["dataset"] and set(record["metrics"]) == set(
            summary["dataset"]["hub_metrics"]
        )
        best = tmp_path / "glue" / name / "lr0.001-batch8-seed1" / "best"
        assert (best / "model.safetensors").is_file() and not list(best.parent.glob("**/*.bin"))
        assert AutoTokenizer.from_pretrained(best).model_max_length == 64
        paths = re.findall(r"^(?:best epoch|answers|summary) +(/.*)$", capsys.readouterr().out, re.M)
        assert paths == [
            str(best),
            str(best.parent / "validation_answers.tsv"),
            str(best.parent.parent / "summary.json"),
        ]
        assert all(Path(path).exists() for path in paths)
        check_answers(name, read_answers(Path(paths[1])), record)
    assert "accuracy_mismatched" in record_of(tmp_path, "mnli")["metrics"]

    folder = ["--folder", str(tmp_path / "glue")]
    assert glue_table.main([*folder, "--submission", "--other_rows"]).keys() == set(TASKS)
    shown = capsys.readouterr().out
    assert "not run" not in shown.partition("ours")[2] and "90.2" in shown
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

    with pytest.raises(InputError, match=r"CoLA.tsv: 7 rows, and the test set has 1063"):
        glue_table.main([*folder, "--submission"])
    (tmp_path / "glue" / "rte" / "submission" / "RTE.tsv").write_text("index\tprediction\n0\tyes\n")
    with pytest.raises(InputError, match="row 0: 'yes' is no label of RTE"):
        glue_table.main([*folder, "--submission", "--other_rows"])


def test_a_submission_of_the_official_sizes(tmp_path, capsys):
    """The eleven files as the server's guidelines have them, from prediction files with as many rows as GLUE's."""
    for name, task in {**TASKS, "ax": AX}.items():
        for split, file in task.submission.items():
            numbers = np.arange(task.splits[split][1])
            predictions = numbers % len(task.labels) if task.labels else numbers % 11 / 2
            path = tmp_path / ("mnli" if name == "ax" else name) / "submission" / file
            glue.write_predictions(path, glue.answers(task, predictions))
        few = name == "rte"
        of_data = {"dataset": {"hub_id": glue.HUB_DATASET}, "resolved_args": {"max_train_samples": 9} if few else {}}
        setting = {"median": 0.5, "seeds": dict.fromkeys("1" if few else "12345", 0.5)}
        summary = {"settings": [setting], "picked": 0, "task": "mnli" if name == "ax" else name, **of_data}
        durable.write_sealed(tmp_path / summary["task"] / "summary.json", summary)
    glue_table.main(["--folder", str(tmp_path), "--submission"])
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if ": " in line][:-1] == [
        "rte: the median of 1 seed, the paper's is of 5; trained on the first 9 examples"
    ]
    nli = ["contradiction", "entailment", "neutral"]
    official = {
        "CoLA": (1063, ["0", "1"]), "SST-2": (1821, ["0", "1"]), "MRPC": (1725, ["0", "1"]),
        "QQP": (390965, ["0", "1"]), "MNLI-m": (9796, nli), "MNLI-mm": (9847, nli), "AX": (1104, nli),
        "QNLI": (5463, ["entailment", "not_entailment"]), "RTE": (3000, ["entailment", "not_entailment"]),
        "WNLI": (146, ["0", "1"]), "STS-B": (1379, [f"{score / 2:.4f}" for score in range(11)]),
    }  # fmt: skip
    with zipfile.ZipFile(tmp_path / "submission.zip") as archive:
        assert sorted(archive.namelist()) == sorted(f"{name}.tsv" for name in official)
        for name, (rows, labels) in official.items():
            lines = archive.read(f"{name}.tsv").decode().split("\n")
            assert lines[0] == "index\tprediction" and lines[-1] == "" and len(lines) == rows + 2, name
            indices, predictions = zip(*(line.split("\t") for line in lines[1:-1]), strict=True)
            assert indices == tuple(map(str, range(rows))) and sorted(set(predictions)) == sorted(labels), name


def test_a_wnli_test_set_of_the_official_size(flags, wsc_dir, tmp_path, data_dir, config, tokenizer):
    """All 146 rows are predicted, a sixth of them rewritten, and each by the schema that it asks for."""
    config.max_position_embeddings = 130
    RobertaForMaskedLM(config).save_pretrained(tmp_path / "longer")
    tokenizer.save_pretrained(tmp_path / "longer")
    folder = tmp_path / "official"
    shutil.copytree(data_dir, folder)
    others = ["--data_dir", folder, "--model_name_or_path", tmp_path / "longer", "--max_seq_length", 128]
    order = write_wsc(tmp_path / "official_wsc", folder)
    shutil.copy(tmp_path / "official_wsc" / "test.jsonl", wsc_dir / "test.jsonl")
    finetune_glue.main(flags("wnli", "--do_predict", *special("wnli", wsc_dir), *others))
    assert record_of(tmp_path, "wnli")["features"]["test rows with WSC's phrase"] == 146
    lines = (tmp_path / "glue" / "wnli" / "submission" / "WNLI.tsv").read_text().splitlines()[1:]
    assert len(lines) == 146 and {line.split("\t")[1] for line in lines} == {"0", "1"}
    # the same rows, asked for literally
    literal = write_wsc(tmp_path / "again", folder, changes_every=None)
    assert literal == order
    finetune_glue.main(flags("wnli", "--do_predict", *special("wnli", wsc_dir), *others))
    assert (tmp_path / "glue" / "wnli" / "submission" / "WNLI.tsv").read_text().splitlines()[1:] == lines


def test_mnli_without_the_mismatched_set(flags, tmp_path, data_dir, capsys):
    folder = tmp_path / "without"
    shutil.copytree(data_dir, folder)
    (folder / "MNLI" / "dev_mismatched.tsv").unlink()
    summary = finetune_glue.main(flags("mnli", "--data_dir", folder))
    assert "dev_mismatched.tsv is missing: nothing is measured on validation_mismatched" in capsys.readouterr().err
    assert set(summary["settings"][0]["medians"]) == {"accuracy"} == set(summary["dataset"]["hub_metrics"])
    (folder / "MNLI" / "dev_matched.tsv").unlink()
    with pytest.raises(InputError, match=r"dev_matched\.tsv is missing"):
        finetune_glue.main(flags("mnli", "--data_dir", folder))


def test_as_a_user_starts_it_and_again(flags, root, tmp_path, capfd):
    """Two seeds through `accelerate launch`; the same command line again runs nothing."""
    command = ["-m", "accelerate.commands.launch", "--config_file", root / "ds_configs/accelerate/one_gpu.yaml"]
    argv = flags("rte", "--seeds", 1, 2, "--do_predict", "--predict_with", "ensemble")
    command += [root / "finetune_glue.py", *argv]
    done = run_python(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rte, validation accuracy x 100" in done.stdout and "base 78.7, large 86.6" in done.stdout
    assert "7 rows from 2 runs" in done.stdout and "ensemble    validation accuracy" in done.stdout
    assert "Duplicates  0 of 9" in done.stderr
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
    """Predictions come from the kept weights; where these are deleted, the error says so."""
    finetune_glue.main(flags("rte", "--seeds", 1, 2))
    records = sorted((tmp_path / "glue").rglob("run_record.json"))
    before = [path.read_bytes() for path in records]
    finetune_glue.main(flags("rte", "--seeds", 1, 2, "--do_predict"))
    assert (tmp_path / "glue" / "rte" / "submission" / "RTE.tsv").is_file()
    assert [path.read_bytes() for path in records] == before and len(before) == 2
    with pytest.raises(InputError, match="was run without do_predict, or on other test rows, and its weights are gone"):
        finetune_glue.main(flags("rte", "--seeds", 1, 2, "--do_predict", "--predict_with", "ensemble"))


def test_a_run_of_other_settings_is_not_taken_for_done(flags):
    finetune_glue.main(flags("rte"))
    with pytest.raises(InputError, match="max_steps was 6, is 7"):
        finetune_glue.main(flags("rte", "--max_steps", 7))


@pytest.mark.parametrize("name", ["rte", "stsb", "qnli", "wnli"])
def test_any_accumulation_gives_one_curve(flags, wsc_dir, tmp_path, name):
    form = ["--qnli_form", "ranking"] if name == "qnli" else []
    curves = []
    for micro_batch in (8, 4, 1):
        out = tmp_path / str(micro_batch)
        others = ["--per_device_train_batch_size", micro_batch, "--output_dir", out, *form, *special(name, wsc_dir)]
        finetune_glue.main(flags(name, *others))
        curves.append(losses(durable.read_json(out / "lr0.001-batch8-seed1" / "run_record.json")))
    assert len(curves[0]) == 6 and curves[0][-1] != curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4) and curves[2] == pytest.approx(curves[0], rel=1e-4)


def test_two_processes_give_the_curve_of_one_process_also_when_resumed(flags, tmp_path, monkeypatch):
    """Killed in the middle of an epoch, two processes resume with the batches that are left of the epoch."""
    saving = ["--save_strategy", "steps", "--save_steps", 5, "--max_steps", 8]
    finetune_glue.main(flags("rte", *saving, "--output_dir", tmp_path / "a"))
    batches = ["--per_device_train_batch_size", 2, "--per_device_eval_batch_size", 2]
    argv = flags("rte", *saving, *batches, "--do_predict")
    step = finetune_trainer.FinetuneTrainer.training_step

    def killed(self, *args, **kwargs):
        if self.state.global_step == 6:
            os._exit(9)
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(finetune_trainer.FinetuneTrainer, "training_step", killed)
        ranks = forked_ranks(lambda rank: finetune_glue.main(argv), tmp_path)
        assert [rank.end() for rank in ranks] == [9, 9]
    assert (tmp_path / "glue/rte/lr0.001-batch8-seed1/checkpoint-5").is_dir()
    ranks = forked_ranks(lambda rank: finetune_glue.main(argv), tmp_path)
    end_well(ranks)
    two, single = record_of(tmp_path), durable.read_json(tmp_path / "a" / "lr0.001-batch8-seed1" / "run_record.json")
    assert losses(two) == pytest.approx(losses(single), rel=1e-4) and len(losses(two)) == 8 and two["resumes"] == 1
    assert two["metrics"] == pytest.approx(single["metrics"]) and two["tokens_seen"] == single["tokens_seen"]
    assert "".join(rank.log for rank in ranks).count("rte, validation accuracy") == 1


def test_killed_and_started_again(flags, tmp_path, monkeypatch):
    """With a checkpoint an epoch, losses, metrics and best weights equal an uninterrupted run's."""
    saving = ["--save_strategy", "epoch", "--max_steps", 9]
    finetune_glue.main(flags("rte", *saving, "--output_dir", tmp_path / "whole"))
    step = finetune_trainer.FinetuneTrainer.training_step

    def killed(self, *args, **kwargs):
        if self.state.global_step == 7:
            raise RunError("killed")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(finetune_trainer.FinetuneTrainer, "training_step", killed)
    with pytest.raises(RunError):
        finetune_glue.main(flags("rte", *saving))
    monkeypatch.setattr(finetune_trainer.FinetuneTrainer, "training_step", step)
    finetune_glue.main(flags("rte", *saving))
    whole = durable.read_json(tmp_path / "whole" / "lr0.001-batch8-seed1" / "run_record.json")
    again = record_of(tmp_path)
    assert not list((tmp_path / "glue").rglob("checkpoint-*"))  # a finished run does not need these gigabytes
    assert again["resumes"] == 1 and whole["resumes"] == 0
    for key in ("loss_at_steps", "metrics", "tokens_seen", "computed_tokens", "best_step"):
        assert again[key] == whole[key], key
    weights = [
        load_file(folder / "lr0.001-batch8-seed1" / "best" / "model.safetensors")
        for folder in (tmp_path / "whole", tmp_path / "glue" / "rte")
    ]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_stopped_with_data_workers_and_in_the_last_evaluation(flags, tmp_path, monkeypatch):
    """A signal to all processes of a run saves the step; one behind the last step ends the protocol after that run."""
    step = finetune_trainer.FinetuneTrainer.training_step

    def told(self, *args, **kwargs):
        if self.state.global_step == 3:
            for process in [*psutil.Process().children(), psutil.Process()]:
                process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        return step(self, *args, **kwargs)

    workers = ["--dataloader_num_workers", 1, "--save_strategy", "epoch", "--seeds", 1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(finetune_trainer.FinetuneTrainer, "training_step", told)
        with pytest.raises(Stopped, match="stopped by SIGTERM: step 4 of 6 is saved"):
            finetune_glue.main(flags("rte", *workers))
    evaluate = finetune_trainer.FinetuneTrainer.evaluate

    def last(self, *args, **kwargs):
        if self.state.global_step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(finetune_trainer.FinetuneTrainer, "evaluate", last)
        with pytest.raises(Stopped, match=r"stopped by Ctrl-C: the run in .*seed1 is finished\. Continue with: "):
            finetune_glue.main(flags("rte", *workers))
    assert record_of(tmp_path)["steps"] == 6 and not (tmp_path / "glue/rte/lr0.001-batch8-seed2").exists()
    finetune_glue.main(flags("rte", *workers))
    assert record_of(tmp_path)["resumes"] == 1
    assert record_of(tmp_path, run="lr0.001-batch8-seed2")["resumes"] == 0


def test_killed_behind_the_last_step(flags, tmp_path):
    """The second start writes scores and record, and repeats no step."""
    saving = ["--save_strategy", "steps", "--save_steps", 7, "--max_steps", 7]
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(
            finetune_trainer.FinetuneTrainer, "load_best", lambda self: (_ for _ in ()).throw(RunError("killed"))
        )
        with pytest.raises(RunError):
            finetune_glue.main(flags("rte", *saving))
    finetune_glue.main(flags("rte", *saving))
    record = record_of(tmp_path)
    assert record["steps"] == 7 and len(losses(record)) == 7 and record["resumes"] == 1


def test_a_folder_without_a_finished_task():
    with pytest.raises(InputError, match="folder=/nowhere holds no finished task"):
        glue_table.main(["--folder", "/nowhere"])


def test_a_score_that_is_no_number(flags, tmp_path, monkeypatch, capsys):
    """STS-B with constant predictions has no correlation: both starts show nan."""
    monkeypatch.setattr(finetune_glue, "measure", lambda *_: {"pearson": float("nan"), "spearman": float("nan")})
    for _ in range(2):
        finetune_glue.main(flags("stsb"))
        assert "1: nan" in capsys.readouterr().out
    assert record_of(tmp_path, "stsb")["metrics"]["pearson"] is None
    assert glue_table.main(["--folder", str(tmp_path / "glue")]) == {"stsb": "nan"}


def test_a_checkpoint_that_lacks_a_layer_is_refused(flags, model_dir):
    path = Path(model_dir) / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(InputError, match=r"has no weights for roberta.encoder.layer.2.\S+ and 15 others"):
        finetune_glue.main(flags("rte"))


def test_dropout_of_a_head_whose_config_does_not_name_it():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = AutoModelForSequenceClassification.from_config(DebertaV2Config(vocab_size=50, **sizes))
    heads._with_head_dropout(model, 0.0)
    shares = {name: module.p for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)}
    body = {name: share for name, share in shares.items() if name.startswith("deberta.")}
    assert set(body.values()) == {0.1} and len(shares) > len(body) > 2
    assert all(share == 0.0 for name, share in shares.items() if name not in body)


def test_micro_batches_fit_the_batch_and_the_processes():
    largest = batch.largest_micro_batch
    assert (largest(16, 32, 1), largest(16, 16, 2), largest(32, 12, 2), largest(24, 16, 3)) == (16, 8, 8, 8)
    with pytest.raises(InputError, match="global_batch_size=16 is not divisible by 3 processes"):
        largest(16, 16, 3)


def test_the_papers_grid(flags, tmp_path, capsys):
    grid = ["--sweep", "--seeds", 3, "--per_device_train_batch_size", 32]  # more than the grid's first batch size, 16
    with pytest.raises(InputError, match="global_batch_size=32 is more than the 24 training examples"):
        finetune_glue.main(flags("rte", *grid))
    assert "rates 1e-05, 2e-05, 3e-05 x batches 16, 32, 10 epochs each: learning_rate" in capsys.readouterr().err
    done = {
        path.name for path in (tmp_path / "glue" / "rte" / "sweep").iterdir() if (path / "run_record.json").is_file()
    }
    assert done == {"lr1e-05-batch16-seed3"}
    assert record_of(tmp_path, "rte/sweep", "lr1e-05-batch16-seed3")["steps"] == 10  # 24 // 16 steps, ten epochs
    assert len(protocol.runs_of(finetune_glue.SWEEP_RATES, finetune_glue.SWEEP_BATCHES, [1, 2, 3, 4, 5], "x")) == 30


def test_the_best_median_is_picked_and_degenerate_seeds_are_shown():
    runs = protocol.runs_of([1e-5, 2e-5], [16], [1, 2, 3], "out")
    scores = [0.9, 0.5, 0.6, 0.7, 0.7, 0.1]
    records = [{"metrics": {"accuracy": score}, "degenerate": score == 0.1} for score in scores]
    summary = protocol.summarise(runs, records, "accuracy")
    first, second = summary["settings"]
    assert (first["median"], second["median"]) == (0.6, 0.7) and summary["picked"] == 1
    assert (second["lowest"], second["highest"]) == (0.1, 0.7) and second["degenerate_seeds"] == [3]
    assert first["best_run"].endswith("lr1e-05-batch16-seed1")
    summary |= {"task": "rte", "baseline": {"answer": "entailment", "metrics": {"accuracy": 0.6}}}
    shown = summary_text.table(summary, finetune_glue.paper_line("rte"))
    assert "best median" in shown.splitlines()[4] and "degenerate (one answer to everything): seed 3" in shown
    assert shown.splitlines()[-1] == "Majority answer: 60.0 (always entailment)"


def test_a_result_that_one_answer_to_everything_would_have_is_said():
    runs = protocol.runs_of([1e-5], [16], [1, 2], "out")
    records = [{"metrics": {"accuracy": score}, "degenerate": score == 0.57} for score in (0.52, 0.57)]
    summary = protocol.summarise(runs, records, "accuracy") | {"task": "mine", "baseline": None}
    kept = "the weights that are kept, of seed 2, give one answer to everything"
    assert summary_text.table(summary, finetune_glue.paper_line("mine")).splitlines()[-1] == f"Warning: {kept}"
    summary["baseline"] = {"answer": "positive", "metrics": {"accuracy": 0.57}}
    (*_, last) = summary_text.table(summary, "").splitlines()
    assert last == f"Majority answer: 57.0 (always positive): no seed is above it; {kept}"


def test_from_the_mnli_model_the_head_is_replaced(flags, tmp_path, capsys):
    """The paper's test setting for RTE, MRPC and STS-B; a head of the right size is kept."""
    finetune_glue.main(flags("mnli"))
    best = tmp_path / "glue" / "mnli" / "lr0.001-batch8-seed1" / "best"
    for name, said in (("rte", "fresh, as the checkpoint's has another size"), ("mnli", "kept")):
        model = heads.load_with_head(
            AutoModelForSequenceClassification, str(best), 0.0, num_labels=len(TASKS[name].labels)
        )
        assert f"Head        {said}" in capsys.readouterr().err and model.config.classifier_dropout == 0.0
        stored = load_file(best / "model.safetensors")
        same = model.classifier.dense.weight.equal(stored["classifier.dense.weight"])
        assert same == (name == "mnli")
        layer = "roberta.encoder.layer.0.attention.self.query.weight"
        assert model.state_dict()[layer].equal(stored[layer])


def test_random_weights_are_the_seeds(flags, tmp_path, model_dir):
    """The baseline that shows the gain of pretraining: the same architecture with random weights."""
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


def test_the_hubs_columns(monkeypatch):
    """On the Hub, labels are numbers, and -1 in a test set."""
    rows = datasets.Dataset.from_dict({"premise": ["a", "c"], "hypothesis": ["b", "d"], "label": [2, 0], "idx": [0, 1]})
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or rows)
    examples = glue.read_split(TASKS["mnli"], "mnli", "validation_mismatched", None)
    assert examples.texts == [("a", "b"), ("c", "d")] and examples.labels == [2, 0]
    assert asked == [(("nyu-mll/glue", "mnli"), {"split": "validation_mismatched"})]
    assert glue.read_split(AX, "ax", "test", None).labels is None


def test_without_the_hub_the_way_out_is_said():
    with pytest.raises(InputError, match=r"cannot load nyu-mll/glue .*--data_dir"):
        glue.read_split(TASKS["rte"], "rte", "train", None)


def test_batches_are_of_like_length_and_depend_on_nothing_else():
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 200, 1003).tolist()
    sampler = finetune_trainer.LengthGroupedSampler(lengths, 8, seed=1)
    first = list(sampler)
    assert len(first) == len(sampler) == 1000 == len(set(first)) and first == list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    batches = np.array(lengths)[np.array(first)].reshape(-1, 8)
    waste = 1 - batches.sum() / (8 * batches.max(1)).sum()
    assert waste < 0.05 < 0.3 < 1 - np.mean(lengths) / max(lengths)
    assert np.corrcoef(batches.mean(1), np.arange(125))[0, 1] < 0.3  # long batches are not last
    with pytest.raises(InputError, match="global_batch_size=8 is more than the 7 training examples"):
        finetune_trainer.LengthGroupedSampler(lengths[:7], 8, seed=1)


def test_scores_come_back_in_the_order_of_the_file(flags, tmp_path, data_dir, tokenizer):
    """The reference: the saved model on each example alone."""
    finetune_glue.main(flags("rte"))
    best = tmp_path / "glue" / "rte" / "lr0.001-batch8-seed1" / "best"
    model = AutoModelForSequenceClassification.from_pretrained(best).eval()
    examples = glue.read_split(TASKS["rte"], "rte", "validation", str(data_dir))
    with torch.no_grad():
        wanted = torch.cat([model(**tokenizer(*texts, return_tensors="pt")).logits for texts in examples.texts])
    assert np.load(best / finetune_trainer.SCORES) == pytest.approx(wanted.numpy(), abs=1e-5)


def test_qnli_is_ranked_within_its_questions():
    features = [{"input_ids": [0] * n, "labels": 0} for n in range(3, 9)]
    questions, labels = ["a", "a", "a", "b", "c", "c"], [1, 0, 1, 0, 1, 1]
    groups, alone = qnli_ranking.group_features(features, questions, labels)
    assert [[len(pair["input_ids"]) for pair in group["pairs"]] for group in groups] == [[4, 3, 5]]
    assert alone == {"without a negative": 1, "without a positive": 1}
    scores = np.array([0.1, 0.9, 0.5, -1.0, -3.0, -2.0])
    assert qnli_ranking.rank(scores, questions, threshold=0.0).tolist() == [1, 0, 1, 1, 1, 0]
    assert qnli_ranking.rank(scores, questions, threshold=-2.0).tolist() == [1, 0, 1, 0, 1, 0]
    singles, truth = np.array([3.0, 2.0, 1.0, 0.0]), [0, 1, 0, 1]
    assert qnli_ranking.threshold_for_singles(singles, list("wxyz"), truth) == 0.0
    # loss by hand: a group of three pairs and a group of two
    logits = torch.tensor([[1.0], [2.0], [0.0], [3.0], [1.0]], requires_grad=True)
    batch = {"labels": torch.tensor([0, 0]), "group_sizes": torch.tensor([3, 2])}
    total, _ = qnli_ranking.ranking_loss(lambda **_: types.SimpleNamespace(logits=logits), batch)
    wanted = -torch.log_softmax(logits[:3, 0], 0)[0] - torch.log_softmax(logits[3:, 0], 0)[0]
    assert total.item() == pytest.approx(wanted.item())


def test_what_is_cut_is_counted(tokenizer):
    """The longer text of a pair is cut, and every example stays a single feature."""
    long, short = " ".join(PLACES), PLACES[0]
    examples = glue.Examples([(short, short), (long, short), (short, long)], [0, 1, 0])
    args = finetune_glue.GlueArguments(max_seq_length=24)
    features, cut = finetune_glue.make_features(args, TASKS["rte"], {"train": examples}, tokenizer)
    lengths = [len(feature["input_ids"]) for feature in features["train"]]
    assert lengths[0] < 24 and lengths[1:] == [24, 24] and cut == {"cut to 24 in train": 2}
    whole = tokenizer(short).input_ids
    assert list(features["train"][1]["input_ids"][-len(whole) :]) == [tokenizer.eos_token_id, *whole[1:]]
    assert [feature["labels"] for feature in features["train"]] == [0, 1, 0]


def test_duplicates_are_counted():
    train = glue.Examples([("The cat", "A dog"), ("B", "C"), ("B ", "c")], [0, 1, 0])
    validation = glue.Examples([("the  CAT", "a dog"), ("b", "c"), ("x", "y"), ("A dog", "The cat")], [1, 0, 0, 0])
    assert glue.duplicates(train, validation) == {"in_train": 2, "with_the_same_label": 1}


def test_quotes_tabs_and_line_ends(tmp_path):
    """Quoting is off, \\r\\n ends a line, Unicode's other separators do not, and a byte order mark is in no name."""
    text = "\ufeffindex\tsentence1\tsentence2\tlabel\r\n"
    text += '0\tHe said "no.\tA\u2028b " c\tentailment\r\n1\t\tx\tnot_entailment\n'
    (tmp_path / "RTE").mkdir()
    (tmp_path / "RTE" / "dev.tsv").write_bytes(text.encode())
    examples = glue.read_split(TASKS["rte"], "rte", "validation", str(tmp_path))
    assert examples.texts == [('He said "no.', 'A\u2028b " c'), ("", "x")] and examples.labels == [0, 1]


def test_broken_rows_of_qqp_are_skipped_and_counted(tmp_path):
    (tmp_path / "QQP").mkdir()
    rows = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\ta\tb\t1\nbroken\n"
    (tmp_path / "QQP" / "dev.tsv").write_text(rows)
    examples = glue.read_split(TASKS["qqp"], "qqp", "validation", str(tmp_path))
    assert len(examples) == 1 and examples.skipped == 1


BAD = {
    "unknown task": (["--task_name", "snli"], "task_name=snli is none of GLUE's: cola, sst2, mrpc, stsb, qqp, mnli"),
    "no model": (["--model_name_or_path", "nowhere/at-all"], "nowhere/at-all"),
    "no data": (["--data_dir", "/nowhere"], "/nowhere/RTE/train.tsv is missing"),
    "other rows": (["--other_rows", "false"], "rte, train: 24 rows, and GLUE's has 2,490"),
    "batch": (["--global_batch_size", "0"], "global_batch_size=0 and per_device_train_batch_size=1 must be at least 1"),
    "no batch": (["--per_device_eval_batch_size", "0"], "per_device_eval_batch_size=0 must be at least 1"),
    "length": (["--max_seq_length", "65"], "max_seq_length=65 is more than the 64 positions"),
    "unknown tracker": (["--report_to", "mlflow"], "report_to=.*mlflow"),
    "smoothing": (["--label_smoothing_factor", "0.1"], "label_smoothing_factor=0.1"),
    "best by Trainer": (
        ["--load_best_model_at_end", "true", "--save_strategy", "epoch"],
        "load_best_model_at_end must stay false",
    ),
    "seeds": (["--seeds", "1", "1"], r"seeds=\[1, 1\] must be different"),
    "no evaluation": (["--eval_strategy", "no"], "eval_strategy=no"),
    "no step": (["--max_steps", "0"], "max_steps=0 and num_train_epochs=3 train nothing"),
    "no epoch": (["--max_steps", "-1", "--num_train_epochs", "0"], "max_steps=-1 and num_train_epochs=0 train nothing"),
    "head dropout": (["--head_dropout", "1.5"], "head_dropout=1.5"),
    "ranking": (["--qnli_form", "ranking"], "qnli_form=ranking is QNLI's"),
    "wnli without schemas": (["--task_name", "wnli"], "name the folder of its train.jsonl"),
    "head of wnli": (
        ["--task_name", "wnli", "--wsc_dir", "wsc", "--head_dropout", "0"],
        "head_dropout=0.0 has no effect",
    ),
    "shrinking batch": (["--auto_find_batch_size"], "auto_find_batch_size must stay false; lower"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, flags):
    others, said = BAD[case]
    with pytest.raises(InputError, match=said):
        finetune_glue.main(flags("rte", *others))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1\tcaf\udce9\tb\tentailment\n", "train.tsv is not UTF-8 text"),
        ("1\tonly two\n", "train.tsv, line 3: 2 columns, and 4 are wanted"),
        ("1\ta\tb\tmaybe\n", "line 3: label 'maybe' is none of entailment, not_entailment"),
    ],
)
def test_bad_rows_are_named(flags, data_dir, tmp_path, line, said):
    (tmp_path / "bad" / "RTE").mkdir(parents=True)
    head = (data_dir / "RTE" / "train.tsv").read_text().splitlines(keepends=True)[:2]
    (tmp_path / "bad" / "RTE" / "train.tsv").write_text("".join(head) + line, errors="surrogateescape")
    with pytest.raises(InputError, match=said):
        finetune_glue.main(flags("rte", "--data_dir", tmp_path / "bad"))


def test_a_score_out_of_range_is_named(tmp_path):
    (tmp_path / "STS-B").mkdir()
    (tmp_path / "STS-B" / "dev.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t5.5\n")
    with pytest.raises(InputError, match=r"line 2: score '5.5' is no number from 0 to 5"):
        glue.read_split(TASKS["stsb"], "stsb", "validation", str(tmp_path))


def test_wnli_needs_a_masked_lm_head(flags, wsc_dir, tmp_path, model_dir):
    AutoModelForSequenceClassification.from_pretrained(model_dir).save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="WNLI is scored by the masked-LM head"):
        finetune_glue.main(flags("wnli", *special("wnli", wsc_dir)))


def test_presets_are_fairseqs(root):
    """The table of examples/roberta/README.glue.md: rate, batch, updates, warm-up."""
    table = {
        "mnli": (1e-5, 32, 123873, 7432),
        "qnli": (1e-5, 32, 33112, 1986),
        "qqp": (1e-5, 32, 113272, 28318),
        "rte": (2e-5, 16, 1560, 94),  # fairseq: 2,036 steps of which --max-epoch 10 runs 1,560
        "sst2": (1e-5, 32, 20935, 1256),
        "mrpc": (1e-5, 16, 2296, 137),
        "cola": (1e-5, 16, 5336, 320),
        "stsb": (2e-5, 16, 3598, 214),
    }
    rows = {name: TASKS[name].splits["train"][1] for name in table}
    epochs = {name: steps * batch / rows[name] for name, (_, batch, steps, _) in table.items()}
    assert all(9.9 < count < 10.15 for count in epochs.values()), epochs  # section 5.1: ten
    presets = sorted((root / "presets" / "glue").glob("*.yaml"))
    assert {path.stem for path in presets} == set(TASKS) and len(presets) == 9
    for path in presets:
        (args, training), _ = finetune_glue.read_arguments(["--config", str(path), "--use_cpu"])
        assert args.task_name == path.stem and args.seeds == [1, 2, 3, 4, 5]
        assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-6)
        assert training.max_grad_norm == 0 and training.weight_decay == (0.01 if path.stem == "wnli" else 0.1)
        got = (training.learning_rate, args.global_batch_size, training.max_steps, training.warmup_steps)
        assert got == table.get(path.stem, (2e-5, 32, 2000, 250))
        assert args.head_dropout == (None if path.stem == "wnli" else 0.0)


def test_the_card_names_glues_data_only_for_glues_rows():
    whole, others = glue.dataset_card("stsb", TASKS["stsb"], False), glue.dataset_card("stsb", TASKS["stsb"], True)
    assert (whole["name"], whole["hub_id"], whole["hub_config"]) == ("GLUE stsb", "nyu-mll/glue", "stsb")
    assert whole["hub_metrics"] == {"pearson": "pearsonr", "spearman": "spearmanr"}
    assert (others["name"], others["hub_id"], others["hub_config"]) == ("stsb (other_rows)", None, None)
    mnli = glue.dataset_card("mnli", TASKS["mnli"], False)
    assert mnli["split"] == "validation_matched" and list(mnli["hub_metrics"]) == ["accuracy", "accuracy_mismatched"]
    assert "SuperGLUE's WSC" in glue.dataset_card("wnli", TASKS["wnli"], False)["note"]
    # a preset for a new task, whatever the task's name
    for name in ("mine", "rte"):
        own = glue.dataset_card(name, glue.Task("my_task", PAIR, labels=("no", "yes")), False)
        assert (own["name"], own["hub_id"], own["hub_config"], own["note"]) == (name, None, None, "")


def test_a_new_task_is_checked_before_it_runs(flags, monkeypatch):
    scored = glue.Task("my_task", PAIR, metrics=("pearson",))
    assert finetune_glue.form_name(finetune_glue.GlueArguments(task_name="mine"), scored) == "regression"
    with pytest.raises(InputError, match="mine is not on the Hub: name the folder that holds my_task/ with --data_dir"):
        glue.read_split(scored, "mine", "train", None)
    monkeypatch.setattr(finetune_glue, "TASKS", {"mine": glue.Task("my_task", PAIR, metrics=("f2",))})
    with pytest.raises(InputError, match="mine: f2 is no metric of accuracy, f1"):
        finetune_glue.main(flags("rte", "--task_name", "mine"))


def test_the_table_of_tasks():
    """Nine tasks and AX, eleven submission files, each name once."""
    assert len(TASKS) == 9
    official = "CoLA SST-2 MRPC STS-B QQP MNLI QNLI RTE WNLI diagnostic"
    assert [task.folder for task in [*TASKS.values(), AX]] == official.split()
    files = [file for task in [*TASKS.values(), AX] for file in task.submission.values()]
    assert len(files) == len(set(files)) == 11
    for task in TASKS.values():
        assert len(task.columns) == len(task.hub_columns) and Path(task.folder).name == task.folder


def test_a_task_of_scores_of_your_own_and_its_predictions(flags, tmp_path, data_dir, monkeypatch, capsys):
    """`pipeline` shows what the model says: no sigmoid of a score. Epochs on the command line replace the preset's
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
    folder = tmp_path / "glue"
    (folder / "stsb").rename(folder / "rte")
    with pytest.raises(InputError, match=r"rte/summary.json is of the task 'mine': move its folder"):
        glue_table.main(["--folder", str(folder)])
    assert "submission" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("labels", "metrics", "said"),
    [
        (("a", "b", "c"), "matthews_correlation", "matthews_correlation is of two classes, and the task has 3 classes"),
        ((), "accuracy", "accuracy is of classes, and the task has scores"),
        ((), "f1", r"f1 is of two classes, and the task has scores; metrics=\('pearson',\)"),
        (("a", "b"), "pearson", "pearson is of scores, and the task has 2 classes"),
    ],
)
def test_a_metric_that_is_not_of_the_task(flags, monkeypatch, labels, metrics, said):
    monkeypatch.setattr(finetune_glue, "TASKS", {"mine": glue.Task("RTE", PAIR, labels=labels, metrics=(metrics,))})
    with pytest.raises(InputError, match=f"mine: {said}"):
        finetune_glue.main(flags("rte", "--task_name", "mine"))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--seed", 7], r"seed=7: each run has one of seeds; --seeds 7"),
        (["--data_seed", 7], "data_seed=7.* name --seeds"),
        (["--predict_with", "ensemble"], "predict_with=ensemble says how the test set is predicted: add --do_predict"),
    ],
)
def test_a_flag_that_would_change_nothing(flags, argv, said):
    with pytest.raises(InputError, match=said):
        finetune_glue.main(flags("rte", *argv))


def test_tokenizers_that_do_not_fit_the_model(flags, wordpiece, tmp_path, monkeypatch):
    """BERT's token types for a model without them are left out; more tokens than the model has, and a slow tokenizer,
    are refused."""
    wordpiece.save_pretrained(tmp_path / "wordpiece")
    assert 1 in wordpiece("a", "b")["token_type_ids"]
    argv = flags("rte", "--tokenizer_name", tmp_path / "wordpiece", "--random_weights", True, "--max_steps", 1)
    assert finetune_glue.main(argv)["task"] == "rte"
    config = Path(argv[argv.index("--model_name_or_path") + 1], "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": len(wordpiece) - 1}))
    with pytest.raises(InputError, match=r"has 193 tokens and .* 192: they do not belong together"):
        finetune_glue.main(argv)
    monkeypatch.setattr(type(wordpiece), "is_fast", False)
    with pytest.raises(InputError, match="a slow one, which does not say where in a text its tokens are"):
        finetune_glue.main(argv)


def test_a_head_whose_labels_have_another_order_is_fresh(flags, tmp_path, capfd):
    out = tmp_path / "glue" / "rte"
    finetune_glue.main(flags("rte"))
    best = out / "lr0.001-batch8-seed1" / "best"
    again = flags("rte", "--model_name_or_path", best, "--output_dir", tmp_path / "again")
    finetune_glue.main(again)
    assert "Head        kept" in capfd.readouterr().err
    text = (best / "config.json").read_text()
    swapped = (
        text.replace("not_entailment", "x").replace('"entailment"', '"not_entailment"').replace('"x"', '"entailment"')
    )
    (best / "config.json").write_text(swapped)
    (best / "manifest.json").unlink()
    finetune_glue.main([*again[:-1], str(tmp_path / "other")])
    fresh = "fresh, as the checkpoint's has its labels in another order: not_entailment, entailment"
    assert fresh in capfd.readouterr().err
