"""What a transport inherits: every communicator's own way gives, bit by bit, what the defaults of the contract give."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from lanes import in_lane

import tfrep_strategy as tfrep
from tfrep_strategy.communicators import Communicator, SingleCommunicator
from tfrep_strategy.communicators.local import ContextCommunicator
from tfrep_strategy.communicators.ring import RingCommunicator

pytestmark = pytest.mark.lane("quick")

DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
          "float64", "complex64", "complex128"]  # fmt: skip


def special(name: str, rank: int) -> np.ndarray:
    """Values that a sum, or a cast, may not keep: -0.0, no number, the smallest and the largest; of shape [3, 2]."""
    dtype = tf.as_dtype(name).as_numpy_dtype
    if name == "bool":
        return np.array([[True, False], [False, True], [rank == 0, rank == 1]])
    if name.startswith(("int", "uint")):
        info = np.iinfo(dtype)
        return np.array([[info.min, info.max], [info.max - 1, 0], [rank, 1]], dtype)
    real = tf.as_dtype({"complex64": "float32", "complex128": "float64"}.get(name, name))
    smallest = {tf.float16: 2.0**-14, tf.float64: 2.0**-1022}.get(real, 2.0**-126)  # Half of it loses its leading bit.
    numbers = [[-0.0, np.nan], [np.inf, smallest], [smallest / 2, rank + 1.5]]
    parts = np.array(numbers, np.float64).astype(real.as_numpy_dtype)
    if not name.startswith("complex"):
        return parts
    together = parts.astype(dtype)
    together.imag = -parts[::-1]
    return together


def own_and_default(communicator: Communicator, dtypes: Sequence[str] = DTYPES) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
    """Calls every method that has a default, in the communicator's own way and in that of the contract."""
    rank, size = communicator.rank, communicator.size
    splits = tf.constant([1] * (size - 1) + [3 - (size - 1)])
    values = {dtype: tf.constant(special(dtype, rank), dtype) for dtype in dtypes}
    found = {}
    for root in range(size):
        own = communicator.broadcast(list(values.values()), root)
        default = Communicator.broadcast(communicator, list(values.values()), root)
        for dtype, *pair in zip(dtypes, own, default, strict=True):
            found[f"broadcast {root} {dtype}"] = tuple(pair)
    for dtype in dtypes:
        own, default = communicator.all_to_all(values[dtype], splits), Communicator.all_to_all(communicator, values[dtype], splits)
        found[f"all_to_all {dtype}"] = own[0], default[0]
        found[f"received {dtype}"] = own[1], default[1]
    for dtype in ("uint64", "float64"):
        for op, rows in [("sum", 3), ("max", 3), ("sum", 2 * size), ("mean", 2 * size), ("product", 2 * size)]:
            value = tf.cast(tf.reshape(tf.range(2 * rows), [rows, 2]) + rank, dtype)
            pair = communicator.reduce_scatter(value, op), Communicator.reduce_scatter(communicator, value, op)
            found[f"reduce_scatter {op} {rows} {dtype}"] = pair
    for dtype in dtypes:
        own, default = communicator.all_gather_equal(values[dtype]), communicator.all_gather(values[dtype])
        found[f"all_gather_equal {dtype}"] = own, default
    communicator.barrier()
    return found


def check(found: dict[str, tuple[Any, Any]], size: int, dtypes: Sequence[str] = DTYPES) -> None:
    for name, (own, default) in found.items():
        assert (own.dtype, own.shape) == (default.dtype, default.shape), name
        assert own.numpy().tobytes() == default.numpy().tobytes(), f"{name}: {own} and {default}"
    for root in range(size):
        for dtype in dtypes:
            sent = special(dtype, root)
            assert found[f"broadcast {root} {dtype}"][0].numpy().tobytes() == sent.tobytes(), f"broadcast {root} {dtype}"


def shapes_of_nothing(communicator: Communicator) -> list[tf.Tensor]:
    """Moves tensors of 2 rows without columns, and of no rows."""
    found = []
    for shape in [2, 0], [0, 2]:
        nothing = tf.zeros(shape)
        rows, _ = communicator.all_to_all(nothing, [shape[0] // 2] * 2)
        found += [rows, communicator.all_gather(nothing), communicator.all_gather_equal(nothing)]
        found += [communicator.reduce_scatter(nothing)]
    return [tf.shape(tensor) for tensor in found]


def in_processes(strategy: Any) -> None:
    communicator = strategy.communicator
    for compiled in (False, True):
        check(tf.function(own_and_default)(communicator) if compiled else own_and_default(communicator), communicator.size)
        shapes = tf.function(shapes_of_nothing)(communicator) if compiled else shapes_of_nothing(communicator)
        assert np.array(shapes).tolist() == [[2, 0], [4, 0], [4, 0], [1, 0], *[[0, 2]] * 4]


def through_folder(strategy: Any, examples: str, folder: str) -> None:
    sys.path.insert(0, examples)
    from own_transport import FolderCommunicator

    own = FolderCommunicator(strategy.communicator, Path(folder))
    check(own_and_default(own), own.size)
    group = own.subgroup([0])
    assert (group is None) == (own.rank == 1)
    strategy.communicator.barrier()


@pytest.mark.lane("wires")
def test_tensorflows_ring(worker_pool: Any) -> None:
    worker_pool("tf", 2).run(in_processes)


@pytest.mark.lane("wires")
def test_horovod(worker_pool: Any) -> None:
    worker_pool("horovod", 2).run(in_processes)


@pytest.mark.lane("short")
def test_shared_memory(worker_pool: Any) -> None:
    worker_pool("shared_memory", 2).run(in_processes)


@pytest.mark.lane("wires")
def test_a_transport_of_ones_own(worker_pool: Any, tmp_path: Path) -> None:
    worker_pool("tf", 2).run(through_folder, str(Path(__file__).parents[2] / "examples"), str(tmp_path))


def test_a_single_process() -> None:
    check(own_and_default(SingleCommunicator()), 1)


@pytest.mark.parametrize("where", ["eager", *in_lane("short", "together", "apart")])
def test_replicas_of_one_process(where: str) -> None:
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    dtypes = ["uint8", "complex128"] if where == "apart" else DTYPES  # To build collectives in branches takes long.

    def step() -> Any:
        communicator = strategy.extended.communicator_of(tfrep.replica_id())
        if where != "apart":
            return own_and_default(communicator)
        both = lambda: own_and_default(communicator, dtypes)  # noqa: E731
        return tf.cond(tf.constant(True), both, both)

    def run() -> Any:
        return strategy.run(step)

    found = run() if where == "eager" else tf.function(run)()
    for replica in range(2):
        check(tf.nest.map_structure(lambda v, r=replica: strategy.experimental_local_results(v)[r], found), 2, dtypes)


def test_a_strategy_of_tensorflow(stock_mirrored: Any) -> None:
    def step() -> Any:
        communicator = ContextCommunicator(tf.distribute.get_replica_context())
        return {dtype: communicator.broadcast([of_replica(dtype)], 1)[0] for dtype in DTYPES}

    def of_replica(dtype: str) -> tf.Tensor:
        both = tf.stack([tf.constant(special(dtype, rank), dtype) for rank in range(2)])
        return both[tf.distribute.get_replica_context().replica_id_in_sync_group]

    @tf.function
    def run() -> Any:
        return stock_mirrored.run(step)

    for dtype, received in run().items():
        for value in stock_mirrored.experimental_local_results(received):
            assert value.numpy().tobytes() == special(dtype, 1).tobytes(), dtype


def test_nccl_gets_floats_as_floats() -> None:
    sent = {}
    for rank in range(2):
        graph = tf.Graph()
        with graph.as_default():
            ring = RingCommunicator(rank, 2, "CPU:0", 2**30 + 900, nccl=True)
            ring.broadcast([tf.constant([1.5, -0.0]), tf.constant([2], tf.uint8)])
        sums = [operation for operation in graph.get_operations() if operation.type == "CollectiveReduceV2"]
        with tf.compat.v1.Session(graph=graph) as session:
            sent[rank] = session.run([operation.inputs[0] for operation in sums])
    assert [array.dtype.name for array in sent[0]] == ["float32", "int32"]
    np.testing.assert_array_equal(np.signbit(sent[1][0]), [True, True])  # x + -0.0 is x, whatever x is.
    np.testing.assert_array_equal(sent[0][0] + sent[1][0], np.array([1.5, -0.0], np.float32))


def test_nccl_scatters_sums() -> None:
    with tf.Graph().as_default() as graph:
        ring = RingCommunicator(0, 2, "CPU:0", 2**30 + 902, nccl=True)
        assert ring.reduce_scatter(tf.ones([4, 3])).shape == (2, 3)
    assert "CollectiveReduceScatterV2" in {operation.type for operation in graph.get_operations()}


def test_dtypes_are_told_apart() -> None:
    """Several dtypes travel as int32: members that bring different ones must not meet."""
    keys = []
    for dtype in (tf.float32, tf.int32):
        graph = tf.Graph()
        with graph.as_default():
            ring = RingCommunicator(0, 2, "CPU:0", 2**30 + 901)
            ring.broadcast([tf.constant([1, 2], dtype)])
            (operation,) = (each for each in graph.get_operations() if each.type == "CollectiveReduceV2")
            keys.append(tf.get_static_value(operation.inputs[3]))
    assert None not in keys
    assert keys[0] != keys[1]


_FLOATS = [[np.nan, 1.0, -0.0, np.inf, -np.inf, -2.5, 6e-8], [1.0, np.nan, 0.0, 1.0, 2.0, -3.0, -6e-8]]


def _extremes(strategy: Any) -> dict[tuple[str, str, bool], np.ndarray]:
    found = {}
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        own = tf.cast(tf.constant(_FLOATS[strategy.rank], tf.float64), dtype)
        for op in ("min", "max"):
            for eager in (True, False):
                reduce = lambda value=own, op=op: strategy.communicator.all_reduce([value], op)[0]  # noqa: E731
                values = reduce() if eager else tf.function(reduce)()
                found[dtype, op, eager] = tf.cast(values, tf.float64).numpy()
    return found


@pytest.mark.lane("short")
@pytest.mark.parametrize("communicator", ["tf", "horovod", "shared_memory"])
def test_the_largest_of_what_is_no_number(worker_pool: Any, communicator: str) -> None:
    """As on one device, a result is no number if one of the values is none."""
    for found in worker_pool(communicator, 2).run(_extremes):
        for (dtype, op, _), values in found.items():
            of_ranks = [tf.cast(tf.cast(tf.constant(own, tf.float64), dtype), tf.float64).numpy() for own in _FLOATS]
            np.testing.assert_array_equal(values, {"min": np.minimum, "max": np.maximum}[op](*of_ranks), f"{dtype} {op}")
