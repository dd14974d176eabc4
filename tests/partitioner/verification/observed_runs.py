"""Runs a function of one device on replicas that are all in this program, and verifies it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from partitioner.replicas import Together, difference, own_rows, parts_of, planned

from tfrep_strategy.partitioner.placements import Placement
from tfrep_strategy.partitioner.verification.verified_step import Finding, VerifiedStep


class Run(NamedTuple):
    """What was found in a run.

    Attributes:
        finding: The first difference from one device.
        compared: How many tensors were compared.
        worst: The largest difference of a result, as `partitioner.replicas.differences` tells it.
    """

    finding: Finding | None
    compared: int
    worst: float


def verified(
    function: Callable[..., Any], values: Sequence[np.ndarray], placements: Sequence[Placement], counts: Sequence[int]
) -> Run:
    """Runs a function on replicas.

    Args:
        function: Of tensors. It may not use variables.
        values: Its arguments, which have rows where they are sharded.
        placements: How they are placed.
        counts: How many rows each replica has.
    """
    step = planned(function, values, placements, len(counts), is_open=True, is_observed=True)
    parts = [parts_of(v, p, counts) for v, p in zip(values, placements, strict=True)]
    captured = [outer for outer, _ in step.graph.captures]
    inputs = [[*(tf.constant(each[r]) for each in parts), *captured] for r in range(len(counts))]
    run = tf.function(lambda inputs: step.run(own_rows(counts, sum(counts)), inputs, Together(len(counts))), autograph=False)
    every, results = run(inputs), len(step.graph.outputs)
    comparing = VerifiedStep(step.graph, step.observed)
    finding = comparing.first_difference([own[results:] for own in every], {})
    wanted = tf.nest.flatten(function(*map(tf.constant, values)))
    worst = max(difference(x.numpy(), y.numpy()) for own in every for x, y in zip(own[:results], wanted, strict=True))
    assert finding or not comparing.alone, comparing.alone
    return Run(finding, comparing.compared, worst)
