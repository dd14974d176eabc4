"""Each distribution that is imported is one that `pyproject.toml` declares."""

from __future__ import annotations

import ast
import functools
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tfrep_strategy._version import __version__

_REPOSITORY = Path(__file__).resolve().parent.parent
_PROJECT = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
_BUILT = {"horovod"}
"""No index has a distribution that works: `tfrep horovod install` builds it."""


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return {module: [_normalized(name) for name in names] for module, names in packages_distributions().items()}


def _normalized(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def _declared(requirements: Iterable[str]) -> set[str]:
    return {_normalized(requirement) for requirement in requirements}


_REQUIRED = _declared(_PROJECT["dependencies"])
_OF_EXTRAS = _declared(requirement for extra in _PROJECT["optional-dependencies"].values() for requirement in extra)


def _imports(node: ast.AST, at_import: bool = True) -> Iterator[tuple[str, bool]]:
    """Yields the first part of each name that is imported, and whether that happens when the file itself is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name.partition(".")[0], at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            if child.module and not child.level:
                yield child.module.partition(".")[0], at_import
        else:
            is_later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from _imports(child, at_import and not is_later and not is_for_types)


def _third_party(folder: str) -> Iterator[tuple[str, str, bool]]:
    """Yields, for each import of another's module in a folder: the file, the module, and whether it happens at once."""
    for path in sorted((_REPOSITORY / folder).rglob("*.py")):
        for module, at_import in _imports(ast.parse(path.read_text("utf-8"))):
            if module not in {*sys.stdlib_module_names, "tfrep_strategy"}:
                yield path.relative_to(_REPOSITORY).as_posix(), module, at_import


def _is_one_of(module: str, declared: set[str]) -> bool:
    # What is not installed here is taken to be called as its module.
    return not declared.isdisjoint(_distributions().get(module, [_normalized(module)]))


def _is_later(path: str, at_import: bool) -> bool:
    """Returns whether something is imported in a function, or in a module that is imported behind the package that it names."""
    return not at_import or path.startswith("tfrep_strategy/strategies/packages/")


def test_the_package_imports_at_once_what_is_always_installed_and_later_what_an_extra_brings() -> None:
    wrong = {
        (path, module)
        for path, module, at_import in _third_party("tfrep_strategy")
        if not _is_one_of(module, _REQUIRED | _OF_EXTRAS | _BUILT if _is_later(path, at_import) else _REQUIRED)
    }
    assert not wrong


def test_what_is_always_installed_is_imported() -> None:
    imported = {module for _, module, _ in _third_party("tfrep_strategy")}
    assert {name for name in _REQUIRED if not any(_is_one_of(module, {name}) for module in imported)} == set()


def test_tests_benchmarks_and_docs_import_what_is_declared() -> None:
    wrong = {
        (path, module)
        for folder in ("tests", "benchmarks", "docs")
        for path, module, _ in _third_party(folder)
        # A module of the repository itself belongs to no distribution.
        if module in _distributions() and not _is_one_of(module, _REQUIRED | _OF_EXTRAS | _BUILT)
    }
    assert not wrong


def test_what_a_page_installs_beside_another_tensorflow_is_all_that_is_required() -> None:
    page = (_REPOSITORY / "docs" / "getting_started.md").read_text("utf-8").replace("\\\n", " ")
    (listed,) = re.findall(r"--no-deps \.\npip install (.*)", page)
    assert _declared(shlex.split(listed)) == _REQUIRED - {"tensorflow", "keras", "numpy"}  # NumPy comes with them.


def test_the_address_of_the_repository_is_one() -> None:
    address = _PROJECT["urls"]["Repository"]
    notebooks = {path.name: path.read_text("utf-8") for path in (_REPOSITORY / "notebooks").glob("*.ipynb")}
    assert {name: re.findall(r'REPOSITORY = \\"([^"\\]*)', text) for name, text in notebooks.items()} == {
        name: [address] for name in notebooks
    }


def test_the_newest_release_is_this_version() -> None:
    changelog = (_REPOSITORY / "CHANGELOG.md").read_text("utf-8")
    _, *releases = re.split(r"^## ", changelog, flags=re.MULTILINE)
    headings = [re.match(r"(\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)\n", release) for release in releases]
    versions, dates = zip(*(heading.groups() for heading in headings if heading), strict=True)
    assert len(versions) == len(releases)
    assert sorted(dates, reverse=True) == [*dates]
    assert max(len(release.splitlines()) for release in releases) <= 80
    assert versions[0] == __version__
    citation = (_REPOSITORY / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {__version__}\ndate-released: {dates[0]}\n" in citation


def test_the_page_of_versions_has_those_that_are_tested() -> None:
    pytest.importorskip("nox")
    page = (_REPOSITORY / "docs" / "support.md").read_text("utf-8")
    rows = re.findall(r"^\| (3\.\d+) \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \| those of one process", page, re.MULTILINE)
    sessions = runpy.run_path(str(_REPOSITORY / "noxfile.py"))["VERSIONS"].values()
    pinned = {(python, *(each.partition("==")[2] for each in versions)) for python, *versions in sessions if "==" in versions[0]}
    assert set(rows) == pinned
    classifiers = {each.removeprefix("Programming Language :: Python :: ") for each in _PROJECT["classifiers"]}
    assert {python for python, *_ in rows} == {each for each in classifiers if re.fullmatch(r"3\.\d+", each)}


def test_each_extra_of_a_hint_is_declared() -> None:
    calls = [
        ast.literal_eval(node.args[0])
        for path in (_REPOSITORY / "tfrep_strategy").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "install_hint"
    ]
    assert calls
    assert set(calls) <= set(_PROJECT["optional-dependencies"])


_OWN_NAME_ON_AN_INDEX = re.compile(r"\bpip3? install\b[^\n]*?[\s'\"`\\]tfrep[-_.]strategy(\[[\w,-]*\])?(?! ?@)(?=[\s'\"`\\<>=!]|$)")
"""The package's name as an argument of pip, without an address."""


def test_nothing_installs_the_package_by_its_name() -> None:
    """The name is not registered, so a stranger may register it."""
    folders = ("tfrep_strategy", "docs", "notebooks", "examples", "benchmarks", "deploy", ".ci")
    paths = [*_REPOSITORY.glob("*"), *(path for folder in folders for path in (_REPOSITORY / folder).rglob("*"))]
    texts = {path: path.read_text("utf-8", errors="ignore") for path in paths if path.is_file()}
    assert {_REPOSITORY / "README.md", _REPOSITORY / "tfrep_strategy" / "errors.py"} <= set(texts)
    assert {path: found[0] for path, text in texts.items() if (found := _OWN_NAME_ON_AN_INDEX.search(text))} == {}


@pytest.mark.parametrize(
    ("command", "by_name"),
    [
        ("pip install 'tfrep-strategy[ray]'", True),
        ("%pip install --quiet tfrep_strategy", True),
        ("uv pip install tfrep-strategy>=0.2", True),
        ("pip install --upgrade 'tfrep-strategy'", True),
        ("pip install '.[ray]'", False),
        ('pip install "tfrep-strategy[plots] @ {REPOSITORY}"', False),
    ],
)
def test_a_command_that_installs_by_name_is_found(command: str, by_name: bool) -> None:
    assert bool(_OWN_NAME_ON_AN_INDEX.search(command)) == by_name
