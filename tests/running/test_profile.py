"""Profiles of runs, as a user asks for them: `tfrep run --profile`, and `tfrep profile` of a run that is running."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calling import command
from needs import needs_horovod
from test_joining import LIMIT, SCRIPTS, environ

from tfrep_strategy.cluster.profiles.summary import SUMMARY_NAME

pytestmark = pytest.mark.lane("profiles")

TFREP = [sys.executable, "-m", "tfrep_strategy.cli"]
SCRIPT = str(SCRIPTS / "learns.py")
KINDS = {
    "tf": ["-n", "2", "--communicator", "tf"],
    "horovod": ["-n", "2", "--communicator", "horovod"],
    "shared_memory": ["-n", "2", "--communicator", "shared_memory"],
    "mirrored": ["-n", "2", "--strategy", "mirrored"],
    "servers": ["--strategy", "parameter-server"],
}
PROCESSES = {
    "tf": ["rank0", "rank1"],
    "horovod": ["rank0", "rank1"],
    "shared_memory": ["rank0", "rank1"],
    "mirrored": ["rank0"],
    "servers": ["coordinator", "ps0", "worker0", "worker1"],
}
each_kind = pytest.mark.parametrize(
    "kind", ["tf", pytest.param("horovod", marks=needs_horovod), "shared_memory", "mirrored", "servers"]
)


def ended(*arguments: str, folder: Path, exit_code: int = 0) -> tuple[str, str]:
    """Runs `tfrep` with these arguments, and returns what it wrote to standard output and error."""
    done = subprocess.run([*TFREP, *arguments], cwd=folder, env=environ(), capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == exit_code, done.stderr[-3000:]
    return done.stdout, done.stderr


def learnt(output: str) -> Any:
    return json.loads(output.split("FOUND ")[1])


@contextlib.contextmanager
def running(*arguments: str, folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Starts `tfrep run` with these arguments, and waits until it trains."""
    with subprocess.Popen(
        [*TFREP, "run", *arguments], cwd=folder, env=environ(**variables), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("EPOCH"), "It does not train."
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=LIMIT)


def traces_in(folder: Path) -> dict[str, Path]:
    """Returns the traces of the only profile in a folder, by process."""
    (run_folder,) = (folder / "plugins" / "profile").iterdir()
    assert not [path for path in run_folder.iterdir() if path.is_dir()]
    return {path.name.split(".")[0].rpartition("_")[2]: path for path in run_folder.glob("*.xplane.pb")}


def reports_in(folder: Path) -> dict[str, Any]:
    """Returns what the only profile in a folder says, by process. It is whole."""
    (file,) = folder.glob(f"plugins/profile/*/{SUMMARY_NAME}")
    reports = {report["who"]: report for report in json.loads(file.read_text("utf-8"))}
    for report in reports.values():
        parts = [report[name] for name in ("compute", "collectives", "input", "idle")]
        assert not report["problem"]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(report["traced"])
    return reports


def steps_in(trace: Path) -> list[int]:
    """Returns the numbers of the steps that a trace contains."""
    from tfrep_strategy.core.tf import XSpace

    found = []
    for plane in XSpace.FromString(trace.read_bytes()).planes:
        steps = {key for key, data in plane.event_metadata.items() if data.name == "train"}
        numbers = {key for key, data in plane.stat_metadata.items() if data.name == "step_num"}
        events = [event for line in plane.lines for event in line.events if event.metadata_id in steps]
        found += [stat.int64_value for event in events for stat in event.stats if stat.metadata_id in numbers]
    return sorted(found)


@each_kind
def test_all_processes_trace_the_same_steps(kind: str, tmp_path: Path) -> None:
    output, said = ended("run", *KINDS[kind], "--profile", "10:20", "--profile-dir", "traces", SCRIPT, "4", "0", folder=tmp_path)
    traces, reports = traces_in(tmp_path / "traces"), reports_in(tmp_path / "traces")
    assert sorted(traces) == sorted(reports) == PROCESSES[kind]
    assert "tfrep: profile of steps 10 to 19" in said
    for who, trace in traces.items():
        trains = who.startswith(("rank", "coordinator"))
        assert steps_in(trace) == (list(range(10, 20)) if trains else [])
        assert re.search(rf"^{who} +{10 if trains else '-'} ", said, re.MULTILINE)
        assert reports[who]["compute"] > 0 or who == "coordinator"
    if PROCESSES[kind] == ["rank0", "rank1"]:
        assert min(report["collectives"] for report in reports.values()) > 0
    if kind != "servers":  # Workers of parameter servers take steps in another order each time.
        alone, _ = ended("run", *KINDS[kind], SCRIPT, "4", "0", folder=tmp_path)
        assert learnt(output) == learnt(alone)


@pytest.mark.parametrize("kind", ["tf", pytest.param("horovod", marks=needs_horovod), "shared_memory"])
def test_who_waits_for_a_slow_rank(kind: str, tmp_path: Path) -> None:
    ended("run", *KINDS[kind], "--profile", "9:14", "--log-dir", "logs", SCRIPT, "2", "0", "rank1", folder=tmp_path)
    reports = reports_in(tmp_path / "logs" / "profile")
    assert reports["rank0"]["collectives"] > 5 * 0.04
    assert reports["rank1"]["idle"] > 5 * 0.05
    assert reports["rank0"]["collectives"] - reports["rank1"]["collectives"] > 5 * 0.03


@pytest.mark.parametrize("kind", ["tf", "mirrored"])
def test_who_waits_for_input(kind: str, tmp_path: Path) -> None:
    ended("run", *KINDS[kind], "--profile", "8:16", SCRIPT, "2", "0", "input", folder=tmp_path)
    reports = reports_in(tmp_path / "tfrep-profile").values()
    # The rank whose batch comes last makes the other one wait in a collective.
    assert all(report["input"] + report["collectives"] > 0.5 * report["traced"] for report in reports)
    assert sum(report["input"] for report in reports) > 0.5 * max(report["traced"] for report in reports)


@each_kind
def test_a_run_that_is_running(kind: str, tmp_path: Path) -> None:
    with running(*KINDS[kind], "--log-dir", "logs", SCRIPT, "1000000", "0", folder=tmp_path) as run:
        for number, seconds in enumerate((1.0, 0.5)):
            wanted = ["--seconds", str(seconds), "--profile-dir", f"traces{number}"]
            output, _ = ended("profile", str(run.pid), *wanted, folder=tmp_path)
            traces, reports = traces_in(tmp_path / f"traces{number}"), reports_in(tmp_path / f"traces{number}")
            assert sorted(traces) == sorted(reports) == PROCESSES[kind]
            assert f"tfrep: profile of {seconds:g} seconds" in output
            for who, report in reports.items():
                assert report["traced"] == pytest.approx(seconds, rel=0.5)
                assert (report["steps"] > 0) == who.startswith(("rank", "coordinator"))
        assert run.poll() is None


def test_runs_that_are_not_running(tmp_path: Path) -> None:
    arguments = [*KINDS["mirrored"], "--log-dir", "logs", SCRIPT, "1000000", "0"]
    with running(*arguments, folder=tmp_path, TMPDIR=str(tmp_path)) as run:  # Who is killed leaves files.
        run.send_signal(signal.SIGKILL)
        run.wait(LIMIT)
    for pid in (run.pid, os.getpid()):
        began = time.monotonic()
        _, said = ended("profile", str(pid), folder=tmp_path, exit_code=2)
        assert f"has ended, or is no launcher of yours. Received: run={pid}\nHint: " in said
        assert time.monotonic() - began < 10


def test_a_run_that_ends_while_it_is_profiled(tmp_path: Path) -> None:
    with running(*KINDS["tf"], SCRIPT, "1000000", "3", folder=tmp_path) as run:
        _, said = ended("profile", str(run.pid), "--seconds", "60", folder=tmp_path, exit_code=1)
    assert "The run has ended while it was profiled." in said


@pytest.mark.parametrize(
    ("steps", "arguments", "exit_code", "story", "traced"),
    [
        ("10:20", [SCRIPT, "2", "0"], 0, "ended before step 19, which was to be profiled. What was traced until then is kept.", 6),
        ("100:110", [SCRIPT, "2", "0"], 0, "ended before step 109, which was to be profiled. Nothing was traced.", 0),
        ("10:20", [SCRIPT, "3", "0", "fails"], 1, "fit failed while it was profiled. Traces from step 10 on: ", 6),
        ("10:20", [str(SCRIPTS / "learns_nothing.py")], 0, "no step was profiled: the script did not call fit.", 0),
    ],
)
def test_runs_that_end_early(steps: str, arguments: list[str], exit_code: int, story: str, traced: int, tmp_path: Path) -> None:
    _, said = ended(
        *("run", *KINDS["tf"], "--profile", steps, "--profile-dir", "traces"), *arguments, folder=tmp_path, exit_code=exit_code
    )
    assert said.count(story) == 1
    if traced:
        assert {who: len(steps_in(trace)) for who, trace in traces_in(tmp_path / "traces").items()} == {
            "rank0": traced,
            "rank1": traced,
        }
    else:
        assert list((tmp_path / "traces").iterdir()) == []


def train_on_own_cluster() -> None:
    import keras
    import numpy as np

    import tfrep_strategy as tfrep
    from tfrep_strategy.errors import ConfigurationError

    with tfrep.local_cluster(workers=1) as cluster:
        with tfrep.ParameterServerStrategy(cluster).scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        try:
            model.fit(np.ones([8, 2]), np.ones([8, 1]), verbose=0)
        except ConfigurationError as error:
            print(error)


def test_workers_that_nobody_can_ask(tmp_path: Path) -> None:
    done = subprocess.run(
        command(train_on_own_cluster), cwd=tmp_path, env=environ(TFREP_PROFILE="1:3"), capture_output=True, text=True, timeout=LIMIT
    )
    what = "Workers trace themselves only if `tfrep run` has started them. Received: TFREP_PROFILE='1:3'\nHint: unset"
    assert what in done.stdout, done.stderr[-3000:]


def test_tensorboard_shows_each_rank(tmp_path: Path) -> None:
    profile_plugin = pytest.importorskip("xprof.profile_plugin", reason="needs the extra profile")
    from tensorboard.plugins.base_plugin import TBContext
    from werkzeug.test import EnvironBuilder
    from werkzeug.wrappers import Request

    ended("run", *KINDS["tf"], "--profile", "3:6", SCRIPT, "1", "0", folder=tmp_path)
    logdir = str(tmp_path / "tfrep-profile")
    flags = types.SimpleNamespace(master_tpu_unsecure_channel="", logdir=logdir)
    plugin = profile_plugin.ProfilePlugin(TBContext(logdir=logdir, flags=flags))
    (run,) = plugin.runs_imp()
    hosts = [host["hostname"] for host in plugin.host_impl(run, "trace_viewer")]
    assert [host.rpartition("_")[2] for host in hosts] == ["rank0", "rank1"]
    for host in hosts:
        query = {"run": run, "tag": "trace_viewer", "host": host}
        trace, *_ = plugin.data_impl(Request(EnvironBuilder(query_string=query).get_environ()))
        events = json.loads(trace)["traceEvents"]
        assert sum(event.get("name", "").startswith("train") for event in events) >= 3
