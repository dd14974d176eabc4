"""Shows the variables of this rank. If told so, one rank fails."""

import json
import os
import sys
import time

own = ("TF_CONFIG", "TFREP_", "PYTHONHASHSEED")
shown = {name: value for name, value in os.environ.items() if name.startswith(own)}
print("RANK " + json.dumps(shown), flush=True)
rank = json.loads(shown["TF_CONFIG"])["task"]["index"]
if str(rank) == sys.argv[1]:
    time.sleep(0.5)
    sys.exit(7)
