"""Checks that all replicas hold the same values."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy._tensorflow import SyncOnReadVariable
from tfrep_strategy.errors import DesyncError, message

_Description = tuple[str, tuple[int, ...], str]
"""Of a variable: its name, its shape, its dtype."""


class Checksum(NamedTuple):
    """The checksum of one variable, which replicas compare.

    Attributes:
        name: Path of the variable.
        dtype: Name of its dtype.
        shape: Its shape.
        crc: CRC-32 of its bytes, which is compared.
        total: Sum of its elements in float64, for error messages; None for strings.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    crc: int
    total: float | None

    def __str__(self) -> str:
        total = "" if self.total is None else f"sum {self.total:.17g}, "
        return f"{total}crc32 {self.crc:08x}, {self.dtype}{list(self.shape)}"


def checksum(name: str, value: Any) -> Checksum:
    """Makes the checksum of one array.

    Example:
        >>> checksum("kernel", np.ones([2, 3], "float32")).total
        6.0
    """
    array = np.ascontiguousarray(value)
    if array.dtype == object:  # Strings.
        data, total = repr(array.tolist()).encode(), None
    else:
        data, total = array.tobytes(), float(array.astype(np.float64).sum())
    return Checksum(name, str(array.dtype), np.shape(value), zlib.crc32(data), total)


def variables_of(model_or_variables: Any) -> list[Any]:
    """Returns the variables of a model and its optimizer, or the given variables, each once."""
    variables = model_or_variables
    if hasattr(variables, "variables"):
        optimizer = getattr(variables, "optimizer", None)
        variables = [*variables.variables, *(optimizer.variables if optimizer is not None else ())]
    return list({id(each): each for each in variables}.values())


def of_tensorflow(variable: Any) -> tf.Variable:
    """Returns the variable of TensorFlow that a variable of Keras has, or is."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def replica_checksums(variables: Sequence[Any], num_local_replicas: int) -> list[list[Checksum]]:
    """Makes the checksums of the copies that the replicas of this process hold.

    Args:
        variables: Keras or TensorFlow variables. Variables that each replica keeps for itself, such as the totals of
            metrics, are left out.
        num_local_replicas: How many copies a variable has in this process.

    Returns:
        A list of the checksums of all variables, in order, for each replica of this process.
    """
    replicas: list[list[Checksum]] = [[] for _ in range(num_local_replicas)]
    for variable in variables:
        inner = of_tensorflow(variable)
        if isinstance(inner, SyncOnReadVariable):
            continue
        copies = getattr(inner, "values", None) or [inner] * num_local_replicas
        for checksums, copy in zip(replicas, copies, strict=True):
            checksums.append(checksum(getattr(variable, "path", variable.name), copy.numpy()))
    return replicas


def places_of_differing(replicas: Sequence[Sequence[Checksum]]) -> list[int]:
    """Returns which of the variables differ between replicas, by their places in the order of the checksums."""
    return [i for i, copies in enumerate(zip(*replicas, strict=True)) if any(copy.crc != copies[0].crc for copy in copies)]


def compare(replicas: Sequence[Sequence[Checksum]]) -> None:
    """Raises unless all replicas have the same checksums.

    Args:
        replicas: The checksums of each replica, in order of their ids.

    Raises:
        DesyncError: A variable differs. The message names the first one, and its checksum on each replica.

    Example:
        >>> compare([[checksum("w", np.ones(2))], [checksum("w", np.ones(2))]])
    """
    lengths = [len(checksums) for checksums in replicas]
    if len(set(lengths)) > 1:
        raise DesyncError(
            message("Replicas hold different numbers of variables.", hint="build the same model everywhere.", held=lengths)
        )
    for copies in zip(*replicas, strict=True):
        if any(copy[1:4] != copies[0][1:4] for copy in copies):
            lines = "\n".join(f"  replica {replica}: {copy}" for replica, copy in enumerate(copies))
            raise DesyncError(
                f"Variable {copies[0].name!r} differs between the replicas.\n{lines}\n"
                "Hint: look for code that changes it on one replica only, or with values of one replica only."
            )


def described(variable: Any) -> _Description:
    """Returns the name, the shape and the dtype of a variable."""
    return variable.name, tuple(variable.shape), variable.dtype.name


def are_in_other_orders(ranks: Sequence[Sequence[_Description]]) -> bool:
    """Returns whether ranks made variables of the same names in different orders.

    Args:
        ranks: What `described` tells of each variable, by rank.

    Raises:
        DesyncError: They made different variables. The message names the first difference.
    """
    if any(other != ranks[0] for other in ranks) and all(sorted(other) == sorted(ranks[0]) for other in ranks):
        return True
    for r, other in enumerate(ranks):
        for first, found in itertools.zip_longest(ranks[0], other):
            if first is None or found is None or first[1:] != found[1:]:
                raise DesyncError(
                    message(
                        f"Ranks 0 and {r} made different variables.",
                        hint="build the same model on every rank.",
                        **{"rank_0": _in_words(first), f"rank_{r}": _in_words(found)},
                    )
                )
    return False


def _in_words(variable: _Description | None) -> str:
    return "no variable" if variable is None else f"{variable[0]} of shape {variable[1]}, {variable[2]}"
