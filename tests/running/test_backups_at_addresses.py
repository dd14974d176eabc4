"""Runs whose backups are in a bucket: TensorFlow's own client speaks to a server on this machine, as it would to Google's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_backed_up_runs import KINDS, RUN, SCRIPT, check, ended, fits_in
from test_joining import LIMIT, SCRIPTS

from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.processes.shared_folder import marked, shared_folder
from tfrep_strategy.running.runs import Options

pytest.importorskip("gcp_storage_emulator", reason="no server of a bucket")

LOOKS = """
import sys
from tfrep_strategy.processes.shared_folder import check_reached, shared_folder
check_reached(shared_folder(sys.argv[1]), sys.argv[2], "host2")
"""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Serves `gs://bucket`; gives the environment variables of programs that are to find it."""
    folder = tmp_path_factory.mktemp("bucket")
    command = [sys.executable, str(SCRIPTS / "serves_a_bucket.py"), str(folder)]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        proxy = f"http://127.0.0.1:{port}"
        yield {"https_proxy": proxy, "CURL_CA_BUNDLE": str(folder / "authority.pem"), "NO_GCE_CHECK": "true"}
    finally:
        server.terminate()
        server.communicate()


@pytest.fixture
def here(bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process finds the bucket, too. Its helper for files keeps the variables with which it was started."""
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one device learns."""
    return fits_in(ended([sys.executable, SCRIPT], tmp_path_factory.mktemp("alone"))[0])


@pytest.mark.usefixtures("here")
def test_a_killed_run_goes_on_from_a_bucket(bucket: dict[str, str], undisturbed: list[Any], tmp_path: Path) -> None:
    """It is killed inside an epoch of its second fit. Nothing is left of it, here or there, when it has ended well."""
    run = [*RUN, *KINDS["tf"], "--max-restarts", "1", "--backup-dir", "gs://bucket/run", SCRIPT]
    output, said = ended([*run, json.dumps(["self", signal.SIGKILL, [[1, 1, 1, 5]]])], tmp_path, **bucket)
    check(fits_in(output), undisturbed)
    assert "Each fit goes on from its last backup." in said
    assert "this fit was finished before. It is not repeated." in said
    assert "fit goes on from its backup: epoch 1, batch" in said
    assert not shared_folder("gs://bucket/run").has_backups()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("here")
def test_a_later_start_goes_on_from_a_bucket(bucket: dict[str, str], undisturbed: list[Any], tmp_path: Path) -> None:
    """The run has ended with an error, and another start finds what it has left: without a number of restarts."""
    run = [*RUN, *KINDS["mirrored"], "--backup-dir", "gs://bucket/later", SCRIPT]
    ended([*run, json.dumps(["self", signal.SIGTERM, [[0, 0, 2, 3]]])], tmp_path, 128 + signal.SIGTERM, **bucket)
    assert shared_folder("gs://bucket/later").has_backups()
    output, said = ended(run, tmp_path, **bucket)
    check(fits_in(output), undisturbed)
    assert "fit goes on from its backup: epoch 2" in said


@pytest.mark.usefixtures("here")
def test_each_machine_looks_for_the_mark_of_the_first(tmp_path: Path) -> None:
    """One that names another address is refused."""
    with marked(shared_folder("gs://bucket/run")) as mark:
        for place, code in (("gs://bucket/run", 0), ("gs://bucket/elsewhere", 1)):
            command = [sys.executable, "-c", LOOKS, place, mark]
            done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=LIMIT)
            assert done.returncode == code, done.stderr
    assert "host2 does not see in the folder for backups what machine 0 has written there" in done.stderr


def test_an_address_that_nobody_knows() -> None:
    with pytest.raises(ConfigurationError, match="(?s)no file system for addresses that begin with nfs://.*gs, ram"):
        Options(2, backup_dir="nfs://host/run")
