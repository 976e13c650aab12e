"""SQuAD through the command line, on generated contexts: several windows, emoji and accents, no answers."""

import copy
import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PLACES, SUBJECTS, VERBS, copied, end_well, forked_ranks, losses, run_python, second_of_training
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AlbertConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    CLIPTextConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    RobertaConfig,
    T5Config,
)

import finetune_squad
from roberta_recipe import durable
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.model import heads
from roberta_recipe.tasks import answerability, squad, squad_files
from roberta_recipe.tools import squad_score
from roberta_recipe.training.finetune_trainer import SCORES, FinetuneTrainer

RUN = "lr0.001-batch8-seed1"


def entry(name, question, context, *answers):
    """A question in the official format; a question without answers is unanswerable."""
    found = [{"text": answer, "answer_start": context.index(answer)} for answer in answers]
    return {"id": name, "question": question, "answers": found, "is_impossible": not found}


def official(paragraphs, version_2):
    entries = [{"context": context, "qas": [dict(row) for row in entries]} for context, entries in paragraphs]
    if not version_2:
        for paragraph in entries:
            paragraph["qas"] = [row for row in paragraph["qas"] if not row.pop("is_impossible")]
    return {"version": "v2.0" if version_2 else "1.1", "data": [{"title": "made here", "paragraphs": entries}]}


def paragraphs(count, seed):
    """Contexts that say who does what where; every third question is about somebody whom the context does not name."""
    rng, made = random.Random(seed), []
    for number in range(count):
        # the first context has several windows of 64 tokens
        facts = [(rng.choice(SUBJECTS), rng.choice(VERBS), rng.choice(PLACES)) for _ in range(9 if number == 0 else 2)]
        context = " ".join(f"{who.capitalize()} {verb} {place}." for who, verb, place in facts)
        absent = next(who for who in SUBJECTS if who not in {fact[0] for fact in facts})
        who, verb, place = facts[-1]
        entries = [
            entry(f"{seed}-{number}-a", f"Where does {who} {verb}?", context, place, place),
            entry(f"{seed}-{number}-b", f"Who {verb}?", context, who.capitalize()),
            entry(f"{seed}-{number}-c", f"Where is {absent}?", context),
        ]
        made.append((context, entries))
    return made


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squad")
    for version_2, name in ((False, "v1.1"), (True, "v2.0")):
        for split, count, seed in (("train", 10, 1), ("dev", 4, 2)):
            (folder / f"{split}-{name}.json").write_text(json.dumps(official(paragraphs(count, seed), version_2)))
    return folder


@pytest.fixture
def flags(root, data_dir, model_dir, tmp_path):
    """A function that makes a command line of a second's training from a version and further flags."""

    def of(version, *others):
        own = {"data_dir": data_dir, "model_name_or_path": model_dir, "output_dir": tmp_path / "squad" / version}
        own |= {"max_query_length": 20, "doc_stride": 8, "head_dropout": 0}
        own |= {"global_batch_size": 8, "per_device_train_batch_size": 8}
        return second_of_training(root / "presets" / "squad" / f"v{version}.yaml", *others, **own)

    return of


def record_of(tmp_path, version):
    return durable.read_json(tmp_path / "squad" / version / RUN / "run_record.json")


@pytest.mark.parametrize(("version", "no_answer"), [("1.1", None), ("2.0", "classifier"), ("2.0", "null_score")])
def test_from_the_command_line_to_the_score_of_the_file(flags, tmp_path, data_dir, capsys, version, no_answer):
    others = ["--no_answer", no_answer] if no_answer else []
    summary = finetune_squad.main(flags(version, *others))
    shown = capsys.readouterr()
    assert f"squad {version}, validation f1 x 100" in shown.out and "(Table 6)" in shown.out
    assert "come back verbatim from their labels" in shown.err and "Duplicates  0 of" in shown.err
    record, folder = record_of(tmp_path, version), tmp_path / "squad" / version / RUN
    assert record["steps"] == 6 and record["features"]["train_answers"]["in_no_window"] == 0
    assert summary["settings"][0]["medians"]["f1"] == record["metrics"]["f1"]
    assert set(record["dataset"]["hub_metrics"]) == {
        name for name in record["metrics"] if "total" not in name and "thresh" not in name
    }

    questions = squad_files.read_file(data_dir / f"dev-v{version}.json", version == "2.0")
    predictions, n_best = (durable.read_json(folder / f"{name}predictions.json") for name in ("", "nbest_"))
    assert list(predictions) == [question.id for question in questions] == list(n_best)
    for question in questions:
        entries = n_best[question.id]
        assert sum(entry["probability"] for entry in entries) == pytest.approx(1)
        assert all(entry["text"] in question.context for entry in entries) and len(entries) > 1
        assert [e["probability"] for e in entries] == sorted((e["probability"] for e in entries), reverse=True)

    dev = ["--validation_file", str(data_dir / f"dev-v{version}.json")]
    if version == "2.0":
        dev += ["--version_2_with_negative", "--null_odds", str(folder / "null_odds.json")]
    scored = squad_score.main(["--predictions", str(folder / "predictions.json"), *dev])
    for name in finetune_squad.SHOWN[version][:-1]:
        assert scored[name] == pytest.approx(100 * record["metrics"][name])
    assert json.loads(capsys.readouterr().out) == scored
    if version == "2.0":  # thresholds are searched over all questions, by span score and by probability
        best = squad_score.main(["--predictions", str(folder / "span_predictions.json"), *dev])
        for name in ("best_f1", "best_exact"):
            assert best[name] == pytest.approx(100 * record["metrics"][name])
        given = durable.read_json(folder / "null_odds.json")
        assert all(0 <= value <= 1 for value in given.values()) and len(set(given.values())) > 1
        threshold = record["metrics"]["threshold"]
        assert {name for name, text in predictions.items() if not text} == {n for n in given if given[n] > threshold}
        assert threshold == 0.5 or no_answer == "null_score"
    rows = [line.split("\t") for line in (folder / "validation_answers.tsv").read_text().splitlines()]
    rows = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert {row["id"]: row["prediction"] for row in rows} == predictions and all(row["probability"] for row in rows)
    for name in ("f1", "exact_match"):
        scores = [float(row[name]) for row in rows]
        assert 100 * sum(scores) / len(scores) == pytest.approx(scored.get(name, scored.get("exact")), abs=0.01)
    assert [float(row["f1"]) for row in rows] == sorted(float(row["f1"]) for row in rows)
    # the run leaves a plain checkpoint, and the classifier beside it
    best = folder / "best"
    _, info = AutoModelForQuestionAnswering.from_pretrained(best, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (best / answerability.FILE).is_file() == (no_answer == "classifier")


def test_as_a_user_starts_it_and_again(flags, tmp_path, capfd):
    """The script copied with `roberta_recipe` into an empty folder; then the same command line, which finds its runs
    done. (With a launcher: tests/test_glue.py.)"""
    script = copied("finetune_squad.py", tmp_path / "mine")
    argv = flags("2.0", "--seeds", 1, 2)
    done = run_python(script, *argv, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert "RoBERTa-large: exact 86.5, f1 89.4 (Table 6)" in done.stdout and "HasAns_f1" in done.stdout
    finetune_squad.main(argv)
    again = capfd.readouterr()
    assert again.err.count("Done") == 2 and "  loss " not in again.err
    kept = [path.parent.parent.name for path in (tmp_path / "squad").rglob(f"best/{answerability.FILE}")]
    assert len(kept) == 1 == len(list((tmp_path / "squad").rglob("best/model.safetensors")))


@pytest.mark.parametrize(
    ("version", "no_answer"), [("1.1", "classifier"), ("2.0", "classifier"), ("2.0", "null_score")]
)
def test_any_accumulation_gives_one_curve(flags, tmp_path, version, no_answer):
    """Padding, whose length differs between micro-batches, is not in the softmax."""
    curves = []
    for micro_batch in (8, 4, 1):
        out = tmp_path / str(micro_batch)
        others = ["--per_device_train_batch_size", micro_batch, "--output_dir", out, "--no_answer", no_answer]
        finetune_squad.main(flags(version, *others))
        curves.append(losses(durable.read_json(out / RUN / "run_record.json")))
    assert len(curves[0]) == 6 and curves[0][-1] != curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4) and curves[2] == pytest.approx(curves[0], rel=1e-4)


def test_two_processes_give_the_curve_of_one_process(flags, tmp_path):
    """Data parallelism rebuilds a model's outputs, with the classifier's among them."""
    finetune_squad.main(flags("2.0", "--output_dir", tmp_path / "single"))
    argv = flags("2.0", "--per_device_train_batch_size", 2)
    end_well(forked_ranks(lambda rank: finetune_squad.main(argv), tmp_path))
    alone, both = durable.read_json(tmp_path / "single" / RUN / "run_record.json"), record_of(tmp_path, "2.0")
    assert losses(both) == pytest.approx(losses(alone), rel=1e-4) and len(losses(both)) == 6
    assert both["metrics"] == pytest.approx(alone["metrics"], abs=1e-4)


def test_a_run_that_breaks_is_named(flags, tmp_path):
    """A rate that gives NaN, whose argmax is an answer: no score of it is ever written."""
    for version in ("1.1", "2.0"):
        for _ in range(2):
            with pytest.raises(
                RunError, match=r"seed 1: the \S+ .*step \d (is|are) not finite; nothing of it was saved"
            ):
                finetune_squad.main(flags(version, "--learning_rate", 1e15))
        assert not list((tmp_path / "squad" / version).rglob("run_record.json"))


def test_padding_is_on_the_right_whatever_the_tokenizer_says(flags, tmp_path, model_dir):
    finetune_squad.main(flags("2.0"))
    before = record_of(tmp_path, "2.0")
    config = Path(model_dir) / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "padding_side": "left"}))
    finetune_squad.main(flags("2.0", "--output_dir", tmp_path / "left"))
    after = durable.read_json(tmp_path / "left" / RUN / "run_record.json")
    assert after["loss_at_steps"] == before["loss_at_steps"] and after["metrics"] == before["metrics"]


def test_scores_need_no_cache_that_can_be_written(flags, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", str(tmp_path / "file" / "x"))
    for version in ("1.1", "2.0"):
        assert finetune_squad.main(flags(version, "--seeds", 1, "--output_dir", tmp_path / version))


def test_spans_of_the_same_scores_are_found_once(flags, monkeypatch):
    """The epoch that is kept is measured at its end and again when it is loaded, judged, and written down."""
    found, best_spans = [], finetune_squad.squad.best_spans
    monkeypatch.setattr(
        finetune_squad.squad, "best_spans", lambda *args: found.append(args[2].tobytes()) or best_spans(*args)
    )
    summary = finetune_squad.main(flags("2.0", "--seeds", 1, "--eval_strategy", "steps", "--eval_steps", 6))
    assert len(summary["settings"][0]["seeds"]) == 1
    assert len(set(found)) == 1 and len(found) == 2  # the second is for predictions.json, of the file


def test_a_finished_run_names_what_it_lacks(flags, tmp_path):
    finetune_squad.main(flags("1.1"))
    folder = tmp_path / "squad" / "1.1" / RUN
    with pytest.raises(InputError, match=r"optim was 'adamw_\S+', is 'adafactor'"):
        finetune_squad.main(flags("1.1", "--optim", "adafactor"))
    (folder / "best" / SCORES).unlink()
    with pytest.raises(InputError, match=r"best cannot be used: validation_scores.npy is missing. Move"):
        finetune_squad.main(flags("1.1"))
    (folder / "run_record.json").write_text("{")
    with pytest.raises(InputError, match=r"run_record.json is not JSON"):
        finetune_squad.main(flags("1.1"))


def test_killed_and_started_again(flags, tmp_path, monkeypatch):
    """Losses, metrics and weights, the classifier's among them, equal an uninterrupted run's."""
    saving = ["--save_strategy", "steps", "--save_steps", 4, "--max_steps", 7]
    finetune_squad.main(flags("2.0", *saving, "--output_dir", tmp_path / "whole"))
    step = FinetuneTrainer.training_step

    def killed(self, *args, **kwargs):
        if self.state.global_step == 5:
            raise RunError("killed")
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(FinetuneTrainer, "training_step", killed)
        with pytest.raises(RunError):
            finetune_squad.main(flags("2.0", *saving))
    finetune_squad.main(flags("2.0", *saving))
    whole, again = durable.read_json(tmp_path / "whole" / RUN / "run_record.json"), record_of(tmp_path, "2.0")
    assert again["resumes"] == 1 and whole["resumes"] == 0
    for key in ("loss_at_steps", "metrics", "tokens_seen"):
        assert again[key] == whole[key], key
    for file in ("model.safetensors", answerability.FILE):
        wanted, found = (
            load_file(folder / RUN / "best" / file) for folder in (tmp_path / "whole", tmp_path / "squad/2.0")
        )
        assert wanted.keys() == found.keys() and all(wanted[name].equal(found[name]) for name in wanted)


def test_it_learns_what_can_be_learnt(flags, tmp_path):
    """Both heads learn the training set by heart."""
    train, spaced = tmp_path / "train.json", tmp_path / "spaced.json"  # the same file would be refused
    train.write_text(json.dumps(official(paragraphs(3, seed=3), True)))
    spaced.write_text(f"{train.read_text()}\n")
    files = [
        "--train_file",
        train,
        "--validation_file",
        spaced,
        "--max_steps",
        150,
        "--eval_strategy",
        "steps",
        "--learning_rate",
        5e-3,
        "--output_dir",
        tmp_path,
    ]
    argv = flags("2.0", *files, "--eval_steps", 75)
    at = argv.index("--data_dir")
    summary = finetune_squad.main(argv[:at] + argv[at + 2 :])
    medians = summary["settings"][0]["medians"]
    assert medians["exact"] > 0.85 and medians["NoAns_exact"] > 0.6 < medians["HasAns_exact"], medians


# The classifier


def test_from_a_joint_checkpoint_the_classifier_is_kept(flags, tmp_path):
    finetune_squad.main(flags("2.0"))
    best = str(tmp_path / "squad" / "2.0" / RUN / "best")
    args = finetune_squad.SquadArguments(model_name_or_path=best, version_2_with_negative=True)
    stored = load_file(f"{best}/{answerability.FILE}")["dense.weight"]
    assert finetune_squad.build_model(args).answerability.dense.weight.equal(stored)
    args.random_weights = True
    assert not finetune_squad.build_model(args).answerability.dense.weight.equal(stored)


def test_a_finished_run_does_not_take_a_fresh_classifier_for_its_own(flags, tmp_path, model_dir):
    finetune_squad.main(flags("2.0"))
    best = tmp_path / "squad" / "2.0" / RUN / "best"
    args = finetune_squad.SquadArguments(model_name_or_path=model_dir, version_2_with_negative=True)
    cls = type(finetune_squad.build_model(args))
    (best / answerability.FILE).write_bytes(b"damaged")
    args.model_name_or_path = str(best)
    with pytest.raises(InputError, match=r"best' is damaged: answerability.safetensors has 7 bytes of 4\d+"):
        finetune_squad.build_model(args)
    (best / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"no classifier for this model in \S+/answerability.safetensors"):
        cls.from_pretrained(best)
    with pytest.raises(InputError, match=r"^no classifier for this model"):
        finetune_squad.build_model(args)
    (best / answerability.FILE).unlink()
    with pytest.raises(InputError, match=r"no classifier for this model in \S+/answerability.safetensors"):
        cls.from_pretrained(best)
    assert finetune_squad.build_model(args).answerability.training is False


@pytest.mark.parametrize("config_class", [RobertaConfig, BertConfig])
def test_the_joint_model_saves_a_stock_checkpoint_and_loads_itself(config_class, config, tmp_path):
    small = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    sizes = {"num_attention_heads": 2, "intermediate_size": 64, "hidden_dropout_prob": 0.25}
    model = answerability.AutoModelWithAnswerability.from_config(config_class(**small, **sizes)).eval()
    assert model.answerability.dropout.p == 0.25 and model.answerability.dense.bias.eq(0).all()
    assert model.answerability.dense.weight.std().item() == pytest.approx(0.02, rel=0.1)
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    stock, info = AutoModelForQuestionAnswering.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.architectures == [type(stock).__name__]
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not again.training
    batch = {"input_ids": torch.randint(4, config.vocab_size, (3, 9)), "attention_mask": torch.ones(3, 9).long()}
    with torch.no_grad():
        wanted, found, plain = model(**batch), again(**batch), stock(**batch)
    assert found.answerable.equal(wanted.answerable) and found.answerable.shape == (3,)
    for name in ("start_logits", "end_logits"):
        assert found[name].equal(wanted[name]) and plain[name].equal(wanted[name])


def test_head_dropout_is_the_classifiers_too(model_dir):
    args = finetune_squad.SquadArguments(model_name_or_path=model_dir, version_2_with_negative=True, head_dropout=0.5)
    for args.random_weights in (False, True):
        assert finetune_squad.build_model(args).answerability.dropout.p == 0.5


def test_a_family_without_a_span_head_is_named(tmp_path):
    CLIPTextConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    args = finetune_squad.SquadArguments(model_name_or_path=str(tmp_path), version_2_with_negative=True)
    with pytest.raises(InputError, match=r"no question-answering head for a 'clip_text_model' model"):
        finetune_squad.build_model(args)


def test_the_card_names_the_data_and_publishes_scores_only():
    hub, own = squad.dataset_card("2.0", own_files=False), squad.dataset_card("1.1", own_files=True)
    assert (hub["name"], hub["hub_id"], hub["task_type"]) == ("SQuAD 2.0", "rajpurkar/squad_v2", "question-answering")
    assert own["hub_id"] is None and list(own["hub_metrics"]) == ["exact_match", "f1"]
    assert not [name for name in hub["hub_metrics"] if "total" in name or "thresh" in name]


def test_losses_by_hand():
    """Three windows: the second is without the answer, the third is padded."""
    torch.manual_seed(0)
    start, end, judged = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]])
    positions = {"start_positions": torch.tensor([1, 0, 2]), "end_positions": torch.tensor([2, 0, 2])}

    class Output(dict):
        start_logits, end_logits = start, end

    def model(**kwargs):
        return Output(answerable=judged)

    def cross_entropy(logits, wanted, length):
        return -torch.log_softmax(logits[:length], 0)[wanted]

    lengths = (4, 4, 3)
    of_spans = [
        (
            cross_entropy(start[n], positions["start_positions"][n], k)
            + cross_entropy(end[n], positions["end_positions"][n], k)
        )
        / 2
        for n, k in enumerate(lengths)
    ]
    batch = {"attention_mask": mask, "labels": torch.tensor([1, 0, 1]), **positions}
    total, scores = finetune_squad.span_loss(model, dict(batch))
    assert total.item() == pytest.approx(sum(of_spans).item(), rel=1e-5) and scores.shape == (3, 4, 2)
    total, scores = finetune_squad.joint_loss(model, dict(batch))
    of_classifier = -torch.log(torch.sigmoid(judged * torch.tensor([1, -1, 1]))).sum()
    assert total.item() == pytest.approx((of_spans[0] + of_spans[2] + of_classifier).item(), rel=1e-5)
    assert scores.shape == (3, 4, 3) and scores[:, 3, 2].equal(judged)


# Bad input


def write(path, made, version_2=True):
    path.write_text(json.dumps(official(made, version_2)))
    return path


def test_data_of_the_other_version_are_refused(data_dir):
    with pytest.raises(InputError, match=r"10 questions have no answer .*1-0-c.*v2.0.yaml"):
        squad_files.read_file(data_dir / "train-v2.0.json", version_2=False)
    with pytest.raises(InputError, match=r"1 question, and none has an answer"):
        squad_files.checked([squad.Question("x", "Who?", "The river.", ())], "here", version_2=True)
    with pytest.raises(InputError, match=r"all 20 questions have answers.*v1.1.yaml"):
        squad_files.read_file(data_dir / "train-v1.1.json", version_2=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": "1-0-b"}, "question id 1-0-b comes twice"),
        ({"question": "  "}, "question 1-0-a has no text"),
        ({"answers": []}, "question 1-0-a has no answers, and is_impossible is false"),
        ({"is_impossible": True}, "question 1-0-a has answers, and is_impossible is true"),
        ({"answers": [{"text": "x"}]}, "1-0-a: answer_start=None must be the number of a character"),
        ({"answers": [{"text": "x", "answer_start": 4.5}]}, "1-0-a: answer_start=4.5 must be"),
        ({"answers": [{"text": "", "answer_start": -1}]}, "1-0-a has an answer without text"),
        ({"answers": [{"text": "x", "answer_start": -1}]}, "1-0-a: answer_start=-1 must be"),
        ({"answers": [{"text": 5, "answer_start": 0}]}, "1-0-a has an answer without text"),
        ({"answers": None}, "1-0-a: answers must be a list"),
        ({"question": None}, "1-0-a has no text"),
        ({"question": "half \ud83d"}, "1-0-a has no text"),
        ({"id": 7.5}, "question number 1 has no id that is a text or a whole number"),
        ({"id": True}, "question number 1 has no id that is a text or a whole number"),
        ({"answers": {"text": ["x"]}}, "1-0-a: answers must be a list"),
        ({"answers": {"text": ["x"], "answer_start": []}}, "1-0-a: answers must be a list"),
    ],
)
def test_bad_questions_are_named(tmp_path, change, said):
    made = paragraphs(2, seed=1)
    made[0][1][0].update(change)
    with pytest.raises(InputError, match=said):
        squad_files.read_file(write(tmp_path / "x.json", made), version_2=True)


def shapes_of(made):
    """SQuAD's questions in the shapes of public files, by name."""
    flat = [
        {
            **row,
            "context": context,
            "answers": {key: [a[key] for a in row["answers"]] for key in ("text", "answer_start")},
        }
        for context, entries in made
        for row in entries
    ]
    parts = [{"context": context, "qas": entries, "document_id": 1} for context, entries in made]
    numbered = json.loads(json.dumps(parts))
    for number, row in enumerate(row for part in numbered for row in part["qas"]):
        row["id"] = number
    lists = {
        "a title for each": [{"title": "x", "paragraphs": [part]} for part in parts],
        "without titles, ids are numbers": [{"paragraphs": [part]} for part in numbered],
        "paragraphs": parts,
        "rows": flat,
        "rows with lists of answers": [{**row, "context": part["context"]} for part in parts for row in part["qas"]],
    }
    files = {
        f"{name}, below data": json.dumps({"version": "x", "data": rows}, indent=1) for name, rows in lists.items()
    }
    files |= {f"{name}, a list": json.dumps(rows) for name, rows in lists.items()}
    return files | {
        f"{name}, a line each": "".join(map("{}\n".format, map(json.dumps, rows))) for name, rows in lists.items()
    }


def test_every_shape_of_public_files_has_the_same_questions(tmp_path):
    made = paragraphs(4, seed=1)
    wanted = squad_files.read_file(write(tmp_path / "x.json", made), version_2=True)
    shapes = shapes_of(made)
    assert len(shapes) == 15 and len(wanted) == 12
    for name, content in shapes.items():
        (tmp_path / "x.json").write_text(content)
        found = squad_files.read_file(tmp_path / "x.json", version_2=True)
        if "numbers" in name:
            assert [question.id for question in found] == [str(number) for number in range(len(found))]
            found = [dataclasses.replace(a, id=b.id) for a, b in zip(found, wanted, strict=True)]
        assert found == wanted, name


def test_bad_files_are_named(tmp_path):
    made = paragraphs(1, seed=1)
    with pytest.raises(InputError, match="question 1-0-a has no context"):
        squad_files.read_file(write(tmp_path / "x.json", [("", made[0][1])]), version_2=True)
    for content, said in (
        ("{", "is not JSON"),
        ("[" * 10**5, "is not JSON"),
        ("{}", "not in SQuAD's"),
        ('{"data": "text"}', "not in SQuAD's"),
        ('[{"question": "Who?"}]', "not in SQuAD's"),
        ('{"id": 1}\n{"id": 2}', "not in SQuAD's"),
    ):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(InputError, match=f"bad.json {said}|bad.json is {said}"):
            squad_files.read_file(tmp_path / "bad.json", version_2=True)
    (tmp_path / "bad.json").write_bytes(b'{"data": "\xff"}')
    with pytest.raises(InputError, match=r"bad.json is not UTF-8"):
        squad_files.read_file(tmp_path / "bad.json", version_2=True)
    for content in ('{"data": []}', "[]"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(InputError, match=r"bad.json has no questions"):
            squad_files.read_file(tmp_path / "bad.json", version_2=True)
    with pytest.raises(InputError, match=r"none.json is missing"):
        squad_files.read_file(tmp_path / "none.json", version_2=True)


def test_misplaced_answers_are_left_out_and_named(flags, tmp_path, capsys):
    made = paragraphs(10, seed=1)
    made[3][1][0]["answers"][0]["answer_start"] += 1
    write(tmp_path / "train-v2.0.json", made)
    write(tmp_path / "dev-v2.0.json", paragraphs(4, seed=2))
    finetune_squad.main(flags("2.0", "--data_dir", tmp_path))
    assert "Left out    1 training questions" in (said := capsys.readouterr().err) and "1-3-a" in said
    assert record_of(tmp_path, "2.0")["features"]["left_out_misplaced"] == 1
    for _, entries in made:
        for row in entries:
            row["answers"] = [{**answer, "answer_start": 10**6} for answer in row["answers"]]
    write(tmp_path / "train-v1.1.json", made, version_2=False)
    write(tmp_path / "train-v2.0.json", made)
    write(tmp_path / "dev-v1.1.json", paragraphs(4, seed=2), version_2=False)
    for version in ("1.1", "2.0"):
        with pytest.raises(InputError, match="no answer stands at its answer_start"):
            finetune_squad.main(flags(version, "--data_dir", tmp_path))


def test_a_tokenizer_that_loses_most_answers_is_refused(flags, tmp_path, capsys):
    """A token for each sentence: it is counted, and nothing is trained."""
    backend = Tokenizer(models.WordLevel({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "x": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(".", "merged_with_previous")
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = {"cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}
    sentences = PreTrainedTokenizerFast(tokenizer_object=backend, **{f"{k}_token": v for k, v in names.items()})
    sentences.save_pretrained(tmp_path / "sentences")
    said = r"sentences' loses the answers: of 20 training answers, 0 come .*becomes 'The.*name another tokenizer"
    with pytest.raises(InputError, match=said):
        finetune_squad.main(flags("1.1", "--tokenizer_name", tmp_path / "sentences"))
    assert "Answers     0 of 20 come back" in capsys.readouterr().err and not (tmp_path / "squad").exists()


BAD = {
    "stride": (["--doc_stride", 60], "leaves 40 tokens .* doc_stride=60 must be less; what fits: --doc_stride 16$"),
    "answer length": (["--max_answer_length", 0], "max_answer_length=0 must be at least 1"),
    "two sources": (["--train_file", "x.json"], "data_dir=.* exclude each other"),
    "the tool's flag": (["--null_odds", "x.json"], "unknown argument '--null_odds'"),
    "no data": (["--data_dir", "/nowhere"], "/nowhere/train-v1.1.json is missing"),
    "order of evaluation": (["--train_sampling_strategy", "group_by_length"], "train_sampling_strategy must stay"),
    "no evaluation at first": (["--eval_delay", 10], "eval_delay must stay 0"),
    "decay": (["--layer_decay", 1.5], "layer_decay=1.5"),
    "decay of lamb": (
        ["--layer_decay", 0.5, "--optim", "lamb"],
        "layer_decay=0.5 goes with adamw_torch and its like, not lamb",
    ),
    "samples": (["--max_train_samples", 0], "max_train_samples=0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, flags):
    others, said = BAD[case]
    with pytest.raises(InputError, match=said):
        finetune_squad.main(flags("1.1", *others))


def test_without_the_hub_the_way_out_is_said():
    with pytest.raises(InputError, match=r"cannot load rajpurkar/squad_v2 .*--data_dir"):
        squad.read_hub("train", version_2=True)


# Presets and rates


def test_presets_are_the_papers(root):
    """Table 10's column for SQuAD, in both versions."""
    presets = sorted((root / "presets" / "squad").glob("*.yaml"))
    assert [path.stem for path in presets] == ["v1.1", "v2.0"]
    for path in presets:
        (args, training), _ = finetune_squad.read_arguments(["--config", str(path), "--use_cpu"])
        assert f"v{finetune_squad.version(args)}" == path.stem and args.seeds == [1, 2, 3, 4, 5]
        assert (training.learning_rate, args.global_batch_size, training.num_train_epochs) == (1.5e-5, 48, 2)
        assert (training.weight_decay, training.warmup_steps, training.lr_scheduler_type) == (0.01, 0.06, "linear")
        assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-6)
        assert training.max_grad_norm == 0 and args.max_seq_length == 512 and args.layer_decay == 1


def test_rates_fall_from_the_head_to_the_embeddings(flags, tmp_path, model_dir, monkeypatch):
    args = finetune_squad.SquadArguments(model_name_or_path=model_dir, version_2_with_negative=True)
    rates = heads.layer_rates(finetune_squad.build_model(args), 1.0, 0.5)
    assert rates["qa_outputs.weight"] == rates["answerability.dense.bias"] == 1.0
    assert rates["roberta.encoder.layer.1.output.dense.weight"] == 0.5
    assert rates["roberta.encoder.layer.0.attention.self.query.bias"] == 0.25
    assert rates["roberta.embeddings.word_embeddings.weight"] == 0.125
    groups = []
    make = FinetuneTrainer.create_optimizer

    def seen(self, model=None):
        optimizer = make(self, model)
        groups.append([dict(group) for group in optimizer.param_groups])
        return optimizer

    monkeypatch.setattr(FinetuneTrainer, "create_optimizer", seen)
    finetune_squad.main(flags("1.1", "--layer_decay", 0.5, "--weight_decay", 0.25))
    (groups,) = groups
    found = [(group["lr"], group["weight_decay"]) for group in groups]
    assert found == [(1e-3 * 0.5**depth, decay) for depth in (0, 1, 2, 3) for decay in (0.25, 0.0)]
    counted = sum(parameter.numel() for group in groups for parameter in group["params"])
    assert counted == record_of(tmp_path, "1.1")["parameters"]


def test_a_context_of_which_the_tokenizer_leaves_nothing_has_no_span(tokenizer):
    question = squad.Question("q", "Where?", "a", [])
    made = squad.windows([question], tokenizer, 32, 8, 16)
    made.offsets[0][:] = -1
    (spans,) = squad.best_spans([question], made, np.zeros((1, len(made.offsets[0]), 3), np.float32), 3, 5, True)
    assert spans.texts == [] and spans.answer(0.5) == ""


def test_models_and_tokenizers_whose_first_token_cannot_stand_for_no_answer(tokenizer):
    for config in (BartConfig(), Qwen2Config()):
        with pytest.raises(
            InputError, match=f"a '{config.model_type}' model has not seen the rest: --no_answer null_score"
        ):
            answerability.AutoModelWithAnswerability.from_config(config)
    bare = PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(tokenizer.backend_tokenizer), pad_token="<pad>")
    bare.backend_tokenizer.post_processor = processors.Sequence([])
    question = squad.Question("q", "Where?", "Paris is far.", [])
    assert squad.windows([question], bare, 32, 8, 16).features
    with pytest.raises(InputError, match=r"passage_first=true: .* puts no special token before a pair"):
        squad.windows([question], bare, 32, 8, 16, passage_first=True)


def test_layer_rates_of_other_families():
    small = {"vocab_size": 40, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    layers = {"num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    model = AutoModelForSequenceClassification.from_config(Qwen2Config(**small, **layers))
    rates = heads.layer_rates(model, 1.0, 0.5)
    assert rates["model.embed_tokens.weight"] == 0.125 and rates["score.weight"] == rates["model.norm.weight"] == 1
    assert rates["model.layers.1.mlp.up_proj.weight"] == 0.5 and rates["model.layers.0.mlp.up_proj.weight"] == 0.25
    unshared = AlbertConfig(**small, embedding_size=4, num_hidden_layers=2, num_hidden_groups=2)
    rates = heads.layer_rates(AutoModelForSequenceClassification.from_config(unshared), 1.0, 0.5)
    below = {rate for name, rate in rates.items() if name.startswith(("albert.embeddings", "albert.encoder.embedding"))}
    assert below == {0.125} and rates["albert.encoder.embedding_hidden_mapping_in.weight"] == 0.125
    for config in (
        AlbertConfig(**small, embedding_size=8, num_hidden_layers=2),
        T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, pad_token_id=0),
    ):
        model = AutoModelForSequenceClassification.from_config(config)
        with pytest.raises(InputError, match=r"layer_decay=0.5: .* has no single stack of layers"):
            heads.layer_rates(model, 1.0, 0.5)
