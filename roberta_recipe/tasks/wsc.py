"""WNLI as a ranking of noun phrases (paper, section 5.1, task-specific modifications: WNLI).

Each noun phrase of a SuperGLUE WSC text replaces the pronoun, as masks, and is scored by the masked-LM head; the label
is positive if no candidate scores higher than the query. Training uses positive rows only. Phrases and losses follow
fairseq's examples/roberta/wsc, the margin loss Kocijan et al. (2019).
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from roberta_recipe.data import IGNORED, tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import explained, parse_json, read_text, resolve_path
from roberta_recipe.log import logger
from roberta_recipe.model import weights
from roberta_recipe.model.masked_lm import EXCLUDED_LOGIT, masked_lm_class

# No space before these words, and none after these brackets.
_JOINS_LEFT = re.compile(r"""[.,;:!?)\]%]+["'”’]*$|['’](?:s|m|d|re|ve|ll)(?!\w)|n['’]t(?!\w)""", re.IGNORECASE)
_JOINS_RIGHT = {"(", "[", "“"}
_PRONOUN_EDGES = '.,;:!?"“”'
_NEAR = (0, 1, -1, 2, -2)  # word offsets to try: an index of SuperGLUE's validation set is one too low


@dataclass(frozen=True)
class Schema:
    """A row of SuperGLUE's WSC: does the pronoun `text[start:end]` refer to `query`? `label` is None if unknown."""

    idx: int
    text: str
    start: int
    end: int
    query: str
    label: bool | None
    where: str  # file and line


def read_wsc(path: str | Path) -> list[Schema]:
    """The rows of a SuperGLUE WSC file (JSON lines; `span2_index` counts words), detokenized.

    A pronoun may have other case, attached punctuation, and an index that is up to two words off. Raises `InputError`
    with file and line for a malformed row or a missing pronoun.
    """
    path = resolve_path(path)
    lines = read_text(path, "; name a .jsonl file of SuperGLUE's WSC").split("\n")
    schemas = [_schema(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if absent := [schema.where for schema in schemas if not _pattern(schema.query).search(schema.text)]:
        logger.warning(
            f"{len(absent)} queries do not occur verbatim in their text; they are used anyway: {absent[0]}, ..."
        )
    return schemas


def _schema(line: str, where: str) -> Schema:
    row = parse_json(line, where)
    with explained(f"{where} is not a row of SuperGLUE's WSC"):
        target, label, index = row["target"], row.get("label"), row["target"]["span2_index"]
        text, starts = join(row["text"].split())
        query = re.sub("[.,]$", "", join(target["span1_text"].split())[0])  # some of the test set end in a full stop
        pronoun = target["span2_text"].strip(_PRONOUN_EDGES + " ")  # sometimes "it,"
        if not query or not pronoun or type(label) not in (bool, NoneType):
            raise InputError(f"{where}: query {query!r}, pronoun {pronoun!r} or label {label!r} is wrong; fix the row")
        pattern = _pattern(pronoun)
        for near in (index + shift for shift in _NEAR):
            if 0 <= near < len(starts) and (found := pattern.match(text, starts[near])):
                return Schema(row["idx"], text, *found.span("span"), query, label, where)
        raise InputError(f"{where}: span2_text {pronoun!r} is not at word {index} (or within two of it) of {text!r}")


def _pattern(span: str) -> re.Pattern:
    """Matches `span` as whole words, in any case and spacing, after optional punctuation."""
    words = r"\s*".join(map(re.escape, span.split()))
    return re.compile(rf"\W*(?<!\w)(?P<span>{words})(?!\w)", re.IGNORECASE)


def join(words: Sequence[str]) -> tuple[str, list[int]]:
    """The words detokenized ("Singer 's heels ." -> "Singer's heels."), and each word's first character."""
    text, starts, glued = "", [], True
    for word in words:
        closing = word == '"' and text.count('"') % 2 == 1
        if not (glued or closing or _JOINS_LEFT.match(word)):
            text += " "
        starts.append(len(text))
        text += word
        glued = word in _JOINS_RIGHT or (word == '"' and not closing)
    return text, starts


def noun_phrases(text: str, parse: Any, query: str) -> list[str]:
    """The candidates in `text` other than the query, in text order; `parse` is its spaCy `Doc`.

    As in fairseq: noun chunks and runs of NOUN or PROPN tokens, except for phrases of PRON tokens only and for phrases
    that contain the query or are contained in it, ignoring case. A phrase that occurs twice is two candidates.
    """
    tokens = list(parse)
    runs = [(tag, list(run)) for tag, run in groupby(range(len(tokens)), lambda number: tokens[number].pos_)]
    spans = {(chunk.start, chunk.end) for chunk in parse.noun_chunks}
    spans |= {(run[0], run[-1] + 1) for tag, run in runs if tag in ("NOUN", "PROPN")}
    phrases, low = [], query.lower()
    for first, end in sorted(spans):
        phrase = text[tokens[first].idx : tokens[end - 1].idx + len(tokens[end - 1].text)]
        pronoun = all(token.pos_ == "PRON" for token in tokens[first:end])
        if not pronoun and low not in phrase.lower() and phrase.lower() not in low:
            phrases.append(phrase)
    return phrases


def load_masked_lm(model_name_or_path: str, random_weights: bool = False) -> PreTrainedModel:
    """A checkpoint with its masked-LM head, or its architecture with random weights, as in pretraining: its head runs
    at masks only. Raises `InputError` if the head's weights are missing."""
    config = weights.read_config(model_name_or_path)
    cls = masked_lm_class(config, model_name_or_path)
    if random_weights:
        weights.check(model_name_or_path)
        logger.info("Weights     random")
        return weights.fresh(cls, config)
    advice = "WNLI needs the masked-LM head; name a checkpoint that was saved with it"
    return weights.load(cls, model_name_or_path, config=config, advice=advice)[0]


def build_features(
    schema: Schema,
    candidates: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 512,
    encode: PreTrainedTokenizerBase | None = None,
) -> dict[str, Any]:
    """The text with the query, then with each candidate, masked, in the pronoun's position.

    `input_ids` and `targets` have a list per phrase: `targets` has the phrase's ids at the masks, else -100. `label` is
    1, 0, or -100 if unknown. The whole text is encoded at once, so that a phrase's first token includes its space.
    `encode`: a `text_tokenizer`, made once for many schemas. Raises `InputError` for a text of more than `max_length`
    tokens, and for a phrase without tokens.
    """
    if tokenizer.mask_token_id is None:
        raise InputError(f"the tokenizer {tokenizer.name_or_path!r} has no mask token, which WNLI needs; name another")
    inputs, targets, encode = [], [], encode or tokenization.text_tokenizer(tokenizer)
    for phrase in (schema.query, *candidates):
        text = schema.text[: schema.start] + phrase + schema.text[schema.end :]
        encoding = encode(text, return_offsets_mapping=True, verbose=False)
        ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
        if len(ids) > max_length:
            raise InputError(
                f"{schema.where}: {len(ids)} tokens with phrase {phrase!r}, more than {max_length}; shorten the text"
            )
        start, end = schema.start, schema.start + len(phrase)
        # byte-level offsets exclude a token's space: a space token is (start, start) and part of the phrase; a special
        # token is (0, 0)
        inside = [first < end and (last > start or first == last == start > 0) for first, last in offsets]
        if not any(inside):
            raise InputError(f"{schema.where}: the tokenizer has no tokens for the phrase {phrase!r}; leave it out")
        inputs.append([tokenizer.mask_token_id if hit else token for token, hit in zip(ids, inside, strict=True)])
        targets.append([token if hit else IGNORED for token, hit in zip(ids, inside, strict=True)])
    return {"input_ids": inputs, "targets": targets, "label": IGNORED if schema.label is None else int(schema.label)}


def training_features(features: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The training features: positive rows with a candidate other than the query; and counts of the other rows."""
    usable, left_out = [], Counter()
    for row in features:
        if row["label"] != 1:
            left_out["negative" if row["label"] == 0 else "without a label"] += 1
        elif len(row["input_ids"]) == 1:
            left_out["without another candidate"] += 1
        else:
            usable.append(row)
    return usable, left_out


@dataclass
class WscCollator:
    """Collates schemas of `build_features`, each a group of rows: the query's, then its candidates'.

    Returns int64 `input_ids`, `attention_mask` and `targets` (rows, longest row), `group_sizes` (schemas,) in rows, and
    `labels` (schemas,), which make `num_items_in_batch` the number of schemas in the effective batch.
    """

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [torch.tensor(ids) for example in examples for ids in example["input_ids"]]
        targets = [torch.tensor(ids) for example in examples for ids in example["targets"]]
        lengths = torch.tensor([len(row) for row in rows])
        pad, pad_id = torch.nn.utils.rnn.pad_sequence, self.tokenizer.pad_token_id
        return {
            "input_ids": pad(rows, batch_first=True, padding_value=pad_id),
            "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
            "targets": pad(targets, batch_first=True, padding_value=IGNORED),
            "group_sizes": torch.tensor([len(example["input_ids"]) for example in examples]),
            "labels": torch.tensor([example["label"] for example in examples]),
        }


def phrase_log_probs(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """(rows,) mean log-probability of each row's masked tokens, in nats."""
    predicted = targets != IGNORED
    losses = model(input_ids=input_ids, attention_mask=attention_mask, labels=targets).losses
    return losses.new_zeros(targets.shape).masked_scatter(predicted, -losses).sum(dim=1) / predicted.sum(dim=1)


def wsc_loss(
    query_score: torch.Tensor, candidate_scores: torch.Tensor, form: Literal["margin", "cross_entropy"]
) -> torch.Tensor:
    """A schema's loss from the scores of the query () and of the other candidates (candidates,).

    "margin": the sum over candidates of -query + 5 x max(0, candidate - query + 0.4), as in the paper (5 and 0.4 are
    from fairseq's WinoGrande command; its defaults are 1 and 0). "cross_entropy": of the query among all phrases, in
    fairseq's command for WSC (92.3 against about 90 on SuperGLUE's validation set).
    """
    if form == "margin":
        return (-query_score + 5.0 * (candidate_scores - query_score + 0.4).clamp(min=0)).sum()
    return torch.logsumexp(torch.cat([query_score.view(1), candidate_scores]), dim=0) - query_score


def margin(query_score: torch.Tensor, candidate_scores: torch.Tensor) -> torch.Tensor:
    """(): the query's score minus the highest score of another candidate, infinite without one. The label is positive
    from 0 on, ties included, as in fairseq."""
    return query_score - torch.cat([query_score.new_tensor([-torch.inf]), candidate_scores]).max()


def run_batch(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], form: str = "cross_entropy"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the positive schemas' losses, margins (schemas,)) of a `WscCollator` batch; `form`: of `wsc_loss`."""
    scores = phrase_log_probs(model, batch["input_ids"], batch["attention_mask"], batch["targets"])
    groups = scores.split(batch["group_sizes"].tolist())
    total = 0.0 * scores.sum()  # has a gradient without a positive schema too
    for group, label in zip(groups, batch["labels"].tolist(), strict=True):
        if label == 1:
            total = total + wsc_loss(group[0], group[1:], form)
    margins = torch.stack([margin(group[0], group[1:]) for group in groups])
    return total, margins.clamp(max=-EXCLUDED_LOGIT)  # finite: non-finite scores are refused as divergence
