"""Text written character by character by an LSTM, in the manner of Keras's character-level text generation."""

import json
import random

import keras
import numpy as np

text = (
    "the quick brown fox jumps over the lazy dog while the slow grey wolf sleeps under the old oak tree. "
    "now and then a bird sings in the dark, and the fox looks up and wonders what the wolf may dream of. "
) * 3
chars = list(set(text))
print("Total chars:", len(chars))
char_indices = {c: i for i, c in enumerate(chars)}
indices_char = dict(enumerate(chars))

maxlen, step = 12, 2
sentences = [text[i : i + maxlen] for i in range(0, len(text) - maxlen, step)]
next_chars = [text[i + maxlen] for i in range(0, len(text) - maxlen, step)]
x = np.zeros((len(sentences), maxlen, len(chars)), dtype="bool")
y = np.zeros((len(sentences), len(chars)), dtype="bool")
for i, sentence in enumerate(sentences):
    for t, char in enumerate(sentence):
        x[i, t, char_indices[char]] = 1
    y[i, char_indices[next_chars[i]]] = 1

model = keras.Sequential(
    [
        keras.Input(shape=(maxlen, len(chars))),
        keras.layers.LSTM(32),
        keras.layers.Dense(len(chars), activation="softmax"),
    ]
)
model.compile(loss="categorical_crossentropy", optimizer=keras.optimizers.RMSprop(learning_rate=0.01))


def sample(preds, temperature=1.0):
    preds = np.asarray(preds).astype("float64")
    exp_preds = np.exp(np.log(preds) / temperature)
    probas = np.random.multinomial(1, exp_preds / np.sum(exp_preds), 1)
    return np.argmax(probas)


losses = []
for _epoch in range(2):
    losses += model.fit(x, y, batch_size=32, epochs=1, verbose=0).history["loss"]
    start_index = random.randint(0, len(text) - maxlen - 1)
    generated, sentence = "", text[start_index : start_index + maxlen]
    for _ in range(5):
        x_pred = np.zeros((1, maxlen, len(chars)))
        for t, char in enumerate(sentence):
            x_pred[0, t, char_indices[char]] = 1.0
        preds = model.predict(x_pred, verbose=0)[0]
        next_char = indices_char[sample(preds, temperature=0.5)]
        sentence = sentence[1:] + next_char
        generated += next_char
    print("Generated:", repr(generated))
print(json.dumps({"losses": losses, "length": len(generated)}))
