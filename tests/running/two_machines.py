"""Two machines with a server of ssh each: network namespaces, each with a host name, mounts and a temporary folder of its own.

This needs root, and the commands that `needs_machines` names.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from networks import HOSTS, on, pids_on

COMMANDS = ("ip", "nsenter", "unshare", "ssh", "ssh-keygen", "/usr/sbin/sshd")
MISSING = [command for command in COMMANDS if shutil.which(command) is None]
needs_machines = pytest.mark.skipif(
    os.geteuid() != 0 or bool(MISSING), reason=f"two machines need root, and {', '.join(MISSING) or 'what is there'}"
)
_START_SECONDS = 20

_START = """
set -e
hostname {name}
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
mount -t tmpfs tmpfs {own}
mkdir {own}/tmp
printf '127.0.0.1 localhost\n{address} {name}\n' > {own}/names
mount --bind {own}/names /etc/hosts
exec /usr/sbin/sshd -D -e -f {config}
"""
"""What makes a namespace a machine. Its folder `own` has the same name on both, and other contents."""

_SSHD = """
Port 22
ListenAddress {address}
HostKey {folder}/{name}_key
AuthorizedKeysFile {folder}/user_key.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
SetEnv TMPDIR={folder}/own/tmp
"""

_SSH = """
Host *
    User root
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
"""

_SSH_HOST = """
Host {name}
    HostName {address}
"""


@dataclass(frozen=True)
class Machine:
    """One of the two.

    Attributes:
        name: Of its network namespace, and of the host.
        address: Its address.
        pid: Of its server.
        folder: What both share: configurations and keys. Its `own` is of one machine.
    """

    name: str
    address: str
    pid: int
    folder: Path

    @property
    def enter(self) -> list[str]:
        """What stands before a command that is to run there."""
        return ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--net", f"--wdns={self.folder}"]

    @property
    def variables(self) -> dict[str, str]:
        """What a program needs that is to run there."""
        return {"TFREP_SSH": f"ssh -F {shlex.quote(str(self.folder / 'ssh_config'))}", "TMPDIR": str(self.folder / "own" / "tmp")}

    def file(self, path: Path) -> Path:
        """Returns where this process finds a file of the machine."""
        return Path(f"/proc/{self.pid}/root{path}")

    def pids(self) -> set[int]:
        """Returns the processes on it, without its server's own."""
        return {pid for pid in pids_on(self.name) if "sshd" not in _command_line(pid)}

    def command_lines(self) -> list[str]:
        """Returns the command lines of all processes on it, which every user there can read."""
        return [_command_line(pid) for pid in pids_on(self.name)]


@contextlib.contextmanager
def machines_in(names: Sequence[str], folder: Path, addresses: Sequence[str] = HOSTS) -> Iterator[list[Machine]]:
    """Makes machines of two network namespaces, and ends all that runs on them.

    Args:
        names: Of the namespaces, which a cable joins. ssh knows the machines by these, too.
        folder: An empty folder.
        addresses: Of the two.
    """
    mount = ["unshare", "--mount", "--uts", "mount", "-t", "tmpfs", "tmpfs", "/run"]
    probe = subprocess.run(mount, capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"a machine cannot have mounts of its own here: {probe.stderr.decode()}")
    (folder / "own").mkdir()
    for key in (*(f"{name}_key" for name in names), "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    named = [_SSH_HOST.format(name=name, address=address) for name, address in zip(names, addresses, strict=True)]
    (folder / "ssh_config").write_text("".join([*named, _SSH.format(folder=folder)]))
    know(folder, names, addresses)
    with contextlib.ExitStack() as stack:
        machines = []
        for name, address in zip(names, addresses, strict=True):
            config = folder / f"{name}_sshd"
            config.write_text(_SSHD.format(address=address, folder=folder, name=name))
            start = _START.format(name=name, address=address, own=folder / "own", config=config)
            stack.callback(end_all_on, name)
            with open(folder / f"{name}.log", "w") as log:
                server = subprocess.Popen([*on(name), "unshare", "--mount", "--uts", "sh", "-c", start], stdout=log, stderr=log)
            stack.callback(server.wait)
            stack.callback(server.terminate)
            machines.append(Machine(name, address, server.pid, folder))
        for machine in machines:
            _wait_for_server(machine)
        yield machines


def know(folder: Path, names: Sequence[str], addresses: Sequence[str] = HOSTS) -> None:
    """Writes the keys of the machines where ssh looks for them."""
    keys = [" ".join((folder / f"{name}_key.pub").read_text().split()[:2]) for name in names]
    lines = [f"{address} {key}\n" for address, key in zip(addresses, keys, strict=True)]
    (folder / "known_hosts").write_text("".join(lines))


def end_all_on(name: str) -> None:
    """Ends all processes of a network namespace."""
    for pid in pids_on(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _wait_for_server(machine: Machine) -> None:
    deadline = time.monotonic() + _START_SECONDS
    probe = f"import socket; socket.create_connection(({machine.address!r}, 22), 1).close()"
    while subprocess.run([*on(machine.name), sys.executable, "-S", "-c", probe], capture_output=True, check=False).returncode:
        log = (machine.folder / f"{machine.name}.log").read_text()
        assert Path(f"/proc/{machine.pid}").exists(), f"sshd has ended: {log}"
        assert time.monotonic() < deadline, log
        time.sleep(0.1)
    assert socket.gethostname() != machine.name


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return ""
