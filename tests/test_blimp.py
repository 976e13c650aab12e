"""BLiMP: scores equal a plain loop over masks, ties count half, the paradigm table is the official one, and scoring
during a run does not change the run."""

import hashlib
import json
import re

import numpy as np
import pytest
import torch
from conftest import end_well
from hypothesis import given, settings
from hypothesis import strategies as st
from official_files import blimp_rows, write_blimp, write_paradigm
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM

import train_mlm
from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.publishing import blimp_table, hub
from roberta_recipe.record import read_record
from roberta_recipe.tasks import blimp, pseudo_likelihood
from roberta_recipe.training.mlm_trainer import MlmTrainer
from tools import blimp as tool

SENTENCES = [
    "The cat sees a small dog in the garden.",
    "The cats sees a small dog in the garden.",
    "The cat sees a small dog in the garden, doesn't it?",
    "Every child's old friend remembers the red boat.",
    "Whom does the teacher-to-be forget?",
    "My friend.",
    "No teacher paints this house at night.",
    "This house paints no teacher at night.",
    "A unseenword follows the river.",
    "My friend can't hear herself.",
]


@pytest.fixture
def data_dir(tmp_path):
    """All 67 paradigms, with two pairs each."""
    write_blimp(tmp_path / "blimp", pairs=2)
    return tmp_path / "blimp"


@pytest.fixture
def bert(wordpiece):
    """A BERT with random weights, large enough for distinct scores."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    return larger(BertForMaskedLM(BertConfig(vocab_size=len(wordpiece), max_position_embeddings=80, **shape)))


def larger(model):
    for parameter in model.parameters():
        parameter.data.mul_(6)
    return model.eval()


def plain_loop(model, tokenizer, sentence, words=None):
    """Reference implementation: a full forward per mask; with `words` (an index per token), the later tokens of a word
    are masked too."""
    encoded = tokenizer(sentence, return_special_tokens_mask=True)
    ids, special, total = encoded["input_ids"], encoded["special_tokens_mask"], 0.0
    for position, token in enumerate(ids):
        if special[position]:
            continue
        masked = list(ids)
        masked[position] = tokenizer.mask_token_id
        for later in range(position + 1, len(ids)):
            if words and words[later] == words[position]:
                masked[later] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = model(torch.tensor([masked])).logits[0, position].double()
        total += float(torch.log_softmax(logits, -1)[token])
    return total


def check_scores(model, tokenizer, sentences):
    scores = pseudo_likelihood.log_likelihoods(model, tokenizer, sentences)
    for number, sentence in enumerate(sentences):
        word_ids = tokenizer(sentence).word_ids()
        assert scores[0, number] == pytest.approx(plain_loop(model, tokenizer, sentence), abs=1e-3)
        assert scores[1, number] == pytest.approx(plain_loop(model, tokenizer, sentence, word_ids), abs=1e-3)
    return scores


# Scores


def test_scores_equal_the_plain_loop(model_dir, tokenizer, bert, wordpiece):
    """Three families, two tokenizers, both methods."""
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 80}
    distilbert = larger(DistilBertForMaskedLM(DistilBertConfig(vocab_size=len(wordpiece), **shape)))
    roberta = larger(AutoModelForMaskedLM.from_pretrained(model_dir))
    for model, own in ((roberta, tokenizer), (bert, wordpiece), (distilbert, wordpiece)):
        scores = check_scores(model, own, SENTENCES)
        assert np.ptp(scores[0]) > 10 and (np.abs(scores[0] - scores[1]) > 0.01).sum() > 5
        alone = pseudo_likelihood.log_likelihoods(model, own, SENTENCES, ("within_word",))
        assert not alone[0].any() and alone[1] == pytest.approx(scores[1], abs=1e-4)


@settings(max_examples=15)
@given(st.lists(st.text("abcdeXYZ 01.,'-?", min_size=1, max_size=20).filter(str.strip), min_size=1, max_size=6))
def test_scores_of_random_sentences_equal_the_plain_loop(wordpiece, sentences):
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = larger(BertForMaskedLM(BertConfig(vocab_size=len(wordpiece), max_position_embeddings=80, **shape)))
    check_scores(model, wordpiece, sentences)


def test_a_word_is_a_piece_of_the_pre_tokenizer_and_spans_no_space(tokenizer):
    (group,) = pseudo_likelihood.encode(tokenizer, ["She can't see."])
    tokens = tokenizer.convert_ids_to_tokens(group.ids[0])
    words: dict[int, str] = {}
    for token, word in zip(tokens, group.words[0].tolist(), strict=True):
        words[word] = words.get(word, "") + token
    assert list(words.values()) == ["<s></s>", "She", "Ġcan", "'t", "Ġsee", "."]
    # word ids that never change, as of a pre-tokenizer that does not split
    offsets = [(0, 0), (0, 3), (4, 6), (6, 7), (0, 0)]
    assert pseudo_likelihood._words("She see.", [None, 0, 0, 0, None], offsets, [1, 0, 0, 0, 1]) == [-1, 1, 2, 2, -1]


def test_processes_share_the_sentences(model_dir, tokenizer, monkeypatch):
    monkeypatch.setitem(pseudo_likelihood._BATCH_TOKENS, "cpu", 64)
    model, calls = AutoModelForMaskedLM.from_pretrained(model_dir).eval(), []

    def call(input_ids):
        calls.append(len(input_ids))
        return model(input_ids=input_ids)

    whole = pseudo_likelihood.log_likelihoods(model, tokenizer, SENTENCES, call=call)
    shares, counts = [], []
    for process in range(3):
        calls.clear()
        shares.append(
            pseudo_likelihood.log_likelihoods(model, tokenizer, SENTENCES, call=call, process=process, processes=3)
        )
        counts.append(len(calls))
    assert sum(shares) == pytest.approx(whole, abs=1e-4) and len(set(counts)) == 1 < counts[0]


@pytest.mark.parametrize("sentence", ["A <mask> here.", "  ", "long " * 80])
def test_sentences_that_cannot_be_scored(tokenizer, sentence):
    with pytest.raises(InputError, match="cannot score the sentence"):
        pseudo_likelihood.encode(tokenizer, ["Fine.", sentence.strip()], max_length=64)


# Pairs


def test_the_table_of_paradigms():
    assert len(blimp.PHENOMENON) == sum(map(len, blimp.PARADIGMS.values())) == 67 and len(blimp.PARADIGMS) == 12
    sizes = {name: len(uids) for name, uids in blimp.PARADIGMS.items()}
    assert (sizes["argument_structure"], sizes["island_effects"], sizes["ellipsis"]) == (9, 8, 2)
    # of the official files' pairs of UID and linguistics_term, with s-selection as argument_structure
    assert hashlib.sha256(json.dumps(sorted(blimp.PHENOMENON.items())).encode()).hexdigest() == (
        "1ac462923f660c37d299175ad7c2833a994e12f1603dc93fa15256d114f2abd0"
    )


def test_pairs_are_the_first_of_each_paradigm(data_dir, tmp_path):
    whole, first = blimp.read(str(data_dir)), blimp.read(str(data_dir), 1)
    assert list(whole.counts) == list(blimp.PHENOMENON) and set(whole.counts.values()) == {2}
    assert first.good == whole.good[::2] and first.bad == whole.bad[::2]
    assert whole.partial == "2 pairs a paradigm"
    (data_dir / "passive_1.jsonl").unlink()
    write_paradigm(data_dir, "passive_2", 3)
    assert blimp.read(str(data_dir)).partial == "2 to 3 pairs a paradigm; 66 of 67 paradigms (without passive_1)"
    assert blimp.Pairs([], [], dict.fromkeys(blimp.PHENOMENON, 1000)).partial == ""


def test_bad_pairs(tmp_path, data_dir):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "passive_1.jsonl").touch()
    with pytest.raises(InputError, match=r"begun has no pair of sentences"):
        blimp.read(str(tmp_path / "begun"))
    with pytest.raises(InputError, match=r"absent has no \*.jsonl"):
        blimp.read(str(tmp_path / "absent"))
    with pytest.raises(InputError, match="pairs=0 must be at least 1"):
        blimp.read(str(data_dir), 0)
    (row,) = blimp_rows("passive_1", 1)
    path = data_dir / "passive_1.jsonl"
    for change, said in (
        ({"sentence_good": None}, "is not a row of BLiMP"),
        ({"sentence_bad": " "}, "has an empty sentence"),
        ({"UID": "pasive_1"}, "in none of BLiMP's paradigms"),
    ):
        path.write_text(json.dumps(row | change))
        with pytest.raises(InputError, match=re.escape(f"{path}, line 1") + ".*" + re.escape(said)):
            blimp.read(str(data_dir))
    path.write_text("{")
    with pytest.raises(InputError, match="line 1 is not JSON"):
        blimp.read(str(data_dir))


# Accuracies


def test_ties_count_half():
    pairs = blimp.Pairs(["a", "b", "c", "d"], ["e", "f", "g", "d"], {"passive_1": 3, "wh_island": 1})
    of = {"a": -1.0, "b": -2.0, "c": -4.0, "d": -5.0, "e": -3.0, "f": -2.0 - 1e-5, "g": -3.0}
    found = blimp.outcomes(pairs, [of[sentence] for sentence in pairs.sentences])
    assert {uid: right.tolist() for uid, right in found.items()} == {"passive_1": [1, 0.5, 0], "wh_island": [0.5]}
    assert blimp.accuracies(found)["ties"] == 2


@settings(max_examples=30)
@given(st.data())
def test_means_of_random_outcomes(data):
    """Compared with plain sums, for any subset of the paradigms."""
    uids = data.draw(st.lists(st.sampled_from(sorted(blimp.PHENOMENON)), unique=True, min_size=1, max_size=9))
    of = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=8)
    found = {uid: np.array(data.draw(of)) for uid in uids}
    scores = blimp.accuracies(found, samples=200)
    means = {uid: sum(right) / len(right) for uid, right in found.items()}
    groups = {}
    for uid, mean in means.items():
        groups.setdefault(blimp.PHENOMENON[uid], []).append(mean)
    of_phenomena = [sum(group) / len(group) for group in groups.values()]
    assert scores["mean_of_paradigms"] == pytest.approx(sum(means.values()) / len(means))
    assert scores["mean_of_phenomena"] == pytest.approx(sum(of_phenomena) / len(of_phenomena))
    low, high = scores["mean_of_paradigms_interval"]
    assert 0 <= low <= high <= 1 and scores == blimp.accuracies(found, samples=200)


# Command line


def test_the_command_line(model_dir, data_dir, tmp_path, capsys):
    argv = ["--model_name_or_path", model_dir, "--data_dir", str(data_dir), "--random_seeds", "2"]
    record = tool.main(argv)
    shown = capsys.readouterr().out
    again = tool.main([*argv, "--output_dir", str(tmp_path / "other")])
    timed = {"wall_clock_s", "hardware"}
    assert {k: v for k, v in again.items() if k not in timed} == {k: v for k, v in record.items() if k not in timed}
    assert read_record(tmp_path / "model" / "blimp.json", ("scores",), "") == record
    assert (tmp_path / "other" / "blimp.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path) not in json.dumps(record) and record["pairs"] == 134
    assert list(record["scores"]) == ["pll", "within_word"] and len(record["random_weights"]) == 2
    assert record["random_weights"][0] != record["random_weights"][1]
    assert "| argument_structure |" in shown and "| GPT-2 | published: Warstadt et al. 2020" in shown
    assert "134 (partial: 2 pairs a paradigm)" in shown and "2 seeds)" in shown and "Ties, which count half" in shown
    less = [*argv[:-1], "0", "--methods", "within_word", "--pairs", "1"]
    for fewer in (less, [*argv[:-1], "1"]):
        with pytest.raises(InputError, match=r"134 pairs by pll, within_word, with 2 controls, more than .*: name an"):
            tool.main(fewer)
    one = tool.main([*less, "--output_dir", str(tmp_path / "less")])
    assert list(one["scores"]) == ["within_word"] and one["pairs"] == 67 and not one["random_weights"]
    assert "| not run |" in capsys.readouterr().out
    other = ["pll" if word == "within_word" else word for word in less]
    with pytest.raises(InputError, match=r"less/blimp.json has 67 pairs by within_word, with 0 controls, more"):
        tool.main([*other, "--output_dir", str(tmp_path / "less")])


def test_the_model_card_has_the_scores(preset, data_dir, tmp_path):
    train_mlm.main(["--config", preset, "--max_steps", "1"])
    tool.main(["--model_name_or_path", str(tmp_path / "run"), "--data_dir", str(data_dir), "--random_seeds", "0"])
    assert durable.damage(tmp_path / "run") is None  # the model's manifest still holds
    published = hub.prepare("me/mine", tmp_path / "run")
    shown = (published / "README.md").read_text()
    assert (published / "blimp.json").is_file() and "| mine | pseudo-log-likelihood |" in shown
    assert blimp_table.EXPLANATION in shown


# While training


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_run_is_the_same_run_with_and_without(dropout, data_dir, tmp_path, capsys):
    """With dropout. The scores are in log, record and on stderr, and in fp32 although training is in bf16."""
    flags = ["--config", dropout, "--save_strategy", "steps", "--save_steps", "2", "--bf16", "true"]
    flags += ["--eval_strategy", "steps", "--eval_steps", "2", "--save_total_limit", "1"]
    plain = train_mlm.main([*flags, "--output_dir", str(tmp_path / "plain")])
    capsys.readouterr()
    with_blimp = [*flags, "--output_dir", str(tmp_path / "with"), "--blimp_dir", str(data_dir)]
    scored = train_mlm.main(with_blimp)
    said = capsys.readouterr()
    for name in ("state_digests", "digest", "loss_at_steps"):
        assert scored[name] == plain[name], name
    assert scored["fingerprint"] == plain["fingerprint"]
    assert len(re.findall(r"^step \d/4  validation  loss .*  blimp \d+\.\d%", said.err, re.M)) == 2
    assert "BLiMP       134 pairs, 67 of 67 paradigms, at each evaluation" in said.err and "\nBLiMP " in said.out
    points = scored["blimp_at_steps"]
    assert [step for step, _ in points] == [2, 4] and scored["metrics"]["eval_blimp"] == points[-1][1]
    assert [entry["eval_blimp"] for entry in log_of(tmp_path / "with") if "eval_blimp" in entry] == [
        score for _, score in points
    ]
    assert plain["blimp_at_steps"] == [] and "eval_blimp" not in plain["metrics"]
    # the last figure is that of the finished model alone, by the command, in fp32
    found = tool.main(
        ["--model_name_or_path", str(tmp_path / "with"), "--data_dir", str(data_dir), "--random_seeds", "0"]
    )
    assert found["scores"]["pll"]["mean_of_paradigms"] == points[-1][1]


def test_bad_pairs_are_refused_before_training(preset, data_dir, monkeypatch, tmp_path):
    monkeypatch.setattr(MlmTrainer, "train", lambda *a, **k: pytest.fail("it trained"))
    with pytest.raises(InputError, match=r"absent has no \*.jsonl"):
        train_mlm.main(["--config", preset, "--blimp_dir", str(tmp_path / "absent")])
    (row,) = blimp_rows("passive_1", 1)
    (data_dir / "passive_1.jsonl").write_text(json.dumps(row | {"sentence_good": "word " * 200}))
    with pytest.raises(InputError, match="fit the model's length \(64\)"):
        train_mlm.main(["--config", preset, "--blimp_dir", str(data_dir)])


@pytest.mark.slow
def test_zero_3_scores_in_step(preset, data_dir, tmp_path, deepspeed_ranks):
    """Each rank has a shard of the weights, and a forward gathers all."""
    flags = ["--config", preset, "--blimp_dir", str(data_dir), "--max_steps", "2"]
    one = train_mlm.main([*flags, "--output_dir", str(tmp_path / "one")])
    two = [*flags, "--output_dir", str(tmp_path / "two"), "--per_device_train_batch_size", "4"]
    ranks = deepspeed_ranks("zero3", lambda _: train_mlm.main(two), tmp_path)
    end_well(ranks)
    record = read_record(tmp_path / "two" / "run_record.json", (), "")
    assert record["metrics"]["eval_blimp"] == pytest.approx(one["metrics"]["eval_blimp"], abs=0.02)
