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
        run: Runs steps, each of them in one call of `strategy.run`.
        by_replicas: Runs steps that cannot be partitioned.
        builds: Whether the first step builds the model.
        compiled: Whether XLA compiles what lies between collectives.

    Attributes:
        gives_global_logs: Whether the last steps were one device's, so that their logs are those of the global batch.
    """

    def __init__(
        self,
        extended: KerasExtended,
        run: Callable[[Any], Any],
        by_replicas: Callable[[Any], Any],
        builds: bool,
        compiled: bool,
    ) -> None:
        self._extended, self._run, self._by_replicas = extended, run, by_replicas
        self._steps = extended.new_partitioned_steps(builds)
        self._in_its_way = compiled_at_once if compiled else contextlib.nullcontext
        self._is_traced = self._cannot_be_traced = self.gives_global_logs = False

    def __call__(self, batches: Any) -> Any:
        self.gives_global_logs = not self._cannot_be_traced and self._takes(batches)
        if not self.gives_global_logs:
            return self._by_replicas(batches)
        try:
            with self._extended.partitioned_steps.to(self._steps), self._in_its_way():
                result = self._run(batches)
        except tf.errors.OpError as error:
            self._steps.tell_lines(error)
            raise
        except (PeerError, StopIteration):
            raise
        except Exception as error:  # A step may ask how many rows there are, or do what the partitioner has no way for.
            if self._is_traced and not isinstance(error, CannotPartitionError):
                raise
            self._cannot_be_traced, self.gives_global_logs = True, False
            return self._by_replicas(batches)
        self._is_traced = True
        return result

    def _takes(self, batches: Any) -> bool:
        together: bool = batches.rows_belong_together
        return together and not tf.config.functions_run_eagerly()


class WholeBatches(list[Any]):
    """Whole batches as `Shards`.

    Args:
        extended: That of the strategy, which cuts them.
        batches: The batches.

    Attributes:
        rows_belong_together: Whether all of them is dense, and the tensors of each have one number of rows, on every process.
    """

    def __init__(self, extended: KerasExtended, batches: Iterable[Any]) -> None:
        given = list(batches)
        super().__init__(map(extended.shard, given))
        self.rows_belong_together = all(map(extended.rows_belong_together, given))
