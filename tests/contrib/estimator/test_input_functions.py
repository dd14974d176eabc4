"""What an input function gives to the replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
from estimator_programs import (
    ALL,
    Records,
    X,
    Y,
    check_equal,
    estimator_in,
    global_batches,
    one_device,
    shuffled_input_fn,
    train_through_estimator,
    two,
)
from lanes import in_lane
from raising import refuses

pytestmark = pytest.mark.lane("migration")


@pytest.mark.parametrize(
    ("replicas", "kind"),
    [*in_lane("quick", (2, "input_fn")), (1, "input_fn"), (1, "input_fn_of_process"), (2, "input_fn_of_process")],
)
def test_each_replica_takes_a_batch_of_its_own(replicas: int, kind: str, tmp_path: Path) -> None:
    """44 examples are 11 batches of 4: with two replicas, five steps of 8 examples and one of 4."""
    strategy = two() if replicas == 2 else None
    found = train_through_estimator(strategy, str(tmp_path), kind)
    expected = one_device(global_batches([ALL], replicas))
    assert len(expected["losses"]) == {1: 11, 2: 6}[replicas]
    check_equal(found, expected)


def test_a_shuffle_without_a_seed_has_the_order_of_the_config(tmp_path: Path) -> None:
    def losses(name: str, seed: int | None) -> list[float]:
        hook = Records()
        estimator_in(tmp_path / name, tf_random_seed=seed).train(shuffled_input_fn, hooks=[hook], steps=3)
        return [value["loss"] for value in hook.values]

    assert losses("a", 1) == losses("b", 1) != losses("c", 2)
    assert losses("d", None) != losses("e", None)


def test_tensors_are_the_batch_of_every_step(tmp_path: Path) -> None:
    estimator = estimator_in(tmp_path).train(lambda: (X, Y), steps=3)
    expected = one_device([ALL] * 3)
    results = estimator.evaluate(lambda: (X, Y))
    assert results == pytest.approx(expected["results"] | {"global_step": 3}, rel=1e-5)


@pytest.mark.lane("quick")
def test_input_functions_that_return_nothing(tmp_path: Path) -> None:
    with refuses(input_fn=...):
        estimator_in(tmp_path).train(lambda: None)
