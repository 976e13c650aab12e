"""A flipped bit in any file of a run's folder: the next start is the same run, bit for bit, or names the damage."""

import json
import random
import shutil

import pytest

import train_mlm
from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.publishing import hub
from roberta_recipe.training import checkpoint

SAVING = ["--save_strategy", "steps", "--save_steps", "2", "--max_steps", "6"]


def start(preset, folder, *argv):
    return train_mlm.main(["--config", str(preset), *SAVING, "--output_dir", str(folder), *argv])


@pytest.fixture(scope="module")
def made():
    """The run whose copies the tests of this file damage."""
    return {}


@pytest.fixture
def killed(made, config, preset, tmp_path, tmp_path_factory, monkeypatch):
    """(folder of a run that was killed while writing its third checkpoint, its preset, hash of its final weights)."""
    monkeypatch.setattr(train_mlm.plots, "plot_loss", lambda *_: None)
    if not made:
        config.hidden_dropout_prob = 0.1  # so that the random state counts
        config.to_json_file(tmp_path / "config.json")
        folder = tmp_path_factory.mktemp("made") / "run"
        start(preset, folder)
        made.update(folder=folder, preset=preset, weights=checkpoint.hash_of_weights(folder))
        for path in folder.iterdir():
            if path.is_file() and path.name not in ("preset.yaml", "log.jsonl", "chunks.index", ".lock"):
                path.unlink()
        (folder / "checkpoint-6" / "manifest.json").unlink()
        hub.run_id(folder)
    return shutil.copytree(made["folder"], tmp_path / "killed"), made["preset"], made["weights"]


def flip(path, rng):
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def test_a_flipped_bit_in_any_file_of_the_folder(killed, tmp_path):
    """All files outside of checkpoints, some of the newest checkpoint, and one of each older or incomplete folder."""
    folder, preset, weights = killed
    rng, resumed = random.Random(17), 0
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    by_parent = {}
    for path in files:
        by_parent.setdefault(path.parent.as_posix(), []).append(path)
    assert "chunks.index" in map(str, by_parent["."])
    assert set(by_parent) == {".", "checkpoint-2", "checkpoint-4", "checkpoint-6"}
    for path in by_parent["checkpoint-4"]:  # each is seen, wherever the bit is
        whole = (folder / path).read_bytes()
        flip(folder / path, rng)
        assert durable.damage(folder / "checkpoint-4"), path
        (folder / path).write_bytes(whole)
    chosen = [*by_parent["."], *rng.sample(by_parent["checkpoint-4"], 2)]
    chosen += [rng.choice(by_parent[name]) for name in ("checkpoint-2", "checkpoint-6")]
    assert len(by_parent["checkpoint-4"]) > 7 and len(chosen) > 7
    for path in chosen:
        damaged = shutil.copytree(folder, tmp_path / "damaged")
        flip(damaged / path, rng)
        record = start(preset, damaged)
        assert checkpoint.hash_of_weights(damaged) == weights, path
        resumed += record["resumes"]
        entries = map(json.loads, (damaged / "log.jsonl").read_text().splitlines())
        assert [entry["step"] for entry in entries if "loss" in entry] == [1, 2, 3, 4, 5, 6], path
        shutil.rmtree(damaged)
    assert resumed == len(chosen)  # none began from the start


@pytest.mark.parametrize(
    "content",
    ["", "[]", "3", '{"files": {}}', '{"files": []}', '{"files": {"a": 3}}', '{"files": {"a\\u0000": [1, "b"]}}'],
)
def test_a_manifest_of_another_shape_is_a_fault(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    assert durable.damage(tmp_path)


def test_a_damaged_mark_of_the_hub_is_a_line(tmp_path):
    mark, rng = hub.run_id(tmp_path), random.Random(3)
    whole = (tmp_path / "hub.json").read_bytes()
    for _ in range(100):
        flip(tmp_path / "hub.json", rng)
        try:
            assert hub.run_id(tmp_path) == mark
        except InputError as error:
            assert "hub.json is damaged" in str(error)
        (tmp_path / "hub.json").write_bytes(whole)
