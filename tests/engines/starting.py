"""What the tests of engines share: the program that they run, the tools that they need, and commands with a limit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfrep_strategy as tfrep
from tfrep_strategy.cluster.identity import inherited_environ

LIMIT = 150
TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
_SCRIPTS = TESTS / "running" / "scripts"
TELLS = str(TESTS / "cluster" / "environments" / "scripts" / "tells.py")
GOES_ON = str(_SCRIPTS / "goes_on.py")
JOINS = str(_SCRIPTS / "joins.py")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
"""Daemons are in a folder that a user's path may lack."""
RUN = [sys.executable, "-m", "tfrep_strategy.cli", "run"]


def needs(*tools: str) -> pytest.MarkDecorator:
    """Skips the tests of an engine that is not installed, and names what is missing.

    Args:
        *tools: Its programs.
    """
    missing = [tool for tool in tools if shutil.which(tool, path=_PATH) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


def environ(**own: str) -> dict[str, str]:
    """Returns the environment variables of an engine."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    return inherited_environ() | {"PATH": _PATH, "PYTHONPATH": str(Path(tfrep.__file__).parents[1])} | quiet | own


def done(command: Sequence[str], folder: Path, exit_code: int = 0, **own: str) -> tuple[str, str]:
    """Runs a command to its end, and returns what it wrote to standard output and error."""
    ended = subprocess.run(command, cwd=folder, env=environ(**own), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert ended.returncode == exit_code, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout, ended.stderr


def found_in(output: str) -> list[Any]:
    """Returns what the ranks have found, which each prints in a line."""
    return list(_found_in(output))


def _found_in(output: str) -> Iterator[Any]:
    for text in output.split("FOUND ")[1:]:
        yield json.JSONDecoder().raw_decode(text)[0]


def places_in(output: str) -> list[Any]:
    """Returns what processes of `tells.py` have told, in the order of their places. Their lines may have run together."""
    told = [json.JSONDecoder().raw_decode(output, found.start())[0] for found in re.finditer(r'\{"place"', output)]
    return sorted(told, key=lambda each: each["place"])


def check_ranks(found: Sequence[dict[str, Any]], communicator: str) -> None:
    """Checks that two ranks of `joins.py` agree on everything."""
    assert len(found) == 2
    assert sorted(each.pop("failure") for each in found) == ["FileExistsError", "PeerError"]
    assert found[0] == found[1]
    assert found[0]["size"] == 2
    assert found[0]["ranks"] == [0, 1]
    assert found[0]["communicator"] == communicator


def check_what_was_learned(output: str, alone: list[Any]) -> None:
    """Checks that `goes_on.py`, which was started again, has learned what one device learns."""
    (found,) = found_in(output)
    for own, expected in zip(found["fits"], alone, strict=True):
        for values, wanted in zip(own[2:], expected[2:], strict=True):
            np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)


def check_fits(output: str, alone: list[Any]) -> None:
    """Checks that `goes_on.py` has learned what one device learns."""
    (found,) = found_in(output)
    for own, expected in zip(found["fits"], alone, strict=True):
        for values, wanted in zip(own, expected, strict=True):
            np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)
