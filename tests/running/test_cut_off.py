"""An elastic run on two machines whose cable is cut: one goes on, and the other says what it has lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from networks import ADDRESS, ip, on
from test_elastic_runs import wait_for
from test_joining import SCRIPTS, environ, found_in
from test_two_hosts import hosts, pytestmark, secret  # noqa: F401

from tfrep_strategy.progress import Progress, Step

LIMIT = 200
SCRIPT = str(SCRIPTS / "goes_slowly.py")


@pytest.mark.parametrize("cut_off", ["for ever", "for some time"])
def test_a_cut_cable(cut_off: str, hosts: list[str], secret: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    backups = tmp_path / "backups"
    own = environ(**secret, TFREP_BACKUP_SECONDS="0", TMPDIR=str(tmp_path))

    def start(number: int) -> subprocess.Popen[str]:
        options = ["--nnodes", "1:2", "--rendezvous", ADDRESS, "--communicator", "tf", "--backup-dir", str(backups)]
        options += ["--log-dir", str(tmp_path / f"logs{number}")]
        command = [*on(hosts[number]), sys.executable, "-m", "tfrep_strategy.cli", "run", *options, SCRIPT, "6", "0.3"]
        return subprocess.Popen(command, cwd=tmp_path, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    progress = Progress(backups)
    both = [start(0), start(1)]
    try:
        wait_for(progress, Step(0, 1, 2), both[0])
        ip("-n", hosts[0], "link", "set", "cable", "down")
        _, said = both[1].communicate(timeout=LIMIT)
        assert both[1].returncode == 1
        assert "Machine 0, with the rendezvous of the run, was lost." in said
        assert ADDRESS in said
        if cut_off == "for some time":
            wait_for(progress, Step(0, 1, 3), both[0])
            ip("-n", hosts[0], "link", "set", "cable", "up")
            both.append(start(1))
        output, said = both[0].communicate(timeout=LIMIT)
    finally:
        ip("-n", hosts[0], "link", "set", "cable", "up")
        for each in both:
            each.terminate()
            each.communicate()
    assert both[0].returncode == 0, said
    alone = subprocess.run([sys.executable, SCRIPT, "6", "0"], env=environ(), capture_output=True, text=True, check=True)
    [found], [expected] = found_in(output), found_in(alone.stdout)
    assert " was lost. All ranks are started again." in said
    assert found["replicas"] == (1 if cut_off == "for ever" else 2)
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
