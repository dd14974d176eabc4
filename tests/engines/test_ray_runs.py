"""`tfrep run --engine ray`, for real: on a Ray of its own, and on a cluster whose machines are processes here."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from needs import needs_ray
from starting import GOES_ON, RUN, check_fits, check_what_was_learned, done, environ, found_in

from tfrep_strategy.rendezvous.connections import free_ports

pytestmark = [pytest.mark.lane("engines"), needs_ray]
TELLS = str(Path(__file__).with_name("scripts") / "tells.py")
ON_RAY = [*RUN, "--engine", "ray", "-n", "2", "--communicator", "tf"]
_NODE = ["--object-store-memory", str(100 << 20), "--disable-usage-stats", "--min-worker-port", "0", "--max-worker-port", "0"]
_END_SECONDS = 30.0
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
_AGENTS_END_SECONDS = 90.0
"""If Ray's server was killed, its agents try for a minute to tell it that they end."""


class Cluster:
    """A Ray with machines at loopback addresses of their own. The one of the launcher has no place for ranks."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def start(self, folder: str) -> None:
        head = ["--head", "--port", self.address.rpartition(":")[2], "--temp-dir", folder, "--include-dashboard", "false"]
        self._start("127.0.0.1", *head, "--num-cpus", "0")
        for number, gpus in enumerate(("0", "0", "2"), 1):
            self._start(f"127.0.1.{number}", "--address", self.address, "--num-cpus", "1", "--num-gpus", gpus)

    def run(self, *arguments: str) -> list[str]:
        """Returns the command line of a run on the cluster."""
        return [*ON_RAY, "--ray-address", self.address, *arguments]

    def _start(self, ip: str, *options: str) -> None:
        ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
        command = [*ray, *_NODE, "--node-ip-address", ip, *options]
        variables = environ(**self.variables, CUDA_VISIBLE_DEVICES="0,1")  # As many as a machine may declare.
        subprocess.run(command, env=variables, check=True, capture_output=True, timeout=100)

    def end(self) -> None:
        """Ends all that knows the token."""
        token = self.variables["RAY_AUTH_TOKEN"]
        mine = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine += [each] if each.environ().get("RAY_AUTH_TOKEN") == token else []
        for each in mine:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(mine, _END_SECONDS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three machines with a place each, or two places with GPUs on the last."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        started = Cluster()
        try:
            started.start(folder)
            yield started
        finally:
            started.end()


@pytest.fixture
def no_notes_left() -> Iterator[None]:
    """A launcher that is killed without warning, as Ray kills what a lost actor has started, leaves a folder with notes."""
    yield
    for folder in Path(tempfile.gettempdir()).glob("tfrep-*"):
        if not folder.name.startswith("tfrep-logs-"):
            shutil.rmtree(folder, ignore_errors=True)


def test_ranks_on_an_own_ray_learn_what_one_device_learns(one_device: list[Any], tmp_path: Path) -> None:
    output, _ = done([*ON_RAY, GOES_ON], tmp_path)
    check_fits(output, one_device)


@pytest.mark.parametrize(("what", "exit_code"), [("fails", 1), ("ends", 143)])
def test_a_rank_that_fails_is_named_and_not_started_again(what: str, exit_code: int, tmp_path: Path) -> None:
    output, said = done([*ON_RAY, "--prefix", "--max-restarts", "1", TELLS, what], tmp_path, exit_code)
    assert len(found_in(output)) == 2, "ranks were started again"
    assert f"Rank 1 failed with exit code {exit_code}" in said
    assert ("ValueError: the data are spoiled" in said) == (what == "fails")
    assert "[0] FOUND" in output
    assert "[1] FOUND" in output


def test_a_killed_rank_goes_on_from_its_backup(one_device: list[Any], tmp_path: Path) -> None:
    kill = json.dumps(["self", signal.SIGKILL, [[1, 0, 2, 3]]])
    output, said = done([*ON_RAY, "--max-restarts", "1", GOES_ON, kill], tmp_path, TFREP_BACKUP_SECONDS="0")
    assert "tfrep: rank 1 was lost (SIGKILL). All ranks are started again (1 of 1). Each fit goes on" in said
    check_what_was_learned(output, one_device)


@contextlib.contextmanager
def waiting_run(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """Gives the launcher of a run on a Ray of its own, and all processes of the run; its ranks wait."""
    launcher = subprocess.Popen([*ON_RAY, TELLS, "waits", str(tmp_path)], env=environ(), cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        pids = tmp_path / "pids"
        deadline = time.monotonic() + 100
        while not pids.exists() or not pids.read_text():
            assert launcher.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        started = psutil.Process(launcher.pid).children(recursive=True)
        assert {each.pid for each in started} >= set(json.loads(pids.read_text()))
        yield launcher, started
    finally:
        launcher.kill()
        launcher.wait()


def check_end(launcher: subprocess.Popen[bytes], started: list[psutil.Process], number: int) -> None:
    agents = [each for each in started if each.name() in _AGENTS]
    launcher.send_signal(number)
    assert launcher.wait(_END_SECONDS) in (-number, 128 + number)
    assert not psutil.wait_procs(set(started).difference(agents), _END_SECONDS)[1]
    assert not psutil.wait_procs(agents, _AGENTS_END_SECONDS)[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.usefixtures("no_notes_left")
def test_everything_ends_with_the_launcher(number: int, tmp_path: Path) -> None:
    with waiting_run(tmp_path) as (launcher, started):
        assert "raylet" in {each.name() for each in started}
        check_end(launcher, started, number)


_CONNECTS = """
import sys, ray
from ray.exceptions import RayError
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    print("ran", ray.get(ray.remote(lambda: "a task").options(num_cpus=0).remote()))
except Exception as error:
    print("refused", type(error).__name__, error)
"""


def connect(address: str, *tokens: str) -> list[str]:
    """Returns what becomes of programs that connect to a Ray at once, each with its token, and have it run something."""
    command = [sys.executable, "-c", _CONNECTS, address]
    # Else Ray would look for a loopback address at another one of this machine.
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    quiet = {name: value for name, value in environ(**settings).items() if "RAY_AUTH" not in name}
    with contextlib.ExitStack() as stack:
        started = []
        for token in tokens:
            own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}
            started.append(subprocess.Popen(command, env=quiet | own, stdout=subprocess.PIPE, text=True))
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        return [each.communicate(timeout=90)[0] for each in started]


@pytest.mark.usefixtures("no_notes_left")
def test_who_has_not_the_token_of_an_own_ray_is_refused(tmp_path: Path) -> None:
    """Of all programs of this machine, only who has the token runs something there."""
    with waiting_run(tmp_path) as (launcher, started):
        [server] = [each for each in started if each.name() == "gcs_server"]
        token = server.environ()["RAY_AUTH_TOKEN"]
        assert len(token) == 64
        assert not any(token in " ".join(each.cmdline()) for each in [psutil.Process(launcher.pid), *started])
        ports = {each.laddr.port for each in server.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        address = next(word for each in started for word in each.cmdline() if word.startswith("--gcs-address=")).partition("=")[2]
        assert int(address.rpartition(":")[2]) in ports
        own, without, wrong = connect(address, token, "", secrets.token_hex(32))
        assert own == "ran a task\n"
        assert without.startswith("refused "), without
        assert wrong.startswith("refused "), wrong
        check_end(launcher, started, signal.SIGTERM)


def test_addresses_without_a_cluster(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        silent = f"127.0.0.1:{stranger.getsockname()[1]}"
        starting = time.monotonic()
        _, said = done([*ON_RAY, TELLS], tmp_path, 2, RAY_ADDRESS=silent)
        assert "Cannot connect to Ray" in said
        assert time.monotonic() - starting < 60
    _, said = done([*ON_RAY, "--ray-address", silent, TELLS], tmp_path, 2)
    assert f"Nobody listens at the address of the Ray cluster (Connection refused). Received: ray_address='{silent}'" in said


def test_places_with_gpus(cluster: Cluster, tmp_path: Path) -> None:
    """The GPUs are only declared. Ranks see those of their places, and a variable that was exported."""
    options = ["--gpus-per-rank", "1", "--cpus-per-rank", "0.5", "--prefix", "--export", "MY_WORD"]
    output, _ = done(cluster.run(*options, TELLS), tmp_path, MY_WORD="hello", CUDA_VISIBLE_DEVICES="7", **cluster.variables)
    found = found_in(output)
    assert sorted(each["rank"] for each in found) == [0, 1]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,1"] * 2
    assert [each["MY_WORD"] for each in found] == ["hello"] * 2
    assert [each["OMP_NUM_THREADS"] for each in found] == [None] * 2


def test_places_that_there_are_not(cluster: Cluster, tmp_path: Path) -> None:
    command, limit = cluster.run("--cpus-per-rank", "7", TELLS), {"TFREP_RENDEZVOUS_TIMEOUT": "12"}
    _, said = done(command, tmp_path, 2, **limit, **cluster.variables)
    assert "waiting for Ray to have 2 places of 7 CPU" in said
    assert "Ray did not have places for 2 ranks within 12 seconds." in said


@pytest.mark.parametrize("lost", ["ray::", "raylet"])
@pytest.mark.usefixtures("no_notes_left")
def test_what_ray_has_lost_goes_on_elsewhere(lost: str, cluster: Cluster, one_device: list[Any], tmp_path: Path) -> None:
    """An actor is killed, then the Ray of a whole machine, whose place another machine takes."""
    kill = json.dumps([lost, signal.SIGKILL, [[1, 0, 2, 3]]])
    restart = ["--max-restarts", "1", "--backup-dir", str(tmp_path / "backups")]
    command = cluster.run("--gpus-per-rank", "0", *restart, GOES_ON, kill)
    output, said = done(command, tmp_path, TFREP_BACKUP_SECONDS="0", **cluster.variables)
    assert " was lost (" in said
    assert "All ranks are started again (1 of 1). Each fit goes on from its last backup." in said
    check_what_was_learned(output, one_device)
