"""MPICH's `mpiexec`, for real: its ranks meet where the user says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from starting import TELLS, done, needs, places_in

from tfrep_strategy.cluster.rendezvous.connections import free_ports

pytestmark = [pytest.mark.lane("engines"), needs("mpiexec.hydra")]


def test_the_ranks_meet_at_the_address_that_the_user_gives(tmp_path: Path) -> None:
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(*free_ports(1))}
    command = ["mpiexec.hydra", "-n", "2", sys.executable, TELLS]
    first, second = places_in(done(command, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"), **address)[0])
    assert (first["place"], second["place"]) == (["MPI", 0, 2], ["MPI", 1, 2])
    assert first["addresses"] == second["addresses"]
