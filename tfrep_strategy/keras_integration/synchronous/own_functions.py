"""Losses and metrics that users write: whether what they say of a batch follows from what they say of its parts.

It does for nearly all of them. The others, such as the root of a mean, a maximum, or a mean over the targets that are not masked,
need the rows of all replicas. To find out, each is tried once, on batches of made-up rows. One that refuses all of these (it wants
two classes in a batch, say) gets the rows of all replicas, too, which is right for every function. One that calls collectives
sees what it wants to see.
"""

from __future__ import annotations

import concurrent.futures
import enum
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfrep_strategy._tensorflow import called_graphs
from tfrep_strategy.errors import message, warn
from tfrep_strategy.keras_integration.internals import MeanMetricWrapper, StatelessScope, Tracker
from tfrep_strategy.keras_integration.trial import TrialContext

_ROWS, _FIRST = 4, 1
_TOLERANCE = 2e-5
_MARKS = (None, 0, -1, 255, -100, float("nan"))
"""With what programs mark targets that do not count. Zeros are labels, too, and rows of one label belong together."""

_OPEN_SIZES = 2, 16, 192
"""What is tried for dimensions that are not known. A function may refuse pictures that are smaller than its filter."""

_READS = frozenset(
    {
        "Identity", "LookupTableExportV2", "LookupTableFindV2", "LookupTableSizeV2", "NoOp", "ReadVariableOp", "ResourceGather",
        "ResourceGatherNd", "VariableShape", "VarIsInitializedOp",
    }
)  # fmt: skip
"""Operations that take what TensorFlow keeps, and leave it as it is."""

_MARKED = 0.8, 0.2, 0.6, 0.4
"""How much of each made-up row is marked: more of some than of others, so that the rows that count differ between the parts."""

_answers: Any = weakref.WeakKeyDictionary()
_numbers_of_variables: Any = weakref.WeakKeyDictionary()
"""How many variables metrics have when they have been updated."""


class Sees(enum.Enum):
    """What a loss or metric has to see."""

    OWN_ROWS = "those of its replica"
    ALL_ROWS = "those of all replicas"
    WHAT_IT_GATHERS = "what its collectives give to it"


def loss_needs_all_rows(loss: Any, compute: Callable[..., Any], y_true: Any, y_pred: Any) -> bool:
    """Whether the value of a loss on a batch is neither the mean nor the rows of its values on the parts.

    Args:
        loss: A `keras.losses.Loss`.
        compute: Its `__call__`, as a function of the loss, targets and predictions.
        y_true: Targets, a tensor or a nest of them.
        y_pred: Predictions.
    """
    calls_itself = not is_of_keras(compute)
    called = compute if calls_itself else type(loss).call
    if is_of_keras(called):
        called = getattr(loss, "fn", called)
    if is_of_keras(called) or not _are_rows(y_true, y_pred):
        return False
    function = (lambda *batch: compute(loss, *batch)) if calls_itself else loss.call
    # With all rows, each replica assigns to its copy of a variable what one device assigns.
    trial = _Trial(lambda part: function(*part), lambda parts: not _is_mean_or_rows(function, parts), Sees.ALL_ROWS)
    return _tried(loss, compute.__qualname__, (y_true, y_pred), trial) is Sees.ALL_ROWS


def what_metric_sees(metric: Any, update: Callable[..., Any], args: Any, kwargs: Any) -> Sees:
    """Returns what a metric has to see: all rows, if an update with a batch does to its state not the sum of what its parts do.

    Args:
        metric: The metric.
        update: Its `update_state`, as a function of the metric and its arguments.
        args: The arguments of the update.
        kwargs: Its keyword arguments.
    """
    if isinstance(metric, MeanMetricWrapper) and is_of_keras(update):
        fn = metric._fn
        if is_of_keras(fn) or not _are_rows(args, kwargs):
            return Sees.OWN_ROWS
        trial = _Trial(lambda part: fn(*part), lambda parts: not _is_mean_or_rows(fn, parts), Sees.ALL_ROWS)
        sees = _tried(metric, "fn", args[:2], trial)
        return Sees.ALL_ROWS if sees is Sees.ALL_ROWS else Sees.OWN_ROWS  # The mean of what it gathers is that of its rows.
    rows = [value for value in keras.tree.flatten((args, kwargs)) if not (isinstance(value, tf.Tensor) and value.shape.rank == 0)]
    if is_of_keras(update) or not _are_rows(rows, None):
        return Sees.OWN_ROWS
    zeros = [tf.zeros(variable.shape, variable.dtype) for variable in metric.variables]
    trial = _Trial(
        lambda part: _ends(_copied(metric), update, part, zeros), lambda parts: not _is_sum(metric, update, parts), Sees.OWN_ROWS
    )
    return _tried(metric, update.__qualname__, (args, kwargs), trial)


def make_variables(metric: Any, update: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Makes the variables that a metric makes in its first update, which only one replica is to do. Every replica calls it.

    The arguments are those of `what_metric_sees`.
    """
    if len(metric.variables) < _numbers_of_variables.get(metric, 1):
        with StatelessScope():
            update(metric, *args, **kwargs)


def _are_rows(args: Any, kwargs: Any) -> bool:
    """Whether something is given, and all of it can be put together with the rows of other replicas."""
    given = [value for value in keras.tree.flatten((args, kwargs)) if value is not None]
    return bool(given) and all(
        isinstance(value, tf.Tensor) and bool(value.shape.rank) and value.dtype != tf.string for value in given
    )


def is_of_keras(function: Any) -> bool:
    """Whether Keras defines a function or a class."""
    return str(getattr(function, "__module__", "")).startswith("keras.")


class _Trial(NamedTuple):
    """How a function is tried.

    Attributes:
        call: Calls it with a batch.
        needs_all: Whether what it says of a whole batch, and of its two parts, tells that it needs all rows.
        with_state: What it sees if it writes to variables that are none of Keras. It is not run then: it would write.
    """

    call: Callable[[Any], Any]
    needs_all: Callable[[list[Any]], bool]
    with_state: Sees


def _tried(user: Any, what: str, batch: Any, trial: _Trial) -> Sees:
    answers = _answers.setdefault(user, {})
    if what not in answers:
        answers[what] = Sees.OWN_ROWS  # First: an update may call that of its base class.
        # What is traced here, and under which strategy, does not hold in another thread.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            answers[what] = thread.submit(_found_out, user, batch, trial).result()
    return answers[what]  # type: ignore[no-any-return]


def _found_out(user: Any, batch: Any, trial: _Trial) -> Sees:
    """Returns what the graph of a function tells that has no need to be run, else what its trials say."""
    with TrialContext() as context:
        writes = _writes(trial.call, _whole_and_parts(batch, None, _OPEN_SIZES[0])[0])
        if context.calls_collectives:
            return Sees.WHAT_IT_GATHERS
        if writes:
            return trial.with_state
        sees = _told_by_trials(user, batch, trial)
        return Sees.WHAT_IT_GATHERS if context.calls_collectives else sees  # It may have been no graph.


def _told_by_trials(user: Any, batch: Any, trial: _Trial) -> Sees:
    """Returns what the trials say that do not fail, or that all rows are needed if all fail."""
    is_open = any(None in value.shape[1:] for value in keras.tree.flatten(batch) if tf.is_tensor(value) and value.shape.rank)
    refused: Exception | None = None
    for size in _OPEN_SIZES if is_open else _OPEN_SIZES[:1]:
        answers = []
        for mark in _MARKS:
            try:
                answers.append(trial.needs_all(_whole_and_parts(batch, mark, size)))
            except Exception as error:  # A user's code need not like made-up numbers.
                refused = refused or error
        if answers:
            return Sees.ALL_ROWS if any(answers) else Sees.OWN_ROWS
    warn(
        message(
            "A loss or metric refuses rows that were made up to find out whether it is a mean over rows."
            " So it gets the rows of all replicas in each step, which costs more.",
            hint="nothing has to be done. If it is a mean, let it take any rows of numbers from 0 to 1.",
            name=getattr(user, "name", user),
            refused=f"{type(refused).__name__}: {refused}"[:200],
        ),
    )
    return Sees.ALL_ROWS


def _writes(call: Callable[[Any], Any], batch: Any) -> bool:
    """Returns whether a function writes to something that TensorFlow keeps, such as a `tf.Variable`, as far as its graph tells."""

    @tf.function(autograph=False)
    def traced() -> None:
        with StatelessScope():  # A metric has one of its own, since what it reads of its state is a sum over replicas.
            call(batch)

    try:
        return _writes_in(traced.get_concrete_function().graph)
    except Exception:  # A user's code need not like made-up numbers, nor graphs.
        return False


def _writes_in(graph: Any) -> bool:
    for operation in graph.get_operations():
        inner = called_graphs(operation)
        takes = not inner and operation.type not in _READS and any(given.dtype == tf.resource for given in operation.inputs)
        if takes or any(map(_writes_in, inner)):
            return True
    return False


def _is_mean_or_rows(function: Callable[..., Any], parts: list[Any]) -> bool:
    with StatelessScope():  # What is drawn at random here is not drawn.
        whole, first, rest = (keras.ops.convert_to_numpy(function(*part)) for part in parts)
    if whole.ndim:
        return len(whole) != _ROWS or _is_close(whole, np.concatenate([first, rest]))
    return _is_close(whole, (_FIRST * first + (_ROWS - _FIRST) * rest) / _ROWS)


def _is_sum(metric: Any, update: Callable[..., Any], parts: list[Any]) -> bool:
    def added(part: Any, starts: list[Any]) -> list[np.ndarray]:
        ends = _ends(metric, update, part, starts)
        return [np.asarray(end, "float64") - np.asarray(start, "float64") for end, start in zip(ends, starts, strict=True)]

    whole, first, rest = parts
    metric = _with_variables(metric, update, whole)
    zeros = [tf.zeros(variable.shape, variable.dtype) for variable in metric.variables]
    moved = [zero + tf.cast(2, zero.dtype) for zero in zeros]
    sums = [a + b for a, b in zip(added(first, zeros), added(rest, zeros), strict=True)]
    return all(map(_is_close, added(whole, moved), sums))


def _ends(metric: Any, update: Callable[..., Any], part: Any, starts: list[Any]) -> list[Any]:
    """Returns the state of a metric after an update that begins with another state. The metric keeps its own."""
    variables = list(metric.variables)[: len(starts)]  # An update may make more.
    with StatelessScope(state_mapping=list(zip(variables, starts, strict=True))) as scope:
        update(metric, *part[0], **part[1])
        return [scope.get_current_value(variable) for variable in variables]


def _with_variables(metric: Any, update: Callable[..., Any], batch: Any) -> Any:
    """Returns a copy that has made the variables that the metric would make in its first update."""
    copied = _copied(metric)
    with StatelessScope():
        update(copied, *batch[0], **batch[1])
    _numbers_of_variables[metric] = len(copied.variables)
    return copied


def _copied(metric: Any) -> Any:
    """Returns a copy of a metric, and of those that it holds. It has the same variables, and makes others for itself.

    Keras would copy it by saving and loading, which takes classes that it knows.
    """
    copied = object.__new__(type(metric))
    copies = {id(each): _copied(each) for each in metric._metrics}
    stores = {"_variables": list(metric._variables), "_metrics": list(copies.values())}
    kinds = {name: (is_one, stores[f"_{name}"]) for name, (is_one, _) in metric._tracker.config.items()}
    tracker = Tracker(kinds)
    tracker.stored_ids = {name: set(map(id, store)) for name, (_, store) in kinds.items()}

    def own(value: Any) -> Any:
        if isinstance(value, list):
            return tracker.track([own(each) for each in value])
        if isinstance(value, dict):
            return tracker.track({name: own(each) for name, each in value.items()})
        return copies.get(id(value), value)

    vars(copied).update({name: own(value) for name, value in vars(metric).items() if name not in stores})
    vars(copied).update(stores, _tracker=tracker)
    return copied


def _is_close(one: Any, other: Any) -> bool:
    scale = max(1.0, float(np.max(np.abs(np.nan_to_num(one)), initial=0.0)))
    return np.allclose(one, other, rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True)


def _whole_and_parts(batch: Any, mark: Any, size: int) -> list[Any]:
    """Makes up rows that are unlike each other, of numbers between 0 and 1, or of ones where they have to be whole; cuts them.

    Half of what may be probabilities of classes say that it is class 1, as targets that have to be whole do.

    Args:
        batch: A nest, of which the first tensor holds targets.
        mark: What stands for some of the targets, or None.
        size: That of dimensions that are not known.
    """
    random, are_targets = np.random.RandomState(0), iter([True])

    def made_up(value: Any) -> Any:
        if not tf.is_tensor(value):
            return value
        if not value.shape.rank:  # A limit, say: small for one trial, and large for the others.
            return tf.cast(0.5 if mark is None else 1000, value.dtype)
        shape = [_ROWS, *(size if known is None else known for known in value.shape[1:])]
        sizes = np.linspace(0.1, 1.0, _ROWS).reshape([_ROWS] + [1] * (len(shape) - 1))
        made = random.uniform(size=shape) * sizes if value.dtype.is_floating else np.ones(shape)
        if next(are_targets, False):
            if mark is not None:
                made[np.random.RandomState(3).uniform(size=shape) < np.reshape(_MARKED, sizes.shape)] = mark
        elif value.dtype.is_floating and len(shape) > 1 and shape[-1] > 1:
            made[..., 1][np.random.RandomState(2).uniform(size=shape[:-1]) < 0.5] = 0.9
        return tf.cast(tf.constant(made), value.dtype)

    whole = keras.tree.map_structure(made_up, batch)
    parts = [
        keras.tree.map_structure(lambda v, rows=rows: v[rows] if tf.is_tensor(v) and v.shape.rank else v, whole)
        for rows in (slice(None, _FIRST), slice(_FIRST, None))
    ]
    return [whole, *parts]
