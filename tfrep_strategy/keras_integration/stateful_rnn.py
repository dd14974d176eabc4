"""Recurrent layers with `stateful=True`, which keep a row of state for each row of the global batch.

Each replica has some of the rows. The variables are sums over replicas: one replica holds a row's state, zeros stand in the
others, whoever it was that had the row last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.keras_integration.layers import creating_partial_sums
from tfrep_strategy.keras_integration.patching import replaces
from tfrep_strategy.keras_integration.protocol import current_strategy, replica_strategy
from tfrep_strategy.keras_integration.whole_batch import place_in_batch

_RNN = keras.layers.RNN


def _has_parts() -> bool:
    strategy = current_strategy()
    return strategy is not None and strategy.num_replicas_in_sync > 1


@replaces(_RNN, "_create_state_variables")
def create_state_variables(original: Any, self: Any, batch_size: int) -> None:
    """Lets each replica hold the state of its own rows."""
    with creating_partial_sums() if _has_parts() else contextlib.nullcontext():
        original(self, batch_size)


@replaces(_RNN, "call")
def call(original: Any, self: Any, sequences: Any, initial_state: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Begins with the state that the batch before has left for this replica's rows."""
    strategy = replica_strategy()
    if not self.stateful or not _has_parts():
        return original(self, sequences, initial_state, *args, **kwargs)
    if strategy is None:
        is_part = sequences.shape[0] not in (None, self._expected_batch_size)  # A model is being built for the data of a replica.
        with _without_state(self) if is_part else contextlib.nullcontext():
            result = original(self, sequences, initial_state, *args, **kwargs)
        return _outputs(self, result) if is_part else result
    rows = tf.shape(sequences)[0]
    first, total = place_in_batch(strategy, rows)
    states = keras.tree.flatten(self.states)
    if initial_state is None:
        whole = strategy.sum_over_replicas([tf.convert_to_tensor(state) for state in states])
        initial_state = keras.tree.pack_sequence_as(self.states, [state[first : first + rows] for state in whole])
    with _without_state(self):
        result = original(self, sequences, initial_state, *args, **kwargs)
    _keep(states, keras.tree.flatten(result[1:]), first, total)
    return _outputs(self, result)


@contextlib.contextmanager
def _without_state(layer: Any) -> Iterator[None]:
    """Makes a layer return its last state, instead of keeping it."""
    before = layer.stateful, layer.return_state
    layer.stateful, layer.return_state = False, True
    try:
        yield
    finally:
        layer.stateful, layer.return_state = before


def _outputs(layer: Any, result: tuple[Any, ...]) -> Any:
    return result if layer.return_state else result[0]


def _keep(variables: list[Any], states: list[Any], first: tf.Tensor, total: tf.Tensor) -> None:
    for variable, state in zip(variables, states, strict=True):
        fits = tf.debugging.assert_equal(
            total, variable.shape[0], "A stateful recurrent layer got a batch that is not of the size that it was made for."
        )
        with tf.control_dependencies([fits] if fits is not None else []):
            behind = total - first - tf.shape(state)[0]
            variable.assign(tf.pad(state, [[first, behind]] + [[0, 0]] * (len(state.shape) - 1)))
