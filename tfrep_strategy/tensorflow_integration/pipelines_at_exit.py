"""Ends data pipelines before Python ends.

A pipeline that calls Python (a generator, `tf.numpy_function`, a `PyDataset`) reads ahead in a thread of TensorFlow. Once
Python has begun to end, it ends each thread that wants to run Python code, and the pipeline, which waits for its thread,
would wait for ever: a process that has done everything would stay.
"""

from __future__ import annotations

import atexit
import gc
import threading
import time

from tfrep_strategy._tensorflow import OwnedIterator

_LIMIT_SECONDS = 5.0
"""How long all pipelines may take; a generator may wait for something that will never come."""


def end_pipelines() -> None:
    """Ends the pipelines of all iterators that are still there; they cannot be used afterwards.

    Example:
        >>> iterator = iter(tf.data.Dataset.from_generator(lambda: itertools.count(), tf.int64).prefetch(2))
        >>> end_pipelines()
    """
    threads = []
    for each in gc.get_objects():  # Also what nobody can reach any more; to collect that here could wait for ever.
        # Not by `isinstance`, for which some objects run code of their own.
        if type(each) is OwnedIterator and (resource := vars(each).pop("_iterator_resource", None)) is not None:
            # The last reference goes in a thread, which may be left alone if it has to wait.
            threads.append(threading.Thread(target=[resource].clear, daemon=True, name="tfrep-pipeline-end"))
            del resource
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _LIMIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(end_pipelines)
