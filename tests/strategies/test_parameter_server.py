"""Runs `parameter_server_*cases.py`, each in a process of its own.

A process that has been connected to a cluster cannot use what it made before, so the other tests must not share one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from parameter_server_support import ROOT

pytestmark = pytest.mark.lane("servers")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["parameter_server_cases.py", "parameter_server_bad_input_cases.py"])
def test_cases(name: str) -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    cases = str(Path(__file__).with_name(name))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", cases]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
