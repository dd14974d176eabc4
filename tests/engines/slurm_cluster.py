"""A Slurm cluster on this machine: `munged`, `slurmctld` and a `slurmd` for each node as child processes, all in one folder.

The one node is this machine, or several nodes are network namespaces.
"""

from __future__ import annotations

import contextlib
import getpass
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from networks import HOSTS
from starting import LIMIT, environ

from tfrep_strategy.cluster.rendezvous.connections import free_ports

_CONFIGURATION = """\
ClusterName=tfrep
SlurmctldHost={host}({addresses[0]})
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
FirstJobId={first_job}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_NODE = "NodeName={node} NodeAddr={address} Port={port} CPUs=2 State=UNKNOWN"
_GPUS = "NodeName={node} Name=gpu File=/dev/null\nNodeName={node} Name=gpu File=/dev/zero\n"
"""Devices that stand for two GPUs: Slurm hands them out, and tells processes their numbers."""

_START_SECONDS = 60.0


class Cluster:
    """A running cluster.

    Args:
        folder: Where everything is that belongs to it.
        network: The network namespace in which users are, if it is not that of this process.
    """

    def __init__(self, folder: Path, network: str | None = None) -> None:
        self._folder = folder
        self._where = _in(network) if network else []
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf"), "XDG_CACHE_HOME": str(folder / "cache")}

    def ask(self, *command: str) -> str:
        """Runs one of Slurm's commands, and returns what it says."""
        asked = subprocess.run(
            [*self._where, *command], env=environ(**self.variables), capture_output=True, text=True, timeout=LIMIT, check=True
        )
        return asked.stdout.strip()

    def state(self, job: str, field: str = "JobState") -> str:
        """Returns the state of a job, such as "RUNNING", or another field of its description."""
        shown = self.ask("scontrol", "show", "job", "--oneliner", job)
        return shown.partition(f"{field}=")[2].partition(" ")[0]

    def logs(self) -> str:
        """Returns the ends of what the daemons have written."""
        return "\n".join(f"{log.name}:\n{log.read_text('utf-8')[-2000:]}" for log in self._folder.glob("*.log"))


@contextlib.contextmanager
def cluster(folder: Path, networks: Sequence[str] = ()) -> Iterator[Cluster]:
    """Starts the daemons, and ends them.

    Args:
        folder: Where they keep their files. Their sockets need a short name.
        networks: Network namespaces, those of `two_networks`. Each is a node, which is said to have two GPUs.
    """
    nodes = HOSTS[: len(networks)] if networks else [socket.gethostname()]
    addresses = HOSTS[: len(networks)] if networks else ["127.0.0.1"]
    (folder / "state").mkdir()
    for node in nodes:
        (folder / f"spool-{node}").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    configuration = folder / "slurm.conf"
    # The ports of ranks follow from the number of their job: those of two clusters of one machine should differ.
    first_job = 1 + secrets.randbelow(10_000)
    controller, *ports = free_ports(1 + len(nodes))
    gpus = " Gres=gpu:2" if networks else ""
    lines = [
        _NODE.format(node=node, address=address, port=port) + gpus
        for node, address, port in zip(nodes, addresses, ports, strict=True)
    ]
    text = _CONFIGURATION.format(
        host=socket.gethostname(), addresses=addresses, user=getpass.getuser(), port=controller, folder=folder,
        first_job=first_job, nodes="\n".join(lines),
    )  # fmt: skip
    configuration.write_text(text, "utf-8")
    (folder / "gres.conf").write_text("".join(_GPUS.format(node=node) for node in nodes if networks), "utf-8")
    made = Cluster(folder, networks[0] if networks else None)
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "daemon", "seed-file": "seed"}
    munged = ["munged", "--foreground", "--force", *(f"--{option}={folder}/munge.{name}" for option, name in files.items())]
    with contextlib.ExitStack() as daemons:
        daemons.enter_context(_daemon(munged, folder / "munged.log"))
        _wait_for(made, (folder / "munge.socket").exists)
        places = [_in(network) for network in networks] or [[]]
        daemons.enter_context(_daemon([*places[0], "slurmctld", "-D", "-f", str(configuration)], folder / "slurmctld.log"))
        for node, place in zip(nodes, places, strict=True):
            slurmd = [*place, "slurmd", "-D", "-f", str(configuration), "-N", node]
            daemons.enter_context(_daemon(slurmd, folder / f"slurmd-{node}.log"))
        _wait_for(made, lambda: _is_idle(made))
        yield made


def _in(network: str) -> list[str]:
    """What stands before a command in a namespace. Slurm needs /sys as it is, in place of that of `ip netns exec`."""
    return ["nsenter", f"--net=/run/netns/{network}"]


@contextlib.contextmanager
def _daemon(command: list[str], log: Path) -> Iterator[None]:
    with open(log, "wb") as file:
        daemon = subprocess.Popen(command, env=environ(), stdout=file, stderr=file)
    try:
        yield
    finally:
        daemon.terminate()
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(20)


def _is_idle(made: Cluster) -> bool:
    try:
        return made.ask("sinfo", "--noheader", "--format=%T") == "idle"
    except subprocess.CalledProcessError:
        return False


def _wait_for(made: Cluster, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not ready():
        assert time.monotonic() < deadline, made.logs()
        time.sleep(0.2)
