"""What is replaced in TensorFlow fits the one that is installed, and is undone to the letter."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf
from typer.testing import CliRunner

from tfrep_strategy import keras_integration
from tfrep_strategy.cli import app
from tfrep_strategy.core.replacements import TENSORFLOW, Replacement, Replacements
from tfrep_strategy.errors import UnsupportedVersionError
from tfrep_strategy.strategies import REPLACED, patches

pytestmark = pytest.mark.lane("quick")


class _Tool:
    def work(self, hours: int = 8) -> int:
        return hours


def _table(*entries: Replacement) -> Replacements:
    return Replacements(TENSORFLOW, "Tools", "There is no other way.", entries)


def _doubled(work: Any) -> Any:
    return lambda self, hours=8: 2 * work(self, hours)


def test_an_attribute_is_replaced_once_and_put_back() -> None:
    original, sizes = _Tool.work, {int: 1}
    table = _table(
        Replacement(_Tool, "work", ("(self)", "(self, hours=8)"), _doubled, "twice as much"),
        Replacement(sizes, int, "", lambda size: size + 1, "larger"),
    )
    for _ in range(2):
        table.install("2.21.0")
        assert _Tool().work(3) == 6
        assert sizes == {int: 2}
    table.uninstall()
    table.uninstall()
    assert _Tool.work is original
    assert sizes == {int: 1}
    assert [row.expects for row in table.describe()] == ["(self)", ""]


def test_nothing_is_replaced_where_something_does_not_fit() -> None:
    original = _Tool.work
    fits = Replacement(_Tool, "work", "(self, hours=8)", _doubled, "")
    other, gone = Replacement(_Tool, "work", "(self)", _doubled, ""), Replacement(_Tool, "rest", "(self)", _doubled, "")
    with pytest.raises(UnsupportedVersionError) as error:
        _table(fits, other, gone).install("2.21.0")
    assert _Tool.work is original
    assert "_Tool.work` is (self, hours=8), not (self)." in str(error.value)
    assert "_Tool.rest` is gone." in str(error.value)


def test_every_entry_has_a_reason_and_a_place_of_its_own() -> None:
    rows = patches.describe()
    assert len({row.target for row in rows}) == len(rows)
    assert all(row.why and row.otherwise for row in rows)
    assert len(rows) == len(keras_integration.describe()) + len(REPLACED.entries)


_UNDONE = """
import keras, tensorflow as tf
from tensorflow.python.framework import random_seed
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
kinds = [tf.train.Checkpoint, tf.data.Dataset, Function, keras.optimizers.Optimizer, keras.Model]
def state():
    return [dict(vars(kind)) for kind in kinds] + [random_seed.get_seed, tf.saved_model.save]
before = state()
from tfrep_strategy.strategies import patches
replaced = [a is not b for a, b in zip(state(), before)][-2:]
patches.uninstall()
after = state()
print(replaced, after == before)
"""


def test_uninstalling_leaves_nothing_behind() -> None:
    ran = subprocess.run([sys.executable, "-c", _UNDONE], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "[True, True] True"


def test_the_command_lists_them() -> None:
    told = CliRunner().invoke(app, ["doctor", "--patches", "--json"])
    assert told.exit_code == 0, told.output
    assert [row["target"] for row in json.loads(told.stdout)] == [row.target for row in patches.describe()]
    assert "pads a replica's" in CliRunner().invoke(app, ["doctor", "--patches"]).stdout


def test_a_loop_over_data_is_named() -> None:
    targets = [row.target for row in REPLACED.describe()]
    assert f"{tf.data.Dataset.__module__}:DatasetV2 (a loop over it)" in targets
