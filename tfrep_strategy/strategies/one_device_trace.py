"""One device's step as it was traced, and its run on the replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy._tensorflow import DistributedVariable, MirroredVariable, trace, value_container
from tfrep_strategy.keras_integration.protocol import Whole
from tfrep_strategy.limits import Verification, verification
from tfrep_strategy.partitioner.fingerprint import line_of
from tfrep_strategy.partitioner.placements import OWN, PARTIAL, REPLICATE, Own
from tfrep_strategy.partitioner.step import Given, PartitionedStep
from tfrep_strategy.partitioner.values import OwnRows
from tfrep_strategy.strategies.one_replica import one_replica
from tfrep_strategy.strategies.part_variables import PartVariable
from tfrep_strategy.strategies.variables import is_sum
from tfrep_strategy.verification.watch import Variable, Watch


class Results(NamedTuple):
    """What a step returns: its tensors, and the structure that they are in."""

    tensors: list[tf.Tensor]
    structure: Any

    def whole_results(self) -> Whole:
        """Returns the structure with these tensors."""
        tensors, flat = iter(self.tensors), tf.nest.flatten(self.structure, expand_composites=True)
        results = [next(tensors) if tf.is_tensor(each) else each for each in flat]
        return Whole(tf.nest.pack_sequence_as(self.structure, results, expand_composites=True))


class OneDeviceTrace:
    """A step that was traced for batches of one kind.

    Args:
        strategy: The strategy whose replicas run it.
        fn: The step.
        batch: The specification of a batch.
        of_batch: How replicas get each tensor of it.
        keeps_rows: See `PartitionedSteps`.

    Attributes:
        is_for_replicas: Whether the step calls `strategy.run`.
    """

    def __init__(
        self, strategy: Any, fn: Callable[[Any], Any], batch: Any, of_batch: Sequence[Given], keeps_rows: bool = False
    ) -> None:
        self._strategy = strategy
        made: list[Any] = [None]
        while made:  # As `tf.function` does: what made variables is traced once more, now that they are there.
            with one_replica(strategy) as made:
                graph = trace("step", fn, [batch], {})
                self.is_for_replicas = strategy.extended.is_asked_to_run
        strategy.extended.synchronize_new_variables()
        self._results = graph.structured_outputs
        self._captured = [outer for outer, _ in graph.captures]
        _copy_from_first(map(_variable_of, self._captured))
        self._num_batch = len(of_batch)
        given = [*of_batch, *map(_given, self._captured)]
        asked = verification()
        local, replicas = strategy.extended.num_local_replicas, strategy.num_replicas_in_sync
        self.step = PartitionedStep(graph, given, local, replicas, keeps_rows, is_observed=asked is not None)
        self._watch = None if asked is None else self._watched(asked)
        self.without_rule = self.step.without_rule

    def run(self, rows: Sequence[OwnRows], batches: Sequence[Sequence[tf.Tensor]]) -> Results:
        """Runs it.

        Args:
            rows: Which rows each replica of this process has.
            batches: What of the batch each of them gets.
        """
        inputs = [[*batch, *self._captured_by(i)] for i, batch in enumerate(batches)]
        transport = self._strategy.extended.transport
        before = self._watch.values(inputs, transport.devices) if self._watch else []
        every, results = self.step.run(rows, inputs, transport), len(self.step.program.results)
        if self._watch:
            self._watch.compare(before, [own[results:] for own in every], self._watch.values(inputs, transport.devices))
        return Results(every[0][:results], self._results)

    def _watched(self, asked: Verification) -> Watch:
        """Returns what compares the first runs with one device."""
        variables, resources = [], {}
        for place, captured in enumerate(self._captured, self._num_batch):
            variable, given = _variable_of(captured), _given(captured)
            if captured.dtype != tf.resource or isinstance(given.placement, Own):
                continue
            if not isinstance(variable, (tf.Variable, DistributedVariable)):  # A table, say.
                resources[place] = captured
            else:
                variables.append(Variable(place, variable.name, variable.dtype, given.placement))
        extended = self._strategy.extended
        replicas = self._strategy.num_replicas_in_sync
        return Watch(asked, self.step, variables, resources, extended.first_local_replica, replicas)

    def describe(self) -> list[str]:
        """Says how it is partitioned, a line for each finding."""
        whole = [f"{type_} ({line_of(operation)})" for type_, operation in self.without_rule.items()]
        told = [f"Every replica computes for all rows, for want of a rule: {', '.join(whole)}."] if whole else []
        return self.step.describe() + told

    @functools.cached_property
    def run_without_batch(self) -> Any:
        """A function that does what needs nothing of a batch."""
        return tf.function(self._run_without_batch, autograph=False).get_concrete_function()

    def _run_without_batch(self) -> None:
        extended = self._strategy.extended
        numbers = range(extended.first_local_replica, extended.first_local_replica + extended.num_local_replicas)
        inputs = [[*[None] * self._num_batch, *self._captured_by(i)] for i in range(len(numbers))]
        self.step.run_without_batch(list(map(tf.constant, numbers)), inputs, extended.transport)

    def _captured_by(self, replica: int) -> list[Any]:
        every = map(_copies, self._captured)
        return [copies[replica] if len(copies) > 1 else copies[0] for copies in every]


def _variable_of(captured: Any) -> Any:
    """Returns the variable that a handle belongs to, or the container of its copies; None if it is no such handle."""
    variable = getattr(captured, "_parent_trackable", lambda: None)()
    return None if variable is None else value_container(variable)


def _copy_from_first(variables: Iterable[Any]) -> None:
    """Gives all copies of variables what the first has: what eager code has written while a step was traced went to it alone."""
    with tf.init_scope():
        for variable in variables:
            if isinstance(variable, MirroredVariable):
                for copy in variable.values[1:]:
                    copy.assign(variable.values[0])


def _copies(captured: Any) -> list[Any]:
    """Returns what the replicas of this process have of what a step captures: one thing for all, or one for each."""
    variable = _variable_of(captured)
    return [copy.handle for copy in variable.values] if isinstance(variable, DistributedVariable) else [captured]


def _given(captured: Any) -> Given:
    variable = _variable_of(captured)
    if isinstance(variable, PartVariable):
        return Given(OWN)
    is_partial = isinstance(variable, DistributedVariable) and is_sum(variable)
    is_handle = captured.dtype == tf.resource
    placement = PARTIAL if is_partial else REPLICATE
    return Given(placement, is_shared=is_handle and len(_copies(captured)) == 1, is_whole=not is_handle)
