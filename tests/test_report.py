"""results/report.py: tables, verdict, curves and pages agree with the records; missing results are named."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.record import SUMMARY_NAME, write_record
from roberta_recipe.tasks.summaries import Run, summarise

EMPTY = "# Title\n<!-- results: made by make report -->\nold\n<!-- end of results -->\nafter\n"


@pytest.fixture(scope="module")
def ledger(root):
    """results/report.py, loaded as a module."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("ledger", root / "results" / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_pretraining(folder, perplexity=50.25):
    folder.mkdir(parents=True)
    record = {
        "metrics": {"eval_loss": 3.9, "eval_perplexity": perplexity, "eval_blocks": 1024},
        "metrics_by_source": {
            name: {"loss": loss, "perplexity": 2.5 * loss, "unigram_entropy": 6.5}
            for name, loss in (("a", 3.0), ("b", 4.0))
        },
        "steps": 100,
        "tokens_seen": 2_000_000,
        "tokens_per_second": 1234,
        "train_seconds": 7200.0,
        "peak_memory_bytes": 3e9,
        "parameters": 5_000_000,
        "unigram_entropy": 6.5,
        "loss_at_steps": {"train": [[50, 5.0], [100, 4.0]], "validation": [[50, 4.8], [100, 3.9]]},
        "tokens_at_steps": [[50, 500_000]],
        "counts": {"train": {}, "validation": {"a": {"blocks": 1000}, "b": {"blocks": 24}}},
        "hardware": {"gpus": ["NVIDIA H200"], "cpu_cores": 16, "machine": "x86_64"},
        "global_batch_size": 32,  # derived, so not among the arguments
        "resolved_args": {
            "max_seq_length": 128,
            "max_steps": 100,
            "learning_rate": 1e-3,
            "output_dir": "/home/me/x",
        },
        "shown_args": ["global_batch_size"],
    }
    durable.write_sealed(folder / "run_record.json", record)
    (folder / "loss_curve.png").write_bytes(b"png")


def write_tuning(folder, scores, task="rte", metric="accuracy", degenerate=False, majority=0.5, **args):
    args = {"learning_rate": 1e-4, "global_batch_size": 16, "num_train_epochs": 3.0, "max_seq_length": 64, **args}
    settings = {"resolved_args": {**args, "data_dir": "/home/somebody/data"}, "shown_args": [*args, "doc_stride"]}
    runs = [Run(1e-4, 16, seed, folder / f"lr0.0001-batch16-seed{seed}") for seed in range(1, len(scores) + 1)]
    records = [
        {
            "metrics": {metric: score},
            "steps": 60,
            "tokens_seen": 1_500_000,
            "tokens_per_second": 900,
            "train_seconds": 1800.0,
            "score_at_steps": [[30, 0.5], [60, score]],
            "degenerate": degenerate,
            "parameters": 5_000_000,
            "versions": {},
            "commit": "abc",
            "hardware": {"gpus": [], "cpu_cores": 2, "machine": "x86_64"}
            | ({"processor": "EPYC"} if len(scores) == 1 else {}),
            **settings,
        }
        for score in scores
    ]
    for run, record in zip(runs, records, strict=True):
        run.output_dir.mkdir(parents=True)
        durable.write_sealed(run.output_dir / "run_record.json", record)
    dataset = {"name": f"GLUE {task}", "hub_id": None, "hub_config": None, "split": "validation", "note": ""}
    dataset |= {"task_type": "text-classification", "hub_metrics": {metric: metric}}
    baseline = None if majority is None else {"answer": "yes", "metrics": {metric: majority}}
    measured = {"dataset": dataset, "scored_examples": {"validation": 277}, "baseline": baseline}
    summary = summarise(runs, records, metric) | {"task": task, "duplicates": {}, **measured, **settings}
    write_record(summary, folder / SUMMARY_NAME)


def report(ledger, tmp_path, *argv):
    ledger.main(["--results", str(tmp_path / "results"), *map(str, argv)])
    return (tmp_path / "results" / "README.md").read_text()


def write_blimp(folder, score, random):
    """Write BLiMP scores next to a pretraining record."""
    scores = [
        {"mean_of_paradigms": mean, "mean_of_phenomena": mean}
        | {f"mean_of_{kind}_interval": [mean - 0.01, mean + 0.01] for kind in ("paradigms", "phenomena")}
        for mean in (score, *random)
    ]
    ours, *controls = [{"pll": values} for values in scores]
    record = {"scores": ours, "random_weights": controls, "pairs": 6700, "partial": "", "weights": "of the scores"}
    durable.write_sealed(folder / "blimp.json", record)


def write_pair(ledger, tmp_path, task, pretrained, random, **settings):
    """Add a fine-tuning of the model `mini`, and its control from random weights."""
    write_tuning(tmp_path / f"{task}_ours", pretrained, task=task, **settings)
    write_tuning(tmp_path / f"{task}_random", random, task=task, random_weights=True, **settings)
    for side in ("ours", "random"):
        ledger.add(tmp_path / "results", tmp_path / f"{task}_{side}", "mini", "made of 277 rows" * (task == "rte"))


def test_tables_show_the_records(ledger, tmp_path):
    write_pretraining(tmp_path / "runs" / "mini")
    write_tuning(tmp_path / "runs" / "glue" / "rte", [0.6, 0.7, 0.55], max_train_samples=2000)
    write_tuning(tmp_path / "runs" / "few" / "rte", [0.58], max_train_samples=500)
    write_tuning(
        tmp_path / "runs" / "random" / "rte_random",
        [0.51],
        degenerate=True,
        random_weights=True,
        max_train_samples=2000,
    )
    report(ledger, tmp_path, "--add", tmp_path / "runs/mini")
    (tmp_path / "results/speedrun.md").write_text("text")
    for folder in ("glue/rte", "few/rte", "random/rte_random"):
        whole = report(ledger, tmp_path, "--add", tmp_path / "runs" / folder, "--name", "mini", "--note", "odd")
    # one line for a task and number of examples, with pretrained, random and majority side by side
    figures = "60.0 (55.0 to 70.0, 3 seeds) | 51.0 (1 seed, 1 degenerate) | 50.0 (always yes) | 86.6 (base 78.7)"
    lines = [line for line in whole.splitlines() if line.startswith("| GLUE rte, accuracy, ")]
    assert lines[0].startswith("| GLUE rte, accuracy, 500 training examples | mini | 58.0 (1 seed) | - | 50.0 (alw")
    assert lines[1:] == [
        f"| GLUE rte, accuracy, 2,000 training examples | mini | {figures} | validation, 277 examples | - |"
    ]
    assert whole.count("GLUE rte: odd.") == 1  # the note of both sides, once
    (waiting,) = [line for line in whole.splitlines() if line.startswith("Not run from these models: ")]
    assert "GLUE cola, matthews_correlation" in waiting and "RACE, high" in waiting and "rte" not in waiting
    assert "not run" not in whole and "[speedrun.md](speedrun.md)" in whole and whole.index("**mini**") < 30
    settings, spent = "0.0001, batch 16, 3 epochs, length 64, 2,000 examples", "4.5 M | 2 cores of x86_64 | 1.50 |"
    assert f"(55.0 to 70.0, 3 seeds) | validation, 277 examples | {settings} | {spent}" in whole
    assert "| mini, random weights | 51.0 (1 seed, 1 degenerate) |" in whole
    assert "length 64, 2,000 examples | 1.5 M | 2 cores of EPYC | 0.50 |" in whole
    assert "| mini | 5.0 M | 50.25 | validation, 1,024 blocks | 32 x 128, 100 steps at 0.001 | 2.0 M" in whole
    assert "| NVIDIA H200 | 2.00 | 1,234 | 3.0 GB | a 7.50; b 10.00 |" in whole

    assert len(ledger.paper_rows()) == 9 + 4 + 3
    names = sorted(path.name for path in (tmp_path / "results/mini").glob("rte*"))
    assert names == [
        *("rte_max_train_samples_2000.json", "rte_max_train_samples_500.json"),
        "rte_random_weights_max_train_samples_2000.json",
    ]
    stored = json.loads((tmp_path / "results/mini" / names[0]).read_text())
    assert len(stored["runs"]) == 3 and "somebody" not in json.dumps(stored)
    assert (stored["scored_examples"], stored["baseline"]["answer"]) == ({"validation": 277}, "yes")
    shown = {"learning_rate", "global_batch_size", "num_train_epochs", "max_seq_length", "max_train_samples"}
    assert set(stored["resolved_args"]) == shown


@pytest.mark.parametrize(
    ("pretrained", "random", "majority", "said"),
    [
        ([0.63, 0.66, 0.68], [0.61, 0.62, 0.60], 0.5, "Suggestive, no more: GLUE rte 66.0 against 61.0, p 0.100."),
        ([0.61, 0.64, 0.68], [0.61, 0.66, 0.60], 0.5, "Level with random weights: GLUE rte 64.0 against 61.0"),
        ([0.63, 0.66, 0.68], [0.61, 0.62, 0.60], 0.66, "Not above the majority answer: GLUE rte 66.0 against 61.0 "
         "(66.0)"),
        ([0.51, 0.52, 0.53, 0.54, 0.5], [0.61, 0.62, 0.60, 0.63, 0.64], None, "Below random weights: GLUE rte 52.0 "
         "against 62.0, p 0.008."),
        ([None, 0.66, 0.68], [0.61, 0.62, 0.60], 0.5, "Suggestive, no more: GLUE rte 66.0 against 61.0, p 1.000."),
        ([0.63, 0.66, 0.68], [0.61], 0.5, "A single seed, so no statement: GLUE rte 66.0 against 61.0"),
        ([0.7, 0.71, 0.72, 0.73, 0.74], [0.6, 0.61, 0.62, 0.63, 0.64], 0.5, "**Better than random weights on GLUE rte "
         "72.0 against 62.0, p 0.008.**"),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_the_seeds(ledger, tmp_path, pretrained, random, majority, said):
    write_pretraining(tmp_path / "results" / "mini")
    write_pair(ledger, tmp_path, "rte", pretrained, random, majority=majority)
    (verdict,) = ledger.verdict(ledger.read(tmp_path / "results"))
    assert said in verdict and verdict.startswith(
        "**mini** (5.0 M parameters, 2.0 M tokens, 2.00 hours on NVIDIA H200): "
    )
    gains = "Not shown to be better than random weights on any task."
    assert (gains in verdict) == ("Better" not in said) and verdict.count("GLUE rte") == 1


def test_a_task_among_several_is_corrected_for_them(ledger, tmp_path):
    """Two tasks: 2 of 252 splits each, twice that by Holm; one of seven tasks would not be significant."""
    write_pretraining(tmp_path / "results" / "mini")
    apart = [0.7, 0.71, 0.72, 0.73, 0.74], [0.6, 0.61, 0.62, 0.63, 0.64]
    for task in ("rte", "mrpc"):
        write_pair(ledger, tmp_path, task, *apart)
    (verdict,) = ledger.verdict(ledger.read(tmp_path / "results"))
    assert verdict.count("against 62.0, p 0.016") == 2 and "Better than" in verdict
    same = [0.7, 0.61, 0.72, 0.63, 0.74], [0.7, 0.61, 0.72, 0.63, 0.74]
    for task in ("qnli", "qqp", "sst2", "wnli", "mnli"):
        write_pair(ledger, tmp_path, task, *same)
    (verdict,) = ledger.verdict(ledger.read(tmp_path / "results"))
    assert "Not shown to be better" in verdict and verdict.count("Suggestive") == 1
    assert "Too few seeds to show it: the least possible corrected p is 0.06." in verdict  # 7 x 2/252


def test_curves_stand_over_the_tokens_that_were_seen(ledger, tmp_path, monkeypatch):
    write_pretraining(tmp_path / "mini")
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    write_blimp(tmp_path / "mini", 0.7, [0.45, 0.55])
    ledger.plot_curves(ledger.read(tmp_path), tmp_path / "curves.png")
    loss, blimp = drawn[0].axes
    train, validation, entropy = loss.lines
    assert train.get_xdata() == pytest.approx([0.5, 2.0]) and list(train.get_ydata()) == [5.0, 4.0]
    assert validation.get_xdata() == pytest.approx([0.5, 2.0]) and list(validation.get_ydata()) == [4.8, 3.9]
    assert list(entropy.get_ydata()) == [6.5, 6.5]
    random, score, *published = blimp.lines
    assert random.get_ydata() == pytest.approx([50, 50]) and len(published) == 3
    assert (score.get_xdata(), score.get_ydata()) == (pytest.approx([2.0]), pytest.approx([70]))


def test_blimp_without_a_control_and_of_an_earlier_run(ledger, tmp_path):
    results, run = tmp_path / "results", tmp_path / "mini"
    write_pretraining(run)
    write_blimp(run, 0.7, [])
    assert "BLiMP 70.0" in report(ledger, tmp_path, "--add", run)
    assert "/home/me" not in (results / "mini" / "run_record.json").read_text()
    (run / "model.safetensors").write_bytes(b"trained again")
    with pytest.raises(InputError, match=r"blimp.json scores other weights: run make blimp again"):
        ledger.add(results, run, None)
    (run / "blimp.json").unlink()
    assert "BLiMP 70.0" not in report(ledger, tmp_path, "--add", run)


def test_readme_rows_are_written_on_request_the_best_first(ledger, tmp_path):
    write_pretraining(tmp_path / "results" / "mini")
    write_blimp(tmp_path / "results" / "mini", 0.7, [0.45, 0.55])
    write_pair(ledger, tmp_path, "rte", [0.7, 0.71, 0.72, 0.73, 0.74], [0.6, 0.61, 0.62, 0.63, 0.64])
    write_pair(ledger, tmp_path, "cola", [0.7, 0.6, 0.8], [0.6, 0.7, 0.8])  # level: no row
    for task, score in (("mrpc", 0.9), ("sst2", 0.95), ("qnli", 0.8), ("qqp", 0.4)):  # the last is below the majority
        write_tuning(tmp_path / task, [score], task=task)
        ledger.add(tmp_path / "results", tmp_path / task, "known")
    readme = tmp_path / "README.md"
    readme.write_text(EMPTY)
    report(ledger, tmp_path)
    assert readme.read_text() == EMPTY
    report(ledger, tmp_path, "--readme", readme)
    title, mark, _, _, *rows, end, after = readme.read_text().splitlines()
    assert (title, mark, end, after) == ("# Title", *ledger.MARKS, "after")
    shown = [row.strip("| ").split(" | ")[:4] for row in rows]
    assert shown == [
        ["mini", "BLiMP", "70.0 (69.0 to 71.0)", "50.0 (45.0 to 55.0, 2 seeds)"],
        ["mini", "GLUE rte, accuracy", "72.0 (70.0 to 74.0, 5 seeds)", "62.0 (60.0 to 64.0, 5 seeds)"],
        *(["known", f"GLUE {task}, accuracy", f"{score} (1 seed)", "50.0 (always yes)"]
          for task, score in (("sst2", 95.0), ("mrpc", 90.0), ("qnli", 80.0))),
    ]  # fmt: skip


def test_what_a_run_measured_of_a_task_is_shown_and_no_more(ledger, tmp_path):
    """RACE of a single level has no accuracy of the other; settings are those of the runs, which a sweep changes."""
    write_pretraining(tmp_path / "results" / "mini")
    write_tuning(tmp_path / "race", [0.42], task="race", level="middle", learning_rate=1e-5, max_steps=1560)
    (path,) = (tmp_path / "race").glob("*/run_record.json")
    record = json.loads(path.read_text())
    record["resolved_args"] |= {"learning_rate": 1e-4, "max_steps": -1, "seed": 1}
    durable.write_sealed(path, {**record, "metrics": {"accuracy": 0.42, "middle": 0.42}})
    whole = report(ledger, tmp_path, "--add", tmp_path / "race", "--name", "mini")
    first, _ = [line for line in whole.splitlines() if line.startswith("| RACE")]
    assert first.startswith("| RACE, middle | mini | 42.0 (1 seed) | - | - | 86.5 (test set) | validation, 277")
    assert "| mini, level middle | 42.0 (1 seed) | validation, 277 examples | 0.0001, batch 16, 3 epochs" in whole
    assert "RACE, accuracy; RACE, high" in whole.split("Not run from these models: ")[1]
    assert (tmp_path / "results/mini/race_level_middle.json").is_file()


def test_a_run_is_added_from_within_its_folder(ledger, tmp_path, monkeypatch):
    write_pretraining(tmp_path / "mini")
    monkeypatch.chdir(tmp_path / "mini")
    assert ledger.add(tmp_path / "results", Path("."), None) == tmp_path / "results" / "mini"


def test_sides_scored_on_other_examples_are_not_compared(ledger, tmp_path):
    write_pretraining(tmp_path / "results" / "mini")
    write_pair(ledger, tmp_path, "rte", [0.7, 0.71, 0.72, 0.73, 0.74], [0.6, 0.61, 0.62, 0.63, 0.64])
    path = tmp_path / "rte_random" / SUMMARY_NAME
    summary = json.loads(path.read_text())
    durable.write_sealed(path, {**summary, "scored_examples": {"validation": 100}})
    whole = report(ledger, tmp_path, "--add", tmp_path / "rte_random", "--name", "mini")
    assert "Better than random weights" not in whole and "p 0.008" not in whole
    lines = [line.split(" | ")[2:4] for line in whole.splitlines() if line.startswith("| GLUE rte, accuracy | mini | ")]
    assert [["-" in cells for cells in zip(line, strict=True)] for line in lines[:2]] == [[False, True], [True, False]]


def test_another_run_is_not_added_under_the_name_of_a_model(ledger, tmp_path):
    """Fine-tunings of the former model would stand beside the new one."""
    write_pretraining(tmp_path / "a" / "mini")
    write_pretraining(tmp_path / "b" / "mini", perplexity=40.0)
    report(ledger, tmp_path, "--add", tmp_path / "a/mini")
    with pytest.raises(InputError, match=r"results/mini has another run's run_record.json: .*--name, or"):
        report(ledger, tmp_path, "--add", tmp_path / "b/mini")
    assert "50.25" in report(ledger, tmp_path, "--add", tmp_path / "a/mini")  # again


def test_bad_input(ledger, tmp_path):
    with pytest.raises(InputError, match="holds no"):
        report(ledger, tmp_path)
    write_pretraining(tmp_path / "results" / "mini")
    write_tuning(tmp_path / "rte", [0.5])
    with pytest.raises(InputError, match="is a fine-tuning: name its pretrained model"):
        report(ledger, tmp_path, "--add", tmp_path / "rte")
    write_tuning(tmp_path / "my", [0.5], task="my")
    with pytest.raises(InputError, match="is fine-tuned on 'my', a task without a table in the paper"):
        report(ledger, tmp_path, "--add", tmp_path / "my", "--name", "mini")
    write_pretraining(tmp_path / "killed")
    (tmp_path / "killed" / "loss_curve.png").unlink()
    durable.write_sealed(tmp_path / "killed" / "blimp.json", {"scores": {}, "random_weights": []})
    with pytest.raises(InputError, match=r"killed has no loss_curve.png: copy it too, or move run_record.json away"):
        report(ledger, tmp_path, "--add", tmp_path / "killed")
    assert not (tmp_path / "results" / "killed").exists()
    proofs = tmp_path / "results" / "proofs.yaml"
    for text, message in (
        ("proofs: [{claim: a, figure: b}]", r"proofs.yaml, entry 1 of proofs has no 'command'"),
        ("proofs: [{claim: a, figure: 3, command: b}]", "figure is 3, and must be a valid string"),
    ):
        proofs.write_text(text)
        with pytest.raises(InputError, match=message):
            report(ledger, tmp_path)
    proofs.unlink()
    (tmp_path / "README.md").write_text("no marks")
    with pytest.raises(InputError, match="has no section between"):
        report(ledger, tmp_path, "--readme", tmp_path / "README.md")


def test_what_is_committed_is_what_the_records_give(ledger, root):
    """The committed page and README table are up to date: run `make report` after each change."""
    found = ledger.read(root / "results")
    sections = ledger.sections(found, root / "results")
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert ledger.MARKS[0] not in readme or ledger.with_rows(readme, ledger.best_rows(found)) == readme
    assert (root / "results" / "README.md").read_text(encoding="utf-8") == ledger.as_markdown(sections)
    records = json.dumps([*found.pretrained.values(), *found.tuned.values()])
    assert not re.search(r'"/(home|root|tmp|work|mnt)/', records)
    named = [re.sub(r"^`python (-m )?", "", command).strip("`").split()[0] for *_, command in found.proofs]
    assert len(named) >= 4 and all((root / name).exists() or (root / name.replace(".", "/")).exists() for name in named)
    pages = {target for target in re.findall(r"\]\(([^)#]+)", str([*found.proofs, *found.orderings]))}
    assert pages and all((root / "results" / target).is_file() for target in pages)


def test_every_committed_score_names_its_examples_and_the_majority(ledger, root):
    """A share of n examples times n is a whole number; n must be the number of scored examples."""
    found, checked = ledger.read(root / "results"), 0
    for (model, name), entry in found.tuned.items():
        ((split, count), *by_level) = entry["scored_examples"].items()
        assert by_level == ([("middle", 1436), ("high", 3451)] if name.startswith("race") and count > 491 else [])
        assert split == "validation" and isinstance(entry["note"], str)
        assert (entry["baseline"] is None) == (entry["task"] in ("squad 1.1", "stsb")), (model, name)
        measured = [record["metrics"] for record in entry["runs"]] + [(entry["baseline"] or {"metrics": {}})["metrics"]]
        for metrics in measured:
            for metric in {"accuracy", "exact", "exact_match"} & metrics.keys():
                assert metrics[metric] * count == pytest.approx(round(metrics[metric] * count), abs=1e-6), (model, name)
                checked += 1
    assert checked == 130
    official = {"cola": 1043, "sst2": 872, "mrpc": 408}
    counts = {entry["task"]: entry["scored_examples"]["validation"] for entry in found.tuned.values()}
    assert official.items() <= counts.items()
    noted = {entry["task"] for entry in found.tuned.values() if entry["note"]}
    assert noted == {"sst2", "squad 1.1", "race"}
