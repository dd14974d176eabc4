"""An elastic run whose machines come and go ends with one device's weights. The machines are launchers on this one.

Where N replicas do not learn what one device learns, each step has one device's data nevertheless.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from needs import needs_horovod
from test_joining import SCRIPTS, environ, found_in

from tfrep_strategy.cluster.notices import Progress, Step
from tfrep_strategy.cluster.rendezvous.connections import free_ports

pytestmark = pytest.mark.lane("faults")

LIMIT = 120
EPOCHS = "8"
SCRIPT = str(SCRIPTS / "goes_slowly.py")


def wait_for(progress: Progress, step: Step, run: subprocess.Popen[str]) -> None:
    """Returns when a run has come to a step."""
    deadline = time.monotonic() + LIMIT
    while (progress.read() or Step(0, 0, 0)) < step:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("communicator", "kind"), [("tf", "exact"), pytest.param("horovod", "exact", marks=needs_horovod), ("tf", "dropout")]
)
def test_four_then_two_then_three_replicas(communicator: str, kind: str, tmp_path: Path) -> None:
    backups, more_arguments = tmp_path / "backups", ["dropout"] * (kind == "dropout")
    common = ["--nnodes", "1:2", "--rendezvous", f"localhost:{free_ports(1)[0]}", "--communicator", communicator]
    variables = environ(XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path), TFREP_BACKUP_SECONDS="0")

    def start(name: str, size: int, *more: str) -> subprocess.Popen[str]:
        own = ["-n", str(size), "--backup-dir", str(backups), "--log-dir", str(tmp_path / name), *more]
        command = [sys.executable, "-m", "tfrep_strategy.cli", "run", *common, *own, SCRIPT, EPOCHS, "0.3"]
        command += more_arguments
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    progress = Progress(backups)
    with contextlib.ExitStack() as stack:
        first, second = start("first", 2, "--node-rank", "0"), start("second", 2, "--node-rank", "1")
        stack.callback(first.kill)
        stack.callback(second.kill)
        wait_for(progress, Step(0, 1, 2), first)
        second.kill()
        progress.clear()
        wait_for(progress, Step(0, 2, 1), first)
        third = start("third", 1, "--node-rank", "1")
        stack.callback(third.kill)
        (output, said), (_, said_there) = first.communicate(timeout=LIMIT), third.communicate(timeout=LIMIT)
        second.communicate(timeout=LIMIT)
    assert (first.returncode, third.returncode) == (0, 0), said + said_there
    one = [sys.executable, SCRIPT, EPOCHS, "0", *more_arguments]
    alone = subprocess.run(one, env=environ(), capture_output=True, text=True, check=True, timeout=LIMIT)
    [found], [expected] = found_in(output), found_in(alone.stdout)
    assert found["replicas"] == 3
    assert said.count("fit resumes from its backup: epoch ") == 2
    assert "has ranks 2 to 3 of 4" not in said
    assert "has rank 2 of 3; logs in " in said_there
    assert found["steps"] == expected["steps"]
    np.testing.assert_allclose(found["labels"], expected["labels"], rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
    if kind == "exact":
        np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)  # type: ignore[arg-type]
    else:
        assert not np.allclose(found["weights"], expected["weights"], rtol=1e-3)  # type: ignore[arg-type]
    assert list(backups.iterdir()) == []
