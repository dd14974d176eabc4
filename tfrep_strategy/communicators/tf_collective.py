"""TensorFlow's own collectives as a communicator: a ring over gRPC between CPUs, NCCL between GPUs."""

from __future__ import annotations

import math
import signal
import socket
import threading
from typing import Any, ClassVar

import tensorflow as tf

from tfrep_strategy.cluster.devices import full_name, replica_device
from tfrep_strategy.cluster.rendezvous.channel import CONNECT_SECONDS
from tfrep_strategy.cluster.rendezvous.confinement import confined
from tfrep_strategy.cluster.rendezvous.meeting import meet_at
from tfrep_strategy.communicators.peers.position import Position
from tfrep_strategy.communicators.ring import RingCommunicator, group_key
from tfrep_strategy.core.limits import timeout_seconds
from tfrep_strategy.core.tf import (
    CoordinatedJob,
    ServerDef,
    configure_collectives,
    context,
    forget_device_names,
    runtime_has_started,
)
from tfrep_strategy.errors import ConfigurationError, PeerError, message, warn

_REGISTER_SECONDS = 25
"""The time in which TensorFlow must connect ranks that have met."""
_HEARTBEAT_SECONDS = 40.0
"""TensorFlow waits for the answer to a heartbeat for half of this time. A connection may be dead for 17 seconds."""
_LONGEST_HEARTBEAT_SECONDS = 30 * 86400.0
"""Used instead of no limit."""

# Measured, see docs/benchmarks.md: faster than one bucket of 20 MB, and than the many small buckets of a deep net.
_CPU_BUCKET_BYTES = 4 << 20


class TensorFlowCommunicator(RingCommunicator):
    """Runs collectives over TensorFlow's gRPC servers. Each process starts one server.

    A process may make several communicators, which share the server. All ranks make them in the same order.

    Args:
        environment: The environment with rank, size and `addresses` (`host:port` of every rank). Reading these may need a
            rendezvous.
        device: Device that the collectives run on, such as `"GPU:0"`. Default: the GPU whose number is the local rank, or
            the CPU.

    Raises:
        ConfigurationError: The environment knows no addresses, its addresses have changed or differ from those of rank 0, another
            program listens on the address of this process or of rank 0, or there is no such device.
        PeerError: Not all ranks arrive in time, or the address of a rank does not answer.
    """

    name = "tf"
    _connected: ClassVar[list[tuple[int, list[str]]]] = []
    """Rank and addresses of each communicator made so far."""

    def __init__(self, environment: Any, device: str | None = None) -> None:
        if not environment.addresses:
            raise ConfigurationError(
                message(
                    "TensorFlow's collectives need the address of every process.",
                    hint="start the processes with `tfrep run --communicator tf`, or set TF_CONFIG in each of them. Under mpirun,"
                    " set MASTER_ADDR and MASTER_PORT to where rank 0 can listen.",
                    environment=environment.name,
                )
            )
        self.rank, self.size = environment.rank, environment.size
        self.local_rank, self.local_size = environment.local_rank, environment.local_size
        # Without a rendezvous, a rank knows the addresses from the start, and has not met the others.
        self._connect_once(list(environment.addresses), None if environment.rendezvous else environment.name)
        name = f"strategy{len(self._connected)}/" if len(self._connected) > 1 else ""
        device = full_name(device or replica_device(self.local_rank))
        super().__init__(self.rank, self.size, device, group_key(name), name, position=Position())
        if self.size > 1:
            self.choose_transport()  # The ranks communicate here, so TensorFlow's threads run now.
            _heed_sigterm_as_before()
        if "CPU" in device:
            self.bucket_bytes, self.gathers_few = _CPU_BUCKET_BYTES, True

    def _heartbeat_seconds(self) -> float:
        # On one machine the monitor notices the end of a rank at once. There TensorFlow's heartbeats would only fail runs whose
        # ranks end without an error at different times. Between machines a firewall may block the monitor.
        if self.local_size < self.size and timeout_seconds() < math.inf:
            return _HEARTBEAT_SECONDS
        return min(max(timeout_seconds(), _HEARTBEAT_SECONDS), _LONGEST_HEARTBEAT_SECONDS)

    def abort(self, reason: str) -> None:
        context().abort_collective_ops(tf.errors.UNAVAILABLE, reason)

    def _server(self, addresses: list[str]) -> Any:
        """Describes the server of this process, and configures the runtime, even after its start."""
        if runtime_has_started():
            warn(
                "TensorFlow was used before its collectives were set up. Tensors and data sets made before can be used, but"
                " variables, models, iterators and functions cannot.\nHint: make the strategy before them.",
            )
        leader = "/job:worker/replica:0/task:0"
        configure_collectives(leader, (f"/job:worker/task:{self.rank}",))
        context().configure_coordination_service(
            service_type="standalone",
            service_leader=leader,
            coordinated_jobs=[CoordinatedJob(name="worker", num_tasks=self.size)],
            heartbeat_timeout_in_ms=round(1000 * self._heartbeat_seconds()),
            cluster_register_timeout_in_ms=1000 * _REGISTER_SECONDS,
        )
        config = context().config
        # Otherwise rank 0 waits forever, and holds Python's lock, if another rank has ended since they met.
        config.experimental.coordination_config.cluster_register_with_barrier = True
        return ServerDef(
            cluster=tf.train.ClusterSpec({"worker": addresses}).as_cluster_def(),
            default_session_config=config,
            job_name="worker",
            task_index=self.rank,
            protocol="grpc",
            port=int(addresses[self.rank].rpartition(":")[2]),
        )

    @staticmethod
    def _check_own_port(address: str) -> None:
        port = int(address.rpartition(":")[2])
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                raise ConfigurationError(
                    message(
                        f"This process cannot listen on its own address ({error.strerror}).",
                        hint=f"end the program that has port {port} of this machine, or use another port: give it in TF_CONFIG;"
                        " under Slurm call srun again, since ports follow from the numbers of the job and its step.",
                        code="TFREP-E014",
                        address=address,
                    )
                ) from error

    def _connect_once(self, addresses: list[str], source: str | None) -> None:
        own = self.rank, addresses
        if not self._connected:
            self._connect(addresses, source)
        elif self._connected[0] != own:
            raise ConfigurationError(
                message(
                    "This process is already connected to other processes, and TensorFlow can connect it only once.",
                    hint="do not change TF_CONFIG between two strategies.",
                    before=self._connected[0],
                    now=own,
                )
            )
        self._connected.append(own)

    def _connect(self, addresses: list[str], source: str | None) -> None:
        self._check_own_port(addresses[self.rank])
        if source is not None:
            meet_at(addresses, self.rank, source)
            self._check_own_port(addresses[self.rank])  # Another program may have taken it meanwhile.
        server = self._server(addresses)
        with confined(addresses[self.rank], addresses, speaks=self.rank == 0):
            self._start(server)
            self._check_next(addresses)

    def _start(self, server: Any) -> None:
        try:
            context().enable_collective_ops(server)
            context().ensure_initialized()
            forget_device_names()
        except tf.errors.OpError as error:
            raise PeerError(
                message(
                    f"TensorFlow's runtime could not connect the {self.size} processes.",
                    hint=f"look for the reason in the output of the other ranks; the limit is {_REGISTER_SECONDS} seconds.",
                    rank=self.rank,
                    size=self.size,
                )
            ) from error

    def _check_next(self, addresses: list[str]) -> None:
        """Checks the address of the next rank, so that every address is checked once. All servers are listening."""
        rank = (self.rank + 1) % self.size
        host, _, port = addresses[rank].rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            raise PeerError(
                message(
                    f"No process answers at the address of rank {rank} ({error}).",
                    hint="check that all ranks have the right address, and which peers it accepts (docs/security.md).",
                    address=addresses[rank],
                )
            ) from error


def _heed_sigterm_as_before() -> None:
    """Restores the effect of SIGTERM: TensorFlow's coordination only records it, for checkpoints of other strategies."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
