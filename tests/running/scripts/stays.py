"""A rank that shows who it is, and stays: `stays.py FOLDER NOTES`. It does what stands in files of the folder.

`ROUND-RANK` is what it shows. It ends well when there is a file `done`, and as `end-ROUND-RANK` says: by a signal, or with an exit
code.
"""

import json
import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
config = json.loads(os.environ["TF_CONFIG"])
rank, size, number = config["task"]["index"], len(config["cluster"]["worker"]), int(os.environ["TFREP_RESTARTS"])
shown = folder / f".{number}-{rank}"
shown.write_text(json.dumps({"size": size, "replicas": os.environ["TFREP_NUM_REPLICAS"], "seed": os.environ["PYTHONHASHSEED"]}))
shown.rename(folder / f"{number}-{rank}")
end = folder / f"end-{number}-{rank}"
while not (folder / "done").exists():
    if end.exists():
        code = int(end.read_text())
        if code < 0:
            os.kill(os.getpid(), -code)
        sys.exit(code)
    time.sleep(0.05)
