"""What each rank of a run on several hosts shows: `on_hosts.py tells`, `fails` or `waits FOLDER`."""

import json
import os
import socket
import sys
import time
from pathlib import Path

import tfrep_strategy as tfrep

rank = tfrep.MultiWorkerStrategy().rank
if sys.argv[1] == "tells":
    found = {
        "ranks": tfrep.all_gather_object(rank),
        "hosts": tfrep.all_gather_object(socket.gethostname()),
        "folder": os.getcwd(),
        "token": os.environ.get("MY_TOKEN"),
        "other": os.environ.get("MY_OTHER"),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    print("FOUND " + json.dumps(found), flush=True)
elif sys.argv[1] == "fails":
    print(f"I am rank {rank}", flush=True)
    tfrep.barrier()
    if rank == 1:
        sys.exit(7)
    tfrep.barrier()
else:
    Path(sys.argv[2], f"ready{rank}").touch()
    while True:
        tfrep.barrier()
        time.sleep(0.1)
