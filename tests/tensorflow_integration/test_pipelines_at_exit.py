"""A process that has done everything ends, whatever its data pipelines do at that moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# The iterators are in a cycle of references, as those of a script that `tfrep run` runs are: Python finds them when it ends.
PROGRAM = """
import queue, sys, time
import tensorflow as tf
import tfrep_strategy as tfrep

def slow():
    while True:
        time.sleep(0.01)
        yield 1

def stuck():
    yield 1
    queue.Queue().get()

class Holder:
    pass

holder = Holder()
holder.itself = holder
number = tf.TensorSpec([], tf.int32)
holder.slow = [iter(tf.data.Dataset.from_generator(slow, output_signature=number).prefetch(10_000)) for _ in range(4)]
holder.stuck = iter(tf.data.Dataset.from_generator(stuck, output_signature=number).prefetch(2))
print(sum(int(next(each)) for each in [*holder.slow, holder.stuck]), flush=True)
del holder
"""


def test_live_pipelines_do_not_hold_up_the_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "5\n"
