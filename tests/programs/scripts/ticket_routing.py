"""A functional model with several inputs and outputs given by name, in the manner of Keras's functional guide."""

import json

import keras
import numpy as np
from keras import layers

num_tags, num_words, num_departments = 6, 200, 4
keras.utils.set_random_seed(1337)

title_input = keras.Input(shape=(None,), name="title")
body_input = keras.Input(shape=(None,), name="body")
tags_input = keras.Input(shape=(num_tags,), name="tags")

title_features = layers.LSTM(16)(layers.Embedding(num_words, 16)(title_input))
body_features = layers.LSTM(8)(layers.Embedding(num_words, 16)(body_input))
x = layers.concatenate([title_features, body_features, tags_input])
priority_pred = layers.Dense(1, name="priority")(x)
department_pred = layers.Dense(num_departments, name="department")(x)

model = keras.Model(
    inputs=[title_input, body_input, tags_input],
    outputs={"priority": priority_pred, "department": department_pred},
)
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-3),
    loss={
        "priority": keras.losses.BinaryCrossentropy(from_logits=True),
        "department": keras.losses.CategoricalCrossentropy(from_logits=True),
    },
    loss_weights={"priority": 1.0, "department": 0.2},
    metrics={"department": ["accuracy"]},
)

title_data = np.random.randint(num_words, size=(330, 5))
body_data = np.random.randint(num_words, size=(330, 9))
tags_data = np.random.randint(2, size=(330, num_tags)).astype("float32")
priority_targets = np.random.random(size=(330, 1))
dept_targets = keras.utils.to_categorical(np.random.randint(num_departments, size=330), num_departments)

history = model.fit(
    {"title": title_data, "body": body_data, "tags": tags_data},
    {"priority": priority_targets, "department": dept_targets},
    epochs=2,
    batch_size=32,
    verbose=2,
)

# One new ticket.
ticket = {"title": title_data[:1], "body": body_data[:1], "tags": tags_data[:1]}
answer = model.predict(ticket)
print("priority", answer["priority"], "department", answer["department"].argmax())
print(json.dumps({"history": history.history, "answer": {k: v.tolist() for k, v in answer.items()}}))
