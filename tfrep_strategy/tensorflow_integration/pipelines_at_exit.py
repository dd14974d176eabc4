"""Ends data pipelines before Python exits.

A pipeline that calls Python (a generator, `tf.numpy_function`, a `PyDataset`) reads ahead in a thread of TensorFlow. When
Python exits, it ends each thread that wants to run Python code. The pipeline would wait for its thread forever, and the
process would never end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import threading
import time

from tfrep_strategy._tensorflow import OwnedIterator
from tfrep_strategy.tensorflow_integration.pipeline_ends import PipelineIterator

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
            # A thread drops the last reference. If that blocks, the thread is abandoned.
            threads.append(threading.Thread(target=[resource].clear, daemon=True, name="tfrep-pipeline-end"))
            del resource
    with contextlib.suppress(RuntimeError):  # Python 3.12 starts no threads at its end. Pipelines are dropped with them then.
        for thread in threads:
            thread.start()
    deadline = time.monotonic() + _LIMIT_SECONDS
    for thread in filter(threading.Thread.is_alive, threads):
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(end_pipelines)
