"""A cable between two network namespaces that delays packets and loses some. Packets pass through here; `netem` is not needed.

Each namespace gets a TUN device, which hands packets to this process, and a route to the other's address through that device.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import random
import selectors
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Sequence

import pytest
from networks import HOSTS, ip

_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_LONGEST_PACKET = 1 << 16


class RoughCable:
    """Carries packets between two devices, in a thread of its own.

    Args:
        ends: Descriptors of the devices.
        seconds: How long each packet is under way.
        loss: How many of them are lost, from 0 to 1.

    Attributes:
        loss: How many are lost from now on. At 1 the cable is out.
        carried, lost: The packets so far.
    """

    def __init__(self, ends: Sequence[int], seconds: float, loss: float) -> None:
        self.carried = self.lost = 0
        self.loss, self._seconds, self._chance = loss, seconds, random.Random(0)
        self._other = {ends[0]: ends[1], ends[1]: ends[0]}
        self._under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
        self._is_over = False
        self._thread = threading.Thread(target=self._carry, daemon=True, name="rough-cable")
        self._thread.start()

    def end(self) -> None:
        """Carries no more packets."""
        self._is_over = True
        self._thread.join()

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            for end in self._other:
                selector.register(end, selectors.EVENT_READ)
            while not self._is_over:
                for key, _ in selector.select(self._patience()):
                    self._take(key.fd)
                self._deliver()

    def _patience(self) -> float:
        return max(0.0, min(self._under_way[0][0] - time.monotonic(), 0.1)) if self._under_way else 0.1

    def _take(self, end: int) -> None:
        packet = os.read(end, _LONGEST_PACKET)
        if self._chance.random() < self.loss:
            self.lost += 1
        else:
            self._under_way.append((time.monotonic() + self._seconds, self._other[end], packet))

    def _deliver(self) -> None:
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, end, packet = self._under_way.popleft()
            os.write(end, packet)
            self.carried += 1


@contextlib.contextmanager
def rough_cable(
    names: Sequence[str], addresses: Sequence[str] = HOSTS, *, seconds: float = 0.05, loss: float = 0.02
) -> Iterator[RoughCable]:
    """Joins two network namespaces by a rough cable while the body runs; connections that were there before go through it, too.

    Args:
        names: Of the namespaces.
        addresses: Of the two.
        seconds: How long each packet is under way.
        loss: How many of them are lost, from 0 to 1.
    """
    if not os.access(_TUN, os.R_OK | os.W_OK):
        pytest.skip(f"there is no {_TUN}, by which packets pass through a process")
    with contextlib.ExitStack() as stack:
        ends = []
        for name, own, other in zip(names, addresses, reversed(addresses), strict=True):
            device = f"rough{uuid.uuid4().hex[:8]}"
            ends.append(os.open(_TUN, os.O_RDWR))
            stack.callback(os.close, ends[-1])  # The device and its route end with it.
            fcntl.ioctl(ends[-1], _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
            ip("link", "set", device, "netns", name)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "route", "add", other, "dev", device, "src", own)
        cable = RoughCable(ends, seconds, loss)
        stack.callback(cable.end)
        yield cable
