"""GLUE results compared with the paper's Table 5 (section 5.1), and the submission for the GLUE server.

    python tools/glue_table.py --folder runs/glue                     # or: make glue-all
    python tools/glue_table.py --folder runs/glue --submission        # or: make glue-submission

Reads `<folder>/<task>/summary.json` of finished tasks. A star marks differences from the preset (presets/glue) or from
section 5.1, which are listed below the table. `<folder>/submission.zip` needs the predictions of all tasks
(`finetune_glue.py --do_predict`).
"""

import statistics
import sys
import zipfile
from pathlib import Path

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.input_files import ROOT, read_text
from roberta_recipe.log import counted
from roberta_recipe.record import SUMMARY_NAME, Summary, percent, picked_setting, read_record
from roberta_recipe.settings import RecipeParser, load_yaml
from roberta_recipe.tasks import glue
from roberta_recipe.tasks.summaries import test_set_lines

PAPER_SEEDS = 5  # section 5.1
PRESETS = ROOT / "presets" / "glue"
# preset keys that are not part of the protocol; with --sweep, the grid's too
_NOT_PROTOCOL = ("model_name_or_path", "output_dir", "seeds", "spacy_model", "report_to", "logging_steps", "eval_steps")
_NOT_PROTOCOL += ("per_device_train_batch_size", "per_device_eval_batch_size", "save_strategy", "save_total_limit")
_DEFAULTS = {"layer_decay": 1.0, "random_weights": False, "qnli_form": "classification", "label_smoothing_factor": None}
_DEFAULTS |= {"optim": "adamw_torch_fused", "optim_args": None, "neftune_noise_alpha": None, "tokenizer_name": None}
_OF_GRID = ("learning_rate", "global_batch_size", "max_steps", "warmup_steps")
COLUMNS = ("mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb", "wnli")  # in the order of Table 5


def main(argv: list[str] | None = None) -> dict[str, str]:
    """Run the command line `argv`; returns the median of each finished task, times 100. Raises `InputError`."""
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("--folder", required=True, help="folder with a folder per task")
    parser.add_argument("--sweep", action="store_true", help="results of --sweep")
    parser.add_argument("--submission", action="store_true", help="zip the predictions of all tasks")
    parser.add_argument("--other_rows", action="store_true", help="accept row counts other than GLUE's")
    args = parser.parse_args(argv)
    below = glue.SWEEP_FOLDER if args.sweep else ""
    summaries = finished_tasks(args.folder, below)
    medians = {name: percent(picked_setting(summary)["median"]) for name, summary in summaries.items()}
    model = statistics.mode(_model(summary) for summary in summaries.values())
    differing = {name: found for name, summary in summaries.items() if (found := _differs(summary, args.sweep, model))}
    ours = {name: median + "*" * (name in differing) for name, median in medians.items()}
    rows = {"RoBERTa-large, Table 5": glue.PAPER["large"], "RoBERTa-base, fairseq": glue.PAPER["base"], "ours": ours}
    print(" " * 24 + "".join(f"{name:>9}" for name in COLUMNS))
    for title, row in rows.items():
        missing = "not run" if row is ours else "-"
        print(f"{title:<24}" + "".join(f"{row.get(name, missing):>9}" for name in COLUMNS))
    for name, found in differing.items():
        print(f"* {name}, not comparable with Table 5: {'; '.join(found)}")
    for name, summary in summaries.items():
        for line in test_set_lines(summary):
            print(f"{name}: {line}")
    if args.submission:
        tasks = {**glue.TASKS, "ax": glue.AX}
        folders = {name: Path(args.folder, "mnli" if name == "ax" else name, below, "submission") for name in tasks}
        path = Path(args.folder, below, "submission.zip")
        path.parent.mkdir(exist_ok=True)
        print(f"{path}: {', '.join(zip_submission(tasks, folders, path, official_rows=not args.other_rows))}")
    return medians


def finished_tasks(folder: str, below: str) -> dict[str, Summary]:
    """The summaries in `<folder>/<task>/<below>` by task. Raises `InputError` without any, or for another task's."""
    paths = {name: Path(folder, name, below, SUMMARY_NAME) for name in COLUMNS}
    needed = ("settings", "picked", "task", "dataset", "resolved_args")
    advice = "move its folder away to run it again"
    finished = {name: read_record(path, needed, advice) for name, path in paths.items() if path.is_file()}
    if not finished:
        where = Path("<task>", below, SUMMARY_NAME)
        raise InputError(f"folder={folder} holds no finished task ({where}): run make glue TASK=rte")
    for name, summary in finished.items():
        if summary["task"] != name:
            raise InputError(f"{paths[name]} has the task {summary['task']!r}: rename its folder to that task")
    return finished


def _model(summary: Summary) -> str:
    return str(Path(summary["resolved_args"]["model_name_or_path"]))  # without a slash at the end


def _differs(summary: Summary, sweep: bool, model: str) -> list[str]:
    """Differences from Table 5's protocol, from the task's preset, and from the `model` of most tasks, as text."""
    found, args = [], summary["resolved_args"]
    if _model(summary) != model:
        found.append(f"fine-tuned from {_model(summary)} (most tasks: {model})")
    if (seeds := len(picked_setting(summary)["seeds"])) != PAPER_SEEDS:
        found.append(f"the median of {counted(seeds, 'seed')} (paper: {PAPER_SEEDS})")
    if summary["dataset"]["hub_id"] is None:
        found.append("rows that are not GLUE's")
    if count := args.get("max_train_samples"):
        found.append(f"trained on the first {counted(count, 'example')}")
    protocol = {**_DEFAULTS, **load_yaml(PRESETS / f"{summary['task']}.yaml")}
    for name in [name for name in protocol if name not in (*_NOT_PROTOCOL, *(_OF_GRID * sweep))]:
        if args.get(name) != protocol[name]:
            ours = "num_train_epochs" if name == "max_steps" and args["max_steps"] == -1 else name
            found.append(f"{ours}={args.get(ours)} instead of {name}={protocol[name]}")
    return found


def zip_submission(tasks: dict[str, glue.Task], folders: dict[str, Path], path: Path, official_rows: bool) -> list[str]:
    """Check and zip the eleven files for the GLUE server; returns their names. `folders`: of predictions by task.
    Raises `InputError` with the missing and invalid files."""
    files, faults = {}, []
    for name, task in tasks.items():
        for split, file in task.submission.items():
            source = folders[name] / file
            files[file] = source
            fault = _fault(task, source, task.splits[split][1] if official_rows else None)
            faults += [f"{source}: {fault}"] if fault else []
    if faults:
        raise InputError(
            f"no submission: {len(faults)} of {len(files)} files are missing or invalid. " + "; ".join(faults)
        )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, source in files.items():
            archive.write(source, file)
    return list(files)


def _fault(task: glue.Task, path: Path, rows: int | None) -> str | None:
    if not path.is_file():
        return "missing; run its task with --do_predict"
    header, *lines = read_text(path).splitlines() or [""]
    if header != "index\tprediction":
        return f"its first line is {header!r}"
    if rows is not None and len(lines) != rows:
        return f"{len(lines)} rows, but the test set has {rows}"
    allowed = set(task.labels)
    for number, line in enumerate(lines):
        index, _, prediction = line.partition("\t")
        if index != str(number):
            return f"index {index} instead of {number}"
        if not (prediction in allowed if allowed else glue.is_score(prediction)):
            return f"row {number}: {prediction!r} is not a label of {task.folder}"
    return None


if __name__ == "__main__":
    exit_on_error(main)
