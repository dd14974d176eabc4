"""What a test needs that a machine may lack; without it the test is skipped, and the report names what is missing."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tfrep_strategy.cluster.horovod.gloo import horovod_version
from tfrep_strategy.cluster.horovod.source import MARK
from tfrep_strategy.cluster.identity import horovod_is_installed

needs_horovod = pytest.mark.skipif(not horovod_is_installed(), reason="Horovod is not installed")

needs_ray = pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: the extra ray")

needs_closed_horovod = pytest.mark.skipif(
    not horovod_is_installed() or not horovod_version().endswith(MARK),
    reason="Horovod is not installed, or not by `tfrep horovod install`",
)
"""A Horovod whose ranks take no strangers."""
