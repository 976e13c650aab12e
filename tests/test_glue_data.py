"""GLUE's tables, splits and features; refused input."""

import json
import types
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import PLACES
from glue_runs import data_dir, flags, special, wsc_dir  # noqa: F401
from official_files import PAIR
from transformers import AlbertConfig

import finetune_glue
from results import report
from roberta_recipe.errors import InputError
from roberta_recipe.tasks import glue, protocol, qnli_ranking, summaries, wsc
from roberta_recipe.tasks.glue import AX, TASKS
from roberta_recipe.training import finetune_trainer


def test_the_pronoun_and_the_parser_are_in_the_fingerprint(flags, wsc_dir, monkeypatch):
    """The position of the pronoun and the parser's phrases, which the texts do not determine."""
    seen = []
    monkeypatch.setattr(protocol, "run_all", lambda argv, runs, job, *_: seen.append((job.inputs, job.test_hash)) or [])
    monkeypatch.setattr(protocol, "finish", lambda *_: None)
    monkeypatch.setattr(summaries, "table", lambda *_: "")
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


def test_the_hubs_columns(monkeypatch):
    """On the Hub, labels are numbers, -1 in unlabelled test sets."""
    rows = datasets.Dataset.from_dict({"premise": ["a", "c"], "hypothesis": ["b", "d"], "label": [2, 0], "idx": [0, 1]})
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or rows)
    examples = glue.read_split(TASKS["mnli"], "mnli", "validation_mismatched", None)
    assert examples.texts == [("a", "b"), ("c", "d")] and examples.labels == [2, 0]
    assert asked == [(("nyu-mll/glue", "mnli"), {"split": "validation_mismatched"})]
    assert glue.read_split(AX, "ax", "test", None).labels == [2, 0]
    rows = rows.map(lambda row: {"label": -1})
    assert glue.read_split(AX, "ax", "test", None).labels is None


def test_batches_are_of_like_length_and_depend_on_nothing_else():
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 200, 1003).tolist()
    sampler = finetune_trainer.LengthGroupedSampler(lengths, 8, seed=1)
    first = list(sampler)
    assert len(first) == len(sampler) == 1000 == len(set(first)) and first == list(sampler)
    sampler.epoch = 1
    second = list(sampler)
    assert set(second) != set(first)  # another remainder is dropped
    means = [np.array(lengths)[np.array(epoch)].reshape(-1, 8).mean(1) for epoch in (first, second)]
    assert abs(np.corrcoef(*means)[0, 1]) < 0.3  # and long batches are elsewhere
    batches = np.array(lengths)[np.array(first)].reshape(-1, 8)
    waste = 1 - batches.sum() / (8 * batches.max(1)).sum()
    assert waste < 0.05 < 0.3 < 1 - np.mean(lengths) / max(lengths)
    assert np.corrcoef(batches.mean(1), np.arange(125))[0, 1] < 0.3  # long batches are not last
    with pytest.raises(InputError, match="global_batch_size=8 is more than the 7 training examples"):
        finetune_trainer.LengthGroupedSampler(lengths[:7], 8, seed=1)


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


def test_what_is_cut_is_counted(tokenizer, monkeypatch):
    """The longer text of a pair is truncated; every example is a single feature."""
    long, short = " ".join(PLACES), PLACES[0]
    examples = glue.Examples([(short, short), (long, short), (short, long), (long, long)], [0, 1, 0, 0])
    args = finetune_glue.GlueArguments(max_seq_length=24)

    def compact(encoded, row):
        assert len(encoded["input_ids"]) == 4  # not each window of one text with each window of the other
        return finetune_trainer.compact(encoded, row)

    monkeypatch.setattr(finetune_glue, "compact", compact)
    features, cut = finetune_glue.make_features(args, TASKS["rte"], {"train": examples}, tokenizer)
    lengths = [len(feature["input_ids"]) for feature in features["train"]]
    assert lengths[0] < 24 and lengths[1:] == [24, 24, 24] and cut == {"cut to 24 in train": 3}
    whole = tokenizer(short).input_ids
    assert list(features["train"][1]["input_ids"][-len(whole) :]) == [tokenizer.eos_token_id, *whole[1:]]
    assert [feature["labels"] for feature in features["train"]] == [0, 1, 0, 0]


def test_duplicates_are_counted():
    train = glue.Examples([("The cat", "A dog"), ("B", "C"), ("B ", "c")], [0, 1, 0])
    validation = glue.Examples([("the  CAT", "a dog"), ("b", "c"), ("x", "y"), ("A dog", "The cat")], [1, 0, 0, 0])
    assert glue.duplicates(train, validation) == {"in_train": 2, "with_the_same_label": 1}


def test_quotes_tabs_and_line_ends(tmp_path):
    """Quoting is off, \r\n ends a line, other Unicode line separators do not, a byte order mark is no part of a
    name."""
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
    "unknown task": (["--task_name", "snli"], "task_name=snli is not a GLUE task: cola, sst2, mrpc, stsb, qqp, mnli"),
    "no model": (["--model_name_or_path", "nowhere/at-all"], "nowhere/at-all"),
    "no data": (["--data_dir", "/nowhere"], "/nowhere/RTE/train.tsv is missing"),
    "other rows": (["--other_rows", "false"], "rte, train: 24 rows, but GLUE's has 2,490"),
    "no example": (["--max_train_samples", "0"], "max_train_samples=0 must be above 0"),
    "length": (["--max_seq_length", "65"], "max_seq_length=65 is more than the 64 positions"),
    "smoothing": (["--label_smoothing_factor", "1"], "label_smoothing_factor=1.0 must be below 1"),
    "smoothing of scores": (["--task_name", "stsb", "--label_smoothing_factor", "0.1"], "is for classification only"),
    "another metric": (["--metric_for_best_model", "f1"], "metric_for_best_model=f1 .* the highest accuracy"),
    "micro-batch": (["--global_batch_size", "4"], "per_device_train_batch_size=8 is more than global_batch_size=4"),
    "seeds": (["--seeds", "1", "1"], r"seeds=\[1, 1\] must be different"),
    "one seed's checkpoint": (["--resume_from_checkpoint", "r/checkpoint-9"], "None, not r/checkpoint-9: it belongs"),
    "seed": (["--seed", "42", "--seeds", "1", "2"], "seed=42 has no effect with seeds; use --seeds 42"),
    "no evaluation": (["--eval_strategy", "no"], "--eval_strategy.*invalid choice: 'no'"),
    "ranking": (["--qnli_form", "ranking"], "qnli_form=ranking has no effect on task_name=rte"),
    "wnli without schemas": (["--task_name", "wnli"], "name the folder of its train.jsonl"),
    "head of wnli": (
        ["--task_name", "wnli", "--wsc_dir", "wsc", "--head_dropout", "0"],
        "head_dropout=0.0 has no effect",
    ),
    "shrinking batch": (
        ["--auto_find_batch_size"],
        "auto_find_batch_size must stay False, not True: Trainer would shrink",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, flags):
    others, said = BAD[case]
    with pytest.raises(InputError, match=said):
        finetune_glue.main(flags("rte", *others))


@pytest.mark.parametrize(
    ("name", "lines", "said"),
    [
        ("rte", b"0\tcaf\xe9\tb\tentailment\n", "dev.tsv is not UTF-8 text"),
        ("rte", b"0\ta\tb\tentailment\n1\tonly two\n", "dev.tsv, line 3: 2 columns instead of 4"),
        ("rte", b"0\ta\tb\tmaybe\n", "line 2: label 'maybe' is not one of entailment, not_entailment"),
        ("stsb", b"0\ta\tb\t5.5\n", "line 2: label '5.5' is not one of the scores from 0 to 5"),
    ],
)
def test_bad_rows_are_named(tmp_path, name, lines, said):
    (tmp_path / TASKS[name].folder).mkdir()
    header = f"index\tsentence1\tsentence2\t{TASKS[name].label_column}\n".encode()
    (tmp_path / TASKS[name].folder / "dev.tsv").write_bytes(header + lines)
    with pytest.raises(InputError, match=said):
        glue.read_split(TASKS[name], name, "validation", str(tmp_path))


def test_presets_are_fairseqs(root):
    """The table of examples/roberta/README.glue.md in fairseq 0.9: learning rate, batch, updates, warm-up."""
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
    presets = sorted(path for path in (root / "presets" / "glue").glob("*.yaml") if path.stem != "own")
    assert {path.stem for path in presets} == set(TASKS) and len(presets) == 9
    for path in presets:
        (args, training), _ = finetune_glue.read_arguments(["--config", str(path), "--use_cpu"])
        assert args.task_name == path.stem and args.seeds == [1, 2, 3, 4, 5]
        assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-6)
        assert training.max_grad_norm == 0 and training.weight_decay == (0.01 if path.stem == "wnli" else 0.1)
        got = (training.learning_rate, args.global_batch_size, training.max_steps)
        *wanted, warmup = table.get(path.stem, (2e-5, 32, 2000, 250))
        assert got == tuple(wanted) and training.warmup_steps < 1
        assert training.get_warmup_steps(training.max_steps) - warmup in (0, 1, 2)  # fairseq: 5.95% to 6%
        assert args.head_dropout == (None if path.stem == "wnli" else 0.0)


def test_the_card_names_glues_data_only_for_glues_rows():
    whole, others = glue.dataset_card("stsb", TASKS["stsb"], False), glue.dataset_card("stsb", TASKS["stsb"], True)
    assert (whole["name"], whole["hub_id"], whole["hub_config"]) == ("GLUE stsb", "nyu-mll/glue", "stsb")
    assert whole["hub_metrics"] == {"pearson": "pearsonr", "spearman": "spearmanr"}
    assert (others["name"], others["hub_id"], others["hub_config"]) == ("stsb (other_rows)", None, None)
    mnli = glue.dataset_card("mnli", TASKS["mnli"], False)
    assert mnli["split"] == "validation_matched" and list(mnli["hub_metrics"]) == ["accuracy", "accuracy_mismatched"]
    wnli = glue.dataset_card("wnli", TASKS["wnli"], False)  # its scores are those of WSC's validation set
    assert (wnli["hub_id"], wnli["hub_config"]) == ("aps/super_glue", "wsc") and "SuperGLUE's WSC" in wnli["note"]
    # a preset for a new task, whatever the task's name
    for name in ("mine", "rte"):
        own = glue.dataset_card(name, glue.Task("my_task", PAIR, labels=("no", "yes")), False)
        assert (own["name"], own["hub_id"], own["hub_config"], own["note"]) == (name, None, None, "")


def test_a_task_that_is_added_to_the_table_needs_no_preset_and_is_not_glues(monkeypatch):
    """As in CONTRIBUTING.md."""
    rows = report.paper_rows()
    monkeypatch.setitem(TASKS, "boolq", glue.Task("BoolQ", ("question", "passage"), labels=("0", "1")))
    (args, _), _ = finetune_glue.read_arguments(["--task_name", "boolq", "--data_dir", "data", "--use_cpu"])
    assert (args.task_name, args.data_dir, args.global_batch_size) == ("boolq", "data", 32)
    card = glue.dataset_card("boolq", TASKS["boolq"], False)
    assert (card["name"], card["hub_id"], card["hub_config"]) == ("boolq", None, None)
    assert report.paper_rows() == rows


def test_segment_ids_where_the_model_has_them(wordpiece, tmp_path):
    """ALBERT's tokenizer does not name them among its model inputs."""
    wordpiece.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    names = {"model_input_names": ["input_ids", "attention_mask"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | names))
    for rows in (2, 1):
        AlbertConfig(vocab_size=400, type_vocab_size=rows).save_pretrained(tmp_path)
        tokenizer = protocol.load_tokenizer(finetune_glue.GlueArguments(model_name_or_path=str(tmp_path)))
        assert ("token_type_ids" in tokenizer("a", "b")) == (rows == 2)


def test_tokenizers_that_do_not_fit_the_model(flags, wordpiece, tmp_path, monkeypatch):
    """BERT's token types are omitted for a model without them; a vocabulary larger than the model's and a slow
    tokenizer are refused."""
    wordpiece.save_pretrained(tmp_path / "wordpiece")
    assert 1 in wordpiece("a", "b")["token_type_ids"]
    argv = flags("rte", "--tokenizer_name", tmp_path / "wordpiece", "--random_weights", True, "--max_steps", 1)
    summary = finetune_glue.main(argv)
    assert summary["task"] == "rte" and wordpiece.pad_token_id == 0
    saved = json.loads(Path(summary["settings"][0]["best_run"], "best", "config.json").read_text())
    assert saved["pad_token_id"] == 1  # positions of a loaded model begin where those of training did
    config = Path(argv[argv.index("--model_name_or_path") + 1], "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": len(wordpiece) - 1}))
    with pytest.raises(InputError, match=r"has 193 tokens, the model .* 192: name the model"):
        finetune_glue.main(argv)
    monkeypatch.setattr(type(wordpiece), "is_fast", False)
    with pytest.raises(InputError, match=r"needs the tokenizer\.json of a fast tokenizer"):
        finetune_glue.main(argv)
