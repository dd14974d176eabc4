"""Faults are found at the operation that has them, and healthy programs have none. Faults are drawn from the table of rules."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from lanes import in_lane
from partitioner import wrong_rules
from partitioner.programs_of_rows import PROGRAMS
from partitioner.test_rules import CASES, tries
from partitioner.wrong_rules import MUTATIONS, TALK
from verification.observed_runs import Run, verified

from tfrep_strategy.partitioner.placements import REPLICATE, Shard

_ROWS = np.random.RandomState(0).randn(6, 4, 2).astype("float32")
_NAMES = [(kind, name) for kind, each in PROGRAMS.items() for name in each]
_SEEDS = [0, *in_lane("rows", *range(1, 30))]
"""Each of them draws some faults."""


def _verified(kind: str, name: str, counts: tuple[int, ...] = (4, 2)) -> Run:
    """Runs a program of rows, and takes its gradient by a weight."""

    def value_and_gradient(x: tf.Tensor, weight: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(weight)
            value = weight**2 * PROGRAMS[kind][name](weight * x)
        return [value, tape.gradient(value, weight, unconnected_gradients="zero")]

    return verified(value_and_gradient, [_ROWS, np.float32(1.2)], [Shard(0), REPLICATE], counts)


def _drawn(seed: int) -> random.Random:
    return random.Random(f"faults {seed}")


def _tries(name: str, *splits: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    for each in tries(CASES[name], splits or [(3, 2), (4, 0, 1)]):
        yield each[:4]


@pytest.mark.parametrize("seed", _SEEDS)
def test_healthy_operations_and_programs(seed: int) -> None:
    draw = _drawn(seed)
    compared = 0
    for name in draw.sample(list(CASES), 3):
        run = verified(*draw.choice(list(_tries(name))))
        assert run.finding is None, f"{name}: {run.finding}"
        compared += run.compared
    for kind, name in draw.sample(_NAMES, 3):
        run = _verified(kind, name, draw.choice([(4, 2), (6, 0), (2, 3, 1)]))
        assert run.finding is None, f"{name}: {run.finding}"
        compared += run.compared
    assert compared > 20


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_placement(mutation: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, named = _drawn(seed), 0
    for name in draw.sample([each for each in CASES if each != "sums"], len(CASES) - 1):
        with monkeypatch.context() as patch:
            changed = wrong_rules.mutated(patch, MUTATIONS[mutation], name.split())
            run = _run_or_none(*draw.choice(list(_tries(name, (3, 3)))))  # With unequal parts most of these programs fail.
        if run is None or not changed:  # A program that cannot run needs no search.
            continue
        if run.finding is None:
            assert run.worst < 1e-5, f"{name}: {mutation}, and {changed} are not found"
            continue
        assert any(repr(each) in run.finding.what for each in changed), f"{name}: {mutation}: {run.finding} for {changed}"
        named += 1
        if named == 2:
            return
    assert named


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("fault", TALK)
def test_replicas_that_do_not_get_what_they_send(fault: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, named = _drawn(seed), 0
    for kind, name in draw.sample(_NAMES, len(_NAMES)):
        with monkeypatch.context() as patch:
            changed = wrong_rules.misled(patch, TALK[fault], draw.choice([0, 0, 1, 2]))
            run = _run_or_none(kind, name, of=_verified)
        if run is None or not changed:
            continue
        if run.finding is None:
            assert run.worst < 1e-5, f"{name}: {fault}, and {changed} is not found"
            continue
        assert repr(changed[0]) in run.finding.what, f"{name}: {fault}: {run.finding} for {changed}"
        assert fault != "a copy is stale" or run.finding.replica == 1
        named += 1
        if named == 2:
            return
    assert named


@pytest.mark.parametrize("type_", ["Sub", "RealDiv", "Pow", "Maximum"])
def test_operands_in_another_order(type_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tf.raw_ops
    function = {"Sub": raw.Sub, "RealDiv": raw.RealDiv, "Pow": raw.Pow, "Maximum": raw.Maximum}[type_]
    changed = wrong_rules.with_operands_swapped(monkeypatch, type_)
    rows = np.abs(_ROWS[:5, :, 0]) + 0.5
    given = [rows, rows[:, ::-1].copy()], [Shard(0)] * 2, (3, 2)
    run = verified(lambda x, y: [tf.reduce_sum(function(x=x * 2.0, y=y + 1.0) ** 2)], *given)
    if type_ == "Maximum":
        assert run.finding is None
    else:
        assert run.finding is not None
        assert repr(changed[0]) in run.finding.what
        assert "test_found_faults.py" in run.finding.line


def test_draws_of_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("noisy"):
            return tf.reduce_mean(x * tf.random.stateless_uniform(tf.shape(x), [3, 1]))

    given = function, [_ROWS[:5, :, 0]], [Shard(0)], (3, 2)
    assert verified(*given).finding is None
    wrong_rules.with_draws_from_the_start(monkeypatch)
    finding = verified(*given).finding
    assert finding is not None
    assert finding.what.startswith("StatelessRandomUniformV2")
    assert finding.layer.startswith("noisy")
    assert finding.replica == 1


def _run_or_none(*args: Any, of: Any = verified) -> Run | None:
    """Returns a run; None if planning it, or the program, fails: who runs it is told then."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return of(*args)
    except Exception:
        return None
