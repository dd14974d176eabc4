"""Users and films in one space of embeddings, in the manner of Keras's collaborative filtering for film recommendations."""

import json

import keras
import numpy as np
import pandas as pd
from keras import layers, ops

EMBEDDING_SIZE = 8
keras.utils.set_random_seed(40)
rng = np.random.default_rng(40)
df = pd.DataFrame({"userId": rng.integers(1, 40, 900), "movieId": rng.integers(100, 160, 900)})
df["rating"] = 1 + ((df.userId * 7 + df.movieId * 3) % 9) / 2

user2user_encoded = {x: i for i, x in enumerate(df["userId"].unique().tolist())}
movie2movie_encoded = {x: i for i, x in enumerate(df["movieId"].unique().tolist())}
df["user"] = df["userId"].map(user2user_encoded)
df["movie"] = df["movieId"].map(movie2movie_encoded)
min_rating, max_rating = min(df["rating"]), max(df["rating"])
df = df.sample(frac=1, random_state=42)
x = df[["user", "movie"]].values
y = df["rating"].apply(lambda r: (r - min_rating) / (max_rating - min_rating)).values
split = int(0.9 * df.shape[0])


class RecommenderNet(keras.Model):
    def __init__(self, num_users, num_movies, embedding_size, **kwargs):
        super().__init__(**kwargs)
        regularizer = keras.regularizers.l2(1e-6)
        self.user_embedding = layers.Embedding(
            num_users, embedding_size, embeddings_initializer="he_normal", embeddings_regularizer=regularizer
        )
        self.user_bias = layers.Embedding(num_users, 1)
        self.movie_embedding = layers.Embedding(
            num_movies, embedding_size, embeddings_initializer="he_normal", embeddings_regularizer=regularizer
        )
        self.movie_bias = layers.Embedding(num_movies, 1)

    def call(self, inputs):
        user_vector, user_bias = self.user_embedding(inputs[:, 0]), self.user_bias(inputs[:, 0])
        movie_vector, movie_bias = self.movie_embedding(inputs[:, 1]), self.movie_bias(inputs[:, 1])
        dot = ops.sum(user_vector * movie_vector, axis=1, keepdims=True)
        return ops.nn.sigmoid(dot + user_bias + movie_bias)


model = RecommenderNet(len(user2user_encoded), len(movie2movie_encoded), EMBEDDING_SIZE)
model.compile(loss=keras.losses.BinaryCrossentropy(), optimizer=keras.optimizers.Adam(learning_rate=0.01))
history = model.fit(
    x=x[:split], y=y[:split], batch_size=64, epochs=3, verbose=2, validation_data=(x[split:], y[split:])
)

user_id = int(df.userId.iloc[0])
watched = set(df[df.userId == user_id].movieId)
not_watched = [m for m in movie2movie_encoded if m not in watched]
pairs = np.array([[user2user_encoded[user_id], movie2movie_encoded[m]] for m in not_watched])
ratings = model.predict(pairs).flatten()
print("Recommended:", [not_watched[i] for i in ratings.argsort()[-3:][::-1]])
print(json.dumps({"history": history.history, "best": float(ratings.max())}))
