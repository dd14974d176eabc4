"""The process of `tfrep estimate`: it runs a script until a step is traced, as rank 0 of ranks that do not exist."""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy.cluster.environments import Environment, register_environment
from tfrep_strategy.communicators import SingleCommunicator, register_communicator
from tfrep_strategy.communicators.sharding import Along, Cut, Even, Owned, owners
from tfrep_strategy.core.calls import user_line
from tfrep_strategy.core.tf import BaseResourceVariable, DistributedVariable, UninitializedVariable
from tfrep_strategy.keras_integration.synchronous.optimizer import is_by_elements
from tfrep_strategy.partitioner.memory import footprint
from tfrep_strategy.running import script
from tfrep_strategy.strategies.one_device import OneDeviceTrace, hears_of_steps
from tfrep_strategy.strategies.variables import PartVariable


class Rehearsal(SingleCommunicator):
    """Rank 0 of ranks that all have what it has.

    Args:
        size: How many ranks there are.
    """

    name = "rehearsal"

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        given = super().all_reduce(tensors, op)
        if op == "product":
            return [tensor**self.size for tensor in given]
        return [tensor * tf.cast(self.size, tensor.dtype) for tensor in given] if op == "sum" else given

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.concat([tensor] * self.size, 0)

    def subgroup(self, ranks: Sequence[int]) -> Rehearsal | None:
        return Rehearsal(len(self.check_group(ranks))) if 0 in ranks else None


def run(replicas: int, memory: int | None, result: Path, program: Sequence[str], own_path: Sequence[str]) -> None:
    """Runs a script until its first training step is traced, writes what a replica needs, and ends this process.

    Args:
        replicas: How many replicas share the work.
        memory: How many bytes each of them has; None if that is not known.
        result: The file to write. It stays empty of numbers if the size of a batch is not known.
        program: "script" or "module", its name, and its arguments.
        own_path: The search path with which Python started.
    """
    size = max(2, replicas)  # The step of one replica is not partitioned.

    @register_environment
    class RehearsalEnvironment(Environment):
        """Rank 0 of as many."""

        name = "tfrep estimate"

        @classmethod
        def detect(cls) -> bool:
            return True

        def __init__(self) -> None:
            super().__init__(rank=0, size=size, local_rank=0, local_size=1)

    register_communicator(Rehearsal.name, lambda environment: Rehearsal(size))
    os.environ.update(TFREP_STRATEGY="multi-worker", TFREP_COMMUNICATOR=Rehearsal.name)

    def end(traced: OneDeviceTrace, batch: int | None) -> NoReturn:
        with tf.init_scope():
            rows = batch or _rows_of_fit(traced.strategy)
            of_model = traced.strategy.extended.model_size
            found: dict[str, Any] = {} if rows is None else {"shards_weights": True, "of_model": of_model}
            if rows is not None and (replicas > 1 or not traced.shards_weights) and of_model in (1, size):
                found = Needs(traced, rows, replicas).report(memory)
        result.write_text(json.dumps(found and {"line": user_line(), **found}), "utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # Nothing that the script would do at its end is done: it has not trained.

    with hears_of_steps.to(end):
        script.main(["", "", *program], own_path)


def _rows_of_fit(strategy: Any) -> int | None:
    """Returns how many rows the first batch of the `fit` that runs now has; None if that is not known."""
    steps = strategy.extended.keras_driver.steps_of_fit
    if steps is None:
        return None
    batch = next(iter(steps.data_adapter.get_tf_dataset()), ())
    rows = [x.shape[0] for x in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(x) and x.shape.rank]
    return int(rows[0]) if rows else None


class _Slot(NamedTuple):
    """A variable of an optimizer.

    Attributes:
        whole: The bytes of all of it.
        shape: Its shape.
        kind: "slot", of which replicas may have parts; "accumulator"; "whole", of which all have all.
        cut: Which part each replica has now.
        optimizer: The optimizer.
    """

    whole: int
    shape: tuple[int, ...]
    kind: str
    cut: Cut | None
    optimizer: Any


class Needs:
    """The memory that each replica needs for a step, in bytes.

    Args:
        traced: The step.
        batch: How many examples the global batch has.
        replicas: How many replicas share them.
    """

    def __init__(self, traced: OneDeviceTrace, batch: int, replicas: int) -> None:
        self._step, self._batch, self._replicas = traced.step, batch, replicas
        plan = self._step.plan
        assert plan is not None, "steps are traced while they are heard of"
        extended = traced.strategy.extended
        shares = replicas // extended.model_size  # Layouts may leave each replica all rows of a batch.
        bucket = extended.bucket_bytes_for([])
        self._footprint = functools.cache(lambda rows: footprint(plan, self._step.graph, rows * shares, replicas, bucket))
        self._rows = -(-batch // shares)
        there = gc.get_objects()
        optimizers = [x for x in there if issubclass(type(x), keras.optimizers.Optimizer) and x.built]
        self._slots = list(_slots(optimizers))
        self._updated = sum(_bytes(v) for v in {id(v): v for each in optimizers for v in each._trainable_variables}.values())
        of_optimizers = set(_copies(v for each in optimizers for v in each.variables))
        layers = [x for x in there if issubclass(type(x), keras.layers.Layer)]
        of_layers = set(_copies(v for layer in layers for v in layer.weights))
        self._weights = self._others = 0
        for variable in there:
            kind = type(variable)
            is_one = issubclass(kind, BaseResourceVariable) and not issubclass(kind, (DistributedVariable, UninitializedVariable))
            if not is_one or id(variable) in of_optimizers:
                continue
            if variable.trainable or id(variable) in of_layers:
                self._weights += _bytes(variable)
            else:
                self._others += _bytes(variable)

    def report(self, memory: int | None) -> dict[str, Any]:
        """Says what a replica needs, and what would make it fit.

        Args:
            memory: How many bytes it has; None if that is not known.

        Returns:
            What `tfrep estimate --json` prints, without the line of the script.
        """
        found = self._footprint(self._rows)
        exact = {
            "weights": self._weights,
            "optimizer": self._of_slots(self._is_sharded) - self._accumulators,
            "accumulators": self._accumulators,
            "gradients": found.gradients,
            "others": self._others,
        }
        total = self._total(self._rows)
        return {
            "replicas": self._replicas,
            "batch_size": self._batch,
            "examples_of_replica": self._rows,
            "exact": exact,
            "upper_bound": {"activations": found.others, "total": total},
            "tensors_of_guessed_size": found.guessed,
            "memory": memory,
            "fits": None if memory is None else True if total <= memory else False if sum(exact.values()) > memory else None,
            "changes": [] if memory is None or total <= memory else self._changes(memory),
        }

    def _total(self, rows: int, accumulates: bool = False, shards: bool = False) -> int:
        """Returns what a replica needs with another number of rows, and other settings, at most."""
        found = self._footprint(rows)
        # The accumulators, their sums with new gradients, the means of these, and the sums over replicas.
        slots = self._of_slots(shards or self._is_sharded) + (4 * self._updated if accumulates else 0)
        return self._weights + self._others + slots + found.gradients + found.others

    @property
    def _accumulators(self) -> int:
        return sum(_part(each, self._replicas) for each in self._slots if each.kind == "accumulator")

    @property
    def _is_sharded(self) -> bool:
        return any(each.cut is not None for each in self._slots)

    def _of_slots(self, is_sharded: bool) -> int:
        """Returns what the variables of optimizers need on the replica that has most of them."""
        held = np.zeros(self._replicas, np.int64)
        dealt: list[int] = []
        for each in self._slots:
            is_whole = not is_sharded or self._replicas == 1 or (self._is_sharded and each.cut is None)
            if each.kind != "slot" or is_whole or isinstance(each.cut, Along):
                held += _part(each, self._replicas)
            elif is_by_elements(each.optimizer):
                held += Even(each.shape, self._replicas).part_shape.num_elements() * each.whole // math.prod(each.shape)
            elif isinstance(each.cut, Owned):
                held[each.cut.owner] += each.whole
            else:
                dealt.append(each.whole)
        for size, owner in zip(dealt, owners(dealt, self._replicas), strict=True):
            held[owner] += size
        return int(held.max())

    def _changes(self, memory: int) -> list[dict[str, Any]]:
        """Returns what each change of a setting would make of the total."""
        changes = [self._with_smaller_batch(memory)]
        parts = [n for n in range(2, self._batch // self._replicas + 1) if not self._batch % n]
        if parts and not self._accumulators:
            changes.append(self._with_accumulation(memory, parts))
        may_shard = self._replicas > 1 and not self._is_sharded and any(each.kind == "slot" for each in self._slots)
        if may_shard:
            changes.append({"shard_optimizer_state": True, "total": self._total(self._rows, shards=True)})
            if all(each["total"] > memory for each in changes):
                changes.append(self._with_smaller_batch(memory, shards=True))
        return [{**each, "fits": each["total"] <= memory} for each in changes]

    def _with_smaller_batch(self, memory: int, shards: bool = False) -> dict[str, Any]:
        """Returns the largest batch that fits, or the smallest one."""
        low, high = 1, self._rows
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._total(middle, shards=shards) <= memory else (low, middle)
        settings = {"batch_size": low * self._replicas, **({"shard_optimizer_state": True} if shards else {})}
        return {**settings, "total": self._total(low, shards=shards)}

    def _with_accumulation(self, memory: int, parts: Sequence[int]) -> dict[str, Any]:
        """Returns the fewest batches into which this one can be cut so that each fits, or the most."""
        for steps in parts:
            total = self._total(-(-self._batch // steps // self._replicas), accumulates=True)
            if total <= memory or steps == parts[-1]:
                break
        return {"batch_size": self._batch // steps, "gradient_accumulation_steps": steps, "total": total}


def _slots(optimizers: Iterable[Any]) -> Iterable[_Slot]:
    """Yields the variables of optimizers, each once: one that scales the loss has those of the one inside, too."""
    seen: set[int] = set()
    for optimizer in optimizers:
        accumulators = {id(v) for v in getattr(optimizer, "_accumulated_gradients", None) or ()}
        whole = {id(v) for v in getattr(optimizer, "_model_variables_moving_average", None) or ()}
        for variable in optimizer.variables:
            if id(variable) in seen:
                continue
            seen.add(id(variable))
            is_whole = id(variable) in whole or not variable.shape
            kind = "accumulator" if id(variable) in accumulators else "whole" if is_whole else "slot"
            cut = variable.value.cut if isinstance(variable.value, PartVariable) else None
            yield _Slot(_bytes(variable), tuple(variable.shape), kind, cut, optimizer)


def _part(slot: _Slot, replicas: int) -> int:
    """Returns the bytes that a replica has of a variable that is cut evenly, or along an axis; of all of another one."""
    if replicas == 1 or not slot.whole or not isinstance(slot.cut, (Along, Even)):
        return slot.whole
    return int(slot.cut.part_shape.num_elements()) * slot.whole // math.prod(slot.shape)


def _bytes(variable: Any) -> int:
    return math.prod(variable.shape) * int(tf.as_dtype(variable.dtype).size)


def _copies(variables: Iterable[Any]) -> Iterable[int]:
    """Returns the ids of the variables of TensorFlow that hold what variables of Keras hold."""
    for variable in variables:
        value = variable.value if isinstance(variable, keras.Variable) else variable
        yield from map(id, value.values if isinstance(value, DistributedVariable) else [value])
