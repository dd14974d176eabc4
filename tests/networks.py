"""Two network namespaces, joined by a cable, stand for two machines. This needs root, and the command ip."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence

import pytest

HOSTS = ["10.77.0.1", "10.77.0.2"]
HOSTS_6 = ["fd00:77::1", "fd00:77::2"]
ADDRESS = f"{HOSTS[0]}:29500"
CABLE = "cable"
ORDINARY = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
"""What takes from root all that root may do and others may not."""

needs_networks = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root, and the command ip"
)


@contextlib.contextmanager
def two_networks(addresses: Sequence[str] = HOSTS) -> Iterator[list[str]]:
    """Yields the names of two network namespaces, which reach only each other.

    Args:
        addresses: Of the two.
    """
    names = [f"tfrep-{uuid.uuid4().hex[:8]}" for _ in addresses]
    made = [subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False) for name in names]
    try:
        if any(each.returncode for each in made):
            pytest.skip(f"network namespaces cannot be made here: {made[0].stderr.decode()}")
        ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            # An IPv6 address can be used at once, without a search for another host that has it.
            prefix = ["64", "nodad"] if ":" in address else ["24"]
            ip("-n", name, "address", "add", f"{address}/{prefix[0]}", "dev", CABLE, *prefix[1:])
            ip("-n", name, "link", "set", CABLE, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextlib.contextmanager
def cable_cut(name: str) -> Iterator[None]:
    """Cuts the cable at a machine while the body runs."""
    ip("-n", name, "link", "set", CABLE, "down")
    try:
        yield
    finally:
        ip("-n", name, "link", "set", CABLE, "up")


def ip(*arguments: str) -> None:
    """Runs the command ip."""
    subprocess.run(["ip", *arguments], check=True)


def on(name: str) -> list[str]:
    """What stands before a command that is to run in a namespace."""
    return ["ip", "netns", "exec", name]


def pids_on(name: str) -> list[int]:
    """Returns the processes of a namespace."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in found.split()]
