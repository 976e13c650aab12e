"""finetune_squad.py through its command line, on generated contexts: several windows, emoji and accents, unanswerable
questions."""

import copy
import json
import random
import types

import pytest
import torch
from conftest import PLACES, SUBJECTS, VERBS, end_well, forked_ranks, losses, second_of_training
from safetensors.torch import load_file
from tokenizers import processors
from transformers import (
    AutoModelForQuestionAnswering,
    BartConfig,
    LukeConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    RobertaConfig,
    XLNetConfig,
)
from transformers.hf_argparser import string_to_bool

import finetune_squad
from roberta_recipe import durable
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.model import task_heads
from roberta_recipe.tasks import answerability, squad, squad_files
from roberta_recipe.training.arguments import FinetuneTrainingArguments
from roberta_recipe.training.finetune_trainer import SCORES, FinetuneTrainer
from tools import squad_score

RUN = "lr0.001-batch8-seed1"
CLASSIFIER = {f"answerability.{layer}.{kind}" for layer in ("dense", "out_proj") for kind in ("weight", "bias")}


def entry(name, question, context, *answers):
    """A question in the official format, unanswerable without answers."""
    found = [{"text": answer, "answer_start": context.index(answer)} for answer in answers]
    return {"id": name, "question": question, "answers": found, "is_impossible": not found}


def official(paragraphs, version_2):
    entries = [{"context": context, "qas": [dict(row) for row in entries]} for context, entries in paragraphs]
    if not version_2:
        for paragraph in entries:
            paragraph["qas"] = [row for row in paragraph["qas"] if not row.pop("is_impossible")]
    return {"version": "v2.0" if version_2 else "1.1", "data": [{"title": "made here", "paragraphs": entries}]}


def paragraphs(count, seed):
    """Contexts about who does something where; every third question is about a person who is not in the context."""
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
    """A function: the command line of a second of training on a version, with further flags."""

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
    assert f"squad {version}, validation f1 x 100" in shown.out
    assert "\nnot SQuAD's own validation questions\n" in shown.out and "(Table 6)" not in shown.out
    record, folder = record_of(tmp_path, version), tmp_path / "squad" / version / RUN
    assert record["steps"] == 6 and record["features"]["train_answers"]["in_no_window"] == 0
    assert summary["settings"][0]["medians"]["f1"] == record["metrics"]["f1"]

    questions = squad_files.read_file(data_dir / f"dev-v{version}.json", version == "2.0")
    predictions, n_best = (durable.read_json(folder / f"{name}predictions.json") for name in ("", "nbest_"))
    assert list(predictions) == [question.id for question in questions] == list(n_best)
    for question in questions:
        chances = [entry["probability"] for entry in n_best[question.id]]
        assert sum(chances) == pytest.approx(1) and chances == sorted(chances, reverse=True) and len(chances) > 1
        assert all(entry["text"] in question.context for entry in n_best[question.id])

    dev = ["--validation_file", str(data_dir / f"dev-v{version}.json")]
    if version == "2.0":
        dev += ["--version_2_with_negative", "--null_odds", str(folder / "null_odds.json")]
    scored = squad_score.main(["--predictions", str(folder / "predictions.json"), *dev])
    for name in finetune_squad.SHOWN[version][:-1]:
        assert scored[name] == pytest.approx(100 * record["metrics"][name])
    if version == "2.0":  # thresholds are searched over all questions, by span score and by probability
        best = squad_score.main(["--predictions", str(folder / "span_predictions.json"), *dev])
        for name in ("best_f1", "best_exact"):
            assert best[name] == pytest.approx(100 * record["metrics"][name])
        given, threshold = durable.read_json(folder / "null_odds.json"), record["metrics"]["threshold"]
        assert {name for name, text in predictions.items() if not text} == {n for n in given if given[n] > threshold}
        assert threshold == 0.5 or no_answer == "null_score"
    rows = [line.split("\t") for line in (folder / "validation_answers.tsv").read_text().splitlines()]
    rows = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert {row["id"]: row["prediction"] for row in rows} == predictions
    f1 = [float(row["f1"]) for row in rows]
    assert f1 == sorted(f1) and 100 * sum(f1) / len(f1) == pytest.approx(scored["f1"], abs=0.01)
    # the run leaves a plain checkpoint, with the classifier in it
    _, info = AutoModelForQuestionAnswering.from_pretrained(folder / "best", output_loading_info=True)
    assert not info["missing_keys"] and set(info["unexpected_keys"]) == (
        CLASSIFIER if no_answer == "classifier" else set()
    )


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_any_accumulation_gives_one_curve(flags, tmp_path, version):
    """Padding, which differs between micro-batches, is not part of the softmax."""
    curves = []
    for micro_batch in (8, 1):
        out = tmp_path / str(micro_batch)
        finetune_squad.main(flags(version, "--per_device_train_batch_size", micro_batch, "--output_dir", out))
        curves.append(losses(durable.read_json(out / RUN / "run_record.json")))
    assert len(curves[0]) == 6 and curves[0][-1] != curves[0][0] and curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_two_processes_give_the_curve_of_one_process(flags, tmp_path):
    """Data parallelism rebuilds the model's outputs, including the classifier's."""
    finetune_squad.main(flags("2.0", "--output_dir", tmp_path / "single"))
    argv = flags("2.0", "--per_device_train_batch_size", 2)
    end_well(forked_ranks(lambda rank: finetune_squad.main(argv), tmp_path))
    alone, both = durable.read_json(tmp_path / "single" / RUN / "run_record.json"), record_of(tmp_path, "2.0")
    assert losses(both) == pytest.approx(losses(alone), rel=1e-4) and len(losses(both)) == 6
    assert both["metrics"] == pytest.approx(alone["metrics"], abs=1e-4)


def test_a_run_that_breaks_is_named(flags, tmp_path):
    """A learning rate that gives NaN, whose argmax would be an answer: no score is written."""
    with pytest.raises(RunError, match=r"seed 1: the \S+ .*step \d (is|are) not finite; the step was not saved"):
        finetune_squad.main(flags("2.0", "--learning_rate", 1e15))
    assert not list((tmp_path / "squad").rglob("run_record.json"))


def test_a_finished_run_names_what_it_lacks(flags, tmp_path):
    finetune_squad.main(flags("1.1"))
    folder = tmp_path / "squad" / "1.1" / RUN
    with pytest.raises(InputError, match=r"optim was 'adamw_\S+', is 'adafactor'"):
        finetune_squad.main(flags("1.1", "--optim", "adafactor"))
    (folder / "best" / SCORES).unlink()
    with pytest.raises(InputError, match=r"best cannot be used: .*validation_scores.npy"):
        finetune_squad.main(flags("1.1"))
    (folder / "run_record.json").write_text("{")
    with pytest.raises(InputError, match=r"run_record.json is not JSON"):
        finetune_squad.main(flags("1.1"))


def test_killed_and_started_again(flags, tmp_path, monkeypatch):
    """Losses, metrics and weights, including the classifier's, equal those of an uninterrupted run."""
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
    folders = tmp_path / "whole", tmp_path / "squad/2.0"
    wanted, found = (load_file(folder / RUN / "best" / "model.safetensors") for folder in folders)
    assert wanted.keys() == found.keys() >= CLASSIFIER and all(wanted[name].equal(found[name]) for name in wanted)


def test_it_learns_what_can_be_learnt(flags, tmp_path):
    """Both heads memorise the training set."""
    train = tmp_path / "train.json"
    train.write_text(json.dumps(official(paragraphs(3, seed=3), True)))
    longer = ["--max_steps", 150, "--eval_strategy", "steps", "--eval_steps", 75, "--learning_rate", 5e-3]
    files = ["--train_file", train, "--validation_file", train, "--output_dir", tmp_path]
    argv = flags("2.0", *files, *longer)
    at = argv.index("--data_dir")
    summary = finetune_squad.main(argv[:at] + argv[at + 2 :])
    medians = summary["settings"][0]["medians"]
    assert medians["exact"] > 0.85 and medians["NoAns_exact"] > 0.6 < medians["HasAns_exact"], medians


# The classifier


def test_the_classifier_of_a_checkpoint_is_kept_or_fresh(flags, tmp_path, capsys):
    finetune_squad.main(flags("2.0"))
    best = tmp_path / "squad" / "2.0" / RUN / "best"
    args = finetune_squad.SquadArguments(model_name_or_path=str(best), version_2_with_negative=True, head_dropout=0.5)
    stored = load_file(best / "model.safetensors")["answerability.dense.weight"]
    model = finetune_squad.build_model(args)
    assert model.answerability.dense.weight.equal(stored) and model.answerability.dropout.p == 0.5
    args.random_weights = True
    assert not finetune_squad.build_model(args).answerability.dense.weight.equal(stored)
    args.random_weights = False
    AutoModelForQuestionAnswering.from_pretrained(best).save_pretrained(tmp_path / "stock")
    args.model_name_or_path = str(tmp_path / "stock")
    model = finetune_squad.build_model(args)
    with pytest.raises(InputError, match=r"stock has other weights .* \(answerability\.dense\.bias and 3 others\)"):
        FinetuneTrainer._load_from_checkpoint(types.SimpleNamespace(model=model), tmp_path / "stock")
    fresh = model.answerability.dense.weight
    assert 0.015 < fresh.std() < 0.025 and not fresh.equal(stored) and not model.answerability.out_proj.bias.any()
    said = capsys.readouterr().err
    assert said.count("Head        fresh (answerability, qa_outputs)\n") == 1  # the training above
    assert said.count("Head        kept\n") == said.count("Head        fresh (answerability)\n") == 1


def test_learning_rates_fall_from_the_head_to_the_embeddings(model_dir, tmp_path):
    args = finetune_squad.SquadArguments(model_name_or_path=model_dir, version_2_with_negative=True)
    rates = task_heads.layer_learning_rates(finetune_squad.build_model(args), 1.0, 0.5)
    assert rates["qa_outputs.weight"] == rates["answerability.dense.bias"] == 1.0
    assert rates["roberta.encoder.layer.1.output.dense.weight"] == 0.5
    assert rates["roberta.encoder.layer.0.attention.self.query.bias"] == 0.25
    assert rates["roberta.embeddings.word_embeddings.weight"] == 0.125
    training = FinetuneTrainingArguments(output_dir=str(tmp_path), use_cpu=True, weight_decay=0.1, learning_rate=1.0)
    trainer = FinetuneTrainer(
        **{"model": finetune_squad.build_model(args), "args": training, "fingerprint": {}, "resumed": None},
        **{"loss_sum": None, "measure": None, "best_metric": "f1", "layer_decay": 0.5},
        **{"train_dataset": [{}], "eval_dataset": [{}]},
    )
    groups, names = trainer.create_optimizer().param_groups, {id(p): n for n, p in trainer.model.named_parameters()}
    found = {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert {name: lr for name, (lr, _) in found.items()} == rates
    assert all(decay == (0.0 if "bias" in name or "LayerNorm" in name else 0.1) for name, (_, decay) in found.items())


def test_the_card_names_the_data_and_publishes_scores_only():
    first, spanish = (
        squad.SquadExample("1", text, "c", ()) for text in ("In what country is Normandy located?", "¿Qué?")
    )
    hub, own = squad.dataset_card("2.0", [first] * 11_873), squad.dataset_card("1.1", [first] * 300)
    assert squad.dataset_card("2.0", [spanish] * 11_873)["hub_id"] is None  # a translation
    assert (hub["name"], hub["hub_id"], hub["task_type"]) == ("SQuAD 2.0", "rajpurkar/squad_v2", "question-answering")
    assert own["hub_id"] is None and list(own["hub_metrics"]) == ["exact_match", "f1"]
    assert not [name for name in hub["hub_metrics"] if "total" in name or "thresh" in name]


def test_the_joint_model_saves_a_stock_checkpoint_and_loads_itself(config, tmp_path):
    config = RobertaConfig(**config.to_dict())
    model = answerability.joint_class(config)(config).eval()
    model.save_pretrained(tmp_path)
    stock, info = AutoModelForQuestionAnswering.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and set(info["unexpected_keys"]) == CLASSIFIER
    assert model.config.architectures == [type(stock).__name__]
    again = type(model).from_pretrained(tmp_path)
    batch = {"input_ids": torch.randint(4, config.vocab_size, (3, 9)), "attention_mask": torch.ones(3, 9).long()}
    with torch.no_grad():
        wanted, found, plain = model(**batch), again(**batch), stock(**batch)
    torch.testing.assert_close(found.answerable, wanted.answerable)  # the loaded weights have another alignment
    assert found.answerable.shape == (3,)
    assert found.start_logits.equal(wanted.start_logits) and plain.end_logits.equal(wanted.end_logits)


@pytest.mark.parametrize(
    "config",
    [
        LukeConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=40, entity_vocab_size=4),
        XLNetConfig(d_model=32, n_layer=1, n_head=2, d_inner=64, vocab_size=40),
    ],
    ids=["luke", "xlnet"],
)
def test_the_joint_model_of_families_with_further_outputs(config):
    """LUKE has states of entities, XLNet has memories, and attends in both directions."""
    model = answerability.joint_class(config)(config).eval()
    output = model(input_ids=torch.randint(4, 40, (3, 9)), attention_mask=torch.ones(3, 9).long())
    assert list(output) == ["start_logits", "end_logits", "answerable"] and output.answerable.shape == (3,)


def test_losses_by_hand():
    """Three windows: the second lacks the answer, the third is padded."""
    torch.manual_seed(0)
    start, end, judged = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3)
    first, last, lengths = [1, 0, 2], [2, 0, 2], (4, 4, 3)
    output = types.SimpleNamespace(start_logits=start, end_logits=end)
    of_spans = [
        -(torch.log_softmax(start[n, :k], 0)[first[n]] + torch.log_softmax(end[n, :k], 0)[last[n]]).item() / 2
        for n, k in enumerate(lengths)
    ]
    batch = {"attention_mask": (torch.arange(4) < torch.tensor(lengths)[:, None]).long()}
    batch |= {"labels": torch.tensor([1, 0, 1])}
    batch |= {"start_positions": torch.tensor(first), "end_positions": torch.tensor(last)}
    total, scores = finetune_squad.span_loss(lambda **_: output, dict(batch))
    assert total.item() == pytest.approx(sum(of_spans), rel=1e-5) and scores.shape == (3, 4, 2)
    output = answerability.JointOutput(start_logits=start, end_logits=end, answerable=judged)
    total, scores = finetune_squad.joint_loss(lambda **_: output, dict(batch))
    of_classifier = -torch.log(torch.sigmoid(judged * torch.tensor([1, -1, 1]))).sum().item()
    assert total.item() == pytest.approx(of_spans[0] + of_spans[2] + of_classifier, rel=1e-5)
    assert scores.shape == (3, 4, 3) and scores[:, 3, 2].equal(judged)


# Bad input


def write(path, made, version_2=True):
    path.write_text(json.dumps(official(made, version_2)))
    return path


def test_data_of_the_other_version_are_refused(data_dir):
    with pytest.raises(InputError, match=r"10 questions have no answer .*1-0-c.*v2.0.yaml"):
        squad_files.read_file(data_dir / "train-v2.0.json", version_2=False)
    with pytest.raises(InputError, match=r"none of 1 questions has an answer"):
        squad_files.check_questions([squad.SquadExample("x", "Who?", "The river.", ())], "here", version_2=True)
    with pytest.raises(InputError, match=r"all 20 questions have answers.*v1.1.yaml"):
        squad_files.read_file(data_dir / "train-v1.1.json", version_2=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": "1-0-b"}, "duplicate question id 1-0-b"),
        ({"id": 7.5}, "question number 1 needs an id"),
        ({"question": "  "}, "question 1-0-a: context, question and answers must"),
        ({"question": "half \ud83d"}, "1-0-a: .* Unicode strings"),
        ({"answers": []}, "question 1-0-a has 0 answers, which contradicts is_impossible=False"),
        ({"is_impossible": True}, "question 1-0-a has 2 answers, which contradicts is_impossible=True"),
        ({"answers": [{"text": "x"}]}, "1-0-a is not as in SQuAD"),
        ({"answers": [{"text": "x", "answer_start": 4.5}]}, "1-0-a: answer_start=4.5 must be"),
        ({"answers": [{"text": "x", "answer_start": -1}]}, "1-0-a: answer_start=-1 must be"),
        ({"answers": [{"text": 5, "answer_start": 0}]}, "1-0-a: context, question and answers must"),
        ({"answers": {"text": ["x"], "answer_start": []}}, "1-0-a is not as in SQuAD"),
    ],
)
def test_bad_questions_are_named(tmp_path, change, said):
    made = paragraphs(2, seed=1)
    made[0][1][0].update(change)
    with pytest.raises(InputError, match=said):
        squad_files.read_file(write(tmp_path / "x.json", made), version_2=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("{}", "is not in SQuAD's"),
        ('[{"question": "Who?"}]', "is not in SQuAD's"),
        ('{"id": 1}\n{"id": 2}', "is not in SQuAD's"),
        ('{"data": []}', "none of 0 questions has an answer"),
    ],
)
def test_bad_files_are_named(tmp_path, content, said):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(InputError, match=f"bad.json.* {said}"):
        squad_files.read_file(tmp_path / "bad.json", version_2=True)


@pytest.mark.parametrize("lines", [False, True])
def test_shapes_of_public_files(tmp_path, lines):
    """Without titles (ids are numbers), without paragraphs, and rows as in the Hub's tables, below "data" or one per
    line."""
    made = paragraphs(4, seed=1)
    wanted = squad_files.read_file(write(tmp_path / "x.json", made), version_2=True)
    parts = [{"context": context, "qas": entries, "document_id": 1} for context, entries in made]
    rows = [{**row, "context": context} for context, entries in made for row in entries]
    tables = [
        {**row, "answers": {key: [a[key] for a in row["answers"]] for key in ("text", "answer_start")}} for row in rows
    ]
    for shape in ([{"paragraphs": [part]} for part in parts], parts, rows, tables):
        text = "".join(json.dumps(row) + "\n" for row in shape) if lines else json.dumps({"data": shape})
        (tmp_path / "x.json").write_text(text)
        assert squad_files.read_file(tmp_path / "x.json", version_2=True) == wanted
    (tmp_path / "x.json").write_text(json.dumps(tables[0]) + "\n")  # JSON lines with one line
    assert squad_files.read_file(tmp_path / "x.json", version_2=None) == wanted[:1]
    (tmp_path / "x.json").write_text(json.dumps([{**row, "id": n} for n, row in enumerate(rows)]))
    assert [q.id for q in squad_files.read_file(tmp_path / "x.json", None)] == [str(n) for n in range(len(rows))]


def test_misplaced_answers_are_left_out_and_named(flags, tmp_path, capsys):
    made = paragraphs(10, seed=1)
    made[3][1][0]["answers"][0]["answer_start"] += 1
    made[4][1][0]["answers"].append({"text": "elsewhere", "answer_start": 0})  # only the first is trained on
    write(tmp_path / "train-v2.0.json", made)
    held_out = paragraphs(4, seed=2)
    for context, (first, *_) in held_out[:2]:
        first["answers"] = [{"text": context.partition(".")[0], "answer_start": 0}]
    write(tmp_path / "dev-v2.0.json", held_out)
    finetune_squad.main(flags("2.0", "--data_dir", tmp_path, "--max_answer_length", 5))
    assert "Dropped     1 training questions" in (said := capsys.readouterr().err) and "1-3-a" in said
    assert "2 validation questions with a first answer longer than max_answer_length=5 tokens" in said
    assert record_of(tmp_path, "2.0")["features"]["left_out_misplaced"] == 1
    for _, entries in made:
        for row in entries:
            row["answers"] = [{**answer, "answer_start": 10**6} for answer in row["answers"]]
    write(tmp_path / "train-v2.0.json", made)
    with pytest.raises(InputError, match="no answer is at its answer_start"):
        finetune_squad.main(flags("2.0", "--data_dir", tmp_path))


BAD = {
    "prediction": (["--do_predict"], "do_predict has no effect: predictions.json has"),
    "stride": (["--doc_stride", 60], "leaves 40 tokens .* --doc_stride 16 --max_query_length 8 fits$"),
    "negative stride": (["--doc_stride", -1], "doc_stride=-1"),
    "answer length": (["--max_answer_length", 0], "max_answer_length=0 must be at least 1"),
    "two sources": (["--train_file", "x.json"], "data_dir=.* exclude each other"),
    "no data": (["--data_dir", "/nowhere"], "/nowhere/train-v1.1.json is missing"),
    "decay": (["--layer_decay", 1.5], "layer_decay=1.5"),
    "decay of lamb": (["--layer_decay", 0.5, "--optim", "lamb"], "with Trainer's own optimizers, not lamb"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, flags):
    others, said = BAD[case]
    with pytest.raises(InputError, match=said):
        finetune_squad.main(flags("1.1", *others))


# Presets and rates


def test_presets_are_the_papers(root):
    """Table 10's column for SQuAD, for both versions."""
    presets = sorted((root / "presets" / "squad").glob("*.yaml"))
    assert [path.stem for path in presets] == ["v1.1", "v2.0"]
    for path in presets:
        (args, training), _ = finetune_squad.read_arguments(["--config", str(path), "--use_cpu"])
        assert f"v{finetune_squad.version(args)}" == path.stem and args.seeds == [1, 2, 3, 4, 5]
        assert (training.learning_rate, args.global_batch_size, training.num_train_epochs) == (1.5e-5, 48, 2)
        assert (training.weight_decay, training.warmup_steps, training.lr_scheduler_type) == (0.01, 0.06, "linear")
        assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-6)
        assert training.max_grad_norm == 0 and args.max_seq_length == 512 and args.layer_decay == 1


def test_the_preset_follows_the_version():
    for word in ("true", "t", "yes", "Y", "1", "false", "no", "0"):
        preset = finetune_squad.default_preset(["--version_2_with_negative", word])
        assert (preset == finetune_squad.VERSION_2) == string_to_bool(word), word


def test_models_and_tokenizers_whose_first_token_cannot_stand_for_no_answer(tokenizer):
    for config in (BartConfig(), Qwen2Config()):
        with pytest.raises(
            InputError, match=f"which attends to no other in a '{config.model_type}' model: use --no_answer null_score"
        ):
            answerability.joint_class(config)
    bare = PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(tokenizer.backend_tokenizer), pad_token="<pad>")
    bare.backend_tokenizer.post_processor = processors.Sequence([])
    question = squad.SquadExample("q", "Where?", "Paris is far.", [])
    assert squad.make_windows([question], bare, 32, 8, 16).features
    with pytest.raises(InputError, match=r"passage_first=true needs a special token"):
        squad.make_windows([question], bare, 32, 8, 16, passage_first=True)
