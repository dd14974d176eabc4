"""A Transformer tells praise from complaints in texts of different lengths.

    python examples/text_transformer.py
    tfrep run -n 2 examples/text_transformer.py

The reviews are made up. Their words become numbers with `TextVectorization`, and masks
hide the padding. Both commands print the same losses, up to rounding. Half a minute on
two cores.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import keras
import numpy as np
from keras import layers, ops

LENGTH = 24
WORDS = 200
PRAISE = "bright clever fine funny gentle lovely moving sharp superb warm".split()
BLAME = "awful cold confused dull empty flat grey lazy silly weak".split()
OTHERS = "the a this film story cast scene music ending and but very rather quite".split()


def make_review(praises: bool, rng: np.random.Generator) -> str:
    """Returns a sentence with three judgements. Some negate the contrary: "not dull"."""
    phrases = [str(word) for word in rng.choice(OTHERS, rng.integers(4, 14))]
    for _ in range(3):
        negated = rng.random() < 0.3
        word = rng.choice(PRAISE if praises != negated else BLAME)
        phrases.insert(rng.integers(len(phrases)), f"not {word}" if negated else word)
    return " ".join(phrases)


def make_reviews(count: int, rng: np.random.Generator) -> tuple[list[str], np.ndarray]:
    """Returns reviews, and which of them praise."""
    labels = rng.integers(0, 2, count)
    return [make_review(bool(label), rng) for label in labels], labels


class TokensAndPositions(layers.Layer):
    """Adds an embedding of each word's place to that of the word."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = layers.Embedding(WORDS, width, mask_zero=True)
        self.positions = layers.Embedding(LENGTH, width)

    def call(self, x: Any) -> Any:
        return self.tokens(x) + self.positions(ops.arange(ops.shape(x)[-1]))

    def compute_mask(self, x: Any, mask: Any = None) -> Any:
        return self.tokens.compute_mask(x)


class TransformerBlock(layers.Layer):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)
        self.feed_forward = keras.Sequential(
            [layers.Dense(inner, "gelu"), layers.Dense(width), layers.Dropout(0.1)]
        )
        self.norm_1, self.norm_2 = layers.LayerNormalization(), layers.LayerNormalization()
        self.supports_masking = True

    def call(self, x: Any, mask: Any = None, training: bool | None = None) -> Any:
        allowed = None if mask is None else ops.expand_dims(mask, 1)
        x = self.norm_1(x + self.attention(x, x, attention_mask=allowed, training=training))
        return self.norm_2(x + self.feed_forward(x, training=training))


def main() -> None:
    parser = argparse.ArgumentParser(description="A Transformer on made-up reviews.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="of all replicas")
    parser.add_argument("--reviews", type=int, default=2000)
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    reviews, labels = make_reviews(args.reviews, rng)
    validation_reviews, validation_labels = make_reviews(args.reviews // 5, rng)
    to_tokens = layers.TextVectorization(WORDS, output_sequence_length=LENGTH)
    to_tokens.adapt(reviews)

    inputs = keras.Input((LENGTH,), dtype="int64")
    x = TokensAndPositions(32)(inputs)
    x = TransformerBlock(32, heads=2, inner=64)(x)
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(1, "sigmoid")(x))
    model.compile(keras.optimizers.AdamW(2e-3), "binary_crossentropy", metrics=["accuracy"])
    history = model.fit(
        to_tokens(reviews),
        labels,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=(to_tokens(validation_reviews), validation_labels),
        verbose=2,
    )
    review = "the cast is superb and the music not dull and the ending very moving"
    score = float(model.predict(to_tokens([review]), verbose=0)[0, 0])
    print(f"{review!r} praises with probability {score:.2f}")
    print(json.dumps({"history": history.history, "score": score}))


if __name__ == "__main__":
    main()
