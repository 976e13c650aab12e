"""The official scores of a predictions.json, as JSON.

    python -m roberta_recipe.tools.squad_score --predictions predictions.json --validation_file dev-v1.1.json
    ... --predictions span_predictions.json --version_2_with_negative --null_odds null_odds.json   # and a dev-v2.0.json

Every question of the file needs a prediction. With null_odds, the best scores over all thresholds come too.
"""

import argparse
import json
from pathlib import Path

from roberta_recipe.args import RecipeParser
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.log import logger, set_up_logging
from roberta_recipe.tasks import squad
from roberta_recipe.tasks.squad_metric import Squad


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("--predictions", required=True, help="JSON file of question id to text")
    parser.add_argument("--validation_file", required=True, help="file with the answers, in SQuAD's JSON format")
    parser.add_argument("--version_2_with_negative", action="store_true", help="score as SQuAD 2.0")
    parser.add_argument("--null_odds", help="2.0: JSON file of question id to the probability of no answer")
    args = parser.parse_args(argv)
    if args.null_odds and not args.version_2_with_negative:
        raise InputError(f"null_odds={args.null_odds} goes with version 2.0: add --version_2_with_negative")
    return args


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the command line `argv`; prints and returns the scores, in per cent. Raises `InputError`."""
    set_up_logging()
    args = parse(argv)
    questions = squad.read_file(Path(args.validation_file), args.version_2_with_negative)
    names = [question.id for question in questions]
    texts, others = squad.read_answers(Path(args.predictions), names, "prediction", str)
    if others:
        logger.warning(f"{args.predictions}: {len(others):,} ids are not asked for: {squad.listed(others)}")
    predictions = [{"id": name, "prediction_text": text} for name, text in texts.items()]
    if args.version_2_with_negative:
        odds = dict.fromkeys(names)
        if args.null_odds:
            odds, _ = squad.read_answers(Path(args.null_odds), names, "probability", (int, float))
        predictions = [row | {"no_answer_probability": odds[row["id"]]} for row in predictions]
    metric = Squad("2.0" if args.version_2_with_negative else "1.1", keep_in_memory=True)
    scores = metric.compute(predictions=predictions, references=squad.references(questions))
    print(json.dumps(scores, indent=2))
    return scores


if __name__ == "__main__":
    exit_on_error(main)
