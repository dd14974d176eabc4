"""Every primitive x dtype x mode x strategy x number of replicas, forward and gradient, against one device."""

from __future__ import annotations

import functools
import os

import numpy as np
import programs
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("collectives")

STRATEGIES = [("mirrored", n) for n in (1, 2, 3, 4)] + [(c, n) for c in ("tf", "horovod") for n in (2, 3, 4)]
STRATEGIES += [("alone", 1)]


ALL = os.environ.get("TFREP_COLLECTIVES_TESTS") == "all"
"""Whether every number of replicas runs every dtype in every mode."""


def checks(size):
    """Gives what to run on a number of replicas: a name, a function, and its arguments after the strategy.

    Building graphs takes most of the time: two replicas show every dtype and every mode, others a choice of them.
    """
    some_modes = {2: programs.MODES, 3: ["eager", "function"], 4: ["eager"]}
    for mode in programs.MODES if ALL else some_modes.get(size, ["eager", "layer", "function", "cond"]):
        every = ALL or size == 1 or (size == 2 and mode in ("eager", "layer", "function"))
        yield f"forward-{mode}", programs.run_forward, (mode, programs.DTYPES if every else programs.FEW)
        every = ALL or (size == 2 and mode in ("eager", "function"))
        yield f"gradients-{mode}", programs.run_gradients, (mode, programs.DIFFERENTIABLE if every else ["float32"])
        if size < 3 and mode in ("eager", "function"):
            yield f"look-ups-{mode}", programs.run_gradients, (mode, ["float32"], True)
    if size > 2:
        yield "group-eager", programs.run_forward, ("eager", programs.FEW, [0, 2])
    if size == 3:
        yield "group-cond", programs.run_forward, ("cond", programs.FEW, [0, 2])


@pytest.fixture
def everywhere(request, worker_pool):
    """Gives `everywhere(fn, *args)`, which runs `fn(strategy, *args)` in every process of a strategy."""
    kind, size = request.param
    if kind in ("tf", "horovod", "shared_memory"):
        pool = worker_pool(kind, size)
        return lambda fn, *args: pool.run(fn, *args, limit=900 if ALL else 240)
    strategy = tfrep.MultiWorkerStrategy() if kind == "alone" else tfrep.MirroredStrategy([f"CPU:{i}" for i in range(size)])
    return lambda fn, *args: [fn(strategy, *args)]


@pytest.mark.timeout(1000 if ALL else 300)
@pytest.mark.parametrize(
    ("everywhere", "check", "args"),
    [pytest.param(s, fn, args, id=f"{s[0]}-{s[1]}-{name}") for s in STRATEGIES for name, fn, args in checks(s[1])],
    indirect=["everywhere"],
)
def test_as_on_one_device(everywhere, check, args):
    everywhere(check, *args)


KINDS = [("mirrored", 2), ("mirrored", 3), *((kind, 2) for kind in ("tf", "horovod", "shared_memory"))]


@pytest.mark.parametrize("mode", ["eager", "cond"])
@pytest.mark.parametrize("everywhere", KINDS, ids=lambda s: f"{s[0]}-{s[1]}", indirect=True)
def test_means_of_integers_near_their_limits(everywhere, mode):
    everywhere(programs.run_means, mode)


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("everywhere", KINDS, ids=lambda s: f"{s[0]}-{s[1]}", indirect=True)
def test_extremes_keep_what_is_no_number(everywhere, mode):
    everywhere(programs.run_extremes, mode)


@pytest.mark.parametrize("everywhere", KINDS[2:], ids=lambda s: f"{s[0]}-{s[1]}", indirect=True)
def test_splits_that_are_not_all_rows_are_refused(everywhere):
    everywhere(programs.run_wrong_splits)


@functools.cache
def _one_device():
    return programs.weights_after_fit(None)


@pytest.mark.parametrize("everywhere", [s for s in STRATEGIES if s[1] < 4], ids=lambda s: f"{s[0]}-{s[1]}", indirect=True)
def test_in_fit_with_uneven_batches(everywhere):
    for weights in everywhere(programs.weights_after_fit):
        for found, wanted in zip(weights, _one_device(), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [list, tuple, np.array, tf.constant, tf.Variable, lambda numbers: range(3)])
def test_items_are_a_list_or_an_array(make):
    strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
    items = make([0, 1, 2])

    def step():
        squares = tfrep.map_gather(lambda i: i * i, items)
        return tf.stack(squares), tfrep.map_reduce(lambda i: i + 1, items)

    squares, total = tf.function(lambda: strategy.run(step), autograph=False)()
    assert squares.values[1].numpy().tolist() == [0, 1, 4]
    assert total.values[0] == 6
