"""Half precision by a global policy, with fit and with a loop of one's own, in the manner of TensorFlow's mixed precision guide."""

import json

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers, mixed_precision

mixed_precision.set_global_policy("mixed_float16")
keras.utils.set_random_seed(4)
data = np.load("digits.npz")
x = data["images"].reshape(-1, 64).astype("float32") / 16
y = data["labels"]

inputs = keras.Input(shape=(64,), name="digits")
hidden = layers.Dense(64, activation="tanh", name="dense_1")(inputs)
logits = layers.Dense(10, name="dense_logits")(hidden)
outputs = layers.Activation("softmax", dtype="float32", name="predictions")(logits)
model = keras.Model(inputs=inputs, outputs=outputs)
assert hidden.dtype == "float16"
assert model.get_layer("dense_1").kernel.dtype == "float32"

model.compile(loss="sparse_categorical_crossentropy", optimizer=keras.optimizers.RMSprop(), metrics=["accuracy"])
initial_weights = model.get_weights()
history = model.fit(x[:1024], y[:1024], batch_size=256, epochs=3, validation_split=0.2, verbose=2).history
scores = model.evaluate(x[1024:], y[1024:], verbose=0)

model.set_weights(initial_weights)
optimizer = mixed_precision.LossScaleOptimizer(keras.optimizers.RMSprop())
loss_object = keras.losses.SparseCategoricalCrossentropy()
train_dataset = tf.data.Dataset.from_tensor_slices((x[:1024], y[:1024])).batch(256)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        predictions = model(x, training=True)
        loss = loss_object(y, predictions)
        scaled_loss = optimizer.scale_loss(loss)
    scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
    optimizer.apply(scaled_gradients, model.trainable_variables)
    return loss


losses = [float(train_step(images, labels)) for _ in range(2) for images, labels in train_dataset]
mixed_precision.set_global_policy("float32")
print(json.dumps({"history": history, "scores": scores, "losses": losses}))
