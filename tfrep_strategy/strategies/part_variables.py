"""Variables of which each replica holds a part: the slots of an optimizer whose state is sharded."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import UninitializedVariable, in_replica_update_context
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.sharding import Cut
from tfrep_strategy.strategies.variables import ReplicaVariable


class PartVariable(ReplicaVariable):
    """A variable that is the replica's own part in a replica, and the whole outside replicas.

    To read it outside replicas gathers the parts, so all processes must do it. To assign to it there takes the own part of a
    whole value, and needs nobody else.
    """

    def __init__(self, strategy: Any, values: Any, aggregation: Any, var_policy: Any = None, cut: Cut | None = None) -> None:
        super().__init__(strategy, values, aggregation, var_policy)
        self.differs = True
        self.cut: Any = cut
        self.stand_in: Any = None
        """What stands for it in the trace of one device's step: it has the shape of the part of a replica that has one."""
        self.assigned_alone = False
        """Whether this process has assigned `held`, and the others know nothing of it."""

    @classmethod
    def made(cls, extended: Any, creator: Callable[..., Any], cut: Cut, **kwargs: Any) -> PartVariable:
        """Makes a variable of which each replica of this process holds its part.

        Args:
            extended: That of the strategy.
            creator: Makes a variable on one device.
            cut: Which part each replica has.
            **kwargs: Arguments of a variable. The initial value is that of the whole.
        """
        initial = kwargs.pop("initial_value")
        kwargs |= {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.NONE}
        kwargs["shape"] = None
        kwargs.pop("colocate_with", None)
        parts = []
        for replica, device in enumerate(extended.worker_devices, start=extended.first_local_replica):
            with tf.device(device):
                whole = tf.convert_to_tensor(initial() if callable(initial) else initial, kwargs.get("dtype"))
                parts.append(creator(initial_value=cut.part(whole, replica), **kwargs))
        return cls(extended.strategy, parts, tf.VariableAggregation.NONE, cut=cut)

    @property
    def _is_traced(self) -> bool:
        """Whether the step of one device is traced."""
        return self._distribute_strategy._is_one_replica and not tf.executing_eagerly()

    @property
    def _extended(self) -> Any:
        """That of the strategy, also while one device's step runs."""
        extended = self._distribute_strategy.extended
        return getattr(extended, "of_all", extended)

    @property
    def _primary(self) -> Any:
        if not self._is_traced:
            return super()._primary
        if self.stand_in is None:
            with tf.init_scope():
                self.stand_in = UninitializedVariable(trainable=False, shape=self.cut.part_shape, dtype=self.values[0].dtype)
            self.stand_in._distributed_container = weakref.ref(self)
        return self.stand_in

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the whole."""
        return self.cut.shape

    def hold_whole(self, reads: bool) -> None:
        """Gathers the value for a time in which processes act alone. All processes call it.

        Args:
            reads: Whether this process keeps the value.
        """
        whole = self.read_value()
        self.held = whole.numpy() if reads else None

    def take_from_first(self) -> None:
        """Takes the own part of what rank 0 has assigned alone. All processes call it."""
        extended = self._distribute_strategy.extended
        communicator = extended.communicator_of(extended.first_local_replica)
        own = tf.zeros(self.shape, self.dtype) if self.held is None else tf.constant(self.held, self.dtype)
        whole = communicator.broadcast([own])[0]
        self.held, self.assigned_alone = None, False
        self.assign(whole)

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        if self._is_traced:
            return self._primary.assign(value, use_locking, name, read_value)
        if not _outside_replicas():
            return super().assign(value, use_locking=use_locking, name=name, read_value=read_value)
        return self._assign_to_all(value)

    def _assign_to_all(self, value: Any) -> Any:
        extended = self._extended
        value = tf.cast(value, self.dtype)
        if extended.reads_alone:
            self.held, self.assigned_alone = value.numpy(), True
        for replica, part in enumerate(self.values, start=extended.first_local_replica):
            with tf.device(part.device):
                part.assign(self.cut.part(value, replica))
        return value

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_traced:
            return self._primary.assign_add(value, *args, **kwargs)
        return self.assign(self + value) if _outside_replicas() else super().assign_add(value, *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_traced:
            return self._primary.assign_sub(value, *args, **kwargs)
        return self.assign(self - value) if _outside_replicas() else super().assign_sub(value, *args, **kwargs)

    def scatter_add(self, slices: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        return self._scatter("scatter_add", tf.tensor_scatter_nd_add, slices)

    def scatter_sub(self, slices: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        return self._scatter("scatter_sub", tf.tensor_scatter_nd_sub, slices)

    def scatter_update(self, slices: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        return self._scatter("scatter_update", tf.tensor_scatter_nd_update, slices)

    def _scatter(self, method: str, scattered: Callable[..., tf.Tensor], slices: tf.IndexedSlices) -> Any:
        if self._is_traced:
            return getattr(self._primary, method)(slices)
        if not _outside_replicas():
            return getattr(self._get_on_device_or_primary(), method)(slices)
        return self.assign(scattered(self.read_value(), slices.indices[:, tf.newaxis], slices.values))

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        own = self._get_on_device_or_primary()
        if own.shape != self.shape and getattr(value, "shape", None) == self.shape:  # A slot that begins as its variable.
            context: Any = tf.distribute.get_replica_context()
            value = self.cut.part(value, int(tf.get_static_value(context.replica_id_in_sync_group)))
        return super()._update_replica(update_fn, value, **kwargs)

    def value(self) -> Any:
        return self._get_cross_replica() if self._runs_as_one else super().value()

    def _dense_var_to_tensor(self, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
        if self._runs_as_one:
            return tf.convert_to_tensor(self._get_cross_replica(), dtype, name=name)
        return super()._dense_var_to_tensor(dtype=dtype, name=name, as_ref=as_ref)

    @property
    def _runs_as_one(self) -> bool:
        """Whether the step of one device runs eagerly."""
        return self._distribute_strategy._is_one_replica and tf.executing_eagerly()

    def _get_cross_replica(self) -> Any:
        extended = self._extended
        if extended.reads_alone:
            if self.held is None:
                raise ConfigurationError(
                    message(
                        "A process alone cannot read optimizer state that is sharded.",
                        hint="read it where all processes do.",
                        variable=self.name,
                    )
                )
            return tf.constant(self.held, self.dtype)
        parts = [part.value() for part in self.values]
        if len(parts) == self.cut.size:
            return self.cut.joined(parts)
        return self.cut.gathered(parts[0], extended.communicator_of(extended.first_local_replica))

    def __deepcopy__(self, memo: Any) -> Any:
        result = super().__deepcopy__(memo)
        result.cut = copy.copy(self.cut)
        return result


def _outside_replicas() -> bool:
    outside = tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy()
    return outside and not in_replica_update_context()
