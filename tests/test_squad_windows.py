"""SQuAD's windows, labels and best spans: character offsets, also after emoji and accents."""

import copy
import itertools
import logging
import random

import numpy as np
import pytest
from conftest import make_documents
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from roberta_recipe.tasks import squad

AWKWARD = [
    ("emoji before", "A 👩‍🔬🇫🇷 in Zürich sees the river.", "the river"),
    ("the emoji itself", "The sign shows 🇫🇷🎉 at night.", "🇫🇷🎉"),
    ("accents", "Café société: the naïve child likes Łódź, no?", "Łódź"),
    ("decomposed accents", "Cafe\u0301 in the rain.", "Cafe\u0301"),
    ("first word", "Paris is behind a wall.", "Paris"),
    ("last character", "Nobody leaves the red boat.", "Nobody leaves the red boat."),
    ("double spaces", "The  river   flows\u00a0 \n near the sea.", "near the sea"),
    ("other scripts", "北京 is a city, Москва too: 東京!", "東京"),
]


@pytest.mark.parametrize("passage_first", [False, True])
@pytest.mark.parametrize(("case", "context", "answer"), AWKWARD)
def test_offsets_are_exact(tokenizer, wordpiece, case, context, answer, passage_first):
    question = squad.SquadExample("x", "Where?", context, ((answer, context.index(answer)),))
    for either in (tokenizer, wordpiece):
        made = squad.make_windows([question], either, 128, 16, 16, passage_first)
        (feature,), (offsets,) = made.features, made.offsets
        start, end = feature["start_positions"], feature["end_positions"]
        assert feature["labels"] == 1 and context[offsets[start, 0] : offsets[end, 1]] == answer
        assert squad.decode_labels([question], made)["verbatim"] == 1
        inside = np.flatnonzero(offsets[:, 0] >= 0)
        assert (inside[0] == 1) == passage_first and context[offsets[inside[-1], 1] :].strip() == ""


@pytest.mark.parametrize("answer", ["Cafe\u0301", "Paris\u200b", "\u200eParis", "\u2764\ufe0f"])
def test_an_answer_at_a_border_of_the_context_may_end_in_a_dropped_character(wordpiece, answer):
    """BERT's normalizer drops combining marks and zero-width characters; the answer's other tokens are labelled."""
    own = copy.deepcopy(wordpiece)
    own.backend_tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=True, lowercase=False)
    for context in (f"The sign shows {answer}", f"{answer} is far."):
        question = squad.SquadExample("x", "Where?", context, ((answer, context.index(answer)),))
        made = squad.make_windows([question], own, 64, 16, 16)
        (offsets,), (feature,) = made.offsets, made.features
        text = context[offsets[feature["start_positions"], 0] : offsets[feature["end_positions"], 1]]
        assert feature["labels"] == 1 and text == answer.strip("\u0301\u200b\u200e\ufe0f")


def test_a_question_longer_than_the_model_is_truncated_without_a_warning(wordpiece, monkeypatch, caplog):
    own = copy.deepcopy(wordpiece)
    own.model_max_length = 32
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    made = squad.make_windows([squad.SquadExample("x", "Where? " * 40, "By the sea.", ())], own, 32, 4, 8)
    assert made.questions_cut == 1 and not caplog.records


def test_windows_of_a_long_context_share_doc_stride_and_miss_nothing(wordpiece):
    sentences = make_documents(1, seed=5, sentences=(30, 30))[0].split("\n")
    context, answer = " ".join(sentences), sentences[14]
    question = squad.SquadExample("x", "Where?", context, ((answer, context.index(answer)),))
    made = squad.make_windows([question, question], wordpiece, 64, 12, 16)
    windows = [offsets[offsets[:, 0] >= 0] for offsets in made.offsets]
    count = len(windows) // 2
    assert count > 5 and made.question_index.tolist() == [0] * count + [1] * count
    assert all(len(feature["input_ids"]) <= 64 for feature in made.features)
    for before, behind in itertools.pairwise(windows[:count]):
        assert (before[-12:] == behind[:12]).all()
    covered = {position for window in windows[:count] for a, b in window for position in range(a, b)}
    assert covered == {position for position, character in enumerate(context) if not character.isspace()}
    with_it = [n for n in range(count) if made.features[n]["labels"]]
    for number in range(count):
        text = context[windows[number][0, 0] : windows[number][-1, 1]]
        assert (answer in text) == (number in with_it)
        if number not in with_it:
            assert made.features[number]["start_positions"] == made.features[number]["end_positions"] == 0
    assert with_it


def test_answers_at_the_edges_of_a_window(tokenizer):
    """A window contains answers at its first and last token, and none that extends a token further."""
    context = " ".join(make_documents(1, seed=6, sentences=(30, 30)))
    made = squad.make_windows([squad.SquadExample("x", "Where?", context, ())], tokenizer, 64, 0, 16)
    first, second = (offsets[offsets[:, 0] >= 0] for offsets in made.offsets[:2])
    for tokens, wanted in (
        (second[:1], [0, 1]),
        (first[-1:], [1, 0]),
        (first[-3:], [1, 0]),
        (np.concatenate([first[-1:], second[:1]]), [0, 0]),
    ):
        start, end = int(tokens[0, 0]), int(tokens[-1, 1])
        question = squad.SquadExample("x", "Where?", context, ((context[start:end], start),))
        again = squad.make_windows([question], tokenizer, 64, 0, 16)
        assert [feature["labels"] for feature in again.features[:2]] == wanted
        assert squad.decode_labels([question], again)["in_no_window"] == (wanted == [0, 0])


def test_an_answer_inside_a_token_is_covered_and_counted(tokenizer):
    context = "The teacher sees the river."
    token = next(t for t in tokenizer.tokenize(context) if len(t) > 5)
    piece = token.lstrip("Ġ")[:3]
    question = squad.SquadExample("x", "Who?", context, ((piece, context.index(piece)),))
    made = squad.make_windows([question], tokenizer, 64, 8, 16)
    found = squad.decode_labels([question], made)
    assert found["verbatim"] == 0 and found["in_no_window"] == 0
    assert found["others"] == [("x", piece, token.lstrip("Ġ"))]


def test_a_window_of_nothing_but_spaces(tokenizer):
    context = "A table" + "\n" * 200 + "the end."
    question = squad.SquadExample("x", "Where?", context, (("the end", context.index("the end")),))
    made = squad.make_windows([question], tokenizer, 64, 8, 16)
    assert not all((offsets >= 0).any() for offsets in made.offsets)
    assert squad.decode_labels([question], made)["verbatim"] == 1
    scores = np.zeros((len(made.features), 64, 2), dtype=np.float32)
    assert squad.best_spans([question], made, scores, 3, 5)[0].texts


def test_a_question_that_ends_in_a_character_of_several_tokens_is_short_enough(tokenizer):
    question = squad.SquadExample("x", "a " * 13 + "🎉🎉🎉", "The river.", ())
    made = squad.make_windows([question], tokenizer, 64, 39, 20)
    asked = tokenizer.decode(made.features[0]["input_ids"]).split("</s>")[0]
    assert made.questions_cut == 1 and "a a" in asked and "\ufffd" not in asked
    assert len(tokenizer(asked.removeprefix("<s>"), add_special_tokens=False).input_ids) <= 20


# Byte-level offsets that begin inside a word: a space is put before it, and trimmed with its first character

SPLITS = {
    "none": [],
    "punctuation": [pre_tokenizers.Punctuation()],
    "spaces": [pre_tokenizers.WhitespaceSplit()],
    "scripts": [pre_tokenizers.UnicodeScripts()],
    "bert": [pre_tokenizers.BertPreTokenizer()],
}


def asked_for_each_word():
    """Questions about each word of contexts with words next to punctuation, digits and other scripts."""
    rng, questions = random.Random(0), []
    words = ["boat", "I", "teacher", "é", "Łódź", "2", "1066", "東京", "Москва", "naïve", "ﬁsh", "½"]
    between = [" ", " ", "  ", "🎉", " 👩", " (", ") ", ", ", "-", "—", " “", "” ", "\n", "$", "/"]
    for number in range(5):
        context, answers = rng.choice(["", "(", "“"]), []
        for _ in range(30):
            word = rng.choice(words)
            answers.append((word, len(context)))
            context += word + rng.choice(between)
        questions += [
            squad.SquadExample(f"{number}-{n}", "Where?", context, (answer,)) for n, answer in enumerate(answers)
        ]
    return questions


@pytest.mark.parametrize("split", SPLITS)
def test_words_come_back_whatever_begins_inside_them(split):
    """Spans cover the same characters with and without `trim_offsets`, and every word is recovered."""
    questions, covered = asked_for_each_word(), []
    for prefix, trim in itertools.product((False, True), repeat=2):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence([*SPLITS[split], pre_tokenizers.ByteLevel(prefix)])
        backend.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
        special, alphabet = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        )
        backend.train_from_iterator([question.context for question in questions[::30]], trainer)
        backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim, prefix)
        own = PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="<s>", sep_token="</s>", pad_token="<pad>")
        made = squad.make_windows(questions, own, 40, 12, 16)
        found = squad.decode_labels(questions, made)
        assert (found["verbatim"], found["in_no_window"]) == (150, 0), found["others"][:5]
        numbered = zip(made.question_index.tolist(), made.offsets, strict=True)
        covered.append({(number, at) for number, offsets in numbered for a, b in offsets for at in range(a, b)})
    assert covered[0] == covered[1] and covered[2] == covered[3]


# Spans from scores


def by_brute_force(context, offsets, scores, n_best, at_most):
    inside = [offsets_of[:, 0] >= 0 for offsets_of in offsets]
    offsets = [of[there] for of, there in zip(offsets, inside, strict=True)]
    scores = [of[: len(there)][there] for of, there in zip(scores, inside, strict=True)]
    spans = [
        (scores[n][i, 0] + scores[n][j, 1], offsets[n][i, 0], offsets[n][j, 1])
        for n in range(len(offsets))
        for i in range(len(offsets[n]))
        for j in range(i, min(i + at_most, len(offsets[n])))
    ]
    kept = []
    for total, start, end in sorted(spans, reverse=True):
        if len(kept) < n_best and all(end <= a or start >= b for _, a, b in kept):
            kept.append((total, start, end))
    return kept


def test_best_spans_equal_a_search_through_all_spans(tokenizer):
    texts = make_documents(6, seed=8, sentences=(2, 12))
    questions = [squad.SquadExample(str(n), "Who sees it?", text, ()) for n, text in enumerate(texts)]
    made = squad.make_windows(questions, tokenizer, 48, 8, 16)
    assert len(made.features) > 10 and len(set(map(len, made.offsets))) > 3
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(len(made.features), 48, 2)).astype(np.float32)
    found = squad.best_spans(questions, made, scores, n_best_size=20, max_answer_length=7)
    for number, spans in enumerate(found):
        own = np.flatnonzero(made.question_index == number)
        offsets = [made.offsets[n] for n in own]
        wanted = by_brute_force(texts[number], offsets, [scores[n] for n in own], 20, 7)
        assert spans.texts == [texts[number][a:b] for _, a, b in wanted] and len(wanted) > 5
        assert spans.score == pytest.approx([total for total, _, _ in wanted])
        assert spans.score == pytest.approx(spans.start_logit + spans.end_logit) and spans.no_answer is None


def test_the_probability_of_no_answer_over_windows(tokenizer):
    text = make_documents(1, seed=9, sentences=(12, 12))[0]
    question = squad.SquadExample("x", "Who?", text, ())
    made = squad.make_windows([question], tokenizer, 48, 8, 16)
    scores = np.zeros((len(made.features), 48, 3), dtype=np.float32)
    scores[:, :, 2] = np.linspace(-3, 2, len(scores))[:, None]
    (spans,) = squad.best_spans([question], made, scores, 3, 5, version_2=True)
    assert spans.no_answer == pytest.approx(1 / (1 + np.exp(2)))  # the most answerable window
    scores = scores[..., :2]
    scores[:, 0, 0] = np.linspace(4, 1, len(scores))
    inside = np.flatnonzero(made.offsets[1][:, 0] >= 0)
    scores[1, inside[3], 0] = scores[1, inside[4], 1] = 1.5
    (spans,) = squad.best_spans([question], made, scores, 3, 5, version_2=True)
    assert spans.score[0] == 3 and spans.no_answer == pytest.approx(1 / (1 + np.exp(3 - 1)))  # the lowest null score
    assert spans.answer(0.1) == "" and spans.answer(0.2) == spans.answer(None) == spans.texts[0] != ""


def test_the_tokenizer_of_the_fixtures_is_bytes(tokenizer):
    """An emoji is several tokens, which the difficult cases depend on."""
    offsets = tokenizer("🎉", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert len(offsets) > 1 and set(offsets) == {(0, 1)}
