"""Spellings of older years that Keras still takes, in the manner of scripts that were written for TensorFlow 1 and 2.0."""

from __future__ import absolute_import, division, print_function

import json
import os

import numpy as np
import tensorflow as tf
from tensorflow.keras import backend as K
from tensorflow.keras.callbacks import ModelCheckpoint
from tensorflow.keras.layers import Activation, Conv2D, Dense, Flatten, MaxPool2D
from tensorflow.keras.models import Sequential, load_model
from tensorflow.keras.preprocessing.sequence import pad_sequences
from tensorflow.keras.utils import to_categorical

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
tf.get_logger().setLevel("ERROR")
np.random.seed(1671)
tf.random.set_seed(1671)
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)

NB_EPOCH, BATCH_SIZE, VERBOSE, NB_CLASSES, VALIDATION_SPLIT = 2, 128, 2, 10, 0.2
K.set_image_data_format("channels_last")
data = np.load("digits.npz")
X_train, y_train = data["images"][:1000], data["labels"][:1000]
X_test, y_test = data["images"][1000:], data["labels"][1000:]
X_train = X_train.reshape(X_train.shape[0], 8, 8, 1).astype("float32") / 16
X_test = X_test.reshape(X_test.shape[0], 8, 8, 1).astype("float32") / 16
Y_train, Y_test = to_categorical(y_train, NB_CLASSES), to_categorical(y_test, NB_CLASSES)
assert pad_sequences([[1], [2, 3]]).shape == (2, 2)

model = Sequential()
model.add(Conv2D(8, (3, 3), padding="same", input_shape=(8, 8, 1), kernel_initializer="he_normal"))
model.add(Activation("tanh"))
model.add(MaxPool2D(pool_size=(2, 2)))
model.add(Flatten())
model.add(Dense(NB_CLASSES))
model.add(Activation("softmax"))
model.compile(loss="categorical_crossentropy", optimizer=tf.keras.optimizers.RMSprop(), metrics=["accuracy"])
model.optimizer.learning_rate.assign(0.002)

checkpoint = ModelCheckpoint("weights-{epoch:02d}.h5", monitor="val_loss", mode="min", save_freq="epoch")
history = model.fit(
    X_train,
    Y_train,
    batch_size=BATCH_SIZE,
    epochs=NB_EPOCH,
    verbose=VERBOSE,
    validation_split=VALIDATION_SPLIT,
    callbacks=[checkpoint],
)
score = model.evaluate(X_test, Y_test, verbose=VERBOSE)
print("Test score:", score[0])
del model
model = load_model("weights-02.h5")
classes = np.argmax(model.predict(X_test), axis=-1)
matrix = tf.math.confusion_matrix(y_test, classes).numpy()
assert matrix.sum() == len(y_test)
assert tf.executing_eagerly()
print(json.dumps({"history": history.history, "score": score}))
