"""A `RandomizedSearchCV` without a seed: scikit-learn draws from NumPy's global state, which ranks share."""

import json

import keras
import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.model_selection import RandomizedSearchCV

x = np.random.default_rng(0).normal(size=(48, 3)).astype("f")
y = x.sum(1)


class Net(RegressorMixin, BaseEstimator):
    def __init__(self, units=2, rate=0.01):
        self.units, self.rate = units, rate

    def fit(self, x, y):
        keras.utils.set_random_seed(3)
        self.model_ = keras.Sequential([keras.Input((3,)), keras.layers.Dense(self.units, "tanh"), keras.layers.Dense(1)])
        self.model_.compile(keras.optimizers.SGD(self.rate), "mse")
        self.model_.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return self

    def predict(self, x):
        return self.model_.predict(x, verbose=0)[:, 0]


search = RandomizedSearchCV(Net(), {"units": [2, 3, 4, 5], "rate": np.linspace(0.01, 0.1, 10)}, n_iter=3, cv=2)
search.fit(x, y)
print("RESULT", json.dumps([search.best_params_, search.best_score_, [str(each) for each in search.cv_results_["params"]]]))
