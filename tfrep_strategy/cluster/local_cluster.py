"""A cluster of parameter servers and workers on this machine: its processes, and the holder process, which forks its servers.

Only the holder loads TensorFlow. It imports TensorFlow once and initialises nothing, and forks each server from there, so that a
worker is back within a fraction of a second. It reads its orders from a pipe. When the pipe ends, because the process that gave the
orders has ended or was killed, the holder kills all servers and removes their logs.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfrep_strategy.cluster.command import module_command
from tfrep_strategy.cluster.hardware import thread_variables
from tfrep_strategy.cluster.identity import inherited_environ
from tfrep_strategy.cluster.profiles.requests import answer_requests, name_of_folder
from tfrep_strategy.cluster.rendezvous.confinement import confined
from tfrep_strategy.cluster.rendezvous.connections import held_ports, watch_connections
from tfrep_strategy.cluster.signs_of_life import LOOK_SECONDS, Patience, Watch, start_signs
from tfrep_strategy.cluster.startup_log import quiet_start
from tfrep_strategy.core.validation import MOST_PROCESSES
from tfrep_strategy.errors import PeerError, check_count, message

_log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Seconds that the servers may take to start."""
_FROZEN_HINT = "find out who has stopped it, or what it was doing; TFREP_TIMEOUT=0 has others wait, as under a debugger."


class LocalCluster:
    """The servers and workers of a cluster, each a process with its own port.

    They end with `stop`, and also when this process ends in any other way. A stopped or silent one is killed, as a launcher
    kills such a rank. Make one with `local_cluster`.

    Args:
        workers: Number of workers.
        servers: Number of parameter servers.
        on_end: Called with the job, the index and the exit code of a task that ended.
        log_dir: Folder for the logs. Default: `folder`.

    Raises:
        ConfigurationError: `TFREP_TIMEOUT` or `TFREP_SILENCE_TIMEOUT` is not a number of seconds.
        PeerError: The processes do not start.

    Attributes:
        spec: Addresses by job, as `tf.train.ClusterSpec` takes them.
        folder: A temporary folder, which is removed with the cluster.
        log_dir: Folder with one log file for each task.
    """

    def __init__(
        self,
        workers: int,
        servers: int,
        on_end: Callable[[str, int, int], None] | None = None,
        log_dir: Path | None = None,
    ) -> None:
        patience = dataclasses.astuple(Patience.of_environment())
        self._held = contextlib.ExitStack()
        ports = self._held.enter_context(held_ports(workers + servers))
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self.spec: dict[str, list[str]] = {"worker": addresses[:workers], "ps": addresses[workers:]}
        self.folder = Path(tempfile.mkdtemp(prefix=name_of_folder()))
        self.log_dir = log_dir or self.folder
        self._on_end = on_end
        self._is_over = False
        self._pids: dict[str, int] = {}
        self._changed = threading.Condition()
        of_holder = [json.dumps(self.spec), str(self.log_dir), str(self.folder), json.dumps(patience)]
        environ = inherited_environ() | {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}
        environ |= thread_variables(workers)
        self._process = subprocess.Popen(
            module_command(__name__, *of_holder),
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            for job, tasks in self.spec.items():
                for index in range(len(tasks)):
                    self.start(job, index)
        except BaseException:
            self.stop()
            raise

    def start(self, job: str, index: int) -> None:
        """Starts a task, or restarts it after it ended. Returns when its process exists.

        Args:
            job: "worker" or "ps".
            index: Its index in the job.

        Raises:
            PeerError: The process does not start.
        """
        name = f"{job}{index}"
        with self._changed:
            if name in self._pids:
                return
            try:
                print(json.dumps([job, index]), file=self._process.stdin)
            except (OSError, ValueError):  # The pipe is broken, or closed.
                hint = "make a new cluster; their logs may tell why."
                raise PeerError(message("The servers of the cluster have ended.", hint, logs=str(self.log_dir))) from None
            self._changed.wait_for(lambda: name in self._pids or self._is_over, START_SECONDS)
            if name not in self._pids:
                hint = "see its log, and how much memory is left."
                raise PeerError(message("A task of the cluster does not start.", hint, task=name, logs=str(self.log_dir)))

    def kill(self, job: str, index: int) -> None:
        """Kills a task without warning, as `kill -9` does, and returns when it is gone.

        Args:
            job: "worker" or "ps".
            index: Its index in the job.
        """
        name = f"{job}{index}"
        with self._changed:
            if name in self._pids:
                os.kill(self._pids[name], signal.SIGKILL)
                self._changed.wait_for(lambda: name not in self._pids, START_SECONDS)

    def pid(self, job: str, index: int) -> int | None:
        """Returns the process id of a task, or None if it is not running."""
        return self._pids.get(f"{job}{index}")

    @property
    def has_ended(self) -> bool:
        """Whether the process that holds all tasks has ended, and the tasks with it."""
        return self._is_over

    def stop(self) -> None:
        """Ends all tasks, and returns when they are gone."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)
        self._process.stdout.close()  # type: ignore[union-attr]
        self._held.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        for line in self._process.stdout:  # type: ignore[union-attr]
            event = json.loads(line)
            with self._changed:
                if "started" in event:
                    self._pids[event["started"]] = event["pid"]
                elif "frozen" in event:
                    _log.warning("%s %s, and is killed.\nHint: %s", event["frozen"], event["seen"], _FROZEN_HINT)
                elif self._pids.get(event["ended"]) == event["pid"]:
                    del self._pids[event["ended"]]
                self._changed.notify_all()
            if "ended" in event and self._on_end is not None:
                job = event["ended"].rstrip("0123456789")
                self._on_end(job, int(event["ended"][len(job) :]), event["code"])
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def check_counts(**counts: Any) -> None:
    """Refuses a number of workers or servers that is not a positive whole number.

    Raises:
        ConfigurationError: For the first such number.
    """
    for name, count in counts.items():
        check_count(f"A cluster needs at least one of its {name}.", 1, MOST_PROCESSES, **{name: count})


def wait_until_reachable(addresses: dict[str, str], seconds: float) -> list[str]:
    """Waits until a server listens at each address.

    Args:
        addresses: Address ("host:port") of each task, by the task's name.
        seconds: Longest time to wait.

    Returns:
        The names of the tasks that cannot be reached.

    Example:
        >>> wait_until_reachable({"worker 0": "127.0.0.1:1"}, 0.1)
        ['worker 0']
    """
    deadline = time.monotonic() + seconds
    missing = dict(addresses)
    while missing:
        for name, address in list(missing.items()):
            host, _, port = address.rpartition(":")
            with contextlib.suppress(OSError, ValueError):
                left = max(0.1, min(2.0, deadline - time.monotonic()))
                socket.create_connection((host.strip("[]"), int(port)), timeout=left).close()
                del missing[name]
        if missing:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
    return list(missing)


_PR_SET_PDEATHSIG = 1
NAMES = {"worker": "Worker {}", "ps": "Parameter server {}"}
"""Names of the tasks of a job in messages."""


def main(arguments: list[str], own_path: list[str]) -> None:
    """Starts servers as ordered, until the orders end. Never returns.

    Args:
        arguments: The cluster as JSON, the folder of the servers' logs, the folder that is removed with the cluster, and the
            patience with servers as JSON.
        own_path: Unused.
    """
    del own_path
    cluster, log_dir, folder = json.loads(arguments[0]), Path(arguments[1]), arguments[2]
    patience = Patience(*json.loads(arguments[3]))
    orders = os.fdopen(os.dup(0), "r")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    # Ctrl-C in a terminal reaches every process. The process that gives the orders decides how to react.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with quiet_start():
        import tensorflow  # noqa: F401  (shared by the forks)

    servers: dict[tuple[str, int], int] = {}
    lock, reaping = threading.Lock(), threading.Lock()

    def answer(**content: Any) -> None:
        with lock:
            print(json.dumps(content), file=answers)

    def wait(job: str, index: int, pid: int) -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with reaping:  # From here on, the system may give this process id to another process.
            _, status = os.waitpid(pid, 0)
            if servers.get((job, index)) == pid:
                del servers[job, index]
        answer(ended=f"{job}{index}", pid=pid, code=os.waitstatus_to_exitcode(status))

    def kill(job: str, index: int, pid: int) -> bool:
        with reaping:
            is_server = servers.get((job, index)) == pid
            if is_server:
                os.kill(pid, signal.SIGKILL)
        return is_server

    def watch(job: str) -> None:
        """Kills a stopped or silent server. To the others it looks like any killed server."""
        look = Watch(_signs(folder, job), patience, NAMES[job]).look
        while True:
            time.sleep(LOOK_SECONDS)
            pids = {index: pid for (of, index), pid in list(servers.items()) if of == job}
            frozen = look(pids)
            if frozen and frozen.rank in pids and kill(job, frozen.rank, pids[frozen.rank]):
                answer(frozen=NAMES[job].format(frozen.rank), seen=frozen.seen)

    for job in cluster:
        _signs(folder, job).mkdir()
        threading.Thread(target=watch, args=(job,), daemon=True).start()
    parent = os.getpid()
    try:
        for line in orders:
            job, index = json.loads(line)
            name = f"{job}{index}"
            pid = os.fork()
            if pid == 0:
                for stream in (orders, answers):
                    os.close(stream.fileno())
                _serve(cluster, job, index, log_dir / f"{name}.log", Path(folder), parent)
            servers[job, index] = pid
            threading.Thread(target=wait, args=(job, index, pid), daemon=True).start()
            answer(started=name, pid=pid)
    finally:
        for (job, index), pid in list(servers.items()):
            kill(job, index, pid)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _serve(cluster: dict[str, list[str]], job: str, index: int, log: Path, folder: Path, parent: int) -> None:
    """Runs one server from start to end. Never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        start_signs(_signs(folder, job), index)
        answer_requests(folder, f"{job}{index}")
        run_server(cluster, job, index)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _signs(folder: str | Path, job: str) -> Path:
    """Returns the folder where the servers of a job give signs of life."""
    return Path(folder, f"signs-{job}")


def run_server(cluster: dict[str, Any], job: str, index: int, *, coordinator_timeout: float | None = None) -> None:
    """Serves as one worker or parameter server of a cluster until the process is ended.

    Args:
        cluster: Addresses ("host:port") by job: "worker" and "ps", and "chief" if it is known.
        job: "worker" or "ps".
        index: The index of this process in that job.
        coordinator_timeout: If given, the process ends with the chief: with exit code 0 when the chief has come and gone, and with
            1 when it has not come after so many seconds. None: it serves until it is ended.
    """
    # A call to a task that is gone fails at once instead of waiting for the task to come back.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto()
    config.inter_op_parallelism_threads = max(4, len(cluster["worker"]) + 1)
    spec = tf.train.ClusterSpec(cluster)
    own = spec.task_address(job, index)
    all_addresses = [address for each in spec.jobs for address in spec.job_tasks(each)]
    unknown = "" if "chief" in spec.jobs else "the coordinator"
    with confined(own, all_addresses, unknown=unknown):
        server = tf.distribute.Server(spec, job, index, protocol="grpc", config=config, start=False)
    server.start()  # It takes no orders before.
    watch_connections(server, all_addresses)
    if coordinator_timeout is not None:
        threading.Thread(target=_end_with, args=(cluster["chief"][0], coordinator_timeout), daemon=True).start()
    server.join()


def _end_with(address: str, seconds: float) -> None:
    if wait_until_reachable({"chief": address}, seconds):
        print(f"tfrep: the coordinator ({address}) has not connected within {seconds:g} seconds.", file=sys.stderr, flush=True)
        os._exit(1)
    while not wait_until_reachable({"chief": address}, 5.0):
        time.sleep(1.0)
    os._exit(0)
