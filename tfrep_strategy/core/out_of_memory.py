"""A hint for a program whose device has no memory left: what to change, and what is large. It is a note of the error."""

from __future__ import annotations

import gc
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_IS_FULL = re.compile(
    r"OOM when allocating|[Oo]ut of memory|OUT_OF_MEMORY|CUDNN_STATUS_ALLOC_FAILED|[Ff]ailed to allocate|Unable to allocate"
)
_TENSOR = re.compile(r"tensor with shape\s*\[([\d,]*)\] and type (\w+) on (?:\S*device:)?(\S+)")
_ARRAY = re.compile(r"array with shape \(([\d, ]*)\) and data type (\w+)")
_BYTES = re.compile(r"allocate (\d+) ?[Bb]ytes")
_HINT = (
    "Hint: use a smaller batch_size; or batches of 1/N with gradient_accumulation_steps=N of the optimizer; or"
    " shard_optimizer_state=True of the strategy, by which each replica keeps its part of the optimizer's state, and with"
    " shard_weights=True its part of the weights."
)
_MOST_NAMED = 3


class _Variable(NamedTuple):
    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _item_size(self.dtype)

    def __str__(self) -> str:
        return f"{self.path} {list(self.shape)} {self.dtype}, {_shown_size(self.bytes)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an error says that a device, or this machine, has no memory left.

    Args:
        error: The error, of TensorFlow, CUDA or NumPy.

    Returns:
        Whether it does.

    Example:
        >>> is_out_of_memory(MemoryError("Unable to allocate 7.28 TiB for an array")), is_out_of_memory(ValueError("seven"))
        (True, False)
    """
    if not isinstance(error, (MemoryError, RuntimeError)) and not hasattr(error, "error_code"):  # That is an error of TensorFlow.
        return False
    return isinstance(error, MemoryError) or _IS_FULL.search(str(error)) is not None


def note_out_of_memory(error: BaseException) -> None:
    """Adds the hint to an error that says that there is no memory left, once. Other errors stay as they are.

    Args:
        error: The error.
    """
    if is_out_of_memory(error) and _HINT not in getattr(error, "__notes__", ()):
        for line in [_HINT, *_failed_allocation(str(error)), *_large_variables()]:
            error.add_note(line)


@contextmanager
def noting_out_of_memory() -> Iterator[None]:
    """Adds the hint to errors of the body, see `note_out_of_memory`.

    Yields:
        Nothing.
    """
    try:
        yield
    except Exception as error:
        note_out_of_memory(error)
        raise


def _failed_allocation(text: str) -> Iterator[str]:
    if found := _TENSOR.search(text) or _ARRAY.search(text):
        numbers, dtype, *device = found.groups()
        shape = [int(each) for each in numbers.replace(" ", "").split(",") if each]
        where = f" on {device[0]}" if device else ""
        yield f"Not allocated: a tensor {shape} {dtype}, {_shown_size(math.prod(shape) * _item_size(dtype))}{where}."
    elif found := _BYTES.search(text):
        yield f"Not allocated: {_shown_size(int(found[1]))}."


def _large_variables() -> Iterator[str]:
    variables = sorted(_variables(), key=lambda each: each.bytes, reverse=True)
    if variables:
        named = "; ".join(map(str, variables[:_MOST_NAMED]))
        total = _shown_size(sum(each.bytes for each in variables))
        yield f"Largest variables: {named}. All {len(variables)} together: {total}."


def _variables() -> list[_Variable]:
    """Lists the variables of this process: those of Keras, which have paths, or TensorFlow's where there are none."""
    objects = gc.get_objects()
    for module, name in (("keras", "path"), ("tensorflow", "name")):
        kind = getattr(sys.modules.get(module), "Variable", None)
        if kind is None:
            continue
        found = [each for each in objects if issubclass(type(each), kind)]
        if found:
            return [
                _Variable(str(getattr(each, name)), tuple(each.shape), _dtype_name(each.dtype))
                for each in found
                if _has_shape(each)
            ]
    return []


def _has_shape(variable: Any) -> bool:
    try:
        return all(isinstance(size, int) for size in variable.shape)
    except Exception:  # It is not built, or its shape is not known.
        return False


def _dtype_name(dtype: Any) -> str:
    return str(getattr(dtype, "name", dtype))


def _item_size(dtype: str) -> int:
    try:
        return int(sys.modules["tensorflow"].as_dtype(dtype).size)
    except (KeyError, TypeError):
        return 4


def _shown_size(size: int) -> str:
    value = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"
