"""A Transformer block over padded sequences with masks, in the manner of Keras's text classification with Transformer."""

import json

import keras
import numpy as np
from keras import layers, ops

vocab_size, maxlen = 60, 16


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential([layers.Dense(ff_dim, activation="gelu"), layers.Dense(embed_dim)])
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.supports_masking = True

    def call(self, inputs, mask=None):
        attention_mask = None if mask is None else ops.expand_dims(mask, 1)
        out1 = self.layernorm1(inputs + self.att(inputs, inputs, attention_mask=attention_mask))
        return self.layernorm2(out1 + self.ffn(out1))


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim, mask_zero=True)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def compute_mask(self, x, mask=None):
        return self.token_emb.compute_mask(x)

    def call(self, x):
        positions = ops.arange(start=0, stop=ops.shape(x)[-1], step=1)
        return self.token_emb(x) + self.pos_emb(positions)


def make_data(n, rng):
    sequences = [rng.integers(1, vocab_size, rng.integers(3, maxlen + 5)) for _ in range(n)]
    labels = np.array([int(s[-maxlen:].mean() > vocab_size / 2) for s in sequences])
    return keras.utils.pad_sequences(sequences, maxlen=maxlen), labels


keras.utils.set_random_seed(42)
rng = np.random.default_rng(42)
(x_train, y_train), (x_val, y_val) = make_data(500, rng), make_data(101, rng)

inputs = layers.Input(shape=(maxlen,))
x = TokenAndPositionEmbedding(maxlen, vocab_size, 16)(inputs)
x = TransformerBlock(16, 2, 32)(x)
x = layers.GlobalAveragePooling1D()(x)
outputs = layers.Dense(2, activation="softmax")(layers.Dense(20, activation="gelu")(x))
model = keras.Model(inputs=inputs, outputs=outputs)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x_train, y_train, batch_size=32, epochs=2, validation_data=(x_val, y_val), verbose=2)
print(json.dumps(history.history))
