"""Every primitive x dtype x mode x strategy x number of replicas, forward and gradient, against one device."""

from __future__ import annotations

import numpy as np
import programs
import pytest

import tfrep_strategy as tfrep

STRATEGIES = [("mirrored", n) for n in (1, 2, 3, 4)] + [(c, n) for c in ("tf", "horovod") for n in (2, 3, 4)]
STRATEGIES += [("alone", 1)]


@pytest.fixture(params=STRATEGIES, ids=lambda p: f"{p[0]}-{p[1]}", scope="module")
def everywhere(request, worker_pool):
    """Gives `everywhere(fn, *args)`, which runs `fn(strategy, *args)` in every process of a strategy."""
    kind, size = request.param
    if kind in ("tf", "horovod"):
        pool = worker_pool(kind, size)
        run = lambda fn, *args: pool.run(fn, *args, limit=90)  # noqa: E731
    else:
        strategy = tfrep.MultiWorkerStrategy() if kind == "alone" else tfrep.MirroredStrategy([f"CPU:{i}" for i in range(size)])
        run = lambda fn, *args: [fn(strategy, *args)]  # noqa: E731
    run.size = size
    return run


@pytest.mark.parametrize("mode", programs.MODES)
def test_forward(everywhere, mode):
    # Building the graphs takes most of the time: all dtypes in all modes for two replicas, a choice for more.
    everywhere(programs.run_forward, mode, None, programs.FEW if _slow(mode) and everywhere.size > 2 else programs.DTYPES)


@pytest.mark.parametrize("mode", programs.MODES)
def test_gradients(everywhere, mode):
    everywhere(programs.run_gradients, mode, programs.DIFFERENTIABLE if mode == "function" else ["float32"])


@pytest.mark.parametrize("mode", ["eager", "function", "cond"])
def test_groups(everywhere, mode):
    if everywhere.size < 3:
        pytest.skip("A part of the replicas that is no single one needs three.")
    everywhere(programs.run_forward, mode, [0, 2], programs.FEW if _slow(mode) else programs.DTYPES)


def _slow(mode):
    return mode in ("cond", "while", "nested")


@pytest.mark.parametrize("gather", [False, True], ids=["sum", "gather"])
def test_in_fit_with_uneven_batches(everywhere, gather):
    expected = programs.weights_after_fit(None, gather)
    for weights in everywhere(programs.weights_after_fit, gather):
        for found, wanted in zip(weights, expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
