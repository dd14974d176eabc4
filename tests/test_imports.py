"""Who may import whom: the order of the rooms in docs/architecture.md, the parts of a room, and who touches private code."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.lane("quick")

_REPOSITORY = Path(__file__).resolve().parent.parent
_PACKAGE = _REPOSITORY / "tfrep_strategy"
_SOURCES = sorted(_PACKAGE.rglob("*.py"))


@functools.cache
def _imports(path: Path) -> list[tuple[str, bool]]:
    """Gives the modules that a file imports, and whether it does so when it is imported itself."""
    tree = ast.parse(path.read_text("utf-8"))
    inside = {node for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node not in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found.append((module if _is_module(module) else node.module, node not in inside))
    return found


def _is_module(name: str) -> bool:
    """Returns whether `from package import name` means a module, and not something in one."""
    path = _REPOSITORY.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _module(path: Path) -> str:
    parts = path.relative_to(_REPOSITORY).with_suffix("").parts
    return ".".join(parts if parts[-1] != "__init__" else parts[:-1])


def _floors() -> dict[str, int]:
    """Reads the layout: the floor of every room, 0 at the top."""
    text = (_REPOSITORY / "docs" / "architecture.md").read_text("utf-8")
    layout = re.search(r"^## Layout.*?```\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    assert layout is not None
    floors = {}
    for floor, line in enumerate(layout[1].splitlines()):
        names = re.match(r"((?:[\w]+(?:\.py|/)\s{1,2})+)", line + "  ")
        assert names is not None, f"not a floor: {line}"
        for name in names[1].split():
            floors[name.removesuffix(".py").removesuffix("/")] = floor
    return floors


def test_every_room_stands_in_the_layout():
    rooms = {path.relative_to(_PACKAGE).parts[0].removesuffix(".py") for path in _SOURCES}
    assert rooms == set(_floors())


def test_rooms_import_only_what_stands_below_them():
    floors = _floors()
    wrong = []
    for path in _SOURCES:
        own = _room(_module(path))
        for module, _ in _imports(path):
            if module.split(".")[0] == "tfrep_strategy" and (room := _room(module)) != own and floors[room] <= floors[own]:
                wrong.append(f"{_module(path)} imports {module}, which does not stand below it")
    assert not wrong


def test_no_import_circles():
    modules = {_module(path): path for path in _SOURCES}
    needs = {
        name: {m for m, at_import in _imports(path) if at_import and m in modules and m != name} for name, path in modules.items()
    }
    assert not _in_circles(needs)


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in _SOURCES} - {_PACKAGE}), ids=lambda f: f.relative_to(_PACKAGE).as_posix()
)
def test_no_parts_of_a_room_need_each_other(folder):
    """Counts what functions import, too. The `__init__` of a folder hands on what the others have."""
    needs: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        own = _part(folder, _module(path))
        needs.setdefault(own, set()).update({part for module, _ in _imports(path) if (part := _part(folder, module))} - {own})
    assert not _in_circles(needs)


def _part(folder: Path, module: str) -> str:
    """Returns the file or folder directly in a folder that has a module; nothing if the module is elsewhere."""
    package = _module(folder / "__init__.py")
    if module == package:
        return "__init__"
    return module.removeprefix(f"{package}.").split(".")[0] if module.startswith(f"{package}.") else ""


def _in_circles(needs: dict[str, set[str]]) -> set[str]:
    """Returns what needs each other, and what needs any of it."""
    settled: set[str] = set()
    while free := {name for name in set(needs) - settled if needs[name] <= settled}:
        settled |= free
    return set(needs) - settled


def test_private_code_is_touched_in_its_rooms_only():
    """Private TensorFlow goes through core/tf.py, private Keras through keras_integration/internals.py and patching.py."""
    wrong = []
    for path in _SOURCES:
        imports = [module for module, _ in _imports(path) if module.startswith(("tensorflow.python", "keras.src"))]
        text = path.read_text("utf-8")
        if path != _PACKAGE / "core" / "tf.py" and "tensorflow.python" in text:
            imports.append("tensorflow.python")
        if "keras_integration" not in path.parts:
            imports += [name for name in ("keras.src", "keras_integration.internals") if name in text]
        wrong += [f"{_module(path)}: {name}" for name in imports]
    assert not wrong
