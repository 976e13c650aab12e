"""A protocol's scores as a text table, beside the paper's and the majority answer's, and the paths of its files."""

from pathlib import Path

from roberta_recipe.record import SUMMARY_NAME, SettingScores, Summary, percent, picked_setting
from roberta_recipe.tasks.answers import ANSWERS_NAME
from roberta_recipe.training.finetune_trainer import BEST_NAME, WEIGHTS


def table(summary: Summary, paper: str, others: tuple[str, ...] = ()) -> str:
    """Each setting with its median, spread and seeds, the best marked, and medians of the metrics `others`; the line
    `paper` below, what one answer to everything scores, test sets, and where the best run's files are."""
    metric, settings = summary["metric"], summary["settings"]
    lines = [f"\n{summary['task']}, validation {metric} x 100"]
    lines += [f"{'rate':>10}{'batch':>7}{'median':>8}{'lowest':>8}{'highest':>9}  seeds"]
    for number, row in enumerate(settings):
        seeds = ", ".join(f"{seed}: {percent(value)}" for seed, value in row["seeds"].items())
        picked = number == summary["picked"] and len(settings) > 1
        lines.append(
            f"{row['learning_rate']:>10g}{row['global_batch_size']:>7}{percent(row['median']):>8}"
            f"{percent(row['lowest']):>8}{percent(row['highest']):>9}  {seeds}"
            f"{'  <- best median, picked on validation' * picked}"
        )
        if others:
            medians = ", ".join(f"{name} {percent(row['medians'][name])}" for name in others)
            lines.append(f"{'':>10}medians: {medians}")
        if row["degenerate_seeds"]:
            listed = ", ".join(map(str, row["degenerate_seeds"]))
            lines.append(f"{'':>10}degenerate (one answer to everything): seed {listed}")
    best = Path(picked_setting(summary)["best_run"])
    answers, about = best / ANSWERS_NAME, best.parent / SUMMARY_NAME
    files = [f"best epoch  {best / BEST_NAME}"] if (best / BEST_NAME / WEIGHTS).is_file() else []
    files += [f"{name:<12}{path}" for name, path in {"answers": answers, "summary": about}.items() if path.is_file()]
    return "\n".join([*lines, *filter(None, [paper, _beside_one_answer(summary)]), *of_tests(summary), *files])


def of_tests(summary: Summary) -> list[str]:
    """The medians on each test split with known answers, a line each."""
    lines = []
    for split, scores in summary.get("tests", {}).items():
        medians = ", ".join(f"{name} {percent(value)}" for name, value in scores["medians"].items())
        seeds = ", ".join(map(str, scores["seeds"]))
        lines.append(f"{split} set ({scores['examples']:,} examples), medians of seeds {seeds}: {medians}")
    return lines


def _beside_one_answer(summary: Summary) -> str:
    """The score of one answer to everything, with a warning where no seed is above it; empty where it is not known."""
    row: SettingScores = picked_setting(summary)
    best = max(row["seeds"], key=row["seeds"].get)
    kept = f"the weights that are kept, of seed {best}, give one answer to everything"
    kept = kept if best in row["degenerate_seeds"] else ""
    value = (summary["baseline"] or {"metrics": {}})["metrics"].get(summary["metric"])
    if value is None:
        return kept and f"Warning: {kept}"
    above = row["highest"] > value
    doubts = "; ".join(filter(None, ["" if above else "no seed is above it", kept]))
    return f"Majority answer: {percent(value)} (always {summary['baseline']['answer']})" + (doubts and f": {doubts}")
