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

from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase
from tfrep_strategy.keras_integration.synchronous.layers import creates_partial_sums
from tfrep_strategy.keras_integration.synchronous.whole_batch import place_in_batch


class StatefulLayers(SynchronousBase):
    """What layers do whose state goes on from batch to batch."""

    def make_rnn_states(self, original: Any, layer: Any, batch_size: int) -> None:
        """Lets each replica hold the state of its own rows."""
        with creates_partial_sums.to(True) if self.has_several else contextlib.nullcontext():
            original(layer, batch_size)

    def call_rnn(
        self, original: Any, layer: Any, sequences: Any, initial_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Begins with the state that the batch before has left for this replica's rows."""
        if not layer.stateful or not self.has_several:
            return original(layer, sequences, initial_state, *args, **kwargs)
        if not self.in_replica:
            # A model is being built for the data of a replica.
            is_part = sequences.shape[0] not in (None, layer._expected_batch_size)
            with _without_state(layer) if is_part else contextlib.nullcontext():
                result = original(layer, sequences, initial_state, *args, **kwargs)
            return _outputs(layer, result) if is_part else result
        rows = tf.shape(sequences)[0]
        first, total = place_in_batch(self.strategy, rows)
        states = keras.tree.flatten(layer.states)
        if initial_state is None:
            whole = self.strategy.extended.sum_over_replicas([tf.convert_to_tensor(state) for state in states])
            own = [state[first : first + rows] for state in whole]
            initial_state = keras.tree.pack_sequence_as(layer.states, own)
        with _without_state(layer):
            result = original(layer, sequences, initial_state, *args, **kwargs)
        _keep(states, keras.tree.flatten(result[1:]), first, total)
        return _outputs(layer, result)


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
