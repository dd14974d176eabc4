"""What is done again and again, each in one word: `nox -s quick`. `nox -l` lists the sessions; `nox` runs the other versions.

A session of a version installs Python, TensorFlow and Keras as it says into a fresh environment, builds Horovod if it can
(`TFREP_HOROVOD_TESTS=none` saves the eight minutes), and runs the quick tests. One whose Python is not on this machine is skipped.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import nox

nox.options.error_on_missing_interpreters = False

VERSIONS = {
    "oldest": ("3.11", "tensorflow==2.19.1", "keras==3.12.0"),
    "middle": ("3.12", "tensorflow==2.20.0", "keras==3.13.2"),
    "colab": ("3.13", "tensorflow==2.20.0", "keras==3.13.2"),
    "newest": ("3.11", "tensorflow", "keras"),
}
"""Of each session: Python, and what is installed before the package."""

BESIDE = (
    *("keras-hub", "keras-rs", "bayesflow", "scikeras", "shap", "tensorflow-datasets"),
    *("comet-ml", "neptune", "neptune-scale"),
)
"""What is installed beside the package for `tests/strategies/packages/test_beside.py`, each in its newest release."""

nox.options.sessions = list(VERSIONS)


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


@nox.session(venv_backend="none")
def setup(session: nox.Session) -> None:
    """Installs the package for work on it into the environment of nox, Horovod, and the hooks of git."""
    session.run("pip", "install", "-e", ".[dev]")
    session.run("tfrep", "horovod", "install")
    session.run("pre-commit", "install")


@nox.session(venv_backend="none")
def quick(session: nox.Session) -> None:
    """Runs what takes a few minutes: the hooks, and the tests of one process."""
    session.run("pre-commit", "run", "--all-files")
    session.run("pytest", "-m", "quick", *session.posargs)


@nox.session(venv_backend="none")
def test(session: nox.Session) -> None:
    """Runs the short lane, or what is asked for: `nox -s test -- -m rows`."""
    session.run("pytest", *session.posargs)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Builds the site into `build/`, and refuses warnings."""
    session.run("python", "-m", "sphinx", "-W", "docs", "build")


def repository() -> str:
    """Returns the address of the repository, of which `pyproject.toml` has the original."""
    return str(nox.project.load_toml("pyproject.toml")["project"]["urls"]["Repository"])


@nox.session(venv_backend="none")
def address(session: nox.Session) -> None:
    """Writes another address of the repository wherever this one stands, in badges too: `nox -s address -- ADDRESS`."""
    (new,) = session.posargs
    changes = {each(repository()): each(new) for each in (str, in_badges)}
    names = session.run("git", "grep", "-lF", *(f"-e{old}" for old in changes), external=True, silent=True)
    for name in str(names).splitlines():
        text = Path(name).read_text("utf-8")
        for old, other in changes.items():
            text = text.replace(old, other)
        Path(name).write_text(text, "utf-8")
        session.log(name)


def in_badges(address: str) -> str:
    """Returns how an address of GitHub stands in links that open a notebook in Colab."""
    return address.replace("https://github.com/", "colab.research.google.com/github/")


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """Runs every lane on this commit, and builds what is uploaded into `dist/`."""
    if "/OWNER/" in repository():
        session.error(f"The address of the repository is a placeholder, {repository()}: nox -s address -- ADDRESS")
    session.run(".ci/run", "--release", external=True)
    session.run("python", "-m", "build")
    session.run("twine", "check", "--strict", "dist/*")


def but_tensorflow(*extras: str) -> list[str]:
    """Returns what the package and some extras require, without TensorFlow and Keras, of which a session installs its own."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    of_extras, found = project["optional-dependencies"], [*project["dependencies"]]
    for extra in extras:
        for requirement in of_extras[extra]:
            others = re.fullmatch(r"tfrep-strategy\[(.*)\]", requirement)
            found += but_tensorflow(*others[1].split(",")) if others else [requirement]
    return [each for each in dict.fromkeys(found) if not each.startswith(("tensorflow", "keras<", "keras>"))]


@nox.session(python="3.11")
def nightly(session: nox.Session) -> None:
    """Says what of the package no longer fits the nightlies of TensorFlow and Keras: every private name, and every replacement."""
    session.install("tf-nightly", "keras-nightly", *but_tensorflow())
    session.install("--no-deps", ".")
    session.run("tfrep", "doctor", "--patches", success_codes=[0, 1])


@nox.session(python="3.11")
def tensorflow_cpu(session: nox.Session) -> None:
    """Runs the quick tests with the distribution `tensorflow-cpu`, installed as docs/getting_started.md says."""
    session.install("tensorflow-cpu", "keras", *but_tensorflow("test"))
    session.install("--no-deps", ".")
    session.run("pip", "show", "--quiet", "tensorflow", success_codes=[1])  # Nothing has brought it.
    session.run("pytest", "-p", "no:cacheprovider", "-m", "quick", *session.posargs)


@nox.session(python="3.13")
def packages(session: nox.Session) -> None:
    """Runs the tests of packages that are installed beside this one, some of which leave older versions of Python behind."""
    session.install(".", "pytest", "pytest-timeout", *BESIDE)
    session.run("pytest", "-p", "no:cacheprovider", "tests/strategies/packages/test_beside.py", *session.posargs)
