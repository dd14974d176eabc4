"""Lanes of tests: `pytest` runs the short one, `pytest -m LANE` another one, and a file that is named runs whole.

`pytestmark = pytest.mark.lane("faults")` puts the tests of a module into a lane, a decorator the tests of a function, and
`in_lane` the tests of some parameters. The nearest mark counts. A test without one is in the lane `short`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

_KINDS = ("mirrored", "tf", "horovod")

SHORT = ("quick", "short")
"""What `pytest` runs by itself. The quick tests run in one process, in a few minutes."""

LANES: dict[str, tuple[str, ...]] = {
    "programs": _KINDS,
    "verified": ("mirrored", "tf"),
    "keras": (),
    "servers": (),
    "launchers": (),
    "hosts": (),
    "faults": (),
    "engines": (),
    "gpus": (),
    "benchmarks": (),
    "collectives": (),
    "migration": (),
    "functions": ("mirrored", "processes"),
    "loops": (),
    "input": (),
    "callbacks": (),
    "rows": (),
    "ragged": (),
    "resumed": (),
    "wires": (),
    "package": (),
    "packages": (),
    "optimizers": (),
    "sharded": ("training", "every"),
    "transports": (),
    "notebooks": (),
    "profiles": (),
    "drawn": (),
    "scenarios": tuple(f"{kind}_{half}" for kind in _KINDS for half in (1, 2)),
    "versions": ("oldest", "colab", "tensorflow_cpu", "packages"),
}
"""The other lanes, and the parts of those that are too long for one go: `programs_tf`. CONTRIBUTING.md says what is in each.

The parts of `versions` are sessions of `noxfile.py`.
"""


WARNINGS = (
    "error",
    "default::ResourceWarning",
    # This package warns of what is slow, or may be a mistake; tests that are about a warning expect it by themselves.
    "ignore:Operations of a step cannot be split",
    "ignore:Steps run eagerly",
    "ignore:The tensors of a batch have different numbers of rows",
    "ignore:This run uses the communicator",
    "ignore:`[a-z_]+` got a model made outside",
    # Keras, of data that end or cannot be shuffled, and of a file that has other variables.
    "ignore:Your input ran out of data",
    "ignore:`shuffle=True` was passed, but will be ignored",
    "ignore:Skipping variable loading for optimizer",
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning",
)
"""How quick tests take warnings: they are errors, but for those that are named. The last that fits counts."""


def parts() -> list[str]:
    """Returns the names of the other lanes, with the parts in place of a lane that has some."""
    return [f"{lane}_{part}" if part else lane for lane, parts in LANES.items() for part in parts or ("",)]


def in_lane(lane: str, *values: Any) -> list[Any]:
    """Returns parameters whose tests are in a lane: `parametrize("size", [2, *in_lane("wires", 3, 4)])`.

    Args:
        lane: The lane.
        values: The values, each a tuple where there are several parameters.
    """
    mark = pytest.mark.lane(lane)
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark) for value in values]


def others_in_lane(lane: str, values: Iterable[Any], *here: Any) -> list[Any]:
    """Returns parameters whose tests are in a lane, but for those that are named.

    Args:
        lane: The lane.
        values: The values.
        here: Those whose tests stay in the lane of their function.
    """
    return [value if value in here else in_lane(lane, value)[0] for value in values]


def lane_of(item: pytest.Item) -> str:
    """Returns the lane of a test, or the part of a lane.

    Args:
        item: The test.

    Raises:
        pytest.UsageError: There is no such lane, or two marks at one place name different ones.
    """
    for node in reversed(item.listchain()):
        named = {mark.args[0] for mark in node.own_markers if mark.name == "lane"}
        if len(named) > 1:
            raise pytest.UsageError(f"{item.nodeid} is in several lanes: {', '.join(sorted(named))}")
        if named - {*SHORT, *parts()}:
            raise pytest.UsageError(f"{item.nodeid} is in a lane that tests/lanes.py does not have: {named.pop()}")
        if named:
            return str(named.pop())
    return "short"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lane(name): says in which lane a test is.")
    config.addinivalue_line("markers", "full: is not in the short lane, which `pytest` runs by itself.")
    for lane in (*SHORT, *LANES, *parts()):
        config.addinivalue_line("markers", f"{lane}: is in this lane.")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test with its lane, and runs the short one where neither a path nor a lane was asked for."""
    for item in items:
        lane = lane_of(item)
        for marker in {lane, lane.partition("_")[0], "short" if lane in SHORT else "full"}:
            item.add_marker(marker)
        if lane == "quick":
            item.add_marker(pytest.mark.filterwarnings(*WARNINGS), append=False)
    if config.args_source is config.ArgsSource.TESTPATHS and not config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if "full" in item.keywords])
        items[:] = [item for item in items if "full" not in item.keywords]
