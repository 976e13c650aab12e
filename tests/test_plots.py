"""Plots of the shortest runs are readable: a curve of one point has a marker."""

import pytest
from matplotlib.figure import Figure

from roberta_recipe.publishing import plots


@pytest.fixture
def shown(monkeypatch):
    """(points, marker) of each curve in the last figure."""
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **others: (drawn.append(figure), save(figure, *args)))
    return lambda: [(len(line.get_xdata()), line.get_marker()) for axes in drawn[-1].axes for line in axes.lines]


def record(steps):
    """The part of a record that plots read, for a run with so many logged steps."""
    losses = [[step, 5.0 - step / 1000] for step in range(1, steps + 1)]
    return {
        "loss_at_steps": {"train": losses, "validation": losses[-1:]},
        "score_at_steps": [[steps, 0.5]],
        "blimp_at_steps": [[steps, 0.5]],
        "unigram_entropy": 6.0,
        "metrics": {"eval_loss": 4.0},
        "tokens_seen": 10,
        "resolved_args": {"seed": 1, "learning_rate": 1e-3, "global_batch_size": 8},
    }


@pytest.mark.parametrize(("steps", "marker"), [(1, "o"), (10, "o"), (200, "None")])
def test_curves_of_few_points_have_dots(steps, marker, shown, tmp_path):
    plots.plot_loss(record(steps), tmp_path / "a.png")
    assert shown()[:2] == [(steps, marker), (1, "o")]
    plots.plot_runs([record(steps)], "accuracy", tmp_path / "b.png")
    assert shown() == [(steps, marker), (1, "o")] and (tmp_path / "b.png").stat().st_size > 1000
