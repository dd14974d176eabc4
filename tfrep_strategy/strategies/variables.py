"""The variables of our strategies: equal copies, values that each replica keeps for itself until a read, and sharded variables."""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.communicators.sharding import Along, Cut
from tfrep_strategy.core.scoped import assigns_as_is, note_change
from tfrep_strategy.core.step import current_share
from tfrep_strategy.core.tf import (
    MirroredVariable,
    ResourceVariable,
    SyncOnReadVariable,
    UninitializedVariable,
    in_replica_update_context,
    stands_for_its_copies,
    sync_on_read_context,
)
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.partitioner.placements import OF_LAYOUT, REPLICATE, Parts, Placement, Shard

_REDUCED = (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)
_creation_order = itertools.count()


class StepsSinceMerge:
    """Records whether replicas have run steps since their own state was last merged."""

    def __init__(self) -> None:
        self._marked = False
        self._count_when_merged = 0
        with tf.device("CPU:0"):
            self._count = tf.Variable(0, trainable=False, dtype=tf.int64)

    def mark(self) -> None:
        """Records a step that runs now."""
        self._marked = True

    def mark_in_graph(self) -> None:
        """Makes the function that is being traced record each of its runs, since Python code does not see them."""
        self._count.assign_add(1)

    def not_merged(self) -> bool:
        """Returns whether a step has run since the last call of `merged`."""
        with tf.init_scope():
            return self._marked or int(self._count) != self._count_when_merged

    def merged(self) -> None:
        """Records that the state is equal on all replicas now."""
        self._marked = False
        self._count_when_merged = int(self._count)


class _Converts:
    """Lets a variable convert to Python numbers and NumPy arrays, as plain variables do."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.read_value().numpy(), dtype)  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.read_value())  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.read_value())  # type: ignore[attr-defined]

    def __index__(self) -> int:
        return self.read_value().__index__()  # type: ignore[attr-defined]


class ReplicaVariable(_Converts, SyncOnReadVariable):
    """An `ON_READ` variable: metric totals (`SUM`), moving statistics (`MEAN`).

    TensorFlow divides a value assigned to a `SUM` variable among the replicas, and loses counts that do not divide. Here the
    first replica gets the whole value. Once a `MEAN` variable was merged, it is read without another collective.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.differs = False
        """Whether a replica has assigned to it inside a step, so that replicas may hold different values."""
        self.held: np.ndarray | None = None
        """The value over all replicas, while this process acts alone."""
        extended = self._distribute_strategy.extended
        if not extended.reads_alone:  # Otherwise the other processes do not make it.
            extended.replica_variables[next(_creation_order)] = self

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        self.differs = True
        return super()._update_replica(update_fn, value, **kwargs)

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        if stands_for_its_copies():
            return super().assign(value, use_locking=use_locking, name=name, read_value=read_value)
        outside = tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy()
        if not outside:
            value = self._unless_without_rows(value)
        if not outside or in_replica_update_context() or self.aggregation not in _REDUCED:
            return super().assign(value, use_locking=use_locking, name=name, read_value=read_value)
        if self.aggregation == tf.VariableAggregation.MEAN:  # All copies get the value, so no collective is needed to read it.
            update = super().assign(value, use_locking=use_locking, name=name, read_value=False)
            with tf.control_dependencies([] if update is None else [update]):
                return tf.identity(self._primary) if read_value else update
        return self._assign_to_all(value)

    def _assign_to_all(self, value: Any) -> Any:
        """Assigns to the copies of all replicas of this process, and a sum only to the first; also on the thread of one replica."""
        value, self.held = tf.cast(value, self.dtype), None
        first = self._distribute_strategy.extended.first_local_replica
        is_sum = self.aggregation == tf.VariableAggregation.SUM
        assigned = []
        for i, variable in enumerate(self.values):
            with tf.device(variable.device):
                assigned.append(variable.assign(tf.zeros_like(value) if is_sum and first + i > 0 else value))
        return assigned[0]

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        return self._assign_to_all(restored_tensors["VARIABLE_VALUE"])

    def _unless_without_rows(self, value: Any) -> Any:
        """Keeps the moving average of a replica without examples: a mean over no rows would make it NaN for good."""
        share = current_share()
        if share is None or assigns_as_is.value or self.aggregation != tf.VariableAggregation.MEAN:
            return value
        return tf.where(share.value > 0, tf.cast(value, self.dtype), self.read_value())

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        """Returns the saveables of a checkpoint. A sum is restored as it is assigned: TensorFlow would divide it."""

        def restore(restored_tensors: Any, restored_shapes: Any) -> Any:
            return self._assign_to_all(restored_tensors[0])

        def made(make: Any, *args: Any, **kwargs: Any) -> Any:
            saveable = make(*args, **kwargs)
            saveable.restore = restore
            return saveable

        of_tensorflow = super()._gather_saveables_for_checkpoint()
        if self.aggregation != tf.VariableAggregation.SUM:
            return of_tensorflow
        return {key: functools.partial(made, make) for key, make in of_tensorflow.items()}

    def spread_initial_value(self) -> None:
        """Keeps the initial value of a `SUM` variable on the first replica only, so that it counts once."""
        if self.aggregation == tf.VariableAggregation.SUM:
            first = self._distribute_strategy.extended.first_local_replica
            for variable in self.values[first == 0 :]:
                # A variable of a SavedModel has no value yet that tells its shape.
                is_known = variable.shape.is_fully_defined()
                variable.assign(tf.zeros(variable.shape, variable.dtype) if is_known else tf.zeros_like(variable))

    def value(self) -> Any:
        outside = tf.distribute.in_cross_replica_context() and not in_replica_update_context()
        if outside and self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            return self._get_cross_replica()
        return super().value()

    def _dense_var_to_tensor(self, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
        aggregates = getattr(sync_on_read_context, "entered", False) and not tf.distribute.in_cross_replica_context()
        if aggregates and self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            value = self._distribute_strategy.extended.value_of_first_replica(self._primary.value())
            return tf.convert_to_tensor(value, dtype=dtype, name=name)
        return super()._dense_var_to_tensor(dtype=dtype, name=name, as_ref=as_ref)

    def _get_cross_replica(self) -> Any:
        extended = self._distribute_strategy.extended
        if extended.reads_alone:
            return tf.identity(self._primary if self.held is None else tf.constant(self.held, self.dtype))
        if id(self) in extended.totals:
            return tf.identity(extended.totals[id(self)])
        if self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            return extended.value_of_first_replica(self._primary.value())
        merged = self.aggregation == tf.VariableAggregation.MEAN and not (self.differs and extended.steps.not_merged())
        return tf.identity(self._primary) if merged else super()._get_cross_replica()

    def __deepcopy__(self, memo: Any) -> Any:
        copy = super().__deepcopy__(memo)
        copy.differs = self.differs
        return copy


class ReplicatedVariable(_Converts, MirroredVariable):
    """An `ON_WRITE` variable with a copy on each replica."""

    @property
    def handle(self) -> Any:
        """The handle of the copy that reads use, so tapes outside replicas find the gradient."""
        return self._get_on_device_or_primary().handle

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        """Restores all copies from a checkpoint, even if a step makes the variable later, on the thread of one replica."""
        return [each._restore_from_tensors(restored_tensors) for each in self.values][0]


class ProcessVariable(ResourceVariable):
    """A process's copy of a variable that is equal on all processes."""

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        note_change(self)
        return super().assign(value, *args, **kwargs)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        note_change(self)
        return super().assign_add(delta, *args, **kwargs)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        note_change(self)
        return super().assign_sub(delta, *args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return with_our_class(super().__deepcopy__(memo))


def with_local_copies(call: Any) -> Any:
    """Lets functions of a loaded SavedModel run outside replicas, on the local copy."""

    @functools.wraps(call)
    def called(self: Any, args: Any, captured_inputs: Any) -> Any:
        return call(self, args, list(map(_own_copy, captured_inputs)))

    def _own_copy(captured: Any) -> Any:
        has_copies = isinstance(captured, (ReplicatedVariable, ReplicaVariable)) and not is_sum(captured)
        return captured._get_on_device_or_primary().handle if has_copies else captured

    return called


def with_our_class(variable: Any) -> Any:
    """Gives a variable, or TensorFlow's container of its copies, our class."""
    if type(variable) is ResourceVariable:
        variable.__class__ = ProcessVariable  # TensorFlow's creators make it, and take no other class.
    if type(variable) is MirroredVariable:
        return ReplicatedVariable(variable.distribute_strategy, variable.values, variable.aggregation)
    if type(variable) is SyncOnReadVariable:
        return ReplicaVariable(variable.distribute_strategy, variable.values, variable.aggregation)
    return variable


def is_sum(variable: Any) -> bool:
    """Returns whether each replica holds an addend of a variable, whose value is the sum."""
    on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
    return on_read and variable.aggregation == tf.VariableAggregation.SUM


class PartVariable(ReplicaVariable):
    """A sharded variable: the replica's own part inside a replica, and the whole outside.

    Reading it outside replicas gathers the parts, so all processes must read it. Assigning there keeps the own part of a whole
    value, without communication.
    """

    def __init__(self, strategy: Any, values: Any, aggregation: Any, var_policy: Any = None, cut: Cut | None = None) -> None:
        super().__init__(strategy, values, aggregation, var_policy)
        self.differs = True
        self.cut: Any = cut
        self.stand_in: Any = None
        """Stands for the variable in the trace of a one-device step, with the shape of one replica's part."""
        self.assigned_alone = False
        """Whether this process alone has assigned `held`."""

    @classmethod
    def made(cls, extended: Any, creator: Callable[..., Any], cut: Cut, **kwargs: Any) -> PartVariable:
        """Makes a variable that is sharded over the replicas: each replica of this process holds its part.

        Args:
            extended: The `extended` of the strategy.
            creator: Makes a variable on one device.
            cut: The part that each replica has.
            **kwargs: Arguments of a variable. The initial value is the whole value.
        """
        initial = kwargs.pop("initial_value")
        kwargs |= {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.NONE}
        kwargs["shape"] = None
        kwargs.pop("colocate_with", None)
        parts = []
        whole = None
        for replica, device in enumerate(extended.worker_devices, start=extended.first_local_replica):
            with tf.device(device):
                if whole is None:
                    whole = tf.convert_to_tensor(initial() if callable(initial) else initial, kwargs.get("dtype"))
                parts.append(creator(initial_value=_apart(cut.part(whole, replica)), **kwargs))
        return cls(extended.strategy, parts, tf.VariableAggregation.NONE, cut=cut)

    @property
    def _is_traced(self) -> bool:
        """Whether a one-device step is traced."""
        return self._distribute_strategy._is_one_replica and not tf.executing_eagerly()

    @property
    def _stands_in(self) -> bool:
        """Whether another variable is read and assigned in its place."""
        return self._is_traced

    @property
    def _extended(self) -> Any:
        """The `extended` of the strategy, also while a one-device step runs."""
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
        """Gathers the value while processes act alone. All processes call it.

        Args:
            reads: Whether this process keeps the value.
        """
        whole = self.read_value()
        self.held = whole.numpy() if reads else None

    def take_from_first(self) -> None:
        """Takes the own part of the value that rank 0 has assigned alone. All processes call it."""
        extended = self._distribute_strategy.extended
        communicator = extended.communicator_of(extended.first_local_replica)
        own = tf.zeros(self.shape, self.dtype) if self.held is None else tf.constant(self.held, self.dtype)
        whole = communicator.broadcast([own])[0]
        self.held, self.assigned_alone = None, False
        self.assign(whole)

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        if self._stands_in:
            return self._primary.assign(value, use_locking, name, read_value)
        if not self._is_read_whole:
            return super().assign(value, use_locking=use_locking, name=name, read_value=read_value)
        return self._assign_to_all(value)

    def _assign_to_all(self, value: Any) -> Any:
        extended = self._extended
        value = tf.cast(value, self.dtype)
        if extended.reads_alone:
            self.held, self.assigned_alone = value.numpy(), True
        for replica, part in enumerate(self.values, start=extended.first_local_replica):
            with tf.device(part.device):
                part.assign(_apart(self.cut.part(value, replica)))
        return value

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if self._stands_in:
            return self._primary.assign_add(value, *args, **kwargs)
        return self.assign(self + value) if self._is_read_whole else super().assign_add(value, *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if self._stands_in:
            return self._primary.assign_sub(value, *args, **kwargs)
        return self.assign(self - value) if self._is_read_whole else super().assign_sub(value, *args, **kwargs)

    def scatter_add(self, slices: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        return self._scatter("scatter_add", tf.tensor_scatter_nd_add, slices)

    def scatter_sub(self, slices: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        return self._scatter("scatter_sub", tf.tensor_scatter_nd_sub, slices)

    def scatter_update(self, slices: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        return self._scatter("scatter_update", tf.tensor_scatter_nd_update, slices)

    def _scatter(self, method: str, scattered: Callable[..., tf.Tensor], slices: tf.IndexedSlices) -> Any:
        if self._stands_in:
            return getattr(self._primary, method)(slices)
        if not self._is_read_whole:
            return getattr(self._get_on_device_or_primary(), method)(slices)
        return self.assign(scattered(self.read_value(), slices.indices[:, tf.newaxis], slices.values))

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        own = self._get_on_device_or_primary()
        if own.shape != self.shape and getattr(value, "shape", None) == self.shape:  # A slot that starts as its variable.
            context: Any = tf.distribute.get_replica_context()
            value = self.cut.part(value, int(tf.get_static_value(context.replica_id_in_sync_group)))
        return super()._update_replica(update_fn, value, **kwargs)

    def value(self) -> Any:
        return self._get_cross_replica() if self._runs_as_one else super().value()

    def read_value(self) -> Any:
        return self._get_cross_replica() if self._runs_as_one else super().read_value()

    def _get(self) -> Any:
        return self._get_cross_replica() if self._runs_as_one else super()._get()

    def _dense_var_to_tensor(self, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
        if self._runs_as_one:
            return tf.convert_to_tensor(self._get_cross_replica(), dtype, name=name)
        return super()._dense_var_to_tensor(dtype=dtype, name=name, as_ref=as_ref)

    @property
    def _is_read_whole(self) -> bool:
        """Whether it is outside replicas, or a one-device step runs eagerly, whose optimizer updates the whole."""
        return self._runs_as_one or _outside_replicas()

    @property
    def _runs_as_one(self) -> bool:
        """Whether a one-device step runs eagerly."""
        return self._distribute_strategy._is_one_replica and tf.executing_eagerly()

    def _get_cross_replica(self) -> Any:
        extended = self._extended
        if extended.reads_alone:
            if self.held is None:
                raise ConfigurationError(
                    message(
                        "One rank alone cannot read a sharded variable.",
                        hint="read it on all ranks.",
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


class ShardedWeight(PartVariable):
    """A weight of which each replica holds its part. A program reads and assigns the whole.

    In the trace of a one-device step it has its whole shape, and the partitioned step gathers it where an operation reads it.
    Outside replicas it is gathered, as each `PartVariable`. A function under `strategy.run` cannot read it.
    """

    def __init__(self, strategy: Any, values: Any, aggregation: Any, var_policy: Any = None, cut: Cut | None = None) -> None:
        super().__init__(strategy, values, aggregation, var_policy, cut)
        self._whole: Any = None
        """The whole value, while a one-device step runs eagerly."""

    @property
    def placements(self) -> tuple[Placement, Placement]:
        """How a partitioned step has its value: among replicas that have different rows, and among those that have the same."""
        if isinstance(self.cut, Along):
            across, within = (
                REPLICATE if axis is None else Shard(axis, self.cut.part_shape[axis], OF_LAYOUT) for axis in self.cut.axes
            )
            return across, within
        width = self.cut.part_shape.num_elements()
        shape, part_shape = tuple(self.shape.as_list()), tuple(self.cut.part_shape.as_list())
        parts = Parts(width, self.cut.size, self.shape.num_elements(), True, shape, part_shape)
        return parts, parts

    @property
    def trainable(self) -> bool:
        return True

    @property
    def _unique_id(self) -> Any:
        return self.values[0]._unique_id

    @property
    def handle(self) -> Any:
        """The handle by which a tape finds its gradient, in the trace of a step or in an eager one."""
        if not self._stands_in:
            raise ConfigurationError(
                message(
                    "The gradient of a sharded weight can be computed only in a step that replicas share.",
                    hint="compute it in a @tf.function that trains and is called in the scope, or leave out shard_weights.",
                    variable=self.name,
                )
            )
        return self._primary.handle

    @property
    def _primary(self) -> Any:
        if not self._stands_in:
            if stands_for_its_copies():
                raise ConfigurationError(
                    message(
                        "A model whose weights are sharded cannot be exported.",
                        hint="save it with model.save, load the file outside the scope, and export that.",
                        variable=self.values[0].name,
                    )
                )
            return self.values[0]
        if tf.executing_eagerly():
            if self._whole is None:
                self._whole = ResourceVariable(super()._get_cross_replica())
            return self._whole
        if self.stand_in is None:
            with tf.init_scope():
                self.stand_in = UninitializedVariable(trainable=True, shape=self.shape, dtype=self.values[0].dtype)
            self.stand_in._distributed_container = weakref.ref(self)
        return self.stand_in

    def end_eager_step(self) -> None:
        """Takes the own part of the value that an eager step has left."""
        if self._whole is not None:
            whole, self._whole = self._whole, None
            self._assign_to_all(whole.read_value())

    @property
    def _stands_in(self) -> bool:
        return bool(self._distribute_strategy._is_one_replica)

    @property
    def device(self) -> str:
        return str(self.values[0].device)

    def _get_cross_replica(self) -> Any:
        return self._primary.value() if self._runs_as_one else super()._get_cross_replica()

    def _get_replica(self, replica_id: int) -> Any:
        return self._get_on_device_or_primary()

    def _get_on_device_or_primary(self) -> Any:
        if self._stands_in:
            return self._primary
        raise ConfigurationError(
            message(
                "A function under strategy.run cannot read or assign a sharded weight.",
                hint="train with fit or a @tf.function that is called in the scope, without strategy.run.",
                variable=self.name,
            )
        )


def _apart(part: tf.Tensor) -> tf.Tensor:
    """Copies a part. TensorFlow would keep the whole tensor in memory, of which the part is a slice."""
    return tf.raw_ops.DeepCopy(x=part)


def _outside_replicas() -> bool:
    outside = tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy()
    return outside and not in_replica_update_context()
