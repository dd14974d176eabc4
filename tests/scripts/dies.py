"""Rank 1 dies, in the way that the first argument names, while rank 0 waits."""

import os
import signal
import sys
import time

from tfrep_strategy.cluster.environments import detect_environment

if detect_environment().rank == 1:
    print("last words", flush=True)
    if sys.argv[1] == "exit":
        sys.exit(3)
    if sys.argv[1] == "raise":
        raise ValueError("seven")
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    os.mkdir(".")
time.sleep(90)
