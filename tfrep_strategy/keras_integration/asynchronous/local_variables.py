"""Variables that live on a worker for one call, in the place of those on the servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import BaseResourceVariable, anonymous_name, variable_handle


def new_local(variable: Any) -> Any:
    """Makes, in the function that is traced, a variable of zeros that lives for one call on the worker.

    Args:
        variable: The Keras variable whose shape and dtype it has.
    """
    dtype = tf.as_dtype(variable._dtype)
    handle = variable_handle(variable.shape, dtype, anonymous_name(), "local", graph_mode=True)
    local = BaseResourceVariable(trainable=False, shape=variable.shape, dtype=dtype, handle=handle, unique_id=f"local_{id(handle)}")
    local.assign(tf.zeros(variable.shape, dtype))
    return local


@contextlib.contextmanager
def kept_on_worker(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Puts zeros on the worker in the place of Keras variables on the servers, while a step is traced.

    Args:
        variables: Keras variables that are sums.

    Yields:
        The variables on the worker, to be read at the end of the step: what it has added to each sum.
    """
    values = [variable._value for variable in variables]
    locals_ = [new_local(variable) for variable in variables]
    try:
        for variable, local in zip(variables, locals_, strict=True):
            variable._value = local
        yield locals_
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable._value = value
