"""Prints the order that plain TensorFlow gives rows which are shuffled with a seed, where no global seed is set."""

import json

import tensorflow as tf

print(json.dumps([int(v) for v in tf.data.Dataset.range(32).shuffle(32, seed=7)]))
