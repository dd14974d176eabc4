"""Runs a function of one device on replicas that are all in this program, and verifies it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from partitioner.replicas import Together, own_rows, parts_of, planned

from tfrep_strategy.partitioner.placements import Placement
from tfrep_strategy.verification.steps import Finding, VerifiedStep


def first_difference(
    function: Callable[..., Any], values: Sequence[np.ndarray], placements: Sequence[Placement], counts: Sequence[int]
) -> tuple[Finding | None, int]:
    """Runs a function on replicas.

    Args:
        function: Of tensors. It may not use variables.
        values: Its arguments, which have rows where they are sharded.
        placements: How they are placed.
        counts: How many rows each replica has.

    Returns:
        The first difference from one device, and how many tensors were compared.
    """
    step = planned(function, values, placements, len(counts), is_open=True, is_observed=True)
    parts = [parts_of(v, p, counts) for v, p in zip(values, placements, strict=True)]
    captured = [outer for outer, _ in step.graph.captures]
    inputs = [[*(tf.constant(each[r]) for each in parts), *captured] for r in range(len(counts))]
    run = tf.function(lambda inputs: step.run(own_rows(counts, sum(counts)), inputs, Together(len(counts))), autograph=False)
    seen = [[x.numpy() for x in own[len(step.graph.outputs) :]] for own in run(inputs)]
    verified = VerifiedStep(step.graph, step.observed)
    return verified.first_difference(seen, {}), verified.compared
