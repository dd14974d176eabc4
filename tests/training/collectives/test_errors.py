"""Bad input: each error says which replica passed what."""

from __future__ import annotations

import re

import pytest
import tensorflow as tf
from raising import refuses

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError, DesyncError

pytestmark = pytest.mark.lane("collectives")


def differing(*told):
    """Expects that replicas call different collectives, and that the error names them."""
    return refuses(DesyncError, "TFREP-E019", told=told)


@pytest.fixture(params=["eager", "function"])
def run(request):
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])

    def run(*choices):
        choices = choices if len(choices) > 1 else choices * 2
        program = lambda: strategy.run(lambda: choices[tfrep.replica_id()]())  # noqa: E731
        return program() if request.param == "eager" else tf.function(program)()

    run.strategy = strategy
    return run


@pytest.mark.lane("quick")
def test_structures_differ(run):
    with differing(
        "Replica 0 called all_reduce({'a': float32[2]}, op='sum')", "Replica 1 called all_reduce({'b': float32[2]}, op='sum')"
    ):
        run(lambda: tfrep.all_sum({"a": tf.ones(2)}), lambda: tfrep.all_sum({"b": tf.ones(2)}))
    with differing("[float32[2]]", "[float32[2], float32[3]]"):
        run(lambda: tfrep.all_sum([tf.ones(2)]), lambda: tfrep.all_sum([tf.ones(2), tf.ones(3)]))


@pytest.mark.lane("quick")
def test_calls_differ(run):
    with differing("Replica 0 called all_reduce", "Replica 1 called all_gather"):
        run(lambda: tfrep.all_sum(tf.ones(2)), lambda: tfrep.all_gather(tf.ones(2)))
    with differing("op='sum'", "op='max'"):
        run(lambda: tfrep.all_reduce(tf.ones(2), "sum"), lambda: tfrep.all_reduce(tf.ones(2), "max"))
    with differing("float32[2]", " called all_reduce(int32[2]"):
        run(lambda: tfrep.all_sum(tf.ones(2)), lambda: tfrep.all_sum(tf.ones(2, tf.int32)))


def test_dimensions_differ(run):
    with differing("Replica 0 called all_reduce(float32[2]", "Replica 1 ", "float32[3]"):
        run(lambda: tfrep.all_sum(tf.ones(2)), lambda: tfrep.all_sum(tf.ones(3)))
    with differing("float32[2, 4]", "float32[2, 5]"):
        run(lambda: tfrep.all_gather(tf.ones([2, 4])), lambda: tfrep.all_gather(tf.ones([2, 5])))
    with differing("stack=True"):
        run(lambda: tfrep.all_gather(tf.ones(2), stack=True), lambda: tfrep.all_gather(tf.ones(3), stack=True))


UNEVEN = {
    "sum": lambda x: tfrep.all_sum({"a": tf.ones([]), "b": x}),
    "max": lambda x: tfrep.all_reduce(x, "max"),
    "broadcast": lambda x: tfrep.broadcast(x, 1),
    "scatter": tfrep.reduce_scatter,
    "stack": lambda x: tfrep.all_gather(x, stack=True),
    "columns": lambda x: tfrep.all_gather(x[tf.newaxis], axis=0),
    "exchange": lambda x: tfrep.all_to_all(tf.stack([x, x])),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("mode", "name"), [*(("function", name) for name in UNEVEN), ("cond", "sum"), ("cond", "columns")])
def test_dimensions_that_only_the_run_tells_differ(mode, name):
    """As the last batch of an epoch: nothing is known of its rows while the step is built."""
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(7).batch(4))
    call = UNEVEN[name]

    def step(x):
        total = lambda: tf.add_n([tf.size(y) for y in tf.nest.flatten(call(x))])  # noqa: E731
        return tf.cond(tf.identity(True), total, lambda: 0) if mode == "cond" else total()

    program = tf.function(lambda iterator: strategy.run(step, (next(iterator),)), autograph=False)
    iterator = iter(batches)
    assert program(iterator).values[0] > 0
    told = "rank" if (mode, name) == ("cond", "columns") else "replica"
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"(?s)shapes.*{told} 0:\].*2.*{told} 1:\].*1\]"):
        program(iterator)


def _in_cond(fn):
    return tf.cond(tf.identity(True), fn, lambda: 0.0)


def _in_function(fn):
    return tf.function(fn, autograph=False)()


INNER = {
    "cond": _in_cond,
    "while": lambda fn: tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y + fn()), (0, 0.0))[1],
    "function": _in_function,
    "cond in function": lambda fn: _in_function(lambda: _in_cond(fn)),
    "function in cond": lambda fn: _in_cond(lambda: _in_function(fn)),
}


IN_REPLICAS = {
    "tfrep": lambda x, known: tfrep.all_sum(x),
    "broadcast": lambda x, known: tfrep.broadcast([x, x], 1)[1],
    "stock": lambda x, known: tf.distribute.get_replica_context().all_reduce("SUM", x),
    "known to one": lambda x, known: tfrep.all_sum(tf.ensure_shape(x, [3]) if known else x),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("inner", "name"), [*(("function", name) for name in IN_REPLICAS), ("cond", "stock"), ("while", "stock")])
def test_dimensions_that_only_the_run_tells_differ_in_functions(inner, name):
    """Replicas that build their own functions refuse what differs at once, and can go on."""
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])

    def step(*xs):
        replica = tfrep.replica_id()
        return INNER[inner](lambda: tf.reduce_sum(IN_REPLICAS[name](xs[replica], replica == 0)))

    signature = [tf.TensorSpec([None])] * 2
    program = tf.function(lambda *xs: strategy.run(step, xs), signature, autograph=False)
    expected = 12.0 if inner == "while" else 3.0 if name == "broadcast" else 6.0
    for other in (3, 2, 3, 4, 3):
        if other == 3:
            assert [float(value) for value in program(tf.ones(3), tf.ones(3)).values] == [expected] * 2
        else:
            words = "" if name == "known to one" else rf"different shapes.*replica 0:\].*3\].*replica 1:\].*{other}\]"
            with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s){words}"):
                program(tf.ones(3), tf.ones(other))


@pytest.mark.timeout(60)  # Between replicas that build their own branches and functions, what differs would wait for ever.
@pytest.mark.parametrize("inner", INNER)
def test_calls_in_branches_and_functions_differ(inner):
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])

    def run(*choices):
        call = lambda: tf.reduce_sum(choices[tfrep.replica_id()]())  # noqa: E731
        return tf.function(lambda: strategy.run(lambda: INNER[inner](call)), autograph=False)()

    same = lambda: tfrep.all_sum(tf.ones([2]))  # noqa: E731
    assert run(same, same).values[1] == (8.0 if inner == "while" else 4.0)
    with differing("Replica 0 called all_reduce(float32[2]", "Replica 1 ", "float32[3]"):
        run(same, lambda: tfrep.all_sum(tf.ones([3])))
    with differing("op='sum'", "op='max'"):
        run(same, lambda: tfrep.all_reduce(tf.ones([2]), "max"))
    if "function" not in inner:
        with pytest.raises(RuntimeError, match="different number"):
            run(same, lambda: tf.ones([2]))


@pytest.mark.parametrize(
    ("value", "op"), [("a", "sum"), (True, "sum"), (True, "mean"), (1j, "max"), (1j, "min"), ("a", "max"), (1.0, "median")]
)
def test_op_that_the_dtype_cannot_do(run, value, op):
    with refuses(told=["all_reduce on replica 0"], op=op):
        run(lambda: tfrep.all_reduce(tf.constant([value]), op))
    with refuses(op=op):
        tfrep.all_reduce(tf.constant([value]), op)


@pytest.mark.lane("quick")
def test_no_such_root_or_member(run):
    for root in (2, -1, True):
        with refuses(told=["broadcast on replica 0"], hint="use one of [0, 1]", root=root):
            run(lambda root=root: tfrep.broadcast(tf.ones(2), root))
    for members in ([0, 2], [], [1, 1], [-1], ["0"], [[0]], "01", 1, None):
        with refuses(replicas=...):
            run.strategy.new_group(members)
    group = run.strategy.new_group([1])
    with refuses(hint="use one of [1]", root=0):
        run(lambda: tfrep.broadcast(tf.ones(2), 0, group=group))
    other = tfrep.MirroredStrategy(["CPU:0", "CPU:1"]).new_group([1])
    with refuses(hint="make it with the strategy", group=other):
        run(lambda: tfrep.all_sum(tf.ones(2), group=other))
    with refuses(hint="strategy.new_group([0, 2])", group=[0]):
        run(lambda: tfrep.all_sum(tf.ones(2), group=[0]))


def test_shapes_that_do_not_do(run):
    with refuses(axis=1, shape=...):
        run(lambda: tfrep.all_gather(tf.ones(2), axis=1))
    with refuses(hint="stack=True to join scalars"):
        run(lambda: tfrep.all_gather(tf.ones([])))
    with refuses(told=["reduce_scatter"], hint="tf.reshape(x, [1])", shape=...):
        run(lambda: tfrep.reduce_scatter(tf.ones([])))
    with refuses(told=["all_to_all on replica 0", "2 replicas"], shape=...):
        run(lambda: tfrep.all_to_all(tf.ones(3)))
    with refuses(splits=[1, 1, 1], num_replicas=2):
        run(lambda: tfrep.all_to_all(tf.ones(3), [1, 1, 1]))
    for splits in ([1, 1], [4, -1]):
        with refuses(rows=3, splits=...):
            run(lambda splits=splits: tfrep.all_to_all(tf.ones(3), splits))
    with refuses(told=["all_reduce on replica 0"], hint="tf.convert_to_tensor", type="object"):
        run(lambda: tfrep.all_sum({"a": object()}))
    with pytest.raises(ConfigurationError, match="sparse and ragged"):
        run(lambda: tfrep.all_sum(tf.ragged.constant([[1], [2, 3]])))
    with refuses(items=[]):
        run(lambda: tfrep.map_reduce(tf.identity, []))
    with refuses(told=["items"], shape=...):
        run(lambda: tfrep.map_gather(tf.identity, tf.ones([])))
    with refuses(item_0=..., item_1=...):
        run(lambda: tfrep.map_gather(lambda i: tf.ones(2, tf.int32 if i else tf.float32), [0, 1]))


def test_objects_are_for_outside(run):
    with pytest.raises(ConfigurationError, match="inside a step"):
        run(lambda: tfrep.broadcast_object(1))
    assert tfrep.all_gather_object([1]) == [[1]]
    with run.strategy.scope():
        assert tfrep.broadcast_object({"a": 1}) == {"a": 1}
        with refuses(root=3):
            tfrep.broadcast_object(1, 3)


def test_one_replica_outside_a_step():
    x = tf.constant([1.0, 2.0])
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    for scope in (strategy.scope(), tf.name_scope("none")):
        with scope:
            assert tfrep.num_replicas() == 1
            assert tfrep.replica_id() == 0
            tfrep.barrier()
            for y in (tfrep.all_mean(x), tfrep.all_gather(x), tfrep.broadcast(x), tfrep.reduce_scatter(x),
                      tfrep.all_to_all(x), tfrep.map_gather(tf.identity, [x])[0], tfrep.map_reduce(tf.identity, [x])):  # fmt: skip
                assert y.numpy().tolist() == [1.0, 2.0]
            assert tfrep.all_gather(x, stack=True).shape == [1, 2]


def test_an_inner_function_in_an_eager_step():
    """It would wait for ever: the replicas run one after the other."""
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    inner = tf.function(lambda: tfrep.all_sum(tf.ones(2)), autograph=False)
    with refuses(hint="call strategy.run inside a tf.function"):
        strategy.run(lambda: inner())
    result = tf.function(lambda: strategy.run(lambda: inner()), autograph=False)()
    assert result.values[1].numpy().tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("communicator", "debug"), [("tf", "1"), ("tf", "0"), ("horovod", "0")])
def test_structures_differ_between_processes(communicator, debug, monkeypatch):
    monkeypatch.setenv("TFREP_DEBUG", debug)

    def differ():
        strategy = tf.distribute.get_strategy()
        messages = []
        for run in (strategy.run, tf.function(strategy.run, autograph=False)):
            assert run(lambda: tfrep.all_sum({"a": tf.ones([])})["a"]) == 2.0
            try:
                run(lambda: tfrep.all_sum({"ab"[strategy.rank]: tf.ones([])}))
            except tf.errors.InvalidArgumentError as error:
                messages.append(str(error))
        return messages

    for messages in tfrep.launch(differ, communicator=communicator, timeout=100):
        assert len(messages) == 2
        for message in messages:
            assert re.search(r"(?s)different nests.*replica 0:.*{.*a.*: _}.*replica 1:.*{.*b.*: _}", message)
