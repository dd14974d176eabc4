"""Pickles functions by value, and lets them keep the file and the lines that they were written in.

Two things need those in the process where a function arrives: AutoGraph, which reads a function's source to convert
its loops, and tracebacks. cloudpickle 3.1.3 replaces the file of every function that it pickles by value, and the cells
of a notebook are no files at all.
"""

from __future__ import annotations

import io
import linecache
import os
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle


def dumps(value: Any) -> bytes:
    """Pickles a value for another process of this machine, as `cloudpickle.dumps` does, with the sources of functions.

    Args:
        value: Anything that cloudpickle can pickle.

    Returns:
        What `pickle.loads` reads.

    Raises:
        TypeError: The value cannot be pickled.

    Example:
        >>> import pickle
        >>> pickle.loads(dumps(lambda: 1)).__code__.co_filename == (lambda: 1).__code__.co_filename
        True
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _reduced(code: CodeType) -> tuple[Any, ...]:
    build, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)[:2]
    name = code.co_filename
    lines = None if os.path.exists(name) else linecache.getlines(name)
    return _with_source, (build, parts, name, lines)


def _with_source(build: Callable[..., CodeType], parts: tuple[Any, ...], name: str, lines: list[str] | None) -> CodeType:
    if lines:
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)  # Without a time, it is never looked up again.
    return build(*parts).replace(co_filename=name)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = ChainMap({CodeType: _reduced}, cloudpickle.Pickler.dispatch_table)
