"""What programs do with variables beside training: they calculate with them, copy, average, save and restore them, draw numbers.

The subjects are those of TensorFlow's own tests of distributed variables, values and random generators.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checks import Checks, both_ways, first, local, of_each, own_replicas, shared_folder
from lanes import in_lane

import tfrep_strategy as tfrep

check = Checks()
_S, _A = tf.VariableSynchronization, tf.VariableAggregation
_KINDS = [
    *itertools.product((_S.ON_WRITE, _S.ON_READ), (_A.SUM, _A.MEAN, _A.ONLY_FIRST_REPLICA)),
    (_S.ON_WRITE, _A.NONE),
]
_COUNT = (_S.ON_READ, _A.SUM)  # The first replica alone has what was there before.


def make(strategy: Any, kind: Any, value: Any) -> tf.Variable:
    with strategy.scope():
        return tf.Variable(value, synchronization=kind[0], aggregation=kind[1])


def gathered(strategy: Any, call: Any) -> np.ndarray:
    """What each replica of all processes gets."""
    return strategy.gather(strategy.run(lambda: call()[tf.newaxis]), 0).numpy()


@check
def arithmetic(strategy: Any) -> None:
    wanted = [8.0, 6.0, 3.5, 3.0, 49.0, 128.0, -7.0, 1.0, 4.0, 6.0, 1.0]
    for kind in _KINDS:
        scalar, vector = make(strategy, kind, 7.0), make(strategy, kind, [1.0, 2.0, 4.0])
        assert isinstance(scalar, tf.Variable)
        assert tf.is_tensor(scalar)

        def calculate(x: Any = scalar, y: Any = vector) -> tf.Tensor:
            results = [x + 1.0, 13.0 - x, x / 2, x // 2.0, x**2.0, 2.0**x, -x, tf.cast(x >= 7, tf.float32)]
            return tf.stack([*results, y[-1], tf.reduce_sum(y[1:]), tf.gather(y, 0)])

        if kind != _COUNT:
            with strategy.scope():
                outside = both_ways(calculate)
            for found in (*outside, calculate()):
                np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=str(kind))
            for found in both_ways(lambda calculate=calculate: strategy.run(calculate)):
                np.testing.assert_allclose(local(strategy, found), [wanted] * len(local(strategy, found)), err_msg=str(kind))


@check
def assignments(strategy: Any) -> None:
    """They are called in every way that a plain variable allows, and their results are used."""
    one = tf.constant(1.0)
    for kind in _KINDS:
        variable = make(strategy, kind, 0.0)

        def assign(v: Any = variable) -> tf.Tensor:
            for method in (v.assign, v.assign_add, v.assign_sub):
                method(one, True, "name", False)
                method(one, use_locking=True, name="name", read_value=False)
            v.assign(value=one)
            return v.assign_add(one) * 2.0

        if kind != (_S.ON_WRITE, _A.SUM):  # Of which one value has no sum over several replicas.
            for found in both_ways(lambda assign=assign: strategy.run(assign)):
                assert set(local(strategy, found)) == {4.0}, kind
        if kind[1] != _A.SUM:
            with strategy.scope():
                assign()
            strategy.run(lambda v=variable: v.assign(v * 3.0))
            assert set(local(strategy, variable)) == {6.0}, kind


@check
def copies(strategy: Any) -> None:
    for kind in _KINDS:
        variable = make(strategy, kind, 1.5)
        before = local(strategy, variable)
        with strategy.scope():
            inside = copy.deepcopy(variable)
        for other in (inside, copy.deepcopy(variable)):
            assert type(other) is type(variable)
            assert (other.synchronization, other.aggregation) == kind
            assert strategy.extended.variable_created_in_scope(other)
            assert local(strategy, other) == before
            if kind != (_S.ON_WRITE, _A.SUM):
                strategy.run(lambda v=other: v.assign(tf.constant(4.0)))
                assert set(local(strategy, other)) == {4.0}
            assert local(strategy, variable) == before


@check
def variables_made_and_handed_on(strategy: Any) -> None:
    made: dict[str, Any] = {}

    def eagerly() -> tf.Tensor:
        if not made:
            made["random"] = tf.Variable(tf.random.normal([2]))
        return tf.identity(made["random"])

    strategy.run(eagerly)
    values = gathered(strategy, eagerly)
    np.testing.assert_array_equal(values, [values[0]] * len(values))

    @tf.function(autograph=False)
    def lifted() -> tf.Tensor:
        with tf.init_scope():
            if "sum" not in made:
                made["first"] = tf.Variable(1.0, aggregation=_A.MEAN)
                made["sum"] = tf.Variable(made["first"].read_value(), aggregation=_A.MEAN)
        return made["sum"].assign_add(2.0)

    assert set(local(strategy, strategy.run(lifted))) == {3.0}

    variable = make(strategy, (_S.ON_WRITE, _A.MEAN), 2.0)
    increase = tf.function(lambda v, x: v.assign_add(x), autograph=False)
    for run in (strategy.run, tf.function(strategy.run, autograph=False)):
        run(increase, args=(variable, tf.constant(1.0)))
    assert set(local(strategy, variable)) == {4.0}

    def initial(next_creator: Any, **kwargs: Any) -> Any:
        return next_creator(**{**kwargs, "initial_value": 9.0})

    with strategy.scope(), tf.variable_creator_scope(initial):
        assert set(local(strategy, tf.Variable(1.0))) == {9.0}
    with strategy.scope():
        old = strategy.run(lambda: tf.compat.v1.get_variable("old", [1], use_resource=True))
        assert strategy.extended.variable_created_in_scope(old)
        for wrong in ({"synchronization": _S.NONE}, {"synchronization": "always"}, {"aggregation": "median"}):
            with pytest.raises(ValueError, match="(?i)synchronization|aggregation"):
                tf.Variable(1.0, **wrong)
        with pytest.raises(ValueError, match="MEAN"):
            tf.Variable(1, aggregation=_A.MEAN)


@check
def updates_of_each_copy(strategy: Any) -> None:
    variable = make(strategy, (_S.ON_WRITE, _A.NONE), 0.0)
    ranks = [float(r) for r in own_replicas(strategy)]
    strategy.extended.update(variable, lambda v, x: v.assign(x), args=(of_each(strategy, lambda r: tf.constant(float(r))),))
    assert local(strategy, variable) == ranks
    strategy.extended.update(variable, lambda v: v.assign_add(v.value() + v.read_value()))
    assert local(strategy, variable) == [3 * r for r in ranks]


@check
def moving_averages(strategy: Any) -> None:
    """`tf.train.ExponentialMovingAverage` in replicas and outside; 0.8 of 1 and 0.2 of a half, as on one device."""
    for in_replica, traced in itertools.product((True, False), (True, False)):
        variable, average = make(strategy, (_S.ON_WRITE, _A.MEAN), [1.0]), tf.train.ExponentialMovingAverage(0.8)

        def step(variable: Any = variable, average: Any = average) -> Any:
            average.apply([variable])
            variable.assign_sub([0.5])
            average.apply([variable])
            return average.average(variable)

        call = (lambda step=step: strategy.run(step)) if in_replica else step
        with strategy.scope():
            result = (tf.function(call, autograph=False) if traced else call)()
        np.testing.assert_allclose(first(strategy, result), [0.9], rtol=1e-6)


@check
def generators(strategy: Any) -> None:
    """Replicas draw other numbers than each other; outside, all copies move on alike; a checkpoint holds the state."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        made = [tf.random.Generator.from_seed(1), tf.random.Generator.from_non_deterministic_state()]
        other = tf.random.Generator.from_seed(2)
    draw = tf.function(lambda generator: generator.uniform_full_int([4], dtype=tf.int32), autograph=False)
    for generator in made:
        calls = (lambda g=generator: g.uniform_full_int([4], dtype=tf.int32), lambda g=generator: draw(g))
        drawn = [gathered(strategy, call) for call in calls for _ in range(2)]
        assert len(np.unique(drawn)) == 4 * n * 4
    states = [local(strategy, other.state)]
    with strategy.scope():
        other.normal([3])
        other.skip(4)
    states.append(local(strategy, other.state))
    assert states[0] != states[1]
    assert all(copy == of_all[0] for of_all in states for copy in of_all)
    folder = shared_folder(strategy)
    for i in range(2):
        path = tf.train.Checkpoint(g=made[0]).write(str(folder / f"generator{i}"))
        strategy.extended.barrier()
        tf.train.Checkpoint(g=other).read(path)
        np.testing.assert_array_equal(*(gathered(strategy, lambda g=g: g.normal([2])) for g in (made[0], other)))


@check
def checkpoints(strategy: Any) -> None:
    """Written at once and in the background, restored into distributed variables and into plain ones."""
    folder = shared_folder(strategy)
    for in_background in (False, True):
        variables = {f"{s.name}_{a.name}": make(strategy, (s, a), [1.0, 2.0]) for s, a in _KINDS if (s, a) != _COUNT}
        checkpoint = tf.train.Checkpoint(**variables)
        options = tf.train.CheckpointOptions(enable_async=in_background)
        for turn in (1.0, 2.0):
            for variable in variables.values():
                variable.assign([turn, 3.0])
            path = checkpoint.save(str(folder / f"{in_background}"), options=options)
            if in_background:
                checkpoint.sync()
            strategy.extended.barrier()
            for variable in variables.values():
                variable.assign([7.0, 8.0])
            checkpoint.restore(path).assert_consumed()
            plain = {name: tf.Variable([0.0, 0.0]) for name in variables}
            tf.train.Checkpoint(**plain).restore(path).assert_existing_objects_matched()
            for name, variable in variables.items():
                np.testing.assert_allclose(local(strategy, variable)[-1], [turn, 3.0], err_msg=name)
                np.testing.assert_allclose(plain[name], [turn, 3.0], err_msg=name)
            strategy.extended.barrier()

    with strategy.scope():
        count = tf.Variable(0, dtype=tf.int64, trainable=False, synchronization=_S.ON_READ, aggregation=_A.SUM)
    count.assign(7)
    path = tf.train.Checkpoint(count=count).save(str(folder / "count"))
    strategy.extended.barrier()
    count.assign(0)
    tf.train.Checkpoint(count=count).restore(path).assert_consumed()
    assert int(count) == 7

    variable, step = make(strategy, (_S.ON_WRITE, _A.MEAN), 1.0), tf.Variable(0)
    checkpoint = tf.train.Checkpoint(variable=variable, step=step)
    manager = tf.train.CheckpointManager(checkpoint, str(folder / "kept"), max_to_keep=2, step_counter=step)
    paths = []
    for value in range(3):
        variable.assign(float(value))
        step.assign_add(1)
        paths.append(manager.save())
    strategy.extended.barrier()
    variable.assign(9.0)
    assert manager.restore_or_initialize() == paths[-1] == tf.train.latest_checkpoint(str(folder / "kept"))
    assert local(strategy, variable)[0] == 2.0
    assert manager.checkpoints == paths[1:]
    assert len(list((folder / "kept").glob("*.index"))) == 2
    strategy.extended.barrier()


@check
def what_run_takes_and_gives(strategy: Any) -> None:
    square = tf.function(lambda x: strategy.run(tf.square, args=(x,)), autograph=False)
    assert set(local(strategy, square(2.0))) == {4.0}
    assert local(strategy, square(np.array([2.0, 3.0])))[0] == [4.0, 9.0]
    sparse = of_each(strategy, lambda r: tf.sparse.from_dense([[0, 1], [2, 0]]))
    dense = strategy.run(lambda x: tf.sparse.to_dense(x) * 2, args=(sparse,))
    assert local(strategy, dense)[0] == [[0, 2], [4, 0]]
    ragged = strategy.run(lambda x: x * 2, args=(of_each(strategy, lambda r: tf.ragged.constant([[1], [2, 3]])),))
    assert strategy.experimental_local_results(ragged)[0].to_list() == [[2], [4, 6]]
    arrays = strategy.experimental_local_results(of_each(strategy, lambda r: np.array([1.0, 2.0])))
    assert np.asarray(arrays[0]).tolist() == [1.0, 2.0]

    def fail() -> None:
        raise KeyError("of the user")

    def stop(x: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.assert_less(x, 1.0)]):
            return tf.identity(x)

    for run in (strategy.run, tf.function(strategy.run, autograph=False)):
        with pytest.raises(KeyError, match="of the user"):
            run(fail)
        with pytest.raises(tf.errors.InvalidArgumentError):
            run(stop, args=(tf.constant(2.0),))
    traces: list[int] = []
    counted = tf.function(lambda: traces.append(1) or tf.zeros([]), autograph=False)
    strategy.run(counted)
    count = len(traces)
    strategy.run(counted)
    assert len(traces) == count

    variable = make(strategy, (_S.ON_WRITE, _A.MEAN), 3.0)

    def gradient(model: Any) -> Any:
        with tf.GradientTape() as tape:
            y = model(variable)
        return tape.gradient(y, variable)

    for model in (lambda x: x * x, tf.function(lambda x: x * x, autograph=False)):
        step = tf.function(lambda model=model: strategy.run(lambda: gradient(model)), autograph=False)
        assert set(local(strategy, step())) == {6.0}
    tf.config.run_functions_eagerly(True)
    try:
        assert set(local(strategy, step())) == {6.0}
    finally:
        tf.config.run_functions_eagerly(False)


@check
def strategies_set_for_the_whole_program(strategy: Any) -> None:
    tf.distribute.experimental_set_strategy(strategy)
    try:
        assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.in_cross_replica_context()
        variable = tf.Variable(1.0)
        assert strategy.extended.variable_created_in_scope(variable)
        assert set(local(strategy, strategy.run(lambda: variable + 1.0))) == {2.0}
    finally:
        tf.distribute.experimental_set_strategy(None)
    assert not tf.distribute.has_strategy()
    scope = strategy.scope()
    with scope:
        with pytest.raises(RuntimeError, match="scope"):
            tf.distribute.experimental_set_strategy(strategy)
        with scope:
            assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.get_strategy() is strategy
    assert not tf.distribute.has_strategy()


def test_replicas_of_one_process() -> None:
    failed = check.failures(tfrep.MirroredStrategy(["CPU:0", "CPU:1"]))
    assert not failed, failed


@pytest.mark.parametrize("communicator", ["horovod", *in_lane("transports", "tf")])
def test_processes(worker_pool: Any, communicator: str) -> None:
    failed = check.failures_in(worker_pool(communicator, 2))
    assert not failed, failed
