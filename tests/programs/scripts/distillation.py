"""A student taught by a bigger model through compute_loss, in the manner of Keras's knowledge distillation example."""

import json

import keras
import numpy as np
from keras import layers, ops


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.teacher.trainable = False
        self.student = student

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


def convnet(filters, name):
    return keras.Sequential(
        [
            keras.Input(shape=(8, 8, 1)),
            layers.Conv2D(filters, (3, 3), strides=(2, 2), padding="same", activation="tanh"),
            layers.Flatten(),
            layers.Dense(10),
        ],
        name=name,
    )


keras.utils.set_random_seed(77)
with np.load("digits.npz") as data:
    x, y = np.reshape(data["images"].astype("float32") / 16, (-1, 8, 8, 1)), data["labels"]
x_train, y_train, x_test, y_test = x[:1200], y[:1200], x[1200:], y[1200:]
teacher, student = convnet(32, "teacher"), convnet(4, "student")
student_scratch = keras.models.clone_model(student)
student_scratch.set_weights(student.get_weights())
crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
accuracy = [keras.metrics.SparseCategoricalAccuracy()]

teacher.compile(optimizer=keras.optimizers.Adam(0.01), loss=crossentropy, metrics=accuracy)
teacher.fit(x_train, y_train, epochs=2, batch_size=100, verbose=0)
distiller = Distiller(student=student, teacher=teacher)
distiller.compile(
    optimizer=keras.optimizers.Adam(0.01),
    metrics=[keras.metrics.SparseCategoricalAccuracy()],
    student_loss_fn=crossentropy,
    distillation_loss_fn=keras.losses.KLDivergence(),
)
distilled = distiller.fit(x_train, y_train, epochs=2, batch_size=100, verbose=2).history
student_scratch.compile(keras.optimizers.Adam(0.01), crossentropy, metrics=[keras.metrics.SparseCategoricalAccuracy()])
scratch = student_scratch.fit(x_train, y_train, epochs=2, batch_size=100, verbose=2).history
scores = [m.evaluate(x_test, y_test, verbose=0) for m in (teacher, distiller, student_scratch)]
print(json.dumps({"distilled": distilled, "scratch": scratch, "scores": scores}))
