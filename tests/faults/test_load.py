"""On a machine that has much more to do than it can, nobody is taken for frozen, also not a rank that is silent for a while."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disturbed import environ
from needs import needs_horovod

pytestmark = pytest.mark.lane("faults")

SCRIPT = str(Path(__file__).parent / "scripts" / "holds_the_lock.py")
BUSY, SECONDS, LIMIT = 8, "15", 400
FOUND = "FOUND "


@contextlib.contextmanager
def _load() -> Iterator[None]:
    """Keeps processes busy that never wait."""
    with contextlib.ExitStack() as stack:
        for _ in range(BUSY):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def _learned(*command: str) -> dict[str, Any]:
    own, command = environ(TFREP_TIMEOUT="10"), (sys.executable, *command, SCRIPT, SECONDS)
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(FOUND)]
    assert "frozen" not in done.stderr
    return json.loads(line.removeprefix(FOUND))


@pytest.mark.parametrize("communicator", ["tf", pytest.param("horovod", marks=needs_horovod), "shared_memory"])
def test_nobody_is_ended_by_mistake(communicator: str) -> None:
    """`TFREP_TIMEOUT` is 10 seconds. A rank computes for longer without a sign of life, while the others wait for it."""
    expected = _learned()
    with _load():
        found = _learned("-m", "tfrep_strategy.cli", "run", "-n", "2", "--communicator", communicator)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-4)
    for own, alone in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(own, alone, rtol=1e-4, atol=1e-6)
