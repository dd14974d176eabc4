"""Optimizers on replicas. An optimizer gets the global gradient before it checks, clips, accumulates or applies anything.

If the state is sharded, a replica updates its part of the weights, and the parts are gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.communicators import sharding
from tfrep_strategy.communicators.gradients import dense
from tfrep_strategy.core.scoped import Setting, assigns_as_is
from tfrep_strategy.core.step import current_share
from tfrep_strategy.errors import ConfigurationError, message, warn
from tfrep_strategy.keras_integration import refusals
from tfrep_strategy.keras_integration.internals import BaseOptimizer
from tfrep_strategy.keras_integration.synchronous.base import SynchronousBase, overwrites
from tfrep_strategy.keras_integration.synchronous.layers import creates_partial_sums

_BY_ELEMENTS = ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Ftrl", "Nadam", "Lion", "ScheduleFreeAdamW")
"""Keras's optimizers that update each element of a variable independently. Others need whole variables."""

_NOT_CUT = ("gradient_accumulator", "average")
"""Slots of any optimizer that every replica holds whole, except the averages of sharded weights."""


class ShardedUpdates(SynchronousBase):
    """Operations on sharded optimizer state."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._owners: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()
        """For an optimizer that needs whole variables: the owner of each variable, by its key."""

    @property
    def shards(self) -> bool:
        """Whether replicas keep parts of the optimizer's state."""
        return self.has_several and self.strategy.shard_optimizer_state

    @property
    def num_replicas(self) -> int:
        """Number of replicas that keep parts."""
        return self.strategy.num_replicas_in_sync

    def deal_out(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Assigns each variable to a replica that updates it, if an optimizer needs whole variables."""
        owners = sharding.owners([v.shape.num_elements() for v in variables], self.num_replicas)
        self._owners[optimizer] = {optimizer._var_key(v): owner for v, owner in zip(variables, owners, strict=True)}

    def cut_of_slot(self, optimizer: Any, variable: Any, name: str | None) -> sharding.Cut | None:
        """Returns the part of a slot that each replica holds; None if each holds all of it."""
        size = self.num_replicas
        if self.shards and name == "average" and is_sharded(variable):
            return sharding.Even(variable.shape, size, is_whole_where_read=True)
        if not self.shards or name in _NOT_CUT:
            return None
        if is_by_elements(optimizer):
            return sharding.Even(variable.shape, size)
        owner = self._owners.get(optimizer, {}).get(optimizer._var_key(variable))
        return None if owner is None else sharding.Owned(variable.shape, size, owner)

    def takes_parts(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
        """Returns whether nothing between the gradients and the update needs a whole gradient."""
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
        """Updates this replica's part of each variable, or its own variables, and gives all replicas the new values.

        Args:
            optimizer: The optimizer.
            grads: The global gradients.
            variables: The variables, with a gradient each.
            learning_rate: The learning rate.
            are_parts: Whether dense gradients are this replica's parts.
        """
        if not is_by_elements(optimizer):
            _refuse_other_state(optimizer)
            owners = [self._owners[optimizer][optimizer._var_key(variable)] for variable in variables]
            self.update_own(optimizer, grads, variables, learning_rate, owners)
            return
        cuts = [sharding.Even(variable.shape, self.num_replicas) for variable in variables]
        parts = [
            Part(self.own_part(cut, tf.convert_to_tensor(variable)), optimizer._var_key(variable))
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
        """Returns this replica's part of a tensor or of slices."""
        return cut.part(whole, self.strategy.extended.own_communicator().rank)

    def of_parts(self, cuts: Sequence[sharding.Even], parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the whole tensors, given the parts of each replica."""
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


class Part:
    """Stands for a variable in an update, which reads and assigns this replica's part of it, or a whole value."""

    def __init__(self, value: tf.Tensor, key: Any, path: str = "") -> None:
        self.value, self._unique_id, self.path = value, key, path

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
    """Updates variables one after the other. A user's optimizer gets TensorFlow variables, as from Keras."""
    given = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    BaseOptimizer._backend_update_step(optimizer, grads, given, learning_rate)


def is_by_elements(optimizer: Any) -> bool:
    """Returns whether an optimizer updates each element of a variable independently."""
    update = type(optimizer).update_step
    return any(update is getattr(keras.optimizers, name).update_step for name in _BY_ELEMENTS if hasattr(keras.optimizers, name))


def is_sharded(variable: Any) -> bool:
    """Returns whether each replica holds a part of a variable only, which is whole where it is read."""
    return bool(getattr(getattr(getattr(variable, "value", None), "cut", None), "is_whole_where_read", False))


def _module_of(name: str) -> str:
    """Returns the module of Keras's own class of a name."""
    return getattr(keras.optimizers, name).__module__ if hasattr(keras.optimizers, name) else ""


def factors(optimizer: Any, variable: Any) -> tuple[Any, ...]:
    """Returns the state of a variable that is not a slot: Adafactor has means of its rows and columns, which are small."""
    if not isinstance(optimizer, keras.optimizers.Adafactor) or len(variable.shape) < 2:
        return ()
    index = optimizer._get_variable_index(variable)
    return optimizer._r[index], optimizer._c[index]


def _refuse_other_state(optimizer: Any) -> None:
    """Refuses a user's optimizer with state that cannot be assigned to a variable."""
    if type(optimizer).__module__ == _module_of(type(optimizer).__name__):
        return
    of_all = (optimizer._iterations, optimizer._learning_rate)
    own = [v for v in optimizer.variables if not hasattr(v.value, "cut") and all(v is not each for each in of_all)]
    whole = [v for v in own if not v.name.endswith(_NOT_CUT)]
    if whole:
        raise ConfigurationError(
            message(
                "This optimizer has state that cannot be sharded, because it is not a slot of a variable.",
                hint="make it with add_optimizer_variables, or leave out shard_optimizer_state.",
                optimizer=type(optimizer).__name__,
                state=[v.path for v in whole],
            )
        )


_OUTSIDE_REPLICAS = (
    "An optimizer is applied outside `strategy.run`. If its gradients are computed there too, they are those of the whole batch:"
    " correct, but no faster than one device.\n"
    "Hint: make the step a `@tf.function`, called in the scope with the same batches on all ranks. Replicas then share its work."
)

_applied_gradients: Setting[str | None] = Setting(None)
"""The gradients that this replica's thread applies: none, "global" ones, or "local" ones that become global."""

_updated_variables: Setting[Sequence[Any]] = Setting(())
"""The variables whose gradients an update clips."""

_builds_inner = Setting(False)
"""Whether this thread builds an optimizer that another one wraps."""


class Updates(ShardedUpdates):
    """Operations of optimizers, in the order of a step."""

    def build_optimizer(self, original: Any, optimizer: Any, variables: Any) -> None:
        """Refuses variables made outside the scope, also in custom training loops, and optimizers that sum gradients again."""
        refusals.refuse_old_optimizer(optimizer, "A step")
        if self.has_several:
            refusals.refuse_foreign_variables(variables, self.strategy)
            refusals.refuse_foreign_optimizer(optimizer, self.strategy)
        if self.shards:
            self.strategy.extended.synchronize_new_variables()  # A slot may start as its variable.
            self.deal_out(optimizer, variables)
        original(optimizer, variables)

    def build_loss_scaling(self, original: Any, optimizer: Any, var_list: Any) -> None:
        """Records that inner optimizers are built for global gradients."""
        if self.has_several:
            refusals.refuse_foreign_optimizer(optimizer, self.strategy)
        with _builds_inner.to(True):
            original(optimizer, var_list)

    def add_slot(self, original: Any, optimizer: Any, reference_variable: Any, name: Any = None, **kwargs: Any) -> Any:
        """Makes accumulators of gradients hold a partial sum on each process, and sharded slots a part of the whole."""
        accumulates = name == "gradient_accumulator" and self._accumulates_locally(optimizer)
        accumulates = accumulates and not _builds_inner.value  # An inner optimizer gets global gradients.
        accumulates = accumulates and not overwrites(reference_variable)  # Largest values are already global.
        cut = self.cut_of_slot(optimizer, reference_variable, name)
        with creates_partial_sums.to(accumulates), self.strategy.extended.cut_of_new_variables.to(cut):
            return original(optimizer, reference_variable, name=name, **kwargs)

    def apply(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Makes the gradients global. Then every replica does the update of one device."""
        with assigns_as_is.to(True):
            return self._apply(original, optimizer, grads, trainable_variables)

    def _apply(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any) -> Any:
        strategy = self.strategy
        if _applied_gradients.value is not None:
            return original(optimizer, grads, trainable_variables)
        if not self.in_replica:
            if self.has_several:
                warn(_OUTSIDE_REPLICAS)
            with _applied_gradients.to("global"):
                return original(optimizer, strategy.extended.mean_over_processes(list(grads)), trainable_variables)
        grads = list(grads)
        trainable_variables = None if trainable_variables is None else list(trainable_variables)  # It may be an iterator.
        if not grads:
            return original(optimizer, grads, trainable_variables)
        whole = self.what_overwrites(grads, trainable_variables or optimizer._trainable_variables)
        grads = [None if i in whole else gradient for i, gradient in enumerate(grads)]

        def with_whole(gradients: Sequence[Any]) -> list[Any]:
            return [whole.get(i, gradient) for i, gradient in enumerate(gradients)]

        if self._accumulates_locally(optimizer):
            own = _weighted([dense(g) for g in grads])  # Keras collects in dense variables.
            with _applied_gradients.to("local"):
                return original(optimizer, with_whole(own), trainable_variables)
        with _applied_gradients.to("global"):
            summed = strategy.extended.aggregate_gradients(_weighted(grads))
            return original(optimizer, with_whole(summed), trainable_variables)

    def apply_scaled(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Turns an overflow on one replica into an overflow of the global gradient, so that all replicas skip the step.

        It then continues as on one device: Keras's own function coordinates replicas, and does not work outside them.
        """
        return self.apply(type(optimizer)._common_apply, optimizer, grads, trainable_variables)

    def apply_to_variables(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any) -> None:
        """Records the variables whose gradients an update clips."""
        with _updated_variables.to(tuple(trainable_variables)):
            original(optimizer, grads, trainable_variables)

    def accumulate_gradients(self, original: Any, optimizer: Any, grads: Any, acc_grads: Any) -> None:
        """Adds to the accumulators as on one device: a replica accumulates a partial sum."""
        BaseOptimizer._backend_increment_gradient_accumulators(optimizer, grads, acc_grads)

    def clip_gradients(self, original: Any, optimizer: Any, grads: Any) -> Any:
        """Begins an update: makes accumulated gradients global, and transforms them, before they are clipped."""
        applied, strategy = _applied_gradients.value, self.strategy
        if applied is None:
            return original(optimizer, grads)
        if applied == "local":
            grads = strategy.extended.aggregate_gradients(list(grads))
        with _applied_gradients.to("global"):
            return original(optimizer, strategy.extended.transform_gradients(list(grads), _updated_variables.value))

    def update_variables(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        """Updates the whole of each variable on each replica, or the replica's part if the optimizer's state is sharded."""
        if self.shards and self.in_replica:
            self.update_in_parts(optimizer, grads, trainable_variables, learning_rate, are_parts=False)
        else:
            update_each(optimizer, grads, trainable_variables, learning_rate)

    def _accumulates_locally(self, optimizer: Any) -> bool:
        """Returns whether replicas accumulate their own gradients, and communicate only in steps that update.

        This needs a collective inside `tf.cond`. Within one process all steps aggregate, which costs no message.
        """
        return bool(optimizer.gradient_accumulation_steps) and self.strategy.extended.collectives_in_branches


def _weighted(grads: list[Any]) -> list[Any]:
    """Multiplies gradients by the replica's share, in a step that weights by examples."""
    share = current_share()
    return grads if share is None else [share.weighted(g) for g in grads]
