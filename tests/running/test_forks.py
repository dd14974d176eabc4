"""Scripts and functions in forked ranks find what they find in ranks that were started, and TensorFlow is imported once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from needs import needs_horovod
from test_joining import SCRIPTS, environ

from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.running import Options, forks, launch
from tfrep_strategy.running.forks import fork_servers, reason_against_forks

pytestmark = pytest.mark.lane("launchers")

LIMIT = 120.0
KNOWS = SCRIPTS / "knows.py"


def run(folder: Path, *arguments: str, what: str = "", **variables: str) -> tuple[dict[str, Any], str]:
    """Runs the script on two ranks. Returns what it has written for each rank and start, and what was said of it."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tfrep_strategy.cli", "run", "-n", "2", "--communicator", "tf", *arguments, str(folder), what],
        cwd=SCRIPTS, env=environ(PYTHONHASHSEED="7", **variables), input="a line\n", capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {path.stem: json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")}, done.stderr


@pytest.mark.parametrize("script", [[str(KNOWS)], ["-m", "knows"]])
def test_a_script_finds_what_it_finds_in_a_new_process(script: list[str], tmp_path: Path) -> None:
    forked, _ = run(tmp_path / "forked", *script)
    started, _ = run(tmp_path / "started", "--no-fork", *script)
    assert forked.keys() == started.keys() == {"0-0", "1-0"}
    for rank, found in forked.items():
        assert found["facts"] == started[rank]["facts"]
        assert found["facts"]["squares"] == [9]
        assert found["facts"]["ranks"] == [0, 1]
    assert forked["0-0"]["facts"]["input"] == "a line\n"
    assert forked["0-0"]["parent"] == forked["1-0"]["parent"], "the process that has imported TensorFlow"


def test_ranks_that_start_again_are_forked_from_the_same_process(tmp_path: Path) -> None:
    found, said = run(tmp_path / "forked", "--max-restarts", "1", str(KNOWS), what="kill")
    assert "rank 1 was lost (SIGKILL)" in said
    assert {"1-0", "0-1", "1-1"} <= found.keys()
    assert len({each["parent"] for each in found.values()}) == 1
    assert [found[f"{rank}-1"]["facts"]["environ"]["TFREP_RESTARTS"] for rank in range(2)] == ["1", "1"]


def described() -> tuple[str, int, list[str], float]:
    import tensorflow as tf

    parent = psutil.Process(os.getppid())
    libraries = [each.path for each in parent.memory_maps() if "libtensorflow" in each.path]
    return os.environ.get("OMP_NUM_THREADS", ""), parent.pid, libraries, float(tf.random.uniform([]))


@pytest.mark.parametrize("communicator", [pytest.param("horovod", marks=needs_horovod), "tf"])
def test_a_function_is_called_in_forks(communicator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = launch(described, num_replicas=2, communicator=communicator, timeout=LIMIT)
    assert {threads for threads, _, _, _ in found} == {"1"}
    [parent] = {parent for _, parent, _, _ in found}
    assert parent != os.getpid()
    assert all(libraries for _, _, libraries, _ in found)


def test_a_function_is_called_in_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launch(described, num_replicas=2, communicator="tf", timeout=LIMIT, fork=False)
    assert {parent for _, parent, _, _ in found} == {os.getpid()}


def draws() -> tuple[float, float]:
    import tensorflow as tf

    return float(tf.random.uniform([])), float(tf.random.Generator.from_non_deterministic_state().uniform([]))


def test_tensorflow_draws_other_numbers_in_each_fork() -> None:
    drawn = launch(draws, num_replicas=4, communicator="tf", strategy=None, fork=True, timeout=LIMIT)
    assert len({number for pair in drawn for number in pair}) == 8


def test_what_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_against_forks(Options(2)) == ""
    for options in (Options(), Options(1), Options(2, strategy="mirrored"), Options(2, strategy=None)):
        assert reason_against_forks(options)
    monkeypatch.setattr(forks, "gpus_are_visible", lambda: True)
    assert "GPUs" in reason_against_forks(Options(2))
    with fork_servers(Options(2)) as servers:
        assert servers is None


def test_it_says_why_ranks_are_not_forked_though_the_user_wants_it(tmp_path: Path) -> None:
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    (tmp_path / "sitecustomize.py").write_text(thread)
    path = os.pathsep.join((str(tmp_path), environ()["PYTHONPATH"]))
    _, said = run(tmp_path / "started", "--fork", str(KNOWS), PYTHONPATH=path)
    assert re.search(r"tfrep: ranks are not forked: \d threads? run", said)


def test_the_rank_of_another_launcher_is_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfrep_strategy.running.joining import join_outer_run, outer_run

    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    outer = outer_run()
    assert outer is not None
    with pytest.raises(ConfigurationError, match="fork=True"):
        join_outer_run(outer, Options(fork=True), ["script", "train.py"])
