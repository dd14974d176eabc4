"""Checks the installation, and whether processes can communicate. The report can be pasted into an issue."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import cloudpickle
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfrep_strategy._version import __version__
from tfrep_strategy.cluster.environments import detect_environment
from tfrep_strategy.cluster.hardware import (
    SHARES_MEMORY,
    Gpu,
    driver_cuda,
    driver_gpus,
    find_nccl,
    gpus_are_visible,
    nccl_problem,
    problem_of_sharing,
)
from tfrep_strategy.cluster.horovod.build import status
from tfrep_strategy.cluster.identity import horovod_is_installed
from tfrep_strategy.cluster.rendezvous.confinement import problem_of_confining
from tfrep_strategy.cluster.startup_log import quiet_start
from tfrep_strategy.cluster.transports import choose_communicator, horovod_transports, installed_communicators
from tfrep_strategy.errors import TfrepError
from tfrep_strategy.running import Options
from tfrep_strategy.running.function import results
from tfrep_strategy.running.joining import warn_inside_a_run

SELF_TEST_SECONDS = 60.0
"""The time limit of a self-test. It takes a second or two once TensorFlow is imported."""
_SELF_TEST = Options(num_replicas=2, strategy="multi-worker", timeout=SELF_TEST_SECONDS)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: The checked item.
        value: The result.
        ok: Whether the result is good; None if it is neither good nor bad.
    """

    name: str
    value: str
    ok: bool | None = None


def examine(*, self_test: bool = True) -> list[Finding]:
    """Runs all checks.

    Args:
        self_test: Whether to start processes that run a collective, which takes some seconds.

    Returns:
        The lines of the report.

    Example:
        >>> examine(self_test=False)[0].name
        'tfrep_strategy'
    """
    environ = dict(os.environ)
    with quiet_start():
        loaded = [tried("TensorFlow", _tensorflow), tried("Keras", _keras), *_gpus(driver_gpus())]
    findings = [
        Finding("tfrep_strategy", __version__),
        Finding("Python", f"{platform.python_version()} on {platform.platform()}"),
        *loaded,
        _horovod(),
        _nccl(),
        _auto(),
        tried("Environment", lambda: detect_environment().describe()),
        _ports(problem_of_confining()),
    ]
    if self_test:
        warn_inside_a_run("`tfrep doctor`")
        with _output_to_stderr(), _environment(environ):  # TensorFlow sets variables when it is imported.
            # MPI connects only what mpirun starts.
            left_out = ["auto", "mpi", *([] if SHARES_MEMORY else ["shared_memory"])]
            tested = [name for name in installed_communicators() if name not in left_out]
            findings += [_self_test(name) for name in tested if name != "horovod" or horovod_is_installed()]
    return findings


def in_short() -> str:
    """Says in one line what is installed, and which GPUs there are: the notebooks begin with it.

    Example:
        >>> in_short().startswith(f"tfrep_strategy {tfrep.__version__}; Python 3.")
        True
    """
    with quiet_start():
        of_tensorflow = f"TensorFlow {_tensorflow()}; Keras {_keras()}; GPUs {_gpus(driver_gpus())[-1].value}"
    return f"tfrep_strategy {__version__}; Python {platform.python_version()}; {of_tensorflow}"


def show(findings: list[Finding], *, as_json: bool = False) -> bool:
    """Prints a report, and returns whether nothing in it is bad.

    Args:
        findings: Its lines, from `examine`.
        as_json: Whether to print one JSON object instead of a table.

    Example:
        >>> show([Finding("GPUs", "none")], as_json=True)
        {"healthy": true, "findings": [{"name": "GPUs", "value": "none", "ok": null}]}
        True
    """
    healthy = all(finding.ok is not False for finding in findings)
    if as_json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}))
        return healthy
    table = Table("", "what", "found", title="tfrep doctor", show_lines=False)
    marks = {True: "[green]ok[/]", False: "[red]bad[/]", None: ""}
    for finding in findings:
        table.add_row(marks[finding.ok], finding.name, escape(finding.value))
    Console().print(table)
    return healthy


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


def _horovod() -> Finding:
    found = status()
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


def _nccl() -> Finding:
    nccl = find_nccl()
    if gpus_are_visible() and (problem := nccl_problem(nccl, driver_cuda())):
        return Finding("NCCL", problem, ok=False)
    return Finding("NCCL", nccl.describe() if nccl else "none")


def _self_test(communicator: str) -> Finding:
    name = f"Self-test: {communicator}"
    start = time.monotonic()
    try:
        call = cloudpickle.dumps((sum_of_ranks, (), {}))
        sums = results(call, dataclasses.replace(_SELF_TEST, communicator=communicator))
    except TfrepError as error:
        return Finding(name, str(error), ok=False)
    took = f"2 processes, all-reduce gave {sums}, {time.monotonic() - start:.1f} s"
    return Finding(name, took, ok=sums == [3.0, 3.0])


def sum_of_ranks() -> float:
    """Sums rank + 1 over the ranks. It runs on every rank."""
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()

    def step() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tf.constant(detect_environment().rank + 1.0))

    return float(strategy.experimental_local_results(strategy.run(step))[0])


def tried(name: str, find: Callable[[], str]) -> Finding:
    """Returns what a function finds; a bad finding if it raises.

    Args:
        name: The checked item.
        find: The function.

    Example:
        >>> tried("TensorFlow", lambda: tf.__version__).ok
        True
    """
    try:
        return Finding(name, find(), ok=True)
    except Exception as error:  # A doctor reports every illness, whatever it is.
        return Finding(name, f"{type(error).__name__}: {error}", ok=False)


def _tensorflow() -> str:
    import tensorflow as tf

    return f"{tf.__version__}, {'built with CUDA' if tf.test.is_built_with_cuda() else 'built without CUDA'}"


def _keras() -> str:
    import keras

    return f"{keras.__version__}, backend {keras.backend.backend()}"


def _gpus(there: list[Gpu]) -> list[Finding]:
    """Lists the GPUs, whether TensorFlow can use them, and how."""
    if not there:
        return [Finding("GPUs", "none")]
    import tensorflow as tf

    seen = len(tf.config.get_visible_devices("GPU"))
    hidden = not gpus_are_visible()
    used = f"TensorFlow sees {seen}" + (f", CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}" if hidden else "")
    if not (seen or hidden):
        used += "; hint: pip install 'tensorflow[and-cuda]', or name the folders of CUDA's libraries in LD_LIBRARY_PATH"
    return [
        *(Finding(f"GPU {gpu.index}", gpu.describe().partition(": ")[2]) for gpu in there),
        Finding("GPUs", used, ok=bool(seen or hidden)),
    ]
