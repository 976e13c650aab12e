"""fp16 on the CPU: a real loss scale and half-precision arithmetic, with overflows injected at chosen steps. accelerate
creates no loss scale on a CPU; `fp16_on_cpu` patches it."""

import functools
import importlib
import itertools
import json
import math
import os
import shutil
import types
from pathlib import Path

import accelerate
import pytest
import torch
from conftest import end_well, forked_ranks
from safetensors.torch import load_file
from transformers import Trainer

import train_mlm
from roberta_recipe import durable
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.training import checkpoint, durable_trainer, launching

LOGGED = ("step", "loss", "grad_norm", "learning_rate", "skipped_steps", "loss_scale", "digest")
SAVING = ["--save_strategy", "steps", "--save_steps", "1", "--max_steps", "6"]


class Overflow:
    """Steps (from 1) at which gradients overflow or the loss is not finite, and the rank."""

    def __init__(self, steps=(), losses=(), process=0, **scaler):
        self.steps, self.losses, self.process, self.scaler = set(steps), set(losses), process, scaler
        self.step = 0

    def here(self, steps):
        return self.step in steps and self.process == int(os.environ.get("RANK", "0"))


def fp16_on_cpu(patch, overflow):
    """Patch accelerate with CPU autocast and a loss scale in fp16, and inject `overflow` into the backward pass."""
    make, step, backward = accelerate.Accelerator.__init__, Trainer.training_step, accelerate.Accelerator.backward
    scaled = durable_trainer.DurableTrainer.loss_of_batch

    def make_with_scaler(self, *args, **kwargs):
        make(self, *args, **kwargs)
        if self.mixed_precision == "fp16":
            assert self.scaler is None, "accelerate has a loss scale on the CPU by now: drop this patch"
            self.scaler, self.native_amp = torch.amp.GradScaler("cpu", **overflow.scaler), True

    def training_step(self, *args, **kwargs):
        overflow.step = self.state.global_step + 1
        return step(self, *args, **kwargs)

    def loss_of_batch(self, losses, *args):
        return scaled(self, losses * math.inf if overflow.here(overflow.losses) else losses, *args)

    patch(accelerate.Accelerator, "__init__", make_with_scaler)

    def overflowing(self, loss, **kwargs):
        backward(self, loss * math.inf if overflow.here(overflow.steps) else loss, **kwargs)

    patch(accelerate.Accelerator, "backward", overflowing)
    patch(Trainer, "training_step", training_step)
    patch(durable_trainer.DurableTrainer, "loss_of_batch", loss_of_batch)
    patch(launching, "check_launch", lambda args: None)


@pytest.fixture
def train(preset, monkeypatch, tmp_path):
    """A function: pretrain in fp16 with the given `Overflow`."""

    def run(overflow, *argv, name="run"):
        with monkeypatch.context() as patched:
            fp16_on_cpu(patched.setattr, overflow)
            flags = ["--config", preset, "--fp16", "true", "--output_dir", tmp_path / name, *SAVING, *argv]
            return train_mlm.main([str(flag) for flag in flags])

    return run


def history(folder, keys=LOGGED):
    log = durable.read_json(checkpoint.newest_first(folder)[0] / "trainer_state.json")["log_history"]
    return [{key: entry.get(key) for key in keys} for entry in log if "loss" in entry]


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def same(first, second):
    assert first.keys() == second.keys() and len(first) > 20
    return all(torch.equal(value, second[name]) for name, value in first.items())


def stored(folder, name):
    return torch.load(Path(folder) / name, weights_only=True)


def test_a_step_that_overflows_changes_nothing_but_the_loss_scale(train, tmp_path, capsys):
    shape = ["--optim", "adamw_torch_fused", "--per_device_train_batch_size", 4]
    record = train(Overflow({3, 4}), *shape)
    plain = train(Overflow(), *shape, name="plain")
    assert (record["skipped_steps"], plain["skipped_steps"]) == (2, 0) and record["steps"] == plain["steps"] == 6
    assert (record["digest"], record["tokens_seen"]) == (plain["digest"], plain["tokens_seen"])  # blocks are consumed

    folders = [tmp_path / "run" / f"checkpoint-{step}" for step in range(1, 7)]
    changed = [not same(weights(before), weights(after)) for before, after in itertools.pairwise(folders)]
    assert changed == [True, False, False, True, True]
    moments = [stored(folder, "optimizer.pt")["state"][0] for folder in folders]
    assert torch.equal(moments[1]["exp_avg"], moments[3]["exp_avg"]) and moments[5]["step"] == 4
    assert [stored(folder, "scaler.pt")["scale"] for folder in folders] == [2**16] * 2 + [2**15] + [2**14] * 3
    log = history(tmp_path / "run")
    taken = [0, 1, 2, 2, 2, 3]  # steps before each: a rate that falls to 0 over six steps, and waits at a skipped step
    assert [entry["learning_rate"] for entry in log] == pytest.approx([1e-3 * (1 - k / 6) for k in taken])
    assert [entry["skipped_steps"] for entry in log] == [0, 0, 1, 2, 2, 2]
    assert [entry["loss_scale"] for entry in log] == [2**16] * 2 + [2**15] + [2**14] * 3
    assert [entry["grad_norm"] is None for entry in log] == [False, False, True, True, False, False]
    assert all(math.isfinite(entry["loss"]) for entry in log)
    assert log[:2] == history(tmp_path / "plain")[:2]
    assert "Step 4: fp16 gradients overflowed" in capsys.readouterr().err


def test_real_overflow_lowers_the_loss_scale_until_it_fits(train, tmp_path):
    """Without injection: a loss scale of 2^40 overflows half-precision gradients."""
    record = train(Overflow(init_scale=2.0**40), "--max_steps", "40", "--save_steps", "40", "--learning_rate", "3e-3")
    scale = stored(tmp_path / "run" / "checkpoint-40", "scaler.pt")["scale"]
    assert 10 < record["skipped_steps"] == 40 - math.log2(scale) < 32
    losses = [entry["loss"] for entry in history(tmp_path / "run")]
    first = record["skipped_steps"]
    assert max(losses[:first]) - min(losses[:first]) < 0.2 and losses[-1] < losses[0] - 0.3


def test_half_precision_gives_the_curve_of_fp32_and_its_checkpoint_is_fp32(train, tmp_path):
    train(Overflow())
    train(Overflow(), "--fp16", "false", name="fp32")
    for key, close in (("loss", 1e-3), ("grad_norm", 1e-2)):  # the norm is without the loss scale
        half, full = ([entry[key] for entry in history(tmp_path / name)] for name in ("run", "fp32"))
        assert half == pytest.approx(full, rel=close) and half != full
    assert {weight.dtype for weight in weights(tmp_path / "run").values()} == {torch.float32}


def test_a_loss_that_is_not_finite_is_left_out_of_the_mean(train, tmp_path):
    """Also in later log lines."""
    record = train(Overflow(losses={3}), "--logging_steps", "2", "--save_steps", "6")
    every = train(Overflow(steps={3}), name="every")
    assert record["skipped_steps"] == every["skipped_steps"] == 1
    losses = {entry["step"]: entry["loss"] for entry in history(tmp_path / "every")}
    found = {entry["step"]: entry["loss"] for entry in history(tmp_path / "run")}
    wanted = {1: losses[1], 2: losses[2], 4: losses[4], 6: (losses[5] + losses[6]) / 2}
    assert found == pytest.approx(wanted, rel=1e-5)

    train(Overflow(losses={2, 3}), name="alone")  # a log line each step: none where there is nothing to say
    assert [entry["step"] for entry in history(tmp_path / "alone")] == [1, 4, 5, 6]


def test_killed_and_resumed_it_is_the_same_run(train, tmp_path):
    """Bit for bit, with growth of the loss scale, which doubles after two steps without overflow."""
    overflow = {"steps": {2}, "losses": {3}, "growth_interval": 2}
    few = ["--max_steps", "9", "--logging_steps", "2"]
    whole = train(Overflow(**overflow), *few, name="whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    (tmp_path / "run" / "run_record.json").unlink()
    for folder in checkpoint.newest_first(tmp_path / "run"):
        if int(folder.name.split("-")[1]) > 3:
            shutil.rmtree(folder)
    again = train(Overflow(**overflow), *few)
    assert again["resumes"] == 1 and again["digest"] == whole["digest"]
    assert history(tmp_path / "run") == history(tmp_path / "whole")
    folders = [tmp_path / name / "checkpoint-9" for name in ("run", "whole")]
    assert same(*map(weights, folders))
    scales = [stored(folder, "scaler.pt") for folder in folders]
    assert scales[0] == scales[1] and scales[0]["scale"] == 2**16 * 2**-2 * 2**3
    states = [durable.read_json(folder / "recipe_state.json") for folder in folders]
    for state in states:
        del state["resumes"], state["train_seconds"]
    assert states[0] == states[1]


def test_overflow_without_end_ends_the_run(train, tmp_path):
    said = r"overflowed in 32 steps in a row, up to step 34: .*--bf16 true --fp16 false.*learning_rate=0\.001 .*int-30"
    for _ in range(2):  # killed and resumed, it is no other run
        with pytest.raises(RunError, match=said):
            train(Overflow(range(3, 99)), "--max_steps", "60", "--save_steps", "10")


def test_overflows_that_are_not_in_a_row_end_no_run(train, monkeypatch):
    monkeypatch.setattr(durable_trainer, "MAX_SKIPPED_STEPS", 2)
    assert train(Overflow({1, 3, 5}))["skipped_steps"] == 3


def test_overflow_under_deepspeed(train, monkeypatch):
    """With the loss scale at its minimum, for which DeepSpeed raises a plain exception; and a skipped step without a
    loss scale, after which DeepSpeed would continue."""

    def at_the_floor(self, loss, **kwargs):
        raise Exception("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")

    with monkeypatch.context() as patched:
        patched.setattr(accelerate.Accelerator, "backward", at_the_floor)
        with pytest.raises(RunError, match=r"with the loss scale at its minimum, after step 0: train in bf16"):
            train(Overflow())
    monkeypatch.setattr(accelerate.Accelerator, "optimizer_step_was_skipped", property(lambda self: True))
    with pytest.raises(RunError, match=r"the gradient of step 1 is not finite \(blocks 0 to 7\)"):
        train(Overflow(), "--fp16", "false")


def test_it_is_resumed_in_another_precision_as_the_message_says(train, tmp_path):
    train(Overflow({2}), "--max_steps", "4")
    (tmp_path / "run" / "run_record.json").unlink()
    record = train(Overflow(), "--fp16", "false", "--max_steps", "6", "--resume_despite_changes", "true")
    assert record["skipped_steps"] == 1 and record["resumes"] == 1
    assert not (tmp_path / "run" / "checkpoint-6" / "scaler.pt").exists()


def test_two_processes_skip_together(preset, train, tmp_path, deepspeed_ranks):
    """Overflow on rank 1 only, with data parallelism and under ZeRO (whose hysteresis keeps the loss scale at the first
    overflow)."""
    few = ["--max_steps", "4"]
    train(Overflow({2, 3}), *few, name="single")
    flags = ["--config", preset, "--fp16", "true", *SAVING, *few, "--per_device_train_batch_size", "2", "--output_dir"]
    accelerator = type(importlib.import_module("deepspeed.accelerator").get_accelerator())

    def one_process(folder):
        fp16_on_cpu(setattr, Overflow({2, 3}, process=1))
        accelerator.is_fp16_supported = lambda self: True  # DeepSpeed asks for fp16 that is fast
        train_mlm.main([*flags, str(folder)])

    runs = {"ddp": forked_ranks, "zero2": functools.partial(deepspeed_ranks, "zero2")}
    for name, start in runs.items():
        (logs := tmp_path / f"logs-{name}").mkdir()
        ranks = start(lambda rank, name=name: one_process(tmp_path / name), logs)
        end_well(ranks)
        assert sum(rank.log.count("fp16 gradients overflowed") for rank in ranks) == 2
    single = history(tmp_path / "single")
    for name in runs:
        two = history(tmp_path / name)
        assert json.loads((tmp_path / name / "run_record.json").read_text())["skipped_steps"] == 2
        for key in ("step", "skipped_steps", "learning_rate"):
            assert [entry[key] for entry in two] == [entry[key] for entry in single] and len(two) == 4
        scales = [1, 0.5, 0.25, 0.25] if name == "ddp" else [1, 1, 0.5, 0.5]
        assert [entry["loss_scale"] for entry in two] == [2**16 * scale for scale in scales]
        assert [entry["grad_norm"] is None for entry in two] == [False, True, True, False]
        assert [entry["loss"] for entry in two] == pytest.approx([entry["loss"] for entry in single], rel=2e-3)
        folders = [tmp_path / name / f"checkpoint-{step}" for step in range(1, 5)]
        changed = [not same(weights(before), weights(after)) for before, after in itertools.pairwise(folders)]
        assert changed == [False, False, True]


def test_precision_is_never_silently_another(preset, monkeypatch):
    """accelerate would train in fp32 for fp16 on a CPU, and torch would emulate bf16 on an older GPU."""
    with pytest.raises(InputError, match=r"fp16=true: a CPU has no fp16 training; .*--fp16 false"):
        train_mlm.main(["--config", preset, "--fp16", "true"])
    with pytest.raises(InputError, match="bf16=True and fp16=True exclude each other; leave one out"):
        train_mlm.main(["--config", preset, "--fp16", "true", "--bf16", "true"])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    gpu = types.SimpleNamespace(bf16=True, fp16=False, device=torch.device("cuda"), dataloader_num_workers=0)
    vars(gpu).update(world_size=1, n_gpu=1, torch_compile_backend=None)
    with pytest.raises(InputError, match="bf16=true: Tesla V100 has no bf16, only emulation: use --fp16 true"):
        launching.check_launch(gpu)
    gpu.bf16, gpu.fp16 = False, True
    launching.check_launch(gpu)
