"""Finds what a test leaves behind: processes, threads, ports and files. A plugin of pytest, which `conftest.py` loads.

A test has to end what it starts, and a module what its fixtures start. Whatever is left fails the test, or the last test of the
module, and is named. Processes are then killed.

The tests have a temporary folder of their own. All processes that they start inherit an environment variable, which finds them even
after their parents have ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Hashable, Iterator
from pathlib import Path

import psutil
import pytest

import tfrep_strategy

PATIENCE = 5.0
"""For how many seconds processes and threads may go on after their test."""

_ROOT = str(Path(__file__).resolve().parent.parent)
_PACKAGE = os.path.join(os.path.dirname(tfrep_strategy.__file__), "")  # In CI it is installed.
_VARIABLE, _SESSION = "TFREP_TESTS_SESSION", uuid.uuid4().hex
_OF_PYTHON = {"multiprocessing.resource_tracker", "multiprocessing.forkserver"}
"""Modules whose processes Python starts once and keeps."""
_STAYS = ("tfrep-logs-", "tfrep-download-")
"""Temporary files that stay on purpose: the logs of a failed run, and the locks of downloads."""
_HIDDEN = (".", "__pycache__")

os.environ[_VARIABLE] = _SESSION
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # `tmp_path` stays, so that one can look at a failed test's.
_TEMPORARY = tempfile.mkdtemp(prefix="tfrep-tests-")
os.environ["TMPDIR"] = tempfile.tempdir = _TEMPORARY
atexit.register(shutil.rmtree, _TEMPORARY, ignore_errors=True)

# Processes, threads, and descriptions of ports and files.
_kept: set[Hashable] = set()
_foreign: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _test_leaves_nothing() -> Iterator[None]:
    yield from _leaving_nothing()


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_nothing() -> Iterator[None]:
    yield from _leaving_nothing()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Lets what starts inside live longer than its test: the processes of a pool, and what serves them."""
    before = _found()
    yield
    _kept.update(_found() - before)


def _leaving_nothing() -> Iterator[None]:
    before = _found()
    yield
    deadline = time.monotonic() + PATIENCE
    if left := _left(before):
        gc.collect()
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = _left(before)
    if left:
        texts = sorted(map(_describe, left))
        _kept.update(left)  # One leak is one failure.
        for process in left:
            if isinstance(process, psutil.Process):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        pytest.fail("Left behind:\n" + "\n".join(texts), pytrace=False)


def _left(before: set[Hashable]) -> set[Hashable]:
    return {each for each in _found() - before - _kept if not isinstance(each, threading.Thread) or _counts(each)}


def _found() -> set[Hashable]:
    return {*_processes(), *threading.enumerate(), *_ports(), *_files()}


def _processes() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        if process not in _foreign and process.pid != os.getpid():
            with contextlib.suppress(psutil.Error):  # It has ended.
                if process.environ().get(_VARIABLE) != _SESSION:
                    _foreign.add(process)
                elif process.ppid() != os.getpid() or not any(name in " ".join(process.cmdline()) for name in _OF_PYTHON):
                    yield process


def _counts(thread: threading.Thread) -> bool:
    """Returns whether a thread would keep Python from ending, or runs code of the package."""
    if thread.name.startswith("pytest_timeout "):  # Watches the running test.
        return False
    if not thread.daemon:
        return thread.is_alive()
    frame = sys._current_frames().get(thread.ident or 0)
    while frame:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            return True
        frame = frame.f_back
    return False


def _ports() -> Iterator[str]:
    for connection in psutil.Process().net_connections("inet"):
        # TensorFlow's server listens on all interfaces, and stays as long as its process.
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip != "::":
            yield f"listening port {connection.laddr.ip}:{connection.laddr.port}"


def _files() -> Iterator[str]:
    """Gives the package's files in the temporary folder, and all in the working directory and the checkout."""
    for name in os.listdir(_TEMPORARY):
        if name.startswith("tfrep-") and not name.startswith(_STAYS):
            yield f"file {_TEMPORARY}/{name}"
    working = os.getcwd()
    for name in os.listdir(working):
        if not name.startswith(_HIDDEN):
            yield f"file {working}/{name}"
    for folder, folders, names in os.walk(_ROOT):
        folders[:] = [name for name in folders if not name.startswith(_HIDDEN)]
        if "pyvenv.cfg" in names:
            folders.clear()
        else:
            yield from (f"file {folder}/{name}" for name in names if not name.startswith(_HIDDEN))


def _describe(leak: Hashable) -> str:
    if isinstance(leak, psutil.Process):
        with contextlib.suppress(psutil.Error):
            return f"process {leak.pid}: {' '.join(leak.cmdline())[:200]}; from {leak.environ().get('PYTEST_CURRENT_TEST')}"
        return f"process {leak.pid}"
    return f"thread {leak.name}" if isinstance(leak, threading.Thread) else str(leak)
