"""`keras.utils.clear_session()` in the scope of a strategy clears the session, and not the scope."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy._tensorflow import default_graph_stack
from tfrep_strategy.keras_integration.patching import replace_everywhere


def _keeps_scope(clear_session: Any) -> Any:
    @functools.wraps(clear_session)
    def clear_session_in_scope(*args: Any, **kwargs: Any) -> None:
        """Keeps the default graph where a strategy is in scope.

        TensorFlow remembers in that graph which strategy is in scope. With another graph, what follows would be trained
        under none, on every rank alone, and the scope could not be left.
        """
        graph = default_graph_stack.get_default() if tf.distribute.has_strategy() else None
        clear_session(*args, **kwargs)
        if graph is not None:
            default_graph_stack._global_default_graph = graph

    return clear_session_in_scope


replace_everywhere(keras.utils.clear_session, _keeps_scope(keras.utils.clear_session))
