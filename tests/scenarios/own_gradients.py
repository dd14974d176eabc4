"""Steps of one's own that do with gradients, before `apply`, what is not linear, or do without `apply`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from scenarios.base import dense, regression, scenario

_O = keras.optimizers


class Stepping(keras.Model):
    """Runs a step that is a function of the model, the rows and their targets."""

    def __init__(self, step: Callable[..., dict[str, Any]]) -> None:
        super().__init__()
        self.net, self.step = dense(), step

    def call(self, x: Any, training: bool = False) -> Any:
        return self.net(x, training=training)

    def train_step(self, batch: Any) -> dict[str, Any]:
        return self.step(self, *batch)

    def loss_of(self, x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(tf.cast(self(x, training=True), tf.float32) - y))

    def gradients(self, x: Any, y: Any) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        return loss, tape.gradient(loss, self.trainable_variables)


def fitted(step: Callable[..., dict[str, Any]], rows: int = 37, optimizer: Any = None, **settings: Any) -> dict[str, Any]:
    x, y = regression(rows)
    model = Stepping(step)
    model(x[:1])
    model.compile(optimizer or _O.SGD(0.1), **settings)
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "history": history.history}


def _clipped_by_global_norm(model: Any, x: Any, y: Any) -> dict[str, Any]:
    loss, gradients = model.gradients(x, y)
    gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"loss": loss, "norm": norm}


@scenario
def clipped_by_global_norm() -> dict[str, Any]:
    """The last batch has one row, so that most replicas have none."""
    return fitted(_clipped_by_global_norm, rows=33)


@scenario
def clipped_and_accumulated() -> dict[str, Any]:
    return fitted(_clipped_by_global_norm, rows=64, optimizer=_O.SGD(0.1, gradient_accumulation_steps=2))


@scenario
def sharpness_aware_minimization() -> dict[str, Any]:
    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        loss, gradients = model.gradients(x, y)
        norm = tf.linalg.global_norm(gradients)
        moves = [0.05 * gradient / (norm + 1e-12) for gradient in gradients]
        for variable, move in zip(model.trainable_variables, moves, strict=True):
            variable.assign_add(move)
        _, gradients = model.gradients(x, y)
        for variable, move in zip(model.trainable_variables, moves, strict=True):
            variable.assign_sub(move)
        model.optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss, "norm": norm}

    return fitted(step)


@scenario
def updated_by_hand() -> dict[str, Any]:
    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        loss, gradients = model.gradients(x, y)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.1 * tf.sign(gradient) * tf.sqrt(tf.abs(gradient)))
        return {"loss": loss}

    return fitted(step, rows=33)


@scenario
def learning_to_learn() -> dict[str, Any]:
    """The step of MAML: a gradient of the loss after a step of gradient descent."""

    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        variables = model.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = model.loss_of(x, y)
            gradients = inner.gradient(loss, variables)
            w = [variable - 0.1 * gradient for variable, gradient in zip(variables, gradients, strict=True)]
            later = tf.reduce_mean(tf.square(tf.tanh(x @ w[0] + w[1]) @ w[2] + w[3] - y))
        model.optimizer.apply(outer.gradient(later, variables), variables)
        return {"loss": loss, "later": later}

    return fitted(step)


@scenario
def scaled_losses_of_ones_own() -> dict[str, Any]:
    """`scale_loss` of the loss or of 1, and then gradients as they are, or clipped."""

    def step(model: Any, x: Any, y: Any, clip: float | None = None, asks_for_scale: bool = False) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = model.loss_of(x, y)
            scaled = loss * model.optimizer.scale_loss(1.0) if asks_for_scale else model.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        if clip is not None:
            gradients = [tf.clip_by_norm(gradient, clip) for gradient in gradients]
        model.optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss}

    return {
        "fixed, clipped": fitted(functools.partial(step, clip=2.4), rows=33, optimizer=_O.SGD(0.1, loss_scale_factor=8.0)),
        "dynamic": fitted(step, rows=33, optimizer=_O.LossScaleOptimizer(_O.SGD(0.1), initial_scale=64.0)),
        "dynamic, by its scale": fitted(
            functools.partial(step, asks_for_scale=True), rows=33, optimizer=_O.LossScaleOptimizer(_O.SGD(0.1), initial_scale=64.0)
        ),
        "dynamic, clipped": fitted(
            functools.partial(step, clip=19.2), rows=33, optimizer=_O.LossScaleOptimizer(_O.SGD(0.1), initial_scale=64.0)
        ),
    }


@scenario
def sums_whose_gradients_pass_through_collectives() -> dict[str, Any]:
    """Sums over rows, and a root of one, behind a batch normalization with the statistics of all rows; an argument of the tape."""

    def step(model: Any, x: Any, y: Any, of_losses: Callable[[Any], Any], **told: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = of_losses(tf.square(model(x, training=True) - y))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables, **told)
        model.optimizer.apply([0.05 * gradient for gradient in gradients], variables)
        return {"norm": tf.linalg.global_norm(gradients)}

    def normalized(of_losses: Callable[[Any], Any], **told: Any) -> dict[str, Any]:
        model = Stepping(functools.partial(step, of_losses=of_losses, **told))
        first, second = model.net.layers
        model.net = keras.Sequential([first, keras.layers.BatchNormalization(synchronized=True, momentum=0.5), second])
        x, y = regression(37)
        model(x[:1])
        model.compile(_O.SGD(0.1))
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        return {"weights": model.get_weights(), "history": history}

    return {
        "sum": normalized(tf.reduce_sum),
        "root": normalized(lambda losses: tf.sqrt(tf.reduce_sum(losses))),
        "sum and mean": normalized(lambda losses: 0.1 * tf.reduce_sum(losses) + tf.reduce_mean(losses)),
        "sum, unconnected_gradients": normalized(tf.reduce_sum, unconnected_gradients="zero"),
        "rows, none": normalized(lambda losses: losses, unconnected_gradients=tf.UnconnectedGradients.NONE),
    }


@scenario
def penalties_beside_a_scaled_loss() -> dict[str, Any]:
    """What a step adds to a loss after `scale_loss` counts once, as on one device."""

    def step(model: Any, x: Any, y: Any, put_together: Callable[..., Any]) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            errors = tf.square(model(x, training=True) - y)
            scaled = model.optimizer.scale_loss(tf.reduce_mean(errors))
            penalty = tf.add_n([tf.reduce_sum(tf.square(variable)) for variable in model.trainable_variables])
            target = put_together(scaled, penalty, tf.reduce_mean(tf.abs(errors)), tf.reduce_sum(errors))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(target, variables), variables)
        return {"loss": tf.reduce_mean(errors)}

    def of(put_together: Callable[..., Any], optimizer: Any = None) -> dict[str, Any]:
        return fitted(functools.partial(step, put_together=put_together), optimizer=optimizer or _O.SGD(0.05))

    return {
        "weights": of(lambda scaled, penalty, mean, total: scaled + 0.1 * penalty),
        "mean": of(lambda scaled, penalty, mean, total: 0.5 * (scaled + mean)),
        "list": of(lambda scaled, penalty, mean, total: [scaled, 0.1 * penalty, 0.01 * total]),
        "dynamic": of(
            lambda scaled, penalty, mean, total: scaled + penalty + total,
            _O.LossScaleOptimizer(_O.SGD(0.05), initial_scale=64.0),
        ),
    }


@scenario
def several_gradients_of_one_tape() -> dict[str, Any]:
    """A persistent tape; sources that are variables and rows; a sum over parts of the batch; a gradient within a branch."""

    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        variables = model.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = model.loss_of(x, y)
            rows = tf.reduce_sum(tf.square(model(x, training=True) - y))
        first, by_name = tape.gradient(loss, variables[:2]), tape.gradient(loss, {"w": variables[2], "b": variables[3]})
        of_rows = tape.gradient(rows, x)
        gradients = [*first, by_name["w"], by_name["b"]]
        model.optimizer.apply(gradients, variables)

        def of_branch() -> list[Any]:
            return model.gradients(x, y)[1]

        halves = tf.cond(tf.constant(True), of_branch, lambda: [tf.zeros(v.shape) for v in variables])
        model.optimizer.apply([0.5 * gradient for gradient in halves], variables)
        return {"loss": loss, "of_rows": tf.reduce_mean(tf.square(of_rows)), "norm": tf.linalg.global_norm(gradients)}

    return fitted(step)


@scenario
def penalty_on_gradients_of_inputs() -> dict[str, Any]:
    """The gradient of a row counts as on one device, where the mean is over all rows; that of a sum counts whole."""

    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as outer:
            with tf.GradientTape(persistent=True) as inner:
                inner.watch(x)
                loss = model.loss_of(x, y)
                total = tf.reduce_sum(tf.square(model(x, training=True)))
            of_mean, of_sum = inner.gradient(loss, x), inner.gradient(total, [x])[0]
            penalty = tf.reduce_sum(tf.square(of_mean)) + 0.001 * tf.reduce_sum(tf.square(of_sum))
            target = loss + penalty
        model.optimizer.apply(outer.gradient(target, model.trainable_variables), model.trainable_variables)
        return {"loss": loss, "penalty": penalty}

    return fitted(step, rows=33)


@scenario
def learning_to_learn_in_two_steps() -> dict[str, Any]:
    """The second inner step takes a gradient of tensors, which are the same on all replicas."""

    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        def loss_of(w: Any) -> Any:
            return tf.reduce_mean(tf.square(tf.tanh(x @ w[0] + w[1]) @ w[2] + w[3] - y))

        variables = model.trainable_variables
        with tf.GradientTape() as outer:
            w = [tf.identity(variable) for variable in variables]
            for _ in range(3):
                with tf.GradientTape() as inner:
                    inner.watch(w)
                    loss = loss_of(w)
                gradients, norm = tf.clip_by_global_norm(inner.gradient(loss, w), 0.5)
                w = [each - 0.1 * gradient for each, gradient in zip(w, gradients, strict=True)]
            later = loss_of(w)
        model.optimizer.apply(outer.gradient(later, variables), variables)
        return {"loss": loss, "later": later, "norm": norm}

    return fitted(step)


def _adversarial(zeros: Callable[[Any], Any], rows: int) -> dict[str, Any]:
    """Trains on rows that were moved along their gradients, which are those of zeros in the shape of the batch."""

    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        moved = zeros(x)
        with tf.GradientTape() as tape:
            tape.watch(moved)
            loss = tf.reduce_mean(tf.square(model(x + moved) - y))
        moved = 2.0 * tape.gradient(loss, moved)
        with tf.GradientTape() as tape:
            later = tf.reduce_mean(tf.square(model(x + moved) - y))
        model.optimizer.apply(tape.gradient(later, model.trainable_variables), model.trainable_variables)
        return {"loss": loss, "later": later, "moved": tf.reduce_mean(tf.square(moved))}

    return fitted(step, rows=rows)


@scenario
def adversarial_rows() -> dict[str, Any]:
    return _adversarial(tf.zeros_like, rows=37)


@scenario
def adversarial_rows_of_a_known_number() -> dict[str, Any]:
    return _adversarial(lambda x: tf.zeros([int(x.shape[0]), 4]), rows=32)


@scenario
def second_derivatives_of_a_field() -> dict[str, Any]:
    """A net of several coordinates, which are joined, as those that solve differential equations."""

    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        a, others = x[:, :1], x[:, 1:]
        with tf.GradientTape() as tape:
            with tf.GradientTape() as outer:
                outer.watch(a)
                with tf.GradientTape() as inner:
                    inner.watch(a)
                    field = model(tf.concat([a, others], 1))
                slope = inner.gradient(field, a)
            curvature = outer.gradient(slope, a)
            loss = tf.reduce_mean(tf.square(curvature + slope)) + tf.reduce_mean(tf.square(field - y))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss}

    return fitted(step)


@scenario
def jacobians_of_rows() -> dict[str, Any]:
    """A penalty on how fast outputs change, as a contractive autoencoder has it."""

    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = tf.concat([model(x), model(2.0 * x)], 1)
            penalty = tf.reduce_mean(tf.reduce_sum(tf.square(inner.batch_jacobian(outputs, x)), [1, 2]))
            loss = penalty + tf.reduce_mean(tf.square(outputs - y))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss, "penalty": penalty}

    return fitted(step)


def _of_each_row(model: Any, x: Any, y: Any, take: Callable[[Any], Any]) -> dict[str, Any]:
    """Clips the gradient of each row, as for differential privacy, and learns from their mean."""
    gradients = take(model.trainable_variables)
    norms = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(tf.reshape(each, [tf.shape(x)[0], -1])), 1) for each in gradients]))
    scales = tf.minimum(1.0, 1.0 / norms)
    means = [tf.reduce_mean(tf.reshape(scales, [-1] + [1] * (each.shape.rank - 1)) * each, 0) for each in gradients]
    model.optimizer.apply(means, model.trainable_variables)
    return {"loss": tf.reduce_mean(tf.square(model(x) - y))}


@scenario
def gradients_of_each_row() -> dict[str, Any]:
    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape(persistent=True) as tape:
            losses = tf.reduce_mean(tf.square(model(x) - y), 1)
        return _of_each_row(model, x, y, lambda variables: tape.jacobian(losses, variables))

    return fitted(step)


@scenario
def gradients_of_each_row_in_a_map() -> dict[str, Any]:
    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        def gradient_of(row: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(row[0][tf.newaxis]) - row[1][tf.newaxis]))
            return tape.gradient(loss, model.trainable_variables)

        return _of_each_row(model, x, y, lambda variables: tf.vectorized_map(gradient_of, (x, y)))

    return fitted(step)


@scenario
def jacobians_of_errors() -> dict[str, Any]:
    """A step of Gauss and Newton for the last layer, and a clipped Jacobian of the mean error of each output."""

    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        *others, kernel, _ = model.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            errors = (model(x) - y)[:, 0]
            means = tf.reduce_mean(tf.square(tf.stack([errors, 2.0 * errors], 1)), 0)
        of_rows = tf.reshape(tape.jacobian(errors, kernel), [-1, kernel.shape[0]])
        of_means = tape.jacobian(means, others)
        size = tf.linalg.global_norm(of_means)
        for variable, jacobian in zip(others, of_means, strict=True):
            variable.assign_sub(0.1 * tf.reduce_sum(jacobian, 0) / tf.maximum(1.0, size))
        products = tf.matmul(of_rows, of_rows, transpose_a=True) + tf.eye(kernel.shape[0])
        change = tf.linalg.solve(products, tf.linalg.matvec(of_rows, errors, transpose_a=True)[:, tf.newaxis])
        kernel.assign_sub(0.5 * tf.reshape(change, kernel.shape))
        longest = tf.reduce_max(tf.reduce_sum(tf.square(of_rows), 1))
        return {"loss": tf.reduce_sum(tf.square(errors)), "size": size, "longest": longest}

    return fitted(step)


@scenario
def penalty_behind_synchronized_batch_normalization() -> dict[str, Any]:
    """The critic of a GAN: a gradient of a gradient flows through sums over all replicas. One tape is persistent."""
    normalization = keras.layers.BatchNormalization(synchronized=True)

    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape(persistent=True) as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                scores = tf.square(model.net(normalization(x, training=True))[:, 0])
            slopes = inner.gradient(scores, x)
            penalty = tf.reduce_mean(tf.square(tf.norm(slopes + 0.1, axis=1) - 1.0))
            loss = penalty + model.loss_of(normalization(x, training=True), y)
        variables = [*model.net.trainable_variables, *normalization.trainable_variables]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.05 * gradient)
        return {"loss": loss, "slopes": tf.reduce_sum(tf.square(slopes))}

    normalization.build((None, 4))
    return fitted(step) | {"normalization": normalization.get_weights()}
