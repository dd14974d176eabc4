"""Uses the package beside a module of an older version: `python old_version.py MODULE VERSION`."""

import importlib
import sys

importlib.import_module(sys.argv[1]).__version__ = sys.argv[2]
import tfrep_strategy  # noqa: E402

try:
    print(tfrep_strategy.MirroredStrategy)
except ImportError as error:
    print(type(error).__name__, "|", str(error).replace("\n", " "))
