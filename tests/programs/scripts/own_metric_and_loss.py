"""A metric and a loss made by subclassing, saved and loaded with custom_objects, in the manner of a Kaggle script."""

import json

import keras
import numpy as np
from keras import ops


class MacroF1(keras.metrics.Metric):
    def __init__(self, num_classes, name="macro_f1", **kwargs):
        super().__init__(name=name, **kwargs)
        self.num_classes = num_classes
        self.tp = self.add_weight(name="tp", shape=(num_classes,), initializer="zeros")
        self.fp = self.add_weight(name="fp", shape=(num_classes,), initializer="zeros")
        self.fn = self.add_weight(name="fn", shape=(num_classes,), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        true = ops.one_hot(ops.cast(ops.reshape(y_true, (-1,)), "int32"), self.num_classes)
        pred = ops.one_hot(ops.argmax(y_pred, axis=-1), self.num_classes)
        self.tp.assign_add(ops.sum(true * pred, axis=0))
        self.fp.assign_add(ops.sum((1 - true) * pred, axis=0))
        self.fn.assign_add(ops.sum(true * (1 - pred), axis=0))

    def result(self):
        return ops.mean(2 * self.tp / (2 * self.tp + self.fp + self.fn + keras.backend.epsilon()))

    def get_config(self):
        return {**super().get_config(), "num_classes": self.num_classes}


class FocalLoss(keras.losses.Loss):
    def __init__(self, gamma=2.0, **kwargs):
        super().__init__(**kwargs)
        self.gamma = gamma

    def call(self, y_true, y_pred):
        y_pred = ops.clip(y_pred, 1e-7, 1.0)
        true = ops.one_hot(ops.cast(ops.squeeze(y_true, -1), "int32"), y_pred.shape[-1])
        return -ops.sum(true * ops.power(1 - y_pred, self.gamma) * ops.log(y_pred), axis=-1)

    def get_config(self):
        return {**super().get_config(), "gamma": self.gamma}


def scaled_tanh(x):
    return 1.7 * ops.tanh(x)


keras.utils.set_random_seed(31)
with np.load("digits.npz") as data:
    x, y = data["images"].reshape(-1, 64).astype("float32") / 16, data["labels"].reshape(-1, 1)

inputs = keras.Input((64,))
hidden = keras.layers.Dense(24, activation=scaled_tanh)(inputs)
model = keras.Model(inputs, keras.layers.Dense(10, "softmax")(hidden))
model.compile("nadam", FocalLoss(gamma=1.5), metrics=["accuracy", MacroF1(10)])
history = model.fit(x[:1100], y[:1100], batch_size=100, epochs=3, validation_data=(x[1100:], y[1100:]), verbose=2)
model.save("focal.keras")

custom_objects = {"FocalLoss": FocalLoss, "MacroF1": MacroF1, "scaled_tanh": scaled_tanh}
with keras.saving.custom_object_scope(custom_objects):
    loaded = keras.models.load_model("focal.keras")
scores = loaded.evaluate(x[1100:], y[1100:], verbose=0, return_dict=True)
assert abs(scores["macro_f1"] - history.history["val_macro_f1"][-1]) < 1e-5
print(json.dumps({"history": history.history, "scores": scores}))
