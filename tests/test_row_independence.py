"""A row's logits do not depend on the other rows of its batch, for each script's collator and model, over architectures
and tokenizer configurations."""

import argparse
import json

import numpy as np
import pytest
import torch
from conftest import make_documents
from glue_runs import data_dir, flags  # noqa: F401
from test_families import config_of
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    XLNetConfig,
    pipeline,
)

import finetune_glue
import finetune_race
from roberta_recipe.errors import InputError
from roberta_recipe.model import task_heads
from roberta_recipe.model.masked_lm import masked_lm_class
from roberta_recipe.tasks import glue, protocol, pseudo_likelihood, qnli_ranking, race, wsc
from roberta_recipe.training import finetune_trainer

FAMILIES = ("roberta", "bert", "mpnet", "albert", "deberta-v2", "modernbert")
WORDS = (1, 9, 3, 5, 2, 7, 4)
TEXTS = [" ".join(text.split()[:count]) for text, count in zip(make_documents(7, seed=3), WORDS, strict=True)]
LEFT = {"padding_side": "left", "truncation_side": "left", "model_max_length": 8, "model_input_names": ["input_ids"]}


@pytest.fixture(params=FAMILIES)
def family(request, tokenizer_dir, tmp_path):
    """A config of the family, and a tokenizer whose configuration contradicts our batches."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | LEFT))
    config = config_of(request.param)
    config.save_pretrained(tmp_path / "model")
    args = argparse.Namespace(model_name_or_path=str(tmp_path / "model"), tokenizer_name=None, max_seq_length=64)
    return config, protocol.load_tokenizer(args), args


def drawn(make, config, **settings):
    """A model whose weights give logits of about one."""
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = make(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return model


def check(rows, scores_of, least=1e-3):
    """`scores_of(rows)`: an array per row. Compares each row alone, among shorter and longer ones, and in any order."""
    alone = [scores_of([row])[0] for row in rows]
    assert np.std([scores.ravel()[0] for scores in alone]) > least
    for order in (range(len(rows)), range(len(rows) - 1, -1, -1), (0, 1), (1, 2), (3, 4, 5)):
        for number, found in zip(order, scores_of([rows[n] for n in order]), strict=True):
            np.testing.assert_allclose(found[: len(alone[number])], alone[number], rtol=1e-5, atol=1e-5)


def with_loss(model, collate, loss_sum):
    """The scores of `loss_sum`, by row."""

    def scores_of(rows):
        with torch.no_grad():
            scores = loss_sum(model, dict(collate(rows)))[1].float().numpy()
        return list(scores.reshape(len(scores), -1))

    return scores_of


def pairs(tokenizer, args):
    data = {"train": glue.Examples([(a, b) for a, b in zip(TEXTS, TEXTS[::-1], strict=True)], [0] * len(TEXTS))}
    return finetune_glue.make_features(args, glue.TASKS["rte"], data, tokenizer)[0]["train"]


def test_glue(family):
    config, tokenizer, args = family
    model = drawn(AutoModelForSequenceClassification.from_config, config)
    collate = DataCollatorWithPadding(tokenizer)
    check(pairs(tokenizer, args), with_loss(model, collate, finetune_glue.classification_loss))
    model = drawn(AutoModelForSequenceClassification.from_config, config, num_labels=1)
    collate = qnli_ranking.RankingCollator(tokenizer)
    check(pairs(tokenizer, args), with_loss(model, collate, qnli_ranking.ranking_loss))


def test_race(family):
    config, tokenizer, _ = family
    questions = [
        race.RaceExample(f"{n}, 1", "high", text, "the _ ?", tuple(TEXTS[:4]), 0) for n, text in enumerate(TEXTS)
    ]
    model = drawn(AutoModelForMultipleChoice.from_config, config)
    collate = race.RaceCollator(tokenizer)
    check(race.features(questions, tokenizer, 64, 30).rows, with_loss(model, collate, finetune_race.choice_loss))


def masked_lm(config):
    return drawn(lambda config: masked_lm_class(config)(config), config)


def test_wnli(family):
    config, tokenizer, _ = family
    schemas = [
        wsc.Schema(n, f"{text} it", len(text) + 1, len(text) + 3, "the dog", True, "") for n, text in enumerate(TEXTS)
    ]
    rows = [wsc.build_features(schema, ["the cat", "a small boat"], tokenizer, 64) for schema in schemas]
    check(rows, with_loss(masked_lm(config), wsc.WscCollator(tokenizer), wsc.run_batch))


def test_minimal_pairs(family):
    config, tokenizer, _ = family
    model = masked_lm(config)
    check(TEXTS[:6], lambda rows: list(pseudo_likelihood.log_likelihoods(model, tokenizer, rows, disable_bar=True).T))


def test_the_pipeline_of_the_saved_folder_gives_the_predictions_of_validation(flags, tmp_path, model_dir, data_dir):  # noqa: F811
    """In batches of 8, truncated to the training length."""
    examples = glue.read_split(glue.TASKS["rte"], "rte", "validation", str(data_dir))
    words = {word for texts in examples.texts for text in texts for word in text.split()}
    mark = max(words & AutoTokenizer.from_pretrained(model_dir).get_vocab().keys(), key=len)
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | LEFT | {"additional_special_tokens": [mark]}))
    finetune_glue.main(flags("rte", "--max_seq_length", "16"))
    run = tmp_path / "glue" / "rte" / "lr0.001-batch8-seed1"
    texts = [{"text": first, "text_pair": second} for first, second in examples.texts]
    classify = pipeline("text-classification", str(run / "best"), device="cpu")
    found = classify(texts, batch_size=8, truncation=True, top_k=None)
    labels = classify.model.config.id2label
    found = [[{one["label"]: one["score"] for one in row}[labels[n]] for n in sorted(labels)] for row in found]
    scores = torch.from_numpy(finetune_trainer.validation_scores(run)).softmax(-1).numpy()
    np.testing.assert_allclose(found, scores, atol=1e-5)
    assert mark in classify.tokenizer.all_special_tokens


def test_a_head_that_reads_the_last_token_is_refused(tmp_path):
    XLNetConfig(d_model=32, n_layer=1, n_head=2, d_inner=64, vocab_size=400).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="reads the last token"):
        task_heads.load_with_head(AutoModelForMultipleChoice, str(tmp_path), None)
    with pytest.raises(InputError, match="is a 'xlnet' model, for which transformers has no AutoModelForMaskedLM"):
        task_heads.load_with_head(AutoModelForMaskedLM, str(tmp_path), None)


def test_xlnet_tags_each_token_from_its_own_state(tokenizer, tmp_path):
    """Its head has no summary of the sequence."""
    config = XLNetConfig(d_model=32, n_layer=1, n_head=2, d_inner=64, vocab_size=400)
    config.save_pretrained(tmp_path)
    model = drawn(
        lambda _: task_heads.load_with_head(AutoModelForTokenClassification, str(tmp_path), None, True), config
    )
    rows = [dict(tokenizer(text)) for text in TEXTS[:3]]
    batch = DataCollatorWithPadding(tokenizer)(rows)
    with torch.no_grad():
        together = model(**batch).logits
        for number, row in enumerate(rows):
            alone = model(**DataCollatorWithPadding(tokenizer)([row])).logits[0]
            torch.testing.assert_close(together[number, : len(alone)], alone, rtol=1e-4, atol=1e-5)
