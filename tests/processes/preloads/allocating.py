"""Has the thread with which jemalloc frees memory in the background."""

import pyarrow


def preload() -> None:
    pyarrow.jemalloc_memory_pool()
