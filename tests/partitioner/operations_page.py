"""Writes docs/operations.md, which tells for each type of operation what replicas do.

Call it with `python tests/partitioner/operations_page.py`. It traces the operations, layers, losses, metrics, optimizers and
quantizers of Keras, with gradients, which takes a minute.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operations.md"

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfrep_strategy.core.tf import trace  # noqa: E402
from tfrep_strategy.partitioner import rules  # noqa: E402, F401
from tfrep_strategy.partitioner.planner import LEADING, ON_PURPOSE, RULES  # noqa: E402

_HEAD = """\
# Operations that replicas share

A step is traced as the step of one device. Each operation of it has a type, and replicas share its work if there is a rule for
that type ([how](architecture.md#a-step-of-one-device)). This page lists the types that Keras {keras} emits with
TensorFlow {tensorflow}: its operations, layers, losses, metrics, optimizers and quantizers, with their gradients. It lists the
other types that have a rule, too; a type that is not listed has none. `tests/partitioner/operations_page.py` writes it.

* **rule**: each replica computes its rows. Some rules send something small, such as a maximum.
* **on purpose**: every replica computes all rows, for the reason that stands there. A warning names the operation.
* **no rule**: every replica computes all rows. A warning names the operation. A rule could be written.
* **nothing to share**: the operation takes no rows.

The answer is always that of one device. An operation with a rule is still computed for all rows if it is used in a way that the
rule does not cover, such as a softmax over the batch. `strategy.explain(model)` tells what happens in a model.

{counts}.

| operation | emitted by | replicas |
|---|---|---|
"""

WITHOUT_ROWS = frozenset({
    "Assert", "BroadcastArgs", "ConcatOffset", "InvertPermutation", "ListDiff", "NoOp", "Placeholder", "PlaceholderWithDefault",
    "StatelessRandomGetKeyCounter", "VarHandleOp", "VarIsInitializedOp",
})  # fmt: skip
"""These take no rows in any step."""


def says(type_: str) -> str:
    """Returns what replicas do with operations of a type."""
    reason = f"on purpose: {ON_PURPOSE[type_]}" if type_ in ON_PURPOSE else ""
    if type_ in RULES:
        return f"rule; along the batch {reason}" if reason else "rule"
    if reason:
        return f"{reason}; the rows of the result are cut again" if type_ in LEADING else reason
    return "nothing to share" if type_ in WITHOUT_ROWS else "no rule"


def rows_of_page() -> dict[str, tuple[str, str]]:
    """Returns what the page tells of each type: what emits it, and what replicas do."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name.strip("`"): (emitted, does) for name, emitted, does in cells}


def _types(graph: Any) -> Iterator[str]:
    for operation in graph.get_operations():
        yield operation.type
    for function in graph._functions.values():
        if hasattr(function, "graph"):
            yield from _types(function.graph)
        else:
            yield from (node.op for node in function.cached_definition.node_def)


def _with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    def both(*tensors: Any) -> Any:
        given = [x for x in tensors if x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(given)
            results = [x for x in tf.nest.flatten(function(*tensors)) if tf.is_tensor(x)]
            losses = [tf.reduce_sum(tf.abs(x)) for x in results if x.dtype.is_floating]
        if losses:
            watched = [*given, *(v for v in tape.watched_variables() if v.trainable)]
            tape.gradient(losses, watched)
        return results

    return both


def _emitted(function: Callable[..., Any], rows: Any) -> set[str]:
    specs = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in map(tf.convert_to_tensor, rows)]
    try:
        return set(_types(trace("step", _with_gradient(function), specs, {})))
    except Exception:  # No gradient, or none with an unknown number of rows.
        return set(_types(trace("step", function, specs, {})))


def _of_operations() -> set[str]:
    from keras_integration.test_every_operation import CALLS, ONLY_EAGERLY

    return set().union(*(_emitted(call, rows) for name, (call, rows) in CALLS.items() if name not in ONLY_EAGERLY))


def _of_layers() -> set[str]:
    from keras_integration.test_every_layer import deterministic, random, training_of

    found: set[str] = set()
    images = np.ones([1, 8, 8, 3], "float32")
    dilated = (lambda: keras.layers.DepthwiseConv2D(2, dilation_rate=2), images)
    for make, inputs in [*deterministic().values(), *random().values(), dilated]:
        layer = make()
        training = training_of(layer)
        layer(inputs, **training)

        def called(*tensors: Any, layer: Any = layer, inputs: Any = inputs, training: Any = training) -> Any:
            return layer(tf.nest.pack_sequence_as(inputs, list(tensors)), **training)

        found |= _emitted(called, tf.nest.flatten(inputs))
    return found


_PAIRS = [
    [np.eye(3, dtype="float32"), np.full((3, 3), 1 / 3, "float32")],
    [np.array([0, 1, 2]), np.full((3, 3), 1 / 3, "float32")],
    [np.array([0, 1, 1]), np.array([0, 1, 0])],
    [np.array([[1, 2], [1, 1]]), np.ones((2, 4, 4), "float32") / 4],
]
"""Targets and predictions, one pair of which suits a loss or a metric."""


def _classes(module: Any, base: type) -> Iterator[Any]:
    for _, each in sorted(inspect.getmembers(module, inspect.isclass)):
        if issubclass(each, base) and each is not base:
            yield each


def _instances(kind: Any) -> Iterator[Any]:
    for options in ({}, {"num_classes": 3}, {"recall": 0.5}, {"precision": 0.5}, {"specificity": 0.5}, {"sensitivity": 0.5}):
        try:
            yield kind(**options)
        except (TypeError, ValueError):
            continue


def _of_losses() -> set[str]:
    found: set[str] = set()
    for kind in _classes(keras.losses, keras.losses.Loss):
        for pair in _PAIRS:
            for loss in _instances(kind):
                try:
                    loss(*pair)
                    found |= _emitted(loss, pair)
                except Exception:  # It wants another pair.
                    continue
    return found


def _of_metrics() -> set[str]:
    found: set[str] = set()
    for kind in _classes(keras.metrics, keras.metrics.Metric):
        for given in [*_PAIRS, [np.ones(3, "float32")]]:
            for metric in _instances(kind):
                try:
                    metric(*given)
                    found |= _emitted(metric, given)
                except Exception:
                    continue
    return found


_OPTIONS: list[dict[str, Any]] = [
    {},
    {"global_clipnorm": 1.0, "weight_decay": 0.1},
    {"clipnorm": 1.0, "gradient_accumulation_steps": 2},
    {"clipvalue": 0.5, "use_ema": True, "ema_overwrite_frequency": 2},
]


def _of_optimizers() -> set[str]:
    found: set[str] = set()
    optimizers = [keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(momentum=0.9))]
    for kind in _classes(keras.optimizers, keras.optimizers.Optimizer):
        if kind.__name__ not in ("LossScaleOptimizer", "MultiOptimizer"):
            optimizers += [kind(**options) for options in _OPTIONS]
    for optimizer in optimizers:
        table, weight = keras.Variable(tf.ones([4, 2])), keras.Variable(tf.ones([2, 3]))
        optimizer.build([table, weight])

        def update(rows: Any, numbers: Any, optimizer: Any = optimizer, both: Any = (table, weight)) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(both[0].value, numbers) @ both[1].value * rows)
            gradients = tape.gradient(loss, [each.value for each in both])
            optimizer.apply(gradients, both)
            return loss

        specs = [tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.int32)]
        found |= set(_types(trace("step", update, specs, {})))
    return found


def _of_quantizers() -> set[str]:
    quantize, rows = keras.quantizers.fake_quant_with_min_max_vars, np.ones([4, 3], "float32")
    ranges = np.float32(-1), np.float32(1)
    of_channels = [np.full(3, each, "float32") for each in ranges]
    by_channel = _emitted(lambda x: quantize(x, *of_channels, axis=-1), [rows])
    return by_channel | _emitted(lambda x: quantize(x, *ranges), [rows])


def collected() -> dict[str, set[str]]:
    """Returns the types that each part of Keras emits."""
    return {
        "operations": _of_operations(),
        "layers": _of_layers(),
        "losses": _of_losses(),
        "metrics": _of_metrics(),
        "optimizers": _of_optimizers(),
        "quantizers": _of_quantizers(),
    }


def page_of(found: Mapping[str, set[str]]) -> str:
    """Returns the page, given the types that each part of Keras emits."""
    types = {x for x in set().union(*found.values(), RULES, ON_PURPOSE) if hasattr(tf.raw_ops, x)}
    kinds = {type_: says(type_) for type_ in types}
    numbers = {
        "have a rule": sum(each.startswith("rule") for each in kinds.values()),
        "are computed for all rows on purpose": sum(each.startswith("on purpose") for each in kinds.values()),
        "take no rows": sum(each == "nothing to share" for each in kinds.values()),
        "have no rule": sum(each == "no rule" for each in kinds.values()),
    }
    head = _HEAD.format(
        keras=keras.__version__,
        tensorflow=tf.__version__,
        counts=f"Of {len(types)} types, " + ", ".join(f"{number} {words}" for words, number in numbers.items()),
    )
    lines = []
    for type_ in sorted(types):
        emitted = ", ".join(part for part, of_part in found.items() if type_ in of_part) or "programs of your own"
        lines.append(f"| `{type_}` | {emitted} | {kinds[type_]} |")
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page_of(collected()))
