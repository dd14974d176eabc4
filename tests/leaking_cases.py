"""Tests that leave something behind, each something else. `test_leaks.py` runs them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="tfrep-of-module-"))


@pytest.fixture(scope="session")
def to_close() -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    yield sockets
    for each in sockets:
        each.close()


def test_process() -> None:
    subprocess.Popen(SLEEP)


def test_process_without_parent() -> None:
    subprocess.run(["sh", "-c", '"$@" > /dev/null &', "sh", *SLEEP], check=True)


def test_thread() -> None:
    threading.Thread(target=time.sleep, args=(1.5,), name="sleeper").start()


def test_thread_of_the_package() -> None:
    from tfrep_strategy.errors import message

    class Slow:
        def __repr__(self) -> str:
            time.sleep(1.5)
            return "slow"

    threading.Thread(target=message, args=("What.",), kwargs={"slow": Slow()}, name="inside", daemon=True).start()


def test_port(to_close: list[socket.socket]) -> None:
    to_close.append(socket.create_server(("127.0.0.1", 0)))


def test_temporary_file() -> None:
    tempfile.mkdtemp(prefix="tfrep-of-test-")


def test_file_in_the_working_directory() -> None:
    Path("written.txt").touch()


def test_module(folder: Path) -> None:
    assert folder.exists()


def test_nothing(tmp_path: Path) -> None:
    """All of these end, or are allowed to stay."""
    (tmp_path / "file").touch()
    os.rmdir(tempfile.mkdtemp(prefix="tfrep-"))
    tempfile.mkdtemp(prefix="tfrep-logs-")
    threading.Thread(target=time.sleep, args=(0.1,)).start()
    threading.Thread(target=time.sleep, args=(1.0,), daemon=True).start()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.1)"])
    with socket.create_server(("127.0.0.1", 0)):
        pass
