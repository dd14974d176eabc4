"""What of Keras is replaced: it fits the Keras that is installed, is undone to the letter, and stands in the documentation.

Runs with any Keras: `PYTHONPATH=folder/of/another/keras python -m pytest tests/keras_integration/test_patching.py`.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import pytest

import tfrep_strategy as tfrep
from tfrep_strategy import keras_integration
from tfrep_strategy.core.replacements import Row
from tfrep_strategy.keras_integration import internals
from tfrep_strategy.keras_integration.patching import Patch
from tfrep_strategy.strategies import REPLACED

_REPOSITORY = Path(__file__).resolve().parents[2]
_ROOM = _REPOSITORY / "tfrep_strategy" / "keras_integration"


def test_each_attribute_is_replaced_once_and_says_why() -> None:
    rows = keras_integration.describe()
    assert len({row.target for row in rows}) == len(rows)
    for row in rows:
        assert row.why, row.target
        assert row.otherwise, row.target
    assert len(rows) <= 90, "a new entry needs the place of an old one, or a good reason"


def test_a_changed_signature_is_named_beside_the_expected_one() -> None:
    misfit = Patch("utils.file_utils:exists", ("(path, mode)", "(path, how)"), why="").misfit()
    assert misfit == "`utils.file_utils:exists` is (path), not (path, mode) or (path, how)."
    assert "is no function but <property" in Patch("models.model:Model.layers", "(self)", why="").misfit()


@pytest.mark.parametrize("target", ["utils.file_utils:gone", "gone.module:name", "models.model:Model.gone", "models.model:Gone.x"])
def test_a_moved_attribute_is_named(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = f"`{target}` is gone."
    assert Patch(target, "()", why="").misfit() == gone
    older_lacks_it = Patch(target, "()", why="", optional=True)
    assert not older_lacks_it.misfit()
    monkeypatch.setattr(keras, "__version__", "99.0.0")
    assert older_lacks_it.misfit() == gone


def test_what_is_added_needs_a_place() -> None:
    assert not Patch("models.model:Model.new", why="", adds=len).misfit()
    for target in ("gone.module:new", "models.model:Gone.new"):
        assert Patch(target, why="", adds=len).misfit() == f"`{target}` has no place."


def _drawn(rows: Sequence[Row]) -> str:
    """Draws the table of docs/architecture.md."""
    lines: list[str] = []
    topic = None
    for row in rows:
        if row.topic != topic:
            topic = row.topic
            lines += ["", f"**{topic}.** {row.otherwise}", "", "| what | why |", "|---|---|"]
        lines.append(f"| `{row.target}` | {row.why} |")
    return "\n".join(lines[1:]) + "\n"


_PAGE = _REPOSITORY / "docs" / "architecture.md"


def _written(text: str) -> str:
    """Returns the page with the tables and the number of the registry."""
    drawn = _drawn([*keras_integration.describe(), *REPLACED.describe()])
    begin, end = "<!-- generated -->\n\n", "\n<!-- end of what is generated -->"
    before, _, rest = text.partition(begin)
    text = before + begin + drawn + end + rest.partition(end)[2]
    return re.sub(r"Of Keras there are \d+,", f"Of Keras there are {len(keras_integration.describe())},", text)


def test_the_tables_in_the_documentation_are_those_of_the_registry() -> None:
    text = _PAGE.read_text("utf-8")
    assert text == _written(text), "`python tests/keras_integration/test_patching.py` writes them anew"


_PROGRAM = """
import json, sys, types
import keras, numpy as np, tensorflow as tf

tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
x = np.arange(12.0, dtype="float32").reshape(6, 2)
y = x.sum(1, keepdims=True)

class Own(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="own")
        self.rows = self.add_variable((), "zeros", name="rows")
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))
    def result(self):
        return self.rows

def trained():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(clipnorm=1.0), "mse", metrics=["mae", Own()])
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, validation_data=(x, y)).history
    return [w.tolist() for w in model.get_weights()], history, model.predict(x, verbose=0).tolist()

def found():
    spaces = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "keras":
            spaces[name] = module
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__.startswith("keras"):
                    spaces[f"{value.__module__}.{value.__qualname__}"] = value
    spaces["Own"] = Own
    return {name: (space, dict(vars(space))) for name, space in spaces.items()}

plain = trained()
before = found()
import tfrep_strategy as tfrep
from tfrep_strategy import keras_integration

def changed():
    return sorted(
        f"{name}.{attribute}"
        for name, (space, attributes) in before.items()
        for attribute in (attributes.keys() | vars(space).keys()) - {"__warningregistry__"}
        if attributes.get(attribute) is not vars(space).get(attribute)
        and not isinstance(vars(space).get(attribute), types.ModuleType)
    )

strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    trained()
installed, outside = changed(), trained()
keras_integration.uninstall()
left, again = changed(), trained()
keras_integration.install()
keras_integration.install()
reinstalled = changed()
keras_integration.uninstall()
print(json.dumps([plain == outside, plain == again, installed, left, reinstalled, changed()]))
"""


def test_uninstall_leaves_keras_as_if_it_had_never_been_touched() -> None:
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    is_same_outside, is_same, installed, left, reinstalled, left_again = json.loads(done.stdout.splitlines()[-1])
    assert is_same_outside, "outside a scope, Keras trains to the same numbers as before"
    assert is_same, "plain Keras trains to the same numbers as before"
    assert "keras.src.backend.tensorflow.trainer.TensorFlowTrainer.fit" in installed
    assert "keras.utils.get_file" in installed
    assert (left, left_again) == ([], [])
    assert set(installed) - set(reinstalled) <= {name for name in installed if name.endswith((".result", ".update_state"))}


def _changed(tree: ast.AST) -> Iterator[Any]:
    """Gives what statements assign to, but for plain names, and what `setattr` changes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            yield node.args[0]


@pytest.mark.parametrize("path", sorted(_ROOM.rglob("*.py")), ids=lambda path: str(path.relative_to(_ROOM)))
def test_nothing_but_a_patch_changes_keras(path: Path) -> None:
    """Looks for assignments to attributes of modules and classes of Keras, by their public and their private names."""
    tree = ast.parse(path.read_text("utf-8"))
    names = {"keras", *vars(internals)} - {"misfits"}
    for target in _changed(tree):
        assert not re.match(rf"(vars\()?({'|'.join(names)})\b", ast.unparse(target)), ast.unparse(target)


def test_classes_that_are_made_in_functions_are_freed() -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])

    def make() -> weakref.ref[type]:
        class Own(keras.metrics.Mean):
            def update_state(self, *args: Any, **kwargs: Any) -> Any:
                return super().update_state(*args, **kwargs)

            def result(self) -> Any:
                return super().result()

        with strategy.scope():
            Own()
        return weakref.ref(Own)

    made = [make() for _ in range(3)]
    gc.collect()
    assert [each() for each in made] == [None] * 3


if __name__ == "__main__":
    _PAGE.write_text(_written(_PAGE.read_text("utf-8")), "utf-8")
