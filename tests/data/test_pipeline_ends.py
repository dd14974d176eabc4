"""The end of an iterator does not wait for a pipeline that ends slowly."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.core.tf import caches_in_file
from tfrep_strategy.data.pipeline_ends import PipelineIterator

_LONG = 60.0


class Slow:
    """Numbers, of which the second comes when `may_go_on` is set."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.has_ended = threading.Event()

    def numbers(self) -> Iterator[float]:
        try:
            yield 1.0
            assert self.may_go_on.wait(_LONG)
            yield 2.0
        finally:
            self.has_ended.set()

    def dataset(self) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(self.numbers, output_signature=tf.TensorSpec([], tf.float32)).prefetch(1)


def test_a_slow_pipeline_ends_in_the_background() -> None:
    slow = Slow()
    iterator = PipelineIterator(slow.dataset())
    assert next(iterator) == 1.0
    start = time.monotonic()
    del iterator
    assert time.monotonic() - start < _LONG / 2
    assert not slow.has_ended.is_set()
    slow.may_go_on.set()
    assert slow.has_ended.wait(_LONG)


def test_distributed_data(request: pytest.FixtureRequest) -> None:
    slow = Slow()
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    steps = iter(strategy.experimental_distribute_dataset(slow.dataset().map(lambda x: x * np.float32(3)).batch(1)))
    request.addfinalizer(slow.may_go_on.set)
    assert sum(float(tf.reduce_sum(part)) for part in strategy.experimental_local_results(next(steps))) == 3.0
    start = time.monotonic()
    del steps
    gc.collect()
    assert time.monotonic() - start < _LONG / 2
    assert not slow.has_ended.is_set()
    slow.may_go_on.set()
    assert slow.has_ended.wait(_LONG)


def test_what_writes_a_file_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    slow = Slow()
    iterator = PipelineIterator(slow.dataset().cache(str(path)).map(lambda x: x + 1))
    assert next(iterator) == 2.0
    threading.Timer(1.0, slow.may_go_on.set).start()
    del iterator
    assert slow.has_ended.is_set()
    assert not list(tmp_path.iterdir())  # The next pipeline may write the file.


@pytest.mark.parametrize(("name", "answer"), [("", False), ("numbers", True)])
def test_caches_in_file(tmp_path: Path, name: str, answer: bool) -> None:
    cached = tf.data.Dataset.range(3).cache(str(tmp_path / name) if name else "")
    assert caches_in_file(tf.data.Dataset.zip(tf.data.Dataset.range(3), cached).batch(2)) == answer


def test_an_iterator_that_lives_as_long_as_python_ends_in_silence() -> None:
    program = (
        "import tensorflow as tf;"
        "from tfrep_strategy.data.pipeline_ends import PipelineIterator;"
        "tf.kept = PipelineIterator(tf.data.Dataset.range(3)); print(int(next(tf.kept)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0"]
    assert "PipelineIterator" not in done.stderr
    assert "Traceback" not in done.stderr


def test_in_a_function() -> None:
    @tf.function
    def first() -> tf.Tensor:
        return PipelineIterator(tf.data.Dataset.range(3, 6)).get_next()

    assert first() == 3
