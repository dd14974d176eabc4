"""Adapts TensorFlow functions to several processes: checkpoints, cache files, and the end of pipelines."""
