"""Runs a function of one device on replicas that are all in this program, to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrep_strategy.core.tf import trace
from tfrep_strategy.partitioner.between_replicas import Groups
from tfrep_strategy.partitioner.placements import Partial, Placement, Shard
from tfrep_strategy.partitioner.step import Given, PartitionedStep
from tfrep_strategy.partitioner.values import OwnRows


class Together:
    """A transport between replicas of one program, which counts what it does.

    Args:
        size: How many replicas there are.
    """

    def __init__(self, size: int) -> None:
        self.size, self.devices, self.logical_devices = size, ["CPU:0"] * size, [["CPU:0"]] * size
        self.rounds = self.gathers = 0
        self.groups: dict[str, Any] = {}

    def sums(self, values: Sequence[Sequence[tf.Tensor]], gradients: Sequence[bool]) -> list[list[tf.Tensor]]:
        self.rounds += 1
        return [[tf.add_n(list(each))] * self.size for each in values]

    def scattered(self, values: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        self.rounds += 1
        return [tf.unstack(tf.add_n(list(each)), self.size) for each in values]

    def rows_of_all(self, values: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        self.gathers += 1
        return [[tf.stack(each)] * self.size for each in values]

    def gathered(self, values: Sequence[tf.Tensor], axis: int, is_gradient: bool) -> list[tf.Tensor]:
        self.gathers += 1
        return [tf.concat(list(values), axis)] * self.size

    def first(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [values[0]] * self.size


def own_rows(counts: Sequence[Any], total: Any) -> list[OwnRows]:
    """Returns which rows replicas have that have so many of them."""
    starts = [sum(counts[:i], tf.constant(0)) for i in range(len(counts))]
    return [
        OwnRows(tf.convert_to_tensor(start), tf.convert_to_tensor(count), tf.convert_to_tensor(total), tf.constant(replica))
        for replica, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]


def parts_of(value: np.ndarray, placement: Placement, counts: Sequence[int]) -> list[Any]:
    """Returns what each replica has of a value that is placed so."""
    if isinstance(placement, Shard):
        ends = np.cumsum(counts)[:-1] * placement.per_row
        return np.split(value, ends, placement.axis)
    if isinstance(placement, Partial):
        drawn = np.random.default_rng(5).normal(size=(len(counts), *value.shape)).astype(value.dtype)
        drawn[-1] = value - drawn[:-1].sum(0)
        return list(drawn)
    return [value] * len(counts)


def planned(
    function: Callable[..., Any],
    values: Sequence[np.ndarray],
    placements: Sequence[Placement],
    replicas: int,
    is_open: bool,
    is_observed: bool = False,
) -> PartitionedStep:
    """Traces a function of one device, and plans it.

    Args:
        function: Of tensors.
        values: Its arguments.
        placements: How they are placed.
        replicas: How many there are.
        is_open: Whether the trace knows no number of rows.
        is_observed: Whether a run returns the tensors of the trace, too.
    """

    def spec(value: np.ndarray, placement: Placement) -> tf.TensorSpec:
        shape: list[int | None] = list(value.shape)
        if is_open and isinstance(placement, Shard):
            shape[placement.axis] = None
        return tf.TensorSpec(shape, value.dtype if value.dtype.kind not in "OSU" else tf.string)

    graph = trace("step", function, [spec(v, p) for v, p in zip(values, placements, strict=True)], {})
    given = [*map(Given, placements), *(Given(is_whole=x.dtype != tf.resource) for x, _ in graph.captures)]
    return PartitionedStep(graph, given, replicas, replicas, is_observed=is_observed, keeps_plan=True)


def differences(
    function: Callable[..., Any],
    values: Sequence[np.ndarray],
    placements: Sequence[Placement],
    counts: Sequence[int],
    is_open: bool = True,
    in_function: bool = False,
) -> tuple[float, PartitionedStep, Together]:
    """Compares a function on replicas with one device.

    Args:
        function: Of tensors.
        values: Its arguments, which have rows where they are sharded.
        placements: How they are placed.
        counts: How many rows each replica has.
        is_open: Whether the trace knows no number of rows.
        in_function: Whether the replicas run in a `tf.function`.

    Returns:
        The largest difference of a result on a replica, the planned step, and the transport.
    """
    step, transport = planned(function, values, placements, len(counts), is_open), Together(len(counts))
    parts = [parts_of(v, p, counts) for v, p in zip(values, placements, strict=True)]
    captured = [outer for outer, _ in step.graph.captures]
    inputs = [[*(tf.constant(each[r]) for each in parts), *captured] for r in range(len(counts))]

    def run(inputs: Any) -> Any:
        return step.run(own_rows(counts, sum(counts)), inputs, transport)

    results = (tf.function(run, autograph=False) if in_function else run)(inputs)
    wanted = tf.nest.flatten(function(*map(tf.constant, values)))
    worst = 0.0
    for own in results:
        for got, right in zip(own, wanted, strict=True):
            worst = max(worst, difference(got.numpy(), right.numpy()))
    return worst, step, transport


def on_mesh(
    function: Callable[..., Any],
    values: Sequence[np.ndarray],
    of_model: Sequence[Placement | None],
    counts: Sequence[int],
    model_size: int,
    is_open: bool = True,
) -> tuple[float, PartitionedStep]:
    """Compares a function on a mesh of replicas with one device.

    Args:
        function: Of tensors.
        values: Its arguments.
        of_model: How each is placed along the axis of the model; None for one with the rows of the batch.
        counts: How many rows the replicas have at each place along the axis of the batch.
        model_size: How many replicas there are at each of these places.
        is_open: Whether the trace knows no number of rows.

    Returns:
        The largest difference of a result on a replica, and the planned step.
    """
    specs = [
        tf.TensorSpec([None if is_open and placement is None else value.shape[0], *value.shape[1:]], value.dtype)
        for value, placement in zip(values, of_model, strict=True)
    ]
    graph = trace("step", function, specs, {})
    given = [Given(Shard(0)) if placement is None else Given(of_model=placement) for placement in of_model]
    given += [Given(is_whole=x.dtype != tf.resource) for x, _ in graph.captures]
    groups, replicas = len(counts), len(counts) * model_size
    step, transport = PartitionedStep(graph, given, replicas, replicas, model_size=model_size), Together(replicas)
    within = [range(first, first + model_size) for first in range(0, replicas, model_size)]
    across = [range(place, replicas, model_size) for place in range(model_size)]
    transport.groups = {
        "model": Groups(within, [Together(model_size) for _ in within]),
        "batch": Groups(across, [Together(groups) for _ in across]),
    }
    starts, rows, inputs = np.cumsum([0, *counts]), [], []
    for replica in range(replicas):
        group, place = divmod(replica, model_size)
        rows.append(OwnRows(*map(tf.constant, (int(starts[group]), counts[group], int(starts[-1]), replica))))
        own = [
            value[starts[group] : starts[group + 1]]
            if placement is None
            else np.split(value, model_size, placement.axis)[place]
            if isinstance(placement, Shard)
            else value
            for value, placement in zip(values, of_model, strict=True)
        ]
        inputs.append([*map(tf.constant, own), *(outer for outer, _ in graph.captures)])
    wanted = tf.nest.flatten(function(*map(tf.constant, values)))
    results = step.run(rows, inputs, transport)
    worst = max(difference(got.numpy(), right.numpy()) for own in results for got, right in zip(own, wanted, strict=True))
    return worst, step


def difference(got: Any, right: Any) -> float:
    """Returns the largest difference, relative to 1 at least; infinity where shapes, or what is no number, differ."""
    if np.shape(got) != np.shape(right):
        return np.inf
    if not np.size(right):
        return 0.0
    if np.asarray(right).dtype.kind in "fc":
        if not np.array_equal(np.isnan(got), np.isnan(right)):
            return np.inf
        return float(np.max(np.abs(np.nan_to_num(got) - np.nan_to_num(right)) / np.maximum(1, np.abs(np.nan_to_num(right)))))
    return 0.0 if np.array_equal(got, right) else np.inf
