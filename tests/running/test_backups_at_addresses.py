"""Runs whose backups are in a bucket: TensorFlow's own client speaks to a server on this machine, as it would to Google's."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_backed_up_runs import KINDS, RUN, SCRIPT, check, ended, fits_in
from test_joining import LIMIT, SCRIPTS, environ

pytestmark = pytest.mark.lane("faults")

pytest.importorskip("gcp_storage_emulator", reason="no server of a bucket")

LISTS = """
import sys
from tfrep_strategy.running.shared_folder import shared_folder
print(shared_folder(sys.argv[1]).has_backups())
"""


def said_by(program: str, *arguments: str, **own: str) -> tuple[str, str]:
    """Runs a short program; returns what it wrote to standard output and error."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environ(**own), capture_output=True, text=True, timeout=LIMIT)
    return done.stdout, done.stderr


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
        proxy = {"https_proxy": f"http://127.0.0.1:{port}"}
        yield proxy | {"TFREP_BACKUP_SECONDS": "1", "CURL_CA_BUNDLE": str(folder / "authority.pem"), "NO_GCE_CHECK": "true"}
    finally:
        server.terminate()
        server.communicate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one device learns."""
    return fits_in(ended([sys.executable, SCRIPT], tmp_path_factory.mktemp("alone"))[0])


def test_a_killed_run_goes_on_from_a_bucket(bucket: dict[str, str], undisturbed: list[Any], tmp_path: Path) -> None:
    """It is killed inside an epoch of its second fit. Nothing is left of it, here or there, when it has ended well."""
    run = [*RUN, "-n", "2", "--communicator", "shared_memory", "--max-restarts", "1", "--backup-dir", "gs://bucket/run", SCRIPT]
    output, said = ended([*run, json.dumps(["self", signal.SIGKILL, [[1, 1, 1, 5]]])], tmp_path, **bucket)
    check(fits_in(output), undisturbed)
    assert "Each fit resumes from its last backup." in said
    assert "fit resumes from its backup: epoch" in said
    assert said_by(LISTS, "gs://bucket/run", **bucket)[0] == "False\n"
    assert list(tmp_path.iterdir()) == []


def test_a_later_start_goes_on_from_a_bucket(bucket: dict[str, str], undisturbed: list[Any], tmp_path: Path) -> None:
    """The run has ended with an error, and another start finds what it has left: without a number of restarts."""
    run = [*RUN, *KINDS["mirrored"], "--backup-dir", "gs://bucket/later", SCRIPT]
    ended([*run, json.dumps(["self", signal.SIGTERM, [[0, 0, 2, 3]]])], tmp_path, 128 + signal.SIGTERM, **bucket)
    assert said_by(LISTS, "gs://bucket/later", **bucket)[0] == "True\n"
    output, said = ended(run, tmp_path, **bucket)
    check(fits_in(output), undisturbed)
    assert re.search("fit resumes from its backup: epoch [23]", said)
