"""The coordinator of a cluster that `tfrep run` has started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_joining import SCRIPTS, environ

from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.running.coordinator import ClusterOptions, run_coordinator


def test_a_coordinator_that_is_asked_to_end_has_the_grace_time(tmp_path: Path) -> None:
    """More than the three seconds that it has by default."""
    run = [sys.executable, "-m", "tfrep_strategy.cli", "run", "--strategy", "parameter-server", "--workers", "1"]
    saved = tmp_path / "saved"
    command, own = [*run, str(SCRIPTS / "ends_slowly.py"), "4.5", str(saved)], environ(TFREP_GRACE="60")
    with subprocess.Popen(command, cwd=tmp_path, env=own, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(90) == -signal.SIGTERM
    assert saved.exists()


def test_a_grace_time_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("TFREP_GRACE", "abc")
    with pytest.raises(ConfigurationError, match="TFREP_GRACE cannot be used"):
        run_coordinator(str(tmp_path / "train.py"), [], ClusterOptions())
