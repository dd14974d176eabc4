"""What functions keep when they travel by value."""

from __future__ import annotations

import inspect
import linecache
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tfrep_strategy.running import launch
from tfrep_strategy.running.function import dumps

CELL = """
def total(values):
    import tensorflow as tf

    @tf.function
    def add(values):
        sum = 0
        for value in values:
            sum += value
        return sum

    return int(add(tf.constant(values)))
"""


@pytest.fixture
def cell():
    """A function of a notebook's cell: its lines are in no file, and its module is nowhere to be imported."""
    name = "/nowhere/cell.py"
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
    scope = {"__name__": "__main__"}
    exec(compile(CELL, name, "exec"), scope)
    yield scope["total"]
    del linecache.cache[name]


def test_the_lines_of_a_cell_travel(cell, tmp_path: Path) -> None:
    (tmp_path / "call").write_bytes(dumps(cell))
    reading = "import inspect, pickle, sys; print(inspect.getsource(pickle.load(open(sys.argv[1], 'rb'))), end='')"
    found = subprocess.run(
        [sys.executable, "-c", reading, str(tmp_path / "call")], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout == inspect.getsource(cell) == CELL.lstrip()


def test_functions_keep_their_files() -> None:
    def outer():
        return lambda: None

    copy = pickle.loads(dumps(outer))
    assert copy.__code__.co_filename == copy().__code__.co_filename == __file__
    assert inspect.getsource(copy) == inspect.getsource(outer)


def test_autograph_converts_the_loops_of_a_cell(cell) -> None:
    assert launch(cell, ([1, 2, 3],), num_replicas=2, communicator="tf", timeout=100.0) == [6, 6]
