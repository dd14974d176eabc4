"""How many cores this process may use. Containers are often limited to fewer than they see."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def bound_cores() -> int:
    """Returns how many cores this process may run on.

    Example:
        >>> 1 <= bound_cores() <= os.cpu_count()
        True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """Returns how many cores this process may keep busy: those that it may run on, or fewer where its container has a quota.

    Example:
        >>> 1 <= usable_cores() <= bound_cores()
        True
    """
    return max(1, math.ceil(min([bound_cores(), *_quotas()])))


def cores_of_container() -> int:
    """Returns how many cores all processes of this container may keep busy, whatever this one is bound to.

    Example:
        >>> usable_cores() <= cores_of_container()
        True
    """
    return max(1, math.ceil(min([os.cpu_count() or 1, *_quotas()])))


def _quotas() -> Iterator[float]:
    """Yields the quotas of this process's control group, and of those that it is in, in cores (Linux: `man 7 cgroups`)."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _ROOT / controllers
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
            if controllers:  # Version 1.
                quota, period = (_read(folder / f"cpu.cfs_{kind}_us").strip() for kind in ("quota", "period"))
            if quota.isdecimal() and period.isdecimal():
                yield int(quota) / int(period)
            if folder == root:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
