"""The examples in the docstrings of collectives, replicators and logical devices, on two logical CPUs."""

from __future__ import annotations

import doctest
import importlib

import keras
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy import collectives, replicator
from tfrep_strategy.strategies import groups, logical_devices

_OBJECTS = {name: getattr(tfrep, name) for name in (*collectives.__all__, *replicator.__all__, "MirroredStrategy")}
_OBJECTS |= {"logical_device": tfrep.logical_device, "LogicalDevices": logical_devices.LogicalDevices}
_OBJECTS |= {"check_members": groups.check_members}
_WITHOUT_EXAMPLE = {"MultiGpuReplicator", "ParameterServerReplicator", "TpuReplicator", "InputReplicationMode"}


@pytest.mark.parametrize("name", sorted(_OBJECTS))
def test_examples(name):
    thing = _OBJECTS[name]
    names = vars(importlib.import_module(thing.__module__)) | {"tfrep": tfrep, "tf": tf, "keras": keras}
    tests = [t for t in doctest.DocTestFinder(recurse=True).find(thing, name, globs=names) if t.examples]
    assert tests or name in _WITHOUT_EXAMPLE
    said = []
    for test in tests:
        doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
