"""Uses the package beside another version of a library: `python another_version.py MODULE VERSION [-NAME | +METHOD ...]`.

The library has lost the names (`-keras.src.backend.config:keras_home`). The methods have other arguments than in any release.
"""

import importlib
import sys
import warnings

library, version, *changes = sys.argv[1:]
importlib.import_module(library).__version__ = version
for change in changes:
    module, _, path = change[1:].partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    if change[0] == "-":
        delattr(owner, name)
    else:
        setattr(owner, name, lambda self, made_up: None)
import tfrep_strategy  # noqa: E402

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    try:
        print(tfrep_strategy.MirroredStrategy)
    except ImportError as error:
        print(type(error).__name__, "|", str(error).replace("\n", " "))
for each in said:
    if "tfrep_strategy" in str(each.message):
        print("warned |", each.filename, str(each.message).replace("\n", " "))
