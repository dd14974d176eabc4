"""Where collectives run on GPUs, and over what: read from graphs and from made-up GPUs, since there are none here."""

from __future__ import annotations

import itertools
import warnings
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf
from gpu_kernels import has_gpu_kernel, without_gpu_kernel
from needs import needs_horovod

from tfrep_strategy.cluster import devices as gpus_module
from tfrep_strategy.cluster.devices import (
    identity_of_gpu,
    nccl_connects,
    physical_by_logical,
    shared_gpus,
    warn_if_shared,
    warn_of_sparse_gradients,
)
from tfrep_strategy.communicators.ring import RingCommunicator
from tfrep_strategy.core.step import Share

GPU = "/job:localhost/replica:0/task:0/device:GPU:0"
_keys = itertools.count(2**30 + 900_000)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_collectives_run_on_the_gpu_with_their_order(dtype: str) -> None:
    with tf.Graph().as_default() as graph, tf.device(GPU):
        communicator = RingCommunicator(0, 2, GPU, next(_keys), nccl=True)
        tensors = [tf.compat.v1.placeholder(dtype, shape) for shape in ([None, 3], [2], [])]
        for op in ("sum", "mean", "min", "max", "product"):
            communicator.all_reduce(tensors, op)
        communicator.all_to_all(tensors[0], tf.constant([1, 1]))
        communicator.broadcast(tensors)
        Share.equal(2).weighted(tensors[0])
    assert not without_gpu_kernel(graph)
    collectives = [operation for operation in graph.get_operations() if operation.type.startswith("Collective")]
    assert len(collectives) == 8
    for operation in collectives:
        order = operation.inputs[-1]
        # TensorFlow runs an operation where the resource lies that it uses.
        assert (operation.device, order.dtype, order.op.device) == (GPU, tf.resource, GPU)
        assert has_gpu_kernel(order.op.node_def)
        assert operation.get_attr("communication_hint") == b"nccl"
        assert operation.get_attr("T") != tf.int32
    # A shape is taken where the tensor is: anywhere else, all of the tensor would be copied there.
    assert {operation.device for operation in graph.get_operations() if operation.type == "Shape"} == {GPU}


@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int32", "int64", "uint32", "float16", "float32", "complex64"])
def test_no_collective_between_gpus_is_of_int32(dtype: str, nccl: bool) -> None:
    """TensorFlow refuses it while the collective runs, whichever transport it takes."""
    with tf.Graph().as_default() as graph, tf.device(GPU):
        communicator = RingCommunicator(0, 2, GPU, next(_keys), nccl=nccl)
        tensors = [tf.compat.v1.placeholder(dtype, shape) for shape in ([None, 3], [2], [])]
        sent = {"gather": communicator.all_gather(tensors[0]), "equal": communicator.all_gather_equal(tensors[1])}
        sent |= {"to all": communicator.all_to_all(tensors[0], tf.constant([1, 1]))[0], "root": communicator.broadcast(tensors)[0]}
        if dtype not in ("bool", "complex64"):
            sent |= {"sum": communicator.all_reduce(tensors)[0], "part": communicator.reduce_scatter(tensors[1])}
        communicator.of_equal_shapes("sum", tensors)
    assert {tensor.dtype.name for tensor in sent.values()} == {dtype}
    collectives = [operation for operation in graph.get_operations() if operation.type.startswith("Collective")]
    assert len(collectives) >= 6
    assert not [operation.name for operation in collectives if operation.get_attr("T") == tf.int32]


@pytest.mark.parametrize("nccl", [True, False])
def test_collectives_of_all_groups_are_in_one_order_over_nccl_and_few_at_once_over_the_ring(nccl: bool) -> None:
    whole = RingCommunicator(0, 2, "CPU:0", next(_keys), nccl=nccl)
    half = whole.subgroup([0])
    assert half is not None

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        return [group.all_reduce([x])[0] for group in (whole, half, whole, whole, whole, whole)]

    graph = step.get_concrete_function(tf.TensorSpec([2])).graph
    sums = [operation for operation in graph.get_operations() if operation.type == "CollectiveReduceV2"]
    for before, after in itertools.pairwise(sums):
        assert (before in after.control_inputs) == nccl
    if not nccl:  # Few at once: the fifth of a group waits for the first. TensorFlow has its constants wait instead.
        waits = [{wait for value in operation.inputs for wait in value.op.control_inputs} for operation in sums]
        assert waits == [set(), set(), set(), set(), set(), {sums[0]}]
    assert len({id(operation.inputs[-1]) for operation in sums}) == 1
    assert set(graph.control_outputs) >= set(sums), "Each runs, whoever uses its result."


def test_which_gpus_nccl_connects() -> None:
    one_process_per_gpu = ["a 07", "a 0f", "b 07"]
    assert nccl_connects(one_process_per_gpu)
    assert not shared_gpus(one_process_per_gpu)
    two_processes_on_one = ["a 07", "a 0f", "a 07"]
    assert not nccl_connects(two_processes_on_one)
    assert shared_gpus(two_processes_on_one) == {"a 07": [0, 2]}
    with pytest.warns(UserWarning, match=r"share a GPU[\s\S]*a 07"):
        warn_if_shared(two_processes_on_one)
    assert not nccl_connects([None, None])
    assert not nccl_connects([])


def test_sparse_gradients_on_gpus_are_warned_of_unless_operations_are_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_sparse_gradients(["CPU:0", "CPU:1"])
        monkeypatch.setattr(gpus_module, "operations_are_deterministic", lambda: True)
        warn_of_sparse_gradients([GPU])
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="enable_op_determinism"):
        warn_of_sparse_gradients([GPU])


def test_the_physical_gpu_of_a_logical_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert physical_by_logical(["GPU:0", "GPU:1"], {}) == ["GPU:0", "GPU:1"]
    assert physical_by_logical(["GPU:1", "GPU:0"], {"GPU:1": 2}) == ["GPU:1", "GPU:1", "GPU:0"]
    devices = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in (2, 3)]
    parts = {devices[0].name: [object(), object()], devices[1].name: None}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,GPU-77")
    with (
        mock.patch.object(tf.config, "get_visible_devices", return_value=devices),
        mock.patch.object(tf.config, "get_logical_device_configuration", lambda gpu: parts[gpu.name]),
        mock.patch("ctypes.CDLL", side_effect=OSError),
    ):
        first, second, third = (identity_of_gpu(name) for name in ("GPU:0", "/device:GPU:1", GPU.replace("GPU:0", "GPU:2")))
        assert identity_of_gpu("GPU:3") is None
    assert first == second
    assert str(first).endswith("device 6")
    assert str(third).endswith("GPU-77")
    assert identity_of_gpu("CPU:0") is None


def test_replicas_that_share_a_gpu_use_nccl_if_its_variable_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: [object(), object()])
    for setting, connects in ((None, False), ("0", False), ("1", True)):
        if setting is not None:
            monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", setting)
        halves = [identity_of_gpu("GPU:0"), identity_of_gpu("GPU:1")]
        assert nccl_connects(halves) == connects
        assert bool(shared_gpus(halves)) != connects
        assert identity_of_gpu("CPU:0") is None


def choices(strategy: Any) -> list[Any]:
    """Has ranks choose a transport for made-up GPUs, and sum over it where that needs no GPU."""
    import warnings

    from tfrep_strategy.communicators import ring
    from tfrep_strategy.errors import ConfigurationError

    found: list[Any] = []
    device = f"/job:worker/replica:0/task:{strategy.rank}/device:CPU:0"
    for key, gpus in enumerate((["a 07", "a 0f"], ["a 07", "a 07"], [None, None], ["a 07", None])):
        communicator = ring.RingCommunicator(strategy.rank, 2, device, 2**30 + 10 + key, f"{key}/")
        with (
            mock.patch.object(ring, "identity_of_gpu", lambda device, gpus=gpus: gpus[strategy.rank]),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            try:
                communicator.choose_transport()
            except ConfigurationError as error:
                found.append(str(error))
                continue
        total = None if communicator._nccl else float(communicator.all_reduce([tf.constant(1.0 + strategy.rank)])[0])
        found.append((communicator._nccl, total, sum("share a GPU" in str(w.message) for w in warned)))
    return found


def places(strategy: Any) -> list[Any]:
    """Makes communicators of a Horovod that says it has NCCL, on made-up GPUs, and sums over each."""
    import horovod.tensorflow as hvd

    from tfrep_strategy.communicators import horovod

    found: list[Any] = []
    for gpus in (["a 07", "a 0f"], ["a 07", "a 07"], [None, None], ["a 07", None]):
        with (
            mock.patch.object(hvd, "nccl_built", return_value=True),
            mock.patch.object(horovod, "identity_of_gpu", lambda device, gpus=gpus: gpus[strategy.rank]),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            communicator = horovod.HorovodCommunicator()

        @tf.function(autograph=False)
        def total(communicator: Any = communicator) -> tf.Tensor:
            return communicator.all_reduce([tf.constant(1.0 + strategy.rank)])[0]

        operations = total.get_concrete_function().graph.get_operations()
        devices = {operation.device for operation in operations if operation.type == "HorovodAllreduce"}
        on_host = all("CPU:0" in device for device in devices)
        found.append((on_host, float(total()), sum("share a GPU" in str(w.message) for w in warned)))
    return found


@needs_horovod
def test_horovod_takes_the_way_through_the_host_where_nccl_connects_no_gpus(worker_pool: Any) -> None:
    for rank, (distinct, shared, cpus, mixed) in enumerate(worker_pool("horovod", 2).run(places)):
        assert distinct == (False, 3.0, 0)
        assert shared == (True, 3.0, 1 - rank)  # Rank 0 says so, once.
        assert cpus == (False, 3.0, 0)
        assert mixed == (True, 3.0, 0)


def test_ranks_agree_on_nccl(worker_pool: Any) -> None:
    for rank, (distinct, shared, cpus, mixed) in enumerate(worker_pool("tf", 2).run(choices)):
        assert distinct == (True, None, 0)
        assert shared == (False, 3.0, 1 - rank)  # Rank 0 says so, once.
        assert cpus == (False, 3.0, 0)
        assert "ranks_without_gpu=[1]" in mixed
