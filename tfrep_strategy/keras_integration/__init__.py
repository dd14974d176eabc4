"""The replacements with which Keras 3 works under the strategies of this package. No other room touches Keras's internals.

Importing this room checks all names that it needs of Keras (`internals.py`). It then replaces the functions that decide how
replicas work together (`tables.py`). Under other strategies, and under none, each function does what Keras wrote, unless its
entry says otherwise (`does`). `uninstall()` restores Keras.
"""

import keras

from tfrep_strategy.core.replacements import KERAS
from tfrep_strategy.errors import UnsupportedVersionError, message

KERAS.refuse_older(keras.__version__)
if keras.backend.backend() != "tensorflow":
    raise UnsupportedVersionError(
        message(
            "Only Keras's TensorFlow backend works here.",
            hint="set KERAS_BACKEND=tensorflow before Keras is imported.",
            code="TFREP-E001",
            backend=keras.backend.backend(),
        )
    )

from tfrep_strategy.keras_integration import internals  # noqa: E402
from tfrep_strategy.keras_integration.driver import registry  # noqa: E402

KERAS.refuse_misfits(keras.__version__, [*internals.misfits, *registry.misfits()])

from tfrep_strategy.keras_integration.asynchronous import driver as _asynchronous  # noqa: E402, F401  (derives from Keras's own)
from tfrep_strategy.keras_integration.synchronous import driver as _synchronous  # noqa: E402, F401  (likewise)

install, uninstall, describe = registry.install, registry.uninstall, registry.describe
install()
KERAS.warn_of_newer(keras.__version__)

__all__ = ["describe", "install", "registry", "uninstall"]
