"""Train and test functions whose steps are traced once, as one device's, and partitioned: `strategy.run` does it.

Nothing of Keras is changed in such a step. Steps that cannot be partitioned yet run by replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import CannotPartitionError, PeerError
from tfrep_strategy.keras_integration.protocol import KerasExtended
from tfrep_strategy.keras_integration.shared.xla import compiled_at_once


class OneDeviceSteps:
    """Runs steps as one device's where that is possible.

    Args:
        extended: That of the strategy.
        make: Makes what runs steps, each of them in one call of `strategy.run`.
        by_replicas: Runs steps that cannot be partitioned.
        builds: Whether the first step builds the model.
        compiled: Whether XLA compiles what lies between collectives.

    Attributes:
        gives_global_logs: Whether the last steps were one device's, so that their logs are those of the global batch.
    """

    def __init__(
        self,
        extended: KerasExtended,
        make: Callable[[], Callable[[Any], Any]],
        by_replicas: Callable[[Any], Any],
        builds: bool,
        compiled: bool,
    ) -> None:
        self._extended, self._make, self._by_replicas, self._builds = extended, make, by_replicas, builds
        self._in_its_way = compiled_at_once if compiled else contextlib.nullcontext
        self._ways: dict[bool | None, tuple[Callable[[Any], Any], Any]] = {}
        """By whether the tensors of a batch have one number of rows: what runs its steps, and how they are partitioned."""
        self._traced: set[bool | None] = set()
        self._cannot_be_traced = self.gives_global_logs = False

    def __call__(self, batches: Any) -> Any:
        alike = batches.rows_are_alike
        self.gives_global_logs = not (self._cannot_be_traced or alike is False or tf.config.functions_run_eagerly())
        if not self.gives_global_logs:
            return self._by_replicas(batches)
        if alike not in self._ways:
            self._ways[alike] = self._make(), self._extended.new_partitioned_steps(self._builds, alike)
        run, steps = self._ways[alike]
        try:
            with self._extended.partitioned_steps.to(steps), self._in_its_way():
                result = run(batches)
        except tf.errors.OutOfRangeError:
            steps.run_without_batch()
            raise
        except tf.errors.OpError as error:
            steps.tell_lines(error)
            raise
        except (PeerError, StopIteration):
            raise
        except Exception as error:  # A step may ask how many rows there are, or do what the partitioner has no way for.
            if alike in self._traced and not isinstance(error, CannotPartitionError):
                raise
            self._cannot_be_traced, self.gives_global_logs = True, False
            return self._by_replicas(batches)
        self._traced.add(alike)
        return result


class WholeBatches(list[Any]):
    """Whole batches as `Shards`.

    Args:
        extended: That of the strategy, which cuts them.
        batches: The batches.

    Attributes:
        rows_are_alike: Whether all tensors of each batch have one number of rows; None if its `Shards` tell.
    """

    def __init__(self, extended: KerasExtended, batches: Iterable[Any]) -> None:
        given = list(batches)
        super().__init__(map(extended.shard, given))
        told = set(map(extended.rows_are_alike, given))
        self.rows_are_alike = told.pop() if len(told) == 1 else False if False in told else None
