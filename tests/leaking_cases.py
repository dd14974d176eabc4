"""Tests that leave something behind, each something else. `test_leaks.py` runs them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfrep_strategy.errors import message

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="tfrep-of-module-"))


@pytest.fixture(scope="session")
def stack() -> Iterator[contextlib.ExitStack]:
    """Ends at last what tests have left behind."""
    with contextlib.ExitStack() as opened:
        yield opened


def test_process() -> None:
    subprocess.Popen(SLEEP)


def test_process_without_parent() -> None:
    subprocess.run(["sh", "-c", '"$@" > /dev/null &', "sh", *SLEEP], check=True)


def test_thread(stack: contextlib.ExitStack) -> None:
    end = threading.Event()
    stack.callback(end.set)
    threading.Thread(target=end.wait, args=(60,), name="waiting").start()


def test_thread_of_the_package(stack: contextlib.ExitStack) -> None:
    end = threading.Event()
    stack.callback(end.set)

    class Waiting:
        def __repr__(self) -> str:
            return str(end.wait(60))

    threading.Thread(target=message, args=("What.",), kwargs={"value": Waiting()}, name="inside", daemon=True).start()


def test_port(stack: contextlib.ExitStack) -> None:
    stack.enter_context(socket.create_server(("127.0.0.1", 0)))


def test_temporary_file() -> None:
    tempfile.mkdtemp(prefix="tfrep-of-test-")


def test_file_in_the_working_directory() -> None:
    Path("written.txt").touch()


def test_module(folder: Path) -> None:
    assert folder.exists()


def test_nothing(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    """Leaves only what may stay."""
    end = threading.Event()
    stack.callback(end.set)
    threading.Thread(target=end.wait, args=(60,), daemon=True).start()
    tempfile.mkdtemp(prefix="tfrep-logs-")
    (tmp_path / "file").touch()
    os.rmdir(tempfile.mkdtemp(prefix="tfrep-"))
    subprocess.run(["true"], check=True)
    with socket.create_server(("127.0.0.1", 0)):
        pass
