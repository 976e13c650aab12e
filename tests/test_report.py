"""The ledger: tables, curves and page say what the records say, and "not run" where a record is missing."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from conftest import run_python

from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.publishing import plots
from roberta_recipe.record import finite
from roberta_recipe.tasks.protocol import Run, summarise

EMPTY = "# Title\n<!-- results: made by `make report` -->\nold\n<!-- end of results -->\nafter\n"


@pytest.fixture(scope="module")
def ledger(root):
    """results/report.py, a script beside the records, loaded as a module."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("ledger", root / "results" / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_pretraining(folder, perplexity=50.25):
    folder.mkdir(parents=True)
    record = {
        "metrics": {"eval_loss": 3.9, "eval_perplexity": perplexity},
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
        "hardware": {"gpus": ["NVIDIA H200"], "cpu_cores": 16},
        "resolved_args": {"global_batch_size": 32, "max_seq_length": 128, "max_steps": 100, "learning_rate": 1e-3},
        "shown_args": ["global_batch_size"],
    }
    (folder / "run_record.json").write_text(json.dumps(record))
    (folder / "loss_curve.png").write_bytes(b"png")


def write_tuning(folder, scores, task="rte", metric="accuracy", degenerate=False, **args):
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
            "hardware": {"gpus": [], "cpu_cores": 2},
            **settings,
        }
        for score in scores
    ]
    for run, record in zip(runs, records, strict=True):
        run.output_dir.mkdir(parents=True)
        (run.output_dir / "run_record.json").write_text(json.dumps(record))
    dataset = {"name": f"GLUE {task}", "hub_id": None, "hub_config": None, "split": "validation", "note": ""}
    dataset |= {"task_type": "text-classification", "hub_metrics": {metric: metric}}
    summary = summarise(runs, records, metric) | {"task": task, "dataset": dataset, "duplicates": {}, **settings}
    (folder / "summary.json").write_text(json.dumps(finite(summary)))


def report(ledger, tmp_path, *argv):
    readme = tmp_path / "README.md"
    readme.exists() or readme.write_text(EMPTY)
    ledger.main(["--results", str(tmp_path / "results"), "--readme", str(readme), *map(str, argv)])
    return readme.read_text(), (tmp_path / "results" / "index.html").read_text()


def test_tables_show_the_records(ledger, tmp_path, capsys):
    write_pretraining(tmp_path / "runs" / "mini")
    write_tuning(tmp_path / "runs" / "glue" / "rte", [0.6, 0.7, 0.55])
    write_tuning(
        tmp_path / "runs" / "random" / "rte_random",
        [0.51],
        degenerate=True,
        random_weights=True,
        max_train_samples=2000,
    )
    report(ledger, tmp_path, "--add", tmp_path / "runs/mini")
    for folder in ("glue/rte", "random/rte_random"):
        readme, page = report(ledger, tmp_path, "--add", tmp_path / "runs" / folder, "--name", "mini")
    lines = readme.splitlines()
    assert lines[0] == "# Title" and lines[-1] == "after" and "old" not in lines
    spent = "4.5 M | 2 CPU cores | 1.50 |"
    settings = "0.0001, batch 16, 3 epochs, length 64"
    assert f"| GLUE rte, accuracy | 86.6 (base 78.7) | mini: 60.0 (55.0 to 70.0, n 3) | {settings} | {spent}" in lines
    assert any("mini, random weights: 51.0 (n 1, 1 degenerate)" in line and "2,000 examples" in line for line in lines)
    assert any(line.startswith("| held-out perplexity") and "mini: 50.25" in line for line in lines)
    assert "| mini | b | 10.00 | 4.000 | 6.500 |" in lines and any("NVIDIA H200 | 2.00 |" in line for line in lines)
    waiting = next(line for line in lines if line.startswith("Not run: "))
    assert "GLUE cola, matthews_correlation" in waiting and "RACE, high" in waiting and "rte" not in waiting

    # every figure of the paper's tables has a line on the page, also where nothing was run
    assert len(ledger.paper_rows()) == 9 + 4 + 3
    assert page.count(">not run<") == (len(ledger.paper_rows()) - 1) * 5
    assert page.count("data:image/png;base64,") == 2 and "<script" not in page and "http" not in page
    assert 'name="viewport"' in page
    HTMLParser().feed(page)
    names = sorted(path.name for path in (tmp_path / "results/mini").glob("rte*"))
    assert names == ["rte.json", "rte_random_weights_max_train_samples_2000.json"]
    stored = json.loads((tmp_path / "results/mini/rte.json").read_text())
    assert len(stored["runs"]) == 3 and "somebody" not in json.dumps(stored)
    assert set(stored["resolved_args"]) == {"learning_rate", "global_batch_size", "num_train_epochs", "max_seq_length"}
    assert capsys.readouterr().out.splitlines()[-1].endswith("3 lines of 18 run")


def test_curves_stand_over_the_tokens_that_were_seen(tmp_path, monkeypatch):
    write_pretraining(tmp_path / "mini")
    monkeypatch.setattr(plots.plt, "close", lambda figure: None)
    plots.plot_curves({"mini": durable.read_json(tmp_path / "mini/run_record.json")}, tmp_path / "curves.png")
    loss, perplexity = plots.plt.gcf().axes
    monkeypatch.undo()
    plots.plt.close("all")
    train, validation, entropy = loss.lines
    assert train.get_xdata() == pytest.approx([0.5, 2.0]) and list(train.get_ydata()) == [5.0, 4.0]
    assert validation.get_xdata() == pytest.approx([0.5, 2.0]) and list(validation.get_ydata()) == [4.8, 3.9]
    assert list(entropy.get_ydata()) == [6.5, 6.5]
    assert perplexity.lines[0].get_ydata() == pytest.approx([math.exp(4.8), math.exp(3.9)])


def test_a_score_that_is_no_number_is_shown_as_such(ledger, tmp_path):
    write_pretraining(tmp_path / "results" / "mini")
    write_tuning(tmp_path / "cola", [None, None, 0.2], task="cola", metric="matthews_correlation")
    readme, _ = report(ledger, tmp_path, "--add", tmp_path / "cola", "--name", "mini")
    assert "mini: nan (nan to 20.0, n 3)" in readme


def test_what_a_run_measured_of_a_task_is_shown_and_no_more(ledger, tmp_path):
    """RACE of a single level has no accuracy of the other level; settings come from the picked row, not the preset."""
    write_pretraining(tmp_path / "results" / "mini")
    write_tuning(tmp_path / "race", [0.42], task="race", level="middle", learning_rate=1e-5)
    (path,) = (tmp_path / "race").glob("*/run_record.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "metrics": {"accuracy": 0.42, "middle": 0.42}}))
    readme, _ = report(ledger, tmp_path, "--add", tmp_path / "race", "--name", "mini")
    (line,) = [line for line in readme.splitlines() if line.startswith("| RACE")]
    assert line.startswith("| RACE, middle |") and "mini, level middle: 42.0 (n 1) | 0.0001, batch 16" in line
    assert "RACE, accuracy; RACE, high" in readme.split("Not run: ")[1]
    assert (tmp_path / "results/mini/race_level_middle.json").is_file()


def test_bad_input(ledger, tmp_path, root):
    with pytest.raises(InputError, match="holds no"):
        report(ledger, tmp_path)
    write_pretraining(tmp_path / "results" / "mini")
    write_tuning(tmp_path / "rte", [0.5])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="is a fine-tuning: say with --name"):
        report(ledger, tmp_path, "--add", tmp_path / "rte")
    run = tmp_path / "rte" / "lr0.0001-batch16-seed1"
    record = json.loads((run / "run_record.json").read_text())
    (run / "run_record.json").write_text(json.dumps({**record, "task": "rte"}))
    with pytest.raises(InputError, match="is a single run of a fine-tuning"):
        report(ledger, tmp_path, "--add", run)
    (run / "run_record.json").write_text(json.dumps({name: record[name] for name in record if name != "shown_args"}))
    with pytest.raises(InputError, match="has no 'shown_args': it was written by another version of this recipe"):
        report(ledger, tmp_path, "--add", tmp_path / "rte", "--name", "mini")
    with pytest.raises(InputError, match=r"has neither run_record.* nor summary"):
        report(ledger, tmp_path, "--add", tmp_path / "empty")
    (tmp_path / "README.md").write_text("no marks")
    with pytest.raises(InputError, match="has no section between"):
        report(ledger, tmp_path)
    done = run_python(root / "results" / "report.py", "--ad", "x", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: unknown argument '--ad'; did you mean '--add'?")


def test_what_is_committed_is_what_the_records_give(ledger, root):
    """README, page and ledger belong together: `make report` after every change of a record."""
    found = ledger.read(root / "results")
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert ledger.with_section(readme, ledger.readme_section(found)) == readme
    shown = (root / "results" / "index.html").read_text(encoding="utf-8")
    tables = re.findall(r"<table.*?</table>", shown, re.S)
    wanted = ledger.page(found, root / "results" / "curves.png", root / "results" / "scores.png")
    assert tables == re.findall(r"<table.*?</table>", wanted, re.S) and len(tables) == 3
    records = json.dumps([*found.pretrained.values(), *found.tuned.values()])
    assert not re.search(r'"/(home|root|tmp|work|mnt)/', records)
