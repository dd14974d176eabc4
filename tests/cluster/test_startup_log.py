"""What a process shows of TensorFlow's start, told by lines as TensorFlow writes them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NOISE = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795365687.265102    4601 port.cc:153] oneDNN custom operations are on.",
    "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow.",
    "2025-11-22 13:00:00.000000: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary is optimized",
    "E0000 00:00:1795365687.265102    4601 cuda_dnn.cc:8579] Unable to register cuDNN factory: Attempting to register",
    "E0000 00:00:1795365763.745411    5301 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error",
)
NEWS = (
    "E0000 00:00:1795365687.265102    4601 file.cc:1] The disk is full.",
    "F0000 00:00:1795365687.265102    4601 cpu.cc:1] This TensorFlow needs AVX instructions.",
    "script.py:3: UserWarning: mine",
    "Important: not TensorFlow's",
)
PROGRAM = """
import os, sys
from tfrep_strategy.cluster.startup_log import quiet_start
with quiet_start():
    os.write(2, sys.argv[1].encode())
    if "dies" in sys.argv:
        os.abort()
os.write(2, b"I0000 00:00:1795365687.265102    4601 later.cc:1] later\\n")
print(os.environ["TF_CPP_MIN_LOG_LEVEL"], "tensorflow" in sys.modules)
"""


def _start(*arguments: str, level: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
    written = "".join(f"{line}\n" for pair in zip(NOISE, NEWS + NEWS, strict=False) for line in pair)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, written, *arguments],
        env=environ if level is None else environ | {"TF_CPP_MIN_LOG_LEVEL": level},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("level", [None, "2"])
def test_what_is_no_error_is_left_out_while_tensorflow_starts(level):
    done = _start(level=level)
    *shown, later = done.stderr.splitlines()
    assert shown == [*NEWS, *NEWS[:2]]
    assert later.endswith("later")
    assert done.stdout.split() == [level or "1", "False"]


def test_the_last_words_of_a_process_that_dies_are_shown():
    done = _start("dies")
    assert done.returncode < 0
    assert done.stderr.splitlines() == [*NEWS, *NEWS[:2]]


def test_a_user_who_asks_for_everything_gets_it():
    done = _start(level="0")
    assert set(done.stderr.splitlines()) > {*NOISE, *NEWS}
