"""The tests on other versions of Python, TensorFlow and Keras: `nox` runs all sessions, `nox -s colab` one, `nox -l` lists them.

Each session installs its versions into a fresh environment, builds Horovod where that works, and runs the quick tests. A session
whose Python is not on this machine is skipped, and the run says so.
"""

from __future__ import annotations

import nox

nox.options.error_on_missing_interpreters = False

QUICK = ("pytest", "-p", "no:cacheprovider", "-m", "quick")


def check(session: nox.Session, *versions: str) -> None:
    """Installs the package with these versions of what it stands on, and runs the quick tests."""
    session.install(*versions, ".[test]")
    # Without Horovod its tests skip themselves.
    session.run("tfrep", "horovod", "install", success_codes=[0, 1, 2])
    session.run(*QUICK, *session.posargs)


@nox.session(python="3.10")
def oldest(session: nox.Session) -> None:
    """The oldest versions that the package takes."""
    check(session, "tensorflow==2.19.1", "keras==3.12.0")


@nox.session(python="3.12")
def middle(session: nox.Session) -> None:
    check(session, "tensorflow==2.20.0", "keras==3.13.2")


@nox.session(python="3.13")
def colab(session: nox.Session) -> None:
    """What Google Colab has."""
    check(session, "tensorflow==2.20.0", "keras==3.13.2")


@nox.session(python="3.11")
def newest(session: nox.Session) -> None:
    """The newest versions that there are."""
    check(session, "tensorflow", "keras")
