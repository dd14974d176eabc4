"""A run on several machines, on each of which somebody starts `tfrep run`: the launchers meet, and tell the ranks who they are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tfrep_strategy.cluster.horovod.gloo import horovod_version, interface_of, new_secret, served, slots_of, variables_of
from tfrep_strategy.cluster.identity import common_hash_seed, tf_config
from tfrep_strategy.cluster.rendezvous.confinement import machines_of_run
from tfrep_strategy.cluster.rendezvous.connections import LOOPBACK, free_ports, is_loopback
from tfrep_strategy.cluster.rendezvous.introductions import Place
from tfrep_strategy.cluster.rendezvous.meeting import Met, meet, with_port
from tfrep_strategy.core.validation import MOST_RANKS, Address, Numbers, checked
from tfrep_strategy.errors import ConfigurationError, check_count, is_count, message


@dataclass(frozen=True)
class Node:
    """This machine among those of a run.

    Args:
        rank: Its number, from 0. None in an elastic run: the machine of the rendezvous is 0, and the others come in any order.
        count: How many machines there are; in an elastic run, at most.
        rendezvous: "host:port" of machine 0, where the launchers meet.
        name: What messages call it.
        least: With how many machines an elastic run goes on; None if the run is not elastic.

    Raises:
        ConfigurationError: One of them cannot be used.

    Example:
        >>> Node(rank=1, count=2, rendezvous="host1:29500").place.target
        ('host1', 29500)
    """

    rank: int | None
    count: int
    rendezvous: str
    name: str = "This machine"
    least: int | None = None

    def __post_init__(self) -> None:
        check_count("A run cannot have this number of machines.", 1, MOST_RANKS, nnodes=self.count)
        if self.least is not None:
            what = "An elastic run needs MIN:MAX machines, with MIN not above MAX."
            check_count(what, 1, self.count, nnodes_min=self.least)
        if not (self.is_elastic and self.rank is None) and not is_count(self.rank, 0, self.count - 1):
            raise ConfigurationError(
                message(
                    "The number of this machine does not fit the run.",
                    hint=f"use a number from 0 to {self.count - 1}, a different one on each machine.",
                    node_rank=self.rank,
                    nnodes=self.count,
                )
            )
        checked(Address, "rendezvous", self.rendezvous, hint="give the address of machine 0, as the others reach it.")

    @classmethod
    def of(cls, *, rank: int | None, nnodes: str | None, rendezvous: str | None) -> Node | None:
        """Returns the machine that the options of a command line describe; None if they describe none.

        Args:
            rank: Its number.
            nnodes: How many machines there are: "2", or "1:4" for an elastic run.
            rendezvous: Where the launchers meet.

        Raises:
            ConfigurationError: Some options are missing, or one cannot be used.

        Example:
            >>> Node.of(rank=0, nnodes="2", rendezvous="host1:29500").count
            2
            >>> Node.of(rank=None, nnodes="1:4", rendezvous="host1:29500").least
            1
        """
        if rank is None and nnodes is None and rendezvous is None:
            return None
        hint = "write a number, or MIN:MAX for an elastic run."
        numbers = checked(Numbers, "nnodes", nnodes, hint=hint) if nnodes is not None else ()
        if (rank is None and len(numbers) < 2) or not numbers or rendezvous is None:
            raise ConfigurationError(
                message(
                    "A run on several machines needs --nnodes, --node-rank and --rendezvous.",
                    hint="give all three on each machine; with --nnodes MIN:MAX no --node-rank is needed.",
                    nnodes=nnodes,
                    node_rank=rank,
                    rendezvous=rendezvous,
                )
            )
        return cls(rank, numbers[-1], rendezvous, least=numbers[0] if len(numbers) == 2 else None)

    @property
    def is_elastic(self) -> bool:
        """Whether machines may come and go."""
        return self.least is not None

    @property
    def place(self) -> Place:
        """Where the launchers meet."""
        one_machine = is_loopback(self.rendezvous.rpartition(":")[0])
        return Place(self.rendezvous, self.rank or 0, self.count, one_machine, noun="node")


@dataclass(frozen=True)
class Nodes:
    """The facts that the launchers of a run have told each other.

    Args:
        own: This machine.
        met: All machines.
    """

    own: Node
    met: list[Met]

    @property
    def first_rank(self) -> int:
        """The first rank on this machine."""
        return sum(self._counts[: self.own.place.number])

    @property
    def size(self) -> int:
        """How many ranks there are on all machines."""
        return sum(self._counts)

    def describe(self) -> str:
        """Names the ranks on this machine, as in "ranks 2 to 3 of 4"."""
        last = self.first_rank + self._counts[self.own.place.number] - 1
        return f"rank {last} of {self.size}" if last == self.first_rank else f"ranks {self.first_rank} to {last} of {self.size}"

    @property
    def communicator(self) -> str:
        """The communicator of the run."""
        return self.met[0].told["communicator"]

    @property
    def hash_seed(self) -> str:
        """The `PYTHONHASHSEED` of all ranks."""
        return self.met[0].told["hash_seed"]

    @contextlib.contextmanager
    def identities(self) -> Iterator[list[dict[str, str]]]:
        """Gives the environment variables of each rank on this machine. Machine 0 serves Horovod's rendezvous meanwhile.

        Yields:
            One dictionary per rank.

        Raises:
            ConfigurationError: Horovod's rendezvous cannot listen, or cannot be confined. The machines have different Horovods.
        """
        first, last = self.first_rank, self.first_rank + self._counts[self.own.place.number]
        if self.communicator == "horovod":
            with self._horovod_identities(slice(first, last)) as variables:
                yield variables
        else:
            addresses = [with_port(each.host, port) for each in self.met for port in each.told["ports"]]
            yield [tf_config(addresses, rank) for rank in range(first, last)]

    @contextlib.contextmanager
    def _horovod_identities(self, ranks: slice) -> Iterator[list[dict[str, str]]]:
        versions = [each.told["horovod"] for each in self.met]
        if len(set(versions)) > 1:
            raise ConfigurationError(
                message(
                    "The machines of the run have different versions of Horovod.",
                    hint="run `tfrep horovod install` on each.",
                    code="TFREP-E003",
                    versions=versions,
                )
            )
        slots = slots_of([each.host for each in self.met for _ in each.told["ports"]])
        host, port, secret = self.met[0].host, self.met[0].told["rendezvous_port"], self.met[0].told["rendezvous_secret"]
        own = self.met[self.own.place.number].host
        interface = os.environ.get("HOROVOD_GLOO_IFACE") or interface_of(own)
        with contextlib.ExitStack() as stack:
            if self.own.rank == 0:
                networks, problem = machines_of_run(with_port(own, port), [with_port(each.host, port) for each in self.met])
                if problem is not None:
                    raise ConfigurationError(
                        message(
                            f"Horovod's rendezvous would take connections from everywhere: {problem}.",
                            hint='set TFREP_TRUSTED_NETWORKS to the networks of the machines, or use communicator "tf".',
                            hosts=[each.host for each in self.met],
                        )
                    )
                stack.enter_context(served(slots, host, port, networks, secret))
            yield variables_of(slots[ranks], host, port, interface, secret)

    @property
    def _counts(self) -> list[int]:
        return [each.told["size"] for each in self.met]


def meet_nodes(node: Node, size: int, communicator: str, *, secret: bytes | None = None) -> Nodes:
    """Meets the launchers on the other machines.

    Args:
        node: This machine.
        size: How many ranks this machine is to have.
        communicator: The communicator of the run, as this machine was told.
        secret: What the launchers share. Default: from `shared_secret`.

    Returns:
        What all have told.

    Raises:
        ConfigurationError: The launchers do not fit: two have one number, or their versions or communicators differ.
        PeerError: Not all have come in time.

    Example:
        >>> meet_nodes(Node(0, 1, "localhost:29500"), 2, "tf").size
        2
    """
    told = told_by(node, size, communicator, common_hash_seed())
    met = meet(node.place, told, secret=secret)
    chosen = [each.told["communicator"] for each in met]
    if len(set(chosen)) > 1:
        raise ConfigurationError(
            message(
                "The machines of the run would use different communicators.",
                hint="name one on each machine: `tfrep run --communicator tf`.",
                communicators=chosen,
            )
        )
    return Nodes(node, met)


def told_by(node: Node, size: int, communicator: str, hash_seed: str, mark: str | None = None) -> dict[str, Any]:
    """Returns what a launcher tells the others of its machine.

    Args:
        node: This machine.
        size: How many ranks it is to have.
        communicator: The communicator of the run, as it was told.
        hash_seed: The `PYTHONHASHSEED` of all ranks, if it is machine 0.
        mark: What it has left in the folder for backups.

    Example:
        >>> len(told_by(Node(0, 1, "localhost:29500"), 2, "tf", "7")["ports"])
        2
    """
    *ports, rendezvous_port = free_ports(size + 1, LOOPBACK if node.place.one_machine else "")
    told = {
        "size": size, "ports": ports, "rendezvous_port": rendezvous_port, "communicator": communicator,
        "hash_seed": hash_seed, "mark": mark,
    }  # fmt: skip
    if communicator == "horovod":
        told |= {"rendezvous_secret": new_secret(), "horovod": horovod_version()}
    return told
