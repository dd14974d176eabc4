"""Addition learned from strings, encoder and decoder as models of their own, in the manner of Keras's seq2seq examples."""

import json

import keras
import numpy as np

CHARS = "0123456789+ \t\n"
LATENT, MAXLEN, MAXOUT = 32, 5, 5


class CharacterTable:
    def __init__(self, chars):
        self.chars = sorted(set(chars))
        self.char_indices = {c: i for i, c in enumerate(self.chars)}

    def encode(self, text, num_rows):
        x = np.zeros((num_rows, len(self.chars)), "float32")
        for i, c in enumerate(text.ljust(num_rows)):
            x[i, self.char_indices[c]] = 1
        return x


def generate(table, n):
    rng = np.random.RandomState(8)
    questions, targets = [], []
    for a, b in rng.randint(0, 100, (n, 2)):
        questions.append(f"{a}+{b}")
        targets.append("\t" + str(a + b) + "\n")
    encoder = np.stack([table.encode(q, MAXLEN) for q in questions])
    decoder_in = np.stack([table.encode(t, MAXOUT) for t in targets])
    decoder_out = np.stack([table.encode(t[1:], MAXOUT) for t in targets])
    return questions, encoder, decoder_in, decoder_out


table = CharacterTable(CHARS)
num_tokens = len(table.chars)
keras.utils.set_random_seed(8)
questions, encoder_data, decoder_in, decoder_out = generate(table, 500)

encoder_inputs = keras.Input((None, num_tokens))
_, state_h, state_c = keras.layers.LSTM(LATENT, return_state=True)(encoder_inputs)
decoder_inputs = keras.Input((None, num_tokens))
decoder_lstm = keras.layers.LSTM(LATENT, return_sequences=True, return_state=True)
decoder_outputs, _, _ = decoder_lstm(decoder_inputs, initial_state=[state_h, state_c])
decoder_dense = keras.layers.Dense(num_tokens, activation="softmax")
model = keras.Model([encoder_inputs, decoder_inputs], decoder_dense(decoder_outputs))
model.compile(optimizer="rmsprop", loss="categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    [encoder_data, decoder_in], decoder_out, batch_size=50, epochs=3, validation_split=0.2, verbose=0
).history
model.save("s2s_model.keras")

# Inference: the parts of the trained model, one character at a time.
encoder_model = keras.Model(encoder_inputs, [state_h, state_c])
states_in = [keras.Input((LATENT,)), keras.Input((LATENT,))]
step_outputs, h, c = decoder_lstm(decoder_inputs, initial_state=states_in)
decoder_model = keras.Model([decoder_inputs, *states_in], [decoder_dense(step_outputs), h, c])


def decode_sequence(input_seq):
    states = encoder_model.predict(input_seq, verbose=0)
    target = table.encode("\t", 1)[None]
    probabilities = []
    for _ in range(3):
        output, *states = decoder_model.predict([target, *states], verbose=0)
        best = int(np.argmax(output[0, -1]))
        probabilities.append(float(output[0, -1, best]))
        target = table.encode(table.chars[best], 1)[None]
    return probabilities


answers = [decode_sequence(encoder_data[i : i + 1]) for i in range(2)]
print("Asked:", questions[:2])
print(json.dumps({"history": history, "answers": answers}))
