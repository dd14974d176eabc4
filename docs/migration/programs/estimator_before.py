"""Trains with tf.estimator, as articles of TensorFlow 1 and 2.0 do."""

import tensorflow as tf

from tfrep_strategy.contrib.digits import load_digits

(x, y), test = load_digits()


def input_fn():
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.shuffle(1437, seed=1).repeat().batch(64)


def eval_input_fn():
    data = tf.data.Dataset.from_tensor_slices((test.images, test.labels))
    return data.batch(64)


def model_fn(features, labels, mode, params):
    hidden = tf.compat.v1.layers.flatten(features)
    hidden = tf.compat.v1.layers.dense(hidden, 32, tf.tanh)
    logits = tf.compat.v1.layers.dense(hidden, 10)
    predictions = {"digit": tf.argmax(logits, axis=1)}
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=predictions)
    losses = tf.compat.v1.losses
    loss = losses.sparse_softmax_cross_entropy(labels, logits)
    digits = predictions["digit"]
    metrics = {"accuracy": tf.compat.v1.metrics.accuracy(labels, digits)}
    if mode == tf.estimator.ModeKeys.EVAL:
        spec = tf.estimator.EstimatorSpec
        return spec(mode, loss=loss, eval_metric_ops=metrics)
    rate = params["learning_rate"]
    optimizer = tf.compat.v1.train.MomentumOptimizer(rate, momentum=0.9)
    pairs = optimizer.compute_gradients(loss)
    gradients, variables = zip(*pairs, strict=True)
    gradients, _ = tf.clip_by_global_norm(gradients, 0.3)
    step = tf.compat.v1.train.get_global_step()
    pairs = zip(gradients, variables, strict=True)
    train_op = optimizer.apply_gradients(pairs, global_step=step)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


strategy = tf.distribute.MirroredStrategy()
config = tf.estimator.RunConfig(
    model_dir="digits",
    tf_random_seed=1,
    save_checkpoints_steps=23,
    train_distribute=strategy,
)
params = {"learning_rate": 0.2}
estimator = tf.estimator.Estimator(model_fn, config=config, params=params)
tf.estimator.train_and_evaluate(
    estimator,
    tf.estimator.TrainSpec(input_fn, max_steps=46),
    tf.estimator.EvalSpec(eval_input_fn, steps=None, throttle_secs=0),
)
serving = tf.estimator.export.build_raw_serving_input_receiver_fn(
    {"images": tf.zeros([1, 8, 8, 1])},
)
estimator.export_saved_model("digits/export", serving)
