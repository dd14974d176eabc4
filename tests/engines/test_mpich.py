"""MPICH's `mpiexec`, for real: its ranks meet where the user says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from starting import TESTS, done, needs

from tfrep_strategy.rendezvous.connections import free_ports

pytestmark = needs("mpiexec.hydra")


def test_the_ranks_meet_at_the_address_that_the_user_gives(tmp_path: Path) -> None:
    tells = [sys.executable, str(TESTS / "environments" / "scripts" / "tells.py")]
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(*free_ports(1))}
    output, _ = done(["mpiexec.hydra", "-n", "2", *tells], tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"), **address)
    first, second = (json.loads(line) for line in output.splitlines())
    assert sorted([first["place"], second["place"]]) == [["MPI", 0, 2], ["MPI", 1, 2]]
    assert first["addresses"] == second["addresses"]
