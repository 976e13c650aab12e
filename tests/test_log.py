"""Progress of long operations: a bar on a terminal, log lines elsewhere; warnings of slow tokenization."""

import io
import logging
import re
import time
import types

import pytest

import train_mlm
from roberta_recipe import log
from roberta_recipe.log import Bar
from roberta_recipe.training import mlm_trainer, monitor
from tools import pack


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def lines(monkeypatch, caplog):
    """Log lines, one every 0.05 seconds for a bar."""
    monkeypatch.setattr(log, "LOG_INTERVAL_S", 0.05)
    caplog.set_level(logging.INFO, logger="recipe")
    return caplog


@pytest.mark.parametrize("disable", [None, True])
def test_without_a_terminal_a_bar_is_a_line_now_and_then(lines, disable):
    shown = io.StringIO()
    for _ in Bar(range(10), "Packing", file=shown, disable=disable):
        time.sleep(0.02)
    assert 2 <= len(lines.messages) <= 4 and not shown.getvalue()
    assert all(re.fullmatch(r"Packing \d+%, ETA \d+ s", line) for line in lines.messages)
    with Bar(desc="Reading", unit=" documents", file=shown) as bar:
        time.sleep(0.06)
        bar.update(2000)
    assert lines.messages[-1] == "Reading 2,000 documents" and not shown.getvalue()


def test_short_parts_and_terminals_have_no_line(lines):
    shown = Terminal()
    assert list(Bar(range(3), "Short", file=io.StringIO())) == [0, 1, 2]
    for _ in Bar(range(3), "Long", file=shown):
        time.sleep(0.06)
    assert "Long" in shown.getvalue() and not lines.messages


def test_the_eta_of_several_runs_has_them_all(monkeypatch):
    now = types.SimpleNamespace(s=0.0)
    monkeypatch.setattr(monitor, "time", types.SimpleNamespace(monotonic=lambda: now.s))
    state = types.SimpleNamespace(global_step=0, max_steps=11, is_world_process_zero=False)
    for steps_after, said in ((0, "ETA 50 s"), (22, "ETA 50 s, all runs 4 min")):
        line, state.global_step, now.s = monitor.Progress(steps_after), 0, 0.0
        line.on_train_begin(None, state, None)
        for state.global_step in range(1, 7):
            line.on_step_end(None, state, None)
            now.s += 10
        now.s -= 10
        assert line._line(state, {"loss": 1.0, "learning_rate": 1e-3}).rpartition("  ")[2] == said


def test_a_count_in_a_line_has_all_its_digits():
    line, state = monitor.Progress(), types.SimpleNamespace(global_step=5, max_steps=10)
    shown = line._line(state, {"eval_f1": 0.81234, "eval_total": 11873, "eval_loss": 0.5})
    assert shown == "step 5/10  validation  f1 0.8123  total 11,873  loss 0.5"


def test_a_warning_of_slow_tokenization_has_a_command_that_packs(preset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mlm_trainer, "_TOKENIZED_PER_CORE", 1e-3)
    train_mlm.main(["--config", preset])
    (command,) = re.findall(r"tools/pack.py (.*)", capsys.readouterr().err)
    cache = str(tmp_path / "cache")
    assert pack.main(command.replace("DIR", cache).split())
    train_mlm.main(["--config", preset, "--token_cache", cache, "--output_dir", str(tmp_path / "cached")])
    assert "Tokenization" not in capsys.readouterr().err
