"""Differences from Keras in the trace of a step: gradients are marked, slots are sharded, layers are placed.

With `batch_statistics="replica"`, batch normalization uses the statistics of each replica's own rows. No replica then waits for
another one in a layer, and the answer depends on the number of replicas.

Layers by name are placed on the logical devices of a replica, for models that do not place them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.communicators import sharding
from tfrep_strategy.core.scoped import Setting
from tfrep_strategy.errors import warn
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase, overwrites
from tfrep_strategy.keras_integration.synchronous.optimizer import Part, ShardedUpdates, factors, is_sharded, update_each
from tfrep_strategy.partitioner import marks


class _Statistics(NamedTuple):
    """The statistics of a replica's own rows. All have the axes of the rows; reduced axes have size 1."""

    count: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


_statistics: Setting[_Statistics | None] = Setting(None)
"""The statistics for the layer that is called now."""


class OwnStatistics(SynchronousBase):
    """Batch normalization in the trace of a step."""

    def normalize(self, original: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Normalizes the rows of each replica by its own mean and variance, if the strategy asks for it."""
        is_own = self.strategy.batch_statistics == "replica" and not layer.synchronized and not getattr(layer, "renorm", False)
        if not is_own or not training or not layer.trainable:
            return original(layer, inputs, training=training, mask=mask)
        dtype = tf.as_dtype(inputs.dtype)
        rows = tf.cast(inputs, tf.float32) if dtype.size < 4 else inputs
        replicas: Any = self.strategy.extended
        own = _found(replicas, rows, mask, layer._reduction_axes)
        with _statistics.to(own):
            original(layer, inputs, training=training, mask=mask)  # Updates the moving statistics; the result is not used.
        for moved in (layer.moving_mean, layer.moving_variance):
            moved.value.differs = True
        shape = own.mean.shape

        def of_layer(variable: Any) -> tf.Tensor:
            return tf.reshape(tf.cast(variable, rows.dtype), shape)

        outputs = tf.nn.batch_normalization(
            rows,
            replicas.spread(own.mean, rows),
            replicas.spread(own.variance, rows),
            of_layer(layer.beta) if layer.center else None,
            of_layer(layer.gamma) if layer.scale else None,
            layer.epsilon,
        )
        return tf.cast(outputs, layer.compute_dtype)

    def moments(self, original: Any, layer: Any, inputs: Any, mask: Any) -> Any:
        """Updates the moving statistics of a replica by its own mean and variance; without rows they stay."""
        own = _statistics.value
        if own is None:
            return original(layer, inputs, mask)
        there = tf.reshape(own.count, []) > 0
        return tuple(
            tf.where(there, tf.reshape(new, [-1]), tf.cast(old, new.dtype))
            for new, old in ((own.mean, layer.moving_mean), (own.variance, layer.moving_variance))
        )


def _found(replicas: Any, rows: tf.Tensor, mask: Any, axes: Sequence[int]) -> _Statistics:
    kept = tf.ones_like(rows[..., :1], tf.bool) if mask is None else tf.cast(mask, tf.bool)[..., tf.newaxis]
    count = tf.stop_gradient(replicas.own_sum(tf.cast(kept, rows.dtype), list(range(rows.shape.rank))))
    if rows.shape.rank - 1 in axes:  # The channels are on another axis, and each of its entries was counted.
        (channels,) = set(range(rows.shape.rank)) - set(axes)
        count *= tf.cast(tf.shape(rows)[-1], rows.dtype) / tf.cast(tf.shape(rows)[channels], rows.dtype)

    def of_kept(values: tf.Tensor) -> tf.Tensor:
        kept_only = values if mask is None else tf.where(kept, values, tf.zeros_like(values))
        return tf.math.divide_no_nan(replicas.own_sum(kept_only, axes), count)

    mean = of_kept(rows)
    return _Statistics(count, mean, of_kept(tf.square(rows - replicas.spread(mean, rows))))


class Placement(SynchronousBase):
    """Placement of layers."""

    def call_layer(self, original: Any, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Builds and computes a layer on its logical device."""
        with self._placed(layer):
            return original(layer, *args, **kwargs)

    def add_weight(self, original: Any, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Puts the weights of a layer that is built without a call on its logical device."""
        with self._placed(layer):
            return super().add_weight(original, layer, *args, **kwargs)

    @property
    def layers_not_seen(self) -> set[str]:
        """The names in `keras_layer_placement` that no called layer has had, and no warning has named."""
        return set() if self._devices is None else self._devices.layers_not_seen

    def warn_of_layers_not_seen(self) -> None:
        """Warns, once, of names in `keras_layer_placement` that no layer has had by the end of a step."""
        if self.layers_not_seen:
            names, self._devices.layers_not_seen = sorted(self.layers_not_seen), set()
            warn(f"keras_layer_placement names layers that have not been called. Received: {names}")

    @property
    def _devices(self) -> Any:
        return getattr(self.strategy.extended, "logical_devices", None)

    def _placed(self, layer: Any) -> contextlib.AbstractContextManager[Any]:
        devices = self._devices
        if devices is None or not devices.layer_placement:
            return contextlib.nullcontext()
        return devices.for_layer(layer.name)


_applied: Setting[str | None] = Setting(None)
"""The gradients that are applied now: none, "global" ones, "parts" of them, or ones that are "accumulated" first."""

_updated_variables: Setting[Sequence[Any]] = Setting(())
"""The variables whose gradients an update clips."""


class TracedStep(Placement, ShardedUpdates, OwnStatistics):
    """The driver while a one-device step is traced.

    Args:
        driver: The driver of the strategy.
    """

    def __init__(self, driver: ShardedUpdates) -> None:
        super().__init__(driver.strategy)
        self._owners = driver._owners

    @property
    def num_replicas(self) -> int:
        return int(self._traced.num_replicas)

    @property
    def shards(self) -> bool:
        return self.num_replicas > 1 and self.strategy.shard_optimizer_state

    @property
    def _traced(self) -> Any:
        """The `OneReplica` of the trace."""
        return self.strategy.extended

    def build_optimizer(self, original: Any, optimizer: Any, variables: Any) -> None:
        """Assigns variables to replicas if the state is sharded."""
        if self.shards:
            self.deal_out(optimizer, variables)
        original(optimizer, variables)

    def add_slot(self, original: Any, optimizer: Any, reference_variable: Any, name: Any = None, **kwargs: Any) -> Any:
        """Makes slots that are sharded over the replicas."""
        with self._traced.cut_of_new_variables.to(self.cut_of_slot(optimizer, reference_variable, name)):
            return original(optimizer, reference_variable, name=name, **kwargs)

    def apply(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Marks gradients where they are applied; accumulated ones where an update uses them."""
        grads = list(grads)
        if _applied.value is not None or not grads:
            return original(optimizer, grads, trainable_variables)
        variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        marks.note_applied(grads)
        if _accumulates_addends(inner):
            with _applied.to("accumulated"):
                return original(optimizer, grads, trainable_variables and variables)
        in_parts = not inner.gradient_accumulation_steps and self.takes_parts(inner, grads, variables)
        with _applied.to("parts" if in_parts else "global"):
            return original(optimizer, self._marked(grads, variables, in_parts), trainable_variables and variables)

    apply_scaled = apply

    def apply_to_variables(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any) -> None:
        """Records the variables whose gradients an update clips."""
        with _updated_variables.to(tuple(trainable_variables)):
            original(optimizer, grads, trainable_variables)

    def clip_gradients(self, original: Any, optimizer: Any, grads: Any) -> Any:
        """Begins an update: marks accumulated gradients, and transforms all."""
        variables = _updated_variables.value
        if _applied.value == "accumulated":
            grads = self._marked(list(grads), variables, self.takes_parts(optimizer, grads, variables))
        return original(optimizer, self._traced.transform_gradients(list(grads), variables))

    def update_variables(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        """Updates each replica's part if the optimizer's state is sharded."""
        if not self.shards:
            update_each(optimizer, grads, trainable_variables, learning_rate)
            return
        takes_parts = _applied.value == "accumulated" and self.takes_parts(optimizer, grads, trainable_variables)
        self.update_in_parts(optimizer, grads, trainable_variables, learning_rate, takes_parts or _applied.value == "parts")

    def check_finite(self, original: Any, optimizer: Any, grads: Any) -> Any:
        """Turns an overflow in one replica's part into one of the whole gradient."""
        finite = original(optimizer, grads)
        return self._traced.on_all(finite) if _applied.value == "parts" else finite

    def _marked(self, grads: Sequence[Any], variables: Sequence[Any], in_parts: bool) -> list[Any]:
        """Marks gradients, except those that overwrite their variables."""
        given: list[Any] = [None if overwrites(v) else g for g, v in zip(grads, variables, strict=False)]
        is_cut = [in_parts and g is not None and not isinstance(g, tf.IndexedSlices) for g in given]
        marked = self._traced.aggregate_gradients([None if cut else g for g, cut in zip(given, is_cut, strict=True)])
        for i in (i for i, cut in enumerate(is_cut) if cut):
            marked[i] = self.own_part(sharding.Even(given[i].shape, self.num_replicas), given[i])
        return [old if new is None else new for old, new in zip(grads, marked, strict=True)]

    def own_part(self, cut: sharding.Even, whole: Any) -> Any:
        return self._traced.own_part(cut, whole)

    def of_parts(self, cuts: Sequence[sharding.Even], parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [self._traced.of_parts(cut, part) for cut, part in zip(cuts, parts, strict=True)]

    def update_own(
        self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], learning_rate: Any, owners: Sequence[int]
    ) -> None:
        given = [
            Part(tf.convert_to_tensor(v), optimizer._var_key(v), v.path) if is_sharded(v) else v for v in variables
        ]  # Only whole values can be read in a branch that one replica takes.
        for owner in sorted(set(owners)):
            own = [i for i, each in enumerate(owners) if each == owner]
            parts = [given[i] for i in own if isinstance(given[i], Part)]
            before = [part.value for part in parts]

            def update(own: Sequence[int] = own, parts: Sequence[Part] = parts) -> list[tf.Tensor]:
                update_each(optimizer, [grads[i] for i in own], [given[i] for i in own], learning_rate)
                return [tf.constant(0), *(part.value for part in parts)]

            def keep(before: Sequence[tf.Tensor] = before) -> list[tf.Tensor]:
                return [tf.constant(0), *map(tf.identity, before)]

            _, *updated = tf.cond(tf.equal(self._traced.replica(), owner), update, keep)
            for part, value in zip(parts, updated, strict=True):
                part.value = value
        for owner, variable, each in zip(owners, variables, given, strict=True):
            variable.assign(self._traced.of_owner(owner, tf.convert_to_tensor(each)))
            for factor in factors(optimizer, variable):
                factor.assign(self._traced.of_owner(owner, tf.convert_to_tensor(factor)))


def _accumulates_addends(optimizer: Any) -> bool:
    """Returns whether each replica accumulates its addends of gradients, which become global when an update uses them."""
    slots = (optimizer.built and optimizer.gradient_accumulation_steps and optimizer._accumulated_gradients) or ()
    on_read = tf.VariableSynchronization.ON_READ
    return any(slot is not None and getattr(slot.value, "synchronization", None) == on_read for slot in slots)
