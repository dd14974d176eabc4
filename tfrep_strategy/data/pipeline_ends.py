"""Ends data pipelines without a long wait, and before Python exits.

Each pipeline has a thread that tunes it, after 10 ms, 20 ms, 40 ms, ..., at last once a minute. When TensorFlow ends a
pipeline, it wakes this thread first and marks the pipeline as cancelled afterwards. A thread that checks the mark too
early sleeps again. The end of the pipeline then waits for it, up to the pipeline's age, and at most a minute. On a busy
machine this happens at every third to fifth end.

A pipeline that calls Python (a generator, `tf.numpy_function`, a `PyDataset`) reads ahead in a thread of TensorFlow. When
Python exits, it ends each thread that wants to run Python code. The pipeline would wait for its thread forever, and the
process would never end.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.step import KnownRows
from tfrep_strategy.core.tf import OwnedIterator, caches_in_file

PATIENCE_SECONDS = 0.1
"""The time that the end of an iterator waits for its pipeline. Most pipelines end in less than a millisecond."""


class PipelineIterator(OwnedIterator):
    """An iterator of TensorFlow whose end does not wait for a slow pipeline. The pipeline then ends in the background.

    The end does wait for a pipeline that caches in a file, because the next pipeline writes the same file.

    Args:
        dataset: The data set to read.
        spec: Its specification, for iterators that share one. By default TensorFlow makes one on demand.

    Example:
        >>> int(next(PipelineIterator(tf.data.Dataset.range(3))))
        0
    """

    known_rows = KnownRows()

    def __init__(self, dataset: tf.data.Dataset, spec: tf.data.IteratorSpec | None = None) -> None:
        super().__init__(dataset)
        self._spec = spec
        self._patience = -1.0 if caches_in_file(dataset) else PATIENCE_SECONDS

    @property
    def _type_spec(self) -> Any:
        return super()._type_spec if self._spec is None else self._spec

    def __del__(self, python_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not python_ends():  # Otherwise there are no threads any more, and names of modules are cleared.
            end_pipeline(self, vars(self).get("_patience", -1.0))


def end_pipeline(iterator: Any, patience: float = PATIENCE_SECONDS) -> None:
    """Ends the pipeline of an iterator. The iterator cannot be used afterwards.

    Args:
        iterator: An iterator of TensorFlow.
        patience: The seconds to wait; -1 means until the pipeline has ended.

    Example:
        >>> end_pipeline(iter(tf.data.Dataset.range(3)))
    """
    resource = [vars(iterator).pop("_iterator_resource", None)]
    if resource[0] is None or tf.is_symbolic_tensor(resource[0]):
        return
    ended = _thread.allocate_lock()
    ended.acquire()

    def end() -> None:
        resource.clear()  # Drops the last reference. TensorFlow lets other Python threads run meanwhile.
        ended.release()

    try:
        _thread.start_new_thread(end, ())  # A destructor may interrupt code that holds a lock of `threading`.
    except RuntimeError:  # Python is ending.
        return
    ended.acquire(timeout=patience)


_ITERATORS = (OwnedIterator, PipelineIterator)
_LIMIT_SECONDS = 5.0
"""The time limit for all pipelines. A generator may wait for an event that never happens."""


def end_pipelines() -> None:
    """Ends the pipelines of all existing iterators. The iterators cannot be used afterwards.

    Example:
        >>> iterator = iter(tf.data.Dataset.from_generator(lambda: itertools.count(), tf.int64).prefetch(2))
        >>> end_pipelines()
    """
    threads = []
    for each in gc.get_objects():  # Includes unreachable objects. Collecting them here could wait forever.
        # `isinstance` would run the code of some objects.
        if type(each) in _ITERATORS and (resource := vars(each).pop("_iterator_resource", None)) is not None:
            # A thread drops the last reference. If it blocks, it is abandoned.
            threads.append(threading.Thread(target=[resource].clear, daemon=True, name="tfrep-pipeline-end"))
            del resource
    with contextlib.suppress(RuntimeError):  # Python 3.12 starts no threads at its end. Then pipelines end with the references.
        for thread in threads:
            thread.start()
    deadline = time.monotonic() + _LIMIT_SECONDS
    for thread in filter(threading.Thread.is_alive, threads):
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(end_pipelines)
