"""Starts one child in its own process group, and one in a session of its own."""

import subprocess
import sys
import time

sleep = [sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
print("started", flush=True)
time.sleep(60)
