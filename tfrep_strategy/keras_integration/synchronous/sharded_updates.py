"""Updates of an optimizer whose state is sharded: a replica updates its part of the weights, and all gather the new ones."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy import sharding
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.internals import BaseOptimizer
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase

_BY_ELEMENTS = ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Ftrl", "Nadam", "Lion", "ScheduleFreeAdamW")
"""Keras's optimizers that update each element of a variable by itself. Others look at whole variables."""

_NOT_CUT = ("gradient_accumulator", "average")
"""Slots of any optimizer that every replica holds whole."""


class ShardedUpdates(SynchronousBase):
    """What the parts of an optimizer's state need."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._owners: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()
        """Of an optimizer that looks at whole variables: the owner of each variable, by its key."""

    @property
    def shards(self) -> bool:
        """Whether replicas keep parts of the optimizer's state."""
        return self.has_several and self.strategy.shard_optimizer_state

    @property
    def num_replicas(self) -> int:
        """How many replicas keep parts."""
        return self.strategy.num_replicas_in_sync

    def deal_out(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Decides which replica updates which variable, where an optimizer looks at whole ones."""
        owners = sharding.owners([v.shape.num_elements() for v in variables], self.num_replicas)
        self._owners[optimizer] = {optimizer._var_key(v): owner for v, owner in zip(variables, owners, strict=True)}

    def cut_of_slot(self, optimizer: Any, variable: Any, name: str | None) -> sharding.Cut | None:
        """Returns which part of a slot each replica holds; None if each holds all of it."""
        size = self.num_replicas
        if not self.shards or name in _NOT_CUT:
            return None
        if is_by_elements(optimizer):
            return sharding.Even(variable.shape, size)
        owner = self._owners.get(optimizer, {}).get(optimizer._var_key(variable))
        return None if owner is None else sharding.Owned(variable.shape, size, owner)

    def takes_parts(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
        """Whether nothing between the gradients and the update looks at a whole gradient."""
        strategy = self.strategy
        return (
            self.shards
            and is_by_elements(optimizer)
            and type(optimizer).__module__ == _module_of(type(optimizer).__name__)
            and not (optimizer.clipnorm or optimizer.global_clipnorm)
            and not (strategy.gradient_transformers or strategy.gradient_aggregator)
            and not any(getattr(v, "overwrite_with_gradient", False) for v in variables)
            and all(g is None or isinstance(g, tf.IndexedSlices) or g.shape.is_fully_defined() for g in gradients)
        )

    def update_in_parts(
        self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], learning_rate: Any, are_parts: bool
    ) -> None:
        """Updates the own part of each variable, or the own variables, and gives all replicas the new values.

        Args:
            optimizer: The optimizer.
            grads: The global gradients.
            variables: The variables, with a gradient each.
            learning_rate: The learning rate.
            are_parts: Whether dense gradients are the own parts.
        """
        if not is_by_elements(optimizer):
            _refuse_other_state(optimizer)
            owners = [self._owners[optimizer][optimizer._var_key(variable)] for variable in variables]
            self.update_own(optimizer, grads, variables, learning_rate, owners)
            return
        cuts = [sharding.Even(variable.shape, self.num_replicas) for variable in variables]
        parts = [
            _Part(self.own_part(cut, tf.convert_to_tensor(variable)), optimizer._var_key(variable))
            for cut, variable in zip(cuts, variables, strict=True)
        ]
        own = [
            gradient if are_parts and not isinstance(gradient, tf.IndexedSlices) else self.own_part(cut, gradient)
            for cut, gradient in zip(cuts, grads, strict=True)
        ]
        update_each(optimizer, own, parts, learning_rate)
        updated = self.of_parts(cuts, [part.value for part in parts])
        for variable, value in zip(variables, updated, strict=True):
            variable.assign(value)

    def own_part(self, cut: sharding.Even, whole: Any) -> Any:
        """Returns the replica's part of a tensor, or of slices."""
        return cut.part(whole, self.strategy.extended.own_communicator().rank)

    def of_parts(self, cuts: Sequence[sharding.Even], parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the wholes of which each replica has a part."""
        extended = self.strategy.extended
        return sharding.gather_parts(cuts, parts, extended.own_communicator(), extended.bucket_bytes_for(parts))

    def update_own(
        self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], learning_rate: Any, owners: Sequence[int]
    ) -> None:
        """Updates the variables that the replica owns, and gives all replicas the new values.

        Args:
            optimizer: The optimizer.
            grads: The global gradients.
            variables: The variables, with a gradient each.
            learning_rate: The learning rate.
            owners: The owner of each variable.
        """
        communicator = self.strategy.extended.own_communicator()
        own = [i for i, owner in enumerate(owners) if owner == communicator.rank]
        update_each(optimizer, [grads[i] for i in own], [variables[i] for i in own], learning_rate)
        changed = [(owner, each) for owner, v in zip(owners, variables, strict=True) for each in (v, *factors(optimizer, v))]
        owned_by = [owner for owner, _ in changed]
        values = sharding.exchange_owned(owned_by, [tf.convert_to_tensor(each) for _, each in changed], communicator)
        for (owner, each), value in zip(changed, values, strict=True):
            if owner != communicator.rank:
                each.assign(value)


class _Part:
    """Stands for a variable in an update, which reads and assigns the own part of it."""

    def __init__(self, value: tf.Tensor, key: Any) -> None:
        self.value, self._unique_id = value, key

    @property
    def dtype(self) -> tf.DType:
        return self.value.dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self.value.shape

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.value, dtype)

    def assign(self, value: Any) -> None:
        self.value = tf.convert_to_tensor(value, self.dtype)

    def assign_add(self, value: Any) -> None:
        self.value += value

    def assign_sub(self, value: Any) -> None:
        self.value -= value

    def scatter_add(self, slices: tf.IndexedSlices) -> None:
        self.value = tf.tensor_scatter_nd_add(self.value, slices.indices[:, tf.newaxis], slices.values)

    def scatter_sub(self, slices: tf.IndexedSlices) -> None:
        self.value = tf.tensor_scatter_nd_sub(self.value, slices.indices[:, tf.newaxis], slices.values)

    def scatter_update(self, slices: tf.IndexedSlices) -> None:
        self.value = tf.tensor_scatter_nd_update(self.value, slices.indices[:, tf.newaxis], slices.values)


def update_each(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
    """Updates variables one after the other. An optimizer of the user's own gets TensorFlow's, as from Keras."""
    given = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    BaseOptimizer._backend_update_step(optimizer, grads, given, learning_rate)


def is_by_elements(optimizer: Any) -> bool:
    """Returns whether an optimizer updates each element of a variable by itself."""
    update = type(optimizer).update_step
    return any(update is getattr(keras.optimizers, name).update_step for name in _BY_ELEMENTS if hasattr(keras.optimizers, name))


def _module_of(name: str) -> str:
    """Returns the module of Keras's own class of a name."""
    return getattr(keras.optimizers, name).__module__ if hasattr(keras.optimizers, name) else ""


def factors(optimizer: Any, variable: Any) -> tuple[Any, ...]:
    """Returns the state of a variable that is no slot: Adafactor has means of its rows and columns, which are small."""
    if not isinstance(optimizer, keras.optimizers.Adafactor) or len(variable.shape) < 2:
        return ()
    index = optimizer._get_variable_index(variable)
    return optimizer._r[index], optimizer._c[index]


def _refuse_other_state(optimizer: Any) -> None:
    """Refuses an optimizer of the user's own with state of which nobody knows to which variable it belongs."""
    if type(optimizer).__module__ == _module_of(type(optimizer).__name__):
        return
    of_all = (optimizer._iterations, optimizer._learning_rate)
    own = [v for v in optimizer.variables if not hasattr(v.value, "cut") and all(v is not each for each in of_all)]
    whole = [v for v in own if not v.name.endswith(_NOT_CUT)]
    if whole:
        raise ConfigurationError(
            message(
                "This optimizer has state that cannot be sharded: it is no slot of a variable.",
                hint="make it with add_optimizer_variables, or leave out shard_optimizer_state.",
                optimizer=type(optimizer).__name__,
                state=[v.path for v in whole],
            )
        )
