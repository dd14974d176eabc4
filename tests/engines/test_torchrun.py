"""PyTorch's `torchrun`, for real: it starts the ranks, which meet beside its own store."""

from __future__ import annotations

from pathlib import Path

import pytest
from starting import JOINS, TELLS, check_ranks, done, found_in, needs, places_in

pytestmark = [pytest.mark.lane("engines"), needs("torchrun")]


def torchrun(script: str, folder: Path) -> str:
    """Returns what two ranks of a script have written."""
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", script]
    return done(command, folder, XDG_CACHE_HOME=str(folder / "cache"))[0]


def test_the_ranks_meet(tmp_path: Path) -> None:
    first, second = places_in(torchrun(TELLS, tmp_path))
    assert (first["place"], second["place"]) == (["torchrun", 0, 2], ["torchrun", 1, 2])
    assert first["addresses"] == second["addresses"]


def test_a_script_trains_with_all_ranks(tmp_path: Path) -> None:
    check_ranks(found_in(torchrun(JOINS, tmp_path)), "shared_memory")
