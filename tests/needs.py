"""What a test needs that a machine may lack; without it the test is skipped, and the report names what is missing."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tfrep_strategy.horovod_source import MARK
from tfrep_strategy.processes.identity import horovod_is_installed
from tfrep_strategy.rendezvous.horovod_server import horovod_version

needs_horovod = pytest.mark.skipif(not horovod_is_installed(), reason="Horovod is not installed")

needs_ray = pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: the extra ray")

needs_closed_horovod = pytest.mark.skipif(
    not horovod_is_installed() or not horovod_version().endswith(MARK),
    reason="Horovod is not installed, or not by `tfrep horovod install`",
)
"""A Horovod whose ranks take no strangers."""
