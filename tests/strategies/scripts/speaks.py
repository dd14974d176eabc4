"""Says one word, and ends with the exit code that it is given."""

import sys

print("once", flush=True)
sys.exit(int((sys.argv[1:] or ["0"])[0]))
