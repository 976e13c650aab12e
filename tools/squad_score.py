"""SQuAD's official metrics for a predictions.json, printed as JSON.

    python tools/squad_score.py --predictions predictions.json --validation_file dev-v1.1.json
    ... --predictions span_predictions.json --version_2_with_negative --null_odds null_odds.json   # and a dev-v2.0.json

Equal to the official scripts (evaluate-v1.1.py, evaluate-v2.0.py) to the last digit. As there, a missing prediction is
wrong in 1.1 and an error in 2.0; null_odds adds the best scores over all thresholds, with ties in file order, and
questions with odds above 1 are unanswered in the other scores.
"""

import json
import math
import sys
from pathlib import Path

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.log import listed, logger, set_up_logging
from roberta_recipe.settings import RecipeParser
from roberta_recipe.tasks import squad_files
from roberta_recipe.tasks.squad_scores import NO_ANSWER_ABOVE, score_1, score_2


def read_odds(path: str, names: list[str]) -> dict[str, float]:
    """The odds of no answer for the questions `names`, in file order. Raises `InputError`."""
    odds, missing, _ = squad_files.read_answers(Path(path), names, "odds", (int, float))
    if missing:
        raise InputError(f"{path} has no odds for {len(missing):,} of {len(names):,} questions ({listed(missing)})")
    if undefined := [name for name in names if math.isnan(odds[name])]:
        raise InputError(f"{path}: the odds of {listed(undefined)} are NaN; give a number")
    if above := [name for name in names if odds[name] > NO_ANSWER_ABOVE]:
        logger.warning(
            f"{path}: the odds of {len(above):,} of {len(names):,} questions are above {NO_ANSWER_ABOVE:g} "
            f"({listed(above)}); as in the official script, they are unanswered in all but the best scores"
        )
    return odds


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the command line `argv`; prints and returns the scores, in per cent. Raises `InputError`."""
    set_up_logging()
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("--predictions", required=True, help="JSON file of question id to text")
    parser.add_argument("--validation_file", required=True, help="file with the answers, in SQuAD's JSON format")
    parser.add_argument("--version_2_with_negative", action="store_true", help="score as SQuAD 2.0")
    parser.add_argument("--null_odds", help="2.0: JSON file of question id to the odds of no answer")
    args = parser.parse_args(argv)
    if args.null_odds and not args.version_2_with_negative:
        raise InputError(f"null_odds={args.null_odds} needs version 2.0: add --version_2_with_negative")
    questions = squad_files.read_file(Path(args.validation_file), args.version_2_with_negative)
    names = [question.id for question in questions]
    texts, missing, others = squad_files.read_answers(Path(args.predictions), names, "prediction", str)
    if others:
        logger.warning(f"{args.predictions}: {len(others):,} ids match no question: {listed(others)}")
    if missing:
        lacks = f"no prediction for {len(missing):,} of {len(names):,} questions ({listed(missing)})"
        if args.version_2_with_negative:
            raise InputError(f"{args.predictions} has {lacks}; the official 2.0 script does not score such a file")
        logger.warning(f"{args.predictions} has {lacks}; they count as wrong")
    answers = squad_files.gold_answers(questions)
    if args.version_2_with_negative:
        scores = score_2(texts, answers, read_odds(args.null_odds, names) if args.null_odds else None)
    else:
        scores = score_1(texts, answers)
    print(json.dumps(scores, indent=2))
    return scores


if __name__ == "__main__":
    exit_on_error(main)
