"""The cores that a container may use, by the files of Linux's control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfrep_strategy.cluster import hardware
from tfrep_strategy.cluster.hardware import threads_of_rank

_V2, _V1 = "0::/pod/container\n", "3:cpu,cpuacct:/pod\n2:memory:/pod\n1:cpuset:/\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, 16),
        (_V2, {"pod/container/cpu.max": "max 100000\n"}, 16),
        (_V2, {"pod/container/cpu.max": "400000 100000\n"}, 4),
        (_V2, {"pod/container/cpu.max": "max 100000\n", "pod/cpu.max": "250000 100000\n"}, 3),
        (_V2, {"pod/container/cpu.max": "50000 100000\n"}, 1),
        (_V2, {"pod/container/cpu.max": "6400000 100000\n"}, 16),
        (_V1, {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 16),
        (_V1, {"cpu,cpuacct/cpu.cfs_quota_us": "200000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_cores(groups: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    read = hardware._read
    monkeypatch.setattr(hardware, "_ROOT", tmp_path)
    monkeypatch.setattr(hardware, "_read", lambda path: groups if path == Path("/proc/self/cgroup") else read(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert (hardware.bound_cores(), hardware.usable_cores()) == (16, expected)
    assert threads_of_rank(2) == max(1, expected // 2)
