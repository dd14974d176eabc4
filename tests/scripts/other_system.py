"""Hides what Windows lacks, and then runs a script: `python other_system.py SCRIPT [ARGUMENT ...]`."""

import os
import runpy
import signal
import sys

for name in ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None  # An import of it fails.
for name in ("fork", "forkpty", "getuid", "killpg", "register_at_fork", "setsid"):
    delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2"):
    delattr(signal, name)

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
