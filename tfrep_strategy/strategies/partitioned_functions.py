"""Functions of the user, such as the step of a training loop: traced as on one device, and shared by the replicas.

The place where a tensor is cut decides how fast a function is, never its result. So a function may be cut wherever that helps.

Functions may read data by `for x in data` and `next(iterator)`. Each process then reads all batches, and a replica takes its
rows of each.

A user's `tf.function` that trains is called as a `PartitionedFunction` if eager code calls it in the scope of a strategy, outside
replicas, and if it gets or draws rows and writes variables. All others stay as they are: exports, functions with `strategy.run`
in them, functions of libraries.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy.core.limits import verification
from tfrep_strategy.core.out_of_memory import note_out_of_memory
from tfrep_strategy.core.step import Shards
from tfrep_strategy.core.tf import (
    Function,
    OwnedIterator,
    asks_for_xla,
    converted_by_autograph,
    loops_of_autograph,
    tape_may_record,
)
from tfrep_strategy.data.agreement import Fingerprint
from tfrep_strategy.data.batches import bounds
from tfrep_strategy.data.pipeline_functions import rows_are_alike
from tfrep_strategy.errors import CannotPartitionError, ConfigurationError, message, warn
from tfrep_strategy.keras_integration.verified_calls import called
from tfrep_strategy.keras_integration.xla import compiled_at_once, compiled_between_collectives
from tfrep_strategy.partitioner import marks
from tfrep_strategy.partitioner.placements import REPLICATE, Shard
from tfrep_strategy.partitioner.step import Given
from tfrep_strategy.partitioner.values import OwnRows
from tfrep_strategy.strategies.one_device import OneDeviceTrace, hears_of_steps

_traced = threading.local()

Check = Callable[[Sequence[tf.Tensor]], None]
"""Refuses tensors that differ between ranks."""


@contextlib.contextmanager
def shared_reading(replicas: int, check: Check, alike: dict[int, bool], read: list[Any]) -> Iterator[None]:
    """Makes replicas share the batches that functions read, for functions that are traced in the block.

    Args:
        replicas: The number of replicas.
        check: Adds a comparison of the tensors that ranks have read.
        alike: Whether all tensors of a batch have equally many rows, by the id of each data set or iterator argument.
        read: The tensors whose rows replicas share are appended here.
    """
    _traced.now = replicas, check, alike, read
    try:
        yield
    finally:
        _traced.now = None


class SharedIterator(OwnedIterator):
    """An iterator argument of a function, in its trace: replicas share the batches that it reads.

    Args:
        traced: The iterator.
    """

    def __init__(self, traced: OwnedIterator) -> None:
        components = tf.nest.flatten(traced, expand_composites=True)
        super().__init__(components=components, element_spec=traced.element_spec)

    def __next__(self) -> Any:
        return self._shared(super().__next__())

    def get_next(self) -> Any:
        return self._shared(super().get_next())

    def _shared(self, element: Any) -> Any:
        change = _sharing(self)
        return element if change is None else change(element)


def have_rows_alike(data: Any) -> bool:
    """Returns whether all tensors of a batch of a data set, or of an iterator, are known to have equally many rows."""
    read = data if isinstance(data, tf.data.Dataset) else data._dataset
    return read is not None and rows_are_alike(read)


def _sharing(data: Any) -> Callable[[Any], Any] | None:
    """Returns a function that marks batches that are read; None if no function is traced for replicas."""
    now = getattr(_traced, "now", None)
    if now is None:
        return None
    replicas, check, alike, read = now
    known = alike.get(id(data))
    are_alike = have_rows_alike(data) if known is None else known

    def marked(element: Any) -> Any:
        tensors = tf.nest.flatten(element)
        if not all(isinstance(x, tf.Tensor) and x.dtype != tf.variant for x in tensors):
            return element
        check(tensors)
        places = [i for i, x in enumerate(tensors) if x.shape.rank]
        if places and are_alike:
            own = marks.batch([tensors[i] for i in places], replicas)
            read.extend(own)
            for place, rows in zip(places, own, strict=True):
                tensors[place] = rows
        return tf.nest.pack_sequence_as(element, tensors)

    return marked


_over_data, _over_iterator = loops_of_autograph._registry[tf.data.Dataset], loops_of_autograph._registry[OwnedIterator]


def loop(data: Any, extra_test: Any, body: Callable[[Any], Any], *state: Any) -> None:
    """Turns a loop over a data set into a loop of the graph over an iterator. TensorFlow would use functions of the data set."""
    change, is_data = _sharing(data), isinstance(data, tf.data.Dataset)
    if change is None:
        (_over_data if is_data else _over_iterator)(data, extra_test, body, *state)
    else:
        iterator = OwnedIterator(data) if is_data else data
        _over_iterator(iterator, extra_test, lambda element: body(change(element)), *state)


_READ = (tf.data.Dataset, OwnedIterator)


def partition(function: Callable[..., Any]) -> PartitionedFunction:
    """Makes the replicas of the strategy in scope share the work of a function that is written for one device.

    The function means the same as on one device: it gets whole batches, and sees one replica. It is traced as by
    `tf.function`, for each kind of arguments. Replicas share the rows of its arguments, and random numbers for equally
    many rows. All processes call it with the same arguments; the first of each kind are compared.

    Args:
        function: A Python function or a `tf.function`. Its arguments and results are nests of tensors; other arguments are
            constants of the trace.

    Returns:
        A function with the same arguments and results. The original function runs if no strategy with several replicas is in
        scope, in a replica, and inside another function. Under an open gradient tape each process computes all of it.

    Raises:
        ConfigurationError: `function` is not a function.
        DesyncError: Raised by a call: processes passed other arguments, or traced another program.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     total = tf.Variable(0.0)
        ...     @tfrep.partition
        ...     def step(x):
        ...         total.assign_add(tf.reduce_sum(x))
        ...         return tf.reduce_mean(x)
        ...     float(step(tf.range(8.0))), float(total)
        (3.5, 28.0)
    """
    if not callable(function):
        raise ConfigurationError(message("Only a function can be partitioned.", hint="pass the training step.", function=function))
    return function if isinstance(function, PartitionedFunction) else PartitionedFunction(function)


class PartitionedFunction:
    """The result of `partition`; see there.

    Args:
        function: The function.
        original: Calls the original function. If given, the function is partitioned only if it trains.
    """

    def __init__(self, function: Callable[..., Any], original: Callable[..., Any] | None = None) -> None:
        self._must_train = original is not None
        self._python: Callable[..., Any] = getattr(function, "python_function", function)
        self._name = getattr(self._python, "__qualname__", "a function")
        self._signature, self._compiled = getattr(function, "input_signature", None), asks_for_xla(function)
        self._original = original or (function if hasattr(function, "python_function") else tf.function(function))
        self._steps: dict[Any, _Step | _NotShared] = {}
        self._lock = threading.RLock()
        functools.update_wrapper(self, self._python)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Returns the function as a method of an object."""
        if owner is None:
            return self
        made = PartitionedFunction(self._original.__get__(owner, kind))
        name = getattr(self._python, "__name__", "")
        if name and getattr(kind, name, None) is self:
            vars(owner)[name] = made  # Its traces belong to the object.
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return called(self._name, self._call, args, kwargs)

    def call_original(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the original function, whose work replicas do not share. `tfrep verify` compares it as well."""
        return called(self._name, self._original, args, kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_here()
        if strategy is None:
            return self._original(*args, **kwargs)
        bound = inspect.signature(self._python).bind(*args, **kwargs)
        bound.apply_defaults()
        given = _Arguments.of((bound.args, bound.kwargs), self._signature)
        if not all(map(_fits, given.specs, given.tensors)):
            return self._original(*args, **kwargs)  # The original function raises the error.
        names = [name for name, value in bound.arguments.items() for _ in _dense(list(filter(_is_tensor, _leaves(value))))]
        key, extended = (id(strategy), given.key), strategy.extended
        with self._lock:
            if key not in self._steps:
                self._steps[key] = self._step(strategy, given, names)
            elif isinstance(self._steps[key], _Step):
                self._note_call(extended, given)
        step = self._steps[key]
        if isinstance(step, _NotShared):
            return self._original(*args, **kwargs)
        extended.synchronize_new_variables()
        extended.mark_state_changed()
        with extended.watching_peers():
            return step(given.tensors)

    def _note_call(self, extended: Any, given: _Arguments) -> None:
        """Reports a call to the other ranks, which must make it as well."""
        extended.note_call(f"{self._name}({', '.join(map(_described, given.tensors))})")

    def describe(self) -> list[str]:
        """Describes how the function is partitioned, for each kind of arguments that it was called with."""
        return [line for step in self._steps.values() for line in step.describe()]

    def _step(self, strategy: Any, given: _Arguments, names: Sequence[str]) -> _Step | _NotShared:
        """Returns the step for one kind of arguments."""
        extended, fingerprint = strategy.extended, Fingerprint({"arguments": given.tensors})
        name = self._name
        # In the very first call, ranks may pass other arguments, and compute their own.
        is_shared = any(isinstance(each, _Step) for each in self._steps.values())
        if not self._must_train:
            if is_shared:
                self._note_call(extended, given)
            extended.check_same(fingerprint)
        try:
            step = _Step(strategy, self._python, given, names, self._compiled, extended.name_of_step(name))
        except Exception:
            if self._must_train:  # The original function raises the error again when it is called.
                extended.forget_step()
                return _NotShared([])
            raise
        if self._must_train:
            if not step.trains:
                extended.forget_step()
                return _NotShared([])
            if is_shared:
                self._note_call(extended, given)
            if len(set(extended.all_gather_object(fingerprint.digest))) > 1:
                warn(
                    f"Ranks call {name} with different arguments, so each rank computes all of it for its own arguments.\n"
                    "Hint: give all ranks the same batches, so that they share the work; or set partition_functions=False."
                )
                return _NotShared(["Each process computes all of it, since ranks have called it with other arguments."])
        step.compare()
        return step


class _NotShared(NamedTuple):
    """Stands for a function that replicas do not share for one kind of arguments.

    Attributes:
        reason: The reason.
    """

    reason: list[str]

    def describe(self) -> list[str]:
        """Returns the reason."""
        return self.reason


def strategy_here() -> Any:
    """Returns the strategy in scope if it has several replicas and eager code outside replicas asks; else None.

    It also returns None under a gradient tape that is open around the call: the tape would not see the replicas' operations.
    """
    if not tf.executing_eagerly() or not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context() is False:
        return None
    strategy = tf.distribute.get_strategy()
    knows = hasattr(strategy.extended, "transport") and strategy.num_replicas_in_sync > 1
    return strategy if knows and not tape_may_record() else None


class _Arguments(NamedTuple):
    """The arguments of a call.

    Attributes:
        nest: All arguments.
        tensors: The arguments that are tensors.
        specs: The specifications of the tensors in a trace.
        are_rows: For each dense tensor in them, whether its first dimension holds the shared rows.
        alike: For each tensor, whether it is a data set or iterator whose batches have equally many rows in all tensors.
        key: Identifies the trace.
    """

    nest: Any
    tensors: list[Any]
    specs: list[Any]
    are_rows: tuple[bool, ...]
    alike: tuple[bool, ...]
    key: Any

    @classmethod
    def of(cls, nest: Any, signature: Any) -> _Arguments:
        """Sorts the arguments of a call.

        Args:
            nest: All arguments.
            signature: The input signature of the function; None if it is traced for each size.
        """
        flat = _leaves(nest)
        declared = tf.nest.flatten(signature) if signature else []
        if declared and len(declared) == len(flat):
            flat = [x if isinstance(x, tf.Variable) else tf.convert_to_tensor(x, spec.dtype) if _is_dense(spec) else x
                    for x, spec in zip(flat, declared, strict=True)]  # fmt: skip
        tensors = list(filter(_is_tensor, flat))
        specs = [tf.type_spec_from_value(x) for x in tensors]
        if declared and len(declared) == len(specs):
            specs = declared
        dense = _dense(tensors)
        rows = _number_of_rows(dense)
        are_rows = tuple(bool(x.shape.rank and x.shape[0] == rows) for x in dense)
        constants = tuple(_as_key(x) for x in flat if not _is_tensor(x))
        places = tuple(map(_is_tensor, flat))
        alike = tuple(isinstance(x, _READ) and have_rows_alike(x) for x in tensors)
        key = tuple(specs), are_rows, alike, constants, places
        return cls(tf.nest.pack_sequence_as(nest, flat), tensors, specs, are_rows, alike, key)

    def with_tensors(self, tensors: Sequence[Any]) -> Any:
        """Returns the arguments with the tensors replaced."""
        there = iter(tensors)
        flat = [next(there) if _is_tensor(x) else x for x in tf.nest.flatten(self.nest)]
        return tf.nest.pack_sequence_as(self.nest, flat)


class _Step:
    """A function, traced for one kind of arguments.

    Args:
        strategy: The strategy whose replicas run it.
        function: The function.
        given: Arguments.
        names: For each dense tensor in them, the name of its argument.
        compiled: Whether XLA compiles the operations between collectives.
        name: The name of the step, equal on all processes.

    Attributes:
        trains: Whether the function writes variables, has rows, and does not call `strategy.run`.
    """

    def __init__(
        self, strategy: Any, function: Callable[..., Any], given: _Arguments, names: Sequence[str], compiled: bool, name: str
    ) -> None:
        self._strategy, self._compiled = strategy, compiled
        extended = strategy.extended
        has_ranks = extended.num_local_replicas < extended._num_replicas_in_sync
        empty = self._kept = given.with_tensors([None] * len(given.tensors))  # The key has the ids of other arguments.
        converted = converted_by_autograph(function)
        places = [_is_tensor(x) for x in tf.nest.flatten(given.nest)]

        replicas, text = extended._num_replicas_in_sync, f"Ranks call {name} with other arguments:"
        read: list[Any] = []

        def check_read(tensors: Sequence[tf.Tensor]) -> None:
            if has_ranks:
                _refuse_others(_checksums(tensors), ["a batch of data that it reads"] * len(tensors), replicas, text)

        def traced(batch: Sequence[Any]) -> Any:
            tensors, sums = batch
            if has_ranks:
                _refuse_others(sums, [*names, "the function"], replicas, text)
            tensors = [SharedIterator(x) if isinstance(x, OwnedIterator) else x for x in tensors]
            there = iter(tensors)
            flat = [next(there) if is_tensor else x for x, is_tensor in zip(tf.nest.flatten(empty), places, strict=True)]
            args, kwargs = tf.nest.pack_sequence_as(empty, flat)
            alike = {id(x): is_alike for x, is_alike in zip(tensors, given.alike, strict=True) if isinstance(x, _READ)}
            with shared_reading(replicas // extended.model_size, check_read, alike, read):
                return converted(*args, **kwargs)

        step: Callable[[Any], Any] = compiled_between_collectives(traced) if compiled else traced
        of_process = [x.dtype == tf.resource for x in _dense(given.tensors)]  # An iterator.
        shared = [
            Given(Shard(0) if is_row else REPLICATE, is_shared=is_shared, is_whole=True)
            for is_row, is_shared in zip(given.are_rows, of_process, strict=True)
        ]
        specs = given.specs, tf.TensorSpec([len(shared) + 1], tf.int64)
        try:
            self._trace = OneDeviceTrace(strategy, step, specs, [*shared, Given()])
        except CannotPartitionError as error:
            warn(f"Each process computes all of {name}. This is correct, but no faster than one device.\n{error}")
            self._trace = OneDeviceTrace(strategy, step, specs, [Given()] * (len(shared) + 1))
        self._checksum = tf.constant(zlib.crc32(name.encode()), tf.int64)
        self._name, self._place = name, given.are_rows.index(True) if True in given.are_rows else None
        of_one_device = self._trace.step
        has_rows = of_one_device.rows is not None or bool(read) or any(x.shape.rank for x in _dense(given.tensors))
        self.trains = has_rows and of_one_device.writes and not self._trace.is_for_replicas
        if self.trains and hears_of_steps.value is not None:
            hears_of_steps.value(self._trace, of_one_device.rows or _rows_of(given, self._place))
        self._run = tf.function(self._on_replicas, autograph=False)

    def __call__(self, tensors: Sequence[Any]) -> Any:
        extended = self._strategy.extended
        with extended.partitioned_by(None, self._compiled), compiled_at_once() if self._compiled else contextlib.nullcontext():
            return self._run(_dense(tensors))

    def compare(self) -> None:
        """Refuses a function that other ranks have traced differently. Each rank calls it before it runs the function."""
        self._strategy.extended.transport.compare(self._name, self._trace.step)

    def describe(self) -> list[str]:
        """Describes how the function is partitioned."""
        return self._trace.describe()

    def _on_replicas(self, tensors: Sequence[tf.Tensor]) -> Any:
        extended = self._strategy.extended
        first, size = extended.first_local_replica, extended._num_replicas_in_sync
        total: Any = self._trace.step.rows or 0
        if self._place is not None and not total:
            total = tf.shape(tensors[self._place])[0]
        rows = []
        for replica in range(first, first + extended.num_local_replicas):
            start, stop = bounds(total, size // extended.model_size, replica // extended.model_size)
            rows.append(OwnRows(*map(tf.convert_to_tensor, (start, stop - start, total, replica))))
        sums = tf.concat([_checksums(tensors), [self._checksum]], 0)
        return self._trace.run(rows, [[*tensors, sums]] * len(rows)).whole_results().results


def _rows_of(given: _Arguments, place: int | None) -> int | None:
    """Returns how many rows the arguments have, or else the next batch of the data that is among them."""
    if place is not None:
        return int(_dense(given.tensors)[place].shape[0])
    data = next((x for x in given.tensors if isinstance(x, _READ)), None)
    batch = [] if data is None else [x for x in _dense([next(iter(data))]) if x.shape.rank]
    return int(batch[0].shape[0]) if batch else None


def _checksums(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.stack(list(map(checksum, tensors))) if tensors else tf.zeros([0], tf.int64)


def checksum(tensor: tf.Tensor) -> tf.Tensor:
    """Returns an int64 number that differs for other values, or the same in another order; 0 for data sets and iterators."""
    if not _is_comparable(tensor):
        return tf.constant(0, tf.int64)
    if tensor.dtype == tf.string:
        bits = tf.strings.to_hash_bucket_fast(tensor, 2**62)
    elif tensor.dtype.is_floating:
        bits = tf.bitcast(tensor, {2: tf.int16, 4: tf.int32, 8: tf.int64}[tensor.dtype.size])
    elif tensor.dtype.is_complex:
        return checksum(tf.math.real(tensor)) + 3 * checksum(tf.math.imag(tensor))
    else:
        bits = tensor
    flat = tf.cast(tf.reshape(bits, [-1]), tf.int64)
    return tf.reduce_sum(flat * (2 * tf.range(tf.size(flat, tf.int64)) + 1))


def _described(given: Any) -> str:
    """Returns the description of an argument that a call reports to the other ranks."""
    if not isinstance(given, tf.Tensor):
        return type(given).__name__
    return f"{given.dtype.name}[{', '.join(map(str, given.shape))}]"


def _is_comparable(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor has a value that ranks can compare."""
    return tensor.dtype not in (tf.variant, tf.resource)


def _refuse_others(sums: tf.Tensor, names: Sequence[str], replicas: int, text: str) -> None:
    """Makes a step fail on all ranks if their tensors differ. The comparison travels with the first gradients of the step.

    Args:
        sums: The checksum of each tensor.
        names: The name of each tensor.
        replicas: The number of replicas.
        text: The text of the error.
    """
    words = tf.cast(tf.bitcast(sums, tf.uint8), tf.float32)  # Sums of 65,536 bytes are exact.
    own = words + tf.cast(marks.replica(), tf.float32) * 0
    differs = tf.reduce_any(tf.not_equal(marks.addend(own), words * replicas), 1)
    named = tf.boolean_mask(tf.constant(list(names), tf.string, [len(names)]), differs)
    tf.debugging.Assert(tf.logical_not(tf.reduce_any(differs)), [text, named])


def _number_of_rows(tensors: Sequence[tf.Tensor]) -> int | None:
    """Returns the size of the first dimension that most elements of the tensors have."""
    sizes: collections.Counter[int] = collections.Counter()
    for each in tensors:
        if each.shape.rank and each.shape[0] > 1:
            sizes[each.shape[0]] += each.shape.num_elements()
    return max(sizes, key=lambda size: sizes[size]) if sizes else None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices, *_READ))


def _leaves(nest: Any) -> list[Any]:
    return [tf.convert_to_tensor(x) if isinstance(x, (np.ndarray, np.generic)) else x for x in tf.nest.flatten(nest)]


def _dense(tensors: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the dense tensors inside tensors."""
    return list(tf.nest.flatten(list(tensors), expand_composites=True))


def _fits(spec: Any, tensor: Any) -> bool:
    return bool(spec.is_compatible_with(tensor))


def _is_dense(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec)


def _as_key(value: Any) -> Any:
    """Returns the key of a constant of a trace: its type and value, or its id."""
    return (type(value), value) if isinstance(value, (bool, int, float, str, bytes, type(None))) else id(value)


_LIBRARIES = ("tensorflow", "keras", "tfrep_strategy")
_candidates: weakref.WeakKeyDictionary[Any, PartitionedFunction | None] = weakref.WeakKeyDictionary()
_original_call = Function.__call__


def candidate(function: Any) -> PartitionedFunction | None:
    """Returns the partitioned version of a `tf.function` that is called in a scope; None if it belongs to a library."""
    if function not in _candidates:
        module = str(getattr(inspect.unwrap(function.python_function), "__module__", None) or "")
        is_users = module.partition(".")[0] not in _LIBRARIES
        # It must not keep alive the function, which is the key.
        original = functools.partial(_call, weakref.ref(function))
        _candidates[function] = PartitionedFunction(function, original) if is_users else None
    return _candidates[function]


def _call(function: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    return _original_call(function(), *args, **kwargs)


@functools.wraps(_original_call)
def call_in_scope(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a `tf.function`. Replicas share its work if it is the user's, and is called in a scope."""
    strategy = strategy_here() if threading.current_thread() is threading.main_thread() else None
    shares = strategy is not None and _shares(strategy)
    found = candidate(function) if shares or verification() is not None else None
    try:
        if found is None or any(map(_is_distributed, (*args, *kwargs.values()))):
            return _original_call(function, *args, **kwargs)
        return found(*args, **kwargs) if shares else found.call_original(*args, **kwargs)
    except tf.errors.OpError as error:
        note_out_of_memory(error)
        raise


def _shares(strategy: Any) -> bool:
    """Returns whether all processes make the same calls as this one, with the same arguments."""
    is_alone = strategy.extended.reads_alone  # As in a callback that one process runs by itself.
    return strategy.partition_functions and not is_alone and getattr(strategy, "rank_data", "same") != "own"


def _is_distributed(argument: Any) -> bool:
    """Returns whether an argument is distributed data, or a value of each replica."""
    if isinstance(argument, (Shards, tf.distribute.DistributedDataset)):
        return True
    if hasattr(argument, "__next__") and not isinstance(argument, OwnedIterator):
        return True
    return any(isinstance(x, tf.distribute.DistributedValues) and not isinstance(x, tf.Variable) for x in tf.nest.flatten(argument))
