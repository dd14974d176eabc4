"""Variables do what those of TensorFlow's own strategies do: assignments, sparse updates, reads, moving averages."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep

_SYNCHRONIZATIONS = ("ON_WRITE", "ON_READ")
_AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
_SPARSE = ("scatter_add", "scatter_sub", "scatter_max", "scatter_min", "scatter_mul", "scatter_div", "scatter_update")
_METHODS = ("assign", "assign_add", "assign_sub", *_SPARSE)
# Ours leave a sum that is assigned, and its initial value, to the first replica: halves of a count would be lost.
_SPREAD_OTHERWISE = ("ON_READ", "SUM")


def make_variable(strategy: Any, synchronization: str, aggregation: str, value: Any = (1.0, 2.0, 8.0)) -> Any:
    with strategy.scope():
        return tf.Variable(
            value,
            synchronization=getattr(tf.VariableSynchronization, synchronization),
            aggregation=getattr(tf.VariableAggregation, aggregation),
        )


def update_all(strategy: Any, variables: dict[str, Any], in_replica: bool, traced: bool) -> dict[str, str]:
    """Updates a variable by each method, with values that differ between replicas, in number too; returns the errors."""
    errors: dict[str, str] = {}

    def update() -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group if in_replica else 1
        factor = tf.cast(replica, tf.float32) + 2
        indices = tf.range(1, 2 + replica)
        for method, variable in variables.items():
            sparse = tf.IndexedSlices(factor + tf.cast(indices, tf.float32), indices)
            try:
                getattr(variable, method)(sparse if method in _SPARSE else tf.constant([1.0, 4.0, 2.0]) * factor)
            except (NotImplementedError, ValueError) as error:
                errors[method] = type(error).__name__

    def call() -> None:
        if in_replica:
            strategy.run(update)
        else:
            update()

    (tf.function(call, autograph=False) if traced else call)()
    return errors


_KINDS = tuple(itertools.product(_SYNCHRONIZATIONS, _AGGREGATIONS))
_PLACES = tuple(itertools.product((True, False), (True, False)))  # In a replica or outside, traced or not.


def outcomes(strategy: Any, kinds: Any = _KINDS, places: Any = _PLACES) -> dict[tuple[Any, ...], Any]:
    """Gives, for each kind of variable, place and method, all copies afterwards or the name of the error."""
    results: dict[tuple[Any, ...], Any] = {}
    for kind, place in itertools.product(kinds, places):
        with strategy.scope():
            variables = {method: make_variable(strategy, *kind) for method in _METHODS}
        errors = update_all(strategy, variables, *place)
        for method, variable in variables.items():
            copies = [copy.numpy().tolist() for copy in strategy.experimental_local_results(variable)]
            results[(*kind, *place, method)] = errors.get(method, copies)
    return results


@pytest.fixture(scope="module")
def stock() -> dict[tuple[Any, ...], Any]:
    return outcomes(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))


@pytest.mark.lane("quick")
def test_updates_on_mirrored_replicas(stock: dict[tuple[Any, ...], Any]) -> None:
    found = outcomes(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))
    for case, expected in stock.items():
        if case[:2] != _SPREAD_OTHERWISE:
            assert found[case] == expected, case


def test_updates_on_processes(stock: dict[tuple[Any, ...], Any], worker_pool: Any) -> None:
    kinds = [("ON_WRITE", "MEAN"), ("ON_WRITE", "ONLY_FIRST_REPLICA"), ("ON_READ", "MEAN")]
    for rank, found in enumerate(worker_pool("tf", 2).run(outcomes, kinds, [(True, True), (False, False)])):
        for case, result in found.items():
            expected = stock[case]
            assert result == (expected if isinstance(expected, str) else [expected[rank]]), (rank, case)


def read_in_update(strategy: Any) -> list[Any]:
    """Averages variables of each kind as TensorFlow's own class does, and reads them inside an update."""
    results: list[Any] = []
    for aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        variable = make_variable(strategy, "ON_WRITE", aggregation)
        average = tf.train.ExponentialMovingAverage(0.5)
        with strategy.scope():
            average.apply([variable])
            variable.assign([3.0, 4.0, 10.0])
            average.apply([variable])
        results.append(average.average(variable).numpy().tolist())
        strategy.extended.update(variable, lambda copy, other: copy.assign(copy + 2 * other), args=(variable,))
        results.append(variable.numpy().tolist())
        twice = strategy.extended.update(variable, lambda copy, v=variable: copy * 2 + v, group=False)
        results += [copy.numpy().tolist() for copy in twice]
    return results


def test_variables_are_read_inside_an_update(worker_pool: Any) -> None:
    alone = read_in_update(tfrep.MirroredStrategy(["CPU:0"]))
    assert alone[:3] == [[2.0, 3.0, 9.0], [9.0, 12.0, 30.0], [27.0, 36.0, 90.0]]
    two = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    assert read_in_update(two) == read_in_update(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    assert worker_pool("tf", 2).run(read_in_update) == [alone, alone]


def reads(strategy: Any) -> list[Any]:
    """Reads what each replica has assigned for itself, outside, in replicas, and aggregated in replicas."""
    results: list[Any] = []
    for aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        variable = make_variable(strategy, "ON_READ", aggregation, 0.0)

        def assign(variable: Any = variable) -> tf.Tensor:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return variable.assign(tf.cast(replica, tf.float32) + 1)

        def add(variable: Any = variable) -> tf.Tensor:
            return variable + 10.0

        def add_to_aggregate(variable: Any = variable) -> tf.Tensor:
            with tf.__internal__.distribute.variable_sync_on_read_context():
                return tf.convert_to_tensor(variable) + 10.0

        strategy.run(tf.function(assign))
        with strategy.scope():
            results += [float(v) for v in (variable.read_value(), variable.value(), tf.identity(variable), variable + 1)]
        for fn in (add, add_to_aggregate):
            gathered = strategy.gather(strategy.run(tf.function(lambda fn=fn: fn()[tf.newaxis])), 0)
            results.append(gathered.numpy().tolist())
    return results


def test_reads(worker_pool: Any) -> None:
    expected: list[Any] = []
    for total in (3.0, 1.5, 1.0):
        expected += [total, total, total, total + 1, [11.0, 12.0], [total + 10.0] * 2]
    assert reads(tfrep.MirroredStrategy(["CPU:0", "CPU:1"])) == expected
    assert worker_pool("tf", 2).run(reads) == [expected, expected]


def made_in_a_step(strategy: Any) -> list[list[float]]:
    """Makes variables with random values inside a step."""
    made: list[Any] = []

    @tf.function
    def step() -> None:
        def make() -> None:
            if not made:
                for synchronization in (tf.VariableSynchronization.ON_WRITE, tf.VariableSynchronization.ON_READ):
                    made.append(tf.Variable(lambda: tf.random.normal([2]), synchronization=synchronization))

        strategy.run(make)

    step()
    return [np.ravel(c).tolist() for v in made for c in strategy.experimental_local_results(v)]


def test_variables_made_in_a_step_start_equal(worker_pool: Any) -> None:
    first, second, third, fourth = made_in_a_step(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))
    assert (first, third) == (second, fourth)
    ranks = worker_pool("tf", 2).run(made_in_a_step)
    assert ranks[0] == ranks[1]
