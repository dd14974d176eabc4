"""What collectives cost by the alpha-beta model: a time for each message, and a time for each byte.

Hockney, "The communication challenge for MPP" (1994), has the model; Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH" (2005), the numbers of messages of rings and trees.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tfrep_strategy.common_memory import CHUNK_BYTES, MOST_IN_MESSAGE
from tfrep_strategy.communicators.grid import Grid

RESNET50_PARAMETERS = 25_600_000
_PIECE_BYTES = 64
"""TensorFlow's ring cuts what travels into as many pieces as there are processes, none shorter than this."""


@dataclass(frozen=True)
class Primitive:
    """What `n` processes send that bring `size` bytes each.

    Attributes:
        rounds: Rounds of a ring; each has `n - 1` messages that follow each other.
        exchanges: How often each process sends to all others at once.
        parts: How many times the bytes that a process brings it sends in all, in units of `(n - 1) / n`.
        grows: Whether each process sends all that it brings `n - 1` times, as a gather does.
        in_pieces: Whether only pieces travel, so that few processes have something to send where little is sent.
    """

    rounds: int = 0
    exchanges: int = 0
    parts: float = 1
    grows: bool = False
    in_pieces: bool = False

    def waits(self, n: int) -> int:
        """Returns how many messages follow each other.

        Example:
            >>> Primitive(rounds=2).waits(8), Primitive(exchanges=1).waits(8)
            (14, 1)
        """
        return self.rounds * (n - 1) + self.exchanges

    def messages(self, n: int, size: float, cores: int) -> float:
        """Returns how many messages a core works on while one process sends all of its own.

        Example:
            >>> Primitive(exchanges=1).messages(8, 1e6, cores=2)
            28.0
        """
        senders = min(n, math.ceil(size / _PIECE_BYTES)) if self.in_pieces else n
        return (self.rounds + self.exchanges) * (n - 1) * max(1.0, senders / cores)

    def sent(self, n: int, size: float) -> float:
        """Returns how many bytes a process sends.

        Example:
            >>> Primitive(rounds=2, parts=2).sent(4, 1000.0)
            1500.0
        """
        return self.parts * (n - 1) * size / (1 if self.grows else n)

    def features(self, n: int, size: float, cores: int) -> list[float]:
        """Returns what `Costs` are the costs of: calls, waits, messages and bytes, as many as a core has to do with."""
        return [1.0, self.waits(n), self.messages(n, size, cores), self.sent(n, size) * _load(n, cores)]


@dataclass(frozen=True)
class Summed(Primitive):
    """A sum that goes over a grid of the processes of a machine where it is short, and through a ring where it is long."""

    def features(self, n: int, size: float, cores: int) -> list[float]:
        """Returns what `Costs` are the costs of: calls, waits, messages and bytes, as many as a core has to do with."""
        grid = Grid(0, n, lambda name: 1)
        if size > grid.most_bytes or (n > 2 and size <= _PIECE_BYTES):
            return super().features(n, size, cores)
        return [1.0, grid.messages, *(grid.messages * each * _load(n, cores) for each in (1.0, size))]


@dataclass(frozen=True)
class InMemory:
    """What `n` processes do that bring `size` bytes each to common memory.

    All of it is work of Python, which the processes of a machine share the cores for. Each greets all others once. What is too long
    for the greeting is written to the memory, one filling after the other, and all wait for each other after each.

    Attributes:
        copied: How many times the bytes that it brings a process copies.
        grows: Whether each also copies all that the others bring.
        reduces: Whether the result goes through the memory, too.
    """

    copied: float
    grows: bool = False
    reduces: bool = False

    def fillings(self, size: float) -> int:
        """Returns how often all wait for each other.

        Example:
            >>> InMemory(3, reduces=True).fillings(3 << 20), InMemory(2).fillings(100)
            (4, 0)
        """
        return 0 if size <= MOST_IN_MESSAGE else math.ceil(size / CHUNK_BYTES) + self.reduces

    def features(self, n: int, size: float, cores: int) -> list[float]:
        """Returns what `Costs` are the costs of: calls, waits, messages and bytes, as many as a core has to do with."""
        copied = (self.copied + (n - 1) * self.grows) * size
        return [_load(n, cores) * each for each in (1.0, self.fillings(size), n - 1, copied)]


def _load(n: int, cores: int) -> float:
    return max(1.0, n / cores)


_SHORT_OR_LONG = Summed(rounds=2, parts=2, in_pieces=True)
_SUMMED = InMemory(copied=3, reduces=True)
PRIMITIVES: dict[str, dict[str, Primitive | InMemory]] = {
    "tf": {
        "all_reduce sum": _SHORT_OR_LONG,
        "all_gather": Primitive(rounds=2, grows=True),  # The shapes are gathered first.
        "broadcast": _SHORT_OR_LONG,  # A sum with zeros.
        "reduce_scatter": Primitive(exchanges=1),
        "all_to_all": Primitive(rounds=1, exchanges=1),  # The shapes are gathered first.
        "barrier": _SHORT_OR_LONG,
    },
    # Rank 0 is asked first, and answers when all are ready.
    "horovod": {
        "all_reduce sum": Primitive(rounds=2, parts=2),
        "all_gather": Primitive(rounds=2, grows=True),
        "broadcast": Primitive(rounds=2, parts=2),
        "reduce_scatter": Primitive(rounds=2, parts=2),
        "all_to_all": Primitive(rounds=2),
        "barrier": Primitive(rounds=2, parts=2),
    },
    "shared_memory": {
        "all_reduce sum": _SUMMED,
        "all_gather": InMemory(copied=2, grows=True),
        "broadcast": InMemory(copied=1),
        "reduce_scatter": _SUMMED,
        "all_to_all": InMemory(copied=2),
        "barrier": _SUMMED,
    },
}
"""By communicator."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a primitive, as a sum of terms that are not negative.

    Attributes:
        call_s: Of each call, however much it sends.
        wait_s: Of each message that another one follows.
        message_s: What a core works for each message. The processes of a machine share the cores.
        byte_s: What a core works for each byte that a process sends.
    """

    call_s: float = 0.0
    wait_s: float = 0.0
    message_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, primitive: Primitive | InMemory, n: int, size: float, cores: int) -> float:
        """Predicts how long a call takes.

        Args:
            primitive: What is called.
            n: How many processes there are.
            size: How many bytes each brings.
            cores: Of the machine.
        """
        return float(np.dot([self.call_s, self.wait_s, self.message_s, self.byte_s], primitive.features(n, size, cores)))


def fit(primitive: Primitive | InMemory, measured: Mapping[tuple[int, float], float], cores: int) -> Costs:
    """Fits the costs of a primitive, with the same weight for each number of processes and size.

    Args:
        primitive: What was called.
        measured: Seconds, by the number of processes and the bytes that each brought.
        cores: Of the machine.

    Returns:
        The costs that fit best.

    Example:
        >>> ring, made = PRIMITIVES["tf"]["all_reduce sum"], Costs(1e-3, 1e-5, 2e-5, 1e-9)
        >>> points = {(n, b): made.seconds(ring, n, b, 2) for n in (2, 3, 4) for b in (1e5, 1e6)}
        >>> round(fit(ring, points, 2).seconds(ring, 8, 1e6, 2) / made.seconds(ring, 8, 1e6, 2), 6)
        1.0
    """
    rows = np.array([primitive.features(n, size, cores) for n, size in measured])
    seconds = np.array(list(measured.values()))
    return Costs(*_least_squares(rows / seconds[:, None], np.ones_like(seconds)))


def line(measured: Mapping[int, float]) -> tuple[float, float]:
    """Fits what grows with the number of ranks: a constant, and a cost of each rank, neither of them negative.

    Example:
        >>> constant, each = line({64: 2.0, 128: 3.0, 256: 5.0})
        >>> round(constant + 1024 * each, 6)
        17.0
    """
    ranks, values = np.array(list(measured), float), np.array(list(measured.values()))
    rows = np.stack([np.ones_like(ranks), ranks], 1)
    constant, each = _least_squares(rows / values[:, None], np.ones_like(values))
    return constant, each


def _least_squares(rows: np.ndarray, values: np.ndarray) -> list[float]:
    """Returns the solution that is nowhere negative: the best of those that leave out some columns."""
    best, smallest = np.zeros(rows.shape[1]), math.inf
    for count in range(1, rows.shape[1] + 1):
        for columns in map(list, itertools.combinations(range(rows.shape[1]), count)):
            found = np.linalg.lstsq(rows[:, columns], values, rcond=None)[0]
            left = float(np.sum((rows[:, columns] @ found - values) ** 2))
            if found.min() >= 0 and left < smallest:
                best, smallest = np.zeros(rows.shape[1]), left
                best[columns] = found
    return [float(each) for each in best]


@dataclass(frozen=True)
class Links:
    """What connects replicas.

    Attributes:
        name: For tables.
        per_node: Replicas of a machine.
        inside_s: Latency of a message within a machine.
        between_s: Latency of a message between machines.
        bytes_per_s: Bandwidth of all that a replica's machine sends for one replica, in one direction.
    """

    name: str
    per_node: int
    inside_s: float
    between_s: float
    bytes_per_s: float

    def ring_s(self, n: int, size: float) -> float:
        """Returns the seconds of an all-reduce in a ring, as NCCL's own model adds them up.

        Args:
            n: How many replicas there are.
            size: How many bytes each brings.

        Example:
            >>> round(1e3 * ETHERNET.ring_s(64, 4), 2)
            6.3
        """
        nodes = math.ceil(n / self.per_node)
        latency = 2 * (n - nodes) * self.inside_s + 2 * (nodes - 1) * self.between_s
        return latency + 2 * (n - 1) / n * size / self.bytes_per_s

    def half_ring_s(self, n: int, size: float) -> float:
        """Returns the seconds of a reduce-scatter or of an all-gather: each is half of a ring's all-reduce."""
        return self.ring_s(n, size) / 2

    def exchange_s(self, n: int, size: float) -> float:
        """Returns the seconds of an all-to-all: each replica sends a part to each other one, one after the other."""
        near = min(n, self.per_node) - 1
        return near * self.inside_s + (n - 1 - near) * self.between_s + (n - 1) / n * size / self.bytes_per_s

    def tree_s(self, n: int, size: float) -> float:
        """Returns the seconds of an all-reduce in a double binary tree of machines."""
        nodes = math.ceil(n / self.per_node)
        latency = 2 * ((min(n, self.per_node) - 1) * self.inside_s + math.log2(nodes) * self.between_s)
        return latency + 2 * size / self.bytes_per_s

    def short_or_long_s(self, n: int, size: float) -> float:
        """Returns the seconds over `communicator="tf"` between CPUs: a grid of machines for what is short, else the ring.

        Example:
            >>> round(1e3 * ETHERNET.short_or_long_s(64, 4), 2)
            0.7
        """
        grid = Grid(0, n, lambda name: 1)
        if size > grid.most_bytes:
            return self.ring_s(n, size)
        return grid.messages * (max(self.inside_s, self.between_s) + size / self.bytes_per_s)


H200 = Links("8 x H200 a machine, NVLink and 8 x 400 Gb/s InfiniBand", 8, 3.4e-6, 9.6e-6, 8 * 50e9)
ETHERNET = Links("one replica a machine, 25 Gb/s Ethernet", 1, 0.0, 50e-6, 25e9 / 8)

MESSAGES = {
    "a barrier, or an agreement on a step": 40.0,
    "gradients of ResNet-50, float32": 4.0 * RESNET50_PARAMETERS,
    "gradients of ResNet-50, bfloat16": 2.0 * RESNET50_PARAMETERS,
}


def predicted_collectives(replicas: Sequence[int] = (64, 1024)) -> dict[str, dict[str, dict[str, float]]]:
    """Predicts collectives on machines that were not measured.

    Returns:
        Milliseconds, by links, message, and algorithm with the number of replicas.
    """

    def reduced(links: Links, n: int, size: float) -> dict[str, float]:
        of_tf = {"tf": links.short_or_long_s(n, size)} if links.per_node == 1 else {}
        return {"ring": links.ring_s(n, size), "tree": links.tree_s(n, size), **of_tf}

    def of_each(links: Links, n: int) -> dict[str, dict[str, float]]:
        weights = 4.0 * RESNET50_PARAMETERS
        return {
            **{message: reduced(links, n, size) for message, size in MESSAGES.items()},
            "sharded state: gradients of ResNet-50 are scattered": {"ring": links.half_ring_s(n, weights)},
            "... and its weights are gathered": {"ring": links.half_ring_s(n, weights)},
            "each exchanges 100 MB with all the others (`all_to_all`)": {"pairs": links.exchange_s(n, 1e8)},
        }

    return {
        links.name: {
            message: {f"{name}, {n}": 1e3 * of_each(links, n)[message][name] for n in replicas for name in names}
            for message, names in of_each(links, replicas[0]).items()
        }
        for links in (H200, ETHERNET)
    }
