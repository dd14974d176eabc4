"""What a test needs that a machine may lack; without it the test is skipped, and the report names what is missing."""

from __future__ import annotations

import pytest

from tfrep_strategy.processes.identity import horovod_is_installed

needs_horovod = pytest.mark.skipif(not horovod_is_installed(), reason="Horovod is not installed")
