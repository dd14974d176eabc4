"""What every replica runs in the tests of the collectives, and what one device with all their values would get."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfrep_strategy as tfrep
from tfrep_strategy.errors import ConfigurationError

NUMBERS = ["float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
           "uint64", "complex64", "complex128"]  # fmt: skip
DTYPES = [*NUMBERS, "bool", "string"]
FEW = ["float32", "int64", "bool", "string"]
DIFFERENTIABLE = ["float16", "bfloat16", "float32", "float64", "complex64"]
OPS = ["sum", "mean", "min", "max", "product"]
MODES = ["eager", "layer", "function", "cond", "while", "nested"]


def can(dtype, op):
    if dtype == "string":
        return False
    if dtype == "bool":
        return op in ("min", "max")
    return not (dtype.startswith("complex") and op in ("min", "max"))


def splits_of(size):
    return [1] * (size - 1) + [5 - size]


def value(dtype, replica, rows=4):
    """Small whole numbers, so that sums and products are exact in every dtype; shape [rows, 3]."""
    numbers = (np.arange(rows * 3).reshape(rows, 3) + 5 * replica) % 3 + 1
    if dtype == "string":
        return np.array([[f"r{replica}" + "é" * int(n) for n in row] for row in numbers], dtype=object).reshape(rows, 3)
    if dtype == "bool":
        return numbers > 1
    if dtype.startswith("complex"):
        return (numbers + 1j * (replica - 1)).astype(dtype)
    return numbers.astype(tf.dtypes.as_dtype(dtype).as_numpy_dtype)


def tensors(replica, dtypes, rows=4):
    return {dtype: tf.constant(value(dtype, replica, rows), dtype) for dtype in dtypes}


def forward(x, ragged, size, group=None):
    """Calls every primitive on a nest of tensors, one of each dtype that it takes.

    Returns the results by primitive, option and dtype, such as `"all_reduce sum float32"`.
    """
    out = {}

    def add(name, nest):
        out.update({f"{name} {dtype}": tensor for dtype, tensor in nest.items()})

    for op in OPS:
        some = {dtype: v for dtype, v in x.items() if can(dtype, op)}
        add(f"all_reduce {op}", tfrep.all_reduce(some, op, group=group))
        add(f"reduce_scatter {op}", tfrep.reduce_scatter(some, op, group=group))
    add("all_gather rows", tfrep.all_gather(ragged, group=group))
    add("all_gather columns", tfrep.all_gather(x, axis=-1, group=group))
    add("all_gather stack", tfrep.all_gather(x, stack=True, group=group))
    add("broadcast last", tfrep.broadcast(x, size - 1 if group is None else group.replicas[-1], group=group))
    rows, out["all_to_all received int32"] = tfrep.all_to_all(x, splits_of(size), group=group)
    add("all_to_all splits", rows)
    if 4 % size == 0:
        add("all_to_all even", tfrep.all_to_all(x, group=group))
    mapped = tfrep.map_gather(lambda i: {dtype: v[i] for dtype, v in x.items()}, [0, 1, 2], group=group)
    for i, nest in enumerate(mapped):
        add(f"map_gather {i}", nest)
    some = {dtype: v for dtype, v in x.items() if can(dtype, "max")}
    add("map_reduce max", tfrep.map_reduce(lambda i: {dtype: v[i] for dtype, v in some.items()}, [0, 1, 2], "max", group=group))
    tfrep.barrier(group=group)
    return out


def expected_forward(members, rank, dtypes):
    """What `forward` gives the member of that rank; in NumPy."""
    size = len(members)
    starts = np.cumsum([0, *splits_of(size)])
    out = {"all_to_all received int32": np.full(size, splits_of(size)[rank], np.int32)}
    for dtype in dtypes:
        values = [value(dtype, r) for r in members]
        for op in OPS:
            if can(dtype, op):
                reduced = reduce_numpy(values, op)
                out[f"all_reduce {op} {dtype}"] = reduced
                out[f"reduce_scatter {op} {dtype}"] = np.array_split(reduced, size)[rank]
        out[f"all_gather rows {dtype}"] = np.concatenate([value(dtype, r, rows=r + 1) for r in members])
        out[f"all_gather columns {dtype}"] = np.concatenate(values, -1)
        out[f"all_gather stack {dtype}"] = np.stack(values)
        out[f"broadcast last {dtype}"] = values[-1]
        out[f"all_to_all splits {dtype}"] = np.concatenate([v[starts[rank] : starts[rank + 1]] for v in values])
        if 4 % size == 0:
            out[f"all_to_all even {dtype}"] = np.concatenate([np.split(v, size)[rank] for v in values])
        items = [values[i % size][i] for i in range(3)]
        out.update({f"map_gather {i} {dtype}": item for i, item in enumerate(items)})
        if can(dtype, "max"):
            out[f"map_reduce max {dtype}"] = reduce_numpy(items, "max")
    return out


def reduce_numpy(values, op):
    stack = np.stack(values)
    if stack.dtype == bool:
        return stack.all(0) if op == "min" else stack.any(0)
    if op == "mean":
        wide = stack.astype(np.complex128 if stack.dtype.kind == "c" else np.float64).mean(0)
        return (np.trunc(wide) if stack.dtype.kind in "iu" else wide).astype(stack.dtype)
    if op in ("min", "max"):
        return getattr(stack, op)(0)
    return (stack.sum(0) if op == "sum" else stack.prod(0)).astype(stack.dtype)


def check_forward(found, members, rank, dtypes):
    expected = expected_forward(members, rank, dtypes)
    assert found.keys() == expected.keys()
    for key, wanted in expected.items():
        got = found[key]
        if key.endswith("string"):
            got = np.vectorize(bytes.decode, otypes=[object])(got) if got.size else got
            assert got.tolist() == wanted.tolist(), key
            continue
        assert got.dtype == wanted.dtype, key
        rtol = 1e-2 if "mean" in key and key.endswith("float16") else 1e-6  # bfloat16 too
        wide = np.complex128 if got.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(got.astype(wide), wanted.astype(wide), rtol=rtol, err_msg=key)


class Calls(keras.layers.Layer):
    """A layer whose `call` talks to the other replicas."""

    def __init__(self, fn):
        super().__init__(autocast=False)
        self.fn = fn

    def call(self, x):
        return self.fn(x)


def in_mode(mode, fn, otherwise):
    """Wraps `fn`, from a nest of tensors to a dict of tensors, in what the mode puts around it.

    `otherwise` gives anything of the structure and dtypes of what `fn` gives.
    """
    if mode == "layer":
        return Calls(fn)
    if mode == "cond":
        return lambda x: tf.cond(tf.identity(True), lambda: fn(x), otherwise)
    if mode == "nested":
        return tf.function(fn, autograph=False)
    if mode == "while":

        def loop(x):
            first = tf.nest.map_structure(tf.zeros_like, fn(x))  # TensorFlow takes the rank of a loop's first value for granted.
            free = tf.nest.map_structure(lambda t: tf.TensorShape(None), first)
            return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, fn(x)), (0, first), (tf.TensorShape([]), free))[1]

        return loop
    return fn


def on_replicas(strategy, step, mode):
    """Runs `step(replica)` on every replica; returns the results of this process's replicas as NumPy, in order."""

    def run():
        return strategy.run(lambda: step(tfrep.replica_id()))

    if mode not in ("eager", "layer"):
        run = tf.function(run, autograph=False)
    with strategy.scope():
        result = run()
    local = tf.nest.map_structure(strategy.experimental_local_results, result)
    return [{key: values[i].numpy() for key, values in local.items()} for i in range(strategy.extended.num_local_replicas)]


def run_forward(strategy, mode, dtypes=DTYPES, members=None):
    """Runs every primitive and checks it; `members` puts them into a group."""
    group = None if members is None else strategy.new_group(members)
    members = list(range(strategy.num_replicas_in_sync)) if members is None else members

    def step(replica):
        def otherwise():
            return {key: tf.zeros([], key.split()[-1]) for key in expected_forward(members, 0, dtypes)}

        call = in_mode(mode, lambda x: forward(*x, len(members), group), otherwise)
        return call([tensors(replica, dtypes), tensors(replica, dtypes, rows=replica + 1)])

    for replica, result in enumerate(on_replicas(strategy, step, mode), strategy.extended.first_local_replica):
        if replica in members:
            check_forward(result, members, members.index(replica), dtypes)


# Gradients.

_REDUCTIONS = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "min": tf.reduce_min, "max": tf.reduce_max,
               "product": tf.reduce_prod}  # fmt: skip
_FACTORS = (2, 3, 4)


def differentiable(size):
    """Gives every differentiable primitive as a function of a nest (a dict) of tensors."""
    out = {}
    for op in OPS:
        out[f"all_reduce {op}"] = lambda x, op=op: tfrep.all_reduce(x, op)
        out[f"reduce_scatter {op}"] = lambda x, op=op: tfrep.reduce_scatter(x, op)
    out["all_gather rows"] = tfrep.all_gather
    out["all_gather columns"] = lambda x: tfrep.all_gather(x, axis=1)
    out["all_gather stack"] = lambda x: tfrep.all_gather(x, stack=True)
    out["broadcast last"] = lambda x: tfrep.broadcast(x, size - 1)
    out["all_to_all splits"] = lambda x: tfrep.all_to_all(x, splits_of(size))[0]
    scaled = lambda x, k: {dtype: tf.cast(k, v.dtype) * v[0] for dtype, v in x.items()}  # noqa: E731
    out["map_gather stacked"] = lambda x: tf.nest.map_structure(
        lambda *results: tf.stack(results), *tfrep.map_gather(lambda k: scaled(x, k), _FACTORS)
    )
    out["map_reduce mean"] = lambda x: tfrep.map_reduce(lambda k: scaled(x, k), _FACTORS, "mean")
    return out


def expected_outputs(name, xs):
    """One device's computation of what each replica would get."""
    size = len(xs)
    kind, option = name.split()
    if kind in ("all_reduce", "reduce_scatter"):
        y = _REDUCTIONS[option](tf.stack(xs), 0)
        sizes = [4 // size + (r < 4 % size) for r in range(size)]
        return [y] * size if kind == "all_reduce" else tf.split(y, sizes)
    if kind == "all_gather":
        return [{"rows": tf.concat, "columns": lambda v, _: tf.concat(v, 1), "stack": tf.stack}[option](xs, 0)] * size
    if kind == "broadcast":
        return [xs[-1]] * size
    if kind == "all_to_all":
        parts = [tf.split(x, splits_of(size)) for x in xs]
        return [tf.concat([p[r] for p in parts], 0) for r in range(size)]
    items = [tf.cast(k, xs[0].dtype) * xs[i % size][0] for i, k in enumerate(_FACTORS)]
    return [tf.stack(items) if kind == "map_gather" else tf.add_n(items) / 3] * size


def gradient_inputs(replica, size, dtypes):
    """One tensor for each primitive and dtype, so that their gradients do not mix."""

    def tensor(name, dtype):
        rows = replica + 1 if name == "all_gather rows" else 4
        numbers = ((np.arange(rows * 3).reshape(rows, 3) * 7 + 3 * replica) % 5) / 2
        return tf.constant(numbers + 1j * (replica + 1), dtype) if "complex" in dtype else tf.cast(tf.constant(numbers), dtype)

    return {name: {dtype: tensor(name, dtype) for dtype in dtypes if can(dtype, name.split()[1])} for name in differentiable(size)}


def loss_of(outputs, replica, looks_up=False):
    """A weighted sum of all outputs of a replica, which has weights of its own; or of rows that are looked up in them."""
    losses = []
    for y in tf.nest.flatten(outputs):
        y = tf.gather(y, [0, tf.shape(y)[0] - 1, 0]) if looks_up else y
        weights = tf.cast(tf.range(tf.size(y)) % 7 + 1 + replica, tf.float32)
        losses.append(tf.reduce_sum(tf.cast(tf.math.real(y * tf.cast(tf.reshape(weights, tf.shape(y)), y.dtype)), tf.float32)))
    return tf.add_n(losses)


def run_gradients(strategy, mode, dtypes=DIFFERENTIABLE, looks_up=False):
    """Compares the gradients of `sum_r loss_r` with those of one device that has all values.

    If a loss looks rows up, the gradient that comes back to the collective is `tf.IndexedSlices`.
    """
    size = strategy.num_replicas_in_sync
    calls = differentiable(size)

    def step(replica):
        x = gradient_inputs(replica, size, dtypes)
        y = lambda x: {name: calls[name](x[name]) for name in calls}  # noqa: E731
        otherwise = lambda: tf.nest.map_structure(lambda v: tf.zeros([], v.dtype), x)  # noqa: E731
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(in_mode(mode, y, otherwise)(x), replica, looks_up)
        gradients = tape.gradient(loss, x)
        return {f"{name} {dtype}": tf.convert_to_tensor(gradients[name][dtype]) for name in x for dtype in x[name]}

    found = on_replicas(strategy, step, mode)
    xs = [gradient_inputs(r, size, dtypes) for r in range(size)]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        losses = []
        for name in calls:
            for dtype in xs[0][name]:
                outputs = expected_outputs(name, [x[name][dtype] for x in xs])
                losses += [loss_of(y, r, looks_up) for r, y in enumerate(outputs)]
        loss = tf.add_n(losses)
    wanted = tape.gradient(loss, xs, unconnected_gradients="zero")
    for replica, result in enumerate(found, strategy.extended.first_local_replica):
        for key, got in result.items():
            name, _, dtype = key.rpartition(" ")
            expected = tf.convert_to_tensor(wanted[replica][name][dtype]).numpy()
            tolerance = 3e-2 if dtype in ("float16", "bfloat16") else 1e-5
            wide = np.complex128 if "complex" in dtype else np.float64
            np.testing.assert_allclose(
                got.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance, err_msg=f"{key}, replica {replica}"
            )


# Means of integers.


def near_the_limits(dtype, replica):
    """Numbers whose sums are beyond the limits of a dtype; shape [6]."""
    limits = np.iinfo(dtype)
    quarter = limits.max // 4
    return np.array([limits.max, limits.max - replica, 3 * quarter, limits.min, limits.min + replica, quarter], dtype)


def run_means(strategy, mode):
    """Compares means of integers with `tf.reduce_mean` on one device."""
    size = strategy.num_replicas_in_sync
    dtypes = [dtype for dtype in NUMBERS if "int" in dtype]

    def call(x):
        out = {}
        for dtype, own in x.items():
            out[f"all_mean {dtype}"] = tfrep.all_mean(own)
            out[f"reduce_scatter {dtype}"] = tfrep.reduce_scatter(own, "mean")
            items = [tf.constant(near_the_limits(dtype, i)) for i in range(5)]
            out[f"map_reduce {dtype}"] = tfrep.map_reduce(tf.identity, items, "mean")
        return out

    def step(replica):
        otherwise = lambda: {f"{kind} {dtype}": tf.zeros([], dtype) for dtype in dtypes  # noqa: E731
                             for kind in ("all_mean", "reduce_scatter", "map_reduce")}  # fmt: skip
        return in_mode(mode, call, otherwise)({dtype: tf.constant(near_the_limits(dtype, replica)) for dtype in dtypes})

    for replica, result in enumerate(on_replicas(strategy, step, mode), strategy.extended.first_local_replica):
        for dtype in dtypes:
            values = np.stack([near_the_limits(dtype, i) for i in range(5)])
            mean = tf.reduce_mean(values[:size], 0).numpy()
            np.testing.assert_array_equal(result[f"all_mean {dtype}"], mean, dtype)
            np.testing.assert_array_equal(result[f"reduce_scatter {dtype}"], np.array_split(mean, size)[replica], dtype)
            np.testing.assert_array_equal(result[f"map_reduce {dtype}"], tf.reduce_mean(values, 0).numpy(), dtype)


# Extremes of special numbers.


def special(dtype, replica):
    """NaN on the first replica, on another, on all; numbers of both signs, zeros and infinities."""
    nan, inf, most = np.nan, np.inf, float(tf.as_dtype(dtype).max)
    if replica == 0:
        numbers = [nan, 1.0, nan, -2.0, -0.0, -inf, inf, -1.5, nan, inf, most]
    else:
        numbers = [1.0, nan, nan, 3.0, 0.0, 2.0, -inf, -2.5, inf, nan, -most]
    return tf.constant(np.array(numbers), dtype)


def run_extremes(strategy, mode):
    """Compares the least and the largest numbers with those of one device, which keeps NaN."""
    size = strategy.num_replicas_in_sync
    dtypes = ["float16", "bfloat16", "float32", "float64"]

    def call(x):
        out = {}
        for op in ("min", "max"):
            out |= {f"all_reduce {op} {dtype}": value for dtype, value in tfrep.all_reduce(x, op).items()}
            out |= {f"reduce_scatter {op} {dtype}": value for dtype, value in tfrep.reduce_scatter(x, op).items()}
        return out

    def step(replica):
        return in_mode(mode, call, None)({dtype: special(dtype, replica) for dtype in dtypes})

    for replica, result in enumerate(on_replicas(strategy, step, mode), strategy.extended.first_local_replica):
        for op in ("min", "max"):
            for dtype in dtypes:
                wanted = _REDUCTIONS[op](tf.stack([special(dtype, i) for i in range(size)]), 0).numpy().astype(np.float64)
                found = {kind: result[f"{kind} {op} {dtype}"].astype(np.float64) for kind in ("all_reduce", "reduce_scatter")}
                np.testing.assert_array_equal(found["all_reduce"], wanted, f"{op} {dtype}")
                np.testing.assert_array_equal(found["reduce_scatter"], np.array_split(wanted, size)[replica], f"{op} {dtype}")


# Splits that are not all rows.


def run_wrong_splits(strategy):
    """They are refused on the rank that passes them, before it sends anything. All can go on, and exchange rows."""

    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None], tf.int32)], autograph=False)
    def exchange(rows, splits):
        return strategy.run(lambda: tfrep.all_to_all(rows, splits)[0])

    for splits in ([1, 1], [2, 2], [4, -1]):
        for call in (exchange, lambda rows, splits: strategy.run(lambda: tfrep.all_to_all(rows, splits))):
            with pytest.raises(
                (ConfigurationError, tf.errors.InvalidArgumentError), match="the splits must be 0 or more and add up to all rows"
            ):
                call(tf.ones([3]), tf.constant(splits))
            assert float(strategy.run(lambda: tfrep.all_sum(1.0))) == strategy.num_replicas_in_sync
    assert exchange(tf.ones([3]), tf.constant([1, 2])).shape[0] == 2 * (strategy.rank + 1)


# In `fit`.


class Centered(keras.layers.Layer):
    """Takes away the mean of the global batch, in a way that gradients of uneven parts are right only if they are weighed."""

    def call(self, x):
        total = tfrep.all_sum(tf.reduce_sum(x, 0))
        return x - total / tfrep.all_sum(tf.cast(tf.shape(x)[0], x.dtype))


def weights_after_fit(strategy):
    """Fits a model with collectives in a layer, on batches that do not divide."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(37, 3)).astype("float32"), rng.normal(size=(37, 1)).astype("float32")
    with strategy.scope() if strategy else tf.name_scope("none"):
        inputs = keras.Input((3,))
        h = keras.layers.Dense(4, activation="tanh", kernel_initializer=keras.initializers.GlorotUniform(1))(inputs)
        h = Contrast()(Centered()(h))
        model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))(h))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


class Contrast(keras.layers.Layer):
    """Compares each row with all rows of the global batch, as contrastive losses do."""

    def call(self, x):
        return x + tf.matmul(tf.nn.softmax(tf.matmul(x, tfrep.all_gather(x), transpose_b=True)), tfrep.all_gather(x))
