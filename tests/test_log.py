"""Progress of long parts: a bar on a terminal, elsewhere a log line every half minute. The clock is a made-up one."""

import io
import itertools
import logging
import types

import pytest

from roberta_recipe import log
from roberta_recipe.log import Bar
from roberta_recipe.training import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    now = types.SimpleNamespace(s=0.0)
    monkeypatch.setattr(log, "time", types.SimpleNamespace(monotonic=lambda: now.s))
    return now


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("step_s", [7, 31])
def test_a_line_every_half_minute_where_there_is_no_terminal(clock, caplog, by_hand, step_s):
    caplog.set_level(logging.INFO, logger="recipe")
    said_s = []
    bar = Bar(None if by_hand else range(100), "Packing", total=100, file=io.StringIO())
    for _ in range(100) if by_hand else bar:
        if by_hand:
            bar.update()
        if len(caplog.messages) > len(said_s):
            said_s.append(clock.s)
        clock.s += step_s
    wait_s = step_s * (30 // step_s + 1)
    assert bar.n == 100 and len(said_s) in (100 * step_s // wait_s - 1, 100 * step_s // wait_s)
    assert all(b - a == wait_s for a, b in itertools.pairwise(said_s))
    assert all(line.startswith("Packing ") and "%, ETA " in line for line in caplog.messages)


def test_short_parts_and_terminals_have_no_line(clock, caplog):
    caplog.set_level(logging.INFO, logger="recipe")
    shown = Terminal()
    assert list(Bar(range(3), "Short", file=io.StringIO())) == [0, 1, 2] and not caplog.messages
    for _ in Bar(range(3), "Long", file=shown):
        clock.s += 100
    assert "Long" in shown.getvalue() and not caplog.messages


def test_without_a_total_a_line_says_how_many(clock, caplog):
    caplog.set_level(logging.INFO, logger="recipe")
    for _ in Bar(iter(range(3)), "wiki", unit=" documents", file=io.StringIO()):
        clock.s += 20
    assert caplog.messages == ["wiki 2 documents"]


def test_the_eta_of_several_runs_has_them_all(monkeypatch):
    now = types.SimpleNamespace(s=0.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now.s))
    state = types.SimpleNamespace(global_step=0, max_steps=11, is_world_process_zero=False)
    for steps_after, said in ((0, "ETA 50 s"), (22, "ETA 50 s, of all runs 4 min")):
        line, state.global_step, now.s = progress.Progress(steps_after), 0, 0.0
        line.on_train_begin(None, state, None)
        for state.global_step in range(1, 7):
            line.on_step_end(None, state, None)
            now.s += 10
        now.s -= 10
        assert line._line(state, {"loss": 1.0, "learning_rate": 1e-3}).rpartition("  ")[2] == said
