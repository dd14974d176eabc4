"""Train and test functions whose steps are traced once, as one device's, and partitioned: `strategy.run` does it.

Nothing of Keras is changed in such a step. Steps that cannot be partitioned yet run by replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.keras_integration.protocol import KerasExtended


class OneDeviceSteps:
    """Runs steps as one device's where that is possible.

    Args:
        extended: That of the strategy.
        run: Runs steps, each of them in one call of `strategy.run`.
        by_replicas: Runs steps that cannot be partitioned.
        builds: Whether the first step builds the model.

    Attributes:
        gives_global_logs: Whether the last steps were one device's, so that their logs are those of the global batch.
    """

    def __init__(
        self, extended: KerasExtended, run: Callable[[Any], Any], by_replicas: Callable[[Any], Any], builds: bool
    ) -> None:
        self._extended, self._run, self._by_replicas = extended, run, by_replicas
        self._steps = extended.new_partitioned_steps(builds)
        self._is_traced = self._cannot_be_traced = self.gives_global_logs = False

    def __call__(self, batches: Any) -> Any:
        self.gives_global_logs = not self._cannot_be_traced and self._takes(batches)
        if not self.gives_global_logs:
            return self._by_replicas(batches)
        try:
            with self._extended.partitioned_steps.to(self._steps):
                result = self._run(batches)
        except (tf.errors.OpError, StopIteration):
            raise
        except Exception:  # A step may ask how many rows there are, or do what the partitioner has no way for.
            import os, traceback
            if os.environ.get("NOFALLBACK") == "2":
                raise
            if os.environ.get("NOFALLBACK"):
                traceback.print_exc()
                with open("/work/wip/play/fallbacks.txt", "a") as f:
                    f.write(os.environ.get("PYTEST_CURRENT_TEST", "") + " | " + traceback.format_exc().strip().splitlines()[-1][:200] + "\n")
            if self._is_traced:
                raise
            self._cannot_be_traced, self.gives_global_logs = True, False
            return self._by_replicas(batches)
        self._is_traced = True
        return result

    def _takes(self, batches: Any) -> bool:
        if tf.config.functions_run_eagerly():
            return False
        if isinstance(batches, Sequence):
            return all(map(self._steps.fit, batches))
        fit: bool = batches.rows_belong_together
        return fit
