"""Runs `parameter_server_cases.py` in a process of its own.

A process that has been connected to a cluster cannot use what it made before, so the other tests must not share one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from parameter_server_support import ROOT

_CASES = Path(__file__).with_name("parameter_server_cases.py")


def test_cases() -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", str(_CASES)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
