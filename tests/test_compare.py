"""tools/compare.py: whether two runs are the same, the first step at which they differ, and why."""

import json
import re
import shutil

import pytest
import torch
from conftest import make_documents, write_parquet

import train_mlm
from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.training import checkpoint
from tools import compare

SAVING = ["--save_strategy", "steps", "--save_steps", "2", "--max_steps", "4", "--data_seed", "42"]


@pytest.fixture(scope="module")
def made(request):
    """Shared runs of this file, by name."""
    return {}


@pytest.fixture
def run(preset, tmp_path_factory, made):
    """A function: train a run of four steps and return its folder; the plain run is trained once."""

    def train(name, *argv):
        if name not in made:
            folder = tmp_path_factory.mktemp("runs") / name
            train_mlm.main(["--config", preset, *SAVING, "--output_dir", str(folder), *map(str, argv)])
            made[name] = folder
        return made[name]

    return train


def verdict(capsys, a, b):
    """(exit code, printed lines) of the command."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        compare.main([str(a), str(b)])
    return ended.value.code, capsys.readouterr().out.splitlines()


def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_the_same_run_elsewhere_and_in_two_starts(run, preset, tmp_path, capsys):
    plain = run("plain")
    begun = copy(plain, tmp_path)
    for name in ("checkpoint-4", "run_record.json"):
        shutil.rmtree(begun / name, ignore_errors=True)
    (begun / "run_record.json").unlink()
    train_mlm.main(["--config", preset, *SAVING, "--output_dir", str(begun), "--dataloader_num_workers", "1"])
    code, lines = verdict(capsys, plain, begun)
    assert code == 0 and lines[-1] == "same: weights and log up to step 4"
    assert "may differ  dataloader_num_workers: 0 | 1" in lines
    log = [(folder / "log.jsonl").read_text().splitlines() for folder in (plain, begun)]
    steps = [[json.loads(line)["step"] for line in lines if '"loss"' in line] for lines in log]
    assert steps == [[1, 2, 3, 4]] * 2  # none twice


@pytest.mark.parametrize(
    ("flags", "setting", "step", "cause"),
    [
        ({"learning_rate": 2e-3}, "learning_rate: 0.001 | 0.002", 1, "learning rate"),
        ({"lr_scheduler_type": "cosine"}, 'lr_scheduler_type: "linear" | "cosine"', 2, "learning rate"),
        ({"mlm_probability": 0.3}, "mlm_probability: 0.15 | 0.3", 1, "masks"),
        ({"data_seed": 7}, "data_seed: 42 | 7", 1, "blocks"),
        ({"seed": 7}, "seed: 42 | 7", 1, "loss"),  # other weights at the start
        ({"weight_decay": 0.5}, "weight_decay: 0.01 | 0.5", 2, "loss"),
    ],
)
def test_the_first_cause_and_its_step(run, capsys, flags, setting, step, cause):
    other = run(f"{flags}", *[word for name, value in flags.items() for word in (f"--{name}", value)])
    code, lines = verdict(capsys, run("plain"), other)
    assert code == 1 and f"setting     {setting}" in lines
    assert re.match(rf"different: from step {step} on, first in the {cause}", lines[-1]), lines


def test_other_text_is_a_setting_by_its_content(run, capsys, tmp_path):
    other = write_parquet(tmp_path / "other.parquet", make_documents(200, seed=5))
    code, lines = verdict(capsys, run("plain"), run("text", "--train_file", other))
    assert code == 1 and lines[-1].startswith("different: from step 1 on, first in the blocks")
    assert any(line.startswith("may differ  train_file: ") for line in lines)


def test_digests_tell_runs_apart_that_log_nothing(run, capsys):
    """Only the weights of the checkpoints after two steps differ, without log lines."""
    silent = [run(f"silent{seed}", "--logging_strategy", "no", "--seed", seed) for seed in (42, 7)]
    code, lines = verdict(capsys, *silent)
    assert code == 1 and lines[-1] == "different: from step 2 on, first in the weights"
    assert any(re.fullmatch(r"step 2 +optimizer: optimizer .*", line) for line in lines)
    code, lines = verdict(capsys, silent[0], run("plain"))
    assert code == 0, lines


def test_an_unfinished_run_is_the_same_up_to_where_it_ends(run, tmp_path, capsys):
    plain = run("plain")
    cut = copy(plain, tmp_path)
    (cut / "run_record.json").unlink()
    shutil.rmtree(cut / "checkpoint-4")
    text = (cut / "log.jsonl").read_text()
    (cut / "log.jsonl").write_text("".join(text.splitlines(keepends=True)[:3]) + '{"loss": 5.1, "st')
    code, lines = verdict(capsys, plain, cut)
    assert code == 0 and lines[-1] == f"same: weights and log up to step 3, where {cut} ends"
    shutil.rmtree(cut / "checkpoint-2")
    code, lines = verdict(capsys, cut, plain)
    assert code == 0 and lines[-1] == f"same: log (no hashes of weights in common) up to step 3, where {cut} ends"


def test_a_finished_model_is_compared_with_no_checkpoint(run, tmp_path, capsys):
    """Its weights lack the head of next-sentence prediction; the other run was killed before it ended."""
    pairs = run("pairs", "--input_format", "segment_pair", "--objective", "mlm", "nsp")
    killed = copy(pairs, tmp_path)
    (killed / "run_record.json").unlink()
    code, lines = verdict(capsys, pairs, killed)
    assert code == 0 and lines[-1] == "same: weights and log up to step 4"


def test_what_cannot_be_compared(run, tmp_path, capsys):
    plain = run("plain")
    with pytest.raises(InputError, match=r"holds no run \(log.jsonl or run_record.json\)$"):
        compare.main([str(plain), str(tmp_path)])
    with pytest.raises(InputError, match=rf"it has {plain}$"):
        compare.main([str(plain), str(plain.parent)])
    damaged = copy(plain, tmp_path)
    for content in (b'{"loss": 3}\n', b"\xff\n", b'{"step": "a"}\n'):
        (damaged / "log.jsonl").write_bytes(content)
        with pytest.raises(InputError, match=r"log\.jsonl is not the log of a run"):
            compare.main([str(plain), str(damaged)])
    (damaged / "log.jsonl").unlink()
    (damaged / "checkpoint-2" / "recipe_state.json").write_text("[]")
    with pytest.raises(InputError, match="checkpoint-2 was written by another version"):
        compare.main([str(plain), str(damaged)])


# Digests


def test_a_checkpoint_says_what_it_holds_and_the_record_what_the_run_ended_with(run):
    plain = run("plain")
    record = durable.read_json(plain / "run_record.json")
    found = {}
    for path in checkpoint.newest_first(plain):
        state = durable.read_json(path / "recipe_state.json")
        assert set(state["digests"]) == {"weights", "optimizer", "scheduler"}
        assert state["digests"]["weights"] == checkpoint.hash_of_weights(path)
        found[state["step"]] = state["digests"]
    assert found[4] == record["state_digests"] and not set(found[2].values()) & set(found[4].values())
    assert re.fullmatch("[0-9a-f]{12}", record["blocks_digest"]) and record["blocks_digest"] != record["digest"]


def test_a_digest_does_not_depend_on_how_weights_are_spread_over_files(tmp_path, config):
    from transformers import RobertaForMaskedLM

    model = RobertaForMaskedLM(config)
    for name, size in (("one", "1GB"), ("many", "20KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    of_one = checkpoint.hash_of_weights(tmp_path / "one")
    assert checkpoint.hash_of_weights(tmp_path / "many") == of_one
    model.roberta.embeddings.LayerNorm.bias.data[0] += 1e-7
    model.save_pretrained(tmp_path / "one")
    assert checkpoint.hash_of_weights(tmp_path / "one") != of_one


def test_a_digest_of_a_state_is_of_its_content():
    def state(**others):
        tensors = {"exp_avg": torch.arange(4.0), "step": torch.tensor(3.0)}
        return {"state": {0: {**tensors, **others}}, "scale": 2.0}

    of = checkpoint.hash_of
    assert of(state()) == of(state()) and of(state(kept=object())) == of(state(kept=object()))
    others = [
        {"step": torch.tensor(4.0)},
        {"exp_avg": torch.arange(4)},
        {"exp_avg": torch.arange(4.0)[None]},
        {"exp_avg": torch.arange(4.0).bfloat16()},
        {"another": torch.arange(4.0)},
        {"step": 3.0},
    ]
    found = {of(state(**other)) for other in others} | {of(state()), of({**state(), "scale": 1.0}), of([state()])}
    assert len(found) == len(others) + 3
