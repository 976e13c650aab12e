"""Cool-down by the clock: a constant learning rate that falls linearly to the time limit, equal on all ranks."""

import json
from types import SimpleNamespace

import pytest
from conftest import end_well, forked_ranks

import train_mlm
from roberta_recipe.errors import InputError
from roberta_recipe.training import stopping
from roberta_recipe.training.mlm_trainer import MlmTrainer

CONSTANT = ["--lr_scheduler_type", "constant_with_warmup", "--max_steps", "100000"]
SHARE = "--cooldown_share"
ONE_MINUTE = [*CONSTANT, "--max_train_minutes", "1", "--warmup_steps", "2", SHARE, "0.5"]


def rates(folder):
    entries = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [entry["learning_rate"] for entry in entries if "loss" in entry]


@pytest.fixture
def clock(monkeypatch):
    """A stub of the time of `stopping`, 6 s per step."""
    now_s, step_losses = [0.0], MlmTrainer.step_losses

    def ticking(self):
        now_s[0] += 6.0
        return step_losses(self)

    monkeypatch.setattr(MlmTrainer, "step_losses", ticking)
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def test_the_rate_is_constant_then_falls_with_the_clock(preset, tmp_path, clock):
    """A step takes a tenth of the limit. The learning rate is set before the clock is read, so it lags by a step."""
    record = train_mlm.main(["--config", preset, *ONE_MINUTE])
    assert record["steps"] == 10 and record["stopped_by"] == "max_train_minutes"
    shares = [0, 0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4]
    assert rates(tmp_path / "run") == pytest.approx([1e-3 * share for share in shares], rel=1e-5)
    # started again, with another rate too: the clock starts at 0
    more = ["--learning_rate", "2e-3", "--resume_despite_changes", "true"]
    assert train_mlm.main(["--config", preset, *ONE_MINUTE, *more])["steps"] == 20
    shares = [1, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4]
    assert rates(tmp_path / "run")[10:] == pytest.approx([2e-3 * share for share in shares], rel=1e-5)


def test_all_processes_have_the_first_ones_clock(preset, tmp_path, clock):
    def call(rank):
        stopping.time.monotonic = lambda: clock[0] * (1 + rank)
        found, log = [], MlmTrainer.log
        MlmTrainer.log = lambda self, logs, *rest: found.append(logs.get("learning_rate")) or log(self, logs, *rest)
        train_mlm.main(["--config", preset, *ONE_MINUTE, "--per_device_train_batch_size", "4"])
        (tmp_path / f"rates-{rank}").write_text(json.dumps(found))

    end_well(forked_ranks(call, tmp_path))
    first, second = (json.loads((tmp_path / f"rates-{rank}").read_text()) for rank in (0, 1))
    assert first == second and first[7:10] == pytest.approx([8e-4, 6e-4, 4e-4], rel=1e-5)


@pytest.mark.parametrize("changes", [["--max_train_minutes", "1"], CONSTANT, [*ONE_MINUTE, SHARE, "1"]])
def test_without_a_limit_or_a_constant_schedule_it_is_refused(preset, changes):
    with pytest.raises(InputError, match=r"cooldown_share=.* between 0 and 1, with --max_train_minutes"):
        train_mlm.main(["--config", preset, SHARE, "0.5", *changes])
