"""What processes read, and their loops over it in functions: AutoGraph needs functions of a module that can be imported."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

Steps = list[list[Any]]
"""Of each step, what each replica got."""


def plain(value: Any) -> Any:
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(value)
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    return value.numpy().tolist()


def local_parts(strategy: Any, batch: Any) -> list[Any]:
    """Returns what each replica of this process has of a batch, in lists."""

    def part(i: int) -> Any:
        return tf.nest.map_structure(lambda v: plain(strategy.experimental_local_results(v)[i]), batch)

    return [part(i) for i in range(strategy.extended.num_local_replicas)]


def read(strategy: Any, data: Any) -> Steps:
    return [local_parts(strategy, batch) for batch in data]


def without_rank(data: tf.data.Dataset) -> tf.data.Dataset:
    return data.map(lambda v: tf.numpy_function(lambda x: x, [v], v.dtype))


def own_pipeline(kind: str, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """The numbers from 0 in turn for all pipelines."""
    own = lambda data: data.shard(context.num_input_pipelines, context.input_pipeline_id)  # noqa: E731
    numbers = tf.data.Dataset.range(5)
    rows = tf.ragged.constant([[0], [], [], [], [1, 2], [3]], dtype=tf.int64)
    return {
        "zero rows": lambda: own(tf.data.Dataset.from_tensor_slices(rows).map(tf.identity)),
        "scalars": lambda: own(numbers),
        "unknown rank": lambda: without_rank(own(numbers.batch(2))),
        "static": lambda: own(tf.data.Dataset.range(6).batch(2, drop_remainder=True)),
        "uneven": lambda: own(numbers.batch(2)),
    }[kind]()


def read_own_pipelines(strategy: Any, kinds: list[str]) -> dict[str, tuple[Steps, int, int]]:
    results = {}
    for kind in kinds:
        data = strategy.distribute_datasets_from_function(lambda context, kind=kind: own_pipeline(kind, context))

        @tf.function
        def count(data: Any = data) -> tuple[tf.Tensor, tf.Tensor]:
            loop, optionals, iterator = tf.constant(0), tf.constant(0), iter(data)
            for _ in data:
                loop += 1
            for _ in tf.range(10):
                optional = iterator.get_next_as_optional()
                if not optional.has_value():
                    break
                optionals += 1
            return loop, optionals

        loop, optionals = count()
        results[kind] = read(strategy, data), int(loop), int(optionals)
    return results


def loop_in_functions(strategy: Any) -> list[list[int]]:
    batches = tf.data.Dataset.range(1, 8).batch(3)  # [1 2 3] [4 5 6] [7]
    whole = strategy.experimental_distribute_dataset(batches)
    own = strategy.distribute_datasets_from_function(
        lambda c: batches.unbatch().batch(1).shard(c.num_input_pipelines, c.input_pipeline_id)  # [1 2] [3 4] [5 6] [7]
    )
    total = lambda batch: strategy.reduce("SUM", batch, axis=0)  # noqa: E731

    @tf.function
    def enumerated(data: Any) -> tf.Tensor:
        result = tf.constant(0, tf.int64)
        for number, batch in enumerate(data, 10):
            result += number * total(batch)
        return result

    @tf.function
    def left(data: Any) -> tf.Tensor:
        result = tf.constant(0, tf.int64)
        for number, batch in enumerate(data):
            if number == 1:
                break
            result += total(batch)
        return result

    @tf.function
    def zipped(first: Any, second: Any) -> tf.Tensor:
        result = tf.constant(0, tf.int64)
        for number, (a, b) in enumerate(zip(first, second)):  # noqa: B905
            result += number * total(a) * total(b)
        return result

    @tf.function
    def iterated(data: Any) -> tf.Tensor:
        result = tf.constant(0, tf.int64)
        for batch in iter(data):
            result += total(batch)
        iterator = iter(data)
        return 1000 * total(next(iterator)) + 100 * total(next(iterator)) + result

    eager = [sum(int(number * total(batch)) for number, batch in enumerate(data, 10)) for data in (whole, own)]
    iterator = iter(whole)
    return [
        eager,
        [int(enumerated(data)) for data in (whole, own, iter(whole), iter(own))],
        [int(left(data)) for data in (whole, own)],
        [int(left(iterator)), int(total(next(iterator)))],
        [int(zipped(whole, own)), int(zipped(iter(own), iter(whole)))],
        [int(iterated(data)) for data in (whole, own)],
    ]
