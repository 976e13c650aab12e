"""The fault census (`make faults`): it draws every kind of fault, and detects a silent difference."""

import json
from collections import Counter

from conftest import run_python

from benchmarks import endings
from benchmarks.faults import case, kinds, scenarios, starts


def test_a_thousand_plans_have_every_kind_and_a_hundred_of_them_a_launcher():
    plans = [kinds.draw_plan(0, number) for number in range(1000)]
    assert (
        plans == [kinds.draw_plan(0, number) for number in range(1000)] != [kinds.draw_plan(1, n) for n in range(1000)]
    )
    assert {plan["kind"] for plan in plans} == set(kinds.KINDS) and len(kinds.KINDS) > 20
    found = Counter(plan["scenario"] for plan in plans)
    assert set(found) == set(scenarios.SCENARIOS) and min(found.values()) > 9
    assert sum(found[scenario.name] for scenario in scenarios.LAUNCHED) == 100
    assert json.loads(json.dumps(plans)) == plans


def test_a_launchers_report_is_told_from_a_traceback_of_ours():
    ours = "Traceback (most recent call last):\n  File 'x'\n    1 / 0\nZeroDivisionError: division by zero\n"
    lost = "Traceback (most recent call last):\n  File 'x'\nRuntimeError: [gloo] Connection closed by peer\n"
    theirs = "Traceback (most recent call last):\n  File 'y'\ntorch.distributed.elastic.ChildFailedError:\n===\n"
    assert starts.tracebacks(f"error: x\n{theirs}", peer_gone=False) == []
    assert starts.tracebacks(f"[rank0]: {ours}{theirs}", peer_gone=True) == ["ZeroDivisionError: division by zero"]
    assert starts.tracebacks(lost, peer_gone=True) == [] != starts.tracebacks(lost, peer_gone=False)


def test_damage_is_what_it_is_called(tmp_path):
    path = tmp_path / "file.txt"
    content = b"by the sea the river " * 1000
    for how, size in {"bits": 21000, "zeros": 21000, "word": 21000, "cut": 10500, "empty": 0}.items():
        path.write_bytes(content)
        case.spoil(path, how, [[0.5, 3]])
        assert path.stat().st_size == size and path.read_bytes() != content
    case.spoil(path, "gone", [[0.5, 3]])
    assert not path.exists()


def test_what_an_ending_kept_is_named_by_its_program(tmp_path):
    for name, file, kept in (
        ("pack, 2 processes", "out/cache/x/train-00000.json", "1 of 5 shards"),
        ("tokenizer", "out/tokenizer/tokenizer.json", "the tokenizer"),
    ):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
        assert endings.kept(tmp_path, scenarios.SCENARIOS[name]) == kept


def test_the_census_counts_a_run_with_another_seed_as_a_silent_difference(root, tmp_path):
    """Real runs that are killed or damaged and restarted, and a run with a deliberately changed seed."""
    flags = ["--only", "sabotage", "kill all", "file operation", "bits flipped, between"]
    flags += ["--scenario", "text", "pack, 1 process", "--seed", "208", "--cases", "7"]
    flags += ["--output", tmp_path / "report.json"]
    done = run_python("-m", "benchmarks.faults", *flags, cwd=root)
    cases = json.loads((tmp_path / "report.json").read_text())["cases"].values()
    found = {kind: [one["outcome"] for one in cases if one["kind"] == kind] for kind in (one["kind"] for one in cases)}
    assert done.returncode == 1 and "| **all** | 7 |" in done.stdout, done.stdout + done.stderr
    assert found["sabotage"] == ["silent difference"], done.stdout
    assert found["kill all"] == found["kill at a file operation"] == ["same run"] * 2, done.stdout
    assert set(found["bits flipped, between starts"]) <= {"same run", "refused", "missed"}, done.stdout
    (seen,) = [one["detail"] for one in cases if one["kind"] == "sabotage"]
    assert "digest" in seen and "model.safetensors" in seen
