"""The plots: what is drawn, under which names, in which units."""

from __future__ import annotations

import io

import numpy as np
import pytest
from matplotlib.figure import Figure

from tfrep_strategy.examples import plots

pytestmark = pytest.mark.lane("quick")


@pytest.fixture
def axes():
    axes = Figure().subplots()
    yield axes
    axes.figure.savefig(io.BytesIO(), format="png")  # It can be drawn.


def test_curves_lie_over_each_other(axes):
    plots.draw_curves(axes, {"one": [3.0, 2.0], "two": [3.0, 2.0]}, x=[10, 20], xlabel="step", ylabel="loss (nats)")
    first, second = axes.get_lines()
    assert list(first.get_xdata()) == [10, 20]
    assert list(first.get_ydata()) == list(second.get_ydata()) == [3.0, 2.0]
    assert first.get_linewidth() > second.get_linewidth()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss (nats)")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "two"]


def test_bars_stand_in_order_with_their_values(axes):
    plots.draw_bars(axes, {"slow": 12.34, "fast": 12345.6})
    assert [bar.get_width() for bar in axes.patches] == [12.34, 12345.6]
    assert [text.get_text() for text in axes.texts] == ["12.3", "12,346"]
    assert axes.yaxis_inverted()


def test_bars_of_errors_are_standard_errors(axes):
    rows = np.array([[1.0, 5.0], [3.0, 5.0], [5.0, 5.0]])
    plots.draw_spread(axes, {"score": rows}, x=[8, 16], xlabel="batch (examples)", ylabel="score")
    segments = axes.collections[0].get_segments()
    half = 2.0 / np.sqrt(3)
    np.testing.assert_allclose([s[:, 1] for s in segments], [[3 - half, 3 + half], [5, 5]])
    plots.draw_spread(axes, {"one seed": [[1.0, 2.0]]}, x=[8, 16], xlabel="batch (examples)", ylabel="score")


def test_a_grid_of_pictures(axes):
    pictures = np.arange(3)[:, None, None, None] / 2 * np.ones([3, 4, 5, 1])
    plots.draw_pictures(axes, pictures, columns=2, title="three")
    drawn = axes.images[0].get_array()
    assert drawn.shape == (9, 11)
    np.testing.assert_array_equal([drawn[0, 0], drawn[0, 6], drawn[5, 0]], [0.0, 0.5, 1.0])
    plots.draw_pictures(axes, np.zeros([2, 4, 5, 3]))
    assert axes.images[1].get_array().shape == (4, 47, 3)


def test_a_confusion_matrix_counts_rows_by_true_class(axes):
    plots.draw_confusion(axes, [[5, 1], [0, 4]], ["no", "yes"])
    assert [text.get_text() for text in axes.texts] == ["5", "1", "0", "4"]
    assert [text.get_position() for text in axes.texts] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert axes.get_xlabel() == "predicted class"
