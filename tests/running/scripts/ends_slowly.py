"""Waits. When it is asked to end, it takes some seconds to write a file: `ends_slowly.py SECONDS FILE`."""

import signal
import sys
import time
from pathlib import Path


def save(*_: object) -> None:
    time.sleep(float(sys.argv[1]))
    Path(sys.argv[2]).touch()
    sys.exit(143)


signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(300)
