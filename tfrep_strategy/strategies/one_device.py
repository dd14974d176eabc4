"""The trace of a one-device step, and its run on the replicas. While the step is traced, one global replica stands for all.

Keras and the user's code find no strategy and no replicas, as on one device. A variable with copies acts as its first copy. New
variables still belong to the strategy: they are made outside the trace, in the strategy's scope.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.cluster.devices import warn_of_sparse_gradients
from tfrep_strategy.communicators import SingleCommunicator
from tfrep_strategy.communicators.gradients import dense
from tfrep_strategy.core.calls import line_of
from tfrep_strategy.core.limits import Verification, verification
from tfrep_strategy.core.scoped import Setting
from tfrep_strategy.core.step import Whole
from tfrep_strategy.core.tf import (
    DefaultDistributionExtended,
    DistributedVariable,
    MirroredVariable,
    in_no_strategy,
    trace,
    value_container,
)
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.finding import driver_of_trace
from tfrep_strategy.partitioner import marks
from tfrep_strategy.partitioner.placements import OWN, PARTIAL, REPLICATE, Own, Parts, Shard
from tfrep_strategy.partitioner.step import Given, PartitionedStep
from tfrep_strategy.partitioner.values import OwnRows
from tfrep_strategy.partitioner.verification.verified_step import Variable, Watch
from tfrep_strategy.strategies.variables import PartVariable, ShardedWeight, is_sum

_thread = threading.local()

hears_of_steps: Setting[Callable[[OneDeviceTrace, int | None], None] | None] = Setting(None)
"""What hears of each step that trains when it was traced, and of how many rows the batch has, if that is known."""


class OneReplica(DefaultDistributionExtended):
    """The `extended` of a strategy on a thread that traces a one-device step.

    Args:
        strategy: The strategy.
        of_all: The strategy's own `extended`.

    Attributes:
        is_asked_to_run: Whether the traced function has called `strategy.run`, and so is written for replicas.
    """

    def __init__(self, strategy: Any, of_all: Any) -> None:
        super().__init__(strategy)
        self.is_asked_to_run = False
        self.of_all = of_all
        self.num_replicas = of_all._num_replicas_in_sync
        self.cut_of_new_variables, self.transform_gradients = of_all.cut_of_new_variables, of_all.transform_gradients
        self.logical_devices = getattr(of_all, "logical_devices", None)

    def aggregate_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Marks gradients as values that travel between replicas.

        Args:
            gradients: `tf.Tensor`, `tf.IndexedSlices` or None.
        """
        strategy = self.of_all.strategy
        own = [dense(g) if strategy.densify_sparse_gradients else g for g in gradients]
        if self.num_replicas > 1 and any(isinstance(g, tf.IndexedSlices) for g in own):
            warn_of_sparse_gradients(self.of_all.worker_devices)
        if strategy.gradient_aggregator is not None:
            return self._aggregated(strategy.gradient_aggregator, own)
        return list(map(_marked, own))

    def _aggregated(self, aggregator: Any, gradients: Sequence[Any]) -> list[Any]:
        given = tf.nest.flatten(list(gradients), expand_composites=True)

        def call(tensors: Sequence[tf.Tensor], communicator: Any) -> list[Any]:
            there = iter(tensors)
            own = [each if each is None else next(there) for each in given]
            return list(aggregator(tf.nest.pack_sequence_as(list(gradients), own, expand_composites=True), communicator))

        with tf.__internal__.FuncGraph("trial").as_default():  # It may return dense gradients for sparse ones.
            trial = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in given if x is not None]
            results = call(trial, SingleCommunicator())
        flat = tf.nest.flatten(results, expand_composites=True)

        def aggregate(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            found = tf.nest.flatten(call(tensors, self.of_all.own_communicator()), expand_composites=True)
            return [each for each in found if each is not None]

        specs = [tf.TensorSpec(each.shape, each.dtype) for each in flat if each is not None]
        made = iter(marks.called(aggregate, [x for x in given if x is not None], specs))
        filled = [each if each is None else next(made) for each in flat]
        return tf.nest.pack_sequence_as(results, filled, expand_composites=True)

    def replica(self) -> tf.Tensor:
        """Returns the replica id, as a value that differs between replicas."""
        return marks.replica()

    def own_sum(self, rows: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
        """Returns, for each replica, the sum of its rows over axes, which stay with size 1."""
        return marks.own_sum(rows, axes)

    def spread(self, own: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Repeats the value of a replica for each of its rows."""
        return marks.spread(own, rows)

    def own_part(self, cut: Any, whole: Any) -> Any:
        """Returns the part of a tensor, or of slices, that this replica holds.

        Args:
            cut: A `sharding.Even`.
            whole: The tensor.
        """
        if isinstance(whole, tf.IndexedSlices):
            return cut.part(whole, marks.replica())
        return tf.reshape(marks.own_row(cut.rows(whole)), cut.part_shape)

    def of_parts(self, cut: Any, part: tf.Tensor) -> tf.Tensor:
        """Returns the whole tensor, given the part of each replica."""
        return cut.joined([marks.all_rows(tf.reshape(part, [-1]), self.num_replicas)])

    def of_owner(self, owner: int, value: tf.Tensor) -> tf.Tensor:
        """Returns the value of one replica."""
        is_own = tf.equal(marks.replica(), owner)
        return marks.addend(tf.where(is_own, value, tf.zeros_like(value)))

    def on_all(self, condition: tf.Tensor) -> tf.Tensor:
        """Returns whether a condition is true on all replicas."""
        return tf.equal(marks.addend(tf.cast(condition, tf.int32)), self.num_replicas)

    def bucket_bytes_for(self, tensors: Sequence[Any]) -> int:
        """Returns the size of the buckets for gradients."""
        return int(self.of_all.bucket_bytes_for(tensors))

    def _scope(self, strategy: Any) -> Any:
        return contextlib.nullcontext(strategy)

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.is_asked_to_run = True
        return fn(*args, **kwargs)

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        return contextlib.nullcontext()  # Each copy of the variable is beside a copy of the other one.


def _marked(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(marks.slices(gradient.values), marks.slices(gradient.indices), gradient.dense_shape)
    return gradient if gradient is None else marks.gradient(gradient)


class HasOneReplica:
    """Gives a `tf.distribute.Strategy` one replica on threads that trace a one-device step."""

    @property
    def _extended(self) -> Any:
        return getattr(_thread, "extended", {}).get(id(self), self._own_extended)

    @_extended.setter
    def _extended(self, extended: Any) -> None:
        self._own_extended = extended

    @property
    def _is_one_replica(self) -> bool:
        """Whether this thread traces a one-device step."""
        return id(self) in getattr(_thread, "extended", ())


def traced_for() -> OneReplica | None:
    """Returns the `OneReplica` of the step that this thread traces; None if it traces none."""
    extendeds = list(getattr(_thread, "extended", {}).values())
    return extendeds[-1] if extendeds else None


@contextlib.contextmanager
def one_replica(strategy: Any, is_traced: bool = True) -> Iterator[list[Any]]:
    """Opens a block in which this thread traces or runs a one-device step.

    Args:
        strategy: The strategy; it derives from `HasOneReplica`.
        is_traced: Whether the block traces a step. An eager step needs no marks.

    Yields:
        The variables that are made in the block. The list grows as they are made.
    """
    made: list[Any] = []
    extendeds = _thread.__dict__.setdefault("extended", {})

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        kwargs["initial_value"] = _outside_of_trace(kwargs.get("initial_value"))
        one = extendeds.pop(id(strategy))
        try:
            with tf.init_scope(), strategy.scope():
                made.append(next_creator(**kwargs))
        finally:
            extendeds[id(strategy)] = one
        return made[-1]

    with strategy.scope(), in_no_strategy(), tf.variable_creator_scope(create):
        of_all = strategy.extended
        extendeds[id(strategy)] = OneReplica(strategy, of_all)
        try:
            with driver_of_trace.to(of_all.keras_driver.of_trace if is_traced else None):
                yield made
        finally:
            del extendeds[id(strategy)]


def _outside_of_trace(value: Any) -> Any:
    """Returns an initial value without tensors of the trace."""
    if not tf.is_tensor(value) or not tf.is_symbolic_tensor(value):
        return value
    known = tf.get_static_value(value)
    if known is None:
        raise ConfigurationError(
            message(
                "The initial value of a variable that a step makes cannot be computed by the step.",
                hint="use a constant as initial value, then assign the computed value.",
                initial_value=value,
            )
        )
    return known


def none_in_trace(replica_id: Callable[[], Any]) -> Callable[[], Any]:
    """Wraps the function that tells a `tf.random.Generator` its replica: a one-device trace has none."""

    @functools.wraps(replica_id)
    def of_generator() -> Any:
        return None if traced_for() is not None else replica_id()

    return of_generator


class Results(NamedTuple):
    """The results of a step: its tensors, and the structure around them."""

    tensors: list[tf.Tensor]
    structure: Any

    def whole_results(self) -> Whole:
        """Returns the structure with these tensors."""
        tensors, flat = iter(self.tensors), tf.nest.flatten(self.structure, expand_composites=True)
        results = [next(tensors) if tf.is_tensor(each) else each for each in flat]
        return Whole(tf.nest.pack_sequence_as(self.structure, results, expand_composites=True))


class OneDeviceTrace:
    """A step that was traced for one kind of batch.

    Args:
        strategy: The strategy whose replicas run the step.
        fn: The step.
        batch: The specification of a batch.
        of_batch: How replicas get each tensor of the batch.
        keeps_rows: See `PartitionedSteps`.

    Attributes:
        strategy: The strategy.
        is_for_replicas: Whether the step calls `strategy.run`.
    """

    def __init__(
        self, strategy: Any, fn: Callable[[Any], Any], batch: Any, of_batch: Sequence[Given], keeps_rows: bool = False
    ) -> None:
        self.strategy = strategy
        made: list[Any] = [None]
        while made:  # As in `tf.function`: a function that made variables is traced once more, now that they exist.
            with one_replica(strategy) as made:
                graph = trace("step", fn, [batch], {})
                self.is_for_replicas = strategy.extended.is_asked_to_run
        strategy.extended.synchronize_new_variables()
        self._results = graph.structured_outputs
        self._captured = [outer for outer, _ in graph.captures]
        _copy_from_first(map(_variable_of, self._captured))
        self._num_batch = len(of_batch)
        self._specs = tf.nest.flatten(batch)
        self._partition(graph, of_batch, keeps_rows)

    def _partition(self, graph: Any, of_batch: Sequence[Given], keeps_rows: bool) -> None:
        given = [*of_batch, *map(_given, self._captured)]
        asked = verification()
        local, replicas = self.strategy.extended.num_local_replicas, self.strategy.num_replicas_in_sync
        is_asked = hears_of_steps.value is not None
        self.step = PartitionedStep(
            graph,
            given,
            local,
            replicas,
            keeps_rows,
            is_observed=asked is not None,
            keeps_plan=is_asked,
            model_size=self.strategy.extended.model_size,
        )
        self._watch = None if asked is None else self._watched(asked)
        self.without_rule = self.step.without_rule

    @property
    def shards_weights(self) -> bool:
        """Whether replicas hold parts of a weight that it uses."""
        return any(isinstance(_variable_of(captured), ShardedWeight) for captured in self._captured)

    def takes(self, specs: Sequence[Any]) -> bool:
        """Returns whether it was traced for whatever has these specifications, each None for what stands for None."""
        pairs = zip(specs, self._specs, strict=True)
        return all(one is other or (None not in (one, other) and one.is_subtype_of(other)) for one, other in pairs)

    def of_all_rows(self) -> OneDeviceTrace:
        """Returns the same step, not traced again, as one that each replica computes for all rows."""
        other = copy.copy(self)
        other.__dict__.pop("run_without_batch", None)
        other._partition(self.step.graph, [Given()] * self._num_batch, keeps_rows=False)
        return other

    def run(self, rows: Sequence[OwnRows], batches: Sequence[Sequence[tf.Tensor]]) -> Results:
        """Runs the step.

        Args:
            rows: The rows of each replica of this process.
            batches: The tensors of the batch for each of these replicas.
        """
        inputs = [[*batch, *self._captured_by(i)] for i, batch in enumerate(batches)]
        transport = self.strategy.extended.transport
        before = self._watch.values(inputs, transport.devices) if self._watch else []
        every, results = self.step.run(rows, inputs, transport), len(self.step.program.results)
        if self._watch:
            self._watch.compare(before, [own[results:] for own in every], self._watch.values(inputs, transport.devices))
        return Results(every[0][:results], self._results)

    def _watched(self, asked: Verification) -> Watch:
        """Returns the `Watch` that compares the first runs with one device."""
        variables, resources = [], {}
        for place, captured in enumerate(self._captured, self._num_batch):
            variable, given = _variable_of(captured), _given(captured)
            placements = given.placement, given.of_model
            if captured.dtype != tf.resource or any(isinstance(each, (Own, Parts, Shard)) for each in placements):
                continue
            if not isinstance(variable, (tf.Variable, DistributedVariable)):  # A table, say.
                resources[place] = captured
            else:
                variables.append(Variable(place, variable.name, variable.dtype, given.placement))
        extended = self.strategy.extended
        replicas = self.strategy.num_replicas_in_sync
        return Watch(asked, self.step, variables, resources, extended.first_local_replica, replicas)

    def describe(self) -> list[str]:
        """Describes how the step is partitioned, one finding a line."""
        whole = [f"{type_} ({line_of(operation)})" for type_, operation in self.without_rule.items()]
        notes = [f"Every replica computes for all rows, for want of a rule: {', '.join(whole)}."] if whole else []
        return self.step.describe() + notes

    @functools.cached_property
    def run_without_batch(self) -> Any:
        """A function that runs the part of the step that does not depend on the batch."""
        return tf.function(self._run_without_batch, autograph=False).get_concrete_function()

    def _run_without_batch(self) -> None:
        extended = self.strategy.extended
        numbers = range(extended.first_local_replica, extended.first_local_replica + extended.num_local_replicas)
        inputs = [[*[None] * self._num_batch, *self._captured_by(i)] for i in range(len(numbers))]
        self.step.run_without_batch(list(map(tf.constant, numbers)), inputs, extended.transport)

    def _captured_by(self, replica: int) -> list[Any]:
        every = map(_copies, self._captured)
        return [copies[replica] if len(copies) > 1 else copies[0] for copies in every]


def _variable_of(captured: Any) -> Any:
    """Returns the variable behind a handle, or the container of its copies; None if the tensor is not a handle."""
    variable = getattr(captured, "_parent_trackable", lambda: None)()
    return None if variable is None else value_container(variable)


def _copy_from_first(variables: Iterable[Any]) -> None:
    """Copies the first copy of variables to the others: eager code that ran during a trace has written only the first."""
    with tf.init_scope():
        for variable in variables:
            if isinstance(variable, MirroredVariable):
                for other in variable.values[1:]:
                    other.assign(variable.values[0])


def _copies(captured: Any) -> list[Any]:
    """Returns the captured tensor for the replicas of this process: one for all, or one for each."""
    variable = _variable_of(captured)
    return [each.handle for each in variable.values] if isinstance(variable, DistributedVariable) else [captured]


def _given(captured: Any) -> Given:
    variable = _variable_of(captured)
    if isinstance(variable, ShardedWeight):
        placement, of_model = variable.placements
        return Given(placement, of_model, dims=tuple(variable.shape))
    if isinstance(variable, PartVariable):
        return Given(OWN, OWN)
    is_partial = isinstance(variable, DistributedVariable) and is_sum(variable)
    is_handle = captured.dtype == tf.resource
    placement = PARTIAL if is_partial else REPLICATE
    return Given(placement, placement, is_shared=is_handle and len(_copies(captured)) == 1, is_whole=not is_handle)
