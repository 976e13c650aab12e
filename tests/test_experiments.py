"""Experiment lists: rows in parallel, stopped or killed at any time, resumed, never run twice.

Rows are forks of a process that has imported the libraries, which takes ten seconds; `test_command_line` starts one as
a subprocess. test_experiment_table.py tests the table.
"""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from conftest import Forked, make_documents, run_python, same_run, wait_until, write_text

import train_mlm
from experiments import checks, lists
from experiments import run as experiments
from roberta_recipe import durable, hardware, standard_error
from roberta_recipe.errors import InputError, RunError
from tools import words

SLOW = {"max_steps": 100000, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}


KEPT = []  # a fork replaces stdout and stderr; the replaced ones, closed, would close the descriptors of the new


class ForkedProcess:
    """A stand-in for the `Popen` object of `experiments.start`: a fork."""

    def __init__(self, command, log, cores):
        runner, main = os.getpid(), words.main if command[1].endswith("words.py") else train_mlm.main

        def call():
            os.setpgid(0, 0)
            os.sched_setaffinity(0, cores)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            hardware.end_with_parent(runner, signal.SIGTERM)
            main(command[2:])

        KEPT.append((sys.stdout, sys.stderr))
        self.child, self.code = Forked(call, log), None
        self.send_signal = lambda number: os.kill(self.child.pid, number)

    def poll(self):
        if self.code is None:
            pid, status = os.waitpid(self.child.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(experiments, "start", ForkedProcess)
    monkeypatch.setattr(experiments, "_POLL_S", 0.02)


@pytest.fixture
def write(tmp_path, preset):
    """A function: write a list of two learning rates and two seeds, with the given changes; returns its path."""

    def of(**others):
        rows = [{"name": "low"}, {"name": "high", "flags": {"learning_rate": 0.005}, "claim": "better"}]
        values = {
            "output_dir": str(tmp_path / "out"), "config": preset, "seeds": [1, 2], "measures": {"loss": None},
            "rows": rows, **others,
        }  # fmt: skip
        path = tmp_path / "list.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return str(path)

    return of


def records(folder):
    return sorted(Path(folder).glob("*/seed-*/run/run_record.json"))


@pytest.mark.slow
def test_command_line(write, tmp_path, root):
    """As typed: in its own process, on its own core."""
    path = write(seeds=[3], rows=[{"name": "high", "flags": {"learning_rate": 0.005}}])
    jobs = min(2, len(os.sched_getaffinity(0)))
    done = run_python("experiments/run.py", path, "--jobs", jobs, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "starts  high, seed 3: not started; core" in done.stderr, done.stderr
    assert "done    high, seed 3: validation loss, nats" in done.stderr and "no rows left" in done.stderr
    record = durable.read_json(tmp_path / "out/high/seed-3/run/run_record.json")
    assert record["hardware"]["cpu_cores"] == len(os.sched_getaffinity(0)) // jobs
    assert record["resolved_args"]["seed"] == 3 and record["steps"] == 4
    assert re.search(rf"\| high \| 1 \| [0-9.]+ \| {record['metrics']['eval_loss']:.3f} \|", done.stdout)
    log = (tmp_path / "out/high/seed-3/log.txt").read_text()
    assert log.startswith("$ ") and "--learning_rate 0.005 --seed 3 " in log


@pytest.mark.slow
def test_finished_rows_are_not_run_again_and_the_table_is_that_of_the_records(write, tmp_path, forked, capsys):
    path = write()
    experiments.main([path, "--dry_run"])
    assert capsys.readouterr().out.count(": not started\n") == 4
    experiments.main([path, "--jobs", "1"])
    printed, said = capsys.readouterr()
    found = records(tmp_path / "out")
    assert len(found) == 4
    begun = [line.split(":")[0] for line in said.splitlines() if line.startswith("starts  ")]
    assert begun == [f"starts  {name}, seed {seed}" for seed in (1, 2) for name in ("low", "high")]
    assert "3 left, ETA" in said
    losses = {
        name: [durable.read_json(tmp_path / f"out/{name}/seed-{seed}/run/run_record.json") for seed in (1, 2)]
        for name in ("low", "high")
    }
    losses = {name: [record["metrics"]["eval_loss"] for record in of] for name, of in losses.items()}
    stored = json.loads((tmp_path / "out/table.json").read_text())["loss"]
    for name, (one, two) in losses.items():
        assert stored[name]["mean"] == pytest.approx((one + two) / 2)
        assert stored[name]["error"] == pytest.approx(abs(one - two) / 2)  # standard deviation / sqrt(2)
    difference = sum(losses["high"]) / 2 - sum(losses["low"]) / 2
    assert stored["high"]["against_first"]["difference"] == pytest.approx(difference)
    assert stored["high"]["against_first"]["p"] in (pytest.approx(2 / 6), pytest.approx(4 / 6), 1.0)
    assert stored["high"]["verdict"] == "too few seeds" and (tmp_path / "out/table.md").read_text() == printed
    # again: no run, no change of a file
    before = {record: record.stat().st_mtime_ns for record in found}
    experiments.main([path])
    assert {record: record.stat().st_mtime_ns for record in found} == before
    assert capsys.readouterr().out == printed
    # another seed is one more row of each name; a new measure is measured of what is trained
    experiments.main([write(seeds=[1, 2, 3]), "--table"])
    assert "| low | 2 of 3 |" in capsys.readouterr().out
    texts = tmp_path / "text.jsonl"
    texts.write_text(json.dumps({"text": "the cat sees a dog " * 3}) + "\n")
    path = write(measures={"loss": None, "words": {"text_file": [str(texts)]}, "short_words": None})
    experiments.main([path, "--dry_run"])
    assert capsys.readouterr().out.count(": trained; not measured: words\n") == 4
    experiments.main([path])
    printed = capsys.readouterr().out
    for key in ("bits_per_word", "bits_per_short_word"):
        figures = [durable.read_json(tmp_path / f"out/low/seed-{seed}/words.json")[key] for seed in (1, 2)]
        mean, half = sum(figures) / 2, abs(figures[0] - figures[1]) / 2
        assert f" | {standard_error.with_error(mean, half)} | - | - | - |" in printed
    assert {record: record.stat().st_mtime_ns for record in found} == before
    measured = tmp_path / "out/low/seed-1/words.json"
    values = durable.read_sealed(measured)
    measured.write_text(measured.read_text()[:50])
    with pytest.raises(InputError, match=r"low/seed-1/words.json is not JSON"):
        experiments.main([path, "--table"])
    durable.write_sealed(measured, {key: values[key] for key in values if key != "bits_per_short_word"})
    with pytest.raises(InputError, match=r"words.json has no 'bits_per_short_word'.*; move it away to repeat"):
        experiments.main([path, "--table"])
    durable.write_sealed(measured, values)
    # what a row was run with is what it stays
    experiments.main([write(rows=[{"name": "low"}, {"name": "high"}]), "--dry_run"])
    assert "high, seed 1: changed: learning_rate was 0.005, is 0.001" in capsys.readouterr().out
    config = Path(yaml.safe_load((tmp_path / "preset.yaml").read_text())["config_name"])
    for change in (
        lambda: write(rows=[{"name": "low"}, {"name": "high", "flags": {"learning_rate": 0.005, "max_steps": 5}}]),
        lambda: (config.write_text(config.read_text() + "\n"), write())[1],
    ):
        with pytest.raises(
            InputError, match=r"row (high|low), seed 1: (max_steps was 4, is 5|content of .*config.json)"
        ):
            experiments.main([change()])


@pytest.mark.slow
def test_stopped_and_continued_the_weights_are_those_of_an_uninterrupted_list(write, tmp_path, forked):
    flags = {"save_strategy": "steps", "save_steps": 50, "max_steps": 40}
    experiments.main([write(flags=flags, output_dir=str(tmp_path / "whole"))])
    path = write(flags=flags)
    for number, code in ((signal.SIGTERM, 75), (signal.SIGINT, 130)):
        seen = len(records(tmp_path / "out"))
        for log in unfinished(tmp_path / "out"):
            log.write_text("")  # so that what is waited for is of this start
        runner = Forked(lambda: experiments.main([path]), tmp_path / "runner.log")
        wait_until(lambda: any(log.read_text().count("  loss ") > 1 for log in unfinished(tmp_path / "out")))
        os.kill(runner.pid, number)
        assert runner.end() == code, runner.log
        assert len(records(tmp_path / "out")) - seen <= 1
        stopped = runner.log.splitlines()
        assert stopped[-1].startswith(f"stopped by {'SIGTERM' if code == 75 else 'Ctrl-C'}: "), runner.log
        assert any(" to be resumed at step " in line for line in stopped)
    experiments.main([path])
    resumed = 0
    for record in records(tmp_path / "whole"):
        other = tmp_path / "out" / record.relative_to(tmp_path / "whole")
        assert same_run(record.parent, other.parent)
        weights = [path.parent.joinpath("model.safetensors").read_bytes() for path in (record, other)]
        assert weights[0] == weights[1]
        resumed += durable.read_json(other)["resumes"]
    assert resumed == 2


def unfinished(folder):
    return [log for log in Path(folder).glob("*/seed-*/log.txt") if not (log.parent / "run/run_record.json").exists()]


@pytest.mark.slow
def test_kill_9_of_the_runner_leaves_no_process_and_what_was_saved_continues(write, tmp_path, forked):
    path = write(flags=SLOW, seeds=[1])
    jobs = min(2, len(os.sched_getaffinity(0)))
    runner = Forked(lambda: experiments.main([path, "--jobs", str(jobs)]), tmp_path / "runner.log")
    checkpoints = lambda: {found.parts[-5] for found in (tmp_path / "out").glob("*/*/run/checkpoint-*/manifest.json")}  # noqa: E731
    wait_until(lambda: len(checkpoints()) == jobs)
    children = psutil.Process(runner.pid).children(recursive=True)
    assert len(children) == jobs and len({tuple(child.cpu_affinity()) for child in children}) == jobs
    runner.kill()
    runner.end()
    wait_until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
    listed = lists.read(path)
    states = [row.state() for row in listed.rows[:jobs]]
    assert all(state.startswith("to be resumed at step ") for state in states), states
    logs = [row.log.read_text() for row in listed.rows[:jobs]]
    assert all("stopped by SIGTERM: step " in log for log in logs)


@pytest.mark.slow
def test_a_failed_row_is_said_and_the_others_finish(write, tmp_path, forked, capsys):
    rows = [{"name": "bad", "flags": {"train_file": [str(tmp_path / "none.jsonl")]}}, {"name": "good"}]
    path = write(rows=rows, seeds=[1])
    with pytest.raises(RunError, match=r"1 of 2 rows failed: bad, seed 1\. .*Continue with: "):
        experiments.main([path])
    printed, said = capsys.readouterr()
    assert "| bad | 0 of 1 | - | not run |" in printed and len(records(tmp_path / "out")) == 1
    (line,) = [line for line in said.splitlines() if line.startswith("failed")]
    assert line.startswith("failed  bad, seed 1 (run, exit code 2): error: ") and "none" in line


@pytest.mark.slow
def test_rows_that_are_not_what_the_list_says_give_no_table(write, preset, tmp_path, forked, capsys, monkeypatch):
    """For any reason: a preset changed during the run, the list changed between two starts, a file is missing."""
    path, out, before = write(flags={"max_eval_samples": 8}), tmp_path / "out", Path(preset).read_text()

    def with_another_preset(command, log, cores):
        monkeypatch.setattr(experiments, "start", ForkedProcess)
        Path(preset).write_text(before + "\nmlm_probability: 0.5\n")
        process = ForkedProcess(command, log, cores)
        wait_until(lambda: log.is_file() and "step 1/" in log.read_text())
        Path(preset).write_text(before)
        return process

    monkeypatch.setattr(experiments, "start", with_another_preset)
    with pytest.raises(InputError, match=r"row low, seed 1: mlm_probability was 0.5, is 0.15 .*low/seed-1\)"):
        experiments.main([path])
    shutil.rmtree(out / "low/seed-1")
    experiments.main([path])
    with pytest.raises(InputError, match=r"low, seed 1: max_eval_samples was 8, is 9 \(.* \(and 3 more\): it was run"):
        experiments.main([path, "--set", "max_eval_samples=9"])
    (out / "low/seed-1/row.json").unlink()  # the run's own record still says it
    with pytest.raises(InputError, match=r"low, seed 1: max_steps was 4, is 9 \(.* \(and 3 more\): it was run"):
        experiments.main([path, "--table", "--set", "max_steps=9"])
    record = out / "high/seed-2/run/run_record.json"
    values = durable.read_sealed(record)
    durable.write_sealed(record, {**values, "fingerprint": {**values["fingerprint"], "tokenizer": "x"}})
    with pytest.raises(InputError, match=r"high, seed 2 was run with different data from high, seed 1: tokenizer was"):
        experiments.main([path, "--table"])


def test_rows_that_were_measured_on_other_text_give_no_table(write, monkeypatch):
    listed = lists.read(write(measures={"words": {"corpus": "presets/corpus/docstrings.yaml"}}))
    monkeypatch.setattr(lists.Experiment, "record", lambda row: {"resolved_args": {}})
    for row in listed.rows:
        row.folder.mkdir(parents=True)
        experiments.write_row_state(row)
        durable.write_sealed(row.output_of("words"), {"bits_per_word": 9.0, "words": 545, "documents": 15})
    checks.check_rows(listed)
    other = listed.rows[-1].output_of("words")
    durable.write_sealed(other, {"bits_per_word": 8.0, "words": 217, "documents": 15})
    with pytest.raises(InputError, match=r"high, seed 2 was measured \(words\) on .* low, seed 1: words was 545, is"):
        checks.check_rows(listed)
    digests = ({}, {"windows_digest": "a"}, {}, {"windows_digest": "b"})  # files of older versions have none
    for row, digest in zip(listed.rows, digests, strict=True):
        durable.write_sealed(row.output_of("words"), {"bits_per_word": 9.0, "words": 545, "documents": 15, **digest})
    with pytest.raises(
        InputError, match=r"high, seed 2 .* from high, seed 1: windows_digest was 'a', is 'b'. Move the"
    ):
        checks.check_rows(listed)
    other.write_text('{"bits_per_word": 1.0, "words": 545, "documents": 15}')
    with pytest.raises(InputError, match=r"words.json has no .checksum.*; move it away to repeat the measurement"):
        checks.check_rows(listed)


@pytest.fixture
def trained(monkeypatch):
    """A function: train the rows of a list by hand, with the commands of `--dry_run`."""

    def of(path, **others):
        records = {}
        for row in lists.read(path).rows:
            resolved = {**train_mlm.read_arguments(row.train[2:])[1], "attn_implementation": "sdpa"}
            records[row.title] = {"resolved_args": resolved, **others}
        monkeypatch.setattr(lists.Experiment, "record", lambda row: records.get(row.title, {}))
        return records

    return of


def test_a_row_that_was_trained_by_hand_is_compared_by_its_record(write, trained):
    """Without row.json, the record is compared: flags of the list, and flags that it does not set."""
    held_out = {"words": {"corpus": "presets/corpus/docstrings.yaml"}}
    trained(write(measures=held_out))
    listed = lists.read(write(measures=held_out))
    checks.check_rows(listed)
    with pytest.raises(InputError, match="low, seed 1: max_train_samples was None, is 16"):
        checks.check_rows(lists.read(write(flags={"max_train_samples": 16})))
    skips = {"skip_blocks": ["3-5"], "rewind_on_spike": 2.0}  # free in a resumed run
    with pytest.raises(InputError, match=r"skip_blocks was None, is \['3-5'\]; rewind_on_spike was None, is 2.0"):
        checks.check_rows(lists.read(write(flags=skips)))
    row = listed.rows[0]
    row.folder.mkdir(parents=True)
    durable.write_sealed(row.output_of("words"), {"bits_per_word": 9.0})
    with pytest.raises(InputError, match=r"low, seed 1: measure words was not known, is .*its file"):
        checks.check_rows(listed)
    experiments.write_row_state(row)
    checks.check_rows(listed)
    trained(write(flags={"max_train_samples": 16}))
    with pytest.raises(InputError, match="low, seed 1: max_train_samples was 16, is None"):
        checks.check_rows(listed)


def test_values_that_a_run_derives_are_no_change(write, trained, tmp_path, monkeypatch):
    """max_steps from epochs, the folder of an own tokenizer, the precision of another machine."""
    text = write_text(tmp_path / "a.txt", make_documents(20, seed=0))
    own = {"config": "", "flags": {"train_file": [text], "num_train_epochs": 2, "use_cpu": True}}
    path = write(**own)
    records = trained(path)
    for row in lists.read(path).rows:
        row.folder.mkdir(parents=True)
        experiments.write_row_state(row)
        records[row.title]["resolved_args"] |= {"max_steps": 123, "bf16": True}
    monkeypatch.setattr("roberta_recipe.hardware.has_bf16", lambda use_cpu: False)
    checks.check_rows(lists.read(path))
    own["flags"]["num_train_epochs"] = 3
    with pytest.raises(InputError, match=r"low, seed 1: num_train_epochs was 2.0, is 3.0"):
        checks.check_rows(lists.read(write(**own)))


def test_losses_of_other_held_out_blocks_give_no_table(write, trained):
    listed = lists.read(write(seeds=[1]))
    records = trained(str(listed.path), metrics={"eval_blocks": 8}, unigram_entropy=5.5)
    checks.check_rows(listed)
    for changed in ({"metrics": {"eval_blocks": 9}}, {"unigram_entropy": 5.25}):
        before = dict(records["high, seed 1"])
        records["high, seed 1"].update(changed)
        with pytest.raises(
            InputError,
            match=r"high, seed 1 was measured \(loss\) on .* low, seed 1: .* use the measure words instead",
        ):
            checks.check_rows(listed)
        records["high, seed 1"].update(before)


def test_a_folder_of_another_seed_is_refused(write, trained, tmp_path):
    listed = lists.read(write(seeds=[1, 3]))
    records = trained(str(listed.path))
    records["low, seed 3"] = records["low, seed 1"]
    with pytest.raises(InputError, match=r"low, seed 3: seed was 1, is 3 \(.*low/seed-3\): it was run with other"):
        checks.check_rows(listed)
    records["low, seed 3"] = {"resolved_args": {"seed": 42, "seeds": [1]}}  # the summary of a fine-tuning
    assert "seed was 1, is 3" in listed.rows[2].changes()


def test_a_row_is_the_same_from_another_folder(write, root, tmp_path, monkeypatch):
    """Settings store a flag's text; files in the repository are found from any folder."""
    path = write(flags={"config_name": "presets/model/tiny.json"})
    monkeypatch.chdir(root)
    before = lists.read(path).rows[0].settings
    assert "content of presets/model/tiny.json" in before
    monkeypatch.chdir(tmp_path)
    assert lists.read(path).rows[0].settings == before


def test_what_was_measured_is_not_measured_again(write, trained):
    measures = {"words": {"corpus": "presets/corpus/docstrings.yaml"}, "blimp": {"data_dir": "blimp"}}
    path = write(measures=measures)
    trained(path)
    row = lists.read(path).rows[0]
    assert list(row.to_do()) == ["words", "blimp"]
    row.folder.mkdir(parents=True)
    row.output_of("blimp").touch()
    assert list(row.to_do()) == ["words"]
    row.output_of("blimp").unlink()
    row.output_of("words").touch()
    assert list(row.to_do()) == ["blimp"]


def test_a_run_that_begins_is_measured_again(write, tmp_path, monkeypatch):
    stale = tmp_path / "out/high/seed-1/words.json"  # of a run that was moved away
    path = write(measures={"words": {"corpus": "presets/corpus/docstrings.yaml"}}, seeds=[1])
    stale.parent.mkdir(parents=True)
    durable.write_sealed(stale, {"bits_per_word": 9.0})
    monkeypatch.setattr(experiments, "start", lambda *_: SimpleNamespace(poll=lambda: 1))
    with pytest.raises(RunError, match=r"2 of 2 rows failed: low, seed 1; high, seed 1\."):
        experiments.main([path])
    assert not stale.exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rows": [{"name": "a", "flags": {"learning_rat": 1}}]}, "row 'a': unknown argument '--learning_rat'; did"),
        ({"rows": [{"name": "a", "script": "none.py"}]}, "row 'a': script=none.py is not a Python script"),
        ({"rows": [{"name": "a", "flags": {"seed": 3}}]}, "row 'a': flag seed is set by the runner"),
        ({"rows": [{"name": "a"}, {"name": "a"}]}, "row 'a': two rows have this name"),
        ({"rows": [{"name": "../a"}]}, "row '../a': a name becomes a folder"),
        ({"rows": [{"name": "a", "flags": {"max-steps": 5}}]}, "row 'a': flag max-steps: write max_steps"),
        ({"rows": [{"name": "a", "config": "{folder}/timed.yaml"}]}, "max_train_minutes=5.0 in the preset: remove"),
        ({"rows": [{"name": "a", "claim": "better"}]}, "row 'a': claim=better on the first row"),
        ({"rows": []}, "rows is missing or empty"),
        ({"seeds": [1, 1]}, r"seeds=\[1, 1\] must be different numbers from 0 on, below 2\^32, at most 16"),
        ({"measures": {"loss": {"a": 1}}}, "measure 'loss': flag a is set by the runner, or"),
        ({"measures": {"blimp": {"methods": ["within_word"]}}}, "measure 'blimp': its score needs pll"),
        ({"measures": {"blimp": {"methods": None}}}, "measure 'blimp': flag methods has no value; leave it out"),
        ({"measures": {"words": {"corpu": "a"}}}, "measure 'words': unknown argument '--corpu'; did you mean"),
        ({"measures": {"words": {"model_name_or_path": "a"}}}, "'words': flag model_name_or_path is set by the runner"),
        ({"measures": {"short_words": None}}, "measure 'short_words' needs the measure 'words'"),
        ({"measures": {"score": None}}, "row 'low': measure score is for fine-tuning, not for train_mlm.py"),
        ({"rows": [{"name": "a", "flags": {"warmup_steps": 50}}]}, "'a': warmup_steps=50 is more than the 4 steps of"),
    ],
)  # fmt: skip
def test_the_list_is_checked_before_anything_starts(write, tmp_path, changed, said):
    (tmp_path / "timed.yaml").write_text(f"{(tmp_path / 'preset.yaml').read_text()}\nmax_train_minutes: 5.0\n")
    path = Path(write(**changed))
    path.write_text(path.read_text().replace("{folder}", str(tmp_path)))
    with pytest.raises(InputError, match=said):
        experiments.main([str(path)])
    assert not (tmp_path / "out").exists()


def test_a_setting_of_fine_tuning_is_parsed_by_its_own_script(write, tmp_path):
    """Each seed may start from its own model: the row of a pretraining list with that seed."""
    flags = {"model_name_or_path": "pretrained/seed-{seed}/run"}
    rows = [{"name": "rte", "config": "presets/glue/rte.yaml", "script": "finetune_glue.py", "flags": flags}]
    path = write(rows=rows, seeds=[7, 8], measures={"score": None})
    row, other = (listed := lists.read(path)).rows
    with pytest.raises(InputError, match="hardware=8xH100: costs are estimated for pretraining only; leave"):
        experiments.costs(listed, "8xH100")
    assert row.train[-4:] == ["--seeds", "7", "--output_dir", str(tmp_path / "out/rte/seed-7/run")]
    assert row.settings["task_name"] == "rte" and "seeds" not in row.settings and row.figure("score") is None
    assert "pretrained/seed-7/run" in row.train and "pretrained/seed-8/run" in other.train
    assert row.settings == other.settings


def test_fine_tunings_of_other_weights_or_validation_examples_give_no_table(write):
    """The summary has no fingerprint; the record of the row's only run has it."""
    flags = {"model_name_or_path": "pretrained"}
    rows = [{"name": name, "flags": {**flags, "learning_rate": rate}} for name, rate in (("low", 1e-5), ("high", 2e-5))]
    task = {"config": "presets/glue/rte.yaml", "script": "finetune_glue.py", "measures": {"score": None}}
    listed = lists.read(write(rows=rows, **task))
    for row in listed.rows:
        weights = "retrained" if row.title == "high, seed 2" else "before"
        run = {"fingerprint": {"weights": weights, "seed": row.seed}, "metrics": {}}
        (row.run / "lr").mkdir(parents=True)
        experiments.write_row_state(row)
        durable.write_sealed(row.run / "lr/run_record.json", run)
        summary = {"settings": [], "picked": 0, "scored_examples": {"validation": 277 if row.name == "low" else 200}}
        summary["resolved_args"] = {"seeds": [row.seed]}
        durable.write_sealed(row.run / "summary.json", summary)
    with pytest.raises(InputError, match=r"high, seed 2 was run with .* high, seed 1: weights was 'before', is 'retr"):
        checks.check_rows(listed)
    shutil.rmtree(listed.rows[-1].folder)
    with pytest.raises(
        InputError, match=r"high, seed 1 was measured \(score\) on .* low, seed 1: .*200.*list of its own"
    ):
        checks.check_rows(listed)


def test_rows_that_each_begin_at_their_own_seed_belong_together(write, preset, tmp_path, capsys, monkeypatch):
    """The command of a row and its record, which has an absolute path, agree on the checkpoint of the seed."""
    monkeypatch.chdir(tmp_path)
    for seed in ("1", "2"):
        train_mlm.main(["--config", preset, "--max_steps", "1", "--seed", seed, "--output_dir", str(tmp_path / seed)])
    path = write(rows=[{"name": "again", "flags": {"model_name_or_path": "./{seed}"}}])
    for row in lists.read(path).rows:
        row.folder.mkdir(parents=True)
        experiments.write_row_state(row)
        train_mlm.main(row.train[2:])
    capsys.readouterr()
    experiments.main([path, "--table"])
    shown = capsys.readouterr().out
    assert "| again | 2 | 0.00 |" in shown and "median time" not in shown  # trained by hand
    assert experiments.costs(lists.read(path), "H100")[0].startswith("again: ")


def test_the_lists_of_the_repository_are_lists(root, monkeypatch):
    monkeypatch.chdir(root)
    names = {"rates", "mini_search", "mini_hour", "mini_initialization", "mini_length", "unigram_bias"}
    assert {path.stem for path in Path("presets/experiments").glob("*.yaml")} == names
    assert len(lists.read("presets/experiments/mini_initialization.yaml").rows) == 16
    assert len(lists.read("presets/experiments/mini_hour.yaml").rows) == 15
    assert len(lists.read("presets/experiments/mini_length.yaml").rows) == 15
    searched = lists.read("presets/experiments/mini_search.yaml")
    assert len(searched.rows) == 12 and searched.search
    arms = {
        tuple(row.settings.get(name) for name in ("optim", "optim_args", "mlm_probability")) for row in searched.rows
    }
    assert len(arms) == 9 and {row.settings["learning_rate"] for row in searched.rows} == {1e-3, 2e-3, 3e-3}
    listed = lists.read("presets/experiments/rates.yaml")
    assert len(listed.rows) == 10 and listed.measures == ["loss", "words"] and listed.rows[1].seed == 1
