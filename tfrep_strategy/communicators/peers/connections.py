"""Connections between the ranks of a run, which carry reports and failures."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import psutil

CONNECT_SECONDS = 10.0


def own_hosts(loopback: bool, hosts: Sequence[str]) -> list[str]:
    """Returns the addresses at which other ranks may reach this machine, the best first."""
    if loopback:
        return ["127.0.0.1"]
    numbers = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6) and not each.address.startswith(("127.", "::1", "fe80:"))
    ]
    named = [hosts[0].strip("[]")] if hosts and hosts[0] else []
    return list(dict.fromkeys([*named, *numbers, socket.gethostname(), "127.0.0.1"]))


def connect(addresses: Sequence[str], port: int, key: bytes, rank: int) -> Connection | None:
    """Connects to the hub of rank 0.

    Args:
        addresses: Possible addresses of rank 0, the best first.
        port: The hub's port.
        key: Shared secret.
        rank: This rank.

    Returns:
        The connection; None if the hub could not be reached within 10 seconds.
    """
    deadline = time.monotonic() + CONNECT_SECONDS
    for address in addresses:
        patience = min(3.0, deadline - time.monotonic())
        if patience <= 0:
            break
        with contextlib.suppress(Exception):  # Another program may listen there and answer anything.
            connection = connection_of(socket.create_connection((address, port), patience), 3)
            try:
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
                connection.send(rank)
                set_patience(connection, 0)
            except Exception:
                connection.close()
                raise
            return connection
    return None


def connection_of(peer: socket.socket, seconds: int) -> Connection:
    """Turns a connected socket into a connection for Python objects. Reads give up after some seconds."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A machine that disappears without closing its connections is noticed after 5 + 4 * 3 seconds.
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection = Connection(peer.detach())
    set_patience(connection, seconds)
    return connection


def set_patience(connection: Connection, seconds: int) -> None:
    """Sets how many seconds a read from a connection may take; 0 for no limit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, 0))
