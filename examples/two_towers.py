"""A recommender with two towers: users and films meet in one space of embeddings.

    python examples/two_towers.py
    tfrep run -n 2 examples/two_towers.py

Each user of a batch should be nearest to the film that he has watched; the films of all
others in the *global* batch are the wrong answers. Replicas gather those, so both
commands print the same losses, up to rounding. Users and films are made up. Half a
minute on two cores.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import keras
import numpy as np
from keras import layers, ops

USERS, FILMS, GENRES = 500, 200, 8


def make_views(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns who has watched which film. A user mostly watches films of two genres."""
    users = rng.integers(0, USERS, count)
    genres = np.where(rng.random(count) < 0.5, users % GENRES, users // 7 % GENRES)
    films = rng.integers(0, FILMS // GENRES, count) * GENRES + genres
    return users, films


def tower(things: int, width: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((), dtype="int64"),
            layers.Embedding(things, width),
            layers.Dense(width, activation="gelu"),
            layers.Dense(width),
            layers.UnitNormalization(),
        ]
    )


class TwoTowers(keras.Model):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.users, self.films = tower(USERS, width), tower(FILMS, width)

    def call(self, inputs: dict[str, Any]) -> Any:
        """Returns how near each user of the batch is to each of its films."""
        users, films = self.users(inputs["user"]), self.films(inputs["film"])
        return 10 * ops.matmul(users, ops.transpose(films))

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        own = ops.arange(ops.shape(y_pred)[0])
        return ops.mean(keras.losses.sparse_categorical_crossentropy(own, y_pred, from_logits=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="A recommender with two towers.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128, help="of all replicas")
    parser.add_argument("--views", type=int, default=10_000)
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    users, films = make_views(args.views, rng)
    model = TwoTowers(32)
    model.compile(keras.optimizers.Adam(0.005))
    history = model.fit(
        {"user": users, "film": films}, batch_size=args.batch_size, epochs=args.epochs, verbose=2
    )

    # Are the films that users watch next among the twenty nearest?
    users, films = make_views(500, rng)
    nearness = (
        model.users.predict(users, verbose=0) @ model.films.predict(np.arange(FILMS), verbose=0).T
    )
    ranks = (nearness > nearness[np.arange(500), films][:, None]).sum(1)
    recall = float((ranks < 20).mean())
    print(f"{recall:.0%} of the films watched next are among the 20 that are recommended.")
    print(json.dumps({"loss": history.history["loss"], "recall": recall}))


if __name__ == "__main__":
    main()
