"""Says that it is there, and sleeps."""

import time

print("here", flush=True)
time.sleep(90)
