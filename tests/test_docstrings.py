"""Every example in a docstring of the package gives what the docstring says."""

from __future__ import annotations

import re

import docstrings
import pytest

import tfrep_strategy as tfrep
from tfrep_strategy.training import collectives, replicator

pytestmark = pytest.mark.lane("package")

_EXAMPLES = docstrings.examples()
_NEED_NO_EXAMPLE = {"InputReplicationMode", "ParameterServerReplicator"}


@pytest.mark.parametrize("name", [name for name in _EXAMPLES if name.rpartition(".")[2] not in docstrings.STARTS_PROCESSES])
def test_example(name, differences):
    assert not differences[name], differences[name]


def test_no_example_is_overlooked():
    written = sum(len(re.findall(r"^\s*>>> ", path.read_text("utf-8"), re.MULTILINE)) for path in docstrings.SOURCES)
    assert written == sum(len(test.examples) for test in _EXAMPLES.values())


@pytest.mark.parametrize("name", sorted({*collectives.__all__, *replicator.__all__} - _NEED_NO_EXAMPLE))
def test_collectives_and_replicators_have_an_example(name):
    public = getattr(tfrep, name)
    assert f"{public.__module__}.{public.__qualname__}" in _EXAMPLES
