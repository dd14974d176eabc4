"""TensorFlow's own collectives as a communicator: a ring over gRPC between CPUs, NCCL between GPUs."""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import CoordinatedJob, ServerDef, context
from tfrep_strategy.communicators.base import Communicator
from tfrep_strategy.communicators.naming import structural_name
from tfrep_strategy.errors import ConfigurationError, PeerError, message

_MERGE_OPS = {"sum": "Add", "mean": "Add", "min": "Min", "max": "Max", "product": "Mul"}
# The dtypes that TensorFlow's ring reduces; the others are carried by one of these.
_CARRIERS = {tf.bool: tf.int32, tf.uint8: tf.int32, tf.int8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32,
             tf.uint32: tf.int64, tf.uint64: tf.int64, tf.bfloat16: tf.float32}  # fmt: skip
_CONNECT_SECONDS = 25
_COLLECTIVE_SECONDS = 600.0


class TensorFlowCommunicator(Communicator):
    """Collectives over TensorFlow's gRPC servers, one of which this process starts.

    Args:
        environment: Tells rank, size and `addresses` (`host:port` of every rank).
        device: Device string that the collectives run on, such as `"GPU:0"`. Default: the GPU with the number of this
            process's local rank, or the CPU.

    Raises:
        ConfigurationError: when the environment knows no addresses, or TensorFlow has run something already.
        PeerError: when a rank's address does not answer within 25 seconds.
    """

    name = "tf"

    def __init__(self, environment: Any, device: str | None = None) -> None:
        if not environment.addresses:
            raise ConfigurationError(
                message(
                    "TensorFlow's collectives need the address of every process.",
                    hint="start the processes with `tfrep run --communicator tf`, or set TF_CONFIG in each of them.",
                    environment=environment.name,
                )
            )
        self.rank, self.size = environment.rank, environment.size
        self.local_rank, self.local_size = environment.local_rank, environment.local_size
        self._start_server(list(environment.addresses))
        self._wait_for_peers(list(environment.addresses))
        if device is None:
            device = f"GPU:{self.local_rank}" if tf.config.list_physical_devices("GPU") else "CPU:0"
        self._device = f"/job:worker/replica:0/task:{self.rank}/device:{device}"
        self._base_name = ""
        self._make_group(1)

    def _make_group(self, key: int) -> None:
        self._group_key = key
        with tf.init_scope(), tf.device(self._device):
            # TensorFlow's automatic control dependencies keep ops that share this resource in program order.
            self._order = tf.raw_ops.VarHandleOp(
                dtype=tf.float32, shape=[], shared_name=f"tfrep_collective_order_{key}", name="collective_order"
            )
        if self._device.endswith("CPU:0") or not tf.config.list_physical_devices("GPU"):
            self._hint = "ring"
        else:
            self._hint = "nccl"

    def _start_server(self, addresses: list[str]) -> None:
        runtime = context()
        leader = "/job:worker/replica:0/task:0"
        try:
            runtime.configure_collective_ops(
                collective_leader=leader,
                scoped_allocator_enabled_ops=("CollectiveReduce",),
                device_filters=(f"/job:worker/task:{self.rank}",),
            )
        except RuntimeError as error:
            raise ConfigurationError(
                "TensorFlow has already run something in this process, so its collectives cannot be set up any more.\n"
                "Hint: make the strategy before anything else touches TensorFlow, or use communicator='horovod'."
            ) from error
        runtime.configure_coordination_service(
            service_type="standalone",
            service_leader=leader,
            coordinated_jobs=[CoordinatedJob(name="worker", num_tasks=self.size)],
            heartbeat_timeout_in_ms=20_000,
            cluster_register_timeout_in_ms=1000 * _CONNECT_SECONDS,
        )
        server = ServerDef(
            cluster=tf.train.ClusterSpec({"worker": addresses}).as_cluster_def(),
            default_session_config=runtime.config,
            job_name="worker",
            task_index=self.rank,
            protocol="grpc",
            port=int(addresses[self.rank].rpartition(":")[2]),
        )
        self._check_own_port(addresses[self.rank])
        runtime.enable_collective_ops(server)

    @staticmethod
    def _check_own_port(address: str) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", int(address.rpartition(":")[2])))
            except OSError as error:
                raise ConfigurationError(
                    message("This process cannot listen on its own address.", hint=str(error), address=address)
                ) from error

    def _wait_for_peers(self, addresses: list[str]) -> None:
        """Starts the runtime in the background of a connection check, so that a wrong address is named."""
        import threading

        failure: list[BaseException] = []

        def start() -> None:
            try:
                context().ensure_initialized()
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=start, daemon=True, name="tfrep-collectives")
        thread.start()
        deadline = time.monotonic() + _CONNECT_SECONDS
        missing = list(addresses)
        while missing and time.monotonic() < deadline and not failure:
            missing = [address for address in missing if not _answers(address)]
            time.sleep(0.05)
        if missing:
            raise PeerError(
                message(
                    f"No process answers at the address of rank {addresses.index(missing[0])}.",
                    hint="check that it was started, and that TF_CONFIG is the same everywhere.",
                    address=missing[0],
                )
            )
        thread.join(_CONNECT_SECONDS)
        if failure or thread.is_alive():
            raise PeerError(
                f"TensorFlow's runtime could not connect the {self.size} processes within {_CONNECT_SECONDS} seconds."
            ) from (failure[0] if failure else None)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        self.check_op(op)
        tensors = [tf.convert_to_tensor(t) for t in tensors]
        reduced: list[Any] = [None] * len(tensors)
        by_dtype: dict[Any, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_dtype.setdefault(_CARRIERS.get(tensor.dtype, tensor.dtype), []).append(i)
        for dtype, members in by_dtype.items():
            parts = [tf.reshape(tf.cast(tensors[i], dtype), [-1]) for i in members]
            sizes = [tf.size(part) for part in parts]
            whole = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
            whole = self._reduce(whole, op)
            pieces = [whole] if len(parts) == 1 else tf.split(whole, sizes)
            for i, piece in zip(members, pieces, strict=True):
                shaped = tf.reshape(piece, tf.shape(tensors[i]))
                reduced[i] = tf.ensure_shape(tf.cast(shaped, tensors[i].dtype), tensors[i].shape)
        return reduced

    def _reduce(self, flat: tf.Tensor, op: str) -> tf.Tensor:
        with tf.device(self._device):
            result = tf.raw_ops.CollectiveReduceV2(
                input=flat,
                group_size=self.size,
                group_key=self._group_key,
                instance_key=self._instance_key("all_reduce", flat),
                ordering_token=[self._order],
                merge_op=_MERGE_OPS[op],
                final_op="Id",
                communication_hint=self._hint,
                timeout_seconds=_COLLECTIVE_SECONDS,
            )
        return tf.cast(result / tf.cast(self.size, result.dtype), flat.dtype) if op == "mean" else result

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        dtype = _CARRIERS.get(tensor.dtype, tensor.dtype)
        rows = tf.shape(tensor)[:1]
        counts = self._gather(rows)
        # The ring gathers equal parts only, so that all are padded to the longest.
        longest = tf.maximum(tf.reduce_max(counts), 1)
        padding = [[0, longest - rows[0]]] + [[0, 0]] * (tensor.shape.rank - 1)
        gathered = self._gather(tf.pad(tf.cast(tensor, dtype), padding))
        parts = [gathered[r * longest : r * longest + counts[r]] for r in range(self.size)]
        result = tf.cast(tf.concat(parts, 0), tensor.dtype)
        return tf.ensure_shape(result, [None, *tensor.shape[1:]])

    def _gather(self, tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(self._device):
            return tf.raw_ops.CollectiveGatherV2(
                input=tensor,
                group_size=self.size,
                group_key=self._group_key,
                instance_key=self._instance_key("all_gather", tensor),
                ordering_token=[self._order],
                communication_hint=self._hint,
                timeout_seconds=_COLLECTIVE_SECONDS,
            )

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        self.check_root(root)
        tensors = [tf.convert_to_tensor(t) for t in tensors]
        return self.all_reduce([t if self.rank == root else tf.zeros_like(t) for t in tensors], "sum")

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        splits = tf.cast(splits, tf.int32)
        table = tf.reshape(self.all_gather(splits), [self.size, self.size])
        rows = self.all_gather(tensor)
        sender_starts = tf.cumsum(tf.reduce_sum(table, axis=1), exclusive=True)
        offsets = tf.reduce_sum(table[:, : self.rank], axis=1) + sender_starts
        received = table[:, self.rank]
        parts = [rows[offsets[s] : offsets[s] + received[s]] for s in range(self.size)]
        return tf.concat(parts, 0), received

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        ranks = self.check_group(ranks)
        if self.rank not in ranks:
            return None
        group = object.__new__(TensorFlowCommunicator)
        group.rank, group.size = ranks.index(self.rank), len(ranks)
        group.local_rank, group.local_size = self.local_rank, self.local_size
        group._device = self._device
        group._base_name = f"{self._base_name}/{'-'.join(map(str, ranks))}"
        group._make_group(2 + zlib.crc32(group._base_name.encode()) % (2**30))
        return group

    def _instance_key(self, kind: str, tensor: tf.Tensor) -> tf.Tensor:
        """Identifies one collective: by its place in the program and by its shape, which TensorFlow caches with the key."""
        place = zlib.crc32(f"{self._base_name}.{structural_name(kind)}.{tensor.dtype.name}".encode())
        with tf.device("CPU:0"):
            shape = tf.shape(tensor, out_type=tf.int64)
            mixed = tf.reduce_sum(shape * tf.constant([31**i for i in range(tensor.shape.rank)], tf.int64))
            return tf.cast((place + mixed * 0x9E3779B1) % (2**31 - 1), tf.int32)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1):
            return True
    except OSError:
        return False
