"""A collective as one rank calls it, and the lines of the user's program. TensorFlow is not loaded for this."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from types import FrameType
from typing import Any, NamedTuple

_FREE_ROWS = ("all_gather", "all_to_all")


class Call(NamedTuple):
    """A collective as one rank calls it.

    Attributes:
        kind: Name of the collective.
        option: An argument that must be equal on all ranks, such as the reduction or the root.
        tensors: Dtype and shape of each tensor.
        line: File and line of the user's code.
    """

    kind: str
    option: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    line: str

    def __str__(self) -> str:
        return f"{self.what} at {self.line}"

    @property
    def what(self) -> str:
        """The collective without its line, such as `"all_reduce(float32[3], sum)"`."""
        tensors = [f"{dtype}{list(shape)}" for dtype, shape in self.tensors]
        return f"{self.kind}({', '.join([*tensors, *filter(None, [self.option])])})"

    def fits(self, other: Call) -> bool:
        """Returns whether both calls can be part of one collective.

        Example:
            >>> Call("all_reduce", "sum", (("float32", (3,)),), "a.py:1").fits(
            ...     Call("all_reduce", "sum", (("float32", (4,)),), "a.py:1"))
            False
        """
        return self._agreed() == other._agreed()

    def _agreed(self) -> tuple[Any, ...]:
        free = self.kind in _FREE_ROWS
        return self.kind, self.option, tuple((dtype, shape[1:] if free else shape) for dtype, shape in self.tensors)


_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


@functools.cache
def _inner_folders() -> tuple[str, ...]:
    """Returns the folders of this package, TensorFlow and Keras."""
    found = [spec.origin for name in ("tensorflow", "keras") if (spec := find_spec(name)) is not None and spec.origin]
    return (_PACKAGE, *(os.path.join(os.path.dirname(os.path.abspath(origin)), "") for origin in found))


def is_users(file: str) -> bool:
    """Returns whether a file of code is neither of TensorFlow, Keras, Python's own modules nor this package.

    Args:
        file: The name that a frame gives.

    Example:
        >>> is_users("/home/me/train.py"), is_users(os.__file__)
        (True, False)
    """
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not (file.startswith((*_inner_folders(), "<")) or standard or "__autograph_generated" in file)


def user_line(stack: Iterable[tuple[str, int]] | None = None) -> str:
    """Finds the current line of the user's program.

    Args:
        stack: File and line of each frame, the innermost first. Default: the caller's stack.

    Returns:
        The innermost frame outside TensorFlow, Keras, Python's own modules and this package, as `"file.py:12"`.

    Example:
        >>> user_line([(os.__file__, 3), ("/home/me/model.py", 12), ("/home/me/train.py", 40)])
        '/home/me/model.py:12'
    """
    for file, line in _lines(sys._getframe(1)) if stack is None else stack:
        if is_users(file):
            return f"{file}:{line}"
    return "an unknown line"


def line_of(operation: Any) -> str:
    """Returns the line of the user's program that made an operation of a graph, as `user_line` does.

    Example:
        >>> with tf.Graph().as_default():
        ...     line_of(tf.constant(1).op)  # doctest: +SKIP
        '/home/me/model.py:12'
    """
    return user_line((frame.filename, frame.lineno) for frame in reversed(operation.traceback))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _lines(frame: FrameType) -> Iterator[tuple[str, int]]:
    return ((each.f_code.co_filename, each.f_lineno) for each in _frames(frame))


def purpose() -> str:
    """Returns the name of this package's outermost function on the stack, which the user or Keras has called."""
    name = ""
    for frame in _frames(sys._getframe(2)):
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            break
        name = frame.f_code.co_name if frame.f_code.co_name != "replaced" else name
    return name


def line_of_main_thread() -> str:
    """Returns where the main thread of this process is, also if it waits in native code.

    Returns:
        The user's line and its function; then the innermost function of Python, if that is another one.

    Example:
        >>> line_of_main_thread()  # doctest: +SKIP
        '/home/me/train.py:12 in load, inside wait (threading.py:355)'
    """
    return _where(sys._current_frames().get(threading.main_thread().ident or 0))


def lines_of_other_threads() -> list[str]:
    """Returns where other threads of this process are in the user's code, such as one that reads data.

    Example:
        >>> lines_of_other_threads()
        []
    """
    apart = (threading.main_thread().ident, threading.get_ident())
    stacks = [frame for ident, frame in sys._current_frames().items() if ident not in apart]
    return [_where(frame) for frame in stacks if any(is_users(file) for file, _ in _lines(frame))]


def _where(innermost: FrameType | None) -> str:
    if innermost is None:
        return "an unknown line"
    own = next((frame for frame in _frames(innermost) if is_users(frame.f_code.co_filename)), innermost)
    found = f"{own.f_code.co_filename}:{own.f_lineno} in {own.f_code.co_name}"
    if own is innermost:
        return found
    return f"{found}, inside {innermost.f_code.co_name} ({os.path.basename(innermost.f_code.co_filename)}:{innermost.f_lineno})"
