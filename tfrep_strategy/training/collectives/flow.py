"""Collectives that gradients flow through.

The equivalent computation on one device minimizes the sum of the replicas' losses. In a step that weights by examples it minimizes
their mean, weighted by their shares; see `Share.through`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.communicators import Communicator
from tfrep_strategy.communicators.gradients import dense
from tfrep_strategy.core.step import Share
from tfrep_strategy.core.tf import stop_recording

Tensors = Sequence[tf.Tensor]


class Flow:
    """One replica's collectives on dense numeric tensors. Gradients flow through floating tensors.

    Args:
        communicator: The communicator of this replica.
        share: The replica's share of all examples, in a step that weights by examples; None elsewhere.
    """

    def __init__(self, communicator: Communicator, share: Share | None) -> None:
        self.communicator = communicator
        self._share = share

    def all_reduce(self, tensors: Tensors, op: str) -> list[tf.Tensor]:
        """Reduces each tensor over the replicas."""
        differentiable = [i for i, t in enumerate(tensors) if t.dtype.is_floating]
        others = [i for i, t in enumerate(tensors) if not t.dtype.is_floating]
        result: list[Any] = [None] * len(tensors)
        reduced = self._reduce([tensors[i] for i in differentiable], op) if differentiable else []
        reduced += self.communicator.all_reduce([tensors[i] for i in others], op) if others else []
        for i, tensor in zip(differentiable + others, reduced, strict=True):
            result[i] = tensor
        return result

    def _reduce(self, tensors: Tensors, op: str) -> list[tf.Tensor]:
        if op == "mean":
            return [total / tf.cast(self.communicator.size, total.dtype) for total in self._reduce(tensors, "sum")]

        def forward(*xs: tf.Tensor) -> Any:
            ys = self.communicator.all_reduce(list(xs), op)

            def gradient(*dys: tf.Tensor) -> list[tf.Tensor]:
                totals = self._back(dys, lambda ds: self._reduce(ds, "sum"))
                if op == "sum":
                    return totals
                return self._product_gradient(xs, totals) if op == "product" else self._extremum_gradient(xs, ys, totals)

            return _of_this_graph(ys), gradient

        return _list(_differentiable(forward)(*tensors))

    def _extremum_gradient(self, xs: Tensors, ys: Tensors, totals: Tensors) -> list[tf.Tensor]:
        """Sends the gradient, in equal parts, to the replicas that have the extremum."""
        chosen = [tf.cast(tf.equal(x, y), x.dtype) for x, y in zip(xs, ys, strict=True)]
        counts = self.communicator.all_reduce(chosen, "sum")
        return [t * c / n for t, c, n in zip(totals, chosen, counts, strict=True)]

    def _product_gradient(self, xs: Tensors, totals: Tensors) -> list[tf.Tensor]:
        """Multiplies the gradient by the product of the other replicas' tensors."""
        rank, size = self.communicator.rank, self.communicator.size
        result = []
        for x, total in zip(xs, totals, strict=True):
            everyone = self.all_gather(x[tf.newaxis])
            own = tf.reshape(tf.equal(tf.range(size), rank), [size] + [1] * x.shape.rank)
            others = tf.reduce_prod(tf.where(own, tf.ones_like(everyone), everyone), axis=0)
            result.append(total * others)
        return result

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates the replicas' tensors along the first dimension, whose size may differ."""
        communicator = self.communicator

        def forward(x: tf.Tensor) -> Any:
            def gradient(dy: tf.Tensor) -> tf.Tensor:
                total = self._back([dy], lambda ds: self._reduce(ds, "sum"))[0]
                rows = communicator.all_gather(tf.shape(x)[:1])
                start = tf.reduce_sum(rows[: communicator.rank])
                return tf.ensure_shape(total[start : start + rows[communicator.rank]], x.shape)

            return communicator.all_gather(x), gradient

        return _differentiable(forward)(tensor) if tensor.dtype.is_floating else communicator.all_gather(tensor)

    def broadcast(self, tensors: Tensors, root: int) -> list[tf.Tensor]:
        """Gives each replica the tensors of `root`."""
        communicator = self.communicator

        def forward(*xs: tf.Tensor) -> Any:
            def gradient(*dys: tf.Tensor) -> list[tf.Tensor]:
                totals = self._back(dys, lambda ds: self._reduce(ds, "sum"))
                # If TensorFlow knew the condition, it would remove the sum on all replicas but one.
                is_root = tf.raw_ops.PlaceholderWithDefault(input=tf.equal(communicator.rank, root), shape=[])
                return [tf.where(is_root, t, tf.zeros_like(t)) for t in totals]

            return _of_this_graph(communicator.broadcast(list(xs), root)), gradient

        if all(t.dtype.is_floating for t in tensors):
            return _list(_differentiable(forward)(*tensors))
        return [
            _list(_differentiable(forward)(t))[0] if t.dtype.is_floating else communicator.broadcast([t], root)[0] for t in tensors
        ]

    def reduce_scatter(self, tensor: tf.Tensor, op: str) -> tf.Tensor:
        """Reduces a tensor over the replicas, and gives each replica one part of the rows."""
        communicator = self.communicator
        if op == "mean":
            if not tensor.dtype.is_floating:
                return communicator.reduce_scatter(tensor, op)
            total = self.reduce_scatter(tensor, "sum")
            return total / tf.cast(communicator.size, total.dtype)

        def forward(x: tf.Tensor) -> Any:
            def gradient(dy: tf.Tensor) -> tf.Tensor:
                total = self._back([dy], lambda ds: [self.all_gather(ds[0])])[0]
                total = tf.ensure_shape(total, x.shape)
                if op == "sum":
                    return total
                if op == "product":
                    return self._product_gradient([x], [total])[0]
                return self._extremum_gradient([x], communicator.all_reduce([x], op), [total])[0]

            return communicator.reduce_scatter(x, op), gradient

        return _differentiable(forward)(tensor) if tensor.dtype.is_floating else communicator.reduce_scatter(tensor, op)

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[r]` rows to replica r. Returns the received rows, and the number of rows from each replica."""
        communicator = self.communicator

        def forward(x: tf.Tensor) -> Any:
            rows, received = communicator.all_to_all(x, splits)

            def gradient(dy: tf.Tensor, _: Any) -> tf.Tensor:
                back = self._back([dy], lambda ds: [self.all_to_all(ds[0], received)[0]])[0]
                return tf.ensure_shape(back, x.shape)

            return (rows, received), gradient

        return _differentiable(forward)(tensor) if tensor.dtype.is_floating else communicator.all_to_all(tensor, splits)

    def _back(self, dys: Tensors, send: Callable[[list[tf.Tensor]], list[tf.Tensor]]) -> list[tf.Tensor]:
        return send(list(dys)) if self._share is None else self._share.through(send, dys)


def _differentiable(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Does the same as `tf.custom_gradient`, but converts gradients that are slices, because rows were looked up, to dense ones.

    `forward` is not recorded: a tape that is persistent, or inside another, would ask TensorFlow's collectives for gradients.
    """

    def with_dense_gradients(*xs: tf.Tensor) -> Any:
        with stop_recording():
            ys, gradient = forward(*xs)
        shapes = [y.shape for y in tf.nest.flatten(ys)]
        return ys, lambda *dys: gradient(*map(_dense, dys, shapes))

    return tf.custom_gradient(with_dense_gradients)


def _dense(gradient: Any, shape: tf.TensorShape) -> Any:
    return tf.ensure_shape(dense(gradient), shape) if isinstance(gradient, tf.IndexedSlices) else gradient


def _of_this_graph(tensors: Tensors) -> list[tf.Tensor]:
    """Copies the result, so that a branch never returns a tensor of the outer graph."""
    return [tf.identity(tensor) for tensor in tensors]


def _list(result: Any) -> list[tf.Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]
