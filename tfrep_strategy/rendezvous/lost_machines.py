"""TensorFlow waits for a machine that has disappeared without closing its connections, such as one behind a cut cable, for ever.

TensorFlow cannot be told to check its connections. So they are found among the descriptors of this process, and the system checks
them: a connection to a lost machine is closed, and TensorFlow notices that.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Iterable

import psutil

from tfrep_strategy.rendezvous.connections import duplicate, is_loopback, notice_loss

_LOOK_SECONDS = 5.0
"""How often to look for new connections."""


def watch_connections(owner: object, addresses: Iterable[str]) -> None:
    """Has TensorFlow's connections to other machines closed about 20 seconds after such a machine has disappeared.

    Args:
        owner: The connections are watched for as long as it exists.
        addresses: "host:port" of the processes to which TensorFlow connects.

    Example:
        >>> class Owner: ...
        >>> watch_connections(Owner(), ["node1:2222", "node2:2222"])
    """
    placed = [address.rpartition(":") for address in addresses]
    ports = {int(port) for host, _, port in placed if not is_loopback(host)}
    if ports:
        is_over = threading.Event()
        weakref.finalize(owner, is_over.set)
        threading.Thread(target=_watch, args=(ports, is_over), daemon=True, name="tfrep-lost-machines").start()


def _watch(ports: Collection[int], is_over: threading.Event) -> None:
    while not is_over.wait(_LOOK_SECONDS):
        with contextlib.suppress(OSError, psutil.Error):  # Where the system does not list them, a lost machine is waited for.
            for each in psutil.Process().net_connections("tcp"):
                if each.status == psutil.CONN_ESTABLISHED and each.raddr.port in ports:
                    _check(each.fd)


def _check(descriptor: int) -> None:
    # It may have been closed meanwhile.
    with contextlib.suppress(OSError), duplicate(descriptor) as peer:
        notice_loss(peer)
