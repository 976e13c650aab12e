"""BLiMP (Warstadt et al. 2020, arXiv 1912.00582): accuracy on 67 paradigms of 1,000 minimal pairs, an acceptable and an
unacceptable sentence each. Not in RoBERTa's paper; it shows early how much grammar a small model has learnt (BabyLM:
Warstadt et al. 2023).

Scores are pseudo-log-likelihoods (`pseudo_likelihood`). Chance is not 50%: length alone gives 33 to 70 by paradigm, so
the control is the same architecture with random weights.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from roberta_recipe.errors import InputError
from roberta_recipe.input_files import explained, load_from_hub, parse_json, read_text, resolve_path
from roberta_recipe.log import counted, logger
from roberta_recipe.model import weights
from roberta_recipe.record import BlimpScores
from roberta_recipe.tasks import pseudo_likelihood

HUB_ID = "nyu-mll/blimp"
PAIRS = 1000  # in each official paradigm
PAIRS_WHILE_TRAINING = 100  # per paradigm: a standard error of 0.5 points of the mean over paradigms
TIE_NATS = 1e-4  # closer scores are a tie, which counts half: they differ by fp32 rounding only

# The paper's 12 phenomena (table 2 there). The files' 13th term, `s-selection`, is argument structure.
PARADIGMS: dict[str, tuple[str, ...]] = {
    phenomenon: tuple(uids.split())
    for phenomenon, uids in {
        "anaphor_agreement": "anaphor_gender_agreement anaphor_number_agreement",
        "argument_structure": """animate_subject_passive animate_subject_trans causative drop_argument inchoative
            intransitive passive_1 passive_2 transitive""",
        "binding": """principle_A_c_command principle_A_case_1 principle_A_case_2 principle_A_domain_1
            principle_A_domain_2 principle_A_domain_3 principle_A_reconstruction""",
        "control_raising": """existential_there_object_raising existential_there_subject_raising
            expletive_it_object_raising tough_vs_raising_1 tough_vs_raising_2""",
        "determiner_noun_agreement": """determiner_noun_agreement_1 determiner_noun_agreement_2
            determiner_noun_agreement_irregular_1 determiner_noun_agreement_irregular_2
            determiner_noun_agreement_with_adj_2 determiner_noun_agreement_with_adj_irregular_1
            determiner_noun_agreement_with_adj_irregular_2 determiner_noun_agreement_with_adjective_1""",
        "ellipsis": "ellipsis_n_bar_1 ellipsis_n_bar_2",
        "filler_gap_dependency": """wh_questions_object_gap wh_questions_subject_gap
            wh_questions_subject_gap_long_distance wh_vs_that_no_gap wh_vs_that_no_gap_long_distance
            wh_vs_that_with_gap wh_vs_that_with_gap_long_distance""",
        "irregular_forms": "irregular_past_participle_adjectives irregular_past_participle_verbs",
        "island_effects": """adjunct_island complex_NP_island coordinate_structure_constraint_complex_left_branch
            coordinate_structure_constraint_object_extraction left_branch_island_echo_question
            left_branch_island_simple_question sentential_subject_island wh_island""",
        "npi_licensing": """matrix_question_npi_licensor_present npi_present_1 npi_present_2
            only_npi_licensor_present only_npi_scope sentential_negation_npi_licensor_present
            sentential_negation_npi_scope""",
        "quantifiers": """existential_there_quantifiers_1 existential_there_quantifiers_2
            superlative_quantifiers_1 superlative_quantifiers_2""",
        "subject_verb_agreement": """distractor_agreement_relational_noun distractor_agreement_relative_clause
            irregular_plural_subject_verb_agreement_1 irregular_plural_subject_verb_agreement_2
            regular_plural_subject_verb_agreement_1 regular_plural_subject_verb_agreement_2""",
    }.items()
}
PHENOMENON = {uid: phenomenon for phenomenon, uids in PARADIGMS.items() for uid in uids}


class Pairs(NamedTuple):
    """Pairs of sentences, grouped by paradigm, in the order of `PHENOMENON`."""

    good: list[str]
    bad: list[str]
    counts: dict[str, int]  # by paradigm

    @property
    def partial(self) -> str:
        """The difference from the official 67 x 1,000 pairs, empty without one."""
        low, high = min(self.counts.values()), max(self.counts.values())
        each = f"{low:,} pairs a paradigm" if low == high else f"{low:,} to {high:,} pairs a paradigm"
        differences = [each] * ((low, high) != (PAIRS, PAIRS))
        differences += [self.paradigms] * (len(self.counts) < len(PHENOMENON))
        return "; ".join(differences)

    @property
    def paradigms(self) -> str:
        """The number of paradigms, and the first that are missing."""
        missing = [uid for uid in PHENOMENON if uid not in self.counts]
        named = f" (without {', '.join(missing[:3])}{', ...' * (len(missing) > 3)})" * bool(missing)
        return f"{len(self.counts)} of {len(PHENOMENON)} paradigms{named}"

    @property
    def sentences(self) -> list[str]:
        """Each sentence once, in the order of its first pair."""
        return list(dict.fromkeys([*self.good, *self.bad]))


def read(data_dir: str | None, limit: int | None = None) -> Pairs:
    """The first `limit` pairs of each paradigm (the official pairs are in random order), from a folder's official
    *.jsonl or, with None, from the Hub. Raises `InputError`."""
    if limit is not None and limit < 1:
        raise InputError(f"pairs={limit} must be at least 1; leave it out for all {PAIRS:,} of each paradigm")
    pairs: dict[str, list[tuple[str, str]]] = {}
    for where, row in _folder_rows(resolve_path(data_dir)) if data_dir else _hub_rows():
        with explained(f"{where} is not a row of BLiMP (UID, sentence_good, sentence_bad)"):
            uid, good, bad = (row[name].strip() for name in ("UID", "sentence_good", "sentence_bad"))
        if uid not in PHENOMENON or not (good and bad):
            raise InputError(f"{where}: {row} has an empty sentence, or is in none of BLiMP's paradigms; fix the row")
        pairs.setdefault(uid, []).append((row["sentence_good"], row["sentence_bad"]))
    chosen = {uid: pairs[uid][:limit] for uid in PHENOMENON if uid in pairs}
    flat = [pair for rows in chosen.values() for pair in rows]
    if not flat:
        raise InputError(f"{data_dir or HUB_ID} has no pair of sentences")
    return Pairs([good for good, _ in flat], [bad for _, bad in flat], {uid: len(rows) for uid, rows in chosen.items()})


def _folder_rows(folder: Path) -> Iterator[tuple[str, Any]]:
    """(file and line, row) of each line."""
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise InputError(
            f"{folder} has no *.jsonl: name the folder of BLiMP's files, one per paradigm (github.com/alexwarstadt/"
            f"blimp, data/), or leave it out to load {HUB_ID} from the Hub"
        )
    for path in paths:
        for number, line in enumerate(read_text(path).split("\n"), 1):
            if line.strip():
                yield f"{path}, line {number}", parse_json(line, f"{path}, line {number}")


def _hub_rows() -> Iterator[tuple[str, Any]]:
    for uid in PHENOMENON:
        rows = load_from_hub(HUB_ID, uid, split="train", instead="--data_dir, a folder of BLiMP's *.jsonl")
        yield from ((f"{HUB_ID} {uid}, row {number}", row) for number, row in enumerate(rows))


def outcomes(pairs: Pairs, scores: Sequence[float]) -> dict[str, np.ndarray]:
    """(pairs,) by paradigm: 1 if the acceptable sentence has the higher score, 0.5 for a tie, else 0. `scores`: of
    `pairs.sentences`."""
    score = dict(zip(pairs.sentences, scores, strict=True))
    margins = np.array([score[good] - score[bad] for good, bad in zip(pairs.good, pairs.bad, strict=True)])
    right = np.where(np.abs(margins) < TIE_NATS, 0.5, (margins > 0).astype(float))
    ends = np.cumsum(list(pairs.counts.values()))[:-1]
    return dict(zip(pairs.counts, np.split(right, ends), strict=True))


def accuracies(by_pair: dict[str, np.ndarray], samples: int = 1000, seed: int = 0) -> BlimpScores:
    """Accuracies (0 to 1) by paradigm and phenomenon, their two means, and 95% intervals, for the record.

    Intervals are a percentile bootstrap over the pairs of each paradigm, drawn as multinomial counts of the outcomes 0,
    0.5 and 1: they cover other pairs of the same paradigms, not other paradigms or training seeds.
    """
    counts = np.array([[np.sum(right == value) for value in (0.0, 0.5, 1.0)] for right in by_pair.values()])
    sizes = counts.sum(axis=1)
    drawn = np.random.default_rng(seed).multinomial(sizes, counts / sizes[:, None], size=(samples, len(sizes)))
    resampled = drawn @ (0.0, 0.5, 1.0) / sizes  # (samples, paradigms)
    phenomena = {name: [n for n, uid in enumerate(by_pair) if PHENOMENON[uid] == name] for name in PARADIGMS}
    phenomena = {name: numbers for name, numbers in phenomena.items() if numbers}
    resampled_phenomena = np.stack([resampled[:, numbers].mean(axis=1) for numbers in phenomena.values()], axis=1)
    mean = {uid: float(right.mean()) for uid, right in by_pair.items()}
    by_phenomenon = {name: float(np.mean([list(mean.values())[n] for n in ns])) for name, ns in phenomena.items()}
    return {
        "mean_of_paradigms": float(np.mean(list(mean.values()))),
        "mean_of_paradigms_interval": _interval(resampled.mean(axis=1)),
        "mean_of_phenomena": float(np.mean(list(by_phenomenon.values()))),
        "mean_of_phenomena_interval": _interval(resampled_phenomena.mean(axis=1)),
        "by_phenomenon": by_phenomenon,
        "by_phenomenon_interval": dict(zip(phenomena, map(_interval, resampled_phenomena.T), strict=True)),
        "by_paradigm": mean,
        "ties": int(counts[:, 1].sum()),
    }


def _interval(values: np.ndarray) -> list[float]:
    """The middle 95% of `values`."""
    return [float(value) for value in np.percentile(values, (2.5, 97.5))]


def while_training(
    data_dir: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Any], dict[str, float]]:
    """An evaluation metric of a trainer's model, on the first 100 pairs of each paradigm. Raises `InputError` for
    sentences that cannot be scored."""
    pairs = read(data_dir, PAIRS_WHILE_TRAINING)
    pseudo_likelihood.encode(tokenizer, pairs.sentences, weights.max_positions(model.config))
    logger.info(f"BLiMP       {counted(len(pairs.good), 'pair')}, {pairs.paradigms}, at each evaluation")
    return functools.partial(trainer_metric, pairs=pairs, tokenizer=tokenizer)


def trainer_metric(trainer: Any, pairs: Pairs, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """{"blimp": mean over paradigms, 0 to 1} of a trainer's model in evaluation mode; called in all processes, which
    share the sentences.

    Scores are in fp32, as bf16 makes ties: the class's forward bypasses accelerate's autocast. DeepSpeed keeps the
    run's precision.
    """
    model = trainer.model
    plain = functools.partial(type(model).forward, model)
    scores = pseudo_likelihood.log_likelihoods(
        model,
        tokenizer,
        pairs.sentences,
        ("pll",),
        call=trainer.model_wrapped if trainer.is_deepspeed_enabled else plain,
        process=trainer.args.process_index,
        processes=trainer.args.world_size,
        disable_bar=trainer.args.disable_tqdm or not trainer.is_world_process_zero() or None,
    )
    total = trainer.sum_over_processes(torch.from_numpy(scores[0]).to(trainer.args.device))
    return {"blimp": accuracies(outcomes(pairs, total.tolist()))["mean_of_paradigms"]}
