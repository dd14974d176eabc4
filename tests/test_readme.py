"""What README and the pages in `docs` show works, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tfrep_strategy.cli import app

pytestmark = pytest.mark.lane("quick")

_REPOSITORY = Path(__file__).resolve().parent.parent
_README = (_REPOSITORY / "README.md").read_text("utf-8")


_PAGES = [*_REPOSITORY.glob("*.md"), *_REPOSITORY.glob("docs/**/*.md")]

_MAKE_MODEL = """
def make_model():
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10, "softmax")])
"""
_OWN_LOOP = """
import tensorflow as tf
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)

@tf.function
def step(images, labels):
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, model(images, training=True)))
"""
"""What `docs/callbacks.md` leaves to the reader."""


def _python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.lane("package")
def test_python_blocks_run_in_order(tmp_path):
    first, *others = _python_blocks(_README)
    of_callbacks = _python_blocks((_REPOSITORY / "docs" / "callbacks.md").read_text("utf-8"))
    measured, read, warmed_up, _ = of_callbacks  # The last needs wandb: tests/training/callbacks/test_trackers.py runs its like.
    blocks = [first, _MAKE_MODEL, measured, _OWN_LOOP, read, warmed_up, *others]  # In one process, which is cheaper than two.
    script = tmp_path / "readme.py"
    script.write_text("\n".join([*blocks, 'print("all of README ran")\n']), "utf-8")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all of README ran"
    for written in ("model.keras", "log.csv"):
        assert (tmp_path / written).exists(), written


@pytest.mark.parametrize("line", re.findall(r"^tfrep run .*?(?=\s*(?:#|$))", _README, re.MULTILINE))
def test_run_lines_parse(line):
    command = get_command(app).commands["run"]  # type: ignore[attr-defined]
    context = command.make_context("run", line.split()[2:])
    assert context.params["script"] == "train.py"
    assert context.params["num_replicas"] in (2, 8)


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.relative_to(_REPOSITORY).as_posix())
def test_linked_files_exist(page):
    for target in re.findall(r"\]\(([^)#:]+)[#)]", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target
