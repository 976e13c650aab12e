"""Accuracy of a masked LM on BLiMP's minimal pairs (Warstadt et al. 2020), by pseudo-log-likelihood.

    python tools/blimp.py --model_name_or_path runs/mine --data_dir blimp      # or: make blimp MODEL=...
    python tools/blimp.py --model_name_or_path FacebookAI/roberta-base         # all from the Hub
    python tools/blimp.py --model_name_or_path runs/mine --data_dir blimp --pairs 100    # a tenth of it

Takes a masked LM with a fast tokenizer. Two methods: each token masked alone, or with the later tokens of its word. The
control is the same architecture with random weights: pairs differ in length, so chance is not 50. In fp32 or bf16.
Writes blimp.json and blimp.png into the checkpoint's folder or --output_dir.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from roberta_recipe import durable
from roberta_recipe import record as records
from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.hardware import describe_machine
from roberta_recipe.input_files import resolve_path
from roberta_recipe.log import counted, duration, logger, set_up_logging
from roberta_recipe.model import weights
from roberta_recipe.publishing import blimp_table, plots
from roberta_recipe.publishing.tables import markdown_table
from roberta_recipe.settings import RecipeParser
from roberta_recipe.tasks import blimp, pseudo_likelihood
from roberta_recipe.training import launching

CHART_NAME = "blimp.png"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("--model_name_or_path", required=True, help="checkpoint: a folder or a Hub id")
    parser.add_argument("--tokenizer_name", help="tokenizer of a checkpoint without one")
    parser.add_argument("--data_dir", help=f"folder of BLiMP's *.jsonl; without it, {blimp.HUB_ID} from the Hub")
    parser.add_argument("--pairs", type=int, help="number of pairs per paradigm; default: all")
    parser.add_argument(
        "--methods", nargs="+", choices=pseudo_likelihood.METHODS, default=list(pseudo_likelihood.METHODS),
        help="each token masked alone (pll), or with the later tokens of its word (within_word)",
    )  # fmt: skip
    more = "number of controls with random weights; each takes as long as the model"
    parser.add_argument("--random_seeds", type=int, default=1, help=more)
    parser.add_argument("--bf16", action="store_true", help="bf16 matrix products; changes scores by about 0.01 nats")
    parser.add_argument("--output_dir", help="folder for blimp.json and blimp.png")
    values = vars(parser.parse_args(argv))
    name, folder = values["model_name_or_path"], resolve_path(values["model_name_or_path"])
    beside = folder if folder.is_dir() else Path("runs", "blimp", name.replace("/", "-"))
    return argparse.Namespace(**{**values, "output_dir": Path(values["output_dir"] or beside)})


def check_output(path: Path, pairs: int, methods: list[str], controls: int) -> None:
    """Raise `InputError` if `path` cannot be written, or has results on more pairs, methods or controls than this
    run."""
    durable.check_output_file(path, "output_dir", "name another folder")
    try:
        before = durable.read_sealed(path)
        more = before["pairs"] > pairs or not before["scores"].keys() <= set(methods)
        more |= len(before["random_weights"]) > controls
    except (OSError, ValueError, KeyError):  # missing or damaged
        return
    if more:
        raise InputError(
            f"{path} has {before['pairs']:,} pairs by {', '.join(before['scores'])}, with "
            f"{counted(len(before['random_weights']), 'control')}, more than this run: "
            "name another output_dir, or move the file away"
        )


def score_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: blimp.Pairs, methods: list[str], bf16: bool
) -> dict[str, records.BlimpScores]:
    """A model's scores by method."""
    scores = pseudo_likelihood.log_likelihoods(model, tokenizer, pairs.sentences, methods, bf16=bf16)
    return {
        method: blimp.accuracies(blimp.outcomes(pairs, scores[pseudo_likelihood.METHODS.index(method)]))
        for method in pseudo_likelihood.METHODS
        if method in methods
    }


def report(record: records.BlimpRecord) -> str:
    """The printed tables."""
    head = ("phenomenon", *record["scores"], *(f"random, {m}" for m in record["scores"] if record["random_weights"]))
    ties = ", ".join(f"{scores['ties']:,} by {method}" for method, scores in record["scores"].items())
    return "\n\n".join(
        [
            markdown_table(head, by_phenomenon(record)),
            markdown_table(blimp_table.HEAD, blimp_table.rows({record["model"]: record})),
            f"Ties, which count half: {ties}. " + blimp_table.EXPLANATION,
        ]
    )


def by_phenomenon(record: records.BlimpRecord) -> list[tuple[str, ...]]:
    """(phenomenon, score by each method, the control's by each method) in per cent."""
    rows = []
    for name in next(iter(record["scores"].values()))["by_phenomenon"]:
        own = [records.percent(scores["by_phenomenon"][name]) for scores in record["scores"].values()]
        methods = record["scores"] if record["random_weights"] else ()
        control = [records.percent(_mean(record["random_weights"], method, name)) for method in methods]
        rows.append((name, *own, *control))
    return rows


def _mean(controls: list, method: str, phenomenon: str) -> float:
    """The controls' mean score on a phenomenon."""
    return statistics.fmean(control[method]["by_phenomenon"][phenomenon] for control in controls)


def plot(record: records.BlimpRecord, path: Path) -> None:
    """PNG with bars by phenomenon: the model with its interval, and random weights."""
    method, scores = next(iter(record["scores"].items()))
    figure, axes = plots.subplots(1, 1, 7, 5.5)
    names = list(scores["by_phenomenon"])[::-1]
    own = [100 * scores["by_phenomenon"][name] for name in names]
    ends = [[100 * end for end in scores["by_phenomenon_interval"][name]] for name in names]
    errors = [[max(0.0, x - low) for x, (low, _) in zip(own, ends, strict=True)],
              [max(0.0, high - x) for x, (_, high) in zip(own, ends, strict=True)]]  # fmt: skip
    rows = range(len(names))
    axes.barh([p + 0.2 for p in rows], own, 0.4, xerr=errors, color="C0", label=record["model"])
    if record["random_weights"]:
        control = [100 * _mean(record["random_weights"], method, name) for name in names]
        axes.barh([p - 0.2 for p in rows], control, 0.4, color="C7", label="random weights")
    axes.set_yticks(list(rows), [name.replace("_", " ") for name in names])
    axes.set_xlabel(f"acceptable sentence higher, %, by {blimp_table.SHOWN[method]}", fontsize=9)
    axes.set_xlim(0, 100)
    axes.axvline(50, color="grey", linestyle="--", linewidth=0.8)
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize=8, loc="lower right")
    partial = f"; partial: {record['partial']}" * bool(record["partial"])
    figure.suptitle(f"BLiMP, {record['pairs']:,} pairs{partial}", fontsize=10)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> records.BlimpRecord:
    """Run the command line `argv`; prints the tables and returns the record. Raises `InputError`."""
    set_up_logging()
    launching.set_up_process()
    args, started_s = parse(argv), time.monotonic()
    if args.output_dir.exists():
        durable.make_folder(args.output_dir)  # before the work: raises for a file
    pairs = blimp.read(args.data_dir, args.pairs)
    model, tokenizer = pseudo_likelihood.load_masked_lm(args.model_name_or_path, args.tokenizer_name)
    durable.make_folder(args.output_dir)
    check_output(args.output_dir / records.BLIMP_NAME, len(pairs.good), args.methods, args.random_seeds)
    name = args.model_name_or_path
    logger.info(f"BLiMP       {counted(len(pairs.good), 'pair')}" + f", partial: {pairs.partial}" * bool(pairs.partial))
    own, controls = score_model(model, tokenizer, pairs, args.methods, args.bf16), []
    for seed in range(1, args.random_seeds + 1):
        logger.info(f"Control     random weights, seed {seed}")
        set_seed(seed)
        control = weights.fresh(AutoModelForMaskedLM, model.config).to(model.device).eval()
        controls.append(score_model(control, tokenizer, pairs, args.methods, args.bf16))
    record: records.BlimpRecord = {
        "model": resolve_path(name).resolve().name if resolve_path(name).is_dir() else name,
        "parameters": model.num_parameters(),
        "scores": own,
        "random_weights": controls,
        "pairs": len(pairs.good),
        "partial": pairs.partial,
        "pairs_digest": durable.fingerprint([pairs.good, pairs.bad]),
        "bf16": args.bf16,
        "weights": weights.content_hash(name),
        "tokenizer": tokenization.tokenizer_fingerprint(tokenizer),
        "wall_clock_s": round(time.monotonic() - started_s, 1),
        "versions": records.versions(),
        "commit": records.git_commit(),
        "hardware": describe_machine(),
    }
    records.write_record(record, args.output_dir / records.BLIMP_NAME)
    plot(record, args.output_dir / CHART_NAME)
    print(report(record))
    print(f"\n{duration(record['wall_clock_s'])}; {args.output_dir / records.BLIMP_NAME}, {CHART_NAME}")
    return record


if __name__ == "__main__":
    exit_on_error(main)
