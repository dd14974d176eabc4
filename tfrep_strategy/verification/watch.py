"""Compares the first runs of each step that the replicas of a run take, on rank 0.

The other ranks hand it what they have by files in a folder, and not through the transport, which may be what is wrong.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from tfrep_strategy.errors import PeerError, TfrepError, message
from tfrep_strategy.limits import Verification, timeout_seconds
from tfrep_strategy.partitioner.placements import Placement
from tfrep_strategy.partitioner.step import PartitionedStep
from tfrep_strategy.verification.comparison import as_array
from tfrep_strategy.verification.verified_step import Held, VerifiedStep

_numbers = itertools.count()
"""All ranks trace the same steps, in the same order."""
_WAIT_SECONDS = 0.005


class Variable(NamedTuple):
    """A variable that a step uses.

    Attributes:
        place: Of its handle among the inputs of the step.
        name: Its name.
        dtype: Its dtype.
        placement: Whether replicas have copies of it, or addends.
    """

    place: int
    name: str
    dtype: tf.DType
    placement: Placement


class Watch:
    """Compares the first runs of a step.

    Args:
        asked: What is asked of this process.
        step: The step, which is observed.
        variables: Those that it uses.
        resources: What else it uses: by the place among its inputs.
        first_replica: The number of the first replica of this process.
        replicas: How many replicas the run has.
    """

    def __init__(
        self,
        asked: Verification,
        step: PartitionedStep,
        variables: Sequence[Variable],
        resources: Mapping[int, Any],
        first_replica: int,
        replicas: int,
    ) -> None:
        self._asked, self._step, self._variables, self._replicas = asked, step, list(variables), replicas
        self._resources, self._first = resources, first_replica
        self._number, self._runs = next(_numbers), 0
        self._verified: VerifiedStep | None = None

    def values(self, inputs: Sequence[Sequence[Any]], devices: Sequence[str]) -> list[list[tf.Tensor]]:
        """Reads what each replica of this process has of the variables, in the graph that is being built.

        Args:
            inputs: What each replica gives for the inputs of the step.
            devices: Of the replicas.
        """
        found = []
        for own, device in zip(inputs, devices, strict=True):
            with tf.device(device):
                read = [tf.raw_ops.ReadVariableOp(resource=own[each.place], dtype=each.dtype) for each in self._variables]
            found.append(read)
        return found

    def compare(
        self, before: Sequence[Sequence[tf.Tensor]], seen: Sequence[Sequence[tf.Tensor]], after: Sequence[Sequence[tf.Tensor]]
    ) -> None:
        """Adds what compares a run to the graph that is being built.

        Args:
            before: What each replica of this process had of the variables.
            seen: What each of them returns of the trace.
            after: What it has of the variables then.
        """
        flat = [x for of_replica in zip(before, seen, after, strict=True) for part in of_replica for x in part]
        tf.py_function(self._note, flat, [])

    def _note(self, *flat: tf.Tensor) -> None:
        if self._runs >= self._asked.steps:
            return
        self._runs += 1
        each = len(self._variables)
        local, sizes = [], (each, len(flat) // self._local - 2 * each, each)
        left = iter(flat)
        for _ in range(self._local):
            local.append([list(itertools.islice(left, size)) for size in sizes])
        if self._first:
            arrays = [[[(as_array(x), x.dtype.name) for x in part] for part in own] for own in local]
            _write(self._file(self._first), pickle.dumps(arrays, protocol=pickle.HIGHEST_PROTOCOL))
            return
        for first in range(self._local, self._replicas, self._local):
            local += self._received(self._file(first))
        self._check(local)

    @property
    def _local(self) -> int:
        return self._step.local_replicas

    def _file(self, first: int) -> Path:
        return self._asked.folder / f"step{self._number}-{self._runs}-{first}.pkl"

    def _received(self, file: Path) -> Any:
        end = time.monotonic() + timeout_seconds()
        while not file.exists():
            if time.monotonic() > end:
                hint = "ranks do not take the same steps, or one of them is stuck: look at its log."
                raise PeerError(message("Another rank does not tell what it has computed.", hint=hint, file=file.name))
            time.sleep(_WAIT_SECONDS)
        received = pickle.loads(file.read_bytes())
        file.unlink()
        return [[[tf.constant(value, dtype) for value, dtype in part] for part in own] for own in received]

    def _check(self, replicas: Sequence[Any]) -> None:
        graph = self._step.graph
        if self._verified is None:
            resources = {graph.inputs[place].name: resource for place, resource in self._resources.items()}
            self._verified = VerifiedStep(graph, self._step.observed, resources)
        held = {
            graph.inputs[each.place].name: Held(
                each.name, each.placement, [before[i] for before, _, _ in replicas], [after[i] for _, _, after in replicas]
            )
            for i, each in enumerate(self._variables)
        }
        finding = self._verified.first_difference([seen for _, seen, _ in replicas], held)
        verified = self._verified
        told = {
            "step": self._number,
            "run": self._runs,
            "compared": verified.compared,
            "alone": verified.alone,
            "draws": verified.draws,
            "finding": finding and asdict(finding),
        }
        _write(self._asked.folder / f"told{self._number}-{self._runs}.json", json.dumps(told).encode())
        if finding is not None:
            hint = "see what tfrep verify tells."
            raise TfrepError(message("A step differs from that of one device.", hint=hint, operation=finding.what))


def _write(file: Path, content: bytes) -> None:
    part = file.with_suffix(".part")
    part.write_bytes(content)
    os.replace(part, file)
