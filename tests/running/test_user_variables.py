"""Variables that the user sets count where no option says anything else."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from raising import refuses
from test_joining import LIMIT, _tasks_of_torchrun, environ

from tfrep_strategy.cluster.command import module_command
from tfrep_strategy.running import Options, hosts
from tfrep_strategy.running.runs import chosen_by_user

pytestmark = pytest.mark.lane("launchers")


@pytest.mark.parametrize("of_a_run", [None, "TFREP_RESTARTS", "TFREP_NUM_REPLICAS"])
def test_those_of_an_outer_run_are_not_the_users(of_a_run: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_BACKUP_DIR", "backups")
    monkeypatch.setenv("TFREP_COMMUNICATOR", "tf")
    if of_a_run is not None:
        monkeypatch.setenv(of_a_run, "1")
    found = chosen_by_user("TFREP_BACKUP_DIR"), chosen_by_user("TFREP_COMMUNICATOR")
    assert found == (("backups", "tf") if of_a_run is None else (None, None))


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFREP_COMMUNICATOR", "pigeons")
    with refuses(code="TFREP-E005", TFREP_COMMUNICATOR="pigeons"):
        chosen_by_user("TFREP_COMMUNICATOR")


def test_what_other_hosts_get(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MINE", "NOT_MINE", "RANK", "HOROVOD_RANK", "HOROVOD_GLOO_IFACE", "TFREP_COMMUNICATOR"):
        monkeypatch.setenv(name, "eth7")
    options = Options(hosts="localhost:1,127.0.0.1:1", export=("MINE",))
    given = hosts._given(options, ["script", "train.py"])["environ"]
    assert {name for name, value in given.items() if value == "eth7"} == {"MINE", "HOROVOD_GLOO_IFACE"}
    with refuses(export=["RANK", "TFREP_COMMUNICATOR"]):
        hosts._given(replace(options, export=("RANK", "MINE", "TFREP_COMMUNICATOR")), ["script", "train.py"])


def test_folders_that_take_no_files() -> None:
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--log-dir", "/proc/self", __file__]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("tfrep: Cannot write to the folder (")
    assert "Received: log_dir='/proc/self'" in done.stderr


def test_a_search_path_with_other_things_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores what is no text there."""
    monkeypatch.setattr(sys, "path", [Path("/somewhere"), *sys.path])
    assert "/somewhere" not in module_command("a.module")[-1]


SAYS = """
import os, sys, time
from pathlib import Path
import tfrep_strategy as tfrep
tfrep.barrier()
names = ("TFREP_COMMUNICATOR", "TFREP_BACKUP_DIR")
Path(sys.argv[1], "rank" + os.environ["RANK"]).write_text(" ".join(os.environ.get(name, "") for name in names) + f" {os.getpid()}")
time.sleep(float(sys.argv[2]))
"""


@contextlib.contextmanager
def two_tasks(folder: Path, seconds: int, first: Sequence[str] = ()) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts two ranks as another launcher does, each of which calls `tfrep run`."""
    (folder / "says.py").write_text(SAYS)
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", str(folder / "says.py"), str(folder), str(seconds)]
    own = {"TFREP_COMMUNICATOR": "tf", "TFREP_BACKUP_DIR": str(folder / "backups"), "XDG_CACHE_HOME": str(folder / "cache")}
    tasks = [
        subprocess.Popen([*first, *command] if not rank else command, cwd=folder, env=environ(**own, **task))
        for rank, task in enumerate(_tasks_of_torchrun())
    ]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.kill()
            task.wait()


def test_ranks_of_another_launcher_hear_of_them(tmp_path: Path) -> None:
    with two_tasks(tmp_path, 0) as tasks:
        assert [task.wait(LIMIT) for task in tasks] == [0, 0]
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text().split()[:2] == ["tf", str(tmp_path / "backups")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "tf {}/backups multi-worker"),
        (["--communicator", "shared_memory", "--backup-dir", "mine"], "shared_memory {}/mine multi-worker"),
    ],
)
def test_a_run_hears_of_them_where_no_option_says_it(options: list[str], expected: str, tmp_path: Path) -> None:
    says = tmp_path / "says.py"
    names = "TFREP_COMMUNICATOR", "TFREP_BACKUP_DIR", "TFREP_STRATEGY"
    says.write_text(f"import os; print('FOUND', *map(os.environ.get, {names}))")
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", *options, str(says)]
    own = environ(TFREP_COMMUNICATOR="tf", TFREP_BACKUP_DIR=str(tmp_path / "backups"), TFREP_STRATEGY="multi-worker")
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"FOUND {expected.format(tmp_path)}"]


def written_by(task: subprocess.Popen[bytes], path: Path) -> str:
    """Waits until a file has three words, and returns them."""
    deadline = time.monotonic() + LIMIT
    while not path.exists() or len(path.read_text().split()) < 3:
        assert task.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return path.read_text()


def _can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _can_make_namespaces(), reason="namespaces of processes cannot be made here")
def test_the_first_process_of_a_container(tmp_path: Path) -> None:
    """The kernel shields process 1 from signals. So the rank is another process, and is told of them."""
    with two_tasks(tmp_path, 600, ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]) as tasks:
        assert int(written_by(tasks[0], tmp_path / "rank0").split()[2]) > 1
        (first,) = psutil.Process(tasks[0].pid).children()
        first.terminate()
        assert tasks[0].wait(30) == 128 + signal.SIGTERM
