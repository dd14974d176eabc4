"""A transport over TCP sockets, as in a package of others: rank 0 gets what each rank sends, and sends all of it to every rank."""

from __future__ import annotations

import itertools
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep

_SECONDS = 60.0
_HEAD = struct.Struct("!QQ")
_REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "product": np.prod}


def _received(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionError("A rank has ended.")
        found += part
    return bytes(found)


def _send(connection: socket.socket, number: int, data: bytes) -> None:
    connection.sendall(_HEAD.pack(number, len(data)) + data)


def _receive(connection: socket.socket) -> tuple[int, bytes]:
    number, size = _HEAD.unpack(_received(connection, _HEAD.size))
    return number, _received(connection, size)


def _connected(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            return socket.create_connection((host, port), _SECONDS)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class TcpCommunicator(tfrep.Communicator):
    """Talks through rank 0."""

    name = "tcp"

    def __init__(self, environment: Any) -> None:
        self.rank, self.size = environment.rank, environment.size
        self.local_rank, self.local_size = environment.local_rank, environment.local_size
        self._members = list(range(self.size))
        host, port = environment.addresses[0].rsplit(":", 1)
        self._connections: dict[int, socket.socket] = {}
        if self.rank:
            self._connections[0] = _connected(host, int(port))
            _send(self._connections[0], self.rank, b"")
            return
        with socket.create_server((host, int(port)), backlog=self.size) as server:
            server.settimeout(_SECONDS)
            for _ in range(1, self.size):
                connection, _ = server.accept()
                connection.settimeout(_SECONDS)
                self._connections[_receive(connection)[0]] = connection

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        self.check_op(op)
        reduce = _REDUCTIONS[op]

        def reduced(array: np.ndarray) -> np.ndarray:
            return np.asarray(reduce(np.stack(self._exchange(array)), 0)).astype(array.dtype)

        return [tf.ensure_shape(tf.numpy_function(reduced, [t], t.dtype), t.shape) for t in map(tf.convert_to_tensor, tensors)]

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        gathered = tf.numpy_function(lambda array: np.concatenate(self._exchange(array)), [tensor], tensor.dtype)
        return tf.ensure_shape(gathered, [None, *tensor.shape[1:]])

    def subgroup(self, ranks: Sequence[int]) -> tfrep.Communicator | None:
        if self.check_group(ranks) != self._members:
            raise tfrep.errors.ConfigurationError("The transport tcp has no groups.")
        return self

    def _exchange(self, array: np.ndarray) -> list[np.ndarray]:
        own = array.tobytes()
        if self.rank:
            _send(self._connections[0], self.rank, own)
            parts = [_receive(self._connections[0])[1] for _ in range(self.size)]
        else:
            parts = [own, *(_receive(self._connections[rank])[1] for rank in range(1, self.size))]
            for connection, (rank, part) in itertools.product(self._connections.values(), enumerate(parts)):
                _send(connection, rank, part)
        arrays = [np.frombuffer(part, array.dtype).reshape(-1, *array.shape[1:]) for part in parts]
        return arrays if array.ndim else [each[0] for each in arrays]
