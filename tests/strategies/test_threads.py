"""A process gets the threads that its replicas need, and no more: idle ones cost time in every step."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import tensorflow as tf
from calling import command

import tfrep_strategy as tfrep

pytestmark = pytest.mark.lane("loops")

_MANY = 24


def sums_that_run_at_once(replicas: str) -> None:
    """Prints how many threads TensorFlow is asked for, and what many collectives of a branch, a loop and functions give."""
    strategy = tfrep.MirroredStrategy(tfrep.use_logical_cpus(int(replicas)))

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tfrep.all_sum(x)

    def step(x: tf.Tensor) -> tf.Tensor:
        def in_branch() -> tf.Tensor:
            return tf.add_n([tf.reduce_sum(tfrep.all_sum(tf.ones([n + 1]) * x)) for n in range(_MANY)]) + inner(x)

        in_loop = tf.map_fn(lambda one: one * tfrep.all_sum(x), tf.ones([8]), parallel_iterations=8)
        return tf.cond(x > 0, in_branch, lambda: x) + tf.reduce_sum(in_loop)

    run = tf.function(lambda: strategy.experimental_local_results(strategy.run(step, (tf.constant(1.0),))))
    results = [float(value) for _ in range(20) for value in run()]
    print(json.dumps({"threads": tf.config.threading.get_inter_op_parallelism_threads(), "results": results}))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_two_threads_a_replica_are_enough(replicas: int) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TF_NUM_INTEROP_THREADS"}
    done = subprocess.run(
        command(sums_that_run_at_once, str(replicas)), env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected = replicas * (_MANY * (_MANY + 1) // 2 + 1 + 8)
    assert found["results"] == [expected] * (20 * replicas)
    assert found["threads"] == (0 if replicas == 1 else max(2 * replicas, os.cpu_count() or 1))
