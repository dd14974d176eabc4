"""Training over common memory: the answer of one device."""

from __future__ import annotations

from typing import Any

import pytest
from test_one_device_answer import CUT, PROMISED, assert_same, on_one_device, run_in_scope


@pytest.mark.parametrize("name", [*PROMISED, *CUT])
def test_two_processes(name: str, worker_pool: Any) -> None:
    pool = worker_pool("shared_memory", 2)
    for rank, found in enumerate(pool.run(run_in_scope, name, limit=120, meanwhile=lambda: on_one_device(name))):
        assert_same(found, on_one_device(name), f"rank {rank}: {name}")
