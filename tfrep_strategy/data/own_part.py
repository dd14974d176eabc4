"""Lets a process compute only its own examples of a pipeline that all processes read.

A step takes one global batch, and each process needs a part of it. The batch is cut as low in the pipeline as possible, if the part
stays equal to that of a cut at the end: below maps that treat each row independently, below `batch`, and below
maps of single examples. Operations below the cut (file names, shuffling, records) run in every process, which keeps the order
of one device. Operations above it run only for the own examples.

If the sizes of batches are known beforehand, they are in data sets, not in functions: TensorFlow optimizes each function of a
pipeline whenever an iterator starts, in every epoch and process. A function of more than three operations takes 2 to 7 ms of CPU
time for that.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrep_strategy.core.step import Shards
from tfrep_strategy.core.tf import dataset_from_tensors, dataset_to_tensors, is_none, parts_of_dataset
from tfrep_strategy.core.tf import dataset_kinds as kinds
from tfrep_strategy.data.agreement import FirstBatch
from tfrep_strategy.data.batches import as_element, bounds, empty_batch, has_open_sizes, shard, take_rows
from tfrep_strategy.data.pipeline_functions import (
    COUNTING,
    changed_below,
    first_stateful_operation,
    has_rows,
    is_same_in_every_step,
    makes_maps,
    of_any_size,
    parts_fit,
)

_MOST_BYTES = 64 * 2**20
_IGNORE_STATE = 1  # tensorflow::data::ExternalStatePolicy::POLICY_IGNORE


class ShuffledAlike(kinds.Shuffle):
    """A data set in the order that another shuffle gives to its elements, in this epoch and in all later ones.

    A shuffle has a generator, which gives each epoch another order. It belongs to the data set, and may have been used before.
    Both data sets draw from it, so that an epoch of either counts.

    Args:
        shuffle: The data set that shuffles.
        below: A data set with equally many elements as it reads.
        generator: The result of `seed_generator` for `shuffle`.
    """

    def __init__(self, shuffle: Any, below: tf.data.Dataset, generator: tf.Tensor) -> None:
        self._original = shuffle  # Keeps the generator alive.
        self._input_dataset = below
        self._buffer_size = shuffle._buffer_size
        self._seed, self._seed2 = shuffle._seed, shuffle._seed2
        self._reshuffle_each_iteration = shuffle._reshuffle_each_iteration
        self._name = shuffle._name
        variant = tf.raw_ops.ShuffleDatasetV3(
            input_dataset=tf.data.experimental.to_variant(below),
            buffer_size=self._buffer_size,
            seed=self._seed,
            seed2=self._seed2,
            seed_generator=generator,
            reshuffle_each_iteration=self._reshuffle_each_iteration,
            **self._common_args,
        )
        super(kinds.Shuffle, self).__init__(below, variant)


def seed_generator(shuffle: Any) -> tf.Tensor | None:
    """Returns the generator from which a shuffle draws the order of each epoch.

    If all epochs have the same order, it follows from the seeds. Otherwise TensorFlow names the generator only in the description
    of the data set, which contains all arrays that the data set reads.

    Args:
        shuffle: A data set that shuffles.

    Returns:
        A scalar of dtype `tf.resource`; None if the description would be too large, or TensorFlow cannot make one.
    """
    if shuffle._reshuffle_each_iteration is False:  # None means True.
        return tf.raw_ops.DummySeedGenerator()
    if _bytes_described(shuffle) > _MOST_BYTES:
        return None
    source = tf.data.experimental.to_variant(shuffle)
    try:
        described = tf.raw_ops.DatasetToGraphV2(input_dataset=source, external_state_policy=_IGNORE_STATE)
    except tf.errors.OpError:  # An operation below has no description, such as a copy to a device.
        return None
    nodes = {node.name: node for node in tf.compat.v1.GraphDef.FromString(described.numpy()).node}
    result = next(node for node in nodes.values() if node.op == "_Retval")
    generator = nodes[_node_of(nodes[_node_of(result.input[0])].input[4])]
    return tf.io.parse_tensor(generator.attr["value"].tensor.SerializeToString(), tf.resource)


def _node_of(tensor: str) -> str:
    return tensor.split(":")[0]


def _bytes_described(dataset: tf.data.Dataset) -> int:
    tensors: list[tf.Tensor] = []
    for part in parts_of_dataset(dataset):
        tensors += getattr(part, "_tensors", ())
        tensors += [captured for each in part._functions() for captured in each.function.captured_inputs]
    return sum(_bytes_of(tensor) for tensor in tensors if tensor.dtype != tf.resource)


def _bytes_of(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(tensor)))
    return int(tf.size(tensor)) * int(tensor.dtype.size)


class Map(NamedTuple):
    """A map of single examples.

    Attributes:
        name: Its name, for explanations.
        function: Maps an element to an element.
        parallel_calls: Number of parallel calls; None for sequential calls.
    """

    name: str
    function: Callable[[Any], Any]
    parallel_calls: int | None

    def on(self, rows: tf.data.Dataset) -> tf.data.Dataset:
        """Maps a data set, in order."""
        spec = rows.element_spec

        @tf.autograph.experimental.do_not_convert
        def mapped(*components: Any) -> Any:
            return self.function(as_element(spec, components))

        return rows.map(mapped, self.parallel_calls, deterministic=None if self.parallel_calls is None else True)


class Lifted(NamedTuple):
    """A data set without some of its maps.

    Attributes:
        source: The data set without these maps.
        maps: The maps. `source`, mapped by them in order, has the elements of the data set.
    """

    source: tf.data.Dataset
    maps: tuple[Map, ...] = ()


class Batches(NamedTuple):
    """The number of rows of each batch.

    Attributes:
        rows: Number of rows of the whole data set; negative if it has no end.
        size: Number of rows of a full batch.
        drops: Whether a last batch with fewer rows is dropped.
    """

    rows: int
    size: int
    drops: bool

    def each(self, value: Callable[[int], Any]) -> tf.data.Dataset:
        """Returns a data set with `value(rows)` for each batch."""
        full = tf.data.Dataset.from_tensors(value(self.size))
        if self.rows < 0:
            return full.repeat()
        number, rest = divmod(self.rows, self.size)
        values = full.repeat(number)
        return values if not rest or self.drops else values.concatenate(tf.data.Dataset.from_tensors(value(rest)))


def are_known(batches: Batches, place: Any, spec: Any) -> bool:
    """Returns whether `own_batches` can read these batches.

    Args:
        batches: The rows of the batches.
        place: The replicas of this process.
        spec: The specification of a batch. A part without rows needs the sizes of all other dimensions.
    """
    if place.local > 1 or batches.size < place.total or batches.rows == tf.data.UNKNOWN_CARDINALITY:
        return False
    return not (_last_part_is_empty(batches, place) and has_open_sizes(spec))


def own_batches(lifted: Lifted, batches: Batches, place: Any) -> tf.data.Dataset:
    """Takes the own rows of each batch, and maps them.

    Args:
        lifted: The rows of all batches, and their maps.
        batches: The rows of the batches; `are_known` is true for them.
        place: The replica of this process.

    Returns:
        A data set of `Shards` with one part.
    """

    def own(rows: int) -> tuple[tf.Tensor, tf.Tensor]:
        start, stop = bounds(rows, place.total, place.first)
        return tf.constant(start, tf.int64), tf.constant(stop - start, tf.int64)

    @tf.autograph.experimental.do_not_convert
    def own_rows(window: Any, limits: tuple[tf.Tensor, tf.Tensor]) -> tf.data.Dataset:
        rows = window if isinstance(window, tf.data.Dataset) else tf.data.Dataset.zip(window)
        return rows.skip(limits[0]).take(limits[1])

    windows = lifted.source.window(batches.size, drop_remainder=batches.drops)
    rows = tf.data.Dataset.zip((windows, batches.each(own))).flat_map(own_rows)
    for each in lifted.maps:
        rows = each.on(rows)
    start, stop = bounds(batches.size, place.total, place.first)
    parts = rows.batch(stop - start, drop_remainder=batches.drops)
    if _last_part_is_empty(batches, place):
        parts = parts.concatenate(tf.data.Dataset.from_tensors(empty_batch(parts.element_spec)))

    @tf.autograph.experimental.do_not_convert
    def shards(part: Any, total: tf.Tensor) -> Shards:
        return Shards((part,), total, tf.constant(True))

    totals = batches.each(lambda rows: tf.constant(rows, tf.int64))
    return tf.data.Dataset.zip((parts, totals)).map(shards)


def _last_part_is_empty(batches: Batches, place: Any) -> bool:
    """Returns whether the last batch is too short to have a row for this process."""
    rest = 0 if batches.rows < 0 or batches.drops else batches.rows % batches.size
    start, stop = bounds(rest, place.total, place.first)
    return rest > 0 and start == stop


_BATCHES = (kinds.Batch, kinds.ParallelBatch)
_MAPS = (kinds.Map, kinds.ParallelMap)


class OwnReplicas(NamedTuple):
    """The replicas of this process among all.

    Attributes:
        total: Number of replicas of all processes.
        first: The id of the first replica of this process.
        local: Number of replicas of this process.
    """

    total: int
    first: int
    local: int


class CutDataset(NamedTuple):
    """A pipeline that computes the parts of one process.

    Attributes:
        dataset: A data set of `Shards`.
        above: The operations above the cut, from the last of the pipeline down. A process computes them for its own part.
        reason: The reason why a map is computed for all examples, and how to change that; empty if none is.
    """

    dataset: tf.data.Dataset
    above: tuple[str, ...]
    reason: str


def cut_low(dataset: tf.data.Dataset, place: OwnReplicas, first_batch: FirstBatch | None, most: int | None = None) -> CutDataset:
    """Cuts the batches of a pipeline for the replicas of this process, as low in the pipeline as possible.

    Args:
        dataset: A data set of global batches.
        place: The replicas of this process.
        first_batch: Records the first batch where it is cut, so that the processes can compare it.
        most: The largest number of batches that will be read. Maps below a lower cut then do not run ahead of it.

    Returns:
        The data set of `Shards`, with a description. Its steps equal those of a cut at the end, bit by bit.
    """
    cutter = _Cutter(place, first_batch, most)
    shards = cutter.batches(dataset)
    return CutDataset(shards.with_options(dataset.options()), tuple(cutter.above), cutter.reason)


def maps_examples(dataset: tf.data.Dataset) -> bool:
    """Returns whether a data set of batches maps single examples, which is usually the main cost."""
    return any(_has_maps(part) for part in parts_of_dataset(dataset) if isinstance(part, _BATCHES))


def cutting(dataset: tf.data.Dataset, place: OwnReplicas) -> Callable[..., Shards]:
    """Returns the function for `map` that cuts whole batches of a data set."""
    spec, fits = dataset.element_spec, True if parts_fit(dataset, place.total) else None

    @tf.autograph.experimental.do_not_convert
    def cut(*components: Any) -> Shards:
        return shard(as_element(spec, components), *place, fits)

    return cut


class _Cutter:
    """Walks down a pipeline to the lowest possible cut, and rebuilds the pipeline from there."""

    def __init__(self, place: OwnReplicas, first_batch: FirstBatch | None, most: int | None) -> None:
        self._place = place
        self._first_batch = first_batch
        self._most = most
        self.above: list[str] = []
        self.reason = ""

    def batches(self, dataset: Any) -> tf.data.Dataset:
        """Returns the `Shards` of a data set of global batches."""
        if isinstance(dataset, kinds.Options):
            return self.batches(dataset._input_dataset)
        if isinstance(dataset, COUNTING):
            self._most = None  # The number of elements below differs.
        if isinstance(dataset, (kinds.Prefetch, *COUNTING)):
            return _again(dataset, self.batches(dataset._input_dataset))
        if isinstance(dataset, kinds.Zip) and parts_fit(dataset, self._place.total):
            return self._zipped(dataset)
        if isinstance(dataset, _MAPS):
            of_rows, mixing = of_any_size(dataset)
            if mixing is None:
                self.above.append(_name(dataset))
                return self._mapped(dataset, _function(of_rows))
            what = f"`{_name(dataset)}` gets whole batches, and may mix their rows or draw numbers ({mixing})"
            self._say(dataset, f"{what}; map single examples, before `batch`")
        elif isinstance(dataset, _BATCHES):
            examples = _Examples()
            lifted = examples.lift(dataset._input_dataset)
            self.reason = self.reason or examples.reason
            if lifted.maps and _is_as_large_as_its_largest(dataset):
                self._say(dataset, "the size of a batch of sparse examples is that of its largest; give all one shape")
            elif lifted.maps and any(map(is_none, tf.nest.flatten(lifted.source.element_spec))):
                self._say(dataset, "TensorFlow makes no windows of examples with None; leave it out")
            elif lifted.maps:
                self.above += ["batch", *(each.name for each in reversed(lifted.maps))]
                return self._batched(dataset, lifted)
        else:
            self._say(dataset, f"`{_kind(dataset)}` comes after `batch`; write it before `map`")
        return self._here(dataset)

    def _say(self, dataset: tf.data.Dataset, reason: str) -> None:
        """Records why a data set is computed as a whole, if that is costly because it maps single examples."""
        if maps_examples(dataset):
            self.reason = self.reason or reason

    def _here(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Cuts whole batches, and records the first one."""
        return self._cut(dataset if self._first_batch is None else self._first_batch.noted(dataset))

    def _cut(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        cut = cutting(dataset, self._place)
        return dataset.map(cut, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def _zipped(self, dataset: Any, for_rows: bool = False) -> tf.data.Dataset:
        """Cuts each of several zipped data sets.

        Args:
            dataset: A data set that zips others.
            for_rows: Whether the result is for a map of rows, which takes elements that are equal in every step unchanged.
        """

        def cut(each: Any) -> tf.data.Dataset:
            if is_same_in_every_step(each):
                return each if for_rows else self._cut(each)
            return self.batches(each)

        @tf.autograph.experimental.do_not_convert
        def joined(*elements: Any) -> Shards:
            return self._joined(dataset, elements)

        return tf.data.Dataset.zip(tuple(map(cut, dataset._inputs()))).map(joined)

    def _joined(self, dataset: Any, elements: Sequence[Any]) -> Shards:
        """Joins the elements of zipped data sets. `Shards` have a part for each replica; other elements are in all parts."""

        def part(i: int) -> Any:
            own = [element.parts[i] if isinstance(element, Shards) else element for element in elements]
            return tf.nest.pack_sequence_as(dataset._datasets, own)

        cut = [(element, each) for element, each in zip(elements, dataset._inputs(), strict=True) if isinstance(element, Shards)]
        with_rows = [element for element, each in cut if has_rows(each)] or [cut[0][0]]
        total = with_rows[0].total
        alike = tf.reduce_all([each.alike & tf.equal(each.total, total) for each in with_rows])
        return Shards(tuple(map(part, range(self._place.local))), total, alike)

    def _mapped(self, dataset: Any, function: Callable[[Any], Any]) -> tf.data.Dataset:
        """Maps the parts instead of the batches.

        Args:
            dataset: A data set that maps batches.
            function: The map, for any number of rows.
        """
        below = dataset._input_dataset
        is_zipped = isinstance(below, kinds.Zip)
        picks = self._first_batch is None and is_zipped and any(map(is_same_in_every_step, below._inputs()))

        @tf.autograph.experimental.do_not_convert
        def mapped(shards: Shards) -> Shards:
            return shards._replace(parts=tuple(map(function, shards.parts)))

        @tf.autograph.experimental.do_not_convert
        def cut_and_mapped(*components: Any) -> Shards:
            elements = tf.__internal__.nest.flatten_up_to(below._datasets, as_element(below.element_spec, components))
            pairs = zip(elements, below._inputs(), strict=True)
            cut = [element if is_same_in_every_step(each) else shard(element, *self._place) for element, each in pairs]
            return mapped(self._joined(below, cut))

        # Keras picks the rows of arrays by batches of indices. Here one operation costs less per epoch than three.
        if picks and not maps_examples(below):
            source, run = below, cut_and_mapped
        else:
            source, run = self._zipped(below, for_rows=True) if is_zipped else self.batches(below), mapped
        return source.map(run, num_parallel_calls=_parallel_calls(dataset), deterministic=_order(dataset))

    def _batched(self, dataset: Any, lifted: Lifted) -> tf.data.Dataset:
        """Takes the own examples of each batch before they are mapped."""
        total, first, count = self._place
        size, drops = int(dataset._batch_size), bool(dataset._drop_remainder)
        if self._most is not None:
            lifted = lifted._replace(source=lifted.source.take(self._most * size))
        known = Batches(int(lifted.source.cardinality()), size, drops)
        if self._first_batch is None and _tells_its_end(lifted.source) and are_known(known, self._place, dataset.element_spec):
            return own_batches(lifted, known, self._place)

        # Each operation in a function makes the start of an iterator slower, in every epoch.
        parts_of_all = np.arange(first, first + count + 1)

        def limits(number: Any) -> Any:
            """Returns the starts of the own parts of a batch, and the end of the last one."""
            return parts_of_all * (number // total) + tf.minimum(parts_of_all, number % total)

        @tf.autograph.experimental.do_not_convert
        def own_rows(index: tf.Tensor, window: Any) -> tf.data.Dataset:
            rows = window if isinstance(window, tf.data.Dataset) else tf.data.Dataset.zip(window)
            number = rows.cardinality()
            if self._first_batch is not None:
                number = self._first_batch.noted_rows(index, rows, number)
            own = limits(number)
            # Each batch needs a row, even if the part has none and the row is unused: the data must end with the batches.
            start = tf.minimum(own[0], number - 1)
            number_and_limits = tf.concat([[number], own - own[0]], 0)
            return tf.data.Dataset.zip((rows.skip(start).take(tf.maximum(own[-1] - start, 1)), _always(number_and_limits)))

        # Uses the size of the own part of a full batch. Only the last batch may be shorter, so every batch is complete.
        start, stop = bounds(size, total, first)[0], bounds(size, total, first + count - 1)[1]
        rows = lifted.source.window(size, drop_remainder=drops).enumerate().flat_map(own_rows)
        for each in lifted.maps:
            in_order = None if each.parallel_calls is None else True
            rows = rows.map(_beside(each.function), each.parallel_calls, deterministic=in_order)
        whole = rows.batch(max(stop - start, 1), drop_remainder=drops)

        @tf.autograph.experimental.do_not_convert
        def parts(batch: Any, number_and_limits: tf.Tensor) -> Shards:
            if drops and count == 1:
                part = take_rows(batch, 0, stop - start)  # Has a known size.
                return Shards((part,), number_and_limits[0, 0], tf.constant(True))
            number, *own = tf.unstack(number_and_limits[0], count + 2)
            return Shards(tuple(take_rows(batch, *pair) for pair in itertools.pairwise(own)), number, tf.constant(True))

        return whole.map(parts, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


class _Examples:
    """Takes maps out of a data set of single examples. They can run last if the operations above do not use the examples."""

    def __init__(self) -> None:
        self.reason = ""

    def lift(self, dataset: Any) -> Lifted:
        """Returns the data set without the maps that can run last, and these maps."""
        if isinstance(dataset, _MAPS):
            stateful = first_stateful_operation(dataset._map_func.function) or changed_below(dataset)
            if stateful is None:
                below = self.lift(dataset._input_dataset)
                return Lifted(below.source, (*below.maps, Map(_name(dataset), _function(dataset), _parallel_calls(dataset))))
            what = f"the results of `{_name(dataset)}` may depend on the order of its calls ({stateful})"
            instead = "use operations without state, such as `tf.random.stateless_uniform`"
            self.reason = self.reason or f"{what}, which are made one at a time; {instead}"
        elif isinstance(dataset, (kinds.Options, kinds.Prefetch)):
            below = self.lift(dataset._input_dataset)
            return below if below.maps else Lifted(dataset)
        elif isinstance(dataset, COUNTING):
            below = self.lift(dataset._input_dataset)
            return Lifted(_again(dataset, below.source), below.maps) if below.maps else Lifted(dataset)
        elif isinstance(dataset, kinds.Zip):
            return self._lift_each(dataset)
        elif isinstance(dataset, kinds.Shuffle):
            below = self.lift(dataset._input_dataset)
            generator = seed_generator(dataset) if below.maps else None
            if generator is not None:
                return Lifted(ShuffledAlike(dataset, below.source, generator), below.maps)
            if below.maps:
                what = f"`shuffle` comes after `{below.maps[-1].name}`, and its order is not known"
                self.reason = self.reason or f"{what} (large arrays, or copies to devices); write `shuffle` before `map`"
        elif _makes_maps(dataset):
            self.reason = self.reason or f"`{_kind(dataset)}` maps in its function; write `map` after it"
        elif _has_maps(dataset):
            self.reason = self.reason or f"`{_kind(dataset)}` comes after `map`; write it before"
        return Lifted(dataset)

    def _lift_each(self, dataset: Any) -> Lifted:
        each = [self.lift(part) for part in dataset._inputs()]
        maps = [m for lifted in each for m in lifted.maps]
        if not maps:
            return Lifted(dataset)

        def mapped(elements: Any) -> Any:
            mapped_ones = []
            for element, lifted in zip(tf.__internal__.nest.flatten_up_to(dataset._datasets, elements), each, strict=True):
                for one in lifted.maps:
                    element = one.function(element)
                mapped_ones.append(element)
            return tf.nest.pack_sequence_as(dataset._datasets, mapped_ones)

        parallel = [m.parallel_calls for m in maps if m.parallel_calls is not None]
        together = Map(" and ".join(m.name for m in maps), mapped, parallel[0] if parallel else None)
        source = tf.data.Dataset.zip(tf.nest.pack_sequence_as(dataset._datasets, [lifted.source for lifted in each]))
        return Lifted(source, (together,))


def _tells_its_end(dataset: tf.data.Dataset) -> bool:
    """Returns whether the cardinality of a data set shows its end. Choosing from data sets is endless if one of them is."""
    is_endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    return not is_endless or not any(isinstance(part, kinds.Chosen) for part in parts_of_dataset(dataset))


def _again(dataset: Any, below: tf.data.Dataset) -> tf.data.Dataset:
    """Applies an operation that only counts elements to another data set."""
    if isinstance(dataset, kinds.Take):
        return below.take(dataset._count)
    if isinstance(dataset, kinds.Skip):
        return below.skip(dataset._count)
    return below.repeat(dataset._count) if isinstance(dataset, kinds.Repeat) else below.prefetch(int(dataset._buffer_size))


def _function(dataset: Any) -> Callable[[Any], Any]:
    """Returns the function of a map for one element: the one that TensorFlow has traced, with its seeds."""
    traced, spec = dataset._map_func, dataset._input_dataset.element_spec
    return lambda element: dataset_from_tensors(traced.output_structure, traced.function(*dataset_to_tensors(spec, element)))


def _beside(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a function that maps the first of two values and passes the second on."""

    @tf.autograph.experimental.do_not_convert
    def mapped(element: Any, passed_on: tf.Tensor) -> tuple[Any, tf.Tensor]:
        return function(element), passed_on

    return mapped


def _is_as_large_as_its_largest(dataset: Any) -> bool:
    """Returns whether the size of a batch depends on all of its examples, as for sparse ones of different sizes."""
    specs = tf.nest.flatten(dataset._input_dataset.element_spec)
    return any(isinstance(leaf, tf.SparseTensorSpec) and not leaf.shape.is_fully_defined() for leaf in specs)


def _always(value: tf.Tensor) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(value).repeat()


def _has_maps(dataset: tf.data.Dataset) -> bool:
    """Returns whether there is a map of the user. TensorFlow makes some itself, such as in `unbatch`."""
    maps = (part._map_func._func for part in parts_of_dataset(dataset) if isinstance(part, _MAPS))
    return any(not str(getattr(function, "__module__", "")).startswith("tensorflow.") for function in maps)


def _makes_maps(dataset: Any) -> bool:
    """Returns whether the function of an operation makes data sets that map their elements."""
    return hasattr(dataset, "_map_func") and makes_maps(dataset._map_func.function)


def _parallel_calls(dataset: Any) -> int | None:
    return int(dataset._num_parallel_calls) if isinstance(dataset, kinds.ParallelMap) else None


def _order(dataset: Any) -> bool | None:
    return True if isinstance(dataset, kinds.ParallelMap) else None


def _kind(dataset: Any) -> str:
    name = type(dataset).__name__.strip("_").removesuffix("Dataset").removesuffix("V2").removeprefix("Parallel")
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _name(dataset: Any) -> str:
    function = getattr(dataset._map_func._func, "__name__", "")
    return f"map({function})" if function and function != "<lambda>" else "map"
