"""Pipelines of `tf.data` from inside: what they consist of, and which part of them a process can leave to the others."""
