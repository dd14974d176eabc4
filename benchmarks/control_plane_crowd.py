"""Many ranks in one process, as threads, for `benchmarks.control_plane`. Only what a rank tells the others is real."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Listener
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from benchmarks.crews import work
from tfrep_strategy.cluster.rendezvous.introductions import Place
from tfrep_strategy.cluster.rendezvous.meeting import meet
from tfrep_strategy.communicators.base import Communicator
from tfrep_strategy.communicators.peers.monitor import PeerMonitor
from tfrep_strategy.communicators.peers.reports import group_of
from tfrep_strategy.core.calls import Call
from tfrep_strategy.errors import ConfigurationError

_Result = TypeVar("_Result")
_SECRET = b"of a benchmark on one machine"
_LIMIT_SECONDS = 120.0
_SWITCH_SECONDS = 0.1
"""How often a thread that waits for Python's lock wakes to ask for it. Ranks have processes of their own; hundreds of threads that
ask every 5 ms, as by default, would be half of what is measured."""


class OverTree(Communicator):
    """Stands for the transport: gathers numbers over a binary tree of connections, with two messages for each of them.

    Args:
        rank: This rank.
        size: How many there are.
        listener: Where its children in the tree connect.
        ports: Those of all ranks, on this machine.
    """

    def __init__(self, rank: int, size: int, listener: Listener, ports: Sequence[int]) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = size
        self._parent = Client(("127.0.0.1", ports[(rank - 1) // 2])) if rank else None
        self._children = [listener.accept() for child in (2 * rank + 1, 2 * rank + 2) if child < size]

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        found = [(self.rank, tensor.numpy())]
        for child in self._children:
            found += child.recv()
        if self._parent is not None:
            self._parent.send(found)
            gathered = self._parent.recv()
        else:
            gathered = np.concatenate([part for _, part in sorted(found, key=lambda each: each[0])])
        for child in self._children:
            child.send(gathered)
        return tf.constant(gathered)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        if root != 0:
            raise ConfigurationError("This tree broadcasts what its root has.")
        values = self._parent.recv() if self._parent is not None else [tensor.numpy() for tensor in tensors]
        for child in self._children:
            child.send(values)
        return list(map(tf.constant, values))

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        raise ConfigurationError("This tree gathers only.")

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        raise ConfigurationError("This tree has no groups.")

    def close(self) -> None:
        for connection in (*self._children, *([self._parent] if self._parent is not None else [])):
            connection.close()


class Crowd:
    """Some of the ranks of a run, as threads of this process.

    Args:
        ranks: Which.
        size: How many ranks the run has.
        address: A free address, where they meet.
    """

    def __init__(self, ranks: Sequence[int], size: int, address: str) -> None:
        self._ranks, self._size, self._address = list(ranks), size, address
        self._threads = ThreadPoolExecutor(len(self._ranks))
        self.monitors: dict[int, PeerMonitor] = {}
        self._trees: dict[int, OverTree] = {}

    def join(self) -> dict[str, float]:
        """Joins: the ranks meet, connect their transport, and start their monitors.

        Returns:
            When the first began and the last ended ("began", "ended"; of `time.monotonic()`), and the CPU seconds of this process
            ("cpu").
        """
        began = time.monotonic()
        _, cpu = self._cpu_of(lambda: self._each(self._join, self._ranks))
        return {"began": began, "ended": time.monotonic(), "cpu": cpu}

    def _join(self, rank: int) -> None:
        place = Place(self._address, rank, self._size, one_machine=True)
        with Listener(("127.0.0.1", 0), backlog=2) as listener:
            met = meet(place, {"port": listener.address[1]}, secret=_SECRET, seconds=_LIMIT_SECONDS)
            tree = self._trees[rank] = OverTree(rank, self._size, listener, [each.told["port"] for each in met])
        monitor = PeerMonitor.start(tree)
        if monitor is None:
            raise RuntimeError(f"Rank {rank} has no monitor.")
        self.monitors[rank] = monitor

    def train(self, seconds: float) -> float:
        """Only the monitors do something, as in a step.

        Args:
            seconds: For how long.

        Returns:
            The CPU seconds of this process meanwhile.
        """
        return self._cpu_of(lambda: time.sleep(seconds))[1]

    def agree(self, calls: int) -> tuple[float, float]:
        """Each rank reports collectives one after the other, and waits until all have reported the same.

        Args:
            calls: How many.

        Returns:
            The seconds per collective, and the CPU seconds of this process per collective.
        """
        group = group_of(range(self._size))
        call = Call("all_reduce", "sum", (("float32", (100,)),), "train.py:7")

        def report(monitor: PeerMonitor) -> None:
            for _ in range(calls):
                with monitor.watching(group, single=True):
                    monitor.report(group, call)

        began = time.monotonic()
        _, cpu = self._cpu_of(lambda: self._each(report, list(self.monitors.values())))
        return (time.monotonic() - began) / calls, cpu / calls

    def compare(self, calls: int, differs: bool) -> float:
        """Compares the state of a callback of all ranks, as `fit` does at the end of an epoch.

        Args:
            calls: How often.
            differs: Whether that of one rank is another, so that all states are sent.

        Returns:
            The seconds per comparison.
        """

        def exchange(tree: OverTree) -> None:
            state = {"monitor": "val_loss", "best": 0.25, "wait": int(differs and tree.rank == 1)}
            for _ in range(calls):
                states = tree.all_gather_object(state)
                if [each["wait"] for each in states] != [int(differs and rank == 1) for rank in range(tree.size)]:
                    raise RuntimeError(f"Rank {tree.rank} has got other objects than were sent.")

        began = time.monotonic()
        self._each(exchange, list(self._trees.values()))
        return (time.monotonic() - began) / calls

    def lose(self, rank: int) -> float:
        """Breaks the connection of a rank, as the system does when it is killed.

        Returns:
            When, by `time.monotonic()`.
        """
        monitor = self.monitors.pop(rank)
        monitor._closing = True
        with socket.socket(fileno=os.dup(monitor._channel.fileno())) as own:
            began = time.monotonic()
            own.shutdown(socket.SHUT_RDWR)
        return began

    def heard(self, rank: int) -> float:
        """Waits until each rank here has heard of the end of another.

        Returns:
            When the last one did, by `time.monotonic()`.
        """

        def when(monitor: PeerMonitor) -> float:
            with monitor._news:
                if not monitor._news.wait_for(lambda: any(each.rank == rank for each in monitor.ended), _LIMIT_SECONDS):
                    raise RuntimeError(f"Rank {monitor.rank} has not heard of the end of rank {rank}.")
            return next(each.when for each in monitor.ended if each.rank == rank)

        return max(self._each(when, list(self.monitors.values())), default=-math.inf)

    def leave(self) -> tuple[float, float]:
        """Ends all ranks at once.

        Returns:
            How long it took, and the CPU seconds of this process.
        """
        began = time.monotonic()
        monitors = list(self.monitors.values())
        _, cpu = self._cpu_of(lambda: self._each(PeerMonitor.close, monitors))
        for tree in self._trees.values():
            tree.close()
        self._threads.shutdown()
        return time.monotonic() - began, cpu

    def _each(self, do: Callable[[Any], _Result], of: Sequence[Any]) -> list[_Result]:
        return list(self._threads.map(do, of, timeout=_LIMIT_SECONDS))

    def _cpu_of(self, do: Callable[[], _Result]) -> tuple[_Result, float]:
        before = time.process_time()
        result = do()
        return result, time.process_time() - before


def main() -> None:
    """Answers questions until the benchmark is over."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    work(make)


def make(settings: dict[str, Any]) -> Callable[[tuple[str, list[Any]]], Any]:
    """Sets a process up.

    Args:
        settings: The arguments of a `Crowd`.

    Returns:
        A function that takes the name of a method of the crowd and its arguments, and returns its result.
    """
    crowd = Crowd(**settings)
    return lambda question: getattr(crowd, question[0])(*question[1])


if __name__ == "__main__":
    main()
