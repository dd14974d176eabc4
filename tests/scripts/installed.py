"""Says what is in the installed package, as JSON."""

import json
import os
import sys

import tfrep_strategy as tfrep
from tfrep_strategy.contrib.digits import load_digits

before = set(sys.modules)
room = tfrep.strategies.mirrored
from tfrep_strategy import *  # noqa: E402, F403

found = {
    "file": tfrep.__file__,
    "early": [name for name in ("tensorflow", "keras") if name in before],
    "same": room.MirroredStrategy is tfrep.MirroredStrategy is MirroredStrategy,  # noqa: F405
    "version": tfrep.__version__,
    "missing": [name for name in tfrep.__all__ if not hasattr(tfrep, name)],
    "all": tfrep.__all__,
    "digits": len(load_digits()[0].labels),
    "typed": os.path.exists(os.path.join(os.path.dirname(tfrep.__file__), "py.typed")),
}
print(json.dumps(found))
