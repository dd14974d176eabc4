"""Reaches files at addresses such as `gs://` for a launcher, which does not load TensorFlow itself."""

from __future__ import annotations

import json
import sys

import tensorflow as tf


def main(arguments: list[str], path: list[str]) -> None:
    """Prints the names in a folder as JSON, or removes folders in it.

    Args:
        arguments: The address of the folder, and "names", or "remove" and their names.
        path: The search path with which Python started: file systems may be added to TensorFlow from there.
    """
    sys.path[:] = path
    place, what, *names = arguments
    if what == "names":
        print(json.dumps([name.rstrip("/") for name in tf.io.gfile.listdir(place)]))
    for name in names:
        tf.io.gfile.rmtree(f"{place}/{name}")
