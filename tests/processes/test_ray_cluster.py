"""What is refused before Ray is asked. `tests/engines/test_ray_runs.py` asks it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from tfrep_strategy.cli import app
from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.processes.ray_cluster import RayPlaces, ray_cluster
from tfrep_strategy.running.runs import Options


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"address": "nonsense"}, "ray_address='nonsense'"),
        ({"address": "ray://head:10001"}, "Ray's client does not pass on what ranks write."),
        ({"cpus_per_rank": -1.0}, "fewer than no CPUs"),
        ({"gpus_per_rank": -0.5}, "gpus_per_rank=-0.5"),
    ],
)
def test_places_that_cannot_be(wanted: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        RayPlaces(**wanted)


def test_the_variable_of_ray_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigurationError, match="ray_address='ray://head:10001'"):
        RayPlaces()


@pytest.mark.parametrize(
    ("others", "error"),
    [
        ({"num_replicas": 2, "hosts": "a:1,b:1"}, "Ray places the processes of a run.*hosts="),
        ({"num_replicas": 2, "strategy": "mirrored"}, "strategy='mirrored'"),
        ({"num_replicas": 2, "bind_cores": True}, "Ray places the processes of a run.*bind_cores=True"),
        ({}, "Ray needs to know how many replicas there are."),
    ],
)
def test_options_that_do_not_fit(others: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        Options(ray=RayPlaces(), **others)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--engine", "dask"], "Unknown engine. Received: engine='dask'"),
        (["--gpus-per-rank", "1"], "Without Ray there is no --gpus-per-rank."),
        (["--strategy", "parameter-server", "--engine", "ray"], "This strategy has no --engine."),
    ],
)
def test_command_lines_that_do_not_fit(arguments: list[str], error: str) -> None:
    result = CliRunner().invoke(app, ["run", *arguments, "train.py"])
    assert isinstance(result.exception, ConfigurationError)
    assert error in str(result.exception)


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[ray\]'"), ray_cluster(RayPlaces(), 2):
        pytest.fail("Ray cannot be there.")
