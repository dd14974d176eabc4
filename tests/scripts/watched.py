"""Warns, writes an error, says that it is there, and sleeps."""

import sys
import time
import warnings

warnings.warn("the script's warning", stacklevel=1)
print("the script's error", file=sys.stderr)
print("READY", flush=True)
time.sleep(90)
