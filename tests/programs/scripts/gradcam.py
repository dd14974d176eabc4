"""What a convnet looks at, by gradients of inner layers and by ascent on the input, in the manner of Keras's Grad-CAM example."""

import json

import keras
import matplotlib as mpl
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(44)
with np.load("digits.npz") as data:
    x, y = data["images"].astype("float32")[..., None] / 16, data["labels"]

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(8, 3, activation="tanh", padding="same", name="last_conv"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(10),
    ]
)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
history = model.fit(x[:1000], y[:1000], batch_size=50, epochs=2, verbose=0).history


def make_gradcam_heatmap(img_array, model, last_conv_layer_name, pred_index=None):
    grad_model = keras.models.Model(model.inputs, [model.get_layer(last_conv_layer_name).output, model.outputs[0]])
    with tf.GradientTape() as tape:
        last_conv_layer_output, preds = grad_model(img_array)
        if pred_index is None:
            pred_index = tf.argmax(preds[0])
        class_channel = preds[:, pred_index]
    grads = tape.gradient(class_channel, last_conv_layer_output)
    pooled_grads = tf.reduce_mean(grads, axis=(0, 1, 2))
    heatmap = last_conv_layer_output[0] @ pooled_grads[..., tf.newaxis]
    heatmap = tf.maximum(tf.squeeze(heatmap), 0) / (tf.math.reduce_max(tf.abs(heatmap)) + 1e-9)
    return heatmap.numpy()


@tf.function
def gradient_ascent_step(img, filter_index, learning_rate):
    with tf.GradientTape() as tape:
        tape.watch(img)
        loss = tf.reduce_mean(feature_extractor(img)[:, :, :, filter_index])
    grads = tf.math.l2_normalize(tape.gradient(loss, img))
    return loss, img + learning_rate * grads


heatmap = make_gradcam_heatmap(x[1200:1201], model, "last_conv", pred_index=3)
jet = mpl.colormaps["jet"](np.uint8(255 * heatmap))[..., :3]
keras.utils.array_to_img(jet).resize((64, 64)).save("cam.jpg")

feature_extractor = keras.Model(inputs=model.inputs, outputs=model.get_layer("last_conv").output)
img = tf.random.uniform((1, 8, 8, 1), seed=1)
losses = []
for _ in range(5):
    loss, img = gradient_ascent_step(img, tf.constant(2), 1.0)
    losses.append(float(loss))
print(json.dumps({"history": history, "heat": float(heatmap.sum()), "gain": losses[-1] - losses[0]}))
