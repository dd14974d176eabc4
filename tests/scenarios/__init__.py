"""Small Keras programs, each of which must give under a strategy what it gives on one device: `S:name` in docs/exactness.md."""

# Each registers what it has.
from scenarios import (  # noqa: F401
    around_keras,
    assigned_state,
    branches,
    called_functions,
    compared_rows,
    composed_models,
    layer_kinds,
    learned_weights,
    losses,
    mixing_layers,
    models,
    optimizers,
    own_gradients,
    own_reductions,
    own_steps,
    reports,
    running,
    unequal_rows,
)
from scenarios.base import SCENARIOS, dense, regression, run

__all__ = ["SCENARIOS", "dense", "regression", "run"]
