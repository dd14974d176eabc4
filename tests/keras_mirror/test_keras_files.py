"""Keras's own tests, in the scope of each of our strategies: what holds on one device holds there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from keras_runs import KERAS, VARIANTS, run

from tfrep_strategy.cluster.identity import horovod_is_installed

pytestmark = pytest.mark.lane("keras")

ALL = os.environ.get("TFREP_KERAS_TESTS") == "all"
"""Whether to run every test of every file: an hour and more on two cores."""

FILES = {
    True: [
        "trainers/trainer_test.py",
        "callbacks/[!o]*_test.py",  # Not those of Orbax: tests/keras_integration/test_callbacks.py has it.
        "optimizers/**/*_test.py",
        "saving/*_test.py",
        "metrics/*_test.py",
    ],
    False: [
        "trainers/trainer_test.py",
        "callbacks/[!o]*_test.py",
        "optimizers/optimizer_test.py",
        "optimizers/loss_scale_optimizer_test.py",
        "saving/saving_api_test.py",
        "metrics/metric_test.py",
    ],
}
EVERY = {True: 1, False: 20}
"""Each variant runs every test, or every twentieth one, beginning at another."""
LIMIT = {True: 7200.0, False: 600.0}
"""Seconds for one variant."""


@pytest.mark.timeout(LIMIT[ALL] * 2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_holds_on_one_device_holds_in_scope(variant: str) -> None:
    if variant == "horovod" and not horovod_is_installed():
        pytest.skip("Horovod is not installed.")
    files = sorted({str(path.relative_to(KERAS)) for pattern in FILES[ALL] for path in KERAS.glob(pattern)})
    first = VARIANTS.index(variant) % EVERY[ALL]
    found = run(variant, files, LIMIT[ALL], first, EVERY[ALL], cannot_hold(variant, runs=False))
    assert sum(outcome.name == "passed" for outcome in found.values()) > 10
    rest = [test for test, outcome in found.items() if outcome.name != "passed"]
    alone = run("one device", rest, LIMIT[ALL])
    assert alone.keys() == set(rest)
    differing = {test for test in rest if found[test].name != alone[test].name}
    listed = cannot_hold(variant, runs=True) & found.keys()
    assert not differing - listed, "\n".join(
        f"{test}: {found[test].name}, {alone[test].name} on one device\n{found[test].why}" for test in differing - listed
    )
    assert not listed - differing, "These hold, and are listed as tests that cannot."


def cannot_hold(variant: str, runs: bool) -> set[str]:
    """Reads which tests cannot hold on a variant; the file says why, and which of them are not even run."""
    table = json.loads(Path(__file__).with_name("cannot_hold.json").read_text("utf-8"))
    return {test for entry in table if variant in entry["variants"] and entry["runs"] is runs for test in entry["tests"]}


def test_a_rank_that_fails_alone_does_not_hold_up_the_rest(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("alone_cases.py"), tmp_path / "alone_test.py")
    found = run("tf", [str(tmp_path / "alone_test.py")], 120.0)
    first, second = found.values()
    assert first.name == "failed"
    assert "assert 1 == 0" in first.why
    assert second.name == "passed"
