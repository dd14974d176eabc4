"""A subclassed model whose train_step and test_step are its own, in the manner of Keras's guide to customizing fit."""

import json

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(3)


class CustomModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(32, activation="tanh")
        self.out = keras.layers.Dense(1)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(self.loss_fn(y, y_pred))
        self.mae_metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


x = np.random.random((1000, 32))
y = x.sum(axis=1, keepdims=True) + np.sin(x[:, :1])
model = CustomModel()
model.compile(optimizer="adam")
history = model.fit(x, y, epochs=3, batch_size=100, verbose=2)
scores = model.evaluate(x, y, batch_size=100, return_dict=True)
print(json.dumps({"history": history.history, "scores": scores}))
