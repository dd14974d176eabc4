"""Callbacks of one's own that watch, draw, change and stop training, in the manner of Keras's guide to callbacks."""

import json

import keras
import matplotlib.pyplot as plt
import numpy as np

keras.utils.set_random_seed(13)
with np.load("digits.npz") as data:
    x, y = data["images"].astype("float32")[..., None] / 16, data["labels"]
x_train, y_train, x_test, y_test = x[:800], y[:800], x[800:1000], y[800:1000]


class EarlyStoppingAtMinLoss(keras.callbacks.Callback):
    def __init__(self, patience=0):
        super().__init__()
        self.patience = patience
        self.best_weights = None

    def on_train_begin(self, logs=None):
        self.wait, self.stopped_epoch, self.best = 0, 0, np.inf

    def on_epoch_end(self, epoch, logs=None):
        current = logs.get("loss")
        if np.less(current, self.best):
            self.best, self.wait = current, 0
            self.best_weights = self.model.get_weights()
        else:
            self.wait += 1
            if self.wait >= self.patience:
                self.stopped_epoch = epoch
                self.model.stop_training = True
                self.model.set_weights(self.best_weights)


class CustomLearningRateScheduler(keras.callbacks.Callback):
    schedule = {1: 0.5, 2: 0.1, 3: 30.0}

    def on_epoch_begin(self, epoch, logs=None):
        lr = self.schedule.get(epoch, float(self.model.optimizer.learning_rate))
        self.model.optimizer.learning_rate = lr
        print(f"Epoch {epoch}: learning rate is {lr}.")


class ConfusionMatrix(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.matrices = []

    def on_epoch_end(self, epoch, logs=None):
        guesses = self.model.predict(x_test, verbose=0).argmax(axis=1)
        matrix = np.zeros((10, 10), int)
        np.add.at(matrix, (y_test, guesses), 1)
        self.matrices.append(matrix)
        logs["diagonal"] = np.trace(matrix) / len(y_test)

    def on_train_end(self, logs=None):
        fig, axes = plt.subplots(1, len(self.matrices), figsize=(8, 2))
        for axis, matrix in zip(axes, self.matrices, strict=True):
            axis.matshow(matrix)
        fig.savefig("confusion.png")
        plt.close(fig)


class BatchLosses(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))


model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10, "softmax")])
model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
stopper, matrix, batches = EarlyStoppingAtMinLoss(), ConfusionMatrix(), BatchLosses()
callbacks = [matrix, CustomLearningRateScheduler(), stopper, batches]
history = model.fit(x_train, y_train, batch_size=64, epochs=6, callbacks=callbacks, verbose=2, shuffle=False)
assert stopper.stopped_epoch == 3
score = model.evaluate(x_test, y_test, verbose=0)
first = {name: values[:3] for name, values in history.history.items()}
print(json.dumps({"history": first, "score": score, "batches": batches.losses[:39]}))
