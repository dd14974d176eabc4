"""Layers and losses made by subclassing, with add_loss, in the manner of Keras's guide to new layers and models."""

import json

import keras
import numpy as np
from keras import ops


@keras.saving.register_keras_serializable("from_scratch")
class Linear(keras.layers.Layer):
    def __init__(self, units=32, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape):
        self.w = self.add_weight(shape=(input_shape[-1], self.units), initializer="glorot_uniform", trainable=True)
        self.b = self.add_weight(shape=(self.units,), initializer="zeros", trainable=True)

    def call(self, inputs):
        return ops.matmul(inputs, self.w) + self.b

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("from_scratch")
class ActivityRegularization(keras.layers.Layer):
    def __init__(self, rate=1e-2, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate

    def call(self, inputs):
        self.add_loss(self.rate * ops.mean(ops.square(inputs)))
        return inputs

    def get_config(self):
        return {**super().get_config(), "rate": self.rate}


@keras.saving.register_keras_serializable("from_scratch")
class MLPBlock(keras.Model):
    def __init__(self, width=24, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.linear_1 = Linear(width)
        self.regularization = ActivityRegularization()
        self.linear_2 = Linear(width)
        self.linear_3 = Linear(1)

    def call(self, inputs):
        x = ops.tanh(self.linear_1(inputs))
        x = self.regularization(x)
        return self.linear_3(ops.tanh(self.linear_2(x)))

    def get_config(self):
        return {**super().get_config(), "width": self.width}


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x = rng.normal(size=(700, 10)).astype("float32")
y = (x[:, :1] * x[:, 1:2]).astype("float32")

mlp = MLPBlock()
mlp.compile("adamw", "mse", metrics=["mae"])
history = mlp.fit(x, y, batch_size=64, epochs=3, verbose=0).history
mlp.save("mlp.keras")
again = keras.saving.load_model("mlp.keras")
difference = np.abs(again.predict(x, verbose=0) - mlp.predict(x, verbose=0)).max()
print("loss", history["loss"][-1], "after loading", difference)
print(json.dumps({"history": history, "difference": float(difference), "losses": len(mlp.losses)}))
