"""Checks the installation, and whether processes can communicate. The report can be pasted into an issue."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import cloudpickle
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfrep_strategy._version import __version__
from tfrep_strategy.common_memory import SHARES_MEMORY, problem_of_sharing
from tfrep_strategy.environments import detect_environment
from tfrep_strategy.errors import TfrepError
from tfrep_strategy.findings import Finding, about_tensorflow, sum_of_ranks, tried
from tfrep_strategy.horovod_build import PROBE_SECONDS, status
from tfrep_strategy.nvidia import driver_cuda, find_nccl, gpus_are_visible, nccl_problem
from tfrep_strategy.processes.command import module_command
from tfrep_strategy.processes.forked_ranks import ForkServers
from tfrep_strategy.processes.identity import horovod_is_installed
from tfrep_strategy.processes.ranks import Command, deferred_signals, run_ranks
from tfrep_strategy.rendezvous.confinement import problem_of_confining
from tfrep_strategy.rendezvous.connections import free_ports
from tfrep_strategy.running import Options
from tfrep_strategy.running.forks import fork_servers, reason_against_forks
from tfrep_strategy.running.function import results
from tfrep_strategy.running.joining import warn_inside_a_run
from tfrep_strategy.transports import choose_communicator, horovod_transports, installed_communicators

SELF_TEST_SECONDS = 60.0
"""The time limit of a self-test. It takes a second or two once TensorFlow is imported."""
_SELF_TEST = Options(num_replicas=2, strategy="multi-worker", timeout=SELF_TEST_SECONDS)

_IN_SHORT = {"tfrep_strategy", "Python", "TensorFlow", "Keras", "GPU", "GPUs"}


@dataclass(frozen=True)
class Report:
    """The result of all checks.

    Attributes:
        findings: The lines.
    """

    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        """Whether no finding is bad."""
        return all(finding.ok is not False for finding in self.findings)


def examine(*, self_test: bool = True) -> Report:
    """Runs all checks.

    Args:
        self_test: Whether to start processes that run a collective, which takes some seconds.

    Returns:
        The report.

    Example:
        >>> examine(self_test=False).findings[0].name
        'tfrep_strategy'
    """
    environ = dict(os.environ)
    with _forking() if self_test else contextlib.nullcontext() as servers:
        findings = _found(servers)
        if self_test:
            warn_inside_a_run("`tfrep doctor`")
            with _output_to_stderr(), _environment(environ):  # TensorFlow sets variables when it is imported.
                # MPI connects only what mpirun starts.
                left_out = ["auto", "mpi", *([] if SHARES_MEMORY else ["shared_memory"])]
                tested = [name for name in installed_communicators() if name not in left_out]
                findings += [_self_test(name, servers) for name in tested if name != "horovod" or horovod_is_installed()]
    return Report(findings)


@contextlib.contextmanager
def _forking() -> Iterator[ForkServers | None]:
    """Starts the process from which all that needs TensorFlow is forked, so that it is imported once."""
    with contextlib.ExitStack() as stack:
        with _output_to_stderr():
            servers = stack.enter_context(fork_servers(_SELF_TEST, shown=(__name__,)))
            if servers:
                servers.of()
        yield servers


def _forked(servers: ForkServers, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in a fork, which need not import TensorFlow again."""
    with tempfile.TemporaryDirectory() as name, deferred_signals() as events:
        folder, call = Path(name), Command(command, servers.of().environ)
        start = servers.of().starter([call], events)
        failure = run_ranks(
            [call], events, log_dir=folder, note_dir=folder, timeout=PROBE_SECONDS, logs_all=True, start=start
        )
        said = (folder / "rank0.log").read_text("utf-8", "replace")
    return subprocess.CompletedProcess(command, failure.exit_code if failure else 0, said, said)


def _told_by_a_fork(servers: ForkServers) -> list[Finding]:
    """Has a fork look at TensorFlow, so that this process need not import it."""
    with tempfile.TemporaryDirectory() as name:
        told = Path(name) / "findings"
        done = _forked(servers, module_command("tfrep_strategy.findings", str(told)))
        if done.returncode:
            return [Finding("TensorFlow", f"exit code {done.returncode}: {done.stderr[-2000:].strip()}", ok=False)]
        return [Finding(**each) for each in json.loads(told.read_text("utf-8"))]


def _found(servers: ForkServers | None) -> list[Finding]:
    return [
        Finding("tfrep_strategy", __version__),
        Finding("Python", f"{platform.python_version()} on {platform.platform()}"),
        *(about_tensorflow() if servers is None else _told_by_a_fork(servers)),
        _horovod(servers),
        _nccl(),
        _auto(),
        tried("Environment", lambda: detect_environment().describe()),
        _ports(problem_of_confining()),
        tried("Free ports", lambda: ", ".join(str(port) for port in free_ports(2)) + " on the loopback interface"),
        _start(),
    ]


def in_short() -> str:
    """Says in one line what is installed and which devices there are, without tests.

    Returns:
        Such as `"tfrep_strategy 0.2.0; Python 3.11.2; TensorFlow ...; GPUs none; Horovod none"`.

    Example:
        >>> in_short().startswith(f"tfrep_strategy {tfrep.__version__}; Python 3.")
        True
    """
    horovod = importlib.metadata.version("horovod") if horovod_is_installed() else "none"
    findings = [Finding("tfrep_strategy", __version__), Finding("Python", platform.python_version()), *about_tensorflow()]
    lines = [f"{each.name} {each.value}" for each in findings if each.name.partition(" ")[0] in _IN_SHORT]
    return "; ".join([*lines, f"Horovod {horovod}"])


def show_keras(*, as_markdown: bool = False) -> None:
    """Prints what of Keras is replaced.

    Args:
        as_markdown: Whether to print the tables of docs/architecture.md.
    """
    from tfrep_strategy.keras_integration import describe
    from tfrep_strategy.keras_integration.patching import markdown

    rows = describe()
    if as_markdown:
        sys.stdout.write(markdown(rows))
        return
    table = Table("part", "what of Keras is replaced", "with the signature", "why")
    for row in rows:
        table.add_row(*map(escape, (row.topic, row.target, row.expects, row.why)))
    Console(highlight=False).print(table)


def show(report: Report, *, as_json: bool = False) -> None:
    """Prints a report.

    Args:
        report: The report, from `examine`.
        as_json: Whether to print one JSON object instead of a table.

    Example:
        >>> show(Report([Finding("GPUs", "none")]), as_json=True)
        {"healthy": true, "findings": [{"name": "GPUs", "value": "none", "ok": null}]}
    """
    if as_json:
        print(json.dumps({"healthy": report.healthy, "findings": [asdict(finding) for finding in report.findings]}))
        return
    table = Table("", "what", "found", title="tfrep doctor", show_lines=False)
    marks = {True: "[green]ok[/]", False: "[red]bad[/]", None: ""}
    for finding in report.findings:
        table.add_row(marks[finding.ok], finding.name, escape(finding.value))
    Console().print(table)


@contextlib.contextmanager
def _environment(environ: dict[str, str]) -> Iterator[None]:
    """Gives this process other environment variables while the body runs."""
    saved = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Redirects the output of started processes to stderr, since a program may read the report from stdout."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _horovod(servers: ForkServers | None) -> Finding:
    found = status() if servers is None else status(functools.partial(_forked, servers))
    return Finding(
        "Horovod",
        found.describe().removeprefix("Horovod").lstrip(": "),
        ok=None if found.version is None else not found.problem,
    )


def _auto() -> Finding:
    choice = choose_communicator(
        horovod_transports(),
        gpus=gpus_are_visible(),
        open_because=problem_of_confining(),
        apart_because=problem_of_sharing(2),
    )
    return Finding('"auto"', choice.describe())


def _ports(problem: str | None) -> Finding:
    """Tells whether TensorFlow's servers can be kept to the machines of a run."""
    return Finding("TensorFlow's ports", f"open to everybody: {problem}" if problem else "confined to the run", ok=not problem)


def _start() -> Finding:
    """Tells how the ranks of a run start."""
    reason = reason_against_forks(_SELF_TEST)
    forked = "forked from one process that has imported TensorFlow"
    return Finding("Ranks of a run", f"each imports TensorFlow: {reason}" if reason else forked)


def _nccl() -> Finding:
    nccl = find_nccl()
    if gpus_are_visible() and (problem := nccl_problem(nccl, driver_cuda())):
        return Finding("NCCL", problem, ok=False)
    return Finding("NCCL", nccl.describe() if nccl else "none")


def _self_test(communicator: str, servers: ForkServers | None) -> Finding:
    name = f"Self-test: {communicator}"
    start = time.monotonic()
    try:
        call = cloudpickle.dumps((sum_of_ranks, (), {}))
        sums = results(call, dataclasses.replace(_SELF_TEST, communicator=communicator), servers)
    except TfrepError as error:
        return Finding(name, str(error), ok=False)
    took = f"2 processes, all-reduce gave {sums}, {time.monotonic() - start:.1f} s"
    return Finding(name, took, ok=sums == [3.0, 3.0])
