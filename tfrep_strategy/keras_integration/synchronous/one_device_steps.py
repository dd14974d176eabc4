"""Train and test functions whose steps are traced once, as one device's, and partitioned: `strategy.run` does it.

Where replicas have batches of their own that make no global one, each of them runs the step on its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import PeerError
from tfrep_strategy.keras_integration.protocol import KerasExtended, KnownRows
from tfrep_strategy.keras_integration.shared.xla import compiled_at_once
from tfrep_strategy.keras_integration.synchronous.logs import note_one_device


class OneDeviceSteps:
    """Runs steps as one device's, where there is a global batch.

    Args:
        extended: That of the strategy.
        model: The model.
        phase: "train" or "test".
        make: Makes what runs steps, each of them in one call of `strategy.run`.
        by_replicas: Runs steps of which replicas have batches of their own that make no global one.
        builds: Whether the first step builds the model.
        compiled: Whether XLA compiles what lies between collectives.
    """

    def __init__(
        self,
        extended: KerasExtended,
        model: Any,
        phase: str,
        make: Callable[[], Callable[[Any], Any]],
        by_replicas: Callable[[Any], Any],
        builds: bool,
        compiled: bool,
    ) -> None:
        self._extended, self._make, self._by_replicas, self._builds = extended, make, by_replicas, builds
        self._of = model, phase
        self._compiled, self._in_its_way = compiled, compiled_at_once if compiled else contextlib.nullcontext
        self._ways: dict[KnownRows, tuple[Callable[[Any], Any], Any]] = {}
        """By what is known of the rows of batches: what runs their steps, and how they are partitioned."""
        self._traced: set[KnownRows] = set()
        self._needs_total = builds  # A layer that was built for any number of rows could not be built again.

    def __call__(self, batches: Any) -> Any:
        known = batches.known_rows if self._needs_total else batches.known_rows._replace(total=None)
        note_one_device(*self._of, not known.are_apart)
        if known.are_apart:
            return self._by_replicas(batches)
        if known not in self._ways:
            self._ways[known] = self._make(), self._extended.new_partitioned_steps(self._builds, known, *self._of)
        run, steps = self._ways[known]
        try:
            with self._extended.partitioned_by(steps, self._compiled), self._in_its_way():
                result = run(batches)
        except tf.errors.OutOfRangeError:
            steps.run_without_batch()
            raise
        except tf.errors.OpError as error:
            steps.tell_lines(error)
            raise
        except (PeerError, StopIteration):
            raise
        except Exception:
            if known in self._traced or known == batches.known_rows:
                raise
            self._needs_total = True  # A step may ask how many rows there are, as in `tf.zeros([x.shape[0], 8])`.
            return self(batches)
        self._traced.add(known)
        return result


class WholeBatches(list[Any]):
    """Whole batches as `Shards`.

    Args:
        extended: That of the strategy, which cuts them.
        batches: The batches.

    Attributes:
        known_rows: What is known of their rows.
    """

    def __init__(self, extended: KerasExtended, batches: Iterable[Any]) -> None:
        given = list(batches)
        super().__init__(map(extended.shard, given))
        self.known_rows = KnownRows.common(map(extended.known_rows, given))
