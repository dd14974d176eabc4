"""The tests on other versions of Python, TensorFlow and Keras: `nox` runs all sessions, `nox -s colab` one, `nox -l` lists them.

Each session installs its versions into a fresh environment, builds Horovod if it can (`TFREP_HOROVOD_TESTS=none` saves the eight
minutes), and runs the quick tests. A session whose Python is not on this machine is skipped, and the run says so.
"""

from __future__ import annotations

import os

import nox

nox.options.error_on_missing_interpreters = False

VERSIONS = {
    "oldest": ("3.11", "tensorflow==2.19.1", "keras==3.12.0"),
    "middle": ("3.12", "tensorflow==2.20.0", "keras==3.13.2"),
    "colab": ("3.13", "tensorflow==2.20.0", "keras==3.13.2"),
    "newest": ("3.11", "tensorflow", "keras"),
}
"""Of each session: Python, and what is installed before the package."""


def add_session(name: str, python: str, *versions: str) -> None:
    """Adds a session; what stands behind `--` on nox's command line goes to pytest."""

    @nox.session(name=name, python=python)
    def run(session: nox.Session) -> None:
        session.install(*versions, ".[test]")
        if os.environ.get("TFREP_HOROVOD_TESTS") != "none":
            session.run("tfrep", "horovod", "install", success_codes=[0, 1, 2])  # If it cannot, it says why.
        session.run("pytest", "-p", "no:cacheprovider", "-m", "quick", *session.posargs)


for name, (python, *versions) in VERSIONS.items():
    add_session(name, python, *versions)
