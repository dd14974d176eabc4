"""Is the launcher of one machine: `python launches.py SYS_PATH OPTIONS PROGRAM...`. It prints what came of it."""

import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = json.loads(sys.argv[1])

from tfrep_strategy.errors import TfrepError  # noqa: E402
from tfrep_strategy.running import Options, RunFailed  # noqa: E402
from tfrep_strategy.running.nodes import Node, meet_nodes  # noqa: E402
from tfrep_strategy.running.ranks import deferred_signals  # noqa: E402
from tfrep_strategy.running.runs import Round, run_to_end  # noqa: E402
from tfrep_strategy.running.together import together  # noqa: E402

given = json.loads(sys.argv[2])
try:
    options = Options(**given | {"node": Node(**given["node"])})
    with tempfile.TemporaryDirectory() as notes:
        rank = [sys.executable, *sys.argv[3:], notes]
        if options.has_rounds:
            with together(options) as launcher, deferred_signals() as events:
                run_to_end(options, rank, Path(notes), events, launcher.rounds(events))
        else:
            nodes = meet_nodes(options.node, options.size, options.resolved_communicator)
            with deferred_signals() as events:
                run_to_end(options, rank, Path(notes), events, [Round(0, events, nodes)])
    found = "ended well"
except (TfrepError, RunFailed) as error:
    found = f"{type(error).__name__}: {error}"
print("FOUND " + json.dumps(found), flush=True)
