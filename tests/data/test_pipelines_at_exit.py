"""A process that has done everything ends, whatever its data pipelines do at that moment."""

from __future__ import annotations

import os
import queue
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf
from calling import command

from tfrep_strategy.data import pipeline_ends  # noqa: F401  # Acts when Python ends.
from tfrep_strategy.data.pipeline_ends import PipelineIterator

pytestmark = pytest.mark.lane("faults")


class Holder:
    """Holds itself, so that Python finds what it holds only when it ends: as in a script that `tfrep run` runs."""

    def __init__(self) -> None:
        self.itself = self
        number = tf.TensorSpec([], tf.int32)
        slow = tf.data.Dataset.from_generator(_slow, output_signature=number).prefetch(10_000)
        stuck = tf.data.Dataset.from_generator(_stuck, output_signature=number).prefetch(2)
        self.iterators = [*(iter(slow) for _ in range(4)), iter(stuck), PipelineIterator(slow), PipelineIterator(stuck)]


def _slow() -> Iterator[int]:
    while True:
        time.sleep(0.01)
        yield 1


def _stuck() -> Iterator[int]:
    yield 1
    queue.Queue[int]().get()


def _read() -> None:
    print(sum(int(next(each)) for each in Holder().iterators), flush=True)


def test_live_pipelines_do_not_hold_up_the_end(tmp_path: Path) -> None:
    done = subprocess.run(
        command(_read),
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "7\n"
