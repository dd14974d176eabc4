#!/usr/bin/env python
"""A notebook that was exported as a script, cells and all, in the manner of a Kaggle kernel."""
# coding: utf-8

# # Boston-like prices

# In[1]:

import json
import os
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tensorflow as tf
from tensorflow.keras import layers

warnings.filterwarnings("ignore")
try:
    get_ipython().run_line_magic("matplotlib", "inline")
except NameError:
    pass
for dirname, _, filenames in os.walk("."):
    for filename in filenames:
        if filename.endswith(".npz"):
            print(os.path.join(dirname, filename))

# In[2]:

np.random.seed(0)
df = pd.DataFrame(np.random.randn(300, 5), columns=list("abcde"))
df["price"] = 20 + 3 * df.a - 2 * df.b + df.c * df.d
df["area"] = pd.cut(df.e, [-np.inf, -0.5, 0.5, np.inf], labels=["low", "mid", "high"])
df = pd.get_dummies(df, columns=["area"], dtype=float)
print(df.describe().transpose())

# In[3]:

train_dataset = df.sample(frac=0.8, random_state=0)
test_dataset = df.drop(train_dataset.index)
train_features, test_features = train_dataset.copy(), test_dataset.copy()
train_labels, test_labels = train_features.pop("price"), test_features.pop("price")

# In[4]:

tf.keras.utils.set_random_seed(0)
normalizer = tf.keras.layers.Normalization(axis=-1)
normalizer.adapt(np.array(train_features))
linear_model = tf.keras.Sequential([normalizer, layers.Dense(units=1)])
print(linear_model.predict(train_features[:10]).shape)
linear_model.compile(optimizer=tf.keras.optimizers.Adam(learning_rate=0.1), loss="mean_absolute_error")

# In[5]:

history = linear_model.fit(train_features, train_labels, epochs=3, verbose=0, validation_split=0.2)
hist = pd.DataFrame(history.history)
hist["epoch"] = history.epoch
print(hist.tail())

# In[6]:

plt.plot(history.history["loss"], label="loss")
plt.plot(history.history["val_loss"], label="val_loss")
plt.legend()
plt.grid(True)
plt.show()

# In[7]:

test_results = {"linear": linear_model.evaluate(test_features, test_labels, verbose=0)}
dnn_model = tf.keras.Sequential([normalizer, layers.Dense(32, activation="softplus"), layers.Dense(1)])
dnn_model.compile(loss="mean_absolute_error", optimizer=tf.keras.optimizers.Adam(0.01))
dnn_model.fit(train_features, train_labels, validation_split=0.2, verbose=0, epochs=2)
test_results["dnn"] = dnn_model.evaluate(test_features, test_labels, verbose=0)
test_predictions = dnn_model.predict(test_features).flatten()
submission = pd.DataFrame({"Id": test_features.index, "price": test_predictions})

# In[8]:

print(json.dumps({**test_results, "loss": history.history["loss"], "mean": float(submission.price.mean())}))
