"""The command `tfrep`, as a user types it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

import tfrep_strategy

pytestmark = pytest.mark.lane("launchers")

ROOT = str(Path(tfrep_strategy.__file__).parents[1])
LIMIT = 120

SCRIPTS = Path(__file__).with_name("scripts")
MEGABYTES = 80


def environ(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": ROOT, "TF_CPP_MIN_LOG_LEVEL": "3"} | more


def tfrep(*arguments: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tfrep_strategy.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environ(**more), capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with scripts of which one is in a folder of its own, beside a module that it imports."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / "place.py", tmp_path / "scripts")
    (tmp_path / "scripts" / "helper.py").touch()
    return tmp_path


def found_in(output: str) -> dict[str, object]:
    lines = [line for line in output.splitlines() if line.startswith("FOUND ")]
    assert len(lines) == 1
    return json.loads(lines[0].removeprefix("FOUND "))


@pytest.mark.parametrize("strategy", ["auto", "mirrored"])
def test_a_script_runs_as_python_would_run_it(project, strategy):
    done = tfrep(
        *("run", "-n", "2", "--strategy", strategy, "--log-dir", "logs"),
        *("scripts/place.py", "-n", "3", "--strategy", "mine", "--help"),
        cwd=project,
    )
    assert done.returncode == 0, done.stderr
    assert found_in(done.stdout) == {
        "argv": ["scripts/place.py", "-n", "3", "--strategy", "mine", "--help"],
        "path": str(project / "scripts"),
        "name": "__main__",
        "main": str(project / "scripts" / "place.py"),
        "replicas": 2,
        "same": True,
        "experimental": True,
        "stock": False,
        "helper": str(project / "scripts" / "helper.py"),
    }
    logs = sorted((project / "logs").iterdir())
    assert [log.name for log in logs] == ["events.jsonl", "rank1.log"][: 1 if strategy == "mirrored" else 2]
    if strategy != "mirrored":
        assert found_in(logs[1].read_text())["replicas"] == 2


def test_all_ranks_are_shown_with_their_rank(tmp_path):
    """Also where logs of an earlier run are left, which were longer."""
    (tmp_path / "logs").mkdir()
    for rank in range(2):
        (tmp_path / "logs" / f"rank{rank}.log").write_text(f"rank {rank}: of an earlier run\n" * 1000)
    done = tfrep("run", "-n", "2", "--prefix", "--log-dir", "logs", str(SCRIPTS / "speaks.py"), cwd=tmp_path)
    assert done.returncode == 3
    for rank in range(2):
        shown = [line for line in done.stdout.splitlines() if f"rank {rank}" in line]
        assert shown == [f"[{rank}] rank {rank}: {said}" for said in ("first", "second, to stderr", "no end")]
    assert "Its last lines:\n  rank 1: first" in done.stderr
    assert (tmp_path / "logs" / "rank0.log").read_text() == "rank 0: first\nrank 0: second, to stderr\nrank 0: no end"


def test_a_module_runs_as_python_would_run_it(project):
    done = tfrep("run", "-n", "1", "-m", "place", "--", "--epochs", "3", cwd=project / "scripts")
    assert done.returncode == 0, done.stderr
    found = found_in(done.stdout)
    assert found["argv"] == [str(project / "scripts" / "place.py"), "--epochs", "3"]
    assert found["path"] == str(project / "scripts")


@pytest.mark.parametrize(
    ("death", "code", "shown"),
    [
        ("exit", 3, "exit code 3"),
        ("raise", 1, "ValueError: seven"),
        ("make a folder that is there", 1, "`with tfrep.chief_first():`"),
        ("kill", 137, "SIGKILL"),
    ],
)
def test_a_rank_that_dies_ends_the_run(tmp_path, death, code, shown):
    word = f"marker-{uuid.uuid4().hex}"
    command = ["run", "-n", "2", str(SCRIPTS / "dies.py"), death, word]
    done = tfrep(*command, cwd=tmp_path, TMPDIR=str(tmp_path), TF_CPP_MIN_LOG_LEVEL="0")
    assert done.returncode == code
    assert "Rank 1 failed" in done.stderr
    report = done.stderr.rpartition("Rank 1 failed")[2]
    assert "last words" in report
    assert shown in report
    # TensorFlow's log and the frames of the launcher are in the log file only.
    assert not any(text in report for text in ("oneDNN", "absl::InitializeLog", "runpy", "noted_failure"))
    if "Error" in report:
        assert report.splitlines()[-2].strip().startswith(("ValueError: seven", "`with tfrep.chief_first():`"))
    logs = Path(done.stderr.rpartition("Logs: ")[2].strip())
    log = (logs / "rank1.log").read_text()
    assert "last words" in log
    assert shown in log or "exit" in shown or "SIGKILL" in shown
    assert not ranks_of(word)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["-n", "2"], "tfrep: 2 replicas on this machine (CPU), "),
        (["--strategy", "parameter-server", "--workers", "1"], "tfrep: 1 worker and 1 parameter server on this machine"),
        (["-q", "-n", "2"], ""),
    ],
    ids=["ranks", "servers", "quiet"],
)
def test_what_only_watches_is_small_and_ranks_start_quietly(tmp_path, options, what):
    unset = environ()
    del unset["TF_CPP_MIN_LOG_LEVEL"]
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", *options, str(SCRIPTS / "watched.py")]
    with open(tmp_path / "errors", "w+") as errors:
        process = subprocess.Popen(command, cwd=tmp_path, env=unset, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout.readline() == "READY\n", (tmp_path / "errors").read_text()
            launcher = psutil.Process(process.pid)
            guard = next(each for each in launcher.children() if "-S" in each.cmdline())
            for watcher in (launcher, guard):
                assert watcher.memory_info().rss < MEGABYTES * 2**20
                assert not [each.path for each in watcher.memory_maps() if "tensorflow" in each.path]
        finally:
            process.terminate()
            process.communicate(timeout=LIMIT)
        errors.seek(0)
        said, *lines = errors.read().splitlines()
    warning, source, error, *rest = lines if what else [said, *lines]
    assert said.startswith(what)
    assert warning.endswith("watched.py:7: UserWarning: the script's warning")
    assert "warnings.warn" in source
    assert error == "the script's error"
    assert all(line.startswith("tfrep: ") for line in rest), rest


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_stopping_the_command_stops_its_ranks(tmp_path, number, code):
    word = f"marker-{uuid.uuid4().hex}"
    command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", str(SCRIPTS / "sleeps.py"), word]
    own = environ(TMPDIR=str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with subprocess.Popen(command, cwd=tmp_path, env=own, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
            process.send_signal(number)
            assert process.wait(20) == code
        finally:
            process.kill()
    assert not ranks_of(word)
    assert not list((tmp_path / "temporary").iterdir())


def ranks_of(word: str) -> list[psutil.Process]:
    """Lists the processes with a word in their command line that are still there after two seconds."""
    deadline = time.monotonic() + 2
    while (left := [each for each in psutil.process_iter(["cmdline"]) if word in (each.info["cmdline"] or ())]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    return left


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-n", "0", "script.py"], "num_replicas=0"),
        (["-n", "100000", "script.py"], "num_replicas=100000"),
        (["--hosts", "a:" + "1" * 5000, "script.py"], "hosts='a:111"),
        (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a:" + "1" * 5000, "script.py"], "rendezvous='a:111"),
        (["--workers", "100000", "--strategy", "parameter-server", "script.py"], "workers=100000"),
        (["s" * 5000], "script='sss"),
        (["-n", "2", "missing.py"], "script='missing.py'"),
        (["--strategy", "mirorred", "script.py"], "strategy='mirorred'"),
        (["--communicator", "mpi", "script.py"], "communicator='mpi'"),
        (["--hosts", "a", "script.py"], "hosts='a'"),
        (["--hosts", "a:0", "script.py"], "hosts='a:0'"),
        (["--hosts", "[::1]:1,a:1", "script.py"], "give an IPv6 address a name in ~/.ssh/config."),
        (["--hosts", "a:2", "-n", "3", "script.py"], "num_replicas=3"),
        (["--export", "A", "script.py"], "export=('A',)"),
        (["--hosts", "no.such.host.invalid:2", "--export", "NO_SUCH_NAME", str(SCRIPTS / "speaks.py")], "export=['NO_SUCH_NAME']"),
        (["--hosts", "no.such.host.invalid:2", "--max-restarts", "1", str(SCRIPTS / "speaks.py")], "max_restarts=1"),
        (["--hosts", "a:2", "--strategy", "mirrored", "script.py"], "no --hosts."),
        (["--hosts", "a:2", "--strategy", "parameter-server", "script.py"], "no --hosts."),
        (["-n", "4", "--strategy", "parameter-server", "script.py"], "no --num-replicas."),
        (["--communicator", "auto", "--strategy", "parameter-server", "script.py"], "no --communicator."),
        (["--communicator", "tf", "--strategy", "mirrored", "script.py"], "strategy='mirrored'"),
        (["--workers", "2", "--strategy", "mirrored", "script.py"], "that is for --strategy parameter-server."),
        (["--bind-cores", "--strategy", "mirrored", "script.py"], "no --bind-cores."),
        (["--bind-cores", "-n", "1000", "script.py"], "ranks=1000"),
        (["--servers", "1", "script.py"], "no --servers."),
        (["--max-restarts", "-1", "--strategy", "multi-worker", "script.py"], "max_restarts=-1"),
        (["--strategy", "parameter_server", "script.py"], "mirrored, parameter-server."),
        (["--log-dir", "script.py/logs", "script.py"], "log_dir='script.py/logs'"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, arguments, named):
    from tfrep_strategy.cli import main

    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tfrep", "run", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert named in error
    assert "Received: " in error
    assert "Hint: " in error


@pytest.mark.parametrize(
    "command", [["run", "script.py"], ["run", "--strategy", "parameter-server", "script.py"], ["doctor"], ["demo"]], ids=" ".join
)
@pytest.mark.parametrize("backend", ["jax", "torch", "numpy", "Tensorflow"])
def test_another_backend_of_keras_is_refused(tmp_path, monkeypatch, capsys, command, backend):
    from tfrep_strategy.cli import main

    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tfrep", *command])
    monkeypatch.setenv("KERAS_BACKEND", backend)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    what = f"Only Keras's TensorFlow backend works here. Received: KERAS_BACKEND='{backend}'"
    assert capsys.readouterr().err == f"tfrep: {what}\nHint: set KERAS_BACKEND=tensorflow. [TFREP-E001]\n"


def test_version(monkeypatch, capsys):
    from tfrep_strategy.cli import main

    monkeypatch.setattr(sys, "argv", ["tfrep", "--version"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert tfrep_strategy.__version__ in capsys.readouterr().out
