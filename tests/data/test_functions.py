"""What is known of a function of a pipeline, and that it is true."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tfrep_strategy.data.pipeline_functions import first_stateful_operation

_GENERATOR = tf.random.Generator.from_seed(1)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda v: v + tf.random.uniform([], seed=1), "RandomUniform"),
        (lambda v: tf.function(lambda w: w + tf.random.normal([], seed=1))(v), "RandomStandardNormal"),
        (lambda v: tf.cond(v > 0.0, lambda: tf.random.uniform([], seed=1), lambda: v), "RandomUniform"),
        (lambda v: tf.numpy_function(lambda w: w, [v], tf.float32), "PyFunc"),
        (lambda v: v + tf.random.stateless_uniform([], [1, 2]), None),
        (lambda v: v + _GENERATOR.uniform([]), "RngReadAndSkip"),
    ],
)
def test_operations_whose_result_depends_on_the_calls_before(function: Any, said: str | None) -> None:
    concrete = tf.function(function, [tf.TensorSpec([])]).get_concrete_function()
    assert first_stateful_operation(concrete) == said


def test_variables_and_tables_may_be_read_and_not_changed() -> None:
    variable = tf.Variable(2.0)
    reads = tf.function(lambda v: v * variable, [tf.TensorSpec([])]).get_concrete_function()
    assert first_stateful_operation(reads) is None
    writes = tf.function(lambda v: variable.assign_add(v), [tf.TensorSpec([])]).get_concrete_function()
    assert first_stateful_operation(writes) == "AssignAddVariableOp"
