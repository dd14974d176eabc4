"""Image similarity by a Siamese network and contrastive loss, in the manner of Keras's example of that name."""

import json
import random

import keras
import matplotlib.pyplot as plt
import numpy as np
from keras import ops

epochs = 2
batch_size = 64
margin = 1
random.seed(5)
keras.utils.set_random_seed(5)


def make_pairs(x, y):
    """Creates pairs of images with label 0 if they match and 1 if they do not."""
    digit_indices = [np.where(y == i)[0] for i in range(max(y) + 1)]
    pairs, labels = [], []
    for idx1 in range(len(x)):
        label1 = y[idx1]
        pairs += [[x[idx1], x[random.choice(digit_indices[label1])]]]
        labels += [0]
        label2 = random.choice([label for label in range(10) if label != label1])
        pairs += [[x[idx1], x[random.choice(digit_indices[label2])]]]
        labels += [1]
    return np.array(pairs), np.array(labels).astype("float32")


def euclidean_distance(vects):
    x, y = vects
    sum_square = ops.sum(ops.square(x - y), axis=1, keepdims=True)
    return ops.sqrt(ops.maximum(sum_square, keras.backend.epsilon()))


def loss(margin=1):
    def contrastive_loss(y_true, y_pred):
        square_pred = ops.square(y_pred)
        margin_square = ops.square(ops.maximum(margin - y_pred, 0))
        return ops.mean((1 - y_true) * square_pred + y_true * margin_square)

    return contrastive_loss


def plt_metric(history, metric, title):
    plt.plot(history[metric])
    plt.plot(history["val_" + metric])
    plt.legend(["train", "validation"], loc="upper left")
    plt.title(title)
    plt.savefig(f"{metric}.png")
    plt.clf()


with np.load("digits.npz") as data:
    x, y = data["images"].astype("float32") / 16, data["labels"]
pairs_train, labels_train = make_pairs(x[:500], y[:500])
pairs_val, labels_val = make_pairs(x[500:700], y[500:700])

image = keras.layers.Input((8, 8, 1))
features = keras.layers.Conv2D(4, (3, 3), activation="tanh")(image)
features = keras.layers.AveragePooling2D(pool_size=(2, 2))(features)
features = keras.layers.Dense(10, activation="tanh")(keras.layers.Flatten()(features))
embedding_network = keras.Model(image, features)

input_1, input_2 = keras.layers.Input((8, 8, 1)), keras.layers.Input((8, 8, 1))
towers = [embedding_network(input_1), embedding_network(input_2)]
merge_layer = keras.layers.Lambda(euclidean_distance, output_shape=(1,))(towers)
output_layer = keras.layers.Dense(1, activation="sigmoid")(merge_layer)
siamese = keras.Model(inputs=[input_1, input_2], outputs=output_layer)
siamese.compile(loss=loss(margin=margin), optimizer="RMSprop", metrics=["accuracy"])
history = siamese.fit(
    [pairs_train[:, 0], pairs_train[:, 1]],
    labels_train,
    validation_data=([pairs_val[:, 0], pairs_val[:, 1]], labels_val),
    batch_size=batch_size,
    epochs=epochs,
    verbose=0,
)
plt_metric(history.history, "loss", "Contrastive loss")
print(json.dumps(history.history))
