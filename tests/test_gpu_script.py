"""`make gpu` at tiny sizes on the CPU, through the same steps; and what it says where a machine lacks something."""

import json
import os
import signal
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from conftest import Forked
from test_deepspeed import needs_compiler

import finetune_glue
import train_mlm
from benchmarks.gpu import __main__ as script
from benchmarks.gpu import half, machine, results, runs, steps
from benchmarks.gpu.runs import TINY, Runs, Sizes
from benchmarks.gpu.steps import STEPS, Step
from results import report
from roberta_recipe import hardware
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.input_files import ROOT
from roberta_recipe.training import optimization

SCRIPTS = {"train_mlm.py": train_mlm, "finetune_glue.py": finetune_glue}
FIRST = ["prepare", "base", "curve", "fp16", "tune"]


class ForkedProcess(Forked):
    """A command of the recipe in a fork of this process, which has everything imported, as `subprocess.Popen`."""

    def __init__(self, command, log):
        def call():
            os.chdir(ROOT)
            sys.argv = list(command)
            SCRIPTS[command[0]].main(list(command[1:]))

        super().__init__(call, log)

    def wait(self, timeout=100):
        if not hasattr(self, "code"):
            self.code = self.end(timeout)
        return self.code


def run(*argv):
    """The exit code of the script."""
    with pytest.raises(SystemExit) as ended:
        script.main([str(word) for word in argv])
    return int(ended.value.code)


def read(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def done(tmp_path_factory, tokenizer_dir):
    """The folder of the most valuable steps, run once."""
    folder = tmp_path_factory.mktemp("gpu") / "out"
    started = ["--tiny", "--output_dir", folder, "--tokenizer_name", tokenizer_dir, "--steps", *FIRST]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "spawn", ForkedProcess)
        assert run(*started) == 0, json.dumps(read(folder)["steps"], indent=1)
    return folder


@pytest.mark.slow
def test_the_steps_give_throughput_memory_a_curve_and_five_seeds(done):
    found = read(done)
    assert found["tiny"] and list(found["steps"]) == FIRST and found["hardware"]["gpus"] == []
    given = {name: step["result"] for name, step in found["steps"].items()}
    assert given == {**dict.fromkeys(FIRST, "passed"), "fp16": "not run"}
    assert found["steps"]["fp16"]["why"] == "fp16 needs a GPU"
    base = found["steps"]["base"]["figures"]
    assert (base["steps"], base["micro_batch"], base["target"]) == (3, 8, 0.6)
    assert base["utilisation"] > 0 and base["tokens_per_second"] > 0 and base["peak_gib"] > base["estimate_gib"] > 0
    record = json.loads((done / "gpu_base" / "run_record.json").read_text())
    assert record["resolved_args"]["global_batch_size"] == 32 and record["resolved_args"]["bf16"]
    assert record["tokens_per_second"] == base["tokens_per_second"] and record["matrix_rate"] > 0
    curve = found["steps"]["curve"]["figures"]
    assert [step for step, _ in curve["validation_losses"]] == [2, 4, 6, 8]
    tuned = found["steps"]["tune"]["figures"]
    assert set(tuned["seeds"]) == set("12345") and len(tuned["peak_gib"]) == 5 and tuned["data"].startswith("made up")


@pytest.mark.slow
def test_the_ledger_takes_the_runs(done, tmp_path):
    assert report.add(tmp_path, done / "gpu_base", None) == tmp_path / "gpu_base"
    note = "made up in RTE's layout"
    assert report.add(tmp_path, done / "gpu_made_up_task", "gpu_curve", note).parent == tmp_path / "gpu_curve"
    said = results.for_the_ledger(done, read(done)["steps"])
    assert f"--add {done / 'gpu_base'}" in said and f"--add {done / 'gpu_curve'}" in said and "made_up" not in said


@pytest.mark.slow
def test_another_start_runs_what_has_not_passed(done, capsys, monkeypatch):
    before = (done / "gpu_base" / "run_record.json").stat().st_mtime_ns
    flags = ["--tiny", "--output_dir", done]
    assert run(*flags, "--steps", "base", "fp16") == 0
    said = capsys.readouterr().out
    assert "base         passed before" in said and "fp16         not run" in said
    assert (done / "gpu_base" / "run_record.json").stat().st_mtime_ns == before
    monkeypatch.setattr(results, "git_commit", lambda: "another")
    assert run(*flags) == 2
    assert "is of another commit; name another folder" in capsys.readouterr().err


@needs_compiler
@pytest.mark.slow
def test_zero_is_started_by_accelerate_and_has_the_curves_losses(done, tokenizer_dir):
    zero = Runs(done, TINY, tokenizer=tokenizer_dir)
    zero.begin(280, time.monotonic() + 280)  # on a CPU, DeepSpeed may have to build its extension first
    passed, figures = steps.step_zero(zero, 3)
    assert passed and figures["largest_relative"] < 2e-3 and figures["steps"] == TINY.zero_steps, zero.last_lines()
    assert figures["estimate_gib"] > 0


def test_a_step_that_fails_or_hangs_stops_no_other(tmp_path, monkeypatch, capsys):
    def command(code):
        return lambda begun: (True, {"folder": begun.run("it", ["-c", code]).name})

    some = {
        "bad": Step(command("print('what went wrong'); raise SystemExit(3)"), 60),
        "slow": Step(command("import time; print('begun', flush=True); time.sleep(60)"), 2),
        "odd": Step(lambda begun: {}["nothing"], 60),
        "wrong": Step(lambda begun: (False, {"seen": 1}), 60),
        "good": Step(command("print(1)"), 60),
    }
    monkeypatch.setattr(results, "STEPS", some)
    monkeypatch.setattr(runs, "SHORTEST_S", 1.0)
    start_s = time.monotonic()
    assert run("--tiny", "--output_dir", tmp_path / "out") == 1 and time.monotonic() - start_s < 20
    found = read(tmp_path / "out")["steps"]
    assert [step["result"] for step in found.values()] == ["FAILED"] * 4 + ["passed"]
    assert found["bad"]["last_lines"] == ["what went wrong"] and "exit code 3" in found["bad"]["why"]
    assert found["slow"]["last_lines"] == ["begun"] and "its time is over" in found["slow"]["why"]
    assert "KeyError" in found["odd"]["why"] and found["wrong"]["figures"] == {"seen": 1}
    assert "good         passed" in capsys.readouterr().out

    assert run("--tiny", "--output_dir", tmp_path / "out", "--minutes", "0.001", "--steps", "bad") == 1
    assert read(tmp_path / "out")["steps"]["bad"]["why"] == "RunError: the time is over"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert run("--tiny", "--output_dir", tmp_path / "other") == 2


def test_a_run_that_is_over_leaves_no_process(tmp_path):
    begun = Runs(tmp_path)
    begun.begin(60, time.monotonic() + 60)
    children = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
    children += "start_new_session=True); "
    begun.deadline_s = time.monotonic() + 3
    with pytest.raises(RunError, match="its time is over"):
        begun.run("it", ["-c", children + "print(p.pid, flush=True); p.wait()"])
    pid = int(begun.log("it").read_text())
    for _ in range(100):  # its parent is gone, so that another process reaps it
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return
        except OSError:
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the child of a run outlives it")


def test_the_list_of_steps_and_a_machine_without_a_gpu(tmp_path, monkeypatch, capsys):
    flags = ["--output_dir", tmp_path / "gpu"]
    script.main([*map(str, flags), "--dry_run"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " at most " in line]
    assert listed == list(STEPS)
    valuable = ["prepare", "base", "curve", "fp16", "overflow", "large", "precision", "tune"]
    zero = [f"zero{stage}{precision}" for precision in ("", "_fp16") for stage in (1, 2, 3)]
    assert listed == [*valuable, *zero, "resume", "ddp", "contiguous", "compiled"]
    assert run(*flags) == 2 and "not run: no CUDA device" in capsys.readouterr().err
    assert run(*flags, "--tiny", "--steps", "bse") == 2 and "'bse' is none of" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert results.cannot_run(tiny=False) is None
    other = results.INTERNALS[0]._replace(parameters=("self",))
    monkeypatch.setattr(results, "INTERNALS", [*results.INTERNALS, other])
    said = results.cannot_run(tiny=False)
    assert f"another Trainer.{other.name} than" in said and "pip install --no-index --no-deps" in said
    assert not (tmp_path / "gpu").exists()


def test_what_is_missing_is_named_with_the_commands_that_carry_it(monkeypatch, capsys):
    found = machine.packages()
    assert {"torch", "transformers", "datasets", "deepspeed"} <= {package.name for package in found}
    assert "pytest" not in {package.name for package in found} and all(package.installed for package in found)
    versions = {"transformers": "5.17.0", "torch": "2.13.0+cu130", "datasets": None}
    seen = [package._replace(installed=versions.get(package.name, package.pinned)) for package in found]
    (datasets,) = [package.pinned for package in found if package.name == "datasets"]
    (transformers,) = [package.pinned for package in found if package.name == "transformers"]
    assert machine.differences(seen) == [
        f"missing of requirements.txt: datasets=={datasets}",
        f"other versions than requirements.txt has: transformers 5.17.0 (pinned: {transformers})",
    ]
    monkeypatch.setitem(sys.modules, "train_mlm", None)  # its import fails
    monkeypatch.setattr(machine, "packages", lambda: seen)
    assert run("--dry_run") == 2
    said = capsys.readouterr()
    assert f"datasets=={datasets}" in said.out and "train_mlm.py cannot start" in said.err
    assert "PYTHONPATH=carried" in said.err and "--target carried" in said.err
    monkeypatch.setattr(half.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="deepspeed is not installed"):
        half.with_zero(1, "file")


def test_every_command_of_the_full_sizes_is_one_that_its_script_takes(tmp_path, monkeypatch):
    """Up to the device: arguments, warm-up, launcher."""
    commands = {}

    def note(self, name, command, again=False):
        commands[name] = list(command)
        raise RunError("not started")

    monkeypatch.setattr(Runs, "run", note)
    whole = Runs(tmp_path, tokenizer="tokenizer", model="runs/mine")
    for step in STEPS.values():
        whole.begin(step.limit_s, time.monotonic() + 1000)
        if step.run is not STEPS["prepare"].run:
            with pytest.raises(RunError, match="not started"):
                step.run(whole)
        else:
            step.run(whole)
    launched = 0
    for command in commands.values():
        script_name = next(word for word in command if word in SCRIPTS or word.endswith("inside.py"))
        launched += command.index(script_name) > 0
        argv = command[command.index(script_name) + 1 :]
        if script_name.endswith("inside.py"):
            argv = argv[1:]
        module = SCRIPTS.get(script_name, train_mlm)
        (_, training_args), _ = module.read_arguments([*argv, "--use_cpu", "true"])
        optimization.check_length(training_args, training_args.max_steps)
    assert len(commands) == 17 and launched == 7, commands.keys()


def test_the_micro_batch_leaves_room_and_the_peak_is_the_runs_own(tmp_path, monkeypatch):
    whole = Runs(tmp_path, tokenizer="tokenizer")
    steps.step_prepare(whole)
    base, large = (steps.config_of(whole, shape) for shape in ("base", "large"))
    assert (base.vocab_size, base.num_hidden_layers, large.hidden_size) == (50304, 12, 1024)
    for gigabytes, expected in ((80, (128, 64)), (24, (32, 8))):
        monkeypatch.setattr(steps, "device_bytes", lambda size=gigabytes: size * 1e9)
        assert tuple(steps.micro_batch(config, Sizes(), 8192) for config in (base, large)) == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)  # a run on the CPU of a machine with a GPU
    assert hardware.peak_memory_bytes() > 1e8
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5)
    assert hardware.peak_memory_bytes() == 5
    called = types.SimpleNamespace(count=0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(called, "count", called.count + 1))
    hardware.forget_peak_memory()
    assert called.count == 1
