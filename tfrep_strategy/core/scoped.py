"""Settings that hold for a block of code, by which a caller controls code further down."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import tensorflow as tf

T = TypeVar("T")


class Setting(Generic[T]):
    """A value that a `with` block changes, for the thread that runs the block.

    Args:
        default: The value outside blocks, and on threads that are started in one.
        of_all_threads: Whether every thread sees the value. TensorFlow traces the replicas of a worker on other threads, while
            the calling thread waits.

    Example:
        >>> verbose = Setting(False)
        >>> with verbose.to(True):
        ...     print(verbose.value)
        True
    """

    def __init__(self, default: T, of_all_threads: bool = False) -> None:
        self._default = default
        self._holder: Any = types.SimpleNamespace() if of_all_threads else threading.local()

    @property
    def value(self) -> T:
        """The current value."""
        return getattr(self._holder, "value", self._default)

    @contextlib.contextmanager
    def to(self, value: T) -> Iterator[T]:
        """Sets the value in the block."""
        before, self._holder.value = self.value, value
        try:
            yield value
        finally:
            self._holder.value = before


assigns_as_is = Setting(False)
"""Whether code that assigns to variables now, such as an optimizer, assigns what each replica shall assign."""

before_changes: Setting[dict[int, tuple[Any, Any]] | None] = Setting(None)
"""Variables that a callback of this process alone has assigned to, with their values before, by the ids of the variables."""


def note_change(variable: Any) -> None:
    """Records the value of a variable before an assignment, if a callback that not all processes have is running."""
    noted = before_changes.value
    if noted is not None and tf.executing_eagerly():
        noted.setdefault(id(variable), (variable, variable.numpy()))
