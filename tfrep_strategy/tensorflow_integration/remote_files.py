"""A process that reaches files at addresses such as `gs://` for a launcher, which does not load TensorFlow itself.

It is asked by lines of JSON on its standard input, and answers each with one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def main(arguments: list[str], path: list[str]) -> None:
    """Answers until nobody asks.

    Args:
        arguments: None.
        path: The search path with which Python started: file systems may be added to TensorFlow from there.
    """
    sys.path[:] = path
    for line in sys.stdin:
        what, *given = json.loads(line)
        try:
            answer = {"result": _ANSWERS[what](*given)}
        except tf.errors.OpError as error:
            answer = {"error": error.message}
        print(json.dumps(answer), flush=True)


def _write(address: str, text: str) -> None:
    with tf.io.gfile.GFile(address, "w") as file:
        file.write(text)


def _read(address: str) -> str:
    with tf.io.gfile.GFile(address, "r") as file:
        return file.read()


def _names(address: str) -> list[str]:
    return [name.rstrip("/") for name in tf.io.gfile.listdir(address)]


_ANSWERS: dict[str, Callable[..., Any]] = {
    "schemes": tf.io.gfile.get_registered_schemes,
    "make": tf.io.gfile.makedirs,
    "write": _write,
    "read": _read,
    "names": _names,
    "remove": tf.io.gfile.remove,
    "remove all": tf.io.gfile.rmtree,
}
