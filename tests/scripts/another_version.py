"""Uses the package beside another version of a module: `python another_version.py MODULE VERSION [CLASS.METHOD ...]`.

The methods, in `keras.src`, have other arguments than in any release.
"""

import importlib
import sys
import warnings

name, version, *changed = sys.argv[1:]
importlib.import_module(name).__version__ = version
for path in changed:
    module, _, method = path.partition(":")
    owner, _, attribute = method.partition(".")
    setattr(getattr(importlib.import_module(f"keras.src.{module}"), owner), attribute, lambda self, made_up: None)
import tfrep_strategy  # noqa: E402

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    try:
        print(tfrep_strategy.MirroredStrategy)
    except ImportError as error:
        print(type(error).__name__, "|", str(error).replace("\n", " "))
for each in said:
    if "tfrep_strategy" in str(each.message):
        print("warned |", str(each.message).replace("\n", " "))
