"""The process that holds the servers of a local cluster: it starts them, restarts them, watches them, and ends them.

TensorFlow is imported once, before anything of it is initialised, and every server is a fork, so that a worker is back
within a fraction of a second. The process reads its orders from a pipe; when that ends, since whoever gave the orders has
ended or was killed, all servers are killed, and their logs removed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tfrep_strategy.cluster.local_cluster import wait_until_reachable
from tfrep_strategy.cluster.profiles.requests import answer_requests
from tfrep_strategy.cluster.rendezvous.confinement import confined
from tfrep_strategy.cluster.rendezvous.connections import watch_connections
from tfrep_strategy.cluster.signs_of_life import LOOK_SECONDS, Patience, Watch, start_signs
from tfrep_strategy.cluster.startup_log import quiet_start

_PR_SET_PDEATHSIG = 1
NAMES = {"worker": "Worker {}", "ps": "Parameter server {}"}
"""What the tasks of a job are called in messages."""


def main(arguments: list[str], own_path: list[str]) -> None:
    """Starts servers when it is told to, until its orders end. Returns never.

    Args:
        arguments: The cluster as JSON, the folder of the servers' logs, the one that goes with the cluster, and the patience with
            servers as JSON.
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
    # Ctrl-C in a terminal reaches every process; the one that gives the orders decides what follows from it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with quiet_start():
        import tensorflow  # noqa: F401  (what the forks share)

    servers: dict[tuple[str, int], int] = {}
    lock, reaping = threading.Lock(), threading.Lock()

    def answer(**content: Any) -> None:
        with lock:
            print(json.dumps(content), file=answers)

    def wait(job: str, index: int, pid: int) -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with reaping:  # From here on, the system may give the number to any process.
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
        """Kills a server that is stopped or silent. For the others it is then as any that is killed."""
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
    """Runs one server from start to end. Returns never."""
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
    """Returns where the servers of a job give signs of life."""
    return Path(folder, f"signs-{job}")


def run_server(cluster: dict[str, Any], job: str, index: int, *, coordinator_timeout: float | None = None) -> None:
    """Serves as one worker or parameter server of a cluster until the process is ended.

    Args:
        cluster: Addresses ("host:port") by job: "worker" and "ps", and "chief" if it is known.
        job: "worker" or "ps".
        index: Which of that job's tasks this process is.
        coordinator_timeout: Lets the process end with the chief: with exit code 0 when the chief has been there and is
            gone, and with 1 when it has not come after so many seconds. None: it serves until it is ended.
    """
    # A call to a task that is gone fails at once instead of waiting for it to come back.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto()
    config.inter_op_parallelism_threads = max(4, len(cluster["worker"]) + 1)
    spec = tf.train.ClusterSpec(cluster)
    own = spec.task_address(job, index)
    everybody = [address for each in spec.jobs for address in spec.job_tasks(each)]
    unknown = "" if "chief" in spec.jobs else "the coordinator"
    with confined(own, everybody, unknown=unknown):
        server = tf.distribute.Server(spec, job, index, protocol="grpc", config=config, start=False)
    server.start()  # It obeys nobody before.
    watch_connections(server, everybody)
    if coordinator_timeout is not None:
        threading.Thread(target=_end_with, args=(cluster["chief"][0], coordinator_timeout), daemon=True).start()
    server.join()


def _end_with(address: str, seconds: float) -> None:
    if wait_until_reachable({"chief": address}, seconds):
        print(f"tfrep: the coordinator ({address}) has not come after {seconds:g} seconds.", file=sys.stderr, flush=True)
        os._exit(1)
    while not wait_until_reachable({"chief": address}, 5.0):
        time.sleep(1.0)
    os._exit(0)
