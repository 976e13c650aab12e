"""`make gpu` with tiny models on the CPU, from data to results; messages if nothing can be run."""

import bz2
import importlib.metadata
import json
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import make_documents, write_parquet
from official_files import write_blimp, write_glue, write_squad
from packaging.requirements import Requirement

import finetune_glue
import train_mlm
from benchmarks.gpu import __main__ as script
from benchmarks.gpu import carry, half, parts, runs
from benchmarks.gpu.runs import Work
from results import report
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.input_files import ROOT
from roberta_recipe.settings import load_yaml
from roberta_recipe.training import optimizers, pretraining

# what the recipe needs and --dry_run carries no wheel for: on the machine, or optional
IN_THE_IMAGE = """torch accelerate huggingface_hub numpy pyarrow xxhash fsspec PyYAML regex tqdm matplotlib psutil
typing-extensions email-validator tzdata pytorch_optimizer"""
DOMAINS = [source["name"] for source in load_yaml(carry.CORPUS)["sources"]]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The input folder of `benchmarks.gpu.carry`, with domains of different sizes."""
    folder = tmp_path_factory.mktemp("data")
    for number, name in enumerate(DOMAINS):
        (folder / "pretrain" / name).mkdir(parents=True)
        for split, count in (("train-0", 40 + 40 * number), ("train-1", 60), ("valid-0", 20)):
            documents = make_documents(count, seed=hash((name, split)) % 1000)
            write_parquet(folder / "pretrain" / name / f"{split}.parquet", documents)
    write_glue(folder / "glue", rows={"train": 24, "dev": 9, "test": 7})
    write_blimp(folder / "blimp", pairs=runs.PAIRS + 1)
    write_squad(folder / "squad")
    (folder / "squad" / "v1.1").mkdir()
    for split in ("train", "dev"):
        (folder / "squad" / f"{split}-v1.1.json").rename(folder / "squad" / "v1.1" / f"{split}.json")
    return folder


@pytest.fixture(scope="module")
def carried(data):
    """The carried folder, with half of the text."""
    half_mb = sum(len(text) for text in texts_of(data / "pretrain", "train-*")) / 2e6
    folder = data.parent / "carried"
    carry.main([f"--data={data}", f"--output={folder}", f"--text_mb={half_mb}", "--vocab_size=400"])
    return folder


def texts_of(folder, pattern):
    """All documents of a folder's files, Parquet or compressed JSON lines."""
    for path in sorted(folder.glob(f"*/{pattern}")):
        if path.suffix == ".bz2":
            with bz2.open(path, "rt", encoding="utf-8") as lines:
                yield from (json.loads(line)["text"] for line in lines)
        else:
            yield from carry._texts(path)


def run(*argv):
    """The exit code of the script."""
    with pytest.raises(SystemExit) as ended:
        script.main([str(word) for word in argv])
    return int(ended.value.code)


def work_in(folder, carried=Path("carried"), seconds=60.0):
    """The script's folders in `folder`."""
    for name in ("work", "out"):
        (folder / name).mkdir()
    return Work(carried, folder / "work", folder / "out", True, time.monotonic() + seconds)


def test_the_carried_folder_has_the_same_share_of_each_domain(data, carried):
    for name in DOMAINS:
        for pattern, share in (("train-*", 0.5), ("valid-*", 1.0)):
            whole = list(texts_of(data / "pretrain", f"../{name}/{pattern}"))
            kept = list(texts_of(carried / "text", f"../{name}/{pattern}"))
            assert sum(map(len, kept)) == pytest.approx(share * sum(map(len, whole)), rel=0.05)
            assert set(kept) <= set(whole)
    assert len(list((carried / "text").glob("*/train-*.jsonl.bz2"))) == 2 * len(DOMAINS)
    with tarfile.open(carried / runs.TASKS) as archive:
        names = archive.getnames()
        pairs = archive.extractfile("blimp/passive_1.jsonl").read().splitlines()
    assert len(names) == 67 + 2 * len(carry.GLUE) + 2 and "glue/SST-2/dev.tsv" in names and len(pairs) == runs.PAIRS
    with pytest.raises(InputError, match="holds text already"):
        carry.main([f"--data={data}", f"--output={carried}"])
    with pytest.raises(InputError, match=r"must hold train-\*.parquet"):
        carry.write_text(data / "glue", data / "nowhere", 1e6)


def test_without_a_gpu_one_line_is_printed_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    flags = ["--work_dir", tmp_path / "work", "--output_dir", tmp_path / "out", "--carried", tmp_path / "carried"]
    assert run(*flags) == 2 and capsys.readouterr().err == "not run: no CUDA device\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run(*flags) == 2 and "carried holds no text" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_dry_run_lists_parts_and_what_is_carried(capsys):
    script.main(["--dry_run", "--carried", "some/folder"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["install", *parts.PRETRAINING]
    assert "at most 30 s" in lines[4] and "--dest some/folder/wheels" in "\n".join(lines)
    pinned = (ROOT / "requirements.txt").read_text()
    carried = dict(wheel.split("==") for wheel in script.WHEELS.split())
    assert [name for name in carried if f"\n{name}==" in pinned and f"\n{name}=={carried[name]} " not in pinned] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {Requirement(line).name for line in [*project, *importlib.metadata.requires("pydantic")]}
    assert needed - carried.keys() - {name.replace("_", "-") for name in carried} <= set(IN_THE_IMAGE.split())
    script.main(["--dry_run", "--finetune"])
    assert "fine_tune  the rest" in capsys.readouterr().out


def test_failed_checks_of_fp16_are_an_exit_code(tmp_path, monkeypatch):
    def half_failed(work):
        work.results["half"] = {"overflow": {"result": "FAILED"}, "killed": {"result": "passed"}}
        return True, {}

    monkeypatch.setattr(script, "install", lambda work: (True, {}))
    monkeypatch.setattr(script, "chosen", lambda args: {"train": half_failed})
    (tmp_path / "text").mkdir()
    folders = ["--carried", tmp_path, "--work_dir", tmp_path / "work", "--output_dir", tmp_path / "out"]
    assert run("--tiny", *folders) == 1


def test_a_part_that_fails_or_hangs_stops_no_other_and_leaves_its_log(tmp_path, capsys):
    work = work_in(tmp_path)
    bad, slow = "print('what went wrong'); raise SystemExit(3)", "import time; print('begun'); time.sleep(60)"
    work.part("bad", lambda work: work.run("bad", ["-c", bad], work.end_s))
    work.part("slow", lambda work: work.run("slow", ["-c", slow], time.monotonic() + 2))
    work.part("odd", lambda work: {}["nothing"])
    work.part("wrong", lambda work: (False, {"seen": 1}))
    (work.folder / "tokens").mkdir()
    (work.folder / "tokens" / "fingerprint.json").touch()
    work.part("good", lambda work: (True, {"seen": 2}))
    found = json.loads((work.output / "results.json").read_text())["parts"]
    assert [part["result"] for part in found.values()] == ["FAILED"] * 4 + ["passed"]
    assert found["bad"]["last_lines"] == ["what went wrong"] and "exit code 3" in found["bad"]["why"]
    assert found["slow"]["last_lines"] == ["begun"] and "time limit" in found["slow"]["why"]
    assert "KeyError" in found["odd"]["why"] and found["wrong"]["figures"] == {"seen": 1}
    with tarfile.open(work.output / "records.tar.xz") as archive:
        assert archive.getnames() == ["bad.log", "slow.log"]
    assert "good       passed" in capsys.readouterr().out


def test_saving_ends_when_the_time_for_the_rest_begins(tmp_path):
    work = work_in(tmp_path, seconds=2.0)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    assert len(list(work.save_while(process, 1.5))) == 1 and 0 < work.left_s <= 1.5
    runs.kill(process)


def test_a_list_keeps_its_weights_without_time_for_the_table(tmp_path, monkeypatch):
    (tmp_path / "work" / "list" / "a" / "seed-1" / "run").mkdir(parents=True)
    (tmp_path / "work" / "list" / "a" / "seed-1" / "run" / "run_record.json").touch()
    (tmp_path / "out").mkdir()
    work = Work(tmp_path, tmp_path / "work", tmp_path / "out", False, time.monotonic() + 60)
    work.listed, order = str(tmp_path / "list.yaml"), []
    listed = {"config": "presets/mlm/roberta_mini.yaml", "seeds": [1], "measures": {"loss": None, "words": {}}}
    (tmp_path / "list.yaml").write_text(json.dumps({**listed, "rows": [{"name": "a"}]}))

    def note(self, name, command, end_s):
        order.append(name)
        if name == "table":
            raise RunError("table: time limit")

    monkeypatch.setattr(Work, "run", note)
    monkeypatch.setattr(Work, "start", lambda *_: subprocess.Popen([sys.executable, "-c", ""]))
    monkeypatch.setattr(parts, "export", lambda model, output, name: order.append(name))
    with pytest.raises(RunError, match="table: time limit"):
        parts.run_list(work)
    assert order == ["pack", "a", "table"]
    written = load_yaml(work.folder / "list.yaml")["measures"]
    assert written == {"loss": {}, "words": {"corpus": "presets/corpus/five_domains.yaml"}}


def test_every_command_of_the_full_sizes_is_one_that_its_script_takes(tmp_path, monkeypatch, carried):
    """Flags and warm-up are checked, up to the device."""
    work, commands = work_in(tmp_path, carried, seconds=480), {}
    work.tiny = False
    work.results["parts"] = {"profile": {"figures": {"same_losses": {"relative_differences": [0.0]}}}}
    monkeypatch.setenv("FIVE_DOMAINS", str(carried / "text"))

    def note(self, name, command, **_):
        commands[name] = command
        raise RunError("not started")

    monkeypatch.setattr(Work, "start", note)
    for function in (parts.train, parts.fine_tune):
        with pytest.raises(RunError, match="not started"):
            function(work)
    for function in (half.overflow, half.resume):
        with pytest.raises(RunError, match="not started"):
            function(work, work.end_s)
    assert list(commands) == ["roberta_h100", "tuned_cola", "overflow", "whole"]
    for command in commands.values():
        module = finetune_glue if command[0] == "finetune_glue.py" else train_mlm
        words = command[2:] if command[0].endswith("inside.py") else command[1:]
        (args, training_args), _ = module.read_arguments([*words, "--use_cpu", "true"])
        if module is train_mlm:
            optimizers.check_length(training_args, training_args.max_steps)
        if command[0] == "train_mlm.py":
            pretraining.check_cooldown(args, training_args)
            assert training_args.torch_compile and 6 < args.max_train_minutes < 7
            assert (args.cooldown_share, args.initialization) == (0.2, "mimetic")


def test_training_that_is_on_the_plateau_halfway_is_stopped_and_failed(tmp_path, monkeypatch, carried):
    work, start = work_in(tmp_path, carried, seconds=parts.SECONDS["evaluate"] + 2), Work.start
    work.results["parts"] = {"profile": {"figures": {}}}
    monkeypatch.setattr(Work, "start", lambda self, name, _: start(self, name, ["-c", "import time; time.sleep(60)"]))
    for name, seconds in (("START_S", 0.0), ("END_S", 0.0), ("SAVED_S", 0.2)):
        monkeypatch.setattr(parts, name, seconds)
    monkeypatch.setattr(runs, "SAVED_S", 0.2)
    lines = "unigram entropy 7.227 nats\nstep 1/9  validation  loss 7.394\n"
    work.log(runs.MODEL).write_text(lines)
    with pytest.raises(RunError, match="stopped halfway: the validation loss is above the unigram entropy"):
        parts.train(work)
    work.log(runs.MODEL).write_text(f"{lines}step 2/9  validation  loss 7.226\n")
    assert not parts.on_plateau(work)


@pytest.mark.slow
def test_both_commands_at_tiny_sizes_give_what_the_ledger_takes(tmp_path, carried):
    folders = ["--carried", carried, "--work_dir", tmp_path / "work"]
    assert run("--tiny", *folders, "--output_dir", tmp_path / "out") == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(found["parts"]) == ["install", *parts.PRETRAINING]
    measured = found["parts"]["profile"]["figures"]
    assert [*measured] == ["eager", "without_dropout", "padded", "compiled", "same_losses", "error"]
    assert all(measured[name]["utilisation"] > 0 for name in ("eager", "padded", "compiled"))
    assert measured["padded"]["tokens_per_second"] < 0.8 * measured["padded"]["positions_per_second"]
    assert len(measured["eager"]["kernels"]) > 10 and "kernels" not in measured["padded"]
    trained = found["parts"]["train"]["figures"]
    assert parts.on_plateau(Work(carried, tmp_path / "work", tmp_path / "out", True, 0.0))
    assert trained["compiled"] and [step for step, _ in trained["losses"]] == [3, 6]
    assert set(trained["loss_by_source"]) == set(DOMAINS) and found["half"]["overflow"]["result"] == "not run"
    assert sorted(path.name for path in (tmp_path / "out").iterdir())[-2:] == ["records.tar.xz", "results.json"]

    assert run("--tiny", "--finetune", *folders, "--output_dir", tmp_path / "tuned") == 0
    found = json.loads((tmp_path / "tuned" / "results_finetune.json").read_text())["parts"]["fine_tune"]["figures"]
    assert len(found) == 2 * len(parts.TUNED) and all(
        len(of["seeds"]) == 2 and of["median"] is not None for of in found.values()
    )
    for name, archive in (("out", "records"), ("tuned", "records_finetune")):
        with tarfile.open(tmp_path / name / f"{archive}.tar.xz") as records:
            records.extractall(tmp_path / "records", filter="data")
    assert report.add(tmp_path / "ledger", tmp_path / "records" / runs.MODEL, None).name == runs.MODEL
    for twin in ("mrpc", "sst2_1000_random"):
        added = report.add(tmp_path / "ledger", tmp_path / "records" / "tuned" / twin, runs.MODEL)
        assert added.parent.name == runs.MODEL and sys.getsizeof(added.read_text()) > 1000


@pytest.mark.slow
def test_a_list_of_runs_gives_its_table_and_weights_that_can_be_fine_tuned(tmp_path, carried):
    row = {"config": "presets/mlm/roberta_mini.yaml", "seeds": [1], "output_dir": "elsewhere"}
    row |= {"measures": {"words": {"max_documents": 3}, "blimp": {"pairs": 1, "methods": ["pll"], "random_seeds": 0}}}
    rows = [{"name": f"masked_{share}", "flags": {"mlm_probability": share / 100}} for share in (15, 40)]
    path = tmp_path / "list.yaml"
    path.write_text(json.dumps({**row, "rows": rows}))
    folders = ["--carried", carried, "--work_dir", tmp_path / "work", "--output_dir", tmp_path / "out"]
    assert run("--tiny", "--list", path, *folders) == 0
    found = json.loads((tmp_path / "out" / "results_list.json").read_text())["parts"]["list"]["figures"]
    assert found["exported"] == ["masked_15", "masked_40"]
    assert all(f"| {name} |" in found["table"] for name in found["exported"])
    assert (tmp_path / "out" / "masked_40.safetensors.0").stat().st_size > 10_000
    assert run("--tiny", "--finetune", "--model", "list/masked_40/seed-1/run", *folders) == 0
