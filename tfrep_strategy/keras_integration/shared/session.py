"""`keras.utils.clear_session()` in the scope of a strategy clears the session, and not the scope."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy._tensorflow import default_graph_stack


def clear_but_keep_scope(clear_session: Any, *args: Any, **kwargs: Any) -> None:
    """Keeps the default graph where a strategy is in scope.

    TensorFlow remembers in that graph which strategy is in scope. With another graph, what follows would be trained under
    none, on every rank alone, and the scope could not be left.
    """
    graph = default_graph_stack.get_default() if tf.distribute.has_strategy() else None
    clear_session(*args, **kwargs)
    if graph is not None:
        default_graph_stack._global_default_graph = graph
