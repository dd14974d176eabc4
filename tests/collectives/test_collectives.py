"""Every primitive x dtype x mode x strategy x number of replicas, forward and gradient, against one device."""

from __future__ import annotations

import functools

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
        run = lambda fn, *args: pool.run(fn, *args, limit=240)  # noqa: E731
    else:
        strategy = tfrep.MultiWorkerStrategy() if kind == "alone" else tfrep.MirroredStrategy([f"CPU:{i}" for i in range(size)])
        run = lambda fn, *args: [fn(strategy, *args)]  # noqa: E731
    run.size = size
    return run


# Building graphs takes most of the time: two replicas show every dtype and every mode, others a choice of them.


@pytest.mark.parametrize("mode", programs.MODES)
def test_forward(everywhere, mode):
    _skip_what_two_replicas_show(everywhere, mode)
    all_dtypes = mode in ("eager", "layer") or (mode == "function" and everywhere.size == 2)
    everywhere(programs.run_forward, mode, programs.DTYPES if all_dtypes else programs.FEW)


@pytest.mark.parametrize("mode", programs.MODES)
def test_gradients(everywhere, mode):
    _skip_what_two_replicas_show(everywhere, mode)
    all_dtypes = mode in ("eager", "function") and everywhere.size == 2
    everywhere(programs.run_gradients, mode, programs.DIFFERENTIABLE if all_dtypes else ["float32"])


@pytest.mark.parametrize("mode", ["eager", "cond"])
def test_groups(everywhere, mode):
    if everywhere.size < 3:
        pytest.skip("A part of the replicas that is no single one needs three.")
    everywhere(programs.run_forward, mode, programs.DTYPES if mode == "eager" else programs.FEW, [0, 2])


def _skip_what_two_replicas_show(everywhere, mode):
    if mode in ("while", "nested") and everywhere.size != 2:
        pytest.skip("Loops and inner functions are built by the replicas apart, as branches are.")


@functools.cache
def _one_device():
    return programs.weights_after_fit(None)


def test_in_fit_with_uneven_batches(everywhere):
    for weights in everywhere(programs.weights_after_fit):
        for found, wanted in zip(weights, _one_device(), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
