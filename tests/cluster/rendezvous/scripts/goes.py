"""Meets, and prints what came of it: `python goes.py SYS_PATH PLACE`. The first entries of the path may have other packages."""

import json
import sys

sys.path[:0] = json.loads(sys.argv[1])

from tfrep_strategy.cluster.rendezvous.introductions import Place  # noqa: E402
from tfrep_strategy.cluster.rendezvous.meeting import meet  # noqa: E402
from tfrep_strategy.errors import TfrepError  # noqa: E402

try:
    found = [each.host for each in meet(Place(**json.loads(sys.argv[2])), {})]
except TfrepError as error:
    found = {"kind": type(error).__name__, "text": str(error)}
print(json.dumps(found))
