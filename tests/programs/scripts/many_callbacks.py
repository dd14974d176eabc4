"""All the callbacks that a careful author uses at once, in the manner of TensorFlow's distributed Keras tutorial."""

import json
import os

import keras
import numpy as np

checkpoint_dir = "./training_checkpoints"
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt_{epoch}.weights.h5")

keras.utils.set_random_seed(17)
with np.load("digits.npz") as data:
    x, y = data["images"].reshape(-1, 64) / 16.0, data["labels"]


def decay(epoch, lr):
    if epoch < 2:
        return 1e-2
    return lr * 0.5


class PrintLR(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"\nLearning rate for epoch {epoch + 1} is {float(self.model.optimizer.learning_rate):.5f}")


timeline = []
callbacks = [
    keras.callbacks.TensorBoard(log_dir="./logs"),
    keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix, save_weights_only=True),
    keras.callbacks.ModelCheckpoint("best/model.keras", monitor="val_accuracy", save_best_only=True),
    keras.callbacks.LearningRateScheduler(decay),
    keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_lr=1e-5),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True),
    keras.callbacks.CSVLogger("training.csv"),
    keras.callbacks.TerminateOnNaN(),
    keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: timeline.append(f"begin {epoch}"),
        on_train_end=lambda logs: timeline.append("end"),
    ),
    PrintLR(),
]
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(10, "softmax")])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x[:1000], y[:1000], epochs=5, batch_size=100, validation_split=0.2, callbacks=callbacks, verbose=2)

last = os.path.join(checkpoint_dir, sorted(os.listdir(checkpoint_dir))[-1])
model.load_weights(last)
eval_loss, eval_acc = model.evaluate(x[1000:], y[1000:], verbose=0)
with open("training.csv") as file:
    lines = file.read().splitlines()
print(f"Eval loss: {eval_loss}, eval accuracy: {eval_acc}")
print(
    json.dumps({"history": history.history, "eval": [eval_loss, eval_acc], "lines": len(lines), "timeline": timeline})
)
