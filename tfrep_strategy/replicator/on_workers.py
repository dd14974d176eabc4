"""Steps on the workers of a parameter-server strategy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.collectives.checks import check_op
from tfrep_strategy.collectives.spread_work import reduce_nests
from tfrep_strategy.errors import ConfigurationError, check_count, message
from tfrep_strategy.keras_integration.asynchronous.worker_data import drawn_by_each_worker
from tfrep_strategy.replicator.inputs import InputFn, per_pipeline
from tfrep_strategy.replicator.loop import Replicator, StepFn
from tfrep_strategy.strategies.parameter_server import ParameterServerStrategy


class ParameterServerReplicator(Replicator):
    """Runs steps on workers that do not wait for each other, with variables on parameter servers.

    `run` gives `steps` steps to free workers, waits for all of them, and returns one result for each step, in order.
    A step cannot call collectives. Gradients are not aggregated: every step updates the variables by itself.

    Args:
        strategy: A parameter-server strategy, made in the coordinator. Default: `tfrep.ParameterServerStrategy()`.

    Raises:
        ConfigurationError: The strategy is of another kind.
    """

    def __init__(self, strategy: tf.distribute.ParameterServerStrategy | None = None) -> None:
        super().__init__(ParameterServerStrategy() if strategy is None else strategy)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    def init(self) -> None:
        """Checks that the replicator was not shut down; there is nothing to wait for."""
        self._check_alive()

    def run(self, step_fn: StepFn, input_fn: InputFn | None = None, *, steps: int = 1) -> Any:
        """Runs `steps` steps, each on one worker. Returns a list of their results; see `Replicator.run`."""
        self._check_alive()
        check_count("At least one step is needed.", steps=steps)
        key = step_fn, input_fn
        if key not in self._compiled:
            self._compiled[key] = tf.function(self._program(step_fn, self._input(input_fn), 1), autograph=False)
        source = self._input(input_fn)
        with self.context():
            scheduled = [
                self._coordinator.schedule(self._compiled[key], args=() if source is None else (source,)) for _ in range(steps)
            ]
        self._coordinator.join()
        return [each.fetch() for each in scheduled]

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Reduces the results of the steps of one `run`.

        Raises:
            ConfigurationError: There is no such reduction.
        """
        for leaf in tf.nest.flatten(value):
            check_op(op, tf.convert_to_tensor(leaf))
        return reduce_nests(value, op)

    def _make_input(self, input_fn: InputFn) -> Any:
        def pipeline() -> Any:
            # TensorFlow's own strategy does not say how many workers it has.
            with drawn_by_each_worker(getattr(self.strategy, "num_workers", 2)):
                return per_pipeline(self.strategy, self.input_replication_mode, input_fn)

        return iter(self._coordinator.create_per_worker_dataset(pipeline))

    def _check_strategy(self) -> None:
        if not isinstance(self.strategy, tf.distribute.ParameterServerStrategy):
            hint = "pass a tfrep.ParameterServerStrategy."
            raise ConfigurationError(message("A parameter-server strategy is needed.", hint, type=type(self.strategy).__name__))
