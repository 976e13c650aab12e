"""Advice at the start of a run: when it is given, and flags and commands that do what it promises."""

import re

import pytest

import train_mlm
from roberta_recipe.training import advice
from roberta_recipe.training.batch import accumulation_steps
from tools import pack

H100, BASE = 798e12, 0.602e9  # FLOP/s, FLOPs a token


def test_tokenization_is_compared_with_training():
    assert advice.on_tokenization(16, 8, H100, BASE, "p") is None  # 7.68 M tokens/s for 3.71 M
    line = advice.on_tokenization(2.5, 8, H100, BASE, "runs/a/preset.yaml")
    assert "each process and data worker tokenizes the whole text, some 1.20 M tokens/s" in line
    assert "on 2.5 cores each, and 8 processes can train some 3.71 M tokens/s" in line
    assert line.endswith("python tools/pack.py --config runs/a/preset.yaml --token_cache DIR")
    assert advice.on_tokenization(2, 1, H100, BASE, "p") is None


def test_a_run_from_text_is_advised_and_its_command_packs(preset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(advice, "_TOKENIZED_PER_CORE", 1e-3)
    train_mlm.main(["--config", preset])
    (command,) = re.findall(r"tools/pack\.py (.*)", capsys.readouterr().err)
    cache = str(tmp_path / "cache")
    assert pack.main(command.replace("DIR", cache).split())
    for others in (["--token_cache", cache], ["--max_train_samples", "9"]):
        train_mlm.main(["--config", preset, *others, "--output_dir", str(tmp_path / others[0])])
        assert "Tokenization" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        ((16, 128, 32, 1), "--per_device_train_batch_size 128 --global_batch_size 128 (another run)"),
        ((16, 128, 32, 2), "--per_device_train_batch_size 128 --global_batch_size 256 (another run)"),
        ((8, 512, 8192, 8), "--per_device_train_batch_size 32 (the global batch stays 8192)"),
        ((1, 512, 42, 1), "--per_device_train_batch_size 42 (the global batch stays 42)"),
        ((10, 500, 100, 1), "--per_device_train_batch_size 50 (the global batch stays 100)"),
    ],
)
def test_a_micro_batch_that_leaves_a_gpu_idle(sizes, flags):
    line = advice.on_micro_batch(*sizes)
    assert line.endswith(f"where memory allows: {flags}") and f"{sizes[0]} x {sizes[1]} tokens" in line
    micro, batch = map(int, re.findall(r" (\d+)", flags))
    assert accumulation_steps(batch, micro, sizes[3]) >= 1
    assert advice.on_micro_batch(micro, sizes[1], batch, sizes[3]) is None
