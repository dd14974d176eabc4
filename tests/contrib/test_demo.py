"""`tfrep demo`, on fewer examples."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from raising import refuses
from rich.console import Console

from tfrep_strategy.cluster.hardware import problem_of_sharing, visible_gpus
from tfrep_strategy.cluster.identity import horovod_is_installed
from tfrep_strategy.contrib import demo
from tfrep_strategy.errors import PeerError

pytestmark = pytest.mark.lane("launchers")

_REPOSITORY = Path(__file__).resolve().parents[2]
_EXAMPLES = 333  # Does not divide by the batch, and its last batch not by two.


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What a small demo returned, printed and drew."""
    picture = tmp_path_factory.mktemp("demo") / "demo.png"
    output = io.StringIO()
    results = demo.run_demo(picture, epochs=3, examples=_EXAMPLES, console=Console(file=output, width=100))
    return results, output.getvalue(), picture


def test_every_variant_gives_the_answer_of_one_device(shown):
    results, _, _ = shown
    one_device, *others = results
    assert one_device.variant == demo.ONE_DEVICE
    assert len(others) == 2 + horovod_is_installed() + (problem_of_sharing(2) is None)
    for result in others:
        assert result.largest_difference < 1e-5, result.variant
        assert result.accuracy == pytest.approx(one_device.accuracy, abs=1e-6)
        np.testing.assert_allclose(result.losses, one_device.losses, rtol=1e-4)
    assert any(result.largest_difference > 0 for result in others)  # They did add up in another order.


def test_it_learns(shown):
    for result in shown[0]:
        assert len(result.losses) == 3
        assert result.losses[-1] < 0.75 * result.losses[0]
        assert result.accuracy > 0.2
        assert result.examples_per_second > 0


def test_table_has_a_line_for_each_variant(shown):
    results, text, picture = shown
    lines = text.splitlines()
    for result in results:
        row = next(line for line in lines if result.variant in line and "%" in line)
        assert f"{result.accuracy:.1%}" in row
        assert f"{result.examples_per_second:,.0f}" in row
    assert str(picture) in text.replace("\n", "")


def test_it_says_why_replicas_on_cores_are_not_faster_and_at_last_how_long_it_took(shown):
    _, text, _ = shown
    assert ("Do not expect two replicas to be faster here: they share the " in text) == (visible_gpus() < 2)
    assert re.fullmatch(r"\d+ s in all, most of them to start Python and TensorFlow\.", text.splitlines()[-1])


def test_picture_is_a_picture(shown):
    pixels = imread(shown[2])
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > 800
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20


def test_without_matplotlib_it_shows_the_table_and_how_to_get_the_picture(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # As where it is not installed.
    monkeypatch.setattr(demo, "variants", lambda: [demo.Variant(demo.ONE_DEVICE, "none")])
    output = io.StringIO()
    demo.run_demo(tmp_path / "demo.png", epochs=2, examples=64, console=Console(file=output, width=60))
    assert "test accuracy" in output.getvalue()
    first_command = re.search(r"^pip install .* && tfrep demo$", (_REPOSITORY / "README.md").read_text("utf-8"), re.MULTILINE)
    assert first_command is not None
    assert output.getvalue().splitlines()[-2].endswith(f": {first_command[0]}")
    assert not (tmp_path / "demo.png").exists()


def test_one_epoch_is_refused():
    with refuses(epochs=1):
        demo.run_demo(None, epochs=1)


def test_a_failure_is_told(monkeypatch):
    monkeypatch.setattr(demo, "variants", lambda: [demo.Variant("one device", "none")])
    with pytest.raises(PeerError, match="examples"):
        demo.run_demo(None, epochs=2, examples="many", console=Console(file=io.StringIO()))  # type: ignore[arg-type]
