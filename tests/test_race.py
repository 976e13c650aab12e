"""finetune_race.py through its command line, on generated passages: blanks, several questions per passage, long
options."""

import json
import math
import random
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import (
    PLACES,
    SUBJECTS,
    VERBS,
    losses,
    make_documents,
    second_of_training,
)
from transformers import AutoModelForMultipleChoice

import finetune_race
from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.tasks import race
from roberta_recipe.training import finetune_trainer

RUN = "lr0.001-batch4-seed1"
COUNTS = {"train": 8, "dev": 4, "test": 3}


def passage(number, seed):
    """Three questions; in the first and second, the option fills a blank."""
    rng = random.Random(f"{seed}-{number}")
    whos, places = rng.sample(SUBJECTS, 4), rng.sample(PLACES, 4)
    verbs = [rng.choice(VERBS) for _ in whos]
    lines = [f"{w.capitalize()} {v}  somebody {p}." for w, v, p in zip(whos, verbs, places, strict=True)]
    answers = [rng.randrange(4) for _ in range(3)]
    questions = [f"{whos[answers[0]].capitalize()} {verbs[answers[0]]} somebody  _  .", "_ is there.", "Who leaves?"]
    return {
        "article": "\n\n".join(lines),
        "questions": questions,
        "options": [places, whos, [f"{who} {number}" for who in whos]],
        "answers": ["ABCD"[answer] for answer in answers],
        "id": f"high{number}.txt",
    }


def write(folder, name, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("race")
    for split, count in COUNTS.items():
        for level in race.LEVELS:
            for number in range(count):
                write(folder / split / level, f"{number + 8}.txt", passage(number, f"{split}{level}"))
    return folder


@pytest.fixture
def flags(root, data_dir, model_dir, tmp_path):
    """A function: the command line of a second of training, with further flags."""

    def of(*others):
        own = {"data_dir": data_dir, "model_name_or_path": model_dir, "output_dir": tmp_path / "race"}
        own |= {"max_option_length": 24, "global_batch_size": 4, "per_device_train_batch_size": 4}
        return second_of_training(root / "presets" / "race" / "paper.yaml", *others, **own)

    return of


def record_of(folder):
    return durable.read_json(folder / RUN / "run_record.json")


def test_from_the_command_line(flags, tmp_path, data_dir, capsys):
    summary = finetune_race.main(flags("--do_predict"))
    shown, record = capsys.readouterr(), record_of(tmp_path / "race")
    assert "race, validation accuracy x 100" in shown.out and "accuracy 83.2, middle 86.5, high 81.3" in shown.out
    tested = summary["tests"]["test"]
    assert f"test set (18 examples), medians of seeds 1: accuracy {100 * tested['median']:.1f}, middle" in shown.out
    scores = np.load(tmp_path / "race" / RUN / "test_scores.npz")["test"]
    questions = race.read_folder(data_dir, "test", race.LEVELS)
    assert tested["medians"] == finetune_race.measure(questions, scores) and tested["seeds"] == {1: tested["median"]}
    assert durable.read_json(tmp_path / "race" / "summary.json")["tests"]["test"]["medians"] == tested["medians"]
    assert "Rows        train 48, validation 24, test 18 questions" in shown.err and "Duplicates  0 of 24" in shown.err
    metrics = record["metrics"]
    assert set(metrics) == {"accuracy", "middle", "high"} and record["steps"] == 6
    assert record["dataset"] == summary["dataset"] and set(summary["dataset"]["hub_metrics"]) == set(metrics)
    assert metrics["accuracy"] == pytest.approx((metrics["middle"] + metrics["high"]) / 2)
    assert summary["settings"][0]["medians"] == metrics
    assert record["features"]["validation_high"]["questions"] == 12
    rows = [line.split("\t") for line in (tmp_path / "race" / RUN / "validation_answers.tsv").read_text().splitlines()]
    assert rows[0] == ["id", "question", *"ABCD", "label", "prediction", "probability", "verdict"] and len(rows) == 25
    assert np.mean([row[-1] == "right" for row in rows[1:]]) == pytest.approx(metrics["accuracy"])
    # the run leaves a plain checkpoint
    best = tmp_path / "race" / RUN / "best"
    _, info = AutoModelForMultipleChoice.from_pretrained(best, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_any_accumulation_and_activation_checkpointing_give_one_curve(flags, tmp_path):
    curves = []
    for others in ((4,), (1, "--activation_checkpointing", "true")):
        out = tmp_path / str(len(curves))
        finetune_race.main(flags("--output_dir", out, "--per_device_train_batch_size", *others))
        curves.append(losses(record_of(out)))
    assert len(curves[0]) == 6 and curves[0][-1] != curves[0][0] and curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_it_learns_what_can_be_learnt(flags, tmp_path):
    """The model memorises three questions."""
    for split in ("train", "dev"):
        for number in range(3):
            row = passage(number, "learn")
            row |= {key: row[key][:1] for key in ("questions", "options", "answers")}
            write(tmp_path / "data" / split / "middle", f"{number}.txt", row)
    longer = ["--max_steps", 120, "--eval_strategy", "steps", "--eval_steps", 60, "--learning_rate", 3e-3]
    longer += ["--global_batch_size", 3, "--per_device_train_batch_size", 3]
    found = finetune_race.main(flags("--data_dir", tmp_path / "data", "--level", "middle", *longer))
    assert found["settings"][0]["median"] == 1.0


def test_scores_of_other_test_rows_are_not_taken(flags, tmp_path, data_dir, capsys):
    """Other questions in the test folder are scored with the kept weights, or refused if the weights were deleted."""
    shutil.copytree(data_dir, tmp_path / "data")
    argv = flags("--do_predict", "--data_dir", tmp_path / "data")
    finetune_race.main(argv)
    stored = tmp_path / "race" / RUN / "test_scores.npz"
    before = stored.read_bytes()
    finetune_race.main(argv)
    assert stored.read_bytes() == before
    for path in (tmp_path / "data" / "test" / "high").glob("*.txt"):
        write(path.parent, path.name, passage(99, path.name))
    write(tmp_path / "data" / "test" / "high", "100.txt", passage(100, "more"))
    capsys.readouterr()
    finetune_race.main(argv)
    assert stored.read_bytes() != before and "test 21 questions" in capsys.readouterr().err
    (tmp_path / "data" / "test" / "high" / "100.txt").unlink()
    (tmp_path / "race" / RUN / "best" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no scores on this test set"):
        finetune_race.main(argv)


def test_without_the_article_it_is_not_seen(flags, tmp_path, tokenizer, data_dir):
    questions = race.read_folder(data_dir, "validation", ("middle",))
    blind = race.features(questions, tokenizer, 64, 24, without_article=True)
    batch = race.RaceCollator(tokenizer)(blind.rows[:2])
    for number in (0, 1):
        for choice, option in enumerate(questions[number].options):
            ids = batch["input_ids"][number, choice][batch["attention_mask"][number, choice] == 1]
            alone = tokenizer(questions[number].with_option(option)).input_ids
            assert ids.tolist() == [*alone, 2, 2]  # an empty passage
    finetune_race.main(flags("--without_article", "true"))


def test_scores_come_from_the_stored_model(flags, tmp_path, data_dir, tokenizer, model_dir):
    """Reference: each question alone, encoded as a pair by the tokenizer. With dropout, which scores are without."""
    config = Path(model_dir, "config.json")
    config.write_text(config.read_text().replace('"hidden_dropout_prob": 0.0', '"hidden_dropout_prob": 0.1'))
    finetune_race.main(flags())
    best = tmp_path / "race" / RUN / "best"
    model = AutoModelForMultipleChoice.from_pretrained(best).eval()
    wanted = []
    for question in race.read_folder(data_dir, "validation", race.LEVELS):
        texts = [question.with_option(option) for option in question.options], [question.article] * 4
        batch = tokenizer(*texts, truncation="only_second", max_length=64, padding=True, return_tensors="pt")
        with torch.no_grad():
            wanted.append(model(**{name: tensor[None] for name, tensor in batch.items()}).logits)
    assert np.load(best / "validation_scores.npy") == pytest.approx(torch.cat(wanted).numpy(), abs=1e-5)


# Input


def test_a_blank_takes_the_option():
    def text(question, option="the  sea"):
        return race.RaceExample("x", "high", "a", question, ("",) * 4, 0).with_option(option)

    assert text("He likes  _  .") == "He likes the sea ."
    assert text("He likes ____.") == "He likes the sea."  # a single blank, not four
    assert text("_ likes _", "it") == "it likes it"
    assert text("What is\nit?") == "What is it? the sea"
    assert text("_", r"\1 \g<0>") == r"\1 \g<0>"  # an option is not a pattern of `re`


def test_files_are_read_in_order_and_folded(data_dir):
    questions = race.read_folder(data_dir, "train", race.LEVELS)
    assert len(questions) == 48 and [question.level for question in questions] == ["middle"] * 24 + ["high"] * 24
    files = [question.id.split(",")[0] for question in questions[:24:3]]
    assert files == [f"middle/{number}.txt" for number in range(8, 16)]  # by number: 10 comes after 9
    assert "  " not in questions[0].article and "\n" not in questions[0].article
    assert [question.question for question in questions[:3]] == passage(0, "trainmiddle")["questions"]
    assert "ABCD"[questions[0].answer] == passage(0, "trainmiddle")["answers"][0]


def test_passages_without_questions_are_named_and_give_no_example(tmp_path):
    """As in two passages of the official train/high, at the start, in the middle and at the end."""
    for number in range(6):
        empty = {"questions": [], "options": [], "answers": []} if number in (0, 2, 5) else {}
        write(tmp_path / "train" / "high", f"{number}.txt", {**passage(number, "gaps"), **empty})
    (tmp_path / "train" / "high" / "._0.txt").write_bytes(b"\x00\x05\x16\x07\x00")  # macOS's resource fork
    found: list[str] = []
    questions = race.read_folder(tmp_path, "train", ("high",), found)
    assert found == ["high/0.txt", "high/2.txt", "high/5.txt"]
    assert [question.id for question in questions[::3]] == [f"high/{number}.txt, question 1" for number in (1, 3, 4)]
    assert len(questions) == 9 and questions == race.read_folder(tmp_path, "train", ("high",))


@pytest.mark.parametrize("max_seq_length", [44, 64, 512])
@pytest.mark.parametrize("kind", ["tokenizer", "wordpiece"])
def test_sequences_are_the_tokenizers_own_pairs(request, kind, max_seq_length):
    """Truncated or not, for both kinds of special tokens; the last special token stays."""
    of = request.getfixturevalue(kind)
    texts = make_documents(5, seed=4, sentences=(1, 6))
    options = ("a boat", "the red cat", "it", "my old dog")
    questions = [race.RaceExample(str(n), "high", race.fold(t), "Who _?", options, n % 4) for n, t in enumerate(texts)]
    made = race.features(questions, of, max_seq_length, 40)
    multiple = finetune_trainer.padded_to(max_seq_length)
    batch = race.RaceCollator(of, pad_to_multiple_of=multiple)(made.rows)
    assert batch["labels"].tolist() == [0, 1, 2, 3, 0] and batch["input_ids"].shape[:2] == (5, 4)
    assert ("token_type_ids" in batch) == (kind == "wordpiece")
    for number, question in enumerate(questions):
        cut = []
        for choice, option in enumerate(options):
            texts = question.with_option(option), question.article
            pair = of(*texts, truncation="only_second", max_length=max_seq_length)
            there = batch["attention_mask"][number, choice] == 1
            for name in pair:
                assert batch[name][number, choice][there].tolist() == pair[name]
            assert pair["input_ids"][-1] == of.sep_token_id
            cut.append(len(of(*texts, verbose=False)["input_ids"]) > max_seq_length)
        assert made.articles_cut[number] == any(cut)
    assert made.articles_cut.any() == (max_seq_length < 512)
    texts = race.RaceExample("x", "high", "It is <mask> or </s>.", "</s>?", options, 0)
    (row,) = race.features([texts], of, max_seq_length, 40).rows
    added = {of.cls_token_id: 1, of.sep_token_id: 3 if kind == "tokenizer" else 2}
    special = {token: row["input_ids"][0].tolist().count(token) for token in of.all_special_ids}
    assert {token: n for token, n in special.items() if n and token != of.unk_token_id} == added
    width, longest = batch["input_ids"].shape[2], max(row["length"] for row in made.rows)
    assert width == math.ceil(longest / (multiple or 1)) * (multiple or 1)


def test_long_options_are_cut_and_counted(tokenizer):
    """The passage is shorter than the question."""
    long = " ".join(make_documents(1, seed=3))
    question = race.RaceExample("x", "high", "The river.", "Where?", (long, long, "it", "a"), 2)
    made = race.features([question], tokenizer, 64, 24)
    assert made.options_cut.tolist() == [2]
    texts = question.article, question.with_option(long)
    article, option = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
    assert not made.articles_cut[0] and made.rows[0]["length"] == 24 + len(article) + 4
    assert made.rows[0]["input_ids"][0].tolist() == [0, *option[:24], 2, 2, *article, 2]


def test_the_card_names_race_for_its_own_questions_only():
    official, own = race.dataset_card("all", False, 4887), race.dataset_card("all", False, 20)
    assert (official["name"], official["hub_id"]) == ("RACE", "ehovy/race")
    assert (own["name"], own["hub_id"]) == ("race (20 questions)", None)
    assert race.dataset_card("middle", False, 1436)["name"] == "race (level middle)"


def test_the_hubs_columns(monkeypatch):
    row = {"example_id": "high1.txt", "article": "a  b", "question": "_?", "options": list("wxyz"), "answer": "C"}
    asked = []
    rows = datasets.Dataset.from_list([row, row])
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or rows)
    questions = race.read_hub("validation", race.LEVELS)
    assert asked == [(("ehovy/race", level), {"split": "validation"}) for level in race.LEVELS]
    assert [question.answer for question in questions] == [2] * 4 and questions[0].article == "a b"
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"cannot load ehovy/race, .*--data_dir"):
        race.read_hub("train", race.LEVELS)


# Bad input

ROW = passage(0, "bad")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", r"middle/8.txt is not JSON"),
        ("[]", r"8.txt is not a passage of RACE \(article, questions, options, answers\)"),
        ({**ROW, "answers": ["A", "E", "B"]}, r"middle/8.txt, question 2: .* and answer 'E'"),
        ({**ROW, "answers": ["A", "", "B"]}, r"question 2: .* and answer ''"),
        ({**ROW, "options": [["a"] * 4, ["a"] * 3, ["a"] * 4]}, r"question 2: .* has options \['a', 'a', 'a'\]"),
        ({**ROW, "options": ["abcd", ["a"] * 4, ["a"] * 4]}, r"question 1: .* has options 'abcd'"),
        ({**ROW, "answers": ["A", "B"]}, r"8.txt is not a passage of RACE .*ValueError"),
        ({**ROW, "article": " \n"}, r"question 1: needs an article"),
        ({**ROW, "article": "half \ud83d"}, r"question 1: needs an article"),
        ({**ROW, "questions": [None, "b", "c"]}, r"question 1: needs an article"),
    ],
)
def test_bad_questions_are_named(tmp_path, content, said):
    write(tmp_path / "train" / "middle", "8.txt", content)
    with pytest.raises(InputError, match=said):
        race.read_folder(tmp_path, "train", ("middle",))


BAD = {
    "no folder": (["--data_dir", "/nowhere"], r"/nowhere/train/middle has no \*.txt.*--level middle or high"),
    "option length": (["--max_option_length", 60], "max_option_length=60 must be from 1 to 59"),
    "no option": (["--max_option_length", 0], "max_option_length=0 must be from 1"),
    "positions": (["--max_seq_length", 65], "max_seq_length=65 is more than the 64 positions"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, flags):
    others, said = BAD[case]
    with pytest.raises(InputError, match=said):
        finetune_race.main(flags(*others))


def test_presets_are_the_papers_and_fairseqs(root):
    table = {"paper": (4, 0.1, 0.06, "linear"), "fairseq": (5, 0.01, 0, "constant")}
    presets = sorted((root / "presets" / "race").glob("*.yaml"))
    assert {path.stem for path in presets} == set(table) and len(presets) == 2
    for path in presets:
        (args, training), _ = finetune_race.read_arguments(["--config", str(path), "--use_cpu"])
        got = training.num_train_epochs, training.weight_decay, training.warmup_steps, training.lr_scheduler_type
        assert got == table[path.stem] and args.level == "all" and args.head_dropout == 0.0
        assert (training.learning_rate, args.global_batch_size, args.seeds) == (1e-5, 16, [1, 2, 3, 4, 5])
        assert (args.max_seq_length, args.max_option_length, training.max_grad_norm) == (512, 128, 0)
        assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-6)
