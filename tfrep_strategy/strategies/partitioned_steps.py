"""Steps that Keras drives: each is traced once, with the global batch, as on one device, and then partitioned."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.calls import line_of
from tfrep_strategy.core.step import KnownRows, Shards, Whole
from tfrep_strategy.data.batches import any_size, bounds, is_nothing, known_total, num_examples
from tfrep_strategy.errors import CannotPartitionError, TfrepError, message, warn
from tfrep_strategy.partitioner.placements import REPLICATE, Offset, Rows, Shard
from tfrep_strategy.partitioner.planner import ON_PURPOSE
from tfrep_strategy.partitioner.step import Given
from tfrep_strategy.partitioner.values import OwnRows
from tfrep_strategy.strategies.one_device import OneDeviceTrace, Results, hears_of_steps, one_replica
from tfrep_strategy.strategies.variables import ShardedWeight


class PartitionedSteps:
    """The partitioned steps of one function, by the kind of batch.

    Args:
        strategy: The strategy whose replicas run them.
        builds: Whether the first step builds something that the function needs, such as the layers of a model.
        known: What is known about the rows of batches.
        keeps_rows: Whether a process keeps only its own rows of sharded results.
        name: The name of the steps, equal on all ranks, and different from that of other steps.
    """

    def __init__(self, strategy: Any, builds: bool, known: KnownRows, keeps_rows: bool = False, name: str = "step") -> None:
        self._strategy, self._builds, self._known, self._keeps_rows = strategy, builds, known, keeps_rows
        self._name = name
        self._traced: dict[Any, OneDeviceTrace | None] = {}
        """The step for each specification of a batch; None if it must be computed whole."""
        self._reported: set[str] = set()
        """The types of operations that a warning has named."""

    def run(self, fn: Callable[[Any], Any], shards: Shards) -> Whole:
        """Adds a step to the graph that is being built; outside graphs, runs it.

        Args:
            fn: The step of one device.
            shards: The batch. It is sharded if all its tensors have equally many rows. Otherwise each replica computes all rows.

        Returns:
            What `fn` returns for the global batch, as `Whole`.

        Raises:
            CannotPartitionError: No rule can partition the step.
        """
        if tf.executing_eagerly():
            return Whole(self._eagerly(fn, shards))
        has_rows = any(leaf.shape.rank for leaf in _tensors(shards.parts[0]))
        if self._known.alike is not None or not has_rows:
            return (self._in_rows if self._known.alike and has_rows else self._of_all)(fn, shards).whole_results()
        made: list[Results] = []

        def of(run: Callable[[Any, Shards], Results], given: Shards) -> list[tf.Tensor]:
            made.append(run(fn, given))
            return made[-1].tensors

        def in_rows() -> list[tf.Tensor]:
            return of(self._in_rows, shards._replace(parts=tf.nest.map_structure(_of_any_rows, shards.parts)))

        # TensorFlow optimizes and places a function that is not inlined when it first runs. Most data never needs this one.
        whole = tf.function(lambda: of(self._of_all, shards), autograph=False, experimental_attributes={"_noinline": True})
        tensors = tf.cond(shards.alike, in_rows, whole)
        return made[0]._replace(tensors=tensors).whole_results()

    def _eagerly(self, fn: Callable[[Any], Any], shards: Shards) -> Any:
        """Runs a step as Python, once in each process, with all rows."""
        extended, batch = self._strategy.extended, self._whole(shards)
        if "eager" not in self._reported:
            self._reported.add("eager")
            warn("Steps run eagerly: each process computes the whole batch. This is correct, but no faster than one device.")
        with _as_one_device(extended), one_replica(self._strategy, is_traced=False):
            results = fn(batch)
        if not self._keeps_rows:
            return results
        own = self._rows(shards, with_start=True)[0]
        return tf.nest.map_structure(lambda x: _own_of(x, own) if tf.is_tensor(x) else x, results)

    def _whole(self, shards: Shards) -> Any:
        """Returns the whole batch."""
        whole = self._strategy.extended.whole_batch(shards)
        return tf.nest.map_structure(lambda leaf: None if is_nothing(leaf) else leaf, whole)

    def _in_rows(self, fn: Callable[[Any], Any], shards: Shards) -> Results:
        """Runs a step in which each replica computes its own rows."""
        total = known_total(shards.parts, self._strategy.num_replicas_in_sync) or self._known.total
        leaves = tf.nest.flatten(shards.parts[0])
        key = total, *map(_with_open_rows, leaves)
        wholes, own = self._wholes(shards), shards
        are_in_groups = self._strategy.extended.model_size > 1
        if are_in_groups:
            shards = self._strategy.extended.in_groups(shards)
        if key not in self._traced:
            try:
                self._traced[key] = self._trace(fn, shards.parts[0], total, [*map(_given_for, leaves, wholes)])
            except CannotPartitionError as error:
                warn(f"Each replica computes all rows of a step. This is correct, but no faster than one device.\n{error}")
                self._traced[key] = None
            self._compare(key)
            self._tell_of(self._traced[key], total)
        traced = self._traced[key]
        if traced is None:
            return self._of_all(fn, shards)
        batches = [
            [
                x
                for leaf, whole in zip(tf.nest.flatten(part), wholes, strict=True)
                for x in tf.nest.flatten(leaf if whole is None else whole, expand_composites=True)
                if not is_nothing(x)
            ]
            for part in shards.parts
        ]
        results = traced.run(self._rows(shards, traced.step.asks_for_start, are_in_groups), batches)
        if not self._keeps_rows or not are_in_groups:
            return results
        rows = self._rows(own, with_start=True)[0]
        return results._replace(tensors=[_own_of(x, rows) for x in results.tensors])

    def _compare(self, key: Any) -> None:
        """Refuses a step that other processes have traced differently."""
        traced = self._traced[key]
        if traced is not None:
            self._strategy.extended.transport.compare(f"{self._name} {key}", traced.step)

    def _tell_of(self, traced: OneDeviceTrace | None, rows: int | None) -> None:
        """Tells who wants to hear of steps that train of this one."""
        if traced is not None and hears_of_steps.value is not None and self._name.startswith("train"):
            hears_of_steps.value(traced, rows)

    def _wholes(self, shards: Shards) -> list[Any]:
        """Returns the whole of each leaf of a batch that cannot be cut into dense rows; None for the other leaves."""
        if not any(map(_is_uncut, tf.nest.flatten(shards.parts[0]))):
            return [None for _ in tf.nest.flatten(shards.parts[0])]
        parts = [[leaf if _is_uncut(leaf) else None for leaf in tf.nest.flatten(part)] for part in shards.parts]
        return list(self._strategy.extended.whole_batch(shards._replace(parts=tuple(parts))))

    def _of_all(self, fn: Callable[[Any], Any], shards: Shards) -> Results:
        """Runs a step in which each replica computes all rows."""
        batch = self._whole(shards)
        specs = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf), batch)
        key = ("all", *tf.nest.flatten(specs))
        tensors = [x for x in tf.nest.flatten(batch, expand_composites=True) if x is not None]
        traced = self._traced.get(key)
        if traced is None:
            leaves = tf.nest.flatten(specs)
            of_rows = next((each for each in self._traced.values() if each is not None and each.takes(leaves)), None)
            given = [Given()] * len(tensors)
            new = OneDeviceTrace(self._strategy, fn, specs, given) if of_rows is None else of_rows.of_all_rows()
            traced = self._traced[key] = new
            self._compare(key)
            self._tell_of(traced, self._known.total)
        rows = self._rows(shards, with_start=self._keeps_rows)
        results = traced.run(rows, [tensors] * len(shards.parts))
        return results._replace(tensors=[_own_of(x, rows[0]) for x in results.tensors]) if self._keeps_rows else results

    def _rows(self, shards: Shards, with_start: bool, are_in_groups: bool = False) -> list[OwnRows]:
        extended = self._strategy.extended
        size = extended.model_size if are_in_groups else 1
        total, counts = tf.cast(shards.total, tf.int32), [tf.cast(num_examples(part), tf.int32) for part in shards.parts]
        start, is_even = tf.constant(0), self._known.are_even
        if with_start and extended.num_local_replicas < extended._num_replicas_in_sync:
            first = extended.first_local_replica // size * size
            start = bounds(total, extended._num_replicas_in_sync, first)[0] if is_even else extended.rows_before(counts[0])
        rows = []
        for replica, count in enumerate(counts, extended.first_local_replica):
            rows.append(OwnRows(start, count, total, tf.constant(replica)))
            start += count if (replica + 1) % size == 0 else 0
        return rows

    def run_without_batch(self) -> None:
        """Runs the part of a step that does not depend on the batch, as TensorFlow does when a step finds no more data.

        If each batch decides how it is computed, nothing runs before the batch is there.
        """
        traced = next(filter(None, reversed(self._traced.values())), None)
        if self._known.alike is None and traced is not None:
            traced.run_without_batch()

    def describe(self) -> list[str]:
        """Describes how the traced steps are partitioned, one finding a line."""
        # Keras 3.16 traces a step for the first batch, and once more for any number of rows.
        lines = [*dict.fromkeys(line for traced in filter(None, self._traced.values()) for line in traced.describe())]
        if any(traced is None for traced in self._traced.values()):
            lines.append("Every replica computes all rows of some batches.")
        return lines

    def tell_lines(self, error: tf.errors.OpError) -> None:
        """Adds to an error the lines of the user's program that made the failing operations."""
        for traced in filter(None, self._traced.values()):
            for operation in traced.step.named_in(error.message or ""):
                error.add_note(f"{operation.type} {operation.name!r} was made at {line_of(operation)}.")

    def _trace(self, fn: Callable[[Any], Any], part: Any, total: int | None, given: Sequence[Sequence[Given]]) -> OneDeviceTrace:
        specs = list(map(_with_open_rows, tf.nest.flatten(part)))
        ways = [specs]
        if total is not None:
            ways.append([_with_rows(spec, total) for spec in specs])
        if self._builds:  # A layer that was built for any number of rows cannot be built again.
            ways.reverse()
        traced: list[OneDeviceTrace] = []
        for specs in ways:
            try:
                batch = tf.nest.pack_sequence_as(part, specs)
                keeps_rows = self._keeps_rows and self._strategy.extended.model_size == 1
                traced.append(OneDeviceTrace(self._strategy, fn, batch, [*itertools.chain(*given)], keeps_rows))
            except (TfrepError, tf.errors.OpError):
                raise
            except Exception:  # The step may need the number of rows, as in `tf.zeros([x.shape[0], 8])`.
                if specs is ways[-1] and not traced:
                    raise
                continue
            if not traced[-1].without_rule:
                break
        best = min(traced, key=lambda each: len(each.without_rule))
        self._tell_costs(best.without_rule)
        return best

    def _tell_costs(self, without_rule: dict[str, Any]) -> None:
        """Warns of operations that each replica computes for all rows."""
        new = [
            f"{type_} {operation.name!r}, {line_of(operation)}" + (f" ({ON_PURPOSE[type_]})" if type_ in ON_PURPOSE else "")
            for type_, operation in without_rule.items()
            if type_ not in self._reported
        ]
        self._reported.update(without_rule)
        if new:
            warn(
                message(
                    "Operations of a step cannot be split among replicas, so each replica computes them for all rows. This is"
                    " correct, but no faster than one device.",
                    hint="use such operations as late in a step as you can. See docs/exactness.md.",
                    code="TFREP-E023",
                    operations=new,
                )
            )


@contextlib.contextmanager
def _as_one_device(extended: Any) -> Iterator[None]:
    """Opens a block in which this process runs, eagerly, the step of one device. All processes open it together.

    Inside, the first copies of sums and of moving statistics hold the value over all replicas.
    """

    def own() -> list[list[Any]]:
        return extended.own_of_replicas(tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)

    for variables in own():
        for variable in variables:
            variable.assign(variable.read_value())
    for variable, value in [(v, v.read_value()) for v in own()[0]]:
        variable.values[0].assign(value)
    yield
    for variable in extended.own_of_replicas(tf.VariableAggregation.NONE)[0]:
        if isinstance(variable, ShardedWeight):
            variable.end_eager_step()
    sums, means = own()
    for variable in sums:  # Rank 0's value counts.
        variable.assign(tf.identity(variable.values[0]))
    for variable in means:
        for copy in variable.values[1:]:
            copy.assign(variable.values[0])


def _own_of(result: tf.Tensor, own: OwnRows) -> tf.Tensor:
    """Returns the replica's own rows of a result; the whole result if it has another number of rows."""
    if not result.shape.rank:
        return result
    count = tf.shape(result)[0]
    are_rows = tf.equal(count, own.total)
    start, stop = tf.where(are_rows, own.start, 0), tf.where(are_rows, own.start + own.count, count)
    return result[start:stop]


def _tensors(part: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(part) if not is_nothing(leaf)]


def _is_uncut(leaf: Any) -> bool:
    """Returns whether a leaf of a batch is ragged or sparse, or has an unknown number of dimensions."""
    return not is_nothing(leaf) and (not isinstance(leaf, tf.Tensor) or leaf.shape.rank is None)


def _of_any_rows(leaf: Any) -> Any:
    """Hides the number of rows of a dense tensor from TensorFlow's optimizer.

    TensorFlow's optimizer assumes what either branch of a condition implies. Where the tensors of one branch have equally many
    rows, it would fold the number of one into the other branch.
    """
    if not isinstance(leaf, tf.Tensor) or leaf.dtype == tf.variant or not leaf.shape.rank:
        return leaf
    hidden = tf.raw_ops.OptionalFromValue(components=[leaf])
    (shown,) = tf.raw_ops.OptionalGetValue(optional=hidden, output_types=[leaf.dtype], output_shapes=[[None, *leaf.shape[1:]]])
    return shown


def _with_open_rows(leaf: Any) -> Any:
    """Returns the specification of a leaf with any number of rows; None for a leaf that stands for None."""
    return None if is_nothing(leaf) else any_size(tf.type_spec_from_value(leaf))


def _with_rows(spec: Any, total: int) -> Any:
    """Returns the specification with this number of dense rows; other specifications are left open."""
    is_dense = isinstance(spec, tf.TensorSpec) and spec.shape.rank
    return tf.TensorSpec([total, *spec.shape[1:]], spec.dtype) if is_dense else spec


def _given_for(leaf: Any, whole: Any) -> tuple[Given, ...]:
    """Returns how replicas get the tensors of a leaf of a batch."""
    if is_nothing(leaf):
        return ()
    if whole is None:
        return (Given(Shard(0) if leaf.shape.rank else REPLICATE),)
    if isinstance(whole, tf.SparseTensor):
        known = None if whole.shape.rank is None else ((whole.shape.rank,), Rows(), *whole.shape[1:])
        return Given(), Given(), Given(sizes=known)
    tensors = tf.nest.flatten(whole, expand_composites=True)
    limits = whole.row_splits if isinstance(whole, tf.RaggedTensor) else None
    return tuple(Given(dims=(Offset(1, 1),) if x is limits else None) for x in tensors)
